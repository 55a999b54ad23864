"""Graphs of several kinds of nodes, and layers over their relations."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom, nn
from rtxarr.testing import assert_close, gradcheck

WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")
REVIEWS = ("author", "reviews", "paper")
EDGES = {
    WRITES: (np.array([0, 1, 1, 0]), np.array([0, 0, 2, 0])),
    CITES: (np.array([1, 2]), np.array([0, 2])),
    REVIEWS: (np.array([], int), np.array([], int)),
}
COUNTS = {"author": 2, "paper": 4, "venue": 0}


def library(**options):
    return geom.HeteroGraph.from_edges(EDGES, COUNTS, **options)


def test_kinds_and_relations():
    x = np.arange(4.0)
    graph = library(nodes={"paper": {"x": x}})
    assert graph.kinds == ("author", "paper", "venue")
    assert graph.relations == (WRITES, CITES, REVIEWS)
    assert graph.n_edges == 6
    assert graph.nodes["paper"]["x"] is x
    assert dict(graph.nodes["venue"]) == {}
    assert (graph[WRITES].n_src, graph[WRITES].n_dst) == (2, 4)
    assert_close(graph[WRITES] @ np.array([1.0, 10.0]), np.array([12.0, 0.0, 10.0, 0.0]))
    turned = graph.T["paper", "writes", "author"]
    assert_close(turned @ x, np.array([0.0, 2.0]))
    with pytest.raises(KeyError, match="there is no relation"):
        graph["author", "cites", "paper"]
    assert graph.to_device("cpu").nodes["paper"]["x"] is x


def test_times():
    graph = library(edges={WRITES: {"time": np.array([4, 1, 2, 3])}})
    seen = graph.before(3)
    assert seen[WRITES].edges["time"].tolist() == [1, 2]
    assert seen[CITES].n_edges == 2
    assert graph.before(3, inclusive=True)[WRITES].n_edges == 3


class Sum(nn.Module):
    def forward(self, graph, x):
        return graph @ (x[0] if isinstance(x, tuple) else x)


def outputs(aggr, x, **options):
    layer = geom.HeteroConv({WRITES: Sum(), CITES: Sum(), REVIEWS: Sum()}, aggr=aggr, **options)
    return layer(library(), x)["paper"]


X = {"author": np.array([[-1.0], [-10.0]]), "paper": np.array([[1.0], [2.0], [-3.0], [4.0]])}


# By hand: writes gives -12, -, -10, - and cites gives 2, -, -3, -; reviews gives nothing.
@pytest.mark.parametrize(
    ("aggr", "wanted"),
    [
        ("sum", [-10.0, 0.0, -13.0, 0.0]),
        ("mean", [-5.0, 0.0, -6.5, 0.0]),
        ("max", [2.0, 0.0, -3.0, 0.0]),
        ("min", [-12.0, 0.0, -10.0, 0.0]),
    ],
)
def test_outputs_of_relations_are_put_together(aggr, wanted):
    assert_close(outputs(aggr, X)[:, 0], np.array(wanted))


def test_no_edge_is_no_zero():
    """dgl#3564: the largest of {-2} and {} is -2."""
    graph = geom.HeteroGraph.from_edges(
        {WRITES: (np.array([0]), np.array([0])), REVIEWS: EDGES[REVIEWS]},
        {"author": 1, "paper": 1},
    )
    x = {"author": np.array([[-2.0]]), "paper": np.zeros((1, 1))}
    for aggr in ("max", "min", "mean", "sum"):
        layer = geom.HeteroConv({WRITES: Sum(), REVIEWS: Sum()}, aggr=aggr)
        assert_close(layer(graph, x)["paper"], np.array([[-2.0]]))
    layer = geom.HeteroConv({WRITES: Sum(), REVIEWS: Sum()}, aggr="max", skip_empty=False)
    assert_close(layer(graph, x)["paper"], np.array([[0.0]]))


def test_infinities_stay():
    x = {"author": np.array([[np.inf], [1.0]]), "paper": np.full((4, 1), -np.inf)}
    assert_close(outputs("max", x)[:, 0], np.array([np.inf, 0.0, 1.0, 0.0]))


def test_all_relations_in_any_case():
    assert_close(outputs("mean", X, skip_empty=False)[:, 0], np.array([-10.0, 0.0, -13.0, 0.0]) / 3)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min"])
def test_gradients(aggr):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 2)), rng.standard_normal((4, 2))
    gradcheck(lambda a, p: outputs(aggr, {"author": a, "paper": p}), x)


class Project(nn.Module):
    def __init__(self):
        self.lin = nn.Linear(1, 2)

    def forward(self, graph, x):
        return graph @ self.lin(x[0])


def test_parameters_have_the_names_of_their_relations():
    layer = geom.HeteroConv({WRITES: Project()})
    names = [name for name, _ in layer.named_parameters()]
    assert names == [f"convs.<author___writes___paper>.lin.{what}" for what in ("weight", "bias")]
    out = layer(library(), {kind: x.astype(np.float32) for kind, x in X.items()})
    assert list(out) == ["paper"]
    rx.sum(out["paper"]).backward()
    assert layer.convs["<author___writes___paper>"].lin.weight.grad is not None


def test_bad_hetero_graphs():
    graph = library()[WRITES]
    with pytest.raises(ValueError, match=r"must have 3 sources, got 2"):
        geom.HeteroGraph({WRITES: graph}, {"author": 3, "paper": 4})
    with pytest.raises(ValueError, match="n_nodes must have each kind of"):
        geom.HeteroGraph({WRITES: graph}, {"author": 2})
    with pytest.raises(ValueError, match="n_nodes must have each kind of"):
        geom.HeteroGraph.from_edges({WRITES: EDGES[WRITES]}, {"author": 2})
    with pytest.raises(TypeError, match="a relation must be"):
        geom.HeteroGraph({"writes": graph}, COUNTS)
    with pytest.raises(ValueError, match="nodes must be of author, paper, venue, got book"):
        library(nodes={"book": {}})
    with pytest.raises(
        ValueError, match=r"nodes\['paper'\]\['x'\] must have an entry for each of 4"
    ):
        library(nodes={"paper": {"x": np.ones(2)}})
    with pytest.raises(ValueError, match="edges must be of relations in pairs, got"):
        library(edges={("venue", "prints", "paper"): {}})
    with pytest.raises(IndexError, match=r"src must lie in \[0, 2\)"):
        geom.HeteroGraph.from_edges({WRITES: (np.array([2]), np.array([0]))}, COUNTS)
    with pytest.raises(ValueError, match="aggr must be one of sum, mean, max, min, got 'median'"):
        geom.HeteroConv({WRITES: Sum()}, aggr="median")
    with pytest.raises(ValueError, match="at least one relation"):
        geom.HeteroConv({})
