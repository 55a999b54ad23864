"""Namespaces, devices and launches; without a GPU the launcher runs against stand-ins for it."""

import ctypes
import importlib.util
import itertools
import logging
import math
import os
import struct
import subprocess
import sys
import threading
from types import SimpleNamespace

import array_api_compat
import array_api_compat.numpy
import ml_dtypes
import numpy as np
import pytest

from rtxarr import _compile, _device, _kernel_cache
from rtxarr._device import (
    Device,
    device,
    device_of,
    devices,
    is_array,
    is_device_array,
    launch_shape,
    memory_stats,
    namespace,
    to_device,
)
from rtxarr._out_of_memory import explain_out_of_memory
from rtxarr.testing import assert_close

needs_cuda_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("cupy", "numba_cuda", "cuda")),
    reason="needs cupy, numba-cuda and cuda-core",
)


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


# ----------------------------------------------------------------------------------- namespaces


def test_namespace_of_numpy():
    for x in (np.ones(2), np.float32(1), np.ma.ones(2)):
        assert namespace(x) is array_api_compat.numpy
        assert namespace(1.0, x, None, True) is array_api_compat.numpy


@pytest.mark.parametrize("library", ["array_api_strict", "dask.array"])
def test_namespace_of_other_libraries(library):
    x = pytest.importorskip(library).ones(2)
    want = array_api_compat.array_namespace(x)
    assert namespace(x) is want
    assert namespace(2, x, x) is want
    assert namespace(np.float64(2), x) is want, "a NumPy scalar is no array of its own here"
    with pytest.raises(TypeError, match="one library, got numpy and "):
        namespace(np.ones(2), x)


def test_namespace_without_arrays_is_the_current_devices():
    with device("cpu"):
        assert namespace() is array_api_compat.numpy
        assert namespace(1, 2.0, None) is array_api_compat.numpy


def test_is_array():
    strict = pytest.importorskip("array_api_strict")
    for x in (np.ones(2), np.float32(1), np.bool_(True), strict.ones(2)):
        assert is_array(x)
        assert not is_device_array(x)
    for x in (1, 2.0, None, [1.0], "a", object(), np.dtype("f4"), np.float32):
        assert not is_array(x)
        assert not is_device_array(x)


# -------------------------------------------------------------------------------------- devices


def test_device_names_and_equality():
    cpu = device("cpu")
    assert str(cpu) == "cpu"
    assert repr(cpu) == "Device('cpu')"
    assert cpu == "cpu" == np.ones(1).device
    assert cpu == Device("cpu")
    assert cpu != "cuda:0"
    assert cpu != 3
    assert Device("cuda", 1) == "cuda:1"
    assert Device("cuda", 0) == "cuda"
    assert Device("cuda", 1) not in ("cuda", "cuda:0", cpu)
    assert len({Device("cuda", 1), Device("cuda", 1), cpu}) == 2
    assert hash(cpu) == hash("cpu")
    assert device(cpu) is cpu
    assert devices()[0] == "cpu"


@pytest.mark.parametrize("spec", ["gpu", "cuda:", "cuda:x", "cuda:-1", "", "CPU"])
def test_unknown_devices_are_refused(spec):
    with pytest.raises(ValueError, match=r"must be 'auto', 'cpu', 'cuda' or 'cuda:N', got"):
        device(spec)


def test_other_kinds_of_device_are_refused():
    with pytest.raises(TypeError, match="spec must be a device or its name, got int"):
        device(0)
    with pytest.raises(ValueError, match="kind must be 'cpu' or 'cuda', got 'tpu'"):
        Device("tpu")


def test_gpus_are_counted_by_the_runtime_itself(monkeypatch):
    class CUDARuntimeError(RuntimeError):
        pass

    def no_driver():
        raise CUDARuntimeError("cudaErrorInsufficientDriver")

    runtime = SimpleNamespace(getDeviceCount=lambda: 3, CUDARuntimeError=CUDARuntimeError)
    cuda = SimpleNamespace(runtime=runtime)
    # As CuPy's does in one thread while another is the first to ask.
    cupy = SimpleNamespace(cuda=cuda, is_available=lambda: False)
    monkeypatch.setattr(_device, "_has_driver", lambda: True)
    monkeypatch.setattr(_device, "_cupy", lambda: cupy)
    count = _device._gpu_count.__wrapped__
    assert count() == 3
    runtime.getDeviceCount = no_driver
    assert count() == 0
    monkeypatch.setattr(_device, "_cupy", lambda: None)
    assert count() == 0


