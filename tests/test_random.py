"""Generators: reproducibility, distributions with a fixed seed, and refusals."""

import json
import math
import threading

import ml_dtypes
import numpy as np
import pytest
from scipy import stats

from rtxarr import random
from rtxarr._device import device
from rtxarr.random import Generator, record_draws, replay_draws
from rtxarr.testing import assert_close

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
N = 100_000  # over the limit from which draws are compiled
DRAWS = {
    "uniform": lambda g, n: g.uniform(n),
    "uniform_f32": lambda g, n: g.uniform(n, -1, 3, dtype="float32"),
    "normal": lambda g, n: g.normal(n),
    "normal_f32": lambda g, n: g.normal(n, 2.0, 3.0, dtype="float32"),
    "truncated_normal": lambda g, n: g.truncated_normal(n),
    "exponential": lambda g, n: g.exponential(n),
    "integers": lambda g, n: g.integers(-5, 5, n),
    "dropout_mask": lambda g, n: g.dropout_mask(n, 0.3),
    "bernoulli": lambda g, n: g.bernoulli(0.3, n),
}


@pytest.fixture(autouse=True)
def _on_cpu():
    with device("cpu"):
        yield


def significant(p_value):
    """Tell whether a statistical test with a fixed seed failed."""
    return p_value < 1e-4


# ------------------------------------------------------------------------------ reproducibility


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_same_seed_same_numbers(draw):
    assert_close(draw(Generator(7), 100), draw(Generator(7), 100), exact=True)
    assert (draw(Generator(7), 100) != draw(Generator(8), 100)).any()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_continue_each_other(draw):
    rng = Generator(3)
    parts = [draw(rng, n) for n in (1, 0, 2, 3, 10, 84)]
    assert_close(np.concatenate(parts), draw(Generator(3), 100), exact=True)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_large_and_small_draws_agree(draw):
    rng = Generator(3)
    small = np.concatenate([draw(rng, 1000) for _ in range(70)])
    assert_close(small, draw(Generator(3), 70_000), exact=True)


def test_mixed_widths_start_on_an_even_word():
    """A float32 draw of one word, then float64 draws, which take pairs."""
    rng = Generator(0)
    rng.uniform(1, dtype="float32")
    pair = rng.uniform(1)
    assert pair[0] == Generator(0).uniform(2)[1]
    assert rng.state_dict()["offset"] == 4


def test_values_are_pinned():
    """These numbers are a promise: experiments are repeated years later."""
    rng = Generator(2026)
    assert rng.integers(0, 1000, 4).tolist() == [522, 296, 348, 818]
    assert rng.normal(2, dtype="float32").tolist() == [0.5077314972877502, 0.5811170339584351]
    assert rng.permutation(6).tolist() == [5, 3, 4, 2, 0, 1]
    assert float(Generator(1, key=(2, 3)).uniform(())) == 0.5364219975633304


def test_keys_name_streams():
    first = Generator(1, key=(4, 5)).uniform(8)
    assert_close(first, Generator(1, key=(4, 5)).uniform(8), exact=True)
    others = [Generator(1), Generator(1, key=4), Generator(1, key=(5, 4)), Generator(2, key=(4, 5))]
    assert all((first != other.uniform(8)).all() for other in others)
    assert_close(Generator(1, key=4).uniform(3), Generator(1, key=(4,)).uniform(3), exact=True)


def test_spawned_generators_are_independent():
    parent = Generator(5)
    first, second = parent.spawn(2)
    third = parent.spawn(1)[0]
    again = Generator(5).spawn(3)
    draws = [g.uniform(1000) for g in (first, second, third, parent)]
    assert_close(draws[2], again[2].uniform(1000), exact=True)
    correlations = np.corrcoef(draws) - np.eye(4)
    assert np.abs(correlations).max() < 0.12  # 3.8 standard deviations of 1000 pairs


