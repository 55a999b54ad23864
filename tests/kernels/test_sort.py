"""Grouping entries by row on a device, against a stable sort."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device
from rtxarr.kernels import sort
from rtxarr.kernels.sort import group_rows
from rtxarr.testing import assert_close

SMALL = [(1, 1), (7, 3), (23, 5), (20, 70)]
LARGE = [(1, 1), (8192, 300), (8193, 1), (100_003, 50_257), (300_000, 64), (1_000_003, 300_001)]


def expected(index, n_rows):
    keys = np.where((index < 0) | (index >= n_rows), n_rows, index.astype(np.int64))
    order = np.argsort(keys, kind="stable")
    return order, np.searchsorted(keys[order], np.arange(n_rows + 1))


@pytest.mark.parametrize("few", [None, 0], ids=["compared", "radix"])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "int16"])
def test_order_is_that_of_a_stable_sort(place, monkeypatch, dtype, few):
    if few is not None:
        monkeypatch.setattr(sort, "_FEW", few)
    rng = np.random.default_rng(0)
    small = SMALL if dtype == "int64" else SMALL[1:2]
    for n, n_rows in small if place == "cpu" else LARGE:
        if n_rows > np.iinfo(dtype).max:
            continue
        low = 0 if dtype == "uint8" else -2  # some that do not exist
        high = min(n_rows + 2, np.iinfo(dtype).max)
        for index in (rng.integers(low, high, n), np.minimum(rng.zipf(1.3, n) - 1, n_rows - 1)):
            index = index.astype(dtype)
            order, indptr = group_rows(_device.to_device(index, place), n_rows)
            want, pointers = expected(index, n_rows)
            assert_close(_device.to_device(order, "cpu").astype(np.int64), want, exact=True)
            assert_close(indptr, pointers, exact=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("index_dtype", ["int64", "int32", "uint8"])
def test_gradient_of_an_embedding(place, dtype, index_dtype):
    n, n_rows, n_features = (30, 9, 8) if place == "cpu" else (20_000, 200, 96)
    rng = np.random.default_rng(1)
    indices = rng.integers(0, n_rows, (2, n // 2)).astype(index_dtype)
    xp = rx.asarray(rng.integers(-2, 3, (2, n // 2, n_features)), dtype=dtype, device="cpu")
    weight = rx.asarray(np.zeros((n_rows, n_features)), dtype=dtype, device=place)
    for padding in (None, 2):
        weight = rx.Tensor(weight, requires_grad=True)
        where = _device.to_device(indices, place)
        rx.embedding(where, weight, padding_index=padding).backward(_device.to_device(xp, place))
        want = np.zeros((n_rows, n_features))
        np.add.at(want, indices, xp.astype(np.float64))
        if padding is not None:
            want[padding] = 0
        assert_close(weight.grad, want.astype(xp.dtype), exact=True)
        weight = weight.data


@pytest.mark.gpu
@pytest.mark.parametrize("n", [5000, 50_000])
def test_gradient_of_an_embedding_can_be_captured(n):
    """A sort that waited for the GPU would be refused."""
    cupy = pytest.importorskip("cupy")
    index = cupy.asarray(np.random.default_rng(2).integers(0, 100, n))
    weight = rx.Tensor(cupy.zeros((100, 64), cupy.float32), requires_grad=True)
    grad = cupy.ones((n, 64), cupy.float32)

    def step():
        weight.grad = None
        rx.embedding(index, weight).backward(grad)
        return weight.grad

    with cupy.cuda.Stream(non_blocking=True) as stream:
        step()
        want = step().copy()
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        try:
            got = step()
        finally:
            graph = stream.end_capture()
        got[...] = -1
        graph.launch(stream)
        stream.synchronize()
        assert_close(got, want, exact=True)
