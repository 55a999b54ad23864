"""Features in the host's memory, or in a file, some columns at a time."""

import numpy as np
import pytest

from rtxarr import _device, geom
from rtxarr.testing import assert_close


@pytest.fixture
def case(random):
    graph = random(50, 400)
    return graph, np.random.default_rng(0).standard_normal((50, 7)).astype("float32")


@pytest.mark.parametrize("op", ["sum", "mean", "min", "std", "mul"])
@pytest.mark.parametrize("n_slices", [1, 2, 7, 100])
def test_streamed_is_aggregate_to_the_bit(case, op, n_slices):
    graph, x = case
    got = geom.aggregate_streamed(graph, x, op, n_slices=n_slices, empty=-1.0)
    assert_close(got, geom.aggregate(graph, x, op, empty=-1.0), exact=True)


def test_weights(case):
    graph, x = case
    weight = np.asarray(graph.edges["weight"], dtype="float32")
    got = geom.aggregate_streamed(graph, x, weight=weight, n_slices=3)
    assert_close(got, geom.aggregate(graph, x, weight=weight), exact=True)


def test_files_are_read_and_written_in_place(case, tmp_path):
    graph, x = case
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    out = np.lib.format.open_memmap(tmp_path / "y.npy", "w+", x.dtype, (50, 7))
    assert geom.aggregate_streamed(graph, mapped, "mean", out=out) is out
    out.flush()
    assert_close(np.load(tmp_path / "y.npy"), geom.aggregate(graph, x, "mean"), exact=True)


def test_no_features_and_no_nodes(multigraph):
    x = np.zeros((multigraph.n_nodes, 0))
    assert geom.aggregate_streamed(multigraph, x).shape == (multigraph.n_nodes, 0)


def test_what_does_not_fit_is_refused(case):
    graph, x = case
    with pytest.raises(ValueError, match="x must be a two-dimensional NumPy array"):
        geom.aggregate_streamed(graph, x[:, 0])
    with pytest.raises(ValueError, match=r"out must be a NumPy array of shape \(50, 7\)"):
        geom.aggregate_streamed(graph, x, out=np.empty((50, 6), "float32"))
    with pytest.raises(ValueError, match="n_slices must be an int >= 1, got 0"):
        geom.aggregate_streamed(graph, x, n_slices=0)


@pytest.mark.gpu
@pytest.mark.parametrize("n_slices", [1, 3])
def test_on_a_gpu(case, n_slices):
    graph, x = case
    there = graph.to_device("cuda:0")
    got = geom.aggregate_streamed(there, x, "mean", n_slices=n_slices)
    assert isinstance(got, np.ndarray)
    want = geom.aggregate(there, _device.to_device(x, "cuda:0"), "mean")
    assert_close(got, want, exact=True)
