"""CuPy's functions on tracers, without a GPU; fused functions of CuPy arrays, with one."""

import threading

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.polygraph import _interpret
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._trace import Trace

cupy = pytest.importorskip("cupy")

X = np.random.default_rng(0).normal(size=(3, 4)).astype("f4")

FUNCTIONS = {
    "exp": lambda cp, x: cp.exp(x) + cp.tanh(x) * cp.sqrt(cp.abs(x)),
    "number first": lambda cp, x: cp.add(1.0, x) - cp.maximum(0, x),
    "power": lambda cp, x: cp.power(x, 2) + cp.square(x) + cp.true_divide(x, 2),
    "tests": lambda cp, x: cp.logical_and(x > 0, cp.isfinite(x)),
    "where": lambda cp, x: cp.where(x > 0, x, 0),
    "sums": lambda cp, x: cp.sum(x, axis=1) + cp.mean(x, axis=-1) + cp.prod(x, axis=1),
    "extrema": lambda cp, x: cp.max(x, axis=0, keepdims=True) - cp.min(x),
    "places": lambda cp, x: cp.argmax(x, axis=1) + cp.argmin(x),
    "any": lambda cp, x: cp.any(x > 1) | cp.all(x < 9),
    "spread": lambda cp, x: cp.var(x, axis=0) + cp.std(x, axis=0),
    "shapes": lambda cp, x: cp.reshape(cp.transpose(x), (2, 6)),
    "axes": lambda cp, x: cp.moveaxis(cp.expand_dims(cp.swapaxes(x, 0, 1), 0), 0, 2),
    "flat": lambda cp, x: cp.ravel(x)[::-1],
    "broadcast": lambda cp, x: cp.broadcast_to(x, (2, 3, 4)) + cp.tile(x, (2, 1, 1)),
    "matmul": lambda cp, x: cp.matmul(x, x.T) + cp.dot(x, x.T) + x @ x.T,
    "einsum": lambda cp, x: cp.einsum("ij,kj->ik", x, x) + cp.tensordot(x, x.T, 1),
    "joined": lambda cp, x: cp.concatenate([x, cp.stack([x[0], x[1]]), cp.vstack([x, x])]),
    "likes": lambda cp, x: cp.zeros_like(x) + cp.ones_like(x) + cp.full_like(x, 2),
    "running": lambda cp, x: cp.cumsum(x, axis=0) + cp.roll(x, 1, axis=1),
    "clip": lambda cp, x: cp.clip(x, 0, 1) + cp.rint(x),
    "take": lambda cp, x: cp.take(x, 1, axis=0) + cp.diff(x, axis=0)[0],
    "sort": lambda cp, x: cp.sort(x, axis=1) + cp.argsort(x, axis=1),
    "triangle": lambda cp, x: cp.triu(x) + cp.pad(x, 1)[1:-1, 1:-1],
    "fft": lambda cp, x: cp.fft.irfft(cp.fft.rfft(x, axis=1) * 2, n=4, axis=1),
    "as arrays": lambda cp, x: cp.asarray(x) + cp.array(x, copy=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_cupy_reach_tracers(name):
    from array_api_compat import cupy as xp

    from rtxarr.polygraph._cupy import answering

    function = FUNCTIONS[name]
    with Trace(xp) as trace, answering():
        out = function(cupy, trace.input(0, X.dtype, X.shape, "C"))
        graph = ir.Graph(trace.inputs, [out.node])
    import array_api_compat.numpy

    (got,) = _interpret.run(graph, [X], array_api_compat.numpy)
    np.testing.assert_allclose(got, function(np, X), rtol=1e-5, atol=1e-6)


def test_new_arrays_are_traced_and_writable():
    from array_api_compat import cupy as xp

    from rtxarr.polygraph._cupy import answering

    with Trace(xp) as trace, answering():
        x = trace.input(0, X.dtype, X.shape, "C")
        out = cupy.zeros((2, 4), dtype="f4")
        out[0] = x[1]
        cupy.exp(x[0], out=out[1])
        graph = ir.Graph(trace.inputs, [out.node])
    (got,) = _interpret.run(graph, [X], np)
    np.testing.assert_allclose(got, [X[1], np.exp(X[0])], rtol=1e-6)


def test_cupys_functions_come_back():
    from rtxarr.polygraph._cupy import answering

    own, seen = cupy.size, []
    with answering():
        with answering():
            assert cupy.size is not own
        thread = threading.Thread(target=lambda: seen.append(cupy.ndim(X)))
        thread.start()
        thread.join()
        assert cupy.size is not own
    assert cupy.size is own
    assert seen == [2]


# ------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_fused_functions_of_cupy_arrays(name):
    function, x = FUNCTIONS[name], cupy.asarray(X)
    fused = rx.fuse(lambda x: function(cupy, x))
    for _ in range(2):
        got, want = fused(x), function(cupy, x)
        assert got.dtype == want.dtype and got.shape == want.shape
        cupy.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert fused.n_eager == 0, fused.reasons


@pytest.mark.gpu
def test_writes_views_and_numbers_on_a_gpu():
    def f(x, a):
        x[1:] *= a
        y = x.T
        y[0] += 1
        return y, x.sum(axis=0)

    fused = rx.fuse(f)
    for a in (2.0, -0.5):
        one, other = cupy.asarray(X), cupy.asarray(X)
        want, got = f(one, a), fused(other, a)
        for p, q in zip((*got, other), (*want, one), strict=True):
            cupy.testing.assert_allclose(p, q, rtol=1e-5)
    assert fused.n_traces == 1


@pytest.mark.gpu
def test_gradients_on_a_gpu():
    def f(x, w):
        return rx.sum(rx.softmax(rx.tanh(x @ w)) ** 2)

    x, w = cupy.asarray(X), cupy.asarray(X[:2].T.copy())
    got, want = rx.grad(rx.fuse(f), (0, 1))(x, w), rx.grad(f, (0, 1))(x, w)
    for p, q in zip(got, want, strict=True):
        cupy.testing.assert_allclose(p, q, rtol=1e-4, atol=1e-6)
