"""Kernels of running programs replaced: what is let in, what is not, and what takes them out."""

import gc
import json
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _replay
from rtxarr.autograd._capture import _Graph
from rtxarr.polygraph import _admission
from rtxarr.polygraph._fuse import fuse
from rtxarr.polygraph._patch import Refused, patch, slots_of

from . import emulator, faults, loops_reference

KERNELS = faults.kernels()


class Reference:
    """The back end that runs loops as they are written."""

    def fuses(self, op, dtype):
        return True

    def empty(self, shape, dtype):
        return np.full(shape, 77, dtype)

    def build(self, loops):
        return lambda *arrays: loops_reference.run(loops, *arrays)


def softmax():
    """Return a fused softmax, its argument and its result, computed by a kernel in use."""
    fused = fuse(faults.softmax, backend=Reference())
    x = np.random.default_rng(0).standard_normal((4, 9)).astype("float32")
    return fused, x, fused(x)


def numpy_softmax(x, out):
    with np.errstate(all="ignore"):
        np.copyto(out, faults.softmax(x))


def wrong_softmax(x, out):
    numpy_softmax(x, out)
    out[-1, -1] = np.nextafter(out[-1, -1], np.float32(2))


quick = {"n_runs": 1, "max_slowdown": None}


def test_kernel_is_replaced_and_taken_back():
    fused, x, want = softmax()
    calls = []

    def noted(x, out):
        calls.append(1)
        numpy_softmax(x, out)

    done = patch(fused, "kernel0", noted, calls=[(x,)], canary=0, **quick)
    assert done.state == "live"
    n = len(calls)
    assert np.array_equal(fused(x), want)
    assert len(calls) == n + 1
    start = time.perf_counter()
    done.rollback()
    assert time.perf_counter() - start < 0.01
    assert done.state == "rolled back"
    assert np.array_equal(fused(x), want)
    assert len(calls) == n + 1
    assert [e["event"] for e in done.journal] == ["checked", "swapped", "rolled back"]


def test_back_end_may_build_the_replacement():
    fused, x, want = softmax()
    patch(fused, "kernel0", Reference(), calls=[(x,)], **quick)
    assert np.array_equal(fused(x), want)


# ------------------------------------------------------------------------------ what is refused


needs_compiler = pytest.mark.skipif(not emulator.HAS_COMPILER, reason="needs g++")


def spoilt(name):
    """Return a function fused on the emulator, its kernel, its text, and texts that are wrong."""
    function, arguments = KERNELS[name]
    backend = emulator.EmulatorBackend(seeds=(1, 2))
    fused = fuse(function, backend=backend)
    fused(*arguments)
    (slot,) = slots_of(fused)
    text = backend.source(slot.loops)
    texts = {f[1]: faults.planted(text, *f[2:]) for f in faults.FAULTS if f[0] == name}
    return fused, slot, text, {what: t for what, t in texts.items() if t not in (None, text)}


@pytest.fixture
def on_chip(monkeypatch):
    """Let rows stay in shared memory, not in registers, where a kernel's name says so."""

    def decide(name):
        if name.startswith("kept"):
            monkeypatch.setattr("rtxarr.polygraph.codegen._rows._HELD", 0)
        else:
            monkeypatch.undo()

    return decide


@needs_compiler
@pytest.mark.parametrize("name", KERNELS)
def test_planted_faults_are_refused(name, tmp_path, on_chip):
    on_chip(name)
    fused, slot, text, texts = spoilt(name)
    arguments = KERNELS[name][1]
    want = fused(*arguments)
    backend = slot.program.backend
    built = backend.build_texts([(slot.loops, t) for t in texts.values()])
    options = {"calls": [arguments], "max_slowdown": None, "journal": tmp_path / "journal"}
    accepted = []
    for what, kernel in zip(texts, built, strict=True):
        try:
            patch(fused, slot.name, kernel, **options).rollback()
        except Refused:
            continue
        accepted.append(what)
    assert not accepted
    lines = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    assert [e["event"] for e in lines] == ["refused"] * len(texts)
    good = backend.build_text(slot.loops, text)
    patch(fused, slot.name, good, **options)  # what is not spoilt is let in
    found = fused(*arguments)
    for a, b in zip(*((r,) if not isinstance(r, tuple) else r for r in (found, want)), strict=True):
        assert np.array_equal(a, b)


