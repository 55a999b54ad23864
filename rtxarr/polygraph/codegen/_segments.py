"""Kernels over the edges of rows: results are features of a row, which share its edges.

A row has part of a warp. Rows of many edges, hubs, have a block each: the first blocks of a launch
look for them, and the others leave them out.
"""

from __future__ import annotations

from collections.abc import Sequence

from rtxarr.polygraph._index import Expr
from rtxarr.polygraph._loops import Statement
from rtxarr.polygraph.codegen._launch import Argument
from rtxarr.polygraph.codegen._reductions import Reduction
from rtxarr.polygraph.codegen._rows import SLOT, Passes
from rtxarr.polygraph.codegen._text import BATCH, Kernel
from rtxarr.polygraph.codegen._writer import FULL, Entry, power_of_two

THREADS = 256  # of a block
WARPS = THREADS // 32
_HUB = 256  # edges from which on a row can be a hub
_ROUNDS = 8  # or of few rows, what its threads take in so many rounds
_HUB_BLOCKS = 512


class Segments(Passes):
    """For few features: a thread takes one of them.

    A group of ``width * along`` threads has a row: ``x`` tells its features apart, ``y`` shares its
    edges. It is part of a warp, or a block.
    """

    leader = "y == 0"

    def run(self) -> Kernel:
        loops = self.loops
        rows, features = loops.rows, loops.features
        degree = loops.cols // rows + 1
        width, least = self.widths()
        # Few rows have a warp each, and a block where that is long at work: the GPU has room.
        few = rows * 32 <= FULL
        wanted = 32 if few else power_of_two(-(-degree // self.edges_of_thread()))
        along = max(min(wanted, 32 // width), least)
        rounds = _ROUNDS * along * self.edges_of_thread()
        hub = min(_HUB, rounds) if few else max(_HUB, 4 * degree)
        hub_blocks = min(rows, _HUB_BLOCKS) if loops.cols >= hub else 0
        # Several rows for a group, if there are many blocks all the same.
        turns = min(max(rows * width * along // (6 * FULL), 1), 4)
        self.thread_lines()
        self.row_loop()
        sizes = {
            "rows": rows, "features": features, "width_bits": width.bit_length() - 1,
            "along_bits": along.bit_length() - 1, "hub": hub, "hub_blocks": hub_blocks,
            "turns": turns, "flags_at": self.partial_bytes(), **self.sizes(),
        }  # fmt: skip
        arguments = [Argument("number", "Index", name, n) for name, n in sizes.items()]
        blocks = hub_blocks + -(-rows // (turns * THREADS // (width * along)))
        grid = blocks, -(-features // (width * self.features_of_thread()))
        shared = self.shared_bytes()
        entry = Entry("segments", self.out, grid, (THREADS, 1), shared, arguments, THREADS)
        return self.finish([entry])

    # -------------------------------------------------------------------------------- sizes

    def _lanes(self) -> int:
        """Return the edges of a packet, which lie ``along`` apart: more where they are small."""
        loops, buffers = self.loops, self.texts.buffers
        read = [buffers[s.args[0]] for s in self._statements() if s.op == "load"]
        sizes = [b.dtype.itemsize for b in read if 2 * b.node.size >= loops.rows * loops.cols]
        return 8 if max(sizes, default=4) <= 2 else 4

    def _in_packets(self, s: Statement) -> bool:
        return False

    def packet_step(self, place: Expr) -> int | None:
        return None

    def features_of_thread(self) -> int:
        return 1

    def edges_of_thread(self) -> int:
        """Return the edges that keep a thread busy."""
        return BATCH * self.lanes

    def widths(self) -> tuple[int, int]:
        """Return the threads for the features of an edge, and how many edges a row's take."""
        packets = -(-self.loops.features // self.features_of_thread())
        return min(power_of_two(packets), 32), 1

    def sizes(self) -> dict[str, int]:
        """Return further numbers that the text names."""
        return {}

    def partial_bytes(self) -> int:
        return WARPS * self.widths()[0] * SLOT * len(self.reductions)

    def shared_bytes(self) -> int:
        """Return the bytes on chip: values of warps, then which rows are hubs, and if any is."""
        return self.partial_bytes() + THREADS + 16

    def tile_size(self) -> str:
        return f"along * {BATCH * self.lanes}"

    def first_element(self) -> str:
        return f"tile + j * along * {self.lanes} + y"

    # --------------------------------------------------------------------------------- rows

    def row_loop(self) -> None:
        with self.out.block("for (Index row = row_0; row < past; row += apart_rows, ++turn)"):
            self.hub_lines()
            self.row_lines()
            self.all_passes()
            self.out("if (is_hub) BARRIER();")  # the next row's values take the same place

    def feature_lines(self) -> None:
        self.out(f"const Index feature = (Index){self.dialect.block_y} * width + x;")
        self.out("const Index f = feature < features ? feature : features - 1;")

    def thread_lines(self) -> None:
        out, d = self.out, self.dialect
        out(d.shared_memory)
        out(f"const Index thread = {d.thread_x}, block = {d.block_x};")
        out("const bool is_hub = block < hub_blocks;")
        out(f"const Index bits = is_hub ? {THREADS.bit_length() - 1} : width_bits + along_bits;")
        out("const Index width = (Index)1 << width_bits, along = (Index)1 << (bits - width_bits);")
        out("const Index x = thread & (width - 1), y = (thread >> width_bits) & (along - 1);")
        out("const Index team = is_hub ? 32 : width * along;")  # lanes of a warp that have a row
        out("const Index step = along;")
        out(f"const Index groups = {THREADS} >> bits, others = (block - hub_blocks) * groups;")
        out("const Index row_0 = is_hub ? block : others * turns + (thread >> bits);")
        out("const Index apart_rows = is_hub ? hub_blocks : groups;")
        out("const Index past = is_hub ? rows : row_0 + turns * groups;")
        out("SHARED u8* const hubs = (SHARED u8*)(shared_memory + flags_at);")
        out("Index turn = 0;")
        self.feature_lines()

    def hub_lines(self) -> None:
        """Let a block for hubs leave out other rows; its threads look ahead, at one row each."""
        out, indptr = self.out, self.loops.indptr
        with out.block("if (is_hub)"):
            with out.block(f"if ((turn & {THREADS - 1}) == 0)"):
                out("const Index mine = row + thread * hub_blocks;")
                has_many = f"{indptr}[mine + 1] - {indptr}[mine] >= hub"
                out(f"const bool is_one = mine < rows && {has_many};")
                out("BARRIER();")
                out(f"if (thread == 0) hubs[{THREADS}] = 0;")
                out("BARRIER();")
                out("hubs[thread] = is_one;")
                out(f"if (is_one) hubs[{THREADS}] = 1;")
                out("BARRIER();")
                with out.block(f"if (!hubs[{THREADS}])"):  # none of these
                    out(f"row += {THREADS - 1} * hub_blocks;")
                    out(f"turn += {THREADS - 1};")
                    out("continue;")
            out(f"if (!hubs[turn & {THREADS - 1}]) continue;")

    def row_lines(self) -> None:
        out, indptr = self.out, self.loops.indptr
        out("const Index r = row < rows ? row : rows - 1;")
        out(f"const Index begin = (Index){indptr}[r], count = (Index){indptr}[r + 1] - begin;")
        out("const bool in_turn = row < rows && (is_hub || count < hub);")
        out("const bool live = in_turn && feature < features;")
        out("const Index end = in_turn ? begin + count : begin;")

    def combine(self, reductions: Sequence[Reduction]) -> None:
        out = self.out
        with out.block("for (int apart = width; apart < team; apart *= 2)"):
            for r in reductions:
                out(f"{r.running} = {r.combine(r.running, f'#shuffled({r.running}, apart)')};")
        with out.block("if (is_hub)"):
            for r in reductions:
                number = self.reductions.index(r)
                place = f"{number * SLOT * WARPS} * width"
                out(
                    f"SHARED {r.type}* const {r.name}_of = "
                    f"(SHARED {r.type}*)(shared_memory + {place}) + x;"
                )
            with out.block("if (thread % 32 < width)"):
                for r in reductions:
                    out(f"{r.name}_of[thread / 32 * width] = {r.running};")
            out("BARRIER();")
            for r in reductions:
                out(f"{r.running} = {r.name}_of[0];")
            with out.block(f"for (Index warp = 1; warp < {WARPS}; ++warp)"):
                for r in reductions:
                    out(f"{r.running} = {r.combine(r.running, f'{r.name}_of[warp * width]')};")
