"""Products that an array is added to, and what of products the library is asked beforehand."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device
from rtxarr.libs import blas
from rtxarr.polygraph import _products

from .products import EPILOGUES, FLOATS, check, host, poison, random_operands


def sums(array, dtype, n_cases, seed=0):
    """Add random arrays to random products; compare with float64."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(rx, dtype))
    for i in range(n_cases):
        a, b, a64, b64 = random_operands(rng, array, dtype)
        x, size = a64 @ b64, np.abs(a64) @ np.abs(b64)
        scale = float(rng.choice([1, -0.5, 3]))
        values = rng.standard_normal(x.shape).astype(dtype)
        want, size = scale * x + values, abs(scale) * size + np.abs(values.astype(np.float64))
        bias = None
        if b64.ndim > 1 and i % 2:
            bias = rng.standard_normal(b64.shape[-1]).astype(dtype)
            want, size = want + bias, size + np.abs(bias.astype(np.float64))
        epilogue = (None, "relu")[i % 3 == 2]
        addend = array(values)
        options = {"bias": None if bias is None else array(bias), "epilogue": epilogue}
        got = blas.matmul(a, b, addend=addend, scale=scale, **options)
        check(got, EPILOGUES[epilogue](want), size)
        assert got.dtype == dtype
        np.testing.assert_array_equal(host(addend), host(values))
        check(blas.matmul(a, b, scale=scale), scale * x, abs(scale) * (np.abs(a64) @ np.abs(b64)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_plain_sums(dtype):
    sums(np.asarray, dtype, 60)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_library_adds(fake, dtype):
    sums(fake.array, dtype, 100)
    assert {share for _, share in fake.scalars} == {0, 1}
    assert {scale for scale, _ in fake.scalars} == {1, -0.5, 3}


def test_addends_that_the_library_does_not_take(fake):
    a = fake.array(np.eye(8, dtype=np.float32))
    gaps = fake.array(np.arange(128, dtype=np.float32).reshape(8, 16))[:, ::2]
    np.testing.assert_array_equal(host(blas.matmul(a, a, addend=gaps)), host(a) + host(gaps))
    assert blas.status().refused == {"an addend with gaps": 1}
    out = fake.array(np.zeros((8, 8), np.float32))
    assert blas.matmul(a, a, addend=a, out=out) is out
    np.testing.assert_array_equal(host(out), 2 * np.eye(8))
    with pytest.raises(ValueError, match="addend must be float32 of shape"):
        blas.matmul(a, a, addend=fake.array(np.zeros((8, 4), np.float32)))


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(_device, "devices", lambda: ("cpu", "cuda:0"))


def like(x, strides=None):
    return x.dtype, x.shape, strides or x.strides


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_asked_is_what_runs(fake, a_gpu, dtype):
    """A plan that was asked for serves the call; each form has its own."""
    dtype = getattr(rx, dtype)
    shapes = (16, 32), (128, 32), (16, 128), (128,)
    x, w, c, bias = (fake.array(np.ones(s, dtype)) for s in shapes)
    forward = like(x), like(w.T)
    cases = [
        (forward, {}, lambda: blas.matmul(x, w.T)),
        (forward, {"bias": True}, lambda: blas.matmul(x, w.T, bias=bias)),
        (
            forward,
            {"addend": True, "scale": 0.5},
            lambda: blas.matmul(x, w.T, addend=c, scale=0.5),
        ),
        *(
            (
                forward,
                {"epilogue": name, "bias": True},
                lambda name=name: blas.matmul(x, w.T, bias=bias, epilogue=name),
            )
            for name in ("relu", "gelu")
        ),
        (
            forward,
            {"epilogue": "gelu", "bias": True, "aux_ld": 128},
            lambda: _products.product_and_sum(x, w.T, bias, epilogue="gelu"),
        ),
    ]
    kinds = []
    for operands, options, call in cases:
        asked = fake.asked
        assert blas.refusal(*operands, **options) == ""
        assert fake.asked == asked + 1
        assert blas.refusal(*operands, **options) == ""
        assert fake.asked == asked + 1
        n_calls = len(fake.calls)
        call()
        assert len(fake.calls) == n_calls + 1
        kinds.append(fake.calls[-1][0][7])
        plans = [key[1] for key in blas._loaded[0]._plans]
        assert len(set(plans)) == len(kinds)  # memory that is aligned otherwise has its own plan
    assert kinds == [1, 4, 1, 6, 36, 164]
    assert not blas.status().refused


def test_what_would_not_run_is_refused_by_name(fake, a_gpu):
    x = fake.array(np.ones((8, 8), np.float32))
    assert "copied" in blas.refusal(like(x, (64, 8)), like(x))
    assert "nothing" in blas.refusal(like(x[:0]), like(x))
    assert "dtypes" in blas.refusal(like(x.astype(np.int32)), like(x.astype(np.int32)))
    fake.most = 0
    assert "no algorithm" in blas.refusal(like(x), like(x), epilogue="relu")


def test_without_the_library_all_is_refused(clean, monkeypatch):
    x = np.ones((8, 8), np.float32)
    assert blas.refusal(like(x), like(x)) == "there is no GPU"
    monkeypatch.setattr(_device, "devices", lambda: ("cpu", "cuda:0"))
    with pytest.warns(RuntimeWarning, match="run through CuPy"):
        assert "nvmath-python" in blas.refusal(like(x), like(x))
    assert "nvmath-python" in blas.refusal(like(x), like(x))


# ----------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def cupy():
    found = pytest.importorskip("cupy")
    pytest.importorskip("nvmath")
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_gpu_sums(cupy, dtype):
    sums(cupy.asarray, dtype, 150)
    for reason in blas.status().refused:
        assert reason != "an addend with gaps"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gpu_results_are_written_whole(cupy, dtype):
    """Memory that results get held NaN before; addends are left alone."""
    dtype = np.dtype(getattr(rx, dtype))
    rng = np.random.default_rng(0)
    for m, n, k in ((33, 65, 17), (128, 256, 64), (1, 8, 8)):
        a, b, c = (rng.standard_normal(s).astype(dtype) for s in ((m, k), (k, n), (m, n)))
        cupy.cuda.Device().synchronize()
        for _ in range(4):
            poison(cupy.asarray, (m, n), dtype)  # given back at once
            addend = cupy.asarray(c)
            got = blas.matmul(cupy.asarray(a), cupy.asarray(b), addend=addend)
            a64, b64, c64 = map(host, (a, b, c))
            check(got, a64 @ b64 + c64, np.abs(a64) @ np.abs(b64) + np.abs(c64))
            np.testing.assert_array_equal(host(addend), c64)
