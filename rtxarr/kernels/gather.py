"""Reductions over gathered rows on a GPU: sums, extrema and the like over the edges of a graph."""

from __future__ import annotations

from typing import Any

from rtxarr import _device
from rtxarr._device import _SIMULATING, launch_planned
from rtxarr.dtypes import accumulator
from rtxarr.kernels._dense import _address, packed

__all__ = ["gather_reduce"]

# Threads that share a row at most.
_LANES = 4 if _SIMULATING else 128


def gather_reduce(
    kind: str,
    x: Any,
    indptr: Any,
    indices: Any,
    levels: Any,
    *,
    end: str = "plain",
    own: Any = None,
    extra: Any = None,
    order: Any = None,
    n_heads: int = 1,
    empty: float = 0.0,
    dtype: Any = None,
) -> Any:
    """Reduce, for each row ``i`` of the result, over ``s`` in ``indices[indptr[i]:indptr[i + 1]]``.

    Parameters
    ----------
    kind : str
        "sum", "max" or "min" of ``x[s]``; the sum of ``x[s]`` times a factor of its entry
        ("weighted") or of ``s`` ("scaled"); of ``(x[s] - own[i]) ** 2`` ("squares"); of 1 where
        ``x[s]`` is ``own[i]`` ("ties") and of ``extra[s]`` there ("matched"), element by element
        and a NaN being one; of ``x[s] * (own[i] - extra[s])`` ("difference"); of products without
        their factor ``own[i]``, see :func:`rtxarr.kernels.product.without`, of numbers ``x[s]`` and
        codes ``extra[s]`` ("others"). NaN wins in "max" and "min".
    x : array of a real floating dtype, shape (n_values, n_features), on a GPU
        Half types are accumulated in float32.
    indptr : array of int64, shape (n_rows + 1,)
    indices : array of int32 or int64, shape (n_entries,)
    levels : sequence of Level
        How the rows are dealt out: ``rtxarr.geom._bins.deal_out(indptr)``.
    end : {"plain", "mean", "share", "filled", "biased"}
        What becomes of a row's total: "mean" divides it by the number of entries, at least 1;
        "share" gives ``extra[i]`` divided by it, or by 1 where it is less; "filled" gives ``empty``
        where there are no entries; "biased" adds ``own``.
    own : array, shape (n_rows, n_features), for the kinds that name it
        For "biased" of shape (n_features,).
    extra : array, for the kinds that name it
        Shape (n_values, n_features), or (n_rows, n_features) for "share", or (n_values,) for
        "scaled"; for "weighted" (n_entries,), or (n_entries, n_heads).
    order : array of int64, shape (n_entries,), optional
        The factor of entry ``j`` for "weighted" is ``extra[order[j]]``.
    n_heads : int, default 1
        Parts of equal size that the features come in, with a factor each for "weighted".
    empty : float, for "filled"
    dtype : dtype, default that of ``x``

    Returns
    -------
    array of ``dtype``, shape (n_rows, n_features)
        Without entries 0, or the infinity that loses in "max" and "min".

    Notes
    -----
    Entries are taken in order, those of long rows piece by piece: equal inputs give equal bits.
    Types may differ, but float64 goes with float64 alone. No index is checked.
    """
    n_rows, n_features = indptr.shape[0] - 1, x.shape[1]
    out = _device.empty(indptr, (n_rows, n_features), x.dtype if dtype is None else dtype)
    if not out.size:
        return out
    scalar = accumulator(x.dtype)
    x = packed(x)
    own, extra = None if own is None else packed(own), None if extra is None else packed(extra)
    gathered, width, pointers, parts = True, None, indices, x
    if len(levels) > 1:  # all go by the first
        width = _width(kind, n_heads, x, own, extra, out)
    numbers = n_features, n_heads, n_features // n_heads, scalar.type(empty)
    for level in levels:
        joined, n = parts, level.n_pieces * n_features
        parts = _device.empty(indptr, (n,), scalar) if n else _device.nothing(indptr, scalar)
        flags = gathered, order is not None, own is not None, extra is not None
        given = (  # what is left out is not read
            indptr if order is None else order, joined,
            indptr if own is None else own, indptr if extra is None else extra,
        )  # fmt: skip
        arguments = (*level, pointers, *given, out, parts, *numbers)
        launch_planned(_reduction, (kind, end, *flags, n_heads, width), arguments)
        # What is left is to join the pieces.
        kind = kind if kind in ("max", "min") else "sum"
        gathered, pointers, order, own = False, indptr, None, own if end == "biased" else None
        extra = extra if end == "share" else None
    return out


def _reduction(options, args):
    """Choose the kernel of a level, the blocks and the block."""
    from rtxarr.kernels._gather_cuda import Types, reduction

    kind, end, gathered, ordered, has_own, has_extra, n_heads, width = options
    _, _, rows, _, _, _, x, own, extra, out = args[:10]
    own, extra = own if has_own else None, extra if has_extra else None
    width = width or _width(kind, n_heads, x, own, extra, out)
    block = _block(out.shape[1], width)
    types = Types(*(None if a is None else a.dtype for a in (x, own, extra, out)))
    more = {"ordered": ordered, "headed": n_heads > 1} if gathered else {}
    kernel = reduction(kind, end, width, types, gathered=gathered, **more)
    return kernel, -(-rows.shape[0] // block[1]), block


def _width(kind: str, n_heads: int, x: Any, own: Any, extra: Any, out: Any) -> int:
    """Give how many neighbours to read at once, where all arrays of rows allow it."""
    sizes = out.shape[1], out.shape[1] // n_heads
    rows = [x, own, out, None if kind in ("weighted", "scaled") else extra]
    width = 16 // x.dtype.itemsize
    while width > 1 and not (
        all(n % width == 0 for n in sizes)
        and all(_address(a) % min(16, width * a.itemsize) == 0 for a in rows if a is not None)
    ):
        width //= 2
    return width


def _block(n_features: int, width: int) -> tuple[int, int]:
    """Give the block whose threads along x share a row; y runs over rows."""
    from rtxarr.kernels._gather_cuda import THREADS

    n_pieces = -(-n_features // width)
    n_rounds = -(-n_pieces // _LANES)
    lanes = -(-n_pieces // n_rounds)
    return lanes, THREADS // lanes
