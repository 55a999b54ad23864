"""What captured steps are told apart by, and what replays change on the host; no GPU is asked.

The graphs here do nothing when they are started: these tests are about everything around them.
"""

import contextlib
import types

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, _replay, libs, nn, optim
from rtxarr.autograd import CaptureError, _capture, _capture_places
from rtxarr.autograd._mode import state, witnesses


class Stream:
    ptr = 7
    capturing = False
    started = 0
    entered = 0

    def __enter__(self):
        Stream.entered += 1
        return self

    def __exit__(self, *exc):
        Stream.entered -= 1

    def record(self):
        return None

    def wait_event(self, event):
        pass

    def begin_capture(self):
        self.capturing = True

    def is_capturing(self):
        return self.capturing

    def end_capture(self):
        self.capturing = False
        return types.SimpleNamespace(launch=self.launch)

    def launch(self, stream):
        Stream.started += 1


class Place(contextlib.nullcontext):
    kind, index = "cuda", 0


@pytest.fixture
def fake(monkeypatch):
    """Let arrays on the host stand for those on a GPU."""
    current = Stream()
    pool = types.SimpleNamespace(free_all_blocks=lambda: None, malloc=None, total_bytes=lambda: 8)
    cuda = types.SimpleNamespace(
        Stream=lambda non_blocking: Stream(),
        MemoryPool=lambda: pool,
        get_current_stream=lambda: current,
        using_allocator=lambda allocator: contextlib.nullcontext(),
        runtime=types.SimpleNamespace(getDevice=lambda: 0),
    )
    cupy = types.SimpleNamespace(
        cuda=cuda, get_default_memory_pool=lambda: pool, empty=np.empty, asarray=np.array
    )
    place = Place()
    monkeypatch.setitem(vars(_device), "cupy", cupy)
    monkeypatch.setattr(_capture, "place_of", lambda leaves: place)
    monkeypatch.setattr(_capture, "on_device", lambda x: x)
    monkeypatch.setattr(_capture.blas, "use_workspace", lambda buffer: contextlib.nullcontext())
    monkeypatch.setattr(_capture._Graph, "take", lambda self, leaves, stream: True)

    unused = set()  # ids of arrays that the graph does not use

    class NoWatch(contextlib.nullcontext):
        def check(self, graph, recorder):
            return lambda array: id(array) not in unused

    monkeypatch.setattr(_capture, "Watch", lambda stream: NoWatch())
    monkeypatch.setattr(_replay, "_Block", lambda n: types.SimpleNamespace(used=0))
    cupy.unused = unused
    monkeypatch.setattr(_capture_places, "is_device_array", lambda x: isinstance(x, np.ndarray))
    yield cupy
    assert not witnesses
    assert state.witness is None


def calls(run, n, *args):
    """Call ``n`` times and say how often that recorded."""
    before = run.n_captures
    for _ in range(n):
        run(*args)
    return run.n_captures - before


X = np.ones((2, 3), np.float32)


def make_layer():
    return nn.Linear(3, 2, device="cpu")


def test_what_the_eager_call_leaves_behind_is_of_the_current_stream(fake):
    entered = []
    run = rx.capture(lambda x: entered.append(Stream.entered))
    calls(run, 2, X)
    assert entered == [0, 1]


def test_the_second_call_records_and_the_next_replay(fake):
    runs = []
    run = rx.capture(lambda x: runs.append(1))
    started = Stream.started
    assert calls(run, 5, X) == 1
    assert (len(runs), Stream.started - started) == (2, 4)
    assert run.n_graphs == 1
    assert run.pool_bytes(Place()) == 8
    run.clear()
    assert run.n_graphs == 0


def test_a_replay_leaves_gradients_alone_that_its_step_does_not_set(fake):
    layer = make_layer()
    run = rx.capture(lambda x: layer(x))  # as an evaluation
    calls(run, 2, X)
    rx.sum(layer(X)).backward()
    grad = layer.weight.grad
    loss = rx.sum(layer(rx.Tensor(X, requires_grad=True)))
    run(X)
    assert layer.weight.grad is grad
    loss.backward()  # nothing that it needs was changed


