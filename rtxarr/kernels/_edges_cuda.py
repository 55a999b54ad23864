"""GPU kernels between nodes and edges, and the softmax over the edges of a node.

Arrays are flat; numbers of edges and heads are in the order of the edges' numbers.
"""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._arithmetic import arithmetic
from rtxarr.kernels._heads import Plan, combine, heads_of, leaky
from rtxarr.kernels._rows import add, bounded
from rtxarr.kernels._vector import access


@functools.cache
def dots(dtype: np.dtype, plan: Plan, gated: bool, both: bool, numbered: bool):
    """Return the kernel of the inner product of each edge's rows ``src`` and ``dst``.

    If ``gated``, the sum of ``dst``, and of ``src`` if ``both``, times the slope of the leaky ReLU
    at the sum of the keys.
    """
    _, scalar, _, store_one, _ = access(dtype, wide=False)
    begin, fetch, _, _, total, _ = heads_of(dtype, plan)
    (n_heads, n_features), slope_at = plan[:2], leaky(scalar)
    n_rows = 1 + (gated and both)
    size, unroll = plan.kept, plan.unroll(n_rows, dtype)
    n_near, n_key = unroll * size, size if gated else 1
    n_keys_near = unroll * n_key
    from_src, zero = both or not gated, scalar(0)

    @bounded(plan.threads)
    def kernel(
        starts, lengths, rows, n_pieces, indices, ids, src, dst, key_src, key_dst, out, slope
    ):
        item, head = begin()
        if item >= rows.size or head >= n_heads:
            return
        own = cuda.local.array(size, scalar)
        key = cuda.local.array(n_key, scalar)
        near = cuda.local.array(n_near, scalar)
        keys = cuda.local.array(n_keys_near, scalar)
        first = starts[item]
        stop = first + lengths[item]
        at_row = (np.int64(rows[item]) * n_heads + head) * n_features
        fetch(dst, at_row, own, 0)
        if gated:
            fetch(key_dst, at_row, key, 0)
        while first < stop:
            for u in range(unroll):
                node = np.int64(indices[min(first + u, stop - 1)]) * n_heads + head
                if from_src:
                    fetch(src, node * n_features, near, u * size)
                if gated:
                    fetch(key_src, node * n_features, keys, u * size)
            for u in range(unroll):
                found = zero
                for i in range(size):
                    if gated:
                        value = own[i] + near[u * size + i] if from_src else own[i]
                        found += value * slope_at(key[i] + keys[u * size + i], slope)
                    else:
                        found += own[i] * near[u * size + i]
                found = total(found)
                if first + u < stop and cuda.threadIdx.x == 0:
                    number = np.int64(ids[first + u] if numbered else first + u)
                    store_one(out, number * n_heads + head, (found,))
            first += unroll

    return kernel


@functools.cache
def gated_sums(dtype: np.dtype, plan: Plan, numbered: bool):
    """Return the kernel that sums edges' values times the slopes at the sum of the keys.

    Of pieces of long rows it leaves the sums in ``sums``.
    """
    _, scalar, load_one, _, _ = access(dtype, wide=False)
    begin, fetch, put, put_sums, *_ = heads_of(dtype, plan)
    (n_heads, n_features), slope_at = plan[:2], leaky(scalar)
    size, unroll = plan.kept, plan.unroll(1, dtype)
    n_near, zero = unroll * size, scalar(0)

    @bounded(plan.threads)
    def kernel(
        starts, lengths, rows, n_pieces, indices, ids, values, key_src, key_dst, out, sums, slope
    ):
        item, head = begin()
        if item >= rows.size or head >= n_heads:
            return
        key = cuda.local.array(size, scalar)
        held = cuda.local.array(size, scalar)
        near = cuda.local.array(n_near, scalar)
        first = starts[item]
        stop = first + lengths[item]
        at_row = (np.int64(rows[item]) * n_heads + head) * n_features
        fetch(key_dst, at_row, key, 0)
        for i in range(size):
            held[i] = zero
        while first < stop:
            for u in range(unroll):
                node = np.int64(indices[min(first + u, stop - 1)]) * n_heads + head
                fetch(key_src, node * n_features, near, u * size)
            for u in range(unroll):
                if first + u < stop:
                    number = np.int64(ids[first + u] if numbered else first + u)
                    value = load_one(values, number * n_heads + head)[0]
                    for i in range(size):
                        held[i] += value * slope_at(key[i] + near[u * size + i], slope)
            first += unroll
        if item < n_pieces:
            put_sums(sums, (item * n_heads + head) * n_features, held)
        else:
            put(out, at_row, held)

    return kernel


