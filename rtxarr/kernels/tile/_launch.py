"""Starting compiled programs on the current stream of a GPU."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from rtxarr import _device
from rtxarr.kernels.tile._build import Signature, cubin

__all__ = ["launch", "load"]


class Loaded(NamedTuple):
    """A program on a GPU: its handle, the threads of a block, and what keeps it there."""

    handle: int
    n_threads: int
    owner: Any


def load(signature: Signature, device_id: int) -> Loaded:
    """Return a program on a GPU, compiling it if it is not on disk."""
    cuda = _device.cupy.cuda
    name, code = cubin(signature, f"sm_{cuda.Device(device_id).compute_capability}")
    cuda.runtime.setDevice(device_id)
    module = cuda.function.Module()
    module.load(code)
    kernel = module.get_function(name)
    # The compiler fixes how many threads a block has.
    most = cuda.driver.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
    return Loaded(kernel.ptr, cuda.driver.funcGetAttribute(most, kernel.ptr), kernel)


def launch(loaded: Loaded, n_blocks: int, values: list[int]) -> None:
    """Start a program.

    Parameters
    ----------
    loaded : Loaded
        Of the current GPU.
    n_blocks : int
    values : list of int
        For each array its address, shape and strides (in elements, one for lines of one), for a
        scalar its bits.
    """
    cuda = _device.cupy.cuda
    # The driver wants the context current in each thread; CuPy sets it only when it is used.
    cuda.runtime.setDevice(cuda.runtime.getDevice())
    # Eight bytes for each; of a narrower argument the driver reads the lower ones. It copies them
    # before it returns.
    buffer = (ctypes.c_int64 * len(values))(*values)
    first = ctypes.addressof(buffer)
    pointers = (ctypes.c_void_p * len(values))(*range(first, first + 8 * len(values), 8))
    cuda.driver.launchKernel(
        loaded.handle, n_blocks, 1, 1, loaded.n_threads, 1, 1, 0,
        cuda.get_current_stream().ptr, ctypes.addressof(pointers), 0,
    )  # fmt: skip
