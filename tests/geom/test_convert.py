"""Graphs of other libraries: what comes over, and that the way back gives the same graph.

cudf, cugraph, torch and DGL are played by stand-ins with what the conversions use of them.
"""

import sys
import types

import networkx as nx
import numpy as np
import pytest
from scipy import sparse

from rtxarr import geom
from rtxarr.testing import assert_close

# ------------------------------------------------------------------------------ sparse matrices


def test_scipy_and_back(multigraph):
    matrix = geom.to_scipy(multigraph)
    back = geom.from_scipy(matrix)
    assert_close(back.indptr, multigraph.indptr, exact=True)
    assert_close(back.indices, multigraph.indices, exact=True)
    assert_close(back.edges["weight"], multigraph.stored(multigraph.edges["weight"]), exact=True)
    x = multigraph.nodes["x"]
    assert_close(geom.to_scipy(multigraph, np.ones(multigraph.n_edges)) @ x, multigraph @ x)


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "lil", "dok"])
def test_every_form_of_matrix(form):
    dense = np.array([[0, 2, 0], [1, 0, 3]])
    graph = geom.from_scipy(sparse.csr_array(dense).asformat(form))
    assert (graph.n_src, graph.n_dst) == (3, 2)
    again = np.zeros((2, 3), int)
    again[graph.dst, graph.src] = graph.edges["weight"]
    assert_close(again, dense, exact=True)


def test_duplicates_and_zeros_are_edges():
    entries = np.array([1.0, 2.0, 0.0]), (np.array([1, 1, 0]), np.array([0, 0, 1]))
    graph = geom.from_scipy(sparse.coo_array(entries, shape=(2, 2)))
    assert graph.src.tolist() == [0, 0, 1]
    assert graph.dst.tolist() == [1, 1, 0]
    assert graph.edges["weight"].tolist() == [1.0, 2.0, 0.0]
    rows = sparse.csr_array((np.ones(2), np.array([1, 1]), np.array([0, 2, 2])), shape=(2, 2))
    assert geom.from_scipy(rows).n_edges == 2


def test_matrices_share_their_memory():
    rows = sparse.csr_array(np.array([[0.0, 2.0], [1.0, 0.0]]))
    graph = geom.from_scipy(rows)
    assert np.shares_memory(graph.indices, rows.indices)
    assert graph.edges["weight"] is rows.data
    assert np.shares_memory(geom.to_scipy(graph).data, rows.data)
    assert np.shares_memory(geom.to_scipy(graph).indices, rows.indices)
    columns = rows.tocsc()
    assert np.shares_memory(geom.from_scipy(columns).T.indices, columns.indices)


def test_bad_matrices():
    with pytest.raises(TypeError, match="matrix must be a sparse matrix, got ndarray"):
        geom.from_scipy(np.ones((2, 2)))
    graph = geom.from_scipy(sparse.csr_array(np.ones((2, 2))))
    with pytest.raises(ValueError, match=r"weight must be an array of shape \(4,\)"):
        geom.to_scipy(graph, np.ones(3))


# ------------------------------------------------------------------------------------- networkx


def test_networkx_and_back(multigraph, same):
    there = geom.to_networkx(multigraph)
    assert there.number_of_nodes() == multigraph.n_nodes
    assert there.number_of_edges() == multigraph.n_edges
    if multigraph.n_edges:
        back, ids = geom.from_networkx(there, nodes=["x"], edges=["weight", "number"])
        assert ids == list(range(multigraph.n_nodes))
        same(back, multigraph)
    else:
        assert geom.from_networkx(there)[0].n_nodes == multigraph.n_nodes


def test_undirected_edges_lead_both_ways():
    path = nx.Graph()
    path.add_nodes_from("cab")
    path.add_edge("a", "b", weight=2.0)
    path.add_edge("c", "c", weight=3.0)
    graph, ids = geom.from_networkx(path, edges=["weight"])
    assert ids == ["c", "a", "b"]
    assert list(zip(graph.src, graph.dst, graph.edges["weight"], strict=True)) == [
        (0, 0, 3.0),
        (1, 2, 2.0),
        (2, 1, 2.0),
    ]


def test_directed_edges_and_parallel_ones():
    graph, _ = geom.from_networkx(nx.DiGraph([(0, 1), (1, 2)]))
    assert (graph.src.tolist(), graph.dst.tolist()) == ([0, 1], [1, 2])
    graph, _ = geom.from_networkx(nx.MultiDiGraph([(0, 1), (0, 1), (2, 0)]))
    assert (graph.src.tolist(), graph.dst.tolist()) == ([0, 0, 2], [1, 1, 0])
    graph, _ = geom.from_networkx(nx.MultiGraph([(0, 1), (0, 1)]))
    assert graph.n_edges == 4


