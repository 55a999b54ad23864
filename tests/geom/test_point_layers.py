"""Layers on points against plain loops over their formulas."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom, nn
from rtxarr.testing import assert_close, gradcheck

rng = np.random.default_rng(7)
X, POS = rng.normal(size=(30, 4)), rng.random((30, 3))
PTR = np.array([0, 12, 30])


def network(n_in, n_out):
    generator = rx.random.Generator(3)
    return nn.Sequential(nn.Linear(n_in, n_out, dtype="float64", generator=generator), rx.tanh)


def test_dynamic_edges_are_those_of_the_nearest_features():
    layer = geom.DynamicEdgeConv(network(8, 5), k=3)
    got = layer(X, PTR)
    for begin, end in ((0, 12), (12, 30)):
        part = X[begin:end]
        for i, row in enumerate(part):
            near = np.argsort(((part - row) ** 2).sum(1), kind="stable")[:3]
            pairs = np.concatenate([np.tile(row, (3, 1)), part[near] - row], axis=1)
            assert_close(got.data[begin + i], layer.nn(pairs).data.max(0))
    alone = layer(X[12:])
    assert_close(alone.data, got.data[12:], exact=True)


def test_balls_are_those_around_far_points():
    layer = geom.PointNetSetAbstraction(network(7, 5), n_points=4, r=0.45, max_neighbors=6)
    x, pos, ptr = layer(X, POS, PTR)
    assert ptr.tolist() == [0, 4, 8]
    centres = geom.farthest_point_sampling(POS, 4, ptr=PTR)
    assert_close(pos, POS[centres], exact=True)
    for i, centre in enumerate(centres):
        cloud = np.arange(*PTR[i // 4 : i // 4 + 2])
        d = ((POS[cloud] - POS[centre]) ** 2).sum(1)
        order = np.argsort(d, kind="stable")[:6]
        near = cloud[order[d[order] <= 0.45**2]]
        rows = np.concatenate([X[near], POS[near] - POS[centre]], axis=1)
        assert_close(x.data[i], layer.nn(rows).data.max(0))


def test_whole_clouds_become_one_point():
    layer = geom.PointNetSetAbstraction(network(7, 5))
    x, pos, ptr = layer(X, POS, np.array([0, 12, 12, 30]))
    assert_close(pos, np.zeros((3, 3)), exact=True)
    assert ptr.tolist() == [0, 1, 2, 3]
    rows = layer.nn(np.concatenate([X, POS], axis=1)).data
    assert_close(x.data, np.stack([rows[:12].max(0), np.zeros(5), rows[12:].max(0)]))
    bare = geom.PointNetSetAbstraction(network(3, 5), n_points=2, r=0.5)
    assert bare(None, POS)[0].shape == (2, 5)


def test_layers_have_the_gradients_of_their_formulas():
    balls = geom.PointNetSetAbstraction(network(7, 2), n_points=3, r=0.5)
    gradcheck(lambda x, pos: balls(x, pos, PTR)[0], (X, POS))
    edges = geom.DynamicEdgeConv(network(8, 2), k=3)
    gradcheck(lambda x: edges(x, PTR), (X,))
    x, _, _ = balls(X, POS, PTR)
    rx.sum(x).backward()
    names = dict(balls.named_parameters())
    assert len(names) == 2
    assert all(p.grad is not None for p in names.values())


def test_order_of_points_does_not_matter():
    order = np.concatenate([rng.permutation(12), 12 + rng.permutation(18)])
    layer = geom.DynamicEdgeConv(network(8, 5), k=4)
    assert_close(layer(X[order], PTR).data, layer(X, PTR).data[order], exact=True)


def test_refuses():
    with pytest.raises(ValueError, match="given together, got 4 and None"):
        geom.PointNetSetAbstraction(network(3, 2), n_points=4)
    with pytest.raises(ValueError, match="n must be at most 12"):
        geom.PointNetSetAbstraction(network(7, 2), n_points=13, r=1.0)(X, POS, PTR)
    with pytest.raises(ValueError, match="k must be at most 12"):
        geom.DynamicEdgeConv(network(8, 2), k=13)(X, PTR)
