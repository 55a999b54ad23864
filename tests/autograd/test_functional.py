"""Transforms of functions: values by hand or closed form, nesting, structures, refusals."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

X = np.array([0.3, 0.7, 1.1])


def energy(x):
    return rx.sum(rx.sin(x) * x)


def test_grad_of_an_array_function():
    g = rx.grad(energy)(X)
    assert isinstance(g, np.ndarray)
    assert_close(g, np.cos(X) * X + np.sin(X))


def test_every_order_of_a_power():
    f, want = (lambda x: x**5), [5 * 2.0**4, 20 * 2.0**3, 60 * 2.0**2, 120 * 2.0, 120.0, 0.0]
    for value in want:
        f = rx.grad(f)
        assert float(f(2.0)) == value


def test_value_and_grad_over_nested_containers():
    def f(p, k):
        return rx.sum(p["a"] * p["b"][0]) * k

    value, grad = rx.value_and_grad(f)({"a": X, "b": [X * 2, X]}, 3.0)
    assert float(value) == pytest.approx(6 * np.sum(X * X))
    assert_close(grad["a"], 6 * X)
    assert_close(grad["b"][0], 3 * X)
    assert_close(grad["b"][1], 0 * X)


def test_argnums_and_aux():
    def f(x, y):
        return rx.sum(x * y), {"sum": rx.sum(x)}

    (dx, dy), aux = rx.grad(f, (0, 1), has_aux=True)(X, X * 2)
    assert_close(dx, 2 * X)
    assert_close(dy, X)
    assert_close(aux["sum"], np.sum(X))
    (value, aux), dy = rx.value_and_grad(f, -1, has_aux=True)(X, X * 2)
    assert_close(dy, X)


def test_transform_inside_a_transform_over_another_variable():
    def outer(w):
        return rx.sum(rx.grad(lambda x: rx.sum(w * x**3))(X))

    got = rx.grad(outer)(np.array(2.0))
    assert not isinstance(got, rx.Tensor)
    assert_close(got, np.sum(3 * X**2))


def test_perturbation_confusion():
    # d/dx [x * d/dy (x + y)] = 1, not 2.
    got = rx.grad(lambda x: x * rx.grad(lambda y: x + y)(1.0))(1.0)
    assert float(got) == 1.0


def test_a_change_between_the_value_and_the_pull_back_is_noticed():
    x = rx.Tensor(np.array([1.0, 2.0]))
    _, pull_back = rx.vjp(lambda x: x * x, x)
    x[0] = 5.0
    with pytest.raises(RuntimeError, match="changed in place"):
        pull_back(np.ones(2))


def test_grad_inside_backward_reaches_parameters():
    w = rx.Tensor(np.array([2.0, 3.0]), requires_grad=True)
    x = np.array([1.0, -1.0])
    penalty = rx.sum(rx.grad(lambda v: rx.sum(w * v * v))(x) ** 2)  # (2 w x)^2
    penalty.backward()
    assert_close(w.grad, 8 * w.data * x**2)
    with rx.no_grad():
        assert not isinstance(rx.grad(lambda v: rx.sum(w * v * v))(x), rx.Tensor)


def test_vjp_and_jvp_agree_with_the_jacobian():
    def f(x):
        return rx.stack([x[0] * x[1], rx.exp(x[2]), x[1] ** 2])

    want = np.array([[X[1], X[0], 0], [0, 0, np.exp(X[2])], [0, 2 * X[1], 0]])
    assert_close(rx.jacobian(f)(X), want)
    value, pull = rx.vjp(f, X)
    v = np.array([1.0, -2.0, 0.5])
    assert_close(pull(v)[0], v @ want)
    assert_close(pull(2 * v)[0], 2 * v @ want)
    value, pushed = rx.jvp(f, (X,), (v,))
    assert_close(value, f(X))
    assert_close(pushed, want @ v)


def test_jvp_of_containers_and_of_what_does_not_depend():
    def f(p):
        return {"y": p["x"] * 3, "n": rx.ones(2, device="cpu")}

    value, pushed = rx.jvp(f, ({"x": X},), ({"x": np.ones(3)},))
    assert_close(value["y"], 3 * X)
    assert_close(pushed["y"], np.full(3, 3.0))
    assert_close(pushed["n"], np.zeros(2))


@pytest.mark.parametrize("transform", [rx.jvp, rx.hvp])
def test_primals_and_tangents_are_tuples(transform):
    with pytest.raises(TypeError, match="primals must be a tuple .* got ndarray"):
        transform(rx.sum, X, (X,))
    with pytest.raises(TypeError, match="tangents must be a tuple .* got ndarray"):
        transform(rx.sum, (X,), X)


def test_jvp_inside_grad():
    got = rx.grad(lambda x: rx.sum(rx.jvp(rx.sin, (x,), (np.ones(3),))[1]))(X)
    assert_close(got, -np.sin(X))


def test_hessian_and_its_products():
    a = np.array([[2.0, 1.0, 0.0], [1.0, 3.0, 0.5], [0.0, 0.5, 1.0]])

    def f(x):
        return rx.sum(x * rx.matmul(a, x)) / 2 + rx.sum(x**3) / 3

    want = a + np.diag(2 * X)
    assert_close(rx.hessian(f)(X), want)
    v = np.array([1.0, 2.0, -1.0])
    assert_close(rx.hvp(f, (X,), (v,))[0], want @ v)
    assert_close(rx.grad(lambda x: rx.sum(rx.grad(f)(x) * v))(X), want @ v)


def test_jacobian_shapes():
    x = np.arange(6.0).reshape(2, 3)
    jac = rx.jacobian(lambda x: rx.sum(x, axis=1) * 2)(x)
    assert jac.shape == (2, 2, 3)
    assert_close(jac[0], [[2, 2, 2], [0, 0, 0]])
    assert rx.jacobian(lambda x: x[:, :0])(x).shape == (2, 0, 2, 3)
    assert rx.hessian(lambda x: rx.sum(x))(x).shape == (2, 3, 2, 3)
    assert_close(rx.jacobian(lambda x: rx.ones(2, device="cpu"))(x), np.zeros((2, 2, 3)))


def test_complex_gradients_point_uphill():
    # |z|^2 has the gradient 2 z: a small step along it raises the value most.
    z = np.array([1.0 + 2.0j, -0.5j])
    assert_close(rx.grad(lambda z: rx.sum(rx.abs(z) ** 2))(z), 2 * z)
    assert_close(rx.grad(lambda z: rx.sum(rx.real(z * z)))(z), 2 * np.conj(z))


def test_tensors_in_give_tensors_out():
    x = rx.Tensor(X)
    value, grad = rx.value_and_grad(energy)(x)
    assert isinstance(value, rx.Tensor) and isinstance(grad, rx.Tensor)
    assert not value.requires_grad and not grad.requires_grad


def test_raw_value_of_a_function_that_ignores_its_input():
    value, grad = rx.value_and_grad(lambda x: rx.asarray(3.0, device="cpu"))(X)
    assert float(value) == 3.0
    assert_close(grad, 0 * X)


def test_integers_beside_floats_are_passed_through():
    got = rx.grad(lambda x, i: rx.sum(x[i]))(X, np.array([0, 0, 2]))
    assert_close(got, [2.0, 0.0, 1.0])


def test_refusals_name_the_problem():
    with pytest.raises(ValueError, match=r"must return a real scalar, got shape \(3,\)"):
        rx.grad(lambda x: x)(X)
    with pytest.raises(ValueError, match="must return a real scalar, got tuple"):
        rx.grad(lambda x: (rx.sum(x), 1))(X)
    with pytest.raises(TypeError, match="argnums must be an int or a tuple of them, got 'x'"):
        rx.grad(lambda x: x, "x")(1.0)
    with pytest.raises(ValueError, match="argnums must not name an argument twice, got"):
        rx.grad(lambda x, y: x * y, (0, -2))(1.0, 2.0)
    with pytest.raises(ValueError, match="argnums names argument 2, but 1"):
        rx.grad(energy, 2)(X)
    with pytest.raises(TypeError, match="argument 0 must have a floating-point"):
        rx.grad(energy)(np.array([1, 2]))
    with pytest.raises(ValueError, match=r"tangent 0 must have shape \(3,\)"):
        rx.jvp(energy, (X,), (np.ones(2),))
    with pytest.raises(ValueError, match="structure of primals"):
        rx.jvp(energy, (X,), ([X],))
    with pytest.raises(ValueError, match="structure of the function's value"):
        rx.vjp(lambda x: (x, x), X)[1](X)
    with pytest.raises(ValueError, match=r"inputs\[0\] must be a Tensor"):
        rx.autograd.gradients([], [X])


def test_gradients_with_respect_to_inner_tensors():
    x = rx.Tensor(X, requires_grad=True)
    y = x * 2
    z = rx.sum(y * y)
    dy, dx = rx.autograd.gradients([z], [y, x])
    assert_close(dy, 4 * X)
    assert_close(dx, 8 * X)


def test_gradients_do_not_touch_other_leaves():
    x, w = rx.Tensor(X, requires_grad=True), rx.Tensor(X, requires_grad=True)
    rx.autograd.gradients([rx.sum(x * w)], [x])
    assert x.grad is None and w.grad is None


def test_per_sample_gradients_of_a_linear_layer():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 3))
    w = rx.Tensor(rng.standard_normal((2, 3)), requires_grad=True)
    b = rx.Tensor(rng.standard_normal(2), requires_grad=True)
    loss = rx.sum(rx.tanh(rx.linear(x, w, b)) ** 2)
    got_w, got_b = rx.autograd.per_sample_gradients(loss, [w, b])
    for i in range(5):

        def one(w, b, i=i):
            return rx.sum(rx.tanh(rx.linear(x[i : i + 1], w, b)) ** 2)

        want_w, want_b = rx.grad(one, (0, 1))(w.data, b.data)
        assert_close(got_w[i], want_w)
        assert_close(got_b[i], want_b)
    assert w.grad is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: rx.grad(5),
        lambda: rx.value_and_grad(5),
        lambda: rx.jacobian(5),
        lambda: rx.hessian(5),
        lambda: rx.vjp(5, np.ones(3)),
        lambda: rx.jvp(5, (np.ones(3),), (np.ones(3),)),
        lambda: rx.hvp(5, (np.ones(3),), (np.ones(3),)),
        lambda: rx.checkpoint(5, np.ones(3)),
        lambda: rx.custom_op(5),
        lambda: rx.no_grad(5),
        lambda: rx.testing.gradcheck(5, (np.ones(3),)),
    ],
)
def test_what_is_no_function_is_refused(call):
    with pytest.raises(TypeError, match="(function|fwd) must be callable, got int"):
        call()