def test_a_device_is_asked_for_while_cupy_is_imported(monkeypatch):
    for half in (SimpleNamespace(), SimpleNamespace(cuda=SimpleNamespace())):
        monkeypatch.setitem(sys.modules, "cupy", half)
        assert device("cpu") == "cpu"
        error = MemoryError("of NumPy's")
        explain_out_of_memory(error)
        assert str(error) == "of NumPy's"


@pytest.mark.parametrize("spec", ["auto", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_threads_that_are_the_first_to_ask_for_a_device(spec):
    code = f"""
import threading
import rtxarr as rx

start, found = threading.Barrier(8), []

def ask():
    start.wait()
    try:
        found.append(str(rx.device({spec!r})))
    except Exception as error:
        found.append(repr(error))

threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*found, sep="\\n")
"""
    assert run_python(code).splitlines() == 8 * [str(device(spec))]


def test_a_missing_gpu_is_named_with_its_cure(monkeypatch):
    monkeypatch.setattr(_device, "_gpu_count", lambda: 0)
    monkeypatch.setattr(_device, "_cupy", lambda: None)
    with pytest.raises(RuntimeError, match=r"needs CuPy.*pip install 'rtxarr\[cuda13\]'"):
        device("cuda:0")
    monkeypatch.setattr(_device, "_cupy", lambda: SimpleNamespace())
    with pytest.raises(RuntimeError, match="CuPy finds none; run on 'cpu', or check `nvidia-smi`"):
        device("cuda")
    monkeypatch.setattr(_device, "_gpu_count", lambda: 2)
    with pytest.raises(RuntimeError, match="'cuda:2' does not exist: .* cuda:0 to cuda:1"):
        device("cuda:2")
    assert [str(d) for d in devices()] == ["cpu", "cuda:0", "cuda:1"]
    assert device("auto") == "cuda:0"


def test_entered_devices_nest_and_end():
    before = device()
    with device("cpu") as outer:
        assert device() is outer
        with pytest.raises(ZeroDivisionError), device("cpu"):
            raise ZeroDivisionError
        assert device() is outer
    assert device() == before


def test_entered_devices_belong_to_their_thread(monkeypatch):
    monkeypatch.setattr(_device, "_default_device", lambda: "the default")
    seen = []
    with device("cpu"):
        thread = threading.Thread(target=lambda: seen.append(device()))
        thread.start()
        thread.join()
    assert seen == ["the default"]


def test_the_choice_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(_device, "_gpu_count", lambda: 0)
    monkeypatch.delenv("RTXARR_DEVICE", raising=False)
    _device._default_device.cache_clear()
    with caplog.at_level(logging.INFO, logger="rtxarr"):
        for _ in range(2):
            assert device() == "cpu"
    assert caplog.messages == ["device: Device('cpu') (automatic: no GPU that CuPy can use)"]
    _device._default_device.cache_clear()


def test_the_environment_chooses():
    code = "from rtxarr._device import device; print(device())"
    assert run_python(code, RTXARR_DEVICE="cpu") == "cpu\n"
    code = """
from rtxarr._device import device
try:
    device()
except ValueError as error:
    print(error)
"""
    assert run_python(code, RTXARR_DEVICE="gpu0").startswith("RTXARR_DEVICE: device must be")


def test_importing_loads_no_gpu_library():
    """Nor does it look for a GPU; and without a driver no CuPy is imported at all."""
    code = """
import sys
import rtxarr._device, rtxarr.dtypes, rtxarr.random, rtxarr.kernels.segment, rtxarr.kernels.scatter
rtxarr._device._has_driver = lambda: False
rtxarr.random.Generator(0).uniform(3)
print([name for name in ("cupy", "numba", "cuda", "scipy") if name in sys.modules])
"""
    assert run_python(code, RTXARR_DEVICE="auto") == "[]\n"
    assert run_python(code, RTXARR_DEVICE="") == "[]\n"


def test_device_of():
    assert device_of(np.ones(2)) == "cpu"
    assert device_of(np.float32(2)) == "cpu"
    strict = pytest.importorskip("array_api_strict")
    x = strict.ones(2, device=strict.Device("device1"))
    assert device_of(x) == strict.Device("device1")
    with pytest.raises(TypeError, match="x must be an array, got list"):
        device_of([1])


def test_to_device_keeps_what_is_there():
    x = np.ones(2)
    assert to_device(x, "cpu") is x
    assert to_device(x, device("cpu")) is x
    with pytest.raises(ValueError, match="got 'nowhere'"):
        to_device(x, "nowhere")


def test_streams_of_the_cpu():
    with device("cpu"):
        _device.synchronize()
        with _device.stream() as stream:
            stream.synchronize()
        assert _device.current_stream() is stream
        assert repr(stream) == "Stream('cpu')"


def test_memory_of_the_cpu():
    stats = memory_stats("cpu")
    assert set(stats) == {"used", "pool", "free", "total"}
    assert 0 <= stats["used"] <= stats["total"]
    if sys.platform == "linux":
        block = np.ones(2**24)
        assert memory_stats("cpu")["used"] - stats["used"] > block.nbytes / 2


# -------------------------------------------------------------------------------- launch shapes


@pytest.mark.parametrize(
    "n, block, want",
    [
        (1, None, ((1,), (256,))),
        (256, None, ((1,), (256,))),
        (257, None, ((2,), (256,))),
        ((100, 10), None, ((1, 5), (128, 2))),
        ((1, 1000), None, ((1, 4), (1, 256))),
        ((5, 6, 7), None, ((1, 1, 7), (8, 32, 1))),
        (3, 64, ((3,), (64,))),
        ((3, 4), (8, 8), ((3, 4), (8, 8))),
        (0, None, None),
        ((4, 0), (8, 8), None),
    ],
)
def test_launch_shapes(n, block, want):
    assert launch_shape(n, block) == want


@pytest.mark.parametrize("n", [1, 31, 1000, (7, 3), (1000, 1), (3, 500), (2, 3, 4)])
def test_launch_shapes_cover_all_threads(n):
    grid, block = launch_shape(n, None)
    sizes = n if isinstance(n, tuple) else (n,)
    assert all(g * b >= size for g, b, size in zip(grid, block, sizes, strict=True))
    assert math.prod(block) == 256


def test_impossible_launch_shapes_are_refused():
    with pytest.raises(ValueError, match="must not be negative, got"):
        launch_shape(-1, None)
    with pytest.raises(ValueError, match="a grid holds at most"):
        launch_shape((1, 65536), (32, 8))
    with pytest.raises(ValueError, match="a grid holds at most"):
        launch_shape(2**31, 1)
    for block in [(1, 1, 65), (1025,), (64, 32), (1, 2, 0)]:
        with pytest.raises(ValueError, match="a block holds at most"):
            launch_shape(1, block)
    assert launch_shape(1, (16, 1, 64)) == ((1,), (16, 1, 64))


def test_signatures():
    args = (np.ones((2, 3), "f4"), np.ones((2, 3), "f4").T, 1, 2.0, True, np.uint8(3))
    want = (("float32", 2, "C"), ("float32", 2, "A"), "int64", "float64", "bool", "uint8")
    assert _compile.signature_of(args) == want
    with pytest.raises(TypeError, match="a kernel takes arrays and numbers, got list"):
        _compile.signature_of(([1],))


# ------------------------------------------------------------------- the launcher without a GPU


def add(x, y, out):
    """A kernel: ``cuda`` is a global that ``kernel_globals`` puts there."""
    i = cuda.grid(1)  # noqa: F821
    if i < out.size:
        out[i] = x[i] + y[i]


def scale(x, out, offset, factor, flag):
    i = cuda.grid(1)  # noqa: F821
    if flag and i < out.size:
        out[i, 0] = x[i, 0] * factor + np.float32(offset)


@pytest.fixture
def kernel_globals(monkeypatch):
    monkeypatch.setitem(globals(), "cuda", _device.cuda)


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Put stand-ins where the launcher would touch a driver; give what it did."""
    import cupy
    from cuda import core

    done = SimpleNamespace(
        n_bytes=8, launches=[], loaded=[], stream=SimpleNamespace(ptr=0), device=0
    )
    runtime = SimpleNamespace(getDevice=lambda: done.device)
    library = SimpleNamespace(
        ndarray=cupy.ndarray,
        cuda=SimpleNamespace(
            runtime=runtime,
            get_current_stream=lambda: done.stream,
            driver=SimpleNamespace(launchKernel=lambda *args: start(*args)),
        ),
    )

    def load(cubin):
        done.loaded.append(cubin)
        # The number stands for the kernel: which one it is, of those loaded.
        return SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=len(done.loaded)))

    def start(handle, *rest):
        *shape, shared, stream, pointers, extra = rest
        assert shared == extra == 0
        addresses = (ctypes.c_void_p * (done.n_bytes // 8)).from_address(pointers)
        slots = b"".join(bytes((ctypes.c_char * 8).from_address(a)) for a in addresses)
        done.launches.append(
            SimpleNamespace(handle=handle, shape=tuple(shape), stream=stream, slots=slots)
        )

    monkeypatch.setattr(_device, "_cupy", lambda: library)
    monkeypatch.setattr(_device, "_gpu_count", lambda: 2)
    gpu = SimpleNamespace(set_current=lambda: None, compute_capability=(9, 0))
    monkeypatch.setattr(core, "Device", lambda index: gpu)
    monkeypatch.setattr(core, "ObjectCode", SimpleNamespace(from_cubin=load, from_ptx=load))
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path))
    _device._launcher.cache_clear()
    yield done
    _device._launcher.cache_clear()


def gpu_array(host, index=0):
    """Return a CuPy array whose address is that of a NumPy array: good for all but its values."""
    import cupy

    memory = cupy.cuda.UnownedMemory(host.ctypes.data, max(host.nbytes, 1), host, index)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(host.shape, host.dtype, pointer, strides=host.strides)


@needs_cuda_packages
def test_launch_passes_numbas_arguments(stand_in, kernel_globals):
    host = np.ones((4, 6), np.float32)
    x, y = gpu_array(host), gpu_array(host[::2, ::3])
    stand_in.n_bytes = 8 * 21
    _device.launch(scale, 1000, (x, y, 7, np.float32(2), True))
    (done,) = stand_in.launches
    address = host.ctypes.data
    assert struct.unpack("=18qqf4x?7x", done.slots) == (
        *(0, 0, 24, 4, address, 4, 6, 24, 4),
        *(0, 0, 4, 4, address, 2, 2, 48, 12),
        *(7, 2.0, True),
    )  # fmt: skip
    assert done.shape == (4, 1, 1, 256, 1, 1)
    assert done.stream == 0
    assert done.handle == 1


@needs_cuda_packages
def test_launch_compiles_once_for_each_signature(stand_in, kernel_globals):
    host = np.ones(6, np.float32)
    x, spread, wide = gpu_array(host), gpu_array(host[::2]), gpu_array(host.astype("f8"))
    for _ in range(2):
        _device.launch(add, 6, (x, x, x))
        _device.launch(add, 3, (spread, x, x))
        _device.launch(add, 6, (wide, x, x))
    assert len(stand_in.loaded) == 3
    stand_in.device = 1
    elsewhere = gpu_array(host, 1)
    _device.launch(add, 6, (elsewhere,) * 3)
    assert len(stand_in.loaded) == 4
    assert len(stand_in.launches) == 7


@needs_cuda_packages
def test_a_plan_is_asked_once_for_arguments_that_are_alike(stand_in, kernel_globals):
    asked = []

    def plan(options, args):
        asked.append((options, args[0].shape, args[0].data.ptr % 16))
        return add, args[2].size, 32

    host = np.zeros(64, np.float32)
    first = -host.ctypes.data % 16 // 4  # where a multiple of 16 bytes is
    whole, shifted = (gpu_array(host[first + by :][:24].reshape(4, 6)) for by in (0, 1))
    stand_in.n_bytes = 8 * 21
    for _ in range(2):
        _device.launch_planned(plan, ("a",), (whole, whole, whole))
        _device.launch_planned(plan, ("b",), (whole, whole, whole))
        _device.launch_planned(plan, ("b",), (shifted, whole, whole))
    assert asked == [(("a",), (4, 6), 0), (("b",), (4, 6), 0), (("b",), (4, 6), 4)]
    assert len(stand_in.loaded) == 1, "the kernel sees one axis"
    assert len(stand_in.launches) == 6
    done = stand_in.launches[-1]
    assert done.shape == (24, 1, 1, 32, 1, 1)
    address = whole.data.ptr
    each = [(0, 0, 24, 4, address + by, 24, 4) for by in (4, 0, 0)]
    assert struct.unpack("=21q", done.slots) == sum(each, ())
    with pytest.raises(ValueError, match="must be C-contiguous, got strides"):
        _device.launch_planned(plan, ("a",), (whole[:, ::2], whole, whole))


@needs_cuda_packages
def test_launch_follows_the_current_stream(stand_in, kernel_globals):
    x = gpu_array(np.ones(6, np.float32))
    for pointer in (0, 4096, 0, 8192, 4096):
        stand_in.stream.ptr = pointer
        _device.launch(add, 6, (x, x, x))
    assert [done.stream for done in stand_in.launches] == [0, 4096, 0, 8192, 4096]


@needs_cuda_packages
def test_launch_of_nothing(stand_in):
    x = gpu_array(np.ones(0, np.float32))
    _device.launch(add, 0, (x, x, x))
    _device.launch(add, (4, 0), (x, x, x), block=(8, 8))
    assert stand_in.launches == stand_in.loaded == []


@needs_cuda_packages
def test_launch_refuses_what_is_elsewhere(stand_in, kernel_globals):
    x = gpu_array(np.ones(6, np.float32))
    with pytest.raises(TypeError, match="takes CuPy arrays, got a NumPy array; move it"):
        _device.launch(add, 6, (x, x, np.ones(6, np.float32)))
    with pytest.raises(ValueError, match="an array is on cuda:1 but the current device is cuda:0"):
        _device.launch(add, 6, (x, x, gpu_array(np.ones(6, np.float32), 1)))
    assert stand_in.launches == []


@needs_cuda_packages
def test_compiled_kernels_outlive_the_process(stand_in, kernel_globals, tmp_path, monkeypatch):
    x = gpu_array(np.ones(6, np.float32))
    _device.launch(add, 6, (x, x, x))
    (kept,) = tmp_path.iterdir()

    def restart():
        _device._launcher.cache_clear()
        _device.launch(add, 6, (x, x, x))

    compiled = []
    real = _compile.compile_ptx
    monkeypatch.setattr(_compile, "compile_ptx", lambda *a: compiled.append(a) or real(*a))
    restart()
    assert compiled == []
    assert stand_in.loaded[1] == stand_in.loaded[0]
    content = kept.read_bytes()
    for damaged in (b"", content[:50], content[:-1], content[:60] + b"x" + content[61:]):
        kept.write_bytes(damaged)
        restart()
        assert _kernel_cache.load(kept.name)[1] == stand_in.loaded[-1], "it is written again"
    assert len(compiled) == 4
    assert list(tmp_path.iterdir()) == [kept], "no temporary file stays"


@needs_cuda_packages
def test_without_nvjitlink_the_driver_assembles(stand_in, kernel_globals, monkeypatch, caplog):
    def missing(ptx, cc):
        raise ImportError("no nvjitlink")

    monkeypatch.setattr(_compile, "assemble", missing)
    x = gpu_array(np.ones(6, np.float32))
    _device.launch(add, 6, (x, x, x))
    assert b".visible .entry" in stand_in.loaded[0]
    assert "the driver assembles kernels" in caplog.text


@pytest.mark.skipif(_device._SIMULATING, reason="needs NUMBA_ENABLE_CUDASIM unset")
def test_launch_without_a_gpu(monkeypatch):
    monkeypatch.setattr(_device, "_gpu_count", lambda: 0)
    monkeypatch.setattr(_device, "_cupy", lambda: None)
    _device._launcher.cache_clear()
    with pytest.raises(RuntimeError, match="needs CuPy, which is not installed: pip install"):
        _device.launch(add, 1, ())


# --------------------------------------------------------------------------------- kernels on disk


def make_function(constant=1.0, table=(1, 2), helper=math.sqrt):
    def function(x):
        return helper(x) * constant + table[0]

    return function


def test_fingerprints_follow_what_the_code_depends_on():
    def helper(x):
        return x + 1

    def other(x):
        return x + 2

    prints = [
        _kernel_cache.fingerprint(make_function()),
        _kernel_cache.fingerprint(make_function(constant=2.0)),
        _kernel_cache.fingerprint(make_function(table=(1, 3))),
        _kernel_cache.fingerprint(make_function(table=np.array([1, 2]))),
        _kernel_cache.fingerprint(make_function(table=np.array([1, 3]))),
        _kernel_cache.fingerprint(make_function(helper=helper)),
        _kernel_cache.fingerprint(make_function(helper=other)),
        _kernel_cache.fingerprint(make_function(), (9, 0)),
        _kernel_cache.fingerprint(make_function(), (8, 0)),
        _kernel_cache.fingerprint(lambda x: x + SCALE),
    ]
    assert len(set(prints)) == len(prints)
    assert _kernel_cache.fingerprint(make_function()) == prints[0]


SCALE = 3


def test_fingerprints_follow_names():
    """Bytecode alone does not tell which functions and attributes it names."""
    functions = [
        make_function(helper=math.exp),
        make_function(helper=math.sqrt),
        lambda x: math.exp(x),
        lambda x: math.log(x),
        lambda x: abs(x),
        lambda x: float(x),
        lambda x: x.real,
        lambda x: x.imag,
        lambda x, y: min(x, y) - max(x, y),
        lambda x, y: max(x, y) - min(x, y),
    ]
    assert len({_kernel_cache.fingerprint(x) for x in functions}) == len(functions)


def test_fingerprints_follow_what_was_met_before():
    def make(*functions):
        a, b, c = functions
        return lambda x: a(x) + b(x) - c(x)

    def one(x):
        return x

    def two(x):
        return 2 * x

    orders = list(itertools.product((one, two), repeat=3))
    assert len({_kernel_cache.fingerprint(make(*x)) for x in orders}) == len(orders)


@pytest.mark.skipif(_device._SIMULATING, reason="needs NUMBA_ENABLE_CUDASIM unset")
def test_fingerprints_follow_types_tables_and_options():
    from llvmlite import ir

    def helper(x):
        return x

    inside = [
        *(_device.types.float32, _device.types.float64),
        *(ir.IntType(16), ir.IntType(64)),
        *({"a": 1}, {"a": 2}),
        *(_device.cuda.jit(device=True, fastmath=x)(helper) for x in (False, True)),
    ]
    prints = [_kernel_cache.fingerprint(make_function(table=x)) for x in inside]
    assert len(set(prints)) == len(prints)


def test_fingerprints_follow_globals(monkeypatch):
    def function(x):
        return x * SCALE

    before = _kernel_cache.fingerprint(function)
    monkeypatch.setitem(globals(), "SCALE", 4)
    assert _kernel_cache.fingerprint(function) != before


def test_recursive_functions_have_a_fingerprint():
    def function(x):
        return function(x - 1) if x else 0

    assert len(_kernel_cache.fingerprint(function)) == 64


def test_cache_places(monkeypatch, tmp_path):
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path / "new"))
    assert _kernel_cache.load("a") is None
    _kernel_cache.store("a", "entry", b"\x00\ncode")
    assert _kernel_cache.load("a") == ("entry", b"\x00\ncode")
    monkeypatch.setenv("RTXARR_CACHE_DIR", "")
    _kernel_cache.store("a", "entry", b"code")
    assert _kernel_cache.load("a") is None
    monkeypatch.delenv("RTXARR_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _kernel_cache.cache_dir() == tmp_path / ".cache" / "rtxarr"


def test_a_cache_that_cannot_be_written_warns(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path / "file" / "below"))
    _kernel_cache.store("a", "entry", b"code")
    assert "each process compiles anew" in caplog.text
    assert _kernel_cache.load("a") is None


# ----------------------------------------------------------------------------------- with a GPU


@pytest.mark.gpu
def test_gpu_is_found_and_named():
    gpu = device("cuda:0")
    assert gpu in devices()
    assert repr(gpu).startswith("Device('cuda:0', ")
    assert device("auto") == "cuda:0"
    import cupy

    assert gpu == cupy.cuda.Device(0)
    assert device(cupy.cuda.Device(0)) == gpu
    with gpu:
        assert namespace().__name__ == "array_api_compat.cupy"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, bool, np.int64])
def test_round_trip_to_the_gpu(dtype):
    x = np.arange(12).reshape(3, 4).astype(dtype)
    there = to_device(x, "cuda:0")
    assert is_device_array(there)
    assert device_of(there) == "cuda:0"
    assert to_device(there, "cuda:0") is there
    assert_close(to_device(there, "cpu"), x, exact=True)
    with device("cuda:0"), _device.stream() as stream:
        assert_close(to_device(to_device(x, "cuda:0", stream=stream), "cpu"), x, exact=True)


@pytest.mark.gpu
def test_namespaces_do_not_mix_with_a_gpu():
    there = to_device(np.ones(2), "cuda:0")
    assert namespace(there, np.float32(1)).__name__ == "array_api_compat.cupy"
    with pytest.raises(TypeError, match="one library, got numpy and cupy"):
        namespace(np.ones(2), there)


@pytest.mark.gpu
def test_launch_on_strided_arrays(kernel_globals):
    with device("cuda:0"):
        xp = namespace()
        x = xp.arange(2000, dtype=xp.float32)
        out = xp.full(1000, -1, dtype=xp.float32)
        _device.launch(add, 1000, (x[::2], x[1000:], out))
        _device.synchronize()
    want = np.arange(0, 2000, 2) + np.arange(1000, 2000)
    assert_close(out, want.astype(np.float32), exact=True)


@pytest.mark.gpu
def test_launch_in_a_thread_and_on_a_stream(kernel_globals):
    with device("cuda:0"):
        xp = namespace()
        x, out = xp.ones(1000, dtype=xp.float32), xp.zeros(1000, dtype=xp.float32)
        _device.synchronize()

    def work():
        with device("cuda:0"), _device.stream() as stream:
            _device.launch(add, 1000, (x, x, out))
            stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert_close(out, np.full(1000, 2, np.float32), exact=True)


@pytest.mark.gpu
def test_launch_is_captured_in_a_graph(kernel_globals):
    with device("cuda:0"):
        xp = namespace()
        x, out = xp.ones(1000, dtype=xp.float32), xp.zeros(1000, dtype=xp.float32)
        _device.launch(add, 1000, (x, x, out))
        _device.synchronize()  # the new stream does not wait for the default one
        with _device.stream() as stream:
            stream.begin_capture()
            _device.launch(add, 1000, (x, out, out))
            graph = stream.end_capture()
            for _ in range(3):
                graph.launch(stream)
            stream.synchronize()
    assert_close(out, np.full(1000, 5, np.float32), exact=True)


@pytest.mark.gpu
def test_memory_of_the_gpu():
    import cupy

    with device("cuda:0"):
        before = memory_stats()["used"]
        block = cupy.ones(2**20, dtype=np.float32)
        stats = memory_stats("cuda:0")
    assert stats["used"] - before == block.nbytes
    assert stats["pool"] >= stats["used"]
    assert 0 < stats["free"] < stats["total"]


@pytest.mark.gpu
def test_out_of_memory_says_how_much():
    import cupy

    with device("cuda:0"):
        pool = cupy.cuda.MemoryPool()  # the default one may hold room that other tests left
        pool.set_limit(size=2**20)
        with (
            cupy.cuda.using_allocator(pool.malloc),
            pytest.raises(MemoryError, match=r"no room for 64.0 MiB on Device\('cuda:0'"),
        ):
            to_device(np.ones(2**23), "cuda:0")
