"""Fourier transforms on a GPU through cuFFT, with plans that are kept.

``_fft_plans`` says which plans make up a transform. They depend on the array's shape alone, so that
equal numbers give equal bits however the array lies in memory. cuFFT does not scale: what ``norm``
asks for is one multiplication by a number, in place.

Where axes were moved to the end, they stay there in memory: the result is a view of that.

A plan has memory on the GPU that its transforms work in, so a graph that holds one must own its
plan: those that a captured step uses are kept with the step and used by nothing else.

What cuFFT makes no plan for goes through CuPy's own plans or, where there are none either, through
NumPy on the host; :func:`rtxarr.libs.show` counts it.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._replay import branch, kept_resources
from rtxarr.kernels.transpose import contiguous
from rtxarr.libs._fft_plans import Pass, inverse, kept_axes, passes, scale_of
from rtxarr.libs._layout import Unsupported
from rtxarr.libs._status import Provider

__all__ = ["status", "transform"]

_provider = Provider("Fourier transforms", "CuPy or NumPy")
_loaded: list[Any] = []  # CuPy's module of cuFFT or None; empty until it is looked for
_loading = threading.Lock()
_MOST = 64  # plans of a thread, beside those of captured steps
# cufftType, by kind and whether double precision.
_TYPES = {
    ("C2C", False): 0x29, ("R2C", False): 0x2A, ("C2R", False): 0x2C,
    ("C2C", True): 0x69, ("R2C", True): 0x6A, ("C2R", True): 0x6C,
}  # fmt: skip
_FORWARD, _INVERSE = -1, 1


class _Thread(threading.local):
    def __init__(self) -> None:
        self.plans: OrderedDict[tuple, Any] = OrderedDict()


_thread = _Thread()


def _load() -> Any:
    """Look for the library, once; warn if it is not there."""
    with _loading:
        if not _loaded:
            try:
                found = _device.cupy.cuda.cufft
                version = found.getVersion()
            except Exception as error:  # of the library that is not found, or does not load
                _loaded.append(None)
                _provider.is_missing(f"CuPy cannot use cuFFT ({_first_line(error)})", _install())
            else:
                _loaded.append(found)
                numbers = version // 1000, version // 100 % 10, version % 100
                _provider.library = f"cuFFT {'.'.join(map(str, numbers))}, through CuPy"
        return _loaded[0]


def _library() -> Any:
    return _loaded[0] if _loaded else _load()


def _install() -> str:
    major = _device.cupy.cuda.runtime.runtimeGetVersion() // 1000
    return f"pip install --upgrade 'cuda-toolkit[cufft]=={major}.*'"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def status() -> Provider:
    """Return what serves Fourier transforms on a GPU, and what went elsewhere instead."""
    if len(_device.devices()) > 1:
        _library()
    return _provider


def transform(
    name: str,
    x: Any,
    s: tuple[int, ...],
    axes: tuple[int, ...],
    norm: str,
    *,
    owned: bool = False,
) -> Any:
    """Transform a CuPy array.

    Parameters
    ----------
    name : {"fftn", "ifftn", "rfftn", "irfftn"}
    x : CuPy array of float32, float64, complex64 or complex128
    s : tuple of int
        Points along each of ``axes``, as in NumPy's function of that name.
    axes : tuple of int, not negative
    norm : {"backward", "ortho", "forward", "none"}
        "none" scales in neither direction.
    owned : bool, default False
        That nobody needs ``x`` any more: its memory may be written to.

    Returns
    -------
    CuPy array
        In memory that is not another's, as the last plan leaves it: with its axes at the end.
    """
    wide = _complex(x.dtype)
    forward, halves = name in ("fftn", "rfftn"), name in ("rfftn", "irfftn")
    shape = list(x.shape)
    for n, axis in zip(s, axes, strict=True):
        shape[axis] = n
    if halves and forward:
        shape[axes[-1]] = s[-1] // 2 + 1
    dtype = _real(wide) if name == "irfftn" else wide
    if 0 in shape:
        return _device.cupy.empty(shape, dtype)
    library = _library()
    if library is not None:
        try:
            return _by_plans(library, name, x, s, axes, norm, owned).reshape(shape)
        except Unsupported as reason:
            _refuse(str(reason))
    return _elsewhere(name, x, s, axes, norm).astype(dtype, copy=False)


def _refuse(reason: str) -> None:
    """Count what cuFFT has no plan for; warn at the first."""
    if not _provider.refused:
        warnings.warn(
            f"{_provider.serves} run through {_provider.instead}: {reason}; {_install()}",
            RuntimeWarning,
            stacklevel=3,
        )
    _provider.refused[reason] += 1


def _by_plans(library, name, x, s, axes, norm, owned):
    """Transform by plans of our own; nothing is written to unless all of them can be made."""
    wide = _complex(x.dtype)
    out = _fitted(name, x, s, axes)
    forward, halves = name in ("fftn", "rfftn"), name in ("rfftn", "irfftn")
    real = halves and s[-1] > 1  # of one real point there is nothing to do
    if out.dtype != wide and not (forward and real):
        out = out.astype(wide)
    owned = owned or out.data.ptr != x.data.ptr
    long = kept_axes(out.shape)
    if len(long) < out.ndim:
        out = out.squeeze(tuple(i for i in range(out.ndim) if i not in long))
    pairs = [(n, long.index(a)) for n, a in zip(s, axes, strict=True) if n > 1]
    if halves and not real:
        name = "fftn" if forward else "ifftn"
    steps = passes(name, out.shape, [n for n, _ in pairs], [a for _, a in pairs])
    plans = [_plan(library, one, out) for one in steps]
    scale = scale_of(forward, s, norm)
    last = len(plans) - 1
    for i, (one, plan) in enumerate(zip(steps, plans, strict=True)):
        out = _executed(one, plan, out, forward, owned or i > 0, in_place=i > 0)
        if i == last and scale != 1:
            _device.cupy.multiply(out, out.dtype.type(scale), out)
        if one.order is not None:
            out = out.transpose(inverse(one.order))
    if not plans:
        if not owned:
            out = out.copy()
        if scale != 1:
            _device.cupy.multiply(out, out.dtype.type(scale), out)
    if halves and not forward and not real:
        out = out.real.copy()
    return out


def _elsewhere(name, x, s, axes, norm):
    """Transform by CuPy's own plans or, if there are none either, by NumPy on the host."""
    cupy = _device.cupy
    stream = cupy.cuda.get_current_stream()
    if stream.is_capturing():
        raise RuntimeError(
            f"a Fourier transform without a plan of cuFFT cannot be captured; {_install()}"
        )
    if norm == "none":  # NumPy's names for where it scales
        norm = "forward" if name.startswith("i") else "backward"
    if _library() is not None:
        try:
            return _by_cupy(cupy, stream, name, x, s, axes, norm)
        except (RuntimeError, ValueError):  # it has no plan for it either
            pass
    return cupy.asarray(getattr(np.fft, name)(cupy.asnumpy(x), s=s, axes=axes, norm=norm))


