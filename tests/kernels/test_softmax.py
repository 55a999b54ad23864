"""The kernels of softmax, its logarithm and the cross entropy with labels, against float64."""

import os

import ml_dtypes
import numpy as np
import pytest
from scipy import special

import rtxarr as rx
from rtxarr import _device
from rtxarr.kernels import softmax as kernels
from rtxarr.testing import TOLERANCES, assert_close

if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    from rtxarr.kernels import _plan

DTYPES = ["float32", "float16", "bfloat16", "float64"]
SMALL = [(1, 1), (5, 3), (2, 3, 24), (2, 70)]
LARGE = [(1, 1), (70_001, 5), (1000, 64), (333, 768), (4099, 1000), (2000, 1024), (5, 32_000)]
LARGE += [(9, 33_000), (3, 65_536), (70, 50_257), (2, 65_535)]


def shapes(place, dtype):
    if place != "cpu":
        return LARGE
    return SMALL if dtype in ("float32", "bfloat16") else SMALL[1:3]


def near(got, want, dtype, tighter=1.0):
    rtol, atol = TOLERANCES[dtype]
    assert_close(got, want, rtol=rtol, atol=atol * tighter)


def make(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    kind = getattr(ml_dtypes, dtype, dtype)
    return [(scale * rng.standard_normal(shape)).astype(kind) for scale in (3, 1)]


def run(place, function, x, grad):
    t = rx.Tensor(_device.to_device(x, place), requires_grad=True)
    out = function(t)
    out.backward(_device.to_device(grad, place))
    return out, t.grad


def wide(x):
    return x.astype(np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(place, dtype):
    for shape in shapes(place, dtype):
        x, grad = make(shape, dtype)
        assert kernels.fits(_device.to_device(x, place))
        out, of_x = run(place, rx.softmax, x, grad)
        want = special.softmax(wide(x), axis=-1)
        assert out.dtype == of_x.dtype == x.dtype
        near(out, want, dtype, 1e-2)
        # The backward pass starts from the rounded result.
        p = wide(_device.to_device(out.data, "cpu"))
        near(of_x, p * (wide(grad) - (wide(grad) * p).sum(-1, keepdims=True)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_softmax(place, dtype):
    for shape in shapes(place, dtype):
        x, grad = make(shape, dtype)
        out, of_x = run(place, rx.log_softmax, x, grad)
        want = special.log_softmax(wide(x), axis=-1)
        near(out, want, dtype)
        p = np.exp(wide(_device.to_device(out.data, "cpu")))
        want = wide(grad) - p * wide(grad).sum(-1, keepdims=True)
        near(of_x, want, dtype, max(1.0, np.abs(want).max(initial=0.0)))


@pytest.mark.sim
@pytest.mark.parametrize("function", [rx.softmax, rx.log_softmax])
def test_rows_longer_than_the_registers(monkeypatch, function):
    monkeypatch.setattr(_plan, "_MOST_LANES", 2)
    for shape in ((3, 72), (2, 70)):
        x, grad = make(shape, "float32")
        want = run("cpu", function, wide(x), wide(grad))
        for a, b in zip(run("cpu", function, x, grad), want, strict=True):
            near(a, b, "float32")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the simulator: infinity minus itself
@pytest.mark.parametrize("width", [3, 8, 40])
def test_rows_of_what_is_not_finite(place, width):
    x = np.zeros((4, width), np.float32)
    x[0] = -np.inf
    x[1, 1:] = -np.inf
    x[2, 1] = np.nan
    x[3, 0] = -3e38
    got = rx.softmax(_device.to_device(x, place))
    want = np.full((4, width), np.nan)
    want[0], want[1], want[3] = 0, 0, 1 / (width - 1)
    want[1, 0], want[3, 0] = 1, 0
    near(got, want, "float32")
    logarithm = _device.to_device(rx.log_softmax(_device.to_device(x, place)), "cpu")
    assert np.isnan(logarithm[[0, 2]]).all()
    with np.errstate(divide="ignore"):
        near(logarithm[1], np.log(want[1]), "float32")


@pytest.mark.parametrize("index_dtype", ["int64", "int32", "uint8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(place, dtype, index_dtype, smoothing):
    if index_dtype != "int64" and dtype != "float32":
        return  # one type of each is enough
    for shape in shapes(place, dtype):
        x, _ = make(shape, dtype)
        rng = np.random.default_rng(1)
        labels = rng.integers(0, min(200, shape[-1]), shape[:-1]).astype(index_dtype)
        grad = rng.standard_normal(shape[:-1]).astype(x.dtype)
        kept = labels != 1
        log_p = special.log_softmax(wide(x), axis=-1)
        target = np.eye(shape[-1])[labels] if shape[-1] < 100 else None
        picked = np.take_along_axis(log_p, labels[..., None].astype(int), -1)[..., 0]
        losses = -(1 - smoothing) * picked - smoothing * log_p.mean(-1)
        out, of_x = run(
            place,
            lambda t, labels=labels: rx.cross_entropy(
                t,
                _device.to_device(labels, place),
                label_smoothing=smoothing,
                ignore_index=1,
                reduction="none",
            ),
            x,
            grad,
        )
        near(out, np.where(kept, losses, 0), dtype, 3.0)
        assert of_x.dtype == x.dtype
        if target is not None:
            target = (1 - smoothing) * target + smoothing / shape[-1]
            want = (wide(grad) * kept)[..., None] * (np.exp(log_p) - target)
            near(of_x, want, dtype)
        else:
            total = np.asarray(_device.to_device(of_x, "cpu"), np.float64)
            want = wide(grad) * kept * (np.exp(picked) - (1 - smoothing) - smoothing / shape[-1])
            got = np.take_along_axis(total, labels[..., None].astype(int), -1)[..., 0]
            near(got.astype(x.dtype), want, dtype)
            near(total.sum(-1).astype(x.dtype), 0 * want, dtype, 30.0)


def test_mean_over_what_counts(place):
    x, _ = make((6, 5), "bfloat16")
    labels = np.array([0, 4, 2, 2, 1, 3])
    losses = -np.take_along_axis(special.log_softmax(wide(x), -1), labels[:, None], -1)[:, 0]
    got = rx.cross_entropy(
        _device.to_device(x, place), _device.to_device(labels, place), ignore_index=2
    )
    near(got, losses[labels != 2].mean(), "bfloat16")


def test_labels_that_are_no_classes_give_nan(place):
    x, _ = make((3, 5), "float32")
    labels = _device.to_device(np.array([5, -1, 2]), place)
    if place == "cpu":  # where the host can see them, they are refused before
        with pytest.raises(IndexError):
            rx.cross_entropy(x, labels)
        return
    losses = _device.to_device(
        rx.cross_entropy(_device.to_device(x, place), labels, reduction="none"), "cpu"
    )
    assert np.isnan(losses).tolist() == [True, True, False]


def test_nothing_to_do(place):
    x = _device.to_device(np.zeros((0, 3), np.float32), place)
    assert rx.softmax(x).shape == (0, 3)
    assert rx.log_softmax(x).shape == (0, 3)
    labels = _device.to_device(np.zeros(0, np.int64), place)
    assert rx.cross_entropy(x, labels, reduction="none").shape == (0,)


@pytest.mark.gpu
def test_no_memory_as_large_as_the_logits_is_taken():
    """The forward pass takes a number a row, the backward pass only its result."""
    cupy = pytest.importorskip("cupy")
    logits = rx.Tensor(cupy.zeros((2000, 50_000), cupy.float32), requires_grad=True)
    labels = cupy.zeros(2000, cupy.int64)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        loss = rx.cross_entropy(logits, labels)
        assert pool.total_bytes() < logits.data.nbytes // 100
        loss.backward()
        assert pool.total_bytes() < 1.1 * logits.data.nbytes
