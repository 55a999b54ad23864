"""Attention for inference: keys and values in pages, and everything in 8 bits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import is_device_array, namespace
from rtxarr.dtypes import is_half
from rtxarr.libs import _attention_plans as plans
from rtxarr.libs import _dnn, blas
from rtxarr.libs._attention_plans import Band, dense, heads
from rtxarr.libs._cudnn import Graph, Spec
from rtxarr.libs._layout import Unsupported

__all__ = ["paged_attention", "try_fp8_attention"]

_LARGEST = 448.0  # of e4m3 numbers


class PagedAttention(NamedTuple):
    """Tensors q, pages of k and v, their table, lengths (queries, keys), then out."""

    q: Spec
    k: Spec
    v: Spec
    out: Spec
    table: Spec
    max_keys: int
    causal: bool
    scale: float

    @property
    def strict(self) -> bool:
        return False

    @property
    def tuned(self) -> bool:
        return False

    def name(self) -> str:
        return f"paged attention in {self.q.dtype}"

    def describe(self, graph: Graph) -> None:
        q, k, v = (graph.tensor(getattr(self, name), name) for name in "qkv")
        table = graph.tensor(self.table, "table")
        lengths = Spec("int32", (self.q.shape[0], 1, 1, 1), (1, 1, 1, 1))
        band = Band(None, 0 if self.causal else None, True)
        out, _ = graph.graph.sdpa(
            q=q, k=k, v=v, attn_scale=self.scale, generate_stats=False, use_padding_mask=True,
            seq_len_q=graph.tensor(lengths, "n_queries"),
            seq_len_kv=graph.tensor(lengths, "n_keys"),
            paged_attention_k_table=table, paged_attention_v_table=table,
            paged_attention_max_seq_len_kv=self.max_keys, **band.options(graph.dnn),
        )  # fmt: skip
        graph.output(out, self.out)


def paged_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    key_lengths: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Any:
    """Return attention to keys and values that lie in pages, as in a cache of many sequences.

    Parameters
    ----------
    q : array of a floating dtype, shape (batch, n_heads, n_queries, head_dim)
        The last queries of each sequence.
    k_pages, v_pages : array, shape (n_pages, n_kv_heads, page_size, head_dim)
        Consecutive query heads share a key head.
    page_table : array of int32, shape (batch, max_pages)
        Which pages hold each sequence, in order; those behind its end are not read.
    key_lengths : array of int, shape (batch,)
        How many keys each sequence has; at most ``max_pages * page_size`` are read.
    causal : bool, default False
        Let the last query see all keys, and each one before it one less.
    scale : float, default ``1 / sqrt(head_dim)``

    Returns
    -------
    array, shape (batch, n_heads, n_queries, head_dim)
        Zero for a query that sees no key.

    Notes
    -----
    Not differentiable. cuDNN serves half-precision arrays on a GPU, and lets a captured step decode
    with lengths and a table that change from replay to replay.
    """
    n_batch, n_heads, _, head_dim = q.shape
    n_kv_heads = k_pages.shape[1]
    if k_pages.shape != v_pages.shape or k_pages.shape[3] != head_dim or n_heads % n_kv_heads:
        raise ValueError(
            f"k_pages and v_pages must have shape (n_pages, n_kv_heads, page_size, {head_dim}) "
            f"with a divisor of {n_heads} heads, got {k_pages.shape} and {v_pages.shape}"
        )
    if page_table.ndim != 2 or page_table.shape[0] != n_batch or page_table.dtype != np.int32:
        raise ValueError(
            f"page_table must be int32 of shape ({n_batch}, max_pages), got {page_table.dtype} of "
            f"{page_table.shape}"
        )
    if key_lengths.shape != (n_batch,):
        raise ValueError(f"key_lengths must have shape ({n_batch},), got {key_lengths.shape}")
    scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    arrays = (q, k_pages, v_pages, page_table, key_lengths)
    found = _try_paged(*arrays, causal, scale) if is_device_array(q) else None
    return _plain_paged(*arrays, causal, scale) if found is None else found


def _try_paged(q, k, v, table, lengths, causal, scale):
    try:
        if not is_half(q.dtype) or k.dtype != q.dtype or v.dtype != q.dtype:
            raise Unsupported(f"paged attention in {q.dtype}, {k.dtype} and {v.dtype}")
        if q.shape[3] % 8 or q.shape[3] > 256:
            raise Unsupported("heads whose dimension is not a multiple of 8, at most 256")
        library = _dnn.library()
        if library is None:
            return None
        _dnn.check(library, q, k, v, table, lengths)
        if heads(k) is None or heads(v) is None:
            raise Unsupported("pages whose rows do not start at multiples of 16 bytes")
        cupy = library.cupy
        q = plans.rows(cupy, q)
        table = cupy.ascontiguousarray(table)
        n_batch, n_pages = table.shape
        max_keys = n_pages * k.shape[2]
        out = plans.behind(cupy, q.shape, q.dtype)
        specs: Any = [heads(x) for x in (q, k, v, out)]
        as_table = dense((n_batch, 1, n_pages, 1), "int32")
        problem = PagedAttention(*specs, as_table, max_keys, causal and q.shape[2] > 1, scale)
        counts = (
            cupy.full(lengths.shape, q.shape[2], np.int32),
            cupy.clip(lengths, 1, max_keys).astype(np.int32),
        )
        pointers = (x.data.ptr for x in (q, k, v, table, *counts, out))
        library.run(problem, tuple(pointers))
    except Unsupported as reason:
        _dnn.refuse(reason)
        return None
    cupy.copyto(out, 0, where=_blind(cupy, lengths, q.shape[2], causal)[..., None])
    return out


def _blind(xp, lengths, n_queries, causal):
    """Tell which queries see no key, shape (batch, 1, n_queries or 1)."""
    n_seen = lengths[:, None]
    if causal:
        n_seen = n_seen + xp.arange(1 - n_queries, 1)[None, :]
    return (n_seen <= 0)[:, None, :]


def _plain_paged(q, k_pages, v_pages, table, lengths, causal, scale):
    xp = namespace(q, k_pages, v_pages, table, lengths)
    n_batch, n_heads, n_queries, head_dim = q.shape
    wide = xp.float32 if is_half(q.dtype) else q.dtype

    def gather(pages):
        _, n_kv_heads, size, dim = pages.shape
        taken = xp.take(xp.astype(pages, wide), xp.reshape(table, (-1,)), axis=0)
        taken = xp.reshape(taken, (n_batch, -1, n_kv_heads, size, dim))
        taken = xp.reshape(xp.moveaxis(taken, 2, 1), (n_batch, n_kv_heads, -1, dim))
        return xp.repeat(taken, n_heads // n_kv_heads, axis=1)

    k, v = gather(k_pages), gather(v_pages)
    n_keys = xp.clip(lengths, 0, k.shape[2])
    keys = xp.arange(k.shape[2])[None, :]
    seen = keys < n_keys[:, None, None, None]
    if causal:
        last = xp.arange(n_queries)[:, None] - n_queries
        seen = seen & (keys <= last + n_keys[:, None, None, None])
    v = xp.where(keys[..., None] < n_keys[:, None, None, None], v, 0)  # pages may hold anything
    scores = blas.matmul(xp.astype(q, wide), xp.matrix_transpose(k)) * scale
    scores = xp.where(seen, scores, -xp.inf)
    top = xp.max(scores, axis=-1, keepdims=True)
    probs = xp.exp(scores - xp.where(xp.isfinite(top), top, 0))
    total = xp.sum(probs, axis=-1, keepdims=True)
    return xp.astype(blas.matmul(probs, v) / xp.where(total > 0, total, 1), q.dtype)


class Fp8Attention(NamedTuple):
    """Tensors q, k, v, what to multiply each, the weights (back and forth) and out by, then out."""

    q: Spec
    k: Spec
    v: Spec
    out: Spec
    right: int | None
    scale: float

    @property
    def strict(self) -> bool:
        return False

    @property
    def tuned(self) -> bool:
        return False

    def name(self) -> str:
        return "attention in 8 bits"

    def describe(self, graph: Graph) -> None:
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        tensors = {name: graph.tensor(getattr(self, name), name) for name in "qkv"}
        one = dense((1, 1, 1, 1), "float32")
        tensors.update((name, graph.tensor(one, name)) for name in names)
        options = {} if self.right is None else {"right_bound": self.right}
        out, *_ = graph.graph.sdpa_fp8(
            **tensors, attn_scale=self.scale, generate_stats=False, **options
        )
        graph.output(out, self.out)


def try_fp8_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scales: tuple[Any, Any, Any],
    out_scale: Any,
    causal: bool = False,
    offset: int = 0,
    scale: float | None = None,
) -> Any:
    """Return attention in 8-bit floating point; None if not by cuDNN.

    Parameters are those of :func:`rtxarr.nn.fp8_attention`, on CuPy arrays: ``head_dim`` and
    ``value_dim`` multiples of 16 up to 256, ``offset`` at least 0.
    """
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    try:
        if any(x.dtype != np.uint8 for x in (q, k, v)):
            raise Unsupported(f"attention in 8 bits of {q.dtype}, {k.dtype} and {v.dtype}")
        if q.shape[3] % 16 or v.shape[3] % 16 or max(q.shape[3], v.shape[3]) > 256:
            raise Unsupported("heads in 8 bits whose dimension is not a multiple of 16")
        if causal and offset < 0:
            raise Unsupported("a causal offset below zero")
        library = _dnn.library()
        if library is None:
            return None
        _dnn.check(library, q, k, v, *scales, out_scale)
        cupy = library.cupy
        q, k, v = (plans.rows(cupy, x) for x in (q, k, v))
        out = plans.behind(cupy, (*q.shape[:3], v.shape[3]), q.dtype)
        factors = [x.copy() if x.data.ptr % 16 else x for x in scales]
        factors += [cupy.full(1, x, np.float32) for x in (1 / _LARGEST, _LARGEST)]
        factors.append(1 / out_scale)
        right = offset if causal and offset < k.shape[2] - 1 else None
        fields: list[Any] = [*map(_as_e4m3, (q, k, v, out)), right, scale]
        problem = Fp8Attention(*fields)
        library.run(problem, tuple(x.data.ptr for x in (q, k, v, *factors, out)))
    except Unsupported as reason:
        _dnn.refuse(reason)
        return None
    return out


def _as_e4m3(x):
    return heads(x)._replace(dtype="e4m3")
