"""Rows combined by their index, against a sort and sums over segments."""

import ml_dtypes
import numpy as np
import pytest

from rtxarr import _device
from rtxarr.kernels import scatter
from rtxarr.kernels.scatter import scatter_reduce
from rtxarr.kernels.segment import segment_reduce
from rtxarr.kernels.sort import group_rows
from rtxarr.testing import assert_close


def put(x, place):
    return x if place == "cpu" else _device.to_device(x, place)


def bits(x):
    return np.ascontiguousarray(_device.to_device(x, "cpu")).view(np.uint8)


@pytest.fixture
def launched(monkeypatch):
    """List the kernels that are started."""
    names = []

    def launch(plan, options, args):
        names.append(plan.__name__)
        _device.launch_planned(plan, options, args)

    monkeypatch.setattr(scatter, "launch_planned", launch)
    return names


def indices(kind, n, n_rows):
    rng = np.random.default_rng(n)
    return {
        "skewed": lambda: np.minimum(rng.zipf(1.3, n) - 1, n_rows - 1),
        "uniform": lambda: rng.integers(0, n_rows, n),
        "same": lambda: np.full(n, n_rows // 2),
        "outside": lambda: rng.integers(-3, n_rows + 3, n),
        "falling": lambda: np.arange(n)[::-1] % n_rows,
    }[kind]()


SMALL = [(13, 20), (17, 9), (32, 5), (9, 70), (16, 33)]
LARGE = [(1, 1), (65, 9), (1000, 50_257), (2049, 300), (8192, 128_000), (8191, 2000)]


@pytest.mark.parametrize("kind", ["skewed", "uniform", "same", "outside", "falling"])
def test_bits_are_those_of_a_sort_and_segments(place, monkeypatch, launched, kind):
    chunk = 4 if place == "cpu" else 16
    monkeypatch.setattr(scatter, "_CHUNK_OF_FEW", chunk)
    types = ["float32", ml_dtypes.bfloat16, "float64"]
    sizes = SMALL if place == "cpu" else LARGE
    for i, (n, n_rows) in enumerate(sizes):
        dtype, n_features = types[i % 3], (8, 3, 24, 1, 200)[(i + n) % 5]
        index = put(indices(kind, n, n_rows).astype(("int64", "int32")[i % 2]), place)
        values = np.random.default_rng(i).standard_normal((n, n_features)).astype(dtype)
        values = put(values, place)
        order, indptr = group_rows(index, n_rows)
        want = segment_reduce("sum", values, indptr, indices=order, chunk=chunk)
        got = scatter_reduce("sum", index, values, n_rows)
        assert launched == ["_few"]
        launched.clear()
        assert_close(bits(got), bits(want), exact=True)


@pytest.mark.parametrize("kind", ["skewed", "uniform", "same", "outside", "falling"])
def test_bits_of_more_entries_are_those_of_segments(place, monkeypatch, launched, kind):
    chunk = 4 if place == "cpu" else 64
    monkeypatch.setattr(scatter, "_CHUNK", chunk)
    small = [(33, 9, 16), (50, 40, 12), (70, 3, 5)]
    large = [(8193, 40, 512), (20_000, 50_257, 300), (140_000, 70_000, 3)]
    for i, (n, n_rows, n_features) in enumerate(small if place == "cpu" else large):
        dtype = ("bfloat16", "float32", "float64")[i]
        index = put(indices(kind, n, n_rows).astype(("int64", "int32")[i % 2]), place)
        values = np.random.default_rng(i).standard_normal((n, n_features))
        values = put(values.astype(getattr(ml_dtypes, dtype, dtype)), place)
        order, indptr = group_rows(index, n_rows)
        want = segment_reduce("sum", values, indptr, indices=order, chunk=chunk)
        got = scatter_reduce("sum", index, values, n_rows)
        assert launched == ["_group", "_order", "_add_up", "_join"]
        launched.clear()
        assert_close(bits(got), bits(want), exact=True)


@pytest.mark.parametrize("op", ["mean", "max", "min"])
def test_other_operations_have_the_bits_of_segments(place, monkeypatch, op):
    chunk = 4 if place == "cpu" else 16
    monkeypatch.setattr(scatter, "_CHUNK_OF_FEW", chunk)
    n, n_rows = (30, 9) if place == "cpu" else (5000, 700)
    index = put(indices("skewed", n, n_rows), place)
    for dtype in ("float16", "int32") if op != "mean" else ("float16",):
        values = np.random.default_rng(0).integers(-9, 9, (n, 8)).astype(dtype)
        values[3 * n // 4] = values[0]
        values = put(values, place)
        order, indptr = group_rows(index, n_rows)
        want = segment_reduce(op, values, indptr, indices=order, chunk=chunk)
        assert_close(bits(scatter_reduce(op, index, values, n_rows)), bits(want), exact=True)


@pytest.mark.parametrize("sizes", [(9, 1 << 28), (1 << 22, 5), (9000, 1 << 24), (9, 1 << 19)])
def test_more_than_fit_are_left_to_segments(sizes):
    assert not scatter._can_sort(*sizes)


@pytest.mark.parametrize("lacking", ["bits", "shared memory"])
def test_bits_of_what_is_left_to_segments(place, launched, monkeypatch, lacking):
    if lacking == "bits":
        monkeypatch.setattr(scatter, "_FEW", 0)
        monkeypatch.setattr(scatter, "_can_sort", lambda n, n_rows: False)
    else:
        monkeypatch.setattr(scatter, "_has_room", lambda index: False)
    index, values = np.arange(9) % 4, np.ones((9, 512), np.float32)
    got = scatter_reduce("sum", put(index, place), put(values, place), 5)
    want = np.array([3, 2, 2, 2, 0], np.float32)
    assert_close(got, np.repeat(want[:, None], 512, 1), exact=True)
    assert not launched


@pytest.mark.gpu
@pytest.mark.parametrize("n_rows", [1 << 26, (1 << 26) + 1])
def test_few_entries_of_many_rows(n_rows):
    place = _device.device("cuda:0")
    index, values = np.array([0, n_rows - 1, 5, n_rows - 1]), np.array([[1], [2], [3], [4]], "u1")
    got = scatter_reduce("sum", put(index, place), put(values, place), n_rows)
    assert [int(got[i, 0]) for i in (0, 1, 5, n_rows - 1)] == [1, 0, 3, 6]
    assert int((got != 0).sum()) == 3
