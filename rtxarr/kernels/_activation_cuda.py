"""GPU kernels of the activation functions: a thread makes 16 neighbouring bytes of the result."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._vector import access, each, lift


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
