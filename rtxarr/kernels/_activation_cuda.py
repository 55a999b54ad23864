"""GPU kernels of the activation functions: a thread makes 16 neighbouring bytes of the result."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._vector import access, each, lift
from rtxarr.kernels.activation import BACKWARD


@functools.cache
def forward(name: str, dtype: np.dtype, wide: bool):
    """Return ``kernel(x, out)`` over flat arrays; ``kernel.per_thread`` elements a thread."""
    kind = access(dtype, wide=wide)
    load, store, width = kind.load, kind.store, kind.width
    apply = each(_formulas(kind.scalar)[name], width)
    one = access(dtype, wide=False)
    load_one, store_one, apply_one = one.load, one.store, each(_formulas(one.scalar)[name], 1)

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
def backward(name: str, dtype: np.dtype, wide: bool):
    """Return ``kernel(saved, grad, out)`` over flat arrays, likewise."""
    kind = access(dtype, wide=wide)
    load, store, width = kind.load, kind.store, kind.width
    apply = lift(_slopes(kind.scalar)[name], width)
    one = access(dtype, wide=False)
    load_one, store_one, apply_one = one.load, one.store, lift(_slopes(one.scalar)[name], 1)

    @cuda.jit
    def kernel(saved, grad, out):
        first = cuda.grid(1) * width
        if first + width <= out.size:
            store(out, first, apply(load(saved, first), load(grad, first)))
        else:
            for i in range(first, out.size):
                store_one(out, i, apply_one(load_one(saved, i), load_one(grad, i)))

    kernel.per_thread = width
    return kernel


def _places(width: int, halves: bool):
    """Return the device function that says where the two operands of a result's element are.

    They are in arrays like the result, or ``halves`` of rows of ``2 * n`` in one.
    """

    @cuda.jit(device=True)
    def places(first, n):
        if halves:
            row = np.int64(np.uint32(first // width) // np.uint32(n // width))  # 32 bits: quick
            return first + row * n, first + row * n + n
        return first, first

    return places


@functools.cache
def gate(name: str, halves: bool, dtype: np.dtype, wide: bool):
    """Return ``kernel(x, y, out, n)``, likewise: values times gates; see :func:`_places`."""
    kind, one = access(dtype, wide=wide), access(dtype, wide=False)
    load, store, width = kind.load, kind.store, kind.width
    load_one, store_one = one.load, one.store
    formula, places = _formulas(kind.scalar)[name], _places(width, halves)

    @cuda.jit(device=True)
    def times(value, gate):
        return value * formula(gate)

    apply, apply_one = lift(times, width), lift(times, 1)

    @cuda.jit
    def kernel(x, y, out, n):
        first = cuda.grid(1) * width
        if first + width <= out.size:
            i, j = places(first, n)
            store(out, first, apply(load(x, i), load(y, j)))
        else:  # not of halves
            for i in range(first, out.size):
                store_one(out, i, apply_one(load_one(x, i), load_one(y, i)))

    kernel.per_thread = width
    return kernel


@functools.cache
def gate_backward(name: str, halves: bool, dtype: np.dtype, wide: bool):
    """Return ``kernel(x, y, grad, of_x, of_y, n)``, likewise; ``of_x`` has both of ``halves``."""
    kind, one = access(dtype, wide=wide), access(dtype, wide=False)
    load, store, width = kind.load, kind.store, kind.width
    load_one, store_one = one.load, one.store
    formula, slope = _formulas(kind.scalar)[name], _slopes(kind.scalar)[name]
    places, of_result = _places(width, halves), BACKWARD[name] == "out"

    @cuda.jit(device=True)
    def by_value(gate, grad):
        return grad * formula(gate)

    @cuda.jit(device=True)
    def by_gate(gate, grad):
        return slope(formula(gate) if of_result else gate, grad)

    @cuda.jit(device=True)
    def times(a, b):
        return a * b

    of_values, of_gates, products = lift(by_value, width), lift(by_gate, width), lift(times, width)
    of_value, of_gate = lift(by_value, 1), lift(by_gate, 1)

    @cuda.jit
    def kernel(x, y, grad, of_x, of_y, n):
        first = cuda.grid(1) * width
        if first + width <= grad.size:
            i, j = places(first, n)
            v, s, g = load(x, i), load(y, j), load(grad, first)
            store(of_x, i, of_values(s, g))
            store(of_x if halves else of_y, j, of_gates(s, products(v, g)))
        else:
            for i in range(first, grad.size):
                s, g = load_one(y, i), load_one(grad, i)
                store_one(of_x, i, of_value(s, g))
                store_one(of_y, i, of_gate(s, (load_one(x, i)[0] * g[0],)))

    kernel.per_thread = width
    return kernel


@functools.cache
def _shared(scalar):
    """Return the numbers and functions that the formulas have in common."""
    one = scalar(1)

    @cuda.jit(device=True)
    def sigmoid(x):
        small = math.exp(-abs(x))
        return (one if x >= scalar(0) else small) / (one + small)

    @cuda.jit(device=True)
    def softplus(x):
        return max(x, scalar(0)) + math.log1p(math.exp(-abs(x)))

    return sigmoid, softplus


@functools.cache
def _formulas(scalar) -> dict[str, Callable]:
    zero, one, half = scalar(0), scalar(1), scalar(0.5)
    root = scalar(math.sqrt(0.5))
    scale, cubic = scalar(math.sqrt(2 / math.pi)), scalar(0.044715)
    sigmoid, softplus = _shared(scalar)

    @cuda.jit(device=True)
    def elu(x):
        return x if x > zero else scalar(math.expm1(x))

    @cuda.jit(device=True)
    def gelu(x):
        return half * x * (one + math.erf(x * root))

    @cuda.jit(device=True)
    def gelu_tanh(x):
        return half * x * (one + math.tanh(scale * (x + cubic * x * x * x)))

    @cuda.jit(device=True)
    def silu(x):
        return x * sigmoid(x)

    @cuda.jit(device=True)
    def mish(x):
        return x * math.tanh(softplus(x))

    @cuda.jit(device=True)
    def relu(x):
        return zero if x <= zero else x  # a NaN stays

    return {
        "elu": elu,
        "gelu": gelu,
        "gelu_tanh": gelu_tanh,
        "mish": mish,
        "relu": relu,
        "sigmoid": sigmoid,
        "silu": silu,
    }


@functools.cache
def _slopes(scalar) -> dict[str, Callable]:
    zero, one, half = scalar(0), scalar(1), scalar(0.5)
    root, density = scalar(math.sqrt(0.5)), scalar(1 / math.sqrt(2 * math.pi))
    scale, cubic = scalar(math.sqrt(2 / math.pi)), scalar(0.044715)
    three = scalar(3 * 0.044715)
    sigmoid, softplus = _shared(scalar)

    @cuda.jit(device=True)
    def gelu(x, g):
        below = half * (one + math.erf(x * root))
        return g * (below + x * density * math.exp(-half * x * x))

    @cuda.jit(device=True)
    def gelu_tanh(x, g):
        square = x * x
        t = math.tanh(scale * x * (one + cubic * square))
        slope = scale * (one + three * square)
        return g * (half * (one + t) + half * x * (one - t * t) * slope)

    @cuda.jit(device=True)
    def silu(x, g):
        s = sigmoid(x)
        return g * (s * (one + x * (one - s)))

    @cuda.jit(device=True)
    def mish(x, g):
        t = math.tanh(softplus(x))
        return g * (t + x * sigmoid(x) * (one - t * t))

    @cuda.jit(device=True)
    def of_sigmoid(out, g):
        return g * (out * (one - out))

    @cuda.jit(device=True)
    def of_elu(out, g):
        return g if out > zero else g * (out + one)

    @cuda.jit(device=True)
    def of_relu(out, g):
        return zero if out <= zero else g

    return {
        "elu": of_elu,
        "gelu": gelu,
        "gelu_tanh": gelu_tanh,
        "mish": mish,
        "relu": of_relu,
        "sigmoid": of_sigmoid,
        "silu": silu,
    }