def test_names_and_attributes_of_networkx():
    graph = geom.Graph.from_edges(np.array([0]), np.array([1]), n_nodes=2)
    assert list(geom.to_networkx(graph, "ab").edges(keys=True)) == [("a", "b", 0)]
    with pytest.raises(ValueError, match="ids must be 2 different names, got 1"):
        geom.to_networkx(graph, "aa")
    with pytest.raises(ValueError, match="every node must have 'x', got node 0 without it"):
        geom.from_networkx(nx.Graph([(0, 1)]), nodes=["x"])


# ----------------------------------------------------------------- PyTorch Geometric and DGL


class Tensor:
    """Something of another library that exports DLPack."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def detach(self):
        return self

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


class Store(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    __setattr__ = dict.__setitem__


class HeteroStore(dict):
    def __missing__(self, key):
        self[key] = Store()
        return self[key]

    @property
    def node_types(self):
        return [key for key in self if isinstance(key, str)]

    @property
    def edge_types(self):
        return [key for key in self if isinstance(key, tuple)]


@pytest.fixture
def stand_ins(monkeypatch):
    """Let torch, torch_geometric, cudf and cugraph be stand-ins."""
    modules = {
        "torch": {"from_dlpack": Tensor, "Tensor": Tensor},
        "torch_geometric": {},
        "torch_geometric.data": {"Data": Store, "HeteroData": HeteroStore},
        "cudf": {"Series": Column, "DataFrame": Frame},
        "cugraph": {"Graph": CuGraph},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def no_packages(monkeypatch):
    for name in ("torch", "torch_geometric", "cudf", "cugraph", "networkx"):
        monkeypatch.setitem(sys.modules, name, None)


def test_pyg_and_back(stand_ins, multigraph, same):
    data = geom.to_pyg(multigraph)
    assert data.edge_index.values.tolist() == [multigraph.src.tolist(), multigraph.dst.tolist()]
    back = geom.from_pyg(data, nodes=["x"], edges=["weight", "number"])
    same(back, multigraph)
    assert np.shares_memory(back.nodes["x"], multigraph.nodes["x"]) or not multigraph.n_nodes


def test_batches_of_pyg(stand_ins, multigraphs, same):
    batch = geom.Batch.from_graphs(multigraphs, graph={"y": np.arange(6)})
    back = geom.from_pyg(geom.to_pyg(batch), edges=["weight", "number"], graph=["y"])
    assert isinstance(back, geom.Batch)
    for got, want in zip(back.unbatch(), multigraphs, strict=True):
        same(got, want)
    assert back.graph["y"].tolist() == list(range(6))


def test_hetero_data_and_back(stand_ins, same):
    relation = ("author", "writes", "paper")
    graph = geom.HeteroGraph.from_edges(
        {relation: (np.array([1, 0, 0]), np.array([2, 0, 0]))},
        {"author": 3, "paper": 4, "venue": 0},
        nodes={"paper": {"x": np.arange(4.0)}},
    )
    back = geom.from_pyg(geom.to_pyg(graph))
    assert dict(back.n_nodes) == dict(graph.n_nodes)
    same(back[relation], graph[relation])
    assert_close(back.nodes["paper"]["x"], np.arange(4.0), exact=True)


def test_arrays_of_pyg_are_declared(stand_ins):
    """PyG#9912: with one edge, y of one entry is not the edges'."""
    data = Store(
        edge_index=Tensor([[0], [0]]),
        num_nodes=1,
        x=Tensor([[1.0]]),
        y=Tensor([5]),
        edge_attr=Tensor([2.0]),
    )
    graph = geom.from_pyg(data)
    assert list(graph.nodes) == ["x"]
    assert list(graph.edges) == ["edge_attr"]
    assert list(geom.from_pyg(data, nodes=["y"], edges=[]).nodes) == ["y"]
    with pytest.raises(ValueError, match="the data must have 'z'"):
        geom.from_pyg(data, nodes=["z"])
    with pytest.raises(ValueError, match="the data must have 'edge_index'"):
        geom.from_pyg(Store(num_nodes=2))
    with pytest.raises(ValueError, match="num_nodes must be set"):
        geom.from_pyg(Store(num_nodes=None))
    with pytest.raises(ValueError, match="one array of a name, got two called x"):
        geom.to_pyg(graph.replace(edges={"x": np.ones(1)}))


def test_isolated_nodes_of_pyg(stand_ins, same):
    data = Store(edge_index=Tensor(np.zeros((2, 0), np.int64)), num_nodes=3)
    assert geom.from_pyg(data).n_nodes == 3