@needs_compiler
def test_every_fault_is_planted(on_chip):
    for name in KERNELS:
        on_chip(name)
        assert {f[1] for f in faults.FAULTS if f[0] == name} == spoilt(name)[3].keys()
    assert len(faults.FAULTS) >= 50


@needs_compiler
def test_text_is_built_by_the_programs_back_end():
    backend = emulator.EmulatorBackend()
    fused = fuse(faults.softmax, backend=backend)
    x = np.ones((2, 40), "float32")
    want = fused(x)
    (slot,) = slots_of(fused)
    text = backend.source(slot.loops)
    with pytest.raises(Refused, match="was not built"):
        patch(fused, "kernel0", text.replace(";", "", 1), calls=[(x,)])
    with pytest.raises(Refused, match="out0: it gives"):
        patch(fused, "kernel0", text.replace("expf", "exp2f"), calls=[(x,)], **quick)
    done = patch(fused, "kernel0", text + "// the same\n", calls=[(x,)], **quick)
    assert done.state == "canary"
    assert np.array_equal(fused(x), want)


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (wrong_softmax, "at element 35"),
        (lambda x, out: None, "it gives"),
        (lambda x, out: numpy_softmax(x, out) or x.__setitem__(0, 1), "wrote to its input"),
        (lambda x, out: 1 / 0, "raised ZeroDivisionError"),
        (
            lambda x, out: (
                numpy_softmax(x, out)
                or np.lib.stride_tricks.as_strided(out, (37,)).__setitem__(36, 0)
            ),
            "outside of out0",
        ),
    ],
    ids=["last bit", "unwritten", "input", "raises", "outside"],
)
def test_wrong_kernels_are_refused_by_name(kernel, why):
    fused, x, want = softmax()
    with pytest.raises(Refused, match=f"kernel0 was not replaced.*{why}"):
        patch(fused, "kernel0", kernel, calls=[(x,)])
    assert np.array_equal(fused(x), want)


def test_kernel_that_differs_each_time_is_refused():
    fused, x, _ = softmax()
    runs = []

    def drifting(x, out):
        runs.append(1)
        numpy_softmax(x, out)
        out *= np.float32(1 + 1e-6 * (len(runs) == 3))

    with pytest.raises(Refused, match="as it gave before"):
        patch(fused, "kernel0", drifting, calls=[(x,)], rtol=1e-3)


def test_tolerance_lets_other_orders_in():
    fused, x, want = softmax()

    def other(x, out):
        numpy_softmax(x.astype("float64"), out)

    with pytest.raises(Refused):
        patch(fused, "kernel0", other, calls=[(x,)], **quick)
    patch(fused, "kernel0", other, calls=[(x,)], rtol=1e-5, **quick)
    np.testing.assert_allclose(fused(x), want, rtol=1e-5)


def test_slower_kernel_is_refused_unless_asked():
    fused, x, want = softmax()

    def slow(x, out):
        time.sleep(0.005)
        numpy_softmax(x, out)

    with pytest.raises(Refused, match="it takes"):
        patch(fused, "kernel0", slow, calls=[(x,)], edges=False, n_runs=1)
    done = patch(fused, "kernel0", slow, calls=[(x,)], edges=False, max_slowdown=1e4)
    old, new = done.seconds
    assert new > old
    assert np.array_equal(fused(x), want)


