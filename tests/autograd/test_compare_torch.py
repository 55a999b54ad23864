"""Values and gradients of the core operations agree with PyTorch's."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

pytestmark = pytest.mark.compare

rng = np.random.default_rng(11)
X = rng.standard_normal((4, 5))
Y = rng.standard_normal((4, 5))
ROW = rng.standard_normal(5)
POSITIVE = np.abs(X) + 0.5
UNIT = np.tanh(X) * 0.9
COMPLEX = X + 1j * Y
INDEX = np.array([1, 1, 0, 3])

# name -> (rtxarr, torch, inputs); a None takes the function of that name from both.
CASES = {
    **dict.fromkeys(("abs", "sin", "cos", "tan", "exp", "expm1", "atan"), (None, None, (X,))),
    **dict.fromkeys(("sinh", "cosh", "tanh", "asinh", "square", "erf"), (None, None, (X,))),
    **dict.fromkeys(("log", "log2", "log10", "log1p", "sqrt"), (None, None, (POSITIVE,))),
    **dict.fromkeys(("asin", "acos", "atanh"), (None, None, (UNIT,))),
    **dict.fromkeys(("divide", "atan2", "remainder"), (None, None, (X, POSITIVE))),
    **dict.fromkeys(("add", "subtract", "multiply", "maximum"), (None, None, (X, ROW))),
    **dict.fromkeys(("minimum", "logaddexp", "hypot", "copysign"), (None, None, (X, ROW))),
    "acosh": (None, None, (POSITIVE + 1,)),
    "pow": (None, None, (POSITIVE, ROW)),
    "exp complex": (rx.exp, lambda t, x: t.exp(x), (COMPLEX,)),
    "abs complex": (rx.abs, lambda t, x: t.abs(x), (COMPLEX,)),
    "multiply complex": (rx.multiply, lambda t, x, y: x * y, (COMPLEX, ROW)),
    "divide complex": (rx.divide, lambda t, x, y: x / y, (ROW, COMPLEX)),
    "sqrt complex": (rx.sqrt, lambda t, x: t.sqrt(x), (COMPLEX,)),
    "real": (rx.real, lambda t, x: t.real(x), (COMPLEX,)),
    "imag": (rx.imag, lambda t, x: t.imag(x), (COMPLEX,)),
    "matmul complex": (rx.matmul, lambda t, x, y: x @ y, (COMPLEX, COMPLEX.T.copy())),
    "matmul": (None, None, (X, Y.T.copy())),
    "matmul vector": (rx.matmul, lambda t, x, y: x @ y, (X, ROW)),
    "sum": (lambda x: rx.sum(x, axis=0), lambda t, x: x.sum(0), (X,)),
    "mean": (lambda x: rx.mean(x, axis=1), lambda t, x: x.mean(1), (X,)),
    "var": (lambda x: rx.var(x, axis=1, correction=1), lambda t, x: x.var(1), (X,)),
    "std": (lambda x: rx.std(x, correction=1), lambda t, x: x.std(), (X,)),
    "prod": (lambda x: rx.prod(x, axis=1), lambda t, x: x.prod(1), (X,)),
    "prod zero": (
        lambda x: rx.prod(x, axis=1),
        lambda t, x: x.prod(1),
        (X * np.array([1, 1, 0, 1, 1.0]),),
    ),
    "amax ties": (
        lambda x: rx.max(x, axis=1),
        lambda t, x: t.amax(x, 1),
        (np.round(X),),
    ),
    "amin ties": (lambda x: rx.min(x), lambda t, x: t.amin(x), (np.round(X),)),
    "maximum ties": (rx.maximum, lambda t, x, y: t.maximum(x, y), (np.round(X), np.round(Y))),
    "logsumexp": (
        lambda x: rx.logsumexp(x, axis=1),
        lambda t, x: t.logsumexp(x, 1),
        (X * 100,),
    ),
    "cumulative_sum": (
        lambda x: rx.cumulative_sum(x, axis=1),
        lambda t, x: t.cumsum(x, 1),
        (X,),
    ),
    "cumulative_prod": (
        lambda x: rx.cumulative_prod(x, axis=1),
        lambda t, x: t.cumprod(x, 1),
        (X * np.array([1, 0, 1, 0, 1.0]),),
    ),
    "clip": (lambda x: rx.clip(x, -0.5, 0.5), lambda t, x: t.clamp(x, -0.5, 0.5), (X,)),
    "where": (
        lambda x, y: rx.where(x > 0, x * y, y),
        lambda t, x, y: t.where(x > 0, x * y, y),
        (X, ROW),
    ),
    "sort": (
        lambda x: rx.sort(x, axis=0, descending=True),
        lambda t, x: t.sort(x, 0, True)[0],
        (X,),
    ),
    "take": (
        lambda x: rx.take(x, INDEX, axis=0),
        lambda t, x: x[t.from_numpy(INDEX)],
        (X,),
    ),
    "getitem": (
        lambda x: x[INDEX, :3][:, None],
        lambda t, x: x[t.from_numpy(INDEX), :3][:, None],
        (X,),
    ),
    "scatter_add": (
        lambda x: rx.scatter_add(x, INDEX, 5),
        lambda t, x: t.zeros(5, 5, dtype=x.dtype).index_add(0, t.from_numpy(INDEX), x),
        (X,),
    ),
    "tile": (lambda x: rx.tile(x, (2, 3)), lambda t, x: t.tile(x, (2, 3)), (X,)),
    "repeat": (
        lambda x: rx.repeat(x, np.array([2, 0, 1, 3]), axis=0),
        lambda t, x: t.repeat_interleave(x, t.tensor([2, 0, 1, 3]), 0),
        (X,),
    ),
    "roll": (lambda x: rx.roll(x, 2, axis=1), lambda t, x: t.roll(x, 2, 1), (X,)),
    "concat": (lambda x, y: rx.concat([x, y]), lambda t, x, y: t.cat([x, y]), (X, Y)),
    "stack": (
        lambda x, y: rx.stack([x, y], axis=1),
        lambda t, x, y: t.stack([x, y], 1),
        (X, Y),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("narrow", [False, True], ids=["double", "single"])
def test_values_and_gradients(name, narrow):
    torch = pytest.importorskip("torch")
    ours, theirs, inputs = CASES[name]
    ours = ours or getattr(rx, name)
    theirs = theirs or (lambda t, *args: getattr(t, name)(*args))
    if narrow:
        inputs = [x.astype("complex64" if x.dtype.kind == "c" else "float32") for x in inputs]
    mine = [rx.Tensor(x, requires_grad=True) for x in inputs]
    other = [torch.tensor(x, requires_grad=True) for x in inputs]
    got, want = ours(*mine), theirs(torch, *other)
    g = rng.standard_normal(got.shape).astype(got.dtype)
    assert got.dtype == want.detach().numpy().dtype
    assert_close(got, want.detach().numpy(), **({"rtol": 1e-4, "atol": 1e-5} if narrow else {}))
    got.backward(g)
    want.backward(torch.tensor(g))
    for a, b in zip(mine, other, strict=True):
        limits = {"rtol": 1e-4, "atol": 1e-5} if narrow else {"rtol": 1e-10, "atol": 1e-10}
        assert_close(a.grad, b.grad.numpy(), **limits)
