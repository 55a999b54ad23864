"""Attention through cuDNN or our own kernels, and its gradients."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from rtxarr._replay import set_apart
from rtxarr.dtypes import is_half
from rtxarr.libs import _attention_plans as plans
from rtxarr.libs import _dnn, _tile_attention
from rtxarr.libs._attention_plans import Attention, AttentionGrad, dense, heads
from rtxarr.libs._layout import Unsupported
from rtxarr.libs._tile_attention import Dropout, Problem

__all__ = ["Dropout", "deterministic", "try_attention", "try_attention_grad"]

_F32 = np.dtype("float32")
_deterministic = [True]  # a list, to be seen by all threads
# Of a device's memory that the scores kept for one gradient may take.
_SHARE_OF_MEMORY = 16


def deterministic(enabled: bool) -> None:
    """Choose whether gradients of attention have the same bits each time, as they do by default.

    If not, those by the queries are added up in any order: up to a tenth faster, and without the
    table of all scores in half precision that a fixed order takes. Holds for all threads. Captured
    steps have graphs for each choice.
    """
    _deterministic[0] = bool(enabled)
    set_apart("sums in any order", is_usual=bool(enabled))


def try_attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    lengths: Any,
    *,
    causal: bool,
    offset: int,
    window: int | None,
    scale: float,
    dropout: Dropout | None = None,
) -> tuple[Any, Any] | None:
    """Return attention and the logarithms of the sums of exponentials; None if by no library.

    Parameters
    ----------
    q : CuPy array, shape (batch, n_heads, n_queries, head_dim)
    k : CuPy array, shape (batch, n_kv_heads, n_keys, head_dim)
    v : CuPy array, shape (batch, n_kv_heads, n_keys, value_dim)
    mask : CuPy array, shape (batch or 1, n_heads or 1, n_queries or 1, n_keys or 1), or None
        Of bool: True where a query may see a key. Of a floating dtype: added to the scores.
    lengths : CuPy array of int, shape (batch,), or None
        How many keys there are.
    causal : bool
        Let query ``i`` see keys up to ``i + offset`` only.
    offset : int
    window : int or None
        Let query ``i`` see keys after ``i + offset - window`` only.
    scale : float
    dropout : Dropout, optional

    Returns
    -------
    out : CuPy array, shape (batch, n_heads, n_queries, value_dim)
        Zero for a query that sees no key. Heads lie behind the queries in memory.
    logs : CuPy array of float32, shape (batch, n_heads, n_queries)
    """
    arrays = q, k, v, mask, lengths
    problem = Problem(causal, offset, window, scale, dropout)
    try:
        return _by_cudnn(*arrays, problem)
    except Unsupported as reason:
        return _elsewhere(reason, _tile_attention.forward, *arrays, problem)


def _elsewhere(reason, run, *args):
    """Let our own kernels do what cuDNN does not; count who does."""
    found = _tile_attention.attempt(run, *args)
    _dnn.refuse(reason, "" if found is None else "cuda-tile")
    return found


def _library():
    library = _dnn.library()
    if library is None:
        raise Unsupported("")  # which its status says
    return library


def _by_cudnn(q, k, v, mask, lengths, problem):
    known = None
    if mask is lengths is problem.dropout is None and type(q) is type(k) is type(v):
        known = _described(
            q.dtype, q.shape, q.strides, k.dtype, k.shape, k.strides, v.dtype, v.shape, v.strides,
            problem,
        )  # fmt: skip
    else:
        _check_attention(q, k, v, mask, lengths, problem)
    library = _library()
    _dnn.check(library, q, k, v, mask, lengths)
    if known is not None and (q.data.ptr | k.data.ptr | v.data.ptr) % 16 == 0:
        return _run_attention(library, known, q, k, v)
    causal, offset, window, scale, _ = problem
    band = plans.band(q.shape[2], k.shape[2], causal, offset, window, mask, lengths)
    cupy = library.cupy
    q, k, v = (plans.rows(cupy, x) for x in (q, k, v))
    added = plans.added(cupy, mask, q, k)
    fields: list[Any] = [heads(x) for x in (q, k, v)]
    fields += [_result(q, v), _like_spec(added), lengths is not None, band, scale]
    counts = plans.counts(cupy, lengths, q, k)
    more = [x for x in (added, *counts) if x is not None]
    out, sums = _run_attention(library, Attention(*fields), q, k, v, *more)
    blind = plans.blind(cupy, mask, lengths, q, k, causal, offset, window)
    if blind is not None:
        cupy.copyto(out, 0, where=blind[..., None])
        cupy.copyto(sums, -np.inf, where=blind)
    return out, sums


class _Like(NamedTuple):
    """What is asked of an array beside its memory."""

    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _described(*metadata):
    """Describe attention to all keys, or to a band; None where arrays would be copied."""
    *parts, problem = metadata
    q, k, v = (_Like(*parts[i : i + 3]) for i in (0, 3, 6))
    _check_attention(q, k, v, None, None, problem)
    causal, offset, window, scale, _ = problem
    band = plans.band(q.shape[2], k.shape[2], causal, offset, window, None, None)
    specs = [plans.heads_of(x.shape, x.strides, x.dtype) for x in (q, k, v)]
    if None in specs:
        return None
    return Attention(*specs, _result(q, v), None, False, band, scale)


def _result(q, v):
    """Describe what attention gives: heads lie behind the queries in memory."""
    n_batch, n_heads, n_queries, _ = q.shape
    dim = v.shape[3]
    strides = (n_queries * n_heads * dim, dim, n_heads * dim, 1)
    size = q.dtype.itemsize
    shape = n_batch, n_heads, n_queries, dim
    return plans.heads_of(shape, tuple(n * size for n in strides), q.dtype)


def _run_attention(library, attention, q, k, v, *more):
    cupy = library.cupy
    out = plans.behind(cupy, (*q.shape[:3], v.shape[3]), q.dtype)
    sums = cupy.empty(q.shape[:3], _F32)
    pointers = (x.data.ptr for x in (q, k, v, *more, out, sums))
    library.run(attention, tuple(pointers))
    return out, sums


def try_attention_grad(
    grad: Any,
    out: Any,
    sums: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    lengths: Any,
    *,
    causal: bool,
    offset: int,
    window: int | None,
    scale: float,
    of_mask: bool,
    dropout: Dropout | None = None,
) -> list[Any] | None:
    """Return the gradients of q, k, v and the mask (if ``of_mask``); None if by no library.

    Parameters
    ----------
    grad : CuPy array, the shape of ``out``
    out, sums : CuPy array
        From :func:`try_attention` or equal code.

    Other parameters are those of :func:`try_attention`.
    """
    arrays = grad, out, sums, q, k, v, mask, lengths
    problem = Problem(causal, offset, window, scale, dropout)
    try:
        return _grad_by_cudnn(*arrays, problem, of_mask)
    except Unsupported as reason:
        return _elsewhere(reason, _tile_attention.backward, *arrays, problem, of_mask)


def _grad_by_cudnn(grad, out, sums, q, k, v, mask, lengths, problem, of_mask):
    causal, offset, window, scale, _ = problem
    _check_attention(q, k, v, mask, lengths, problem)
    if grad.dtype != q.dtype or out.dtype != q.dtype or sums.dtype != _F32:
        raise Unsupported(f"a gradient of {grad.dtype} for {q.dtype}")
    if q.shape[2] == k.shape[2] == 1:
        raise Unsupported("the gradient of one query and one key")
    library = _library()
    _dnn.check(library, grad, out, sums, q, k, v, mask, lengths)
    band = plans.band(q.shape[2], k.shape[2], causal, offset, window, mask, lengths)
    return _attention_grad(library, grad, out, sums, q, k, v, mask, lengths, band, scale, of_mask)


def _attention_grad(library, grad, out, sums, q, k, v, mask, lengths, band, scale, of_mask):
    cupy = library.cupy
    q, k, v, out, grad = (plans.rows(cupy, x) for x in (q, k, v, out, grad))
    added = plans.added(cupy, mask, q, k)
    if added is not None or lengths is not None:
        # Where nothing was seen: probabilities exp(score - inf) are zero there.
        sums = cupy.where(sums == -np.inf, np.float32(np.inf), sums)
    sums = cupy.ascontiguousarray(sums)
    of_added = None
    if of_mask:
        if mask.dtype != q.dtype:
            raise Unsupported(f"the gradient of a mask of {mask.dtype} for {q.dtype}")
        if mask.shape[2:] != (q.shape[2], k.shape[2]):
            raise Unsupported("the gradient of a mask that is broadcast along queries or keys")
        of_added = cupy.empty_like(added)
    counts = plans.counts(cupy, lengths, q, k)
    grads = [plans.like(cupy, x) for x in (q, k, v)]
    whole = AttentionGrad(
        *(heads(x) for x in (q, k, v, out, grad, *grads)),
        mask=_like_spec(added),
        grad_mask=_like_spec(of_added),
        lengths=lengths is not None,
        band=band,
        scale=scale,
        deterministic=_deterministic[0],
    )
    room = library.memory(q.data.device_id) // _SHARE_OF_MEMORY
    arrays = (q, k, v, out, sums, grad, added, *counts, *grads, of_added)
    for part in plans.parts(whole.score_bytes(), *k.shape[:2], room, of_added):
        problem, pieces = whole, arrays
        if part is not None:
            pieces = tuple(plans.cut(x, part, *k.shape[:2]) for x in arrays)
            specs = [heads(pieces[i]) for i in (0, 1, 2, 3, 5, 9, 10, 11)]
            problem = AttentionGrad(*specs, _like_spec(pieces[6]), None, *whole[10:])
        library.run(problem, tuple(x.data.ptr for x in pieces if x is not None))
    return [*grads, of_added]


def _like_spec(mask):
    return None if mask is None else dense(mask.shape, mask.dtype.name)


def _check_attention(q, k, v, mask, lengths, problem):
    """Refuse what metadata alone tells, before the library is looked for."""
    causal, offset, _, scale, dropout = problem
    if dropout is not None:  # whose random numbers are to be those of other devices
        raise Unsupported("attention with dropout")
    dtype = q.dtype
    if not is_half(dtype):
        raise Unsupported(f"attention in {dtype}")
    if k.dtype != dtype or v.dtype != dtype:
        raise Unsupported(f"attention in {dtype}, {k.dtype} and {v.dtype}")
    head_dim, value_dim = q.shape[3], v.shape[3]
    if head_dim % 8 or value_dim % 8 or max(head_dim, value_dim) > 256:
        raise Unsupported("heads whose dimension is not a multiple of 8, at most 256")
    if q.shape[2] == 1 and lengths is None:
        # Its keys become more from call to call, and each number would take a plan.
        raise Unsupported("a single query, without key_lengths")
    if causal and offset < 0:
        raise Unsupported("a causal offset below zero")
    if not (scale > 0 and math.isfinite(scale)):
        raise Unsupported("a scale that is not positive")
    if mask is not None and lengths is not None:
        raise Unsupported("a mask with key_lengths")
    if mask is not None and mask.dtype not in (np.bool_, _F32, dtype):
        raise Unsupported(f"a mask of {mask.dtype} for {dtype}")