class DGLGraph:
    def __init__(self, counts, edges, features=()):
        self.counts, self.lists = counts, edges
        self.ntypes, self.canonical_etypes = list(counts), list(edges)
        held = dict(features)
        self.nodes = {k: types.SimpleNamespace(data=held.get(k, {})) for k in counts}
        self.edge_data = {k: types.SimpleNamespace(data=held.get(k, {})) for k in edges}

    def num_nodes(self, kind):
        return self.counts[kind]

    @property
    def edges(self):
        outer = self

        class View:
            def __call__(self, *, etype, order):
                assert order == "eid"
                return tuple(Tensor(x) for x in outer.lists[etype])

            def __getitem__(self, etype):
                return outer.edge_data[etype]

        return View()


def test_dgl():
    one = ("_N", "_E", "_N")
    graph = geom.from_dgl(
        DGLGraph(
            {"_N": 4},
            {one: ([2, 0, 0], [1, 0, 0])},
            {"_N": {"feat": Tensor(np.ones((4, 2)))}, one: {"w": Tensor([1.0, 2.0, 3.0])}},
        )
    )
    assert isinstance(graph, geom.Graph)
    assert (graph.n_nodes, graph.src.tolist(), graph.dst.tolist()) == (4, [2, 0, 0], [1, 0, 0])
    assert graph.edges["w"].tolist() == [1.0, 2.0, 3.0]
    assert graph.nodes["feat"].shape == (4, 2)
    relation = ("a", "r", "b")
    graph = geom.from_dgl(DGLGraph({"a": 1, "b": 2}, {relation: ([0], [1])}))
    assert (graph[relation].n_src, graph[relation].n_dst) == (1, 2)


# ----------------------------------------------------------------------------------- RAPIDS


class Column:
    def __init__(self, values):
        self.values = np.asarray(values)


class Frame(dict):
    def __init__(self, columns):
        super().__init__({name: Column(values) for name, values in columns.items()})


class CuGraph:
    def __init__(self, directed):
        assert directed
        self.renumbered = False

    def from_cudf_adjlist(self, offsets, indices, weights):
        self.parts = offsets, indices, weights

    def view_adj_list(self):
        return self.parts

    def unrenumber(self, frame, column, preserve_order):
        assert preserve_order
        return Frame({column: 100 - 10 * frame[column].values})


def test_tables_of_edges():
    frame = Frame({"from": [30, 10, 10], "to": [10, 20, 20], "w": [1.0, 2.0, 3.0]})
    graph, ids = geom.from_cudf(frame, "from", "to", edges=["w"])
    assert ids.tolist() == [10, 20, 30]
    assert ids[graph.src].tolist() == [30, 10, 10]
    assert ids[graph.dst].tolist() == [10, 20, 20]
    assert graph.edges["w"].tolist() == [1.0, 2.0, 3.0]
    every = np.array([30, 40, 20, 10])
    graph, ids = geom.from_cudf(frame, "from", "to", ids=every)
    assert ids is every
    assert graph.n_nodes == 4
    assert ids[graph.src].tolist() == [30, 10, 10]


def test_tables_of_strings_and_of_nothing():
    names = np.array(["b", "a"], dtype=object), np.array(["a", "c"], dtype=object)
    graph, ids = geom.from_cudf(Frame(dict(zip("st", names, strict=True))), "s", "t")
    assert ids.tolist() == ["a", "b", "c"]
    assert graph.src.tolist() == [1, 0]
    empty = Frame({"s": np.array([], int), "t": np.array([], int)})
    graph, ids = geom.from_cudf(empty, "s", "t")
    assert (graph.n_nodes, len(ids)) == (0, 0)
    graph, ids = geom.from_cudf(empty, "s", "t", ids=np.array([5, 3]))
    assert graph.n_nodes == 2


def test_tables_and_back(stand_ins, multigraph, same):
    frame = geom.to_cudf(multigraph, "from", "to")
    assert set(frame) == {"from", "to", "weight", "number"}
    options = {"ids": np.arange(multigraph.n_nodes), "edges": ["weight", "number"]}
    back, _ = geom.from_cudf(frame, "from", "to", **options)
    same(back.replace(nodes=multigraph.nodes), multigraph)
    names = np.array([f"n{i}" for i in range(multigraph.n_nodes)], dtype=object)
    frame = geom.to_cudf(multigraph, ids=names, edges=[])
    assert set(frame) == {"src", "dst"}
    back, ids = geom.from_cudf(frame, "src", "dst", ids=names)
    assert ids is names
    same(back.replace(nodes=multigraph.nodes, edges=multigraph.edges), multigraph)
    with pytest.raises(ValueError, match="ids must have an entry for each of"):
        geom.to_cudf(multigraph, ids=np.arange(multigraph.n_nodes + 1))


