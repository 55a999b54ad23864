"""Transforms of low frequencies in fused functions of mode "fast"."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.kernels import modes
from rtxarr.polygraph import _aot_data, _backends, _fft, _ir, _low_modes
from rtxarr.polygraph._explain import programs_of
from rtxarr.testing import assert_close

AXES = [(1, 2), (2, 1), (2,), (1, 2, 3), (3,), (0, 1, 2), (1,)]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_backends, "_shortens", lambda trace: True)
    monkeypatch.setattr(_fft, "_scales_apart", lambda: True)
    monkeypatch.setattr(modes, "fits", lambda outer, n, inner, m: inner > 1 and 4 * m <= n)


def steps_of(fused):
    ((made,),) = fused._programs.values()
    ((_, program),) = programs_of(made)
    return program.steps


def ops_of(fused):
    """Return what is run of transforms."""
    found = []
    for step in steps_of(fused):
        node = step.results[0]
        if node.op == "call":
            found.append(node.attrs[0].__name__)
        elif "fft" in node.op:
            found.append(node.op)
    return found


def check(f, *arrays, ops=None):
    fused = rx.fuse(f, mode="fast")
    got, want = fused(*arrays), f(*arrays)
    assert not fused.reasons
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert ops is None or ops_of(fused) == ops
    return fused


def array(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def spectrum(*shape):
    return array(*shape) + np.complex64(1j) * array(*shape, seed=1)


def test_parts_of_a_transform():
    def middle(x):  # channels last
        waves = rx.fft.rfftn(x, axes=(1, 2), norm="ortho")
        return waves[:, :3, :4] + 1, waves[:, -3:, :2] * 2

    fused = check(middle, array(2, 16, 32, 4), ops=["rfft_low", "fft"])
    assert [s.results[0].shape for s in steps_of(fused) if s.results[0].op == "fft"] == [
        (2, 16, 4, 4)
    ]

    def last(x):
        waves = rx.fft.rfftn(x, axes=(2, 3)) * 3
        return rx.concat([waves[:, :, :3, :5], waves[:, :, -3:, 5:0:-1]], axis=2)

    fused = check(last, array(2, 4, 16, 32), ops=["rfft", "fft"])
    assert [s.results[0].shape for s in steps_of(fused) if "fft" in s.results[0].op] == [
        (2, 4, 16, 17),
        (2, 4, 16, 6),
    ]
    check(lambda x: rx.fft.rfft(x, axis=0)[:2] * 2, array(40, 4), ops=["rfft_low"])
    check(
        lambda x: rx.fft.rfft(x, axis=1)[:, :2] * 2, array(4, 40), ops=["rfft"]
    )  # nothing to gain


def test_whole_spectra_are_transformed_whole():
    x = array(2, 16, 32, 4)
    for f in (
        lambda x: rx.fft.rfftn(x, axes=(1, 2)),
        lambda x: (rx.fft.rfftn(x, axes=(1, 2)) * 2, rx.fft.rfftn(x, axes=(1, 2))[:, :, :4]),
        lambda x: rx.fft.rfftn(x, axes=(1, 2))[:, :, 3:12] + 1,
        lambda x: rx.fft.rfftn(x, axes=(1, 2))[:, :3] + 1,
        lambda x: rx.sum(rx.fft.rfftn(x, axes=(1, 2)), axis=2),
        lambda x: rx.permute_dims(rx.fft.rfftn(x, axes=(1, 2)), (0, 1, 3, 2))[..., :4] + 1,
    ):
        check(f, x, ops=["rfft"])


def test_parts_of_a_transform_back():
    def middle(low):
        waves = rx.zeros((2, 16, 17, 4), dtype=rx.complex64)
        waves[:, :3, :4] = low[:, :3]
        waves[:, -3:, :2] = low[:, 3:, :2] * 2
        return rx.fft.irfftn(waves * 0.5, s=(16, 32), axes=(1, 2))

    check(middle, spectrum(2, 6, 4, 4), ops=["ifft", "irfft_low"])

    def last(low):
        waves = rx.zeros((2, 16, 17), dtype=rx.complex64)
        waves[:, :, 3:0:-1] = low
        return rx.fft.irfftn(rx.conj(waves) + 2 * waves, s=(16, 32), axes=(1, 2), norm="ortho")

    check(last, spectrum(2, 16, 3), ops=["ifft", "irfft"])
    check(lambda x: rx.fft.irfft(x, n=64, axis=0), spectrum(5, 3), ops=["irfft_low"])
    for f in (
        lambda x: rx.fft.irfft(x, n=64, axis=0),
        lambda x: rx.fft.irfftn(rx.concat([x, 0 * x, 0 * x], axis=0), axes=(1, 0)),
        lambda x: rx.fft.irfftn(1 / (x + 1), axes=(1, 0)),
    ):
        check(f, spectrum(40, 3), ops=["irfft"])


def operator(weight, x):
    waves = rx.fft.rfftn(x, axes=(1, 2), norm="ortho")
    low = rx.concat([waves[:, :3, :4], waves[:, -3:, :4]], axis=1) * weight
    between = rx.zeros((2, 10, 4, 4), dtype=rx.complex64)
    waves = rx.concat([low[:, :3], between, low[:, 3:]], axis=1)
    waves = rx.pad(waves, [(0, 0), (0, 0), (0, 13), (0, 0)])
    return rx.fft.irfftn(waves, s=x.shape[1:3], axes=(1, 2), norm="ortho")


@pytest.mark.parametrize("argument", [0, 1])
def test_gradients(argument):
    arrays = [spectrum(6, 4, 4), array(2, 16, 32, 4)]

    def gradient(*given):
        def loss(x):
            changed = list(given)
            changed[argument] = x
            return rx.sum(operator(*changed) ** 4)

        return (rx.grad(loss)(given[argument]),)

    fused = check(gradient, *arrays)
    ops = ops_of(fused)
    assert not {"rfft", "irfft"} & {*ops}
    assert ops.count("rfft_low") == 2
    assert ops.count("irfft_low") == 1 + argument


def test_the_operator_of_the_examples(monkeypatch):
    """With 24 frequencies of many, as on a GPU: both its transforms are added up."""
    monkeypatch.undo()
    monkeypatch.setattr(_backends, "_shortens", lambda trace: True)
    monkeypatch.setattr(_backends, "_moves", lambda trace: True)
    monkeypatch.setattr(_fft, "_scales_apart", lambda: True)
    assert modes.fits(16 * 256, 256, 64, 24)
    monkeypatch.setattr(modes, "_FEW", 1)
    path = Path(__file__).parents[2] / "docs" / "examples" / "fourier_operator.py"
    spec = importlib.util.spec_from_file_location("fourier_operator", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    parts = example.parameters(4, 24)
    x = array(1, 96, 96, 4)
    fused = check(
        lambda x: (example.block(parts, x),), x, ops=["rfft_low", "fft", "ifft", "irfft_low"]
    )
    for step in steps_of(fused):
        if step.results[0].op in ("fft", "ifft"):  # 24 frequencies, along the last axis
            assert step.results[0].shape == (1, 24, 4, 96)
            assert step.results[0].attrs[0] == (3,)

    def gradient(x):
        return (rx.grad(lambda x: rx.sum(example.block(parts, x) ** 2))(x),)

    fused = check(gradient, x)
    assert not {"rfft", "irfft"} & {*ops_of(fused)}


def test_other_modes_and_other_arrays_are_left(monkeypatch):
    x = array(2, 16, 32, 4)

    def low(x):
        return rx.fft.rfftn(x, axes=(1, 2))[:, :3, :4] + 1

    strict = rx.fuse(low)
    strict(x)
    assert ops_of(strict) == ["rfft"]
    check(low, x.astype("float64"), ops=["rfft"])
    monkeypatch.undo()
    fast = rx.fuse(low, mode="fast")
    fast(x)
    assert ops_of(fast) == ["rfft"]


@pytest.mark.parametrize("seed", range(60))
def test_random_parts(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.choice([4, 8, 12, 20, 33], 4))
    axes = AXES[seed % len(AXES)]
    halved = shape[axes[-1]] // 2 + 1

    def part(limit):
        key = []
        for axis, n in enumerate(shape):
            n = halved if axis == axes[-1] else n
            top = int(rng.integers(1, limit + 1)) if axis == axes[-1] else n
            start = int(rng.integers(0, min(top, n)))
            stop = int(rng.integers(start + 1, min(top, n) + 1))
            if rng.random() < 0.2 and start:
                key.append(slice(stop - 1, start - 1, -1))
            else:
                key.append(slice(start, stop, int(rng.integers(1, 3))))
        return tuple(key)

    limit = halved if rng.random() < 0.2 else max(halved // 3, 1)
    keys = [part(limit) for _ in range(3)]
    norm = ["backward", "ortho", "forward"][seed % 3]
    s = [shape[a] for a in axes]

    def f(x):
        waves = rx.fft.rfftn(x, axes=axes, norm=norm)
        spread = rx.zeros_like(waves)
        parts = []
        for i, key in enumerate(keys):
            parts.append((waves * (i + 1))[key] + 1 if i % 2 else rx.conj(waves)[key] * 2)
            spread[key] = parts[-1]
        return *parts, rx.fft.irfftn(-spread * 0.5, s=s, axes=axes, norm=norm)

    check(f, array(*shape, seed=seed))


def test_what_programs_are_saved_with():
    for function in (modes.rfft_low, modes.irfft_low):
        name = _aot_data.function_name(function)
        assert _aot_data.function_of(name) is function
        _aot_data.check_call(function, (), ())


def test_long_chains_take_no_longer():
    low = _ir.input_node(0, "complex64", (5, 3))
    zeros = _ir.broadcast(_ir.constant(0, low.dtype), (33, 3))
    x = _ir.update(zeros, low, (0, 0), (1, 1))
    for _ in range(200):  # each of which reads the one before twice
        x = _ir.map_node("add", x, _ir.map_node("negative", x))
    graph = _ir.Graph([low], [_ir.transform("irfft", x, [0], [64], "none")])
    assert [n.op for n in _low_modes.shorten(graph).nodes()].count("call") == 1
