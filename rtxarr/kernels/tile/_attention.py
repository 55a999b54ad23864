"""Attention and its gradients without a table of scores, as cuTile programs.

A block takes ``tm`` queries of a head past all keys that they see, ``tn`` at a time (``attention``,
``attention_queries``), or ``tn`` keys past all queries that see them (``attention_keys``). Scores
are in units of log 2, as exp2 is what the hardware has. Sums are in float32, in a fixed order.

Which weights dropout keeps is told by the library's own random words: the weight of query ``i`` of
head ``h`` and key ``j`` has word ``offset + ((batch * n_queries + i) * n_heads + h) * n_keys + j``
of the stream. A block of Philox makes four words, those of four keys beside each other.

References
----------
Dao et al., "FlashAttention", 2022, arXiv:2205.14135. Salmon, Moraes, Dror and Shaw, "Parallel
random numbers: as easy as 1, 2, 3", SC 2011, doi:10.1145/2063384.2063405 (Philox).
"""

from rtxarr._device import tile as ct

ZERO = ct.PaddingMode.ZERO
F32, I32, I64, U32, U64 = ct.float32, ct.int32, ct.int64, ct.uint32, ct.uint64
INF = float("inf")
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
NO_MASK, BOOLEAN, ADDED = range(3)
ANYWHERE, ALIKE, AT_BLOCKS = range(3)


# ---------------------------------------------------------------------------------- random words


def _product(a, factor):
    whole = a.astype(U64) * factor
    return (whole >> 32).astype(U32), whole.astype(U32)


def _philox(block, stream, key):
    """Give the four words of each block of a stream."""
    zero = ct.zeros(block.shape, dtype=U32)
    c0, c1 = block.astype(U32), (block >> 32).astype(U32)
    c2, c3 = zero + stream.astype(U32), zero + (stream >> 32).astype(U32)
    k0, k1 = key.astype(U32), (key >> 32).astype(U32)
    for _ in ct.static_iter(range(10)):
        high0, low0 = _product(c0, 0xD2511F53)
        high1, low1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


def _bit(words, place, last):
    """Give a bit at ``place`` and the three above for each word: whether it is at most ``last``."""
    w0, w1, w2, w3 = words
    low = (w0 <= last).astype(U32) | ((w1 <= last).astype(U32) << 1)
    high = ((w2 <= last).astype(U32) << 2) | ((w3 <= last).astype(U32) << 3)
    return (low | high) << place


def _aligned(block, words):
    """Give four bits for each block of words: which of their weights are kept."""
    _, stream, key, last = words
    return _bit(_philox(block, stream, key), 0, last)


def _shifted(block, lead, words):
    """Give the same where rows begin ``lead`` words later."""
    _, stream, key, last = words
    bits = _bit(_philox(block, stream, key), 0, last)
    bits = bits | _bit(_philox(block + 1, stream, key), 4, last)
    return (bits >> lead) & 15


def _fours(block, lead, words, begin):
    """Give four bits for each block of words, where rows begin as told."""
    if begin == AT_BLOCKS:
        return _aligned(block, words)
    if begin == ANYWHERE:
        return _shifted(block, lead, words)
    if (words[0] & 3) == 0:
        found = _aligned(block, words)
    else:
        found = _shifted(block, lead, words)
    return found


def _bits(row, j, words, begin, tm, tn):
    """Give a bit for each weight of a tile, 32 in a number: which are kept.

    ``row`` is the place in the stream of each query's first weight, of shape (tm, 1). Within a
    block of words rows ``begin`` ANYWHERE, all ALIKE, or AT_BLOCKS.
    """
    first = (j * (tn // 4) + ct.arange(tn // 4, dtype=I32)).astype(U64)[None, :]
    fours = _fours((row >> 2) + first, (row & 3).astype(U32), words, begin)
    places = (ct.arange(8, dtype=U32) * 4)[None, None, :]
    return ct.sum(ct.reshape(fours, (tm, tn // 32, 8)) << places, axis=2)


def _kept(bits, tm, tn):
    """Tell for each weight of a tile whether its bit is set."""
    ones = (ct.zeros((1, 1, 32), dtype=U32) + 1) << ct.arange(32, dtype=U32)[None, None, :]
    return ct.reshape((ct.reshape(bits, (tm, tn // 32, 1)) & ones) != 0, (tm, tn))


def _words(place, from_memory, offset, stream, key, last):
    """Give the place in the stream of random words, which may lie in memory, and a bound."""
    if from_memory:
        offset = ct.load(place, (0,), (1,)).item()
        stream = ct.load(place, (1,), (1,)).item()
        key = ct.load(place, (2,), (1,)).item()
    return offset, stream, key, last


def _rows(b, h, queries, words, q, k):
    """Give the place in the stream of each query's first weight."""
    row = (queries.astype(I64) + ct.astype(b, I64) * q.shape[2]) * q.shape[1] + h
    return (row * k.shape[2]).astype(U64) + words[0]


# ---------------------------------------------------------------------------------------- scores


def _tile(x, b, h, i, rows, columns):
    """Read rows of a head, filled up with zeros."""
    found = ct.load(x, (b, h, i, 0), (1, 1, rows, columns), padding_mode=ZERO)
    return ct.reshape(found, (rows, columns))


def _numbers(x, b, h, i, n):
    return ct.reshape(ct.load(x, (b, h, i), (1, 1, n), padding_mode=ZERO), (n,))


def _n_keys(k, lengths, has_lengths, b):
    n = k.shape[2]
    if has_lengths:
        n = max(0, min(n, ct.load(lengths, (b,), (1,)).item().astype(I32)))
    return n


def _masked(scores, mask, place, seen, options):
    """Add a mask and hide what a query does not see.

    ``seen`` holds the queries and the keys of the tile, shaped to be broadcast to it, how many keys
    there are, how far queries are shifted against them, and the window.
    """
    b, h, i, j, tm, tn, by_key = place
    queries, keys, n_keys, shift, window = seen
    kind, by_batch, by_head, by_row, by_column, ragged, causal, has_window = options
    if kind != NO_MASK:
        rows, columns = tm if by_row else 1, tn if by_column else 1
        sample, head = b if by_batch else 0, h if by_head else 0
        index = sample, head, i if by_row else 0, j if by_column else 0
        part = ct.load(mask, index, (1, 1, rows, columns), padding_mode=ZERO)
        part = ct.reshape(part, (rows, columns))
        if by_key:
            part = ct.transpose(part)
        if kind == BOOLEAN:
            scores = ct.where(part, scores, -INF)
        else:
            scores = scores + part.astype(F32) * LOG2_E
    # Most tiles are seen as a whole, and comparing takes as long as the exponentials. What is
    # constant stands alone, so that the rest is left out.
    if ragged:  # noqa: SIM102
        if (j + 1) * tn > n_keys:
            scores = ct.where(keys < n_keys, scores, -INF)
    if causal:  # noqa: SIM102
        if (j + 1) * tn - 1 > i * tm + shift:
            scores = ct.where(keys <= queries + shift, scores, -INF)
    if has_window:  # noqa: SIM102
        if j * tn <= (i + 1) * tm - 1 + shift - window:
            scores = ct.where(keys > queries + shift - window, scores, -INF)
    return scores


def _key_tiles(i, n_keys, shift, window, causal, has_window, tm, tn):
    """Give the tiles of keys that a tile of queries sees: the first and the one past the last."""
    first, end = 0, n_keys
    if causal:
        end = max(0, min(end, (i + 1) * tm + shift))
    if has_window:
        first = max(0, i * tm + shift - window + 1) // tn
    return first, ct.cdiv(end, tn)


def _query_tiles(j, n_queries, n_keys, shift, window, causal, has_window, tm, tn):
    """Give the tiles of queries that see a tile of keys."""
    first, end = 0, n_queries
    if causal:
        first = max(0, j * tn - shift) // tm
    if has_window:
        end = max(0, min(end, (j + 1) * tn - 1 + window - shift))
    if j * tn >= n_keys:
        end = 0
    return first, ct.cdiv(end, tm)


def _head(index, n_tiles, n_heads, causal):
    """Give the batch, the head and the tile of a block; those with most to see come first."""
    tile = index % n_tiles
    head = index // n_tiles
    return head // n_heads, head % n_heads, n_tiles - 1 - tile if causal else tile


def attention(
    q, k, v, mask, lengths, place, offset, stream, key, last, rescale, scale, shift, window,
    out, logs,
    kind, by_batch, by_head, by_row, by_column, has_lengths, ragged, causal, has_window,
    drops, from_memory, begin, group, d, e, tm, tn,
):  # fmt: skip
    """out = dropped(softmax(scale * q @ k.T + mask)) @ v; logs, of the sums of exponentials"""
    b, h, i = _head(ct.bid(0), ct.cdiv(q.shape[2], tm), q.shape[1], causal)
    n_keys = _n_keys(k, lengths, has_lengths, b)
    first, end = _key_tiles(i, n_keys, shift, window, causal, has_window, tm, tn)
    options = kind, by_batch, by_head, by_row, by_column, ragged, causal, has_window
    queries = (i * tm + ct.arange(tm, dtype=I32))[:, None]
    if drops:
        words = _words(place, from_memory, offset, stream, key, last)
        row = _rows(b, h, queries, words, q, k)
    mine = _tile(q, b, h, i, tm, d)
    top = ct.full((tm, 1), -INF, dtype=F32)
    total = ct.zeros((tm, 1), dtype=F32)
    values = ct.zeros((tm, e), dtype=F32)
    for j in range(first, end):
        keys = (j * tn + ct.arange(tn, dtype=I32))[None, :]
        seen = queries, keys, n_keys, shift, window
        theirs = ct.transpose(_tile(k, b, h // group, j, tn, d))
        scores = ct.mma(mine, theirs, ct.zeros((tm, tn), dtype=F32)) * (scale * LOG2_E)
        scores = _masked(scores, mask, (b, h, i, j, tm, tn, False), seen, options)
        higher = ct.maximum(top, ct.max(scores, axis=1, keepdims=True))
        level = ct.where(higher == -INF, 0.0, higher)
        probs = ct.exp2(scores - level, flush_to_zero=True)
        shrink = ct.exp2(top - level, flush_to_zero=True)
        total = total * shrink + ct.sum(probs, axis=1, keepdims=True)
        if drops:
            kept = _kept(_bits(row, j, words, begin, tm, tn), tm, tn)
            probs = ct.where(kept, probs, 0.0)
        value = _tile(v, b, h // group, j, tn, e)
        values = ct.mma(probs.astype(v.dtype), value, values * shrink)
        top = higher
    factor = ct.where(total == 0.0, 0.0, rescale / total)
    ct.store(out, (b, h, i, 0), ct.reshape((values * factor).astype(out.dtype), (1, 1, tm, e)))
    level = ct.where(top == -INF, 0.0, top)
    ct.store(logs, (b, h, i), ct.reshape((level + ct.log2(total)) * LN_2, (1, 1, tm)))


def attention_queries(
    q, k, v, mask, lengths, place, offset, stream, key, last, rescale, scale, shift, window,
    out, logs, grad, delta, of_q, bits,
    kind, by_batch, by_head, by_row, by_column, has_lengths, ragged, causal, has_window,
    drops, from_memory, begin, group, d, e, tm, tn, stored,
):  # fmt: skip
    """The gradient by the queries; delta = sum(grad * out) and bits, for those by the keys"""
    b, h, i = _head(ct.bid(0), ct.cdiv(q.shape[2], tm), q.shape[1], causal)
    n_keys = _n_keys(k, lengths, has_lengths, b)
    first, end = _key_tiles(i, n_keys, shift, window, causal, has_window, tm, tn)
    options = kind, by_batch, by_head, by_row, by_column, ragged, causal, has_window
    queries = (i * tm + ct.arange(tm, dtype=I32))[:, None]
    if drops:
        words = _words(place, from_memory, offset, stream, key, last)
        row = _rows(b, h, queries, words, q, k)
    mine, of_out = _tile(q, b, h, i, tm, d), _tile(grad, b, h, i, tm, e)
    given = _tile(out, b, h, i, tm, e)
    mean = ct.sum(of_out.astype(F32) * given.astype(F32), axis=1)
    ct.store(delta, (b, h, i), ct.reshape(mean, (1, 1, tm)))
    mean = mean[:, None]
    level = _numbers(logs, b, h, i, tm)[:, None] * LOG2_E
    level = ct.where(level == -INF, 0.0, level)
    found = ct.zeros((tm, d), dtype=F32)
    for j in range(first, end):
        keys = (j * tn + ct.arange(tn, dtype=I32))[None, :]
        seen = queries, keys, n_keys, shift, window
        theirs = _tile(k, b, h // group, j, tn, d)
        scores = ct.mma(mine, ct.transpose(theirs), ct.zeros((tm, tn), dtype=F32))
        scores = scores * (scale * LOG2_E)
        scores = _masked(scores, mask, (b, h, i, j, tm, tn, False), seen, options)
        probs = ct.exp2(scores - level, flush_to_zero=True)
        value = _tile(v, b, h // group, j, tn, e)
        of_probs = ct.mma(of_out, ct.transpose(value), ct.zeros((tm, tn), dtype=F32))
        if drops:
            packed = _bits(row, j, words, begin, tm, tn)
            if stored:
                ct.store(bits, (b, h, i, j), ct.reshape(packed, (1, 1, tm, tn // 32)))
            of_probs = ct.where(_kept(packed, tm, tn), of_probs * rescale, 0.0)
        of_scores = probs * (of_probs - mean)
        found = ct.mma(of_scores.astype(k.dtype), theirs, found)
    ct.store(of_q, (b, h, i, 0), ct.reshape((found * scale).astype(of_q.dtype), (1, 1, tm, d)))


def attention_keys(
    q, k, v, mask, lengths, place, offset, stream, key, last, rescale, scale, shift, window,
    logs, grad, delta, bits, of_k, of_v,
    kind, by_batch, by_head, by_row, by_column, has_lengths, ragged, causal, has_window,
    drops, from_memory, begin, group, d, e, tm, tn, stored,
):  # fmt: skip
    """The gradients by the keys and the values; tiles of scores are transposed"""
    n_tiles, n_shared = ct.cdiv(k.shape[2], tn), k.shape[1]
    b, shared, j = _head(ct.bid(0), n_tiles, n_shared, False)
    n_keys = _n_keys(k, lengths, has_lengths, b)
    first, end = _query_tiles(j, q.shape[2], n_keys, shift, window, causal, has_window, tm, tn)
    options = kind, by_batch, by_head, by_row, by_column, ragged, causal, has_window
    keys = (j * tn + ct.arange(tn, dtype=I32))[:, None]
    if drops:
        words = _words(place, from_memory, offset, stream, key, last)
    mine, value = _tile(k, b, shared, j, tn, d), _tile(v, b, shared, j, tn, e)
    found = ct.zeros((tn, d), dtype=F32)
    of_values = ct.zeros((tn, e), dtype=F32)
    for h in range(shared * group, (shared + 1) * group):
        for i in range(first, end):
            queries = (i * tm + ct.arange(tm, dtype=I32))[None, :]
            seen = queries, keys, n_keys, shift, window
            theirs, of_out = _tile(q, b, h, i, tm, d), _tile(grad, b, h, i, tm, e)
            scores = ct.mma(mine, ct.transpose(theirs), ct.zeros((tn, tm), dtype=F32))
            scores = scores * (scale * LOG2_E)
            scores = _masked(scores, mask, (b, h, i, j, tm, tn, True), seen, options)
            level = _numbers(logs, b, h, i, tm)[None, :] * LOG2_E
            level = ct.where(level == -INF, 0.0, level)
            probs = ct.exp2(scores - level, flush_to_zero=True)
            of_probs = ct.mma(value, ct.transpose(of_out), ct.zeros((tn, tm), dtype=F32))
            dropped = probs
            if drops:
                if stored:
                    packed = ct.load(bits, (b, h, i, j), (1, 1, tm, tn // 32), padding_mode=ZERO)
                    packed = ct.reshape(packed, (tm, tn // 32))
                else:
                    row = _rows(b, h, ct.reshape(queries, (tm, 1)), words, q, k)
                    packed = _bits(row, j, words, begin, tm, tn)
                kept = ct.transpose(_kept(packed, tm, tn))
                of_probs = ct.where(kept, of_probs * rescale, 0.0)
                dropped = ct.where(kept, probs, 0.0)
            of_values = ct.mma(dropped.astype(q.dtype), of_out, of_values)
            of_scores = probs * (of_probs - _numbers(delta, b, h, i, tm)[None, :])
            found = ct.mma(of_scores.astype(q.dtype), theirs, found)
    ct.store(of_k, (b, shared, j, 0), ct.reshape((found * scale).astype(of_k.dtype), (1, 1, tn, d)))
    of_values = (of_values * rescale).astype(of_v.dtype)
    ct.store(of_v, (b, shared, j, 0), ct.reshape(of_values, (1, 1, tn, e)))
