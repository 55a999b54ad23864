"""Tracers: arrays that note what is done with them, as NumPy does it."""

import array_api_compat.numpy as xp
import numpy as np
import pytest

import rtxarr as rx
from rtxarr._override import tracing
from rtxarr.polygraph import _interpret, _namespace
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._trace import Captured, Concretization, Trace, Tracer

from .fused import assert_same, check

rng = np.random.default_rng(0)


def traced(function, *arrays):
    """Give what a function gives, by the interpreter on the graph that tracers made."""
    with Trace(xp) as trace:
        inputs = [
            trace.input(i, a.dtype, a.shape, "C" if a.flags.c_contiguous else a.strides)
            for i, a in enumerate(arrays)
        ]
        out = function(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        more = [s.array for s in trace.sources if isinstance(s, Captured)]
        graph = ir.Graph(trace.inputs, [o.node for o in outs])
    found = _interpret.run(graph, [*arrays, *more], np)
    return found[0] if len(found) == 1 else tuple(found)


X = rng.normal(size=(3, 4))
Y = rng.normal(size=(4,))
N = rng.integers(-5, 6, (3, 4))

# ------------------------------------------------------------------------------- namespaces


def test_the_namespace_has_all_of_the_standard():
    import array_api_strict

    names = [n for n in dir(array_api_strict) if not n.startswith("_")]
    others = ("Device", "ModuleType", "linalg", "fft")
    names = [n for n in names if n not in others and "flags" not in n.lower()]
    assert [n for n in names if not hasattr(_namespace, n)] == []
    for part in ("linalg", "fft"):
        inner = getattr(array_api_strict, part)
        known = getattr(_namespace, part)
        assert [n for n in inner.__all__ if not hasattr(known, n)] == []


def test_tracers_give_their_namespace():
    with Trace(xp) as trace:
        x = trace.input(0, X.dtype, X.shape)
        assert x.__array_namespace__() is _namespace
        assert rx._device.namespace(x) is _namespace
        assert rx._device.namespace(x, X, 2.0) is _namespace
        assert tracing() is not None
    assert tracing() is None


STANDARD = {
    "clip": lambda x, xp: xp.clip(x, -0.5, 0.5),
    "roll": lambda x, xp: xp.roll(x, (1, -2), axis=(0, 1)),
    "roll flat": lambda x, xp: xp.roll(x, 3),
    "tile": lambda x, xp: xp.tile(x, (2, 1, 2)),
    "repeat": lambda x, xp: xp.repeat(x, 2, axis=1),
    "stack": lambda x, xp: xp.stack((x, x * 2), axis=1),
    "concat flat": lambda x, xp: xp.concat((x, x[0]), axis=None),
    "unstack": lambda x, xp: xp.unstack(x, axis=1)[2],
    "moveaxis": lambda x, xp: xp.moveaxis(x, 0, -1),
    "expand_dims": lambda x, xp: xp.expand_dims(x, axis=1),
    "squeeze": lambda x, xp: xp.squeeze(x[:, None], axis=1),
    "flip": lambda x, xp: xp.flip(x, axis=1),
    "tril": lambda x, xp: xp.tril(x, k=1),
    "triu": lambda x, xp: xp.triu(x, k=-1),
    "diff": lambda x, xp: xp.diff(x, axis=1, n=2),
    "eye": lambda x, xp: x @ xp.eye(4, k=1),
    "arange": lambda x, xp: x * xp.arange(0, 8, 2),
    "linspace": lambda x, xp: x * xp.linspace(0, 1, 4),
    "full_like": lambda x, xp: xp.full_like(x, 3) + x,
    "meshgrid": lambda x, xp: xp.meshgrid(x[0], x[:, 1], indexing="ij")[1],
    "var": lambda x, xp: xp.var(x, axis=0, correction=1),
    "std": lambda x, xp: xp.std(x, axis=1, keepdims=True),
    "prod": lambda x, xp: xp.prod(x, axis=(0, 1)),
    "any": lambda x, xp: xp.any(x > 1, axis=0),
    "count": lambda x, xp: xp.count_nonzero(x > 0, axis=1),
    "cumulative": lambda x, xp: xp.cumulative_sum(x, axis=0, include_initial=True),
    "argmax": lambda x, xp: xp.argmax(x, axis=1, keepdims=True),
    "take": lambda x, xp: xp.take(x, xp.asarray([2, 0]), axis=1),
    "take_along": lambda x, xp: xp.take_along_axis(x, xp.argsort(x, axis=1), axis=1),
    "sort": lambda x, xp: xp.sort(x, axis=0, descending=True),
    "searchsorted": lambda x, xp: xp.searchsorted(xp.sort(x[0]), x[1]),
    "tensordot": lambda x, xp: xp.tensordot(x, x, axes=((0,), (0,))),
    "vecdot": lambda x, xp: xp.vecdot(x, x),
    "outer": lambda x, xp: xp.linalg.outer(x[0], x[1]),
    "diagonal": lambda x, xp: xp.linalg.diagonal(x, offset=1),
    "trace": lambda x, xp: xp.linalg.trace(x),
    "solve": lambda x, xp: xp.linalg.solve(x @ x.T, x),
    "svd": lambda x, xp: xp.linalg.svd(x, full_matrices=False)[1],
    "norm": lambda x, xp: xp.linalg.vector_norm(x, axis=1),
    "fft": lambda x, xp: xp.fft.fft(x, n=6, axis=1, norm="ortho"),
    "rfftn": lambda x, xp: xp.fft.rfftn(x),
    "irfft": lambda x, xp: xp.fft.irfft(xp.fft.rfft(x)),
    "fftshift": lambda x, xp: xp.fft.fftshift(x),
    "round": lambda x, xp: xp.round(x),
    "result_type": lambda x, xp: xp.astype(x, xp.result_type(x, xp.complex64)),
    "isin": lambda x, xp: xp.isin(xp.round(x), xp.asarray([0.0, 1.0])),
}


@pytest.mark.parametrize("name", STANDARD)
def test_functions_of_the_standard(name):
    function = STANDARD[name]
    got = traced(lambda x: function(x, x.__array_namespace__()), X)
    assert_same(np.asarray(got), np.asarray(function(X, xp)), exact=False)


NUMPY = {
    "average": lambda x: np.average(x, axis=0),
    "clip": lambda x: np.clip(x, None, 0.5),
    "dot": lambda x: np.dot(x, x.T),
    "inner": lambda x: np.inner(x, x),
    "outer": lambda x: np.outer(x[0], x[:, 0]),
    "einsum": lambda x: np.einsum("ij,kj->ik", x, x),
    "hstack": lambda x: np.hstack([x, x]),
    "vstack": lambda x: np.vstack([x, x[0]]),
    "split": lambda x: tuple(np.split(x, 2, axis=1)),
    "array_split": lambda x: tuple(np.array_split(x, 3, axis=1)),
    "pad": lambda x: np.pad(x, ((1, 0), (0, 2)), constant_values=7),
    "nan_to_num": lambda x: np.nan_to_num(np.log(x)),
    "ravel": lambda x: np.ravel(x.T),
    "swapaxes": lambda x: np.swapaxes(x, 0, 1),
    "rollaxis": lambda x: np.rollaxis(x, 1),
    "atleast": lambda x: np.atleast_2d(x[0]),
    "divmod": lambda x: np.divmod(x, 0.3),
    "zeros_like": lambda x: np.zeros_like(x) + x,
    "copy": lambda x: np.copy(x),
    "accumulate": lambda x: np.add.accumulate(x, axis=1),
    "reduce": lambda x: np.maximum.reduce(x, axis=0),
    "reduce where": lambda x: np.sum(x, axis=0, where=x > 0),
    "reduce out": lambda x: np.any(x > 0, axis=0, out=np.zeros_like(x[0] > 0)),
    "ufunc outer": lambda x: np.multiply.outer(x[0], x[1]),
    "dtype": lambda x: np.add(x, 1, dtype=np.float32),
    "float_power": lambda x: np.float_power(np.abs(x), 2.5),
    "heaviside": lambda x: np.heaviside(x, 0.5),
    "degrees": lambda x: np.degrees(x),
    "cbrt": lambda x: np.cbrt(x),
    "frompyfunc": lambda x: x.clip(-1, 1).round(1).cumsum(axis=0).repeat(2, axis=0),
    "methods": lambda x: x.mean(0) + x.std(axis=0, ddof=1) + x.argmax(0) + x.any(0),
    "order": lambda x: x.reshape(2, 6, order="F"),
    "flatten": lambda x: x.T.flatten(),
}


@pytest.mark.parametrize("name", NUMPY)
def test_functions_of_numpy(name):
    function = NUMPY[name]
    with np.errstate(all="ignore"):
        want = function(X)
    got = traced(function, X)
    many = isinstance(want, tuple)
    for a, b in zip(got if many else [got], want if many else [want], strict=True):
        assert_same(np.asarray(a), np.asarray(b), exact=False)


# ---------------------------------------------------------------------------- promotion


@pytest.mark.parametrize("other", [2, 2.5, True, 1j, np.float32(2), np.int64(3), Y, N])
@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i8", "f2", "f4", "f8", "c8"])
def test_promotion_is_numpys(dtype, other):
    x = (X * 3).astype(dtype)
    assert_same(traced(lambda x: np.multiply(x, other), x), np.multiply(x, other))
    assert_same(traced(lambda x: other + x, x), other + x)


def test_comparisons_of_numbers_out_of_range():
    x = np.array([0, 200], np.uint8)
    for n in (-1, 300):
        assert_same(traced(lambda x: (x < n, x == n), x), (x < n, x == n))  # noqa: B023
    a, b = np.array([2**63 + 5, 3], np.uint64), np.array([-1, 3])
    assert_same(traced(lambda a, b: (a > b, a == b, b < a), a, b), (a > b, a == b, b < a))


def test_powers_take_numpys_shortcuts():
    for exponent in (2, -1, 0.5, 1, 3, 2.0, 1.5):
        x = np.abs(X)
        assert_same(traced(lambda x: x**exponent, x), x**exponent)  # noqa: B023
        assert_same(traced(lambda x: np.power(x, exponent), x), np.power(x, exponent))  # noqa: B023


# -------------------------------------------------------------------------------- views


def test_writes_go_through_chains_of_views():
    def f(x):
        y = x * 1
        part = y.T[1:, ::-1][:, :2]
        part += 10
        part[0] = part[1]
        z = part.reshape(3, 2)[2]
        z *= 2
        return y, part, z

    check(f, X)


def test_a_snapshot_does_not_change():
    def f(x):
        y = x + 0
        before, view = y.copy(), y[0]
        y[0] = 7
        return before, view, y

    check(f, X)


def test_read_only_arrays_are_not_written():
    with Trace(xp) as trace:
        x = trace.input(0, X.dtype, X.shape)
        wide = _namespace.broadcast_to(x[0], (2, 4))
        with pytest.raises(ValueError, match="read-only"):
            wide[0, 0] = 1


def test_writes_must_fit():
    with Trace(xp) as trace:
        x = trace.input(0, X.dtype, X.shape)
        with pytest.raises(ValueError, match=r"could not broadcast .* \(3,\) into shape \(4,\)"):
            x[0] = x[:, 0]
        n = trace.input(1, N.dtype, N.shape)
        with pytest.raises(TypeError, match="Cannot cast"):
            n += x
        with pytest.raises(IndexError):
            x[5]
        with pytest.raises(IndexError, match="too many indices"):
            x[0, 0, [0]]


INDICES = [
    (0,), (-1, 2), (slice(None), 1), (None, Ellipsis, 0), (slice(3, 0, -1), None), ([0, 2],),
    (slice(None), [0, 0, 3]), ([0, 1], [2, -1]), (np.array([[0], [2]]), np.array([1, 3])),
    (Ellipsis, [1, 1]), ([], ), (np.array(1), slice(1, None)), (0, [1, 2]), (None, [0, 1], None),
]  # fmt: skip


@pytest.mark.parametrize("key", INDICES, ids=str)
def test_indices(key):
    assert_same(np.asarray(traced(lambda x: x[key], X)), np.asarray(X[key]))
    got, want = X.copy(), X.copy()
    want[key] = 5.0
    rx.fuse(lambda x: x.__setitem__(key, 5.0), backend="interpreter")(got)
    assert_same(got, want)


# ------------------------------------------------------------------------------ refusals


def test_values_are_refused_with_the_line():
    with Trace(xp) as trace:
        x = trace.input(0, X.dtype, X.shape)
        for ask in (bool, float, int, np.asarray, lambda x: x.item(), lambda x: x.tolist()):
            with pytest.raises(Concretization, match="test_trace.py:"):
                ask(x[0, 0] if ask is not np.asarray else x)


def test_tracers_end_with_their_trace():
    with Trace(xp) as trace:
        x = trace.input(0, X.dtype, X.shape)
    with pytest.raises(RuntimeError, match="after the trace had ended"):
        x + 1


def test_arrays_of_other_libraries_are_refused():
    with Trace(xp) as trace:
        x = trace.input(0, X.dtype, X.shape)
        with pytest.raises(TypeError):
            x + object()


def test_attributes():
    with Trace(xp) as trace:
        x = trace.input(0, X.dtype, X.shape, X.strides)
        assert (x.ndim, x.size, x.nbytes, x.itemsize, len(x)) == (2, 12, 96, 8, 3)
        assert x.T.shape == x.mT.shape == (4, 3)
        assert x.T.strides == X.T.strides
        assert str(x.device) == "cpu"
        assert repr(x) == "Tracer(float64, shape=(3, 4))"
        assert isinstance(x, Tracer)
        assert [row.shape for row in x] == [(4,)] * 3


LAID_OUT = {
    "sum": lambda x: np.sum(x, axis=0),
    "mean": lambda x: x.mean(0, keepdims=True),
    "max": lambda x: np.max(x, axis=0),
    "var": lambda x: x.var(0),
    "cumsum": lambda x: np.cumsum(x, axis=1),
    "accumulate": lambda x: np.maximum.accumulate(x, axis=0),
    "concatenate": lambda x: np.concatenate([x, x], axis=0),
    "stack": lambda x: np.stack([x, x]),
    "index": lambda x: x[[0, 1, 1]],
    "roll": lambda x: np.roll(x, 1, 0),
    "sort": lambda x: np.sort(x, axis=0),
    "take": lambda x: np.take(x, [0, 1], axis=0),
    "copy": lambda x: x.copy(),
}


@pytest.mark.filterwarnings("ignore:.*may share memory with a reshape")
@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("name", LAID_OUT)
def test_a_reshape_is_a_view_where_numpy_gives_one(name, order):
    def f(x):
        y = LAID_OUT[name](x)
        z = y.reshape(-1)
        y[...] = 7
        return z

    x = np.arange(24.0).reshape(2, 3, 4).copy(order)
    fused = rx.fuse(f)
    np.testing.assert_array_equal(fused(x), f(x))
    assert order == "F" or not fused.reasons
