"""Rounding to 8-bit floating point against ml_dtypes, and scales from the past."""

import ml_dtypes
import numpy as np
import pytest

from rtxarr import _device
from rtxarr.kernels import fp8
from rtxarr.testing import assert_close

KINDS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def all_float16():
    """Give every finite float16, which has all values and all ties of both formats."""
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    return values[np.isfinite(values)].astype(np.float32)


def on(place, array):
    return _device.to_device(np.array(array), place)


def host(array):
    return np.asarray(_device.to_device(array, "cpu"))


def expected(x, scale, kind):
    limited = np.clip(
        x.astype("float32") / np.float32(scale), -fp8.LARGEST[kind], fp8.LARGEST[kind]
    )
    return limited.astype(KINDS[kind]).astype(np.float32)


def check(place, x, kind, scale=1.0, turned=True):
    amax = on(place, np.asarray([0.25], "float32"))
    found = fp8.quantize(on(place, x), on(place, np.float32([scale])), kind, amax, turned=turned)
    codes = found[0] if turned else found
    assert codes.dtype == np.uint8 and codes.shape == x.shape
    values = host(fp8.decode(codes, kind))
    assert_close(values, expected(x, scale, kind), exact=True)
    if turned:
        assert_close(host(found[1]), host(codes).T, exact=True)
    assert host(amax)[0] == max(0.25, np.abs(x.astype("float32")).max(initial=0))


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_rounds_as_ml_dtypes(kind):
    x = all_float16().reshape(1, -1)
    check("cpu", x, kind)
    check("cpu", x[:, ::-7], kind, scale=0.5)


@pytest.fixture(params=[True, False], ids=["converts", "computes"])
def converts(request, monkeypatch, place):
    """Round by the GPU's instruction, or without it."""
    if request.param and place != "cpu" and int(_device.cupy.cuda.Device().compute_capability) < 89:
        pytest.skip("needs a GPU of compute capability 8.9")
    monkeypatch.setattr(fp8, "_converts", lambda x: request.param)


@pytest.mark.usefixtures("converts")
@pytest.mark.parametrize("kind", KINDS)
def test_every_value_and_tie_rounds_to_the_nearest_even(place, kind):
    values = all_float16()
    if place == "cpu":  # the simulator is slow: values near the steps of the format
        steps = np.arange(256, dtype=np.uint8).view(KINDS[kind]).astype(np.float32)
        steps = np.sort(steps[np.isfinite(steps)])
        ties = (steps[1:] + steps[:-1]) / 2
        values = np.concatenate([steps, ties, np.nextafter(ties, np.float32(np.inf))])
    check(place, np.resize(values, (-(-values.size // 64), 64)), kind)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("turned", [False, True])
def test_shapes_dtypes_and_scales(place, dtype, turned):
    # Whole parts of a tile or not, one tile or more; (8, 64) lies there as (4, 128), too.
    shapes = [(1, 1), (3, 40), (33, 5), (8, 64), (132, 16), (4, 136)]
    if place != "cpu":
        shapes += [(1000, 1), (777, 1025), (4096, 4096), (70_000, 64), (1008, 1040), (3, 8192)]
    rng = np.random.default_rng(0)
    for shape in shapes:
        x = (rng.standard_normal(shape) * 30).astype(getattr(ml_dtypes, dtype, dtype))
        check(place, x, "e4m3", scale=0.25, turned=turned)


@pytest.mark.usefixtures("converts")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_becomes_nan_and_does_not_count(place, kind):
    row = np.float32([1.0, np.inf, -np.inf, np.nan, -3.0, 1e30, -1e30, 0.0])
    largest = fp8.LARGEST[kind]
    for x in (row[None], np.tile(row, (4, 1))):
        amax = on(place, np.float32([0]))
        found = fp8.quantize(on(place, x), on(place, np.float32([1])), kind, amax, turned=True)
        for codes in (found[0], found[1].T):
            values = host(fp8.decode(codes, kind))
            assert np.isnan(values[:, 1:4]).all()
            want = np.float32([1, -3, largest, -largest, 0])
            assert_close(values[:, [0, 4, 5, 6, 7]], np.resize(want, (len(x), 5)), exact=True)
        assert host(amax)[0] == np.float32(1e30)


def test_memory_that_begins_between_multiples_of_16_bytes(place):
    x = np.arange(64 * 8 + 1, dtype="float16")
    array = on(place, x)[1:].reshape(64, 8)
    amax = on(place, np.float32([0]))
    codes, turned = fp8.quantize(array, on(place, np.float32([2])), "e4m3", amax, turned=True)
    want = expected(x[1:].reshape(64, 8), 2, "e4m3")
    assert_close(host(fp8.decode(codes, "e4m3")), want, exact=True)
    assert_close(host(fp8.decode(turned, "e4m3")), want.T, exact=True)


@pytest.mark.gpu
def test_large_matrices_repeat_to_the_bit():
    """On a GPU alone: many blocks, and sizes found in any order."""
    rng = _device.cupy.random.default_rng(0)
    x = rng.standard_normal((8192, 8192), dtype="float32").astype(ml_dtypes.bfloat16)
    scale, amax = (on("cuda:0", np.float32([value])) for value in (0.01, 0))
    codes, turned = fp8.quantize(x, scale, "e4m3", amax, turned=True)
    assert bool((turned == codes.T).all())
    assert float(amax[0]) == float(abs(x.astype("float32")).max())
    again = fp8.quantize(x, scale, "e4m3", amax)
    assert bool((codes == again).all())


def test_an_empty_matrix_has_no_codes():
    amax = np.zeros(1, "float32")
    scale = np.ones(1, "float32")
    assert fp8.quantize(np.zeros((0, 3), "float32"), scale, "e5m2", amax).shape == (0, 3)
    assert amax[0] == 0


def follow(place):
    limits = (448.0, 448.0, 57344.0)
    history, amax = on(place, np.zeros((3, 4), "float32")), on(place, np.zeros((3, 4), "float32"))
    scales = on(place, np.ones((3, 4), "float32"))
    seen = []
    for step, size in enumerate([8.0, 2.0, 1.0, 1.0, 1.0, 0.5]):
        amax[0, 0] = size
        amax[2, 0] = 4.0 * step
        seen.append(size)
        fp8.advance(history, amax, scales, limits)
        assert not host(amax).any()
        largest = max(seen[-4:])
        assert_close(host(scales)[0, 0], np.float32(largest) / np.float32(448), exact=True)
        assert host(history)[0].tolist() == ([0.0] * 4 + seen)[-4:]
    assert host(scales)[1, 0] == 1  # never seen anything
    assert_close(host(scales)[2, 0], np.float32(20 / 57344))
    assert (host(scales)[:, 1:] == 1).all()


def test_scales_follow_the_largest_of_the_past(place):
    follow(place)


def test_scales_follow_on_the_host():
    follow("cpu")