def test_arguments_are_checked():
    fused, x, _ = softmax()
    with pytest.raises(ValueError, match=r"one of the program's \(kernel0\), got 'kernel7'"):
        patch(fused, "kernel7", numpy_softmax, calls=[(x,)])
    with pytest.raises(ValueError, match="none: call it first"):
        patch(fuse(faults.softmax), "kernel0", numpy_softmax, calls=[(x,)])
    with pytest.raises(ValueError, match="check_every"):
        patch(fused, "kernel0", numpy_softmax, calls=[(x,)], check_every=0)
    with pytest.raises(TypeError, match="replacement must be callable, a text or a back end"):
        patch(fused, "kernel0", 3, calls=[(x,)])
    with pytest.raises(RuntimeError, match="no call ran kernel0"):
        patch(fused, "kernel0", numpy_softmax, timeout=0.01)
    fused(x[:2])
    with pytest.raises(RuntimeError, match="2 programs ran"):
        patch(fused, "kernel0", numpy_softmax, calls=[(x,), (x[:2],)])


# ------------------------------------------------------------------------------- what is checked


def test_results_written_into_inputs():
    def step(x, y):
        x *= 2
        x += y

    fused = fuse(step, backend=Reference())
    x, y = np.ones((3, 4)), np.ones((3, 4))
    fused(x, y)
    program = slots_of(fused)[0].program
    assert program.in_place
    name = next(s.name for s in program.steps if any(n in program.in_place for n in s.results))
    (slot,) = [s for s in slots_of(fused) if s.name == name]
    right = slot.kernel

    def wrong(*arguments):
        right(*arguments)
        arguments[-1][0] += 1

    with pytest.raises(Refused):
        patch(fused, name, wrong, calls=[(x.copy(), y)], **quick)
    done = patch(
        fused,
        name,
        lambda *a: right(*a),
        calls=[(x.copy(), y)],
        canary=4,
        check_every=1,
        max_slowdown=None,
    )
    x = np.ones((3, 4))
    for k in range(6):
        fused(x, y)
        assert (x == 2 ** (k + 2) - 1).all()
    assert (done.state, done.n_checked) == ("live", 4)


def test_indices_keep_their_values():
    fused = fuse(lambda x, i: np.take(x, i, axis=0) * 2, backend=Reference())
    x, i = np.arange(12.0).reshape(4, 3), np.asarray([3, 0, 3])
    fused(x, i)
    (slot,) = slots_of(fused)
    seen = []
    slot.call(lambda *arguments: seen.append(arguments))
    fused(x, i)
    slot.call(slot.kernel)
    case = _admission.recorded("", slot.loops, seen[0])
    of_indices = _admission.index_buffers(slot.loops)
    arrays = [(k, b.name) for k, b in enumerate(slot.loops.buffers) if not b.is_scalar]
    (at,) = [k for k, name in arrays if name in of_indices]
    cases = list(_admission.edge_cases(slot.loops, case))
    assert len(cases) > 10
    for c in cases:
        assert np.array_equal(c.arguments[at], i)
        assert any(np.shape(a) == (4, 3) for a in c.arguments)
    patch(fused, "kernel0", Reference(), calls=[(x, i)], **quick)


def test_kernels_over_edges_keep_their_graph():
    src, dst = np.asarray([0, 1, 2, 2, 3]), np.asarray([1, 2, 0, 1, 1])
    graph = rx.geom.Graph.from_edges(src, dst, n_nodes=4)
    layer = rx.geom.GCNConv(3, 2)
    fused = fuse(lambda x: layer(graph, x), backend=Reference())
    x = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
    with rx.no_grad():
        want = fused(x).numpy()
        (slot,) = [s for s in slots_of(fused) if s.loops.kind == "segments"]
        with pytest.raises(Refused):
            patch(fused, slot.name, lambda *arrays: arrays[-1].fill(0), calls=[(x,)], **quick)
        patch(fused, slot.name, Reference(), calls=[(x,)], **quick)
        assert fused(x).numpy().tobytes() == want.tobytes()


