"""Small cases of the rotary embedding."""

import numpy as np

import rtxarr as rx

rng = np.random.default_rng(21)
X = rng.standard_normal((2, 3, 6))
COS, SIN = rng.standard_normal((2, 3, 2))

CASES = {
    "_rotate": [
        (rx.rotary_embedding, (X, COS, SIN)),
        (lambda *a: rx.rotary_embedding(*a, interleaved=True), (X[..., :4], COS, SIN)),
    ],
}