def test_state_round_trips_through_json():
    rng = Generator(9, key=1)
    rng.normal(3)
    rng.spawn(2)
    state = json.loads(json.dumps(rng.state_dict()))
    other = Generator(0)
    other.uniform(5)
    other.load_state_dict(state)
    assert_close(other.normal(5), rng.normal(5), exact=True)
    assert_close(other.spawn(1)[0].uniform(5), rng.spawn(1)[0].uniform(5), exact=True)


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"algorithm": "pcg64"}, ValueError, "algorithm must be 'philox4x32-10', got 'pcg64'"),
        ({"offset": -1}, ValueError, "offset must lie in"),
        ({"key": "7"}, TypeError, "key must be an integer, got str"),
        ({"more": 1}, ValueError, "state must have the keys"),
    ],
)
def test_bad_states_are_refused(change, error, match):
    rng = Generator(1)
    before = rng.state_dict()
    with pytest.raises(error, match=match):
        rng.load_state_dict({**before, **change})
    assert rng.state_dict() == before


def test_default_generator_restarts():
    random.seed(11)
    first = random.default_generator().uniform(4)
    random.seed(11)
    assert_close(random.default_generator().uniform(4), first, exact=True)
    assert_close(Generator(11).uniform(4), first, exact=True)
    random.seed(0)


# ----------------------------------------------------------------------------- record and replay


def test_replay_repeats_and_then_continues():
    first, second = Generator(1), Generator(2)
    first.uniform(3, dtype="float32")  # leaves an odd counter
    with record_draws() as log:
        want = first.uniform(4), second.normal(3), first.uniform(2)
    assert {generator: place.offset for generator, place in log.items()} == {first: 3, second: 0}
    after = Generator(1)
    after.load_state_dict(first.state_dict())
    for _ in range(2):
        with replay_draws(log):
            got = first.uniform(4), second.normal(3), first.uniform(2)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, exact=True)
    assert_close(first.uniform(5), after.uniform(5), exact=True)


def test_records_nest():
    rng = Generator(1)
    with record_draws() as outer:
        with record_draws() as inner:
            pass
        assert inner == {}
        rng.uniform(1)
        with record_draws() as inner:
            rng.uniform(1)
    assert [place.offset for place in outer.values()] == [0]
    assert [place.offset for place in inner.values()] == [2]
    assert set(outer) == set(inner) == {rng}


def test_records_see_their_own_thread_only():
    rng = Generator(1)
    with record_draws() as log:
        thread = threading.Thread(target=rng.uniform, args=(3,), kwargs={"device": "cpu"})
        thread.start()
        thread.join()
    assert log == {}


def test_replay_restores_after_an_error():
    rng = Generator(1)
    with record_draws() as log:
        rng.uniform(4)
    with pytest.raises(ZeroDivisionError), replay_draws(log):
        raise ZeroDivisionError
    assert rng.state_dict()["offset"] == 8


def test_replay_is_of_its_own_thread():
    rng, want = Generator(1), Generator(1).uniform(6)
    with record_draws() as log:
        rng.uniform(2)
    drawn = []
    with replay_draws(log):
        thread = threading.Thread(target=lambda: drawn.append(rng.uniform(2)))
        thread.start()
        thread.join()
        assert_close(rng.uniform(2), want[:2], exact=True)
    assert_close(drawn[0], want[2:4], exact=True)
    assert_close(rng.uniform(2), want[4:], exact=True)


def test_replay_repeats_spawning_and_reseeding():
    rng = Generator(1)

    def use():
        child = rng.spawn(1)[0].uniform(3)
        rng.load_state_dict(Generator(7).state_dict())
        return child, rng.uniform(3)

    with record_draws() as log:
        want = use()
    state = rng.state_dict()
    for _ in range(2):
        with replay_draws(log):
            for a, b in zip(use(), want, strict=True):
                assert_close(a, b, exact=True)
    assert rng.state_dict() == state


# --------------------------------------------------------------------------------- distributions


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: np.dtype(d).name)
def test_uniform_distribution(dtype):
    x = Generator(1).uniform(N, -1.0, 3.0, dtype=dtype)
    assert x.dtype == dtype
    x = x.astype(np.float64)
    assert x.min() >= -1
    assert x.max() < 3
    if np.dtype(dtype).itemsize >= 4:  # the half types' steps are visible to the test
        assert not significant(stats.kstest(x, stats.uniform(-1, 4).cdf).pvalue)
    assert abs(x.mean() - 1) < 4 * np.sqrt(16 / 12 / N) + 1e-2 * (np.dtype(dtype).itemsize == 2)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: np.dtype(d).name)
