"""Cases of linear maps with an activation or a gate, away from kinks.

The operations that a GPU's library computes are called by themselves, so that they run on the CPU
too.
"""

import numpy as np

import rtxarr as rx
from rtxarr.ops._activated import _in_product
from rtxarr.ops._gates import ACTIVATIONS, _gate_halves

rng = np.random.default_rng(17)
X = rng.standard_normal((2, 3, 4))
WEIGHT, OTHER = rng.standard_normal((2, 5, 4))
BIAS = rng.standard_normal(5)
assert np.abs(X @ WEIGHT.T + BIAS).min() > 0.01  # no kink is near
assert np.abs(X @ WEIGHT.T).min() > 0.01


def within(activation):
    return lambda x, w, b: _in_product(x, w, b, activation)


def gated(activation):
    return lambda *arrays: rx.gated_linear(*arrays, activation=activation)


CASES = {
    "_activated_linear": [
        *((within(name), (X, WEIGHT, BIAS)) for name in ("relu", "gelu_tanh")),
        (within("gelu_tanh"), (X[0, 0], WEIGHT, None)),
    ],
    "_gate": [
        *((gated(name), (X, WEIGHT, OTHER)) for name in ("relu", "sigmoid", "silu")),
        *((gated(name), (X, WEIGHT, OTHER, BIAS, BIAS)) for name in ("gelu", "gelu_tanh")),
    ],
    "_gate_halves": [
        (lambda x, name=name: _gate_halves(x, activation=name), (X,)) for name in ACTIVATIONS
    ],
    "_stored_gelu": [(within("gelu_tanh"), (X[0], WEIGHT, BIAS))],
    "_stored_relu": [
        (within("relu"), (X[0], WEIGHT, BIAS)),
        (lambda x, w: rx.linear(x, w, activation="relu") * within("relu")(x, w, None), (X, WEIGHT)),
    ],
}
