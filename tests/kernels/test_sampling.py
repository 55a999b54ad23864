"""Drawing edges, numbering and walks: GPU code against numba's CPU code, to the bit."""

import numpy as np
import pytest

from rtxarr import _device, geom
from rtxarr.kernels import sampling
from rtxarr.testing import assert_close

PLACE = {"key": np.uint64(0x0123456789ABCDEF), "stream": np.uint64(0xFEDCBA9876543210)}


@pytest.fixture
def both(place, monkeypatch):
    """Give a function that calls another on the host and where kernels run, and compares."""

    def call(function, *arrays, **options):
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "runs_kernels", lambda x: False)
            want = function(*arrays, **options)
        moved = [_device.to_device(x, place) if isinstance(x, np.ndarray) else x for x in arrays]
        options = {
            name: _device.to_device(x, place) if isinstance(x, np.ndarray) else x
            for name, x in options.items()
        }
        got = function(*moved, **options)
        pairs = zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]
        for expected, found in pairs:
            assert expected.dtype == found.dtype
            assert_close(_device.to_device(found, "cpu"), expected, exact=True)
        return want

    return call


def rows(place, seed=0):
    """Give some rows of a graph with isolated nodes, a hub and edges of weight zero."""
    rng = np.random.default_rng(seed)
    n_nodes, most = (12, 9) if place == "cpu" else (5000, 70)
    degrees = rng.integers(0, most, n_nodes)
    degrees[[0, 3]], degrees[5] = 0, 4 * most
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    indices = rng.integers(0, n_nodes, indptr[-1]).astype(np.int32)
    weights = np.round(rng.random(indptr[-1]) * 4) / 4
    nodes = np.concatenate([[5, 0], rng.permutation(n_nodes)[: n_nodes - 2]])
    return indptr, indices, weights, nodes


@pytest.mark.parametrize("n", [-1, 0, 1, 3, 8])
def test_draws_are_those_of_the_host(place, both, n):
    indptr, indices, weights, nodes = rows(place)
    nodes = np.concatenate([nodes, [5, 0, 5, nodes[3]]])  # as many batches reach
    first, degrees = indptr[nodes], np.diff(indptr)[nodes]
    sums, available = both(sampling.sum_rows, indptr, weights)
    for replace in (False, True):
        both(sampling.draw, nodes, first, degrees, n, replace=replace, **PLACE)
        weighted = {"weights": weights, "sums": sums, "available": available[nodes]}
        both(sampling.draw, nodes, first, degrees, n, replace=replace, **weighted, **PLACE)
    both(sampling.draw_labor, first, degrees, indices, n, **PLACE)


