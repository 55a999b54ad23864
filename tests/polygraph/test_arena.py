"""Where results that programs need for themselves lie: no step reads what is there no more."""

import random
import threading
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import nn, optim
from rtxarr.polygraph import (
    Refused,
    _arena,
    _cpu_memory,
    _gpu_memory,
    _schedule,
    cond,
    fuse,
    load,
    patch,
    while_loop,
)
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._cpu_backend import CpuBackend
from rtxarr.polygraph._cuda_backend import CudaBackend
from rtxarr.polygraph._ir import Graph
from rtxarr.polygraph._program import Program
from rtxarr.testing import assert_close

from .poisoned import Poisoned, Pooled, apart, overlap
from .random_graphs import Maker
from .random_programs import Random, copies
from .test_fuzz import compare

FLOAT = np.dtype("float32")


def program_of(fused):
    ((made,),) = fused._programs.values()
    return made.program


def normalized(x, w):
    """A row kernel, a product, a map, a column kernel: three results in between."""
    h = rx.softmax(x, axis=-1)
    y = rx.tanh(rx.matmul(h, w)) * 2
    return rx.matmul(y, w) - rx.sum(y, axis=0)


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return rng.random((64, 32), np.float32), rng.random((32, 32), np.float32)


@pytest.fixture
def small_kernels(monkeypatch):
    """Let kernels compute one operation or two, so that programs keep many results in memory."""
    monkeypatch.setattr(_schedule, "_MAX_MEMBERS", 1)


# -------------------------------------------------------------------------------- what is alive


def test_random_graphs_read_nothing_that_is_dead(small_kernels):
    n_arenas = n_shared = n_over = 0
    for seed in range(100):
        maker = Maker(seed, n_steps=24)
        graph = maker.graph()
        with apart() as backend:
            want = Program(graph, backend)(*(x.copy() for x in maker.arrays()))
        with Poisoned() as backend:
            program = Program(graph, backend)
        for _ in range(2):
            with np.errstate(all="ignore"):
                got = program(*(x.copy() for x in maker.arrays()))
            for a, b in zip(got, want, strict=True):
                assert_close(a, b, exact=True)
        if program.arena is not None:
            n_arenas += 1
            n_shared += program.arena.n_bytes < program.arena.n_apart
            n_over += len(program.over)
            assert program.arena.floor <= program.arena.n_bytes <= program.arena.n_apart
    assert n_arenas > 60
    assert n_shared > 30
    assert n_over > 30


def test_random_programs_read_nothing_that_is_dead(small_kernels):
    n_arenas = 0
    for seed in range(120):
        program = Random(seed)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            with apart() as backend:
                want = rx.fuse(program, backend=backend)(*copies(program.args))
            with Poisoned() as backend:
                got = rx.fuse(program, backend=backend)(*copies(program.args))
            for a, b in zip(got, want, strict=True):
                compare(a, b, False)
        n_arenas += len(backend.programs)
    assert n_arenas > 60


def test_what_dies_too_early_is_seen(small_kernels, monkeypatch):
    """The tests above can fail: here each result is said to be over when it has been read once."""
    made_by = _arena.made_by

    def short(steps, *more):
        found = made_by(steps, *more)
        for memory in found:
            rest = memory.touched & ~(1 << memory.first)
            memory.touched = 1 << memory.first | (rest & -rest)
        return found

    monkeypatch.setattr(_arena, "made_by", short)
    wrong = 0
    for seed in range(30):
        maker = Maker(seed, n_steps=30)
        graph = maker.graph()
        with apart() as backend:
            want = Program(graph, backend)(*(x.copy() for x in maker.arrays()))
        with Poisoned() as backend, np.errstate(all="ignore"):
            got = Program(graph, backend)(*(x.copy() for x in maker.arrays()))
        wrong += any(a.tobytes() != b.tobytes() for a, b in zip(got, want, strict=True))
    assert wrong > 1


def reachable(numbers, needs):
    """Return which pairs of steps have an order, by walking from each to what it comes after."""
    n = len(numbers)
    direct = [{*needs[i], *(p for p in range(i) if numbers[p] == numbers[i])} for i in range(n)]
    found = []
    for i in range(n):
        seen, stack = set(), [*direct[i]]
        while stack:
            p = stack.pop()
            if p not in seen:
                seen.add(p)
                stack += direct[p]
        found.append(seen)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_what_may_be_alive_at_one_time_lies_apart(seed):
    """Of made-up lives on made-up streams, held to an order that is found by walking."""
    rng = random.Random(seed)
    n = 24
    numbers = [rng.randrange(1 + seed % 4) for _ in range(n)]
    needs = [rng.sample(range(i), min(i, rng.randrange(3))) for i in range(n)]
    memories = []
    for i in range(n):
        readers = [k for k in range(i + 1, n) if i in needs[k]]
        touched = 1 << i | sum(1 << k for k in readers)
        memories.append(_arena.Memory(i, 512 * rng.randint(1, 9), i, touched=touched))
    n_bytes = _arena._placed(memories, _arena.on_streams(numbers, needs))
    after = reachable(numbers, needs)
    n_beside = 0
    for a in memories:
        assert 0 <= a.place <= n_bytes - a.n_bytes
        for b in memories:
            steps = [[k for k in range(n) if m.touched >> k & 1] for m in (a, b)]
            is_over = all(k in after[b.first] for k in steps[0])
            if a is not b and not is_over and not all(k in after[a.first] for k in steps[1]):
                spans = [(m.place, m.place + m.n_bytes) for m in (a, b)]
                assert not overlap(*spans)
                n_beside += 1
    assert n_beside
    assert n_bytes < sum(m.n_bytes for m in memories)


def test_steps_in_order_need_no_more_than_what_is_there_at_one_time():
    x = ir.input_node(0, FLOAT, (256,))
    w = ir.input_node(1, FLOAT, (256, 256))
    y = x
    for _ in range(8):
        y = ir.matmul(ir.map_node("tanh", y), w)
    program = Program(Graph([x, w], [ir.map_node("sin", y)]), CpuBackend())
    arena = program.arena
    assert len(arena.places) == len(program.over) == 8  # the last product becomes the result
    assert arena.n_bytes == arena.floor == program.most_between == 2 * 1024
    assert arena.n_apart == 8 * 1024
    assert program.n_between == 16 * 1024


# -------------------------------------------------------------------------------------- in place


def between_products(make):
    """Return a program of ``make(y)`` for a product ``y``, of which a product is made again."""
    x, w = (ir.input_node(i, FLOAT, (16, 16)) for i in range(2))
    y = ir.matmul(x, w)
    outputs = [ir.matmul(z, ir.cast(w, z.dtype)) for z in make(y)]
    return Program(Graph([x, w], outputs), CpuBackend())


def transposed(y):
    return ir.permute(y, (1, 0))


OVER_WHAT_IT_READS = {
    "a map": (lambda y: [ir.map_node("tanh", y)], 1),
    "which is needed later": (lambda y: [ir.map_node("tanh", y), y], 0),
    "elsewhere": (lambda y: [ir.map_node("tanh", transposed(y))], 0),
    "there and elsewhere": (lambda y: [ir.map_node("multiply", y, transposed(y))], 0),
    "of another dtype": (lambda y: [ir.cast(ir.map_node("tanh", y), np.dtype("float64"))], 0),
    "rows": (lambda y: [ir.map_node("subtract", y, ir.broadcast(row_sums(y), y.shape))], 0),
}


def row_sums(y):
    return ir.reshape(ir.reduce_node("sum", y, (1,)), (16, 1))


@pytest.mark.parametrize("case", OVER_WHAT_IT_READS)
def test_a_map_writes_over_what_nobody_else_reads(case):
    make, n = OVER_WHAT_IT_READS[case]
    program = between_products(make)
    assert len(program.over) == n
    arrays = np.random.default_rng(0).standard_normal((2, 16, 16), dtype=np.float32)
    with apart() as backend:
        want = Program(program.graph, backend)(*arrays)
    for got, right in zip(program(*arrays), want, strict=True):
        assert_close(got, right, exact=True)


