"""Scans of rows that stay in registers: the order of ``kernels.scan``, and its text.

A thread combines the elements of each of its pieces, a warp the pieces that lie side by side, and
then one warp what these come to, tile by tile, as the library's own kernel does for arrays of this
type and shape: equal inputs give the bits of an operation that runs by itself. How many threads
share a row does not matter to that order, if they are whole warps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rtxarr.dtypes import is_half
from rtxarr.polygraph._loops import Accumulator, Scan
from rtxarr.polygraph.codegen import _operations as ops
from rtxarr.polygraph.codegen._dialects import Dialect
from rtxarr.polygraph.codegen._reductions import extreme, reduction
from rtxarr.polygraph.codegen._text import BATCH, Lines

_HELD = 32  # registers of a thread for what stays of a row
SLOT = 16  # bytes for what a warp's pieces come to, whatever its type
_DTYPES = "float16 bfloat16 float32 float64 complex64 complex128 int64 uint64".split()
_OF_EXTREMA = [*_DTYPES, "int8", "int16", "int32", "uint8", "uint16", "uint32"]


class Order(NamedTuple):
    """In which order the elements of a row are combined.

    Attributes
    ----------
    width : int
        Elements of a piece.
    lanes : int
        Threads that combine pieces side by side: a warp, or all that have a short row.
    ends : int
        What they come to in a tile.
    tiles : int
        Of a row; each begins with what the one before it ends with.
    pieces : int
        Of a row.
    loose : bool
        Whether pieces begin at multiples of 16 bytes though rows do not.
    in_chunks : bool
        Whether the library cuts rows for several blocks, which is another order.
    """

    width: int
    lanes: int
    ends: int
    tiles: int
    pieces: int
    loose: bool
    in_chunks: bool


@functools.cache
def order_of(dtype: np.dtype, rows: int, cols: int) -> Order:
    """Return the order of an array that begins at a multiple of 16 bytes."""
    from rtxarr.kernels.scan import cut, row_plan

    if dtype.kind in "iu" and dtype.itemsize < 4:  # in a register each; the library widens them
        dtype = np.dtype(np.int32)
    has_wide = is_half(dtype) or dtype == np.float32
    wide = has_wide and cols * dtype.itemsize % 16 == 0
    plan = row_plan(cols, dtype, wide, has_wide)
    n_tiles, n_chunks = cut(cols, rows, plan)
    lanes = min(plan.lanes, 32)
    pieces = -(-(cols + (plan.width - 1) * plan.loose) // plan.width)
    ends = plan.chunks * plan.lanes // lanes
    return Order(
        plan.width, lanes, ends, n_tiles * n_chunks, pieces, plan.loose, n_chunks > 1
    )  # fmt: skip


def deal(words: int, order: Order) -> tuple[int, int] | None:
    """Return the threads of a row and the pieces of each, of so many registers an element, or None.

    The threads of a short row are those of the order.
    """
    # So many registers for few threads; of more, each has fewer beside them.
    for held, most in (_HELD, 256), (_HELD // 2, 1024), (3 * _HELD // 4, 1024), (_HELD, 1024):
        batch = held // (words * order.width) // BATCH * BATCH
        if order.lanes < 32:
            needed = -(-order.pieces // (order.lanes * BATCH)) * BATCH
            if needed <= batch:
                return order.lanes, needed
        elif batch:
            threads = -(-order.pieces // (32 * batch)) * 32
            if threads <= most:
                return threads, batch
    return None


def refusal(scans: Sequence[tuple[str, np.dtype]], rows: int, cols: int, *, strict: bool) -> str:
    """Return why a kernel cannot contain scans, (operation, dtype), of such rows; "" if it can."""
    for op, dtype in scans:
        known = _OF_EXTREMA if op in ("cumulative_max", "cumulative_min") else _DTYPES
        if dtype.name not in known or (op != "cumulative_sum" and dtype.kind == "c"):
            return f"there are no kernels with {op} of {dtype}"
    orders = {order_of(dtype, rows, cols) for _, dtype in scans}
    if len(orders) > 1:
        return "a scan of another type in the kernel deals rows out otherwise"
    (order,) = orders
    if strict and order.in_chunks and any(dtype.kind not in "iu" for _, dtype in scans):
        return f"{rows} rows of {cols} are scanned in chunks, by several blocks each"
    if deal(sum(max(dtype.itemsize, 4) // 4 for _, dtype in scans), order) is None:
        return f"rows of {cols} do not stay on a processor"
    return ""


def nothing(scan: Scan) -> str:
    """Return what leaves the other operand as it is."""
    kind, value = ops.kind(scan.dtype), ops.value(scan.dtype)
    if scan.op == "prod":
        return f"({value})1"
    if scan.op in ("max", "min"):
        return extreme(scan.dtype, least=scan.op == "max")
    if kind == "c":
        return f"{value}{{-0.0f, -0.0f}}"
    return f"({value})0" if kind in "iu" else f"({value})-0.0f"


def write(
    out: Lines, d: Dialect, scan: Scan, order: Order, batch: int, place: str, *, strict: bool
) -> None:
    """Write what makes running totals of ``name_at``, a thread's pieces; all threads run it.

    ``place`` says where memory for it begins: ``SLOT`` bytes for each piece of each warp.
    """
    width, lanes = order.width, order.lanes
    r = reduction(Accumulator(scan.name, scan.op, scan.of, scan.dtype, scan.dtype))
    at, back = f"{scan.name}_at[j]", "+" if scan.backwards else "-"

    def within() -> None:
        """Combine ``value`` with those of the lanes before; ``other`` is what lies before it."""
        with out.block("for (int apart = 1; apart < together; apart *= 2)"):
            out(f"const {r.type} other = #from_lane(value, (own {back} apart) & 31);")
            out(f"if (lane >= apart) value = {r.combine('other', 'value')};")
        out(f"{r.type} other = #from_lane(value, (own {back} 1) & 31);")
        out(f"if (lane == 0) other = {nothing(scan)};")

    def each_end() -> str:
        i = "ends - 1 - i" if scan.backwards else "i"
        out(f"const int e = tile * ends + {i};")
        return "if (i < ends && e < count)"

    with out.block():
        out(f"const int together = {lanes}, warps = threads / together;")
        out("const int warp = thread / together, in_warp = thread % together;")
        out(f"const int own = ({d.thread_y} * threads + thread) % 32;")
        out(f"const int lane = {'together - 1 - in_warp' if scan.backwards else 'in_warp'};")
        out(f"const int count = {batch} * warps, each = (ends + together - 1) / together;")
        out(f"SHARED {r.type}* const totals = (SHARED {r.type}*)(shared_memory + {place})")
        out(f"    + {d.thread_y} * count;")
        out(f"{r.type} before[{batch}];")
        with out.unrolled("j", batch):
            if width > 1:
                with out.unrolled("i", width - 1):
                    k, last = ("{} - i", "k + 1") if scan.backwards else ("i + 1", "k - 1")
                    out(f"const int k = {k.format(width - 2)};")
                    out(f"{at}[k] = {r.combine(f'{at}[{last}]', f'{at}[k]')};")
            out(f"{r.type} value = {at}[{0 if scan.backwards else width - 1}];")
            within()
            out("before[j] = other;")
            out("if (lane == together - 1) totals[j * warps + warp] = value;")
        out("BARRIER();")
        with out.block("if (warp == 0)"):
            out(f"{r.type} carried = {nothing(scan)};")
            with out.block("for (int t = 0; t < tiles; ++t)"):
                out(f"const int tile = {'tiles - 1 - t' if scan.backwards else 't'};")
                out(f"{r.type} value = {nothing(scan)};")
                with out.block("for (int i = lane * each; i < (lane + 1) * each; ++i)"):
                    test = each_end()
                    out(f"{test} value = {r.combine('value', 'totals[e]')};")
                within()
                out(f"value = {r.combine('carried', 'other')};")
                with out.block("for (int i = lane * each; i < (lane + 1) * each; ++i)"):
                    test = each_end()
                    with out.block(test):
                        out(f"const {r.type} total = {r.combine('value', 'totals[e]')};")
                        out("totals[e] = value;")
                        out("value = total;")
                last = "own - in_warp" if scan.backwards else "own - in_warp + together - 1"
                out(f"carried = #from_lane(value, {last});")
        out("BARRIER();")
        with out.unrolled("j", batch):
            out(f"const {r.type} first = {r.combine('totals[j * warps + warp]', 'before[j]')};")
            with out.unrolled("k", width):
                total = r.combine("first", f"{at}[k]")
                if strict and ops.kind(scan.dtype) == "h":
                    total = ops.rounded(total, scan.dtype)
                out(f"{at}[k] = {total};")