def test_a_replay_gives_its_own_gradients_and_counts_its_changes(fake):
    layer = make_layer()
    optimizer = optim.SGD(layer.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        rx.sum(layer(x) ** 2).backward()
        optimizer.step()

    run = rx.capture(step)
    grads = []
    for n in (2, 3):
        x = np.ones((n, 3), np.float32)
        assert calls(run, 2, x) == 1
        grads.append(layer.weight.grad)
    for n in (2, 3, 2):
        loss = rx.sum(layer(rx.Tensor(X, requires_grad=True)))
        run(np.ones((n, 3), np.float32))
        assert layer.weight.grad is grads[n - 2]
        with pytest.raises(RuntimeError, match="changed in place"):
            loss.backward()


def test_parameters_with_other_arrays_are_recorded_anew(fake):
    layer = make_layer()
    run = rx.capture(lambda x: layer(x))
    assert calls(run, 4, X) == 1
    average = optim.ExponentialMovingAverage(layer.parameters())
    for _ in range(2):
        with average.averaged():
            assert calls(run, 2, X) == 1
    assert calls(run, 3, X) == 1
    layer.weight.requires_grad = False
    assert calls(run, 3, X) == 1
    assert run.n_graphs == 1


def test_parameters_that_only_an_optimizer_takes_are_seen_too(fake):
    weight = nn.Parameter(np.ones(3, np.float32))
    optimizer = optim.SGD([weight], lr=0.1)
    weight.grad = np.ones(3, np.float32)
    run = rx.capture(lambda: optimizer.step())
    assert calls(run, 3) == 1
    fake.unused.add(id(weight.data))  # which the optimizer still holds then
    weight.data = np.ones(3, np.float32)
    assert calls(run, 3) == 1


def test_a_step_must_not_replace_arrays_of_parameters(fake):
    layer = make_layer()

    def step(x):
        layer(x)
        layer.weight.data = layer.weight.data * 2

    run = rx.capture(step)
    run(X)
    with pytest.raises(CaptureError, match=r"gives a Parameter of shape \(2, 3\) another array"):
        run(X)


class Recipe:
    """Keeps arrays in all the ways there are; ``step`` uses them."""

    def __init__(self):
        self.table = np.ones(3, np.float32)
        self.cache = {"rows": [np.ones(3, np.float32), (np.ones(3, np.float32),)]}
        self.scale = rx.Tensor(np.ones(3, np.float32))
        self.model = make_layer()
        self.model.extra = {"bias": np.ones(2, np.float32)}
        self.name = "recipe"

    def step(self, x):
        return self.model(x * self.scale + self.table)


def put(holder, key):
    holder[key] = np.zeros(3, np.float32)


CHANGES = {
    "attribute": lambda r: put(vars(r), "table"),
    "list in a dict": lambda r: put(r.cache["rows"], 0),
    "a whole dict": lambda r: setattr(r, "cache", {"rows": []}),
    "a shorter list": lambda r: r.cache["rows"].clear(),
    "tuple in a list": lambda r: r.cache["rows"].__setitem__(1, (np.ones(3, np.float32),)),
    "tensor": lambda r: setattr(r, "scale", rx.Tensor(np.ones(3, np.float32))),
    "data of a tensor": lambda r: setattr(r.scale, "data", np.ones(3, np.float32)),
    "dict on a module": lambda r: put(r.model.extra, "bias"),
    "parameter": lambda r: setattr(r.model, "bias", nn.Parameter(np.ones(2, np.float32))),
    "module": lambda r: setattr(r, "model", make_layer()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_arrays_that_were_replaced_are_recorded_anew(fake, change):
    recipe = Recipe()
    run = rx.capture(recipe.step)
    assert calls(run, 4, X) == 1
    recipe.table[...] = 3  # in place
    recipe.name = "other"
    recipe.table = recipe.table[:]  # another object, the same memory
    assert calls(run, 2, X) == 0
    change(recipe)
    assert calls(run, 3, X) == 1


def test_arrays_of_closures_and_globals_that_were_replaced(fake):
    kept = np.ones(3, np.float32)
    run = rx.capture(lambda x: x * kept + TABLE)
    assert calls(run, 3, X) == 1
    kept = np.ones(3, np.float32)
    assert calls(run, 3, X) == 1
    globals()["TABLE"] = np.ones(3, np.float32)
    assert calls(run, 3, X) == 1


TABLE = np.zeros(3, np.float32)


def test_a_step_must_not_replace_arrays_that_it_uses(fake):
    state, old = {"sum": np.zeros(3, np.float32)}, []

    def step(x):
        old.append(state["sum"])  # so its memory is not given back
        state["sum"] = state["sum"] * 0.5 + x

    run = rx.capture(step)
    run(X)
    fake.unused.add(id(old[0]))
    with pytest.raises(CaptureError, match=r"another array in place of one .* shape \(2, 3\)"):
        run(X)


def test_a_step_may_leave_its_results_in_a_dict(fake):
    last = {}

    def step(x):
        last["loss"] = x * 2

    run = rx.capture(step)
    run(X)
    fake.unused.add(id(last["loss"]))
    assert calls(run, 3, X) == 1


def test_modes_of_modules_are_told_apart_for_each_that_is_called(fake):
    first, second = nn.Dropout(0.5), nn.Dropout(0.5)
    run = rx.capture(lambda model, x: model(x))
    assert calls(run, 3, first, X) == 1
    assert calls(run, 3, second, X) == 1
    first.eval()
    assert calls(run, 1, first, X) == 0  # eager: not seen in this mode
    assert calls(run, 3, first, X) == 1
    assert calls(run, 2, second, X) == 0
    first.train()
    assert calls(run, 2, first, X) == 0


class Hidden:
    __slots__ = ("model",)

    def __init__(self, model):
        self.model = model


def test_modules_that_only_the_run_shows(fake):
    held = Hidden([Hidden(nn.Dropout(0.5))])
    run = rx.capture(lambda x: held.model[0].model(x))
    assert calls(run, 3, X) == 1
    held.model[0].model.eval()
    assert calls(run, 1, X) == 0
    assert calls(run, 2, X) == 1


def test_a_failed_capture_puts_gradients_back(fake):
    layer = make_layer()
    fail = []

    def step(x):
        rx.sum(layer(x)).backward()
        if fail:
            raise KeyError("mine")

    run = rx.capture(step)
    run(X)
    grad = layer.weight.grad
    fail.append(1)
    with pytest.raises(KeyError):
        run(X)
    assert layer.weight.grad is grad
    fail.clear()
    assert calls(run, 2, X) == 1


def test_inner_steps_are_part_of_the_outer(fake):
    layer = make_layer()
    inner = rx.capture(lambda x: layer(x))
    tracked = []

    def outer(x):
        tracked.append(inner(x).requires_grad)

    assert calls(rx.capture(outer), 3, X) == 1
    assert tracked == [False, False]
    assert inner.n_graphs == 0


def test_arguments_that_are_leaves_or_numbers(fake):
    run = rx.capture(lambda x: None)
    first, second = (rx.Tensor(np.ones(3, np.float32), requires_grad=True) for _ in range(2))
    assert calls(run, 3, first) == 1
    assert calls(run, 3, second) == 1
    assert calls(run, 2, first) == 0
    assert calls(run, 4, np.float32(2)) == 1  # an array of no dimensions
    assert calls(run, 3, np.float32(3)) == 0
    assert calls(run, 3, 2.0) == 1
    assert calls(run, 3, 3.0) == 1


def test_the_case_unused_for_longest_goes(fake):
    run = rx.capture(lambda x: x, max_graphs=2)
    a, b, c = (np.ones(n) for n in (1, 2, 3))
    for x in (a, b):
        calls(run, 2, x)
    run(a)
    calls(run, 2, c)
    assert run.n_graphs == 2
    assert calls(run, 1, a) == 0
    assert calls(run, 2, b) == 1


@pytest.mark.parametrize(
    ("change", "usual"), [(libs.blas.allow_tf32, False), (libs.dnn.deterministic, True)]
)
def test_what_libraries_were_told_is_part_of_the_case(fake, change, usual):
    run = rx.capture(lambda x: x)
    assert calls(run, 3, X) == 1
    try:
        change(not usual)
        assert calls(run, 1, X) == 0  # eager, so that plans are made
        assert calls(run, 2, X) == 1
    finally:
        change(usual)
    assert calls(run, 2, X) == 0
    assert run.n_graphs == 2


def test_a_callable_object_does_not_shadow_what_captures_it(fake):
    class Model(nn.Module):
        clear = None

        def forward(self, x):
            return x

    model = Model()
    model.n_captures = 3
    run = rx.capture(model)
    assert calls(run, 3, X) == 1
    run.clear()
    assert not hasattr(run, "training")


def test_users_errors_that_speak_of_captures_stay():
    error = ValueError("the captured photo is empty")
    assert _capture.explained(error, None) is error
