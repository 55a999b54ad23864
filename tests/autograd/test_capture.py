"""Captured steps do what eager ones do, to the bit; what cannot be captured is refused."""

import functools
import gc
import importlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _replay, nn, optim
from rtxarr.autograd import (
    Captured,
    CaptureError,
    _capture_arguments,
    _capture_errors,
    _capture_places,
)
from rtxarr.random import Generator

# ---------------------------------------------------------------------------------- on the CPU


def test_on_a_cpu_the_step_runs():
    calls = []

    @rx.capture
    def step(x, *, shift):
        calls.append(x)
        return {"sum": rx.sum(x + shift)}, [x]

    x = rx.asarray([1.0, 2.0], device="cpu")
    for _ in range(3):
        found, (same,) = step(x, shift=1.0)
        assert found["sum"] == 5.0
        assert same is x
    assert len(calls) == 3
    assert step.n_graphs == 0
    assert step.__name__ == "step"


def test_results_are_untracked():
    w = rx.Tensor(rx.ones(3, device="cpu"), requires_grad=True)
    out = rx.capture(lambda: rx.sum(w * 2))()
    assert isinstance(out, rx.Tensor)
    assert not out.requires_grad


def test_options_and_errors():
    step = rx.capture(max_graphs=3)(lambda x: x)
    assert isinstance(step, Captured)
    with pytest.raises(TypeError, match="step must be callable, got int"):
        rx.capture(3)
    with pytest.raises(ValueError, match="max_graphs must be an int >= 1, got 0"):
        rx.capture(abs, max_graphs=0)


def test_as_a_method():
    class Thing:
        factor = 3

        @rx.capture
        def times(self, x):
            return self.factor * x

    assert Thing().times(2) == 6
    assert Thing.times.n_graphs == 0


def test_a_step_inside_another_is_part_of_it(monkeypatch):
    monkeypatch.setattr(_replay._thread, "recorder", object())
    assert rx.capture(lambda x: x + 1)(1) == 2


def test_kinds_of_arguments():
    kind = _capture_arguments.kind
    assert kind(1) != kind(True) != kind(1.0)
    x = np.zeros((2, 3))
    assert kind(x) == kind(x + 1) != kind(x.T)
    assert kind(rx.Tensor(x)) != kind(x)
    parameter = nn.Parameter(x)
    assert kind(parameter) == kind(parameter) != kind(nn.Parameter(x))
    with pytest.raises(ValueError, match="must not be parts of a graph"):
        kind(parameter * 2)
    with pytest.raises(TypeError, match="hashable, got bytearray"):
        _capture_arguments.require_hashable(bytearray(b"x"))


MODEL = nn.Linear(2, 2, device="cpu")


def test_modules_that_a_step_can_see():
    inner, other = nn.Linear(2, 2, device="cpu"), nn.Dropout(0.5)
    held = SimpleNamespace(model=nn.Sequential(inner, other))

    def with_closure():
        return inner

    def with_global():
        return MODEL

    class Recipe:
        def __init__(self):
            self.model = other

        def step(self):
            return self.model

    def seen(step, *leaves):
        return set(_capture_places.modules_of(step, leaves))

    assert seen(with_closure) == {id(inner)}
    assert seen(with_global) == {id(MODEL)}
    assert seen(Recipe().step) == {id(other)}
    assert seen(functools.partial(with_closure, 1)) == {id(inner)}
    assert seen(abs, held) >= {id(inner), id(other)}
    assert seen(abs, other) == {id(other)}
    assert seen(inner) == {id(inner)}


def test_errors_name_the_users_line():
    def helper():
        raise type("CUDARuntimeError", (RuntimeError,), {})("illegal when stream is capturing")

    def step():
        helper()  # the line

    try:
        step()
    except RuntimeError as error:
        found = _capture_errors.explained(error, step)
    assert isinstance(found, CaptureError)
    assert "raise type(" in str(found)
    assert Path(__file__).name in str(found)
    assert "waits for the GPU or reads from it" in str(found)
    other = ValueError("mine")
    assert _capture_errors.explained(other, step) is other


class _Recorder(_replay.Recorder):
    """One whose memory is the host's."""

    def section(self, values, make):
        out = values.copy()

        def update():
            out[...] = make()

        self.updates.append(update)
        return out


