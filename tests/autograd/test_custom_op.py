"""Operations of a user's own."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.autograd._op import OPS
from rtxarr.testing import assert_close, gradcheck, gradgradcheck


def leaf(values):
    return rx.Tensor(np.asarray(values), requires_grad=True)


def test_custom_op_with_a_joint_rule():
    @rx.custom_op
    def scaled(x, weight, *, power=1.0):
        return x * weight**power

    @scaled.defvjp
    def rule(g, x, weight, power):
        return g * weight**power, g * x * power * weight ** (power - 1)

    args = (np.array([1.0, -2.0]), np.array([0.5, 1.5]))
    gradcheck(lambda x, w: scaled(x, w, power=3.0), args)
    gradgradcheck(lambda x, w: scaled(x, w, power=3.0), args)
    assert_close(scaled(*args), args[0] * args[1])
    assert "scaled" not in OPS


def test_custom_op_saves_only_what_its_rules_name():
    big = np.ones(100_000)

    @rx.custom_op
    def shifted(x, y):
        return x + y

    shifted.defvjps(x=lambda g: g, y=lambda g, y_shape: g)
    out = shifted(rx.Tensor(big, requires_grad=True), rx.Tensor(big, requires_grad=True))
    assert all(not hasattr(s, "dtype") for s in out.node.saved)


def test_custom_op_of_a_function_without_a_module():
    names: dict = {}
    exec("def double(x): return 2 * x", names)  # noqa: S102  (as in a doctest, or a console)
    assert names["double"].__module__ is None
    op = rx.custom_op(names["double"])
    op.defvjps(x=lambda g: 2 * g)
    assert rx.grad(lambda x: rx.sum(op(x)))(np.ones(2)).tolist() == [2.0, 2.0]


def test_custom_op_mistakes_are_named():
    @rx.custom_op
    def op(x, y):
        return x * y

    with pytest.raises(TypeError, match="has no argument 'z', only x, y"):
        op.defvjps(z=lambda g: g)
    op.defvjps(x=lambda g, nothing: g)
    with pytest.raises(TypeError, match="asks for 'nothing'"):
        op(leaf([1.0]), 2.0)
    op.defvjps(x=lambda g, y: g * y)
    with pytest.raises(TypeError, match="not differentiable in its argument 'y'"):
        op(2.0, leaf([1.0]))