def test_a_map_does_not_write_over_what_it_also_reads_through_a_view():
    """The view is memory to the kernel: a slice that a library's function gave it."""
    x, w = (ir.input_node(i, FLOAT, (16, 16)) for i in range(2))
    y = ir.matmul(x, w)
    half = ir.slice_node(y, (0, 0), (1, 1), (8, 16))
    z = ir.map_node("add", y, ir.concat([half, half], 0))
    program = Program(Graph([x, w], [ir.matmul(z, w)]), CpuBackend())
    assert not program.over


# ------------------------------------------------------------------------- what leaves a program


def same(x):
    return (x,)


def halves(x):
    return x[:8], x[8:]


@pytest.mark.parametrize("function", [same, halves])
def test_what_a_call_gives_of_its_arguments_is_not_in_the_arena(function):
    """A function of which nothing is known may give what it is given."""
    x, w = (ir.input_node(i, FLOAT, (16, 16)) for i in range(2))
    y = ir.map_node("tanh", ir.matmul(x, w))
    results = [(FLOAT, a.shape) for a in function(np.empty((16, 16)))]
    given = ir.call(function, [y], (), results)
    later = ir.matmul(ir.matmul(ir.matmul(y, w), w), w)
    program = Program(Graph([x, w], [*given, later]), CpuBackend())
    assert y not in program.arena.places
    arrays = np.random.default_rng(0).random((2, 16, 16), np.float32)
    got = program(*arrays)
    held = [out.copy() for out in got]
    program(*(3 * arrays))
    for out, before in zip(got, held, strict=True):
        assert_close(out, before, exact=True)


def test_results_stay_when_the_program_runs_again(arrays):
    fused = fuse(normalized)
    first = fused(*arrays)
    before = first.copy()
    assert program_of(fused).arena is not None
    fused(*(2 * x for x in arrays))
    assert_close(first, before, exact=True)


def test_arguments_that_are_written_get_what_lies_in_the_arena(arrays):
    def update(x, w):
        y = rx.matmul(rx.tanh(x), w)
        x[...] = y + rx.sum(rx.matmul(y, w), axis=0)

    x, w = arrays
    want, got = x.copy(), x.copy()
    update(want, w)
    with Poisoned() as backend:
        rx.fuse(update, backend=backend)(got, w)
        assert backend.programs
    assert_close(got, want, atol=1e-4)


# ----------------------------------------------------------------- threads, and calls in a call


def test_threads_have_blocks_of_their_own(arrays):
    fused = fuse(normalized)
    inputs = [tuple((i + 1) * x for x in arrays) for i in range(8)]
    want = [fused(*given) for given in inputs]
    errors = []

    def call(i):
        for _ in range(100):
            if fused(*inputs[i]).tobytes() != want[i].tobytes():
                errors.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


def test_a_program_can_be_called_while_it_runs(arrays):
    fused = fuse(normalized)
    want = fused(*arrays)
    program = program_of(fused)
    name = next(s.name for s in program.steps if s.loops is not None and s.sources[0].op != "input")
    kernel, depth = program._values[name], []

    def again(*given):
        if not depth:
            depth.append(1)
            fused(*(2 * x for x in arrays))
        kernel(*given)

    program._values[name] = again
    assert_close(fused(*arrays), want, exact=True)
    assert depth


def test_a_call_that_fails_keeps_nothing_from_later_ones(arrays):
    fused = fuse(normalized)
    want = fused(*arrays)
    program = program_of(fused)
    name = program.steps[-1].name
    kernel = program._values[name]
    program._values[name] = lambda *given: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fused(*arrays)
    program._values[name] = kernel
    assert_close(fused(*arrays), want, exact=True)


# ------------------------------------------------------------------------ the blocks themselves

PARTS = [(0, (4, 8), FLOAT), (512, (3,), np.dtype("int64")), (0, (4, 8), FLOAT), (512, (), FLOAT)]


def test_arrays_of_a_block_on_the_cpu():
    take, give = _cpu_memory.arena(1024, PARTS)
    a, b, again, scalar = held = take()
    assert (a.shape, a.dtype, b.shape, b.dtype) == ((4, 8), FLOAT, (3,), np.int64)
    assert again is a
    assert a.ctypes.data % _arena.ALIGNMENT == 0
    assert [x.ctypes.data - a.ctypes.data for x in (b, scalar)] == [512, 512]
    other = take()
    assert not np.shares_memory(other[0], a)
    give(held)
    assert take() is held


