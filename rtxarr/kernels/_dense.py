"""Elementwise kernels over arrays as they lie in memory, whatever the order of their axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._device import is_device_array, launch_planned, namespace
from rtxarr.kernels.multi_tensor import contiguous

__all__ = ["map_dense", "memory_order", "packed"]


def map_dense(
    kernel: Callable, options: tuple, arrays: tuple, scalars: tuple = (), dtype: Any = None
) -> Any:
    """Run a kernel over all elements of arrays of one shape.

    Parameters
    ----------
    kernel : callable
        ``kernel(*options, dtype, wide)`` gives the kernel over flat arrays: of the operands, then
        of the result, then ``scalars``. ``dtype`` is that of the first array; ``wide`` says that
        all of them begin at multiples of 16 bytes. Its ``per_thread`` is how many elements a
        thread takes.
    options : tuple
        Hashable.
    arrays : tuple of array
        Not empty.
    scalars : tuple
    dtype : dtype, default that of the first array

    Returns
    -------
    array
        In the memory order of the first array if that is dense, else row by row. Operands that
        lie otherwise are copied.
    """
    order = None
    if not all(map(contiguous, arrays)):
        order = memory_order(arrays[0])
        if order is None:
            order = tuple(range(arrays[0].ndim))
        arrays = tuple(packed(x.transpose(order)) for x in arrays)
    first = arrays[0]
    out = _device.empty(first, first.shape, first.dtype if dtype is None else dtype)
    launch_planned(_flat, (kernel, options, len(scalars)), (*arrays, out, *scalars))
    return out if order is None else out.transpose(tuple(np.argsort(order)))


def _flat(options, args):
    kernel, options, n_scalars = options
    arrays = args[: len(args) - n_scalars]
    run = kernel(*options, arrays[0].dtype, all(_address(x) % 16 == 0 for x in arrays))
    return run, -(-arrays[-1].size // run.per_thread), None


def memory_order(x):
    """Give the order of axes in which ``x`` is C-contiguous in memory; None if there is none."""
    if x.flags.c_contiguous:
        return tuple(range(x.ndim))
    order = tuple(sorted(range(x.ndim), key=lambda i: (-x.strides[i], x.shape[i] > 1)))
    return order if x.transpose(order).flags.c_contiguous else None


def packed(x):
    """Give an array whose elements lie row by row in memory, which may be ``x`` itself."""
    if getattr(x, "_c_contiguous", False) or contiguous(x):  # spares most a call
        return x
    if not is_device_array(x):
        return namespace(x).asarray(x, copy=True, order="C")
    from rtxarr.kernels.transpose import contiguous as copied

    return copied(x)


def _address(x):
    """Give where an array begins."""
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr
