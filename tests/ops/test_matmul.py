"""Products of matrices and vectors: matmul, vecdot, tensordot."""

import ml_dtypes
import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close, gradcheck, gradgradcheck

SHAPES = [
    ((3,), (3,)),
    ((2, 3), (3,)),
    ((3,), (3, 2)),
    ((2, 3), (3, 4)),
    ((5, 2, 3), (3,)),
    ((3,), (5, 3, 2)),
    ((5, 2, 3), (3, 4)),
    ((2, 3), (5, 3, 4)),
    ((5, 2, 3), (5, 3, 4)),
    ((4, 1, 2, 3), (5, 3, 2)),
    ((1, 1), (1, 1)),
    ((0, 3), (3, 2)),
    ((2, 0), (0, 3)),
    ((4, 2, 0), (0, 3)),
    ((4, 2, 0), (0,)),
    ((0,), (0,)),
    ((0,), (2, 0, 3)),
    ((2, 0, 3), (3, 4)),
    ((0, 2, 3), (3,)),
]


def random(rng, shape, dtype="float64"):
    values = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        values = values + 1j * rng.standard_normal(shape)
    return np.asarray(values, dtype=dtype)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.mark.parametrize(("shape1", "shape2"), SHAPES, ids=str)
def test_matmul_gives_sums_of_products(xp, shape1, shape2, rng):
    x1, x2 = random(rng, shape1), random(rng, shape2)
    out = rx.matmul(xp.asarray(x1), xp.asarray(x2))
    assert_close(out, np.matmul(x1, x2))


@pytest.mark.parametrize(
    "dtypes",
    [
        ("float64", "float64"),
        ("complex128", "float64"),
        ("float64", "complex128"),
        ("complex128", "complex128"),
    ],
)
@pytest.mark.parametrize(("shape1", "shape2"), SHAPES, ids=str)
def test_matmul_gradients(shape1, shape2, dtypes, rng):
    args = random(rng, shape1, dtypes[0]), random(rng, shape2, dtypes[1])
    gradcheck(rx.matmul, args)
    gradgradcheck(rx.matmul, args)


@pytest.mark.parametrize(("shape1", "shape2"), SHAPES, ids=str)
def test_matmul_gradients_over_every_library(xp, shape1, shape2, rng):
    x1, x2 = random(rng, shape1), random(rng, shape2)
    tensors = [rx.Tensor(xp.asarray(x), requires_grad=True) for x in (x1, x2)]
    rx.sum(rx.matmul(*tensors)).backward()
    ones = np.ones(np.matmul(x1, x2).shape)
    left = x1 if x1.ndim > 1 else x1[None, :]
    right = x2 if x2.ndim > 1 else x2[:, None]
    g = ones.reshape(np.matmul(left, right).shape)
    for tensor, x, grad in (
        (tensors[0], left, np.matmul(g, np.swapaxes(right, -1, -2))),
        (tensors[1], right, np.matmul(np.swapaxes(left, -1, -2), g)),
    ):
        extra = grad.ndim - x.ndim
        grad = grad.sum(axis=tuple(range(extra)))
        longer = tuple(i for i, n in enumerate(x.shape) if n == 1 != grad.shape[i])
        assert_close(tensor.grad, grad.sum(axis=longer, keepdims=True).reshape(tensor.shape))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("function", [
    rx.matmul,
    lambda x, y: rx.tensordot(x, y, axes=1),
    lambda x, y: rx.vecdot(x, rx.matrix_transpose(y)),
    lambda x, y: rx.einsum("ij,jk->ik", x, y),
], ids=["matmul", "tensordot", "vecdot", "einsum"])  # fmt: skip
def test_half_precision_accumulates_in_single(dtype, function):
    # Beyond 2048 (256) a float16 (bfloat16) sum of ones would not grow any more.
    x = np.ones((1, 5000), dtype)
    out = function(x, x.T)
    assert out.dtype == dtype
    assert float(out.reshape(())) == float(dtype(5000))


@pytest.mark.parametrize(
    ("dtype1", "dtype2", "dtype"),
    [
        ("float16", "float32", "float32"),
        ("bfloat16", "float32", "float32"),
        ("float16", "bfloat16", "float32"),
        ("bfloat16", "float64", "float64"),
        ("float16", "complex64", "complex64"),
        ("int32", "float32", "float64"),
        ("int8", "int32", "int32"),
    ],
)
def test_products_promote(dtype1, dtype2, dtype):
    x1, x2 = (np.ones((2, 2), getattr(rx, name)) for name in (dtype1, dtype2))
    for out in (rx.matmul(x1, x2), rx.vecdot(x1, x2), rx.tensordot(x1, x2, axes=1)):
        assert out.dtype == getattr(rx, dtype)