def test_large_blocks_are_not_kept():
    take, give = _cpu_memory.arena(_arena.KEPT + 1, [(0, (8,), FLOAT), (_arena.KEPT, (), FLOAT)])
    assert give is None
    assert take()[0] is not take()[0]


class Pointer(int):
    def __add__(self, n):
        return Pointer(int(self) + n)


def test_blocks_on_a_gpu_belong_to_a_thread_and_a_stream(monkeypatch):
    made, place = [], [(0, 7)]

    def empty(shape, dtype, pointer=None):
        if pointer is None:
            made.append(shape)
            pointer = Pointer(4096 * len(made))
        return SimpleNamespace(shape=shape, dtype=dtype, data=pointer)

    take, give = _gpu_memory.arena(empty, 1024, PARTS, lambda: place[0])
    a, b, again, _ = held = take()
    assert made == [(1024,)]
    assert (int(a.data), int(b.data)) == (4096, 4096 + 512)
    assert again is a
    assert take() is not held  # it is in use
    give(held)
    assert take() is held
    give(held)
    found = []
    thread = threading.Thread(target=lambda: found.append(take()))
    thread.start()
    thread.join()
    assert found[0] is not held
    place[0] = (0, 8)
    assert take() is not held
    place[0] = (0, 7)
    give(held)
    monkeypatch.setattr(_gpu_memory, "recorder", lambda: "one")
    of_graph = take()
    assert of_graph is not held
    give(of_graph)
    monkeypatch.setattr(_gpu_memory, "recorder", lambda: None)
    assert take() is held


# ------------------------------------------------------------------------------ where it is used


def test_one_result_has_nothing_to_be_planned_with(arrays):
    fused = fuse(lambda x, w: rx.matmul(rx.tanh(x), w))
    fused(*arrays)
    assert program_of(fused).arena is None


def test_a_large_block_is_used_where_it_takes_little_more():
    """Results come when nothing else is needed, which a block keeps all the same."""
    x = ir.input_node(0, FLOAT, (512, 512))
    y = ir.matmul(ir.map_node("tanh", ir.matmul(x, x)), x)
    few = ir.broadcast(ir.reduce_node("sum", y, (0,)), (512, 512))
    outs = [ir.map_node("exp", few), ir.map_node("sin", few)]

    def block(most):
        backend = CpuBackend()
        backend.arena_limit = most
        return Program(Graph([x], outs), backend).arena

    assert block(1.9) is None
    assert block(2.1).n_bytes == 2 * (1 << 20)
    assert Program(Graph([x], outs), CpuBackend()).arena is None


def test_training_steps_with_arenas_give_the_same_bits():
    def losses(backend):
        rx.random.seed(0)
        model = nn.Sequential(nn.Linear(32, 64), rx.tanh, nn.LayerNorm(64), nn.Linear(64, 8))
        optimizer = optim.Adam(model.parameters(), 1e-2)

        def step(x, labels):
            optimizer.zero_grad()
            loss = rx.cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step()
            return loss

        run = rx.jit(step, backend=backend)
        rng = np.random.default_rng(0)
        x, labels = rng.standard_normal((16, 32), dtype=np.float32), rng.integers(0, 8, 16)
        return [run(x, labels).item() for _ in range(5)]

    with Poisoned() as backend:
        got = losses(backend)
        assert backend.programs
    assert got == losses(Pooled())


def test_loaded_programs_have_arenas(arrays, tmp_path):
    fused = fuse(normalized)
    want = fused(*arrays)
    fused.aot([arrays]).save(tmp_path / "f.rtx")
    loaded = load(tmp_path / "f.rtx")
    program = loaded.programs[0].program
    assert program.arena == replace(program_of(fused).arena, places=program.arena.places)
    assert len(program.over) == len(program_of(fused).over) > 0
    for _ in range(2):
        assert_close(loaded(*arrays), want, exact=True)