@pytest.mark.parametrize("take", [np.s_[::-1, ::2], np.s_[:, 1:5]], ids=["steps", "part"])
def test_strides_of_inputs_are_kept(take):
    fused = fuse(lambda x: x * 3, backend=Reference())
    x = np.arange(24.0).reshape(4, 6)[take]
    want = fused(x)
    patch(fused, "kernel0", Reference(), calls=[(x,)], **quick)
    assert np.array_equal(fused(x), want)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "complex64"])
def test_edge_inputs_of_every_kind(dtype):
    fused = fuse(lambda x: np.where(x == x[::-1], x, x[:, ::-1]), backend=Reference())
    x = np.ones((3, 5), dtype)
    want = fused(x)
    patch(fused, "kernel0", Reference(), calls=[(x,)], **quick)
    assert np.array_equal(fused(x), want)


# ------------------------------------------------------------------------------ canary, threads


def test_canary_takes_out_what_goes_wrong_later():
    fused, x, want = softmax()
    spoilt = []
    here = threading.get_ident()

    def later(x, out):
        numpy_softmax(x, out)
        if spoilt and threading.get_ident() == here:
            out[0] = 0

    done = patch(fused, "kernel0", later, calls=[(x,)], canary=50, check_every=5, **quick)
    for _ in range(5):
        assert np.array_equal(fused(x), want)
    spoilt.append(1)
    with pytest.warns(RuntimeWarning, match="patch of kernel0 was rolled back: it gives 0.0"):
        assert np.array_equal(fused(x), want)  # the call that was checked gets the right result
    assert done.state == "rolled back"
    for _ in range(50):
        assert np.array_equal(fused(x), want)
    assert done.journal[-1]["event"] == "rolled back"
    assert "it gives 0.0" in done.journal[-1]["why"]


def test_canary_takes_out_what_raises():
    fused, x, want = softmax()
    spoilt = []

    def later(x, out):
        if spoilt:
            raise OSError("no kernel")
        numpy_softmax(x, out)

    done = patch(fused, "kernel0", later, calls=[(x,)], check_every=1, **quick)
    spoilt.append(1)
    with pytest.warns(RuntimeWarning, match="it raised OSError: no kernel"):
        assert np.array_equal(fused(x), want)
    assert done.state == "rolled back"


def test_later_patches_are_taken_back_first():
    fused, x, want = softmax()
    first = patch(fused, "kernel0", numpy_softmax, calls=[(x,)], **quick)
    second = patch(fused, "kernel0", Reference(), calls=[(x,)], **quick)
    with pytest.raises(RuntimeError, match="roll the later patch back first"):
        first.rollback()
    second.rollback()
    first.rollback()
    first.rollback()  # nothing left to do
    assert np.array_equal(fused(x), want)
    assert slots_of(fused)[0].patches == []