@pytest.fixture
def recording(monkeypatch):
    """Run ``step`` as a capture does on the host's side; gives what it drew at each replay."""
    from rtxarr.kernels import philox

    monkeypatch.setattr(_replay, "_Block", lambda n: None)
    draws = []

    def fill(kind, n, dtype, params, *, place, shift=0):
        def draw():
            offset, stream, key = place
            return philox.fill(
                kind,
                n,
                dtype,
                params,
                key=key,
                stream=stream,
                offset=int(offset) + shift,
                device=rx.device("cpu"),
            )

        draws.append(draw)
        return draw()

    monkeypatch.setattr(philox, "fill_from_memory", fill)

    class Device(str):
        kind = "cuda"

    real = rx.device
    monkeypatch.setattr(
        "rtxarr.random._device.device", lambda spec=None: real(spec) if spec else Device("cuda:0")
    )

    def replays(step, n):
        found = []
        recorder = _Recorder()
        with recorder:
            step()
        for i in range(n):
            if i:
                recorder.refresh()
            found.append([draw() for draw in draws])
        return found

    return replays


@pytest.mark.parametrize("kind", ["plain", "checkpointed", "pieces", "made", "seeded", "spawned"])
def test_replayed_draws_are_those_of_eager_steps(recording, monkeypatch, kind):
    def step(rng, log):
        log.append(rng.uniform(3))
        log.append(rng.normal(5, dtype=np.float32))
        log.append(rng.integers(0, 10, (2, 2)))
        if kind == "pieces":
            piece = rng.dropout_mask_pieces(12, 0.5)
            log += [piece(3, (5,)), piece(0, (3,))]
        elif kind == "checkpointed":
            with rx.random.record_draws() as draws:
                log.append(rng.dropout_mask((7,), 0.5))
                log.append(rng.uniform(2, dtype=np.float32))
            log.append(rng.uniform(1))
            with rx.random.replay_draws(draws):
                log.append(rng.dropout_mask((7,), 0.5))
                log.append(rng.uniform(2, dtype=np.float32))
        elif kind == "made":
            log.append(Generator(7, key=3).uniform(2))
        elif kind == "seeded":
            log.append(rng.uniform(2))
            rng.load_state_dict(Generator(3).state_dict())
        elif kind == "spawned":
            for child in rng.spawn(2):
                log.append(child.uniform(2))
                log.append(child.normal(1))
        log.append(rng.exponential(3))

    rng = Generator(5)
    rng.uniform(1, dtype=np.float32, device="cpu")  # an odd place to begin
    found = recording(lambda: step(rng, []), 4)
    monkeypatch.undo()
    again = Generator(5)
    again.uniform(1, dtype=np.float32)
    for i, draws in enumerate(found):
        wanted = []
        step(again, wanted)
        assert len(draws) == len(wanted)
        for got, want in zip(draws, wanted, strict=True):
            np.testing.assert_array_equal(got.reshape(want.shape), want, err_msg=str(i))
    assert rng.state_dict() == again.state_dict()


def test_a_failed_capture_takes_draws_back(monkeypatch):
    monkeypatch.setattr(_replay, "_Block", lambda n: None)
    rng = Generator(1)
    before = rng.state_dict()
    recorder = _Recorder()
    with recorder:
        rng._reserve_in_memory("uniform32", 5)
        rng._reserve_in_memory("uniform64", 5)
        rng.spawn(3)
        rng.load_state_dict(Generator(2).state_dict())
    assert rng.state_dict() != before
    recorder.fail()
    assert rng.state_dict() == before


# ---------------------------------------------------------------------------------- on the GPU

gpu = pytest.mark.gpu


@pytest.fixture
def cupy():
    found = pytest.importorskip("cupy")
    with rx.device("cuda:0"):
        yield found
    gc.collect()


def bits(x):
    x = rx.Tensor(x).numpy() if not isinstance(x, rx.Tensor) else x.numpy()
    return x.tobytes(), x.shape, x.dtype


def assert_same(got, want):
    assert bits(got) == bits(want)


class Net(nn.Module):
    def __init__(self, rng):
        self.layers = nn.Sequential(
            nn.Linear(32, 64, generator=rng),
            nn.BatchNorm(64),
            rx.relu,
            nn.Dropout(0.3, generator=rng),
        )
        self.block = nn.TransformerBlock(64, 4, dropout=0.1, causal=True, generator=rng)
        self.out = nn.Linear(64, 10, generator=rng)

    def forward(self, x):
        x = self.layers(x)
        x = rx.checkpoint(self.block, rx.reshape(x, (4, -1, 64)))
        return self.out(rx.reshape(x, (-1, 64)))


def train(capture, n_steps, *, make_optimizer=optim.AdamW, clip=True):
    rng = Generator(3)
    model = Net(rng)
    optimizer = make_optimizer(model.parameters(), lr=1e-2)
    schedule = optim.CosineSchedule(1e-2, n_steps, warmup=5)

    def step(x, labels):
        optimizer.zero_grad()
        logits = model(x)
        loss = rx.cross_entropy(logits, labels)
        loss.backward()
        if clip:
            optim.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        return loss, rx.argmax(logits.data, axis=1)

    run = rx.capture(step) if capture else step
    data = Generator(9)
    losses = []
    for i in range(n_steps):
        optimizer.lr = schedule(i)
        x = data.normal((64, 32), dtype=rx.float32)
        loss, best = run(x, data.integers(0, 10, (64,)))
        losses.append((loss.numpy(), rx.Tensor(best).numpy()))
    return losses, model, rng, run


@gpu
@pytest.mark.parametrize(
    "make_optimizer",
    [optim.AdamW, optim.Lion, functools.partial(optim.SGD, momentum=0.9), optim.Adam],
    ids=["adamw", "lion", "sgd", "adam"],
)
def test_gpu_training_equals_eager_to_the_bit(cupy, make_optimizer):
    n = 100 if make_optimizer is optim.AdamW else 12
    eager, model, rng, _ = train(False, n, make_optimizer=make_optimizer)
    captured, other, other_rng, run = train(True, n, make_optimizer=make_optimizer)
    assert run.n_captures == 1
    for (loss, best), (other_loss, other_best) in zip(eager, captured, strict=True):
        assert_same(other_loss, loss)
        assert_same(other_best, best)
    for name, value in model.state_dict().items():
        assert_same(other.state_dict()[name], value)
    assert rng.state_dict() == other_rng.state_dict()


@gpu
def test_gpu_results_are_copies_unless_asked(cupy):
    def step(x):
        return x * 2, {"y": rx.Tensor(x) + 1, "name": "z", "none": None}

    for copy in (True, False):
        run = rx.capture(step, copy=copy)
        inputs = [cupy.full(4, i, "float32") for i in range(5)]  # none lies where another lay
        found = [run(x) for x in inputs]
        assert [type(found[-1][1]["y"]), found[-1][1]["name"]] == [rx.Tensor, "z"]
        values = [float(first[0]) for first, _ in found]
        assert values == ([0, 2, 4, 6, 8] if copy else [0, 8, 8, 8, 8])


@gpu
@pytest.mark.parametrize(
    "read",
    [
        lambda x: float(x[0]),
        lambda x: rx.Tensor(x[:1]).item(),
        lambda x: 1 if x[0] > 0 else 2,
        lambda x: rx.nonzero(x),
        lambda x: x[x > 0],
        lambda x: rx.Tensor(x).numpy(),
        lambda x: rx.linalg.svd(x.reshape(2, 2)),
        lambda x: x.reshape(2, 2) @ x.reshape(2, 2),
    ],
    ids=["float", "item", "if", "nonzero", "mask", "numpy", "svd", "cublas"],
)
def test_gpu_reading_the_device_is_refused(cupy, read):
    rng = Generator(0)

    def step(x):
        noise = rng.uniform(4)
        read(x)
        return x + noise

    run = rx.capture(step)
    x = cupy.arange(1, 5, dtype="float64")
    run(x)
    place = rng.state_dict()
    for _ in range(2):
        line = rf"test_capture\.py:{read.__code__.co_firstlineno} `lambda x: "
        with pytest.raises(CaptureError, match=line) as caught:
            run(x)
        assert "step" in str(caught.value)
        assert rng.state_dict() == place
    # Streams, pools and the step's other graphs go on.
    assert float((x + 1).sum()) == 14
    good = rx.capture(lambda x: x * 2)
    assert [float(good(x)[3]) for _ in range(3)] == [8, 8, 8]


