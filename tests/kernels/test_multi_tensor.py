"""Steps, norms and averages of many arrays in one launch, against the same one by one."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, _replay, optim
from rtxarr._device import device, to_device
from rtxarr.kernels import multi_tensor, optimizers
from rtxarr.nn import Parameter
from rtxarr.testing import assert_close


@pytest.fixture(
    params=[pytest.param("sim", marks=pytest.mark.sim), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def place(request, monkeypatch):
    """Give the device that kernels run on; the simulator gets blocks of few threads."""
    if request.param == "gpu":
        return device("cuda:0")
    from rtxarr.kernels import _multi_tensor_cuda

    monkeypatch.setattr(multi_tensor, "_uploaded", {})
    for module in (multi_tensor, _multi_tensor_cuda):
        monkeypatch.setattr(module, "CHUNK", 32)
        monkeypatch.setattr(module, "THREADS", 4)
    return device("cpu")


@pytest.fixture
def launches(monkeypatch):
    """Give the list of launches so far, each as the arguments of ``launch``."""
    seen = []

    def launch(kernel, shape, args, *, block=None):
        seen.append((kernel, shape, args, block))
        _device.launch(kernel, shape, args, block=block)

    for module in (multi_tensor, optimizers):
        monkeypatch.setattr(module, "launch", launch)
    return seen


SIZES = [0, 1, 3, 4, 7, 8, 31, 32, 33, 64, 77]


def shapes(place):
    return SIZES if place == "cpu" else [*SIZES, 4095, 4096, 4097, 8192, 100_003]


def shifted(values, dtype, place, by):
    """Give an array that begins ``by`` elements after a multiple of 16 bytes."""
    kind = rx.asarray(values, dtype=dtype, device="cpu")
    buffer = np.zeros(kind.size + by + 8, kind.dtype)
    start = by + (-(buffer.ctypes.data // kind.itemsize) % (16 // kind.itemsize))
    if place != "cpu":  # memory from the pool begins at such a multiple
        buffer, start = to_device(buffer, place), by
    out = buffer[start : start + kind.size]
    out[...] = to_device(kind, place)
    return out


def make(place, dtype, sizes, *, by=0, seed=0):
    """Give parameters with gradients of so many elements, every one moved off alignment."""
    rng = np.random.default_rng(seed)
    params = []
    for n in sizes:
        param = Parameter(np.zeros(0), dtype=dtype)
        param.data = shifted(rng.standard_normal(n), dtype, place, by)
        param.grad = shifted(rng.standard_normal(n), dtype, place, by)
        params.append(param)
    return params


CASES = {
    "SGD": (optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "SGD nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    # A large eps: a gradient that the decay cancels is 0 or a rounding error.
    "Adam": (optim.Adam, {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-3}),
    "Adam amsgrad": (optim.Adam, {"lr": 0.1, "betas": (0.7, 0.8), "amsgrad": True}),
    "AdamW": (optim.AdamW, {"lr": 0.1, "weight_decay": 0.3}),
    "Lion": (optim.Lion, {"lr": 0.1, "weight_decay": 0.3}),
}
cases = pytest.mark.parametrize("name", CASES)
dtypes = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])


@cases
@dtypes
def test_many_parameters_step_as_over_arrays(place, name, dtype, monkeypatch, launches):
    kind, settings = CASES[name]

    def run():
        params = make(place, dtype, shapes(place))
        groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.03}]
        optimizer = kind(groups, **settings)
        for step in range(3):
            late = params[2]  # has its first step later than the others
            keep = late.grad
            if step == 0:
                late.grad = None
            optimizer.step()
            late.grad = keep
        return params, optimizer

    got, optimizer = run()
    assert len(launches) == 3
    monkeypatch.setattr(kind, "kernel", optim.Optimizer.kernel)
    want, reference = run()
    assert len(launches) == 3
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)
        for x, y in zip(optimizer.state[a].values(), reference.state[b].values(), strict=True):
            assert_close(x, y)


@cases
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alignment_does_not_change_bits(place, name, dtype):
    kind, settings = CASES[name]
    aligned = make(place, dtype, [77, 64])
    for by in (1, 3):
        other = make(place, dtype, [77, 64], by=by)
        for params in (aligned, other):
            kind(params, **settings).step()
        for a, b in zip(aligned, other, strict=True):
            assert_close(b, a, exact=True)
        aligned = make(place, dtype, [77, 64])


def test_one_launch_a_dtype(place, launches):
    params = [p for d in ("float32", "float16") for p in make(place, d, [5, 6, 7])]
    optim.AdamW(params).step()
    assert len(launches) == 2


def test_many_tensors_are_cut_into_launches(place, launches, monkeypatch):
    want = make(place, "float32", range(1, 8))
    optim.Adam(want).step()
    monkeypatch.setattr(multi_tensor, "MOST", 3)
    got = make(place, "float32", range(1, 8))
    optim.Adam(got).step()
    assert len(launches) == 1 + 3
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, exact=True)


def test_strided_gradients_and_parameters(place, launches):
    rng = np.random.default_rng(0)
    values, grad = rng.standard_normal((2, 6, 5)).astype("float32")
    params = [Parameter(values, device=place) for _ in range(3)]
    for param in params:
        param.grad = to_device(grad, place)
    params[1].grad = to_device(np.ascontiguousarray(grad.T), place).T
    params[2].data = to_device(np.asfortranarray(values), place)
    params[2].data = params[2].data if place == "cpu" else params[2].data.copy(order="F")
    optim.AdamW(params, lr=0.1).step()
    assert len(launches) == 1
    assert_close(params[1], params[0], exact=True)
    assert_close(params[2], params[0])  # by the formula over arrays


def test_a_changed_array_or_group_is_seen(place):
    first, second = make(place, "float32", [5, 6])
    optimizer = optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.5)
    optimizer.step()
    before = np.array(to_device(second.data, "cpu"))
    second.data = shifted(np.ones(6), "float32", place, 1)
    optimizer.groups[1]["lr"] = 2.0
    optimizer.step()
    want = 1 - 2.0 * to_device(second.grad, "cpu")
    assert_close(second, want, rtol=1e-6)
    assert not np.array_equal(before, to_device(second.data, "cpu"))


# -------------------------------------------------------------------------------------- clipping


@dtypes
@pytest.mark.parametrize("by", [0, 1])
def test_norms_are_clipped_in_three_launches(place, dtype, by, launches):
    params = make(place, dtype, shapes(place), by=by)
    old = [p.grad for p in params]
    wide = [to_device(g, "cpu").astype("float64") for g in old]
    norm = optim.clip_grad_norm(params, 2.0)
    assert len(launches) == 3
    want = np.sqrt(sum(np.sum(g * g) for g in wide))
    assert norm.shape == ()
    assert norm.dtype == np.dtype("float64" if dtype == "float64" else "float32")
    assert_close(norm, np.asarray(want, norm.dtype), rtol=1e-5)
    for param, before, g in zip(params, old, wide, strict=True):
        assert param.grad is not before
        assert_close(before, g.astype(before.dtype), exact=True)
        assert_close(param.grad, (g * (2.0 / (want + 1e-6))).astype(before.dtype))


def test_norms_of_two_types_and_their_bits(place):
    params = [p for d in ("float32", "float16") for p in make(place, d, [40, 50], seed=1)]
    grads = [p.grad for p in params]
    first = optim.clip_grad_norm(params, np.inf)
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert_close(optim.clip_grad_norm(params, np.inf), first, exact=True)
    want = np.sqrt(sum(np.sum(to_device(g, "cpu").astype("float64") ** 2) for g in grads))
    assert_close(first, np.float32(want), rtol=1e-6)


def test_small_and_bad_norms(place):
    params = make(place, "float32", [3, 40])
    grads = [p.grad for p in params]
    optim.clip_grad_norm(params, 1e6)
    for param, grad in zip(params, grads, strict=True):
        assert_close(param.grad, grad, exact=True)
    params[1].grad[5] = np.nan
    assert np.isnan(to_device(optim.clip_grad_norm(params, 1.0), "cpu"))
    assert np.isnan(to_device(params[0].grad, "cpu")).all()


# -------------------------------------------------------------------------------------- averages


@dtypes
@pytest.mark.parametrize("by", [0, 1])
def test_averages_move_in_one_launch(place, dtype, by, launches):
    params = make(place, dtype, shapes(place), by=by)
    ema = optim.ExponentialMovingAverage(params, decay=0.75, warmup=True)
    want = [to_device(a, "cpu").astype("float64") for a in ema.averages]
    for n in (1, 2):
        for param in params:
            param.assign(param.grad)
            param.grad = -param.grad
        ema.update()
        decay = min(0.75, (1 + n) / (10 + n))
        values = [to_device(p.data, "cpu").astype("float64") for p in params]
        want = [decay * a + (1 - decay) * p for a, p in zip(want, values, strict=True)]
    assert len(launches) == 2
    for a, b in zip(ema.averages, want, strict=True):
        assert_close(a, b.astype(a.dtype), rtol=1e-5)


# ------------------------------------------------------------------------------------ loss scale


def overflowing(step):
    return step in (1, 2, 5)


def scaled_run(kind, settings, place, dtype, *, n_steps=7):
    """Run with a gradient that overflows in some steps; give the parameters and the optimizer."""
    params = make(place, dtype, [5, 33, 8])
    grads = [to_device(p.grad, "cpu") for p in params]
    optimizer = kind(params, **settings)
    scaler = optim.LossScaler(initial_scale=2.0**6, growth_interval=2)
    scales = []
    for step in range(n_steps):
        scale = float(scaler.scale(to_device(np.ones(1, "float32"), place))[0])
        scales.append(scale)
        for param, grad in zip(params, grads, strict=True):
            param.grad = to_device((grad.astype("float32") * scale).astype(grad.dtype), place)
        if overflowing(step):
            params[1].grad[32] = np.inf if step == 1 else np.nan
        scaler.step(optimizer)
        scaler.update()
    return params, grads, optimizer, scales


@cases
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_steps_that_overflow_are_left_out(place, name, dtype):
    kind, settings = CASES[name]
    got, grads, optimizer, scales = scaled_run(kind, settings, place, dtype)
    # Down after each overflow, up after two good steps in a row.
    assert scales == [64.0, 64.0, 32.0, 16.0, 16.0, 32.0, 16.0]
    want = make(place, dtype, [5, 33, 8])
    reference = kind(want, **settings)
    for param, grad in zip(want, grads, strict=True):
        param.grad = to_device(grad, place)
    for _ in range(4):
        reference.step()
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, exact=True)
    state = optimizer.state_dict()["state"]
    assert [state[str(i)]["step"] for i in range(3)] == [4] * 3
    assert str(optimizer.state_dict()) == str(reference.state_dict())
    optimizer.step()  # unscaled, and counted rightly
    for param, grad in zip(want, grads, strict=True):
        param.grad = to_device((grad.astype("float32") * 16).astype(grad.dtype), place)
    reference.step()
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, exact=True)
    optimizer.load_state_dict(reference.state_dict())
    assert str(optimizer.state_dict()) == str(reference.state_dict())


def test_scaled_gradients_can_be_clipped(place, launches):
    params = make(place, "float32", [5, 33])
    plain = make(place, "float32", [5, 33])
    optimizer, scaler = optim.AdamW(params, lr=0.1), optim.LossScaler()
    loss = scaler.scale(to_device(np.float32([2.0]), place))
    assert_close(loss, np.float32([2.0**17]), exact=True)
    for param in params:
        param.grad = param.grad * 65536
    scaler.unscale(optimizer)
    for a, b in zip(params, plain, strict=True):
        assert_close(a.grad, b.grad, exact=True)
    for group in (params, plain):
        optim.clip_grad_norm(group, 0.5)
    launches.clear()
    scaler.step(optimizer)
    assert len(launches) == 2  # counts and steps; what was found was found before
    optim.AdamW(plain, lr=0.1).step()
    for a, b in zip(params, plain, strict=True):
        assert_close(a, b, exact=True)


def test_a_scaled_step_without_a_kernel_is_refused(place):
    params = make(place, "float32", [5])
    scaler = optim.LossScaler()
    scaler.scale(params[0].data)
    with pytest.raises(TypeError, match="SGD, Adam, AdamW and Lion.*got RMSprop"):
        scaler.step(optim.RMSprop(params))


# ---------------------------------------------------------------------------------- captured steps


class Recording:
    """The simulator's graph: launches with their arguments, and what the host does anew."""

    depth = 0  # of branches and loops

    def __init__(self):
        self.updates, self.undo = [], []

    def section(self, values, make):
        out = values.copy()

        def update():
            out[...] = make()

        self.updates.append(update)
        return out


