"""The nodes that the interpreter leaves to functions of the library, against plain NumPy.

Elsewhere these functions are on both sides of a comparison.
"""

import array_api_compat.numpy as xp
import numpy as np
import pytest

import rtxarr as rx
from rtxarr.polygraph import _interpret
from rtxarr.polygraph import _ir as ir

REAL = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64".split()
ALL = [*REAL, "complex64", "complex128"]


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def whole(rng, dtype, *shape):
    """Give small whole numbers: sums and products of few are exact in every dtype."""
    low = 0 if dtype.startswith("uint") else -2
    values = rng.integers(low, 3, shape)
    if dtype.startswith("complex"):
        values = values + 1j * rng.integers(low, 3, shape)
    return values.astype(getattr(rx, dtype))


def wide(x):
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def run(make, *arrays):
    """Give what a node gives, which must leave its sources alone."""
    node = make(*(ir.input_node(i, x.dtype, x.shape) for i, x in enumerate(arrays)))
    before = [x.copy() for x in arrays]
    out = _interpret.evaluate(node, arrays, xp)
    for x, was in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x, was)
    assert (out.dtype, out.shape) == (node.dtype, node.shape)
    return out


SHAPES = {
    "matrices": ((3, 4), (4, 2)),
    "vectors": ((4,), (4,)),
    "matrix and vector": ((3, 4), (4,)),
    "vector and matrix": ((4,), (4, 2)),
    "stacks": ((2, 1, 3, 4), (5, 4, 2)),
    "stack and vector": ((2, 3, 4), (4,)),
    "no rows": ((0, 4), (4, 2)),
    "nothing to add": ((3, 0), (0, 2)),
    "one": ((1, 1), (1, 1)),
}


def product(a, b):
    """Multiply by the definition, without a BLAS."""
    a, b = (a[None, :] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
    return (a[..., :, :, None] * b[..., None, :, :]).sum(axis=-2)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_matmul(shapes, dtype, rng):
    a, b = (whole(rng, dtype, *shape) for shape in shapes)
    got = run(ir.matmul, a, b)
    np.testing.assert_array_equal(wide(got), product(wide(a), wide(b)).reshape(got.shape))


INDICES = {"none": [], "one": [3], "duplicates": [3, 0, 3, 3, 1, 0], "all": [4, 3, 2, 1, 0]}


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(("shape", "axis"), [((5,), 0), ((5, 3), 0), ((2, 5, 3), 1), ((2, 5), 1)])
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_scatter_add(index, shape, axis, dtype, rng):
    index = np.array(index, np.int64)
    x = whole(rng, dtype, *shape)
    values = whole(rng, dtype, *shape[:axis], len(index), *shape[axis + 1 :])
    want = wide(x)
    np.add.at(np.moveaxis(want, axis, 0), index, np.moveaxis(wide(values), axis, 0))
    got = run(lambda *nodes: ir.scatter_add(*nodes, axis), x, index, values)
    np.testing.assert_array_equal(wide(got), want)


POINTERS = {
    "no segments": [0],
    "nothing": [0, 0, 0],
    "one": [0, 1],
    "full": [0, 2, 3, 7],
    "with gaps": [0, 0, 4, 4, 6, 6],
}


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("indptr", POINTERS.values(), ids=POINTERS)
def test_segment_reduce(indptr, op, dtype, rng):
    if op != "sum" and dtype.startswith("complex"):
        pytest.skip("complex numbers have no order")
    for inner in ((), (3,), (2, 2)):
        values = whole(rng, dtype, indptr[-1], *inner)
        kind = values.dtype
        if op == "sum":
            empty = 0
        elif np.dtype(kind).kind in "iu":
            empty = getattr(np.iinfo(kind), "min" if op == "max" else "max")
        else:
            empty = -np.inf if op == "max" else np.inf
        got = run(lambda *nodes: ir.segment_reduce(op, *nodes), values, np.array(indptr, np.int64))
        pairs = zip(indptr[:-1], indptr[1:], strict=True)
        for row, (a, b) in zip(got, pairs, strict=True):
            want = np.full(inner, empty, kind)
            if a < b:
                want = getattr(np, op)(wide(values[a:b]), axis=0)
            np.testing.assert_array_equal(wide(row), wide(np.asarray(want)))


SCANNED = [((6,), 0), ((1,), 0), ((0, 3), 0), ((3, 0), 0), ((4, 5), 0), ((4, 5), 1), ((2, 5, 3), 1)]


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(("shape", "axis"), SCANNED)
@pytest.mark.parametrize("op", ["cumulative_sum", "cumulative_prod"])
def test_scans(op, shape, axis, dtype, rng):
    x = whole(rng, dtype, *shape)
    want, total = np.moveaxis(wide(x), axis, 0).copy(), None
    for i, row in enumerate(want):
        if i:
            want[i] = total + row if op == "cumulative_sum" else total * row
        total = want[i].copy()
    got = run(lambda node: ir.scan_node(op, node, axis), x)
    np.testing.assert_array_equal(wide(got), np.moveaxis(want, 0, axis))


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_all_of_them_within_rounding(dtype, rng):
    """Numbers that are not whole, and rows longer than the library adds up in one go."""
    kind = np.dtype(dtype)

    def numbers(*shape):
        out = rng.normal(size=shape)
        return (out + 1j * rng.normal(size=shape) if kind.kind == "c" else out).astype(kind)

    def assert_near(got, want):
        tolerance = 1e-4 if dtype in ("float32", "complex64") else 1e-11
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)

    a, b, x, values = numbers(20, 300), numbers(300, 7), numbers(9, 2), numbers(3000, 2)
    assert_near(run(ir.matmul, a, b), product(wide(a), wide(b)))
    index = rng.integers(0, 9, 3000)
    want = wide(x)
    np.add.at(want, index, wide(values))
    assert_near(run(lambda *nodes: ir.scatter_add(*nodes, 0), x, index, values), want)
    indptr = np.array([0, 1, 2500, 3000])
    want = np.add.reduceat(wide(values), indptr[:-1], axis=0)
    assert_near(run(lambda *nodes: ir.segment_reduce("sum", *nodes), values, indptr), want)
    want = np.cumsum(wide(values), axis=0)
    assert_near(run(lambda node: ir.scan_node("cumulative_sum", node, 0), values), want)
