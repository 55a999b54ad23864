"""Attention over 8-bit floating-point numbers, for inference."""

from typing import Any

import numpy as np

from rtxarr._device import is_device_array, namespace
from rtxarr.autograd._tape import raw
from rtxarr.kernels import fp8
from rtxarr.libs.dnn import try_fp8_attention
from rtxarr.ops._attention import scaled_dot_product_attention

_KIND = "e4m3"


def fp8_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scales: tuple[Any, Any, Any],
    out_scale: Any,
    causal: bool = False,
    offset: int = 0,
    scale: float | None = None,
):
    """Give attention from and to 8-bit floating-point numbers.

    Parameters
    ----------
    q : array of uint8, shape (batch, n_heads, n_queries, head_dim)
        Bits of e4m3 numbers, as of ``k`` and ``v``.
    k : array of uint8, shape (batch, n_kv_heads, n_keys, head_dim)
        Consecutive query heads share a key head.
    v : array of uint8, shape (batch, n_kv_heads, n_keys, value_dim)
    scales : (array, array, array), float32 of one element
        What the numbers of q, k and v are to be multiplied by.
    out_scale : array, float32 of one element
        What those of the result are to be multiplied by; numbers that are too large become the
        largest.
    causal : bool, default False
        Let query ``i`` see keys up to ``i + offset`` only.
    offset : int, default 0
    scale : float, default ``1 / sqrt(head_dim)``

    Returns
    -------
    array of uint8, shape (batch, n_heads, n_queries, value_dim)
        Bits of e4m3 numbers; zeros for a query that sees no key.

    Raises
    ------
    TypeError
        When q, k or v are no arrays of uint8, ``scales`` no sequence or ``offset`` no int.
    ValueError
        When shapes do not fit, or a scale is not float32 of one element.

    Notes
    -----
    Not differentiable. On a GPU cuDNN does it where ``head_dim`` and ``value_dim`` are multiples of
    16, and rounds the weights of the values to e4m3 too. Otherwise, and on a CPU, the numbers are
    decoded and :func:`rtxarr.scaled_dot_product_attention` computes in float32;
    :func:`rtxarr.libs.show` counts that.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import nn
    >>> one = np.full((1, 1, 2, 4), 0x38, np.uint8)  # 1.0 in e4m3
    >>> scales = [np.float32([x]) for x in (0.5, 0.5, 3.0)]
    >>> out = nn.fp8_attention(one, one, one, scales=scales, out_scale=np.float32([1.5]))
    >>> hex(out[0, 0, 0, 0])  # 2.0, as 2.0 * 1.5 is the mean of values of 3.0
    '0x40'
    """
    if not isinstance(scales, (tuple, list)):
        raise TypeError(f"scales must be three arrays, got {type(scales).__name__}")
    if isinstance(offset, bool) or not isinstance(offset, (int, np.integer)):
        raise TypeError(f"offset must be an int, got {type(offset).__name__}")
    q, k, v, out_scale, *factors = (raw(x) for x in (q, k, v, out_scale, *scales))
    _check(q, k, v, factors, out_scale)
    options: dict[str, Any] = {"causal": causal, "scale": scale}
    if is_device_array(q):
        arrays = {"scales": tuple(factors), "out_scale": out_scale}
        found = try_fp8_attention(q, k, v, **arrays, offset=offset, **options)
        if found is not None:
            return found
    wide = (fp8.decode(x, _KIND) * by.reshape(()) for x, by in zip((q, k, v), factors, strict=True))
    out = scaled_dot_product_attention(*wide, causal_offset=offset, **options)
    xp = namespace(out)
    if out.size == 0:
        return xp.zeros(out.shape, dtype=xp.uint8)
    rows = out.reshape(-1, out.shape[-1])
    amax = xp.zeros((1,), dtype=xp.float32)  # of no use here
    return fp8.quantize(rows, out_scale.reshape(1), _KIND, amax).reshape(out.shape)


def _check(q, k, v, scales, out_scale):
    kinds = [getattr(x, "dtype", type(x).__name__) for x in (q, k, v)]
    if any(kind != np.uint8 for kind in kinds):
        raise TypeError(f"q, k and v must be uint8, got {kinds[0]}, {kinds[1]} and {kinds[2]}")
    fits = q.ndim == k.ndim == v.ndim == 4 and k.shape[:3] == v.shape[:3]
    fits = fits and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    if not fits or k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ValueError(
            "q, k and v must have shapes (batch, n_heads, n_queries, head_dim), (batch, "
            "n_kv_heads, n_keys, head_dim) and (batch, n_kv_heads, n_keys, value_dim) with a "
            f"multiple of n_kv_heads, got {q.shape}, {k.shape} and {v.shape}"
        )
    if len(scales) != 3:
        raise ValueError(f"scales must be three arrays, got {len(scales)}")
    for name, x in (*((f"scales[{i}]", x) for i, x in enumerate(scales)), ("out_scale", out_scale)):
        if getattr(x, "dtype", None) != np.float32 or x.size != 1:
            got = f"{x.dtype} of shape {x.shape}" if hasattr(x, "dtype") else repr(x)
            raise ValueError(f"{name} must be float32 of one element, got {got}")
