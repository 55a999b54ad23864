"""Attention as graphs of cuDNN, and how arrays of heads lie in memory."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from rtxarr.libs._cudnn import Graph, Spec
from rtxarr.libs._layout import Unsupported

__all__ = [
    "Attention",
    "AttentionGrad",
    "Band",
    "added",
    "band",
    "behind",
    "blind",
    "counts",
    "cut",
    "dense",
    "heads",
    "heads_of",
    "like",
    "logs",
    "parts",
    "rows",
]

_ALIGNMENT = 16  # bytes: rows of heads are read so many at a time


class Band(NamedTuple):
    """Which keys query ``i`` sees: those ``j`` with ``i + shift - left < j <= i + shift + right``.

    ``shift`` is zero, or, ``from_end``, by how many the keys outnumber the queries.
    """

    left: int | None
    right: int | None
    from_end: bool

    def options(self, dnn: Any) -> dict:
        found = {}
        if self.left is not None:
            found["diagonal_band_left_bound"] = self.left
        if self.right is not None:
            found["diagonal_band_right_bound"] = self.right
        if found:
            name = "BOTTOM_RIGHT" if self.from_end else "TOP_LEFT"
            found["diagonal_alignment"] = getattr(dnn.diagonal_alignment, name)
        return found


class Attention(NamedTuple):
    """Tensors q, k, v, the mask to add and lengths (queries, keys) if any, then out and logs."""

    q: Spec
    k: Spec
    v: Spec
    out: Spec
    mask: Spec | None
    lengths: bool
    band: Band
    scale: float

    @property
    def strict(self) -> bool:
        return False

    @property
    def tuned(self) -> bool:
        return False  # all but the first candidate are far slower

    def name(self) -> str:
        return f"attention in {self.q.dtype}"

    def describe(self, graph: Graph) -> None:
        q, k, v = (graph.tensor(getattr(self, name), name) for name in "qkv")
        out, stats = graph.graph.sdpa(
            q=q, k=k, v=v, attn_scale=self.scale, generate_stats=True,
            **self.band.options(graph.dnn), **_masks(self, graph),
        )  # fmt: skip
        graph.output(out, self.out)
        graph.output(stats, logs(self.q))


class AttentionGrad(NamedTuple):
    """Tensors q, k, v, out, logs, grad, mask and lengths, then the gradients of q, k, v, mask."""

    q: Spec
    k: Spec
    v: Spec
    out: Spec
    grad: Spec
    grad_q: Spec
    grad_k: Spec
    grad_v: Spec
    mask: Spec | None
    grad_mask: Spec | None
    lengths: bool
    band: Band
    scale: float
    deterministic: bool

    @property
    def strict(self) -> bool:
        return False

    @property
    def tuned(self) -> bool:
        return False  # all but the first candidate are far slower

    def name(self) -> str:
        return f"the gradient of attention in {self.q.dtype}"

    def describe(self, graph: Graph) -> None:
        q, k, v, out = (graph.tensor(getattr(self, name), name) for name in ("q", "k", "v", "out"))
        stats = graph.tensor(logs(self.q), "logs")
        grad = graph.tensor(self.grad, "grad")
        options = {**self.band.options(graph.dnn), **_masks(self, graph)}
        n = graph.n_tensors
        if self.grad_mask is not None:  # an argument, but numbered as the last result
            graph.n_tensors = n + 3
            options["dBias"] = graph.tensor(self.grad_mask, "grad_mask").set_output(True)
        found = graph.graph.sdpa_backward(
            q=q, k=k, v=v, o=out, dO=grad, stats=stats, attn_scale=self.scale,
            use_deterministic_algorithm=self.deterministic, **options,
        )  # fmt: skip
        graph.n_tensors = n
        for tensor, spec in zip(found, (self.grad_q, self.grad_k, self.grad_v), strict=True):
            graph.output(tensor, spec)

    def score_bytes(self) -> int:
        """Return how large the table of all scores is that adding up in a fixed order takes."""
        if not self.deterministic:
            return 0
        n_batch, n_heads, n_queries, _ = self.q.shape
        n_keys = self.k.shape[2]
        return n_batch * n_heads * (-(-n_queries // 64) * 64) * (-(-n_keys // 128) * 128) * 2


def _masks(problem, graph):
    found = {}
    if problem.mask is not None:
        found["bias"] = graph.tensor(problem.mask, "mask")
    if problem.lengths:
        n = problem.q.shape[0]
        spec = Spec("int32", (n, 1, 1, 1), (1, 1, 1, 1))
        found["use_padding_mask"] = True
        found["seq_len_q"] = graph.tensor(spec, "n_queries")
        found["seq_len_kv"] = graph.tensor(spec, "n_keys")
    return found


def heads(x: Any) -> Spec | None:
    """Describe (batch, heads, seq_len, dim); None where only a copy could be read.

    Rows must be contiguous and start at multiples of 16 bytes.
    """
    return heads_of(x.shape, x.strides, x.dtype) if x.data.ptr % _ALIGNMENT == 0 else None


@functools.lru_cache(maxsize=4096)
def heads_of(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Spec | None:
    """Describe an array as :func:`heads` does, which begins at a multiple of 16 bytes."""
    *steps, element = (stride // dtype.itemsize for stride in strides)
    whole = math.prod(shape[1:])
    steps = [whole if n == 1 else step for n, step in zip(shape[:3], steps, strict=True)]
    if element != 1 or any(n <= 0 or n * dtype.itemsize % _ALIGNMENT for n in steps):
        return None
    return Spec(dtype.name, shape, (*steps, 1))


@functools.lru_cache(maxsize=4096)
def dense(shape: tuple[int, ...], dtype: str) -> Spec:
    """Describe an array that is stored in order without gaps."""
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return Spec(dtype, tuple(shape), tuple(strides))


@functools.lru_cache(maxsize=4096)
def logs(q: Spec) -> Spec:
    """Describe the logarithms of the sums of exponentials, one for each query."""
    return dense((*q.shape[:3], 1), "float32")


# ------------------------------------------------------------------------------- preparation


def parts(n_bytes, n_batch, n_kv_heads, room, of_added):
    """Yield slices of samples and key heads whose scores fit into ``room`` bytes; None for all."""
    if n_bytes <= room:
        yield None
        return
    if of_added is not None:
        raise Unsupported("the gradient of a mask over more scores than fit into memory")
    n_samples, n_heads = room * n_batch // n_bytes, n_kv_heads
    if n_samples == 0:
        n_samples, n_heads = 1, room * n_batch * n_kv_heads // n_bytes
        if n_heads == 0:
            raise Unsupported("the gradient of more scores than fit into memory")
    for samples in _even(n_batch, n_samples):
        for kv_heads in _even(n_kv_heads, n_heads):
            yield samples, kv_heads


def _even(n, most):
    """Cut ``n`` into slices of at most ``most``, as even as they can be."""
    n_parts = -(-n // most)
    step = -(-n // n_parts)
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def cut(x, part, n_batch, n_kv_heads):
    """Take a part of the samples, and the heads of a part of the key heads."""
    if x is None:
        return None
    samples, kv_heads = part
    if x.shape[0] == n_batch:
        x = x[samples]
    if x.ndim == 1 or x.shape[1] == 1:
        return x
    group = x.shape[1] // n_kv_heads
    return x[:, kv_heads.start * group : kv_heads.stop * group]


def band(n_queries, n_keys, causal, offset, window, mask, lengths):
    """Translate the causal offset and the window to bounds about a diagonal."""
    right = offset if causal and offset < n_keys - 1 else None
    if window is None or window >= n_queries + offset:
        return Band(None, right, False)
    if lengths is not None:
        raise Unsupported("a window with key_lengths")
    if not 0 <= offset <= n_keys - n_queries:
        raise Unsupported("a window that ends behind the keys")
    if offset == n_keys - n_queries > 0 and mask is None:
        return Band(window, 0 if causal else None, True)
    if window <= offset:
        raise Unsupported("a window shorter than the causal offset")
    return Band(window - offset, right, False)


def rows(cupy, x):
    """Return ``x``, or a copy if cuDNN cannot read it as it lies."""
    if heads(x) is not None:
        return x
    return x.transpose(0, 2, 1, 3).copy(order="C").transpose(0, 2, 1, 3)


def like(cupy, x):
    """Make an array with heads behind the sequence in memory if they are in ``x``."""
    if x.strides[2] < x.strides[1]:
        return cupy.empty(x.shape, x.dtype)
    return behind(cupy, x.shape, x.dtype)


def behind(cupy, shape, dtype):
    """Make an array with heads behind the sequence in memory."""
    n_batch, n_heads, n_rows, dim = shape
    return cupy.empty((n_batch, n_rows, n_heads, dim), dtype).transpose(0, 2, 1, 3)


def added(cupy, mask, q, k):
    """Return what to add to the scores, contiguous, for all queries and keys."""
    if mask is None:
        return None
    if mask.dtype == np.bool_:
        zero, hidden = cupy.zeros((), q.dtype), cupy.full((), -np.inf, q.dtype)
        mask = cupy.where(mask, zero, hidden)
    mask = cupy.broadcast_to(mask, (*mask.shape[:2], q.shape[2], k.shape[2]))
    mask = cupy.ascontiguousarray(mask)
    return mask.copy() if mask.data.ptr % _ALIGNMENT else mask


def counts(cupy, lengths, q, k):
    """Return how many queries and keys of each sample to read; one key at least."""
    if lengths is None:
        return None, None
    n_keys = cupy.clip(lengths, 1, k.shape[2]).astype(np.int32)
    return cupy.full(n_keys.shape, q.shape[2], np.int32), n_keys


def blind(cupy, mask, lengths, q, k, causal, offset, window):
    """Tell which queries see no key; None if all see one."""
    if lengths is not None:
        return (lengths <= 0)[:, None, None]
    if mask is None:
        return None
    seen = mask if mask.dtype == np.bool_ else ~(mask == -np.inf)  # NaN is not hidden
    if causal or window is not None:
        last = cupy.arange(q.shape[2])[:, None] + offset
        keys = cupy.arange(k.shape[2])[None, :]
        if causal:
            seen = seen & (keys <= last)
        if window is not None:
            seen = seen & (keys > last - window)
    return cupy.logical_not(seen.any(axis=-1))
