"""Fused products: against float64, first by an emulator of cuTile on the host, then on a GPU."""

import importlib
import importlib.util
import itertools
import re
import subprocess
import sys
import types
import warnings

import ml_dtypes
import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, libs
from rtxarr.kernels.tile._build import Array
from rtxarr.libs import blas, tile

HALVES = ["float16", "bfloat16"]
FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
# Of a result, relative to the sum of the absolute products. The sums of 8-bit products are kept
# with 14 bits on a GPU of compute capability 9.0.
TOLERANCE = {"float16": 1.5e-3, "bfloat16": 1.2e-2, "float32": 3e-6, "float64": 1e-14}


# ------------------------------------------------------------------------------------ references


def erf(x):
    from scipy.special import erf

    return erf(x)


ACTIVATIONS = {
    None: lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def host(x):
    x = _device.to_device(x, "cpu") if _device.is_device_array(x) else x
    return np.asarray(x).astype(np.float64)


def check(got, want, scale, dtype):
    """Compare with float64, within the rounding of sums of that ``scale``."""
    assert got.dtype == dtype
    assert got.shape == want.shape
    error = np.abs(host(got) - want)
    name = np.dtype(dtype).name
    bound = TOLERANCE[name] * (scale + np.abs(want)) + (1e-5 if "16" in name else 1e-30)
    assert np.all(error <= bound), f"error {np.max(error / bound)} of what is allowed"


def padded(array, values, *, by_column=False, unit=8):
    """Store a matrix with garbage between its lines, which begin at multiples of 16 bytes."""
    if by_column:
        return padded(array, values.T, unit=unit).T
    rows, cols = values.shape
    wide = np.full((rows, -(-cols // unit) * unit + unit), 0x7F, np.uint8).astype(values.dtype)
    wide[:] = np.asarray(1, values.dtype) if unit == 16 else np.nan
    wide[:, :cols] = values
    return array(wide)[:, :cols]


def draw(rng, shape, dtype, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(dtype)


# ----------------------------------------------------------------------------------- an emulator


class Emulator(types.ModuleType):
    """What the kernels use of ``cuda.tile``, on NumPy arrays, one block after another."""

    float32 = np.float32
    int32 = np.int32
    PaddingMode = types.SimpleNamespace(ZERO="zero")
    RoundingMode = types.SimpleNamespace(APPROX="approx")
    abs, exp, where, arange, zeros = map(
        staticmethod, (np.abs, np.exp, np.where, np.arange, np.zeros)
    )
    sum, reshape, transpose = map(staticmethod, (np.sum, np.reshape, np.transpose))

    def __init__(self):
        super().__init__("cuda.tile")
        self.block, self.n_blocks = 0, 1

    def bid(self, axis):
        assert axis == 0
        return self.block

    def num_blocks(self, axis):
        assert axis == 0
        return self.n_blocks

    @staticmethod
    def static_assert(condition, message):
        assert condition, message

    @staticmethod
    def cdiv(a, b):
        return -(-a // b)

    @staticmethod
    def rsqrt(x):
        return 1 / np.sqrt(x)

    @staticmethod
    def truediv(x, y, *, rounding_mode):
        return np.float32(x) / y

    @staticmethod
    def maximum(x, y, *, propagate_nan):
        assert propagate_nan
        return np.maximum(x, y)

    @staticmethod
    def _part(array, index, shape):
        start = [i * n for i, n in zip(index, shape, strict=True)]
        assert all(0 <= i < n for i, n in zip(start, array.shape, strict=True)), "tile outside"
        return tuple(slice(i, i + n) for i, n in zip(start, shape, strict=True))

    def load(self, array, index, shape, *, padding_mode, order=None):
        assert padding_mode == "zero"
        source = array if order is None else array.transpose(order)
        values = source[self._part(source, index, shape)]
        found = np.zeros(shape, array.dtype)
        found[tuple(slice(n) for n in values.shape)] = values
        return found

    def store(self, array, index, values):
        assert values.dtype == array.dtype
        target = array[self._part(array, index, values.shape)]
        target[...] = values[tuple(slice(n) for n in target.shape)]

    @staticmethod
    def extract(x, index, shape):
        (i, j), (rows, columns) = index, shape
        return x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]

    @staticmethod
    def mma(a, b, total, *, use_fast_acc=False):
        assert a.dtype == b.dtype
        assert total.dtype == np.float32
        assert not use_fast_acc or a.dtype.itemsize == 1
        return total + a.astype(np.float32) @ b.astype(np.float32)


@pytest.fixture
def kernels(monkeypatch):
    """The kernels' functions, made with the emulator, which is their ``ct``."""
    name = "rtxarr.kernels.tile._kernels"
    monkeypatch.setitem(vars(_device), "tile", Emulator())
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32,
         "float8_e4m3fn": FP8["e4m3"], "float8_e5m2": FP8["e5m2"]}  # fmt: skip


def at(address, dtype, shape, strides):
    """View memory as an array; strides in elements."""
    size = np.dtype(dtype).itemsize
    n = sum((a - 1) * b for a, b in zip(shape, strides, strict=True)) + 1
    memory = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * (n * size)).from_address(address))
    return np.ndarray(shape, dtype, memory, strides=[size * step for step in strides])


class Launcher:
    """Run a program as the GPU does: from addresses, shapes and strides alone."""

    def __init__(self, kernels):
        self.kernels = kernels
        self.started = []

    def __call__(self, signature, n_blocks, values):
        self.started.append((signature, n_blocks))
        values = iter(values)
        args = []
        for x in signature.parameters:
            if isinstance(x, Array):
                address = next(values)
                shape, strides = ([next(values) for _ in range(x.n_dims)] for _ in range(2))
                array = at(address, NUMPY[x.dtype], shape, strides)
                # What the machine code takes for granted.
                assert strides[x.major] == 1
                assert all(0 < n < 2**31 for n in (*shape, *strides))
                if x.aligned:
                    lines = [step for i, step in enumerate(strides) if i != x.major]
                    assert address % 16 == 0
                    assert all(step * array.itemsize % 16 == 0 for step in lines)
                args.append(array)
            elif isinstance(x, str):
                args.append(np.uint32(next(values)).view(x))
            else:
                args.append(x)
        assert next(values, None) is None
        for block in range(n_blocks):
            self.kernels.ct.block, self.kernels.ct.n_blocks = block, n_blocks
            with np.errstate(over="ignore"):
                getattr(self.kernels, signature.name)(*args)


def forget(monkeypatch):
    """Let the provider look for its library anew."""
    tile._is_there.cache_clear()
    tile._load.cache_clear()
    monkeypatch.setattr(tile, "_provider", tile.Provider("fused products", "separate steps"))


@pytest.fixture
def bare(fake, monkeypatch):
    """A GPU's stand-in, beside that of cuBLASLt; whether cuTile is there is to be found out."""
    fake.cupy.cuda.runtime.driverGetVersion = lambda: 13000
    monkeypatch.setattr(tile, "is_device_array", lambda x: isinstance(x, fake.cupy.ndarray))
    forget(monkeypatch)
    yield fake
    tile._is_there.cache_clear()
    tile._load.cache_clear()


@pytest.fixture
def emulated(bare, kernels, monkeypatch):
    """cuTile in a version that is taken, with the emulator below; results begin as garbage."""

    def empty(shape, dtype):
        out = bare.cupy.ndarray(shape, dtype)
        out.view(np.uint8)[...] = 0xFF  # NaN
        return out

    found = {"cuda-tile": "1.7.0", "nvidia-cuda-tileiras": "13.4.92"}
    monkeypatch.setattr(tile, "version", found.__getitem__)
    monkeypatch.setattr(tile, "_empty", empty)
    monkeypatch.setattr(tile, "load", lambda signature, device_id: signature)
    monkeypatch.setattr(tile, "_processors", lambda device_id: 7)
    bare.launcher = Launcher(kernels)
    monkeypatch.setattr(tile, "launch", bare.launcher)
    return bare


# ---------------------------------------------------------------------------------------- sweeps


def linear_case(rng, array, dtype, shape, *, columns=(False, False), biased=True, activation=None):
    m, n, k = shape
    dtype = np.dtype(getattr(rx, dtype))
    x, weight, bias = (draw(rng, s, dtype) for s in ((m, k), (n, k), (n,)))
    x64, weight64, bias64 = (v.astype(np.float64) for v in (x, weight, bias * biased))
    total = x64 @ weight64.T + bias64
    scale = np.abs(x64) @ np.abs(weight64).T + np.abs(bias64)
    got = tile.linear(
        padded(array, x, by_column=columns[0]),
        padded(array, weight, by_column=columns[1]),
        array(bias) if biased else None,
        activation=activation,
    )
    check(got, ACTIVATIONS[activation](total), scale, dtype)


def gated_case(rng, array, dtype, shape, *, columns=(False, False), biased=True, activation="silu"):
    m, n, k = shape
    dtype = np.dtype(getattr(rx, dtype))
    x, weight, bias = (draw(rng, s, dtype) for s in ((m, k), (2 * n, k), (2 * n,)))
    weight = (weight / np.sqrt(k).astype(dtype)).astype(dtype)
    x64, weight64, bias64 = (v.astype(np.float64) for v in (x, weight, bias * biased))
    total = x64 @ weight64.T + bias64
    scale = np.abs(x64) @ np.abs(weight64).T + np.abs(bias64)
    gate = ACTIVATIONS[activation](total[:, n:])
    # The slope of an activation is at most 1.13.
    scale = scale[:, :n] * np.abs(gate) + 1.13 * np.abs(total[:, :n]) * scale[:, n:]
    given = padded(array, x, by_column=columns[0])
    got = tile.gated_linear(
        given,
        # The gate's part of each column must begin at a multiple of 16 bytes too.
        padded(array, weight, by_column=columns[1] and n % 8 == 0),
        array(bias) if biased else None,
        activation=activation,
    )
    check(got, total[:, :n] * gate, scale, dtype)
    apart = tile.gated_linear(
        given,
        padded(array, weight[:n], by_column=columns[1]),
        array(bias[:n]) if biased else None,
        gate=padded(array, weight[n:], by_column=columns[0]),
        gate_bias=array(bias[n:]) if biased else None,
        activation=activation,
    )
    check(apart, total[:, :n] * gate, scale, dtype)


def norm_case(rng, array, dtype, shape, *, norm="rms", columns=(False, False), vectors="gsb"):
    """``vectors``: which of scale (g), shift (s) and bias (b) there are."""
    m, n, k = shape
    dtype = np.dtype(getattr(rx, dtype))
    x = (rng.standard_normal((m, k)) * rng.uniform(0.1, 10, (m, 1)) + 3).astype(dtype)
    weight, scale, shift, bias = (draw(rng, s, dtype) for s in ((n, k), (k,), (k,), (n,)))
    x64, weight64, scale64, shift64, bias64 = (
        v.astype(np.float64) for v in (x, weight, scale, shift, bias)
    )
    if norm == "layer":
        x64 = x64 - x64.mean(axis=1, keepdims=True)
    rows = x64 / np.sqrt((x64**2).mean(axis=1, keepdims=True) + 1e-5)
    rows = rows * (scale64 if "g" in vectors else 1) + (shift64 if "s" in vectors else 0)
    want = rows @ weight64.T + (bias64 if "b" in vectors else 0)
    # The normalized rows are rounded too.
    size = 2 * np.abs(rows) @ np.abs(weight64).T + np.abs(bias64)
    got = tile.norm_linear(
        padded(array, x, by_column=columns[0]),
        padded(array, weight, by_column=columns[1]),
        array(bias) if "b" in vectors else None,
        norm=norm,
        scale=array(scale) if "g" in vectors else None,
        shift=array(shift) if "s" in vectors else None,
        eps=1e-5,
    )
    check(got, want, size, dtype)


def fp8_case(rng, array, shape, *, formats=("e4m3",) * 2, dtype="bfloat16", vectors="abc", fast=0):
    """``vectors``: which of the scales of a and b, and a bias (c), there are."""
    m, n, k = shape
    dtype = np.dtype(getattr(rx, dtype))
    a, b = (
        draw(rng, s, FP8[kind]).view(np.uint8)
        for s, kind in zip(((m, k), (n, k)), formats, strict=True)
    )
    a64, b64 = a.view(FP8[formats[0]]).astype(float), b.view(FP8[formats[1]]).astype(float)
    scale_a, scale_b = (rng.uniform(0.01, 3, s).astype(np.float32) for s in ((m, 1), (1, n)))
    bias = draw(rng, n, dtype)
    a64 = a64 * (scale_a if "a" in vectors else 1)
    b64 = b64.T * (scale_b if "b" in vectors else 1)
    bias64 = bias.astype(np.float64) * ("c" in vectors)
    got = tile.matmul_fp8_rows(
        padded(array, a, unit=16),
        padded(array, b, unit=16).T,
        formats=formats,
        scale_a=array(scale_a) if "a" in vectors else None,
        scale_b=array(scale_b) if "b" in vectors else None,
        dtype=dtype,
        bias=array(bias) if "c" in vectors else None,
        fast=bool(fast),
    )
    scale = np.abs(a64) @ np.abs(b64) + np.abs(bias64)
    check(got, a64 @ b64 + bias64, (4 if fast else 1) * scale, dtype)


def sweep(array, rng, n_cases, sizes):
    """Compare random products of each kind."""
    for _ in range(n_cases):
        shape = tuple(int(x) for x in rng.choice(sizes, 3))
        dtype = str(rng.choice(HALVES))
        options = {"columns": tuple(bool(x) for x in rng.integers(0, 2, 2))}
        vectors = "".join(x for x in "gsb" if rng.random() < 0.5)
        norm_case(rng, array, dtype, shape, norm=rng.choice(["rms", "layer"]), **options,
                  vectors=vectors)  # fmt: skip
        options["biased"] = bool(rng.integers(0, 2))
        activations = list(ACTIVATIONS)
        linear_case(rng, array, dtype, shape, **options, activation=rng.choice(activations))
        gated_case(rng, array, dtype, shape, **options, activation=rng.choice(activations[1:]))
        vectors = "".join(x for x in "abc" if rng.random() < 0.5)
        fp8_case(rng, array, shape, formats=(str(rng.choice(list(FP8))),) * 2, dtype=dtype,
                 vectors=vectors)  # fmt: skip


SIZES = [1, 2, 3, 7, 8, 16, 33, 64, 65, 130]


# ------------------------------------------------------------------------- wrappers and emulator


def test_kernels_over_random_shapes(emulated):
    sweep(emulated.array, np.random.default_rng(0), 12, SIZES)
    assert not tile.status().refused
    assert {s.name for s, _ in emulated.launcher.started} == {
        "linear", "gated_linear", "gated_linear_apart", "norm_linear", "row_statistics", "fp8_rows"
    }  # fmt: skip


@pytest.mark.parametrize("case", [linear_case, gated_case, norm_case])
def test_every_tile_of_a_large_result(emulated, case):
    # More rows of tiles than a group, and more tiles than processors.
    case(np.random.default_rng(1), emulated.array, "float16", (1200, 304, 40))
    case(np.random.default_rng(1), emulated.array, "float16", (100, 2000, 70))
    started = [x for x in emulated.launcher.started if x[0].name != "row_statistics"]
    assert {s.parameters[-3] for s, _ in started} == {128}
    assert all((n_blocks == 7) == s.parameters[-4] for s, n_blocks in started)
    assert all(s.parameters[-4] == (s.name in ("linear", "gated_linear")) for s, _ in started)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activations_far_from_zero(emulated, activation):
    x = np.linspace(-30, 30, 256).astype(np.float16).reshape(32, 8)
    eye = np.eye(8, dtype=np.float16)
    got = tile.linear(emulated.array(x), emulated.array(eye), activation=activation)
    want = ACTIVATIONS[activation](x.astype(np.float64))
    np.testing.assert_allclose(host(got), want, rtol=1e-3, atol=4e-6)
    assert len(emulated.launcher.started) == 1


def constant_rows_case(array):
    """Rows without variance: their mean over sqrt(eps) is beyond float16."""
    x, weight = np.full((3, 40), 200, np.float16), np.ones((8, 40), np.float16)
    got = tile.norm_linear(array(x), array(weight), norm="layer", eps=1e-6)
    np.testing.assert_array_equal(host(got), np.zeros((3, 8)))


def test_constant_rows(emulated):
    constant_rows_case(emulated.array)
    assert len(emulated.launcher.started) == 2


def test_leading_axes(emulated):
    x = np.arange(48, dtype=np.float16).reshape(2, 3, 8) / 48
    weight = np.eye(8, dtype=np.float16)
    got = tile.gated_linear(emulated.array(x), emulated.array(weight), activation="relu")
    want = x[..., :4] * x[..., 4:]
    np.testing.assert_allclose(host(got), want, rtol=1e-3)
    row = tile.linear(emulated.array(x[0, 0]), emulated.array(weight))
    np.testing.assert_array_equal(row, x[0, 0])
    assert len(emulated.launcher.started) == 2


@pytest.mark.parametrize(
    ("m", "n", "tiles", "n_blocks"),
    [
        (64, 64, (64, 64, 64), 1),
        (64, 4096, (64, 128, 64), 32),  # half of a larger tile would be empty
        (65, 1800, (128, 128, 64), 7),
        (512, 256, (128, 128, 64), 7),
        (512, 64, (64, 128, 64), 8),
        (384, 64, (64, 64, 64), 6),
    ],
)
def test_which_tiles_are_taken(emulated, m, n, tiles, n_blocks):
    x, weight = (emulated.array(np.ones((rows, 8), np.float16)) for rows in (m, n))
    tile.linear(x, weight)
    ((signature, started),) = emulated.launcher.started
    assert (signature.parameters[-3:], started) == (tiles, n_blocks)


def anywhere_case(array, monkeypatch):
    """The gate after the other weight in memory, before it, and too far away for one array."""
    rng = np.random.default_rng(4)
    x, weights = draw(rng, (200, 136), np.float16), draw(rng, (2, 264, 136), np.float16)
    x, after, before = array(x), array(weights), array(weights[::-1].copy())
    first = tile.gated_linear(x, after[0], gate=after[1])
    second = tile.gated_linear(x, before[1], gate=before[0])
    monkeypatch.setattr(tile._Arguments, "pair", lambda *args: None)
    third = tile.gated_linear(x, after[0], gate=after[1])
    np.testing.assert_array_equal(host(second), host(first))
    np.testing.assert_array_equal(host(third), host(first))
    value, gate = (host(x) @ y.astype(np.float64).T for y in weights)
    check(first, value * ACTIVATIONS["silu"](gate), np.ones(value.shape), np.float16)


def test_weights_that_lie_anywhere(emulated, monkeypatch):
    anywhere_case(emulated.array, monkeypatch)
    started = [(s.name, s.parameters[-6]) for s, _ in emulated.launcher.started]
    assert started[:2] == [("gated_linear", 1), ("gated_linear", 0)]
    assert started[2][0] == "gated_linear_apart"


def test_weights_that_are_no_one_array(emulated, monkeypatch):
    x, w = (emulated.array(np.ones(s, np.float16)) for s in ((4, 8), (8, 8)))
    v = emulated.array(np.ones((8, 16), np.float16))[:, :8]  # its lines lie otherwise
    for gate in (w, v):
        got = host(tile.gated_linear(x, w, gate=gate))
        np.testing.assert_allclose(got, np.full((4, 8), 64 / (1 + np.exp(-8))), rtol=1e-3)
    names = [s.name for s, _ in emulated.launcher.started]
    assert names == ["gated_linear_apart"] * 2


def refused(call):
    """Give the reason why ``call`` was computed in steps."""
    before = tile.status().refused.copy()
    out = call()
    (reason,) = (tile.status().refused - before).elements()
    return reason, out


def test_what_is_refused(emulated, monkeypatch):
    def ones(*shape, dtype=np.float16):
        return emulated.array(np.ones(shape, dtype))

    def linear(*args, **options):
        reason, out = refused(lambda: tile.linear(*args, **options))
        np.testing.assert_array_equal(host(out), np.full(out.shape, args[0].shape[-1]))
        return reason

    assert linear(ones(4, 8, dtype=np.float32), ones(4, 8, dtype=np.float32)) == (
        "operands of float32"
    )
    assert linear(ones(4, 8), ones(4, 8, dtype=np.float32)) == (
        "a weight of float32 beside operands of float16"
    )
    assert linear(ones(4, 9), ones(4, 9)) == (
        "an input with lines that do not begin at multiples of 16 bytes"
    )
    assert linear(ones(4, 9)[:, 1:], ones(4, 8)) == (
        "an input with lines that do not begin at multiples of 16 bytes"
    )
    assert linear(ones(4, 16)[:, ::2], ones(4, 8)) == (
        "an input whose rows and columns are both apart in memory"
    )
    rows = np.broadcast_to(np.ones(8, np.float16), (4, 8)).view(emulated.cupy.ndarray)
    assert linear(rows, ones(4, 8)) == "an input whose rows and columns are both apart in memory"
    far = ones(4, 8)
    far.device_id = 1
    assert linear(ones(4, 8), far).startswith("a weight that is not on the current device")
    assert linear(ones(4, 8), np.ones((4, 8), np.float16)) == "a weight that is not a CuPy array"

    bias = np.lib.stride_tricks.as_strided(ones(8) * 0, (4,), (4,), subok=True)
    assert linear(ones(4, 8), ones(4, 8), bias) == "a bias with gaps"
    monkeypatch.setattr(tile, "_MAX_ELEMENTS", 32)
    assert linear(ones(4, 8), ones(4, 8)) == "an input that spans 32 elements or more"
    monkeypatch.setattr(tile, "_MAX_ELEMENTS", 2**31)

    scale = ones(9)[1:]
    reason, _ = refused(lambda: tile.norm_linear(ones(4, 8), ones(4, 8), scale=scale))
    assert reason == "a scale that does not begin at a multiple of 16 bytes"
    bits = ones(16, 16, dtype=np.uint8)
    for options, want in [
        ({"formats": ("e4m3", "e5m2")}, "8-bit numbers of e4m3 beside e5m2"),
        ({"dtype": "float32"}, "a result of float32 from 8-bit numbers"),
    ]:
        reason, _ = refused(lambda options=options: tile.matmul_fp8_rows(bits, bits, **options))
        assert reason == want
    reason, _ = refused(lambda: tile.matmul_fp8_rows(bits, bits))
    assert reason == "8-bit numbers that are not stored along the summed axis"
    assert not emulated.launcher.started
    for shape in ((0, 8), (4, 0)):  # nothing to do, so nothing to count
        before = tile.status().refused.total()
        assert tile.linear(ones(*shape), ones(3, shape[1])).shape == (shape[0], 3)
        assert tile.status().refused.total() == before


def test_what_would_be_refused(emulated, monkeypatch):
    def like(*shape, dtype=np.float16, strides=None):
        x = np.empty(shape, dtype)
        return x.dtype, shape, strides or x.strides

    x = like(4, 8)
    assert tile.refusal(x, x) == "there is no GPU"
    monkeypatch.setattr(_device, "devices", lambda: ["cpu", "cuda:0"])
    assert tile.refusal(x, like(16, 8), like(8, 4, strides=(2, 16))) == ""
    for matrices, want in [
        ((like(4, 8, dtype=np.float32),), "operands of float32"),
        ((x, like(4, 8, dtype=np.float32)), "operands of float16 and float32"),
        ((x, like(0, 8)), "operands without elements"),
        ((x, like(4, 9)), "an operand with lines that do not begin at multiples of 16 bytes"),
        ((like(4, 8, strides=(64, 4)),), "an operand whose rows and columns are both apart"),
    ]:
        assert tile.refusal(*matrices).startswith(want)
    assert not emulated.launcher.started and not tile.status().refused

    def absent(name):
        raise tile.PackageNotFoundError(name)

    monkeypatch.setattr(tile, "version", absent)
    assert tile.refusal(x) == "cuda-tile is not installed"  # without a warning


def test_sizes_that_pay():
    for m, k, n in ((8192, 4096, 14336), (64, 14336, 4096), (16, 1024, 4096)):
        assert tile.pays("gate", m, k, n)
    for m, k, n in ((16, 4096, 14336), (256, 4096, 14336), (2048, 14336, 4096)):
        assert not tile.pays("gate", m, k, n)
    assert tile.pays("activation", 128, 1024, 4096)
    assert not tile.pays("activation", 8192, 1024, 4096)
    assert not tile.pays("activation", 16, 4096, 14336)


def test_bad_arguments():
    x, weight = np.ones((2, 4)), np.ones((6, 4))
    for call, match in [
        (lambda: tile.linear(x, x[0]), r"weight must have shape \(out_features, in_features\)"),
        (lambda: tile.linear(x, weight.T), r"x must have shape \(..., 6\)"),
        (lambda: tile.linear(x, weight, x[0]), r"bias must have shape \(6,\), got \(4,\)"),
        (lambda: tile.linear(x, weight, activation="swish"), "activation must be one of .*'silu'"),
        (lambda: tile.gated_linear(x, weight, activation=None), "activation must be given"),
        (lambda: tile.gated_linear(x, weight[:5]), "an even number of rows, got"),
        (lambda: tile.gated_linear(x, weight, gate=weight[:5]), r"gate must have shape \(6, 4\)"),
        (lambda: tile.gated_linear(x, weight, gate_bias=x[0]), "gate_bias must be part of bias"),
        (
            lambda: tile.gated_linear(x, weight, gate=weight, gate_bias=weight[:, 0]),
            "bias and gate_bias must be given together",
        ),
        (lambda: tile.norm_linear(x, weight, norm="batch"), "norm must be 'rms' or 'layer'"),
        (lambda: tile.norm_linear(x, weight, scale=x), r"scale must have shape \(4,\)"),
        (lambda: tile.norm_linear(x, weight, eps=0), "eps must be above 0, got 0"),
    ]:
        with pytest.raises(ValueError, match=match):
            call()
    bits = np.ones((4, 4), np.uint8)
    for call, error, match in [
        (lambda: tile.matmul_fp8_rows(bits, bits[1:]), ValueError, r"shapes \(m, k\) and \(k, n\)"),
        (lambda: tile.matmul_fp8_rows(bits, bits + 1.0), TypeError, "must be uint8"),
        (lambda: tile.matmul_fp8_rows(bits, bits, formats=("e4m3", "e3m4")), ValueError, "formats"),
        (lambda: tile.matmul_fp8_rows(bits, bits, scale_a=x), ValueError, r"shape \(4, 1\), got"),
        (lambda: tile.matmul_fp8_rows(bits, bits, bias=x), ValueError, "bias must have shape"),
    ]:
        with pytest.raises(error, match=match):
            call()


# ------------------------------------------------------------------------------------- fallbacks


@pytest.mark.parametrize("dtype", [*HALVES, "float32", "float64"])
def test_fallbacks_match_float64(dtype):
    rng = np.random.default_rng(3)
    for shape, activation in itertools.product([(5, 6, 7), (33, 9, 40)], ACTIVATIONS):
        linear_case(rng, np.asarray, dtype, shape, activation=activation)
        if activation is not None:
            gated_case(rng, np.asarray, dtype, shape, activation=activation, biased=False)
    for norm, vectors in itertools.product(("rms", "layer"), ("", "g", "gsb")):
        norm_case(rng, np.asarray, dtype, (5, 6, 24), norm=norm, vectors=vectors)


@pytest.mark.parametrize("formats", list(itertools.product(FP8, FP8)))
def test_the_fp8_fallback_matches_float64(formats):
    rng = np.random.default_rng(4)
    for dtype, vectors in itertools.product([*HALVES, "float32"], ("", "a", "abc")):
        fp8_case(rng, np.asarray, (5, 6, 33), formats=formats, dtype=dtype, vectors=vectors)


def test_fallbacks_are_array_api_code():
    xp = pytest.importorskip("array_api_strict")
    x = xp.asarray(np.linspace(-2, 2, 24, dtype=np.float32).reshape(2, 3, 4))
    weight, scale = xp.ones((6, 4), dtype=xp.float32), xp.ones(4, dtype=xp.float32)
    for activation in list(ACTIVATIONS)[1:]:
        assert tile.gated_linear(x, weight, activation=activation).shape == (2, 3, 3)
    assert tile.norm_linear(x, weight, norm="layer", scale=scale, shift=scale).shape == (2, 3, 6)


def test_a_missing_library_warns_once(bare, monkeypatch, capsys):
    def absent(name):
        raise tile.PackageNotFoundError(name)

    monkeypatch.setattr(tile, "version", absent)
    a = bare.array(np.ones((8, 8), np.float16))
    want = re.escape(
        "fused products run through separate steps: cuda-tile is not installed; "
        "pip install --upgrade 'cuda-tile[tileiras]'"
    )
    with pytest.warns(RuntimeWarning, match=want):
        out = tile.linear(a, a)
    np.testing.assert_array_equal(host(out), np.full((8, 8), 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tile.gated_linear(a, a)
        monkeypatch.setattr(_device, "devices", lambda: ["cpu", "cuda:0"])
        print(*tile.status().lines())
    assert "fused products: separate steps (cuda-tile is not" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "driver", "match"),
    [
        ("1.6.2", 13000, "1.6.2 is older than 1.7"),
        ("1.7.0", 12090, "for CUDA 13, got 12"),
    ],
)
def test_what_is_too_old_is_not_used(bare, monkeypatch, found, driver, match):
    bare.cupy.cuda.runtime.driverGetVersion = lambda: driver
    monkeypatch.setattr(tile, "version", lambda name: found)
    a = bare.array(np.ones((8, 8), np.float16))
    with pytest.warns(RuntimeWarning, match=match):
        tile.linear(a, a)


def test_a_kernel_that_does_not_compile(emulated, monkeypatch, capsys):
    def fail(signature, device_id):
        raise FileNotFoundError("'tileiras' compiler not found")

    monkeypatch.setattr(tile, "load", fail)
    a = emulated.array(np.ones((8, 8), np.float16))
    want = "linear does not compile ('tileiras' compiler not found)"
    with pytest.warns(RuntimeWarning, match=re.escape(f"in separate steps: {want}")):
        tile.linear(a, a)
    tile.linear(a, a)  # not tried, and not warned of, again
    monkeypatch.setattr(_device, "devices", lambda: ["cpu", "cuda:0"])
    assert tile.status().lines() == [
        "fused products: cuda-tile 1.7.0, tileiras 13.4.92",
        f"    2 by separate steps: {want}",
    ]


def test_show_has_a_line(capsys, monkeypatch):
    monkeypatch.setattr(_device, "devices", lambda: ["cpu"])
    forget(monkeypatch)
    libs.show()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "fused products: NumPy (no GPU that CuPy can use)"


def test_importing_loads_no_compiler():
    code = "import sys, rtxarr; rtxarr.libs.tile; assert 'cuda.tile' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def gpu(monkeypatch):
    """Move arrays to the GPU; results begin as NaN, and nothing may be computed in steps."""
    found, reason = tile._look()
    if not found:
        pytest.skip(reason)
    cupy = _device.cupy
    forget(monkeypatch)

    def empty(shape, dtype):
        out = cupy.ndarray(shape, dtype)
        out.view(np.uint8)[...] = 0xFF
        return out

    monkeypatch.setattr(tile, "_empty", empty)
    yield cupy.asarray
    assert not tile.status().refused


GPU_SIZES = [1, 3, 8, 33, 64, 100, 129, 256, 300, 513, 1024]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_random_shapes_on_a_gpu(gpu, seed):
    sweep(gpu, np.random.default_rng(seed), 6, GPU_SIZES)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(2100, 2056, 520), (1024, 2048, 4096), (4097, 1032, 72)])
def test_large_shapes_on_a_gpu(gpu, dtype, shape):
    rng = np.random.default_rng(5)
    linear_case(rng, gpu, dtype, shape, activation="gelu")
    gated_case(rng, gpu, dtype, shape)
    for norm in ("rms", "layer"):
        norm_case(rng, gpu, dtype, shape, norm=norm)
    for fast in (False, True):
        fp8_case(rng, gpu, shape, dtype=dtype, fast=fast)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activations_on_a_gpu(gpu, activation):
    x = np.linspace(-30, 30, 256).astype(np.float16).reshape(32, 8)
    got = tile.linear(gpu(x), gpu(np.eye(8, dtype=np.float16)), activation=activation)
    want = ACTIVATIONS[activation](x.astype(np.float64))
    np.testing.assert_allclose(host(got), want, rtol=1e-3, atol=4e-6)


@pytest.mark.gpu
def test_rows_that_are_not_ordinary_on_a_gpu(gpu):
    constant_rows_case(gpu)
    x = np.ones((4, 8), np.float16)
    x[1, 2] = np.nan
    eye = gpu(np.eye(8, dtype=np.float16))
    for activation in ACTIVATIONS:
        got = host(tile.linear(gpu(x), eye, activation=activation))
        assert np.isnan(got[1]).all()
        assert np.isfinite(got[[0, 2, 3]]).all()


