"""Elementwise kernels over arrays as they lie in memory, whatever the order of their axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr._device import launch, namespace

__all__ = ["map_dense", "memory_order"]


def map_dense(
    kernel: Callable[[bool], Any], arrays: tuple, scalars: tuple = (), dtype: Any = None
) -> Any:
    """Run a kernel over all elements of arrays of one shape.

    Parameters
    ----------
    kernel : callable
        ``kernel(wide)`` gives the kernel over flat arrays: of the operands, then of the result,
        then ``scalars``. ``wide`` says that all of them begin at multiples of 16 bytes. Its
        ``per_thread`` is how many elements a thread takes.
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
    xp = namespace(*arrays)
    order = memory_order(arrays[0])
    if order is None:
        arrays = (xp.asarray(arrays[0], copy=True, order="C"), *arrays[1:])
        order = tuple(range(arrays[0].ndim))
    flat = []
    for x in arrays:
        x = x.transpose(order)
        flat.append((x if x.flags.c_contiguous else x.copy(order="C")).reshape(-1))
    shape = tuple(arrays[0].shape[i] for i in order)
    out = xp.empty(shape, dtype=arrays[0].dtype if dtype is None else dtype)
    flat.append(out.reshape(-1))
    run = kernel(all(_address(x) % 16 == 0 for x in flat))
    launch(run, -(-out.size // run.per_thread), (*flat, *scalars))
    return out.transpose(tuple(np.argsort(order)))


def memory_order(x):
    """Give the order of axes in which ``x`` is C-contiguous in memory; None if there is none."""
    if x.flags.c_contiguous:
        return tuple(range(x.ndim))
    order = tuple(sorted(range(x.ndim), key=lambda i: (-x.strides[i], x.shape[i] > 1)))
    return order if x.transpose(order).flags.c_contiguous else None


def _address(x):
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr
