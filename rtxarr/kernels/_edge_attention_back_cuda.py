"""GPU kernels of attention over edges, backward: one pass by destinations, one by sources.

Both make the weights again from the logarithms of their sums, and never add into one place from
several threads. With ``s`` the score of an edge, ``a`` its weight, and ``g`` the gradient of the
row of its destination, ``g . values`` that of the weight, the score's gradient is
``a * (g . values - delta)``, where ``delta = g . out``. The first pass leaves the logarithm and
``delta`` of each destination that has edges side by side in ``found``, with its own term where
scores have one: the second pass reads them from one place.

The gradients of a destination's scores add up to zero. So those at which the leaky ReLU has one
slope give the sum of the others too, and with additive scores the rows of these need not be read:
taken to be most are those whose sign is that of the destination's own term.
"""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._edge_attention_cuda import Variant
from rtxarr.kernels._heads import (
    Plan,
    element,
    exponential,
    heads_of,
    keeps,
    leaky,
    near_of,
    place_of,
    records_of,
    widest,
)
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._vector import access


@functools.cache
def by_destinations(dtype: np.dtype, plan: Plan, variant: Variant):
    """Return the kernel that gives the gradients of ``dst``, and of ``edge`` or ``vector``.

    Of pieces of long rows it leaves the sums in ``sums``. Blocks take items in turn, as many as
    there are too many, and leave their part of the vectors' gradient in ``parts``, a row of heads
    for each of their items. The threads of a warp go round together, as in the forward kernel.
    """
    kind, nodes, edges, numbered, drops, _ = variant
    _, scalar, load_one, _, _ = access(dtype, wide=False)
    begin, _, put, put_sums, _, total = heads_of(dtype, plan)
    n_words, word, place_of_part, fetch, unpack = near_of(dtype, plan)
    exp, longest_of, n_heads, n_features = exponential(dtype), widest(plan), *plan[:2]
    slope_at, keep = leaky(scalar), keeps()
    mlp, dot, edge_rows = kind == "mlp", kind == "dot", variant.rows
    size, n_items = plan.kept, plan.items
    # Four more rows are kept in registers for "mlp", which is much where heads are wide.
    unroll = plan.unroll(1 + dot + edge_rows + (mlp and size > 8), dtype)
    n_own, n_weights, n_keys = (size if wanted else 1 for wanted in (mlp or dot, mlp, dot))
    n_rows = unroll * n_words
    n_key_rows, n_edge_rows = (n_rows if wanted else 1 for wanted in (dot, edge_rows))
    n_theirs = size if edge_rows else 1
    signed, additive = nodes and not (mlp or dot or edges), not (mlp or dot)
    n_terms, n_next = (unroll if wanted else 1 for wanted in (additive, signed))
    node_type, n_found = variant.node_type, variant.n_found
    _, store_found = records_of(scalar, n_found, n_heads)
    zero, one, lowest = scalar(0), scalar(1), scalar(-np.inf)

    @bounded(plan.threads)
    def kernel(
        starts, lengths, rows, n_pieces, indptr, indices, ids, src, dst, values, vector, edge,
        factor, grad, out, lse, found, of_dst, of_edge, sums, parts, place, offset, stream, key,
        threshold, scale,
    ):  # fmt: skip
        item, head = begin()
        head_is_there = head < n_heads
        if not head_is_there:
            head = np.int64(0)
        if drops:
            offset, stream, key = offset + place[0], stream + place[1], key + place[2]
        own = cuda.local.array(n_own, scalar)
        weights = cuda.local.array(n_weights, scalar)
        value_rows = cuda.local.array(n_rows, word)
        key_rows = cuda.local.array(n_key_rows, word)
        edge_rows_near = cuda.local.array(n_edge_rows, word)
        near = cuda.local.array(size, scalar)
        keys = cuda.local.array(n_keys, scalar)
        slopes = cuda.local.array(n_weights, scalar)
        theirs = cuda.local.array(n_theirs, scalar)  # of an edge
        of_theirs = cuda.local.array(n_theirs, scalar)
        up = cuda.local.array(size, scalar)
        held = cuda.local.array(n_own, scalar)
        part = cuda.local.array(n_weights, scalar)
        terms = cuda.local.array(n_terms, scalar)
        next_terms = cuda.local.array(n_terms, scalar)
        nodes_here = cuda.local.array(unroll, node_type)
        nodes_next = cuda.local.array(n_next, node_type)
        for i in range(n_weights):
            part[i] = zero
        if mlp:
            fetch(vector, place_of_part(vector, head), np.int64(0), value_rows, 0)
            unpack(value_rows, 0, weights)
        place_of_sums = (item * n_heads + head) * n_features
        values_at, src_at = place_of_part(values, head), place_of(src, head)
        if dot:
            src_at = place_of_part(src, head)
        edge_at = place_of_part(edge, head) if edge_rows else np.int64(0)
        dst_at = place_of_part(dst, head) if mlp or dot else np.int64(0)
        out_at, grad_at = place_of_part(out, head), place_of_part(grad, head)
        base = item - cuda.threadIdx.z
        while base < rows.size:  # all threads of the block
            item = base + cuda.threadIdx.z
            live = head_is_there and item < rows.size
            if not live:
                item = np.int64(0)
            length = lengths[item] if live else np.int32(0)
            row, start = np.int64(rows[item]), starts[item]
            whole = start == indptr[row]  # or the first piece
            start = start if length > 0 else np.int64(0)
            last, longest = np.int32(max(length - 1, 0)), longest_of(length)
            unit, piece = row * n_heads + head, item * n_heads + head
            edges_at, ids_at = place_of(indices, start), place_of(ids, start)
            delta, shift, own_term, of_own_term = zero, zero, zero, zero
            for i in range(n_own):
                held[i] = zero
            first = np.int32(0)
            if longest > 0:  # without edges nothing is read
                fetch(out, out_at, row, value_rows, 0)
                unpack(value_rows, 0, near)
                fetch(grad, grad_at, row, value_rows, 0)
                unpack(value_rows, 0, up)
                for i in range(size):
                    delta += up[i] * near[i]
                delta = total(delta)
                if mlp or dot:
                    fetch(dst, dst_at, row, value_rows, 0)
                    unpack(value_rows, 0, own)
                elif nodes:
                    own_term = dst[unit]
                shift = lse[unit]
                shift = shift if shift > lowest else zero
                if live and whole and cuda.threadIdx.x == 0:
                    if n_found == 4:
                        store_found(found, unit, (shift, delta, own_term, zero))
                    else:
                        store_found(found, unit, (shift, delta))
                for u in range(unroll):
                    at = np.int64(min(np.int32(u), last))
                    nodes_here[u] = element(indices, edges_at, at)
                    if signed:
                        at = np.int64(min(np.int32(unroll + u), last))
                        nodes_next[u] = element(indices, edges_at, at)
                        next_terms[u] = element(src, src_at, np.int64(nodes_here[u]) * n_heads)
            mostly_above = own_term > zero
            gain = factor - one if mostly_above else one - factor
            any_node = nodes_here[0]
            while first < longest:
                for u in range(unroll):
                    node, at = nodes_here[u], np.int64(min(np.int32(first + u), last))
                    if signed:
                        term = own_term + next_terms[u]
                        terms[u] = term
                        # That of one that is in the cache, where it is not asked for.
                        node = any_node if (term > zero) == mostly_above else node
                    fetch(values, values_at, node, value_rows, u * n_words)
                    if dot:
                        fetch(src, src_at, node, key_rows, u * n_words)
                    if edge_rows:
                        number = element(ids, ids_at, at) if numbered else start + at
                        fetch(edge, edge_at, number, edge_rows_near, u * n_words)
                    if additive and not signed:
                        term = own_term
                        if nodes:
                            term += element(src, src_at, np.int64(node) * n_heads)
                        if edges:
                            number = element(ids, ids_at, at) if numbered else start + at
                            term += load_one(edge, number * n_heads + head)[0]
                        terms[u] = term
                for u in range(unroll):  # of the next edges, and those after them, ahead
                    if signed:
                        nodes_here[u] = nodes_next[u]
                        next_terms[u] = element(src, src_at, np.int64(nodes_here[u]) * n_heads)
                        at = np.int64(min(np.int32(first + (2 * unroll + u)), last))
                        nodes_next[u] = element(indices, edges_at, at)
                    else:
                        at = np.int64(min(np.int32(first + (unroll + u)), last))
                        nodes_here[u] = element(indices, edges_at, at)
                for u in range(unroll):
                    inside = np.int32(first + u) <= last and length > 0
                    number = np.int64(0)
                    if drops or edges:
                        at = np.int64(min(np.int32(first + u), last))
                        number = element(ids, ids_at, at) if numbered else start + at
                        number = number * n_heads + head
                    unpack(value_rows, u * n_words, near)
                    if edge_rows:
                        unpack(edge_rows_near, u * n_words, theirs)
                    if dot:
                        unpack(key_rows, u * n_words, keys)
                    of_weight = zero
                    for i in range(size):
                        if dot and edge_rows:
                            near[i] += theirs[i]
                        of_weight += up[i] * near[i]
                    of_weight = total(of_weight)
                    term = zero
                    if additive:
                        term = terms[u]
                        score = term * slope_at(term, factor)
                    else:
                        for i in range(size):
                            if dot:
                                if edge_rows:
                                    keys[i] += theirs[i]
                                term += own[i] * keys[i]
                            else:
                                x = own[i] + near[i]
                                if edge_rows:
                                    x += theirs[i]
                                slopes[i] = slope_at(x, factor)
                                near[i] = x * slopes[i]  # the values are done with
                                term += weights[i] * near[i]
                        term = total(term)
                        score = term * factor if dot else term
                    kept = one
                    if drops:
                        if keep(number, offset, stream, key, threshold):
                            kept = scale
                            of_weight *= scale
                        else:
                            kept = zero
                            of_weight = zero
                    weight = exp((score if inside else lowest) - shift)
                    of_score = weight * (of_weight - delta)
                    if mlp:
                        for i in range(size):
                            held[i] += of_score * slopes[i]
                            part[i] += of_score * near[i]
                            if edge_rows:
                                of_theirs[i] = of_score * slopes[i] * weights[i]
                    elif dot:
                        for i in range(size):
                            held[i] += of_score * keys[i]
                            if edge_rows:
                                of_theirs[i] = of_score * factor * own[i] + weight * kept * up[i]
                    elif signed:
                        of_own_term += of_score * (zero if (term > zero) == mostly_above else gain)
                    else:
                        of_score *= slope_at(term, factor)
                        of_own_term += of_score
                    if edges and inside:
                        if edge_rows:
                            put(of_edge, number * n_features, of_theirs)
                        elif cuda.threadIdx.x == 0:
                            of_edge[number] = of_score
                first = np.int32(first + unroll)
            if live:
                is_row = item >= n_pieces
                if mlp or dot:
                    for i in range(size):
                        held[i] *= weights[i] if mlp else factor
                        if length == 0:
                            held[i] = zero
                    if is_row:
                        put(of_dst, unit * n_features, held)
                    else:
                        put_sums(sums, piece * n_features, held)
                elif nodes and cuda.threadIdx.x == 0:
                    if is_row:
                        of_dst[unit] = of_own_term if length > 0 else zero
                    else:
                        sums[piece] = of_own_term
            base += cuda.gridDim.x * n_items
        if mlp and head_is_there:
            put_sums(parts, place_of_sums, part)

    return kernel


