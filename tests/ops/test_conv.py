"""Convolutions and their transposes against plain loops and PyTorch."""

import itertools

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.ops import _conv, _windows
from rtxarr.testing import assert_close

rng = np.random.default_rng(6)

# stride, padding, dilation and groups; tuples are cut to the number of axes
GEOMETRIES = {
    "plain": (1, 0, 1, 1),
    "strided": (2, 1, 1, 1),
    "dilated groups": (1, 2, 2, 2),
    "holes": (3, 1, 2, 1),
    "wide padding": (1, 4, 1, 1),
    "uneven": ((2, 1, 3), (1, 0, 2), (1, 2, 1), 2),
}
CONV = {1: rx.conv1d, 2: rx.conv2d, 3: rx.conv3d}
TRANSPOSE = {1: rx.conv_transpose1d, 2: rx.conv_transpose2d, 3: rx.conv_transpose3d}


def per_axis(value, n):
    return value[:n] if isinstance(value, tuple) else (value,) * n


def make(n, groups, transposed=False):
    x = rng.standard_normal((2, 4, *(5, 6, 4)[:n]))
    shape = (4, 6 // groups) if transposed else (6, 4 // groups)
    return x, rng.standard_normal((*shape, *(3, 2, 3)[:n])), rng.standard_normal(6)


def links(x_spatial, kernel, stride, padding, dilation, counts):
    """Yield each place, tap and element that a convolution connects."""
    for place in itertools.product(*map(range, counts)):
        for tap in itertools.product(*map(range, kernel)):
            element = tuple(
                o * s + k * d - p
                for o, s, k, d, p in zip(place, stride, tap, dilation, padding, strict=True)
            )
            if all(0 <= i < n for i, n in zip(element, x_spatial, strict=True)):
                yield place, tap, element


def plain_conv(x, weight, bias, stride, padding, dilation, groups):
    n = x.ndim - 2
    stride, padding, dilation = (per_axis(v, n) for v in (stride, padding, dilation))
    kernel = weight.shape[2:]
    counts = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    ]
    out = np.zeros((x.shape[0], weight.shape[0], *counts))
    n_in, n_out = weight.shape[1], weight.shape[0] // groups
    for place, tap, element in links(x.shape[2:], kernel, stride, padding, dilation, counts):
        for o in range(weight.shape[0]):
            first = o // n_out * n_in
            read = x[(slice(None), slice(first, first + n_in), *element)]
            out[(slice(None), o, *place)] += read @ weight[(o, slice(None), *tap)]
    return out + bias.reshape(-1, *(1,) * n)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_values(xp, n, geometry):
    stride, padding, dilation, groups = GEOMETRIES[geometry]
    options = {
        "stride": stride if isinstance(stride, int) else stride[:n],
        "padding": padding if isinstance(padding, int) else padding[:n],
        "dilation": dilation if isinstance(dilation, int) else dilation[:n],
        "groups": groups,
    }
    arrays = make(n, groups)
    got = CONV[n](*map(xp.asarray, arrays), **options)
    assert_close(got, plain_conv(*arrays, *GEOMETRIES[geometry]))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_transpose_is_the_adjoint(xp, n):
    """For all x and y, <conv(x), y> = <x, conv_transpose(y)>."""
    x, weight, _ = make(n, 2)
    options = {"stride": 2, "padding": 1, "groups": 2}
    out = CONV[n](x, weight, **options)
    y = rng.standard_normal(out.shape)
    span = np.array(weight.shape[2:])
    least = (np.array(out.shape[2:]) - 1) * 2 - 2 + span
    extra = tuple(int(e) for e in np.array(x.shape[2:]) - least)
    back = TRANSPOSE[n](xp.asarray(y), xp.asarray(weight), output_padding=extra, **options)
    assert back.shape == x.shape
    assert_close(rx.sum(back * xp.asarray(x)), np.sum(out * y), rtol=1e-11)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
