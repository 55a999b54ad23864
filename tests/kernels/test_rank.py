"""Numbers by rank against sorting: in the simulator, and on a GPU at full size."""

import ml_dtypes
import numpy as np
import pytest

from rtxarr import _device
from rtxarr.kernels.rank import segment_ranked

DTYPES = ["float32", "float64", "float16", ml_dtypes.bfloat16]


def there(x, place):
    return _device.to_device(x, place)


def back(x):
    return _device.to_device(x, "cpu").astype(np.float64)


def segments(place, rng):
    """Give lengths of which each kernel gets some: a thread's, a block's, and longer ones."""
    if place.kind == "cpu":
        return np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 19, 0])
    lengths = np.concatenate(
        [[0, 32, 33, 255, 256, 257, 2048, 2049, 60_000], rng.geometric(0.1, 5000)]
    )
    return rng.permutation(np.append(lengths, 0))


def ranks_of(lengths, q):
    place = q * np.clip(lengths - 1, 0, None)
    return np.stack([np.floor(place), np.ceil(place)], axis=1).astype(np.int64)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("n_features", [1, 3])
def test_ranks(place, dtype, gathered, n_features):
    """With ties, zeros of both signs, infinities, and a NaN that wins."""
    rng = np.random.default_rng(0)
    lengths = segments(place, rng)
    n_values = 12 if place.kind == "cpu" else 3000
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    index = rng.integers(0, n_values - 1, indptr[-1]).astype(np.int32)
    x = (np.round(3 * rng.standard_normal((n_values, n_features))) / 3).astype(dtype)
    x[1], x[2], x[3] = -np.inf, np.inf, -0.0
    index[indptr[4]] = n_values - 1  # the one that is NaN
    x[-1, 0] = np.nan
    rows = x[index]
    options = {"indices": there(index, place)} if gathered else {}
    for q in (0.0, 0.3, 0.5, 1.0):
        ranks = ranks_of(lengths, q)
        given = [there(a, place) for a in (x if gathered else rows, indptr, ranks)]
        found = segment_ranked(*given, **options)
        for which, got in enumerate(found):
            assert got.dtype == x.dtype
            want = np.zeros(got.shape)
            for i in np.flatnonzero(lengths):
                own = np.sort(rows[indptr[i] : indptr[i + 1]].astype(np.float64), axis=0)
                want[i] = np.where(np.isnan(own[-1]), np.nan, own[ranks[i, which]])
            np.testing.assert_array_equal(back(got), want)


def test_all_numbers_of_a_type(place):
    """Of each exponent and sign, subnormal ones too."""
    bits = np.arange(0, 2**16, 1 if place.kind == "gpu" else 1024, dtype=np.uint16)
    for kind in (np.float16, ml_dtypes.bfloat16):
        x = bits.view(kind)
        x = x[~np.isnan(x.astype(np.float64))].reshape(-1, 1)
        indptr, n = np.array([0, x.size]), x.size
        want = np.sort(x.astype(np.float64), axis=0)
        for k in range(0, n - 1, max(1, n // 7)):
            given = [there(a, place) for a in (x, indptr, np.array([[k, k + 1]]))]
            low, high = segment_ranked(*given)
            assert [back(low).item(), back(high).item()] == want[k : k + 2, 0].tolist()


def test_no_rows_or_no_features(place):
    for shape, indptr in (((0, 3), [0, 0]), ((2, 0), [0, 2]), ((0, 3), [0])):
        ranks = np.zeros((len(indptr) - 1, 2), np.int64)
        given = [there(np.asarray(a), place) for a in (np.ones(shape), indptr, ranks)]
        for got in segment_ranked(*given):
            assert got.shape == (len(indptr) - 1, shape[1])
            assert not back(got).any()
