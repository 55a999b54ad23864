"""Every differentiable operation through ``rx.fuse``: values and gradients are the tape's."""

import importlib
import warnings

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.autograd._tree import flatten
from rtxarr.dtypes import is_complex, is_inexact

from .fused import BACKENDS, assert_same

registry = importlib.import_module("tests.autograd.test_registry")
CASES = registry.CASES
IDS = registry.IDS


# Over the edges of a graph a program adds up in another order than the kernels do.
OTHER_ORDER = """
    additive_attention mlp_attention dot_attention projected_attention weighted_sum edge_dot
""".split()


# What reads the values of arrays runs as it is.
EAGER = {("getitem", 6), ("index_update", 1), ("repeat", 2), ("spmm", 0), ("spmm", 1)}


def _varies(x):
    return isinstance(x, np.ndarray) and is_inexact(x.dtype)


def value_and_gradients(function, args):
    """Give the results of a function, and the gradients of a weighted sum of them."""
    args = [rx.Tensor(x, requires_grad=True) for x in args]
    out = flatten(function(*args))[0]
    total = 0
    for i, x in enumerate(out):
        if isinstance(x, rx.Tensor) and x.requires_grad:
            weights = np.cos(np.arange(x.size) + i).reshape(x.shape)
            x = rx.real(x) + 2 * rx.imag(x) if is_complex(x.dtype) else x
            total = total + rx.sum(x * weights)
    if isinstance(total, rx.Tensor):
        total.backward()
    return out, [x.grad for x in args]


@pytest.mark.parametrize("backend", BACKENDS, ids=["interpreter", "kernels"])
@pytest.mark.parametrize(("name", "number"), IDS)
def test_values_and_gradients(name, number, backend):
    function, args = CASES[name][number]
    exact = backend is not None and name not in OTHER_ORDER
    fixed = {i: x for i, x in enumerate(args) if not _varies(x)}

    def with_fixed(*args):
        args = iter(args)
        return function(*(fixed[i] if i in fixed else next(args) for i in range(n_args)))

    n_args, args = len(args), [x for x in args if _varies(x)]
    fused = rx.fuse(with_fixed, backend=backend)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(divide by zero|invalid value|overflow|underflow)")
        if (name, number) in EAGER:
            warnings.filterwarnings("ignore", ".*is not fused")
        want = value_and_gradients(with_fixed, args)
        got = value_and_gradients(fused, args)
    assert_same([raw(x) for x in got[0]], [raw(x) for x in want[0]], exact=exact)
    assert_same(got[1], want[1], exact=exact)
    assert fused.n_eager == ((name, number) in EAGER)


def raw(x):
    return x.data if isinstance(x, rx.Tensor) else x
