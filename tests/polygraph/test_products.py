"""Matrix products in fused functions."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

SHAPES = [
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3,)),
    ((5, 2, 3), (3,)),
    ((3,), (5, 3, 2)),
    ((5, 2, 3), (3, 4)),
    ((5, 1, 2, 3), (4, 3, 2)),
    ((0, 3), (3, 2)),
    ((2, 0), (0, 3)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_products_of_any_shapes_are_those_of_matmul(shapes):
    rng = np.random.default_rng(0)
    x, y = map(rng.standard_normal, shapes)
    fused = rx.fuse(lambda x, y: rx.matmul(2 * x, y) * 2)
    want = rx.matmul(2 * x, y) * 2
    got = fused(x, y)
    assert np.shape(got) == np.shape(want)
    assert_close(got, want, exact=True)
    assert not fused.reasons


def test_a_matrix_is_not_repeated_for_a_stack():
    fused = rx.fuse(lambda x, y: rx.matmul(x, y.T))
    x, y = np.ones((4, 5, 3)), np.arange(6.0).reshape(2, 3)
    assert_close(fused(x, y), x @ y.T, exact=True)
    assert "broadcast" not in fused.explain()


@pytest.mark.parametrize("dtype", [rx.float16, rx.bfloat16], ids=str)
def test_half_precision_is_multiplied_as_it_is(dtype):
    rng = np.random.default_rng(0)
    x, weight, bias = (
        rng.standard_normal(shape).astype(dtype) for shape in ((4, 5, 8), (3, 8), (3,))
    )

    def f(x, weight, bias):
        return rx.tanh(rx.matmul(x, weight.T)), rx.linear(x, weight, bias), rx.linear(x, weight)

    fused = rx.fuse(f)
    for got, want in zip(fused(x, weight, bias), f(x, weight, bias), strict=True):
        assert_close(got, want, exact=True)
    assert not fused.reasons
    assert "float32" not in [
        str(s.dtype)
        for programs in fused._programs.values()
        for n in programs[0].graph.nodes()
        if n.op in ("matmul", "call")
        for s in n.src
    ]
    gradient = rx.grad(lambda x: rx.sum(rx.astype(rx.linear(x, weight, bias), rx.float32) ** 2))
    assert_close(rx.fuse(gradient)(x), gradient(x), exact=True)
