"""Kernels around the statements of loops: which thread runs what, what stays on chip.

* map: a thread takes one tile of packets; all its loads come before its arithmetic.
* rows: 1 to 1024 threads share a row, short rows share a block. What a later pass needs of an
  earlier one stays in shared memory where the row fits; each thread reads there only what it wrote,
  so the only barriers are those of the reductions. Threads combine by shuffles, then warps in
  order, so equal inputs give equal bits.
* split rows: few long rows are cut into chunks; a second kernel combines the chunks in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rtxarr.polygraph._index import Expr, Loaded
from rtxarr.polygraph._loops import Accumulator, Loops, Phase, Statement
from rtxarr.polygraph.codegen import _operations as ops
from rtxarr.polygraph.codegen._dialects import Dialect
from rtxarr.polygraph.codegen._snippets import plain
from rtxarr.polygraph.codegen._text import (
    BATCH,
    Argument,
    Kernel,
    Launch,
    Lines,
    Texts,
    loaded_names,
)

# Bytes of shared memory that a block may have; the least of the architectures with much of it.
SHARED_LIMIT = 227 * 1024
_PARTIALS = 512  # bytes for the values of up to 32 warps
_FULL = 1 << 17  # threads that keep a large GPU busy


def generate(
    loops: Loops, dialect: Dialect, *, strict: bool = True, shared_limit: int = SHARED_LIMIT
) -> Kernel:
    """Return the text of a kernel and how to launch it for these sizes.

    Parameters
    ----------
    loops : Loops
    dialect : Dialect
    strict : bool, default True
        Round halves after each operation.
    shared_limit : int, bytes
        What a block can have of shared memory.
    """
    return _WRITERS[loops.kind](loops, dialect, strict, shared_limit).run()


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class _Writer:
    """What the kinds have in common."""

    counter = "c"
    limit = "cols"

    def __init__(self, loops: Loops, dialect: Dialect, strict: bool, shared_limit: int) -> None:
        self.loops = loops
        self.dialect = dialect
        self.strict = strict
        self.shared_limit = shared_limit
        self.wide = _is_wide(loops)
        self.texts = Texts(loops, dialect, strict=strict, wide=self.wide)
        self.out = Lines()
        self.lanes = self._lanes()
        self.packed = True
        self.aligned: dict[str, int] = {}  # buffers that packets are read from or written to

    # -------------------------------------------------------------------------------- sizes

    def _statements(self) -> list[Statement]:
        return [s for p in self.loops.phases for s in p.body]

    def _in_packets(self, s: Statement) -> bool:
        """Tell whether a load or store moves whole packets."""
        if s.op == "store":
            return self.texts.step(s.args[1], self.counter) == 1
        return self.texts.hoisted(s) and self.texts.step(s.args[1], self.counter) in (0, 1)

    def _lanes(self) -> int:
        """Return the elements of a packet: 16 bytes of the largest type that moves in packets."""
        moving = [
            s
            for s in self._statements()
            if s.op in ("load", "store") and self.texts.step(s.args[1], self.counter) == 1
        ]
        sizes = [self.texts.buffers[s.args[0]].dtype.itemsize for s in moving]
        return min(max(16 // max(sizes, default=4), 2), 8)

    def _note_packet(self, s: Statement) -> None:
        buffer, place = s.args[:2]
        self.packed &= self.texts.packs(place, self.counter, self.lanes)
        if self.texts.step(place, self.counter) == 1:
            size = self.texts.buffers[buffer].dtype.itemsize * self.lanes
            self.aligned[buffer] = min(size, 16)

    # ----------------------------------------------------------------------------- elements

    def place(self) -> str:
        return f"const Index {self.counter} = first + k * step;"

    def load_packets(self, loads: Sequence[Statement], left: str) -> None:
        """Fill ``name_at[j]`` for each load; ``first`` and ``step`` are in scope."""
        out, texts, lanes = self.out, self.texts, self.lanes
        for s in loads:
            buffer, place, _ = s.args
            target = f"{s.name}_at[j]"
            step = texts.step(place, self.counter)
            each = f"{self.counter} < {left} ? {texts.value_of(s)} : {ops.zero(s.dtype)}"
            if step is not None:
                self._note_packet(s)
                with out.block("if (packed)"):
                    out(f"const Index {self.counter} = first;")
                    if step == 1:
                        out(
                            f"#load_packet<{lanes}>({target}, {buffer} + ({texts.expr(place)}), "
                            f"{left} - first);"
                        )
                    else:
                        out(f"const {ops.value(s.dtype)} same = {each};")
                        with out.unrolled("k", lanes):
                            out(f"{target}[k] = same;")
            with out.block("else") if step is not None else out.block(), out.unrolled("k", lanes):
                out(self.place())
                out(f"{target}[k] = {each};")

    def store_packets(self, stores: Sequence[Statement], left: str) -> None:
        out, texts = self.out, self.texts
        for s in stores:
            buffer, place, _ = s.args
            self._note_packet(s)
            element = ops.stored(s.dtype)
            with out.block("if (packed)"):
                out(f"const Index {self.counter} = first;")
                out(
                    f"#store_packet<{self.lanes}>({buffer} + ({texts.expr(place)}), "
                    f"{buffer}_at[j], {left} - first);"
                )
            with out.block("else"), out.unrolled("k", self.lanes):
                out(self.place())
                out(
                    f"if ({self.counter} < {left}) "
                    f"{buffer}[{texts.expr(place)}] = #Store<{element}>::of({buffer}_at[j][k]);"
                )

    def elements(
        self, body: Sequence[Statement], given: set[str], left: str, extra: Sequence[str] = ()
    ) -> None:
        """Run the statements of each element of packet ``j``, but those whose values are given."""
        out, texts = self.out, self.texts
        inline = any(s.op == "load" and s.name not in given for s in body)
        with out.unrolled("k", self.lanes):
            if inline:  # elements past the end read the last one
                out("const Index place = first + k * step;")
                out(f"const bool valid = place < {left};")
                out(f"const Index {self.counter} = valid ? place : {left} - 1;")
            else:
                out(self.place())
                out(f"const bool valid = {self.counter} < {left};")
            for s in body:
                if s.name in given:
                    out(f"const {ops.value(s.dtype)} {s.name} = {s.name}_at[j][k];")
                elif s.op != "store":
                    out(texts.let(s))
                elif self._in_packets(s):
                    out(f"{s.args[0]}_at[j][k] = {s.args[2]};")
                else:
                    out(f"if (valid) {texts.store(s)}")
            for line in extra:
                out(line)

    def tile(
        self,
        body: Sequence[Statement],
        left: str,
        first: str,
        *,
        extra: Sequence[str] = (),
        reads: Sequence[str] = (),
        kept: dict[str, tuple[str, np.dtype]] | None = None,
        keep: dict[str, tuple[str, np.dtype]] | None = None,
    ) -> None:
        """Write one tile: loads of all packets, then their elements, then stores.

        ``kept`` has the names that lie on chip with the text of their place, ``keep`` those to put
        there.
        """
        out, lanes = self.out, self.lanes
        kept, keep = kept or {}, keep or {}
        body = _wanted(body, kept, {*keep, *reads})
        loads = [s for s in body if self.texts.hoisted(s) and s.name not in kept]
        stores = [s for s in body if s.op == "store" and self._in_packets(s)]
        given = {s.name for s in loads} | kept.keys()
        for name in (*(s.name for s in loads), *kept):
            out(f"{ops.value(self.texts.dtypes[name])} {name}_at[{BATCH}][{lanes}];")
        for name in keep:
            if name not in given:
                out(f"{ops.value(self.texts.dtypes[name])} {name}_at[{BATCH}][{lanes}];")
        for s in stores:
            out(f"{ops.value(s.dtype)} {s.args[0]}_at[{BATCH}][{lanes}];")
        if given:
            with out.unrolled("j", BATCH):
                if loads:
                    out(f"const Index first = {first};")
                self.load_packets(loads, left)
                for name, (where, _) in kept.items():
                    out(f"#kept_packet<{lanes}>({name}_at[j], {where});")
        with out.unrolled("j", BATCH):
            out(f"const Index first = {first};")
            extras = [f"{name}_at[j][k] = {name};" for name in keep if name not in given]
            self.elements(body, given, left, [*extras, *extra])
        if stores or keep:
            with out.unrolled("j", BATCH):
                if stores:
                    out(f"const Index first = {first};")
                self.store_packets(stores, left)
                for name, (where, _) in keep.items():
                    out(f"#keep_packet<{lanes}>({where}, {name}_at[j]);")

    # ------------------------------------------------------------------------------ kernels

    def kernel(self, name: str, lines: Lines, arguments: Sequence[Argument], threads: int) -> str:
        """Return the text of one entry point."""
        d = self.dialect
        parameters = [_parameter(a) for a in arguments]
        if d.name == "metal":
            return _metal_kernel(name, lines, arguments)
        bounds = f"__launch_bounds__({threads}) "
        opening = f'extern "C" __global__ void {bounds}{name}('
        return "\n".join(
            [opening, *(f"    {p}," for p in parameters[:-1]), f"    {parameters[-1]}) {{"]
            + ["  " + line for line in lines.lines]
            + ["}", ""]
        )

    def buffer_arguments(self) -> list[Argument]:
        found = []
        for i, b in enumerate(self.loops.buffers):
            element = ops.stored(b.dtype)
            if b.is_scalar:
                found.append(Argument("buffer", element, b.name, i))
            else:
                const = "" if b.is_output else "const "
                found.append(Argument("buffer", f"GLOBAL {const}{element}*", b.name, i))
        return found

    def finish(self, entries: Sequence[_Entry], scratch: tuple[int, ...] = ()) -> Kernel:
        """Name the entry points after what they do and put the text together."""
        bodies, launches = [], []
        for e in entries:
            given = [
                *self.buffer_arguments(),
                *e.arguments,
                *self.texts.numbers_of(),
                Argument("packed", "int", "packed"),
            ]
            body = self.kernel("NAME", e.lines, given, e.threads)
            wide = "_wide" if self.wide else ""
            name = f"{e.kind}{wide}_{hashlib.sha256(body.encode()).hexdigest()[:12]}"
            bodies.append(body.replace("NAME", name, 1))
            launches.append(Launch(name, e.grid, e.block, e.shared, tuple(given)))
        marked = self.dialect.library("\n".join(bodies))
        places = {b.name: i for i, b in enumerate(self.loops.buffers)}
        index = f"typedef {'i64' if self.wide else 'i32'} Index;"
        return Kernel(
            dialect=self.dialect,
            head=f"{self.dialect.head}{index}\n{self.texts.halves()}".rstrip("\n"),
            wide=self.wide,
            snippets=self.texts.snippets_for(marked),
            body=plain(marked),
            launches=tuple(launches),
            scratch=scratch,
            packed=self.packed,
            alignments=tuple((places[name], size) for name, size in self.aligned.items()),
        )


@dataclass
class _Entry:
    kind: str
    lines: Lines
    grid: tuple[int, int]
    block: tuple[int, int]
    shared: int
    arguments: list[Argument]
    threads: int


def _parameter(a: Argument) -> str:
    return f"{a.type} {a.name}"


def _wanted(body: Sequence[Statement], kept, reads: set[str]) -> list[Statement]:
    """Return the statements of a body that its stores and ``reads`` need, given ``kept``."""
    needed = set(reads)
    out = []
    for s in reversed(body):
        if s.op == "store" or s.name in needed:
            out.append(s)
            if s.name not in kept or s.op == "store":
                needed.update(sources_of(s))
    return out[::-1]


def sources_of(s: Statement) -> list[str]:
    """Return the names of the values that a statement reads."""
    if s.op == "scalar":
        return []
    if s.op in ("load", "store"):
        extra = [] if s.args[2] is None else [s.args[2]]
        return [*loaded_names(s.args[1]), *extra]
    if s.op in ("index", "in_range", "divides"):
        return list(loaded_names(s.args[0]))
    return list(s.args)


def _is_wide(loops: Loops) -> bool:
    """Tell whether an index can leave the range of 32 bits."""
    limit = 2**31 - 2**22
    if loops.rows * loops.cols >= limit:
        return True
    sizes = {b.name: b.node.size for b in loops.buffers}
    if max(sizes.values(), default=0) >= limit:
        return True
    statements = [*loops.before, *(s for p in loops.phases for s in (*p.body, *p.after))]
    for s in statements:
        for e in (a for a in s.args if isinstance(a, Expr)):
            least, most = _known_bounds(e)
            if least <= -limit or most >= limit:
                return True
    return False


def _known_bounds(e: Expr) -> tuple[int, int]:
    """Return the bounds of the part of ``e`` that is not read from memory."""
    known = tuple((a, f) for a, f in e.terms if type(a) is not Loaded)
    return Expr(known, e.offset).bounds


# ------------------------------------------------------------------------------------- map


class _Map(_Writer):
    counter = "i"

    def run(self) -> Kernel:
        d, out = self.dialect, self.out
        (phase,) = self.loops.phases
        threads = 256
        batch_first = (
            f"(packed ? start + (j * {threads} + thread) * {self.lanes} "
            f": start + j * {threads * self.lanes} + thread)"
        )
        out(f"const Index thread = {d.thread_x};")
        out(f"const Index start = (Index){d.block_x} * {threads * BATCH * self.lanes};")
        out(f"const Index step = packed ? 1 : {threads};")
        for s in self.loops.before:
            out(self.texts.let(s))
        self.tile(phase.body, "cols", batch_first)
        cols = self.loops.cols
        grid = -(-cols // (threads * BATCH * self.lanes))
        entry = _Entry(
            "map", out, (grid, 1), (threads, 1), 0,
            [Argument("number", "Index", "cols", cols)], threads,
        )  # fmt: skip
        return self.finish([entry])


# ------------------------------------------------------------------------------------ rows


@dataclass(frozen=True)
class _Reduction:
    """An accumulator in text: its running type and value, how two are combined."""

    name: str
    type: str
    empty: str
    size: int
    accumulator: Accumulator

    @property
    def running(self) -> str:
        return f"{self.name}_sum"

    def combine(self, a: str, b: str) -> str:
        op, kind = self.accumulator.op, ops.kind(self.accumulator.dtype)
        if op in ("sum", "prod", "mean"):
            sign, names = ("*", ("product", "times")) if op == "prod" else ("+", ("sum", "plus"))
            if kind in "iu":
                return f"#{names[0]}({a}, {b})"
            return f"#{names[1]}({a}, {b})" if kind == "c" else f"{a} {sign} {b}"
        if op in ("any", "all"):
            return f"{a} {'||' if op == 'any' else '&&'} {b}"
        if op in ("max", "min"):
            return f"#{'maximum' if op == 'max' else 'minimum'}({a}, {b})"
        return f"#first_{op[3:]}({a}, {b})"

    def element(self, counter: str) -> str:
        """Return the value of one element, ready to be combined."""
        of = self.accumulator.of
        return f"{self.type}{{{of}, {counter}}}" if self.is_found else of

    @property
    def is_found(self) -> bool:
        return self.accumulator.op.startswith("arg")

    def result(self) -> str:
        a = self.accumulator
        text = f"{self.running}.at" if self.is_found else self.running
        return f"const {ops.value(a.result)} {self.name} = ({ops.value(a.result)}){text};"


_LEAST = {"int8": -(2**7), "int16": -(2**15), "int32": "(-2147483647 - 1)"}
_LEAST["int64"] = "(-9223372036854775807LL - 1)"


def _extreme(dtype: np.dtype, *, least: bool) -> str:
    """Return the least or the greatest number of a dtype."""
    kind = ops.kind(dtype)
    if kind == "b":
        return "false" if least else "true"
    if kind in "hf":
        return f"F32_OF_BITS({'0xff800000u' if least else '0x7f800000u'})"
    if kind == "d":
        return f"F64_OF_BITS({'0xfff0000000000000ull' if least else '0x7ff0000000000000ull'})"
    if kind == "u":
        return f"({ops.value(dtype)}){'0' if least else '-1'}"
    return str(_LEAST[dtype.name]) if least else f"({ops.value(dtype)}){np.iinfo(dtype).max}"


def reduction(a: Accumulator) -> _Reduction:
    value = ops.value(a.dtype)
    size = max(a.dtype.itemsize, 4 if value == "f32" else 1)
    if a.op.startswith("arg"):
        return _Reduction(a.name, f"#Found<{value}>", f"#Found<{value}>{{{value}{{}}, -1}}", 16, a)
    empty = {
        "sum": ops.zero(a.dtype),
        "mean": ops.zero(a.dtype),
        "prod": f"{value}{{1, 0}}" if ops.kind(a.dtype) == "c" else f"({value})1",
        "any": "false",
        "all": "true",
        "max": "" if ops.kind(a.dtype) == "c" else _extreme(a.dtype, least=True),
        "min": "" if ops.kind(a.dtype) == "c" else _extreme(a.dtype, least=False),
    }[a.op]
    return _Reduction(a.name, value, empty, size, a)


class _Rows(_Writer):
    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.reductions = [reduction(a) for p in self.loops.phases for a in p.accumulators]
        self.partials = {r.name: k * _PARTIALS for k, r in enumerate(self.reductions)}

    def geometry(self) -> tuple[int, int]:
        """Return how many threads share a row, and how many rows a block."""
        rows, cols = self.loops.rows, self.loops.cols
        packets = -(-cols // self.lanes)
        if packets <= 32 * BATCH:
            threads = _power_of_two(-(-packets // BATCH))
        else:
            threads = min(max(_power_of_two(packets) // 8, 32), 1024)
        while threads < 1024 and packets > threads * BATCH and rows * threads < _FULL:
            threads *= 2
        return threads, max(256 // threads, 1)

    def run(self) -> Kernel:
        loops, out = self.loops, self.out
        threads, rows = self.geometry()
        tile = threads * BATCH * self.lanes
        padded = -(-loops.cols // tile) * tile
        slots, keeps = keep_plan(loops, self.texts, self.strict)
        held = sum(size for size, _ in slots) * padded * rows
        if held + self._partial_bytes() > self.shared_limit:
            slots, keeps, held = [], [{} for _ in loops.phases], 0
        self._thread_lines(slots, bool(self.reductions))
        for s in loops.before:
            self.row_statement(s)
        for number, phase in enumerate(loops.phases):
            self.phase(number, phase, keeps)
        arguments = [
            Argument("number", "Index", "rows", loops.rows),
            Argument("number", "Index", "cols", loops.cols),
            Argument("number", "Index", "padded", padded),
        ]
        entry = _Entry(
            "rows", out, (-(-loops.rows // rows), 1), (threads, rows),
            held + self._partial_bytes(), arguments, 1024,
        )  # fmt: skip
        return self.finish([entry])

    def _partial_bytes(self) -> int:
        return _PARTIALS * len(self.reductions)

    def _thread_lines(self, slots, shared: bool) -> None:
        out, d = self.out, self.dialect
        if shared or slots:
            out(d.shared_memory)
        out(f"const Index thread = {d.thread_x}, threads = {d.threads_x};")
        out("const Index step = packed ? 1 : threads;")
        out(f"const Index row = (Index){d.block_x} * {d.threads_y} + {d.thread_y};")
        out("const bool live = row < rows;")
        out("const Index r = live ? row : rows - 1;")
        before = f"{self._partial_bytes()}"
        for number, (_, dtype) in enumerate(slots):
            element = self.kept_type(dtype)
            out(
                f"SHARED {element}* const kept{number} = (SHARED {element}*)(shared_memory + "
                f"{before}) + {d.thread_y} * padded;"
            )
            before += f" + sizeof({element}) * padded * {d.threads_y}"

    def kept_type(self, dtype: np.dtype) -> str:
        return ops.stored(dtype) if self.strict else ops.value(dtype)

    def row_statement(self, s: Statement) -> None:
        if s.op == "store":
            self.out(f"if (thread == 0 && live) {self.texts.store(s)}")
        else:
            self.out(self.texts.let(s))

    def phase(self, number: int, phase: Phase, keeps: list[dict]) -> None:
        out = self.out
        reductions = [reduction(a) for a in phase.accumulators]
        for r in reductions:
            out(f"{r.type} {r.running} = {r.empty};")
        if phase.body:
            lanes = self.lanes
            first = (
                f"(packed ? tile + (j * threads + thread) * {lanes} "
                f": tile + j * threads * {lanes} + thread)"
            )
            packet = f"tile + (j * threads + thread) * {lanes}"
            kept, keep = {}, {}
            for name, (slot, made, _) in keeps[number].items():
                where = f"kept{slot} + {packet}"
                (keep if made == number else kept)[name] = (where, self.texts.dtypes[name])
            extra = [
                f"if (valid) {r.running} = {r.combine(r.running, r.element(self.counter))};"
                for r in reductions
            ]
            with out.block(
                f"for (Index tile = 0; tile < (live ? cols : 0); tile += threads * {BATCH * lanes})"
            ):
                reads = [a.of for a in phase.accumulators]
                self.tile(phase.body, "cols", first, extra=extra, reads=reads, kept=kept, keep=keep)
        if reductions:
            self.combine(reductions)
        for r in reductions:
            out(r.result())
        for s in phase.after:
            self.row_statement(s)

    def combine(self, reductions: Sequence[_Reduction]) -> None:
        """Give all threads of a row the values of the whole row."""
        out, d = self.out, self.dialect
        with out.block("for (int apart = (threads < 32 ? threads : 32) / 2; apart; apart /= 2)"):
            for r in reductions:
                out(f"{r.running} = {r.combine(r.running, f'#shuffled({r.running}, apart)')};")
        with out.block("if (threads > 32)"):
            out(f"const Index warps = threads / 32, first_warp = {d.thread_y} * warps;")
            for r in reductions:
                out(
                    f"SHARED {r.type}* const {r.name}_of = "
                    f"(SHARED {r.type}*)(shared_memory + {self.partials[r.name]}) + first_warp;"
                )
            with out.block("if (thread % 32 == 0)"):
                for r in reductions:
                    out(f"{r.name}_of[thread / 32] = {r.running};")
            out("BARRIER();")
            for r in reductions:
                out(f"{r.running} = {r.name}_of[0];")
            with out.block("for (Index warp = 1; warp < warps; ++warp)"):
                for r in reductions:
                    out(f"{r.running} = {r.combine(r.running, f'{r.name}_of[warp]')};")


_NUMBERS = frozenset(("scalar", "index", "in_range", "divides"))
_CHEAP = frozenset("add subtract multiply negative positive abs where cast square".split())


def keep_plan(
    loops: Loops, texts: Texts, strict: bool
) -> tuple[list[tuple[int, np.dtype]], list[dict[str, tuple[int, int, int]]]]:
    """Choose which values of elements stay on chip between passes.

    A later pass takes what an earlier one computed too, but for what is a cheap operation away from
    values that are on chip anyway.

    Returns
    -------
    slots : list of (int, dtype)
        The bytes of an element of each array on chip, the largest first.
    keeps : list of dict
        For each phase the names that it writes or reads there: (slot, the phase that writes it,
        the last one that reads it).
    """
    made: dict[str, int] = {}
    bodies = [{s.name: s for s in p.body if s.op != "store"} for p in loops.phases]
    lives: dict[str, list[int]] = {}
    for number, phase in enumerate(loops.phases):
        for name in _frontier(phase, bodies[number], made, lives, texts):
            lives.setdefault(name, [made[name], number])[1] = number
        for name in bodies[number]:
            made.setdefault(name, number)
    slots: list[tuple[int, np.dtype, int]] = []
    keeps: list[dict[str, tuple[int, int, int]]] = [{} for _ in loops.phases]

    def size(name: str) -> int:
        dtype = texts.dtypes[name]
        return dtype.itemsize if strict else max(dtype.itemsize, 4 * (ops.kind(dtype) == "h"))

    for name in sorted(lives, key=lambda n: (-size(n), lives[n])):
        begin, end = lives[name]
        dtype = texts.dtypes[name]
        for slot, (_, other, free) in enumerate(slots):
            if other == dtype and free <= begin:
                break
        else:
            slot = len(slots)
            slots.append((size(name), dtype, end))
        slots[slot] = (size(name), dtype, end)
        for number in range(begin, end + 1):
            if number == begin or name in bodies[number]:
                keeps[number][name] = (slot, begin, end)
    return [(s, dtype) for s, dtype, _ in slots], keeps


def _frontier(phase, body, made, lives, texts) -> list[str]:
    """Return the names that this pass takes from earlier ones instead of computing them anew."""
    found: dict[str, None] = {}
    seen: set[str] = set()
    stack = [a.of for a in phase.accumulators]
    stack += [s.args[2] for s in phase.body if s.op == "store"]

    def leaves(name: str, depth: int) -> set[str] | None:
        """Return what lies on chip or is loaded that a few cheap operations make ``name`` of."""
        if name not in body or body[name].op in _NUMBERS:
            return set()
        if name in lives or body[name].op == "load":
            return {name}
        if depth == 0 or body[name].op not in _CHEAP:
            return None
        parts = [leaves(a, depth - 1) for a in body[name].args]
        return None if None in parts else set().union(*parts)

    def cheaper_anew(name: str) -> bool:
        found = leaves(name, 4)
        if name in lives or found is None or found == {name}:
            return False
        added = sum(texts.dtypes[n].itemsize for n in found - lives.keys())
        return added <= texts.dtypes[name].itemsize

    while stack:
        name = stack.pop()
        if name in seen or name not in body:
            continue
        seen.add(name)
        s = body[name]
        if name in made and s.op not in _NUMBERS:
            is_same = s.op == "load" and texts.step(s.args[1], "c") == 0
            if not is_same and not cheaper_anew(name):
                found[name] = None
                continue
        stack += sources_of(s)
    return list(found)


_WRITERS = {"map": _Map, "rows": _Rows}
