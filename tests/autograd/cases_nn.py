"""A small case, away from kinks, for each neural-network operation."""

import numpy as np

import rtxarr as rx
from rtxarr.ops._conv import _convolution_weight, _in_plan
from rtxarr.ops._dropout import _dropout, _dropout_add
from rtxarr.ops._losses import _cross_entropy, _cross_entropy_gradient
from rtxarr.ops._norm import _group_formula, _group_norm
from rtxarr.ops._pool import _mean_of_largest, _spread_evenly, _spread_to_largest
from rtxarr.ops._resize import _resample, _resample_transpose
from rtxarr.ops._windows import make_windows

rng = np.random.default_rng(11)
# No element lies within 0.05 of a kink (0, and 3 of the hard sigmoids).
X = np.array([[-4.0, -2.4, -1.1, -0.4], [-0.15, 0.2, 0.7, 1.3], [1.9, 2.6, 3.5, 0.9]])
Y = rng.standard_normal((3, 4))
ROW = rng.standard_normal(4)
# Offset, stream and key of random words.
PLACE = (np.uint64(3), np.uint64(5), np.uint64(7))
LABELS = np.array([2, 0, 3])
KEPT = np.array([True, False, True])
SIGNAL = rng.standard_normal((2, 4, 6))
IMAGE = rng.standard_normal((2, 2, 5, 4))
# All different, so that no small change makes another element of a window the largest.
RANKED = rng.permutation(40).reshape(1, 2, 5, 4) / 10.0
QUERIES = rng.standard_normal((2, 4, 3, 2))
KEYS = rng.standard_normal((2, 2, 4, 2))
VALUES = rng.standard_normal((2, 2, 4, 3))
SCORES = rng.standard_normal((4, 1, 4))
SEEN = np.array([[True, True, False, True], [False] * 4, [True, False, False, False]])
POOL = make_windows((3, 2), (5, 4), 2, 1, 1)
CONV = make_windows((2, 3), (5, 4), (2, 1), 1, (1, 2))
STENCIL = ("cubic", 4, 7, 4 / 7, False)
SAME = make_windows((3, 3), (5, 4), 1, 1, 1)
CENTRE = rng.standard_normal((2, 2, 3, 3))
SUM = rng.standard_normal((2, 2, 5, 4))
assert np.abs(rx.conv2d(IMAGE, CENTRE, np.full(2, 0.3), padding=1) + SUM).min() > 0.01
# As integers they are constants.
RANKS = np.round(10 * RANKED).astype("int64")
LARGEST = np.round(10 * rx.max_pool2d(RANKED, (3, 2), stride=2, padding=1)).astype("int64")


def unary(name, **options):
    function = getattr(rx, name)
    return [(lambda x: function(x, **options), (X,))]


def _grouped(x, weight, bias, *, activation):
    """Normalize in two groups: on a GPU with kernels, else the same operation without."""
    if x.device != "cpu":
        return rx.group_norm(x, 2, weight, bias, activation=activation)
    options = {"n_groups": 2, "eps": 1e-5, "activation": activation}
    return _group_norm(x, weight, bias, None, None, **options)


def in_plan(activation):
    """Convolve and add, in one where a GPU can; these are calls that it gets."""
    return lambda *arrays: _in_plan(arrays, activation, windows=SAME, groups=1)


CASES = {
    # activations
    "_dropout": [(lambda x, kept: _dropout(x, kept, rate=0.4), (X, Y > 0))],
    "_dropout_add": [
        (lambda x, y, b: _dropout_add(x, y, b, place=PLACE, rate=0.4), (X, Y, ROW)),
        (lambda x: _dropout_add(x, None, None, place=PLACE, rate=0.4), (SIGNAL,)),
    ],
    "elu": [*unary("elu", alpha=0.7, scale=1.3), *unary("selu")],
    "erf": unary("erf"),
    "gelu": [*unary("gelu"), *unary("gelu", approximate="tanh")],
    "hardsigmoid": unary("hardsigmoid"),
    "hardswish": unary("hardswish"),
    "leaky_relu": unary("leaky_relu", negative_slope=0.2),
    "log_sigmoid": unary("log_sigmoid"),
    "log_softmax": [*unary("log_softmax"), *unary("log_softmax", axis=0)],
    "mish": unary("mish"),
    "relu": unary("relu"),
    "sigmoid": unary("sigmoid"),
    "silu": unary("silu"),
    "softmax": [*unary("softmax"), *unary("softmax", axis=0)],
    "softplus": unary("softplus", beta=1.7),
    # losses
    "_cross_entropy": [
        (lambda x, labels: rx.cross_entropy(x, labels), (X, LABELS)),
        (
            lambda x, labels: rx.cross_entropy(
                x, labels, label_smoothing=0.2, ignore_index=0, reduction="none"
            ),
            (X, LABELS),
        ),
        (
            lambda x, labels, kept: _cross_entropy(x, labels, kept, label_smoothing=0.1),
            (X, LABELS, KEPT),
        ),
    ],
    "_cross_entropy_gradient": [
        (
            lambda x, lse, up, down, labels: _cross_entropy_gradient(
                x, lse, up, down, labels, label_smoothing=0.1
            ),
            (X / 2, Y[:, 0], Y[:, 1], Y[:, 2], LABELS),
        )
    ],
    "_huber": [
        (lambda x, y: rx.huber_loss(x, y, delta=0.8), (X, Y)),
        (lambda x, y: rx.smooth_l1_loss(x, y, beta=0.5, reduction="none"), (X, Y)),
    ],
    # affine maps and look-ups
    "embedding": [(rx.embedding, (np.array([[0, 2], [2, 1]]), X))],
    "linear": [
        (rx.linear, (SIGNAL, rng.standard_normal((3, 6)), rng.standard_normal(3))),
        (rx.linear, (ROW, Y)),
    ],
    # convolutions
    "_convolution": [
        (
            lambda x, w, b: rx.conv1d(x, w, b, padding="same", groups=2),
            (SIGNAL, rng.standard_normal((4, 2, 2)), rng.standard_normal(4)),
        ),
        (
            lambda x, w, b: rx.conv2d(x, w, b, stride=2, padding=1, dilation=(1, 2)),
            (IMAGE, rng.standard_normal((3, 2, 2, 2)), rng.standard_normal(3)),
        ),
        (rx.conv2d, (IMAGE, rng.standard_normal((3, 2, 1, 1)))),
        *(
            (in_plan(name), (IMAGE, CENTRE, np.full(2, 0.3), SUM))
            for name in (None, "relu", "silu")
        ),
        (
            lambda x, w: rx.conv3d(x, w, stride=(2, 1, 1), padding=(0, 1, 0)),
            (rng.standard_normal((1, 2, 4, 2, 3)), rng.standard_normal((2, 2, 3, 2, 2))),
        ),
    ],
    "_convolution_input": [
        (
            lambda x, w, b: rx.conv_transpose1d(x, w, b, stride=2, output_padding=1),
            (SIGNAL, rng.standard_normal((4, 2, 3)), rng.standard_normal(2)),
        ),
        (
            lambda x, w, b: rx.conv_transpose2d(x, w, b, stride=(2, 1), padding=1, groups=2),
            (IMAGE, rng.standard_normal((2, 2, 3, 2)), rng.standard_normal(4)),
        ),
    ],
    "_convolution_weight": [
        (
            lambda x, y: _convolution_weight(x, y, windows=CONV, groups=2),
            (IMAGE, rng.standard_normal((2, 4, *CONV.counts((5, 4))))),
        )
    ],
    # pooling
    "_avg_pool": [
        (lambda x: rx.avg_pool2d(x, 2), (IMAGE,)),
        (lambda x: rx.avg_pool2d(x, 3, stride=2, padding=1, count_padding=False), (IMAGE,)),
    ],
    "_max_pool": [
        (lambda x: rx.max_pool2d(x, 2), (RANKED,)),
        (lambda x: rx.max_pool2d(x, (3, 2), stride=1, padding=1, dilation=(1, 2)), (RANKED,)),
    ],
    "_mean_of_largest": [
        (
            lambda y, x, largest: _mean_of_largest(y, x, largest, windows=POOL),
            (IMAGE[:1], RANKS, LARGEST),
        )
    ],
    "_spread_evenly": [
        (
            lambda y: _spread_evenly(y, windows=POOL, count_padding=False, spatial=(5, 4)),
            (rng.standard_normal(LARGEST.shape),),
        )
    ],
    "_spread_to_largest": [
        (
            lambda y, x, largest: _spread_to_largest(y, x, largest, windows=POOL),
            (rng.standard_normal(LARGEST.shape), RANKS, LARGEST),
        )
    ],
    # attention
    "_attention": [
        (rx.scaled_dot_product_attention, (QUERIES, KEYS, VALUES)),
        (rx.scaled_dot_product_attention, (QUERIES, KEYS, VALUES, SCORES)),
        (rx.scaled_dot_product_attention, (QUERIES, KEYS, VALUES, SEEN)),
        (
            lambda q, k, v: rx.scaled_dot_product_attention(
                q, k, v, causal=True, causal_offset=-1, scale=0.3
            ),
            (QUERIES, KEYS, VALUES),
        ),
        (
            lambda q, k, v, n: rx.scaled_dot_product_attention(
                q, k, v, causal=True, causal_offset=1, window=2, key_lengths=n
            ),
            (QUERIES, KEYS, VALUES, np.array([4, 3])),
        ),
    ],
    # resizing
    "_resample": [
        (lambda x: _resample(x, axis=3, stencil=STENCIL), (IMAGE,)),
        (lambda x: rx.interpolate(x, size=(3, 7), mode="bilinear"), (IMAGE,)),
        (lambda x: rx.interpolate(x, scale=1.7), (SIGNAL,)),
    ],
    "_resample_transpose": [
        (
            lambda y: _resample_transpose(y, axis=1, stencil=("linear", 3, 4, 0.75, True)),
            (SIGNAL,),
        )
    ],
    # normalizations
    "_group_norm": [
        (lambda x, w, b, a=a: _grouped(x, w, b, activation=a), (SIGNAL, ROW, Y[0]))
        for a in (None, "silu")
    ],
    "_normalize": [
        (rx.layer_norm, (Y, ROW, Y[0])),
        (lambda x: rx.layer_norm(x, n_axes=2), (SIGNAL,)),
        (rx.rms_norm, (Y, ROW)),
        (lambda x, w, b: _group_formula(x, w, b, 2, 1e-5), (SIGNAL, ROW, Y[0])),
        (lambda x, w, b: rx.batch_norm(x, w, b)[0], (SIGNAL, ROW, Y[0])),
        (
            lambda x, w, b: rx.batch_norm(x, w, b, mean=rx.zeros(4), var=rx.full(4, 2.0))[0],
            (SIGNAL, ROW, Y[0]),
        ),
    ],
}
