"""GPU kernels of the elementwise functions: a thread makes 16 neighbouring bytes, or 8 numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._vector import access, each, lift, load4

_ZERO = np.float32(0)


def _device(function):
    return cuda.jit(device=True)(function)


@functools.cache
def unary(name: str, dtype: np.dtype, wide: bool):
    """Return ``kernel(x, out)`` over flat arrays; ``kernel.per_thread`` elements a thread."""
    kind, one = access(dtype, wide=wide), access(dtype, wide=False)
    load, store, width = kind.load, kind.store, kind.width
    load_one, store_one = one.load, one.store
    apply, apply_one = each(_unary()[name], width), each(_unary()[name], 1)

    @cuda.jit
    def kernel(x, out):
        first = cuda.grid(1) * width
        if first + width <= out.size:
            store(out, first, apply(load(x, first)))
        else:
            for i in range(first, out.size):
                store_one(out, i, apply_one(load_one(x, i)))

    kernel.per_thread = width
    return kernel


@functools.cache
def binary(name: str, dtype: np.dtype, wide: bool, scalar: str | None):
    """Return ``kernel(x, y, out)``, or ``kernel(x, out, number)`` with a ``scalar`` operand.

    The number is the "first" or the "second" operand.
    """
    kind, one = access(dtype, wide=wide), access(dtype, wide=False)
    load, store, width = kind.load, kind.store, kind.width
    load_one, store_one = one.load, one.store
    function = _binary()[name]
    if scalar is None:
        apply, apply_one = lift(function, width), lift(function, 1)

        @cuda.jit
        def kernel(x, y, out):
            first = cuda.grid(1) * width
            if first + width <= out.size:
                store(out, first, apply(load(x, first), load(y, first)))
            else:
                for i in range(first, out.size):
                    store_one(out, i, apply_one(load_one(x, i), load_one(y, i)))

    else:
        if scalar == "second":
            pair = function
        else:

            @_device
            def pair(x, number):
                return function(number, x)

        apply, apply_one = each(pair, width, with_number=True), each(pair, 1, with_number=True)

        @cuda.jit
        def kernel(x, out, number):
            first = cuda.grid(1) * width
            if first + width <= out.size:
                store(out, first, apply(load(x, first), number))
            else:
                for i in range(first, out.size):
                    store_one(out, i, apply_one(load_one(x, i), number))

    kernel.per_thread = width
    return kernel


@functools.cache
def conversion(source: np.dtype, target: np.dtype, wide: bool):
    """Return ``kernel(x, out)`` from one type to another; one of them is float32."""
    half = access(target if source == np.float32 else source, wide=wide)
    narrow = access(target if source == np.float32 else source, wide=False)
    width = half.width
    if source != np.float32:
        load, store = half.load, half.store_scalars
        load_one, store_one = narrow.load, narrow.store_scalars
    else:
        load, store = (_load8 if wide else access(source, wide=False).load), half.store
        load_one, store_one = access(source, wide=False).load, narrow.store

    @cuda.jit
    def kernel(x, out):
        first = cuda.grid(1) * width
        if first + width <= out.size:
            store(out, first, load(x, first))
        else:
            for i in range(first, out.size):
                store_one(out, i, load_one(x, i))

    kernel.per_thread = width
    return kernel


@_device
def _load8(array, offset):
    a, b = load4(array, offset), load4(array, offset + 4)
    return (a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3])


@functools.cache
def _unary() -> dict[str, Callable]:
    found = {
        "abs": lambda x: abs(x),
        "exp": lambda x: math.exp(x),
        "log": lambda x: math.log(x),
        "negative": lambda x: -x,
        "sqrt": lambda x: math.sqrt(x),
        "square": lambda x: x * x,
        "tanh": lambda x: math.tanh(x),
    }
    return {name: _device(function) for name, function in found.items()}


@functools.cache
def _binary() -> dict[str, Callable]:
    @_device
    def maximum(x, y):
        return x if x > y or x != x else y  # NaN of either goes through

    @_device
    def minimum(x, y):
        return x if x < y or x != x else y

    found = {
        "add": lambda x, y: x + y,
        "divide": lambda x, y: x / y,
        "multiply": lambda x, y: x * y,
        "subtract": lambda x, y: x - y,
    }
    devices = {name: _device(function) for name, function in found.items()}
    return {**devices, "maximum": maximum, "minimum": minimum}
