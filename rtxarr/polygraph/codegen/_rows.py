"""Kernels of passes over rows, and of rows that lie side by side."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import numpy as np

from rtxarr.polygraph._loops import Phase, Statement
from rtxarr.polygraph.codegen import _operations as ops
from rtxarr.polygraph.codegen import _scans
from rtxarr.polygraph.codegen._keep import keep_plan
from rtxarr.polygraph.codegen._launch import Argument
from rtxarr.polygraph.codegen._reductions import Reduction, reduction
from rtxarr.polygraph.codegen._text import BATCH, Kernel, Lines
from rtxarr.polygraph.codegen._writer import FULL, Entry, Writer, power_of_two, wanted

SLOT = 16  # bytes for a value of a row, whatever its type
_HELD = 32  # registers of a thread for what stays of a row
_MIN_BLOCKS = 3  # of 256 such threads, on a multiprocessor at once
_LONG = 512  # statements of a thread that is written out: half a second to compile three times


class Shape(NamedTuple):
    """How a pass is dealt out.

    ``threads`` share a row and ``rows`` a block; ``chunks`` is above 1 if launches share a row, and
    ``span`` is then the elements of a chunk.
    """

    threads: int
    rows: int
    chunks: int
    span: int


class Passes(Writer):
    """What kernels with several passes have in common.

    A subclass says where a thread is (``thread_lines``), which elements it takes, and how the
    threads of a row combine what they have (``combine``).
    """

    leader = ""  # the test that a thread is the first of its row

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.reductions = [reduction(a) for p in self.loops.phases for a in p.accumulators]

    # ------------------------------------------------------------------------- of subclasses

    @abstractmethod
    def thread_lines(self) -> None:
        """Say which row and which part of it is a thread's."""

    @abstractmethod
    def combine(self, reductions: Sequence[Reduction]) -> None:
        """Give all threads of a row the values of the whole row."""

    @abstractmethod
    def first_element(self) -> str:
        """Return the first element of packet ``j``."""

    @abstractmethod
    def tile_size(self) -> str:
        """Return the elements of a row that its threads take at once."""

    @abstractmethod
    def partial_bytes(self) -> int:
        """Return the bytes of shared memory that combining takes."""

    # --------------------------------------------------------------------------------- passes

    def row_statements(self, statements: Sequence[Statement], *, stores: str = "live") -> None:
        """Run statements once a row; stores where ``stores`` holds, nowhere if that is ""."""
        for s in statements:
            if s.op != "store":
                self.out(self.texts.let(s))
            elif stores:
                self.out(f"if ({self.leader} && {stores}) {self.texts.store(s)}")

    def start(self, phase: Phase) -> bool:
        """Write the values that reductions start from; tell whether there are elements to take."""
        for r in map(reduction, phase.accumulators):
            self.out(f"{r.type} {r.running} = {r.empty};")
        return bool(phase.body or phase.accumulators or phase.scans)

    def sums(self, phase: Phase) -> list[str]:
        """Return the lines that combine an element with what is reduced so far."""
        return [
            f"if (valid) {r.running} = {r.combine(r.running, r.element(self.counter))};"
            for r in map(reduction, phase.accumulators)
        ]

    def body(self, number: int, phase: Phase) -> None:
        """Go over the elements from ``begin`` to ``end``."""
        if self.start(phase):
            self.tiles(phase, "begin", "end")

    def tiles(self, phase: Phase, begin: str, end: str, **on_chip: dict[str, str]) -> None:
        """Go over part of the elements; ``on_chip`` has ``kept`` and ``keep`` of ``tile``."""
        reads = [a.of for a in phase.accumulators]
        first, extra = self.first_element(), self.sums(phase)
        step = f"tile += {self.tile_size()}"
        with self.out.block(f"for (Index tile = {begin}; tile < {end}; {step})"):
            self.tile(phase.body, "end", first, extra=extra, reads=reads, **on_chip)

    def totals(self, phase: Phase) -> None:
        reductions = [reduction(a) for a in phase.accumulators]
        if reductions:
            self.combine(reductions)
        for r in reductions:
            self.out(r.result(r.running))

    def all_passes(self) -> None:
        """Write all passes of a kernel that does them in one launch."""
        self.row_statements(self.loops.before)
        for number, phase in enumerate(self.loops.phases):
            self.body(number, phase)
            self.running_totals(phase)
            self.totals(phase)
            self.row_statements(phase.after)

    def running_totals(self, phase: Phase) -> None:
        """Scan what a pass has put aside for it."""

    def kept_type(self, dtype: np.dtype) -> str:
        return ops.stored(dtype) if self.strict else ops.value(dtype)