@functools.cache
def by_sources(dtype: np.dtype, plan: Plan, variant: Variant, projected: bool):
    """Return the kernel that gives the gradients of ``values`` and ``src``.

    Its rows are those of the graph turned round: ``row`` is a source, ``indices`` its
    destinations. If ``projected``, ``src`` and ``dst`` are the products of ``values`` with
    ``vector`` and ``vector_dst``, whose part in its gradient is added to the rest; the gradient
    ``of_dst`` of the second is known. The first sources are the destinations.
    """
    kind, nodes, edges, numbered, drops, _ = variant
    _, scalar, load_one, _, _ = access(dtype, wide=False)
    begin, _, put, put_sums, _, total = heads_of(dtype, plan)
    n_words, word, place_of_part, fetch, unpack = near_of(dtype, plan)
    (n_heads, n_features), n_found = plan[:2], variant.n_found
    load_found, _ = records_of(scalar, n_found, n_heads)
    exp, longest_of = exponential(dtype), widest(plan)
    slope_at, keep = leaky(scalar), keeps()
    mlp, dot, edge_rows = kind == "mlp", kind == "dot", variant.rows
    size, unroll = plan.kept, plan.unroll(1 + (mlp or dot) + edge_rows, dtype)
    n_keys, n_weights = (size if wanted else 1 for wanted in (dot, mlp))
    n_other = size if mlp or dot else 1
    n_rows = unroll * n_words
    n_dst_rows, n_edge_rows = (n_rows if wanted else 1 for wanted in (mlp or dot, edge_rows))
    n_theirs, node_type = size if edge_rows else 1, variant.node_type
    zero, lowest = scalar(0), scalar(-np.inf)

    @bounded(plan.threads)
    def kernel(
        starts, lengths, rows, n_pieces, indptr, indices, ids, src, dst, values, vector, edge,
        factor, grad, found, of_dst, vector_dst, of_values, of_src, sums, sums_src, place, offset,
        stream, key, threshold, scale,
    ):  # fmt: skip
        item, head = begin()
        live = item < rows.size and head < n_heads
        if not live:
            item, head = np.int64(0), np.int64(0)
        if drops:
            offset, stream, key = offset + place[0], stream + place[1], key + place[2]
        own = cuda.local.array(size, scalar)
        own_key = cuda.local.array(n_keys, scalar)
        weights = cuda.local.array(n_weights, scalar)
        grad_rows = cuda.local.array(n_rows, word)
        dst_rows = cuda.local.array(n_dst_rows, word)
        edge_rows_near = cuda.local.array(n_edge_rows, word)
        near = cuda.local.array(size, scalar)
        others = cuda.local.array(n_other, scalar)
        theirs = cuda.local.array(n_theirs, scalar)  # of an edge
        terms = cuda.local.array(unroll, scalar)
        shifts = cuda.local.array(unroll, scalar)
        deltas = cuda.local.array(unroll, scalar)
        held = cuda.local.array(size, scalar)
        held_key = cuda.local.array(n_keys, scalar)
        of_term = cuda.local.array(n_weights, scalar)
        at_end = cuda.local.array(unroll, node_type)
        row, start = np.int64(rows[item]), starts[item]
        length = lengths[item] if live else np.int32(0)
        whole = start == indptr[row]  # or the first piece
        start = start if length > 0 else np.int64(0)
        last, longest = np.int32(max(length - 1, 0)), longest_of(length)
        unit, piece = row * n_heads + head, item * n_heads + head
        edges_at, ids_at = place_of(indices, start), place_of(ids, start)
        grad_at, found_at = place_of_part(grad, head), place_of(found, n_found * head)
        dst_at = place_of_part(dst, head) if mlp or dot else np.int64(0)
        edge_at = place_of_part(edge, head) if edge_rows else np.int64(0)
        own_term, of_own_term = zero, zero
        for i in range(size):
            held[i] = zero
        for i in range(n_keys):
            held_key[i] = zero
        for i in range(n_weights):
            of_term[i] = zero
        first = np.int32(0)
        if longest > 0:  # without edges nothing is read
            fetch(values, place_of_part(values, head), row, grad_rows, 0)
            unpack(grad_rows, 0, own)
            if mlp:
                fetch(vector, place_of_part(vector, head), np.int64(0), grad_rows, 0)
                unpack(grad_rows, 0, weights)
            elif dot:
                fetch(src, place_of_part(src, head), row, grad_rows, 0)
                unpack(grad_rows, 0, own_key)
            elif nodes:
                own_term = src[unit]
            for u in range(unroll):
                at_end[u] = element(indices, edges_at, np.int64(min(np.int32(u), last)))
        while first < longest:
            for u in range(unroll):
                node, at = at_end[u], np.int64(min(np.int32(first + u), last))
                fetch(grad, grad_at, node, grad_rows, u * n_words)
                term = own_term
                if n_found == 4:
                    shifts[u], deltas[u], dst_term, _ = load_found(found, found_at, node)
                    term += dst_term
                else:
                    shifts[u], deltas[u] = load_found(found, found_at, node)
                if mlp or dot:
                    fetch(dst, dst_at, node, dst_rows, u * n_words)
                if edge_rows:
                    number = element(ids, ids_at, at) if numbered else start + at
                    fetch(edge, edge_at, number, edge_rows_near, u * n_words)
                if not (mlp or dot):
                    if edges:
                        number = element(ids, ids_at, at) if numbered else start + at
                        term += load_one(edge, number * n_heads + head)[0]
                    terms[u] = term
            for u in range(unroll):  # of the next edges, ahead
                at = np.int64(min(np.int32(first + (unroll + u)), last))
                at_end[u] = element(indices, edges_at, at)
            for u in range(unroll):
                term, of_weight = zero, zero
                unpack(grad_rows, u * n_words, near)
                if edge_rows:
                    unpack(edge_rows_near, u * n_words, theirs)
                if mlp or dot:
                    unpack(dst_rows, u * n_words, others)
                    for i in range(size):
                        x = own_key[i] if dot else own[i] + others[i]
                        if edge_rows:
                            x += theirs[i]
                        if dot:
                            term += x * others[i]
                        else:
                            others[i] = x
                            term += weights[i] * (x * slope_at(x, factor))
                    term = total(term)
                    score = term * factor if dot else term
                else:
                    term = terms[u]
                    score = term * slope_at(term, factor)
                for i in range(size):
                    value = own[i]
                    if dot and edge_rows:
                        value += theirs[i]
                    of_weight += value * near[i]
                of_weight = total(of_weight)
                if np.int32(first + u) > last or length == 0:
                    score = lowest
                weight = exp(score - shifts[u])
                share = weight
                if drops:
                    at = np.int64(min(np.int32(first + u), last))
                    number = element(ids, ids_at, at) if numbered else start + at
                    if keep(number * n_heads + head, offset, stream, key, threshold):
                        of_weight *= scale
                        share *= scale
                    else:
                        of_weight = zero
                        share = zero
                of_score = weight * (of_weight - deltas[u])
                for i in range(size):
                    held[i] += share * near[i]
                    if mlp:
                        of_term[i] += of_score * slope_at(others[i], factor)
                    elif dot:
                        held_key[i] += of_score * others[i]
                if not (mlp or dot):
                    of_own_term += of_score * slope_at(term, factor)
            first = np.int32(first + unroll)
        if not live:
            return
        if mlp and length > 0:
            for i in range(size):
                held[i] += weights[i] * of_term[i]
        if length == 0:
            of_own_term = zero
            for i in range(size):
                held[i] = zero
            for i in range(n_keys):
                held_key[i] = zero
        if projected:
            fetch(vector, place_of_part(vector, head), np.int64(0), grad_rows, 0)
            unpack(grad_rows, 0, near)
            for i in range(size):
                held[i] += of_own_term * near[i]
            if whole and unit < of_dst.size:  # a destination too
                fetch(vector_dst, place_of_part(vector_dst, head), np.int64(0), grad_rows, 0)
                unpack(grad_rows, 0, near)
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
