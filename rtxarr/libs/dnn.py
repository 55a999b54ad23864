"""Attention and convolutions through cuDNN on a GPU, with their gradients.

Arrays may lie in memory in the order of their axes or with channels (heads) last; a copy is made
only of what lies in neither. All plans accumulate in float32, give the same bits each time (unless
:func:`deterministic` says otherwise) and do not round float32 operands (unless
:func:`rtxarr.libs.blas.allow_tf32` does). Whatever cuDNN does not take goes through plain array
code; :func:`rtxarr.libs.show` counts it.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr.dtypes import is_half
from rtxarr.libs import _attention_plans as plans
from rtxarr.libs import _conv_plans, blas
from rtxarr.libs._attention_plans import Attention, AttentionGrad, dense, heads
from rtxarr.libs._conv_plans import Convolution
from rtxarr.libs._cudnn import Cudnn
from rtxarr.libs._layout import Unsupported
from rtxarr.libs._status import Provider

__all__ = [
    "deterministic",
    "refuse_dropout",
    "status",
    "try_attention",
    "try_attention_grad",
    "try_convolution",
    "try_convolution_input",
    "try_convolution_weight",
]

_provider = Provider("attention and convolutions", "CuPy")
_loaded: list[Cudnn | None] = []  # empty until it is looked for
_loading = threading.Lock()
_deterministic = [True]  # a list, to be seen by all threads
_F32 = np.dtype("float32")
_MAX_SIZE = 2**31  # elements of one array
# Of a device's memory that the scores kept for one gradient may take.
_SHARE_OF_MEMORY = 16


def _load() -> Cudnn | None:
    """Look for the library, once; warn if it is not there."""
    with _loading:
        if not _loaded:
            cupy = _device.cupy
            try:
                found = Cudnn(cupy)
            except ImportError as error:
                absent = (error.name or "").partition(".")[0] == "cudnn"
                reason = "is not installed" if absent else f"does not import ({error})"
            except Exception as error:  # of the library that is not found, too
                reason = f"cannot use cuDNN ({error})"
            else:
                _provider.library = repr(found)
                _loaded.append(found)
                return found
            _loaded.append(None)
            major = cupy.cuda.runtime.runtimeGetVersion() // 1000
            _provider.is_missing(
                f"nvidia-cudnn-frontend {reason}",
                f"pip install --upgrade nvidia-cudnn-cu{major} nvidia-cudnn-frontend",
            )
        return _loaded[0]


def _library() -> Cudnn | None:
    return _loaded[0] if _loaded else _load()


def status() -> Provider:
    """Return what serves attention and convolutions on a GPU, and what went to CuPy instead."""
    if len(_device.devices()) > 1:
        _library()
    return _provider


def _refuse(reason: Unsupported) -> None:
    if text := str(reason):
        _provider.refused[text] += 1


def _check(library, *arrays):
    """Refuse what is not on the current device, is too large or has no elements."""
    device_id = library.cupy.cuda.runtime.getDevice()
    for x in arrays:
        if x is None:
            continue
        if type(x) is not library.array:
            raise Unsupported("an array that is not CuPy's")
        if x.data.device_id != device_id:
            raise Unsupported("an array that is not on the current device")
        if x.size >= _MAX_SIZE:
            raise Unsupported(f"arrays of {_MAX_SIZE} elements or more")
        if x.size == 0:
            raise Unsupported("")


def deterministic(enabled: bool) -> None:
    """Choose whether gradients of attention have the same bits each time, as they do by default.

    If not, those by the queries are added up in any order: up to a tenth faster, and without the
    table of all scores in half precision that a fixed order takes. Holds for all threads.
    """
    _deterministic[0] = bool(enabled)


# ---------------------------------------------------------------------------------- attention


def refuse_dropout() -> None:
    """Count an attention with dropout, whose random numbers are to be those of other devices."""
    _provider.refused["attention with dropout"] += 1


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
) -> tuple[Any, Any] | None:
    """Return attention and the logarithms of the sums of exponentials; None if not by cuDNN.

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

    Returns
    -------
    out : CuPy array, shape (batch, n_heads, n_queries, value_dim)
        Zero for a query that sees no key. Heads lie behind the queries in memory.
    logs : CuPy array of float32, shape (batch, n_heads, n_queries)
    """
    try:
        _check_attention(q, k, v, mask, lengths, causal, offset, scale)
        library = _library()
        if library is None:
            return None
        _check(library, q, k, v, mask, lengths)
        band = plans.band(q.shape[2], k.shape[2], causal, offset, window, mask, lengths)
        cupy = library.cupy
        q, k, v = (plans.rows(cupy, x) for x in (q, k, v))
        out = plans.behind(cupy, (*q.shape[:3], v.shape[3]), q.dtype)
        sums = cupy.empty(q.shape[:3], _F32)
        added = plans.added(cupy, mask, q, k)
        fields: list[Any] = [heads(x) for x in (q, k, v, out)]
        fields += [_like_spec(added), lengths is not None, band, scale]
        problem = Attention(*fields)
        pointers = [x.data.ptr for x in (q, k, v)]
        counts = plans.counts(cupy, lengths, q, k)
        pointers += [x.data.ptr for x in (added, *counts) if x is not None]
        library.run(problem, (*pointers, out.data.ptr, sums.data.ptr))
    except Unsupported as reason:
        _refuse(reason)
        return None
    blind = plans.blind(cupy, mask, lengths, q, k, causal, offset, window)
    if blind is not None:
        cupy.copyto(out, 0, where=blind[..., None])
        cupy.copyto(sums, -np.inf, where=blind)
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
) -> list[Any] | None:
    """Return the gradients of q, k, v and the mask (if ``of_mask``); None if not by cuDNN.

    Parameters
    ----------
    grad : CuPy array, the shape of ``out``
    out, sums : CuPy array
        From :func:`try_attention` or equal code.

    Other parameters are those of :func:`try_attention`.
    """
    try:
        _check_attention(q, k, v, mask, lengths, causal, offset, scale)
        if grad.dtype != q.dtype or out.dtype != q.dtype or sums.dtype != _F32:
            raise Unsupported(f"a gradient of {grad.dtype} for {q.dtype}")
        if q.shape[2] == k.shape[2] == 1:
            raise Unsupported("the gradient of one query and one key")
        library = _library()
        if library is None:
            return None
        _check(library, grad, out, sums, q, k, v, mask, lengths)
        band = plans.band(q.shape[2], k.shape[2], causal, offset, window, mask, lengths)
        return _attention_grad(
            library, grad, out, sums, q, k, v, mask, lengths, band, scale, of_mask
        )
    except Unsupported as reason:
        _refuse(reason)
        return None


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


def _check_attention(q, k, v, mask, lengths, causal, offset, scale):
    """Refuse what metadata alone tells, before the library is looked for."""
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


# ------------------------------------------------------------------------------- convolutions


def try_convolution(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    windows: Any,
    groups: int,
    residual: Any = None,
    activation: str | None = None,
) -> Any:
    """Return ``activation(x * weight + bias + residual)``, rounded once; None if not by cuDNN.

    Parameters
    ----------
    x : CuPy array, shape (batch, in_channels, *spatial)
    weight : CuPy array, shape (out_channels, in_channels / groups, *kernel)
    bias : CuPy array, shape (out_channels,), optional
    windows : Windows
        Stride, padding and dilation.
    groups : int
    residual : CuPy array, the shape of the result, optional
    activation : {"relu", "silu"}, optional

    Returns
    -------
    CuPy array, shape (batch, out_channels, *counts)
        With channels last in memory if they are in ``x``.
    """
    if activation not in (None, "relu", "silu"):
        raise ValueError(f"activation must be 'relu', 'silu' or None, got {activation!r}")
    shape = (x.shape[0], weight.shape[0], *windows.counts(x.shape[2:]))
    return _convolve("y", shape, x, weight, None, windows, bias, residual, activation)


def try_convolution_input(
    y: Any, weight: Any, *, windows: Any, groups: int, spatial: tuple[int, ...]
) -> Any:
    """Return the gradient of a convolution by its input; None if not by cuDNN.

    Parameters
    ----------
    y : CuPy array, shape (batch, out_channels, *counts)
    weight : CuPy array, shape (out_channels, in_channels / groups, *kernel)
    windows : Windows
    groups : int
    spatial : tuple of int

    Returns
    -------
    CuPy array, shape (batch, in_channels, *spatial)
        With channels last in memory if they are in ``y``.
    """
    shape = (y.shape[0], weight.shape[1] * groups, *spatial)
    return _convolve("x", shape, None, weight, y, windows)


def try_convolution_weight(
    x: Any, y: Any, *, windows: Any, groups: int, channels_last: bool | None = None
) -> Any:
    """Return the gradient of a convolution by its weight; None if not by cuDNN.

    Parameters
    ----------
    x : CuPy array, shape (batch, in_channels, *spatial)
    y : CuPy array, shape (batch, out_channels, *counts)
    windows : Windows
    groups : int
    channels_last : bool, optional
        Whether channels are to be last in the memory of the result; as in ``x`` when left out.

    Returns
    -------
    CuPy array, shape (out_channels, in_channels / groups, *kernel)
    """
    if groups > 1 and x.shape[0] == 1:
        _refuse(Unsupported("the gradient of one sample by the weights of groups"))
        return None
    shape = (y.shape[1], x.shape[1] // groups, *windows.kernel)
    out = _convolve("weight", shape, x, None, y, windows)
    if out is None or channels_last is None:
        return out
    return _conv_plans.lay_out(out, channels_last)


def _convolve(result, shape, x, weight, y, windows, bias=None, residual=None, activation=None):
    given = [a for a in (x, weight, y) if a is not None]
    dtype = given[0].dtype
    try:
        if dtype != _F32 and not is_half(dtype):
            raise Unsupported(f"convolutions in {dtype}")
        others = [a for a in (*given, bias, residual) if a is not None and a.dtype != dtype]
        if others:
            raise Unsupported(f"convolutions in {dtype} and {others[0].dtype}")
        library = _library()
        if library is None:
            return None
        _check(library, *given, bias, residual)
        if not 0 < math.prod(shape) < _MAX_SIZE:
            raise Unsupported("" if 0 in shape else f"arrays of {_MAX_SIZE} elements or more")
        return _run_convolution(
            library, result, shape, x, weight, y, windows, bias, residual, activation
        )
    except Unsupported as reason:
        _refuse(reason)
        return None


def _run_convolution(library, result, shape, x, weight, y, windows, bias, residual, activation):
    cupy = library.cupy
    given = {name: a for name, a in (("x", x), ("weight", weight), ("y", y)) if a is not None}
    dtype = next(iter(given.values())).dtype
    # What is not a weight decides; where both orders are one, the weight.
    orders = [_conv_plans.channels_last(a) for a in (x, y, weight) if a is not None]
    last = next((order for order in orders if order is not None), is_half(dtype))
    given = {name: _conv_plans.lay_out(a, last) for name, a in given.items()}
    padding = tuple(map(min, windows.padding))
    uneven = None
    if any(before != after for before, after in windows.padding):
        uneven = tuple(
            (before - n, after - n)
            for n, (before, after) in zip(padding, windows.padding, strict=True)
        )
        if x is None:
            spatial = tuple(n + sum(pair) for n, pair in zip(shape[2:], uneven, strict=True))
            shape = (*shape[:2], *spatial)
        else:
            given["x"] = _conv_plans.pad(cupy, given["x"], uneven, last)
    out = _conv_plans.make(cupy, shape, dtype, last)
    specs = {name: _conv_plans.spec(a.shape, dtype, last) for name, a in given.items()}
    specs[result] = _conv_plans.spec(shape, dtype, last)
    pointers = [a.data.ptr for a in given.values()]
    bias_spec = residual_spec = None
    if bias is not None:
        bias_spec = _conv_plans.spec((1, bias.size, *(1,) * (out.ndim - 2)), dtype, True)
        bias = bias if bias.flags.c_contiguous and bias.data.ptr % 16 == 0 else bias.copy()
        pointers.append(bias.data.ptr)
    if residual is not None:
        residual = _conv_plans.lay_out(residual, last)
        residual_spec = specs[result]
        pointers.append(residual.data.ptr)
    flat = out.ndim == 3  # a spatial axis of length 1 comes before the only one
    problem = Convolution(
        result,
        **specs,
        bias=bias_spec,
        residual=residual_spec,
        activation=activation,
        stride=(1, *windows.stride) if flat else windows.stride,
        padding=(0, *padding) if flat else padding,
        dilation=(1, *windows.dilation) if flat else windows.dilation,
        strict=dtype == _F32 and not blas._tf32[0],
    )
    library.run(problem, (*pointers, out.data.ptr))
    if uneven is not None and result == "x":
        out = _conv_plans.lay_out(out[_conv_plans.inner(shape[2:], uneven)], last)
    return out
