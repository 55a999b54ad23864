"""What our own kernels take in of fused functions: gated pairs, and activations."""

import json

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.libs import blas, tile
from rtxarr.ops import _gates
from rtxarr.polygraph import _aot_data, _products
from rtxarr.polygraph import _ir as ir
from rtxarr.testing import assert_close

from .taken_in import HALVES, TOLERANCE, Backend, array, calls, on_gpu, wide


@pytest.fixture
def served(monkeypatch):
    """Libraries that take whatever they are asked for; gives what the gates' was asked."""
    asked = []

    def refusal(*matrices):
        asked.append(matrices)
        return ""

    monkeypatch.setattr(tile, "refusal", refusal)
    monkeypatch.setattr(blas, "refusal", lambda *args, **options: "")
    monkeypatch.setattr(tile, "pays", lambda kind, m, k, n: True)
    return asked


def check(f, *arrays, runs=None):
    """Compare a fused function with itself in float64, and what its products take in."""
    fused = rx.fuse(f, mode="fast", backend=Backend("fast"))
    for _ in range(2):
        got = fused(*arrays)
    assert not fused.reasons
    want = f(*(a.astype(np.float64) for a in arrays))
    if not isinstance(got, tuple):
        got, want = (got,), (want,)
    tolerance = TOLERANCE[arrays[0].dtype.name]
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert_close(wide(a), b, rtol=tolerance, atol=tolerance * np.abs(b).max())
    if runs is not None:
        assert calls(fused) == runs, fused.explain()
    return fused


