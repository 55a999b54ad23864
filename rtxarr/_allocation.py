"""Where the memory of an array lies, and whose it is."""

import contextlib
from typing import Any

from rtxarr import _device

__all__ = ["allocation_of", "apart", "extent_of", "owner_of"]


def apart() -> contextlib.AbstractContextManager[None]:
    """Let this thread's arrays on a GPU have memory of their own in a ``with`` block.

    CuPy gives memory that is freed to what comes next on the stream it was taken on, though
    another stream may still use it. This memory was nobody's before, and goes back to the driver,
    which waits for the GPU.
    """
    cuda = _device.cupy.cuda
    return cuda.using_allocator(cuda.MemoryPool().malloc)


def owner_of(array: Any) -> int:
    """Identify the array whose memory ``array`` looks at; by ``id``, so while that lives."""
    while (base := getattr(array, "base", None)) is not None:
        array = base
    return id(array)


def allocation_of(array: Any) -> tuple[Any, int]:
    """Return what identifies the memory of ``array`` while it lives, and its size in bytes."""
    if _device.is_device_array(array):
        memory = array.data.mem
        return (memory.device_id, memory.ptr), memory.size
    owner = array
    while _device.is_array(base := getattr(owner, "base", None)):
        owner = base
    return id(owner), owner.nbytes


def extent_of(array: Any) -> tuple[int, int]:
    """Return the addresses between which an array lies; an empty one takes an element's place."""
    on_gpu = _device.is_device_array(array)
    start = array.data.ptr if on_gpu else array.__array_interface__["data"][0]
    if array.flags.c_contiguous:
        return start, start + (array.nbytes or array.itemsize)
    spans = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    begin = start + sum(span for span in spans if span < 0)
    return begin, start + sum(span for span in spans if span > 0) + array.itemsize
