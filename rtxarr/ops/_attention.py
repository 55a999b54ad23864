"""Scaled dot-product attention without the table of all scores, and its derivative rule.

On a GPU cuDNN computes it in half precision or, where it has no plan, as with dropout, a kernel of
our own. Otherwise queries are taken a block at a time. The backward pass keeps the output and one
number for each query, the logarithm of its sum of exponentials, from which it recomputes the
probabilities.
"""

import math

import numpy as np

from rtxarr._device import is_device_array, namespace
from rtxarr._override import overridable, tracing
from rtxarr.autograd._op import differentiable, explained
from rtxarr.autograd._tape import Tensor, raw
from rtxarr.dtypes import accumulator, isdtype, result_type
from rtxarr.kernels.dropout import threshold
from rtxarr.libs.dnn import Dropout, try_attention, try_attention_grad
from rtxarr.ops._check import (
    check_floating,
    check_number,
    check_rate,
    drawing_device,
    generator_or_default,
)
from rtxarr.ops._elementwise import exp, where
from rtxarr.ops._half import widen
from rtxarr.ops._linalg import matmul
from rtxarr.ops._manipulate import broadcast_to, concat, matrix_transpose, pad, reshape
from rtxarr.ops._reduce import sum
from rtxarr.ops._windows import buffer_size

__all__ = ["scaled_dot_product_attention"]

# Fewer rows make the matrix products slow, more do not make them faster.
_MIN_ROWS, _MAX_ROWS = 32, 512

# In blocks, shapes are (batch, kv_heads, group, seq_len, head_dim): a key head serves the queries
# of a group of heads, so its own group axis has length one.


def _grouped(x, n_kv_heads):
    """Give (batch, kv_heads, group, ...) from (batch, heads, ...); None stays None."""
    if x is None:
        return None
    n_batch, n_heads, *rest = x.shape
    n_kv_heads = 1 if n_heads == 1 else n_kv_heads
    return reshape(x, (n_batch, n_kv_heads, n_heads // n_kv_heads, *rest))


def _blocks(q, k, causal, offset):
    """Yield ``(batch, [(rows, n_keys), ...])``: slices of the queries, and how many keys to see."""
    n_batch, n_rows, n_keys = q.shape[0], q.shape[3], k.shape[3]
    row_size = max(1, q.shape[1] * q.shape[2] * n_keys)
    size = buffer_size(raw(q))
    n = min(_MAX_ROWS, max(_MIN_ROWS, size // row_size))
    blocks = []
    for start in range(0, n_rows, n):
        stop = min(start + n, n_rows)
        seen = min(n_keys, max(0, stop + offset)) if causal else n_keys
        blocks.append((slice(start, stop), seen))
    n = max(1, size // (row_size * min(n, max(1, n_rows))))
    for start in range(0, n_batch, n):
        yield slice(start, min(start + n, n_batch)), blocks


def _cut(x, batch, rows, n_keys):
    """Take a block out of something as large as the scores, or broadcast to them."""
    n = x.shape
    return x[
        batch if n[0] > 1 else slice(None),
        :,
        :,
        rows if n[3] > 1 else slice(None),
        slice(n_keys if n[4] > 1 else None),
    ]


def is_one_block(q, k):
    """Tell whether the scores of ``(batch, heads, seq_len, head_dim)`` are a small table."""
    n_scores = math.prod(q.shape[:3]) * k.shape[2]
    return q.shape[2] <= _MAX_ROWS and 0 < n_scores <= buffer_size(q)


def _scores(q, k, mask, lengths, batch, rows, n_keys, causal, offset, window, scale):
    """Give the scores of a block, -inf where a key is hidden."""
    queries = widen(q[batch, :, :, rows, :]) * scale
    scores = matmul(queries, matrix_transpose(widen(k[batch, :, :, :n_keys, :])))
    if mask is not None:
        part = _cut(mask, batch, rows, n_keys)
        if isdtype(mask.dtype, "bool"):
            scores = where(part, scores, -np.inf)
        else:
            scores = scores + part
    causal = causal and n_keys > rows.start + offset + 1
    windowed = window is not None and rows.stop - 1 + offset - window >= 0
    if not causal and not windowed and lengths is None:
        return scores
    xp = namespace(raw(q))
    keys = xp.arange(n_keys)[None, :]
    last = xp.arange(rows.start, rows.stop)[:, None] + offset
    if causal:
        scores = where(keys <= last, scores, -np.inf)
    if windowed:
        scores = where(keys > last - window, scores, -np.inf)
    if lengths is not None:
        seen = keys < lengths[batch][:, None, None, None, None]
        scores = where(seen, scores, -np.inf)
    return scores


def _drop(probs, chosen, rate):
    return probs if chosen is None else where(chosen, probs / (1 - rate), 0)


class _Kept:
    """``kept(batch, rows)`` draws, each time anew, the weights of a block to keep.

    A mask of all weights would be larger than everything else that the backward pass needs.
    ``dropout`` says to kernels which they are.
    """

    def __init__(self, draw, dropout):
        self._draw = draw
        self.dropout = dropout

    def __call__(self, batch, rows):
        return self._draw(batch, rows)


def _draw_kept(q, shape, rate, generator):
    heads, (n_rows, n_keys) = shape[1:3], shape[3:]
    row_size = math.prod(heads) * n_keys
    piece = generator_or_default(generator).dropout_mask_pieces(math.prod(shape), rate)
    q = raw(q)
    xp = namespace(q)
    place = drawing_device(q)

    def kept(batch, rows):
        # In the order (batch, rows, heads, keys), whole samples and rows of one are contiguous.
        n = rows.stop - rows.start
        samples, each = range(batch.start, batch.stop), 1
        if n == n_rows:
            samples, each = samples[:1], len(samples)
        starts = [(i * n_rows + rows.start) * row_size for i in samples]
        drawn = [xp.asarray(piece(start, (each, n, *heads, n_keys), place)) for start in starts]
        return xp.moveaxis(xp.concat(drawn, axis=0), 1, 3)

    return _Kept(kept, Dropout(piece.place, int(threshold(rate)), float(rate)))


def _dropout_of(kept):
    return None if kept is None else kept.dropout


@differentiable
@overridable
def _attention(q, k, v, mask, kept, lengths, /, *, causal, offset, window, scale, rate):
    """Give the attention of the queries, and the logarithms of their sums of exponentials."""
    if is_device_array(q):
        options = {"causal": causal, "offset": offset, "window": window, "scale": scale}
        found = try_attention(q, k, v, mask, lengths, **options, dropout=_dropout_of(kept))
        if found is not None:
            return found
    xp = namespace(q, k, v, mask)
    dtype = result_type(q.dtype, k.dtype, v.dtype)
    result_shape = (*q.shape[:3], v.shape[-1])
    q, k, v, mask = (_grouped(x, k.shape[1]) for x in (q, k, v, mask))
    # Heads lie behind the queries in memory, so that joining them for what follows takes no copy.
    shape = (q.shape[0], q.shape[3], *q.shape[1:3], v.shape[-1])
    out = xp.moveaxis(xp.zeros(shape, dtype=dtype), 1, 3)
    lse = xp.full(q.shape[:-1], -np.inf, dtype=accumulator(dtype))
    for batch, blocks in _blocks(q, k, causal, offset):
        for rows, n_keys in blocks:
            if n_keys == 0:
                continue
            scores = _scores(
                q, k, mask, lengths, batch, rows, n_keys, causal, offset, window, scale
            )
            chosen = None if kept is None else kept(batch, rows)[..., :n_keys]
            top = xp.max(scores, axis=-1, keepdims=True)
            top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
            probs = xp.exp(scores - top)
            total = xp.sum(probs, axis=-1, keepdims=True)
            seen = total != 0
            total = xp.where(seen, total, xp.ones_like(total))
            probs = _drop(probs, chosen, rate)
            values = matmul(probs, widen(v[batch, :, :, :n_keys, :])) / total
            out[batch, :, :, rows, :] = xp.astype(values, dtype, copy=False)
            logs = xp.where(seen, xp.log(total) + top, -np.inf)
            lse[batch, :, :, rows] = logs[..., 0]
    return xp.reshape(out, result_shape), xp.reshape(lse, result_shape[:3])


def _over_group(x):
    """Add up what the heads of a group contribute to the key head they share."""
    return sum(x, axis=2, keepdims=True) if x.shape[2] != 1 else x


def _all_keys(x, axis, n_keys):
    """Fill up with zeros for the keys that a block did not see."""
    missing = n_keys - x.shape[axis]
    if missing == 0:
        return x
    return pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])


def _sum_to(x, shape):
    """Add up the axes along which something of ``shape`` was broadcast."""
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1)
    return sum(x, axis=axes, keepdims=True) if axes else x


def _collect(parts, part, apart):
    """Append a part that lies beside the others, or add it to the one there is."""
    if apart or not parts:
        parts.append(part)
    else:
        parts[0] = parts[0] + part


def _join(parts, axis):
    return concat(parts, axis=axis) if len(parts) > 1 else parts[0]


def _attention_rule(
    g, out, q, k, v, mask, kept, lengths, causal, offset, window, scale, rate, needs
):
    of_out, of_lse = g
    out, lse = out
    arrays = of_out, out, lse, q, k, v, mask, lengths
    options = {"causal": causal, "offset": offset, "window": window, "scale": scale}
    is_call = tracing() is not None and of_lse is None and kept is None
    if is_call and not any(isinstance(x, Tensor) for x in arrays):
        return _attention_gradient(*arrays, **options, needs=tuple(needs))
    return _gradients(of_lse, *arrays, **options, kept=kept, rate=rate, needs=needs)


def _gradients(
    of_lse, of_out, out, lse, q, k, v, mask, lengths, *,
    causal, offset, window, scale, kept, rate, needs,
):  # fmt: skip
    """Dao et al., "FlashAttention", 2022, arXiv:2205.14135, appendix B.2."""
    # Rules of tensors, for higher derivatives, consist of operations that have rules themselves.
    if of_lse is None and is_device_array(of_out) and is_device_array(q):
        found = try_attention_grad(
            of_out, out, lse, q, k, v, mask, lengths,
            causal=causal, offset=offset, window=window, scale=scale, of_mask=needs[3],
            dropout=_dropout_of(kept),
        )  # fmt: skip
        if found is not None:
            return [*found, None, None]
    if of_out is None:
        of_out = out * 0
    shapes = [x.shape if x is not None else None for x in (q, k, v, mask)]
    n_kv_heads = k.shape[1]
    q, k, v, mask = (_grouped(x, n_kv_heads) for x in (q, k, v, mask))
    out, lse, of_out, of_lse = (_grouped(x, n_kv_heads) for x in (out, lse, of_out, of_lse))
    delta = sum(widen(of_out) * widen(out), axis=-1, keepdims=True)
    if of_lse is not None:
        delta = delta - of_lse[..., None]
    lse = where(lse == -np.inf, 0, lse)[..., None]  # the scores of a row without keys are -inf
    n_keys_all = k.shape[3]
    apart = (True, False, False, needs[3] and mask.shape[3] > 1)
    batches = [], [], [], []
    for batch, blocks in _blocks(q, k, causal, offset):
        chunk = [], [], [], []
        for rows, n_keys in blocks:
            block = (batch, slice(None), slice(None), rows, ...)
            queries, gradient = widen(q[block]), widen(of_out[block])
            keys, values = widen(k[batch, :, :, :n_keys, :]), widen(v[batch, :, :, :n_keys, :])
            scores = _scores(
                q, k, mask, lengths, batch, rows, n_keys, causal, offset, window, scale
            )
            chosen = None if kept is None else kept(batch, rows)[..., :n_keys]
            probs = exp(scores - lse[block])
            of_values = matmul(matrix_transpose(_drop(probs, chosen, rate)), gradient)
            of_probs = matmul(gradient, matrix_transpose(values))
            of_probs = _drop(of_probs, chosen, rate)
            of_scores = probs * (of_probs - delta[block])
            of_keys = matmul(matrix_transpose(of_scores), queries) * scale
            parts = [
                matmul(of_scores, keys) * scale,
                _all_keys(_over_group(of_keys), 3, n_keys_all),
                _all_keys(_over_group(of_values), 3, n_keys_all),
            ]
            if needs[3]:
                of_mask = _sum_to(of_scores, mask.shape)
                parts.append(_all_keys(of_mask, 4, n_keys_all) if mask.shape[4] > 1 else of_mask)
            for known, part, beside in zip(chunk, parts, apart, strict=False):
                _collect(known, part, beside)
        for i, known in enumerate(chunk):
            if known:
                _collect(batches[i], _join(known, 3), i < 3 or mask.shape[0] > 1)
    if not batches[0]:  # no samples or no queries
        xp = namespace(raw(q))
        zeros = [xp.zeros(n, dtype=raw(q).dtype) if n is not None else None for n in shapes]
        return [*zeros, None, None]
    found = [reshape(_join(x, 0), n) if x else None for x, n in zip(batches, shapes, strict=True)]
    return [*found, None, None]


@overridable
def _attention_gradient(of_out, out, lse, q, k, v, mask, lengths, *, needs, **options):
    """Give what the rule gives of arrays: as one function, for programs to call."""
    arrays = None, of_out, out, lse, q, k, v, mask, lengths
    return _gradients(*arrays, **options, kept=None, rate=0.0, needs=needs)


_attention.defvjp(_attention_rule)


@explained
def scaled_dot_product_attention(
    q,
    k,
    v,
    attn_mask=None,
    *,
    causal: bool = False,
    causal_offset: int = 0,
    window: int | None = None,
    key_lengths=None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    generator=None,
):
    """Give the means of the values, weighted by the softmax of the scores ``scale * q @ k.T``.

    Parameters
    ----------
    q : array or Tensor of a real floating dtype, shape (..., n_heads, n_queries, head_dim)
    k : array or Tensor, shape (..., n_kv_heads, n_keys, head_dim)
        ``n_heads`` must be a multiple of ``n_kv_heads``: consecutive query heads share a key
        head (grouped queries).
    v : array or Tensor, shape (..., n_kv_heads, n_keys, value_dim)
    attn_mask : array or Tensor, broadcast to (..., n_heads, n_queries, n_keys), optional
        Of bool: True where a query may see a key. Of a floating dtype: added to the scores.
    causal : bool, default False
        Let query ``i`` see keys up to ``i + causal_offset`` only.
    causal_offset : int, default 0
        Number of keys before the first query; ``n_keys - n_queries`` when decoding with a cache.
    window : int >= 1, optional
        Let query ``i`` see keys after ``i + causal_offset - window`` only: when causal, its own and
        the ``window - 1`` before.
    key_lengths : array of an integer dtype, shape (...), optional
        How many keys each sample has; those behind are padding, which no query sees.
    scale : float, default ``1 / sqrt(head_dim)``
    dropout_rate : float in [0, 1), default 0
        Probability that a weight is dropped. The backward pass draws the same weights again.
    generator : rtxarr.random.Generator, optional
        For dropout; the default one when left out.

    Returns
    -------
    array or Tensor, shape (..., n_heads, n_queries, value_dim)
        A query that sees no key gives zeros.

    Notes
    -----
    Differentiable in all of ``q``, ``k``, ``v`` and a floating ``attn_mask``. Scores are computed
    in float32 or wider, for a block of queries at a time, both ways. On a GPU cuDNN does it in
    float16 and bfloat16, and where it has no plan (with dropout, or a mask and ``key_lengths``) a
    kernel of our own does, if the extra ``tile`` is installed; :func:`rtxarr.libs.show` says what
    both left out.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762, eq. 1.
    Ainslie et al., "GQA", 2023, arXiv:2305.13245.
    Dao et al., "FlashAttention", 2022, arXiv:2205.14135.
    """
    _check(q, k, v)
    check_rate(dropout_rate)
    *batch_shape, n_heads, n_queries, head_dim = q.shape
    n_kv_heads, n_keys = k.shape[-3:-1]
    if scale is None:
        scale = 1 / math.sqrt(head_dim)
    check_number("scale", scale)
    if not isinstance(causal_offset, (int, np.integer)):
        raise TypeError(f"causal_offset must be an int, got {causal_offset!r}")
    if window is not None and not (isinstance(window, (int, np.integer)) and window >= 1):
        raise ValueError(f"window must be an int >= 1, got {window!r}")
    n_batch = math.prod(batch_shape)
    shape = (*batch_shape, n_heads, n_queries, v.shape[-1])
    if len(batch_shape) != 1:
        q, k, v = (reshape(x, (n_batch, *x.shape[-3:])) for x in (q, k, v))
    kept = None
    if dropout_rate:
        weights = (n_batch, n_kv_heads, n_heads // n_kv_heads, n_queries, n_keys)
        kept = _draw_kept(q, weights, dropout_rate, generator)
    out, _ = _attention(
        q,
        k,
        v,
        _mask(attn_mask, (*batch_shape, n_heads, n_queries, n_keys)),
        kept,
        _lengths(key_lengths, tuple(batch_shape)),
        causal=causal,
        offset=int(causal_offset),
        window=None if window is None else int(window),
        scale=float(scale),
        rate=float(dropout_rate),
    )
    return reshape(out, shape) if len(batch_shape) != 1 else out


def _check(q, k, v):
    check_floating(q=q, k=k, v=v)
    if q.ndim < 3 or q.shape[-1] < 1:
        raise ValueError(f"q must have shape (..., n_heads, n_queries, head_dim), got {q.shape}")
    if k.shape[:-3] != q.shape[:-3] or k.ndim != q.ndim or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k must have shape (..., n_kv_heads, n_keys, head_dim) with the batch axes and the "
            f"head_dim of q, {q.shape}, got {k.shape}"
        )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v must have the shape of k but in its last axis, {k.shape}, got {v.shape}"
        )
    if k.shape[-3] < 1 or q.shape[-3] % k.shape[-3]:
        raise ValueError(
            f"the number of heads of q must be a multiple of that of k, got {q.shape[-3]} and "
            f"{k.shape[-3]}"
        )


def _lengths(lengths, batch_shape):
    """Bring the numbers of keys to (batch,)."""
    if lengths is None:
        return None
    if not hasattr(lengths, "dtype") or not isdtype(lengths.dtype, "integral"):
        kind = getattr(lengths, "dtype", type(lengths).__name__)
        raise TypeError(f"key_lengths must be an array of an integer dtype, got {kind}")
    if tuple(lengths.shape) != batch_shape:
        raise ValueError(f"key_lengths must have shape {batch_shape}, got {lengths.shape}")
    return reshape(lengths, (math.prod(batch_shape),)) if len(batch_shape) != 1 else lengths


def _mask(mask, shape):
    """Bring the mask to (batch or 1, heads or 1, queries or 1, keys or 1)."""
    if mask is None:
        return None
    if not hasattr(mask, "dtype") or not isdtype(mask.dtype, ("bool", "real floating")):
        kind = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(f"attn_mask must be an array of bool or of a floating dtype, got {kind}")
    extra = len(shape) - mask.ndim
    if extra < 0 or any(n not in (1, m) for n, m in zip(mask.shape, shape[extra:], strict=True)):
        raise ValueError(f"attn_mask must broadcast to {shape}, got {mask.shape}")
    full = (1,) * extra + tuple(mask.shape)
    lead = full[:-3]
    if set(lead) != {1} and lead != shape[:-3]:
        lead = shape[:-3]  # broadcast along some of several batch axes
        mask = broadcast_to(reshape(mask, full), (*lead, *full[-3:]))
    wanted = (math.prod(lead), *full[-3:])
    return mask if tuple(mask.shape) == wanted else reshape(mask, wanted)
