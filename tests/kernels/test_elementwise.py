"""Elementwise kernels against NumPy in float32, rounded once."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device
from rtxarr.kernels import elementwise
from rtxarr.kernels.elementwise import (
    BINARY,
    UNARY,
    add_to,
    binary,
    convert,
    scaled_product,
    unary,
)
from rtxarr.testing import assert_close

DTYPES = ["float32", "float16", "bfloat16"]
EXACT = {"abs", "negative", "add", "multiply", "subtract", "maximum", "minimum", "square"}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan]


@pytest.fixture
def small(monkeypatch, poisoned_results):
    monkeypatch.setattr(elementwise, "_FEWEST", 1)


def lay_out(place, x, way):
    x = _device.to_device(x, place)
    if way == "turned":
        return x.T.copy(order="C").T
    return x.transpose(1, 0, 2).copy(order="C").transpose(1, 0, 2) if way == "heads" else x


def values(rng, shape, dtype, special):
    x = rng.standard_normal(shape).astype(np.float32).reshape(-1)
    if special:
        n = min(x.size, len(SPECIAL))
        x[:n] = SPECIAL[:n]
    return rng.permutation(x).reshape(shape).astype(getattr(rx, dtype))


def check(got, want, name):
    assert got is not None
    host = rx.Tensor(got).numpy()
    want = np.asarray(want, np.float32).astype(host.dtype)
    if name in EXACT or (host.dtype.itemsize == 2 and name in ("divide", "sqrt")):
        assert_close(host, want, exact=True)
    else:
        assert_close(host, want, rtol=2e-6 if host.dtype == np.float32 else 1e-2)


def rounded(number, dtype):
    return np.float32(np.asarray(number, dtype))


@pytest.mark.parametrize("way", ["plain", "turned", "heads"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_functions(place, small, dtype, way):
    rng = np.random.default_rng(0)
    special = place != "cpu"  # the simulator warns of them
    for shape in [(3, 1, 7), (2, 4, 4)] if place == "cpu" else [(3, 1, 7), (20, 333, 77)]:
        x, y = (values(rng, shape, dtype, special) for _ in range(2))
        wide_x, wide_y = x.astype(np.float32), y.astype(np.float32)
        on_x, on_y = lay_out(place, x, way), lay_out(place, y, way)
        with np.errstate(all="ignore"):
            for name in UNARY:
                positive = name in ("log", "sqrt") and not special
                source = np.abs(x) + np.asarray(0.5, x.dtype) if positive else x
                got = unary(name)(lay_out(place, source, way))
                check(got, getattr(np, name)(source.astype(np.float32)), name)
                assert got.strides == on_x.strides or 1 in shape
            for name in BINARY:
                function, run = getattr(np, name), binary(name)
                check(run(on_x, on_y), function(wide_x, wide_y), name)
                for number in (0.3, -2):
                    n = rounded(number, x.dtype)
                    check(run(on_x, number), function(wide_x, n), name)
                    check(run(number, on_x), function(n, wide_x), name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_with_many(place, small, dtype):
    rng = np.random.default_rng(1)
    x = values(rng, (3, 21), dtype, False)
    one = values(rng, (), dtype, False)
    on_x, on_one = _device.to_device(x, place), _device.to_device(one, place)
    xp = _device.namespace(on_x)
    wide_x, wide_one = x.astype(np.float32), np.float32(one)
    for other in (on_one, xp.reshape(on_one, (1, 1)), xp.broadcast_to(on_one, x.shape)):
        for name in ("subtract", "divide"):
            function, run = getattr(np, name), binary(name)
            check(run(on_x, other), function(wide_x, wide_one), name)
            check(run(other, on_x), function(wide_one, wide_x), name)
    assert binary("add")(on_x, xp.reshape(on_one, (1, 1, 1))) is None  # it has an axis more


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_many(place, small, dtype):
    rng = np.random.default_rng(5)
    shapes = [
        ((3, 5, 8), (8,)),
        ((3, 5, 8), (1, 8)),
        ((3, 5, 8), (3, 1, 8)),
        ((2, 3, 2, 8), (2, 1, 2, 8)),
        ((2, 3, 2, 8), (2, 8)),
        ((2, 1, 5, 16), (1, 1, 16)),
    ]
    if place != "cpu":
        shapes += [((7, 300, 1000), (7, 1, 1000)), ((70_000, 8), (8,)), ((300, 4000), (4000,))]
    for shape, of_rows in shapes:
        x, y = values(rng, shape, dtype, False), values(rng, of_rows, dtype, False)
        on_x, on_y = (_device.to_device(a, place) for a in (x, y))
        wide_x, wide_y = x.astype(np.float32), y.astype(np.float32)
        for name in ("subtract", "multiply"):
            function, run = getattr(np, name), binary(name)
            check(run(on_x, on_y), function(wide_x, wide_y), name)
            check(run(on_y, on_x), function(wide_y, wide_x), name)


def test_most_rows():
    assert elementwise._most_rows(1) == 65_535 * 256
    assert elementwise._most_rows(129) == elementwise._most_rows(9999) == 65_535
    assert elementwise._most_rows(128) == 2 * 65_535


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_with_a_number(place, small, dtype):
    rng = np.random.default_rng(2)
    x, y = (values(rng, (5, 13), dtype, False) for _ in range(2))
    on_x, on_y = (_device.to_device(a, place) for a in (x, y))
    wide_x, wide_y = x.astype(np.float32), y.astype(np.float32)
    check(scaled_product(on_x, on_y, -2), wide_x * wide_y * np.float32(-2), "multiply")
    one = _device.namespace(on_x).broadcast_to(on_y[1, 2], x.shape)
    for pair in ((on_x, one), (one, on_x)):
        check(scaled_product(*pair, 0.5), wide_x * wide_y[1, 2] * np.float32(0.5), "multiply")
    assert scaled_product(on_x, on_y[0], 2) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_in_place(place, small, dtype):
    rng = np.random.default_rng(3)
    x, y = (values(rng, (7, 11), dtype, False) for _ in range(2))
    total, other = (_device.to_device(a.copy(), place) for a in (x, y))
    assert add_to(total, other)
    check(total, x.astype(np.float32) + y.astype(np.float32), "add")
    assert_close(rx.Tensor(other).numpy(), y, exact=True)
    before = rx.Tensor(total).numpy().copy()
    assert not add_to(total, other[:1])
    assert not add_to(total, other.T)
    flat = _device.namespace(total).reshape(total, (-1,))
    assert not add_to(flat[:-16], flat[16:])  # other threads' elements
    assert_close(rx.Tensor(total).numpy(), before, exact=True)


def test_conversions(place, small):
    rng = np.random.default_rng(4)
    for source in DTYPES:
        x = values(rng, (3, 7), source, place != "cpu")
        on_x = lay_out(place, x, "turned")
        for other in DTYPES:
            target = np.dtype(getattr(rx, other))
            got = convert(on_x, target)
            if (source == "float32") == (other == "float32"):
                assert got is None
                continue
            assert got.dtype == target
            assert got.strides == tuple(n // x.itemsize * target.itemsize for n in on_x.strides)
            with np.errstate(all="ignore"):
                assert_close(rx.Tensor(got).numpy(), x.astype(target), exact=True)


def test_what_is_left_to_others(place, small, monkeypatch):
    add, negative = binary("add"), unary("negative")
    x = _device.to_device(np.ones((4, 8), np.float32), place)
    xp = _device.namespace(x)
    assert add(x, x) is not None
    assert add(x, x[:, :1]) is None
    assert add(x, xp.ones((3, 4, 8), dtype=xp.float32, device=x.device)[::2]) is None
    assert add(x[:, :1], xp.ones((1, 8), dtype=xp.float32, device=x.device)) is None
    assert add(x, x.T.copy(order="C").T) is None
    assert add(x, xp.astype(x, xp.float16)) is None
    assert negative(xp.astype(x, xp.int32)) is None
    assert negative(xp.astype(x, xp.float64)) is None
    assert negative(x[:, ::2]) is None
    assert negative(xp.reshape(x, (-1,))[1:]) is None  # not at a multiple of 16 bytes
    assert convert(x, np.dtype(np.float64)) is None
    assert convert(x, np.dtype(np.int32)) is None
    monkeypatch.setattr(elementwise, "_FEWEST", 33)
    assert add(x, x) is None and add(x, 2) is None and add(2.0, x) is None
    assert negative(x) is None and convert(x, np.dtype(np.float16)) is None
    assert scaled_product(x, x, 2) is None and not add_to(x, x)


@pytest.mark.gpu
def test_offsets_beyond_four_gigabytes():
    cupy = _device.cupy
    if cupy.cuda.runtime.memGetInfo()[0] < 20 << 30:
        pytest.skip("needs 20 GB of free memory on the GPU")
    x = cupy.ones(3 << 30, cupy.float16)
    got = binary("add")(x, 1.0)
    assert got is not None
    for i in (0, 1 << 30, (1 << 31) + 5, (3 << 30) - 1):
        assert float(got[i]) == 2


@pytest.mark.skipif(_device._SIMULATING, reason="needs NUMBA_ENABLE_CUDASIM unset")
def test_no_two_kernels_are_one_on_disk():
    from rtxarr._kernel_cache import fingerprint
    from rtxarr.kernels import _elementwise_cuda as made

    forms = ("arrays", "number first", "number second", "one first", "one second")
    kernels = []
    for dtype in (np.dtype(getattr(rx, name)) for name in DTYPES):
        kernels += [made.unary(name, dtype) for name in UNARY]
        kernels += [made.binary(*x, y) for x in ((n, dtype) for n in BINARY) for y in forms]
        kernels += [made.binary_with_row(n, dtype, s) for n in BINARY for s in ("first", "second")]
        kernels += [made.scaled_product(dtype, form) for form in ("arrays", "one")]
    assert len({fingerprint(kernel) for kernel in kernels}) == len(kernels)


def test_zeros_keep_their_sign(place, small):
    x = _device.to_device(np.ones(8, np.float32), place)
    for number in (0.0, -0.0, 0):
        got = rx.Tensor(binary("multiply")(x, number)).numpy()
        assert_close(np.signbit(got), np.full(8, np.signbit(np.float32(number))), exact=True)
