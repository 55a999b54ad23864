"""The back end of NVIDIA GPUs: its host side on the emulator, its text by NVRTC, all on a GPU."""

import ctypes
import dataclasses
import threading

import numpy as np
import pytest

from rtxarr import dtypes
from rtxarr._device import namespace
from rtxarr.polygraph import _cpu_memory, _cuda_backend, _interpret, _schedule
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._cuda_backend import CudaBackend
from rtxarr.polygraph._program import Program
from rtxarr.testing import assert_close

from . import emulator
from .codegen import test_kernels, test_operations, test_segments
from .random_graphs import Maker
from .test_program import Reference

needs_compiler = pytest.mark.skipif(not emulator.HAS_COMPILER, reason="needs g++")


# --------------------------------------------------------------------- a GPU that is not there


class FakeArray:
    """A NumPy array with the attributes of CuPy's that launchers read."""

    def __init__(self, array, device_id=0):
        self.array = array
        self.data = self
        self.ptr = array.ctypes.data
        self.device_id = device_id


class FakeGpu:
    """Runs kernels on the emulator, from the very buffers of arguments a driver would get."""

    ptr = 0  # of its stream

    def __init__(self):
        self.emulated = emulator.EmulatorBackend()
        self.device = 0
        self.loaded, self.used, self.started = [], [], []
        self.emulator_lock = threading.Lock()

    def new(self, shape, dtype):
        return None

    def current_device(self):
        return self.device

    def current_stream(self):
        return self

    def capability(self, device_id):
        return 9, device_id

    def shared_limit(self, device_id):
        return 200_000

    def use(self, device_id):
        self.used.append((device_id, threading.get_ident()))

    def load(self, code):
        self.loaded.append(code)
        return FakeModule(self)

    def empty(self, shape, dtype):
        return FakeArray(self.emulated.empty(shape, dtype), self.device)

    def arena(self, n_bytes, parts):
        take, _ = _cpu_memory.arena(n_bytes, parts)
        return lambda: [FakeArray(x, self.device) for x in take()], None

    def scratch(self, size):
        array = np.full(size + 16, 0xFF, np.uint8)
        return FakeArray(array[-array.ctypes.data % 16 :][:size])

    def start(self, handle, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra):
        assert (gz, bz, stream, extra) == (1, 1, 0, 0)
        self.started.append((gx, gy, bx, by, shared))
        with self.emulator_lock:
            problem = emulator._fibres().gpu_launch(
                ctypes.c_void_p(handle), ctypes.c_void_p(arguments),
                (ctypes.c_uint * 3)(gx, gy, gz), (ctypes.c_uint * 3)(bx, by, bz),
                ctypes.c_uint(shared), ctypes.c_uint(1), ctypes.c_int(0), ctypes.c_uint(1),
            )  # fmt: skip
        assert not problem, problem


class FakeModule:
    def __init__(self, gpu):
        self.gpu = gpu

    def function(self, name, shared):
        return ctypes.cast(self.gpu.emulated.kernels[name], ctypes.c_void_p).value


class FakeBackend(CudaBackend):
    """Compiles for the emulator instead of a GPU."""

    def __init__(self, mode="strict"):
        super().__init__(mode, FakeGpu())
        self.compiled = []

    def machine_code(self, kernel, cc):
        self.compiled.append(cc)
        with self.gpu.emulator_lock:
            self.gpu.emulated.waiting.append(kernel)
            self.gpu.emulated.compile()
        return repr((kernel.text, cc)).encode()


def run(program, arrays):
    return [out.array for out in program(*map(FakeArray, arrays))]


def chain(x, *more):
    for y in more:
        x = ir.map_node("multiply", x, ir.broadcast(y, x.shape))
    return x


@needs_compiler
@pytest.mark.parametrize("offset", [0, 1])
def test_a_program_runs_through_buffers_of_arguments(offset):
    """Maps, rows in one launch, a long row in two with scratch memory; aligned and not."""
    backend = FakeBackend()
    x = ir.input_node(0, "float32", (3, 9000))
    y = ir.map_node("exp", x)
    rows = ir.reduce_node("sum", y, (1,))
    graph = ir.Graph([x], [y, rows, ir.map_node("sqrt", rows)])
    base = np.random.default_rng(0).standard_normal(27001).astype("float32")
    array = base[offset : offset + 27000].reshape(3, 9000)
    program = Program(graph, backend)
    for got, want in zip(run(program, [array]), _interpret.run(graph, [array], np), strict=True):
        assert_close(got, want)
    assert any(gy > 1 for _, gy, *_ in backend.gpu.started)