def test_bad_tables():
    frame = Frame({"s": [1, 2], "t": [2, 3]})
    with pytest.raises(ValueError, match="ids must hold every node of the edges, got none for 3"):
        geom.from_cudf(frame, "s", "t", ids=np.array([1, 2]))
    with pytest.raises(ValueError, match="ids must hold every node"):
        geom.from_cudf(frame, "s", "t", ids=np.array([], int))
    with pytest.raises(ValueError, match="ids must hold each node once"):
        geom.from_cudf(frame, "s", "t", ids=np.array([1, 2, 2, 3]))
    with pytest.raises(TypeError, match="s must hold integers or strings, got float64"):
        geom.from_cudf(Frame({"s": [1.0, np.nan], "t": [2, 3]}), "s", "t")
    with pytest.raises(ValueError, match="t must have no missing values"):
        geom.from_cudf(Frame({"s": ["a"], "t": np.array([None], object)}), "s", "t")
    with pytest.raises(TypeError, match="together must hold integers"):
        mixed = {"s": np.array([2**63], np.uint64), "t": np.array([-1])}
        geom.from_cudf(Frame(mixed), "s", "t")


def test_isolated_nodes_reach_cugraph_and_come_back(stand_ins):
    """cugraph#4326."""
    graph = geom.Graph.from_edges(np.array([0]), np.array([1]), n_nodes=3)
    back, ids = geom.from_cugraph(geom.to_cugraph(graph))
    assert (back.n_nodes, ids.tolist()) == (3, [0, 1, 2])
    assert_close(back @ np.ones((3, 1)), np.array([[0.0], [1.0], [0.0]]))


def test_cugraph_and_back(stand_ins, multigraph):
    there = geom.to_cugraph(multigraph)
    offsets, indices, _ = there.view_adj_list()
    assert offsets.values.dtype == indices.values.dtype == np.int32
    back, _ = geom.from_cugraph(there)
    assert back.n_nodes == multigraph.n_nodes
    assert_close(back.indptr, multigraph.indptr, exact=True)
    assert np.shares_memory(back.T.indices, indices.values) or not multigraph.n_edges
    got = sorted(zip(back.src, back.dst, back.edges["weight"], strict=True))
    wanted = zip(multigraph.src, multigraph.dst, multigraph.edges["weight"], strict=True)
    assert got == sorted(wanted)


def test_nodes_that_cugraph_has_renumbered(stand_ins):
    graph = geom.Graph.from_edges(np.array([0]), np.array([1]), n_nodes=3)
    there = geom.to_cugraph(graph)
    there.renumbered = True
    assert geom.from_cugraph(there)[1].tolist() == [100, 90, 80]


def test_missing_packages_are_named(no_packages):
    graph = geom.Graph.from_edges(np.array([0]), np.array([1]), n_nodes=3)
    with pytest.raises(ImportError, match="to_pyg needs torch and torch_geometric"):
        geom.to_pyg(graph)
    with pytest.raises(ImportError, match="to_cugraph needs cudf and cugraph"):
        geom.to_cugraph(graph)
    with pytest.raises(ImportError, match="to_cudf needs cudf"):
        geom.to_cudf(graph)
    with pytest.raises(ImportError, match="to_networkx needs networkx"):
        geom.to_networkx(graph)


# --------------------------------------------------------------------- the libraries themselves


@pytest.mark.compare
def test_pyg_itself(multigraphs, same):
    data = pytest.importorskip("torch_geometric.data")
    there = [geom.to_pyg(graph) for graph in multigraphs]
    for graph, one in zip(multigraphs, there, strict=True):
        assert one.num_nodes == graph.n_nodes
        same(geom.from_pyg(one, edges=["weight", "number"]), graph)
    batch = geom.from_pyg(data.Batch.from_data_list(there), edges=["weight", "number"])
    for got, want in zip(batch.unbatch(), multigraphs, strict=True):
        same(got, want)
    relation = ("a", "r", "b")
    hetero = geom.HeteroGraph.from_edges(
        {relation: (np.array([0]), np.array([1]))},
        {"a": 1, "b": 3},
        nodes={"a": {"x": np.ones((1, 2))}},
    )
    back = geom.from_pyg(geom.to_pyg(hetero))
    same(back[relation], hetero[relation])
    assert back.nodes["a"]["x"].shape == (1, 2)


def test_pandas_itself():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"s": ["x", "y"], "t": ["y", "y"], "w": [1.0, 2.0]})
    graph, ids = geom.from_cudf(frame, "s", "t", edges=["w"])
    assert ids.tolist() == ["x", "y"]
    assert graph.src.tolist() == [0, 1]
    assert graph.edges["w"].tolist() == [1.0, 2.0]
