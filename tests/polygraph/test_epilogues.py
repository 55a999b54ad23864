"""Matrix products of fused functions that take in what surrounds them."""

import json

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import nn
from rtxarr.libs import blas
from rtxarr.polygraph import _aot_data, _library, _products
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._cuda_backend import CudaBackend
from rtxarr.polygraph._passes import simplify
from rtxarr.polygraph._trace import current
from rtxarr.testing import assert_close

from .taken_in import FLOATS, HALVES, TOLERANCE, Backend, array, calls, on_gpu, programs, wide


@pytest.fixture
def takes_all(monkeypatch):
    """A library that takes whatever it is asked for; gives what it was asked."""
    asked = []

    def refusal(a, b, **options):
        asked.append(options)
        return ""

    monkeypatch.setattr(blas, "refusal", refusal)
    return asked


def check(f, *arrays, runs=None, backend=None):
    """Compare a fused function with itself in float64, and what its products take in."""
    fused = rx.fuse(f, mode="fast", backend=backend or Backend("fast"))
    for _ in range(2):
        got = fused(*arrays)
    assert not fused.reasons
    want = f(*(a.astype(np.float64) if a.dtype.kind not in "iub" else a for a in arrays))
    plain = rx.fuse(f, backend="interpreter")(*arrays)
    if not isinstance(got, tuple):
        got, want, plain = (got,), (want,), (plain,)
    for a, b, c in zip(got, want, plain, strict=True):
        assert a.dtype == c.dtype and a.shape == c.shape
        assert_close(wide(a), b, rtol=TOLERANCE[arrays[0].dtype.name], atol=_atol(arrays[0], b))
    if runs is not None:
        assert calls(fused) == runs, fused.explain()
    return fused


def _atol(x, want):
    return TOLERANCE[x.dtype.name] * float(np.max(np.abs(want), initial=1))


def gelu(x):
    return rx.gelu(x, approximate="tanh")


# -------------------------------------------------------------------------------- what is found


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_added_to_a_product(takes_all, dtype):
    x, w, bias, c = (
        array(*s, dtype=dtype, seed=i) for i, s in enumerate([(6, 5), (5, 7), (7,), (6, 7)])
    )
    check(lambda x, w, b: x @ w + b, x, w, bias, runs=["matmul + bias"])
    check(lambda x, w, b: b + x @ w, x, w, bias, runs=["matmul + bias"])
    check(lambda x, w, b: rx.linear(x, w.T, b) * 2, x, w, bias)
    check(lambda x, w, c: c + x @ w, x, w, c, runs=["matmul + addend"])
    half = x.dtype.type(0.5)
    check(lambda x, w, c: x @ w * half + c, x, w, c, runs=["matmul + scale + addend"])
    check(lambda x, w, b, c: c + (x @ w + b), x, w, bias, c, runs=["matmul + addend + bias"])
    check(lambda x, w, b, c: x @ w + c + b, x, w, bias, c, runs=["matmul + addend + bias"])
    assert takes_all[-1] == {"bias": True, "addend": True, "scale": 1.0, "epilogue": None}
    # One of two products takes in the other.
    check(lambda x, w: x @ w + (2 * x) @ w, x, w, runs=["matmul", "matmul + addend"])
    # Gradients that add up.
    check(lambda x, c, g: g + x.T @ c, x, c, array(5, 7, dtype=dtype), runs=["matmul + addend"])


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_stacks(takes_all, dtype):
    x, w, bias, c = (
        array(*s, dtype=dtype, seed=i) for i, s in enumerate([(2, 3, 5), (5, 8), (8,), (2, 3, 8)])
    )
    check(lambda x, w, b, c: c + (x @ w + b), x, w, bias, c, runs=["matmul + addend + bias"])
    check(lambda x, w, b, c: c + rx.linear(x, w.T, b), x, w, bias, c)
    check(lambda x, w, b: rx.relu(rx.linear(x, w.T, b)), x, w, bias, runs=["matmul + bias + relu"])
    # Heads: the bias has the last two axes of what the product becomes.
    check(
        lambda x, w, b: rx.reshape(x @ w, (2, 3, 2, 4)) + rx.reshape(b, (2, 4)),
        x, w, bias, runs=["matmul + bias"],
    )  # fmt: skip
    stack = array(2, 5, 8, dtype=dtype)
    check(lambda x, w, b: rx.relu(x @ w + b), x, stack, bias, runs=["matmul + bias + relu"])


