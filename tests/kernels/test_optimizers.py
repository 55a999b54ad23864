"""The kernels of the optimizers' steps against the same steps over arrays."""

import numpy as np
import pytest

from rtxarr import _device, optim
from rtxarr.nn import Parameter
from rtxarr.testing import assert_close

CASES = {
    "SGD": (optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "SGD momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    "Adam amsgrad": (optim.Adam, {"lr": 0.1, "betas": (0.7, 0.8), "amsgrad": True}),
    "AdamW": (optim.AdamW, {"lr": 0.1, "weight_decay": 0.3}),
    "Lion": (optim.Lion, {"lr": 0.1, "weight_decay": 0.3}),
}


def run(kind, settings, dtype, device, shape, monkeypatch, *, kernels):
    if not kernels:
        monkeypatch.setattr(kind, "kernel", optim.Optimizer.kernel)
    rng = np.random.default_rng(0)
    param = Parameter(rng.standard_normal(shape), dtype=dtype, device=device)
    xp = _device.namespace(param.data)
    optimizer = kind([param], **settings)
    for _ in range(3):
        grad = xp.asarray(rng.standard_normal((*shape[1:], shape[0]))).astype(param.dtype)
        param.grad = xp.moveaxis(grad, -1, 0)  # not contiguous
        optimizer.step()
    return param


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("device", "shape"),
    [
        pytest.param("cpu", (3, 5), marks=pytest.mark.sim),
        pytest.param("cuda:0", (33, 67), marks=pytest.mark.gpu),
    ],
)
def test_steps_are_those_over_arrays(name, dtype, device, shape, monkeypatch):
    kind, settings = CASES[name]
    got = run(kind, settings, dtype, device, shape, monkeypatch, kernels=True)
    want = run(kind, settings, dtype, device, shape, monkeypatch, kernels=False)
    assert_close(got, want)


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.sim),
        pytest.param("cuda:0", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_nan_gradients_show_and_nothing_else_moves(name, device):
    kind, settings = CASES[name]
    param = Parameter(np.ones(4, "float32"), device=device)
    grad = np.array([np.nan, 0, 0, 0], "float32")
    param.grad = _device.to_device(grad, device)
    kind([param], **{**settings, "weight_decay": 0.0}).step()
    assert_close(param, [np.nan, 1, 1, 1])
