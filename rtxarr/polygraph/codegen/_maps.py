"""Maps: of one pattern and sizes, or several of one pattern in one launch.

The text of a map is the same for all sizes. Where several share a launch, their arrays and sizes
are the rows of a table that the kernel is passed by value, and a block looks up whose it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Hashable, Sequence

from rtxarr.polygraph._loops import Loops
from rtxarr.polygraph.codegen._dialects import Dialect
from rtxarr.polygraph.codegen._launch import Argument, Launch, Table, number_bytes
from rtxarr.polygraph.codegen._snippets import plain
from rtxarr.polygraph.codegen._text import BATCH, Kernel
from rtxarr.polygraph.codegen._writer import Entry, Writer, power_of_two

_THREADS = 256
# Bytes of a kernel's parameters: what all drivers take.
PARAMETER_BYTES = 4096
_NEVER = 2**31 - 1  # where a row that is not used begins


class Map(Writer):
    counter = "i"

    def run(self) -> Kernel:
        return self.finish([self.entry()])

    def entry(self) -> Entry:
        d, out = self.dialect, self.out
        (phase,) = self.loops.phases
        first = (
            f"(packed ? start + (j * {_THREADS} + thread) * {self.lanes} "
            f": start + j * {_THREADS * self.lanes} + thread)"
        )
        out(f"const Index thread = {d.thread_x};")
        out(f"const Index start = (Index){d.block_x} * {_THREADS * BATCH * self.lanes};")
        out(f"const Index step = packed ? 1 : {_THREADS};")
        for s in self.loops.before:
            out(self.texts.let(s))
        self.tile(phase.body, "cols", first)
        cols = self.loops.cols
        grid = -(-cols // (_THREADS * BATCH * self.lanes))
        arguments = [Argument("number", "Index", "cols", cols)]
        return Entry("map", out, (grid, 1), (_THREADS, 1), 0, arguments, _THREADS)


def pattern(loops: Loops, kernel: Kernel) -> tuple[Hashable, int] | None:
    """Return what maps that can share a launch have in common, and how many can share one.

    None for what cannot.

    Parameters
    ----------
    loops : Loops
    kernel : Kernel
        What was generated of them.
    """
    launch = kernel.launches[0]
    if kernel.wide or not launch.name.startswith("map_") or kernel.dialect.name != "cuda":
        return None
    arrays, scalars, sizes = _kinds(launch.arguments)
    row = 8 * len(arrays) + 4 + sum(map(_size, sizes))
    most = (PARAMETER_BYTES - 16 * len(scalars) - 16) // row
    if most < 2:
        return None
    numbers = tuple(b.node for b in loops.buffers if b.is_scalar)
    return (kernel.bodies, kernel.packed, numbers), most


def several(loops: Loops, dialect: Dialect, strict: bool, shared_limit: int) -> Kernel:
    """Return one kernel for maps of one :func:`pattern`, the members of ``loops``."""
    kernels = [Map(m, dialect, strict, shared_limit).run() for m in loops.members]
    alike = kernels[0]
    launches = [k.launches[0] for k in kernels]
    found = pattern(loops.members[0], alike)
    assert found is not None
    capacity = min(max(power_of_two(len(kernels)), 8), found[1])

    # The arguments of a member, in the order of those of the whole.
    inputs = {b.node: i for i, b in enumerate(loops.buffers) if not b.is_output}
    outputs = {b.node: i for i, b in enumerate(loops.buffers) if b.is_output}
    places = [
        [(outputs if b.is_output else inputs)[b.node] for b in m.buffers] for m in loops.members
    ]
    writer = Map(loops.members[0], dataclasses.replace(dialect, block_x="block"), strict, 0)
    body = _body(writer, alike, dialect.block_x, capacity)
    name = f"maps_{hashlib.sha256(body.encode()).hexdigest()[:12]}"
    table, blocks = _table(launches, places, capacity)
    _, scalars, _ = _kinds(launches[0].arguments)
    arguments = (
        Argument("table", f"{name}_table", "table"),
        *(dataclasses.replace(a, value=places[0][a.value]) for a in scalars),
        Argument("packed", "int", "packs"),
    )
    body = dialect.library(body.replace("NAME", name))
    return dataclasses.replace(
        alike,
        snippets=writer.texts.snippets_for(body),
        bodies=(plain(body),),
        launches=(Launch(name, (blocks, 1), (_THREADS, 1), 0, arguments),),
        alignments=(),
        table=table,
    )


def _body(writer: Map, alike: Kernel, block_x: str, capacity: int) -> str:
    """Return the text of a kernel called NAME that looks up the map of a block.

    Parameters
    ----------
    writer : Map
        Of a map whose block is called "block".
    alike : Kernel
        Of one of the maps alone.
    block_x : str
        The number of the block among those of all maps.
    capacity : int
        Rows of the table.
    """
    arrays, scalars, sizes = _kinds(alike.launches[0].arguments)
    entry = writer.entry()
    tests: dict[int, list[str]] = {}
    for number, size in alike.alignments:
        tests.setdefault(size, []).append(f"(u64){writer.loops.buffers[number].name}")
    packed = [f"(({' | '.join(names)}) & {size - 1}) == 0" for size, names in tests.items()]
    lines = [
        "i32 segment = 0;",
        "UNROLL",
        f"for (i32 apart = {power_of_two(capacity) // 2}; apart > 0; apart /= 2) {{",
        "  const i32 next = segment + apart;",
        f"  if (next < {capacity} && table.first[next] <= (i32){block_x}) segment = next;",
        "}",
        f"const Index block = (i32){block_x} - table.first[segment];",
        *(f"{a.type} const {a.name} = table.arrays[segment].{a.name};" for a in arrays),
        *(f"const {a.type} {a.name} = table.sizes[segment].{a.name};" for a in sizes),
        f"const bool packed = {' && '.join(['packs', *packed])};",
    ]
    parameters = [
        "const __grid_constant__ NAME_table table",
        *(f"{a.type} {a.name}" for a in scalars),
        "int packs",
    ]
    return "\n".join(
        [
            f"struct NAME_arrays {{ {' '.join(f'{a.type} {a.name};' for a in arrays)} }};",
            f"struct NAME_sizes {{ {' '.join(f'{a.type} {a.name};' for a in sizes)} }};",
            "struct NAME_table {",
            f"  NAME_arrays arrays[{capacity}];",
            f"  i32 first[{capacity}];",
            f"  NAME_sizes sizes[{capacity}];",
            "};",
            f'extern "C" __global__ void __launch_bounds__({_THREADS}) NAME(',
            *(f"    {p}," for p in parameters[:-1]),
            f"    {parameters[-1]}) {{",
            *("  " + line for line in (*lines, *entry.lines.lines)),
            "}",
            "",
        ]
    )


def _kinds(
    arguments: Sequence[Argument],
) -> tuple[list[Argument], list[Argument], list[Argument]]:
    """Return arrays, numbers of the call, and sizes."""
    buffers = [a for a in arguments if a.kind == "buffer"]
    arrays = [a for a in buffers if "*" in a.type]
    scalars = [a for a in buffers if "*" not in a.type]
    return arrays, scalars, [a for a in arguments if a.kind in ("number", "divisor")]


def _size(a: Argument) -> int:
    return len(number_bytes(a, wide=False))


def _table(
    launches: Sequence[Launch], places: Sequence[Sequence[int]], capacity: int
) -> tuple[Table, int]:
    """Return the rows for the launch of each member, and the number of all blocks."""
    rows, firsts, sizes, blocks = [], [], b"", 0
    for launch, place in zip(launches, places, strict=True):
        arrays, _, numbers = _kinds(launch.arguments)
        rows.append(tuple(place[a.value] for a in arrays))
        firsts.append(blocks)
        size = b"".join(number_bytes(a, wide=False) for a in numbers)
        sizes += size
        blocks += launch.grid[0]
    unused = capacity - len(rows)
    firsts += [_NEVER] * unused
    rest = bytes(8 * len(rows[0]) * unused)
    rest += struct.pack(f"={capacity}i", *firsts) + sizes + bytes(len(size) * unused)
    return Table(tuple(rows), rest + bytes(-len(rest) % 8)), blocks
