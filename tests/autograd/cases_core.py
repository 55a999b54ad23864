"""A small case, away from kinks, for each differentiable operation of the core namespace."""

import numpy as np

import rtxarr as rx
from rtxarr.autograd._functional import alias
from rtxarr.ops._index import _index_add_zeros, _scatter_rows

rng = np.random.default_rng(7)
X = rng.standard_normal((3, 4))
Y = rng.standard_normal((3, 4))
ROW = rng.standard_normal(4)
POSITIVE = np.abs(X) + 0.5
UNIT = np.tanh(X) * 0.9
COMPLEX = X + 1j * Y
MASK = X > 0
INDPTR = np.array([0, 2, 3])
INDEX = np.array([1, 1, 0])
COUNTS = np.array([2, 0, 1])


def unary(name, *inputs):
    return [(getattr(rx, name), (x,)) for x in inputs]


def binary(name, *pairs):
    return [(getattr(rx, name), pair) for pair in pairs]


CASES = {
    "abs": unary("abs", X, COMPLEX),
    "acos": unary("acos", UNIT),
    "acosh": unary("acosh", POSITIVE + 1),
    "add": binary("add", (X, ROW), (X, COMPLEX)),
    "alias": [(alias, (X,))],
    "asin": unary("asin", UNIT, COMPLEX),
    "asinh": unary("asinh", X),
    "astype": [
        (lambda x: rx.astype(x, rx.complex128) * (1 + 2j), (X,)),
        (lambda x: rx.astype(x * 1.5, rx.float64), (X,)),
    ],
    "atan": unary("atan", X),
    "atan2": binary("atan2", (X, POSITIVE)),
    "atanh": unary("atanh", UNIT),
    "broadcast_to": [(lambda x: rx.broadcast_to(x, (2, 3, 4)), (ROW,))],
    "clip": [
        (lambda x: rx.clip(x, -0.5, 0.5), (X,)),
        (lambda x, low, high: rx.clip(x, low, high), (X, ROW - 2.0, ROW + 0.3)),
    ],
    "_concat": [
        (lambda x, y: rx.concat([x, y], axis=1), (X, Y[:, :2])),
        (lambda x, y: rx.concat([x, y], axis=None), (X, ROW)),
    ],
    "conj": unary("conj", COMPLEX),
    "copysign": binary("copysign", (X, Y)),
    "cos": unary("cos", X, COMPLEX),
    "cosh": unary("cosh", X),
    "cumulative_max": [
        (lambda x: rx.cumulative_max(x, axis=1), (X,)),
        (lambda x: rx.cumulative_max(rx.sin(3 * x), axis=0), (X,)),
    ],
    "cumulative_min": [(lambda x: rx.cumulative_min(x, axis=-1), (X,))],
    "cumulative_prod": [
        (lambda x: rx.cumulative_prod(x, axis=1), (X,)),
        (lambda x: rx.cumulative_prod(x, include_initial=True), (np.array([1.5, 0.0, 2.0, 0.3]),)),
    ],
    "cumulative_sum": [
        (lambda x: rx.cumulative_sum(x, axis=-2), (X,)),
        (lambda x: rx.cumulative_sum(x, axis=1, include_initial=True), (X,)),
    ],
    "diff": [
        (lambda x: rx.diff(x, n=2), (X,)),
        (
            lambda x, y: rx.diff(x, axis=0, prepend=y[:1], append=y[1:]),
            (X, np.arange(12).reshape(3, 4)),
        ),
    ],
    "divide": binary("divide", (X, POSITIVE), (ROW, COMPLEX)),
    "exp": unary("exp", X, COMPLEX),
    "expand_dims": [
        (lambda x: rx.expand_dims(x, axis=1), (X,)),
        (lambda x: rx.expand_dims(x, axis=(0, -1)), (X,)),
    ],
    "expm1": unary("expm1", X),
    "flip": [(lambda x: rx.flip(x), (X,)), (lambda x: rx.flip(x, axis=1), (X,))],
    "getitem": [
        (lambda x: x[1:, ::-2], (X,)),
        (lambda x: x[..., 0], (X,)),
        (lambda x: x[:, None, 2], (X,)),
        (lambda x, i: x[i], (X, np.array([0, 0, 2]))),
        (lambda x, i, j: x[i, j], (X, np.array([0, 0, 2]), np.array([1, 1, 3]))),
        (lambda x, i: x[:, i], (X, np.array([[3, 0], [3, 3]]))),
        (lambda x, mask: x[mask], (X, MASK)),
    ],
    "hypot": binary("hypot", (X, Y)),
    "imag": unary("imag", COMPLEX),
    "index_update": [
        (lambda x, v: rx.index_update(x, (slice(None), 1), v), (X, Y[:, 0])),
        (lambda x, v, mask: rx.index_update(x, mask, v), (X, np.array(0.7), MASK)),
    ],
    "_index_add_zeros": [
        (lambda v: _index_add_zeros(v, (slice(1, 3),), (4, 4)), (X[:2],)),
        (lambda v, i: _index_add_zeros(v, i, (2, 4)), (X, np.array([1, 1, 0]))),
        (lambda x, v, i: rx.index_add(x, (i, slice(None)), v), (X, ROW, np.array([0, 0]))),
    ],
    "log": unary("log", POSITIVE, COMPLEX),
    "log10": unary("log10", POSITIVE),
    "log1p": unary("log1p", POSITIVE),
    "log2": unary("log2", POSITIVE),
    "logaddexp": binary("logaddexp", (X, ROW)),
    "logsumexp": [
        (lambda x: rx.logsumexp(x, axis=1), (X,)),
        (lambda x: rx.logsumexp(x, keepdims=True), (X,)),
    ],
    "matmul": [
        (rx.matmul, (X, Y.T)),
        (rx.matmul, (COMPLEX, Y.T)),
        (rx.matmul, (X, np.arange(8).reshape(4, 2))),
        (rx.matmul, (ROW, ROW)),
        (rx.matmul, (X, ROW)),
        (rx.matmul, (Y[:, 0], X)),
        (rx.matmul, (rng.standard_normal((2, 3, 4)), ROW)),
        (rx.matmul, (Y[:, 0], rng.standard_normal((2, 3, 4)))),
        (rx.matmul, (rng.standard_normal((2, 1, 3, 4)), rng.standard_normal((3, 4, 2)))),
        (rx.matmul, (rng.standard_normal((2, 3, 4)), Y.T)),
    ],
    "matrix_transpose": [(rx.matrix_transpose, (rng.standard_normal((2, 3, 4)),))],
    "max": [(lambda x: rx.max(x, axis=1), (X,)), (lambda x: rx.max(x, keepdims=True), (X,))],
    "maximum": binary("maximum", (X, ROW)),
    "mean": [(lambda x: rx.mean(x), (X,)), (lambda x: rx.mean(x, axis=(0, 1)), (COMPLEX,))],
    "min": [(lambda x: rx.min(x, axis=0), (X,))],
    "minimum": binary("minimum", (X, ROW)),
    "moveaxis": [(lambda x: rx.moveaxis(x, (0, 2), (1, 0)), (rng.standard_normal((2, 3, 4)),))],
    "multiply": binary("multiply", (X, ROW), (COMPLEX, ROW), (COMPLEX, COMPLEX)),
    "negative": unary("negative", X),
    "pad": [(lambda x: rx.pad(x, ((1, 0), (0, 2)), constant_values=2.0), (X,))],
    "permute_dims": [(lambda x: rx.permute_dims(x, (2, 0, -2)), (rng.standard_normal((2, 3, 4)),))],
    "positive": unary("positive", X),
    "pow": [
        (rx.pow, (POSITIVE, ROW)),
        (lambda x: x**3, (X,)),
        (lambda x: x**2, (COMPLEX,)),
        (lambda x: x**0, (X,)),
        (lambda x: 2.0**x, (X,)),
        (lambda x, n: rx.pow(x, n), (X * np.array([0.0, 1, 1, 1]), np.array([0, 1, 2, 3]))),
    ],
    "prod": [
        (lambda x: rx.prod(x, axis=0), (X,)),
        (lambda x: rx.prod(x), (np.array([[2.0, 0.0], [3.0, 0.5]]),)),
        (lambda x: rx.prod(x, axis=(0, 2), keepdims=True), (rng.standard_normal((2, 2, 3)),)),
    ],
    "real": unary("real", COMPLEX),
    "reciprocal": unary("reciprocal", POSITIVE),
    "remainder": binary("remainder", (X, POSITIVE)),
    "repeat": [
        (lambda x: rx.repeat(x, 2, axis=1), (X,)),
        (lambda x: rx.repeat(x, 3), (X,)),
        (lambda x, n: rx.repeat(x, n, axis=0), (X, COUNTS)),
    ],
    "reshape": [(lambda x: rx.reshape(x, (2, -1)), (X,))],
    "roll": [
        (lambda x: rx.roll(x, 2), (X,)),
        (lambda x: rx.roll(x, (1, -1), axis=(0, 1)), (X,)),
    ],
    "scatter_add": [(lambda v, i: rx.scatter_add(v, i, 3), (X, INDEX))],
    "scatter_max": [(lambda v, i: rx.scatter_max(v, i, 2), (X, INDEX))],
    "scatter_min": [(lambda v, i: rx.scatter_min(v, i, 2), (X, INDEX))],
    "_scatter_rows": [(lambda v, i: _scatter_rows(v, i, (3, 4)), (X, np.array([1, -1, 1])))],
    "segment_max": [(rx.segment_max, (X, INDPTR))],
    "segment_mean": [(rx.segment_mean, (X, np.array([0, 2, 2, 3])))],
    "segment_min": [(rx.segment_min, (X, INDPTR))],
    "segment_sum": [(rx.segment_sum, (X, np.array([0, 0, 2, 3])))],
    "sin": unary("sin", X, COMPLEX),
    "sinh": unary("sinh", X),
    "sort": [(lambda x: rx.sort(x, axis=0), (X,)), (lambda x: rx.sort(x, descending=True), (X,))],
    "sqrt": unary("sqrt", POSITIVE, COMPLEX),
    "square": unary("square", X, COMPLEX),
    "squeeze": [(lambda x: rx.squeeze(x, axis=(0, 2)), (X.reshape(1, 3, 1, 4),))],
    "std": [
        (lambda x: rx.std(x, axis=1, correction=1), (X,)),
        (lambda x: rx.std(x, keepdims=True), (X,)),
    ],
    "subtract": binary("subtract", (X, ROW)),
    "sum": [
        (lambda x: rx.sum(x), (X,)),
        (lambda x: rx.sum(x, axis=(0, -1)), (rng.standard_normal((2, 3, 4)),)),
        (lambda x: rx.sum(x, axis=0, keepdims=True), (COMPLEX,)),
    ],
    "take": [
        (lambda x, i: rx.take(x, i, axis=0), (X, np.array([0, 0, -1]))),
        (lambda x, i: rx.take(x, i, axis=1), (X, np.array([3, 1, 3]))),
    ],
    "take_along_axis": [
        (
            lambda x, i: rx.take_along_axis(x, i, axis=1),
            (X, np.array([[0, 0], [1, 3], [2, 2]])),
        ),
        (lambda x, i: rx.take_along_axis(x, i, axis=0), (X, np.array([[0, 1, 2, 1]]))),
    ],
    "tan": unary("tan", UNIT),
    "tanh": unary("tanh", X, COMPLEX),
    "tile": [(lambda x: rx.tile(x, (2, 1, 3)), (X,)), (lambda x: rx.tile(x, (2,)), (X,))],
    "to_device": [(lambda x: rx.to_device(x, "cpu"), (X,))],
    "transpose": [(rx.transpose, (X,))],
    "var": [
        (lambda x: rx.var(x, axis=0), (X,)),
        (lambda x: rx.var(x, correction=1, keepdims=True), (X,)),
    ],
    "where": [(lambda x, y, mask: rx.where(mask, x * y, y), (X, ROW, MASK))],
}