# ------------------------------------------------------------------------------------ softmax


@functools.cache
def softmax(dtype: np.dtype, plan: Plan, numbered: bool):
    """Return the kernels ``(whole, rest)`` of the softmax over each row's edges, head by head.

    The first takes whole rows, and leaves the largest logit and the sum of the exponentials of
    pieces of long ones in ``tops``. These joined, the second finishes the pieces: ``tops`` then
    has the two numbers of each row. The threads of a head take edges in turn.
    """
    _, scalar, load_one, store_one, _ = access(dtype, wide=False)
    begin, n_heads, lanes = heads_of(dtype, plan).begin, plan.n_heads, plan.lanes
    larger, _, exp, _, _ = arithmetic(dtype)
    largest_of, total_of = combine(larger, scalar, plan), combine(add, scalar, plan)
    zero, lowest = scalar(0), scalar(-np.inf)

    @cuda.jit(device=True)
    def write(first, stop, head, logits, ids, out, top, denominator):
        shift = top if top > lowest else zero
        while first < stop:
            at = np.int64(ids[first] if numbered else first) * n_heads + head
            share = exp(load_one(logits, at)[0] - shift)
            store_one(out, at, (share / denominator if denominator != zero else zero,))
            first += lanes

    @bounded(plan.threads)
    def whole(starts, lengths, rows, n_pieces, ids, logits, out, tops):
        item, head = begin()
        if item >= rows.size or head >= n_heads:
            return
        first = starts[item] + cuda.threadIdx.x
        stop = starts[item] + lengths[item]
        top, denominator, at = lowest, zero, first
        while at < stop:
            number = np.int64(ids[at] if numbered else at)
            logit = load_one(logits, number * n_heads + head)[0]
            above = larger(top, logit)
            shift = above if above > lowest else zero
            denominator = denominator * exp(top - shift) + exp(logit - shift)
            top = above
            at += lanes
        above = largest_of(top)
        shift = above if above > lowest else zero
        denominator = total_of(denominator * exp(top - shift))
        if item >= n_pieces:
            write(first, stop, head, logits, ids, out, above, denominator)
        elif cuda.threadIdx.x == 0:
            piece = item * n_heads + head
            tops[2 * piece], tops[2 * piece + 1] = above, denominator

    @bounded(plan.threads)
    def rest(starts, lengths, rows, n_pieces, ids, logits, out, tops):
        item, head = begin()
        if item >= n_pieces or head >= n_heads:
            return
        first = starts[item] + cuda.threadIdx.x
        stop = starts[item] + lengths[item]
        unit = np.int64(rows[item]) * n_heads + head
        write(first, stop, head, logits, ids, out, tops[2 * unit], tops[2 * unit + 1])

    return whole, rest


