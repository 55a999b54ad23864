"""Starting kernels on an NVIDIA GPU through CuPy, with nothing that compiles them.

What belongs to a shape (sizes, blocks) is put into a buffer of arguments when a kernel is first
started on a device; what belongs to a call (addresses, numbers, whether packets are aligned) at
each call.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr.polygraph import _cache, _gpu_memory
from rtxarr.polygraph.codegen._launch import Argument, Launches, number_bytes

# struct's formats of numbers that are parameters; what has an "s" is passed by its bytes.
_FORMATS = {
    "bool": "?7x", "i8": "b7x", "i16": "h6x", "i32": "i4x", "i64": "q",
    "u8": "B7x", "u16": "H6x", "u32": "I4x", "u64": "Q", "f32": "f4x", "f64": "d",
    "f16": "2s6x", "bf16": "2s6x", "c64": "8s", "c128": "16s",
}  # fmt: skip


class Gpu:
    """CuPy's part: devices, streams, memory, loading and starting kernels."""

    def __init__(self) -> None:
        cupy = self._cupy = _device.cupy
        self.current_device = cupy.cuda.runtime.getDevice
        self.current_stream = cupy.cuda.get_current_stream
        self.start = cupy.cuda.driver.launchKernel
        self.empty = cupy.ndarray
        self.scratch = cupy.cuda.alloc

    def new(self, shape: tuple[int, ...], dtype: Any) -> Callable[[], Any] | None:
        """Return what gives small uninitialized arrays of one kind; None for large ones."""
        if math.prod(shape) * np.dtype(dtype).itemsize > _gpu_memory.MOST:
            return None
        return _gpu_memory.keeping(self.empty, shape, dtype, self._place)

    def arena(self, n_bytes: int, parts: Sequence) -> tuple[Callable, Callable | None]:
        """Return what gives arrays that lie in one block, and what takes them back."""
        return _gpu_memory.arena(self.empty, n_bytes, parts, self._place)

    def _place(self) -> tuple[int, int]:
        return self.current_device(), self.current_stream().ptr

    def capability(self, device_id: int) -> tuple[int, int]:
        """Return the compute capability, such as (9, 0)."""
        words = self._cupy.cuda.Device(device_id).compute_capability
        return int(words[:-1]), int(words[-1])

    @functools.cache  # noqa: B019  (a process has few)
    def shared_limit(self, device_id: int) -> int:
        """Return the bytes of shared memory that a block can have."""
        runtime = self._cupy.cuda.runtime
        return runtime.deviceGetAttribute(
            runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device_id
        )

    def use(self, device_id: int) -> None:
        """Make the device's context current: the driver wants that of each thread."""
        self._cupy.cuda.runtime.setDevice(device_id)

    def load(self, code: bytes) -> Any:
        """Return a module of the current device, which has ``function(name, shared)``."""
        return _Module(self._cupy, code)


class _Module:
    """Machine code on a GPU."""

    def __init__(self, cupy: Any, code: bytes) -> None:
        self._driver = cupy.cuda.driver
        self._module = cupy.cuda.function.Module()
        self._module.load(code)
        self._shared: dict[str, int] = {}
        self._lock = threading.Lock()

    def function(self, name: str, shared: int) -> int:
        """Return the handle of an entry point that may have ``shared`` bytes a block."""
        handle = self._module.get_function(name).ptr
        with self._lock:
            if shared > self._shared.get(name, 48 << 10):
                attribute = self._driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._driver.funcSetAttribute(handle, attribute, shared)
                self._shared[name] = shared
        return handle


def launcher(
    gpu: Any,
    kernel: Launches,
    machine_code: Callable[[tuple[int, int]], bytes],
    codes: Mapping[tuple[int, int], Future] = MappingProxyType({}),
) -> Callable:
    """Return the function of arrays and NumPy scalars that starts a kernel on the current stream.

    ``codes`` has its machine code for some compute capabilities; ``machine_code`` gives that of
    others when they are met.
    """
    return _Launcher(gpu, kernel, machine_code, codes).run


# Never unloaded: a captured graph may outlive the program that it was captured from.
_modules: dict[tuple, Any] = {}
_modules_lock = threading.Lock()


@functools.lru_cache(1024)
def _compiled(text: str) -> Any:
    """Return the code of a launcher's text, which many kernels share."""
    return compile(text, "<launcher>", "exec")


