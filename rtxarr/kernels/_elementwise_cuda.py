"""GPU kernels of the elementwise functions: a thread makes 16 neighbouring bytes, or 8 numbers.

Arrays are given by their addresses, multiples of 16 bytes, and their number of elements: what the
host has to hand over is little, and the order of their axes does not matter. A result may lie where
an operand does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._vector import by_address, each, lift

WIDTHS = {"float32": 4, "float16": 8, "bfloat16": 8}


@functools.cache
def unary(name: str, dtype: np.dtype):
    """Return ``kernel(x, out, n)``; ``kernel.per_thread`` elements a thread."""
    width = WIDTHS[dtype.name]
    function = _unary()[name]
    load, store, size = _access(dtype, width)
    load_one, store_one, _ = _access(dtype, 1)
    apply, apply_one = each(function, width), each(function, 1)

    @cuda.jit
    def kernel(x, out, n):
        first = np.int64(cuda.grid(1)) * width
        if first + width <= n:
            store(out + first * size, apply(load(x + first * size)))
        else:
            for i in range(first, n):
                store_one(out + i * size, apply_one(load_one(x + i * size)))

    kernel.per_thread = width
    return kernel


@functools.cache
def binary(name: str, dtype: np.dtype, form: str):
    """Return ``kernel(x, y, out, n)``, likewise.

    ``form`` says what the operands are: "arrays"; or ``x`` is one and ``y`` a float32 number or the
    address of a single element, and the first or the second operand: "number first", "number
    second", "one first", "one second".
    """
    if form == "arrays":
        return _of_arrays(name, dtype)
    width = WIDTHS[dtype.name]
    function = _binary()[name]
    load, store, size = _access(dtype, width)
    load_one, store_one, _ = _access(dtype, 1)

    if form.endswith("first"):

        @cuda.jit(device=True)
        def pair(x, number):
            return function(number, x)

    else:
        pair = function
    apply, apply_one = each(pair, width, with_number=True), each(pair, 1, with_number=True)

    if form.startswith("number"):

        @cuda.jit(device=True)
        def number_of(operand):
            return operand

    else:

        @cuda.jit(device=True)
        def number_of(operand):
            return load_one(operand)[0]

    @cuda.jit
    def kernel(x, y, out, n):
        first, number = np.int64(cuda.grid(1)) * width, number_of(y)
        if first + width <= n:
            store(out + first * size, apply(load(x + first * size), number))
        else:
            for i in range(first, n):
                store_one(out + i * size, apply_one(load_one(x + i * size), number))

    kernel.per_thread = width
    return kernel


def _of_arrays(name, dtype):
    width = WIDTHS[dtype.name]
    function = _binary()[name]
    load, store, size = _access(dtype, width)
    load_one, store_one, _ = _access(dtype, 1)
    apply, apply_one = lift(function, width), lift(function, 1)

    @cuda.jit
    def kernel(x, y, out, n):
        first = np.int64(cuda.grid(1)) * width
        if first + width <= n:
            at = first * size
            store(out + at, apply(load(x + at), load(y + at)))
        else:
            for i in range(first, n):
                at = i * size
                store_one(out + at, apply_one(load_one(x + at), load_one(y + at)))

    kernel.per_thread = width
    return kernel


@functools.cache
def binary_with_row(name: str, dtype: np.dtype, side: str):
    """Return ``kernel(x, y, out, n_columns, n_rows, repeats)``: columns of 16 bytes, along axis 0.

    Each row of ``y`` meets ``repeats`` rows of ``x``, one after the other; ``side`` says which
    operand it is, "first" or "second".
    """
    width = WIDTHS[dtype.name]
    load, store, size = _access(dtype, width)
    apply, step = lift(_binary()[name], width), size * width
    is_first = side == "first"

    @cuda.jit
    def kernel(x, y, out, n_columns, n_rows, repeats):
        column, row = cuda.grid(2)
        column, row = np.int64(column), np.int64(row)
        if column < n_columns and row < n_rows:
            at = (row * n_columns + column) * step
            values, others = load(x + at), load(y + (row // repeats * n_columns + column) * step)
            if is_first:
                store(out + at, apply(others, values))
            else:
                store(out + at, apply(values, others))

    kernel.per_thread = width
    return kernel


@functools.cache
def scaled_product(dtype: np.dtype, form: str):
    """Return ``kernel(x, y, number, out, n)`` for ``number * (x * y)``.

    ``form`` is "arrays", or "one" where ``y`` is the address of a single element.
    """
    width = WIDTHS[dtype.name]
    load, store, size = _access(dtype, width)
    load_one, store_one, _ = _access(dtype, 1)
    multiply = _binary()["multiply"]
    with_number, with_number_one = (each(multiply, n, with_number=True) for n in (width, 1))
    product, product_one = lift(multiply, width), lift(multiply, 1)

    if form == "arrays":

        @cuda.jit
        def kernel(x, y, number, out, n):
            first = np.int64(cuda.grid(1)) * width
            if first + width <= n:
                at = first * size
                found = product(load(x + at), load(y + at))
                store(out + at, with_number(found, number))
            else:
                for i in range(first, n):
                    at = i * size
                    found = product_one(load_one(x + at), load_one(y + at))
                    store_one(out + at, with_number_one(found, number))

    else:

        @cuda.jit
        def kernel(x, y, number, out, n):
            first, one = np.int64(cuda.grid(1)) * width, load_one(y)[0]
            if first + width <= n:
                found = with_number(load(x + first * size), one)
                store(out + first * size, with_number(found, number))
            else:
                for i in range(first, n):
                    found = with_number_one(load_one(x + i * size), one)
                    store_one(out + i * size, with_number_one(found, number))

    kernel.per_thread = width
    return kernel


@functools.cache
def conversion(source: np.dtype, target: np.dtype):
    """Return ``kernel(x, out, n)`` from one type to another."""
    load, _, from_size = _access(source, 8)
    _, store, to_size = _access(target, 8)
    load_one, store_one = _access(source, 1)[0], _access(target, 1)[1]

    @cuda.jit
    def kernel(x, out, n):
        first = np.int64(cuda.grid(1)) * 8
        if first + 8 <= n:
            store(out + first * to_size, load(x + first * from_size))
        else:
            for i in range(first, n):
                store_one(out + i * to_size, load_one(x + i * from_size))

    kernel.per_thread = 8
    return kernel


def _access(dtype, width):
    found = by_address(dtype, width)
    return found.load, found.store, np.int64(found.n_bytes)


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
    return {name: cuda.jit(device=True)(function) for name, function in found.items()}


@functools.cache
def _binary() -> dict[str, Callable]:
    @cuda.jit(device=True)
    def maximum(x, y):
        if x != x:  # NaN of either goes through
            return x
        return y if y != y else max(x, y)  # of two zeros the positive one, as CuPy

    @cuda.jit(device=True)
    def minimum(x, y):
        if x != x:
            return x
        return y if y != y else min(x, y)

    found = {
        "add": lambda x, y: x + y,
        "divide": lambda x, y: x / y,
        "multiply": lambda x, y: x * y,
        "subtract": lambda x, y: x - y,
    }
    devices = {name: cuda.jit(device=True)(function) for name, function in found.items()}
    return {**devices, "maximum": maximum, "minimum": minimum}
