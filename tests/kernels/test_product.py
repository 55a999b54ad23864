"""Products of segments against wider numbers: on the CPU, in the simulator, and on a GPU."""

import ml_dtypes
import numpy as np
import pytest

from rtxarr import _device
from rtxarr.kernels import product

DTYPES = ["float32", "float64", "float16", ml_dtypes.bfloat16]
ROUNDING = {"float32": 1e-5, "float64": 1e-13, "float16": 1e-3, "bfloat16": 8e-3}


def there(x, place):
    return x if place is None else _device.to_device(x, place)


def back(x):
    return _device.to_device(x, "cpu")


def checked(place, dtype, gathered, monkeypatch, n=3):
    """Compare products, and those without each factor, with those of wider numbers."""
    rng, name = np.random.default_rng(0), np.dtype(dtype).name
    small = place is None or place.kind == "cpu"
    if small:
        monkeypatch.setattr(product, "_CHUNK", 4)
        monkeypatch.setattr(product, "_HOST", 3)
    lengths = np.array([0, 1, 2, 3, 4, 5, 7, 8, 30, 0, 45] + [1024, 1025, 0, 5000] * (not small))
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    x = rng.uniform(0.5, 1.9, (40, n)) * rng.choice([-1, 1], (40, n))
    x = x.astype(dtype)
    x[3, 0], x[4, 1], x[5, 2], x[6, 1] = np.nan, -np.inf, 0, 0
    if name in ("float32", "float64"):  # which leave the range on the way
        x[7], x[8], x[9] = np.finfo(dtype).max, np.finfo(dtype).tiny / 4, np.finfo(dtype).tiny / 8
    index = rng.integers(0, 40, indptr[-1]).astype(np.int32)
    rows = x[index]
    given = [there(a, place) for a in (x if gathered else rows, indptr)]
    options = {"indices": there(index, place)} if gathered else {}
    got = back(product.segment_product(*given, **options))
    owner = np.repeat(np.arange(lengths.size), lengths)
    number, code = (back(a) for a in product.factors(*given, **options))
    rest = product.without(number[owner], code[owner], rows).astype(np.float64)
    assert got.dtype == x.dtype
    assert (np.abs(code % 16) <= 10).all()
    bound = ROUNDING[name]
    with np.errstate(all="ignore"):
        for i in range(lengths.size):
            own = rows[indptr[i] : indptr[i + 1]].astype(np.longdouble)
            least = float(np.finfo(number.dtype).smallest_subnormal)
            least = least if name in ("float32", "float64") else 1e-6
            want = own.prod(axis=0).astype(number.dtype).astype(dtype).astype(np.float64)
            np.testing.assert_allclose(got[i].astype(np.float64), want, rtol=bound, atol=least)
            for j in range(min(own.shape[0], 50)):
                want = np.delete(own, j, axis=0).prod(axis=0).astype(number.dtype)
                known, left = ~np.isnan(own[j]), rest[indptr[i] + j]
                want = want.astype(np.float64)[known]
                np.testing.assert_allclose(left[known], want, rtol=1e-4, atol=least)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("n_features", [3, 4])
def test_products(place, dtype, gathered, n_features, monkeypatch):
    checked(place, dtype, gathered, monkeypatch, n_features)


@pytest.mark.skipif(_device._SIMULATING, reason="the simulator takes all arrays")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_products_on_the_cpu(dtype, monkeypatch):
    checked(None, dtype, True, monkeypatch)


@pytest.mark.skipif(not _device._SIMULATING, reason="needs the simulator")
@pytest.mark.sim
def test_kernels_and_arrays_leave_a_factor_out_alike():
    from rtxarr.kernels._product_cuda import others

    rng = np.random.default_rng(1)
    number, x = rng.uniform(1, 2, (2, 80)).astype(np.float32)
    x[:8] = [0, 0, np.inf, -np.inf, np.nan, 1e-40, 3e38, -0.0]
    counts = rng.choice([0, 1, 2, 4, 5, 8, 10], 80)
    counts[:4] = 4, 8, 1, 2
    code = (16 * rng.integers(-200, 200, 80) + counts).astype(np.float32)
    want = product.without(number, code, x)
    got = [others(np.float32)(*each) for each in zip(number, code, x, strict=True)]
    np.testing.assert_allclose(got, want, rtol=1e-6)
