"""The kernel of the rotary embedding against the formula over arrays."""

import ml_dtypes
import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device
from rtxarr.kernels import rotary as kernels
from rtxarr.ops._rotary import _formula
from rtxarr.testing import assert_close

# Shape of x, shape of the angles.
SMALL = [
    ((2, 3, 16), (3, 8)),
    ((2, 3, 2, 16), (2, 3, 1, 4)),
    ((2, 2, 3, 6), (2, 1, 3, 3)),
    ((5, 7), (5, 2)),
    ((2, 5, 3, 16), (3, 8)),
    ((2, 3, 5, 16), (3, 1, 8)),
    ((1, 2), (1, 1)),
]
LARGE = [*SMALL, ((4, 16, 1000, 128), (1000, 64)), ((3, 77, 12, 64), (3, 77, 1, 16))]


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_kernel_turns_as_the_formula(place, dtype, interleaved):
    rng = np.random.default_rng(0)
    for shape, angles in SMALL if place == "cpu" else LARGE:
        x, grad = rng.standard_normal((2, *shape)).astype(getattr(ml_dtypes, dtype, dtype))
        turn = rng.standard_normal(angles).astype("float64" if dtype == "float64" else "float32")
        cos, sin = np.cos(turn), np.sin(turn)
        t = rx.Tensor(_device.to_device(x, place), requires_grad=True)
        assert kernels.fits(t.data)
        moved = [_device.to_device(a, place) for a in (cos, sin)]
        out = rx.rotary_embedding(t, *moved, interleaved=interleaved)
        out.backward(_device.to_device(grad, place))
        assert_close(out, _formula(x, cos, sin, interleaved, False))
        assert_close(t.grad, _formula(grad, cos, sin, interleaved, True))


def test_memory_order_is_kept(place):
    """Heads that were split off and moved before the steps."""
    x = np.random.default_rng(1).standard_normal((2, 5, 3, 16)).astype(np.float32)
    view = _device.to_device(x, place).transpose(0, 2, 1, 3)
    cos, sin = (_device.to_device(a, place) for a in rx.rotary_angles(np.arange(5), 16))
    out = rx.rotary_embedding(view, cos, sin)
    assert out.strides == view.strides
    want = _formula(x.transpose(0, 2, 1, 3), *rx.rotary_angles(np.arange(5), 16), False, False)
    assert_close(out, want)
    inner = _device.to_device(np.ascontiguousarray(x.transpose(0, 1, 3, 2)), place)
    out = rx.rotary_embedding(inner.transpose(0, 3, 1, 2), cos, sin)
    assert_close(out, want)


def test_arrays_that_are_not_aligned(place):
    x = np.random.default_rng(2).standard_normal((4, 16)).astype(np.float32)
    flat = _device.to_device(np.concatenate([np.zeros(1, np.float32), x.ravel()]), place)
    angles = rx.rotary_angles(np.arange(4), 16)
    moved = (_device.to_device(a, place) for a in angles)
    got = rx.rotary_embedding(flat[1:].reshape(4, 16), *moved)
    assert_close(got, _formula(x, *angles, False, False))
