"""Matrix products with what surrounds them in a layer, through cuBLASLt on a GPU.

Operands may be transposed, sliced or broadcast; a copy is made only where rows and columns are
both apart in memory. Half-precision products accumulate in float32. NumPy arrays, and whatever
cuBLASLt does not take, go through plain array code with the same results up to rounding;
:func:`rtxarr.libs.show` counts the latter.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._device import is_device_array, namespace
from rtxarr._replay import set_apart
from rtxarr.dtypes import DTYPES, is_half, result_type
from rtxarr.libs import _cublaslt
from rtxarr.libs._cublaslt import WORKSPACE_BYTES, CublasLt, recipe
from rtxarr.libs._layout import MAX_LAUNCHES, SplitsOnly, Unsupported
from rtxarr.libs._status import Provider

__all__ = [
    "WORKSPACE_BYTES",
    "allow_tf32",
    "autotune",
    "matmul",
    "matmul_bias_grad",
    "matmul_dgelu",
    "matmul_drelu",
    "matmul_fp8",
    "matmul_into",
    "matmul_with_aux",
    "prepare",
    "refusal",
    "status",
    "try_matmul",
    "try_matmul_with_aux",
    "use_workspace",
]

_provider = Provider("matrix products", "CuPy")
_loaded: list[CublasLt | None] = []  # empty until it is looked for
_loading = threading.Lock()
_tf32 = [False]  # a list, to be seen by all threads
# By name, and whether there is a bias.
_EPILOGUES = {
    (None, False): _cublaslt.DEFAULT,
    (None, True): _cublaslt.BIAS,
    ("relu", False): _cublaslt.RELU,
    ("relu", True): _cublaslt.RELU + _cublaslt.BIAS,
    ("gelu", False): _cublaslt.GELU,
    ("gelu", True): _cublaslt.GELU + _cublaslt.BIAS,
}
_F32 = np.dtype("float32")
_GELU_SCALE, _GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _load() -> CublasLt | None:
    """Look for the library, once; warn if it is not there."""
    with _loading:
        if not _loaded:
            cupy = _device.cupy
            try:
                found = CublasLt(cupy)
            except ImportError as error:
                absent = (error.name or "").partition(".")[0] == "nvmath"
                reason = "is not installed" if absent else f"does not import ({error})"
            except Exception as error:  # the bindings raise their own, of a missing library too
                reason = f"cannot use cuBLASLt ({error})"
            else:
                _provider.library = repr(found)
                _loaded.append(found)
                return found
            _loaded.append(None)
            major = cupy.cuda.runtime.runtimeGetVersion() // 1000
            _provider.is_missing(
                f"nvmath-python {reason}", f"pip install --upgrade 'nvmath-python[cu{major}]'"
            )
        return _loaded[0]


def _library() -> CublasLt | None:
    return _loaded[0] if _loaded else _load()


def status() -> Provider:
    """Return what serves matrix products on a GPU, and what went to CuPy instead."""
    if len(_device.devices()) > 1:
        _library()
    return _provider


def _refuse(reason: Unsupported) -> None:
    if text := str(reason):
        _provider.refused[text] += 1


# ----------------------------------------------------------------------------------- settings


def allow_tf32(enabled: bool) -> None:
    """Let products of float32 arrays round their operands to TF32, with 10 bits of mantissa.

    Off by default. Holds for all threads, and for all products that do not say ``tf32=``. Captured
    steps have graphs for each choice.
    """
    _tf32[0] = bool(enabled)
    set_apart("TF32", is_usual=not enabled)


def autotune(enabled: bool) -> None:
    """Time the library's candidates when a product is first met, and keep the fastest on disk.

    Off by default: the library's own first guess is used. What is kept lies where compiled
    kernels do, and holds for the same GPU model and library version.
    """
    _cublaslt.autotuning[0] = bool(enabled)


def refusal(
    a: tuple,
    b: tuple,
    *,
    epilogue: str | None = None,
    bias: bool = False,
    aux_ld: int = 0,
    addend: bool = False,
    scale: float = 1.0,
) -> str:
    """Return why cuBLASLt would not compute a product of arrays that lie so; "" if it would.

    Parameters
    ----------
    a, b : (dtype, shape, strides)
        Of the operands, strides in bytes; they are taken to be well aligned.
    epilogue : {"relu", "gelu"}, optional
    bias : bool
        Whether one is added.
    aux_ld : int
        Elements between rows of what :func:`matmul_with_aux` gives for GELU; 0 without it.
    addend, scale
        As for :func:`matmul`.
    """
    if len(_device.devices()) < 2:
        return "there is no GPU"
    library = _library()
    if library is None:
        return _provider.missing
    kind = _EPILOGUES[epilogue, bias]
    attributes = (_cublaslt.BIAS_POINTER,) * bias
    if aux_ld:
        kind += _cublaslt.AUX
        attributes += (_cublaslt.AUX_POINTER,)
    options = recipe(kind, tf32=_tf32[0], aux_ld=aux_ld, scale=scale, adds=addend)
    return library.refusal(a, b, options, attributes)


def prepare() -> None:
    """Create the handle and workspace of the current device and stream, as before a capture."""
    library = _library()
    if library is not None:
        library.prepare()


@contextlib.contextmanager
def use_workspace(buffer: Any) -> Iterator[None]:
    """Let this thread's products use ``buffer`` for intermediate results.

    Without it, those of a stream share one for good. A graph that may be replayed beside other
    work needs its own: capture it with a buffer that is kept as long as the graph.

    Parameters
    ----------
    buffer : CuPy array of at least ``WORKSPACE_BYTES`` bytes, contiguous
    """
    if buffer.nbytes < WORKSPACE_BYTES:
        raise ValueError(f"buffer must hold {WORKSPACE_BYTES} bytes, got {buffer.nbytes}")
    library = _library()
    if library is None:
        yield
        return
    before = getattr(library.thread, "workspace", None)
    library.thread.workspace = buffer.data.ptr
    try:
        yield
    finally:
        library.thread.workspace = before


# ----------------------------------------------------------------------------------- products


def try_matmul(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    epilogue: str | None = None,
    out: Any = None,
    dtype: Any = None,
    tf32: bool | None = None,
    or_unsplit: bool = False,
    addend: Any = None,
    scale: float = 1.0,
    apart: bool = False,
) -> Any:
    """Return what :func:`matmul` does, or None where cuBLASLt cannot compute it.

    ``or_unsplit``: where it would only split the sum in a way that may lose part of it, let it not
    split it, however slow that is. ``apart``: that ``out`` shares no memory with the operands.
    """
    library = _loaded[0] if _loaded else _load()
    if library is None:
        return None
    try:
        if not type(a) is type(b) is library.array:
            raise Unsupported("an array that is not CuPy's")
        kind = _EPILOGUES[epilogue, bias is not None]
        if dtype is not None and dtype != a.dtype and not (dtype == _F32 and is_half(a.dtype)):
            raise Unsupported(f"a result of {dtype} from {a.dtype}")
        pointers: tuple = ()
        if bias is not None:
            pointers = ((_cublaslt.BIAS_POINTER, _vector(library, bias, b, dtype or b.dtype)),)
            if dtype is not None and dtype != a.dtype:
                raise Unsupported(f"a bias of {bias.dtype} for a result of {dtype}")
        if addend is not None:
            if type(addend) is not library.array:
                raise Unsupported("an array that is not CuPy's")
            if out is not None and not apart:
                raise Unsupported("an addend beside an out")
        if (out is not None and not apart) and (
            library.may_share_memory(out, a) or library.may_share_memory(out, b)
        ):
            raise Unsupported("an out that may overlap an operand")
        tf32 = _tf32[0] if tf32 is None else tf32
        try:
            options = (kind, dtype, tf32, 0, None, False, scale, addend is not None)
            return library.run(a, b, options, out, pointers, addend=addend)
        except SplitsOnly:
            alone = epilogue is None and out is None and addend is None and scale == 1
            if alone and a.ndim == b.ndim == 2:
                size = _rounded(-(-a.shape[1] // 64), 256)
                if a.shape[1] >= 2 * size:
                    return _in_pieces(library, a, b, bias, dtype or a.dtype, tf32, size)
            if not or_unsplit:
                raise
            options = (kind, dtype, tf32, 0, None, True, scale, addend is not None)
            return library.run(a, b, options, out, pointers, addend=addend)
    except Unsupported as reason:
        _refuse(reason)
        return None


def _in_pieces(library, a, b, bias, dtype, tf32, size):
    """Multiply pieces of the summed axis, as one stack of products, and add those up."""
    (m, k), n = a.shape, b.shape[1]
    n_pieces = k // size
    wide = _F32 if is_half(a.dtype) else a.dtype

    def product(a, b):
        try:
            return library.run(a, b, recipe(dtype=wide, tf32=tf32))
        except SplitsOnly:
            return library.run(a, b, recipe(dtype=wide, tf32=tf32, unsplit=True))

    as_strided = _device.cupy.lib.stride_tricks.as_strided
    left = as_strided(a, (n_pieces, m, size), (size * a.strides[1], *a.strides))
    right = as_strided(b, (n_pieces, size, n), (size * b.strides[0], *b.strides))
    total = product(left, right).sum(axis=0)
    done = n_pieces * size
    if done < k:
        total += product(a[:, done:], b[done:])
    if bias is not None:
        total += bias
    return total.astype(dtype, copy=False)


def _vector(library, bias, b, dtype):
    """Give the address of a bias of the products with ``b``."""
    if type(bias) is not library.array:
        raise Unsupported("an array that is not CuPy's")
    if bias.shape != b.shape[-1:] or b.ndim < 2:
        raise ValueError(f"bias must have shape {b.shape[-1:]}, got {bias.shape}")
    if bias.dtype != dtype:
        raise Unsupported(f"a bias of {bias.dtype} for a result of {dtype}")
    if bias.data.device_id != b.data.device_id:
        raise Unsupported("an array that is not on the current device")
    if not bias.flags.c_contiguous:
        raise Unsupported("a bias with gaps")
    return bias.data.ptr


def matmul(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    epilogue: str | None = None,
    out: Any = None,
    dtype: Any = None,
    tf32: bool | None = None,
    addend: Any = None,
    scale: float = 1.0,
) -> Any:
    """Return ``epilogue(scale * (a @ b) + addend + bias)``, rounded once.

    Parameters
    ----------
    a : array, shape (..., m, k) or (k,)
    b : array, shape (..., k, n) or (k,)
    bias : array, shape (n,), optional
    epilogue : {"relu", "gelu"}, optional
        "gelu" is the tanh form. NaN stays NaN.
    out : array, optional
        Where to write the result; it should be stored row by row.
    dtype : dtype, optional
        Of the result: float32 instead of half-precision operands' own.
    tf32 : bool, optional
        Whether float32 operands may be rounded to TF32; see :func:`allow_tf32`.
    addend : array of the result's shape and dtype, optional
        Best contiguous.
    scale : float, default 1

    Returns
    -------
    array, shape (..., m, n); the axis of a vector is left out
    """
    if (epilogue, False) not in _EPILOGUES:
        raise ValueError(f"epilogue must be 'relu', 'gelu' or None, got {epilogue!r}")
    dtype = None if dtype is None else np.dtype(DTYPES.get(dtype, dtype))
    if is_device_array(a):
        options = {"bias": bias, "epilogue": epilogue, "dtype": dtype}
        options |= {"addend": addend, "scale": scale}
        alone = bias is None and epilogue is None and addend is None
        result = try_matmul(a, b, **options, out=out, tf32=tf32, or_unsplit=alone)
        if result is not None:
            return result
    result = _plain(a, b, bias, epilogue, dtype, addend, scale)
    if out is None:
        return result
    if out.shape != result.shape or out.dtype != result.dtype:
        raise ValueError(
            f"out must be {result.dtype} of shape {result.shape}, got {out.dtype} of shape "
            f"{out.shape}"
        )
    out[...] = result
    return out


def matmul_into(a: Any, b: Any, out: Any, **options: Any) -> Any:
    """Write what :func:`matmul` gives to ``out`` and return it; None where that takes a copy.

    ``out`` is of the result's shape and dtype, contiguous, and shares no memory with the operands.
    """
    if is_device_array(a):
        return try_matmul(a, b, out=out, apart=True, **options)
    if options or a.dtype != b.dtype or a.dtype != out.dtype or is_half(out.dtype):
        return None
    return np.matmul(a, b, out=out)


def _wide(xp, x):
    return xp.astype(x, xp.float32) if is_half(x.dtype) else x


def _plain(a, b, bias=None, epilogue=None, dtype=None, addend=None, scale=1.0):
    xp = namespace(a, b, bias, addend)
    alone = bias is None and epilogue is None and addend is None and scale == 1
    if alone and dtype is None and is_device_array(a):
        out = xp.matmul(a, b)  # CuPy's accumulates in float32
    else:
        out = _plain_sum(xp, a, b, bias, addend, scale)
    if epilogue == "relu":
        out = xp.maximum(out, 0)
    elif epilogue == "gelu":
        out = 0.5 * out * (1 + _gelu_tanh(xp, out))
    if dtype is None:
        dtype = result_type(*(x.dtype for x in (a, b, bias) if x is not None))
    return xp.astype(out, dtype, copy=False)


def _plain_sum(xp, a, b, bias=None, addend=None, scale=1.0):
    product = matmul if is_device_array(a) else xp.matmul  # the sum alone may be served
    out = product(_wide(xp, a), _wide(xp, b))
    if scale != 1:
        out = out * scale
    if addend is not None:
        out = out + _wide(xp, addend)
    return out if bias is None else out + _wide(xp, bias)


def _gelu_tanh(xp, x):
    return xp.tanh(_GELU_SCALE * (x + _GELU_CUBIC * x * x * x))


# ------------------------------------------------------------------------- layers and gradients


def matmul_with_aux(
    a: Any, b: Any, *, epilogue: str, bias: Any = None, out: Any = None
) -> tuple[Any, Any]:
    """Return ``epilogue(a @ b + bias)`` and what its gradient needs.

    Parameters
    ----------
    a : array of a floating dtype, shape (m, k)
    b : array, shape (k, n)
    epilogue : {"relu", "gelu"}
    bias : array, shape (n,), optional
    out : array, shape (m, n), optional
        Where cuBLASLt writes the result: contiguous, and no memory of the operands.

    Returns
    -------
    out : array, shape (m, n)
    aux : array
        For :func:`matmul_drelu` one bit an element, uint8 of shape (m, 16 * ceil(n / 128)); for
        :func:`matmul_dgelu` the sum before the epilogue, shape (m, n), in rows of whole 8
        elements.

    Notes
    -----
    The bit is set from zero upwards, so the gradient passes where the sum is exactly zero; that
    of :func:`rtxarr.relu` is zero there. For NaN it may be either.
    """
    _check_matrices(a, b)
    if epilogue not in ("relu", "gelu"):
        raise ValueError(f"epilogue must be 'relu' or 'gelu', got {epilogue!r}")
    if is_device_array(a):
        found = try_matmul_with_aux(a, b, epilogue=epilogue, bias=bias, out=out)
        if found is not None:
            return found
    return _plain_with_aux(a, b, epilogue, bias)


def try_matmul_with_aux(
    a: Any, b: Any, *, epilogue: str, bias: Any = None, out: Any = None
) -> tuple[Any, Any] | None:
    """Return what :func:`matmul_with_aux` does, or None where cuBLASLt cannot compute it.

    Parameters are those of :func:`matmul_with_aux`, and are not checked.
    """
    library = _library()
    if library is None:
        return None
    m, n = a.shape[0], b.shape[1]
    try:
        if not type(a) is type(b) is library.array:
            raise Unsupported("an array that is not CuPy's")
        kind = _EPILOGUES[epilogue, bias is not None] + _cublaslt.AUX
        pointers: tuple = ()
        if bias is not None:
            pointers = ((_cublaslt.BIAS_POINTER, _vector(library, bias, b, b.dtype)),)
        if epilogue == "relu":
            ld = _rounded(n, 128)
            aux = library.empty((m, ld // 8), np.uint8)
        else:
            ld = _rounded(n, 8)
            aux = library.empty((m, ld), a.dtype)[:, :n]
        pointers += ((_cublaslt.AUX_POINTER, aux.data.ptr),)
        return library.run(a, b, recipe(kind, aux_ld=ld), out, pointers), aux
    except Unsupported as reason:
        _refuse(reason)
        return None


def _plain_with_aux(a, b, epilogue, bias):
    xp = namespace(a, b, bias)
    before = _plain_sum(xp, a, b, bias)
    m, n = before.shape
    dtype = result_type(a.dtype, b.dtype)
    if epilogue == "gelu":
        out = 0.5 * before * (1 + _gelu_tanh(xp, before))
        rows = xp.zeros((m, _rounded(n, 8)), dtype=dtype)
        rows[:, :n] = xp.astype(before, dtype)
        return xp.astype(out, dtype), rows[:, :n]
    bits = xp.zeros((m, _rounded(n, 128)), dtype=xp.bool)
    bits[:, :n] = before >= 0
    aux = xp.packbits(bits.reshape(-1), bitorder="little").reshape(m, bits.shape[1] // 8)
    return xp.astype(xp.maximum(before, 0), dtype), aux


def matmul_drelu(g: Any, b: Any, aux: Any, *, bias_grad: bool = False) -> Any:
    """Return ``g @ b`` where the ReLU of the layer before let its sum through, else zero.

    Parameters
    ----------
    g : array of a floating dtype, shape (m, k)
        Gradient of what followed the ReLU.
    b : array, shape (k, n)
    aux : array of uint8
        From :func:`matmul_with_aux`, of the layer of width n.
    bias_grad : bool, default False
        Whether to give the gradient of that layer's bias too.

    Returns
    -------
    array, shape (m, n), or with ``bias_grad`` that and its sum over rows, shape (n,)
    """
    _check_matrices(g, b)
    m, n = g.shape[0], b.shape[1]
    ld = _rounded(n, 128)
    if aux.shape != (m, ld // 8) or aux.dtype != np.uint8:
        raise ValueError(
            f"aux must be uint8 of shape {(m, ld // 8)}, got {aux.dtype} of shape {aux.shape}"
        )
    found = _try_gradient(_cublaslt.DRELU, g, b, aux, ld, aux.flags.c_contiguous, bias_grad)
    if found is not None:
        return found
    xp = namespace(g, b, aux)
    bits = xp.unpackbits(aux.reshape(-1), bitorder="little").reshape(m, ld)[:, :n]
    out = _plain_sum(xp, g, b)
    return _plain_gradient(xp, xp.where(bits != 0, out, xp.zeros_like(out)), g, bias_grad)


def matmul_dgelu(g: Any, b: Any, aux: Any, *, bias_grad: bool = False) -> Any:
    """Return ``g @ b`` times the derivative of the tanh form of GELU at ``aux``.

    Parameters
    ----------
    g : array of a floating dtype, shape (m, k)
        Gradient of what followed the GELU.
    b : array, shape (k, n)
    aux : array of the dtype of ``g``, shape (m, n)
        From :func:`matmul_with_aux`, of the layer of width n.
    bias_grad : bool, default False
        Whether to give the gradient of that layer's bias too.

    Returns
    -------
    array, shape (m, n), or with ``bias_grad`` that and its sum over rows, shape (n,)
    """
    _check_matrices(g, b)
    m, n = g.shape[0], b.shape[1]
    if aux.shape != (m, n) or aux.dtype != g.dtype:
        raise ValueError(
            f"aux must be {g.dtype} of shape {(m, n)}, got {aux.dtype} of shape {aux.shape}"
        )
    ld, rest = divmod(aux.strides[0], aux.itemsize)
    fits = rest == 0 and ld >= n and ld % 8 == 0 and aux.strides[1] == aux.itemsize
    found = _try_gradient(_cublaslt.DGELU, g, b, aux, ld, fits, bias_grad)
    if found is not None:
        return found
    xp = namespace(g, b, aux)
    x = _wide(xp, aux)
    t = _gelu_tanh(xp, x)
    slope = _GELU_SCALE * (1 + 3 * _GELU_CUBIC * x * x)
    derivative = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope
    return _plain_gradient(xp, _plain_sum(xp, g, b) * derivative, g, bias_grad)


def matmul_bias_grad(a: Any, b: Any) -> tuple[Any, Any]:
    """Return ``a @ b`` and the sum of each row of ``a``: a layer's two gradients.

    Parameters
    ----------
    a : array of a floating dtype, shape (m, k)
        The gradient of a layer's result, transposed.
    b : array, shape (k, n)
        The layer's input.

    Returns
    -------
    out : array, shape (m, n)
    sums : array, shape (m,)
    """
    _check_matrices(a, b)
    library = _library() if is_device_array(a) else None
    if library is not None:
        try:
            if not type(a) is type(b) is library.array:
                raise Unsupported("an array that is not CuPy's")
            sums = library.empty(a.shape[:1], a.dtype)
            pointers = ((_cublaslt.BIAS_POINTER, sums.data.ptr),)
            return library.run(a, b, recipe(_cublaslt.BGRADB), None, pointers), sums
        except Unsupported as reason:
            _refuse(reason)
    xp = namespace(a, b)
    sums = xp.astype(xp.sum(_wide(xp, a), axis=1), a.dtype, copy=False)
    return matmul(a, b), sums


def _try_gradient(kind, g, b, aux, ld, fits, bias_grad):
    library = _library() if is_device_array(g) else None
    if library is None:
        return None
    try:
        if not type(g) is type(b) is type(aux) is library.array:
            raise Unsupported("an array that is not CuPy's")
        if not fits or aux.data.device_id != g.data.device_id:
            raise Unsupported("an aux that does not come from matmul_with_aux")
        pointers = ((_cublaslt.AUX_POINTER, aux.data.ptr),)
        if not bias_grad:
            return library.run(g, b, recipe(kind, aux_ld=ld), None, pointers)
        sums = library.empty(b.shape[1:], g.dtype)
        pointers += ((_cublaslt.BIAS_POINTER, sums.data.ptr),)
        kind += _cublaslt.BGRAD
        return library.run(g, b, recipe(kind, aux_ld=ld), None, pointers), sums
    except Unsupported as reason:
        _refuse(reason)
        return None


def _plain_gradient(xp, out, g, bias_grad):
    rounded = xp.astype(out, g.dtype, copy=False)
    if not bias_grad:
        return rounded
    return rounded, xp.astype(xp.sum(out, axis=0), g.dtype, copy=False)


def _check_matrices(a, b):
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"operands must have shapes (m, k) and (k, n), got {a.shape}, {b.shape}")


def _rounded(n, unit):
    """Round up to a multiple; rows have at least one unit."""
    return max(-(-n // unit), 1) * unit


# ---------------------------------------------------------------------------------------- fp8


def matmul_fp8(
    a: Any,
    b: Any,
    *,
    formats: tuple[str, str] = ("e4m3", "e4m3"),
    scale_a: Any = None,
    scale_b: Any = None,
    dtype: Any = "bfloat16",
    bias: Any = None,
    epilogue: str | None = None,
    fast: bool = False,
) -> Any:
    """Return ``epilogue((scale_a * a) @ (scale_b * b) + bias)`` of 8-bit floating-point numbers.

    Parameters
    ----------
    a : array of uint8, shape (..., m, k)
        Bits of e4m3 or e5m2 numbers; best stored row by row.
    b : array of uint8, shape (..., k, n)
        Best stored column by column, as the transpose of a weight is.
    formats : ({"e4m3", "e5m2"}, {"e4m3", "e5m2"})
        Of ``a`` and ``b``.
    scale_a : array of float32, shape () or (1,), or (m, 1) or (..., m, 1) for each row, optional
    scale_b : array of float32, shape () or (1,), or (1, n) or (..., 1, n) for each column, optional
    dtype : dtype, default bfloat16
        Of the result: bfloat16, float16 or float32.
    bias : array of ``dtype``, shape (n,), optional
    epilogue : {"relu", "gelu"}, optional
        "gelu" is the tanh form.
    fast : bool, default False
        Whether to accumulate with fewer bits.

    Returns
    -------
    array, shape (..., m, n)

    Notes
    -----
    cuBLASLt wants k and n to be multiples of 16, at most one e5m2 operand, scales that are both
    for rows or both for all, and a GPU of compute capability 8.9 (for each row: 9.0). Anything
    else is computed in float32. Stacks of both operands with a scale for each row are multiplied
    one pair after the other, at most 32 of them.
    """
    kinds = [getattr(x, "dtype", type(x).__name__) for x in (a, b)]
    if kinds != [np.uint8, np.uint8]:
        raise TypeError(f"a and b must be arrays of uint8, got {kinds[0]} and {kinds[1]}")
    stack = _stack_of(a, b)
    two = isinstance(formats, (tuple, list)) and len(formats) == 2
    if not two or any(name not in _cublaslt.FP8_TYPES for name in formats):
        raise ValueError(f"formats must be two of 'e4m3' and 'e5m2', got {formats!r}")
    if (epilogue, False) not in _EPILOGUES:
        raise ValueError(f"epilogue must be 'relu', 'gelu' or None, got {epilogue!r}")
    by_row = [
        _is_by_row("scale_a", scale_a, (*a.shape[:-1], 1)),
        _is_by_row("scale_b", scale_b, (*b.shape[:-2], 1, b.shape[-1])),
    ]
    dtype = np.dtype(DTYPES.get(dtype, dtype))
    if dtype.name not in ("bfloat16", "float16", "float32", "float64"):
        raise ValueError(f"dtype must be a floating dtype, got {dtype}")
    if bias is not None and bias.shape != b.shape[-1:]:
        raise ValueError(f"bias must have shape {b.shape[-1:]}, got {bias.shape}")
    library = _library() if is_device_array(a) else None
    if library is not None:
        try:
            options = formats, by_row, dtype, bias, epilogue, fast
            return _stacked_fp8(library, stack, a, b, (scale_a, scale_b), options)
        except Unsupported as reason:
            _refuse(reason)
    xp = namespace(a, b, bias)
    wide: list = []
    for x, name, scale in ((a, formats[0], scale_a), (b, formats[1], scale_b)):
        values = xp.take(xp.asarray(_fp8_values(name)), xp.astype(x.reshape(-1), xp.int64))
        values = values.reshape(x.shape)
        wide.append(values if scale is None else values * scale)
    return _plain(wide[0], wide[1], bias, epilogue, dtype)


def _stack_of(a, b):
    """Check the shapes of stacks of matrices; give that of the stack of their products."""
    try:
        if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
            raise ValueError
        return np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(
            f"operands must have shapes (..., m, k) and (..., k, n), got {a.shape}, {b.shape}"
        ) from None


def _is_by_row(name, scale, shape):
    if scale is None:
        return False
    kind, found = getattr(scale, "dtype", type(scale).__name__), getattr(scale, "shape", None)
    if kind != np.float32 or found not in ((), (1,), shape[-2:], shape):
        shapes = f"(), (1,) or {shape}" if len(shape) == 2 else f"(), (1,), {shape[-2:]} or {shape}"
        raise ValueError(f"{name} must be float32 of shape {shapes}, got {kind} of {found}")
    return scale.ndim > 1


def _stacked_fp8(library, stack, a, b, scales, options):
    """Multiply stacks: as one tall matrix, in one launch, or one pair after the other."""
    formats, by_row, dtype, bias, _, _ = options
    arrays = [a, b, *(x for x in (*scales, bias) if x is not None)]
    if any(type(x) is not library.array for x in arrays):
        raise Unsupported("an array that is not CuPy's")
    if any(x.data.device_id != a.data.device_id for x in arrays):
        raise Unsupported("an array that is not on the current device")
    if formats == ("e5m2", "e5m2") or dtype.name not in ("bfloat16", "float16", "float32"):
        raise Unsupported(f"fp8 of {' and '.join(formats)} to {dtype}")
    if by_row[0] != by_row[1]:
        raise Unsupported("an fp8 operand with a scale a row beside one with one for all")
    if not stack:
        return _run_fp8(library, a, b, scales, options)
    shape = (*stack, a.shape[-2], b.shape[-1])
    if math.prod(b.shape[:-2]) == 1:
        first = (0,) * len(stack)
        if by_row[0]:
            rows = _device.cupy.broadcast_to(scales[0], (*a.shape[:-1], 1)).reshape(-1, 1)
            scales = rows, _matrix_of(scales[1], first)
        tall = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
        return _run_fp8(library, tall, _matrix_of(b, first), scales, options).reshape(shape)
    n_pairs = math.prod(stack)
    if not by_row[0]:
        try:
            return _run_fp8(library, a, b, scales, options)
        except Unsupported:
            if n_pairs > MAX_LAUNCHES:
                raise
    if n_pairs > MAX_LAUNCHES:
        raise Unsupported(f"more than {MAX_LAUNCHES} fp8 products with a scale a row")
    out = library.empty(shape, dtype)
    for index in np.ndindex(*stack):
        pair, own = ([_matrix_of(x, index) for x in xs] for xs in ((a, b), scales))
        _run_fp8(library, *pair, own, options, out[index])
    return out


def _matrix_of(x, index):
    """Give the matrix of a stack that serves at a place of the stack it is broadcast to."""
    if x is None or x.ndim <= 2:
        return x
    index = index[len(index) - (x.ndim - 2) :]
    return x[tuple(0 if n == 1 else i for n, i in zip(x.shape, index, strict=False))]


def _in_rows(x):
    """Copy 8-bit matrices unless their rows are without gaps and start at multiples of 16 bytes."""
    *steps, row, col = x.strides
    fits = col == 1 and row >= x.shape[-1] and row % 16 == 0
    return x if fits and all(n >= 0 and n % 16 == 0 for n in steps) else x.copy(order="C")


def _run_fp8(library, a, b, scales, options, out=None):
    formats, by_row, dtype, bias, epilogue, fast = options
    a = _in_rows(a)
    b = _in_rows(b.swapaxes(-1, -2)).swapaxes(-1, -2)
    pointers = []
    kept = []
    # The library's A is our b.
    names = (_cublaslt.B_SCALE_POINTER, _cublaslt.A_SCALE_POINTER)
    for name, scale in zip(names, scales, strict=True):
        if scale is not None:
            if scale.data.ptr % 16 or not scale.flags.c_contiguous:
                scale = scale.copy(order="C")
                kept.append(scale)
            pointers.append((name, scale.data.ptr))
    kind = _EPILOGUES[epilogue, bias is not None]
    if bias is not None:
        if dtype == _F32:
            raise Unsupported("a bias for an fp8 product to float32")
        pointers.append((_cublaslt.BIAS_POINTER, _vector(library, bias, b, dtype)))
    # In the order (a, b), like the product's operands.
    types = tuple(_cublaslt.FP8_TYPES[name] for name in formats)
    how = recipe(kind, dtype=dtype, fp8=(*types, by_row[0], fast))
    return library.run(a, b, how, out, tuple(pointers))


@functools.cache
def _fp8_values(name):
    import ml_dtypes

    kind = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[name]
    return np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
