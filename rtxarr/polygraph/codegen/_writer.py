"""What all kernels have in common: tiles of packets, the statements of elements, parameters."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rtxarr.polygraph._index import Div, Expr, Loaded, Symbol
from rtxarr.polygraph._loops import Loops, Statement
from rtxarr.polygraph.codegen import _operations as ops
from rtxarr.polygraph.codegen._dialects import Dialect
from rtxarr.polygraph.codegen._launch import Argument, Launch
from rtxarr.polygraph.codegen._quotients import Stage, is_quotient, stages_of
from rtxarr.polygraph.codegen._reductions import Reduction
from rtxarr.polygraph.codegen._snippets import plain
from rtxarr.polygraph.codegen._text import BATCH, Kernel, Lines, Texts, sources_of

FULL = 1 << 17  # threads that keep a large GPU busy


def power_of_two(n: int) -> int:
    """Return the least power of two that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


class Writer(ABC):
    """What the kinds have in common."""

    counter = "c"

    def __init__(self, loops: Loops, dialect: Dialect, strict: bool, shared_limit: int) -> None:
        self.loops = loops
        self.dialect = dialect
        self.strict = strict
        self.shared_limit = shared_limit
        self.wide = is_wide(loops)
        self.texts = Texts(loops, dialect, strict=strict, wide=self.wide)
        self.out = Lines()
        self.lanes = self._lanes()
        self.batch = BATCH
        self.packed = True
        self.packing: bool | None = None  # whether what is written now is for arrays that pack
        self.whole = False  # whether it is for tiles without elements past the end
        self.even = False  # whether no packet is cut off where arrays pack
        self.clamps = False  # whether what is past the end may read the last element or packet
        self.aligned: dict[str, int] = {}  # buffers that packets are read from or written to

    @abstractmethod
    def run(self) -> Kernel:
        """Return the text of the kernel and how it is launched."""

    # -------------------------------------------------------------------------------- sizes

    def _statements(self) -> list[Statement]:
        return [s for p in self.loops.phases for s in p.body]

    def packet_step(self, place: Expr) -> int | None:
        """Return how far a place moves inside a packet, as ``Texts.step``."""
        return self.texts.step(place, self.counter)

    def _in_packets(self, s: Statement) -> bool:
        """Tell whether a store moves whole packets."""
        return self.packet_step(s.args[1]) == 1

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

    # ------------------------------------------------------------------------------- values

    def _type(self, name: str) -> str:
        return ops.value(self.texts.dtypes[name])

    def _bind(self, names: Iterable[str], where: dict[str, str]) -> None:
        """Name the values that are elsewhere, as far as ``where`` has them."""
        for name in dict.fromkeys(names):
            if where.get(name, name) != name:
                self.out(f"const {self._type(name)} {name} = {where[name]};")

    def _chunk_lines(self, reductions: Sequence[Reduction], slot: int) -> None:
        """Name a block's chunk of the elements, and where the values of all chunks are."""
        self.out(f"const Index chunk = {self.dialect.block_y};")
        self.out("const Index begin = chunk * span, length = cols - begin;")
        self.out("const Index end = live ? begin + (length < span ? length : span) : begin;")
        for k, r in enumerate(reductions):
            self.out(
                f"GLOBAL {r.type}* const {r.name}_part = "
                f"(GLOBAL {r.type}*)(scratch + {k * slot} * rows * chunks);"
            )

    # ----------------------------------------------------------------------------- elements

    def place(self) -> str:
        return f"const Index {self.counter} = first + k * step;"

    def inside(self, left: str, place: str = "") -> str:
        """Return the test that an element is one of those up to ``left``."""
        return f"{place or self.counter} < {left}"

    def _left(self, left: str) -> str:
        """Return how many elements there are from ``first`` on."""
        return str(self.lanes) if self.whole else f"{left} - first"

    def load_packets(self, loads: Sequence[Statement], left: str) -> None:
        """Fill ``name_at[j]`` for each load; ``first`` and ``step`` are in scope."""
        out = self.out
        in_packets = [s for s in loads if self.packet_step(s.args[1]) is not None]
        for s in in_packets:
            self._note_packet(s)
        apart = [s for s in loads if s not in in_packets]
        if in_packets and self.packing is not False:
            with out.block("if (packed)" if self.packing is None else ""):
                for s in in_packets:
                    with out.block():
                        self._packet_of(s, left)
        if in_packets and not self.packing:
            with out.block("else" if self.packing is None else ""):
                self._elements_of(in_packets, left)
        if apart:
            self._elements_of(apart, left)

    def _packet_of(self, s: Statement, left: str) -> None:
        out, lanes, place = self.out, self.lanes, s.args[1]
        target = f"{s.name}_at[j]"
        if self.packet_step(place) == 1:
            is_cut = self.even and not self.whole
            at = f"first < {left} ? first : {left} - {lanes}" if is_cut else "first"
            out(f"const Index {self.counter} = {at};")
            n_left = str(lanes) if is_cut else self._left(left)
            packet = f"{s.args[0]} + ({self.texts.expr(place)})"
            out(f"#load_packet<{lanes}>({target}, {packet}, {n_left});")
            return
        out(self._clamped("first", left))
        out(f"const {ops.value(s.dtype)} same = {self._guarded(s, left)};")
        with out.unrolled("k", lanes):
            out(f"{target}[k] = same;")

    def _elements_of(self, loads: Sequence[Statement], left: str) -> None:
        with self.out.unrolled("k", self.lanes):
            self.out(self._clamped("first + k * step", left))
            for s in loads:
                self.out(f"{s.name}_at[j][k] = {self._guarded(s, left)};")

    def _guarded(self, s: Statement, left: str) -> str:
        """Return the text of a load, or of zero past the end, where that may not be read."""
        value = self.texts.value_of(s)
        if self.whole or self.clamps:
            return value
        return f"{self.inside(left)} ? {value} : {ops.zero(s.dtype)}"

    def _clamped(self, place: str, left: str) -> str:
        """Say at which place an element is read."""
        if self.clamps and not self.whole:
            place = f"{place} < {left} ? {place} : {left} - 1"
        return f"const Index {self.counter} = {place};"

    def store_packets(self, stores: Sequence[Statement], left: str) -> None:
        """Store ``buffer_at[j]``; ``first`` and ``step`` are in scope."""
        out, texts = self.out, self.texts
        for s in stores:
            self._note_packet(s)
        if self.packing is not False:
            is_cut = self.even and not self.whole
            with out.block("if (packed)" if self.packing is None else ""):
                out(f"const Index {self.counter} = first;")
                for s in stores:
                    to = f"{s.args[0]} + ({texts.expr(s.args[1])})"
                    n_left = str(self.lanes) if is_cut else self._left(left)
                    test = f"if (first < {left}) " if is_cut else ""
                    out(f"{test}#store_packet<{self.lanes}>({to}, {s.args[0]}_at[j], {n_left});")
        if self.packing:
            return
        with out.block("else" if self.packing is None else ""), out.unrolled("k", self.lanes):
            out(self.place())
            with out.block("" if self.whole else f"if ({self.inside(left)})"):
                for s in stores:
                    element, value = ops.stored(s.dtype), f"{s.args[0]}_at[j][k]"
                    out(f"{s.args[0]}[{texts.expr(s.args[1])}] = #Store<{element}>::of({value});")

    def elements(
        self,
        body: Sequence[Statement],
        given: set[str],
        left: str,
        extra: Sequence[str] = (),
        reads: Collection[str] = (),
    ) -> None:
        """Run the statements of each element of packet ``j``, but those whose values are given.

        ``extra`` lines come after them, and read ``reads``.
        """
        out = self.out
        inline = any(s.op == "load" and s.name not in given for s in body)
        if self._divides_packets() and any(map(is_quotient, body)):
            self._elements_by_stages(stages_of(body, given), given, left, extra, reads, inline)
            return
        with out.unrolled("k", self.lanes):
            self._element_lines(left, inline)
            for s in body:
                if s.name in given:
                    out(f"const {ops.value(s.dtype)} {s.name} = {s.name}_at[j][k];")
                else:
                    self._element(s)
            for line in extra:
                out(line)

    def _divides_packets(self) -> bool:
        """Tell whether quotients are taken by packets; scans leave no registers for that."""
        return self.strict and self.dialect.name == "cuda" and not self.loops.scans

    def _element_lines(self, left: str, inline: bool) -> None:
        """Say which element ``k`` is, and whether it is there."""
        out = self.out
        if self.whole:
            out(self.place())
            out("const bool valid = true;")
        elif self.even and self.packing and not inline:
            out(self.place())
            out(f"const bool valid = first < {left};")
        elif inline:  # elements past the end read the last one
            out("const Index place = first + k * step;")
            out(f"const bool valid = {self.inside(left, 'place')};")
            out(f"const Index {self.counter} = valid ? place : {left} - 1;")
        else:
            out(self.place())
            out(f"const bool valid = {self.inside(left)};")

    def _element(self, s: Statement) -> None:
        if s.op != "store":
            self.out(self.texts.let(s))
        elif self._in_packets(s):
            self.out(f"{s.args[0]}_at[j][k] = {s.args[2]};")
        else:
            self.out(f"if (valid) {self.texts.store(s)}")

    def _elements_by_stages(
        self,
        stages: Sequence[Stage],
        given: set[str],
        left: str,
        extra: Sequence[str],
        reads: Collection[str],
        inline: bool,
    ) -> None:
        """Run the elements of a packet from quotients to quotients."""
        out = self.out
        where = {name: f"{name}_at[j][k]" for name in given}
        numbers = [s for s in stages[0].body if s.op == "scalar"]
        for s in numbers:
            out(self.texts.let(s))
        rows = self.texts.of_row | {s.name for s in numbers}
        for number, stage in enumerate(stages):
            rest = stages[number + 1 :]
            later = {name for other in rest for name in other.sources()} | set(reads)
            divided = {name for s in stage.quotients for name in sources_of(s)} - rows - given
            body = [s for s in stage.body if s not in numbers]
            here = {s.name for s in body if s.op != "store"}
            apart = sorted((later & here) | divided) if rest else []
            apart = [name for name in apart if where.get(name) != f"{name}_k[k]"]
            for name in apart:
                out(f"{self._type(name)} {name}_k[{self.lanes}];")
            with out.unrolled("k", self.lanes):
                self._element_lines(left, inline)
                read = [name for s in body for name in sources_of(s)]
                read += [*apart, *([] if rest else reads)]
                self._bind([name for name in read if name not in here], where)
                for s in body:
                    self._element(s)
                for name in apart:
                    out(f"{name}_k[k] = {name};")
                for line in () if rest else extra:
                    out(line)
            where |= {name: f"{name}_k[k]" for name in apart}
            for s in stage.quotients:
                names = [
                    name if name in rows else where[name].removesuffix("[k]")
                    for name in sources_of(s)
                ]
                out(f"f32 {s.name}_q[{self.lanes}];")
                operands = ", ".join(["1.0f", *names][-2:])
                out(f"#quotients<{self.lanes}>({s.name}_q, {operands});")
                quotient = f"{s.name}_q[k]"
                is_half = ops.kind(s.dtype) == "h"
                where[s.name] = ops.rounded(quotient, s.dtype) if is_half else quotient

    def tile(
        self,
        body: Sequence[Statement],
        left: str,
        first: str,
        *,
        extra: Sequence[str] = (),
        reads: Sequence[str] = (),
        kept: dict[str, str] | None = None,
        keep: dict[str, str] | None = None,
    ) -> None:
        """Write one tile: loads of all packets, then their elements, then stores.

        ``kept`` has the names that lie on chip with the text of their place, ``keep`` those to put
        there.
        """
        out, lanes = self.out, self.lanes
        kept, keep = kept or {}, keep or {}
        body = wanted(body, kept, {*keep, *reads})
        loads = [s for s in body if self.texts.hoisted(s) and s.name not in kept]
        stores = [s for s in body if s.op == "store" and self._in_packets(s)]
        given = {s.name for s in loads} | kept.keys()
        for name in (*(s.name for s in loads), *kept):
            out(f"{self._type(name)} {name}_at[{self.batch}][{lanes}];")
        for name in keep:
            if name not in given:
                out(f"{self._type(name)} {name}_at[{self.batch}][{lanes}];")
        for s in stores:
            out(f"{ops.value(s.dtype)} {s.args[0]}_at[{self.batch}][{lanes}];")
        if given:
            with out.unrolled("j", self.batch):
                if loads:
                    out(f"const Index first = {first};")
                self.load_packets(loads, left)
                for name, where in kept.items():
                    out(f"#kept_packet<{lanes}>({name}_at[j], {where});")
        with out.unrolled("j", self.batch):
            out(f"const Index first = {first};")
            extras = [f"{name}_at[j][k] = {name};" for name in keep if name not in given]
            self.elements(body, given, left, [*extras, *extra], {*keep, *reads})
        if stores or keep:
            with out.unrolled("j", self.batch):
                if stores:
                    out(f"const Index first = {first};")
                    self.store_packets(stores, left)
                for name, where in keep.items():
                    out(f"#keep_packet<{lanes}>({where}, {name}_at[j]);")

    # ------------------------------------------------------------------------------ kernels

    def kernel(self, name: str, e: Entry, arguments: Sequence[Argument]) -> str:
        """Return the text of one entry point."""
        lines = e.lines
        if self.dialect.name == "metal":
            return _metal_kernel(name, lines, arguments, e.max_threads)
        parameters = [f"{a.type} {a.name}" for a in arguments]
        blocks = f", {e.min_blocks}" if e.min_blocks and self.dialect.name == "cuda" else ""
        bounds = f"__launch_bounds__({e.max_threads}{blocks}) "
        cluster = f"__cluster_dims__({e.cluster}, 1, 1) " if e.cluster > 1 else ""
        opening = f'extern "C" __global__ void {cluster}{bounds}{name}('
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
                # Only a map may write where it reads.
                alone = "" if self.loops.kind == "map" else " RESTRICT"
                found.append(Argument("buffer", f"GLOBAL {const}{element}*{alone}", b.name, i))
        return found

    def finish(self, entries: Sequence[Entry], scratch: tuple[int, ...] = ()) -> Kernel:
        """Name the entry points after what they do and put the text together."""
        bodies: dict[str, None] = {}
        launches = []
        for e in entries:
            given = [
                *self.buffer_arguments(),
                *e.arguments,
                *self.texts.numbers_of(),
                Argument("packed", "int", "packed"),
            ]
            body = self.kernel("NAME", e, given)
            wide = "_wide" if self.wide else ""
            name = f"{e.kind}{wide}_{hashlib.sha256(body.encode()).hexdigest()[:12]}"
            bodies[self.dialect.library(body.replace("NAME", name))] = None
            launches.append(Launch(name, e.grid, e.block, e.shared, tuple(given)))
        places = {b.name: i for i, b in enumerate(self.loops.buffers)}
        head = f"{self.dialect.head}typedef {'i64' if self.wide else 'i32'} Index;\n"
        head += self.texts.halves()
        if any("COPIES_END" in body for body in bodies):
            head += self.dialect.copies
        if any("CLUSTER_WAIT" in body or "FETCH" in body for body in bodies):
            head += self.dialect.clusters
        return Kernel(
            dialect=self.dialect,
            head=head.rstrip("\n"),
            wide=self.wide,
            snippets=self.texts.snippets_for("".join(bodies)),
            bodies=tuple(map(plain, bodies)),
            launches=tuple(launches),
            scratch=scratch,
            packed=self.packed,
            alignments=tuple((places[name], size) for name, size in self.aligned.items()),
        )