@gpu
def test_gpu_users_own_errors_stay(cupy):
    fail = []

    def step(x):
        if fail:
            raise KeyError("mine")
        return x + 1

    run = rx.capture(step)
    x = cupy.ones(3)
    run(x)
    fail.append(1)
    with pytest.raises(KeyError, match="mine"):
        run(x)
    fail.clear()
    assert [float(run(x)[0]) for _ in range(3)] == [2, 2, 2]


@gpu
def test_gpu_replaced_arrays_are_refused(cupy):
    state = [cupy.zeros(1000)]

    def step(x):
        state[0] = state[0] * 0.5 + x
        return state[0].sum()

    run = rx.capture(step)
    x = cupy.ones(1000)
    run(x)
    with pytest.raises(CaptureError, match=r"another array in place .* of shape \(1000,\)"):
        run(x)

    # Deeper than what is looked through: seen by the memory that is given back.
    deep = SimpleNamespace(inner=SimpleNamespace(x=cupy.zeros(1000)))

    def hidden(x):
        deep.inner.x = deep.inner.x * 0.5 + x
        return deep.inner.x.sum()

    run = rx.capture(hidden)
    run(x)
    with pytest.raises(CaptureError, match="lets go of an array from before it"):
        run(x)

    kept = cupy.zeros(1000)

    def right(x):
        kept[...] = kept * 0.5 + x
        return kept.sum()

    run = rx.capture(right)
    assert [float(run(x)) for _ in range(4)] == [1000, 1500, 1750, 1875]


@gpu
def test_gpu_replaced_arrays_in_containers_are_noticed(cupy):
    layer = nn.Linear(3, 3)
    layer.extra = {"bias": cupy.ones(3, "float32"), "unused": cupy.ones(3, "float32")}
    run = rx.capture(lambda x: layer(x) * 0 + layer.extra["bias"])
    x = cupy.ones((2, 3), "float32")
    assert [float(run(x).data[0, 0]) for _ in range(3)] == [1, 1, 1]
    layer.extra["bias"] = cupy.full(3, 5, "float32")
    assert [float(run(x).data[0, 0]) for _ in range(3)] == [5, 5, 5]
    assert run.n_captures == 2
    layer.extra["unused"] = cupy.ones(3, "float32")
    run(x)
    assert run.n_captures == 2

    state, old = {"sum": cupy.zeros(1000)}, []

    def step(x):
        old.append(state["sum"])
        state["sum"] = state["sum"] * 0.5 + x
        return state["sum"].sum()

    run = rx.capture(step)
    run(cupy.ones(1000))
    with pytest.raises(CaptureError, match="another array in place of one that it uses"):
        run(cupy.ones(1000))


@gpu
def test_gpu_numbers_from_the_host_are_refused(cupy):
    run = rx.capture(lambda x: (x, 3))
    x = cupy.ones(3)
    run(x)
    with pytest.raises(CaptureError, match="the step gives 3, which was computed on the host"):
        run(x)


@gpu
def test_gpu_arguments_are_bound_or_copied(cupy):
    run = rx.capture(lambda x, y: x + y)
    x, y = cupy.zeros(5, "float32"), cupy.zeros(5, "float32")
    for i in range(6):
        x[...] = i
        assert float(run(x, cupy.full(5, i, "float32"))[0]) == 2 * i
    n = run.n_captures
    # Both have moved, are strided, or come from the host.
    others = [cupy.full(5, 7, "float32"), cupy.full((5,), 8, "float32")]
    for i in range(4):
        got = run(others[i % 2], y)
        assert float(got[4]) == 7 + i % 2
    assert run.n_captures <= n + 2
    spread = cupy.arange(10, dtype="float32")[::2]
    for _ in range(3):
        assert_same(run(spread, y), cupy.arange(10, dtype="float32")[::2])
        assert float(run(np.full(5, 4, np.float32), y)[0]) == 4
        got = run(rx.Tensor(spread), y)
        assert isinstance(got, rx.Tensor)
    x[...] = 1  # what was bound first was not written over
    assert float(x.sum()) == 5


@gpu
def test_gpu_gradients_are_those_of_the_last_call(cupy):
    layer = nn.Linear(3, 1, bias=False)

    def step(x):
        layer.zero_grad()
        rx.sum(layer(x)).backward()

    run = rx.capture(step)
    for _ in range(4):
        for n in (2, 5):  # a graph each
            run(cupy.ones((n, 3), "float32"))
            assert_same(layer.weight.grad, cupy.full((1, 3), n, "float32"))


