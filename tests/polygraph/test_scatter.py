"""Rows sent to rows: a node of the graph, by name or written with ``np.maximum.at``."""

import functools

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.polygraph import _interpret, load
from rtxarr.polygraph import _ir as ir

from .fused import assert_same

INDEX = np.array([3, 0, 3, 1, 1, 3])
DTYPES = ["float32", "float64", "float16", rx.bfloat16, "int8", "int64", "uint16"]


def some(dtype, seed=0):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    x = rng.normal(size=(6, 4)) * (20 if dtype.kind in "iu" else 1)
    x = (np.abs(x) if dtype.kind == "u" else x).astype(dtype)
    if dtype.kind not in "iu":
        x[2, 1] = np.nan
    return x


def slowly(op, index, values, n_rows):
    """Send row after row; what nothing goes to is what all are compared with."""
    dtype = values.dtype
    if dtype.kind in "iu":
        least = np.iinfo(dtype).min if op == "max" else np.iinfo(dtype).max
    else:
        least = -np.inf if op == "max" else np.inf
    out = np.full((n_rows, values.shape[1]), least).astype(dtype)
    for row, value in zip(index, values, strict=True):
        for k, number in enumerate(value):
            old = out[row, k]
            wins = number > old if op == "max" else number < old
            if old == old and (wins or number != number):
                out[row, k] = number
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["forth", "back"])
def test_definition(op, dtype, order):
    values, index = some(dtype)[order], INDEX[order]
    inputs = ir.input_node(0, "int64", (6,)), ir.input_node(1, dtype, (6, 4))
    node = ir.scatter_reduce(op, *inputs, 5)
    assert (node.dtype, node.shape) == (np.dtype(dtype), (5, 4))
    (got,) = _interpret.run(ir.Graph(inputs, [node]), [index, values], np)
    want = slowly(op, INDEX, some(dtype), 5)  # whatever the order
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.astype("f8"), want.astype("f8"))


NAMED = {
    "max": lambda x, index: rx.scatter_max(2 * x, index, 5) + 1,
    "min": lambda x, index: rx.scatter_min(2 * x, index, 5) + 1,
    "sum": lambda x, index: rx.scatter_add(2 * x, index, 5) + 1,
    "of vectors": lambda x, index: rx.scatter_max(rx.sum(x, axis=1), index, 4),
    "of matrices": lambda x, index: rx.scatter_min(rx.reshape(x, (6, 2, 2)) ** 2, index, 4),
}


def graphs(fused):
    return [made.program.graph for many in fused._programs.values() for made in many]


@pytest.mark.parametrize("name", NAMED)
def test_names_give_nodes(name):
    f, x = functools.partial(NAMED[name], index=INDEX), np.random.default_rng(1).normal(size=(6, 4))
    loss = lambda x: rx.sum(rx.where(f(x) < 9, f(x), 0) ** 2)  # noqa: E731
    twice = lambda x: rx.grad(lambda x: rx.sum(rx.grad(loss)(x) ** 2))(x)  # noqa: E731
    for function in (f, rx.grad(loss), twice):
        fused = rx.fuse(function)
        with np.errstate(all="ignore"):
            assert_same(fused(x), function(x), exact=True)
        assert not fused.reasons
        (graph,) = graphs(fused)
        ops = [n.op for n in graph.nodes()]
        assert "scatter_reduce" in ops
        assert "call" not in ops


def written(x, index, values):
    y = x * 2
    np.maximum.at(y, index, values)
    np.minimum.at(x, [0, -1, 0], 3)
    np.maximum.at(y[1:, ::-1], index[:2] % 2, 1)
    return y + 1


@pytest.mark.parametrize("backend", ["interpreter", None], ids=["interpreter", "kernels"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_writes_are_those_of_numpy(dtype, backend):
    fused = rx.fuse(written, backend=backend)
    index, values = np.array([[0, 5], [-1, 0]]), some(dtype, 1)[:2]
    values = np.stack([values, values[::-1]])
    ours, theirs = some(dtype), some(dtype)
    for _ in range(2):
        got, want = fused(ours, index, values), written(theirs, index, values)
        assert got.dtype == want.dtype
        for a, b in ((got, want), (ours, theirs)):
            np.testing.assert_array_equal(a.astype("f8"), b.astype("f8"))
    assert not fused.reasons


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (3,)])
def test_writes_of_nothing_and_to_vectors(shape):
    def f(x, index):
        np.minimum.at(x, index, 0.5)
        return x

    index = np.zeros(0 if shape[0] == 0 else 4, int)
    fused = rx.fuse(f)
    np.testing.assert_array_equal(fused(np.ones(shape), index), f(np.ones(shape), index))
    assert not fused.reasons


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (lambda x: np.add.at(x, [0, 0], 1), r"np\.add\.at"),
        (lambda x: np.maximum.at(x, (0, [1, 1]), 1), "no list of rows"),
        (lambda x: np.maximum.at(x, slice(1), 1), "no list of rows"),
        (lambda x: np.maximum.at(x, np.array([True] * 6), 1), "no list of rows"),
        (lambda x: np.negative.at(x, [0, 1]), r"np\.negative\.at"),
    ],
)
def test_other_writes_run_as_they_are(write, why):
    fused = rx.fuse(write)
    ours, theirs = some("float64"), some("float64")
    with pytest.warns(RuntimeWarning, match=why):
        fused(ours)
    write(theirs)
    np.testing.assert_array_equal(ours, theirs)


def test_values_of_a_wider_type_run_as_they_are():
    def f(x):
        np.maximum.at(x, [0], 2.5)

    fused = rx.fuse(f)
    ours, theirs = some("int64"), some("int64")
    with pytest.warns(RuntimeWarning, match=r"np\.maximum\.at"):
        fused(ours)
    f(theirs)
    np.testing.assert_array_equal(ours, theirs)


def test_saved(tmp_path):
    fused = rx.fuse(functools.partial(NAMED["max"], index=INDEX))
    x = some("float64")
    for target in ("numpy", None):
        fused.aot([(x,)], targets=target).save(tmp_path / "f")
        np.testing.assert_array_equal(load(tmp_path / "f")(x), fused(x))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMED)
def test_names_on_a_gpu(name):
    cupy = pytest.importorskip("cupy")
    x = cupy.asarray(np.random.default_rng(1).normal(size=(6, 4)))
    index = cupy.asarray(INDEX)
    fused = rx.fuse(NAMED[name])
    got, want = fused(x, index), NAMED[name](cupy.asnumpy(x), INDEX)
    assert not fused.reasons
    np.testing.assert_allclose(cupy.asnumpy(got), want, rtol=1e-14)