@dataclass
class Entry:
    """An entry point being written.

    Registers are bounded such that a block may have ``max_threads``, and a multiprocessor has
    ``min_blocks`` at once; 0 leaves that to the compiler. ``cluster`` neighbouring blocks can reach
    one another's shared memory.
    """

    kind: str
    lines: Lines
    grid: tuple[int, int]
    block: tuple[int, int]
    shared: int
    arguments: list[Argument]
    max_threads: int
    min_blocks: int = 0
    cluster: int = 1


def _metal_kernel(name: str, lines: Lines, arguments: Sequence[Argument], threads: int) -> str:
    """Return the text of an entry point in Metal, where numbers are one structure."""
    arrays = [a for a in arguments if "*" in a.type]
    numbers = [a for a in arguments if "*" not in a.type]
    parameters = [f"{a.type} {a.name} [[buffer({i})]]" for i, a in enumerate(arrays)]
    parameters += [
        f"constant {name}_numbers& numbers [[buffer({len(arrays)})]]",
        "threadgroup u8* shared_memory [[threadgroup(0)]]",
        "uint3 thread_at [[thread_position_in_threadgroup]]",
        "uint3 block_size [[threads_per_threadgroup]]",
        "uint3 block_at [[threadgroup_position_in_grid]]",
    ]
    text = [
        f"struct {name}_numbers {{",
        *(f"  {a.type} {a.name};" for a in numbers),
        "};",
        f"[[kernel, max_total_threads_per_threadgroup({threads})]] void {name}(",
        *(f"    {p}," for p in parameters[:-1]),
        f"    {parameters[-1]}) {{",
        *(f"  const {a.type} {a.name} = numbers.{a.name};" for a in numbers),
        *("  " + _THREAD.sub("self", line) for line in lines.lines),
        "}",
        "",
    ]
    return "\n".join(text)


