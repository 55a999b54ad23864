"""Every differentiable operation through ``rx.fuse``: values and gradients are the tape's.

Bits are, to second order, but for what is named here.
"""

import importlib
import warnings

import numpy as np
import pytest

import rtxarr as rx
from rtxarr._device import is_array
from rtxarr.autograd._engine import gradients
from rtxarr.autograd._op import OPS
from rtxarr.autograd._tree import flatten
from rtxarr.dtypes import is_complex, is_inexact

from .fused import BACKENDS, assert_same

registry = importlib.import_module("tests.autograd.test_registry")
CASES = registry.CASES
IDS = registry.IDS


# Over the edges of a graph a program adds up in another order than the kernels do.
OTHER_ORDER = {
    "additive_attention": (0, 1, 2),
    "mlp_attention": (0, 1),
    "dot_attention": (0, 1),
    "projected_attention": (0, 1, 2),
    "weighted_sum": (0, 2),
    "projected_rows": (0, 1),
    "edge_dot": (1,),
}

# Second derivatives whose complex products the BLAS rounds by how their operands lie in memory.
OTHER_PRODUCTS = {("slogdet", 2)}

# What reads the values of arrays runs as it is.
EAGER = {("getitem", 6), ("index_update", 1), ("repeat", 2), ("spmm", 0), ("spmm", 1)}


def of(function, args):
    """Give the function of a case's arguments that may have gradients, and these."""
    varies = [is_array(x) and is_inexact(x.dtype) for x in args]

    def with_fixed(*given):
        given = iter(given)
        return function(*(next(given) if v else x for x, v in zip(args, varies, strict=True)))

    return with_fixed, [x for x, v in zip(args, varies, strict=True) if v]


def weighted_sum(out):
    """Add up results by weights that no gradient is the same for."""
    total = 0
    for i, x in enumerate(out):
        if isinstance(x, rx.Tensor) and x.requires_grad:
            weights = np.cos(np.arange(x.size) + i).reshape(x.shape)
            x = rx.real(x) + 2 * rx.imag(x) if is_complex(x.dtype) else x
            total = total + rx.sum(x * rx.asarray(weights, device=x.device))
    return total


def value_and_gradients(function, args):
    """Give the results of a function, the gradients of a weighted sum of them, and of theirs."""
    args = [rx.Tensor(x, requires_grad=True) for x in args]
    out = flatten(function(*args))[0]
    total = weighted_sum(out)
    if not isinstance(total, rx.Tensor):
        return out, [], []
    found = gradients([total], args, create_graph=True)
    slope = weighted_sum([g * g for g in found if g is not None])
    twice = [None]
    if isinstance(slope, rx.Tensor):
        twice = gradients([slope], args)
    return [map(raw, x) for x in (out, found, twice)]


def raw(x):
    return x.data if isinstance(x, rx.Tensor) else x


@pytest.mark.parametrize("backend", BACKENDS, ids=["interpreter", "kernels"])
@pytest.mark.parametrize(("name", "number"), IDS)
def test_values_and_gradients(name, number, backend):
    function, args = of(*CASES[name][number])
    fused = rx.fuse(function, backend=backend)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(divide by zero|invalid value|overflow|underflow)")
        if (name, number) in EAGER:
            warnings.filterwarnings("ignore", ".*is not fused")
        want = value_and_gradients(function, args)
        got = value_and_gradients(fused, args)
    for order, (a, b) in enumerate(zip(got, want, strict=True)):
        exact = number not in OTHER_ORDER.get(name, ())
        exact = exact and not (order == 2 and (name, number) in OTHER_PRODUCTS)
        assert_same(list(a), list(b), exact=exact)
    assert fused.n_eager == ((name, number) in EAGER)


def is_map(name, args):
    """Tell whether a case is an elementwise operation on arrays of one shape: nothing is added."""
    op = OPS[name]
    return op.elementwise and len({np.shape(x) for x in args}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "number"), IDS)
def test_values_and_gradients_on_gpu(name, number):
    cupy = pytest.importorskip("cupy")
    case, args = CASES[name][number]
    on_gpu = [cupy.asarray(x) if isinstance(x, np.ndarray) else x for x in args]
    function, args = of(case, on_gpu)
    fused = rx.fuse(function)
    with warnings.catch_warnings(), rx.device("cuda:0"):
        warnings.filterwarnings("ignore", ".*is not fused")
        want = value_and_gradients(function, args)
        got = value_and_gradients(fused, args)
    # CuPy's products and functions of complex numbers round elsewhere.
    exact = is_map(name, args) and not any(np.iscomplexobj(x) for x in CASES[name][number][1])
    for a, b in zip(got, want, strict=True):
        assert_same(list(a), list(b), exact=exact)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128"])
@pytest.mark.parametrize("n", [3, 5, 9, 17, 1000])
def test_means_are_divided_as_numpy_divides_them(dtype, n):
    rng = np.random.default_rng(n)
    for _ in range(20):
        x = rng.standard_normal((n, 2)) @ np.array([1, 1j if "complex" in dtype else 0.5])
        fused = rx.fuse(lambda a: np.mean(a))
        assert_same([fused(x.astype(dtype))], [np.mean(x.astype(dtype))], exact=True)