@functools.cache
def softmax_gradient(dtype: np.dtype, plan: Plan, numbered: bool):
    """Return the kernels ``(whole, rest)`` of its gradient, from the result and its gradient.

    ``sums`` of the first are the sums of their products over pieces, and of the second over rows.
    """
    _, scalar, load_one, store_one, _ = access(dtype, wide=False)
    begin, n_heads, lanes = heads_of(dtype, plan).begin, plan.n_heads, plan.lanes
    total_of, zero = combine(add, scalar, plan), scalar(0)

    @cuda.jit(device=True)
    def write(first, stop, head, grad, out, ids, of_logits, total):
        while first < stop:
            at = np.int64(ids[first] if numbered else first) * n_heads + head
            value = load_one(out, at)[0] * (load_one(grad, at)[0] - total)
            store_one(of_logits, at, (value,))
            first += lanes

    @bounded(plan.threads)
    def whole(starts, lengths, rows, n_pieces, ids, grad, out, of_logits, sums):
        item, head = begin()
        if item >= rows.size or head >= n_heads:
            return
        first = starts[item] + cuda.threadIdx.x
        stop = starts[item] + lengths[item]
        total, at = zero, first
        while at < stop:
            number = np.int64(ids[at] if numbered else at) * n_heads + head
            total += load_one(out, number)[0] * load_one(grad, number)[0]
            at += lanes
        total = total_of(total)
        if item >= n_pieces:
            write(first, stop, head, grad, out, ids, of_logits, total)
        elif cuda.threadIdx.x == 0:
            sums[item * n_heads + head] = total

    @bounded(plan.threads)
    def rest(starts, lengths, rows, n_pieces, ids, grad, out, of_logits, sums):
        item, head = begin()
        if item >= n_pieces or head >= n_heads:
            return
        first = starts[item] + cuda.threadIdx.x
        stop = starts[item] + lengths[item]
        total = sums[np.int64(rows[item]) * n_heads + head]
        write(first, stop, head, grad, out, ids, of_logits, total)

    return whole, rest


# -------------------------------------------------------------- nodes and a vector of each head


@functools.cache
def head_dots(dtype: np.dtype, plan: Plan):
    """Return the kernel of the inner products of nodes' heads with two vectors of each head."""
    _, scalar, _, _, _ = access(dtype, wide=False)
    begin, fetch, _, _, _, total = heads_of(dtype, plan)
    (n_heads, n_features), size, zero = plan[:2], plan.kept, scalar(0)

    @bounded(plan.threads)
    def kernel(x, first_vector, second_vector, first_out, second_out, n_nodes):
        node, head = begin()
        if node >= n_nodes or head >= n_heads:
            return
        own = cuda.local.array(size, scalar)
        vector = cuda.local.array(size, scalar)
        unit = node * n_heads + head
        fetch(x, unit * n_features, own, 0)
        fetch(first_vector, head * n_features, vector, 0)
        a = zero
        for i in range(size):
            a += own[i] * vector[i]
        fetch(second_vector, head * n_features, vector, 0)
        b = zero
        for i in range(size):
            b += own[i] * vector[i]
        a, b = total(a), total(b)
        if cuda.threadIdx.x == 0:
            first_out[unit], second_out[unit] = a, b

    return kernel


@functools.cache
def head_sums(dtype: np.dtype, plan: Plan):
    """Return the kernel that sums nodes' heads times two numbers of each, some nodes a block.

    Nodes without a second number have no part in the second sum.

    ``parts`` has a row for each of a block's items, with the heads of the first sum and those of
    the second.
    """
    _, scalar, _, _, _ = access(dtype, wide=False)
    begin, fetch, _, put_sums, *_ = heads_of(dtype, plan)
    (n_heads, n_features), size, items = plan[:2], plan.kept, plan.items
    zero = scalar(0)

    @bounded(plan.threads)
    def kernel(x, first_weights, second_weights, parts, n_nodes):
        node, head = begin()
        if head >= n_heads:
            return
        own = cuda.local.array(size, scalar)
        a = cuda.local.array(size, scalar)
        b = cuda.local.array(size, scalar)
        for i in range(size):
            a[i] = zero
            b[i] = zero
        part = (2 * node * n_heads + head) * n_features
        while node < n_nodes:
            unit = node * n_heads + head
            fetch(x, unit * n_features, own, 0)
            for i in range(size):
                a[i] += first_weights[unit] * own[i]
            if unit < second_weights.size:
                for i in range(size):
                    b[i] += second_weights[unit] * own[i]
            node += cuda.gridDim.x * items
        put_sums(parts, part, a)
        put_sums(parts, part + n_heads * n_features, b)

    return kernel
