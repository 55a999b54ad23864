import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtxarr.data import kfold, random_split


@given(n=st.integers(0, 50), parts=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_random_split_has_every_index_once(n, parts):
    total = sum(parts) or 1
    fractions = [part / total for part in parts] if sum(parts) else [1.0]
    split = random_split(n, fractions, seed=1)
    assert sorted(np.concatenate(split)) == list(range(n))
    for part, fraction in zip(split, fractions, strict=True):
        assert part.dtype == np.int64
        assert abs(len(part) - fraction * n) <= 1


def test_random_split_depends_on_the_seed_alone():
    first, again, other = (random_split(100, (0.8, 0.2), seed=seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[1], other[1])
    assert [len(part) for part in first] == [80, 20]
    assert not np.array_equal(np.sort(first[1]), first[1])


@pytest.mark.parametrize("fractions", [(0.5, 0.4), (1.5, -0.5), (), (float("nan"), 0.5)])
def test_random_split_refuses_fractions(fractions):
    with pytest.raises(ValueError, match="fractions must be at least 0 and 1 in sum"):
        random_split(10, fractions)


def test_random_split_refuses_a_negative_size():
    with pytest.raises(ValueError, match="n must be at least 0, got -1"):
        random_split(-1, (1.0,))


@pytest.mark.parametrize(("n", "k"), [(10, 3), (5, 5), (7, 2)])
def test_kfold_tests_every_index_once(n, k):
    folds = list(kfold(n, k, seed=1))
    assert len(folds) == k
    assert sorted(np.concatenate([test for _, test in folds])) == list(range(n))
    for train, test in folds:
        assert sorted(np.concatenate([train, test])) == list(range(n))
        assert len(test) in (n // k, n // k + 1)


@pytest.mark.parametrize("k", [1, 11])
def test_kfold_refuses(k):
    with pytest.raises(ValueError, match=rf"k must lie in \[2, 10\], got {k}"):
        kfold(10, k)
