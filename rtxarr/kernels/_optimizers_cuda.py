"""GPU kernels of the optimizers' steps: an element's update, applied to all of many arrays.

The updates say which products and sums are rounded together. Left to the compiler, that would
differ from one kernel to another, and so would the bits with alignment or a scaled loss.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from rtxarr._device import cuda
from rtxarr.dtypes import accumulator
from rtxarr.kernels._multi_tensor_cuda import read, walk
from rtxarr.kernels._vector import rounded_product
from rtxarr.kernels.multi_tensor import FOUND
from rtxarr.kernels.optimizers import N_NUMBERS, N_STATES


@functools.cache
def kernel(name: str, *flags: bool, dtype: np.dtype, scaled: bool):
    """Return the kernel of one optimizer with these flags, for parameters of ``dtype``.

    State, and all arithmetic, is in float32 for the half types. With ``scaled`` the gradients
    are those of a scaled loss, and nothing is done if one of them is not finite.
    """
    makers: dict[str, Callable] = {"sgd": _sgd, "adam": _adam, "adamw": _adam, "lion": _lion}
    scalar = np.dtype(accumulator(dtype)).type
    update = makers[name](scalar, *flags)
    n_states, n_numbers = N_STATES[(name, *flags)], N_NUMBERS[name]
    numbers_at = read(n_numbers)

    if not scaled:
        go = walk(update, n_states, dtype, dtype)

        @cuda.jit
        def step(words, n_rows, blocks, numbers):
            block = blocks[cuda.blockIdx.x]
            at = words[(3 + n_states) * n_rows + (block >> 32)] * n_numbers
            go(words, n_rows, block, numbers_at(numbers, at))

        return step

    go = walk(_unscaled(update, n_numbers), n_states, dtype, dtype)
    one, zero = scalar(1), np.float32(0)

    @cuda.jit
    def scaled_step(words, n_rows, blocks, numbers, state, slot, still_scaled):
        if state[FOUND + slot] != zero:
            return
        block = blocks[cuda.blockIdx.x]
        factor = one / scalar(state[0]) if still_scaled else one
        at = (block >> 32) * n_numbers  # each row has its own, for its own count of steps
        go(words, n_rows, block, numbers_at(numbers, at) + (factor,))  # noqa: RUF005

    return scaled_step


def _unscaled(update, last):
    @cuda.jit(device=True)
    def after_scaling(p, g, a, b, c, n):
        return update(p, g * n[last], a, b, c, n)

    return after_scaling


def _sgd(_, momentum, nesterov):
    @cuda.jit(device=True)
    def plain(p, g, a, b, c, n):
        lr, _, weight_decay = n[0], n[1], n[2]
        return cuda.fma(-lr, cuda.fma(weight_decay, p, g), p), a, b, c

    @cuda.jit(device=True)
    def with_velocity(p, g, a, b, c, n):
        lr, momentum, weight_decay = n[0], n[1], n[2]
        g = cuda.fma(weight_decay, p, g)
        velocity = cuda.fma(momentum, a, g)
        v = velocity
        if nesterov:
            v = cuda.fma(momentum, v, g)
        return cuda.fma(-lr, v, p), velocity, b, c

    return with_velocity if momentum else plain


def _adam(_, amsgrad):
    @cuda.jit(device=True)
    def update(p, g, mean, mean_square, largest, n):
        rate, beta1, new1, beta2, new2, correction, eps, weight_decay, shrink = (
            n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8],
        )  # fmt: skip
        g = cuda.fma(weight_decay, p, g)
        m = cuda.fma(beta1, mean, new1 * g)
        v = cuda.fma(beta2, mean_square, new2 * g * g)
        used = v
        if amsgrad:
            used = largest if largest > v else v  # a NaN in v stays
        root = math.sqrt(used * correction) + eps
        return cuda.fma(shrink, p, -(rate * m / root)), m, v, used

    return update


def _lion(scalar):
    zero = scalar(0)

    @cuda.jit(device=True)
    def update(p, g, momentum, b, c, n):
        lr, beta1, new1, beta2, new2, shrink = n[0], n[1], n[2], n[3], n[4], n[5]
        direction = cuda.fma(new1, g, beta1 * momentum)
        p = rounded_product(shrink, p)
        if direction > zero:
            p -= lr
        elif direction < zero:
            p += lr
        elif direction != direction:  # NaN must show
            p = direction
        return p, cuda.fma(new2, g, beta2 * momentum), b, c

    return update


@cuda.jit(device=True)
def _power(base, exponent):
    out = 1.0
    while exponent > 0:
        if exponent & 1:
            out *= base
        base *= base
        exponent >>= 1
    return out


@functools.cache
def count_steps(dtype: np.dtype, *, corrects: bool):
    """Return the kernel that counts a step that is left out, for each row.

    If ``corrects``, it also writes Adam's two numbers that depend on the steps really made:
    ``numbers`` of a row are those of ``_adam`` in ``kernels.optimizers``.
    """
    scalar = np.dtype(accumulator(dtype)).type
    n_numbers, zero = N_NUMBERS["adam"], np.float32(0)

    @cuda.jit
    def count(places, exact, numbers, skipped, state, slot):
        row = cuda.grid(1)
        if row >= places.size:
            return
        place = places[row]
        if state[FOUND + slot] != zero:
            skipped[place] += 1
        elif corrects:
            lr, beta1, beta2, step = (
                exact[4 * row], exact[4 * row + 1], exact[4 * row + 2], exact[4 * row + 3],
            )  # fmt: skip
            made = np.int64(step) - skipped[place]
            numbers[row * n_numbers] = scalar(lr / (1.0 - _power(beta1, made)))
            numbers[row * n_numbers + 5] = scalar(1.0 / (1.0 - _power(beta2, made)))

    return count
