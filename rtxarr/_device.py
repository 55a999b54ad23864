"""Namespaces, devices, streams, memory and kernel launches: all contact with the array libraries.

Only this file imports cupy, numba, cuda.core or array_api_compat, and all but the NumPy part of the
last on first use, so importing rtxarr needs no GPU, no driver and no CuPy.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import importlib
import logging
import os
import sys
import threading
from importlib.metadata import version
from types import ModuleType
from typing import Any

import array_api_compat
import array_api_compat.numpy as _numpy
import numpy as np

from rtxarr._host import HostStream, host_memory
from rtxarr._launch import Call, Loaded, allow_shared, launch_shape, planned
from rtxarr._out_of_memory import explain_out_of_memory

__all__ = [
    "Device",
    "constant",
    "current_stream",
    "device",
    "device_of",
    "devices",
    "empty",
    "empty_pinned",
    "full_scalar",
    "is_array",
    "is_device_array",
    "launch",
    "launch_planned",
    "mapped",
    "memory_stats",
    "namespace",
    "nothing",
    "runs_here",
    "runs_kernels",
    "special",
    "stream",
    "synchronize",
    "to_device",
]

_log = logging.getLogger("rtxarr")

# ------------------------------------------------------------------------------- namespaces

# From the type of an argument to its namespace; None for what is not an array. Asking
# array_api_compat each time would cost over a microsecond.
_NAMESPACES: dict[type, ModuleType | None] = {np.ndarray: _numpy}


def _find_namespace(kind: type, x: Any) -> ModuleType | None:
    xp: ModuleType | None
    if issubclass(kind, (np.ndarray, np.generic)):
        xp = _numpy
    elif not isinstance(x, type) and array_api_compat.is_array_api_obj(x):
        xp = array_api_compat.array_namespace(x)
    else:
        xp = None
    _NAMESPACES[kind] = xp
    return xp


def namespace(*arrays: Any) -> ModuleType:
    """Return the array-API namespace that all ``arrays`` belong to.

    Parameters
    ----------
    *arrays : array or scalar
        Raw arrays. Python scalars and None are ignored; a NumPy scalar counts only when no array
        of another library is there.

    Returns
    -------
    module
        ``array_api_compat.numpy``, ``array_api_compat.cupy`` or the like; the current device's
        when no argument is an array.

    Raises
    ------
    TypeError
        When arrays of two libraries meet, or when what came is neither arrays nor numbers.
    """
    found = None
    for x in arrays:
        kind = type(x)
        try:
            xp = _NAMESPACES[kind]
        except KeyError:
            xp = _find_namespace(kind, x)
        if xp is found or xp is None:
            continue
        if found is not None:
            return _settle_mix(arrays)
        found = xp
    return found if found is not None else _namespace_without_arrays(arrays)


def _namespace_without_arrays(arrays: tuple) -> ModuleType:
    """Return the current device's namespace, for numbers and lists of them."""
    if arrays and not any(isinstance(x, (int, float, complex, list, tuple)) for x in arrays):
        raise TypeError(f"an array is needed, got {' and '.join(type(x).__name__ for x in arrays)}")
    return _device_namespace(device())


def _settle_mix(arrays: tuple) -> ModuleType:
    """Leave NumPy scalars out and ask again; arrays of two libraries are an error.

    But for arrays that stand for those of another library, and take them.
    """
    rest = [x for x in arrays if not isinstance(x, np.generic)]
    for x in rest:
        if getattr(type(x), "__rtxarr_tracer__", False):
            return x.__array_namespace__()
    found = {xp.__name__: xp for x in rest if (xp := _find_namespace(type(x), x)) is not None}
    if len(found) == 1:
        return next(iter(found.values()))
    names = " and ".join(name.removeprefix("array_api_compat.") for name in found)
    raise TypeError(
        f"arrays must all belong to one library, got {names}; move them with to_device "
        "or rx.asarray"
    )


def is_array(x: Any) -> bool:
    """Tell whether ``x`` is a raw array (NumPy arrays and scalars, CuPy, any array-API object)."""
    kind = type(x)
    try:
        return _NAMESPACES[kind] is not None
    except KeyError:
        return _find_namespace(kind, x) is not None


def is_device_array(x: Any) -> bool:
    """Tell whether ``x`` is a CuPy array."""
    kind = type(x)
    if kind is np.ndarray:
        return False
    try:
        xp = _NAMESPACES[kind]
    except KeyError:
        xp = _find_namespace(kind, x)
    return xp is not None and xp.__name__ == "array_api_compat.cupy"


