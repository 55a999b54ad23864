"""Hold fused functions to the functions themselves: results, writes, dtypes, shapes and bits."""

import copy
import warnings

import numpy as np

import rtxarr as rx
from rtxarr._device import to_device
from rtxarr.autograd._tree import flatten
from rtxarr.testing import assert_close

BACKENDS = ("interpreter", None)


def raw(x):
    return x.data if isinstance(x, rx.Tensor) else x


def assert_same(got, want, *, exact=True):
    """Compare nested results: structure, types, dtypes, shapes, bits (or within rounding)."""
    got, got_structure = flatten(got)
    want, want_structure = flatten(want)
    assert got_structure == want_structure
    for a, b in zip(got, want, strict=True):
        assert type(a) is type(b), (type(a), type(b))
        a, b = raw(a), raw(b)
        if not hasattr(b, "dtype"):
            assert a == b or (a != a and b != b)
            continue
        assert type(a) is type(b), (type(a), type(b))
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        a, b = (to_device(x, "cpu") for x in (a, b))
        if exact:
            np.testing.assert_array_equal(a, b)
            if b.dtype.kind == "f":
                nan = np.isnan(np.asarray(b, np.float64))
                np.testing.assert_array_equal(np.signbit(a) | nan, np.signbit(b) | nan)
        else:
            assert_close(a, b)


def check(f, *args, exact=True, backends=BACKENDS, calls=2, mode="strict", **kwargs):
    """Compare ``rx.fuse(f)`` with ``f``, also in what they write into their arguments."""
    fused = None
    for backend in backends:
        fused = rx.fuse(f, mode=mode, backend=backend)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            warnings.filterwarnings("ignore", "(divide by zero|invalid value|overflow|underflow)")
            for _ in range(calls):
                mine, theirs = copy.deepcopy((args, kwargs)), copy.deepcopy((args, kwargs))
                want = f(*mine[0], **mine[1])
                got = fused(*theirs[0], **theirs[1])
                assert_same(got, want, exact=exact)
                assert_same(theirs, mine, exact=exact)
        assert fused.n_eager == 0, fused.reasons
        assert fused.n_traces == 1
    return fused
