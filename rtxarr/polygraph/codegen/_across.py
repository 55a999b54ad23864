"""Kernels whose neighbouring threads take neighbouring results: columns, and edges of rows."""

from __future__ import annotations

from collections.abc import Sequence

from rtxarr.polygraph._index import Expr
from rtxarr.polygraph._loops import Statement
from rtxarr.polygraph.codegen._keep import keep_plan
from rtxarr.polygraph.codegen._reductions import Reduction
from rtxarr.polygraph.codegen._rows import SLOT, Passes, Shape
from rtxarr.polygraph.codegen._text import BATCH, Argument, Kernel
from rtxarr.polygraph.codegen._writer import FULL, Entry, power_of_two

_HUB = 256  # edges from which on a row is given to a whole block
_HUB_BLOCKS = 4096
_MEMORY_OF_THREAD = 112  # bytes on chip where a multiprocessor is full of threads
FOUND = 16  # bytes before the values of warps


class _Across(Passes):
    """A group of ``width * along`` threads: ``x`` tells results apart, ``y`` shares each.

    Groups of 32 threads or fewer lie in one warp, larger ones are a block.
    """

    leader = "y == 0"
    lane, lanes_of_row = "y", "along"

    def _lanes(self) -> int:
        """Return the elements of a packet, which lie ``along`` apart: more where they are small."""
        loops, buffers = self.loops, self.texts.buffers
        read = [buffers[s.args[0]] for s in self._statements() if s.op == "load"]
        sizes = [b.dtype.itemsize for b in read if 2 * b.node.size >= loops.rows * loops.cols]
        return 8 if max(sizes, default=4) <= 2 else 4

    def _in_packets(self, s: Statement) -> bool:
        return False

    def packet_step(self, place: Expr) -> int | None:
        return None

    def tile_size(self) -> str:
        return f"along * {BATCH * self.lanes}"

    def first_and_packet(self) -> tuple[str, str]:
        packet = f"((tile / {self.lanes} + j * along + y) * width + x) * {self.lanes}"
        return f"tile + j * along * {self.lanes} + y", packet

    def partial_slot(self, chunk: str) -> str:
        return f"{chunk} * rows + r"

    def partial_bytes(self) -> int:
        return FOUND + 512 * SLOT * len(self.reductions)

    def combine(self, reductions: Sequence[Reduction]) -> None:
        out = self.out
        with out.block(
            "for (int apart = width; apart < (width * along < 32 ? width * along : 32); apart *= 2)"
        ):
            for r in reductions:
                out(f"{r.running} = {r.combine(r.running, f'#shuffled({r.running}, apart)')};")
        with out.block("if (width * along > 32)"):
            out("const Index warps = width * along / 32;")
            for r in reductions:
                number = [x.name for x in self.reductions].index(r.name)
                place = f"{FOUND} + {number * SLOT} * width * warps"
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
            with out.block("for (Index warp = 1; warp < warps; ++warp)"):
                for r in reductions:
                    out(f"{r.running} = {r.combine(r.running, f'{r.name}_of[warp * width]')};")