@needs_compiler
def test_kernels_leave_results_to_one_another_in_one_block(monkeypatch):
    """Rows, columns, and maps that write over what they read."""
    monkeypatch.setattr(_schedule, "_MAX_MEMBERS", 1)
    x = ir.input_node(0, "float32", (70, 40))

    def divided(y):
        total = ir.reduce_node("sum", ir.map_node("exp", y), (1,))
        return ir.map_node("divide", y, ir.broadcast(ir.reshape(total, (70, 1)), y.shape))

    def less_sums(y):
        sums = ir.broadcast(ir.reduce_node("sum", y, (0,)), y.shape)
        return ir.map_node("tanh", ir.map_node("subtract", y, sums))

    y = less_sums(divided(x))
    graph = ir.Graph([x], [less_sums(divided(y))])
    program = Program(graph, FakeBackend())
    assert program.over
    assert program.arena.n_bytes < program.arena.n_apart
    array = np.random.default_rng(0).standard_normal((70, 40), dtype=np.float32)
    (want,) = _interpret.run(graph, [array], np)
    for _ in range(2):
        (got,) = run(program, [array.copy()])
        assert_close(got, want, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint16", "int32", "uint64", "float16", "bfloat16", "float32", "float64"]
    + ["complex64", "complex128"],
)
def test_numbers_of_every_dtype_are_parameters(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    dtype = np.dtype(dtype)
    x, a, b = ir.input_node(0, dtype, (5,)), *(ir.input_node(i, dtype, ()) for i in (1, 2))
    graph = ir.Graph([x, a, b], [chain(x, a, b)], scalars=[1, 2])
    array = np.arange(5).astype(dtype)
    program = Program(graph, FakeBackend())
    for numbers in ((1, 1), (3, 1)):
        numbers = [dtype.type(n) for n in numbers]
        (got,) = program(FakeArray(array), *numbers)
        (want,) = _interpret.run(graph, [array, *map(np.asarray, numbers)], np)
        assert_close(got.array, want, exact=True)


@needs_compiler
def test_threads_have_buffers_of_their_own():
    backend = FakeBackend()
    x = ir.input_node(0, "float64", (300,))
    program = Program(ir.Graph([x], [ir.map_node("square", x)]), backend)
    wrong = []

    def work(seed):
        for i in range(20):
            array = np.full(300, seed + i / 100)
            (got,) = run(program, [array])
            if not np.array_equal(got, array**2):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert len(backend.gpu.used) == 8  # the context was made current in each
    assert len(backend.gpu.loaded) == 1


@needs_compiler
def test_another_device_gets_its_own_machine_code():
    backend = FakeBackend()
    x = ir.input_node(0, "float64", (3,))
    program = Program(ir.Graph([x], [ir.map_node("square", x)]), backend)
    array = np.arange(3.0)
    run(program, [array])
    backend.gpu.device = 1
    with pytest.raises(ValueError, match=r"on cuda:0 but the current device is cuda:1"):
        run(program, [array])
    program(FakeArray(array, device_id=1))
    assert backend.compiled == [(9, 0), (9, 1)]


@needs_compiler
def test_nothing_is_started_for_no_elements():
    backend = FakeBackend()
    x = ir.input_node(0, "float64", (3,))
    (step,) = Program(ir.Graph([x], [ir.map_node("square", x)]), backend).steps
    empty = FakeArray(np.empty(0))
    backend.build(dataclasses.replace(step.loops, cols=0))(empty, empty)
    assert not backend.gpu.started


@needs_compiler
def test_changed_text_is_built():
    backend = FakeBackend()
    x = ir.input_node(0, "float64", (3,))
    (step,) = Program(ir.Graph([x], [ir.map_node("square", x)]), backend).steps
    kernel = backend.build_text(step.loops, backend.source(step.loops))
    array, out = np.arange(3.0), np.empty(3)
    kernel(FakeArray(array), FakeArray(out))
    assert np.array_equal(out, array**2)


# ------------------------------------------------------------------------------ without a GPU


class TextOnly(CudaBackend):
    """Keeps the kernels of programs; nothing can be run."""

    def __init__(self, mode="strict"):
        super().__init__(mode, FakeGpu())
        self.made = []

    def build(self, loops):
        self.made.append(self.generate(loops))
        return lambda *arrays: None


def kernels_of(graph, mode="strict"):
    backend = TextOnly(mode)
    Program(graph, backend)
    return backend.made


def softmax(shape, dtype="float32"):
    x = ir.input_node(0, dtype, shape)
    kept = (*shape[:-1], 1)

    def reduced(op, x):
        return ir.broadcast(ir.reshape(ir.reduce_node(op, x, (x.ndim - 1,)), kept), shape)

    e = ir.map_node("exp", ir.map_node("subtract", x, reduced("max", x)))
    return ir.Graph([x], [ir.map_node("divide", e, reduced("sum", e))])


def shapes(n, seed=0):
    rng = np.random.default_rng(seed)
    return [(int(rng.integers(2, 5000)), int(rng.integers(2, 8000))) for _ in range(n)]


def test_two_hundred_shapes_share_a_text():
    texts = {kernels_of(softmax(shape))[0].text for shape in shapes(200)}
    assert len(texts) == 1


def test_large_shapes_have_indices_of_64_bits():
    small, large = (kernels_of(softmax(s))[0] for s in ((1000, 1000), (70_000, 40_000)))
    assert not small.wide and large.wide
    assert "typedef i64 Index" in large.text


@pytest.mark.parametrize("stride, wide", [(8, False), (100_000, True)])
def test_indices_into_a_part_of_a_large_array_have_64_bits(stride, wide):
    x, index = ir.input_node(0, "float32", (50_000, 8)), ir.input_node(1, "int64", (40,))
    backend = TextOnly()
    graph = ir.Graph([x, index], [ir.map_node("exp", ir.gather(x, index, 0))])
    Program(graph, backend, strides=[(stride, 1), None])
    assert backend.made[0].wide is wide


@pytest.mark.nvrtc
def test_text_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_cuda_backend._cache, "kernels", _cuda_backend._cache.KernelCache())
    backend = CudaBackend(gpu=FakeGpu())
    codes = [backend.machine_code(kernels_of(softmax(s))[0], (9, 0)) for s in shapes(5)]
    assert codes[0][:4] == b"\x7fELF" and len(set(codes)) == 1
    assert _cuda_backend._cache.cache_info().compiled == 1
    assert ord(bytes([32])) == 32  # NVRTC's empty log was not written into Python's own byte
    backend.machine_code(kernels_of(softmax((5, 5)))[0], (8, 0))
    assert _cuda_backend._cache.cache_info().compiled == 2