@pytest.mark.gpu
def test_weights_that_lie_anywhere_on_a_gpu(gpu, monkeypatch):
    anywhere_case(gpu, monkeypatch)


@pytest.mark.gpu
def test_runs_give_the_same_bits_on_a_gpu(gpu):
    rng = np.random.default_rng(6)
    x, weight, scale = (gpu(draw(rng, s, np.float16)) for s in ((700, 520), (1032, 520), (520,)))
    for call in (
        lambda: tile.linear(x, weight, activation="silu"),
        lambda: tile.gated_linear(x, weight),
        lambda: tile.norm_linear(x, weight, norm="layer", scale=scale),
    ):
        first = call()
        assert all(bool((call() == first).all()) for _ in range(5))


@pytest.mark.gpu
def test_a_captured_step_on_a_gpu(gpu, monkeypatch):
    monkeypatch.setattr(tile, "_empty", _device.cupy.ndarray)  # a graph needs no poison
    rng = np.random.default_rng(7)
    x, weight = (gpu(draw(rng, s, np.float16)) for s in ((256, 256), (512, 256)))

    def step(x):
        return tile.norm_linear(tile.gated_linear(x, weight), weight, norm="layer")

    with rx.device("cuda:0"):
        eager, captured = step(x), rx.capture(step)
        for _ in range(4):
            assert bool((captured(x) == eager).all())


@pytest.mark.gpu
def test_another_stream_on_a_gpu(gpu):
    rng = np.random.default_rng(8)
    x, weight = (gpu(draw(rng, s, np.float16)) for s in ((300, 512), (512, 512)))
    want = tile.linear(x, weight)
    with rx.device("cuda:0"):
        rx.synchronize()
        with _device.stream() as other:
            got = [tile.linear(x, weight) for _ in range(20)]
        other.synchronize()
    assert all(bool((out == want).all()) for out in got)


def test_blas_is_what_serves_the_rest(emulated):
    # Refused here, served there.
    x = emulated.array(np.ones((4, 9), np.float16))
    tile.linear(x, x)
    assert len(emulated.calls) == 1
    assert not blas.status().refused
