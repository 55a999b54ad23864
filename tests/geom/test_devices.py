"""What a GPU gives is what the CPU gives, for all that has no kernels of its own."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, geom, nn
from rtxarr.random import Generator
from rtxarr.testing import assert_close
from tests.geom.test_message_passing import Gated

pytestmark = pytest.mark.gpu
PTR = np.array([0, 12, 12, 40])
F64 = {"dtype": "float64"}
PAIRS, KINDS = np.array([[0, 39, 3, 3, 2], [4, 1, 3, 3, 0]]), np.array([0, 2, 1, 1, 2])


def options():
    return {"dtype": "float64", "generator": Generator(0)}


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def ends():
    rng = np.random.default_rng(0)
    src = rng.integers(0, 39, 150)
    return src, np.where(src < 12, rng.integers(0, 12, 150), rng.integers(12, 39, 150))


def graph(put):
    src, dst = ends()
    edges = {"time": put(np.arange(150) % 7), "w": put(numbers(1, 150))}
    nodes = {"x": put(numbers(2, 40, 3))}
    return geom.Graph.from_edges(put(src), put(dst), n_nodes=40, nodes=nodes, edges=edges)


def batch(put):
    return geom.Batch(graph(put), put(PTR))


def layer(module, x, *args):
    """Give a case that runs a module and its backward pass."""

    def run(put):
        own = module().to_device(put.device)
        for parameter in own.parameters():  # the same on both, whatever they start from
            parameter.assign(put(numbers(3, *parameter.shape)))
        t = rx.Tensor(put(x), requires_grad=True)
        out = own(t, *map(put, args))
        rx.sum(out * out).backward()
        return out, t.grad, [p.grad for p in own.parameters()]

    return run


def pooling(make):
    def run(put):
        pool, x = make().to_device(put.device), numbers(4, 40, 3)
        for parameter in pool.parameters():
            parameter.assign(put(numbers(5, *parameter.shape)))
        t = rx.Tensor(put(x), requires_grad=True)
        small, rows, kept = pool(batch(put), t)
        rx.sum(rows * rows).backward()
        return small, small.ptr, rows, kept, t.grad, [p.grad for p in pool.parameters()]

    return run


def jumping(mode, **extra):
    def run(put):
        own = geom.JumpingKnowledge(mode, **extra, **options()).to_device(put.device)
        parts = [rx.Tensor(put(x), requires_grad=True) for x in numbers(6, 3, 40, 4)]
        out = own(parts)
        rx.sum(out * out).backward()
        return out, [x.grad for x in parts], [p.grad for p in own.parameters()]

    return run


def scores(function, *extra):
    positive, negative = (np.round(numbers(7, n), 1) for n in (40, 70))
    return lambda put: function(put(positive), put(negative), *extra)


def whole(function, **extra):
    return lambda put: function(put(numbers(8, 40, 3)), ptr=put(PTR), **extra)


def drawn(function, **extra):
    return lambda put: function(put(numbers(8, 40, 3)), Generator(1), ptr=put(PTR), **extra)


def near():
    return nn.Sequential(nn.Linear(6, 4, **options()), rx.tanh)


def abstraction(**extra):
    def run(put):
        own = geom.PointNetSetAbstraction(near(), **extra).to_device(put.device)
        x, pos = (rx.Tensor(put(numbers(9 + i, 40, 3)), requires_grad=True) for i in range(2))
        out, centres, bounds = own(x, pos, put([0, 12, 40]))
        rx.sum(out * out).backward()
        grads = [p.grad for p in own.parameters()]
        return out, centres, bounds, x.grad, pos.grad, grads

    return run


def custom(put):
    own = Gated(3).to_device(put.device)
    x = rx.Tensor(put(numbers(11, 40, 3)), requires_grad=True)
    out = own(graph(put), {"x": x}, (put(numbers(12, 150, 1)), put(numbers(13, 150, 3))))
    rx.sum(out * out).backward()
    return out, x.grad, [p.grad for p in own.parameters()]


ROWS = numbers(2, 40, 3)
CASES = {
    "graph norm": layer(lambda: geom.GraphNorm(3, **F64), ROWS, PTR),
    "instance norm": layer(lambda: geom.InstanceNorm(3, **F64), ROWS, PTR),
    "layer norm": layer(lambda: geom.GraphLayerNorm(3, **F64), ROWS, PTR),
    "pair norm": layer(geom.PairNorm, ROWS, PTR),
    "set2set": layer(lambda: geom.Set2Set(3, n_steps=2, **options()), ROWS, PTR),
    "topk": pooling(lambda: geom.TopKPooling(3, **options())),
    "sag": pooling(lambda: geom.SAGPooling(geom.GraphConv(3, 1, **options()), ratio=3)),
    "jumping cat": jumping("cat"),
    "jumping max": jumping("max"),
    "jumping lstm": jumping("lstm", channels=4, n_layers=3),
    "dot": layer(geom.DotDecoder, ROWS, PAIRS),
    "mlp": layer(lambda: geom.MLPDecoder(3, 9, **options()), ROWS, PAIRS),
    "distmult": layer(lambda: geom.DistMult(3, 3, **options()), ROWS, PAIRS, KINDS),
    "complex": layer(lambda: geom.ComplEx(4, 3, **options()), numbers(2, 40, 4), PAIRS, KINDS),
    "transe": layer(lambda: geom.TransE(3, 3, **options()), ROWS, PAIRS, KINDS),
    "transe-2": layer(lambda: geom.TransE(3, 3, p=2, **options()), ROWS, PAIRS, KINDS),
    "rotate": layer(lambda: geom.RotatE(4, 3, **options()), numbers(2, 40, 4), PAIRS, KINDS),
    "dynamic": layer(lambda: geom.DynamicEdgeConv(near(), k=4), ROWS, [0, 12, 40]),
    "auc": scores(geom.auc),
    "average precision": scores(geom.average_precision),
    "mrr": scores(geom.mrr),
    "hits": scores(geom.hits_at_k, 5),
    "degrees in": lambda put: geom.degree_features(graph(put), 6),
    "degrees out": lambda put: geom.degree_features(graph(put), 3, direction="out"),
    "laplacian": lambda put: abs(geom.laplacian_encoding(graph(put), 4)),
    "laplacian weighted": lambda put: abs(
        geom.laplacian_encoding(graph(put), 4, weight=put(abs(numbers(1, 150))))
    ),
    "k-hop": lambda put: geom.k_hop(graph(put), put([3, 20]), 2),
    "k-hop out": lambda put: geom.k_hop(graph(put), put([3, 20]), 1, direction="out"),
    "subgraph": lambda put: geom.subgraph(graph(put), put(np.arange(30, 3, -1))),
    "subgraph mask": lambda put: geom.subgraph(graph(put), put(np.arange(40) % 3 > 0)),
    "edge subgraph": lambda put: geom.edge_subgraph(graph(put), put([7, 2, 2, 99])),
    "before": lambda put: geom.before(graph(put), 4, inclusive=True),
    "center": whole(geom.center_points),
    "normalize": whole(geom.normalize_points),
    "rotate points": drawn(geom.rotate_points),
    "rotate about": drawn(geom.rotate_points, axis=1),
    "shear": drawn(geom.shear_points),
    "scale": drawn(geom.scale_points, per_axis=True),
    "translate": drawn(geom.translate_points),
    "flip": drawn(geom.flip_points, axis=0),
    "jitter": lambda put: geom.jitter_points(put(ROWS), Generator(1)),
    "drop": drawn(geom.drop_points, rate=0.4),
    "sample": lambda put: geom.sample_points(put(ROWS), 9, Generator(1), ptr=put([0, 12, 40])),
    "abstraction": abstraction(n_points=5, r=1.0),
    "abstraction of all": abstraction(),
    "messages": custom,
}


def parts(x):
    """Give all arrays, however deep in tuples, graphs and mappings."""
    if isinstance(x, geom.Graph):
        x = (x.src, x.dst, dict(x.nodes), dict(x.edges))
    if isinstance(x, dict):
        x = [x[key] for key in sorted(x)]
    return [a for one in x for a in parts(one)] if isinstance(x, (tuple, list)) else [x]


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_gives_the_same(name):
    found = []
    for device in ("cpu", "cuda:0"):

        def put(x, device=device):
            return _device.to_device(np.asarray(x), device)

        put.device = device
        with rx.device(device):
            found.append(parts(CASES[name](put)))
    want, got = found
    assert len(got) == len(want) > 0
    for a, b in zip(got, want, strict=True):
        a, b = rx.Tensor(a), rx.Tensor(b)
        assert _device.is_device_array(a.data)
        assert a.dtype == b.dtype
        exact = b.dtype.kind not in "fc"
        assert_close(a.numpy(), b.numpy(), **({"exact": True} if exact else {"atol": 1e-9}))
