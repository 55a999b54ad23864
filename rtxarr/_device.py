"""Namespaces, devices, streams and memory: the one place that knows which array library holds what.

Only this file imports ``cupy``, ``numba``, ``numba.cuda``, ``cuda.core`` or ``array_api_compat``, and
all but the NumPy part of the last on first use, so importing rtxarr needs no GPU, no driver and
no CuPy.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import array_api_compat
import array_api_compat.numpy as _numpy
import numpy as np

__all__ = [
    "Device",
    "current_stream",
    "device",
    "device_of",
    "devices",
    "is_array",
    "is_device_array",
    "memory_stats",
    "namespace",
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
    if issubclass(kind, (np.ndarray, np.generic)):
        xp = _numpy
    elif array_api_compat.is_array_api_obj(x):
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
        When arrays of two libraries meet.
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
    return found if found is not None else _device_namespace(device())


def _settle_mix(arrays: tuple) -> ModuleType:
    """Leave NumPy scalars out and ask again; arrays of two libraries are an error."""
    rest = [x for x in arrays if not isinstance(x, np.generic)]
    found = {xp.__name__: xp for x in rest if (xp := _find_namespace(type(x), x)) is not None}
    if len(found) == 1:
        return next(iter(found.values()))
    names = " and ".join(name.removeprefix("array_api_compat.") for name in found)
    raise TypeError(f"arrays must all belong to one library, got {names}; move them with to_device")


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


# ---------------------------------------------------------------------------------- devices

_INSTALL = "pip install 'rtxarr[cuda13]' (or 'rtxarr[cuda12]' for a CUDA 12 driver)"

# Devices entered with ``with``, innermost last, each with the CuPy device to return to.
_entered: contextvars.ContextVar[tuple] = contextvars.ContextVar("rtxarr_device", default=())


@functools.cache
def _cupy() -> ModuleType | None:
    """Import CuPy if it is installed, whether or not it sees a GPU."""
    try:
        import cupy
    except ImportError:
        return None
    return cupy


@functools.cache
def _gpu_count() -> int:
    cupy = _cupy()
    # is_available() never raises; getDeviceCount() does when there is no driver.
    return cupy.cuda.runtime.getDeviceCount() if cupy is not None and cupy.is_available() else 0


@functools.cache
def _gpu_name(index: int) -> str:
    return _cupy().cuda.runtime.getDeviceProperties(index)["name"].decode()


class Device:
    """A place where arrays live: ``cpu`` or ``cuda:N``.

    Compares equal to its string, so ``x.device == "cpu"`` works for every library's arrays. As
    a context manager it is the device that creation functions and random numbers use in this
    thread or task.

    Parameters
    ----------
    kind : {"cpu", "cuda"}
    index : int, default 0
        Which GPU; always 0 for the CPU.
    """

    __slots__ = ("_name", "index", "kind")

    def __init__(self, kind: str, index: int = 0) -> None:
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"kind must be 'cpu' or 'cuda', got {kind!r}")
        self.kind = kind
        self.index = index
        self._name = kind if kind == "cpu" else f"cuda:{index}"

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        if self.kind == "cuda" and self.index < _gpu_count():
            return f"Device({self._name!r}, {_gpu_name(self.index)})"
        return f"Device({self._name!r})"

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Device):
            return self._name == other._name
        if isinstance(other, str):
            return self._name == other or (other == "cuda" and self._name == "cuda:0")
        if _is_cupy_device(other):
            return self.kind == "cuda" and self.index == other.id
        return NotImplemented

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


def _is_cupy_device(x: object) -> bool:
    # Only a program that has CuPy loaded can hold one of its devices.
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.cuda.Device)


@functools.cache
def _default_device() -> Device:
    """Choose once: ``RTXARR_DEVICE``, else the first GPU, else the CPU; and say which."""
    spec = os.environ.get("RTXARR_DEVICE", "auto")
    if spec != "auto":
        try:
            chosen = device(spec)
        except ValueError as error:
            raise ValueError(f"RTXARR_DEVICE: {error}") from None
        why = "RTXARR_DEVICE"
    else:
        chosen = Device("cuda", 0) if _gpu_count() else _CPU
        why = "automatic" if _gpu_count() else "automatic: no GPU that CuPy can use"
    _log.info("device: %r (%s)", chosen, why)
    return chosen


def device(spec: str | Device | Any = None) -> Device:
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
        return Device("cuda", x.device.id)
    if not is_array(x):
        raise TypeError(f"x must be an array, got {type(x).__name__}")
    return array_api_compat.device(x)


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
    except cupy.cuda.memory.OutOfMemoryError:
        raise MemoryError(_out_of_memory(x.nbytes, place)) from None


_resolve = device  # to_device's own argument has that name


def _out_of_memory(n_bytes: int, place: Device) -> str:
    stats = memory_stats(place)
    mib = {name: f"{value / 2**20:,.0f} MiB" for name, value in stats.items()}
    return (
        f"no room for {n_bytes / 2**20:,.1f} MiB on {place!r}: {mib['free']} of {mib['total']} are "
        f"free, this process's arrays hold {mib['used']} and its pool keeps {mib['pool']}. Drop "
        "arrays you no longer need, use a smaller batch or a narrower dtype, or see "
        "`nvidia-smi` for other processes"
    )


# --------------------------------------------------------------------- streams and memory


class _HostStream:
    """The CPU's stream: everything has already happened."""

    def __enter__(self) -> _HostStream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def synchronize(self) -> None:
        """Return at once."""

    def __repr__(self) -> str:
        return "Stream('cpu')"


_HOST_STREAM = _HostStream()


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


def memory_stats(device: str | Device | None = None) -> dict[str, int]:
    """Return memory figures of ``device``, in bytes.

    Returns
    -------
    dict
        ``used``: held by live arrays (on the CPU: this process's resident memory); ``pool``: kept
        by the memory pool, used or not (on the CPU the same as ``used``); ``free`` and ``total``: of
        the whole device, over all processes.
    """
    place = _resolve(device)
    if place.kind == "cpu":
        return _host_memory()
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


def _host_memory() -> dict[str, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/self/statm") as f:
            used = int(f.read().split()[1]) * page
        free = os.sysconf("SC_AVPHYS_PAGES") * page
    except (OSError, ValueError):  # not Linux: the peak is the best the standard library offers
        import resource

        used, free = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    total = os.sysconf("SC_PHYS_PAGES") * page
    return {"used": used, "pool": used, "free": free, "total": total}
