"""Checks that the tests of several families of operations share."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close


def _track(arrays):
    return [rx.Tensor(a, requires_grad=True) for a in arrays]


def gradients(function, arrays, weights):
    """Give the output of a function, and the gradients of its weighted sum."""
    tensors = _track(arrays)
    out = function(*tensors)
    out.backward(weights.astype(out.dtype))
    return out, [t.grad for t in tensors]


@pytest.fixture
def against_torch():
    """Compare values and gradients with those that PyTorch finds in float64."""
    torch = pytest.importorskip("torch")

    def check(ours, theirs, *arrays, rtol=1e-10):
        tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
        want = theirs(*tensors)
        weights = np.random.default_rng(0).standard_normal(tuple(want.shape))
        want.backward(torch.tensor(weights))
        out, grads = gradients(ours, arrays, weights)
        assert_close(out, want.detach().numpy(), rtol=rtol)
        for got, tensor in zip(grads, tensors, strict=True):
            assert_close(got, tensor.grad.numpy(), rtol=rtol, atol=1e-12)

    return check


@pytest.fixture(params=["float16", "bfloat16"])
def check_half(request):
    """Check that a half-precision result is the float32 one, rounded once."""
    dtype = np.dtype(getattr(rx, request.param))

    def check(function, *arrays):
        halves = [a.astype(dtype) if a.dtype == np.float64 else a for a in arrays]
        wide = [a.astype("float32") if a.dtype == dtype else a for a in halves]
        out = function(*halves)
        assert out.dtype == dtype
        # Where float32 is itself uncertain at a tie, the halves may be neighbours.
        assert_close(out, function(*wide).astype(dtype), rtol=2 * float(rx.finfo(dtype).eps))
        places = [i for i, a in enumerate(halves) if a.dtype == dtype]

        def call(*chosen):
            full = list(halves)
            for place, value in zip(places, chosen, strict=True):
                full[place] = value
            return function(*full)

        weights = np.random.default_rng(0).standard_normal(out.shape).astype(dtype)
        _, got = gradients(call, [halves[i] for i in places], weights)
        _, want = gradients(call, [wide[i] for i in places], weights.astype("float32"))
        for mine, its in zip(got, want, strict=True):
            assert mine.dtype == dtype
            # Rules that keep the output see it rounded.
            limit = 4 * float(rx.finfo(dtype).eps) * np.abs(its).max(initial=0)
            assert_close(mine, its, rtol=0, atol=limit)

    return check


@pytest.fixture
def check_per_sample():
    """Check the gradients of each sample against those of batches of one."""

    def check(function, x, *parameters):
        shape = function(x, *parameters).shape
        weights = np.random.default_rng(0).standard_normal(shape)
        tensors = _track(parameters)
        loss = rx.sum(function(x, *tensors) * weights)
        got = rx.autograd.per_sample_gradients(loss, tensors)
        for i in range(x.shape[0]):
            _, want = gradients(
                lambda *p, i=i: function(x[i : i + 1], *p), parameters, weights[i : i + 1]
            )
            for mine, its in zip(got, want, strict=True):
                assert_close(mine[i], its, rtol=1e-10)

    return check