def captured(function, launches):
    """Record a function of launches alone; give one that repeats it."""
    recording = Recording()
    first = len(launches)
    _replay._thread.recorder = recording
    try:
        function()
    finally:
        _replay._thread.recorder = None
    graph = launches[first:]

    def replay():
        for update in recording.updates:
            update()
        for kernel, shape, args, block in graph:
            _device.launch(kernel, shape, args, block=block)

    return replay


def training(place, name):
    """Give what a step of a training does after its backward pass, over gradients in place."""
    kind, settings = CASES[name]
    params = make(place, "float32", [5, 33, 8])
    optimizer = kind(params, **settings)
    optimizer.lr = optim.CosineSchedule(0.1, n_steps=10, warmup=2)
    ema = optim.ExponentialMovingAverage(params, warmup=True)
    scaler = optim.LossScaler(initial_scale=8.0, growth_interval=2)
    scaler.scale(params[0].data)
    kept = []  # the simulator's graph does not keep memory

    def step():
        grads = [p.grad for p in params]
        scaler.unscale(optimizer)
        kept.extend(p.grad for p in params)
        optim.clip_grad_norm(params, 3.0)
        kept.extend(p.grad for p in params)
        scaler.step(optimizer)
        scaler.update()
        ema.update()
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad

    return step, params, optimizer, ema, scaler


