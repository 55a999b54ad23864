"""GPU kernels of attention over edges, backward: one pass by destinations, one by sources.

Both make the weights again from the logarithms of their sums, and never add into one place from
several threads. With ``s`` the score of an edge, ``a`` its weight, and ``g`` the gradient of the
row of its destination, ``g . values`` that of the weight, the score's gradient is
``a * (g . values - delta)``, where ``delta = g . out``. The first pass leaves ``delta`` and the
logarithm of each destination side by side, in ``found``.

The gradients of a destination's scores add up to zero. So those at which the leaky ReLU has one
slope give the sum of the others too, and with additive scores the rows of these need not be read:
taken to be most are those whose sign is that of the destination's own term.
"""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._arithmetic import arithmetic
from rtxarr.kernels._edge_attention_cuda import Variant
from rtxarr.kernels._heads import Plan, heads_of, keeps, leaky
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._vector import access


@functools.cache
def by_destinations(dtype: np.dtype, plan: Plan, variant: Variant):
    """Return the kernel that gives the gradients of ``dst``, and of ``edge`` or ``vector``.

    Of pieces of long rows it leaves the sums in ``sums``. Blocks take items in turn, as many as
    there are too many, and leave their part of the vectors' gradient in ``parts``, a row of heads
    for each of their items.
    """
    kind, nodes, edges, numbered, drops = variant
    width, scalar, load_one, _, _ = access(dtype, wide=False)
    begin, fetch, put, put_sums, total = heads_of(dtype, plan)
    exp, n_heads, n_features = arithmetic(dtype).exp, *plan[:2]
    slope_at, keep = leaky(scalar), keeps()
    mlp, dot, edge_rows = kind == "mlp", kind == "dot", variant.rows
    size, n_items = plan.kept, plan.items
    # Four more rows are kept in registers for "mlp", which is much where heads are wide.
    unroll = plan.unroll(1 + dot + edge_rows + (mlp and size > 8), dtype)
    n_own, n_weights, n_keys = (size if wanted else 1 for wanted in (mlp or dot, mlp, dot))
    n_near, n_keys_near = unroll * size, unroll * n_keys
    n_theirs, n_of_theirs = (n_near, size) if edge_rows else (1, 1)
    signed, n_terms = nodes and not (mlp or dot or edges), unroll if nodes else 1
    zero, one, lowest = scalar(0), scalar(1), scalar(-np.inf)

    @bounded(plan.threads)
    def kernel(
        starts, lengths, rows, n_pieces, indptr, indices, ids, src, dst, values, vector, edge,
        factor, grad, out, lse, found, of_dst, of_edge, sums, parts, place, offset, stream, key,
        threshold, scale,
    ):  # fmt: skip
        item, head = begin()
        if head >= n_heads:
            return
        if drops:
            offset, stream, key = offset + place[0], stream + place[1], key + place[2]
        own = cuda.local.array(n_own, scalar)
        weights = cuda.local.array(n_weights, scalar)
        near = cuda.local.array(n_near, scalar)
        keys = cuda.local.array(n_keys_near, scalar)
        theirs = cuda.local.array(n_theirs, scalar)  # of edges
        of_theirs = cuda.local.array(n_of_theirs, scalar)
        up = cuda.local.array(size, scalar)
        held = cuda.local.array(n_own, scalar)
        part = cuda.local.array(n_weights, scalar)
        terms = cuda.local.array(n_terms, scalar)
        for i in range(n_weights):
            part[i] = zero
        if mlp:
            fetch(vector, head * n_features, weights, 0)
        place_of_part = (item * n_heads + head) * n_features
        while item < rows.size:
            row, start = np.int64(rows[item]), starts[item]
            stop = start + lengths[item]
            unit, piece = row * n_heads + head, item * n_heads + head
            fetch(out, unit * n_features, near, 0)
            fetch(grad, unit * n_features, up, 0)
            delta, own_term, of_own_term = zero, zero, zero
            for i in range(size):
                delta += up[i] * near[i]
            delta = total(delta)
            if mlp or dot:
                fetch(dst, unit * n_features, own, 0)
            elif nodes:
                own_term = dst[unit]
            for i in range(n_own):
                held[i] = zero
            mostly_above = own_term > zero
            gain = factor - one if mostly_above else one - factor
            logarithm = lse[unit]
            if start == indptr[row] and cuda.threadIdx.x == 0:
                found[2 * unit], found[2 * unit + 1] = logarithm, delta
            shift = logarithm if logarithm > lowest else zero
            first = start
            while first < stop:
                if signed:
                    for u in range(unroll):
                        node = np.int64(indices[min(first + u, stop - 1)]) * n_heads + head
                        terms[u] = own_term + src[node]
                for u in range(unroll):
                    at = min(first + u, stop - 1)
                    if signed and (terms[u] > zero if mostly_above else terms[u] <= zero):
                        at = start  # any row that is in the cache
                    node = np.int64(indices[at]) * n_heads + head
                    fetch(values, node * n_features, near, u * size)
                    if dot:
                        fetch(src, node * n_features, keys, u * size)
                    if edge_rows:
                        number = np.int64(ids[at] if numbered else at) * n_heads + head
                        fetch(edge, number * n_features, theirs, u * size)
                for u in range(unroll):
                    at = min(first + u, stop - 1)
                    number = np.int64(ids[at] if numbered else at) * n_heads + head
                    term, of_weight = own_term, zero
                    for i in range(size):
                        if dot and edge_rows:
                            near[u * size + i] += theirs[u * size + i]
                        of_weight += up[i] * near[u * size + i]
                    of_weight = total(of_weight)
                    if mlp or dot:
                        for i in range(size):
                            if dot:
                                if edge_rows:
                                    keys[u * size + i] += theirs[u * size + i]
                                term += own[i] * keys[u * size + i]
                            else:
                                x = own[i] + near[u * size + i]
                                if edge_rows:
                                    x += theirs[u * size + i]
                                near[u * size + i] = x  # the values are done with
                                term += weights[i] * (x * slope_at(x, factor))
                        term = total(term)
                        score = term * factor if dot else term
                    else:
                        if signed:
                            term = terms[u]
                        elif nodes:
                            term += src[np.int64(indices[at]) * n_heads + head]
                        if edges:
                            term += load_one(edge, number)[0]
                        score = term * slope_at(term, factor)
                    kept = one
                    if drops:
                        if keep(number, offset, stream, key, threshold):
                            kept = scale
                            of_weight *= scale
                        else:
                            kept = zero
                            of_weight = zero
                    if first + u < stop:
                        weight = exp(score - shift)
                        of_score = weight * (of_weight - delta)
                        if mlp:
                            for i in range(size):
                                x = near[u * size + i]
                                slope = of_score * slope_at(x, factor)
                                held[i] += slope
                                part[i] += slope * x
                                if edge_rows:
                                    of_theirs[i] = slope * weights[i]
                        elif dot:
                            for i in range(size):
                                held[i] += of_score * keys[u * size + i]
                                if edge_rows:
                                    of_theirs[i] = (
                                        of_score * factor * own[i] + weight * kept * up[i]
                                    )
                        if edge_rows:
                            put(of_edge, number * n_features, of_theirs)
                        if signed:
                            if not (term > zero if mostly_above else term <= zero):  # NaN counts
                                of_own_term += of_score * gain
                        elif not (mlp or dot):
                            of_score *= slope_at(term, factor)
                            of_own_term += of_score
                            if edges and cuda.threadIdx.x == 0:
                                of_edge[number] = of_score
                first += unroll
            whole = item >= n_pieces
            if mlp or dot:
                for i in range(size):
                    held[i] *= weights[i] if mlp else factor
                if whole:
                    put(of_dst, unit * n_features, held)
                else:
                    put_sums(sums, piece * n_features, held)
            elif nodes and cuda.threadIdx.x == 0:
                if whole:
                    of_dst[unit] = of_own_term
                else:
                    sums[piece] = of_own_term
            item += cuda.gridDim.x * n_items
        if mlp:
            put_sums(parts, place_of_part, part)

    return kernel


