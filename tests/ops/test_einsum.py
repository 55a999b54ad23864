"""Einstein summation against NumPy's, and its gradients."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close, gradcheck, gradgradcheck

CASES = [
    ("ij,jk->ik", (2, 3), (3, 4)),
    ("ij,jk", (2, 3), (3, 4)),
    ("ij,kj->ik", (2, 3), (4, 3)),
    ("ji,jk->ki", (3, 2), (3, 4)),
    ("bij,bjk", (5, 2, 3), (5, 3, 4)),
    ("bqhd,bkhd->bhqk", (2, 3, 2, 4), (2, 5, 2, 4)),
    ("ijk,jkl->il", (2, 3, 4), (3, 4, 5)),
    ("ij,ij->", (2, 3), (2, 3)),
    ("ij,ij->ij", (2, 3), (2, 3)),
    ("ij,ij->j", (2, 3), (2, 3)),
    ("i,j->ji", (2,), (3,)),
    ("i,i", (3,), (3,)),
    ("ij,j", (2, 3), (3,)),
    ("ba", (2, 3)),
    ("ij->", (2, 3)),
    ("ij->j", (2, 3)),
    ("ii", (3, 3)),
    ("ii->i", (3, 3)),
    ("iij->ji", (3, 3, 2)),
    ("iii->i", (3, 3, 3)),
    ("ijij->ij", (2, 3, 2, 3)),
    ("iij,jk->ki", (3, 3, 2), (2, 4)),
    ("ij,k->", (2, 3), (4,)),
    ("ab,cd,ef->", (2, 3), (2, 2), (1, 3)),
    ("i,j,k->kji", (2,), (3,), (4,)),
    ("ij,jk,kl->il", (2, 3), (3, 4), (4, 2)),
    ("ij,jk,kl,lm->im", (2, 3), (3, 4), (4, 2), (2, 5)),
    ("ij,jk,kl,lm,mn->in", (2, 3), (3, 4), (4, 2), (2, 5), (5, 2)),
    ("ij,ij,ij->i", (2, 3), (2, 3), (2, 3)),
    ("bi,bj,ijk->bk", (5, 2), (5, 3), (2, 3, 4)),
    ("...ij,...jk->...ik", (2, 1, 3, 4), (5, 4, 2)),
    ("...ij,jk", (2, 3, 4), (4, 2)),
    ("i...,i...->...", (2, 3), (2, 4, 3)),
    ("...", (2, 3)),
    ("...->...", ()),
    ("...ii->...i", (2, 3, 3)),
    ("...,...->...", (2, 1), (3,)),
    ("...,...", (), ()),
    ("i...j->j...i", (2, 3, 4, 5)),
    ("ij,jk->ik", (3, 1), (5, 2)),
    ("ij,ij->ij", (1, 3), (2, 1)),
    ("ij,j->i", (3, 1), (4,)),
    ("ij,jk->ik", (2, 0), (0, 3)),
    ("ij,jk->ik", (0, 2), (2, 3)),
    ("ij->i", (2, 0)),
    ("ii->i", (0, 0)),
    ("ij,jk->ik", (1, 1), (1, 1)),
    (" i j , j k -> i k ", (2, 3), (3, 4)),
    ("Ab,bA->A", (2, 3), (3, 2)),
    ("ij,", (2, 3), ()),
]
IDS = [f"{case[0]}:{case[1:]}" for case in CASES]


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_values_are_those_of_numpy(xp, case, rng):
    subscripts, *shapes = case
    operands = [rng.standard_normal(shape) for shape in shapes]
    out = rx.einsum(subscripts, *(xp.asarray(x) for x in operands))
    assert_close(out, np.einsum(subscripts, *operands))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_gradients(case, rng):
    subscripts, *shapes = case
    operands = [rng.standard_normal(shape) for shape in shapes]
    operands[0] = operands[0] + 1j * rng.standard_normal(shapes[0])
    gradcheck(lambda *x: rx.einsum(subscripts, *x), operands)
    if len(shapes) < 4:
        gradgradcheck(lambda *x: rx.einsum(subscripts, *x), operands)


def test_operands_may_be_strided_and_mixed(rng):
    x, y = rng.standard_normal((6, 4)), rng.standard_normal((8, 3))
    out = rx.einsum("ij,kj->ik", rx.Tensor(x[::2, ::-1]), y[::3, [2, 0, 1, 1]])
    assert isinstance(out, rx.Tensor)
    assert_close(out, x[::2, ::-1] @ y[::3, [2, 0, 1, 1]].T)


@pytest.mark.parametrize(
    "dtypes",
    [("int32", "int32"), ("int8", "int32"), ("uint8", "float32"), ("float32", "complex64"),
     ("bool", "int64"), ("bool", "bool")],
)  # fmt: skip
@pytest.mark.parametrize("subscripts", ["ij,jk->ik", "ij,jk->", "ij,ji->ij"])
def test_dtypes_are_those_of_numpy(subscripts, dtypes):
    operands = [np.ones((3, 3), dtype) for dtype in dtypes]
    out, expected = rx.einsum(subscripts, *operands), np.einsum(subscripts, *operands)
    assert out.dtype == expected.dtype
    assert_close(out, expected, exact=True)


def test_a_chain_is_paired_in_the_cheap_order(monkeypatch):
    from rtxarr.ops import _einsum

    shapes = []
    original = _einsum.matmul
    monkeypatch.setattr(
        _einsum, "matmul", lambda a, b: shapes.append((a.shape, b.shape)) or original(a, b)
    )
    column, row, tall = np.ones((50, 1)), np.ones((1, 50)), np.ones((50, 2))
    rx.einsum("ij,jk,kl->il", column, row, tall)
    # From the left it would make a matrix of 50 by 50.
    assert max(a[0] * b[1] for a, b in shapes) <= 100


@pytest.mark.parametrize(
    ("subscripts", "shapes", "match"),
    [
        ("ij,jk", [(2, 3)], "a group for each operand, got 2 in 'ij,jk' for 1 operands"),
        ("ij", [(2,)], r"operand 0 must have 2 dimensions for 'ij', got shape \(2,\)"),
        ("ij", [(2, 3, 4)], "operand 0 must have 2 dimensions"),
        ("i...j", [(2,)], "operand 0 must have 2 dimensions"),
        ("ij,jk", [(2, 3), (4, 5)], "axes of one letter must have one length, got 3 and 4"),
        ("ii", [(2, 3)], "axes of 'i' must have one length in operand 0"),
        ("ii", [(1, 3)], "axes of 'i' must have one length in operand 0"),
        ("ij->ik", [(2, 3)], "letters of the result must be in an operand.*got 'k'"),
        ("ij->ii", [(2, 3)], "once in the result, got 'i'"),
        ("...i->i", [(2, 3)], "the result must have '...' as the operands do"),
        ("i.j", [(2, 3)], "must consist of letters"),
        ("i1", [(2, 3)], "must consist of letters"),
        ("ij->j->i", [(2, 3)], "must consist of letters"),
        ("......", [(2, 3)], "must consist of letters"),
        ("...,...", [(2,), (3,)], "axes of one letter must have one length"),
    ],
)
def test_bad_subscripts_are_refused(subscripts, shapes, match):
    with pytest.raises(ValueError, match=match):
        rx.einsum(subscripts, *(np.ones(shape) for shape in shapes))


def test_what_is_not_an_array_is_refused():
    with pytest.raises(TypeError, match="operand 1 must be an array, got list"):
        rx.einsum("i,i", np.ones(2), [1.0, 2.0])
    with pytest.raises(TypeError, match="subscripts must be a str, got ndarray"):
        rx.einsum(np.ones(2), "i")


@pytest.mark.compare
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_values_and_gradients_agree_with_torch(case, rng):
    import torch

    subscripts, *shapes = case
    operands = [rng.standard_normal(shape) + 1j * rng.standard_normal(shape) for shape in shapes]
    ours = [rx.Tensor(x, requires_grad=True) for x in operands]
    theirs = [torch.tensor(x, requires_grad=True) for x in operands]
    out, expected = rx.einsum(subscripts, *ours), torch.einsum(subscripts, *theirs)
    assert_close(out, expected.detach().numpy())
    rx.sum(rx.square(rx.abs(out))).backward()
    expected.abs().square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a.grad, b.grad.resolve_conj().numpy())
