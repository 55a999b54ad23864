"""Fourier transforms on a GPU through cuFFT, with plans that are kept.

``_fft_plans`` says which plans make up a transform. They depend on the array's shape alone, so that
equal numbers give equal bits however the array lies in memory. cuFFT does not scale: what ``norm``
asks for is one multiplication by a number, in place.

Where axes were moved to the end, they stay there in memory: the result is a view of that.

A plan has memory on the GPU that its transforms work in, so a graph that holds one must own its
plan: those that a captured step uses are kept with the step and used by nothing else.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._replay import branch, kept_resources
from rtxarr.kernels.transpose import contiguous
from rtxarr.libs._fft_plans import Pass, inverse, kept_axes, passes, scale_of

__all__ = ["transform"]

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
    out = _fitted(name, x, s, axes)
    forward, halves = name in ("fftn", "rfftn"), name in ("rfftn", "irfftn")
    shape = list(out.shape)
    if halves:
        shape[axes[-1]] = s[-1] // 2 + 1 if forward else s[-1]
    if out.size == 0:
        return _device.cupy.empty(shape, _real(wide) if name == "irfftn" else wide)
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
    plans = passes(name, out.shape, [n for n, _ in pairs], [a for _, a in pairs])
    scale = scale_of(forward, s, norm)
    last = len(plans) - 1
    for i, one in enumerate(plans):
        out = _executed(one, out, forward, owned or i > 0, in_place=i > 0)
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
    return out.reshape(shape)


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


def _executed(one: Pass, x: Any, forward: bool, owned: bool, *, in_place: bool) -> Any:
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
    _plan(one, x).fft(x, out, _FORWARD if forward else _INVERSE)
    return out


def _plan(one: Pass, x: Any) -> Any:
    """Give the plan of a pass over ``x``, kept."""
    double = _complex(x.dtype).itemsize == 16
    # Transforms of one plan work in the same memory: streams have their own.
    captured = kept_resources() is not None
    stream = branch() if captured else _device.cupy.cuda.get_current_stream().ptr
    layouts = (*one.source, *one.result)
    key = ("cufft", x.data.device_id, stream, double, one.kind, one.n, layouts, one.batch)

    def make():
        cuda = _device.cupy.cuda
        last = len(one.n) - 1, one.result.embed[-1]
        if max(math.prod(d.embed) for d in (one.source, one.result)) * one.batch < 1 << 31:
            kind = _TYPES[one.kind, double]
            plan = cuda.cufft.PlanNd(one.n, *layouts, kind, one.batch, "C", *last)
        else:  # its numbers are of 64 bits
            types = {"R": "d" if double else "f", "C": "D" if double else "F"}
            source, result = types[one.kind[0]], types[one.kind[2]]
            plan = cuda.cufft.XtPlanNd(
                one.n, *one.source, source, *one.result, result, one.batch, types["C"],
                order="C", last_axis=last[0], last_size=last[1],
            )  # fmt: skip
        # Its tables are copied to the GPU on the legacy stream, and the host may be back before
        # they are there: streams that do not wait for that one would read something else.
        cuda.Stream.null.synchronize()
        return plan

    return _kept(key, make)


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
