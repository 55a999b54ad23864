"""Graphs made of chunks are those made of the whole list, in memory and in files."""

import tracemalloc

import numpy as np
import pytest

from rtxarr import geom

RNG = np.random.default_rng(0)
SRC, DST = RNG.integers(0, 50, 1000), RNG.integers(0, 40, 1000)  # nodes 40 to 59: no edge ends


class Drawn:
    """Chunks that are drawn anew each time; none is kept."""

    def __init__(self, n_chunks, size, n_nodes, shift=0):
        self.given, self.n_passes, self.shift = (n_chunks, size, n_nodes), 0, shift

    def __iter__(self):
        n_chunks, size, n_nodes = self.given
        for i in range(n_chunks):
            rng = np.random.default_rng(i + self.shift * self.n_passes)
            yield tuple(rng.integers(0, n_nodes, (2, size), dtype=np.int32))
        self.n_passes += 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint16"])
@pytest.mark.parametrize("size", [1, 7, 1000, 5000])
def test_chunks_give_the_graph_of_the_whole_list(size, dtype, device, same):
    src, dst = SRC.astype(dtype), DST.astype(dtype)
    want = geom.Graph.from_edges(src, dst, n_nodes=60)
    got = geom.from_chunks(geom.EdgeChunks(src, dst, size=size), n_nodes=60, device=device)
    assert got.device == device
    same(got.to_device("cpu"), want)


@pytest.mark.parametrize("in_files", [False, True])
def test_without_numbers_edges_are_numbered_as_stored(in_files, tmp_path):
    options = {"folder": tmp_path / "graph"} if in_files else {}
    want = geom.Graph.from_edges(SRC, DST, n_nodes=60)
    chunks = geom.EdgeChunks(SRC, DST, size=64)
    got = geom.from_chunks(chunks, n_nodes=60, keep_numbers=False, **options)
    assert got.is_ordered
    np.testing.assert_array_equal(got.indptr, want.indptr)
    np.testing.assert_array_equal(got.src, want.indices)


@pytest.mark.parametrize("n", [1000, 0])
def test_files_are_opened_again(n, tmp_path, same):
    want = geom.Graph.from_edges(SRC[:n], DST[:n], n_src=50, n_dst=45)
    chunks = geom.EdgeChunks(SRC[:n], DST[:n], size=64)
    same(geom.from_chunks(chunks, n_src=50, n_dst=45, folder=tmp_path / "graph"), want)
    again = geom.open_graph(tmp_path / "graph")
    same(again, want)
    assert type(again.indices) is np.ndarray
    if n:
        assert not again.indices.flags.writeable
    x = RNG.standard_normal((50, 3))
    np.testing.assert_array_equal(again @ x, want @ x)


def test_layers_are_inferred_over_a_graph_in_files(tmp_path):
    chunks = geom.EdgeChunks(SRC, DST, size=100)
    mapped = geom.from_chunks(chunks, n_nodes=60, folder=tmp_path / "graph")
    layer, x = geom.SAGEConv(4, 3, dtype="float64"), RNG.standard_normal((60, 4))
    want = layer(geom.Graph.from_edges(SRC, DST, n_nodes=60), x).data
    got = geom.infer_layerwise([layer], mapped, x, memory_limit=10_000)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_memory_is_that_of_a_chunk(tmp_path):
    chunks = Drawn(64, 1 << 14, 1000)
    tracemalloc.start()
    try:
        graph = geom.from_chunks(chunks, n_nodes=1000, folder=tmp_path / "graph")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert graph.n_edges == 1 << 20
    assert peak < 3 << 20  # the destinations alone are 8 MiB as int64
    assert chunks.n_passes == 2
    src, dst = np.concatenate(list(chunks), axis=1)
    np.testing.assert_array_equal(graph.src, src)
    np.testing.assert_array_equal(graph.dst, dst)


def test_ids_beyond_32_bits():
    src = np.array([2**31, 5])
    graph = geom.from_chunks([(src, np.array([1, 0]))], n_src=2**31 + 1, n_dst=2)
    assert graph.indices.dtype == np.int64
    np.testing.assert_array_equal(graph.src, src)


def test_bad_chunks(tmp_path):
    good = np.array([0, 1])
    with pytest.raises(TypeError, match="something to go through twice"):
        geom.from_chunks(iter([(good, good)]), n_nodes=2)
    with pytest.raises(IndexError, match=r"dst of chunk 1 must lie in \[0, 2\), got values .* 2"):
        geom.from_chunks([(good, good), (good, good + 1)], n_nodes=2)
    with pytest.raises(TypeError, match="src of chunk 0 must hold integers, got float64"):
        geom.from_chunks([(good * 1.0, good)], n_nodes=2)
    with pytest.raises(ValueError, match="of chunk 0 must have one length, got 1 and 2"):
        geom.from_chunks([(good[:1], good)], n_nodes=2)
    with pytest.raises(ValueError, match="must give the same edges both times, got others"):
        geom.from_chunks(Drawn(3, 50, 10, shift=1), n_nodes=10)
    with pytest.raises(ValueError, match="size must be an int >= 1, got 0"):
        geom.EdgeChunks(good, good, size=0)
    with pytest.raises(FileNotFoundError, match="written to its end"):
        geom.open_graph(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="must be empty"):
        geom.from_chunks([(good, good)], n_nodes=2, folder=tmp_path)


def test_fewer_edges_the_second_time():
    class Fewer(Drawn):
        def __iter__(self):
            chunks = list(super().__iter__())
            yield from chunks[: 3 - self.n_passes]

    with pytest.raises(ValueError, match="got 100 and then 50"):
        geom.from_chunks(Fewer(3, 50, 10), n_nodes=10)
