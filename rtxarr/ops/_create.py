"""Creation functions: raw arrays on the current device, or on ``device``."""

import sys

import numpy as np

from rtxarr import _device, dtypes
from rtxarr._out_of_memory import explains_out_of_memory
from rtxarr.autograd._mode import TRACED, state
from rtxarr.autograd._op import differentiable, explained, nondifferentiable
from rtxarr.autograd._tape import Tensor, raw
from rtxarr.ops._elementwise import astype

__all__ = [
    "arange",
    "asarray",
    "empty",
    "empty_like",
    "eye",
    "from_dlpack",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "to_device",
    "zeros",
    "zeros_like",
]


_NEW = """

    Parameters
    ----------
    {parameters}
    dtype : dtype, optional
        By default {default}.
    device : Device or str, optional
        By default the current device; see :func:`rtxarr.device`.
"""
_FLOAT = "float64"

# DLPack's kinds of memory: plain and pinned by CUDA; CUDA's, and CUDA's that moves.
_HOST_MEMORY = (1, 3)
_CUDA_MEMORY = (2, 13)


def _numeric(name, device, shape, *args, dtype):
    """Call :func:`_create`, refusing dtypes of objects, text and dates."""
    made = _create(name, device, shape, *args, dtype=dtype)
    if made.dtype.kind in "OSUMm":
        raise TypeError(f"dtype must be of numbers or bools, got {made.dtype}")
    return made


@explains_out_of_memory
def _create(name, device, *args, **options):
    """Call the creation function ``name`` of the namespace of ``device`` (None: the current)."""
    if state.mode & TRACED:
        xp = state.tracing.namespace_at(device)
        return getattr(xp, name)(*args, **options)
    if device is None:
        return getattr(_device.namespace(), name)(*args, **options)
    with _device.device(device):
        return getattr(_device.namespace(), name)(*args, **options)


@explained
def asarray(obj, /, *, dtype=None, device=None, copy=None):
    """Make a raw array (a Tensor stays one) from scalars, nested lists or any array.

    Parameters
    ----------
    obj : scalar, nested sequence, array, Tensor or object with DLPack
        Arrays stay on their device unless ``device`` says otherwise; those of other libraries
        (torch, cudf, cugraph, Numba) are taken over without a copy, through DLPack or
        ``__cuda_array_interface__``.
    dtype : dtype, optional
    device : Device or str, optional
    copy : bool, optional
        True always copies; False raises ValueError where a copy would be needed.

    Returns
    -------
    array or Tensor
    """
    if isinstance(obj, Tensor):
        return _asarray_tensor(obj, dtype, device, copy)
    if isinstance(obj, (list, tuple)):
        obj = _plain(obj)
    if _is_foreign(obj):
        if hasattr(obj, "__dlpack__"):
            obj = from_dlpack(obj)
        else:
            obj = _create("asarray", "cuda", obj)
    if _device.is_array(obj):
        if device is not None and _device.device(device) != _device.device_of(obj):
            if copy is False:
                raise ValueError(f"copy=False cannot move an array to {device}")
            obj, copy = _device.to_device(obj, device), None
        return _device.namespace(obj).asarray(obj, dtype=dtype, copy=copy)
    made = _create("asarray", device, obj, dtype=dtype, copy=copy)
    if made.dtype.kind in "OSUM":
        if dtype is not None:
            raise TypeError(f"dtype must be of numbers or bools, got {made.dtype}")
        if isinstance(obj, int):
            raise OverflowError(f"obj must fit into an integer of 64 bits, got {obj}")
        raise TypeError(f"obj must hold numbers or bools, got {type(obj).__name__}: {made.dtype}")
    return made


def _is_foreign(obj):
    """Tell whether ``obj`` is an array of a library whose arrays lack the standard's methods."""
    if isinstance(obj, (np.ndarray, np.generic)) or _device.is_device_array(obj):
        return False
    if hasattr(obj, "__array_namespace__") or isinstance(obj, type):
        return False
    return hasattr(obj, "__dlpack__") or hasattr(obj, "__cuda_array_interface__")


def _plain(obj):
    """Replace tensors inside nested lists by arrays."""
    if isinstance(obj, (list, tuple)):
        return [_plain(part) for part in obj]
    if isinstance(obj, Tensor):
        if obj.requires_grad:
            raise TypeError("a list of tensors that require grad loses them; use rx.stack(list)")
        return obj.data
    return obj


def _asarray_tensor(obj, dtype, device, copy):
    if device is not None and _device.device(device) != _device.device_of(obj.data):
        obj = obj.to_device(device)
    wanted = obj.dtype if dtype is None else dtype
    if wanted == obj.dtype and not copy:
        return obj
    if copy is False:
        raise ValueError(f"copy=False cannot convert {obj.dtype} to {wanted}")
    return astype(obj, wanted)