def test_matmul_of_strided_arrays(rng):
    x = random(rng, (6, 8))
    assert_close(rx.matmul(x[::2, ::-2], x.T[::-2, 1::2]), x[::2, ::-2] @ x.T[::-2, 1::2])


@pytest.mark.parametrize(
    ("shape1", "shape2", "match"),
    [
        ((), (3,), "x1 must have at least one dimension"),
        ((3,), (), "x2 must have at least one dimension"),
        ((2, 3), (2, 3), r"last axis of x1 must match .* got shapes \(2, 3\) and \(2, 3\)"),
        ((3,), (4,), "last axis of x1 must match"),
    ],
)
def test_matmul_refuses_what_does_not_match(shape1, shape2, match):
    with pytest.raises(ValueError, match=match):
        rx.matmul(np.ones(shape1), np.ones(shape2))


def test_matmul_refuses_scalars():
    with pytest.raises(ValueError, match="x1 must have at least one dimension, got a scalar"):
        2.0 @ rx.Tensor(np.ones(2))


@pytest.mark.parametrize(
    ("shape1", "shape2", "axis"),
    [((3,), (3,), -1), ((2, 3), (3,), -1), ((2, 3), (4, 1, 3), -1), ((3, 2), (4, 3, 2), -2),
     ((3, 2), (3, 2), 0), ((2, 0), (2, 0), -1), ((0, 3), (3,), -1)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_vecdot_conjugates_its_first_argument(xp, shape1, shape2, axis, dtype, rng):
    x1, x2 = random(rng, shape1, dtype), random(rng, shape2, dtype)
    out = rx.vecdot(xp.asarray(x1), xp.asarray(x2), axis=axis)
    assert_close(out, np.sum(np.conj(x1) * x2, axis=axis))


def test_vecdot_refuses_what_does_not_match():
    with pytest.raises(ValueError, match="same length along axis -1, got shapes"):
        rx.vecdot(np.ones(3), np.ones(4))
    with pytest.raises(ValueError, match=r"axis must be an axis of x2 of shape \(3,\), got -2"):
        rx.vecdot(np.ones((3, 3)), np.ones(3), axis=-2)
    with pytest.raises(ValueError, match="axis must be negative for arrays of 2 and 1"):
        rx.vecdot(np.ones((3, 3)), np.ones(3), axis=0)


@pytest.mark.parametrize(
    ("shape1", "shape2", "axes"),
    [
        ((2, 3, 4), (3, 4, 5), 2),
        ((2, 3), (3, 4), 1),
        ((2, 3), (4,), 0),
        ((2, 3, 4), (4, 2, 5), ((0, 2), (1, 0))),
        ((2, 3, 4), (4, 2, 5), ((-3, -1), (-2, -3))),
        ((3,), (3,), 1),
        ((2, 0), (0, 3), 1),
        ((2, 3), (3, 2), ((), ())),
    ],
)
def test_tensordot_pairs_axes(xp, shape1, shape2, axes, rng):
    x1, x2 = random(rng, shape1), random(rng, shape2)
    assert_close(
        rx.tensordot(xp.asarray(x1), xp.asarray(x2), axes=axes), np.tensordot(x1, x2, axes=axes)
    )
    gradcheck(lambda a, b: rx.tensordot(a, b, axes=axes), (x1, x2))


@pytest.mark.parametrize(
    ("axes", "match"),
    [
        (3, r"axes must lie in \[0, 2\], got 3"),
        (-1, r"axes must lie in \[0, 2\]"),
        (((0,), (1,), (2,)), "axes must be an int or two sequences"),
        (((0, 0), (0, 1)), "must not name an axis twice"),
        (((2,), (0,)), "axis must lie in"),
        (((0,), (1,)), "axes must pair axes of equal lengths"),
    ],
)
def test_tensordot_refuses_bad_axes(axes, match):
    with pytest.raises(ValueError, match=match):
        rx.tensordot(np.ones((2, 3)), np.ones((3, 4)), axes=axes)


@pytest.mark.compare
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize(("shape1", "shape2"), [s for s in SHAPES if 0 not in s[0]], ids=str)
def test_matmul_agrees_with_torch(shape1, shape2, dtype, rng):
    import torch

    arrays = random(rng, shape1, dtype), random(rng, shape2, dtype)
    ours = [rx.Tensor(a, requires_grad=True) for a in arrays]
    theirs = [torch.tensor(a, requires_grad=True) for a in arrays]
    out, expected = rx.matmul(*ours), torch.matmul(*theirs)
    assert_close(out, expected.detach().numpy())
    rx.sum(rx.square(rx.abs(out))).backward()
    expected.abs().square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a.grad, b.grad.resolve_conj().numpy())