@gpu
def test_gpu_what_was_recorded_before_a_replay_is_known_to_be_stale(cupy):
    layer = nn.Linear(3, 1)
    optimizer = optim.SGD(layer.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        rx.sum(layer(x) ** 2).backward()
        optimizer.step()

    run = rx.capture(step)
    x = cupy.ones((2, 3), "float32")
    for _ in range(3):
        run(x)
    loss = rx.sum(layer(rx.Tensor(x, requires_grad=True)) ** 2)
    run(x)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


@gpu
def test_gpu_shapes_numbers_and_modes_get_their_own_graphs(cupy):
    dropout = nn.Dropout(0.5)
    run = rx.capture(lambda x, factor: dropout(x) * factor, max_graphs=4)
    for _ in range(3):
        for n in (3, 4):
            assert run(cupy.ones(n), 2).shape == (n,)
    assert run.n_graphs == 2
    dropout.eval()
    for _ in range(3):
        assert float(run(cupy.ones(1000), 3.0).sum()) == 3000
    dropout.train()
    assert float(run(cupy.ones(1000), 3.0).sum()) != 3000
    with pytest.warns(RuntimeWarning, match="got 8 kinds of arguments in a row"):
        for n in range(10, 20):
            run(cupy.ones(n), 1)
    assert run.n_graphs <= 4


@gpu
def test_gpu_products_are_rounded_as_was_said_last(cupy):
    x = cupy.asarray(np.random.default_rng(0).standard_normal((128, 128)).astype("float32"))
    run = rx.capture(lambda x: rx.matmul(x, x))
    found = []
    try:
        for enabled in (False, True, False, True):
            rx.libs.blas.allow_tf32(enabled)
            for _ in range(3):
                found.append(bits(run(x)))
                assert found[-1] == bits(rx.matmul(x, x))
    finally:
        rx.libs.blas.allow_tf32(False)
    assert len(set(found)) == run.n_captures == 2


@gpu
def test_gpu_streams_follow_each_other(cupy):
    run = rx.capture(lambda x: rx.cumulative_sum(x * 2))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for i in range(20):
        with streams[i % 2]:
            x = cupy.full(1 << 20, i, "float64")
            got = run(x)
            assert float(got[-1]) == 2 * i * (1 << 20)


# Operations that run in libraries that a graph cannot hold, or sort on the host.
NOT_CAPTURABLE = {
    "cholesky", "det", "eig", "eigh", "eigvals", "eigvalsh", "inv", "pinv", "qr", "slogdet",
    "solve", "spmm", "svd", "svdvals", "to_device",
}  # fmt: skip
# Cases whose shapes depend on values.
READ_VALUES = {("getitem", 6), ("index_update", 1), ("repeat", 2)}


def _cases():
    found = []
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        module = importlib.import_module(f"{__package__}.{path.stem}" if __package__ else path.stem)
        for name, cases in module.CASES.items():
            for i, case in enumerate(cases):
                captures = name.lstrip("_") not in NOT_CAPTURABLE and (name, i) not in READ_VALUES
                found.append(pytest.param(captures, *case, id=f"{name}-{i}"))
    return found


@gpu
@pytest.mark.parametrize(("captures", "function", "args"), _cases())
def test_gpu_every_operation_is_captured_with_its_gradient(cupy, captures, function, args):
    from rtxarr.dtypes import is_inexact

    rx.random.seed(0)
    args = [rx.asarray(a, device="cuda:0") if isinstance(a, np.ndarray) else a for a in args]

    def step():
        inputs = [
            rx.Tensor(a, requires_grad=True) if a is not None and is_inexact(a.dtype) else a
            for a in args
        ]
        out = function(*inputs)
        outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
        for o in outs:
            g = rx.ones(o.shape, dtype=o.dtype, device=str(rx.device_of(o.data)))
            o.backward(g, retain_graph=True)
        grads = [x.grad for x in inputs if isinstance(x, rx.Tensor) and x.grad is not None]
        return outs, grads

    run = rx.capture(step)
    if not captures:
        run()
        with pytest.raises(CaptureError):
            run()
        return
    state = rx.random.default_generator().state_dict()
    want = run()
    got = run()
    for x, y in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        if rx.random.default_generator().state_dict() == state:  # nothing random in it
            assert_same(x, y)
    assert run.n_captures == 1