class Rows(Passes):
    """A group of ``threads`` for each row.

    What later passes need of elements stays in registers, if a row's threads have enough of them;
    else in shared memory, tile by tile.
    """

    leader = "thread == 0"
    in_registers = False

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.slots: list[tuple[int, np.dtype]] = []
        self.keeps: list[dict] = [{} for _ in self.loops.phases]
        self.padded = 0  # elements of a row on chip
        self.partly = False  # and the rest of it is computed anew in each pass
        # Few blocks fit on a multiprocessor beside one another: let each have more on its way, as
        # far as registers allow. All passes give a thread the same elements.
        self.batches = [self._batch(p) for p in self.loops.phases]
        self.batch = max(self.batches)
        self.order: _scans.Order | None = None
        self.one_tile = False  # a row is what its threads take at once
        self.scan_bytes = 0
        if self.loops.scans:
            dtype = self.loops.scans[0].dtype
            self.order = _scans.order_of(dtype, self.loops.rows, self.loops.cols)
            self.lanes = self.order.width
        else:  # the bounds of what is scanned stay in registers as they are
            is_even = self.loops.cols % self.lanes == 0
            self.even = is_even or not self._packs()
            self.packed = is_even or not self.even

    def _packs(self) -> bool:
        """Tell whether rows begin where packets do."""
        places = [s.args[1] for s in self._statements() if s.op in ("load", "store")]
        return all(
            self.texts.packs(place, self.counter, self.lanes)
            for place in places
            if self.packet_step(place) is not None
        )

    def _batch(self, phase: Phase) -> int:
        values = {s.name for s in phase.body if self.texts.hoisted(s)}
        return 2 * BATCH if 2 * BATCH * self.lanes * len(values) <= 16 else BATCH

    def body(self, number: int, phase: Phase) -> None:
        if self.in_registers:
            self.body_in_registers(number, phase)
            return
        self.batch = self.batches[number]
        if self.start(phase):
            kept: dict[str, str] = {}
            keep: dict[str, str] = {}
            for name, (slot, made, _) in self.keeps[number].items():
                (keep if made == number else kept)[name] = f"kept{slot} + {self.packet()}"
            part = "(end < padded ? end : padded)" if self.partly else "end"
            self.tiles(phase, "begin", part, kept=kept, keep=keep)
            if self.partly:
                self.tiles(phase, "padded", "end")
        self.batch = max(self.batches)

    def body_in_registers(self, number: int, phase: Phase) -> None:
        """Go over elements that are in registers: all packets of a thread at once."""
        out, batch, lanes = self.out, self.batch, self.lanes
        # What is read in turn takes registers, too.
        together = BATCH if batch % BATCH == 0 and batch * lanes <= _HELD else 1

        @contextmanager
        def each_packet() -> Iterator[None]:
            with out.unrolled("i", together):
                out(f"const int j = some * {together} + i;")
                out(f"const Index first = {place};")
                yield

        keeps = self.keeps[number]
        kept = {name for name, (_, made, _) in keeps.items() if made != number}
        keep = keeps.keys() - kept
        if not self.start(phase):
            return
        for name in sorted(keep):
            out(f"{self._type(name)} {name}_at[{batch}][{lanes}];")
        reads = {*keep, *(a.of for a in phase.accumulators), *(s.of for s in phase.scans)}
        body = wanted(phase.body, kept, reads)
        loads = [s for s in body if self.texts.hoisted(s) and s.name not in kept]
        at_once = [s for s in loads if s.name in keep]
        in_turn = [s for s in loads if s.name not in keep]
        stores = [s for s in body if s.op == "store" and self._in_packets(s)]
        given = {s.name for s in loads} | kept
        values = {s.name: f"valid ? {s.of} : {_scans.nothing(s)}" for s in phase.scans}
        extra = [f"{n}_at[j][k] = {values.get(n, n)};" for n in sorted(keep - given)]
        extra += self.sums(phase)
        place = self.first_element()
        with out.block("if (begin < end)"):
            out("const Index tile = begin;")
            if at_once:
                self.load_kept(at_once)
            with (
                self.after_loads() if at_once else nullcontext(),
                out.unrolled("some", batch // together),
            ):
                for s in in_turn:
                    out(f"{ops.value(s.dtype)} {s.name}_at[{batch}][{lanes}];")
                for s in stores:
                    out(f"{ops.value(s.dtype)} {s.args[0]}_at[{batch}][{lanes}];")
                if in_turn:
                    with each_packet():
                        self.load_packets(in_turn, "end")
                with each_packet():
                    self.elements(body, given, "end", extra, reads)
                if stores:
                    with each_packet():
                        self.store_packets(stores, "end")

    def load_kept(self, loads: Sequence[Statement]) -> None:
        """Load what stays in registers."""
        self.clamps = self.order is None  # loads in turn would take more registers
        with self.out.unrolled("j", self.batch):
            self.out(f"const Index first = {self.first_element()};")
            self.load_packets(loads, "end")
        self.clamps = False

    def after_loads(self) -> AbstractContextManager[None]:
        """Keep the compiler, which does not know this test, from putting off loads until then."""
        return nullcontext() if self.order else self.out.block("if (padded >= 0)")

    def _is_loose(self) -> bool:
        return self.order is not None and self.order.loose

    def running_totals(self, phase: Phase) -> None:
        for scan in phase.scans:
            assert self.order is not None
            d, number = self.dialect, self.loops.scans.index(scan)
            of_scan = f"{_scans.SLOT} * {self.batch} * warps * {d.threads_y}"
            place = f"{self.sums_bytes()} + {number} * {of_scan}"
            _scans.write(self.out, d, scan, self.order, self.batch, place, strict=self.strict)

    def shape_of_scans(self, order: _scans.Order) -> Shape:
        """Return how rows are dealt out that are scanned, all of them in registers."""
        for least in (False, True):  # what is left out is computed anew in each pass
            slots, keeps = keep_plan(self.loops, self.texts, self.strict, least=least)
            dealt = _scans.deal(sum(max(size, 4) // 4 for size, _ in slots), order)
            if dealt is not None:
                threads, batch = dealt
                self.in_registers, self.batch, self.keeps = True, batch, keeps
                of_block = 256 if self.loops.rows * threads >= FULL else 64
                rows = max(of_block // threads, 1)
                ends = self.batch * max(threads // 32, 1) * rows
                self.scan_bytes = _scans.SLOT * ends * len(self.loops.scans)
                return Shape(threads, rows, 1, self.loops.cols)
        raise AssertionError("a back end takes no scans of rows that do not stay in registers")

    def shape_in_registers(self) -> Shape | None:
        """Return how rows are dealt out that stay in registers; None if they should not."""
        if self.order is not None:
            return self.shape_of_scans(self.order)
        loops = self.loops
        slots, keeps = keep_plan(loops, self.texts, self.strict)
        if not slots or (loops.rows * 1024 < FULL // 2 and loops.cols > 8192):
            return None
        words = sum(max(size, 4) // 4 for size, _ in slots)
        packets = -(-loops.cols // self.lanes)
        for elements in (_HELD, 5 * _HELD // 4):
            batch = elements // (words * self.lanes) // BATCH * BATCH
            threads = -(-packets // max(batch, 1))
            threads = power_of_two(threads) if threads <= 32 else -(-threads // 32) * 32
            if batch and threads <= 1024:
                self.in_registers, self.batch, self.keeps = True, batch, keeps
                of_block = 256 if loops.rows * threads >= FULL else 64
                return Shape(threads, max(of_block // threads, 1), 1, loops.cols)
        return None

    def shape(self) -> Shape:
        """Return how rows are dealt out whole."""
        rows, cols = self.loops.rows, self.loops.cols
        packets = -(-cols // self.lanes)
        if packets <= 32 * self.batch:
            threads = power_of_two(-(-packets // self.batch))
        else:
            threads = min(max(power_of_two(packets) // 8, 32), 1024)
        while threads < 1024 and packets > threads * self.batch and rows * threads < FULL:
            threads *= 2
        return Shape(threads, max(256 // threads, 1), 1, cols)

    def split_shape(self) -> Shape:
        """Return how rows are dealt out in chunks, for twice as many threads as keep a GPU busy."""
        rows, cols = self.loops.rows, self.loops.cols
        tile = 256 * self.batch * self.lanes
        chunks = min(max(FULL * 2 // (256 * rows), 1), -(-cols // 8192))
        span = -(-cols // (chunks * tile)) * tile
        return Shape(256, 1, -(-cols // span), span)

    def run(self) -> Kernel:
        loops, large = self.loops, self.batches
        self.packed &= not self._is_loose()
        in_registers = self.shape_in_registers()
        if in_registers is not None:
            return self.whole_rows(in_registers, 0)
        small = [BATCH] * len(large)  # smaller tiles leave less room unused
        for batches, partly in (large, False), (small, False), (small, True), (large, False):
            self.batches, self.batch = batches, max(batches)
            shape = self.shape()
            tile = shape.threads * self.batch * self.lanes
            held = self.plan_chip(tile, shape.rows, partly=partly)
            if held:
                break
        # Rows that are read again in each pass are worth a launch for each.
        again = (not held or self.partly) and sum(bool(p.body) for p in loops.phases) > 1
        few = FULL if again else FULL // 2
        if loops.rows * 1024 < few and loops.cols > 8192:
            split = self.split_shape()
            if split.chunks > 1:
                self.drop_chip()
                return self.split_passes(split, loops.rows, (split.threads, split.rows))
        return self.whole_rows(shape, held)

    def whole_rows(self, shape: Shape, held: int) -> Kernel:
        """Write one launch for all passes, with ``held`` bytes of rows in shared memory."""
        loops = self.loops
        self.thread_lines()
        self.out("const Index begin = 0, end = live ? cols : 0;")
        self.chip_lines(f"padded * {self.dialect.threads_y}", f"{self.dialect.thread_y} * padded")
        if self.in_registers:
            self.one_tile = loops.cols == shape.threads * self.batch * self.lanes
            self.passes_by_packing()
        else:
            self.all_passes()
        arguments = [
            Argument("number", "Index", "rows", loops.rows),
            Argument("number", "Index", "cols", loops.cols),
            Argument("number", "Index", "padded", self.padded),
        ]
        if self.order is not None:
            arguments.append(Argument("number", "Index", "tiles", self.order.tiles))
            arguments.append(Argument("number", "Index", "ends", self.order.ends))
        # Rows in registers take many; the fewer threads a block has, the more there are for each.
        threads = next(n for n in (256, 512, 1024) if n >= shape.threads * shape.rows)
        entry = Entry(
            "rows", self.out, (-(-loops.rows // shape.rows), 1), (shape.threads, shape.rows),
            held + self.partial_bytes(), arguments, threads if self.in_registers else 1024,
            _MIN_BLOCKS if self.in_registers and threads == 256 and not self.order else 0,
        )  # fmt: skip
        return self.finish([entry])

    # -------------------------------------------------------------- launches for chunks of rows

    def split_passes(self, shape: Shape, grid: int, block: tuple[int, int]) -> Kernel:
        """Write a launch for each pass; each combines anew what the chunks before it gave."""
        phases = self.loops.phases
        entries = []
        n_launches = len(phases) + bool(phases[-1].accumulators)
        for number in range(n_launches):
            self.out = Lines()
            is_last = number == len(phases)
            self.thread_lines()
            self._chunk_lines(self.reductions, SLOT)
            self.row_statements(self.loops.before)
            for earlier in range(number):
                self.from_chunks(phases[earlier])
                stores = "live && chunk == 0" if earlier == number - 1 else ""
                self.row_statements(phases[earlier].after, stores=stores)
            if not is_last:
                self.body(number, phases[number])
                reductions = [reduction(a) for a in phases[number].accumulators]
                if reductions:
                    self.combine(reductions)
                for r in reductions:
                    part = f"{r.name}_part[r * chunks + chunk]"
                    self.out(f"if ({self.leader} && live) {part} = {r.running};")
            arguments = [
                Argument("number", "Index", "rows", self.loops.rows),
                Argument("number", "Index", "cols", self.loops.cols),
                Argument("number", "Index", "span", shape.span),
                Argument("number", "Index", "chunks", shape.chunks),
                Argument("scratch", "GLOBAL u8*", "scratch", 0),
            ]
            entries.append(
                Entry(
                    "rows_split",
                    self.out,
                    (grid, 1 if is_last else shape.chunks),
                    block,
                    self.partial_bytes(),
                    arguments,
                    1024,
                )  # fmt: skip
            )
        size = SLOT * len(self.reductions) * self.loops.rows * shape.chunks
        return self.finish(entries, scratch=(size,))

    def from_chunks(self, phase: Phase) -> None:
        """Combine the values of all chunks of a pass before."""
        for r in map(reduction, phase.accumulators):
            self.out(f"{r.type} {r.running} = {r.empty};")
            with self.out.block("for (Index p = thread; p < (live ? chunks : 0); p += threads)"):
                part = f"{r.name}_part[r * chunks + p]"
                self.out(f"{r.running} = {r.combine(r.running, part)};")
        self.totals(phase)

    # ------------------------------------------------------------------------------- on chip

    def plan_chip(self, tile: int, breadth: int, *, partly: bool = False) -> int:
        """Decide what stays on chip of rows cut into tiles, ``breadth`` side by side.

        Returns the bytes for it. ``partly`` lets the first tiles stay where all do not fit.
        """
        slots, keeps = keep_plan(self.loops, self.texts, self.strict)
        self.padded = -(-self.loops.cols // tile) * tile
        each = sum(size for size, _ in slots) * breadth
        room = self.shared_limit - self.partial_bytes()
        if not slots or (self.padded * each > room and not partly):
            return 0
        self.partly = self.padded * each > room
        if self.partly:
            part = room // (each * tile) * tile
            if part * 8 < self.padded:  # not worth it
                self.partly = False
                return 0
            self.padded = part
        self.slots, self.keeps = slots, keeps
        return self.padded * each

    def drop_chip(self) -> None:
        self.slots, self.keeps = [], [{} for _ in self.loops.phases]
        self.partly = False

    def chip_lines(self, elements: str, own: str) -> None:
        """Name the arrays on chip: of so many ``elements`` each, a row's from ``own`` on."""
        before = f"{self.partial_bytes()}"
        for number, (_, dtype) in enumerate(self.slots):
            element = self.kept_type(dtype)
            self.out(
                f"SHARED {element}* const kept{number} = (SHARED {element}*)(shared_memory + "
                f"{before}) + {own};"
            )
            before += f" + sizeof({element}) * {elements}"

    # ------------------------------------------------------------------------------- threads

    def passes_by_packing(self) -> None:
        """Write all passes for whole tiles of arrays that pack, for parts, and for other arrays.

        So no loop has to ask. A long text is for whole tiles or for parts, as they take as long to
        compile.
        """
        whole = f"cols == {self.row_size()}"
        ways = [
            (f"if (packed && {whole})", True, True),
            ("else if (packed)", True, False),
            ("else", False, False),
        ]
        if self._is_long():
            ways = [("if (packed)", True, self.one_tile), ("else", False, False)]
        for test, packing, is_whole in [("", False, False)] if self._is_loose() else ways:
            self.packing, self.whole = packing, is_whole
            with self.out.block(test):
                apart = "1" if self.packing or self.order else "threads"
                self.out(f"const Index step = {apart};")
                self.all_passes()
        self.packing = None

    def _is_long(self) -> bool:
        n_statements = sum(len(phase.body) for phase in self.loops.phases)
        return n_statements * self.batch * self.lanes > _LONG

    def sums_bytes(self) -> int:
        return 32 * SLOT * len(self.reductions)

    def partial_bytes(self) -> int:
        return self.sums_bytes() + self.scan_bytes

    def thread_lines(self) -> None:
        out, d = self.out, self.dialect
        if self.reductions or self.slots or self.order:
            out(d.shared_memory)
        out(f"const Index thread = {d.thread_x}, threads = {d.threads_x};")
        out("const Index step = packed ? 1 : threads;")
        out(f"const Index row = (Index){d.block_x} * {d.threads_y} + {d.thread_y};")
        out("const bool live = row < rows;")
        out("const Index r = live ? row : rows - 1;")
        if self._is_loose():
            out(f"const Index shift = (r * cols) % {self.lanes};")

    def tile_size(self) -> str:
        return f"threads * {self.batch * self.lanes}"

    def row_size(self) -> str:
        """Return the elements that all threads of a row take at once."""
        return self.tile_size()

    def packet(self) -> str:
        return f"tile + (j * threads + thread) * {self.lanes}"

    def inside(self, left: str, place: str = "") -> str:
        test = super().inside(left, place)
        return f"{place or self.counter} >= 0 && {test}" if self._is_loose() else test

    def first_element(self) -> str:
        if self.order is not None:  # pieces are never dealt out by elements
            return f"{self.packet()} - shift" if self._is_loose() else self.packet()
        single = f"tile + j * threads * {self.lanes} + thread"
        if self.packing is not None:
            return self.packet() if self.packing else single
        return f"(packed ? {self.packet()} : {single})"

    def across_lanes(self, reductions: Sequence[Reduction], apart: str) -> None:
        """Combine lanes up to ``apart`` from one another; all of them get the result."""
        with self.out.block(f"for (int apart = {apart}; apart; apart /= 2)"):
            for r in reductions:
                other = f"#shuffled({r.running}, apart)"
                self.out(f"{r.running} = {r.combine(r.running, other)};")

    def combine(self, reductions: Sequence[Reduction]) -> None:
        out, d = self.out, self.dialect
        self.across_lanes(reductions, "(threads < 32 ? threads : 32) / 2")
        with out.block("if (threads > 32)"):
            out(f"const Index warps = threads / 32, first_warp = {d.thread_y} * warps;")
            for r in reductions:
                place = 32 * SLOT * self.reductions.index(r)
                out(
                    f"SHARED {r.type}* const {r.name}_of = "
                    f"(SHARED {r.type}*)(shared_memory + {place}) + first_warp;"
                )
            with out.block("if (thread % 32 == 0)"):
                for r in reductions:
                    out(f"{r.name}_of[thread / 32] = {r.running};")
            out("BARRIER();")
            out("const Index lane = thread % 32;")
            for r in reductions:
                out(f"{r.running} = {r.empty};")
                out(f"if (lane < warps) {r.running} = {r.name}_of[lane];")
            self.across_lanes(reductions, "16")
