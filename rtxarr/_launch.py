"""What a kernel launch is made of: grids and blocks, and the buffer with a kernel's arguments."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Call", "Loaded", "allow_shared", "launch_shape", "planned"]


class Loaded(NamedTuple):
    """A kernel on a GPU.

    Attributes
    ----------
    handle : int
    formats : list of str
        Struct's formats of its arguments.
    owner : object
        What keeps it loaded.
    shared : int
        Bytes of shared memory that a block has beyond what the code names.
    """

    handle: int
    formats: list[str]
    owner: Any
    shared: int = 0


def allow_shared(driver: Any, handle: int, device_id: int, n_bytes: int) -> None:
    """Let blocks of a kernel have shared memory beyond what its code names."""
    kernel, device = driver.CUkernel(handle), driver.CUdevice(device_id)
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, n_bytes, kernel, device)
    if int(status):
        raise RuntimeError(f"a block cannot have {n_bytes} bytes of shared memory: {status!r}")


class Call:
    """A launch, complete but for addresses and numbers: a buffer with the arguments.

    numba flattens an array to eight-byte slots: no owner (twice), size, itemsize, address, shape
    and strides. What varies lies at the buffer's end. ``array`` is the type of the arrays.
    """

    def __init__(
        self, loaded: Loaded, shape: tuple[tuple, tuple], args: tuple, array: Any, name: Any
    ) -> None:
        self.owner = loaded.owner
        self.name = name
        self.handle = loaded.handle
        grid, block = (part + (1,) * (3 - len(part)) for part in shape)
        self.shape = (*grid, *block, loaded.shared)
        fixed: list[int] = []
        slots = []  # for each slot its place among what is fixed, or ~place among what varies
        for i, x in enumerate(args):
            if type(x) is not array:
                slots.append(~i)
                continue
            head, tail = (0, 0, x.size, x.itemsize), (*x.shape, *x.strides)
            first = len(fixed)
            fixed += (*head, *tail)
            last = first + len(head)
            slots += [*range(first, last), ~i, *range(last, last + len(tail))]
        self.write = struct.Struct("=" + "".join(loaded.formats)).pack_into
        self.start = 8 * len(fixed)
        self.buffer = (ctypes.c_int64 * (len(fixed) + len(args)))(*fixed)
        first = ctypes.addressof(self.buffer)
        addresses = [first + 8 * (i if i >= 0 else len(fixed) + ~i) for i in slots]
        self._pointers = (ctypes.c_void_p * len(slots))(*addresses)
        self.address = ctypes.addressof(self._pointers)


def planned(what: tuple, args: tuple, plan: Any) -> tuple[tuple, tuple]:
    """Give kernel, grid and block, and the arguments as the kernel sees them.

    ``what`` is the first, or with a plan that and its options.
    """
    if plan is None:
        return what, args
    found, flat = plan(what[1], args), []
    for x in args:
        if getattr(x, "ndim", 1) != 1 and not isinstance(x, np.generic):
            if not x.flags.c_contiguous:
                raise ValueError(f"an array must be C-contiguous, got strides {x.strides}")
            x = x.reshape(-1)
        flat.append(x)
    return found, tuple(flat)


def launch_shape(n: int | tuple, block: int | tuple | None) -> tuple[tuple, tuple] | None:
    """Return (grid, block) for ``launch``'s arguments; None when there is nothing to run."""
    n = n if isinstance(n, tuple) else (n,)
    if min(n) < 0:
        raise ValueError(f"n_threads_or_grid must not be negative, got {n}")
    if min(n) == 0:
        return None
    if block is None:
        # 256 threads: warps lie along the first axis, the rest of the block along the second.
        first = 256 if len(n) == 1 else min(256, 1 << (n[0] - 1).bit_length())
        block = (first, *(256 // first,) * (len(n) > 1), *(1,) * (len(n) > 2))
        n = tuple(-(-size // width) for size, width in zip(n, block, strict=True))
    block = block if isinstance(block, tuple) else (block,)
    if n[0] >= 2**31 or max(n[1:], default=1) > 65535:
        raise ValueError(f"a grid holds at most (2**31 - 1, 65535, 65535) blocks, got {n}")
    across, deep = max(block[:2]), max(block[2:], default=1)
    if min(block) < 1 or across > 1024 or deep > 64 or math.prod(block) > 1024:
        raise ValueError(
            f"a block holds at most (1024, 1024, 64) threads, 1 to 1024 in all, got {block}"
        )
    return n, block
