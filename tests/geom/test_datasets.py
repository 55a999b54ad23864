"""Data sets of graphs: the figures of their publications, and what the reader refuses."""

import os
from importlib.resources import files
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from rtxarr import geom

FOLDER = Path(os.environ.get("RTXARR_SHARED_DATA", "not-given")) / "geom" / "tu_dgcnn"

# graphs, nodes, directed edges, classes, tags, nodes without edges, graphs in the ten tests
FIGURES = {
    "MUTAG": (188, 3_371, 7_442, 2, 7, 0, 180),
    "PTC": (344, 8_792, 17_862, 2, 19, 0, 340),
    "PROTEINS": (1_113, 43_471, 162_088, 2, 3, 5, 1_110),
    "ENZYMES": (600, 19_580, 74_564, 6, 3, 106, None),
    "IMDBBINARY": (1_000, 19_773, 193_062, 2, 1, 0, None),
}


def figures(data):
    batch = data.batch(np.arange(data.n_graphs))
    alone = int(((batch.in_degrees == 0) & (batch.out_degrees == 0)).sum())
    tested = sorted(np.concatenate([test for _, test in data.folds]).tolist())
    assert len(set(tested)) == len(tested)
    found = (batch.n_graphs, batch.n_nodes, batch.n_edges, data.n_classes, data.n_tags, alone)
    return (*found, len(tested))


def test_mutag():
    data = geom.load_mutag(device="cpu")
    assert figures(data) == FIGURES["MUTAG"]
    assert np.bincount(data.labels).tolist() == [63, 125]
    assert len(data.folds) == 10
    for train, test in data.folds:
        assert len(test) == 18
        assert not set(train.tolist()) & set(test.tolist())
    for graph in data.graphs:
        assert geom.to_undirected(graph).n_edges == graph.n_edges
        assert not (graph.src == graph.dst).any()
        assert geom.connected_components(graph).max() == 0
    batch = data.batch(np.array([3, 0]))
    assert batch.graph["label"].tolist() == data.labels[[3, 0]].tolist()
    assert batch[1].nodes["tag"].tolist() == data.graphs[0].nodes["tag"].tolist()


def test_karate():
    graph = geom.load_karate(device="cpu")
    club = nx.karate_club_graph()
    assert set(zip(graph.src.tolist(), graph.dst.tolist(), strict=True)) == {
        *club.edges,
        *((v, u) for u, v in club.edges),
    }
    sides = [club.nodes[i]["club"] == "Officer" for i in range(34)]
    assert graph.nodes["label"].tolist() == sides


@pytest.mark.skipif(not FOLDER.is_dir(), reason="needs RTXARR_SHARED_DATA with geom/tu_dgcnn")
@pytest.mark.parametrize("name", FIGURES)
def test_figures_of_larger_sets(name):
    found = figures(geom.read_dgcnn(FOLDER / name, device="cpu"))
    assert found[:-1] == FIGURES[name][:-1]
    assert FIGURES[name][-1] in (found[-1], None)


def write(tmp_path, text):
    folder = tmp_path / "TINY"
    folder.mkdir(exist_ok=True)
    (folder / "TINY.txt").write_text(text)
    return folder


def test_reading_tags_attributes_and_graphs_without_nodes(tmp_path):
    folder = write(tmp_path, "3\n2 5\n7 1 1 0.5 1\n-1 1 0 2.5 3\n0 -5\n1 5\n7 0 8 9\n")
    (folder / "10fold_idx").mkdir()
    (folder / "10fold_idx" / "train_idx-1.txt").write_text("0\n2\n")
    (folder / "10fold_idx" / "test_idx-1.txt").write_text("1\n")
    data = geom.read_dgcnn(folder, device="cpu")
    assert repr(data) == "GraphSet(3 graphs, 2 classes, 2 tags, 1 folds)"
    assert data.labels.tolist() == [1, 0, 1]
    assert [graph.n_nodes for graph in data.graphs] == [2, 0, 1]
    first, _, last = data.graphs
    assert first.nodes["tag"].tolist() == [1, 0]
    assert first.nodes["attributes"].tolist() == [[0.5, 1.0], [2.5, 3.0]]
    assert (first.src.tolist(), first.dst.tolist()) == ([0, 1], [1, 0])
    assert last.n_edges == 0
    assert [part.tolist() for part in data.folds[0]] == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"TINY.txt:1 must have the number of graphs, got ''"),
        ("1\n2\n", r"TINY.txt:2 must have the number of nodes and the class of a graph, got '2'"),
        ("1\n1 0\n", r"TINY.txt:3 must have the tag and the number of neighbours of a node"),
        ("1\n1 0\n0 1 1\n", r"TINY.txt:3 must have 1 neighbours in \[0, 1\), got '1'"),
        ("1\n1 0\n0 2 0\n", r"TINY.txt:3 must have 2 neighbours in \[0, 1\), got '0'"),
        ("1\n1 0\n0 0 word\n", r"TINY.txt:3 must have 0 neighbours"),
    ],
)
def test_text_in_another_format(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        geom.read_dgcnn(write(tmp_path, text))


def test_licences_and_plain_arrays():
    folder = files("rtxarr.data") / "bundled"
    assert "Muhan Zhang" in (folder / "LICENSE.mutag.txt").read_text()
    for name in ("mutag", "karate"):
        assert f"`{name}.npz`" in (folder / "README.md").read_text()
        with np.load(folder / f"{name}.npz", allow_pickle=False) as archive:
            assert all(archive[key].dtype.kind in "iu" for key in archive.files)


@pytest.mark.gpu
def test_on_the_gpu():
    import cupy

    data = geom.load_mutag(device="cuda:0")
    batch = data.batch(data.folds[0][1])
    assert isinstance(batch.indices, cupy.ndarray)
    assert batch.n_graphs == 18
    assert geom.load_karate(device="cuda:0").device == "cuda:0"
