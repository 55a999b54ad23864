"""Dropout."""

from typing import Any

from rtxarr import ops
from rtxarr.nn._module import Module
from rtxarr.nn._text import call_text
from rtxarr.ops._check import check_rate


class Dropout(Module):
    """Set elements to zero at random while training; see :func:`rtxarr.dropout`.

    Parameters
    ----------
    rate : float in [0, 1), default 0.5
        Probability that an element is dropped. What is kept is divided by ``1 - rate``.
    generator : Generator, default :func:`rtxarr.random.default_generator`
        Source of the random numbers.
    """

    def __init__(self, rate: float = 0.5, *, generator: Any = None):
        check_rate(rate)
        self.rate = rate
        self.generator = generator

    def forward(self, x):
        return ops.dropout(x, self.rate, generator=self.generator) if self.training else x

    def __repr__(self):
        return call_text(self, "rate")