class _Launcher:
    """Starts a kernel: straight-line text, and for each thread and device a buffer of arguments.

    The text of a kernel that reads ``a0`` and the number ``a1`` and writes ``a2``::

        def run(a0, a1, a2):
            device = current_device()
            try:
                call = thread.calls[device]
            except (AttributeError, KeyError):
                call = prepare(device, (a0, a2))
            p0 = a0.data.ptr
            p2 = a2.data.ptr
            call.write(call.buffer, 0, p0, a1, p2, not (p0 | p2) & 15)
            start(call.handles[0], 512, 1, 1, 256, 1, 1, 0, current_stream().ptr, call.lists[0], 0)
    """

    def __init__(self, gpu: Any, kernel: Launches, machine_code: Callable, codes: Mapping) -> None:
        self.gpu = gpu
        self.kernel = kernel
        self.machine_code = machine_code
        self.codes = codes
        self._thread = threading.local()
        self.text = self._write()
        names = {
            "current_device": gpu.current_device,
            "current_stream": gpu.current_stream,
            "start": gpu.start,
            "scratch": gpu.scratch,
            "thread": self._thread,
            "prepare": self._prepare,
        }
        exec(_compiled(self.text), names)
        self.run: Callable = names["run"]

    def _write(self) -> str:
        kernel = self.kernel
        buffers = _buffers(kernel)
        rows = [] if kernel.table is None else kernel.table.arrays
        pointers = {b.value for b in buffers if "*" in b.type} | {i for row in rows for i in row}
        n_arguments = len(pointers | {b.value for b in buffers})
        words = [f"{'p' if '*' in b.type else 'a'}{b.value}" for b in buffers]
        for i, b in enumerate(buffers):
            if "s" in _FORMATS.get(b.type, ""):
                words[i] += ".tobytes()"
        arrays = [f"a{i}" for i in sorted(pointers)]
        lines = [
            f"def run({', '.join(f'a{i}' for i in range(n_arguments))}):",
            "device = current_device()",
            "try:",
            "    call = thread.calls[device]",
            "except (AttributeError, KeyError):",
            f"    call = prepare(device, ({''.join(a + ', ' for a in arrays)}))",
            *(f"p{a[1:]} = {a}.data.ptr" for a in arrays),
        ]
        for i, size in enumerate(kernel.scratch):
            lines += [f"s{i} = scratch({size})"]
            words.append(f"s{i}.ptr")
        words.append(_packed(kernel))
        words += [f"p{i}" for row in rows for i in row]
        lines.append(f"call.write(call.buffer, 0, {', '.join(words)})")
        if len(kernel.launches) > 1:
            lines.append("stream = current_stream().ptr")
        stream = "stream" if len(kernel.launches) > 1 else "current_stream().ptr"
        for i, launch in enumerate(kernel.launches):
            if 0 in launch.grid:  # of no elements; the driver wants one block at least
                continue
            shape = ", ".join(map(str, (*launch.grid, 1, *launch.block, 1, launch.shared)))
            lines.append(f"start(call.handles[{i}], {shape}, {stream}, call.lists[{i}], 0)")
        return "\n    ".join(lines) + "\n"

    def _prepare(self, device: int, arrays: tuple) -> _Call:
        for x in arrays:
            if x.data.device_id != device:
                raise ValueError(
                    f"an array is on cuda:{x.data.device_id} but the current device is "
                    f"cuda:{device}; enter `with rx.device('cuda:{x.data.device_id}')`"
                )
        gpu = self.gpu
        gpu.use(device)
        cc = gpu.capability(device)
        code = self.codes[cc].result() if cc in self.codes else None
        if code is None:
            code = self.machine_code(cc)
        with _modules_lock:
            key = _cache.digest(code), device
            module = _modules.get(key)
            if module is None:
                module = _modules[key] = gpu.load(code)
        call = _Call(self.kernel, module)
        if not hasattr(self._thread, "calls"):
            self._thread.calls = {}
        self._thread.calls[device] = call
        return call


class _Call:
    """The arguments of a kernel's launches in memory: first what varies, then what is fixed.

    A table lies across: the addresses in it are the last to vary, the rest of it is fixed.
    """

    def __init__(self, kernel: Launches, module: Any) -> None:
        self._module = module
        self.handles = [module.function(launch.name, launch.shared) for launch in kernel.launches]
        formats = [_FORMATS.get(b.type, "Q") for b in _buffers(kernel)]
        formats += ["Q"] * len(kernel.scratch) + ["q"]
        rest = b""
        if kernel.table is not None:
            formats += ["Q"] * sum(map(len, kernel.table.arrays))
            rest = kernel.table.rest
        self.write = struct.Struct("=" + "".join(formats)).pack_into
        places = [0, *itertools.accumulate(struct.calcsize("=" + f) for f in formats)]
        content = bytearray(places[-1]) + rest
        self._pointers = []
        offsets: list[list[int]] = []
        for launch in kernel.launches:
            offsets.append([])
            for a in launch.arguments:
                if a.kind in ("number", "divisor"):
                    offsets[-1].append(len(content))
                    content += number_bytes(a, wide=kernel.wide).ljust(16, b"\0")
                else:
                    offsets[-1].append(places[_varying(kernel, a)])
        self.buffer = (ctypes.c_ubyte * len(content)).from_buffer(content)
        first = ctypes.addressof(self.buffer)
        self._pointers = [(ctypes.c_void_p * len(o))(*(first + x for x in o)) for o in offsets]
        self.lists = [ctypes.addressof(p) for p in self._pointers]


def _buffers(kernel: Launches) -> list[Argument]:
    """Return the arguments that a call of the kernel takes, in its order, but those in a table."""
    found = {a.value: a for x in kernel.launches for a in x.arguments if a.kind == "buffer"}
    return [found[i] for i in sorted(found)]


def _varying(kernel: Launches, a: Argument) -> int:
    """Return the place of an argument among those that vary from call to call."""
    given = [b.value for b in _buffers(kernel)]
    if a.kind == "buffer":
        return given.index(a.value)
    if a.kind == "scratch":
        return len(given) + a.value
    return len(given) + len(kernel.scratch) + (a.kind == "table")


def _packed(kernel: Launches) -> str:
    """Return the text of the test that all packets are aligned."""
    if not kernel.packed:
        return "0"
    by_size: dict[int, list[str]] = {}
    for number, size in kernel.alignments:
        by_size.setdefault(size, []).append(f"p{number}")
    tests = [f"({' | '.join(names)}) & {size - 1}" for size, names in by_size.items() if size > 1]
    return f"not ({' or '.join(tests)})" if tests else "1"