def test_kernels_that_write_over_what_they_read_can_be_patched(arrays):
    def f(x, w):
        return rx.matmul(rx.tanh(rx.matmul(x, w)), w)

    fused = fuse(f)
    want = fused(*arrays)
    program = program_of(fused)
    assert program.over
    (name,) = (s.name for s in program.steps if s.loops is not None)
    options = {"calls": [arrays], "canary": 8, "check_every": 1, "max_slowdown": None}
    made = patch(fused, name, CpuBackend(), **options)
    for _ in range(10):
        assert_close(fused(*arrays), want, exact=True)
    assert (made.state, made.n_checked) == ("live", 8)

    def writes_first(x, out):
        out[...] = 0
        out += np.tanh(x)

    with pytest.raises(Refused):
        patch(fused, name, lambda *given: writes_first(given[0], given[-1]), **options)
    assert_close(fused(*arrays), want, exact=True)


def test_branches_and_loops_have_arenas_of_their_own(arrays):
    def f(x, w):
        def body(state):
            i, y = state
            y = cond(rx.sum(y) > 0, lambda y: normalized(y, w), lambda y: normalized(-y, w), y)
            return i + 1, y / rx.max(rx.abs(y))

        _, y = while_loop(lambda state: state[0] < 5, body, (rx.asarray(0), x))
        return normalized(y, w)

    with Poisoned() as backend:
        fused = rx.fuse(f, backend=backend)
        got = [fused(*arrays) for _ in range(2)]
    assert not fused.reasons
    assert len(backend.programs) >= 3
    want = rx.fuse(f, backend=Pooled())(*arrays)
    for out in got:
        assert_close(out, want, exact=True)
    assert_close(want, f(*arrays), rtol=1e-4, atol=1e-4)


def test_explain_says_what_lies_where(arrays):
    fused = fuse(normalized)
    fused(*arrays)
    arena = program_of(fused).arena
    (line,) = (x for x in str(fused.explain()).splitlines() if x.startswith("between the steps"))
    assert line.endswith(f"in one block of {arena.n_bytes / 1e3:.3g} kB")
    assert f"{arena.n_apart / 1e3:.3g} kB" in line
    pooled = rx.fuse(normalized, backend=Pooled())
    pooled(*arrays)
    assert "from the memory pool" in str(pooled.explain())


# ----------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def on_gpu(arrays):
    cupy = pytest.importorskip("cupy")
    with rx.device("cuda:0"):
        yield cupy, tuple(map(cupy.asarray, arrays))


def poisoned_on_gpu(self, n_bytes, parts, plan=CudaBackend.arena):
    take, give = plan(self, n_bytes, parts)

    def poisoned():
        found = take()
        for x in found:
            x.data.memset_async(0xFF, x.nbytes)
        return found

    return poisoned, give


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["strict", "fast"])
@pytest.mark.parametrize("captured", [False, True])
def test_gpu_programs_read_nothing_that_is_dead(on_gpu, monkeypatch, mode, captured):
    _, given = on_gpu
    monkeypatch.setattr(CudaBackend, "arena", None)
    want = rx.fuse(normalized, mode=mode)(*given)
    monkeypatch.setattr(CudaBackend, "arena", poisoned_on_gpu)
    fused = rx.fuse(normalized, mode=mode)
    run = rx.capture(fused) if captured else fused
    for _ in range(4):
        assert_close(run(*given), want, exact=True)
    assert program_of(fused).arena is not None


@pytest.mark.gpu
def test_gpu_threads_on_streams_have_blocks_of_their_own(on_gpu):
    cupy, given = on_gpu
    fused = fuse(normalized)
    inputs = [tuple((i + 1) * x for x in given) for i in range(4)]
    want = [fused(*x) for x in inputs]
    cupy.cuda.Device().synchronize()
    wrong = []

    def call(i):
        with rx.device("cuda:0"), cupy.cuda.Stream(non_blocking=True) as stream:
            got = [fused(*inputs[i]) for _ in range(50)]
            stream.synchronize()
            wrong.extend(i for x in got if not bool(cupy.all(x == want[i])))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