def test_uniform_stays_inside_bounds_that_the_type_lacks(dtype):
    x = Generator(1).uniform(N, 0.1, 0.3, dtype=dtype).astype(np.float64)
    assert x.min() >= 0.1
    assert x.max() < 0.3
    x = Generator(1).uniform(N, 1.0, 1.01, dtype=dtype).astype(np.float64)
    assert x.min() >= 1
    assert x.max() < 1.01


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_normal_distribution(dtype):
    x = Generator(2).normal(N, 2.0, 3.0, dtype=dtype)
    assert x.dtype == dtype
    z = (x.astype(np.float64) - 2) / 3
    assert not significant(stats.kstest(z, stats.norm.cdf).pvalue)
    assert abs(stats.skew(z)) < 4 * np.sqrt(6 / N)
    assert abs(stats.kurtosis(z)) < 4 * np.sqrt(24 / N)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_half_normals_are_rounded_float32_ones(dtype):
    want = Generator(2).normal(1000, dtype=np.float32).astype(dtype)
    assert_close(Generator(2).normal(1000, dtype=dtype), want, exact=True)


def test_normal_without_spread():
    assert (Generator(0).normal(5, 3.0, 0.0) == 3.0).all()


@pytest.mark.parametrize(
    "low, high",
    [(-2, 2), (-0.5, 3), (1, np.inf), (-np.inf, -1), (5, 6), (0, 0.1)],
    ids=["even", "uneven", "above", "below", "far", "narrow"],
)
def test_truncated_normal_distribution(low, high):
    mean, std = 0.5, 1.5
    x = Generator(3).truncated_normal(N, mean, std, low, high)
    assert x.min() >= low
    assert x.max() <= high
    want = stats.truncnorm((low - mean) / std, (high - mean) / std, mean, std)
    assert not significant(stats.kstest(x, want.cdf).pvalue)


def test_truncated_normal_far_out():
    x = Generator(3).truncated_normal(10_000, 0.0, 1.0, 20.0, 21.0)
    assert not significant(stats.kstest(x - 20, stats.expon(scale=x.mean() - 20).cdf).pvalue)
    assert 20 < x.min() < x.max() < 21


def test_exponential_distribution():
    for dtype in (np.float32, np.float64):
        x = Generator(4).exponential(N, 2.0, dtype=dtype).astype(np.float64)
        assert not significant(stats.kstest(x, stats.expon(scale=2).cdf).pvalue)


@pytest.mark.parametrize("low, high", [(0, 10), (-7, 6), (0, 2), (100, 103)])
def test_integers_are_equally_likely(low, high):
    x = Generator(5).integers(low, high, N)
    assert not significant(stats.chisquare(np.bincount(x - low, minlength=high - low)).pvalue)


def test_integers_of_a_span_that_needs_rejection():
    """Without rejection a third of this span would come twice as often."""
    x = Generator(5).integers(0, 3 * 2**62, 60_000, dtype=np.uint64)
    counts = np.bincount((x >> np.uint64(62)).astype(np.int64))
    assert not significant(stats.chisquare(counts).pvalue)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_integers_reach_both_ends_of_their_type(dtype):
    info = np.iinfo(dtype)
    x = Generator(6).integers(info.min, info.max + 1, 20_000, dtype=dtype)
    assert x.dtype == dtype
    spread = (x.astype(np.float64) - info.min) / 2.0**info.bits
    assert spread.min() < 0.01
    assert spread.max() > 0.99
    assert (Generator(6).integers(info.max, info.max + 1, 3, dtype=dtype) == info.max).all()


def test_masks_have_their_rate():
    for rate in (0.0, 0.1, 0.5, 1.0):
        kept = Generator(7).dropout_mask((N,), rate)
        assert kept.dtype == bool
        deviation = 4 * np.sqrt(rate * (1 - rate) / N)
        assert abs(kept.mean() - (1 - rate)) <= deviation
        assert abs(Generator(8).bernoulli(rate, N).mean() - rate) <= deviation


def test_bernoulli_of_an_array():
    p = np.repeat([0.0, 0.2, 1.0], 5000).reshape(3, 5000)
    means = Generator(9).bernoulli(p).mean(axis=1)
    assert means[0] == 0
    assert means[2] == 1
    assert abs(means[1] - 0.2) < 4 * np.sqrt(0.16 / 5000)


