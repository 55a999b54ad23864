"""Dynamic loss scaling; on a GPU and in the simulator see tests/kernels/test_multi_tensor.py."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import optim
from rtxarr.data import load_checkpoint, save_checkpoint
from rtxarr.nn import Parameter
from rtxarr.testing import assert_close


def make(xp=np, dtype="float32", **settings):
    param = Parameter(xp.asarray([1.0, 2.0], dtype=getattr(xp, dtype)))
    return param, optim.SGD([param], lr=0.5), optim.LossScaler(**settings)


def backward(param, scaler, *, factor=1.0):
    """Give the parameter the scaled gradient of a loss that is linear in it."""
    param.grad = None
    scaler.scale(rx.sum(param * factor)).backward()


@pytest.mark.skip_xp("dask.array", "numpy:readonly", reason="no update in place")
def test_steps_use_the_unscaled_gradient(xp):
    param, optimizer, scaler = make(xp, initial_scale=1024.0)
    backward(param, scaler)
    assert_close(param.grad, np.full(2, 1024, "float32"), exact=True)
    scaler.step(optimizer)
    scaler.update()
    assert_close(param, np.asarray([0.5, 1.5], "float32"), exact=True)
    assert_close(scaler.current, np.asarray(1024, "float32"), exact=True)


def test_small_gradients_survive_in_float16():
    param, optimizer, scaler = make(dtype="float16")
    param.grad = None
    loss = rx.sum(rx.astype(param * 2.0**-20, "float32") * 2.0**-10)
    loss.backward()
    assert_close(param.grad, np.zeros(2, "float16"), exact=True)  # 2**-30 is 0 in float16
    param.grad = None
    loss = rx.sum(rx.astype(param * 2.0**-10, "float32") * 2.0**-16)
    scaler.scale(loss).backward()
    assert (param.grad > 0).all()
    scaler.step(optimizer)


def test_a_float16_loss_is_scaled_in_float32():
    assert optim.LossScaler().scale(np.ones((), "float16")).dtype == np.float32


@pytest.mark.skip_xp("dask.array", "numpy:readonly", reason="no update in place")
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_overflow_leaves_the_step_out_and_halves_the_scale(xp, bad):
    param, optimizer, scaler = make(xp, initial_scale=8.0)
    optimizer = optim.Adam([param], lr=optim.ExponentialSchedule(0.1, 0.5))
    for factor in (1.0, bad, 1.0):
        backward(param, scaler, factor=factor)
        scaler.step(optimizer)
        scaler.update()
    assert_close(scaler.current, np.asarray(4, "float32"), exact=True)
    assert optimizer.state_dict()["state"]["0"]["step"] == 2
    assert optimizer.state_dict()["n_steps"] == 3  # the schedule goes on
    assert_close(param, np.asarray([0.875, 1.875], "float32"), rtol=1e-5)


def test_the_scale_grows_after_good_steps_in_a_row():
    param, optimizer, scaler = make(initial_scale=4.0, growth=3.0, growth_interval=2, backoff=0.25)
    seen = []
    for factor in (1.0, np.inf, 1.0, 1.0, 1.0, 1.0):
        backward(param, scaler, factor=factor)
        scaler.step(optimizer)
        scaler.update()
        seen.append(float(scaler.current))
    assert seen == [4.0, 1.0, 1.0, 3.0, 3.0, 9.0]


def test_the_scale_stays_finite():
    param, optimizer, scaler = make(initial_scale=2.0**127, growth_interval=1)
    for _ in range(2):
        backward(param, scaler, factor=2.0**-126)
        scaler.step(optimizer)
        scaler.update()
    assert float(scaler.current) == np.finfo(np.float32).max


def test_two_optimizers_share_a_scale():
    first, second = make()[0], make()[0]
    optimizers = [optim.SGD([p], lr=1.0) for p in (first, second)]
    scaler = optim.LossScaler(initial_scale=2.0)
    backward(first, scaler)
    backward(second, scaler, factor=np.inf)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert_close(first, np.asarray([0, 1], "float32"), exact=True)
    assert_close(second, np.asarray([1, 2], "float32"), exact=True)
    assert float(scaler.current) == 1.0


def test_unscaled_gradients_can_be_clipped():
    param, optimizer, scaler = make()
    backward(param, scaler, factor=3.0)
    scaled = param.grad
    scaler.unscale(optimizer)
    assert param.grad is not scaled
    assert_close(param.grad, np.full(2, 3, "float32"), exact=True)
    norm = optim.clip_grad_norm([param], 1.0)
    assert_close(norm, np.asarray(3 * 2**0.5, "float32"))
    scaler.step(optimizer)
    assert_close(param, np.asarray([1, 2], "float32") - np.float32(0.5 / 2**0.5))


def test_parameters_without_gradients_are_passed_over():
    param, optimizer, scaler = make()
    scaler.scale(np.ones(1, "float32"))
    scaler.unscale(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert_close(param, np.asarray([1, 2], "float32"), exact=True)


@pytest.mark.parametrize("used", [False, True])
def test_the_state_goes_through_a_file(tmp_path, used):
    param, optimizer, scaler = make(initial_scale=32.0, growth_interval=3)
    other = make(growth_interval=3)[2]
    if used:
        backward(param, other)
    for factor in (np.nan, 1.0, 1.0):
        backward(param, scaler, factor=factor)
        scaler.step(optimizer)
        scaler.update()
    save_checkpoint(tmp_path / "last.safetensors", {"scaler": scaler.state_dict()})
    other.load_state_dict(load_checkpoint(tmp_path / "last.safetensors")["scaler"])
    assert str(other.state_dict()) == str(scaler.state_dict())
    for one in (scaler, other):
        backward(param, one)
        one.step(optimizer)
        one.update()
        assert float(one.current) == 32.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial_scale": 0}, "initial_scale must be > 0, got 0"),
        ({"initial_scale": np.inf}, "initial_scale must be >= 0 and finite, got inf"),
        ({"initial_scale": 1e39}, r"initial_scale must lie in the range of float32, got 1e\+39"),
        ({"initial_scale": 1e-50}, "initial_scale must lie in the range of float32, got 1e-50"),
        ({"growth": 1.0}, "growth must be > 1, got 1.0"),
        ({"backoff": 1.0}, r"backoff must lie in \(0, 1\), got 1.0"),
        ({"growth_interval": 0}, "growth_interval must be an int > 0, got 0"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        optim.LossScaler(**settings)


def test_the_order_of_calls_is_checked():
    param, optimizer, scaler = make()
    param.grad = np.ones(2, "float32")
    for call in (lambda: scaler.step(optimizer), lambda: scaler.unscale(optimizer), scaler.update):
        with pytest.raises(RuntimeError, match=r"scale\(\) must be called before"):
            call()
    backward(param, scaler)
    scaler.unscale(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale\(\) was called before"):
        scaler.unscale(optimizer)
    scaler.step(optimizer)
    for call in (scaler.step, scaler.unscale):
        with pytest.raises(RuntimeError, match=r"step\(\) was called before.*update\(\) first"):
            call(optimizer)
    scaler.update()
    backward(param, scaler)
    scaler.step(optimizer)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"scale": 1.0}, "state must have scale, n_good_steps, got scale"),
        ({"scale": 0.0, "n_good_steps": 0}, "scale must be > 0, got 0"),
        ({"scale": 1e39, "n_good_steps": 0}, "scale must lie in the range of float32"),
        ({"scale": np.nan, "n_good_steps": 0}, "scale must be >= 0 and finite, got nan"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(state, message):
    scaler = optim.LossScaler()
    with pytest.raises(ValueError, match=message):
        scaler.load_state_dict(state)
    assert float(scaler.current) == 65536.0


def test_a_scaler_serves_so_many_optimizers():
    param, _, scaler = make()
    scaler.scale(param.data)
    many = [optim.SGD([param], lr=0.1) for _ in range(31)]
    for optimizer in many[:30]:
        scaler.step(optimizer)
    with pytest.raises(ValueError, match="at most 30 optimizers"):
        scaler.step(many[30])
    del optimizer, many[0]
    scaler.update()
    scaler.step(many[-1])  # takes the place of the one that is gone


def test_the_repr_shows_the_settings():
    assert repr(optim.LossScaler()) == "LossScaler(growth=2.0, backoff=0.5, growth_interval=2000)"
