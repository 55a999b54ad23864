"""Activations, softmax, gates and dropout against plain float64 formulas and PyTorch."""

import math

import numpy as np
import pytest
from scipy import special, stats

import rtxarr as rx
from rtxarr.ops import _activations
from rtxarr.random import Generator
from rtxarr.testing import assert_close

# Away from 0 and +-3, where some have a kink.
X = np.array([[-5.0, -2.5, -0.7, -0.1], [0.2, 0.9, 2.7, 6.0]])


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


FORMULAS = {
    "relu": lambda x: max(x, 0.0),
    "leaky_relu": lambda x: x if x > 0 else 0.01 * x,
    "elu": lambda x: x if x > 0 else math.exp(x) - 1,
    "selu": lambda x: 1.0507009873554805 * (x if x > 0 else 1.6732632423543772 * (math.exp(x) - 1)),
    "sigmoid": sigmoid,
    "log_sigmoid": lambda x: math.log(sigmoid(x)),
    "softplus": lambda x: math.log(1 + math.exp(x)),
    "hardsigmoid": lambda x: min(max(x / 6 + 0.5, 0), 1),
    "hardswish": lambda x: x * min(max(x / 6 + 0.5, 0), 1),
    "silu": lambda x: x * sigmoid(x),
    "mish": lambda x: x * math.tanh(math.log(1 + math.exp(x))),
    "erf": math.erf,
    "gelu": lambda x: x * stats.norm.cdf(x),
}
TORCH_NAMES = {"log_sigmoid": "logsigmoid", "erf": None}
SHAPED = ("softmax", "log_softmax", "glu", "geglu", "swiglu")


@pytest.mark.parametrize("name", FORMULAS)
def test_values(xp, name):
    got = getattr(rx, name)(xp.asarray(X))
    assert_close(got, np.vectorize(FORMULAS[name], otypes=[float])(X))


def test_options(xp):
    x = xp.asarray(X)
    assert_close(rx.leaky_relu(x, negative_slope=0.3), np.where(X > 0, X, 0.3 * X))
    assert_close(rx.elu(x, alpha=2.0), np.where(X > 0, X, 2 * np.expm1(np.minimum(X, 0))))
    assert_close(rx.softplus(x, beta=3.0), np.log(1 + np.exp(3 * X)) / 3)
    inner = math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)
    assert_close(rx.gelu(x, approximate="tanh"), 0.5 * X * (1 + np.tanh(inner)))


@pytest.mark.parametrize("axis", [0, -1])
def test_softmax(xp, axis):
    assert_close(rx.softmax(xp.asarray(X), axis=axis), special.softmax(X, axis=axis))
    assert_close(rx.log_softmax(xp.asarray(X), axis=axis), special.log_softmax(X, axis=axis))


def test_softmax_of_hidden_elements():
    x = np.array([[0.0, -np.inf, 0.0], [-np.inf] * 3])
    assert_close(rx.softmax(x), [[0.5, 0, 0.5], [0, 0, 0]])
    assert_close(rx.log_softmax(x[:1]), [[-math.log(2), -np.inf, -math.log(2)]])
    tensor = rx.Tensor(x, requires_grad=True)
    rx.sum(rx.softmax(tensor)[:, 0]).backward()
    assert_close(tensor.grad, [[0.25, 0, -0.25], [0, 0, 0]])


def test_gates(xp):
    a, b = X[:, :2], X[:, 2:]
    assert_close(rx.glu(xp.asarray(X)), a * special.expit(b))
    assert_close(rx.geglu(xp.asarray(X)), a * b * stats.norm.cdf(b))
    assert_close(rx.swiglu(xp.asarray(X)), a * b * special.expit(b))
    assert_close(rx.glu(xp.asarray(X), axis=0), X[:1] * special.expit(X[1:]))


@pytest.mark.parametrize("name", [*FORMULAS, *SHAPED])
def test_half_precision(check_half, name):
    check_half(getattr(rx, name), X)


@pytest.mark.parametrize("name", [*FORMULAS, "softmax", "log_softmax"])
@pytest.mark.parametrize("shape", [(0,), (1,), (0, 3), (3, 0)], ids=str)
def test_awkward_shapes(name, shape):
    x = rx.Tensor(np.full(shape, 0.5), requires_grad=True)
    out = getattr(rx, name)(x)
    rx.sum(out).backward()
    assert out.shape == x.grad.shape == shape


@pytest.mark.parametrize("name", FORMULAS)
def test_scalars_and_strided_views(name):
    function = getattr(rx, name)
    assert_close(function(np.asarray(0.7)), FORMULAS[name](0.7))
    assert_close(function(X[::-1, ::2]), function(np.ascontiguousarray(X[::-1, ::2])))
    assert function(X.astype("float32")).dtype == np.float32


@pytest.mark.parametrize("name", FORMULAS)
def test_far_out_values_stay_finite(name):
    far = rx.Tensor(np.array([-1e4, -300.0, 300.0, 1e4], dtype="float32"), requires_grad=True)
    out = getattr(rx, name)(far)
    rx.sum(out).backward()
    assert np.isfinite(out.data).all() and np.isfinite(far.grad).all()
    assert np.isnan(getattr(rx, name)(np.array([np.nan]))).all()


def test_what_is_kept_for_the_backward_pass():
    x = rx.Tensor(X, requires_grad=True)
    for function in (rx.relu, rx.elu, rx.sigmoid, rx.softmax, rx.log_softmax):
        out = function(x)
        arrays = [a for a in out.node.saved if isinstance(a, np.ndarray)]
        assert len(arrays) == 1 and arrays[0] is out.data
    dropped = rx.dropout(x, 0.5, generator=Generator(0))
    arrays = [a for a in dropped.node.saved if isinstance(a, np.ndarray)]
    assert [a.dtype for a in arrays] == [np.bool_]


