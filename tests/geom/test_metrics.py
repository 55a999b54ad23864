"""Metrics of link prediction, against plain counting."""

import functools

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom
from rtxarr.testing import assert_close

rng = np.random.default_rng(0)
# Rounded, so that there are many ties.
SCORES = {
    "distinct": (rng.standard_normal(40), rng.standard_normal(70)),
    "ties": (rng.standard_normal(40).round(0), rng.standard_normal(70).round(0)),
    "equal": (np.zeros(4), np.zeros(6)),
    "one-each": (np.array([1.0]), np.array([0.0])),
    "infinite": (np.array([np.inf, 0.0]), np.array([-np.inf, 0.0, np.inf])),
}


@pytest.fixture(params=SCORES)
def scores(request):
    return SCORES[request.param]


@pytest.mark.skip_xp("dask.array", reason="sorts")
def test_auc(xp, scores):
    positive, negative = scores
    wins = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    got = geom.auc(xp.asarray(positive), xp.asarray(negative))
    assert_close(got, np.asarray(wins / (len(positive) * len(negative))))


@pytest.mark.skip_xp("dask.array", reason="sorts")
def test_average_precision(xp, scores):
    positive, negative = scores
    total, recall = 0.0, 0.0
    for threshold in sorted({*positive, *negative}, reverse=True):
        n_true, n_false = np.sum(positive >= threshold), np.sum(negative >= threshold)
        new = n_true / len(positive)
        total += (new - recall) * n_true / (n_true + n_false)
        recall = new
    got = geom.average_precision(xp.asarray(positive), xp.asarray(negative))
    assert_close(got, np.asarray(total))


@pytest.mark.skip_xp("dask.array", reason="sorts")
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_ranks(xp, scores, own):
    positive, negative = scores
    lists = np.random.default_rng(1).choice(negative, (len(positive), 5)) if own else negative
    every = lists if own else np.broadcast_to(negative, (len(positive), len(negative)))
    ranks, hits = [], []
    for p, row in zip(positive, every, strict=True):
        best, worst = 1 + np.sum(row > p), 1 + np.sum(row >= p)
        ranks.append((best + worst) / 2)
        hits.append(worst <= 3)
    args = xp.asarray(positive), xp.asarray(lists)
    assert_close(geom.mrr(*args), np.asarray(np.mean(1 / np.array(ranks))))
    assert_close(geom.hits_at_k(*args, 3), np.asarray(np.mean(hits)))


def test_constant_scores_look_bad():
    positive, negative = np.zeros(5), np.zeros(99)
    assert geom.auc(positive, negative) == 0.5
    assert geom.average_precision(positive, negative) == 5 / 104
    assert geom.hits_at_k(positive, negative, 10) == 0
    assert geom.mrr(positive, negative) == 1 / 50.5


def test_the_kth_negative_is_the_bar():
    negative = np.array([5.0, 4.0, 3.0, 2.0])
    positive = np.array([6.0, 4.5, 4.0, 3.5])
    assert geom.hits_at_k(positive, negative, 1) == 0.25
    assert geom.hits_at_k(positive, negative, 2) == 0.5
    assert geom.hits_at_k(positive, negative, 3) == 1.0
    assert geom.hits_at_k(positive, negative, 5) == 1.0


@pytest.mark.skip_xp("dask.array", reason="sorts")
@pytest.mark.parametrize("where", ["positive", "negative"])
def test_scores_of_a_model_that_diverged_give_nan(xp, where):
    """Not 1, which they get where NaN is sorted behind all numbers."""
    scores = {"positive": np.array([2.0, 1.0]), "negative": np.array([1.5, 0.5])}
    scores[where][1] = np.nan
    positive, negative = (xp.asarray(scores[name]) for name in ("positive", "negative"))
    metrics = (geom.auc, geom.average_precision, geom.mrr, lambda p, n: geom.hits_at_k(p, n, 1))
    for metric in metrics:
        assert np.isnan(float(metric(positive, negative)))
    assert np.isnan(float(geom.mrr(positive, xp.stack([negative, negative]))))


@pytest.mark.skip_xp("array_api_strict", reason="has no half precision")
@pytest.mark.skip_xp("dask.array", reason="sorts")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_in_half_precision(xp, dtype):
    positive, negative = (
        rx.astype(xp.asarray(scores), dtype) for scores in ([2.0, 1.0, 0.5], [1.5, 0.25])
    )
    hits = functools.partial(geom.hits_at_k, k=1)
    for metric in (geom.auc, geom.average_precision, geom.mrr, hits):
        want = metric(rx.astype(positive, "float64"), rx.astype(negative, "float64"))
        assert float(metric(positive, negative)) == float(want)
    assert np.isnan(float(geom.auc(positive * xp.nan, negative)))


def test_bad_scores():
    with pytest.raises(ValueError, match="at least one score"):
        geom.auc(np.ones(0), np.ones(2))
    with pytest.raises(ValueError, match="at least one score"):
        geom.auc(np.ones(2), np.ones((2, 2)))
    with pytest.raises(ValueError, match="a row for each of 2 positives"):
        geom.mrr(np.ones(2), np.ones((3, 2)))
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        geom.hits_at_k(np.ones(2), np.ones(2), 0)
