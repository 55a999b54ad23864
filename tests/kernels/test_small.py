"""Reductions of small arrays in one launch: in the simulator and on a GPU."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import nn
from rtxarr._device import to_device
from rtxarr.kernels import small
from rtxarr.testing import assert_close


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((1,), None),
        ((2708,), None),
        ((131, 1), 0),
        ((300, 3), (0,)),
        ((2708, 16), 0),
        ((77, 5), None),
        ((9, 4, 5), (0, 1)),
        ((8, 33), 0),
        ((), None),
    ],
    ids=str,
)
def test_sums_over_first_axes(place, shape, axis, dtype):
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    for keepdims in (False, True):
        got = small.leading_sum(to_device(x, place), axis, keepdims)
        assert got.dtype == dtype
        want = np.asarray(x.astype("f8").sum(axis=axis, keepdims=keepdims))
        assert_close(
            to_device(got, "cpu"), want.astype(dtype), atol=1e-4 if dtype[-2:] == "32" else 1e-12
        )
    again = small.leading_sum(to_device(x, place), axis, True)
    assert_close(to_device(again, "cpu"), to_device(got, "cpu"), exact=True)


def test_small_integers_are_added_exactly(place):
    x = np.random.default_rng(1).integers(-9, 9, (513, 7)).astype("float32")
    got = small.leading_sum(to_device(x, place), 0, False)
    assert_close(to_device(got, "cpu"), x.sum(axis=0), exact=True)


@pytest.mark.parametrize(("dtype", "keepdims"), [("float32", False), ("float64", True)])
def test_sums_of_many_rows(place, dtype, keepdims):
    x = np.random.default_rng(2).standard_normal((4, 4200, 2, 4)).astype(dtype)
    got = small.leading_sum(to_device(x, place), (0, 1), keepdims)
    assert got.dtype == dtype
    want = x.astype("f8").sum(axis=(0, 1), keepdims=keepdims)
    assert_close(
        to_device(got, "cpu"), want.astype(dtype), atol=1e-3 if dtype == "float32" else 1e-10
    )


@pytest.mark.parametrize(
    ("shape", "order", "axis"),
    [
        ((5, 7, 3, 6), (0, 3, 1, 2), (0, 2, 3)),
        ((5, 7, 3, 6), (0, 3, 1, 2), (-4, -1, -2)),
        ((40, 30, 2, 64), (0, 3, 1, 2), (0, 2, 3)),
        ((5, 7), (1, 0), 1),
        ((5, 7), (1, 0), np.int64(1)),
        ((3, 4, 2, 6), (2, 0, 1, 3), (1, 2)),
    ],
    ids=str,
)
def test_sums_over_axes_that_lie_outermost(place, shape, order, axis):
    x = np.random.default_rng(3).standard_normal(shape).astype("float32")
    there = rx.permute_dims(to_device(x, place), order)
    x = x.transpose(order)
    for keepdims in (False, True):
        got = small.leading_sum(there, axis, keepdims)
        assert_close(to_device(got, "cpu"), x.sum(axis=axis, keepdims=keepdims), atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "order", "axis"),
    [
        ((5, 7, 3, 6), (0, 3, 1, 2), (0, 2)),
        ((5, 7, 3, 6), (0, 3, 1, 2), (0, 2, 4)),
        ((5, 7, 3, 6), (0, 3, 1, 2), (0, 2, 2)),
        ((5, 7, 3, 6), (0, 3, 1, 2), None),
        ((5, 7, 3, 6), (0, 3, 1, 2), [0, 2, 3]),
        ((5, 7, 3), (0, 2, 1), 0),
        ((5, 7, 3), (0, 2, 1), np.int64(0)),
    ],
    ids=str,
)
def test_other_axes_of_turned_arrays_are_left_alone(place, shape, order, axis):
    x = rx.permute_dims(to_device(np.ones(shape, "float32"), place), order)
    assert small.leading_sum(x, axis, False) is None


@pytest.mark.parametrize(
    ("shape", "axis", "dtype"),
    [
        ((3, 4), 1, "float32"),
        ((3, 4), -1, "float32"),
        ((3, 4), (1, 0), "float32"),
        ((3, 4), 0, "int64"),
        ((0, 4), 0, "float32"),
        ((70_000, 2), 0, "float32"),
        ((3, 4), (0, 1, 2), "float32"),
    ],
    ids=str,
)
def test_others_are_left_alone(place, shape, axis, dtype):
    assert small.leading_sum(to_device(np.ones(shape, dtype), place), axis, False) is None


def test_arrays_with_gaps_are_left_alone(place):
    x = to_device(np.ones((6, 4), "float32"), place)
    assert small.leading_sum(x[:, ::2], 0, False) is None


@pytest.mark.parametrize("ignored", [None, -1, 2])
@pytest.mark.parametrize("labels_dtype", ["int32", "int64", "uint8"])
@pytest.mark.parametrize("shape", [(1, 1), (50, 7), (3, 5, 4), (2708, 3)], ids=str)
def test_share_of_labels_that_are_largest(place, shape, labels_dtype, ignored):
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 4, shape).astype("float32")  # with ties: the first counts
    logits[rng.random(shape) < 0.1] = np.nan
    labels = rng.integers(0, shape[-1], shape[:-1]).astype(labels_dtype)
    if ignored == -1 and labels_dtype != "uint8":
        labels[rng.random(labels.shape) < 0.3] = -1
    kept = np.ones(labels.shape, bool) if ignored is None else labels != ignored
    want = ((logits.argmax(axis=-1) == labels) & kept).sum() / max(1, kept.sum())
    arrays = to_device(logits, place), to_device(labels, place)
    assert small.fits_accuracy(*arrays)
    got = small.accuracy(*arrays, ignored)
    assert got.dtype == np.float64
    assert got.shape == ()
    assert float(got) == want


def test_what_accuracy_does_not_take(place):
    logits, labels = np.ones((6, 4), "float32"), np.ones(6, np.int64)
    for a, b in [
        (logits.astype("float16"), labels),
        (logits, labels.astype("float32")),
        (logits, labels[:5]),
        (np.ones((6, 65), "float32"), labels),
        (logits[:0], labels[:0]),
    ]:
        assert not small.fits_accuracy(to_device(a, place), to_device(b, place))


@pytest.mark.gpu
def test_sums_and_accuracy_of_a_model_take_a_launch_each():
    import cupy

    rng = np.random.default_rng(0)
    x = cupy.asarray(rng.standard_normal((2708, 16)), dtype="float32")
    bias = rx.Tensor(cupy.zeros(16, "float32"), requires_grad=True)
    rx.sum(rx.relu(x + bias)).backward()
    assert_close(bias.grad.get(), (x.get() > 0).sum(axis=0).astype("float32"), exact=True)
    labels = cupy.asarray(rng.integers(0, 16, 2708))
    assert float(nn.accuracy(x, labels)) == (x.get().argmax(axis=1) == labels.get()).mean()
    step = rx.capture(lambda: (rx.sum(x, axis=0), nn.accuracy(x, labels)))
    for _ in range(3):
        sums, share = step()
        assert_close(sums.get(), x.get().astype("f8").sum(axis=0).astype("float32"), atol=1e-3)
        assert float(share) == float(nn.accuracy(x, labels))
