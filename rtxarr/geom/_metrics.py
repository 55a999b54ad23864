"""How well scores tell pairs with an edge from pairs without.

Ties are nobody's win: in :func:`auc` a tie counts half, :func:`average_precision` takes all of a
tie together, the rank in :func:`mrr` is the mean of the best and the worst that ties leave open,
and in :func:`hits_at_k` a positive must score higher than the ``k``-th negative. So constant scores
never look good. Where a score is NaN, so is the metric.
"""

from __future__ import annotations

from typing import Any

from rtxarr import _device
from rtxarr.autograd._tape import raw
from rtxarr.ops._half import widen

__all__ = ["auc", "average_precision", "hits_at_k", "mrr"]


def auc(positive: Any, negative: Any) -> Any:
    """Give the area under the receiver operating characteristic.

    It is the share of pairs of a positive and a negative in which the positive scores higher; a tie
    counts half.

    Parameters
    ----------
    positive, negative : array or Tensor, shape (n_positive,) and (n_negative,)
        Scores.

    Returns
    -------
    array of float64, shape ()

    References
    ----------
    Hanley and McNeil, "The meaning and use of the area under a receiver operating characteristic
    (ROC) curve", 1982, doi:10.1148/radiology.143.1.7063747.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> geom.auc(np.array([3.0, 1.0]), np.array([1.0, 0.0]))
    np.float64(0.875)
    """
    xp, positive, negative = _scores(positive, negative)
    positive, negative = xp.sort(positive), xp.sort(negative)
    below = xp.searchsorted(negative, positive) + xp.searchsorted(negative, positive, side="right")
    share = xp.mean(xp.astype(below, xp.float64)) / (2 * negative.shape[0])
    return _or_nan(xp, share, positive, negative)


def average_precision(positive: Any, negative: Any) -> Any:
    r"""Give the mean precision over the thresholds at which recall rises.

    .. math:: \sum_t (R_t - R_{t-1}) P_t

    over the distinct scores :math:`t` from high to low, each a threshold that takes all scores of
    at least :math:`t`.

    Parameters
    ----------
    positive, negative : array or Tensor, shape (n_positive,) and (n_negative,)
        Scores.

    Returns
    -------
    array of float64, shape ()

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> geom.average_precision(np.array([3.0, 1.0]), np.array([2.0, 0.0])).round(4)
    np.float64(0.8333)
    """
    xp, positive, negative = _scores(positive, negative)
    positive, negative = xp.sort(positive), xp.sort(negative)
    # Each positive adds 1 / n_positive of recall at its own score.
    n_true = positive.shape[0] - xp.searchsorted(positive, positive)
    n_false = negative.shape[0] - xp.searchsorted(negative, positive)
    n_true = xp.astype(n_true, xp.float64)
    precision = xp.mean(n_true / (n_true + xp.astype(n_false, xp.float64)))
    return _or_nan(xp, precision, positive, negative)


def mrr(positive: Any, negative: Any) -> Any:
    """Give the mean of ``1 / rank`` of each positive among its negatives.

    The rank is one more than the number of negatives with a higher score, and half of those with
    the same: the mean of the best and the worst rank that it could have.

    Parameters
    ----------
    positive : array or Tensor, shape (n_positive,)
    negative : array or Tensor, shape (n_positive, n_negative) or (n_negative,)
        One list of negatives for each positive, or one for all.

    Returns
    -------
    array of float64, shape ()

    References
    ----------
    Hu et al., "Open Graph Benchmark", 2020, arXiv:2005.00687, whose evaluator breaks ties so.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> geom.mrr(np.array([3.0, 1.0]), np.array([[2.0, 0.0], [2.0, 0.0]]))
    np.float64(0.75)
    """
    xp, positive, negative = _scores(positive, negative, lists=True)
    best = 1 + _n_higher(xp, positive, negative)
    worst = 1 + _n_higher(xp, positive, negative, tied=True)
    mean = xp.mean(2 / xp.astype(best + worst, xp.float64))
    return _or_nan(xp, mean, positive, negative)


def hits_at_k(positive: Any, negative: Any, k: int) -> Any:
    """Give the share of positives that score higher than the ``k``-th of their negatives.

    Parameters
    ----------
    positive : array or Tensor, shape (n_positive,)
    negative : array or Tensor, shape (n_positive, n_negative) or (n_negative,)
        One list of negatives for each positive, or one for all.
    k : int
        With fewer than ``k`` negatives every positive is a hit.

    Returns
    -------
    array of float64, shape ()

    References
    ----------
    Hu et al., "Open Graph Benchmark", 2020, arXiv:2005.00687, section 5 (link prediction).

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> geom.hits_at_k(np.array([3.0, 2.0]), np.array([2.0, 0.0]), 1)
    np.float64(0.5)
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    xp, positive, negative = _scores(positive, negative, lists=True)
    hit = _n_higher(xp, positive, negative, tied=True) < k
    return _or_nan(xp, xp.mean(xp.astype(hit, xp.float64)), positive, negative)


def _n_higher(xp, positive, negative, tied=False):
    """Count for each positive its negatives with a higher score, and with the same if ``tied``."""
    if negative.ndim == 2:
        higher = negative >= positive[:, None] if tied else negative > positive[:, None]
        return xp.count_nonzero(higher, axis=1)
    side = "left" if tied else "right"
    return negative.shape[0] - xp.searchsorted(xp.sort(negative), positive, side=side)


def _or_nan(xp, metric, *scores):
    """Give the metric, or NaN where a score is: sorted last, it would pass for the highest."""
    for x in scores:
        if xp.isdtype(x.dtype, "real floating"):
            metric = xp.where(xp.any(xp.isnan(x)), xp.full_like(metric, xp.nan), metric)[()]
    return metric


def _scores(positive, negative, lists=False):
    positive, negative = widen(raw(positive)), widen(raw(negative))
    xp = _device.namespace(positive, negative)
    n = positive.shape[0] if positive.ndim else 0
    allowed = [1] if not lists else [1, 2]
    if positive.ndim != 1 or n == 0 or negative.ndim not in allowed or negative.shape[-1] == 0:
        raise ValueError(
            f"positive and negative must be lists of at least one score, got shapes "
            f"{positive.shape} and {negative.shape}"
        )
    if negative.ndim == 2 and negative.shape[0] != n:
        raise ValueError(
            f"negative must have a row for each of {n} positives, got {negative.shape}"
        )
    return xp, positive, negative