@pytest.mark.sim
@cases
def test_replayed_steps_are_the_eager_ones(name, place, launches, request):
    if place != "cpu":
        pytest.skip("the test below is for a GPU")
    eager, recorded = training(place, name), training(place, name)
    recorded[0]()
    replay = captured(recorded[0], launches)
    eager[0]()
    eager[0]()
    for i in range(5):
        for _, params, *_ in (eager, recorded):
            params[1].grad[3] = np.nan if i == 2 else 0.25 * i
        eager[0]()
        replay()
    compare(eager, recorded)


@pytest.mark.sim
def test_an_eager_step_between_replays_is_not_seen_by_them(place, launches):
    if place != "cpu":
        pytest.skip("the tests on a GPU capture steps")
    kinds = []
    for _ in range(2):
        params = make(place, "float32", [5, 33])
        given = [[p.grad * factor for p in params] for factor in (1, 3)]
        kinds.append((params, optim.Adam(params), given))

    def step(kind, i):
        params, optimizer, given = kind
        for param, grad in zip(params, given[i], strict=True):
            param.grad = grad
        optimizer.step()

    eager, recorded = kinds
    step(recorded, 0)
    replay = captured(lambda: step(recorded, 0), launches)
    step(recorded, 1)
    replay()
    for i in (0, 0, 1, 0):
        step(eager, i)
    for a, b in zip(recorded[0], eager[0], strict=True):
        assert_close(a, b, exact=True)


