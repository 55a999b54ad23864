"""Fourier transforms in fused functions."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device
from rtxarr.polygraph import _interpret, _ir
from rtxarr.polygraph._explain import programs_of
from rtxarr.testing import assert_close

ONE = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]
SEVERAL = ["fftn", "ifftn", "rfftn", "irfftn"]


def array(name, dtype, shape=(3, 4, 6)):
    x = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    return x if name in ("rfft", "ihfft", "rfftn") else x + x.dtype.type(0.5) * x * 1j


def check(name, x, **options):
    fused = rx.fuse(lambda x: getattr(rx.fft, name)(x * 2, **options) * 3)
    want = getattr(rx.fft, name)(x * 2, **options) * 3
    got = fused(x)
    assert not fused.reasons
    assert got.dtype == want.dtype
    assert_close(got, want, exact=True)
    assert sum("fft" in line for line in fused.explain().splitlines() if "computes" in line) == 1


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ONE)
def test_along_an_axis(name, dtype, norm):
    x = array(name, dtype)
    for options in ({}, {"axis": 1}, {"n": 5}, {"n": 9, "axis": 0}):
        check(name, x, norm=norm, **options)


@pytest.mark.parametrize("name", SEVERAL)
def test_along_several_axes(name):
    x = array(name, "float32")
    for options in ({}, {"axes": (0, 2)}, {"axes": (2, 0)}, {"s": (5, 3)}, {"norm": "ortho"}):
        if "s" in options:
            options["axes"] = (0, 1)
        check(name, x, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("name", ONE + SEVERAL)
def test_gpu_bits(name, norm):
    cupy = _device.cupy
    choices = [{}, {"axis": 1}, {"n": 9, "axis": 0}]
    if name in SEVERAL:
        choices = [{}, {"axes": (0, 2)}, {"axes": (0, 1)}, {"s": (9, 3), "axes": (1, 2)}]
    for options in choices:
        x = cupy.asarray(array(name, "float32", (5, 6, 8)))
        before = x.copy()

        def f(x):
            return getattr(rx.fft, name)(x * 2, norm=norm, **options) + 1  # noqa: B023

        with rx.device("cuda:0"):
            fused = rx.fuse(f)
            for given in (x, x.transpose(2, 1, 0)):
                assert fused(given).tobytes() == f(given).tobytes(), options
        assert not fused.reasons
        assert x.tobytes() == before.tobytes()


@pytest.mark.parametrize("name", ["fft", "rfft", "irfftn"])
def test_gradients(name):
    x = array(name, "float64")

    def f(x):
        out = getattr(rx.fft, name)(x)
        return rx.sum(rx.real(out * rx.conj(out)))

    assert_close(rx.fuse(rx.grad(f))(x), rx.grad(f)(x))


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("name", ONE + SEVERAL)
def test_scales_share_kernels(name, norm, monkeypatch):
    monkeypatch.setattr("rtxarr.polygraph._fft._scales_apart", lambda: True)
    x = array(name, "float64")
    fused = rx.fuse(lambda x: getattr(rx.fft, name)(x, norm=norm) * 3)
    assert_close(fused(x), getattr(rx.fft, name)(x, norm=norm) * 3)
    (found,) = (s for s in steps_of(fused) if s.loops is None)
    assert found.results[0].attrs[2] == "none"
    assert len(steps_of(fused)) == (3 if name == "hfft" else 2)


@pytest.mark.parametrize("name", ["fft", "rfft", "irfft", "rfftn", "irfftn"])
def test_gradients_with_scales_apart(name, monkeypatch):
    monkeypatch.setattr("rtxarr.polygraph._fft._scales_apart", lambda: True)
    x = array(name, "float64")

    def f(x):
        return rx.sum(rx.abs(getattr(rx.fft, name)(x, norm="ortho")) ** 4)

    assert_close(rx.fuse(rx.grad(f))(x), rx.grad(f)(x))

    def g(x):
        return rx.sum(rx.abs(rx.grad(f)(x)) ** 2)

    assert_close(rx.fuse(rx.grad(g))(x), rx.grad(g)(x))


def steps_of(fused):
    ((made,),) = fused._programs.values()
    ((_, program),) = programs_of(made)
    return program.steps


def test_transforms_overwrite_what_nobody_needs(monkeypatch):
    told = []

    def destroying(xp, node, x, *, owned=False):
        axes, lengths, norm = node.attrs
        out = getattr(xp.fft, f"{node.op}n")(x, s=lengths, axes=axes, norm=norm)
        told.append(owned)
        if owned:
            x[...] = np.nan
        return out

    for op in _ir.TRANSFORMS:
        monkeypatch.setitem(_interpret.RULES, op, destroying)

    def kept(x):
        return x, rx.fft.irfft(x)

    def once(x):
        y = x * 2
        return rx.fft.irfft(y) + 1

    def read_later(x):
        y = x * 2
        return rx.fft.irfft(y)[0, 0] + rx.real(y[0, 0, 0]), rx.sum(rx.real(y))

    def returned(x):
        y = x * 2
        return y, rx.fft.irfft(y)

    def view_returned(x):
        y = x * 2
        return rx.reshape(y, (-1,)), rx.fft.irfft(y)

    def through_a_view(x):
        y = x * 2
        return rx.fft.irfft(rx.permute_dims(y, (1, 0, 2))), rx.fft.irfft(y)

    def twice(x):
        y = x * 2
        return rx.fft.irfft(y) + rx.fft.irfft(y, norm="ortho")

    def written(x):
        x *= 2
        return rx.fft.irfft(x)

    def of_transforms(x):
        return rx.fft.irfft(rx.fft.ifft(x * 2, axis=0) * 2)

    for f, owned in (
        (kept, [False]), (once, [True]), (read_later, [False]), (returned, [False]),
        (view_returned, [False]), (through_a_view, None), (twice, [False, False]),
        (written, [False]), (of_transforms, [True, True]),
    ):  # fmt: skip
        mine, theirs = array("irfft", "float64"), array("irfft", "float64")
        want = f(theirs)
        told.clear()
        got = rx.fuse(f)(mine)
        assert owned is None or told == owned, f.__name__
        for a, b in zip(got, want, strict=True):
            assert_close(a, b)
        assert_close(mine, theirs, exact=True)


@pytest.fixture
def moves(monkeypatch):
    """Transform along the last axes, as on a GPU."""
    monkeypatch.setattr("rtxarr.polygraph._fft._scales_apart", lambda: True)
    monkeypatch.setattr("rtxarr.polygraph._backends._moves", lambda trace: True)


def results_of(fused):
    return [s.results[0] for s in steps_of(fused)]


def test_kernels_move_axes_for_transforms(moves):
    x = array("rfft", "float64", (2, 8, 6, 5))

    def block(x):
        waves = rx.fft.rfftn(x * 2, axes=(1, 2), norm="ortho")
        return rx.fft.irfftn(waves * 3, s=(8, 6), axes=(1, 2), norm="ortho") + x

    fused = rx.fuse(block)
    got = fused(x)
    assert got.flags.c_contiguous
    assert_close(got, block(x))
    assert [(n.op, n.shape) for n in results_of(fused)] == [
        ("permute", (2, 5, 8, 6)), ("rfft", (2, 5, 8, 4)), ("permute", (2, 5, 8, 4)),
        ("irfft", (2, 5, 8, 6)), ("add", (2, 8, 6, 5)),
    ]  # fmt: skip
    assert [s.loops is None for s in steps_of(fused)] == [False, True, False, True, False]


def test_arguments_are_moved_as_they_lie(moves):
    x = array("rfft", "float64", (2, 8, 6, 5))
    fused = rx.fuse(lambda x: rx.fft.rfftn(x, axes=(1, 2)))
    assert_close(fused(x), rx.fft.rfftn(x, axes=(1, 2)))
    assert [n.op for n in results_of(fused)] == ["permute", "rfft", "permute"]
    assert all(s.loops is None for s in steps_of(fused))


def test_what_others_read_too_is_not_stored_moved(moves):
    x = array("fft", "complex128", (4, 6, 5))

    def f(x):
        y = x * 2
        return y, rx.fft.fft(y, axis=1) * 2

    fused = rx.fuse(f)
    for got, want in zip(fused(x), f(x), strict=True):
        assert_close(got, want)
    assert [n.op for n in results_of(fused)] == ["multiply", "permute", "fft", "multiply"]


@pytest.mark.parametrize("seed", range(40))
def test_random_moves(moves, seed):
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4, 7], 4))
    axes = tuple(int(a) for a in rng.permutation(4)[: rng.integers(1, 5)])
    s = [max(shape[a] + int(rng.integers(-1, 2)), 1) for a in axes]
    back = tuple(int(a) for a in rng.permutation(4)[: rng.integers(1, 3)])

    def f(x):
        waves = rx.fft.rfftn(x, s=s, axes=axes, norm="ortho")
        more = rx.fft.ifftn(waves * 2, axes=back)
        again = rx.fft.irfftn(more[..., :3] - waves[..., :3], axes=back)
        return waves, more + waves, again * 2, rx.fft.fft(again + 1, axis=seed % 4)

    x = rng.standard_normal(shape)
    n_again = f(x)[2].size if min(shape[a] for a in back) > 1 else 0
    if not n_again:
        return
    fused = rx.fuse(f)
    for got, want in zip(fused(x), f(x), strict=True):
        assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert not fused.reasons


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4, 32, 24, 16), (2, 16, 15, 7), (3, 64, 64, 64)])
def test_gpu_moved_axes_have_the_bits_of_eager_ones(shape):
    cupy = _device.cupy
    x = cupy.asarray(np.random.default_rng(2).standard_normal(shape).astype("float32"))

    def block(x):
        waves = rx.fft.rfftn(x * 2, axes=(1, 2), norm="ortho")
        more = rx.fft.ifft(waves * 3, axis=1)
        back = rx.fft.irfftn(waves * 3, s=shape[1:3], axes=(1, 2), norm="ortho")
        return waves[:, :3, :5], more, back + x, rx.fft.rfftn(x, axes=(2, 1))

    with rx.device("cuda:0"):
        want = block(x)
        fused, stepped = rx.fuse(block), rx.jit(block)
        for f in (fused, stepped, stepped, stepped):
            for a, b in zip(f(x), want, strict=True):
                assert a.tobytes() == b.tobytes()
        assert not fused.reasons
    host = cupy.asnumpy(x).astype("float64")
    theirs = np.fft.rfftn(host * 2, axes=(1, 2), norm="ortho")
    assert_close(cupy.asnumpy(want[0]), theirs[:, :3, :5], rtol=1e-4, atol=1e-4)
    theirs = np.fft.irfftn(theirs * 3, s=shape[1:3], axes=(1, 2), norm="ortho")
    assert_close(cupy.asnumpy(want[2]), theirs + host, rtol=1e-4, atol=1e-4)
