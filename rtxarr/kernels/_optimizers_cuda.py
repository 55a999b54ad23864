"""GPU kernels of the optimizers' steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._vector import access
from rtxarr.kernels.optimizers import PER_THREAD


@functools.cache
def kernel(name: str, *flags: bool, dtype: np.dtype):
    """Return the kernel of one optimizer with these flags, for parameters of ``dtype``.

    All arrays are flat. State, and all arithmetic, is in float32 for the half types.
    """
    makers: dict[str, Callable] = {"sgd": _sgd, "adam": _adam, "lion": _lion}
    return makers[name](access(dtype, wide=False), *flags)


@cuda.jit(device=True)
def _first():
    # Neighbouring threads take neighbouring elements, then all move on by a block.
    return np.int64(cuda.blockIdx.x) * cuda.blockDim.x * PER_THREAD + cuda.threadIdx.x


def _sgd(kind, momentum, nesterov):
    load, store = kind.load, kind.store

    if not momentum:

        @cuda.jit
        def plain(param, grad, lr, _, weight_decay):
            for k in range(PER_THREAD):
                i = _first() + k * cuda.blockDim.x
                if i < param.size:
                    p = load(param, i)[0]
                    store(param, i, (p - lr * (load(grad, i)[0] + weight_decay * p),))

        return plain

    @cuda.jit
    def step(param, grad, velocity, lr, momentum, weight_decay):
        for k in range(PER_THREAD):
            i = _first() + k * cuda.blockDim.x
            if i < param.size:
                p = load(param, i)[0]
                g = load(grad, i)[0] + weight_decay * p
                v = momentum * velocity[i] + g
                velocity[i] = v
                if nesterov:
                    v = g + momentum * v
                store(param, i, (p - lr * v,))

    return step


def _adam(kind, amsgrad):
    load, store = kind.load, kind.store

    @cuda.jit(device=True)
    def moved(param, grad, mean, mean_square, i, beta1, new1, beta2, new2, weight_decay):
        """Move both means on and give the parameter and them."""
        p = load(param, i)[0]
        g = load(grad, i)[0] + weight_decay * p
        m = beta1 * mean[i] + new1 * g
        v = beta2 * mean_square[i] + new2 * g * g
        mean[i] = m
        mean_square[i] = v
        return p, m, v

    if amsgrad:

        @cuda.jit
        def with_largest(
            param,
            grad,
            mean,
            mean_square,
            largest,
            rate,
            beta1,
            new1,
            beta2,
            new2,
            correction,
            eps,
            weight_decay,
            shrink,
        ):
            for k in range(PER_THREAD):
                i = _first() + k * cuda.blockDim.x
                if i < param.size:
                    p, m, v = moved(
                        param, grad, mean, mean_square, i, beta1, new1, beta2, new2, weight_decay
                    )
                    before = largest[i]
                    v = before if before > v else v  # a NaN in v stays
                    largest[i] = v
                    root = math.sqrt(v * correction) + eps
                    store(param, i, (shrink * p - rate * m / root,))

        return with_largest

    @cuda.jit
    def step(
        param,
        grad,
        mean,
        mean_square,
        rate,
        beta1,
        new1,
        beta2,
        new2,
        correction,
        eps,
        weight_decay,
        shrink,
    ):
        for k in range(PER_THREAD):
            i = _first() + k * cuda.blockDim.x
            if i < param.size:
                p, m, v = moved(
                    param, grad, mean, mean_square, i, beta1, new1, beta2, new2, weight_decay
                )
                root = math.sqrt(v * correction) + eps
                store(param, i, (shrink * p - rate * m / root,))

    return step


def _lion(kind):
    load, store, zero = kind.load, kind.store, kind.scalar(0)

    @cuda.jit
    def step(param, grad, momentum, lr, beta1, new1, beta2, new2, shrink):
        for k in range(PER_THREAD):
            i = _first() + k * cuda.blockDim.x
            if i < param.size:
                g = load(grad, i)[0]
                m = momentum[i]
                direction = beta1 * m + new1 * g
                momentum[i] = beta2 * m + new2 * g
                p = shrink * load(param, i)[0]
                if direction > zero:
                    p -= lr
                elif direction < zero:
                    p += lr
                elif direction != direction:  # NaN must show
                    p = direction
                store(param, i, (p,))

    return step
