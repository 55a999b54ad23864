"""Fourier transforms on a GPU through CuPy's cuFFT, with plans that are kept.

A plan has memory on the GPU that its transforms work in, so a graph that holds one must own its
plan: those that a captured step uses are kept with the step and used by nothing else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._device import namespace
from rtxarr._replay import kept_resources

__all__ = ["transform"]

_MOST = 64  # plans of a thread, beside those of captured steps
_KINDS = {"fftn": "C2C", "ifftn": "C2C", "rfftn": "R2C", "irfftn": "C2R"}
# cufftType, by kind and whether double precision.
_TYPES = {
    ("C2C", False): 0x29, ("R2C", False): 0x2A, ("C2R", False): 0x2C,
    ("C2C", True): 0x69, ("R2C", True): 0x6A, ("C2R", True): 0x6C,
}  # fmt: skip
_ONE_AXIS = {"fftn": "fft", "ifftn": "ifft", "rfftn": "rfft", "irfftn": "irfft"}


class _Thread(threading.local):
    def __init__(self) -> None:
        self.plans: OrderedDict[tuple, Any] = OrderedDict()


_thread = _Thread()


def transform(name: str, x: Any, s: tuple[int, ...], axes: tuple[int, ...], norm: str) -> Any:
    """Transform a CuPy array.

    Parameters
    ----------
    name : {"fftn", "ifftn", "rfftn", "irfftn"}
    x : CuPy array of float32, float64, complex64 or complex128
    s : tuple of int
        Points along each of ``axes``, as in NumPy's function of that name.
    axes : tuple of int, not negative
    norm : {"backward", "ortho", "forward"}

    Returns
    -------
    CuPy array
    """
    fft = namespace(x).fft
    x = _fitted(name, x, s, axes)
    if x.size == 0:
        return getattr(fft, name)(x, s=s, axes=axes, norm=norm)
    if len(axes) > 1 and _in_one(x, axes):
        x = _contiguous(x)
        with _plan(name, x, s, axes):
            return getattr(fft, name)(x, s=s, axes=axes, norm=norm)
    # As NumPy does: the last axis is the real one.
    last = axes[-1]
    if name == "rfftn":
        x = _one(name, x, s[-1], last, norm)
        axes, s, name = axes[:-1], s[:-1], "fftn"
    elif name == "irfftn":
        for n, axis in zip(s[:-1], axes[:-1], strict=True):
            x = _one("ifftn", x, n, axis, norm)
        return _one(name, x, s[-1], last, norm)
    for n, axis in zip(s, axes, strict=True):
        x = _one(name, x, n, axis, norm)
    return x


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


def _in_one(x, axes):
    """Tell whether one plan does for all axes: up to three, in order, at the array's end."""
    n = len(axes)
    # CuPy has no such plans of real transforms for what is stored in both orders.
    in_both_orders = sum(m > 1 for m in x.shape) < 2
    return n <= 3 and axes == tuple(range(x.ndim - n, x.ndim)) and not in_both_orders


def _one(name, x, n, axis, norm):
    x = _contiguous(x.swapaxes(axis, -1))
    with _plan(name, x, (n,), (x.ndim - 1,)):
        out = getattr(namespace(x).fft, _ONE_AXIS[name])(x, n=n, axis=-1, norm=norm)
    return out.swapaxes(axis, -1)


def _contiguous(x):
    return _device.cupy.ascontiguousarray(x)


def _plan(name, x, s, axes):
    """Give the plan for ``x``, contiguous, whose last axes are transformed."""
    kind, double = _KINDS[name], x.dtype.itemsize // (2 if x.dtype.kind == "c" else 1) == 8
    # Transforms of one plan work in the same memory: streams have their own.
    stream = _device.cupy.cuda.get_current_stream().ptr
    key = ("cufft", x.data.device_id, stream, kind, double, x.shape, s)

    def make():
        if len(s) == 1:
            plan = _device.cupy.cuda.cufft.Plan1d
            return plan(s[0], _TYPES[kind, double], x.size // x.shape[-1])
        full = x
        if kind != "R2C" and x.dtype.kind != "c":
            full = x.astype(np.complex128 if double else np.complex64)
        return _device.get_fft_plan(full, shape=s, axes=axes, value_type=kind)

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