def constant(like: Any, make: Any, *key: Any, dtype: Any = None) -> Any:
    """Return the NumPy array ``make(*key)`` where ``like`` is; on a GPU the same one each time.

    For what depends on shapes and options alone. A captured step finds it there from the eager
    call before, or copies it beside what is recorded: a graph cannot copy from the host.
    """
    if not is_device_array(like):
        return namespace(like).asarray(make(*key), dtype=dtype)
    found = _on_gpu(like.data.device_id, make, key, dtype)
    own = _replay().kept_resources()
    if own is not None:  # the cache may drop it, a graph may not
        own[like.data.device_id, make, key, dtype] = found
    return found


@functools.cache
def _replay() -> ModuleType:
    from rtxarr import _replay as found  # it imports this file

    return found


@functools.lru_cache(maxsize=512)
def _on_gpu(device_id: int, make: Any, key: tuple, dtype: Any) -> Any:
    cupy = _cupy()
    with cupy.cuda.Device(device_id):
        stream = cupy.cuda.get_current_stream()
        if _replay().recorder() is not None:  # the step that is recorded is not to copy it again
            stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            found = cupy.asarray(np.asarray(make(*key), dtype=dtype))
        stream.synchronize()  # it may be used on any stream
    return found


_HOST = np.ndarray, np.generic


