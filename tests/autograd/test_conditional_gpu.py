"""Branches and loops that a GPU decides, on one."""

import gc
import os

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, optim
from rtxarr.autograd import CaptureError, _conditional
from rtxarr.polygraph import _control_steps, cond, patch, while_loop
from rtxarr.random import Generator
from rtxarr.testing import assert_close
from tests.polygraph.test_control_steps import scanned

from .test_conditional import collatz, descend, draws

pytestmark = pytest.mark.gpu


@pytest.fixture
def cupy():
    found = pytest.importorskip("cupy")
    with rx.device("cuda:0"):
        if not _conditional.is_available():
            pytest.skip("needs a driver of CUDA 12.8")
        yield found
    gc.collect()


def on_host(x):
    return _device.to_device(x.data if isinstance(x, rx.Tensor) else x, "cpu")


def agree(step, function, *cases, exact=True):
    """Call a captured or fused step in turn, and compare with the function on the host."""
    for values in (*cases, *cases):
        arrays = [rx.asarray(v, device="cuda:0") for v in values]
        got, want = step(*arrays), function(*values)
        got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
        for a, b in zip(got, want, strict=True):
            assert_close(on_host(a), np.asarray(b), exact=exact)


def until_large(x):
    return while_loop(lambda x: rx.max(x) < 100, lambda x: 3 * x, x) + 1


LINES = [np.array(v, "float32") for v in ([1, 2], [300, 1], [50, 60], [0.5, 0.25])]


@pytest.mark.parametrize("make", [rx.capture, rx.jit, rx.fuse])
def test_loops_are_those_of_the_host(cupy, make):
    agree(make(until_large), until_large, *([x] for x in LINES))


@pytest.mark.parametrize("make", [rx.capture, rx.jit, rx.fuse])
@pytest.mark.parametrize("first", [27, 1], ids=["rounds", "no round"])
def test_branches_and_loops_in_loops(cupy, make, first):
    agree(make(collatz), collatz, *([np.array(n)] for n in (first, 2, 1, 97)))


@pytest.mark.parametrize("make", [rx.capture, rx.jit])
@pytest.mark.parametrize("first", [1, -1], ids=["then", "otherwise"])
def test_branches(cupy, make, first):
    """``first`` is the branch that the eager call takes; the other's plans come later."""
    weight = np.arange(16.0, dtype="float32").reshape(4, 4)
    on_device = rx.asarray(weight, device="cuda:0")

    def step(x, weight):
        def product(x):
            return rx.tanh(rx.matmul(x, weight)), rx.sum(x)

        return cond(rx.sum(x) > 0, product, lambda x: (x, rx.max(x)), x)

    captured = make(lambda x: step(x, on_device))
    xs = [sign * np.full((2, 4), 0.25, "float32") for sign in (first, -first)]
    agree(captured, lambda x: step(x, weight), *([x] for x in xs), exact=False)
    if make is rx.capture:
        assert captured.n_captures == 1


def test_constants_that_a_capture_needs_first(cupy):
    def step(x):
        def shifted(x):
            return x + _device.constant(x, np.arange, 5, dtype=np.dtype("float32"))

        return cond(rx.sum(x) > 0, shifted, lambda x: x, x)

    _device._on_gpu.cache_clear()
    agree(rx.capture(step), step, *([np.full(5, v, "float32")] for v in (-1, 1, 2)))


def test_ten_thousand_rounds(cupy):
    step = rx.capture(
        lambda n: while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, s[1] + 1), (n, n * 0))
    )
    agree(step, lambda n: (n * 0, n), [np.array(10_000)], [np.array(0)], [np.array(9_999)])


