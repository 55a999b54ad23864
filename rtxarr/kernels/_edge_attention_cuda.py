"""GPU kernels of attention over edges, forward: softmax and sum in one pass, then the long rows.

Three kinds of scores of the edge from ``j`` to ``i``, for each head:

- "additive": ``leaky_relu(src[j] + dst[i] + edge)``, or ``edge`` alone;
- "mlp": ``vector . leaky_relu(values[j] + dst[i] + edge)``;
- "dot": ``factor * (src[j] + edge) . dst[i]``, where ``edge`` is added to the values too.

Arrays are flat; ``factor`` is the slope of the leaky ReLU or that of the products.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._arithmetic import arithmetic
from rtxarr.kernels._heads import Plan, heads_of, keeps, leaky
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._vector import access


class Variant(NamedTuple):
    """What kernels are specialised in.

    Attributes
    ----------
    kind : str
        Of scores, see above.
    nodes, edges : bool
        Whether additive scores have terms of nodes; whether there is ``edge``.
    numbered : bool
        Whether edges are numbered otherwise than they are stored.
    drops : bool
        Whether weights are dropped.
    """

    kind: str
    nodes: bool = True
    edges: bool = False
    numbered: bool = False
    drops: bool = False

    @property
    def rows(self) -> bool:
        """Whether edges have rows of features like the nodes, not numbers."""
        return self.edges and self.kind != "additive"


@functools.cache
def forward(dtype: np.dtype, plan: Plan, variant: Variant):
    """Return the kernel that takes whole rows, and the pieces of long ones.

    Of a piece it leaves the sum over its edges in ``sums``, and in ``tops`` the shift of the
    exponentials and their sum: :func:`join` makes rows of them.
    """
    kind, nodes, edges, numbered, drops = variant
    _, scalar, load_one, _, _ = access(dtype, wide=False)
    begin, fetch, put, put_sums, total = heads_of(dtype, plan)
    larger, _, exp, _, _ = arithmetic(dtype)
    slope_at, keep, n_heads, n_features = leaky(scalar), keeps(), *plan[:2]
    mlp, dot, edge_rows = kind == "mlp", kind == "dot", variant.rows
    size, unroll = plan.kept, plan.unroll(1 + dot + edge_rows, dtype)
    n_own, n_weights, n_keys = (size if wanted else 1 for wanted in (mlp or dot, mlp, dot))
    n_near, n_keys_near = unroll * size, unroll * n_keys
    n_theirs = n_near if edge_rows else 1
    zero, one, lowest = scalar(0), scalar(1), scalar(-np.inf)

    @bounded(plan.threads)
    def kernel(
        starts, lengths, rows, n_pieces, indices, ids, src, dst, values, vector, edge, factor,
        out, lse, sums, tops, place, offset, stream, key, threshold, scale,
    ):  # fmt: skip
        item, head = begin()
        if item >= rows.size or head >= n_heads:
            return
        if drops:
            offset, stream, key = offset + place[0], stream + place[1], key + place[2]
        own = cuda.local.array(n_own, scalar)
        weights = cuda.local.array(n_weights, scalar)
        near = cuda.local.array(n_near, scalar)
        keys = cuda.local.array(n_keys_near, scalar)
        theirs = cuda.local.array(n_theirs, scalar)  # of edges
        shares = cuda.local.array(unroll, scalar)
        held = cuda.local.array(size, scalar)
        start = starts[item]
        stop = start + lengths[item]
        unit, piece = np.int64(rows[item]) * n_heads + head, item * n_heads + head
        own_term = zero
        if mlp or dot:
            fetch(dst, unit * n_features, own, 0)
        elif nodes:
            own_term = dst[unit]
        if mlp:
            fetch(vector, head * n_features, weights, 0)
        for i in range(size):
            held[i] = zero
        top, denominator = lowest, zero
        first = start
        while first < stop:
            for u in range(unroll):
                at = min(first + u, stop - 1)
                node = np.int64(indices[at]) * n_heads + head
                fetch(values, node * n_features, near, u * size)
                if edge_rows:
                    number = np.int64(ids[at] if numbered else at) * n_heads + head
                    fetch(edge, number * n_features, theirs, u * size)
                if dot:
                    fetch(src, node * n_features, keys, u * size)
                elif not mlp:
                    term = own_term
                    if nodes:
                        term += src[node]
                    if edges:
                        number = np.int64(ids[at] if numbered else at)
                        term += load_one(edge, number * n_heads + head)[0]
                    shares[u] = term * slope_at(term, factor)
            above = top
            for u in range(unroll):
                if mlp or dot:
                    term = zero
                    for i in range(size):
                        at = u * size + i
                        if dot:
                            if edge_rows:
                                keys[at] += theirs[at]
                                near[at] += theirs[at]
                            term += own[i] * keys[at]
                        else:
                            x = own[i] + near[at]
                            if edge_rows:
                                x += theirs[at]
                            term += weights[i] * (x * slope_at(x, factor))
                    term = total(term)
                    shares[u] = term * factor if dot else term
                if first + u >= stop:
                    shares[u] = lowest
                above = larger(above, shares[u])
            shift = above if above > lowest else zero
            rescale = exp(top - shift)
            top = above
            denominator *= rescale
            for i in range(size):
                held[i] *= rescale
            for u in range(unroll):
                if first + u < stop:
                    share = exp(shares[u] - shift)
                    denominator += share
                    if drops:
                        number = np.int64(ids[first + u] if numbered else first + u)
                        number = number * n_heads + head
                        if keep(number, offset, stream, key, threshold):
                            share *= scale
                        else:
                            share = zero
                    for i in range(size):
                        held[i] += share * near[u * size + i]
            first += unroll
        shift = top if top > lowest else zero
        if item < n_pieces:
            put_sums(sums, piece * n_features, held)
            if cuda.threadIdx.x == 0:
                tops[2 * piece], tops[2 * piece + 1] = top, denominator
            return
        inverse = one / denominator if denominator != zero else zero
        for i in range(size):
            held[i] *= inverse
        put(out, unit * n_features, held)
        if cuda.threadIdx.x == 0:
            lse[unit] = shift + math.log(denominator) if denominator != zero else lowest

    return kernel


@functools.cache
def join(dtype: np.dtype, as_pair: bool):
    """Return the kernel that joins pieces, a launch for each further level of items.

    Item ``i`` has the pieces ``starts[i]:starts[i] + lengths[i]`` of the level before; the first
    ``n_pieces`` are pieces again. The threads along x share an item and a head, which the grid
    runs over. ``as_pair``: ``lse`` gets the largest score and the sum of the exponentials of the
    differences from it, for each node and head.
    """
    _, scalar, _, store, _ = access(dtype, wide=False)
    larger, _, exp, _, _ = arithmetic(dtype)
    zero, one, lowest = scalar(0), scalar(1), scalar(-np.inf)

    @cuda.jit
    def kernel(
        starts, lengths, rows, n_pieces, sums, tops, out, lse, next_sums, next_tops, n_heads,
        n_features,
    ):  # fmt: skip
        item, head = np.int64(cuda.blockIdx.x), np.int64(cuda.blockIdx.y)
        begin = starts[item] * n_heads + head
        end = begin + lengths[item] * n_heads
        unit, piece = np.int64(rows[item]) * n_heads + head, item * n_heads + head
        top = lowest
        for part in range(begin, end, n_heads):
            top = larger(top, tops[2 * part])
        shift = top if top > lowest else zero
        denominator = zero
        for part in range(begin, end, n_heads):
            denominator += exp(tops[2 * part] - shift) * tops[2 * part + 1]
        inverse = one / denominator if denominator != zero else zero
        j = np.int64(cuda.threadIdx.x)
        while j < n_features:
            held = zero
            for part in range(begin, end, n_heads):
                held += exp(tops[2 * part] - shift) * sums[part * n_features + j]
            if item < n_pieces:
                next_sums[piece * n_features + j] = held
            else:
                store(out, unit * n_features + j, (held * inverse,))
            j += cuda.blockDim.x
        if cuda.threadIdx.x == 0:
            if item < n_pieces:
                next_tops[2 * piece], next_tops[2 * piece + 1] = top, denominator
            elif as_pair:
                lse[2 * unit], lse[2 * unit + 1] = top, denominator
            else:
                lse[unit] = shift + math.log(denominator) if denominator != zero else lowest

    return kernel


@functools.cache
def join_sums(dtype: np.dtype):
    """Return the kernel that adds pieces of ``width`` numbers up, again a launch for each level.

    The threads along x, and the grid's y, run over the numbers.
    """
    _, scalar, _, store, _ = access(dtype, wide=False)
    zero = scalar(0)

    @cuda.jit
    def kernel(starts, lengths, rows, n_pieces, sums, out, next_sums, width):
        item = np.int64(cuda.blockIdx.x)
        j = np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x
        if j < width:
            held = zero
            start = starts[item]
            for part in range(start, start + lengths[item]):
                held += sums[part * width + j]
            if item < n_pieces:
                next_sums[item * width + j] = held
            else:
                store(out, np.int64(rows[item]) * width + j, (held,))

    return kernel
