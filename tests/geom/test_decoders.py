"""Scores of links against their formulas, with complex numbers where these have them."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom, nn
from rtxarr.random import Generator
from rtxarr.testing import assert_close, gradcheck

F64 = {"dtype": "float64"}
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((7, 6)), RNG.standard_normal((5, 6))
PAIRS = np.array([[0, 6, 3, 3, 2], [4, 1, 3, 3, 0]])
KINDS = np.array([0, 2, 1, 1, 2])


def as_complex(x):
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:]


def mlp(s, d, decoder):
    w, v = decoder.hidden, decoder.out
    hidden = np.maximum(np.concatenate([s, d], axis=1) @ w.weight.data.T + w.bias.data, 0)
    return (hidden @ v.weight.data.T + v.bias.data)[:, 0]


PLAIN = {
    "dot": (lambda: geom.DotDecoder(), lambda s, d, _: (s * d).sum(axis=1)),
    "mlp": (lambda: geom.MLPDecoder(6, 9, **F64), mlp),
}
RELATIONAL = {
    "distmult": (lambda: geom.DistMult(6, 3, **F64), lambda s, w, d: (s * w * d).sum(axis=1)),
    "complex": (
        lambda: geom.ComplEx(6, 3, **F64),
        lambda s, w, d: (as_complex(s) * as_complex(w) * as_complex(d).conj()).sum(axis=1).real,
    ),
    "transe": (lambda: geom.TransE(6, 3, **F64), lambda s, w, d: -np.abs(s + w - d).sum(axis=1)),
    "transe-2": (
        lambda: geom.TransE(6, 3, p=2, **F64),
        lambda s, w, d: -np.linalg.norm(s + w - d, axis=1),
    ),
    "rotate": (
        lambda: geom.RotatE(6, 3, **F64),
        lambda s, w, d: -np.abs(as_complex(s) * np.exp(1j * w) - as_complex(d)).sum(axis=1),
    ),
}
ALL = PLAIN | RELATIONAL


@pytest.mark.parametrize("name", ALL)
def test_scores_are_those_of_the_formula(name):
    make, formula = ALL[name]
    decoder = make()
    for x, y in ((X, X), (X, Y)):
        given = x if x is y else (x, y)
        s, d = x[PAIRS[0]], y[PAIRS[1]]
        if name in PLAIN:
            got, want = decoder(given, PAIRS), formula(s, d, decoder)
        else:
            got, want = decoder(given, PAIRS, KINDS), formula(s, decoder.weight.data[KINDS], d)
        assert got.shape == (5,)
        assert_close(rx.Tensor(got).numpy(), want)


@pytest.mark.parametrize("name", ALL)
def test_gradients(name):
    decoder = ALL[name][0]()
    kinds = () if name in PLAIN else (KINDS,)
    names = list(decoder.state_dict())

    def call(x, *arrays):
        own = dict(zip(names, arrays, strict=True))
        return nn.functional_call(decoder, own, x, PAIRS, *kinds)

    gradcheck(call, (X, *(a.copy() for a in decoder.state_dict().values())))


def test_the_slope_of_no_distance_is_zero():
    for decoder in (geom.TransE(4, 1, p=2, **F64), geom.RotatE(4, 1, **F64)):
        decoder.weight.assign(np.zeros(decoder.weight.shape))
        x = rx.Tensor(np.ones((2, 4)), requires_grad=True)
        rx.sum(decoder(x, np.array([[0], [1]]), np.array([0]))).backward()
        assert_close(x.grad, np.zeros((2, 4)), exact=True)


@pytest.mark.parametrize("name", ALL)
def test_no_pairs(name):
    decoder = ALL[name][0]()
    none = np.zeros((2, 0), dtype=np.int64)
    kinds = () if name in PLAIN else (none[0],)
    assert decoder(X, none, *kinds).shape == (0,)


@pytest.mark.parametrize("kind", [geom.DistMult, geom.ComplEx, geom.TransE, geom.RotatE])
def test_a_relation_that_is_not_symmetric_is_learnt(kind):
    """Of a cycle of 9 nodes, by all but the model that is the same both ways."""
    n, generator = 9, Generator(0)
    nodes = np.arange(n)
    ahead, back = np.stack([nodes, (nodes + 1) % n]), np.stack([(nodes + 1) % n, nodes])
    kinds = np.zeros(n, dtype=np.int64)
    x = nn.Parameter(generator.normal((n, 8), dtype="float64"))
    decoder = kind(8, 1, generator=generator, **F64)
    optimizer = rx.optim.Adam([x, *decoder.parameters()], lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        apart = decoder(x, ahead, kinds) - decoder(x, back, kinds)
        rx.mean(rx.softplus(-apart)).backward()
        optimizer.step()
    if kind is geom.DistMult:
        assert_close(apart.data, np.zeros(n), atol=1e-12)
    else:
        assert (apart.data > 0.5).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="n_features must be even"):
        geom.ComplEx(5, 1)
    with pytest.raises(ValueError, match="p must be 1 or 2, got 3"):
        geom.TransE(4, 1, p=3)
    with pytest.raises(ValueError, match=r"pairs must be sources and destinations.*\(5, 2\)"):
        geom.DotDecoder()(X, PAIRS.T)
    with rx.testing.check_values(), pytest.raises(IndexError, match="edge_type must lie in"):
        geom.DistMult(6, 2, **F64)(X, PAIRS, KINDS)
    assert repr(geom.TransE(4, 3, p=2)) == "TransE(4, 3, p=2)"
    assert repr(geom.DotDecoder()) == "DotDecoder()"
