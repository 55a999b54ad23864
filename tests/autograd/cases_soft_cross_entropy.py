"""Small cases of the cross entropy with class probabilities, and of its gradient."""

import numpy as np

import rtxarr as rx
from rtxarr.ops._soft_cross_entropy import _soft_cross_entropy_gradient

rng = np.random.default_rng(5)
LOGITS, TARGETS = rng.standard_normal((2, 3, 4))
GRAD = rng.standard_normal(3)

CASES = {
    "soft_cross_entropy": [
        (rx.soft_cross_entropy, (LOGITS, TARGETS)),
        (rx.soft_cross_entropy, (LOGITS[:2].T, TARGETS[:2].T)),
    ],
    "_soft_cross_entropy_gradient": [
        (_soft_cross_entropy_gradient, (LOGITS[:1], TARGETS[:1], GRAD[:1])),
        (_soft_cross_entropy_gradient, (LOGITS, TARGETS, GRAD)),
    ],
}