def test_permutations():
    rng = Generator(10)
    for n in (0, 1, 2, 1000):
        x = rng.permutation(n)
        assert x.dtype == np.int64
        assert np.array_equal(np.sort(x), np.arange(n))
    counts = {}
    for _ in range(3000):
        order = tuple(rng.permutation(3).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert not significant(stats.chisquare(list(counts.values())).pvalue)


def test_permutation_of_rows():
    rows = np.arange(20).reshape(10, 2)
    shuffled = Generator(1).permutation(rows)
    assert (shuffled != rows).any()
    assert_close(shuffled[np.argsort(shuffled[:, 0])], rows, exact=True)


@pytest.mark.parametrize("p", [None, [0.1, 0.0, 0.6, 0.3]], ids=["even", "weighted"])
def test_choice_with_replacement(p):
    x = Generator(11).choice(4, (100, 300), p=p)
    assert x.shape == (100, 300)
    counts = np.bincount(x.ravel(), minlength=4)
    p = np.full(4, 0.25) if p is None else np.array(p)
    assert (counts[p == 0] == 0).all()
    assert not significant(stats.chisquare(counts[p > 0], 30_000 * p[p > 0]).pvalue)


@pytest.mark.parametrize("p", [None, [0.1, 0.0, 0.6, 0.3]], ids=["even", "weighted"])
def test_choice_without_replacement(p):
    rng = Generator(12)
    first = np.zeros(4)
    for _ in range(3000):
        x = rng.choice(4, 2, replace=False, p=p)
        assert x[0] != x[1]
        first[x[0]] += 1
    p = np.full(4, 0.25) if p is None else np.array(p)
    assert first[p == 0].sum() == 0
    assert not significant(stats.chisquare(first[p > 0], 3000 * p[p > 0]).pvalue)


def test_choice_of_rows():
    rows = np.arange(10).reshape(5, 2)
    x = Generator(1).choice(rows, 5, replace=False)
    assert_close(x[np.argsort(x[:, 0])], rows, exact=True)
    assert Generator(1).choice(rows).shape == (2,)


def test_consecutive_numbers_are_uncorrelated():
    x = Generator(13).uniform(N)
    for lag in (1, 2, 3, 4, 8):
        assert abs(np.corrcoef(x[:-lag], x[lag:])[0, 1]) < 4 / np.sqrt(N)


# ------------------------------------------------------------------------------ shapes, refusals


@pytest.mark.parametrize("shape", [(), 0, 3, (0, 2), (2, 3), [2, 1]], ids=str)
def test_shapes(shape):
    want = np.empty(shape).shape
    rng = Generator(0)
    assert rng.uniform(shape).shape == want
    assert rng.integers(0, 5, shape).shape == want
    assert rng.dropout_mask(shape, 0.5).shape == want
    assert rng.choice(5, shape).shape == want


def test_a_mask_set_aside_can_be_drawn_in_pieces_and_again():
    whole, pieces = Generator(4), Generator(4)
    for generator in (whole, pieces):
        generator.normal(3, device="cpu")  # masks need not begin at an even word
        generator.normal(2, dtype="float32", device="cpu")
    want = whole.dropout_mask(100_003, 0.3, device="cpu")
    piece = pieces.dropout_mask_pieces(100_003, 0.3)
    assert whole.state_dict()["offset"] == pieces.state_dict()["offset"]
    for start, shape in ((0, 100_003), (99_999, (2, 2)), (7, (0,)), (7, ())):
        n = math.prod(shape) if isinstance(shape, tuple) else shape
        got = piece(start, shape, "cpu")
        assert_close(got.reshape(-1), want[start : start + n], exact=True)
    assert_close(piece(0, 5, "cpu"), want[:5], exact=True)


REFUSED = {
    "rate": (lambda g: g.dropout_mask(3, 1.5), ValueError, r"rate must lie in \[0, 1\], got 1.5"),
    "rate nan": (lambda g: g.dropout_mask(3, float("nan")), ValueError, "rate must lie in"),
    "p": (lambda g: g.bernoulli(-0.1, 3), ValueError, r"p must lie in \[0, 1\], got -0.1"),
    "p array": (lambda g: g.bernoulli(np.array([2.0])), ValueError, "p must lie in"),
    "p shape": (lambda g: g.bernoulli(np.ones(2), 2), ValueError, "shape and device must be left"),
    "low": (lambda g: g.uniform(3, 2, 2), ValueError, "low must be less than high.* got 2.0 and"),
    "infinite": (lambda g: g.uniform(3, 0, np.inf), ValueError, "both finite"),
    "empty": (
        lambda g: g.uniform(3, 1.0001, 1.0002, dtype="float16"),
        ValueError,
        "no float16 number lies in",
    ),
    "integers": (lambda g: g.integers(3, 3, 2), ValueError, "low must be less than high, got 3"),
    "int8": (lambda g: g.integers(0, 300, 2, dtype="int8"), ValueError, "high must lie in"),
    "int float": (lambda g: g.integers(0.5, 2, 2), TypeError, "low must be an integer, got float"),
    "dtype": (lambda g: g.uniform(3, dtype="int32"), TypeError, "dtype must be float16, bfloat16"),
    "int dtype": (lambda g: g.integers(0, 3, dtype="f4"), TypeError, "dtype must be an integer"),
    "std": (lambda g: g.normal(3, std=-1), ValueError, "std must not be negative, got -1"),
    "mean": (lambda g: g.normal(3, np.nan), ValueError, "mean must be finite, got nan"),
    "scale": (lambda g: g.exponential(3, -1.0), ValueError, "scale must not be negative"),
    "truncated": (lambda g: g.truncated_normal(3, 0, 1, 2, 1), ValueError, "low must be less than"),
    "no mass": (lambda g: g.truncated_normal(3, 0, 1, 50, 51), ValueError, "must hold some of"),
    "no std": (lambda g: g.truncated_normal(3, 0, 0), ValueError, "std must be positive, got 0"),
    "size": (
        lambda g: g.choice(3, 4, replace=False),
        ValueError,
        "size must be at most 3 when nothing is drawn twice, got 4",
    ),
    "weights": (
        lambda g: g.choice(3, 2, replace=False, p=[1, 0, 0]),
        ValueError,
        "size must be at most 1",
    ),
    "sum": (lambda g: g.choice(2, 1, p=[0.5, 0.4]), ValueError, "p must sum to one, got 0.9"),
    "negative": (lambda g: g.choice(2, 1, p=[1.5, -0.5]), ValueError, "p must not be negative"),
    "length": (lambda g: g.choice(3, 1, p=[0.5, 0.5]), ValueError, r"p must have shape \(3,\)"),
    "none": (lambda g: g.choice(0), ValueError, r"a must lie in \[1, "),
    "no rows": (lambda g: g.choice(np.ones((0, 2))), ValueError, "a must not be empty"),
    "shape": (lambda g: g.uniform(-1), ValueError, "shape must lie in"),
    "shape float": (lambda g: g.uniform(2.0), TypeError, "shape must be an integer, got float"),
    "n": (lambda g: g.permutation(-1), ValueError, "x must lie in"),
    "device": (
        lambda g: g.permutation(np.ones(2), device="cpu"),
        ValueError,
        "device must be left",
    ),
    "text": (lambda g: g.uniform(2, "a", 1), TypeError, "low must be a number, got 'a'"),
    "no number": (lambda g: g.normal(2, None), TypeError, "mean must be a number, got None"),
    "rate text": (lambda g: g.dropout_mask(2, "a"), TypeError, "rate must be a number, got 'a'"),
    "state": (lambda g: g.load_state_dict(None), TypeError, "state must be a dict, got NoneType"),
    "seed": (lambda g: Generator(-1), ValueError, "seed must lie in"),
    "seed float": (lambda g: Generator(0.5), TypeError, "seed must be an integer, got float"),
    "key": (lambda g: Generator(0, key=-1), ValueError, "key must lie in"),
}


@pytest.mark.parametrize("call, error, match", REFUSED.values(), ids=REFUSED)
def test_bad_options_are_refused_and_draw_nothing(call, error, match):
    rng = Generator(0)
    with pytest.raises(error, match=match):
        call(rng)
    assert rng.state_dict()["offset"] == 0
