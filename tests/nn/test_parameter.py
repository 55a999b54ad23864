"""Parameter, Buffer, and the distributions of the initializers."""

import math

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.nn import Buffer, Parameter, initializers
from rtxarr.random import Generator
from rtxarr.testing import assert_close


def test_values_are_copied(xp):
    array = xp.asarray([1.0, 2.0], dtype=xp.float64)
    param = Parameter(array)
    assert param.requires_grad
    assert isinstance(param, rx.Tensor)
    assert param.dtype == xp.float64
    assert param.data is not array
    assert_close(param, [1.0, 2.0])


def test_a_copy_can_be_written_into():
    array = np.ones(3)
    array.flags.writeable = False
    param = Parameter(array)
    param.assign(np.zeros(3))
    assert_close(array, [1.0, 1.0, 1.0], exact=True)


@pytest.mark.parametrize("value", [np.float64(2.5), 2.5, np.asarray(2.5)])
def test_scalars_become_arrays(value):
    param = Parameter(value)
    assert isinstance(param.data, np.ndarray)
    assert param.shape == ()


def test_lists_are_float32():
    assert Parameter([[1, 2], [3, 4]], device="cpu").dtype == np.float32
    assert Buffer([1, 2], device="cpu").dtype == np.float32
    assert Parameter([1.0], dtype="float64", device="cpu").dtype == np.float64


def test_a_shape_with_init():
    param = Parameter((2, 3), init="ones", dtype="float16", device="cpu")
    assert_close(param, np.ones((2, 3), "float16"), exact=True)
    assert Parameter(4, init="zeros", device="cpu").shape == (4,)
    assert Parameter((), init=initializers.constant(3.0), device="cpu").item() == 3.0
    assert Parameter((0, 2), init="normal", device="cpu").shape == (0, 2)


def test_a_buffer_is_not_trained():
    assert not Buffer(np.ones(2)).requires_grad


def test_a_frozen_parameter():
    assert not Parameter(np.ones(2), requires_grad=False).requires_grad


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Parameter((2, 3)), TypeError, r"needs init, as in Parameter\(\(2, 3\), init="),
        (lambda: Parameter([2, 3], init="zeros"), TypeError, r"tuple of ints >= 0, got \[2, 3\]"),
        (lambda: Parameter((-1,), init="zeros"), TypeError, r">= 0, got \(-1,\)"),
        (lambda: Parameter((2,), init="zeros", dtype="int32"), TypeError, "got int32"),
        (lambda: Parameter(np.ones(2, "int64")), TypeError, "needs a floating-point"),
        (lambda: Parameter((2, 2), init="orthogonl"), ValueError, "did you mean 'orthogonal'"),
        (lambda: Parameter((2,), init="kaiming_normal"), ValueError, r"at least 2 .* \(2,\)"),
        (lambda: Parameter((2,), init="orthogonal"), ValueError, r"at least 2 .* \(2,\)"),
        (
            lambda: Parameter((2,), init=lambda shape, *, dtype, generator: np.ones(3, dtype)),
            ValueError,
            r"init must give an array of shape \(2,\) and dtype float32, got \(3,\)",
        ),
        (lambda: initializers.normal(0), ValueError, "std must be > 0, got 0"),
        (lambda: initializers.uniform(1, 1), ValueError, "low must be less than high"),
        (lambda: initializers.kaiming_normal(mode="fan"), ValueError, "mode must be 'fan_in'"),
    ],
)
def test_bad_arguments(make, error, message):
    with rx.device("cpu"), pytest.raises(error, match=message):
        make()


# ---------------------------------------------------------------------------- distributions


def drawn(init, shape=(200, 300), **options):
    return Parameter(shape, init=init, device="cpu", generator=Generator(1), **options).data


@pytest.mark.parametrize(
    ("init", "std"),
    [
        ("uniform", 0.1 / math.sqrt(12)),
        ("normal", 0.02),
        ("truncated_normal", 0.02 * 0.8796),
        ("fan_in_uniform", 1 / math.sqrt(3 * 300)),
        ("xavier_uniform", math.sqrt(2 / 500)),
        ("xavier_normal", math.sqrt(2 / 500)),
        ("kaiming_uniform", math.sqrt(2 / 300)),
        ("kaiming_normal", math.sqrt(2 / 300)),
        (initializers.kaiming_normal(1.0, mode="fan_out"), 1 / math.sqrt(200)),
        (initializers.kaiming_uniform(3.0, in_axis=0, out_axis=1), 3 / math.sqrt(200)),
        (initializers.get("xavier_normal", in_axis=0, out_axis=1), math.sqrt(2 / 500)),
        (initializers.get("kaiming_normal", in_axis=0, out_axis=1), math.sqrt(2 / 200)),
    ],
)
def test_mean_and_standard_deviation(init, std):
    values = drawn(init).astype("float64")
    # 60,000 draws: five standard errors of the mean and of the deviation.
    assert abs(values.mean()) < 5 * std / math.sqrt(values.size)
    assert values.std() == pytest.approx(std, rel=5 / math.sqrt(2 * values.size))


def test_bounds():
    assert np.abs(drawn("fan_in_uniform")).max() <= 1 / math.sqrt(300)
    assert np.abs(drawn(initializers.truncated_normal(0.5, mean=0.0))).max() <= 1.0
    low, high = drawn(initializers.uniform(2.0, 3.0)).min(), drawn("uniform").max()
    assert low >= 2.0
    assert 0.04 < high < 0.05


def test_fans_count_the_kernel():
    # Fan-in 8 * 5 * 5, fan-out 16 * 5 * 5.
    values = drawn("kaiming_normal", shape=(16, 8, 5, 5))
    assert values.std() == pytest.approx(math.sqrt(2 / 200), rel=0.1)
    values = drawn(initializers.kaiming_normal(mode="fan_out"), shape=(16, 8, 5, 5))
    assert values.std() == pytest.approx(math.sqrt(2 / 400), rel=0.1)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (3, 2, 2), (5, 5)])
def test_orthogonal(shape):
    values = drawn(initializers.orthogonal(2.0), shape=shape, dtype="float64")
    flat = values.reshape(shape[0], -1)
    product = flat @ flat.T if flat.shape[0] <= flat.shape[1] else flat.T @ flat
    assert_close(product, 4 * np.eye(product.shape[0]))


def test_the_generator_decides():
    assert_close(drawn("normal"), drawn("normal"), exact=True)
    rx.random.seed(3)
    first = Parameter((4,), init="normal", device="cpu")
    second = Parameter((4,), init="normal", device="cpu")
    rx.random.seed(3)
    assert_close(Parameter((4,), init="normal", device="cpu"), first, exact=True)
    assert not np.array_equal(first.data, second.data)


@pytest.mark.parametrize("init", ["normal", "xavier_uniform", "orthogonal", "truncated_normal"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(init, dtype):
    values = drawn(init, shape=(8, 8), dtype=dtype)
    assert values.dtype == np.dtype(dtype)
    assert np.isfinite(values.astype("float32")).all()


@pytest.mark.gpu
@pytest.mark.parametrize("init", ["uniform", "kaiming_uniform", "orthogonal", "ones"])
def test_the_same_bits_on_the_gpu(init):
    gpu = Parameter((5, 7), init=init, device="cuda:0", generator=Generator(1))
    assert_close(gpu, drawn(init, shape=(5, 7)), exact=True)
