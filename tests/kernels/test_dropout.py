"""The kernel of dropout: the masks of the generator, at any place in its stream."""

import ml_dtypes
import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device
from rtxarr.kernels import dropout as kernels
from rtxarr.random import Generator, record_draws, replay_draws
from rtxarr.testing import assert_close

DTYPES = ["float32", "float16", "bfloat16", "float64"]
SMALL, LARGE = [(1,), (3, 5), (2, 2, 8), (24,)], [(1,), (3, 5), (1001, 24), (333, 1024), (70_001,)]
LARGE += [(9, 4104), (8, 4096)]


def make(shape, dtype, n=1):
    values = np.random.default_rng(0).standard_normal((n, *shape))
    return values.astype(getattr(ml_dtypes, dtype, dtype))


def at(offset, seed=3):
    """Return a generator that is so far along its stream."""
    generator = Generator(seed)
    if offset:
        generator.dropout_mask(offset, 0.5, device="cpu")
    return generator


def dropped(x, mask, rate):
    return np.where(mask, x.astype(np.float64) / (1 - rate), 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_is_that_of_the_generator(place, dtype):
    for shape in SMALL if place == "cpu" else LARGE:
        x, grad = make(shape, dtype, 2)
        for offset in (0, 1, 2, 3, 6):
            mask = at(offset).dropout_mask(shape, 0.4, device="cpu")
            t = rx.Tensor(_device.to_device(x, place), requires_grad=True)
            assert kernels.fits(t.data)
            generator = at(offset)
            out = rx.dropout(t, 0.4, generator=generator)
            rest = generator.uniform(3, device="cpu")
            out.backward(_device.to_device(grad, place))
            assert_close(out, dropped(x, mask, 0.4).astype(x.dtype))
            assert_close(t.grad, dropped(grad, mask, 0.4).astype(x.dtype))
            after = at(offset)
            after.dropout_mask(shape, 0.4, device="cpu")
            assert_close(rest, after.uniform(3, device="cpu"), exact=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_a_bias_and_a_residual(place, dtype):
    for shape in [(3, 5), (2, 3, 8)] if place == "cpu" else LARGE:
        x, residual, grad = make(shape, dtype, 3)
        bias = make(shape[-1:], dtype)[0]
        mask = at(1).dropout_mask(shape, 0.25, device="cpu")
        tensors = [
            rx.Tensor(_device.to_device(a, place), requires_grad=True) for a in (x, residual, bias)
        ]
        out = rx.dropout_add(*tensors[:2], 0.25, tensors[2], generator=at(1))
        out.backward(_device.to_device(grad, place))
        wide = x.astype(np.float64) + bias.astype(np.float64)
        want = residual.astype(np.float64) + dropped(wide, mask, 0.25)
        assert_close(out, want.astype(x.dtype))
        of_x = dropped(grad, mask, 0.25)
        assert_close(tensors[0].grad, of_x.astype(x.dtype))
        assert_close(tensors[1].grad, grad, exact=True)
        # The terms are the gradient of x, rounded; their sum is rounded once.
        terms = _device.to_device(tensors[0].grad, "cpu").astype(np.float64)
        terms = terms.reshape(-1, shape[-1])
        of_bias = _device.to_device(tensors[2].grad, "cpu").astype(np.float64)
        want = terms.sum(axis=0)
        wide = np.finfo(np.float64 if dtype == "float64" else np.float32).eps
        info = ml_dtypes.finfo(x.dtype)
        bound = float(info.eps) / 2 * np.abs(want) + float(info.smallest_subnormal)
        bound += 8 * wide * np.abs(terms).sum(axis=0)
        assert np.all(np.abs(of_bias - want) <= bound)


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [64, 77, 96], ids=["whole", "ragged", "half"])
def test_blocks_that_are_whole_and_cut(monkeypatch, dtype, n):
    from rtxarr.kernels import _dropout_cuda

    monkeypatch.setattr(_dropout_cuda, "THREADS", 2)
    x, residual = make((n,), dtype, 2)
    for offset in (0, 3):
        mask = at(offset).dropout_mask((n,), 0.25, device="cpu")
        got = rx.dropout_add(x, residual, 0.25, generator=at(offset))
        want = residual.astype(np.float64) + dropped(x, mask, 0.25)
        assert_close(got, want.astype(x.dtype))


@pytest.mark.sim
def test_rows_longer_than_a_block(monkeypatch):
    from rtxarr.kernels import _dropout_cuda

    monkeypatch.setattr(_dropout_cuda, "THREADS", 2)
    x, residual, bias = make((3, 20), "float32", 3)
    mask = at(3).dropout_mask((3, 20), 0.25, device="cpu")
    got = rx.dropout_add(x, residual, 0.25, bias[0], generator=at(3))
    assert_close(got, (residual + dropped(x + bias[0], mask, 0.25)).astype("f4"))


def test_views_that_are_not_aligned_or_not_contiguous(place):
    x = make((6, 8), "float32")[0]
    mask = at(0).dropout_mask((6, 8), 0.5, device="cpu")
    storage = _device.to_device(np.concatenate([np.zeros(1, np.float32), x.ravel()]), place)
    turned = _device.to_device(np.ascontiguousarray(x.T), place).T
    for view in (storage[1:].reshape(6, 8), turned):
        assert_close(rx.dropout(view, 0.5, generator=at(0)), dropped(x, mask, 0.5).astype("f4"))


def test_place_in_memory_gives_the_same(place):
    """As a captured step has it."""
    x = _device.to_device(make((3, 8), "float32")[0], place)
    numbers = at(2).dropout_place(x.size)
    memory = _device.to_device(np.array(numbers, np.uint64), place)
    got = kernels.dropout_add(x, x, None, place=memory, rate=0.3)
    assert_close(got, kernels.dropout_add(x, x, None, place=numbers, rate=0.3), exact=True)


def test_draws_are_recorded_and_replayed(place):
    x = _device.to_device(make((3, 8), "float32")[0], place)
    generator = Generator(5)
    with record_draws() as log:
        first = rx.dropout(x, 0.5, generator=generator)
    second = rx.dropout(x, 0.5, generator=generator)
    with replay_draws(log):
        again = rx.dropout(x, 0.5, generator=generator)
    assert_close(again, first, exact=True)
    assert np.any(_device.to_device(second, "cpu") != _device.to_device(first, "cpu"))


@pytest.mark.gpu
def test_checkpoints_drop_the_same_again():
    x = make((64, 64), "float32")[0]
    grads = []
    for wrap in (lambda f: f, rx.checkpoint):
        generator = Generator(6)

        def block(t, generator=generator):
            return rx.dropout_add(rx.tanh(t), t, 0.3, generator=generator)

        t = rx.Tensor(_device.to_device(x, "cuda:0"), requires_grad=True)
        out = block(t) if wrap is not rx.checkpoint else rx.checkpoint(block, t)
        rx.sum(out * out).backward()
        grads.append(t.grad)
    assert_close(*grads, exact=True)
