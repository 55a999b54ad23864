"""How kernels are started: what the host passes to each entry point of a text.

Nothing here writes or compiles a text, so that what was compiled before is started without loading
what does.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass


@dataclass(frozen=True)
class Argument:
    """A parameter of a kernel and what the host passes for it.

    ``kind`` is "buffer" (``value`` is its place among the arguments of the call), "number" (an
    int), "divisor" (an int), "packed" (whether accesses of packets are allowed), "scratch" (the
    number of a scratch buffer), or "table" (the kernel's :class:`Table`).
    """

    kind: str
    type: str
    name: str
    value: int = 0


@dataclass(frozen=True)
class Launch:
    """An entry point of a text and how it is started."""

    name: str
    grid: tuple[int, int]
    block: tuple[int, int]
    shared: int
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Table:
    """What several maps in one launch are passed: addresses of the arrays of each, then the rest.

    Attributes
    ----------
    arrays : tuple of tuple of int
        For each map the places of its arrays among the arguments of the call.
    rest : bytes
        What comes after their addresses.
    """

    arrays: tuple[tuple[int, ...], ...]
    rest: bytes


@dataclass(frozen=True, kw_only=True)
class Launches:
    """How a kernel is started.

    Attributes
    ----------
    wide : bool
        Whether indices have 64 bits.
    launches : tuple of Launch
        In order.
    scratch : tuple of int
        Bytes of each scratch buffer.
    packed : bool
        Whether packets are aligned, as far as sizes tell.
    alignments : tuple of (int, int)
        Arguments of the call and the number of bytes that their addresses must be multiples of for
        accesses of packets.
    table : Table or None
        Of a kernel that runs several maps.
    """

    wide: bool
    launches: tuple[Launch, ...]
    scratch: tuple[int, ...]
    packed: bool
    alignments: tuple[tuple[int, int], ...]
    table: Table | None = None


def number_bytes(argument: Argument, *, wide: bool) -> bytes:
    """Return what the host passes for a "number" or a "divisor"."""
    n = argument.value
    if argument.kind == "number":
        return struct.pack("=q" if wide else "=i", n)
    if wide:
        return struct.pack("=q", n)
    # Granlund and Montgomery, "Division by invariant integers using multiplication", 1994: for
    # 0 <= a < 2**31, a // n is (high word of a * factor, plus a) >> shift.
    shift = (n - 1).bit_length()
    factor = (2**32 * (2**shift - n)) // n + 1
    return struct.pack("=III", n, factor, shift)