def test_products_in_a_loop(cupy):
    a = np.random.default_rng(0).standard_normal((64, 64)).astype("float32")
    a = (a @ a.T / 64).astype("float32")

    def largest(a, x):
        def body(state):
            i, x, _ = state
            y = rx.matmul(a, x)
            return i + 1, y / rx.sqrt(rx.sum(y * y)), rx.max(rx.abs(y / rx.sqrt(rx.sum(y * y)) - x))

        zero = rx.max(x) * 0
        return while_loop(lambda s: s[2] > 1e-5, body, (zero, x, zero + 1))[1]

    x = np.full((64, 1), 0.125, "float32")
    want = np.abs(np.linalg.eigh(a.astype("float64"))[1][:, -1:])
    for make in (rx.capture, rx.jit):
        step = make(lambda a, x: largest(a, x))
        for _ in range(3):
            got = step(cupy.asarray(a), cupy.asarray(x))
            np.testing.assert_allclose(np.abs(on_host(got)), want, atol=1e-2)


@pytest.mark.parametrize("n", [20, 3000], ids=["one by one", "counted by the GPU"])
def test_scans(cupy, monkeypatch, n):
    monkeypatch.setattr(_control_steps, "MOST_RECORDED", 1024)

    rng = np.random.default_rng(0)
    cases = [[rng.standard_normal((n, 3)), np.array([0.5, 1.0, 2.0])] for _ in range(3)]
    agree(rx.jit(scanned), scanned, *cases, exact=False)


def test_training_with_a_loop_inside(cupy):
    """A step whose forward pass refines its input, as often as that takes; with an optimizer."""

    def train(make):
        w = rx.Tensor(cupy.full(8, 0.5, "float32"), requires_grad=True)
        optimizer = optim.Adam([w], lr=0.1)

        def step(x):
            optimizer.zero_grad()
            x = while_loop(lambda x: rx.sum(x * x) > 1, lambda x: x * 0.5, x)
            loss = rx.mean((x * w - 1) ** 2)
            loss.backward()
            optimizer.step()
            return loss

        step = make(step)
        losses = [step(cupy.full(8, 10.0**i, "float32")).item() for i in (0, 1, -1, 2, 3, 1)]
        return losses, on_host(w)

    want = train(lambda f: f)
    got = train(rx.capture)
    assert got[0] == want[0]
    assert_close(got[1], want[1], exact=True)


@pytest.mark.parametrize("place", ["loop", "branch", "inner loop"])
def test_reading_in_a_body_is_refused_by_line(cupy, place):
    def step(x):
        def read(x):
            return x + float(x[0])  # refused here

        if place == "branch":
            return cond(x[1] > 0, lambda x: x, read, x)
        if place == "loop":
            return while_loop(lambda x: x[0] < 5, read, x)
        return while_loop(lambda x: x[0] < 5, lambda x: while_loop(lambda x: x[0] < 5, read, x), x)

    run = rx.capture(step)
    x = cupy.asarray([1.0, -1.0])
    run(x)
    for _ in range(2):
        with pytest.raises(CaptureError, match="conditional_gpu.py:.*float.* waits for the GPU"):
            run(x)
    good = rx.capture(until_large)
    agree(good, until_large, *([x] for x in LINES))


def test_draws_in_loops_and_branches_are_those_of_the_host(cupy):
    ours, theirs = Generator(5), Generator(5)
    run = rx.capture(lambda x: draws(ours, x))
    for case in ([0.0, 0.0], [20.0, 0.0], [-30.0, 0.0], [0.0, 1.0], [1.0, 0.0]):
        x = cupy.asarray(case, "float32")
        for a, b in zip(run(x), draws(theirs, x), strict=True):
            assert_close(on_host(a), on_host(b), exact=True)
        if case[0]:  # the host asks in between, or does not
            assert ours.state_dict() == theirs.state_dict()
            assert_close(on_host(ours.uniform(3)), on_host(theirs.uniform(3)), exact=True)
    assert run.n_captures == 1


def test_gradients_within_a_round(cupy):
    agree(
        rx.capture(descend), descend, [np.array([1.0, 0.5])], [np.array([2.0, 1.25])], exact=False
    )


