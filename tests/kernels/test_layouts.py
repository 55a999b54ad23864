"""Arrays of one axis with gaps, and broadcast gradients: one axis, but not contiguous."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device
from rtxarr.random import Generator
from rtxarr.testing import assert_close

OPERATIONS = {
    "layer_norm": lambda x: rx.layer_norm(x, x, x),
    "rms_norm": rx.rms_norm,
    "softmax": rx.softmax,
    "log_softmax": rx.log_softmax,
    "dropout": lambda x: rx.dropout(x, 0.5, generator=Generator(0)),
    "dropout_add": lambda x: rx.dropout_add(x, x, 0.5, x, generator=Generator(0)),
    "group_norm": lambda x: rx.group_norm(rx.reshape(x, (1, 8, 2)), 2),
    "rotary": lambda x: rx.rotary_embedding(x, x[:8], x[:8]),
    "cross_entropy": lambda x: rx.cross_entropy(
        rx.reshape(x, (2, 8)), _labels(x), reduction="none"
    ),
    "scatter_add": lambda x: rx.scatter_add(rx.reshape(x, (2, 8)), _labels(x), 4),
}


def _labels(x):
    return _device.to_device(np.array([3, 1]), x.device)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_gaps_and_broadcasts(place, name, dtype):
    values = np.random.default_rng(0).standard_normal(32).astype(dtype)
    function = OPERATIONS[name]

    def run(x, total):
        t = rx.Tensor(x, requires_grad=True)
        out = function(t)
        total(out)
        return out.data, t.grad

    def by_sum(out):
        rx.sum(out).backward()  # its gradient is one number, seen as an array

    def by_ones(out):
        out.backward(rx.ones(out.shape, dtype=out.dtype, device=place))

    spread = _device.to_device(values, place)
    want = run(spread[::2].copy(), by_ones)
    for x, total in ((spread[::2], by_ones), (spread[::2].copy(), by_sum)):
        for got, right in zip(run(x, total), want, strict=True):
            assert_close(got, right)
