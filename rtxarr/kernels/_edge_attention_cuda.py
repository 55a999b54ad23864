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
from rtxarr.kernels._heads import (
    Plan,
    element,
    exponential,
    heads_of,
    keeps,
    leaky,
    near_of,
    place_of,
    widest,
)
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
    far : bool
        Whether the numbers of nodes are int64, not int32.
    """

    kind: str
    nodes: bool = True
    edges: bool = False
    numbered: bool = False
    drops: bool = False
    far: bool = False

    @property
    def node_type(self) -> type:
        return np.int64 if self.far else np.int32

    @property
    def n_found(self) -> int:
        """How many numbers of a destination and a head the backward passes share."""
        return 4 if self.kind == "additive" and self.nodes else 2

    @property
    def rows(self) -> bool:
        """Whether edges have rows of features like the nodes, not numbers."""
        return self.edges and self.kind != "additive"


@functools.cache
def forward(dtype: np.dtype, plan: Plan, variant: Variant):
    """Return the kernel that takes whole rows, and the pieces of long ones.

    Of a piece it leaves the sum over its edges in ``sums``, and in ``tops`` the shift of the
    exponentials and their sum: :func:`join` makes rows of them.

    All threads of a warp go round as often as its longest item needs, so that they can add up
    together. Where an item has no more edges they take its last one with a score of ``-inf``.
    """
    kind, nodes, edges, numbered, drops, _ = variant
    _, scalar, load_one, _, _ = access(dtype, wide=False)
    begin, _, put, put_sums, _, total = heads_of(dtype, plan)
    n_words, word, place_of_part, fetch, unpack = near_of(dtype, plan)
    larger, exp, longest_of = arithmetic(dtype).larger, exponential(dtype), widest(plan)
    slope_at, keep, n_heads, n_features = leaky(scalar), keeps(), *plan[:2]
    mlp, dot, edge_rows = kind == "mlp", kind == "dot", variant.rows
    size, unroll = plan.kept, plan.unroll(1 + dot + edge_rows, dtype)
    n_own, n_weights = (size if wanted else 1 for wanted in (mlp or dot, mlp))
    n_rows = unroll * n_words
    n_key_rows, n_edge_rows = (n_rows if wanted else 1 for wanted in (dot, edge_rows))
    n_theirs, node_type = size if edge_rows else 1, variant.node_type
    zero, one, half, lowest = scalar(0), scalar(1), scalar(0.5), scalar(-np.inf)

    @bounded(plan.threads)
    def kernel(
        starts, lengths, rows, n_pieces, indices, ids, src, dst, values, vector, edge, factor,
        out, lse, sums, tops, place, offset, stream, key, threshold, scale,
    ):  # fmt: skip
        item, head = begin()
        live = item < rows.size and head < n_heads
        if not live:
            item, head = np.int64(0), np.int64(0)
        if drops:
            offset, stream, key = offset + place[0], stream + place[1], key + place[2]
        own = cuda.local.array(n_own, scalar)
        at_x = cuda.local.array(n_weights, scalar)  # the weights of x and of its absolute value
        at_size = cuda.local.array(n_weights, scalar)
        value_rows = cuda.local.array(n_rows, word)
        key_rows = cuda.local.array(n_key_rows, word)
        edge_rows_near = cuda.local.array(n_edge_rows, word)
        near = cuda.local.array(size, scalar)
        theirs = cuda.local.array(n_theirs, scalar)  # of an edge
        shares = cuda.local.array(unroll, scalar)
        held = cuda.local.array(size, scalar)
        found = cuda.local.array(unroll, node_type)
        length = lengths[item] if live else np.int32(0)
        start = starts[item] if length > 0 else np.int64(0)
        last, longest = np.int32(max(length - 1, 0)), longest_of(length)
        unit, piece = np.int64(rows[item]) * n_heads + head, item * n_heads + head
        edges_at, ids_at = place_of(indices, start), place_of(ids, start)
        values_at = place_of_part(values, head)
        src_at = place_of_part(src, head) if dot else place_of(src, head)
        edge_at = place_of_part(edge, head) if edge_rows else np.int64(0)
        for i in range(size):
            held[i] = zero
        top, denominator, own_term, first = lowest, zero, zero, np.int32(0)
        if longest > 0:  # without edges nothing is read
            if mlp or dot:
                fetch(dst, place_of_part(dst, head), np.int64(rows[item]), value_rows, 0)
                unpack(value_rows, 0, own)
            elif nodes:
                own_term = dst[unit]
            if mlp:
                fetch(vector, place_of_part(vector, head), np.int64(0), value_rows, 0)
                unpack(value_rows, 0, at_x)
                for i in range(size):
                    at_size[i] = at_x[i] * (half - half * factor)
                    at_x[i] *= half + half * factor
            for u in range(unroll):
                found[u] = element(indices, edges_at, np.int64(min(np.int32(u), last)))
        while first < longest:
            for u in range(unroll):
                fetch(values, values_at, found[u], value_rows, u * n_words)
                at = np.int64(min(np.int32(first + u), last))
                if edge_rows:
                    number = element(ids, ids_at, at) if numbered else start + at
                    fetch(edge, edge_at, number, edge_rows_near, u * n_words)
                if dot:
                    fetch(src, src_at, found[u], key_rows, u * n_words)
                elif not mlp:
                    term = own_term
                    if nodes:
                        term += element(src, src_at, np.int64(found[u]) * n_heads)
                    if edges:
                        number = element(ids, ids_at, at) if numbered else start + at
                        term += load_one(edge, number * n_heads + head)[0]
                    shares[u] = term * slope_at(term, factor)
            for u in range(unroll):  # of the next edges, ahead
                at = np.int64(min(np.int32(first + (unroll + u)), last))
                found[u] = element(indices, edges_at, at)
            above = top
            for u in range(unroll):
                if mlp or dot:
                    unpack(key_rows if dot else value_rows, u * n_words, near)
                    if edge_rows:
                        unpack(edge_rows_near, u * n_words, theirs)
                    term = zero
                    for i in range(size):
                        x = near[i] + theirs[i] if edge_rows else near[i]
                        if dot:
                            term += own[i] * x
                        else:
                            x += own[i]
                            term += at_x[i] * x
                            term += at_size[i] * abs(x)
                    term = total(term)
                    shares[u] = term * factor if dot else term
                if np.int32(first + u) > last or length == 0:
                    shares[u] = lowest
                above = larger(above, shares[u])
            shift = above if above > lowest else zero
            rescale = exp(top - shift)
            top = above
            denominator *= rescale
            for i in range(size):
                held[i] *= rescale
            for u in range(unroll):
                share = exp(shares[u] - shift)
                denominator += share
                if drops:
                    at = np.int64(min(np.int32(first + u), last))
                    number = element(ids, ids_at, at) if numbered else start + at
                    if keep(number * n_heads + head, offset, stream, key, threshold):
                        share *= scale
                    else:
                        share = zero
                unpack(value_rows, u * n_words, near)
                if dot and edge_rows:
                    unpack(edge_rows_near, u * n_words, theirs)
                for i in range(size):
                    held[i] += share * (near[i] + theirs[i] if dot and edge_rows else near[i])
            first = np.int32(first + unroll)
        if not live:
            return
        shift = top if top > lowest else zero
        if item < n_pieces:
            put_sums(sums, piece * n_features, held)
            if cuda.threadIdx.x == 0:
                tops[2 * piece], tops[2 * piece + 1] = top, denominator
            return
        inverse = one / denominator if denominator != zero else zero
        for i in range(size):
            held[i] = held[i] * inverse if denominator != zero else zero
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
