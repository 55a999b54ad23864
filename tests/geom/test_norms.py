"""Normalisation over the nodes of each graph."""

import numpy as np
import pytest

from rtxarr import geom
from rtxarr.testing import assert_close, gradcheck

NORMS = {
    "graph": (geom.GraphNorm, lambda x: (x - 0.5 * x.mean(0)) / deviation(x - 0.5 * x.mean(0))),
    "instance": (geom.InstanceNorm, lambda x: (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)),
    "layer": (geom.GraphLayerNorm, lambda x: (x - x.mean()) / np.sqrt(x.var() + 1e-5)),
}


def deviation(x):
    return np.sqrt((x * x).mean(0) + 1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_norms_work_on_each_graph(name):
    make, want = NORMS[name]
    layer = make(3, dtype="float64")
    if name == "graph":
        layer.mean_scale.assign(np.full(3, 0.5))
    layer.bias.assign(np.arange(3.0))
    x = np.random.default_rng(13).standard_normal((6, 3)) + 5
    ptr = np.array([0, 4, 4, 6])
    got = layer(x, ptr).data
    for start, stop in ((0, 4), (4, 6)):
        assert_close(got[start:stop], want(x[start:stop]) + np.arange(3.0))
        assert_close(layer(x[start:stop]).data, got[start:stop])
    gradcheck(lambda x: layer(x, ptr), (x,))
    assert layer(np.zeros((0, 3)), np.array([0, 0])).shape == (0, 3)
    assert layer.astype("float16")(x.astype("float16"), ptr).dtype == np.float16
    with pytest.raises(ValueError, match="x must have shape"):
        layer(np.ones(3))


@pytest.mark.parametrize("individually", [False, True])
def test_pair_norm(individually):
    layer = geom.PairNorm(scale=2.0, scale_individually=individually)
    x = np.random.default_rng(14).standard_normal((5, 3))
    ptr = np.array([0, 2, 5])
    got = layer(x, ptr)
    for start, stop in ((0, 2), (2, 5)):
        part = x[start:stop] - x[start:stop].mean(axis=0)
        length = np.linalg.norm(part, axis=1, keepdims=True)
        if individually:
            want = 2 * part / (1e-5 + length)
        else:
            want = 2 * part / np.sqrt(1e-5 + (length**2).mean())
        assert_close(got[start:stop], want)