_THREAD = re.compile(r"\bthread\b")  # a word of the language


def wanted(body: Sequence[Statement], kept, reads: set[str]) -> list[Statement]:
    """Return the statements of a body that its stores and ``reads`` need, given ``kept``."""
    needed = set(reads)
    out = []
    for s in reversed(body):
        if s.op == "store" or s.name in needed:
            out.append(s)
            if s.name not in kept or s.op == "store":
                needed.update(sources_of(s))
    return out[::-1]


def is_wide(loops: Loops) -> bool:
    """Tell whether an index can leave the range of 32 bits."""
    limit = 2**31 - 2**22
    if loops.kind != "segments" and loops.rows * loops.cols >= limit:
        return True
    nodes = {b.name: b.node for b in loops.buffers}
    if max((n.size for n in nodes.values()), default=0) >= limit:
        return True
    for s in loops.statements:
        for e in (a for a in s.args if isinstance(a, Expr)):
            # A number read from memory is an index along some axis.
            axis = max(nodes[s.args[0]].shape, default=0) if s.op in ("load", "store") else 0
            if _largest(e, axis)[1] >= limit:
                return True
    return False


def _largest(e: Expr, axis: int) -> tuple[int, int]:
    """Return the largest value of ``e``, and the largest size of what is computed on the way.

    Numbers that are read from memory lie below ``axis``.
    """
    most = size = abs(e.offset)
    for atom, factor in e.terms:
        if type(atom) is Loaded:
            value = axis
        elif type(atom) is Symbol:
            value = atom.size
        else:
            value, inner = _largest(atom.numerator, axis)
            size = max(size, inner)
            value = value // atom.divisor if type(atom) is Div else min(value, atom.divisor)
        most += value * abs(factor)
    return most, max(most, size)