def test_padding_by_name(stride, kernel):
    x, weight = np.ones((1, 1, 7)), np.ones((1, 1, kernel))
    same = rx.conv1d(x, weight, padding="same", stride=stride)
    assert same.shape[-1] == -(-7 // stride)
    total = max((same.shape[-1] - 1) * stride + kernel - 7, 0)
    padded = np.pad(x, ((0, 0), (0, 0), (total // 2, total - total // 2)))
    assert_close(same, rx.conv1d(padded, weight, stride=stride))
    valid = rx.conv1d(x, weight, padding="valid", stride=stride)
    assert_close(valid, rx.conv1d(x, weight, stride=stride))


@pytest.mark.parametrize("groups", [1, 2])
def test_small_buffers_change_nothing(monkeypatch, groups):
    """The batch is cut into pieces; seven samples do not divide evenly."""
    x, weight, bias = make(2, groups)
    x = rx.Tensor(rng.standard_normal((7, *x.shape[1:])), requires_grad=True)
    weight = rx.Tensor(weight, requires_grad=True)

    def run():
        x.grad = weight.grad = None
        out = rx.conv2d(x, weight, bias, stride=2, padding=1, groups=groups)
        rx.sum(out * out).backward()
        return out.data, x.grad, weight.grad

    want = run()
    monkeypatch.setattr(_windows, "_BUFFER_SIZE_CPU", 1000)
    monkeypatch.setattr(_windows, "_BUFFER_SIZE_GPU", 1000)
    for got, expected in zip(run(), want, strict=True):
        assert_close(got, expected)


def test_pointwise_filters_and_strided_views():
    x = rng.standard_normal((3, 5, 4, 6))[::-1, ::2, :, ::-2]
    weight = rng.standard_normal((2, 3, 1, 1))
    assert_close(rx.conv2d(x, weight), np.einsum("nchw,oc->nohw", x, weight[..., 0, 0]))
    full = rng.standard_normal((2, 3, 2, 2))
    assert_close(rx.conv2d(x, full), rx.conv2d(np.ascontiguousarray(x), full))
    y = rng.standard_normal((3, 2, 4, 3))
    assert_close(rx.conv_transpose2d(y, weight), np.einsum("nohw,oc->nchw", y, weight[..., 0, 0]))


def test_empty_batch():
    x = rx.Tensor(np.zeros((0, 2, 5)), requires_grad=True)
    weight = rx.Tensor(np.ones((3, 2, 2)), requires_grad=True)
    out = rx.conv1d(x, weight)
    rx.sum(out).backward()
    assert out.shape == (0, 3, 4) and x.grad.shape == x.shape
    assert_close(weight.grad, np.zeros((3, 2, 2)))
    [each] = rx.autograd.per_sample_gradients(rx.sum(rx.conv1d(x, weight)), [weight])
    assert each.shape == (0, 3, 2, 2)


def test_half_precision(check_half):
    x, weight, bias = make(2, 2)
    check_half(lambda *a: rx.conv2d(*a, groups=2, padding=1), x, weight, bias)
    x, weight, bias = make(1, 1, transposed=True)
    check_half(lambda *a: rx.conv_transpose1d(*a, stride=2), x, weight, bias)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_residual_and_activation(xp, n):
    x, weight, bias = make(n, 1)
    added = rng.standard_normal((2, 6, *plain_conv(x, weight, bias, 1, 0, 1, 1).shape[2:]))
    want = plain_conv(x, weight, bias, 1, 0, 1, 1)
    arrays = [xp.asarray(a) for a in (x, weight, bias)]
    residual = xp.asarray(added)
    assert_close(CONV[n](*arrays, residual=residual), want + added)
    relu = np.maximum(want + added, 0)
    assert_close(CONV[n](*arrays, residual=residual, activation="relu"), relu)
    assert_close(CONV[n](*arrays, activation="silu"), want / (1 + np.exp(-want)))


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_autocast_casts_a_residual(monkeypatch, on_gpu, activation):
    monkeypatch.setattr(_conv, "on_gpu", lambda x: on_gpu)
    x, weight, bias = (a.astype("float32") for a in make(1, 1))
    shape = CONV[1](x, weight, bias).shape
    residual = rx.Tensor(np.ones(shape, "float32"), requires_grad=True)
    with rx.autocast("bfloat16"):
        out = CONV[1](rx.Tensor(x), weight, bias, residual=residual, activation=activation)
    assert out.dtype == rx.bfloat16
    out.backward(np.ones(shape, rx.bfloat16))
    assert residual.grad.dtype == np.float32


@pytest.mark.parametrize("n", [1, 2, 3])
def test_per_sample_gradients(check_per_sample, n):
    x, weight, bias = make(n, 2)
    check_per_sample(lambda *a: CONV[n](*a, stride=2, padding=1, groups=2), x, weight, bias)
    x, weight, bias = make(n, 2, transposed=True)
    check_per_sample(lambda *a: TRANSPOSE[n](*a, stride=2, groups=2), x, weight, bias)


X, WEIGHT, BIAS = make(2, 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: rx.conv2d(X[0], WEIGHT),
            ValueError,
            r"x must have shape \(batch, channels, height, width\), got \(4, 5, 6\)",
        ),
        (lambda: rx.conv1d(X[0], WEIGHT), ValueError, r"weight must have shape \(out_channels"),
        (
            lambda: rx.conv2d(X, WEIGHT),
            ValueError,
            r"x must have 2 channels for weight of shape \(6, 2, 3, 2\) and groups 1, got shape",
        ),
        (
            lambda: rx.conv2d(X, WEIGHT[:5], groups=2),
            ValueError,
            r"the first axis of weight must be a multiple of groups \(2\), got \(5, 2, 3, 2\)",
        ),
        (
            lambda: rx.conv2d(X, WEIGHT, BIAS[:5], groups=2),
            ValueError,
            r"bias must have shape \(6,",
        ),
        (lambda: rx.conv2d(X, WEIGHT, groups=0), ValueError, "groups must be an int >= 1, got 0"),
        (
            lambda: rx.conv2d(X, WEIGHT, groups=2, stride=0),
            ValueError,
            "stride must be an int >= 1 or 2 of them, got 0",
        ),
        (
            lambda: rx.conv2d(X, WEIGHT, groups=2, dilation=(1, 1, 1)),
            ValueError,
            r"dilation must be an int >= 1 or 2 of them, got \(1, 1, 1\)",
        ),
        (
            lambda: rx.conv2d(X, WEIGHT, groups=2, padding=-1),
            ValueError,
            "padding must be an int >= 0 or 2 of them, got -1",
        ),
        (
            lambda: rx.conv2d(X, WEIGHT, groups=2, padding="full"),
            ValueError,
            "padding must be an int, a tuple, 'same' or 'valid', got 'full'",
        ),
        (
            lambda: rx.conv2d(X, WEIGHT, groups=2, dilation=3),
            ValueError,
            r"weight must fit into the padded input, got windows reaching over \(7, 4\) elements",
        ),
        (
            lambda: rx.conv2d(X.astype("int64"), WEIGHT, groups=2),
            TypeError,
            "x must have a real floating-point dtype, got int64",
        ),
        (
            lambda: rx.conv2d(X, WEIGHT, groups=2, residual=X),
            ValueError,
            r"residual must have the shape of the result, \(2, 6, 3, 5\), got \(2, 4, 5, 6\)",
        ),
        (
            lambda: rx.conv2d(X, WEIGHT, groups=2, residual=np.zeros((2, 6, 3, 5), int)),
            TypeError,
            "residual must have a real floating-point dtype, got int64",
        ),
        (
            lambda: rx.conv2d(X, WEIGHT, groups=2, activation="gelu"),
            ValueError,
            "activation must be one of 'relu', 'silu' or None, got 'gelu'",
        ),
        (
            lambda: rx.conv_transpose2d(X, WEIGHT),
            ValueError,
            r"x must have 6 channels for weight of shape \(6, 2, 3, 2\), got shape \(2, 4, 5, 6\)",
        ),
        (
            lambda: rx.conv_transpose2d(X, WEIGHT[:4], stride=2, output_padding=2),
            ValueError,
            r"output_padding must be smaller than stride \(2, 2\), got 2",
        ),
        (
            lambda: rx.conv2d(X, WEIGHT[:0, :4]),
            ValueError,
            r"weight must have shape .*, none of them 0, got \(0, 2, 3, 2\)",
        ),
        (
            lambda: rx.conv_transpose2d(X, WEIGHT[:4], padding=4),
            ValueError,
            "padding must leave an output",
        ),
        (
            lambda: rx.conv_transpose2d(X, WEIGHT[:4], padding="same"),
            ValueError,
            "padding must be an int >= 0 or 2 of them, got 'same'",
        ),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.compare
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_agreement_with_torch(against_torch, n, geometry):
    from torch.nn import functional as F

    stride, padding, dilation, groups = GEOMETRIES[geometry]
    options = {
        "stride": per_axis(stride, n),
        "padding": per_axis(padding, n),
        "dilation": per_axis(dilation, n),
        "groups": groups,
    }
    theirs = getattr(F, f"conv{n}d")
    against_torch(
        lambda *a: CONV[n](*a, **options), lambda *a: theirs(*a, **options), *make(n, groups)
    )
    if geometry == "wide padding":
        return  # leaves no output in the transpose
    options["output_padding"] = tuple(s - 1 for s in options["stride"])
    theirs = getattr(F, f"conv_transpose{n}d")
    against_torch(
        lambda *a: TRANSPOSE[n](*a, **options),
        lambda *a: theirs(*a, **options),
        *make(n, groups, transposed=True),
    )