class Columns(_Across):
    kind = "columns"

    def shape(self) -> Shape:
        """Return how columns are dealt out; ``rows`` of it is the width of a block."""
        rows, cols = self.loops.rows, self.loops.cols
        width = min(power_of_two(rows), 32)
        blocks = -(-rows // width)
        slots, _ = keep_plan(self.loops, self.texts, self.strict)
        held = min(sum(size for size, _ in slots) * width * cols, self.shared_limit)
        threads = 256
        while threads < 1024 and cols > threads // width * 8:
            # Where a block takes much of a multiprocessor's memory, it needs many threads.
            if blocks * threads >= FULL and held <= threads * _MEMORY_OF_THREAD:
                break
            threads *= 2
        along = threads // width
        tile = along * BATCH * self.lanes
        chunks = 1
        if blocks * threads <= FULL // 2:
            chunks = min(FULL // (blocks * threads), -(-cols // (2 * tile)))
        span = -(-cols // (chunks * tile)) * tile
        return Shape(along, width, -(-cols // span), span)

    def run(self) -> Kernel:
        loops, shape = self.loops, self.shape()
        along, width = shape.threads, shape.rows
        grid, block = -(-loops.rows // width), (width, along)
        if shape.chunks > 1:
            return self.split_passes(shape, grid, block)
        tile = along * BATCH * self.lanes
        held = self.plan_chip(tile, width, partly=True)
        self.thread_lines()
        self.out("const Index begin = 0, end = live ? cols : 0;")
        self.chip_lines("padded * width", "0")
        self.all_passes()
        arguments = [
            Argument("number", "Index", "rows", loops.rows),
            Argument("number", "Index", "cols", loops.cols),
            Argument("number", "Index", "padded", self.padded),
        ]
        shared = held + self.partial_bytes()
        return self.finish([Entry("columns", self.out, (grid, 1), block, shared, arguments, 1024)])

    def partial_bytes(self) -> int:
        along, width, *_ = self.shape()
        return FOUND + width * (width * along // 32) * SLOT * len(self.reductions)

    def thread_lines(self) -> None:
        out, d = self.out, self.dialect
        if self.reductions or self.slots:
            out(d.shared_memory)
        out(f"const Index x = {d.thread_x}, y = {d.thread_y};")
        out(f"const Index width = {d.threads_x}, along = {d.threads_y};")
        out("const Index thread = y * width + x, step = along;")
        out(f"const Index row = (Index){d.block_x} * width + x;")
        out("const bool live = row < rows;")
        out("const Index r = live ? row : rows - 1;")


class Segments(_Across):
    """Edges of rows: results are features of a row, which share its edges.

    A first launch gives a row part of a warp and leaves out hubs, rows of many edges; a second one
    gives each hub a whole block. The text is the same.
    """

    kind = "segments"

    def run(self) -> Kernel:
        loops = self.loops
        rows, features = loops.rows, loops.features
        degree = loops.cols // rows + 1
        per_thread = self.lanes_of_thread()
        width = min(power_of_two(-(-features // per_thread)), 32)
        along = min(power_of_two(-(-degree // self.edges_of_tile())), 32 // width)
        hub = max(_HUB, 4 * degree)
        self.thread_lines()
        with self.out.block("for (Index k = thread / group; k < per_block; k += threads / group)"):
            self.row_lines()
            self.all_passes()
            with self.out.block("if (group > 32)"):  # the next row's values take the same place
                self.out("BARRIER();")
        lines = self.out

        def entry(per_block: int, width: int, along: int, low: int, high: int) -> Entry:
            threads = max(width * along, 256)
            blocks = -(-rows // per_block)
            # Hubs often lie side by side: blocks that take several rows take them apart.
            in_line = width * along <= 32
            sizes = {
                "rows": rows, "features": features, "width": width, "along": along,
                "per_block": per_block, "row_0": per_block if in_line else 1,
                "row_step": 1 if in_line else blocks, "low": low, "high": high,
            }  # fmt: skip
            arguments = [Argument("number", "Index", name, n) for name, n in sizes.items()]
            grid = blocks, -(-features // (width * per_thread))
            shared = self.partial_bytes() if width * along > 32 else 0
            return Entry("segments", lines, grid, (threads, 1), shared, arguments, 512)

        launches = [entry(256 // (width * along), width, along, 0, hub)]
        if loops.cols >= hub:
            per_block = min(-(-rows // _HUB_BLOCKS), 512)
            launches.append(entry(per_block, width, 512 // width, hub, 2**31 - 1))
        return self.finish(launches)

    def lanes_of_thread(self) -> int:
        """Return the features that a thread takes."""
        return 1

    def edges_of_tile(self) -> int:
        return BATCH * self.lanes

    def feature_lines(self) -> None:
        self.out(f"const Index feature = (Index){self.dialect.block_y} * width + x;")
        self.out("const Index f = feature < features ? feature : features - 1;")

    def thread_lines(self) -> None:
        out, d, indptr = self.out, self.dialect, self.loops.indptr
        out(d.shared_memory)
        out(f"const Index thread = {d.thread_x}, threads = {d.threads_x};")
        out("const Index group = width * along, step = along;")
        out("const Index x = thread % width, y = thread / width % along;")
        out(f"const Index first_row = (Index){d.block_x} * row_0;")
        self.feature_lines()
        with out.block("if (group > 32)"):
            out("SHARED int* const found = (SHARED int*)shared_memory;")
            out("if (thread == 0) *found = 0;")
            out("BARRIER();")
            out("const Index mine = first_row + thread * row_step;")
            with out.block("if (thread < per_block && mine < rows)"):
                out(f"if ({indptr}[mine + 1] - {indptr}[mine] >= low) *found = 1;")
            out("BARRIER();")
            out("if (!*found) return;")

    def row_lines(self) -> None:
        out, indptr = self.out, self.loops.indptr
        out("const Index row = first_row + k * row_step;")
        out("const Index r = row < rows ? row : rows - 1;")
        out(f"const Index begin = (Index){indptr}[r], count = (Index){indptr}[r + 1] - begin;")
        out("const bool in_turn = row < rows && count >= low && count < high;")
        out("if (group > 32 && !in_turn) continue;")
        out("const bool live = in_turn && feature < features;")
        out("const Index end = live ? begin + count : begin;")