# --------------------------------------------------------------------------------- dropout


def test_dropout_keeps_the_mean():
    x = np.ones((400, 100))
    out = rx.dropout(x, 0.2, generator=Generator(3))
    assert set(np.unique(out)) == {0.0, 1.25}
    # Four standard deviations of the share of 40000 draws.
    assert abs((out == 0).mean() - 0.2) < 4 * math.sqrt(0.2 * 0.8 / x.size)


def test_dropout_is_seeded_and_its_gradient_uses_the_same_mask():
    x = rx.Tensor(np.ones((5, 7)), requires_grad=True)
    out = rx.dropout(x, 0.4, generator=Generator(1))
    rx.sum(out).backward()
    assert_close(x.grad, out.data, exact=True)
    again = rx.dropout(x.data, 0.4, generator=Generator(1))
    assert_close(again, out.data, exact=True)


def test_dropout_at_rate_zero_draws_nothing():
    generator = Generator(0)
    before = generator.state_dict()
    x = np.ones(3)
    assert rx.dropout(x, 0, generator=generator) is x
    assert generator.state_dict() == before


def test_dropout_over_backends(xp):
    out = rx.dropout(xp.asarray(X), 0.5, generator=Generator(0))
    want = rx.dropout(X, 0.5, generator=Generator(0))
    assert_close(out, want)


def test_dropout_of_half_precision(check_half):
    check_half(lambda x: rx.dropout(x, 0.3, generator=Generator(0)), X)


# ---------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("name", [*FORMULAS, *SHAPED])
def test_integers_are_refused(name):
    with pytest.raises(TypeError, match="x must have a real floating-point dtype, got int64"):
        getattr(rx, name)(np.arange(4))
    with pytest.raises(TypeError, match="x must be an array or Tensor, got list"):
        getattr(rx, name)([1.0, 2.0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rx.elu(X, alpha=-1.0), "alpha must be at least 0"),
        (lambda: rx.softplus(X, beta=0), "beta must be above 0, got 0"),
        (lambda: rx.gelu(X, approximate="erf"), "approximate must be 'none' or 'tanh', got 'erf'"),
        (lambda: rx.softmax(X, axis=2), "axis must lie in"),
        (lambda: rx.glu(X[:, :3]), "x must have an even length along axis 1, got 3"),
        (lambda: rx.dropout(X, 1.0), r"rate must lie in \[0, 1\), got 1.0"),
        (lambda: rx.dropout(X, -0.1), r"rate must lie in \[0, 1\), got -0.1"),
        (lambda: rx.leaky_relu(X, negative_slope=np.nan), "negative_slope must be finite, got nan"),
        (lambda: rx.elu(X, alpha=np.inf), "alpha must be finite, got inf"),
        (lambda: rx.elu(X, scale=np.nan), "scale must be above 0, got nan"),
        (lambda: rx.softplus(X, beta=np.nan), "beta must be above 0, got nan"),
        (lambda: rx.softplus(X, beta=np.inf), "beta must be finite, got inf"),
    ],
)
def test_bad_options_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rx.dropout(X, "half"), "rate must be a number, got str"),
        (lambda: rx.dropout(X, 0.5, generator=3), "generator must be an rtxarr.* got int"),
        (lambda: rx.softplus(X, beta="1"), "beta must be a number, got str"),
    ],
)
def test_options_of_a_wrong_kind_are_refused(call, message):
    with pytest.raises(TypeError, match=message):
        call()


# --------------------------------------------------------------------------------- PyTorch


@pytest.mark.parametrize(
    ("options", "name"),
    [({}, "gelu"), ({"approximate": "none"}, "gelu"), ({"approximate": "tanh"}, "gelu_tanh")],
)
def test_forms_of_gelu_are_one_launch(monkeypatch, options, name):
    """Half precision too, which the kernel widens by itself."""
    launched = []
    monkeypatch.setattr(_activations.kernels, "fits", lambda *arrays: True)
    monkeypatch.setattr(
        _activations.kernels, "activation", lambda *args: launched.append(args) or args[1]
    )
    x = X.astype(rx.bfloat16)
    assert rx.gelu(x, **options) is x
    assert [(kind, a.dtype) for kind, a in launched] == [(name, rx.bfloat16)]


@pytest.mark.compare
@pytest.mark.parametrize("name", FORMULAS)
def test_agreement_with_torch(against_torch, name):
    import torch

    theirs = getattr(torch.nn.functional, TORCH_NAMES.get(name, name) or "", torch.erf)
    # The gradient of PyTorch's hard sigmoid has a float32 constant.
    against_torch(getattr(rx, name), theirs, X, rtol=1e-7 if name == "hardsigmoid" else 1e-10)


@pytest.mark.compare
def test_agreement_of_options_with_torch(against_torch):
    from torch.nn import functional as F

    against_torch(
        lambda x: rx.gelu(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh"), X
    )
    against_torch(lambda x: rx.softplus(x, beta=2.0), lambda x: F.softplus(x, 2.0), X)
    against_torch(lambda x: rx.elu(x, alpha=0.3), lambda x: F.elu(x, 0.3), X)
    against_torch(lambda x: rx.softmax(x, axis=0), lambda x: F.softmax(x, 0), X)
    against_torch(rx.log_softmax, lambda x: F.log_softmax(x, -1), X)
    against_torch(rx.glu, F.glu, X)


def test_a_numpy_rate_does_not_widen_dropout():
    x = np.ones(8, dtype="float32")
    assert rx.dropout(x, np.float64(0.5), generator=Generator(0)).dtype == np.float32