def test_dropout_in_a_loop(cupy):
    """A network called as often as its result asks, with dropout in it."""

    def make(seed):
        rng = Generator(seed)

        def step(x, w):
            def body(x):
                return rx.dropout(rx.matmul(x, w), 0.3, generator=rng)

            return while_loop(lambda x: rx.sum(rx.abs(x)) > 1, body, x)

        return step

    w = rx.asarray(np.random.default_rng(0).standard_normal((64, 64)) / 16, device="cuda:0")
    w = rx.astype(w, "float32")
    ours, theirs = rx.capture(make(1)), make(1)
    for scale in (1, 100, 0, 10):
        x = cupy.full((8, 64), scale, "float32")
        assert_close(on_host(ours(x, w)), on_host(theirs(x, w)), exact=True)


def test_arrays_that_only_a_body_uses_are_watched(cupy):
    held = {"scale": cupy.full(2, 3.0)}

    def step(x):
        return while_loop(lambda x: x[0] < 100, lambda x: x * held["scale"], x)

    run = rx.capture(step)
    x = cupy.ones(2)
    assert [float(run(x)[0]) for _ in range(3)] == [243, 243, 243]
    held["scale"] = cupy.full(2, 10.0)  # noticed: recorded anew
    assert [float(run(x)[0]) for _ in range(2)] == [100, 100]
    assert run.n_captures == 2

    def replaces(x):
        def body(x):
            out = x * held["scale"]
            held["scale"] = out * 0 + 2
            return out

        return while_loop(lambda x: x[0] < 100, body, x)

    run = rx.capture(replaces)
    run(x)
    with pytest.raises(CaptureError, match="in place of one that it uses|lets go of an array"):
        run(x)


def test_two_steps_and_their_memory(cupy):
    double = rx.capture(lambda x: while_loop(lambda x: rx.max(x) < 50, lambda x: 2 * x, x))
    triple = rx.capture(lambda x: while_loop(lambda x: rx.max(x) < 50, lambda x: 3 * x, x))
    x = cupy.ones(1 << 20, "float32")
    for _ in range(4):
        assert float(double(x)[0]) == 64
        assert float(triple(x)[7]) == 81
    assert double.pool_bytes(rx.device("cuda:0")) >= 4 << 20
    cupy.get_default_memory_pool().free_all_blocks()
    before = cupy.cuda.runtime.memGetInfo()[0]
    double.clear()
    triple.clear()
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other workers use the GPU, too
        assert cupy.cuda.runtime.memGetInfo()[0] - before >= 8 << 20
    assert float(double(x)[0]) == 64


def test_many_captures_leak_nothing(cupy):
    def work():
        for i in range(50):
            step = rx.capture(until_large)
            for _ in range(3):
                step(cupy.full(2, 1.0 + i))

    def held():
        gc.collect()
        cupy.cuda.Device().synchronize()
        cupy.get_default_memory_pool().free_all_blocks()
        return cupy.get_default_memory_pool().used_bytes()

    work()
    used = held()
    work()
    assert held() == used


def test_kernels_of_a_captured_loop_are_patched(cupy):
    f = rx.fuse(lambda x: while_loop(lambda s: s[0] < 100, lambda s: s * 3, x))
    x = cupy.asarray([1.0, 2.0])
    for _ in range(3):
        assert on_host(f(x)).tolist() == [243, 486]
    (program,) = (m.program for found in f._programs.values() for m in found)
    body = program.parts[1]

    def kernel(x, three, out):
        cupy.multiply(x, three, out=out)

    (name,) = (step.name for step in body.steps if step.loops is not None)
    done = patch(body, name, kernel, max_slowdown=None, calls=[(x,)])
    for _ in range(3):
        assert on_host(f(x)).tolist() == [243, 486]
    done.rollback()
    assert on_host(f(x)).tolist() == [243, 486]


def test_fused_loops_launch_once(cupy):
    step = rx.fuse(until_large)
    for n in range(4):
        assert_close(on_host(step(cupy.asarray(LINES[0]))), until_large(LINES[0]))
        (program,) = (m.program for found in step._programs.values() for m in found)
        (loop,) = (s.run for s in program.steps if s.name.startswith("while_loop"))
        assert loop._captured.n_captures == min(n, 1)
    assert loop.round is not None

    def waits(x):
        return while_loop(lambda x: rx.max(x) < 100, lambda x: rx.sort(x * 2), x)

    agree(rx.fuse(waits), waits, *([x] for x in LINES))