@explained
def from_dlpack(x, /, *, device=None, copy=None):
    """Take over an array of another library through DLPack, without a copy where possible.

    Parameters
    ----------
    x : object with ``__dlpack__`` and ``__dlpack_device__``
    device : Device or str, optional
    copy : bool, optional
    """
    if not hasattr(x, "__dlpack__"):
        raise TypeError(f"x must have __dlpack__, got {type(x).__name__}")
    x = raw(x)
    kind, index = x.__dlpack_device__()
    if int(kind) not in _HOST_MEMORY + _CUDA_MEMORY:
        raise BufferError(f"x must lie on the CPU or on a CUDA device, got DLPack's device {kind}")
    place = "cpu" if int(kind) in _HOST_MEMORY else f"cuda:{index}"
    options = {} if copy is None else {"copy": copy}
    if str(getattr(x, "dtype", "")) == "torch.bfloat16" and place == "cpu":
        if x.requires_grad:
            raise BufferError("x must not require grad, which DLPack does not carry; detach it")
        # Which NumPy takes as numbers of another type only.
        x = x.view(sys.modules["torch"].int16)
        out = _create("from_dlpack", place, x, **options).view(dtypes.bfloat16)
    else:
        out = _create("from_dlpack", place, x, **options)
    return out if device is None else _device.to_device(out, device)


def _shaped(name, summary):
    def function(shape, *, dtype=None, device=None):
        return _numeric(name, device, shape, dtype=dtype)

    return explained(_documented(function, name, summary, "shape : int or tuple of int", _FLOAT))


def _documented(function, name, summary, parameters, default):
    function.__name__ = function.__qualname__ = name
    function.__doc__ = summary + _NEW.format(parameters=parameters, default=default)
    return function


zeros = _shaped("zeros", "Make an array of zeros.")
ones = _shaped("ones", "Make an array of ones.")
empty = _shaped("empty", "Make an array without setting it.")


@explained
def full(shape, fill_value, *, dtype=None, device=None):
    return _numeric("full", device, shape, raw(fill_value), dtype=dtype)


@explained
def arange(start, /, stop=None, step=1, *, dtype=None, device=None):
    if step == 0:
        raise ValueError("step must not be 0")
    return _create("arange", device, start, stop, step, dtype=dtype)


@explained
def linspace(start, stop, /, num, *, dtype=None, device=None, endpoint=True):
    return _create("linspace", device, start, stop, num, dtype=dtype, endpoint=endpoint)


@explained
def eye(n_rows, n_cols=None, /, *, k=0, dtype=None, device=None):
    return _create("eye", device, n_rows, n_cols, k=k, dtype=dtype)


_documented(
    full,
    "full",
    "Make an array filled with one value.",
    "shape : int or tuple of int\n    fill_value : scalar",
    "the default type of the value's kind",
)
_documented(
    arange,
    "arange",
    "Make evenly spaced values in ``[start, stop)``; one argument means ``[0, start)``.",
    "start, stop, step : scalar",
    "int64, or float64 when an argument is a float",
)
_documented(
    linspace,
    "linspace",
    "Make ``num`` evenly spaced values from ``start`` to ``stop``.",
    "start, stop : scalar\n    num : int\n    endpoint : bool, default True",
    _FLOAT,
)
_documented(
    eye,
    "eye",
    "Make a matrix with ones on the ``k``-th diagonal.",
    "n_rows, n_cols : int\n    k : int, default 0",
    _FLOAT,
)


def _like(name, summary):
    def function(x, /, *, dtype=None, device=None):
        if device is not None and _device.device(device) != _device.device_of(x):
            creator = globals()[name.removesuffix("_like")]
            return creator(x.shape, dtype=x.dtype if dtype is None else dtype, device=device)
        return getattr(_device.namespace(x), name)(x, dtype=dtype)

    _documented(function, name, summary, "x : array or Tensor", "the dtype of ``x``")
    return nondifferentiable(function)


zeros_like = _like("zeros_like", "Make zeros of the shape of ``x``.")
ones_like = _like("ones_like", "Make ones of the shape of ``x``.")
empty_like = _like("empty_like", "Make an array of the shape of ``x`` without setting it.")


@explained
def full_like(x, /, fill_value, *, dtype=None, device=None):
    x = raw(x)
    if fill_value is None:
        raise TypeError("fill_value must be a number or an array, got None")
    if device is not None and _device.device(device) != _device.device_of(x):
        return full(x.shape, fill_value, dtype=x.dtype if dtype is None else dtype, device=device)
    return _device.namespace(x).full_like(x, raw(fill_value), dtype=dtype)


_documented(
    full_like,
    "full_like",
    "Make an array of the shape of ``x`` filled with one value.",
    "x : array or Tensor\n    fill_value : scalar",
    "the dtype of ``x``",
)


@differentiable(movement=True)
def to_device(x, device, /, *, stream=None):
    """Give an array on another device; the gradient travels back.

    Parameters
    ----------
    x : array or Tensor
    device : Device or str
    stream : CuPy stream, optional
        Copy on this stream instead of the current one.
    """
    return _device.to_device(x, device, stream=stream)


to_device.defvjps(x=lambda g, x_device: to_device(g, x_device))
