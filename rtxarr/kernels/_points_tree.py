"""A tree over points on the CPU: they follow a Hilbert curve, and boxes are around those nearby.

Points with up to three axes are sorted along a Hilbert curve, and packed: each is four numbers of
one array, up to three coordinates, zeros in place of those that it lacks, and a lower bound of the
point's number. Neighbours on the curve are leaves of a tree. A box around what is below a node is
eight numbers of another array, the lowest of each of the four and the highest, one level after the
other. A search begins at a leaf nearby and goes up, and down to each node whose box may hold what
is nearer than what has been found, or as far with a lower number. A box is no further than its
points, in rounded numbers too, since each operation is monotone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from rtxarr.kernels._points_core import LEAF_BITS, NODE_BITS, TOP_BITS

__all__ = ["Tree", "build_tree", "curves", "follow", "in_threads", "sizes_of"]

# Work of a thread on the CPU, at least: queries, or rows to sort.
_SHARE = 2048


class Curve(NamedTuple):
    """Where a Hilbert curve lies.

    Attributes
    ----------
    lo : NumPy array, shape (3,)
        A corner of the cube that it fills.
    scale : scalar
        Just below ``2**bits`` by the cube's side.
    bits : int
        Of a coordinate, of which a word of a key has room for ``room``.
    room : int
    """

    lo: np.ndarray
    scale: Any
    bits: int
    room: int


class Tree(NamedTuple):
    """Points sorted along a Hilbert curve, batch by batch, and boxes around them.

    Attributes
    ----------
    points : array, shape (4 * n_points,)
    boxes : array
    order : array of int64, shape (n_points,)
        The points' numbers.
    n_leaves, highest : int
        Places for boxes of leaves, each level has a quarter as many as the one below; and the level
        at the top.
    curve : Curve
    keys : array of int64, shape (n_points,)
        Where the points are on it.
    """

    points: np.ndarray
    boxes: np.ndarray
    order: np.ndarray
    n_leaves: int
    highest: int
    curve: Curve
    keys: np.ndarray


def build_tree(x: np.ndarray, batches: np.ndarray, n_batches: int, found: tuple) -> Tree:
    """Build a tree.

    Parameters
    ----------
    x : array of float32 or float64, shape (n_points, n_axes), n_axes up to 3
    batches : array of int64, shape (n_points,)
        The batch of each point, in order.
    n_batches : int
    found : tuple of two NumPy arrays, shape (n_axes,)
        The ends of the points.
    """
    from rtxarr.kernels import _points_njit as host

    n = x.shape[0]
    for curve in curves(x.dtype, n_batches, found):
        order, keys = _along(x, batches, curve)
        # If many are in one place, as where some are far away: look at them more closely.
        if 4 * np.count_nonzero(keys[1:] == keys[:-1]) <= n:
            break
    packed = _pack(x, order)
    count, n_leaves, highest, n_boxes = sizes_of(n)
    boxes, base = np.empty(8 * n_boxes, dtype=x.dtype), 0
    in_threads(host.leaves, count, (packed, boxes))
    for level in range(highest):
        above = base + (n_leaves >> NODE_BITS * level)
        n_below, count = count, -(-count // (1 << NODE_BITS))
        in_threads(host.level, count, (boxes, base, n_below, above))
        base = above
    return Tree(packed, boxes, order, n_leaves, highest, curve, keys)


def curves(dtype: Any, n_batches: int, found: tuple) -> list[Curve]:
    """Return curves through points whose ends were found, a coarse one and a fine one."""
    low, high = (end.astype(np.float64) for end in found)
    lo = np.zeros(3, dtype)
    lo[: low.size] = low
    side, room = float(np.max(high - low)), (63 - max(n_batches - 1, 0).bit_length()) // 3
    return [Curve(lo, _scale(dtype, bits, side), bits, room) for bits in (room, 2 * room)]


def sizes_of(n: int) -> tuple[int, int, int, int]:
    """Return how many leaves ``n`` points have and places there are for them, levels, and boxes."""
    count, highest = -(-n // (1 << LEAF_BITS)), 0
    while count > 1 << TOP_BITS + NODE_BITS * highest:
        highest += 1
    unit = 1 << NODE_BITS * highest
    n_leaves = -(-count // unit) * unit
    return count, n_leaves, highest, sum(n_leaves >> NODE_BITS * i for i in range(highest + 1))


def follow(y: np.ndarray, batches: np.ndarray, tree: Tree) -> tuple:
    """Return queries along the curve, packed, their numbers, and places of points nearby."""
    order, keys = _along(y, batches, tree.curve)
    near = np.clip(np.searchsorted(tree.keys, keys), 0, tree.keys.shape[0] - 1)
    return _pack(y, order), order, near


def _scale(dtype, bits, side):
    scale = 2.0**bits * (1 - 2.0**-20) / side if side > 0 else 0.0
    return dtype.type(min(scale, float(np.finfo(dtype).max)))


def _along(x, batches, curve):
    """Return the order of points along a curve, and their keys in that order."""
    from rtxarr.kernels import _points_njit as host

    n, order = x.shape[0], None
    side = x.dtype.type(2.0**curve.bits)
    for drop in range(0, curve.bits, curve.room):  # the lower bits of coordinates first
        keys = np.empty(n, dtype=np.int64)
        where = (*curve.lo, curve.scale, side, curve.bits, drop, curve.room)
        in_threads(host.keys, n, (x, batches, *where, keys))
        keys = keys if order is None else keys[order]
        step = np.argsort(keys, kind="stable")
        order = step if order is None else order[step]
        keys = keys[step]
    return order, keys


def _pack(x, order):
    from rtxarr.kernels import _points_njit as host

    packed = np.empty(4 * x.shape[0], dtype=x.dtype)
    in_threads(host.pack, x.shape[0], (x, order, packed))
    return packed


def in_threads(loop: Callable, n: int, arguments: tuple, share: int = _SHARE) -> None:
    """Call ``loop(begin, end, *arguments)`` for pieces of ``range(n)``, which are independent."""
    n_threads = min(os.cpu_count() or 1, n // share)
    if n_threads <= 1:
        loop(0, n, *arguments)
        return
    # Several pieces a thread, since some take longer than others.
    bounds = np.linspace(0, n, 4 * n_threads + 1).astype(int).tolist()
    with ThreadPoolExecutor(n_threads) as pool:
        pieces = [
            pool.submit(loop, begin, end, *arguments)
            for begin, end in zip(bounds[:-1], bounds[1:], strict=True)
        ]
        for piece in pieces:
            piece.result()
