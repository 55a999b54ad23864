"""Starting compiled programs on the current stream of a GPU."""

from __future__ import annotations

import ctypes
import re
import struct
from typing import Any, NamedTuple

from rtxarr import _device
from rtxarr.kernels.tile import _attention_build
from rtxarr.kernels.tile._attention_build import Program
from rtxarr.kernels.tile._build import Signature, cubin

__all__ = ["launch", "load"]


class Loaded(NamedTuple):
    """A program on a GPU: its handle, the threads of a block, and what keeps it there."""

    handle: int
    n_threads: int
    owner: Any


def load(signature: Signature | Program, device_id: int) -> Loaded:
    """Return a program on a GPU, compiling it if it is not on disk."""
    cuda = _device.cupy.cuda
    arch = f"sm_{cuda.Device(device_id).compute_capability}"
    if isinstance(signature, Program):
        name, code = _attention_build.cubin(signature, arch)
    else:
        name, code = cubin(signature, arch)
    cuda.runtime.setDevice(device_id)
    module = cuda.function.Module()
    module.load(code)
    kernel = module.get_function(name)
    most = cuda.driver.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
    n_threads = _n_threads(code) or cuda.driver.funcGetAttribute(most, kernel.ptr)
    return Loaded(kernel.ptr, n_threads, kernel)


def _n_threads(code: bytes) -> int:
    """Read from machine code how many threads a block must have; 0 if it does not say."""
    # EIATTR_REQNTID: a tag, and three numbers of 12 bytes. The driver knows only how many there
    # may be, which is more where blocks share a processor.
    for found in re.finditer(rb"\x04\x10\x0c\x00(.{12})", code, re.DOTALL):
        x, y, z = struct.unpack("<III", found[1])
        if y == z == 1 and 0 < x <= 1024 and x % 32 == 0:
            return x
    return 0


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