def compare(eager, recorded):
    for a, b in zip(recorded[1], eager[1], strict=True):
        assert_close(a, b, exact=True)
    for a, b in zip(recorded[3].averages, eager[3].averages, strict=True):
        assert_close(a, b, exact=True)
    assert recorded[3].n_updates == eager[3].n_updates
    assert str(recorded[2].state_dict()) == str(eager[2].state_dict())
    assert str(recorded[4].state_dict()) == str(eager[4].state_dict())


@pytest.mark.gpu
@cases
def test_captured_steps_are_the_eager_ones(name):
    place = device("cuda:0")
    eager, recorded = training(place, name), training(place, name)
    run = rx.capture(recorded[0])
    for i in range(7):
        for _, params, *_ in (eager, recorded):
            params[1].grad[3] = np.nan if i == 4 else 0.25 * i
        eager[0]()
        run()
    assert run.n_captures == 1
    compare(eager, recorded)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [optim.RMSprop, optim.Adafactor])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_without_a_kernel(kind, dtype):
    place = device("cuda:0")

    def start():
        rng = np.random.default_rng(0)
        params = [Parameter(rng.standard_normal((7, 5)), dtype=dtype, device=place)]
        for param in params:
            param.grad = param.data * 2
        optimizer = kind(params, lr=optim.CosineSchedule(0.1, n_steps=10))
        return params, optimizer

    (eager, a), (recorded, b) = start(), start()
    run = rx.capture(b.step)
    for _ in range(6):
        a.step()
        run()
    assert_close(recorded[0], eager[0], exact=True)
    assert str(a.state_dict()) == str(b.state_dict())


@pytest.mark.sim
def test_a_failed_recording_leaves_the_counts(place, launches):
    if place != "cpu":
        pytest.skip("needs no GPU")
    step, _, optimizer, ema, _ = training(place, "Adam")
    step()
    before = str(optimizer.state_dict()), ema.n_updates, optimizer.lr
    recording = Recording()
    _replay._thread.recorder = recording
    try:
        optimizer.step()
        ema.update()
    finally:
        _replay._thread.recorder = None
    for undo in reversed(recording.undo):
        undo()
    counts = [state["step"] for state in optimizer.state.values()]
    assert counts == [1, 1, 1]
    assert ema.n_updates == before[1]
    assert optimizer._n_steps == 1


@pytest.mark.gpu
def test_state_cannot_begin_in_a_captured_step():
    from rtxarr._replay import Recorder

    params = make(device("cuda:0"), "float32", [5])
    optimizer = optim.Adam(params)
    with Recorder(), pytest.raises(RuntimeError, match="would begin anew in each replay"):
        optimizer.step()


def test_words_fit_a_quick_copy():
    """The most arrays of a launch, with the most numbers and in float64."""
    n_addresses, n_sizes, n_places, n_exact = 2 + 3, 1, 1, 4
    n_words = n_addresses + n_sizes + n_places + n_exact + max(optimizers.N_NUMBERS.values())
    assert multi_tensor.MOST * 8 * n_words <= 1 << 16


def test_threads_share_what_was_uploaded(monkeypatch):
    monkeypatch.setattr(_device, "_SIMULATING", True)
    uploaded = {(i,): None for i in range(255)}
    monkeypatch.setattr(multi_tensor, "_uploaded", uploaded)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(number):
        for i in range(1500):
            blocks, lengths = multi_tensor._blocks((i + 1, number + 1))
            assert blocks.tolist() == [0, 1 << 32]
            assert lengths.tolist() == [i + 1, number + 1]

    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert len(uploaded) == 256