RELUS = [rx.relu, lambda x: rx.maximum(x, 0), lambda x: rx.where(x < 0, 0, x)]
GELUS = [
    gelu,
    lambda x: 0.5 * x * (1 + rx.tanh(0.7978845608028654 * (x + 0.044715 * x**3))),
    lambda x: x * rx.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x)),
]


@pytest.mark.parametrize("f", RELUS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_relu_however_it_is_written(takes_all, dtype, f):
    x, w, b = (array(*s, dtype=dtype, seed=i) for i, s in enumerate([(6, 5), (5, 8), (8,)]))
    check(lambda x, w: f(x @ w), x, w, runs=["matmul + relu"])
    check(lambda x, w, b: f(x @ w + b) * 2, x, w, b, runs=["matmul + bias + relu"])


@pytest.mark.parametrize("dtype", HALVES)
def test_gelu_of_halves(takes_all, dtype):
    x, w, b = (array(*s, dtype=dtype, seed=i) for i, s in enumerate([(6, 5), (5, 8), (8,)]))
    check(lambda x, w, b: gelu(x @ w + b), x, w, b, runs=["matmul + bias + gelu"])
    # With its argument, where others need it.
    together = ["matmul + bias + gelu & its sum"]
    check(lambda x, w, b: (gelu(x @ w + b), x @ w + b), x, w, b, runs=together)

    def both(x, w, b):
        before = rx.linear(x, w.T, b)
        return gelu(before), before * 2

    check(both, x, w, b, runs=together)


@pytest.mark.parametrize("f", GELUS)
def test_gelu_is_told_by_its_values(f):
    fused = rx.fuse(f)
    fused(array(6, 8))
    (program,) = programs(fused)
    (y,) = program.graph.outputs
    assert _products.activation_of(y, program.graph.inputs[0]) == "gelu"


# ---------------------------------------------------------------------------- and what is not


def test_other_activations_are_not_taken_for_these(takes_all):
    x, w = array(6, 5, dtype="bfloat16"), array(5, 8, dtype="bfloat16")
    for f in (
        rx.gelu,  # with the error function
        rx.silu,
        rx.tanh,
        rx.abs,
        lambda x: rx.maximum(x + x.dtype.type(1), 0),
        lambda x: rx.where(x > 0, x, 0),  # zero for NaN
        lambda x: rx.maximum(x, 0.01),
        lambda x: rx.maximum(x, 1e-7),
        lambda x: (x + rx.abs(x)) / 2,  # NaN for -inf
        lambda x: rx.maximum(rx.minimum(x, 100), 0),
        lambda x: x * rx.sigmoid(1.702 * x),
        lambda x: gelu(rx.astype(x, rx.float32)),  # the result has another dtype
    ):
        check(lambda x, w, f=f: f(x @ w), x, w, runs=["matmul"])
    # An explicit cast rounds.
    y, v = array(6, 5), array(5, 8)
    f = lambda x, w: rx.astype(gelu(rx.astype(x @ w, rx.bfloat16)), rx.float32)  # noqa: E731
    check(lambda x, w: f(x, w) * 0 + x @ w, y, v, runs=["matmul"])


def test_factors_that_a_product_cannot_have(takes_all):
    """What is not multiplied, for a factor of 0, is NaN all the same; no factor overflows."""
    x, w = array(6, 5), array(5, 8)
    check(lambda x, w: x @ w * 0, x, w, runs=["matmul"])
    check(lambda x, w: x @ w * 1e-30 * 1e-30, x, w, runs=["matmul + scale"])
    check(lambda x, w: x @ w * 1e30 * 1e30, 0 * x, w, runs=["matmul + scale"])
    assert [options["scale"] for options in takes_all] == pytest.approx([1e-30, 1e30])


def test_gelu_of_float32_is_left_to_a_kernel(takes_all):
    x, w, b = array(6, 5), array(5, 8), array(8)
    fused = check(lambda x, w, b: gelu(x @ w + b), x, w, b, runs=["matmul + bias"])
    assert "gelu left out: the library's is right to 5e-6" in fused.explain()


def test_what_is_added_otherwise_is_left_to_a_kernel(takes_all):
    x, w = array(8, 5), array(5, 8)
    column, row, other = array(8, 1), array(8), array(8, 8)
    check(lambda x, w, c: x @ w + c, x, w, column, runs=["matmul"])
    check(lambda x, w, b: (x @ w) * b, x, w, row, runs=["matmul"])
    check(lambda x, w, b: x @ w - b, x, w, row, runs=["matmul"])
    check(lambda x, w, b: x @ w + b * 2, x, w, row, runs=["matmul"])  # not in memory
    check(lambda x, w, c: x @ w + c * 2, x, w, other, runs=["matmul"])
    check(lambda x, w, c: x @ w + c.T, x, w, other, runs=["matmul"])
    check(lambda x, w: x @ w + 1, x, w, runs=["matmul"])
    check(lambda x, w, k: x @ w * k, x, w, array(1)[0:1], runs=["matmul"])
    # After something was added a factor is another thing.
    check(lambda x, w, b: (x @ w + b) * 2, x, w, row, runs=["matmul + bias"])
    # Neither of one column is a row.
    check(lambda x, w, b: x @ w + b, x, array(5, 1), array(1), runs=["matmul"])


def test_products_that_others_read_keep_what_they_are(takes_all):
    x, w, b = array(6, 5), array(5, 8), array(8)
    check(lambda x, w, b: (x @ w, x @ w + b), x, w, b, runs=["matmul"])
    check(lambda x, w, b: (x @ w + b) * rx.sum(x @ w), x, w, b, runs=["matmul"])
    check(lambda x, w: (rx.relu(x @ w), x @ w), x, w, runs=["matmul"])
    check(lambda x, w: x @ w + x @ w, x, w, runs=["matmul"])
    h = [a.astype(rx.bfloat16) for a in (x, array(5, 12), array(12))]
    fused = check(lambda x, w, b: (gelu(x @ w + b), x @ w + b), *h, runs=["matmul + bias"])
    assert "no multiple of 8" in fused.explain()


def test_operands_with_gaps(takes_all):
    x, w, b, c = array(6, 5), array(5, 8), array(16)[::2], array(6, 16)[:, ::2]
    for added in (b, c):
        fused = check(lambda x, w, b: x @ w + b, x, w, added, runs=["matmul"])
        assert "what is added has gaps" in fused.explain()
    # Rows that are apart do not fold.
    stack = array(4, 6, 5, dtype="bfloat16")[::2, ::2].transpose(1, 0, 2)
    w, b = array(5, 8, dtype="bfloat16"), array(8, dtype="bfloat16")
    f = lambda x, w, b: (gelu(x @ w + b), x @ w + b)  # noqa: E731
    fused = check(f, stack, w, b, runs=["matmul + bias"])
    assert "would be copied" in fused.explain()


def test_a_library_that_refuses_leaves_the_graph(monkeypatch, tmp_path):
    x, w, b, c = array(6, 5), array(5, 8), array(8), array(6, 8)

    def refusal(a, b, *, addend=False, epilogue=None, **options):
        return "no addends" if addend else "no activations" if epilogue else ""

    monkeypatch.setattr(blas, "refusal", refusal)
    fused = check(lambda x, w, b, c: rx.relu(x @ w + b + c), x, w, b, c, runs=["matmul + bias"])
    text = fused.explain()
    assert "what is added is left out: no addends" in text
    text.to_html(tmp_path / "page.html")
    assert "what is added is left out: no addends" in (tmp_path / "page.html").read_text()
    fused = check(lambda x, w, b: rx.relu(x @ w + b), x, w, b, runs=["matmul + bias"])
    assert "relu left out: no activations" in fused.explain()


def test_strict_mode_and_missing_libraries_change_nothing(monkeypatch):
    x, w = ir.input_node(0, "float32", (6, 5)), ir.input_node(1, "float32", (5, 8))
    b = ir.broadcast(ir.reshape(ir.input_node(2, "float32", (8,)), (1, 8)), (6, 8))
    graph = simplify(ir.Graph([x, w], [ir.map_node("add", ir.matmul(x, w), b)]))
    same, notes = CudaBackend("strict").rewrite(graph, {})
    assert same is graph
    assert notes == ['products take in nothing in mode "strict"']
    monkeypatch.setattr(blas, "refusal", lambda *a, **k: "nvmath-python is not installed")
    same, notes = CudaBackend("fast").rewrite(graph, {})
    assert same is graph
    assert notes == [
        "product float32[6x8]: what is added is left out: nvmath-python is not installed"
    ]


def test_nothing_is_asked_of_empty_arrays(takes_all):
    check(lambda x, w, b: rx.relu(x @ w + b), array(0, 5), array(5, 8), array(8), runs=["matmul"])
    check(lambda x, w, b: rx.relu(x @ w + b), array(3, 0), array(0, 8), array(8), runs=["matmul"])
    assert takes_all == []


@pytest.mark.parametrize("dtype", [*FLOATS, "float64"])
def test_linear_on_a_gpu_is_what_it_is_by_itself(takes_all, monkeypatch, dtype):
    """Its bias is part of the library's product, whose algorithm, and bits, depend on it."""

    class OnGpu:
        on_numpy = False

        def __getattr__(self, name):
            return getattr(current(), name)

    monkeypatch.setattr(_library, "current", OnGpu)
    x, w, b = (array(*s, dtype=dtype, seed=i) for i, s in enumerate([(2, 3, 5), (8, 5), (8,)]))
    f = lambda x, w, b: rx.relu(rx.linear(x, w, b))  # noqa: E731
    strict = rx.fuse(f)
    assert_close(strict(x, w, b), f(x, w, b), exact=True)
    assert calls(strict) == ["linear"]
    check(f, x, w, b, runs=["matmul + bias + relu"])
    with pytest.raises(ValueError, match="bias must have shape"):
        rx.fuse(f)(x, w, b[:3])
    with pytest.raises(TypeError):
        rx.fuse(f)(x, w, np.ones(8, "int64"))


def test_calls_can_be_saved():
    x, w = ir.input_node(0, "float32", (4, 8)), ir.input_node(1, "float32", (8, 8))
    bias = ir.input_node(2, "float32", (8,))
    made = _products.made_of(_products.Product(x, w, bias, scale=0.5), "relu")(x, w, bias)
    (call,) = made.src
    written = json.dumps(_aot_data.encode(call.attrs))
    read = _aot_data.decode(json.loads(written))
    _aot_data.check_attrs("call", read)
    assert ir.make("call", call.src, read, None, ()) is call
    _aot_data.check_call(_products.product_and_sum, (), ())


# -------------------------------------------------------------------------------- gradients


class Layers(nn.Module):
    def __init__(self, width, activation, dtype):
        rx.random.seed(0)
        with rx.device("cpu"):
            self.up = nn.Linear(width, 2 * width, dtype=getattr(rx, dtype))
            self.down = nn.Linear(2 * width, width, dtype=getattr(rx, dtype))
        self.activation = activation

    def forward(self, x):
        return x + self.down(self.activation(self.up(x)))


def step_of(model, x):
    def step():
        x.grad = None
        for p in model.parameters():
            p.grad = None
        y = rx.astype(model(x), rx.float32)
        loss = rx.mean(y * y)
        loss.backward()
        return loss

    return step


def gradients(model, x):
    return [wide(x.grad), *(wide(p.grad) for p in model.parameters())]


@pytest.mark.parametrize("lead", [(6,), (2, 3)], ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_of_two_layers(takes_all, dtype, activation, lead):
    function = rx.relu if activation == "relu" else gelu
    x = rx.Tensor(array(*lead, 64, dtype=dtype), requires_grad=True)
    model = Layers(64, function, dtype)
    loss = step_of(model, x)()
    want = gradients(model, x)
    step = rx.jit(step_of(model, x), mode="fast", backend=Backend("fast"))
    for _ in range(2):
        got = step()
    assert not step.reasons
    tolerance = TOLERANCE[dtype]
    assert_close(wide(got), wide(loss), rtol=tolerance)
    for a, b in zip(gradients(model, x), want, strict=True):
        assert a.shape == b.shape
        assert_close(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())
    assert [p.grad.dtype for p in model.parameters()] == [getattr(rx, dtype)] * 4
    runs = calls(step)
    if activation == "gelu" and dtype != "float32":
        assert "matmul + bias + gelu & its sum" in runs
    elif activation == "relu":
        assert "matmul + bias + relu" in runs
    assert "matmul + addend + bias" in runs and "matmul + addend" in runs
    assert "matmul + addend + bias" in step.explain()


# ------------------------------------------------------------------------------- random products


def random_function(rng):
    """Return a function that multiplies and adds at random, and its arrays."""
    n = int(rng.choice([4, 8, 16]))
    kinds = rng.integers(0, 9, size=int(rng.integers(2, 7))).tolist()
    keeps = bool(rng.random() < 0.5)

    def f(x, w, v, b, c):
        kept = []
        for kind in kinds:
            if kind == 0:
                x = x @ w + b
            elif kind == 1:
                x = rx.relu(x @ w)
            elif kind == 2:
                x = c + x @ v
            elif kind == 3:
                x = gelu(x @ v + b)
            elif kind == 4:
                x = x @ w + x @ v
            elif kind == 5:
                x = rx.linear(x, w, b)
            elif kind == 6:
                x = x * 0.5
            elif kind == 7:
                x = (x @ v) * 0.25 + c
            else:
                kept.append(rx.sum(x, axis=0))
                kept.append(x.T @ c)
            if keeps:
                kept.append(x)
            x = x * 0.2
        return (x, *kept)

    shapes = (8, n), (n, n), (n, n), (n,), (8, n)
    return f, [rng.standard_normal(s) for s in shapes]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(25))
def test_random_products(takes_all, dtype, seed):
    f, arrays = random_function(np.random.default_rng(seed))
    check(f, *(a.astype(getattr(rx, dtype)) for a in arrays))


# ---------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def served():
    """Fail when a product that the library should take went elsewhere."""
    found = pytest.importorskip("cupy")
    pytest.importorskip("nvmath")
    before = blas.status().refused.copy()
    yield found
    assert blas.status().refused == before


SHAPES = [(6, 5, 8), (33, 17, 65), (128, 256, 64), (1, 8, 8), (300, 64, 136)]


def forms():
    return {
        "bias": rx_linear,
        "relu": lambda x, w, b, c: rx.relu(rx.linear(x, w, b)),
        "gelu": lambda x, w, b, c: gelu(rx.linear(x, w, b)),
        "addend": lambda x, w, b, c: rx.add(c, rx.linear(x, w, b)),
        "scale": lambda x, w, b, c: rx.add(rx.multiply(rx.matmul(x, w.T), 0.5), c),
        "written out": lambda x, w, b, c: rx.relu(rx.add(rx.matmul(x, w.T), b)),
        "both": lambda x, w, b, c: (gelu(rx.linear(x, w, b)), rx.linear(x, w, b)),
    }


def rx_linear(x, w, b, c):
    return rx.linear(x, w, b)


# Of which a kernel and the library's own function have the same bits.
SAME_BITS = ("bias", "relu", "addend", "scale", "written out")


def layouts(cupy, arrays, way):
    if way == "columns":
        return [cupy.asarray(a.T.copy()).T if a.ndim == 2 else a for a in arrays]
    if way == "wider":
        found = []
        for a in arrays:
            wide = cupy.full((*a.shape[:-1], a.shape[-1] + 3), np.nan, a.dtype)
            wide[..., 1:-2] = a
            found.append(wide[..., 1:-2])
        return found
    return arrays


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["rows", "columns", "wider"])
@pytest.mark.parametrize("name", forms())
@pytest.mark.parametrize("dtype", FLOATS)
def test_gpu_forms(served, dtype, name, way):
    """Strict gives the bits of the function itself; fast what float64 gives, within rounding."""
    f = forms()[name]
    strict, fast = rx.fuse(f), rx.fuse(f, mode="fast")
    for m, k, n in SHAPES:
        shapes = (m, k), (n, k), (n,), (m, n)
        hosts = [array(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]
        want = f(*(a.astype(np.float64) for a in hosts))
        given = layouts(served, on_gpu(served, hosts), way)
        eager, got, quick = f(*given), strict(*given), fast(*given)
        assert not strict.reasons and not fast.reasons
        if not isinstance(want, tuple):
            want, eager, got, quick = (want,), (eager,), (got,), (quick,)
        for a, b, c, d in zip(want, eager, got, quick, strict=True):
            if name in SAME_BITS:
                assert_close(served.asnumpy(c), served.asnumpy(b), exact=True)
            assert c.dtype == d.dtype == b.dtype and d.shape == b.shape
            assert_close(
                wide(served.asnumpy(d)), a, rtol=TOLERANCE[dtype],
                atol=TOLERANCE[dtype] * max(1, np.abs(a).max()),
            )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gpu_gradients_of_two_layers(served, dtype, activation):
    function = rx.relu if activation == "relu" else gelu
    host = array(64, 128, dtype=dtype)
    model = Layers(128, function, dtype)
    x = rx.Tensor(host, requires_grad=True)
    loss = step_of(model, x)()
    want = [loss.data, *gradients(model, x)]
    model = Layers(128, function, dtype).to_device("cuda:0")
    x = rx.Tensor(served.asarray(host), requires_grad=True)
    step = rx.jit(step_of(model, x), mode="fast")
    for _ in range(4):
        on_gpu(served, [])
        got = step()
    assert not step.reasons
    found = [got.data, x.grad, *(p.grad for p in model.parameters())]
    tolerance = 2 * TOLERANCE[dtype]
    for a, b in zip(found, want, strict=True):
        assert_close(
            wide(served.asnumpy(a)), wide(b), rtol=tolerance, atol=tolerance * np.abs(b).max()
        )
    text = step.explain()
    assert (
        "relu" in text if activation == "relu" else dtype == "float32" or "gelu & its sum" in text
    )


@pytest.mark.gpu
def test_gpu_empty_arrays(served):
    f = lambda x, w, b: rx.relu(rx.linear(x, w, b))  # noqa: E731
    fused = rx.fuse(f, mode="fast")
    for m, k, n in ((0, 5, 8), (5, 0, 8), (5, 8, 0)):
        given = [served.ones(s, "float32") for s in ((m, k), (n, k), (n,))]
        assert_close(fused(*given), f(*given), exact=True)