def test_draws_from_hubs_are_those_of_the_host(place, both):
    """A hub of many pieces: what these draw does not fit into a block's memory at once."""
    small = place == "cpu"
    degrees = np.array([34, 3, 9, 0, 8] if small else [300_000, 3, 5000, 0, 2048, 2049, 128, 129])
    rng = np.random.default_rng(4)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    indices = rng.integers(0, 2**40, indptr[-1])
    weights = rng.random(indptr[-1])
    weights[rng.random(weights.size) < 0.3] = 0
    weights[2 : degrees[0] // 2] = 0  # whole pieces without a weight
    nodes = np.concatenate([[0, 2, 0], np.arange(degrees.size)])
    first, degrees = indptr[nodes], degrees[nodes]
    sums, available = both(sampling.sum_rows, indptr, weights)
    weighted = {"weights": weights, "sums": sums, "available": available[nodes]}
    for n in (3,) if small else (15, 100, 1024):
        both(sampling.draw, nodes, first, degrees, n, **weighted, **PLACE)
        both(sampling.draw_labor, first, degrees, indices, n, **PLACE)


def test_beginnings_of_a_row_are_drawn_each_for_itself(place, both):
    """As before different moments: of one node, in many pieces all together."""
    small = place == "cpu"
    degree, n = (34, 3) if small else (9000, 15)
    rng = np.random.default_rng(5)
    weights = np.round(rng.random(degree) * 4) / 4
    indptr = np.array([0, degree])
    sums, _ = both(sampling.sum_rows, indptr, weights)
    degrees = np.concatenate([[degree, 0, degree - 1, degree], rng.integers(0, degree, 60)])
    nodes = np.zeros_like(degrees)
    positive = np.concatenate([[0], np.cumsum(weights > 0)])
    given = {"weights": weights, "sums": sums, "available": positive[degrees], "prefixes": True}
    for replace in (False, True):
        for many in (-1, n, 1024):
            options = {"replace": replace, **given, **PLACE}
            offsets, edges = both(sampling.draw, nodes, nodes, degrees, many, **options)
            assert np.all(edges < np.repeat(degrees, np.diff(offsets)))
            assert np.all(weights[edges] > 0)


@pytest.mark.filterwarnings("ignore:.*overflow encountered")
def test_equal_arrivals_are_taken_in_order(place, both):
    """So small are the weights that no clock ever rings: all arrive at infinity."""
    degrees = np.array([5, 19] if place == "cpu" else [5, 100, 1000, 9000])
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    weights = np.full(indptr[-1], 5e-324)
    nodes = np.arange(degrees.size)
    _, edges = both(
        sampling.draw, nodes, indptr[:-1], degrees, 3, weights=weights, available=degrees, **PLACE
    )
    assert_close(edges, (indptr[:-1, None] + np.arange(3)).reshape(-1), exact=True)


def test_rows_after_the_last_batch_are_none(place, both):
    indptr, _, weights, nodes = rows(place, seed=5)
    _, available = both(sampling.sum_rows, indptr, weights)
    ptr = np.array([0, 3, 3, 7])
    for some in (None, available):
        want = sampling.look_up(indptr, nodes[:7], ptr, some)
        nodes[7:] = 2**62
        moved = [None if x is None else _device.to_device(x, place)
                 for x in (indptr, nodes, ptr, some)]  # fmt: skip
        got = sampling.look_up(*moved)
        for expected, found in zip(want, got, strict=True):
            found = _device.to_device(found, "cpu")
            assert_close(found[:7], expected, exact=True)
            assert not found[7:].any()


@pytest.mark.parametrize("cuts", [[0, 0], [0, 5], [0, 2, 2, 5], [0, 0, 5, 5]])
def test_offsets_are_cut_by_batches(place, cuts):
    ptr, offsets = np.array(cuts), np.array([0, 3, 3, 4, 9, 11])[: cuts[-1] + 1]
    moved = [_device.to_device(x, place) for x in (offsets, ptr)]
    cut, bounds = (_device.to_device(x, "cpu") for x in sampling.cut_offsets(*moved))
    assert bounds.tolist() == [cuts, offsets[cuts].tolist()]
    for batch, (begin, end) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        want = offsets[begin : end + 1] - offsets[begin]
        assert cut[begin + batch : end + batch + 1].tolist() == want.tolist()


def test_counts_of_many_rows_are_added_up(place):
    rng = np.random.default_rng(6)
    for size in (1, 5, 8, 70 if place == "cpu" else 3_000_001):
        counts = rng.integers(0, 9, size).astype(np.int32)
        for n, again, want in (
            (-1, False, counts),
            (3, False, np.minimum(counts, 3)),
            (3, True, np.where(counts > 0, 3, 0)),
        ):
            xp = _device.namespace(moved := _device.to_device(counts, place))
            got = _device.to_device(sampling.offsets_of(xp, moved, n, again), "cpu")
            assert_close(got, np.concatenate([[0], np.cumsum(want)]), exact=True)


def test_nothing_is_numbered(place, both):
    none, ptr = np.zeros(0, np.int64), np.array([0, 2, 2])
    nodes = np.array([7, 7])
    both(sampling.renumber, nodes, ptr, none.astype(np.int32), np.zeros(3, np.int64), 9)
    both(sampling.renumber, none, ptr[:1], none, ptr[:1], 9)
    both(sampling.renumber, none, 0 * ptr, nodes, ptr, 9)


def test_refuses_what_no_table_holds(place):
    none = _device.to_device(np.zeros(0, np.int64), place)
    src, ptr = (_device.to_device(np.array(x), place) for x in ([1, 2], [0, 2]))
    with pytest.raises(ValueError, match="sample fewer batches at once"):
        sampling.number_reached(none, 0 * ptr, src, ptr, 2**62)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_sources_and_numbers_are_gathered(place, both, dtype):
    rng = np.random.default_rng(7)
    indices, ids = rng.integers(0, 99, 50).astype(dtype), rng.permutation(50)
    both(sampling.gather_edges, rng.integers(0, 50, 23), 23, indices, ids)
    both(sampling.gather_edges, np.zeros(0, np.int64), 0, indices, ids)


def test_numbers_are_those_of_the_host(place, both):
    indptr, indices, _, nodes = rows(place, seed=1)
    cuts = [0, 2, 2, 7, nodes.size]
    first, degrees = indptr[nodes], np.diff(indptr)[nodes]
    offsets, edges = both(sampling.draw, nodes, first, degrees, 3, **PLACE)
    nodes[1] = nodes[0]  # a seed that comes twice
    ptr = np.array(cuts)
    local, reached, out_ptr = both(
        sampling.renumber, nodes, ptr, indices[edges], offsets[ptr], indptr.size - 1
    )
    for batch, (begin, end) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        mine = reached[out_ptr[batch] : out_ptr[batch + 1]]
        assert_close(mine[: end - begin], nodes[begin:end], exact=True)
        part = slice(offsets[begin], offsets[end])
        assert_close(mine[local[part]], indices[edges[part]].astype(np.int64), exact=True)
        assert len(set(mine[end - begin :])) == len(mine[end - begin :])


@pytest.mark.parametrize("weights", [(2**32, 2**32, 2**32), (1, 2**20, 2**32), (2**32, 1, 1)])
def test_walks_are_those_of_the_host(place, both, weights):
    indptr, indices, _, nodes = rows(place, seed=2)
    for begin, end in zip(indptr[:-1], indptr[1:], strict=True):
        indices[begin:end].sort()
    nodes = nodes[:3] if place == "cpu" else nodes
    weights = tuple(np.uint64(w) for w in weights)
    both(sampling.walks, nodes, 3, 6, indptr, indices, weights=weights, **PLACE)


@pytest.mark.parametrize("weights", [(5, 9, 2), (5, 2, 9), (1, 1, 2**32), (2**32, 1, 1)])
def test_candidates_are_accepted_in_proportion_to_their_weights(weights):
    from rtxarr.kernels._sampling_njit import _sampling

    back, near, far = (np.uint64(w) for w in weights)
    indices, before = np.array([7, 8, 1, 4, 4, 6, 0]), 6  # those of the node before: 1, 4, 4, 6
    for candidate, weight in ((6, back), (1, near), (4, near), (0, far), (5, far), (8, far)):
        for u in {0, *(min(w + i, 2**32) - 1 for w in weights for i in (0, 1))}:
            arguments = np.uint64(u), candidate, before, indices, 2, 6, back, near, far
            assert _sampling.accepts(*arguments) == (u < weight)


def test_negatives_are_those_of_the_host(place, both):
    indptr, indices, _, nodes = rows(place, seed=3)
    n_nodes = nodes.size
    linked = [np.unique(indices[a:b]) for a, b in zip(indptr[:-1], indptr[1:], strict=True)]
    linked[2] = np.arange(n_nodes)  # has edges to all
    indptr = np.concatenate([[0], np.cumsum([x.size for x in linked])])
    flat = np.concatenate(linked).astype(np.int64)
    src = np.concatenate([nodes, [2]])
    found = both(
        sampling.negatives, 7 + np.arange(src.size), src, 3, indptr, flat, n_nodes, **PLACE
    )
    for node, others in zip(src, found, strict=True):
        free = np.setdiff1d(np.arange(n_nodes), linked[node])
        assert np.isin(others, free).all() if free.size else (others == -1).all()


SAMPLERS = {
    "uniform": (geom.NeighborSampler, {}),
    "again": (geom.NeighborSampler, {"replace": True}),
    "weighted": (geom.NeighborSampler, {"weight": True}),
    "labor": (geom.LaborSampler, {}),
    "induced": (geom.NeighborSampler, {"directional": False}),
}


@pytest.mark.parametrize(
    ("kind", "fanout"), [*((kind, (3, 2)) for kind in SAMPLERS), ("uniform", (-1, 1))]
)
def test_batches_are_those_of_the_host(place, monkeypatch, kind, fanout):
    make, options = SAMPLERS[kind]
    indptr, indices, weights, nodes = rows(place, seed=8)
    graph = geom.Graph(indptr, indices % (indptr.size - 1), n_src=indptr.size - 1)
    seeds = np.concatenate([nodes[:3], nodes[:2], nodes[2:6]])  # isolated ones, a hub, both twice

    def sample(graph, seeds):
        weight = {"weight": _device.to_device(weights, graph.device)} if "weight" in options else {}
        sampler = make(graph, fanout, seed=4, **{**options, **weight})
        return [*sampler.bulk(seeds, 4), *sampler.bulk(seeds[:0], 4), sampler(seeds[:0])]

    with monkeypatch.context() as patch:
        patch.setattr(sampling, "runs_kernels", lambda x: False)
        want = sample(graph, seeds)
    got = sample(graph.to_device(place), _device.to_device(seeds, place))
    assert [one.n_seeds for one in got] == [4, 4, 1, 0]
    for a, b in zip(got, want, strict=True):
        pairs = [(a.nodes, b.nodes), *zip(a.edge_ids, b.edge_ids, strict=True)]
        for x, y in zip(a.graphs, b.graphs, strict=True):
            assert x.n_src == y.n_src
            pairs += [(x.indptr, y.indptr), (x.indices, y.indices)]
        for found, expected in pairs:
            assert_close(_device.to_device(found, "cpu"), expected, exact=True)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint64])
def test_what_is_outside_is_found(place, dtype):
    for values, want in (
        ([], True),
        ([0, 4, 2], True),
        ([0] * 300 + [5], False),
        ([np.iinfo(dtype).max, 1], False),
        ([1, np.iinfo(dtype).min], np.iinfo(dtype).min == 0),
    ):
        x = _device.to_device(np.array(values, dtype), place)
        assert sampling.are_below(x, 5) == want
        assert sampling.are_below(x[::-1], 5) == want


def test_arrays_are_of_a_few_sizes(place):
    x = _device.to_device(np.zeros(1), place)
    sizes = [sampling.room(x, n) for n in range(100_000)]
    assert all(n <= size <= n * 9 / 8 for n, size in enumerate(sizes))
    assert len(set(sizes[16:])) < 8 * 14
