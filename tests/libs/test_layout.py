"""Reading a product's operands from shapes and strides."""

import numpy as np
import pytest

from rtxarr.libs._layout import Copies, Matrix, Product, Unsupported, describe, matrix


def of(a, b, out=None):
    return describe(
        a.shape,
        a.strides,
        b.shape,
        b.strides,
        a.itemsize,
        out_strides=getattr(out, "strides", None),
    )


@pytest.mark.parametrize(
    ("rows", "cols", "row_stride", "col_stride", "want"),
    [
        (3, 4, 4, 1, Matrix(False, 4)),
        (3, 4, 9, 1, Matrix(False, 9)),
        (3, 4, 1, 3, Matrix(True, 3)),
        (3, 4, 1, 5, Matrix(True, 5)),
        (1, 4, 0, 1, Matrix(False, 4)),
        (1, 4, 0, 6, Matrix(True, 6)),
        (3, 1, 7, 0, Matrix(False, 7)),
        (1, 1, 0, 0, Matrix(False, 1)),
        (3, 4, 8, 2, None),
        (3, 4, -4, 1, None),
        (3, 4, 4, -1, None),
        (3, 4, 0, 1, None),
        (3, 4, 2, 1, None),
        (3, 4, 1, 2, None),
        (3, 4, 2**31, 1, None),
    ],
)
def test_matrix(rows, cols, row_stride, col_stride, want):
    assert matrix(rows, cols, row_stride, col_stride) == want


A, B = np.zeros((3, 5)), np.zeros((5, 4))


def test_one_product():
    want = Product(
        3, 4, 5, Matrix(False, 5), Matrix(False, 4), 4, 1, (0, 0, 0), ((0, 0, 0),), (3, 4)
    )
    assert of(A, B) == want
    assert of(A, np.zeros((4, 5)).T) == want._replace(b=Matrix(True, 5))
    assert of(A, B, out=np.zeros((3, 7))[:, :4]) == want._replace(ld=7)


def test_vectors_are_matrices_of_one_row_or_column():
    assert of(A[0], B)[:3] == (1, 4, 5)
    assert of(A[0], B).shape == (4,)
    assert of(A, B[:, 0]).shape == (3,)
    assert of(A, B[:, 0]).b == Matrix(False, 4)
    assert of(A[0], B[:, 0]).shape == ()


def test_a_stack_of_rows_is_one_matrix():
    found = of(np.zeros((2, 6, 3, 5)), B)
    assert (found.m, found.batch, found.shape) == (36, 1, (2, 6, 3, 4))
    assert of(np.zeros((6, 1, 9))[:, :, :5], B).a == Matrix(False, 9)


def test_stacks_and_broadcasting():
    stack = np.zeros((6, 5, 4))
    assert of(np.zeros((6, 3, 5)), stack)[-4:-1] == (6, (15, 20, 12), ((0, 0, 0),))
    assert of(A, stack).steps == (0, 20, 12)
    assert of(np.zeros((6, 5, 3)).swapaxes(1, 2), B)[-4:-1] == (6, (15, 0, 12), ((0, 0, 0),))
    heads = np.zeros((2, 5, 7, 4)).swapaxes(1, 2)  # (batch, heads, rows, features)
    found = of(np.zeros((2, 7, 3, 5)), heads)
    assert (found.batch, found.steps) == (7, (15, 4, 12))
    assert found.offsets == ((0, 0, 0), (7 * 15, 140, 7 * 12))


def test_many_stacks_are_copied():
    heads = np.zeros((50, 5, 60, 4)).swapaxes(1, 2)
    assert of(np.zeros((50, 60, 3, 5)), heads) == Copies(False, True)
    with pytest.raises(Unsupported, match="no single step"):
        of(np.zeros((50, 1, 3, 5)), np.zeros((60, 5, 4)))


@pytest.mark.parametrize("step", [2, -1])
def test_gaps_and_reversals_are_copied(step):
    apart = np.zeros((3, 10))[:, ::step][:, :5]
    assert of(apart, B) == Copies(True, False)
    assert of(np.zeros((3, 2, 5))[::-1], B) == Copies(True, False)


def test_strides_of_part_of_an_element_are_copied():
    pairs = np.zeros((3, 5), [("x", "f8"), ("y", "f4")])["x"]
    assert of(pairs, B) == Copies(True, False)


@pytest.mark.parametrize(
    ("out", "match"),
    [
        (np.zeros((4, 3)).T, "row by row"),
        (np.zeros((3, 8))[:, ::2], "row by row"),
        (np.broadcast_to(np.zeros(4), (3, 4)), "row by row"),
    ],
)
def test_unsupported_results(out, match):
    with pytest.raises(Unsupported, match=match):
        of(A, B, out=out)
    with pytest.raises(Unsupported, match="share memory"):
        of(np.zeros((2, 3, 5)), B, out=np.broadcast_to(np.zeros((3, 4)), (2, 3, 4)))


@pytest.mark.parametrize(("a", "b"), [((0, 5), (5, 4)), ((3, 0), (0, 4)), ((0, 3, 5), (5, 4))])
def test_nothing_to_compute(a, b):
    with pytest.raises(Unsupported) as caught:
        of(np.zeros(a), np.zeros(b))
    assert str(caught.value) == ""


def test_shapes_that_do_not_match():
    with pytest.raises(ValueError, match="do not go together"):
        of(A, A)
    with pytest.raises(ValueError, match="no scalars"):
        of(A, np.zeros(()))
