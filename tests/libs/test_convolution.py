"""Convolutions of random forms with all that goes with them: with a stand-in, then on a GPU.

Against float64, with poisoned memory.
"""

import math

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.libs import dnn
from rtxarr.ops._conv import _unfolded

from .test_dnn import close, convolution_case, host, n_cases, random_image

FORWARD = {1: rx.conv1d, 2: rx.conv2d, 3: rx.conv3d}
TRANSPOSED = {1: rx.conv_transpose1d, 2: rx.conv_transpose2d, 3: rx.conv_transpose3d}
FLOATS = ["float32", "float16", "bfloat16"]


def draw(cupy, rng, shape, dtype, last=False):
    """Give an array, and the same in float64 on the host."""
    x = random_image(cupy, rng, shape, dtype, last)
    return x, host(x).astype(np.float64)


@pytest.mark.parametrize("n_axes", [1, 2, 3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_added_to_convolutions_of_any_form(cupy, dtype, n_axes):
    """Groups, strides, dilation and uneven padding, with a bias, a residual and an activation."""
    rng = np.random.default_rng(20 + n_axes)
    name, dtype = dtype, np.dtype(getattr(rx, dtype))
    before = dnn.status().refused.copy()
    left = n_cases(cupy, 6)
    while left:
        n, c, k, groups, spatial, kernel, windows = convolution_case(rng, n_axes)
        counts = windows.counts(spatial)
        if min(counts) < 1:
            continue
        left -= 1
        last = bool(rng.random() < 0.7)
        (x, x64), (weight, weight64) = (
            draw(cupy, rng, s, dtype, last) for s in ((n, c, *spatial), (k, c // groups, *kernel))
        )
        bias, bias64 = draw(cupy, rng, (k,), dtype) if rng.random() < 0.6 else (None, None)
        residual, added = None, 0
        if rng.random() < 0.6:
            way = [last, not last, "gaps"][rng.integers(3)]
            residual, added = draw(cupy, rng, (n, k, *counts), dtype, way)
        activation = [None, "relu", "silu"][rng.integers(3)]
        options = {"windows": windows, "groups": groups}
        want = _unfolded(x64, weight64, bias64, **options) + added
        if activation is not None:
            want = np.maximum(want, 0) if activation == "relu" else want / (1 + np.exp(-want))
        got = dnn.try_convolution(
            x, weight, bias, **options, residual=residual, activation=activation
        )
        assert got is not None, dnn.status().refused
        assert got.dtype == dtype
        # Where there is no plan for all of it, the convolution is rounded before.
        sums = math.sqrt(c // groups * math.prod(kernel)) / 4 if name == "float32" else 0
        close(host(got), want, name, 2 + sums)
    refused = dnn.status().refused - before
    assert all(" after a convolution in " in reason for reason in refused), refused


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n_axes", [1, 2, 3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_layers_of_any_form(served, dtype, n_axes, transposed):
    """Values and gradients through the namespace, against float64 on the CPU."""
    cupy = served
    rng = np.random.default_rng(40 + n_axes)
    name, dtype = dtype, np.dtype(getattr(rx, dtype))
    for _ in range(n_cases(cupy, 4)):
        groups, stride, dilation = (int(rng.choice(x)) for x in ([1, 2, 4], [1, 2, 3], [1, 2]))
        n_in, n_out = (groups * int(x) for x in rng.choice([1, 2, 8], 2))
        kernel = tuple(int(x) for x in rng.integers(1, 4, n_axes))
        spatial = tuple(int(x) for x in rng.integers(6, 12, n_axes))
        options = {"stride": stride, "dilation": dilation, "groups": groups}
        options["padding"] = int(rng.integers(0, min(kernel)))
        function = (TRANSPOSED if transposed else FORWARD)[n_axes]
        if transposed:
            options["output_padding"] = int(rng.integers(0, stride))
        shape = (n_in, n_out // groups) if transposed else (n_out, n_in // groups)
        last = bool(rng.integers(2))
        pairs = [
            draw(cupy, rng, s, dtype, way)
            for s, way in (
                ((2, n_in, *spatial), last),
                ((*shape, *kernel), last),
                ((n_out,), False),
            )
        ]
        found = []
        for arrays in zip(*pairs, strict=True):
            tensors = [rx.Tensor(a, requires_grad=True) for a in arrays]
            out = function(*tensors, **options)
            if not found:
                g, g64 = draw(cupy, rng, out.shape, dtype, last)
            rx.sum(out * (g64 if found else g)).backward()
            found.append([out.data, *(t.grad for t in tensors)])
        n_terms = max(math.prod(out.shape) // n_out, math.prod(kernel) * max(n_in, n_out) // groups)
        for got, want in zip(*found, strict=True):
            assert got.dtype == dtype
            close(host(got), want, name, 2 + (math.sqrt(n_terms) / 4 if name == "float32" else 0))
