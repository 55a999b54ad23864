"""Linear maps with an activation or a gate: values, rules and what is refused."""

import numpy as np
import pytest
from scipy.special import erf, expit

import rtxarr as rx
from rtxarr.ops import _activated, _gates
from rtxarr.ops._activated import _in_product
from rtxarr.ops._gates import ACTIVATIONS
from rtxarr.testing import assert_close

rng = np.random.default_rng(4)
X = rng.standard_normal((3, 2, 4))
WEIGHT, OTHER = rng.standard_normal((2, 5, 4))
BIAS, SHIFT = rng.standard_normal((2, 5))
FORMULAS = {
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": expit,
    "silu": lambda x: x * expit(x),
    "gelu": lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}
NAMES = sorted(FORMULAS)


def test_the_formulas_are_of_all_names():
    assert set(ACTIVATIONS) == set(FORMULAS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(4,), (3, 4), (3, 2, 4), (0, 4)], ids=str)
def test_linear(xp, name, shape):
    x = rng.standard_normal(shape)
    got = rx.linear(xp.asarray(x), xp.asarray(WEIGHT), xp.asarray(BIAS), activation=name)
    assert_close(got, FORMULAS[name](x @ WEIGHT.T + BIAS), atol=1e-15)
    got = rx.linear(xp.asarray(x), xp.asarray(WEIGHT), activation=name)
    assert_close(got, FORMULAS[name](x @ WEIGHT.T), atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_gated_linear(xp, name):
    x, w, v, b, c = map(xp.asarray, (X, WEIGHT, OTHER, BIAS, SHIFT))
    gate = FORMULAS[name]
    got = rx.gated_linear(x, w, v, b, c, activation=name)
    assert_close(got, gate(X @ WEIGHT.T + BIAS) * (X @ OTHER.T + SHIFT), atol=1e-15)
    got = rx.gated_linear(x, w, v, activation=name)
    assert_close(got, gate(X @ WEIGHT.T) * (X @ OTHER.T), atol=1e-15)
    got = rx.gated_linear(x, w, v, None, c, activation=name)
    assert_close(got, gate(X @ WEIGHT.T) * (X @ OTHER.T + SHIFT), atol=1e-15)
    assert rx.gated_linear(x[:0, ...], w, v).shape == (0, 2, 5)


def gradients(function, *arrays):
    tensors = [rx.Tensor(a, requires_grad=True) for a in arrays]
    out = function(*tensors)
    out.backward(np.cos(np.arange(out.size, dtype=out.dtype)).reshape(out.shape))
    return [out, *(t.grad for t in tensors)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_on_the_cpu_it_has_the_bits_of_two_steps(name, dtype):
    arrays = [a.astype(getattr(rx, dtype)) for a in (X, WEIGHT, BIAS)]
    got = gradients(lambda *a: rx.linear(*a, activation=name), *arrays)
    want = gradients(lambda *a: ACTIVATIONS[name](rx.linear(*a)), *arrays)
    for mine, its in zip(got, want, strict=True):
        assert_close(mine, its, exact=True)


@pytest.mark.parametrize("name", ["relu", "gelu_tanh"])
def test_where_the_product_stores_the_activation_the_rules_are_those_of_two_steps(name):
    got = gradients(lambda *a: _in_product(*a, name), X, WEIGHT, BIAS)
    want = gradients(lambda *a: ACTIVATIONS[name](rx.linear(*a)), X, WEIGHT, BIAS)
    for mine, its in zip(got, want, strict=True):
        assert_close(mine, its, exact=True)
    plain = _in_product(X, WEIGHT, BIAS, name)
    assert type(plain) is np.ndarray
    assert_close(plain, got[0], exact=True)


@pytest.mark.parametrize("function", [rx.relu, lambda x: rx.gelu(x, approximate="tanh")])
def test_what_where_leaves_out_stays_out(function):
    """A sum that is infinite gives no NaN to the gradient of what does not use it."""
    name = "relu" if function is rx.relu else "gelu_tanh"
    x, weight = np.array([[1e200], [1.0]]), np.array([[1e200]])

    def loss(layer):
        tensor = rx.Tensor(weight, requires_grad=True)
        with np.errstate(all="ignore"):
            out = rx.sum(rx.where(np.array([[False], [True]]), layer(rx.asarray(x), tensor), 0))
            out.backward()
        return tensor.grad

    got = loss(lambda x, w: _in_product(x, w, None, name))
    assert_close(got, loss(lambda x, w: function(rx.linear(x, w))))


def test_relu_has_no_slope_at_zero():
    x = rx.Tensor(np.zeros((1, 2)), requires_grad=True)
    rx.sum(_in_product(x, np.eye(2), None, "relu")).backward()
    assert_close(x.grad, [[0.0, 0.0]], exact=True)


def test_half_precision(check_half):
    for name in ("silu", "gelu_tanh"):
        check_half(lambda *a, name=name: rx.gated_linear(*a, activation=name), X, WEIGHT, OTHER)


def test_per_sample_gradients(check_per_sample):
    for name in NAMES:
        check_per_sample(lambda *a, name=name: rx.linear(*a, activation=name), X, WEIGHT, BIAS)
    for name in ("relu", "gelu_tanh"):
        check_per_sample(lambda *a, name=name: _in_product(*a, name), X, WEIGHT, BIAS)
    check_per_sample(rx.gated_linear, X, WEIGHT, OTHER, BIAS, SHIFT)


def test_a_result_that_was_written_to_is_no_longer_told_from():
    x = rx.Tensor(X[0], requires_grad=True)
    out = _in_product(x, WEIGHT, BIAS, "relu")
    with rx.no_grad():
        out[0, 0] = 5.0
    with pytest.raises(RuntimeError, match="changed in place"):
        rx.sum(out).backward()


@pytest.mark.parametrize("name", ["relu", "gelu_tanh", "silu"])
def test_autocast(name):
    """As two steps there, and the gradients come in float32."""
    arrays = [a.astype("float32") for a in (X, WEIGHT, BIAS)]
    with rx.autocast("bfloat16"):
        got = gradients(lambda *a: rx.linear(*a, activation=name), *arrays)
        want = gradients(lambda *a: ACTIVATIONS[name](rx.linear(*a)), *arrays)
        gated = gradients(rx.gated_linear, *arrays[:2], OTHER.astype("float32"))
        no_gradient = _activated._gated_product(
            rx.Tensor(arrays[0]), *arrays[1:2], OTHER.astype("float32"), None, None,
            activation="silu",
        )  # fmt: skip
    for mine, its in zip(got, want, strict=True):
        assert_close(mine, its, exact=True)
    assert [str(a.dtype) for a in got] == ["bfloat16", *["float32"] * 3]
    assert [str(a.dtype) for a in gated] == ["bfloat16", *["float32"] * 3]
    assert no_gradient.dtype == rx.bfloat16
    assert_close(no_gradient, gated[0], exact=True)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("function", [rx.glu, rx.geglu, rx.swiglu])
def test_halves_of_tensors_are_half_on_a_gpu_in_autocast(monkeypatch, function, axis):
    x = np.concat([X, X]).astype("float16")
    with rx.autocast("float16"):
        want = gradients(lambda x: function(x, axis=axis), x)
        monkeypatch.setattr(_gates, "on_gpu", lambda x: True)
        got = gradients(lambda x: function(x, axis=axis), x)
    for mine, its in zip(got, want, strict=True):
        assert_close(mine, its, rtol=2e-3, atol=2e-3)
        assert mine.dtype == np.float16


LAYERS = {
    "relu": lambda x, w, b: rx.linear(x, w, b, activation="relu"),
    "gelu_tanh": lambda x, w, b: rx.linear(x, w, b, activation="gelu_tanh"),
    "gated": lambda x, w, b: rx.gated_linear(x, w, 2 * w, b, b),
    "relu in the product": lambda x, w, b: _in_product(x, w, b, "relu"),
    "gelu in the product": lambda x, w, b: _in_product(x, w, b, "gelu_tanh"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_fused_functions(name):
    arrays = [a.astype("float32") for a in (X, WEIGHT, BIAS)]
    fused = rx.fuse(LAYERS[name])
    assert_close(fused(*arrays), LAYERS[name](*arrays), rtol=1e-6)
    for mine, its in zip(gradients(fused, *arrays), gradients(LAYERS[name], *arrays), strict=True):
        assert_close(mine, its, rtol=1e-5, atol=1e-6)
    assert not fused.reasons


@pytest.mark.parametrize("name", LAYERS)
def test_steps_of_jit(name):
    def step(weight):
        weight.grad = None
        loss = rx.sum(LAYERS[name](X, weight, BIAS) ** 2)
        loss.backward()
        return loss

    weights = [rx.Tensor(WEIGHT, requires_grad=True) for _ in range(2)]
    got, want = rx.jit(step)(weights[0]), step(weights[1])
    assert_close(got, want, rtol=1e-12)
    assert_close(weights[0].grad, weights[1].grad, rtol=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: rx.linear(X, WEIGHT, activation="tanh"),
            ValueError,
            "activation must be one of 'relu', 'sigmoid', 'silu', 'gelu', 'gelu_tanh' or None, "
            "got 'tanh'",
        ),
        (lambda: rx.linear(X, WEIGHT[0], activation="relu"), ValueError, "weight must have shape"),
        (
            lambda: _in_product(X[..., :3], WEIGHT, None, "relu"),
            ValueError,
            r"x must have shape \(..., 4\) for weight of shape \(5, 4\), got \(3, 2, 3\)",
        ),
        (
            lambda: rx.gated_linear(X, WEIGHT, OTHER, activation=None),
            ValueError,
            "activation must be one of .* 'gelu_tanh', got None",
        ),
        (
            lambda: rx.gated_linear(X, WEIGHT, OTHER[:4]),
            ValueError,
            r"w_up must have the shape of w_gate, \(5, 4\), got \(4, 4\)",
        ),
        (
            lambda: rx.gated_linear(X, WEIGHT, OTHER, BIAS[:1], BIAS),
            ValueError,
            r"b_gate must have shape \(5,\), got \(1,\)",
        ),
        (
            lambda: rx.gated_linear(X, WEIGHT, OTHER, BIAS, BIAS.astype(int)),
            TypeError,
            "b_up must have a real floating-point dtype, got int64",
        ),
        (
            lambda: rx.gated_linear(X, WEIGHT[0], OTHER[0], BIAS),
            ValueError,
            r"w_gate must have shape \(out_features, in_features\), got \(4,\)",
        ),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.compare
def test_agreement_with_torch(against_torch):
    from torch.nn import functional as F

    def theirs(x, w, b):
        return F.gelu(F.linear(x, w, b), approximate="tanh")

    against_torch(lambda *a: rx.linear(*a, activation="gelu_tanh"), theirs, X, WEIGHT, BIAS)
    against_torch(
        rx.gated_linear,
        lambda x, w, v, b, c: F.silu(F.linear(x, w, b)) * F.linear(x, v, c),
        *(X, WEIGHT, OTHER, BIAS, SHIFT),
    )
