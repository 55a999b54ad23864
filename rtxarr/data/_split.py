"""Splits of a data set into parts, as sample indices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from rtxarr.random import Generator


def random_split(n: int, fractions: Sequence[float], seed: int = 0) -> tuple[np.ndarray, ...]:
    """Split ``range(n)`` at random into disjoint parts.

    Parameters
    ----------
    n : int
        Number of samples.
    fractions : sequence of float
        Share of each part, all at least 0 and 1 in sum.
    seed : int, default 0

    Returns
    -------
    tuple of NumPy arrays of int64, shape (n_part,)
        Every index is in one part; sizes differ from ``fraction * n`` by at most one.

    Examples
    --------
    >>> from rtxarr.data import random_split
    >>> train, val = random_split(10, (0.8, 0.2), seed=0)
    >>> len(train), len(val)
    (8, 2)
    """
    if not all(fraction >= 0 for fraction in fractions) or not math.isclose(sum(fractions), 1):
        raise ValueError(f"fractions must be at least 0 and 1 in sum, got {tuple(fractions)}")
    ends = np.rint(np.cumsum(fractions) * n).astype(np.int64)
    return tuple(np.split(_permutation(n, seed), ends[:-1]))


def kfold(n: int, k: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return an iterator over the ``(train, test)`` indices of k-fold cross-validation.

    Parameters
    ----------
    n : int
        Number of samples.
    k : int
        Number of folds, from 2 to ``n``.
    seed : int, default 0

    Yields
    ------
    train, test : NumPy arrays of int64, shapes (n - n_test,) and (n_test,)
        Every index is in the test part of one fold; fold sizes differ by at most one.
    """
    if not 2 <= k <= n:
        raise ValueError(f"k must lie in [2, {n}], got {k}")
    folds = np.array_split(_permutation(n, seed), k)
    return ((np.concatenate(folds[:i] + folds[i + 1 :]), test) for i, test in enumerate(folds))


def _permutation(n: int, seed: int) -> np.ndarray:
    if n < 0:
        raise ValueError(f"n must be at least 0, got {n}")
    return Generator(seed).permutation(n, device="cpu")