def empty(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Make an array of the library of ``like`` on the current device, at half the cost of xp's."""
    return np.empty(shape, dtype) if isinstance(like, _HOST) else type(like)(shape, dtype)


def nothing(like: Any, dtype: Any) -> Any:
    """Return an array without elements where ``like`` is: the same one each time."""
    kind: Any = type(like)
    place = None if isinstance(like, _HOST) else like.data.device_id
    return _without_elements(kind, place, dtype)


@functools.cache
def _without_elements(kind: type, device_id: int | None, dtype: Any) -> Any:
    if device_id is None:
        return np.empty(0, dtype)
    with _cupy().cuda.Device(device_id):
        return kind(0, dtype)


def full_scalar(like: Any, value: Any, dtype: Any) -> Any:
    """Return the array of no dimensions that holds ``value``, without a copy from the host."""
    xp = namespace(like)
    if is_device_array(like) and not is_array(value):
        return xp.full((), value, dtype=dtype)
    return xp.asarray(value, dtype=dtype)


# glibc gives each large block back to the system when it is freed, so that every array is paid
# for in page faults again; freeing one block of almost 32 MiB (its limit for adapting), never
# touched, makes it keep those below. Small training steps run up to three times as fast.
np.empty((32 << 20) - (1 << 16), np.uint8)

# ---------------------------------------------------------------------------------- devices

_INSTALL = "pip install 'rtxarr[cuda13]' (or 'rtxarr[cuda12]' for a CUDA 12 driver)"

# Devices entered with ``with``, innermost last, each with the CuPy device to return to.
_entered: contextvars.ContextVar[tuple] = contextvars.ContextVar("rtxarr_device", default=())


@functools.cache
def _cupy() -> Any:
    """Import CuPy if it is installed, else None; whether or not it sees a GPU."""
    try:
        import cupy
    except ImportError:
        return None
    return cupy


def _has_driver() -> bool:
    """Ask for the driver's library, which takes a thousandth of the time to import CuPy."""
    try:
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    return True


@functools.cache
def _gpu_count() -> int:
    cupy = _cupy() if _has_driver() else None
    if cupy is None:
        return 0
    # CuPy's is_available() says no to one thread while another is the first to ask.
    runtime = cupy.cuda.runtime
    try:
        return runtime.getDeviceCount()
    except runtime.CUDARuntimeError:
        return 0


@functools.cache
def _gpu_name(index: int) -> str:
    return _cupy().cuda.runtime.getDeviceProperties(index)["name"].decode()


class Device(str):
    """A place where arrays live: ``cpu`` or ``cuda:N``.

    A string, so NumPy takes it as its own device; ``cuda`` and CuPy's device objects compare
    equal to it too. As a context manager it is the device that creation functions and random
    numbers use in this thread or task.

    Parameters
    ----------
    kind : {"cpu", "cuda"}
    index : int, default 0
        Which GPU; always 0 for the CPU.
    """

    kind: str
    index: int  # type: ignore[assignment]

    def __new__(cls, kind: str, index: int = 0) -> Device:
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"kind must be 'cpu' or 'cuda', got {kind!r}")
        self = super().__new__(cls, kind if kind == "cpu" else f"{kind}:{index}")
        self.kind = kind
        self.index = index
        return self

    def __reduce__(self) -> tuple:
        return Device, (self.kind, self.index)

    def __repr__(self) -> str:
        name = super().__repr__()
        if self.kind == "cuda" and self.index < _gpu_count():
            return f"Device({name}, {_gpu_name(self.index)})"
        return f"Device({name})"

    __hash__ = str.__hash__

    def __eq__(self, other: Any) -> bool:
        if other is self:
            return True
        if _is_cupy_device(other):
            return self.kind == "cuda" and self.index == other.id
        return super().__eq__("cuda:0" if other == "cuda" else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __enter__(self) -> Device:
        before = None
        if self.kind == "cuda":
            runtime = _cupy().cuda.runtime
            before = runtime.getDevice()
            runtime.setDevice(self.index)
        _entered.set((*_entered.get(), (self, before)))
        return self

    def __exit__(self, *exc: object) -> None:
        stack = _entered.get()
        _entered.set(stack[:-1])
        before = stack[-1][1]
        if before is not None:
            _cupy().cuda.runtime.setDevice(before)


_CPU = Device("cpu")


@functools.cache
def _gpu(index: int) -> Device:
    return Device("cuda", index)


def _is_cupy_device(x: Any) -> bool:
    # Only a program that has CuPy loaded can hold one; another thread may still be importing it.
    kind = getattr(getattr(sys.modules.get("cupy"), "cuda", None), "Device", None)
    return kind is not None and isinstance(x, kind)


@functools.cache
def _default_device() -> Device:
    """Choose once: ``RTXARR_DEVICE``, else the first GPU, else the CPU; and say which."""
    spec = os.environ.get("RTXARR_DEVICE") or "auto"  # set to nothing is not set
    if spec != "auto":
        try:
            chosen = device(spec)
        except ValueError as error:
            raise ValueError(f"RTXARR_DEVICE: {error}") from None
        why = "RTXARR_DEVICE"
    else:
        chosen = device("auto")
        why = "automatic" if _gpu_count() else "automatic: no GPU that CuPy can use"
    _log.info("device: %r (%s)", chosen, why)
    return chosen


def device(spec: Any = None) -> Device:
    """Return a device, or the current one.

    Parameters
    ----------
    spec : str, Device or CuPy device, optional
        ``"cpu"``, ``"cuda"`` (the first GPU), ``"cuda:N"`` or ``"auto"`` (the first GPU if there
        is one, else the CPU). None gives the current device: the innermost ``with device(...)``,
        else ``RTXARR_DEVICE``, else as ``"auto"``.

    Returns
    -------
    Device
        Usable as a context manager: ``with rx.device("cpu"): ...``.

    Raises
    ------
    RuntimeError
        When a GPU is asked for that is not there.
    """
    if spec is None:
        stack = _entered.get()
        return stack[-1][0] if stack else _default_device()
    if isinstance(spec, Device):
        return spec
    if _is_cupy_device(spec):
        return Device("cuda", spec.id)
    if not isinstance(spec, str):
        raise TypeError(f"spec must be a device or its name, got {type(spec).__name__}")
    if spec == "cpu":
        return _CPU
    if spec == "auto":
        return Device("cuda", 0) if _gpu_count() else _CPU
    kind, colon, number = spec.partition(":")
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {spec!r}")
    index = int(number or 0)
    if index >= _gpu_count():
        raise RuntimeError(_missing_gpu(spec))
    return Device("cuda", index)


def _missing_gpu(spec: str) -> str:
    if _cupy() is None:
        return f"{spec!r} needs CuPy, which is not installed: {_INSTALL}"
    if _gpu_count() == 0:
        return (
            f"{spec!r} needs an NVIDIA GPU with its driver, and CuPy finds none; run on "
            f"'cpu', or check `nvidia-smi` and that CuPy matches the driver: {_INSTALL}"
        )
    return f"{spec!r} does not exist: this machine has cuda:0 to cuda:{_gpu_count() - 1}"


def devices() -> list[Device]:
    """Return all usable devices, the CPU first."""
    return [_CPU, *(Device("cuda", i) for i in range(_gpu_count()))]


def _device_namespace(place: Device) -> ModuleType:
    if place.kind == "cpu":
        return _numpy
    import array_api_compat.cupy

    return array_api_compat.cupy


def device_of(x: Any) -> Any:
    """Return the device that the raw array ``x`` is on.

    Returns
    -------
    Device
        For NumPy and CuPy arrays; other libraries' arrays give their own device object.
    """
    if isinstance(x, (np.ndarray, np.generic)):
        return _CPU
    if is_device_array(x):
        return _gpu(x.data.device_id)
    if not is_array(x):
        raise TypeError(f"x must be an array, got {type(x).__name__}")
    return array_api_compat.device(x)


def special(x: Any) -> ModuleType:
    """Return the module of special functions (erf and the like) for the raw array ``x``."""
    if is_device_array(x):
        import cupyx.scipy.special as module
    else:
        import scipy.special as module
    return module


def to_device(x: Any, device: str | Device, *, stream: Any = None) -> Any:
    """Return the raw array ``x`` on ``device``; the same object if it is there already.

    Parameters
    ----------
    x : array
    device : str or Device
    stream : CuPy stream, optional
        Copies to or from a GPU run on it; the current stream by default. A copy to the host is
        complete on return.

    Returns
    -------
    array
        A NumPy array for ``"cpu"``, a CuPy array for ``"cuda:N"``.

    Raises
    ------
    MemoryError
        When the GPU has no room, saying how much was asked for and who holds the rest.
    """
    place = _resolve(device)
    here = device_of(x)
    if here == place:
        return x
    if isinstance(here, Device) and place.kind == "cpu":
        return _cupy().asnumpy(x, stream=stream)
    if not isinstance(here, Device):
        return array_api_compat.to_device(x, device, stream=stream)
    cupy = _cupy()
    try:
        with cupy.cuda.Device(place.index):
            if stream is None:
                return cupy.asarray(x)
            with stream:
                return cupy.asarray(x)
    except MemoryError as error:
        explain_out_of_memory(error, place)
        raise


_resolve = device  # to_device's own argument has that name


# --------------------------------------------------------------------- streams and memory


_HOST_STREAM = HostStream()


def synchronize(device: str | Device | None = None) -> None:
    """Wait until all work given to ``device`` (the current one by default) is done."""
    place = _resolve(device)
    if place.kind == "cuda":
        _cupy().cuda.Device(place.index).synchronize()


def current_stream() -> Any:
    """Return the stream that work on the current device goes to (a CuPy stream on a GPU)."""
    return _HOST_STREAM if device().kind == "cpu" else _cupy().cuda.get_current_stream()


def stream(*, non_blocking: bool = True) -> Any:
    """Return a new stream of the current device; ``with stream() as s`` makes it current.

    Parameters
    ----------
    non_blocking : bool, default True
        Whether the stream runs beside the default stream without waiting for it.
    """
    if device().kind == "cpu":
        return _HOST_STREAM
    return _cupy().cuda.Stream(non_blocking=non_blocking)


def empty_pinned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an uninitialized NumPy array in page-locked memory, which needs a GPU.

    Copies between it and a GPU run beside the host's work.
    """
    import cupyx

    return cupyx.empty_pinned(shape, dtype)


def mapped(x: np.ndarray, device: Device) -> Any:
    """Give an array in page-locked memory as one of a GPU, which reads it through the bus."""
    cupy = _cupy()
    with device:
        memory = cupy.cuda.UnownedMemory(x.ctypes.data, x.nbytes, x, device.index)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray(x.shape, dtype=x.dtype, memptr=pointer)


def memory_stats(device: str | Device | None = None) -> dict[str, int]:
    """Return memory figures of ``device``, in bytes.

    Returns
    -------
    dict
        ``used``: held by live arrays (on the CPU: this process's resident memory); ``pool``: kept
        by the memory pool, used or not (on the CPU the same as ``used``); ``free`` and ``total``:
        of the whole device, over all processes. Zero where the system does not say.
    """
    place = _resolve(device)
    if place.kind == "cpu":
        return host_memory()
    cupy = _cupy()
    with cupy.cuda.Device(place.index):
        pool = cupy.get_default_memory_pool()
        free, total = cupy.cuda.runtime.memGetInfo()
        return {
            "used": pool.used_bytes(),
            "pool": pool.total_bytes(),
            "free": free,
            "total": total,
        }


# --------------------------------------------------------------------------------- launching

# numba's CUDA simulator runs kernels on NumPy arrays; numba reads the variable at import.
_SIMULATING = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")

_HALF = ("float16", "bfloat16")

# Given by __getattr__.
cuda: Any
cupy: Any
driver: Any
njit: Any
nvrtc: Any
tile: Any
types: Any

_MODULES = {
    "core": "cuda.core",
    "driver": "cuda.bindings.driver",
    "nvjitlink": "cuda.bindings.nvjitlink",
    "nvrtc": "cuda.bindings.nvrtc",
    "tile": "cuda.tile",
}
_NAMES = {"DynamicLibNotFoundError": "cuda.pathfinder", "njit": "numba", "types": "numba"}


def __getattr__(name: str) -> Any:
    """Import what kernels and providers need when they first ask: ``cuda``, ``njit``, ..."""
    if name in ("cuda", "intrinsic"):
        try:
            from numba import cuda
            from numba.cuda.extending import intrinsic
        except ImportError:
            raise ImportError(f"GPU kernels need numba-cuda: {_INSTALL}") from None
        value: Any = cuda if name == "cuda" else intrinsic
    elif name == "cupy":
        value = _cupy()
        if value is None:
            raise ImportError(f"GPU arrays need CuPy: {_INSTALL}")
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    elif name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def runs_kernels(x: Any) -> bool:
    """Tell whether ``launch`` takes the raw array ``x``: CuPy arrays, all in the simulator."""
    return _SIMULATING or is_device_array(x)


def runs_here(x: Any) -> bool:
    """Tell whether ``launch`` takes ``x`` now: CuPy arrays of the current GPU."""
    if _SIMULATING:
        return True
    return is_device_array(x) and x.data.device_id == _cupy().cuda.runtime.getDevice()


def launch(
    kernel: Any, n_threads_or_grid: int | tuple, args: tuple, *, block: int | tuple | None = None
) -> None:
    """Start ``kernel`` on the current stream, compiling it for these argument types if need be.

    Parameters
    ----------
    kernel : function or ``cuda.jit`` dispatcher
        The dispatcher's ``fastmath`` and ``launch_bounds`` hold, and ``shared_bytes`` and
        ``cluster``, if there.
    n_threads_or_grid : int or tuple of 1 to 3 ints
        Without ``block``: how many threads must run along each axis; the last block reaches
        past that, so the kernel guards its edge. With ``block``: how many blocks.
        Zero anywhere starts nothing.
    args : tuple
        CuPy arrays of any strides, NumPy scalars, and Python bool, int (int64) and float
        (float64). Arrays of float16 and bfloat16 reach the kernel as their uint16 bits; read
        them with ``rtxarr.kernels._vector``.
    block : int or tuple, optional
        Threads in a block, along each axis.

    Notes
    -----
    Never synchronizes. A launch after the first with the same types costs a few microseconds
    of host time, so nothing but the types is checked.
    """
    _launcher()((kernel, n_threads_or_grid, block), args, None)


def launch_planned(plan: Any, options: tuple, args: tuple) -> None:
    """Start the kernel that ``plan`` chooses for these arguments; it sees arrays as one axis.

    Parameters
    ----------
    plan : function
        ``plan(options, args)`` gives kernel, ``n_threads_or_grid`` and ``block`` of :func:`launch`.
        It is asked once for all arguments that are alike, so it may go by the options and by the
        types, sizes and addresses modulo 16 of the arrays, but not by the values of numbers, nor
        by shapes that those leave open.
    options : tuple
        Hashable.
    args : tuple
        As for :func:`launch`; arrays of several axes must be C-contiguous.
    """
    _launcher()((plan, options), args, plan)


@functools.cache
def _launcher() -> Any:
    """Return the launching function, with all it needs bound."""
    if _SIMULATING:
        return _launch_simulated
    cupy = _cupy()
    if not _gpu_count():
        raise RuntimeError(_missing_gpu("cuda:0"))
    try:
        from cuda import core
    except ImportError:
        raise ImportError(f"GPU kernels need cuda-core: {_INSTALL}") from None

    gpu_array = cupy.ndarray
    current_device = cupy.cuda.runtime.getDevice
    current_stream = cupy.cuda.get_current_stream
    start = cupy.cuda.driver.launchKernel
    kernels: dict[tuple, Loaded] = {}
    thread = threading.local()

    def prepare(what, args, plan, device_id):
        """Make the call of this thread for these types and shapes; None if it starts nothing."""
        (kernel, n_threads_or_grid, block), args = planned(what, args, plan)
        shape = launch_shape(n_threads_or_grid, block)
        if shape is None:
            return None
        key = [kernel, device_id]
        for x in args:
            if type(x) is gpu_array:
                key += (x.dtype, x.ndim, x._c_contiguous, x.data.device_id)
            else:
                key.append(type(x))
        key = tuple(key)
        if key not in kernels:
            kernels[key] = _load_kernel(kernel, args, device_id)
        # The driver wants the context current in each thread; CuPy sets it only when it is used.
        core.Device(device_id).set_current()
        return Call(kernels[key], shape, args, gpu_array, getattr(kernel, "__qualname__", kernel))

    def launch(what, args, plan):
        device_id = current_device()
        key, values, all_bits = [what, device_id], [], 0
        note, give = key.append, values.append
        for x in args:
            kind = type(x)
            if kind is gpu_array:
                memory = x.data
                pointer = memory.ptr
                all_bits |= pointer
                give(pointer)
                note(x.dtype)
                note(x.shape if plan is None else x.size)
                if not x._c_contiguous:
                    note(x.strides)
                if memory.device_id != device_id:
                    note(memory.device_id)
            else:
                note(kind)
                give(x)
        if plan is not None and all_bits & 15:
            note(tuple([x.data.ptr & 15 for x in args if type(x) is gpu_array]))
        key = tuple(key)
        try:
            calls = thread.calls
        except AttributeError:
            calls = thread.calls = {}
        try:
            call = calls[key]
        except KeyError:
            if len(calls) >= 4096:
                calls.clear()
            call = calls[key] = prepare(what, args, plan, device_id)
        if call is None:
            return
        # The driver copies the arguments out of the buffer before it returns.
        call.write(call.buffer, call.start, *values)
        try:
            start(call.handle, *call.shape, current_stream().ptr, call.address, 0)
        except Exception as error:
            grid, threads = call.shape[:3], call.shape[3:6]
            error.add_note(f"starting {call.name} with {grid} blocks of {threads} threads")
            raise

    return launch


def _launch_simulated(what: tuple, args: tuple, plan: Any) -> None:
    (kernel, n, block), args = planned(what, args, plan)
    shape = launch_shape(n, block)
    if shape is None:
        return
    cuda = sys.modules[__name__].cuda
    if not hasattr(kernel, "__getitem__"):
        kernel = cuda.jit(kernel)

    def given(x):
        if not isinstance(x, np.ndarray):
            return x
        if not x.flags.writeable:  # it writes all back, also what the kernel only reads
            x = x.copy()
        return x.view(np.uint16) if x.dtype in _HALF else x

    kernel[shape](*map(given, args))


def _load_kernel(kernel: Any, args: tuple, device_id: int) -> Loaded:
    """Load a kernel on a GPU, from the disk cache or freshly compiled."""
    from cuda import core

    from rtxarr import _compile, _kernel_cache

    for x in args:
        if is_device_array(x) and x.data.device_id != device_id:
            raise ValueError(
                f"an array is on cuda:{x.data.device_id} but the current device is "
                f"cuda:{device_id}; enter `with rx.device('cuda:{x.data.device_id}')`"
            )
        if isinstance(x, np.ndarray):
            raise TypeError("a kernel takes CuPy arrays, got a NumPy array; move it with to_device")
    gpu = core.Device(device_id)
    gpu.set_current()
    cc = tuple(gpu.compute_capability)
    signature = _compile.signature_of(args)
    options = getattr(kernel, "targetoptions", {})
    key = _kernel_cache.fingerprint(
        kernel,
        signature,
        cc,
        options.get("fastmath"),
        options.get("launch_bounds"),
        *([kernel.cluster] if hasattr(kernel, "cluster") else []),
        *(version(name) for name in ("numba-cuda", "numba", "cuda-bindings")),
    )
    found = _kernel_cache.load(key)
    if found is None:
        name, ptx = _compile.compile_ptx(kernel, signature, cc)
        found = name, _compile.machine_code(ptx, cc)
        _kernel_cache.store(key, *found)
    name, code = found
    load = core.ObjectCode.from_cubin if code[:4] == b"\x7fELF" else core.ObjectCode.from_ptx
    loaded = load(code).get_kernel(name)
    shared = getattr(kernel, "shared_bytes", 0)
    if shared:
        allow_shared(sys.modules[__name__].driver, int(loaded.handle), device_id, shared)
    return Loaded(int(loaded.handle), _compile.slot_formats(signature), loaded, shared)