def test_running_program_is_recorded():
    fused, x, want = softmax()
    stop, wrong = threading.Event(), []

    def work():
        while not stop.is_set():
            if not np.array_equal(fused(x), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    try:
        done = patch(fused, "kernel0", numpy_softmax, canary=20, check_every=2, **quick)
        end = time.monotonic() + 20
        while done.state == "canary" and time.monotonic() < end:
            time.sleep(0.001)
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert done.state == "live"
    assert not wrong


def test_canary_that_ends_while_a_call_is_recorded():
    fused, x, want = softmax()
    first = patch(fused, "kernel0", numpy_softmax, calls=[(x,)], canary=3, **quick)
    # The recorder stands before the canary, which is over in these calls.
    second = patch(fused, "kernel0", Reference(), calls=[(x,)] * 5, canary=0, **quick)
    assert first.state == "live"
    second.rollback()
    assert np.array_equal(fused(x), want)
    (slot,) = slots_of(fused)
    assert slot.program._values["kernel0"] is numpy_softmax


def test_patches_keep_no_programs():
    fused, x, _ = softmax()
    patch(fused, "kernel0", numpy_softmax, calls=[(x,)], **quick)
    program = weakref.ref(slots_of(fused)[0].program)
    fused.clear()
    gc.collect()
    assert program() is None


def test_thousand_swaps_under_four_threads():
    def function(x):
        return faults.softmax(x * 2) + 1

    fused = fuse(function)
    xs = [np.random.default_rng(k).standard_normal((4, 33)).astype("float32") for k in range(4)]
    want = [fused(x) for x in xs]
    (slot,) = slots_of(fused)
    first = slot.kernel
    stop, wrong, counts = threading.Event(), [], [0] * 4

    def work(k):
        while not stop.is_set():
            if fused(xs[k]).tobytes() != want[k].tobytes():
                wrong.append(k)
            counts[k] += 1

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    slowest = 0.0
    options = dict(calls=[(xs[0],)], edges=False, canary=10, check_every=3, **quick)
    try:
        for _ in range(500):
            done = patch(fused, "kernel0", lambda *a: first(*a), **options)
            start = time.perf_counter()
            done.rollback()
            slowest = max(slowest, time.perf_counter() - start)
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert not wrong
    assert min(counts) > 0
    assert slot.kernel is first
    assert slot.program._values["kernel0"] is first
    assert slowest < 0.1  # 10 ms but for the turns of four threads on few processors


# ------------------------------------------------------------------------------ captured steps


def test_kernels_of_gradients():
    fused = fuse(lambda x: rx.sum(rx.tanh(x) ** 2), backend=Reference())
    x = rx.autograd.Tensor(np.linspace(-1, 1, 12), requires_grad=True)

    def gradient():
        x.grad = None
        fused(x).backward()
        return np.asarray(x.grad)

    want = gradient()
    slots = slots_of(fused)
    assert len({id(s.program) for s in slots}) == 2
    backward = slots[-1]
    stop = threading.Event()

    def work():
        while not stop.is_set():
            gradient()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        done = patch(backward.program, backward.name, Reference(), canary=0, **quick)
    finally:
        stop.set()
        thread.join()
    assert done.state == "live"
    assert gradient().tobytes() == want.tobytes()


def test_captured_steps_are_recorded_anew():
    fused, x, _ = softmax()

    def graph():
        made = object.__new__(_Graph)
        made._state, made.places = [], SimpleNamespace(are_unchanged=lambda: True)
        made._n_swaps = _replay.n_swaps()
        return made

    before = graph()
    assert before.is_current()
    done = patch(fused, "kernel0", numpy_softmax, calls=[(x,)], **quick)
    assert not before.is_current()
    between = graph()
    done.rollback()
    assert not between.is_current()
    assert graph().is_current()


def test_nothing_is_compared_in_a_capture(monkeypatch):
    fused, x, want = softmax()
    done = patch(fused, "kernel0", numpy_softmax, calls=[(x,)], check_every=1, **quick)
    monkeypatch.setattr(_replay, "recorder", lambda: object())
    assert np.array_equal(fused(x), want)
    assert done.n_checked == 0


# ------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_captured_step_takes_the_new_kernel_on_a_gpu():
    cupy = pytest.importorskip("cupy")
    fused = fuse(lambda x: rx.tanh(x) * 2)
    step = rx.capture(lambda x: fused(x))
    x = cupy.linspace(-1, 1, 1000, dtype="float32")
    for _ in range(3):
        want = step(x)
    n = step.n_captures
    (slot,) = slots_of(fused)
    text = slot.program.backend.source(slot.loops)
    with pytest.raises(Refused, match="it gives"):
        patch(fused, "kernel0", text.replace("tanhf(", "sinhf("), calls=[(x,)], max_slowdown=None)
    options = {"max_slowdown": None, "canary": 20, "check_every": 2}
    done = patch(fused, "kernel0", f"{text}\n// again\n", calls=[(x,)], **options)
    for _ in range(25):
        assert bool((fused(x) == want).all())
    assert done.state == "live"
    assert bool((step(x) == want).all())
    assert step.n_captures == n + 1
    done.rollback()
    assert bool((step(x) == want).all())
    assert step.n_captures == n + 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_planted_faults_are_refused_on_a_gpu(name, tmp_path, on_chip):
    cupy = pytest.importorskip("cupy")
    on_chip(name)
    function, arguments = KERNELS[name]
    arguments = tuple(map(cupy.asarray, arguments))
    faults_are_refused(name, fuse(function), arguments, tmp_path / "journal", cupy.asnumpy)


def faults_are_refused(name, fused, arguments, journal, to_numpy):
    """Let in what the back end writes, and nothing that is spoilt but by the order of threads."""
    want = results(fused(*arguments), to_numpy)
    (slot,) = slots_of(fused)
    backend = slot.program.backend
    text = backend.source(slot.loops)
    texts = {f[1]: faults.planted(text, *f[2:]) for f in faults.FAULTS if f[0] == name}
    texts = {what: t for what, t in texts.items() if what not in faults.FATAL_ON_A_GPU}
    assert not {what for what, t in texts.items() if t in (None, text)}
    with ThreadPoolExecutor(8) as pool:
        built = pool.map(lambda t: backend.build_text(slot.loops, t), texts.values())
        kernels = dict(zip(texts, built, strict=True))
    options = {"calls": [arguments], "max_slowdown": None, "journal": journal}
    accepted = set()
    for what, kernel in kernels.items():
        try:
            patch(fused, slot.name, kernel, **options).rollback()
        except Refused:
            continue
        accepted.add(what)
    assert accepted <= faults.OF_TIMING | faults.UNSEEN_ON_A_GPU
    assert same(results(fused(*arguments), to_numpy), want)
    patch(fused, slot.name, f"{text}\n// another\n", **options)
    assert same(results(fused(*arguments), to_numpy), want)


def results(found, to_numpy):
    return [to_numpy(x) for x in (found if isinstance(found, tuple) else (found,))]


def same(found, want):
    return all(a.tobytes() == b.tobytes() for a, b in zip(found, want, strict=True))


@pytest.mark.gpu
def test_thousand_swaps_under_four_threads_on_a_gpu():
    cupy = pytest.importorskip("cupy")
    xs = [np.random.default_rng(k).standard_normal((4, 33)).astype("float32") for k in range(4)]
    xs = list(map(cupy.asarray, xs))
    thousand_swaps(xs, lambda: cupy.cuda.Stream(non_blocking=True), cupy.cuda.Device().synchronize)


def thousand_swaps(xs, stream, synchronize):
    """Swap two builds of one kernel while threads, each on a stream of its own, use it."""
    fused = fuse(lambda x: faults.softmax(x * 2) + 1)
    want = [fused(x) for x in xs]
    (slot,) = slots_of(fused)
    first, backend = slot.kernel, slot.program.backend
    other = backend.build_text(slot.loops, backend.source(slot.loops) + "// another\n")
    synchronize()
    stop, wrong, counts = threading.Event(), [], [0] * len(xs)

    def work(k):
        with stream():
            while not stop.is_set():
                if not bool((fused(xs[k]) == want[k]).all()):
                    wrong.append(k)
                counts[k] += 1
                time.sleep(0)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(xs))]
    for t in threads:
        t.start()
    options = dict(calls=[(xs[0],)], edges=False, canary=10, check_every=3, **quick)
    try:
        for _ in range(500):
            patch(fused, "kernel0", other, **options).rollback()
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert not wrong
    assert min(counts) > 0
    assert slot.kernel is first
    assert slot.program._values["kernel0"] is first