def given(dtype="bfloat16", m=6, k=16, n=24):
    """Give an input, two weights and two biases."""
    shapes = (m, k), (n, k), (n, k), (n,), (n,)
    return [array(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]


ACTIVATIONS = {
    "relu": rx.relu,
    "sigmoid": rx.sigmoid,
    "silu": rx.silu,
    "gelu": rx.gelu,
    "gelu_tanh": lambda x: rx.gelu(x, approximate="tanh"),
}


def block(x, scale, w, v, down):
    y = rx.rms_norm(x, scale)
    return x + rx.linear(rx.silu(rx.linear(y, v)) * rx.linear(y, w), down)


# -------------------------------------------------------------------------------- what is found


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", HALVES)
def test_pairs_of_all_activations(served, dtype, name):
    activation = ACTIVATIONS[name]
    x, w, v, b, c = given(dtype)
    f = lambda x, w, v: activation(rx.linear(x, v)) * rx.linear(x, w)  # noqa: E731
    fused = check(f, x, w, v, runs=[f"gated matmul + {name}"])
    assert f"two products and a {name} gate are one" in fused.explain()
    assert served[-1] == tuple((x.dtype, a.shape, a.strides) for a in (x, w, v))
    f = lambda x, w, v, b, c: rx.linear(x, w, b) * activation(rx.linear(x, v, c))  # noqa: E731
    check(f, x, w, v, b, c, runs=[f"gated matmul + bias + {name}"])


WRITTEN = [
    lambda x, w, v: rx.silu(rx.matmul(x, v.T)) * rx.matmul(x, w.T),
    lambda x, w, v: (x @ w.T) * (x @ v.T / (1 + rx.exp(-(x @ v.T)))),
]


@pytest.mark.parametrize("f", WRITTEN)
def test_however_it_is_written(served, f):
    check(f, *given()[:3], runs=["gated matmul + silu"])


def test_a_gate_in_float32_that_is_rounded_at_the_end(served):
    def f(x, w, v):
        pair = rx.linear(x, w), rx.linear(x, v)
        if x.dtype == np.float64:
            return pair[0] * rx.silu(pair[1])
        value, gate = (rx.astype(y, rx.float32) for y in pair)
        return rx.astype(value * rx.silu(gate), x.dtype)

    check(f, *given()[:3], runs=["gated matmul + silu"])


def test_halves_of_one_product(served):
    x, w, v, b, c = given()
    both, biases = np.concatenate([w, v]), np.concatenate([b, c])
    check(lambda x, w: rx.swiglu(rx.linear(x, w)), x, both, runs=["gated matmul + silu"])
    check(lambda x, w, b: rx.geglu(rx.linear(x, w, b)), x, both, biases,
          runs=["gated matmul + bias + gelu"])  # fmt: skip
    check(lambda x, w, b: rx.swiglu(x @ w.T + b), x, both, biases,
          runs=["gated matmul + bias + silu"])  # fmt: skip

    def gate_first(x, w):
        y = rx.linear(x, w)
        return rx.silu(y[:, :24]) * y[:, 24:]

    check(gate_first, x, both, runs=["gated matmul + silu"])


def test_rows_of_stacks(served):
    _, w, v, b, c = given()
    x = array(2, 3, 16, dtype="bfloat16", seed=9)
    f = lambda x, w, v, b, c: rx.silu(rx.linear(x, v, c)) * rx.linear(x, w, b)  # noqa: E731
    check(f, x, w, v, b, c, runs=["gated matmul + bias + silu"])
    check(WRITTEN[0], x, w, v, runs=["gated matmul + silu"])
    both = np.concatenate([w, v])
    check(lambda x, w: rx.swiglu(rx.linear(x, w)), x, both, runs=["gated matmul + silu"])


def test_a_block_of_a_transformer(served):
    x, w, v, *_ = given()
    scale, down = array(16, dtype="bfloat16", seed=7), array(16, 24, dtype="bfloat16", seed=8)

    check(block, x, scale, w, v, down, runs=["gated matmul + silu", "matmul + addend"])


@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu"])
@pytest.mark.parametrize("dtype", HALVES)
def test_activations_that_cublaslt_does_not_have(served, dtype, name):
    activation = ACTIVATIONS[name]
    x, w, _, b, _ = given(dtype)
    fused = check(lambda x, w: activation(rx.linear(x, w)), x, w, runs=[f"matmul + {name}"])
    assert f"takes in {name}" in fused.explain()
    check(lambda x, w, b: activation(x @ w.T + b), x, w, b, runs=[f"matmul + bias + {name}"])
    stack = array(2, 3, 16, dtype=dtype, seed=9)
    f = lambda x, w, b: activation(rx.linear(x, w, b)) * 2  # noqa: E731
    check(f, stack, w, b, runs=[f"matmul + bias + {name}"])


def test_activations_that_others_have_or_need(served):
    x, w, _, b, _ = given()
    check(lambda x, w: rx.relu(rx.linear(x, w)), x, w, runs=["matmul + relu"])
    check(lambda x, w: rx.tanh(rx.linear(x, w)), x, w, runs=["linear"])
    check(lambda x, w: (rx.silu(x @ w.T), x @ w.T), x, w, runs=["matmul"])
    stacks = array(2, 3, 16, dtype="bfloat16"), array(2, 16, 24, dtype="bfloat16")
    check(lambda x, w: rx.silu(x @ w), *stacks, runs=["matmul"])
    check(lambda x, w: rx.silu(x @ w.T * 2), x, w, runs=["matmul + scale"])
    wide = [a.astype(np.float32) for a in (x, w)]
    check(lambda x, w: rx.silu(x @ w.T), *wide, runs=["matmul"])
    gaps = array(48, dtype="bfloat16")[::2]
    f = lambda x, w, b: rx.silu(rx.linear(x, w, b))  # noqa: E731
    assert "silu left out: a bias has gaps" in check(f, x, w, gaps).explain()


def test_layers_that_are_gated_pairs(served, monkeypatch):
    """Where eager calls on a GPU have them in a kernel, and round once."""
    x, w, v, b, c = given()
    check(rx.gated_linear, x, w, v, b, c, runs=["gated matmul + bias + silu"])
    check(
        lambda x, w, v: rx.gated_linear(x, w, v, activation="gelu_tanh"),
        x,
        w,
        v,
        runs=["gated matmul + gelu_tanh"],
    )
    monkeypatch.setattr(_gates, "on_gpu", lambda x: True)
    check(lambda x, w: rx.swiglu(rx.linear(x, w)), x, w, runs=["gated matmul + silu"])


# ---------------------------------------------------------------------------- and what is not


def test_what_is_no_gated_pair(served):
    x, w, v, b, c = given()
    other = array(6, 16, dtype="bfloat16", seed=9)
    for f in (
        lambda x, w, v, y: rx.silu(rx.linear(x, v)) * rx.linear(y, w),  # of two inputs
        lambda x, w, v, y: rx.silu(rx.linear(x, v)) * rx.silu(rx.linear(x, w)),
        lambda x, w, v, y: rx.linear(x, v) * rx.linear(x, w),
        lambda x, w, v, y: rx.tanh(rx.linear(x, v)) * rx.linear(x, w),
        lambda x, w, v, y: rx.silu(rx.linear(x, v)) + rx.linear(x, w),
        lambda x, w, v, y: rx.silu(rx.linear(x, v)) * rx.linear(x, v),
        lambda x, w, v, y: (rx.silu(rx.linear(x, v)) * rx.linear(x, w), rx.linear(x, v)),
        lambda x, w, v, y: (rx.silu(rx.linear(x, v)) * rx.linear(x, w), rx.linear(x, w) + 1),
    ):
        assert "gated" not in "".join(calls(check(f, x, w, v, other)))
    one_bias = lambda x, w, v, b: rx.silu(rx.linear(x, v)) * rx.linear(x, w, b)  # noqa: E731
    assert "gated" not in "".join(calls(check(one_bias, x, w, v, b)))
    factor = lambda x, w, v: rx.silu(rx.linear(x, v)) * (rx.linear(x, w) * 2)  # noqa: E731
    assert "gated" not in "".join(calls(check(factor, x, w, v)))
    quarters = lambda x, w: rx.silu(rx.linear(x, w)[:, :6]) * rx.linear(x, w)[:, 6:12]  # noqa: E731
    check(quarters, x, w, runs=["gated matmul + silu"])  # what is not read is not computed
    steps = lambda x, w: rx.silu(rx.linear(x, w)[:, ::2]) * rx.linear(x, w)[:, 1::2]  # noqa: E731
    check(steps, x, w, runs=["linear"])
    wide = [a.astype(np.float32) for a in (x, w, v)]
    check(WRITTEN[0], *wide, runs=["matmul", "matmul"])


def test_what_the_library_or_the_size_refuses(served, monkeypatch):
    x, w, v, *_ = given()
    monkeypatch.setattr(tile, "pays", lambda kind, *size: size != (6, 16, 24))
    fused = check(WRITTEN[0], x, w, v, runs=["matmul", "matmul"])
    assert "silu gate left out: at this size separate steps take less time" in fused.explain()
    monkeypatch.setattr(tile, "refusal", lambda *matrices: "cuda-tile is not installed")
    fused = check(WRITTEN[0], x, w, v, runs=["matmul", "matmul"])
    assert "silu gate left out: cuda-tile is not installed" in fused.explain()


def test_strict_mode_has_no_gates(served):
    strict = Backend("strict")
    strict.strict = True
    fused = rx.fuse(WRITTEN[0], backend=strict)
    x, w, v, *_ = given()
    assert_close(fused(x, w, v), WRITTEN[0](x, w, v), exact=True)
    assert calls(fused) == ["matmul", "matmul"]


def test_calls_can_be_saved():
    x, w = ir.input_node(0, "bfloat16", (4, 8)), ir.input_node(1, "bfloat16", (8, 8))
    result = x.dtype, (4, 8)
    (item,) = ir.call(_products.gated_product, (x, w, w), (("activation", "silu"),), [result])
    (call,) = item.src
    read = _aot_data.decode(json.loads(json.dumps(_aot_data.encode(call.attrs))))
    _aot_data.check_attrs("call", read)
    assert ir.make("call", call.src, read, None, ()) is call
    _aot_data.check_call(_products.gated_product, (), ())


# ---------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def gpu(monkeypatch):
    """CuPy beside cuTile, all of whose gates are taken; fails when one was computed in steps."""
    cupy = pytest.importorskip("cupy")
    if reason := tile._look()[1]:
        pytest.skip(reason)
    monkeypatch.setattr(tile, "pays", lambda kind, m, k, n: True)
    before = tile.status().refused.copy()
    yield cupy
    assert tile.status().refused == before


def compare(cupy, f, hosts, runs):
    """Hold a fused function on a GPU to itself in float64; twice the same bits."""
    want = f(*(a.astype(np.float64) for a in hosts))
    fused = rx.fuse(f, mode="fast")
    given = on_gpu(cupy, hosts)
    got = fused(*given)
    on_gpu(cupy, [])
    assert_close(cupy.asnumpy(fused(*given)), cupy.asnumpy(got), exact=True)
    assert not fused.reasons
    assert runs in str(fused.explain())
    tolerance = TOLERANCE[hosts[0].dtype.name]
    assert_close(wide(cupy.asnumpy(got)), want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", HALVES)
def test_gpu_pairs(gpu, dtype, name):
    activation = ACTIVATIONS[name]
    plain = lambda x, w, v, b, c: rx.linear(x, w) * activation(rx.linear(x, v))  # noqa: E731
    biased = lambda x, w, v, b, c: rx.linear(x, w, b) * activation(rx.linear(x, v, c))  # noqa: E731
    for m, k, n in ((33, 64, 72), (300, 128, 520)):
        for f in (plain, biased):
            compare(gpu, f, given(dtype, m, k, n), "gated matmul")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu"])
@pytest.mark.parametrize("dtype", HALVES)
def test_gpu_activations(gpu, dtype, name):
    activation = ACTIVATIONS[name]
    plain = lambda x, w, v, b, c: activation(rx.linear(x, w))  # noqa: E731
    biased = lambda x, w, v, b, c: activation(rx.linear(x, w, b))  # noqa: E731
    for m, k, n in ((33, 64, 72), (2048, 128, 2048)):
        for f in (plain, biased):
            compare(gpu, f, given(dtype, m, k, n), f"matmul{' + bias' * (f is biased)} + {name}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_gpu_halves_of_one_product(gpu, dtype):
    for m, k, n in ((33, 64, 72), (2048, 256, 2048)):
        x, w, v, *_ = given(dtype, m, k, n)
        compare(gpu, lambda x, w: rx.swiglu(rx.linear(x, w)), [x, np.concatenate([w, v])], "gated")


@pytest.mark.gpu
def test_gpu_captured_block(gpu):
    """Eager and captured give the same bits."""
    x, w, v, *_ = given("bfloat16", 256, 128, 512)
    w, v = (a / a.dtype.type(12) for a in (w, v))
    scale, down = (array(*s, dtype="bfloat16", seed=7) for s in ((128,), (128, 512)))
    hosts = x, scale, w, v, down / down.dtype.type(24)
    compare(gpu, block, hosts, "gated matmul + silu")
    with rx.device("cuda:0"):
        arrays = on_gpu(gpu, hosts)
        fused = rx.fuse(block, mode="fast")
        want, captured = fused(*arrays), rx.capture(fused)
        for _ in range(3):
            assert_close(gpu.asnumpy(captured(*arrays)), gpu.asnumpy(want), exact=True)