@functools.cache
def by_sources(dtype: np.dtype, plan: Plan, variant: Variant, projected: bool):
    """Return the kernel that gives the gradients of ``values`` and ``src``.

    Its rows are those of the graph turned round: ``row`` is a source, ``indices`` its
    destinations. If ``projected``, ``src`` and ``dst`` are the products of ``values`` with
    ``vector`` and ``vector_dst``, whose part in its gradient is added to the rest; the gradient
    ``of_dst`` of the second is known. The first sources are the destinations.
    """
    kind, nodes, edges, numbered, drops = variant
    width, scalar, load_one, _, _ = access(dtype, wide=False)
    begin, fetch, put, put_sums, total = heads_of(dtype, plan)
    exp, n_heads, n_features = arithmetic(dtype).exp, *plan[:2]
    slope_at, keep = leaky(scalar), keeps()
    mlp, dot, edge_rows = kind == "mlp", kind == "dot", variant.rows
    size, unroll = plan.kept, plan.unroll(1 + (mlp or dot) + edge_rows, dtype)
    n_keys, n_weights = (size if wanted else 1 for wanted in (dot, mlp))
    n_other = size if mlp or dot else 1
    n_near, n_others_near = unroll * size, unroll * n_other
    n_theirs = n_near if edge_rows else 1
    zero, lowest = scalar(0), scalar(-np.inf)

    @bounded(plan.threads)
    def kernel(
        starts, lengths, rows, n_pieces, indptr, indices, ids, src, dst, values, vector, edge,
        factor, grad, found, of_dst, vector_dst, of_values, of_src, sums, sums_src, place, offset,
        stream, key, threshold, scale,
    ):  # fmt: skip
        item, head = begin()
        if item >= rows.size or head >= n_heads:
            return
        if drops:
            offset, stream, key = offset + place[0], stream + place[1], key + place[2]
        own = cuda.local.array(size, scalar)
        own_key = cuda.local.array(n_keys, scalar)
        weights = cuda.local.array(n_weights, scalar)
        near = cuda.local.array(n_near, scalar)
        others = cuda.local.array(n_others_near, scalar)
        theirs = cuda.local.array(n_theirs, scalar)  # of edges
        held = cuda.local.array(size, scalar)
        held_key = cuda.local.array(n_keys, scalar)
        row, start = np.int64(rows[item]), starts[item]
        stop = start + lengths[item]
        unit, piece = row * n_heads + head, item * n_heads + head
        fetch(values, unit * n_features, own, 0)
        own_term, of_own_term = zero, zero
        if mlp:
            fetch(vector, head * n_features, weights, 0)
        elif dot:
            fetch(src, unit * n_features, own_key, 0)
        elif nodes:
            own_term = src[unit]
        for i in range(size):
            held[i] = zero
        for i in range(n_keys):
            held_key[i] = zero
        first = start
        while first < stop:
            for u in range(unroll):
                at = min(first + u, stop - 1)
                node = np.int64(indices[at]) * n_heads + head
                fetch(grad, node * n_features, near, u * size)
                if mlp or dot:
                    fetch(dst, node * n_features, others, u * size)
                if edge_rows:
                    number = np.int64(ids[at] if numbered else at) * n_heads + head
                    fetch(edge, number * n_features, theirs, u * size)
            for u in range(unroll):
                at = min(first + u, stop - 1)
                node = np.int64(indices[at]) * n_heads + head
                number = np.int64(ids[at] if numbered else at) * n_heads + head
                logarithm, delta = found[2 * node], found[2 * node + 1]
                term, of_weight = own_term, zero
                if mlp or dot:
                    for i in range(size):
                        x = own_key[i] if dot else own[i] + others[u * size + i]
                        if edge_rows:
                            x += theirs[u * size + i]
                        if dot:
                            term += x * others[u * size + i]
                        else:
                            others[u * size + i] = x
                            term += weights[i] * (x * slope_at(x, factor))
                    term = total(term)
                    score = term * factor if dot else term
                else:
                    if nodes:
                        term += dst[node]
                    if edges:
                        term += load_one(edge, number)[0]
                    score = term * slope_at(term, factor)
                for i in range(size):
                    value = own[i]
                    if dot and edge_rows:
                        value += theirs[u * size + i]
                    of_weight += value * near[u * size + i]
                of_weight = total(of_weight)
                if first + u < stop:
                    weight = exp(score - (logarithm if logarithm > lowest else zero))
                    share = weight
                    if drops:
                        if keep(number, offset, stream, key, threshold):
                            of_weight *= scale
                            share *= scale
                        else:
                            of_weight = zero
                            share = zero
                    of_score = weight * (of_weight - delta)
                    for i in range(size):
                        held[i] += share * near[u * size + i]
                        if mlp:
                            x = others[u * size + i]
                            held[i] += weights[i] * (of_score * slope_at(x, factor))
                        elif dot:
                            held_key[i] += of_score * others[u * size + i]
                    if not (mlp or dot):
                        of_own_term += of_score * slope_at(term, factor)
            first += unroll
        if projected:  # reuses near for the vectors
            fetch(vector, head * n_features, near, 0)
            for i in range(size):
                held[i] += of_own_term * near[i]
            if start == indptr[row] and unit < of_dst.size:  # a destination too
                fetch(vector_dst, head * n_features, near, 0)
                of_other = of_dst[unit]
                for i in range(size):
                    held[i] += of_other * near[i]
        for i in range(n_keys):
            held_key[i] *= factor
        if item >= n_pieces:
            put(of_values, unit * n_features, held)
            if dot:
                put(of_src, unit * n_features, held_key)
            elif nodes and not mlp and cuda.threadIdx.x == 0:
                of_src[unit] = of_own_term
        else:
            put_sums(sums, piece * n_features, held)
            if dot:
                put_sums(sums_src, piece * n_features, held_key)
            elif nodes and not mlp and cuda.threadIdx.x == 0:
                sums_src[piece] = of_own_term

    return kernel
