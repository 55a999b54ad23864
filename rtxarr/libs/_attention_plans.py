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
    "blind",
    "counts",
    "cut",
    "dense",
    "heads",
    "like",
    "logs",
    "mask_spec",
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
    """Describe (batch, kv_heads, group, seq_len, dim) as (batch, heads, seq_len, dim).

    None where only a copy could be: rows must be contiguous and start at multiples of 16 bytes.
    """
    return _heads(x.shape, x.strides, x.dtype) if x.data.ptr % _ALIGNMENT == 0 else None


@functools.lru_cache(maxsize=4096)
def _heads(shape, strides, dtype):
    n_batch, n_kv_heads, group, n_rows, dim = shape
    batch, kv_head, member, row, element = (stride // dtype.itemsize for stride in strides)
    if group == 1:
        member = kv_head
    elif n_kv_heads > 1 and kv_head != group * member:
        return None
    lengths = (n_batch, n_kv_heads * group, n_rows)
    whole = math.prod(shape[1:])
    steps = [
        whole if n == 1 else stride for n, stride in zip(lengths, (batch, member, row), strict=True)
    ]
    if element != 1 or any(n <= 0 or n * dtype.itemsize % _ALIGNMENT for n in steps):
        return None
    return Spec(dtype.name, (*lengths, dim), (*steps, 1))


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


def mask_spec(mask: Any) -> Spec:
    """Describe a contiguous mask of shape (batch or 1, kv_heads or 1, group or 1, rows, keys)."""
    n_batch, n_kv_heads, group, *rest = mask.shape
    return dense((n_batch, n_kv_heads * group, *rest), mask.dtype.name)


# ------------------------------------------------------------------------------- preparation


def parts(n_bytes, shape, room, of_added):
    """Yield slices of samples and heads whose scores fit into ``room`` bytes; None for all."""
    if n_bytes <= room:
        yield None
        return
    n_batch, n_kv_heads = shape
    if of_added is not None:
        raise Unsupported("the gradient of a mask over more scores than fit into memory")
    n_samples = room * n_batch // n_bytes
    n_heads = n_kv_heads
    if n_samples == 0:
        n_samples, n_heads = 1, room * n_batch * n_kv_heads // n_bytes
        if n_heads == 0:
            raise Unsupported("the gradient of more scores than fit into memory")
    for samples in _even(n_batch, n_samples):
        for some_heads in _even(n_kv_heads, n_heads):
            yield samples, some_heads


def _even(n, most):
    """Cut ``n`` into slices of at most ``most``, as even as they can be."""
    n_parts = -(-n // most)
    step = -(-n // n_parts)
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def cut(x, part, n_batch):
    """Take a part of the samples, and of the key heads of arrays that have them."""
    if x is None:
        return None
    samples, some_heads = part
    if x.shape[0] == n_batch:
        x = x[samples]
    return x[:, some_heads] if x.ndim > 1 and x.shape[1] > 1 else x


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
    return x.transpose(0, 3, 1, 2, 4).copy(order="C").transpose(0, 2, 3, 1, 4)


def like(cupy, x):
    """Make an array with heads behind the sequence in memory if they are in ``x``."""
    if x.strides[3] < x.strides[2 if x.shape[1] == 1 else 1]:
        return cupy.empty(x.shape, x.dtype)
    n_batch, n_kv_heads, group, n_rows, dim = x.shape
    found = cupy.empty((n_batch, n_rows, n_kv_heads, group, dim), x.dtype)
    return found.transpose(0, 2, 3, 1, 4)


def added(cupy, mask, q, k):
    """Return what to add to the scores, contiguous, with all queries and keys."""
    if mask is None:
        return None
    if mask.dtype == np.bool_:
        zero, hidden = cupy.zeros((), q.dtype), cupy.full((), -np.inf, q.dtype)
        mask = cupy.where(mask, zero, hidden)
    shape = (*mask.shape[:3], q.shape[3], k.shape[3])
    # Heads of a group of which only one axis is broadcast have no single step.
    if mask.shape[1:3] != (1, 1):
        shape = (shape[0], *q.shape[1:3], *shape[3:])
    mask = cupy.ascontiguousarray(cupy.broadcast_to(mask, shape))
    return mask.copy() if mask.data.ptr % 16 else mask


def counts(cupy, lengths, q, k):
    """Return how many queries and keys of each sample to read; one key at least."""
    if lengths is None:
        return None, None
    n_queries, n_keys = q.shape[3], k.shape[3]
    counts = cupy.clip(lengths, 1, n_keys).astype(np.int32)
    return cupy.full(counts.shape, n_queries, np.int32), counts


def blind(cupy, mask, lengths, q, k, causal, offset):
    """Tell which queries see no key; None if all see one."""
    if lengths is not None:
        return (lengths <= 0)[:, None, None, None]
    if mask is None:
        return None
    seen = mask if mask.dtype == np.bool_ else ~(mask == -np.inf)  # NaN is not hidden
    if causal and offset < k.shape[3] - 1:
        last = cupy.arange(q.shape[3])[:, None] + offset
        seen = seen & (cupy.arange(k.shape[3])[None, :] <= last)
    return cupy.logical_not(seen.any(axis=-1))
