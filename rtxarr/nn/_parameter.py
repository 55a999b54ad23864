"""Parameter and Buffer: the arrays that a module owns."""

from collections.abc import Callable
from typing import Any

from rtxarr._device import Device, device_of, is_array, namespace
from rtxarr._device import device as get_device
from rtxarr._device import to_device as move
from rtxarr._out_of_memory import explains_out_of_memory
from rtxarr.autograd import Tensor
from rtxarr.autograd._tape import mark_changed, raw
from rtxarr.dtypes import as_dtype, is_inexact
from rtxarr.nn import initializers


class Parameter(Tensor):
    """A trained array of a module.

    Parameters
    ----------
    value : array, Tensor, nested list, or shape
        Values are copied. A shape, an int or a tuple of ints, needs ``init``.
    init : str or callable, optional
        How to fill a shape: a name or function of :mod:`rtxarr.nn.initializers`.
    dtype : dtype, default that of the array, float32 for lists and shapes
    device : Device or str, default where the array is, the current device for lists and shapes
    generator : Generator, default :func:`rtxarr.random.default_generator`
        Source of the random numbers of ``init``.
    requires_grad : bool, default True
        False freezes the parameter: optimizers pass over it.

    Examples
    --------
    >>> from rtxarr.nn import Parameter
    >>> Parameter((3,), init="ones", device="cpu").data
    array([1., 1., 1.], dtype=float32)
    """

    __slots__ = ()

    def __init__(
        self,
        value: Any,
        *,
        init: str | Callable | None = None,
        dtype: Any = None,
        device: str | Device | None = None,
        generator: Any = None,
        requires_grad: bool = True,
    ):
        if init is not None:
            data = _initialized(value, init, dtype, device, generator)
        else:
            data = _copied(value, dtype, device)
        super().__init__(data, requires_grad=requires_grad)


class Buffer(Tensor):
    """An array of a module that is saved with it but not trained, like a running mean.

    Parameters
    ----------
    value : array, Tensor or nested list
        Copied.
    dtype : dtype, default that of the array, float32 for lists
    device : Device or str, default where the array is, the current device for lists
    """

    __slots__ = ()

    def __init__(self, value: Any, *, dtype: Any = None, device: str | Device | None = None):
        super().__init__(_copied(value, dtype, device))


@explains_out_of_memory
def _copied(value, dtype, device):
    """Give a fresh array with the values of an array, Tensor or nested list."""
    value = raw(value)
    if isinstance(value, tuple):
        raise TypeError(f"a shape needs init, as in Parameter({value}, init='zeros')")
    if not is_array(value):
        with get_device(device):
            return namespace().asarray(value, dtype="float32" if dtype is None else dtype)
    if device is not None and get_device(device) != device_of(value):
        value = move(value, device)
    # A copy of a NumPy scalar is an array, which can be written into.
    return namespace(value).asarray(value, dtype=dtype, copy=True)


@explains_out_of_memory
def _initialized(shape, init, dtype, device, generator):
    shape = (shape,) if isinstance(shape, int) else shape
    if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise TypeError(
            f"with init, the value must be a shape: an int or a tuple of ints >= 0, got {shape!r}"
        )
    dtype = as_dtype("float32" if dtype is None else dtype)
    if not is_inexact(dtype):
        raise TypeError(f"dtype must be a floating-point or complex dtype, got {dtype}")
    with get_device(device):
        data = initializers.get(init)(shape, dtype=dtype, generator=generator)
    if tuple(data.shape) != shape or data.dtype != dtype:
        raise ValueError(
            f"init must give an array of shape {shape} and dtype {dtype}, got {data.shape} and "
            f"{data.dtype}"
        )
    return data


def replace_data(tensor: Tensor, data: Any) -> None:
    """Give a leaf other data, on another device or of another dtype, and its gradient too.

    A graph that saved the old data refuses to run.
    """
    grad = tensor.grad
    tensor.data = data
    if grad is not None:
        tensor.grad = move(namespace(grad).astype(grad, data.dtype), device_of(data))
    mark_changed(tensor)