def _by_cupy(cupy, stream, name, x, s, axes, norm):
    # All streams of a thread share its plans, and so the memory that they work in: one at a time.
    stream.synchronize()
    with cupy.cuda.Stream.null as legacy:
        found = getattr(cupy.fft, name)(x, s=s, axes=axes, norm=norm)
        legacy.synchronize()
    out = found.copy()
    stream.synchronize()  # before the memory of the other stream is given out again
    return out


def _complex(dtype: Any) -> np.dtype:
    return np.result_type(dtype, np.complex64)


def _real(dtype: np.dtype) -> np.dtype:
    return np.dtype(dtype.char.lower())


def _fitted(name, x, s, axes):
    """Cut axes, or fill them up with zeros, to what a plan for these points takes."""
    shape = list(x.shape)
    for i, (n, axis) in enumerate(zip(s, axes, strict=True)):
        half = name == "irfftn" and i == len(axes) - 1
        shape[axis] = n // 2 + 1 if half else n
    if tuple(shape) == x.shape:
        return x
    kept = tuple(slice(0, min(n, m)) for n, m in zip(shape, x.shape, strict=True))
    if tuple(shape) == x[kept].shape:
        return x[kept]
    out = _device.cupy.zeros(shape, x.dtype)
    out[kept] = x[kept]
    return out


def _executed(one: Pass, plan: Any, x: Any, forward: bool, owned: bool, *, in_place: bool) -> Any:
    """Return what a plan makes of ``x``, its axes in the plan's order.

    ``owned`` says that it may write to ``x``, ``in_place`` that it shall: whether it does must not
    depend on who asks, or bits might.
    """
    if one.order is not None:
        x = x.transpose(one.order)
    if not (x.flags.c_contiguous and x.data.ptr % _complex(x.dtype).itemsize == 0):
        x, owned = contiguous(x), True
    if one.kind == "C2R" and not owned:  # it writes to what it reads
        x = x.copy()
    if one.kind == "C2C" and in_place:
        out = x
    else:
        dtype = _real(x.dtype) if one.kind == "C2R" else _complex(x.dtype)
        out = _device.cupy.empty(one.shape, dtype)
    plan.fft(x, out, _FORWARD if forward else _INVERSE)
    return out


def _plan(library: Any, one: Pass, x: Any) -> Any:
    """Give the plan of a pass over ``x``, kept."""
    double = _complex(x.dtype).itemsize == 16
    # Transforms of one plan work in the same memory: streams have their own.
    captured = kept_resources() is not None
    stream = branch() if captured else _device.cupy.cuda.get_current_stream().ptr
    layouts = (*one.source, *one.result)
    key = ("cufft", x.data.device_id, stream, double, one.kind, one.n, layouts, one.batch)

    def make():
        try:
            plan = _new_plan(library, one, double)
        except (RuntimeError, ValueError) as error:  # one of memory is none of these
            reason = f"no plan for {one.kind} transforms ({_first_line(error)})"
            raise Unsupported(reason) from error
        # Its tables are copied to the GPU on the legacy stream, and the host may be back before
        # they are there: streams that do not wait for that one would read something else.
        _device.cupy.cuda.Stream.null.synchronize()
        return plan

    return _kept(key, make)


def _new_plan(library: Any, one: Pass, double: bool) -> Any:
    layouts = (*one.source, *one.result)
    last = len(one.n) - 1, one.result.embed[-1]
    if max(math.prod(d.embed) for d in (one.source, one.result)) * one.batch < 1 << 31:
        kind = _TYPES[one.kind, double]
        return library.PlanNd(one.n, *layouts, kind, one.batch, "C", *last)
    # Its numbers are of 64 bits.
    types = {"R": "d" if double else "f", "C": "D" if double else "F"}
    source, result = types[one.kind[0]], types[one.kind[2]]
    return library.XtPlanNd(
        one.n, *one.source, source, *one.result, result, one.batch, types["C"],
        order="C", last_axis=last[0], last_size=last[1],
    )  # fmt: skip


def _kept(key: tuple, make: Callable[[], Any]) -> Any:
    own = kept_resources()
    if own is not None:
        if key not in own:
            own[key] = make()
        return own[key]
    plans = _thread.plans
    if key not in plans:
        plans[key] = make()
        while len(plans) > _MOST:
            plans.popitem(last=False)
    plans.move_to_end(key)
    return plans[key]
