"""Kernels that reduce columns: results lie side by side, and a thread takes a packet of them.

A block of ``width * along`` threads takes ``width`` packets of neighbouring columns, and ``along``
threads share each: they go down the columns in turn, several rows at a time, whose loads are under
way before the first is used. What is the same for a whole packet, such as a statistic of the row,
is computed once for it where packets are whole (``packed``). Columns that are few are cut into
chunks: each pass is then a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rtxarr.polygraph._index import Expr, names_in
from rtxarr.polygraph._loops import Phase, Statement
from rtxarr.polygraph.codegen import _operations as ops
from rtxarr.polygraph.codegen._keep import keep_plan
from rtxarr.polygraph.codegen._launch import Argument
from rtxarr.polygraph.codegen._reductions import Reduction, reduction
from rtxarr.polygraph.codegen._text import Kernel, Lines, loaded_names, sources_of
from rtxarr.polygraph.codegen._writer import FULL, Entry, Writer, power_of_two, wanted

_THREADS = 256
# What takes more registers than threads have where a multiprocessor is half full of them.
_HEAVY = frozenset("pow sin cos tan sinh cosh atan2 hypot logaddexp remainder".split())
_FEW_TILES = 64  # chunks of one tile, at most
_MEMORY_OF_THREAD = 112  # bytes on chip where a multiprocessor is full of threads
_SUMS = 16  # registers for what a thread has reduced so far
_SHORT_BODY = 10  # statements up to which a thread takes more rows at once
_IN_FLIGHT = 128  # bytes of a thread's loads at once, at most, and of registers for an array


class Shape(NamedTuple):
    """How columns are dealt out: to a block, and in how many chunks of ``span`` rows."""

    width: int
    along: int
    chunks: int
    span: int


class Columns(Writer):
    counter = "r"

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.reductions = [reduction(a) for p in self.loops.phases for a in p.accumulators]
        n_values = sum(1 + r.is_found for r in self.reductions)
        while self.lanes > 2 and n_values * self.lanes > 2 * _SUMS:
            self.lanes //= 2
        most = self.lanes
        while self.lanes > 2 and not self._packs():
            self.lanes //= 2
        self.packed = self._packs()
        if not self.packed:
            self.lanes = most
        self.by_column: set[str] = set()  # names whose values differ between columns
        self.by_packet: set[str] = set()  # of those, what is the same in a whole packet
        self._classify()
        self.slot = max(map(self._bytes, self.reductions), default=0)  # of a value of a column
        self.slots, self.keeps = keep_plan(self.loops, self.texts, self.strict)
        self.n_rows = self._rows_at_once()
        running = sum(self._bytes(r) // 4 for r in self.reductions) * self.lanes
        heavy = running >= _SUMS or any(s.op in _HEAVY for s in self._statements())
        # Blocks on a multiprocessor at once: a bound to the registers of a thread.
        self.blocks_at_once = 3 if heavy and not self.slots else 4
        self.padded = 0  # rows that stay on chip
        self.partly = False  # and the others are read again in each pass

    def _lanes(self) -> int:
        """Return the columns of a packet: 16 bytes of what is written, 32 of what is read."""
        read, written = [4], [2]
        for s in self._statements():
            if s.op in ("load", "store") and self._step(s.args[1]) == 1:
                size = self.texts.buffers[s.args[0]].dtype.itemsize
                (read if s.op == "load" else written).append(size)
        read = read[1:] or read
        return max(min(16 // min(read), 32 // max(read), 16 // max(written), 8), 2)

    def _bytes(self, r: Reduction) -> int:
        size = max(r.accumulator.dtype.itemsize, 4)
        return 2 * max(size, 8 if self.wide else 4) if r.is_found else size

    # -------------------------------------------------------------------- what varies with what

    def _packs(self) -> bool:
        """Tell whether sizes allow packets of ``lanes`` columns."""
        lanes = self.lanes
        if self.loops.rows % lanes:
            return False
        for s in self.loops.statements:
            for place in (a for a in s.args if isinstance(a, Expr)):
                step = self._step(place)
                if step is not None and not self.texts.packs(place, "r", lanes):
                    return False
                if s.op == "in_range" and step == 1:
                    least, most = place.bounds
                    if any(least < n <= most and n % lanes for n in s.args[1:]):
                        return False
        return True

    def _classify(self) -> None:
        names = self.texts.of_row
        names.clear()  # from here on: names whose values are the same in a packet
        phases = self.loops.phases
        for s in [*self.loops.before, *(s for p in phases for s in (*p.body, *p.after))]:
            if s.op == "store":
                continue
            self.by_column |= {a.name for p in phases for a in p.accumulators}
            places = [a for a in s.args if isinstance(a, Expr)]
            values = self.by_column.intersection(sources_of(s))
            if values or any("r" in names_in(e) for e in places):
                self.by_column.add(s.name)
                # The bounds of a range are multiples of packets, where packets are whole.
                steps = (0, 1) if s.op == "in_range" else (0,)
                if values <= self.by_packet and all(self._step(e) in steps for e in places):
                    self.by_packet.add(s.name)
            if s.name not in self.by_column or s.name in self.by_packet:
                names.add(s.name)

    def _step(self, place: Expr) -> int | None:
        return self.texts.step(place, "r")

    def _moves(self, s: Statement) -> int | None:
        """Return how far a load or store moves inside a packet, None if it is not one access."""
        mask = s.args[2] if s.op == "load" else None
        same = mask is None or mask not in self.by_column or mask in self.by_packet
        return self._step(s.args[1]) if same else None

    def _rows_at_once(self) -> int:
        """Return how many rows of a packet a thread takes at once."""
        fewest = 8
        for phase in self.loops.phases:
            packets = [s for s in phase.body if s.op == "load" and self._moves(s) == 1]
            size = sum(s.dtype.itemsize for s in packets) * self.lanes
            width = max([4, *(s.dtype.itemsize for s in packets)]) * self.lanes
            long = len(phase.body) + 2 * len(phase.accumulators) > _SHORT_BODY or self.slots
            room = _IN_FLIGHT // 2 if long else _IN_FLIGHT
            fewest = min(fewest, room // width, _IN_FLIGHT // max(size, 1))
        return max(fewest, 2)

    # ------------------------------------------------------------------------------- launches

    def shape(self) -> Shape:
        rows, cols = self.loops.rows, self.loops.cols
        packets = -(-rows // self.lanes)
        width = min(power_of_two(packets), 8 if self.slots else 16 if self.packed else 32)
        along = min(_THREADS // width, power_of_two(-(-cols // self.n_rows)))
        along = max(along, 32 // width)
        while width * along < _THREADS and packets >= 2 * width * _THREADS:
            width *= 2
        blocks = -(-packets // width)
        if self.slots:
            # Where a block takes much of a multiprocessor's memory, it needs many threads.
            held = min(self._held(width) * cols, self.shared_limit)
            while width * along < 1024 and cols > along * self.n_rows:
                if blocks * width * along >= FULL and held <= width * along * _MEMORY_OF_THREAD:
                    break
                along *= 2
        tile, chunks, threads = along * self.n_rows, 1, width * along
        if blocks * threads <= FULL // 2 and cols >= 4 * tile:
            most = FULL * self.blocks_at_once // (4 * blocks * threads)  # to run at once
            # Few rows are soonest done where no thread takes two tiles.
            chunks = min(most, max(cols // (2 * tile), min(-(-cols // tile), _FEW_TILES)))
        span = -(-cols // (chunks * tile)) * tile
        return Shape(width, along, -(-cols // span), span)

    def _held(self, width: int) -> int:
        """Return the bytes on chip of a row of a block."""
        return sum(size for size, _ in self.slots) * width * self.lanes

    def _places(self, shape: Shape) -> list[int]:
        """Return where in shared memory the values of each reduction are, and where they end."""
        parts = max(shape.width * shape.along // max(shape.width, 32), 1)
        each = -(-parts * shape.width * self.lanes * self.slot // 16) * 16
        return [each * k for k in range(len(self.reductions) + 1)]

    def run(self) -> Kernel:
        loops, shape = self.loops, self.shape()
        n_blocks = -(-loops.rows // (shape.width * self.lanes))
        split = shape.chunks > 1
        held = 0 if split else self._plan_chip(shape)
        if not held:
            self.slots, self.keeps = [], [{} for _ in loops.phases]
        bound = self.blocks_at_once * _THREADS
        sizes = {"rows": loops.rows, "cols": loops.cols}
        sizes |= {"span": shape.span, "chunks": shape.chunks} if split else {"padded": self.padded}
        arguments = [Argument("number", "Index", name, n) for name, n in sizes.items()]
        if split:
            arguments.append(Argument("scratch", "GLOBAL u8*", "scratch", 0))
        n_launches = len(loops.phases) + bool(loops.phases[-1].accumulators) if split else 1
        entries = []
        for number in range(n_launches):
            self.out = Lines()
            self._thread_lines()
            if split:
                self._chunk(number)
            else:
                self._whole()
            is_last = split and number == len(loops.phases)
            grid = n_blocks, 1 if is_last else shape.chunks
            shared = held + self._places(shape)[-1]
            kind = "columns_split" if split else "columns"
            block = shape.width, shape.along
            entries.append(Entry(kind, self.out, grid, block, shared, arguments, bound))
        size = self.slot * len(self.reductions) * loops.rows * shape.chunks
        return self.finish(entries, scratch=(size,) if split else ())

    def _plan_chip(self, shape: Shape) -> int:
        """Decide how many rows stay on chip between passes; return the bytes for them."""
        tile, each = shape.along * self.n_rows, self._held(shape.width)
        room = self.shared_limit - self._places(shape)[-1]
        self.padded = -(-self.loops.cols // tile) * tile
        if each and self.padded * each > room:
            part = room // (each * tile) * tile
            self.partly = part * 8 >= self.padded  # else it is not worth it
            self.padded = part if self.partly else 0
        return self.padded * each

    def _whole(self) -> None:
        """Write all passes of one launch."""
        out = self.out
        out("const Index begin = 0, end = live ? cols : 0;")
        before = f"{len(self.reductions)} * values"
        for number, (_, dtype) in enumerate(self.slots):
            kind = ops.stored(dtype) if self.strict else ops.value(dtype)
            out(f"SHARED {kind}* const kept{number} = (SHARED {kind}*)(shared_memory + {before});")
            before += f" + sizeof({kind}) * padded * width * {self.lanes}"
        self._row_statements(self.loops.before)
        for number, phase in enumerate(self.loops.phases):
            self._body(number, phase)
            self._totals(phase)
            self._row_statements(phase.after)

    def _chunk(self, number: int) -> None:
        """Write one pass over a chunk, after the totals of those before."""
        out, phases = self.out, self.loops.phases
        self._chunk_lines(self.reductions, self.slot)
        self._row_statements(self.loops.before)
        for earlier in range(number):
            self._from_chunks(phases[earlier])
            stores = "live && chunk == 0" if earlier == number - 1 else ""
            self._row_statements(phases[earlier].after, stores=stores)
        if number == len(phases):
            return
        self._body(number, phases[number])
        reductions = [reduction(a) for a in phases[number].accumulators]
        self._combine(reductions)
        if reductions:
            with out.block("if (y == 0 && live)"), out.unrolled("k", self.lanes):
                self._lane_lines()
                for r in reductions:
                    out(f"if (inside) {r.name}_part[chunk * rows + r] = {r.running}[k];")

    def _from_chunks(self, phase: Phase) -> None:
        """Combine the values of all chunks of a pass before."""
        out = self.out
        reductions = [reduction(a) for a in phase.accumulators]
        self._start(reductions)
        if reductions:
            with (
                out.block("for (Index p = y; p < (live ? chunks : 0); p += along)"),
                out.unrolled("k", self.lanes),
            ):
                self._lane_lines()
                for r in reductions:
                    sum_, part = f"{r.running}[k]", f"{r.name}_part[p * rows + r]"
                    out(f"{sum_} = {r.combine(sum_, part)};")
        self._totals(phase)

    def _thread_lines(self) -> None:
        out, d = self.out, self.dialect
        out(d.shared_memory)
        out(f"const Index x = {d.thread_x}, y = {d.thread_y};")
        out(f"const Index width = {d.threads_x}, along = {d.threads_y};")
        out("const Index thread = y * width + x;")
        # Threads of one stretch have no two values of one packet, unless they lie in one warp.
        out("const Index stretch = width < 32 ? 32 : width;")
        out("const Index parts = width * along / stretch;")
        out(f"const Index values = (parts * width * {self.lanes * self.slot} + 15) / 16 * 16;")
        out(
            f"const Index own = (Index){d.block_x} * width * {self.lanes} "
            f"+ (packed ? x * {self.lanes} : x);"
        )
        out("const Index apart = packed ? 1 : width;")
        out("const bool live = own < rows;")
        out("const Index first = live ? own : 0;")

    def _lane_lines(self) -> None:
        self.out("const Index at = first + k * apart;")
        self.out("const bool inside = at < rows;")
        self.out("const Index r = inside ? at : rows - 1;")

    # ------------------------------------------------------------------------ values of columns

    def _of_columns(self) -> dict[str, str]:
        """Return where the values of columns are that differ between them."""
        names = {s.name for s in self.loops.before}
        for phase in self.loops.phases:
            names |= {a.name for a in phase.accumulators} | {s.name for s in phase.after}
        return {name: f"{name}_r[k]" for name in names & self.by_column}

    def _row_statements(self, statements: Sequence[Statement], *, stores: str = "live") -> None:
        """Run statements once a column; stores where ``stores`` holds, nowhere if that is ""."""
        out, where = self.out, self._of_columns()
        varying = [s for s in statements if s.op != "store" and s.name in self.by_column]
        for s in statements:
            if s.op != "store" and s.name not in self.by_column:
                out(self.texts.let(s))
        for s in varying:
            out(f"{self._type(s.name)} {s.name}_r[{self.lanes}];")
            if s.op == "load" and self._moves(s) is not None:
                with out.block():
                    self._load(s, f"{s.name}_r", where)
                continue
            with out.unrolled("k", self.lanes):
                self._lane_lines()
                self._bind(sources_of(s), where)
                out(f"{s.name}_r[k] = {self.texts.value_of(s)};")
        for s in statements if stores else ():
            if s.op == "store":
                self._store_columns(s, where, stores)

    def _store_columns(self, s: Statement, where: dict[str, str], stores: str) -> None:
        buffer, place, name = s.args
        out, lanes = self.out, self.lanes
        packs = self._moves(s) == 1
        with out.block(f"if (y == 0 && {stores})"):
            if packs:
                self._note_packet(s)
                with out.block("if (packed)"):
                    out(f"{self._type(name)} packet[{lanes}];")
                    with out.unrolled("k", lanes):
                        out(f"packet[k] = {where.get(name, name)};")
                    out("const Index r = first;")
                    self._bind(loaded_names(place), _first(where))
                    to = f"{buffer} + ({self.texts.expr(place)})"
                    out(f"#store_packet<{lanes}>({to}, packet, {lanes});")
            with out.block("else") if packs else out.block(), out.unrolled("k", lanes):
                self._lane_lines()
                self._bind(loaded_names(place), where)
                element, at = ops.stored(s.dtype), self.texts.expr(place)
                value = where.get(name, name)
                out(f"if (inside) {buffer}[{at}] = #Store<{element}>::of({value});")

    def _load(self, s: Statement, target: str, where: dict[str, str]) -> None:
        """Read a value for each column of the packet; ``where`` has the values that it takes."""
        buffer, place, mask = s.args
        out, texts, lanes = self.out, self.texts, self.lanes
        step = self._moves(s)
        if step is not None:
            self._note_packet(s)
        if step is not None and self.packing is not False:
            with out.block("if (packed)" if self.packing is None else ""):
                out("const Index r = first;")
                self._bind(sources_of(s), _first(where))
                if step == 1:
                    at = f"{target}, {buffer} + ({texts.expr(place)})"
                    if mask is None:
                        out(f"#load_packet<{lanes}>({at}, {lanes});")
                    else:
                        out(f"#load_packet_if<{lanes}>({mask}, {at});")
                else:
                    out(f"const {self._type(s.name)} same = {texts.value_of(s)};")
                    with out.unrolled("k", lanes):
                        out(f"{target}[k] = same;")
            if self.packing:
                return
        otherwise = step is not None and self.packing is None
        with out.block("else" if otherwise else ""), out.unrolled("k", lanes):
            self._lane_lines()
            self._bind(sources_of(s), where)
            out(f"{target}[k] = {texts.value_of(s)};")

    # --------------------------------------------------------------------------------- passes

    def _start(self, reductions: Sequence[Reduction]) -> None:
        for r in reductions:
            self.out(f"{r.type} {r.running}[{self.lanes}];")
            with self.out.unrolled("k", self.lanes):
                self.out(f"{r.running}[k] = {r.empty};")

    def _body(self, number: int, phase: Phase) -> None:
        """Go over the rows from ``begin`` to ``end``."""
        out = self.out
        reductions = [reduction(a) for a in phase.accumulators]
        self._start(reductions)
        if not phase.body and not reductions:
            return
        kept: dict[str, str] = {}
        keep: dict[str, str] = {}
        for name, (slot, made, _) in self.keeps[number].items():
            (keep if made == number else kept)[name] = f"kept{slot}"
        part = "(end < padded ? end : padded)" if self.partly else "end"
        # Elements of packets are one row at a time: each is a load, and registers are finite.
        forms = (True, "if (packed)", self.n_rows), (False, "else", 1)
        for self.packing, opening, n_rows in forms:
            step = f"tile += along * {n_rows}"
            with out.block(opening):
                with out.block(f"for (Index tile = begin; tile < {part}; {step})"):
                    self._tile(phase.body, reductions, kept, keep, n_rows)
                if self.partly:
                    with out.block(f"for (Index tile = padded; tile < end; {step})"):
                        self._tile(phase.body, reductions, {}, {}, n_rows)
        self.packing = None

    def _row_lines(self) -> None:
        self.out("const Index place = tile + j * along + y;")
        self.out("const bool valid = place < end;")
        self.out("const Index c = valid ? place : end - 1;")

    def _tile(
        self, body, reductions, kept: dict[str, str], keep: dict[str, str], n_rows: int
    ) -> None:
        """Write one tile: values of rows, loads of packets, then the columns of each row.

        ``kept`` has the names that lie on chip with the text of their place, ``keep`` those to put
        there.
        """
        out, lanes = self.out, self.lanes
        body = wanted(body, kept, {*keep, *(r.accumulator.of for r in reductions)})
        # What is computed once for a packet.
        shared = self.by_packet.intersection(s.name for s in body) if self.packing else set()
        of_columns = self._of_columns()
        of_rows = [s for s in body if s.op != "store" and s.name not in self.by_column]
        of_rows = [s for s in of_rows if s.name not in kept]
        known = {s.name for s in of_rows} | of_columns.keys() | self._of_all()
        loads = [s for s in body if s.op == "load" and s.name in self.by_column]
        loads = [s for s in loads if s.name not in kept and known.issuperset(sources_of(s))]
        stores = [s for s in body if s.op == "store" and self._moves(s) == 1]
        given = dict.fromkeys((*(s.name for s in loads), *kept))  # no set: its order varies
        row = {s.name: f"{s.name}_e[j]" for s in of_rows}
        row |= {name: f"{name}_at[j][0]" for name in kept if name not in self.by_column}
        lane = of_columns | {name: f"{name}_at[j][k]" for name in given}
        once = _first(lane)
        if self.packing:
            lane |= {name: where for name, where in once.items() if name in self.by_packet}
        for s in of_rows:
            out(f"{self._type(s.name)} {s.name}_e[{n_rows}];")
        for name in dict.fromkeys((*given, *keep)):
            out(f"{self._type(name)} {name}_at[{n_rows}][{lanes}];")
        for s in stores:
            out(f"{ops.value(s.dtype)} {s.args[0]}_at[{n_rows}][{lanes}];")
        packet = f"((tile + j * along + y) * width + x) * {lanes}"
        if kept:
            with out.unrolled("j", n_rows):
                for name, where in kept.items():
                    out(f"#kept_packet<{lanes}>({name}_at[j], {where} + {packet});")
        if of_rows:
            with out.unrolled("j", n_rows):
                self._row_lines()
                own = {s.name for s in of_rows}
                self._bind([n for s in of_rows for n in sources_of(s) if n not in own], row)
                for s in of_rows:
                    out(self.texts.let(s))
                    out(f"{s.name}_e[j] = {s.name};")
        if loads:
            with out.unrolled("j", n_rows):
                self._row_lines()
                for s in loads:
                    self._load(s, f"{s.name}_at[j]", row | of_columns)
        with out.unrolled("j", n_rows):
            self._row_lines()
            of_packet = [s for s in body if s.name in shared and s.name not in given]
            own = {s.name for s in of_packet}
            if of_packet:
                out("const Index r = first;")
                names = [n for s in of_packet for n in sources_of(s) if n not in own]
                self._bind([n for n in names if n not in row], once)
            inner = [s for s in body if s.op == "store" or s.name in self.by_column]
            inner = [s for s in inner if s.name not in own and s.name not in given]
            made = {s.name for s in inner}
            names = [n for s in inner for n in (*sources_of(s), *_stored(s))]
            names += [r.accumulator.of for r in reductions]
            names += [name for name in keep if name not in given]
            names = [n for n in names if n not in made and n not in own]
            self._bind([*(n for s in of_packet for n in sources_of(s)), *names], row)
            for s in of_packet:
                out(self.texts.let(s))
            with out.unrolled("k", lanes):
                self._lane_lines()
                self._bind(names, {n: w for n, w in lane.items() if n not in row})
                for s in inner:
                    if s in stores:
                        out(f"{s.args[0]}_at[j][k] = {s.args[2]};")
                    elif s.op == "store":
                        out(f"if (valid && inside) {self.texts.store(s)}")
                    else:
                        out(self.texts.let(s))
                for name in keep:
                    if name not in given:
                        out(f"{name}_at[j][k] = {name};")
                for r in reductions:
                    sum_ = f"{r.running}[k]"
                    out(f"if (valid) {sum_} = {r.combine(sum_, r.element('c'))};")
            for name, where in keep.items():
                out(f"#keep_packet<{lanes}>({where} + {packet}, {name}_at[j]);")
            for s in stores:
                self._store(s)

    def _of_all(self) -> set[str]:
        """Return the names of what is the same for all columns, and computed before them."""
        names = {s.name for s in self.loops.before}
        names |= {s.name for p in self.loops.phases for s in p.after}
        return names - self.by_column

    def _store(self, s: Statement) -> None:
        """Write the packet of one row."""
        buffer, place, _ = s.args
        out, lanes, texts = self.out, self.lanes, self.texts
        self._note_packet(s)
        if self.packing is not False:
            with out.block("if (valid && packed)" if self.packing is None else "if (valid)"):
                out("const Index r = first;")
                to = f"{buffer} + ({texts.expr(place)})"
                out(f"#store_packet<{lanes}>({to}, {buffer}_at[j], {lanes});")
            if self.packing:
                return
        otherwise = "else if (valid)" if self.packing is None else "if (valid)"
        with out.block(otherwise), out.unrolled("k", lanes):
            self._lane_lines()
            element = ops.stored(s.dtype)
            out(
                f"if (inside) {buffer}[{texts.expr(place)}] = "
                f"#Store<{element}>::of({buffer}_at[j][k]);"
            )

    # ------------------------------------------------------------------------------ combining

    def _totals(self, phase: Phase) -> None:
        """Give all threads the values of whole columns."""
        out = self.out
        reductions = [reduction(a) for a in phase.accumulators]
        self._combine(reductions)
        for r in reductions:
            out(f"{self._type(r.name)} {r.name}_r[{self.lanes}];")
            with out.unrolled("k", self.lanes):
                out(f"const {r.type} {r.running}_k = {r.running}[k];")
                out(r.result(f"{r.running}_k"))
                out(f"{r.name}_r[k] = {r.name};")

    def _combine(self, reductions: Sequence[Reduction]) -> None:
        """Combine what the threads of a packet have: in a warp by shuffles, then part by part."""
        out, lanes = self.out, self.lanes
        if not reductions:
            return
        with (
            out.block("for (int across = width; across < 32; across *= 2)"),
            out.unrolled("k", lanes),
        ):
            for r in reductions:
                a = f"{r.running}[k]"
                out(f"{a} = {r.combine(a, f'#shuffled({a}, across)')};")
        with out.block("if (parts > 1)"):
            for r in reductions:
                number = self.reductions.index(r)
                out(
                    f"SHARED {r.type}* const {r.name}_of = "
                    f"(SHARED {r.type}*)(shared_memory + {number} * values);"
                )
            with out.block("if (thread % stretch < width)"), out.unrolled("k", lanes):
                out(f"const Index to = (thread / stretch * width + x) * {lanes} + k;")
                for r in reductions:
                    out(f"{r.name}_of[to] = {r.running}[k];")
            out("BARRIER();")
            threads = "width * along"
            with out.block(f"for (Index at = thread; at < width * {lanes}; at += {threads})"):
                for r in reductions:
                    out(f"{r.type} {r.name}_whole = {r.name}_of[at];")
                    with out.block("for (Index part = 1; part < parts; ++part)"):
                        other = f"{r.name}_of[part * width * {lanes} + at]"
                        out(f"{r.name}_whole = {r.combine(f'{r.name}_whole', other)};")
                    out(f"{r.name}_of[at] = {r.name}_whole;")
            out("BARRIER();")
            with out.unrolled("k", lanes):
                for r in reductions:
                    out(f"{r.running}[k] = {r.name}_of[x * {lanes} + k];")


def _first(where: dict[str, str]) -> dict[str, str]:
    """Return where the values of a packet's first column are."""
    return {name: text.replace("[k]", "[0]") for name, text in where.items()}


def _stored(s: Statement) -> list[str]:
    return [s.args[2]] if s.op == "store" else []
