import subprocess
import sys
from importlib.resources import files
from pydoc_data.topics import topics

import numpy as np
import pytest

from rtxarr.data import load_citeseer, load_cora, load_digits, load_topics_text

LOADERS = {"cora": load_cora, "citeseer": load_citeseer}
# n_nodes, n_edges, n_features, n_classes, train, isolated, unlabelled, largest degree: the figures
# of the data sets' papers and their copies elsewhere.
FIGURES = {
    "cora": (2708, 10556, 1433, 7, 140, 0, 0, 168),
    "citeseer": (3327, 9104, 3703, 6, 120, 48, 15, 99),
}


@pytest.fixture(params=LOADERS, scope="module")
def graph(request):
    loaded = LOADERS[request.param](device="cpu")
    return loaded, FIGURES[request.param]


def test_figures(graph):
    data, (n_nodes, n_edges, n_features, n_classes, n_train, isolated, unlabelled, largest) = graph
    assert (data.n_nodes, data.n_edges, data.n_features) == (n_nodes, n_edges, n_features)
    assert data.n_classes == n_classes
    assert set(data.labels.tolist()) - {-1} == set(range(n_classes))
    assert (data.labels == -1).sum() == unlabelled
    degrees = np.bincount(data.edge_index[0], minlength=n_nodes)
    assert (degrees == 0).sum() == isolated
    assert degrees.max() == largest
    assert (len(data.train), len(data.val), len(data.test)) == (n_train, 500, 1000)
    assert f"{n_nodes} nodes, {n_edges} edges" in repr(data)


def test_types(graph):
    data, _ = graph
    assert data.x_data.dtype == np.float32
    for name in ("x_indices", "x_indptr", "edge_index", "labels", "train", "val", "test"):
        assert getattr(data, name).dtype == np.int64, name
    assert data.x_indptr.shape == (data.n_nodes + 1,)
    assert data.x_shape == (data.n_nodes, data.n_features)


def test_edges_are_symmetric_sorted_and_simple(graph):
    source, target = graph[0].edge_index
    pairs = list(zip(source.tolist(), target.tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    assert {(b, a) for a, b in pairs} == set(pairs)
    assert not (source == target).any()


def test_splits_are_disjoint_and_labelled(graph):
    data, _ = graph
    nodes = np.concatenate([data.train, data.val, data.test])
    assert len(set(nodes.tolist())) == len(nodes)
    assert (data.labels[nodes] >= 0).all()
    assert (np.bincount(data.labels[data.train]) == 20).all()


def test_dense_features_match_scipy(graph):
    from scipy.sparse import csr_array

    data, _ = graph
    want = csr_array((data.x_data, data.x_indices, data.x_indptr), shape=data.x_shape).toarray()
    dense = data.features()
    assert dense.dtype == np.float32
    np.testing.assert_array_equal(dense, want)
    assert set(np.unique(dense)) == {0.0, 1.0}


def test_digits():
    digits = load_digits(device="cpu")
    assert (digits.images.shape, digits.images.dtype) == ((1797, 8, 8), np.uint8)
    assert (digits.labels.shape, digits.labels.dtype) == ((1797,), np.int64)
    assert (digits.images.min(), digits.images.max()) == (0, 16)
    assert np.bincount(digits.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert digits.labels[:10].tolist() == list(range(10))
    assert digits.images[0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]  # UCI's first row
    assert repr(digits) == "Digits(1797 images, 10 classes)"


def test_digits_split():
    digits = load_digits(device="cpu")
    parts = (digits.train, digits.val, digits.test)
    assert [len(part) for part in parts] == [1197, 300, 300]
    assert np.sort(np.concatenate(parts)).tolist() == list(range(1797))
    for part in parts[1:]:
        assert part.dtype == np.int64
        assert (np.bincount(digits.labels[part]) == 30).all()


def test_topics_text():
    data = load_topics_text(device="cpu")
    assert 100_000 < len(data.text) < 2_000_000
    assert data.vocabulary == "".join(sorted(set(data.text)))
    assert data.tokens.dtype == np.int64
    assert data.decode(data.tokens) == data.text
    np.testing.assert_array_equal(data.encode(data.text), data.tokens)
    np.testing.assert_array_equal(np.concatenate([data.train, data.val]), data.tokens)
    assert len(data.train) == len(data.text) * 9 // 10
    assert repr(data).startswith(f"TopicsText({len(data.text)} characters")


def test_topics_text_has_every_paragraph_once():
    text = load_topics_text(device="cpu").text
    found = text.rstrip("\n").split("\n\n")
    wanted = {p for topic in topics.values() for p in topic.strip().split("\n\n")}
    assert len(found) == len(set(found))
    assert {p.strip("\n") for p in found} == {p.strip("\n") for p in wanted}


def test_encode_refuses_unknown_characters():
    with pytest.raises(ValueError, match="text must use the vocabulary, got '♥'"):
        load_topics_text(device="cpu").encode("I ♥ it")


def test_licences_lie_beside_the_data():
    folder = files("rtxarr.data") / "bundled"
    assert "MIT License" in (folder / "LICENSE.planetoid.txt").read_text()
    assert "BSD 3-Clause" in (folder / "LICENSE.digits.txt").read_text()
    readme = (folder / "README.md").read_text()
    for file in folder.iterdir():
        assert file.name == "README.md" or file.name in readme


def test_the_archives_hold_no_pickles():
    for name in ("cora", "citeseer", "digits"):
        with np.load(files("rtxarr.data") / "bundled" / f"{name}.npz", allow_pickle=False) as z:
            assert all(z[key].dtype.kind in "iuf" for key in z.files)


def test_importing_takes_no_heavy_package():
    code = (
        "import sys, rtxarr.data\n"
        "rtxarr.data.load_cora(device='cpu')\n"
        "print({'scipy', 'numba', 'cupy', 'safetensors'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.gpu
@pytest.mark.parametrize("device", [None, "cuda:0"])
def test_on_the_gpu(device):
    import cupy

    cora = load_cora(device=device)
    assert isinstance(cora.edge_index, cupy.ndarray)
    np.testing.assert_array_equal(cora.features().get(), load_cora(device="cpu").features())
    assert isinstance(load_digits(device=device).images, cupy.ndarray)
    text = load_topics_text(device=device)
    assert isinstance(text.train, cupy.ndarray)
    assert text.decode(text.encode("if x:")) == "if x:"