@pytest.mark.nvrtc
def test_what_does_not_compile_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match="expected a"):
        _cuda_backend.machine_code("extern int f(;", (9, 0), strict=True)


# --------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_on_a_gpu(seed):
    cupy = pytest.importorskip("cupy")
    maker = Maker(seed, dtype="float64")
    graph = maker.graph()
    program = Program(graph, CudaBackend())
    got = program(*map(cupy.asarray, maker.arrays()))
    for a, b in zip(got, _interpret.run(graph, maker.arrays(), np), strict=True):
        assert_close(cupy.asnumpy(a), b, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
# Sums of halves are CuPy's and NumPy's own, which add up in halves.
@pytest.mark.parametrize("name", [n for n in test_kernels.CASES if n[-9:] != "of halves"])
def test_kernels_on_a_gpu(name):
    """What the emulator runs, held to the same loops, in both modes."""
    cupy = pytest.importorskip("cupy")
    _, shape, dtype = test_kernels.CASES[name]
    graph, array = test_kernels.graph_of(name), test_kernels.array(shape, dtype)
    (want, *_) = wants = Program(graph, Reference())(array)
    for mode in ("strict", "fast"):
        program = Program(graph, CudaBackend(mode))
        got = program(cupy.asarray(array))
        again = program(cupy.asarray(array))
        loose = {"rtol": 2e-2, "atol": 2e-2} if want.dtype.itemsize == 2 else {"rtol": 1e-4}
        for a, b, w in zip(got, again, wants, strict=True):
            assert_close(cupy.asnumpy(a), w, **loose)
            assert cupy.asnumpy(a).tobytes() == cupy.asnumpy(b).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [d.name for d in test_operations.DTYPES])
