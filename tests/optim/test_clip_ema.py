"""Clipping of gradients, and averages of parameters."""

import math

import numpy as np
import pytest

from rtxarr import optim
from rtxarr.nn import Parameter
from rtxarr.testing import assert_close


def with_grads(*grads, xp=np, dtype="float64"):
    params = []
    for grad in grads:
        param = Parameter(xp.zeros(np.shape(grad), dtype=getattr(xp, dtype)))
        param.grad = xp.asarray(grad, dtype=param.dtype)
        params.append(param)
    return params


def test_norm_is_clipped_together(xp):
    params = with_grads([[3.0, 0.0]], [0.0, 4.0, 12.0], xp=xp)
    before = [p.grad for p in params]
    norm = optim.clip_grad_norm(iter(params), 6.5)
    assert_close(norm, np.asarray(13.0))
    assert norm.shape == ()
    for param, old, want in zip(params, before, ([[1.5, 0.0]], [0.0, 2.0, 6.0]), strict=True):
        assert_close(param.grad, want, rtol=1e-6)
        assert param.grad is not old
        assert_close(old, np.asarray(want) * 2, rtol=1e-6)


def test_small_norms_are_left():
    (param,) = with_grads([0.3, 0.4])
    assert_close(optim.clip_grad_norm([param], 1.0), np.asarray(0.5))
    assert_close(param.grad, [0.3, 0.4], exact=True)


def test_infinite_limit_only_measures():
    (param,) = with_grads([3.0, 4.0])
    grad = param.grad
    assert_close(optim.clip_grad_norm([param], math.inf), np.asarray(5.0))
    assert param.grad is grad


def test_half_gradients_are_summed_in_float32():
    (param,) = with_grads([200.0] * 4, dtype="float16")  # 200**2 is not representable in float16
    norm = optim.clip_grad_norm([param], 200.0)
    assert norm.dtype == np.float32
    assert_close(norm, np.float32(400.0))
    assert param.grad.dtype == np.float16
    assert_close(param.grad, [100.0] * 4, rtol=1e-3)


def test_norm_without_gradients_is_zero():
    assert float(optim.clip_grad_norm([Parameter(np.zeros(3))], 1.0)) == 0.0


def test_nan_gradients_show_in_the_norm():
    params = with_grads([math.nan], [1.0])
    assert math.isnan(float(optim.clip_grad_norm(params, 1.0)))


def test_values_are_clipped(xp):
    (param,) = with_grads([-3.0, 0.5, 2.0], xp=xp)
    old = param.grad
    optim.clip_grad_value([param, Parameter(np.zeros(2))], 1.0)
    assert_close(param.grad, [-1.0, 0.5, 1.0])
    assert_close(old, [-3.0, 0.5, 2.0])


def test_a_limit_may_be_an_array_without_axes():
    params = with_grads([3.0, 4.0])
    optim.clip_grad_norm(params, np.asarray(2.5))
    assert_close(params[0].grad, [1.5, 2.0], rtol=1e-5)
    optim.clip_grad_value(params, np.float32(1.75))
    assert_close(params[0].grad, [1.5, 1.75], rtol=1e-5)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_limits_are_checked(limit):
    params = with_grads([1.0])
    with pytest.raises(TypeError, match="max_norm must be a number, got list"):
        optim.clip_grad_norm([], [1.0])
    with pytest.raises(TypeError, match="max_value must be a number, got NoneType"):
        optim.clip_grad_value([], None)
    with pytest.raises(ValueError, match="max_norm must be > 0, got"):
        optim.clip_grad_norm(params, limit)
    with pytest.raises(ValueError, match="max_value must be > 0, got"):
        optim.clip_grad_value(params, limit)


def test_averages_follow_the_formula():
    param = Parameter(np.array([1.0, 2.0]))
    ema = optim.ExponentialMovingAverage([param], decay=0.75)
    want = np.array([1.0, 2.0])
    for value in ([3.0, 0.0], [5.0, -2.0]):
        param.assign(np.array(value))
        ema.update()
        want = 0.75 * want + 0.25 * np.array(value)
    assert_close(ema.averages[0], want)


def test_warmup_forgets_the_first_values():
    param = Parameter(np.array(0.0))
    ema = optim.ExponentialMovingAverage([param], decay=0.9, warmup=True)
    param.assign(np.array(1.0))
    ema.update()
    assert_close(ema.averages[0], np.asarray(1 - 2 / 11))


def test_swap_is_undone_also_after_an_error():
    param = Parameter(np.array([1.0]))
    ema = optim.ExponentialMovingAverage([param], decay=0.5)
    param.assign(np.array([3.0]))
    ema.update()

    def fail():
        with ema.averaged():
            assert_close(param, [2.0])
            param.assign(np.array([9.0]))  # reaches neither the parameter nor the average
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        fail()
    assert_close(param, [3.0])
    assert_close(ema.averages[0], [2.0])


def test_half_parameters_have_float32_averages():
    param = Parameter(np.array([1.0]), dtype="float16")
    ema = optim.ExponentialMovingAverage([param], decay=0.999)
    param.assign(np.array([2.0], dtype="float16"))
    ema.update()
    assert ema.averages[0].dtype == np.float32
    assert_close(ema.averages[0], np.array([1.001], "float32"))
    with ema.averaged():
        assert param.dtype == np.float16


def test_resumed_averages_have_the_same_bits():
    rng = np.random.default_rng(0)
    param = Parameter(rng.standard_normal(5), dtype="float32")
    ema = optim.ExponentialMovingAverage([param], decay=0.9, warmup=True)
    ema.update()
    other = optim.ExponentialMovingAverage([param], decay=0.9, warmup=True)
    other.load_state_dict(ema.state_dict())
    param.assign(rng.standard_normal(5).astype("float32"))
    ema.update()
    other.update()
    assert_close(other.averages[0], ema.averages[0], exact=True)


@pytest.mark.parametrize(
    ("averages", "message"),
    [
        ({}, "state must have 2 averages, got 0"),
        (
            {"0": np.ones(2), "1": np.ones(3)},
            r"average 1 must have shape \(2,\) and dtype float64, got \(3,\)",
        ),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(averages, message):
    params = [Parameter(np.zeros(2)), Parameter(np.zeros(2))]
    ema = optim.ExponentialMovingAverage(params)
    with pytest.raises(ValueError, match=message):
        ema.load_state_dict({"n_updates": 3, "averages": averages})
    assert_close(ema.averages[0], [0.0, 0.0])
    assert ema.n_updates == 0


def test_decay_is_checked():
    with pytest.raises(ValueError, match=r"decay must lie in \[0, 1\), got 1.0"):
        optim.ExponentialMovingAverage([Parameter(np.zeros(2))], decay=1.0)


def test_a_state_of_a_wrong_kind_changes_nothing():
    ema = optim.ExponentialMovingAverage([Parameter(np.zeros(2))])
    with pytest.raises(TypeError, match="state must be a dict, got NoneType"):
        ema.load_state_dict(None)
    with pytest.raises(ValueError, match="state must have n_updates, averages, got averages"):
        ema.load_state_dict({"averages": {"0": np.ones(2)}})
    with pytest.raises(TypeError, match="average 0 must be an array, got list"):
        ema.load_state_dict({"n_updates": 1, "averages": {"0": [1.0, 1.0]}})
    assert_close(ema.averages[0], [0.0, 0.0])