def test_operations_have_cupys_bits(name):
    """Strict kernels give what CuPy gives for each operation by itself.

    Or NumPy, where these differ: CuPy has no numbers below the normal ones, and others for
    quotients of infinities and shifts by less than nothing.
    """
    cupy = pytest.importorskip("cupy")
    dtype = np.dtype(dtypes.DTYPES[name])
    names, loops, _ = test_operations.kernels()[name]
    values = test_operations.values
    a, b, test = values(dtype, 1), values(dtype, 2), values(np.dtype(bool), 3)
    if dtype.kind in "iu":
        b[::5] %= 9
    exponents = np.maximum(b, 0) if dtype.kind == "i" else b
    inputs = [cupy.asarray(x) for x in (a, b, test, exponents)]
    outputs = [cupy.zeros(len(a), x.dtype) for x in loops.buffers if x.is_output]
    CudaBackend().build(loops)(*inputs, *outputs)
    for op, got in zip(names, outputs, strict=True):
        n_sources, _ = ir.MAPS[op]
        sources = inputs[:n_sources]
        if op == "where":
            sources = [inputs[2], *inputs[:2]]
        elif op == "pow":
            sources = [inputs[0], inputs[3]]
        nodes = [ir.input_node(i, x.dtype, x.shape) for i, x in enumerate(sources)]
        node, given = ir.map_node(op, *nodes), cupy.asnumpy(got)
        want = cupy.asnumpy(_interpret.evaluate(node, sources, namespace(*sources)))
        with np.errstate(all="ignore"):
            of_numpy = _interpret.evaluate(node, list(map(cupy.asnumpy, sources)), np)
        far = np.minimum(*(test_operations.apart(given, x, op) for x in (want, of_numpy)))
        worst = int(np.argmax(far))
        limit = 2 if op in test_operations.INEXACT or dtype.kind == "c" else 0
        assert far[worst] <= limit, (op, a[worst], b[worst], got[worst], want[worst])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("heads", "features"), test_segments.SHARES)
def test_heads_on_a_gpu(heads, features, dtype):
    cupy = pytest.importorskip("cupy")
    degrees = [*test_segments.DEGREES["hubs"], *np.random.default_rng(2).integers(0, 40, 3000)]
    graph, edges = test_segments.attention(degrees, features, dtype, heads)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n.shape).astype(n.dtype) for n in graph.inputs[:-2]]
    (want,) = _interpret.run(graph, [*arrays, *edges.arrays], np)
    given = [cupy.asarray(x) for x in (*arrays, *edges.arrays)]
    program = Program(graph, CudaBackend())
    (got,) = program(*given)
    loose = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 2e-2, "atol": 2e-2}
    assert_close(cupy.asnumpy(got), want, **loose)
    apart = [cupy.empty(x.size + 1, x.dtype)[1:].reshape(x.shape) for x in arrays]
    for x, y in zip(apart, given, strict=False):
        x[...] = y
    (again,) = program(*apart, *given[len(apart) :])  # packets are not whole
    assert cupy.asnumpy(again).tobytes() == cupy.asnumpy(got).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("which", test_segments.DEGREES)
@pytest.mark.parametrize("name", test_segments.MAKERS)
def test_edges_on_a_gpu(name, which):
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    for features in test_segments.FEATURES:
        graph, edges = test_segments.MAKERS[name](test_segments.DEGREES[which], features, "float64")
        inputs = [rng.standard_normal(n.shape).astype(n.dtype) for n in graph.inputs[:-2]]
        arrays = inputs + edges.arrays
        with np.errstate(all="ignore"):
            (want,) = _interpret.run(graph, arrays, np)
        (got,) = Program(graph, CudaBackend())(*map(cupy.asarray, arrays))
        loose = {"rtol": 1e-4, "atol": 1e-4} if name == "halves" else {}
        assert_close(cupy.asnumpy(got), want, **loose)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 8192), (3, 5), (100, 40_000), (70_000, 3), (64, 60_000)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_softmax_on_a_gpu(shape, dtype):
    cupy = pytest.importorskip("cupy")
    graph = softmax(shape, dtype)
    x = cupy.random.standard_normal(shape, dtype="float32").astype(dtype)
    (got,) = Program(graph, CudaBackend("fast"))(x)
    wide = cupy.exp(x.astype("float64") - x.max(axis=1, keepdims=True))
    want = wide / wide.sum(axis=1, keepdims=True)
    assert_close(cupy.asnumpy(got), cupy.asnumpy(want).astype(dtype))
