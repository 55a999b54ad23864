"""A cuBLASLt that computes on the host what the descriptors say, and the CuPy around it."""

import ctypes
import itertools
import sys
import types

import ml_dtypes
import numpy as np
import pytest

from rtxarr import _device
from rtxarr.libs import _cublaslt, blas

DTYPES = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16,
          28: ml_dtypes.float8_e4m3fn, 29: ml_dtypes.float8_e5m2}  # fmt: skip


# cublasLtEpilogue_t.
EPILOGUES = {1, 2, 4, 6, 32, 36, 130, 134, 136, 152, 160, 164, 192, 208, 256, 512}


class FakeArray(np.ndarray):
    """A NumPy array that says where it lies as CuPy's do."""

    device_id = 0

    @property
    def data(self):
        pointer = self.__array_interface__["data"][0]
        return types.SimpleNamespace(ptr=pointer, device_id=self.device_id)

    def copy(self, order="C"):
        return np.array(self, order=order, copy=True, subok=True)


def at(address, dtype, shape, strides):
    """View memory as an array of floats; strides in elements."""
    n = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    dtype = np.dtype(dtype)
    buffer = (ctypes.c_byte * (n * dtype.itemsize)).from_address(address)
    return np.ndarray(shape, dtype, buffer, strides=[s * dtype.itemsize for s in strides])


class FakeError(Exception):
    status = 15


class FakeLibrary(types.ModuleType):
    """The calls of ``nvmath.bindings.cublasLt`` that rtxarr makes, column-major as there."""

    cuBLASLtError = FakeError

    def __init__(self):
        super().__init__("nvmath.bindings.cublasLt")
        self.version = 130000
        self.numbers = itertools.count(1)
        self.live = {}
        self.asked = 0
        self.calls = []
        self.splits = (1, 1)  # of the algorithms that it finds

    def get_version(self):
        return self.version

    def create(self):
        return 7

    def _new(self, *values):
        number = next(self.numbers)
        self.live[number] = dict(enumerate(values, -len(values)))
        return number

    def matmul_desc_create(self, compute, scale):
        return self._new(compute, scale)

    def matrix_layout_create(self, kind, rows, cols, ld):
        return self._new(kind, rows, cols, ld)

    def matmul_preference_create(self):
        return self._new()

    def _destroy(self, number):
        del self.live[number]

    matmul_desc_destroy = matrix_layout_destroy = matmul_preference_destroy = _destroy

    def _set(self, number, attribute, address, size):
        kind = {1: ctypes.c_int8, 4: ctypes.c_int32, 8: ctypes.c_int64}[size]
        self.live[number][attribute] = kind.from_address(address).value

    matmul_desc_set_attribute = matrix_layout_set_attribute = _set
    matmul_preference_set_attribute = _set

    def matmul_algo_get_heuristic(self, handle, desc, a, b, c, d, preference, n, results, count):
        self.asked += 1
        self.preference = dict(self.live[preference])
        found = np.ctypeslib.as_array((ctypes.c_byte * (n * 96)).from_address(results))
        found = found.view(_cublaslt._RESULT)
        for i, split in enumerate(self.splits):
            found[i]["algo"][:2] = 66, split
            found[i]["workspace"] = 1000
        ctypes.c_int32.from_address(count).value = len(self.splits)

    def matmul_algo_config_get_attribute(self, algo, attribute, address, size, written):
        algo_id, split = np.ctypeslib.as_array((ctypes.c_uint64 * 2).from_address(algo))
        ctypes.c_int32.from_address(address).value = int({0: algo_id, 2: split}[attribute])

    def matmul_algo_check(self, handle, desc, a, b, c, d, algo, result):
        found = np.ctypeslib.as_array((ctypes.c_byte * 96).from_address(result))
        found.view(_cublaslt._RESULT)["workspace"] = 1000

    def matmul(
        self, handle, desc, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algo,
        workspace, size, stream,
    ):  # fmt: skip
        assert workspace and size == 1000
        assert (c, c_layout) == (d, d_layout)
        desc, a_layout, b_layout, d_layout = (
            self.live[x] for x in (desc, a_layout, b_layout, d_layout)
        )
        self.calls.append((desc, a_layout, b_layout, d_layout))
        scalar = ctypes.c_double if desc[-1] == 1 else ctypes.c_float
        assert (scalar * 2).from_address(alpha)[0] == 1
        assert scalar.from_address(beta).value == 0
        for i in range(d_layout.get(5, 1)):
            self._one(desc, a, a_layout, b, b_layout, d, d_layout, i)

    def _matrix(self, address, layout, i):
        kind, rows, cols, ld = (layout[j] for j in range(-4, 0))
        assert ld >= rows
        dtype = np.dtype(DTYPES[kind])
        start = address + i * layout.get(6, 0) * dtype.itemsize
        return at(start, dtype, (rows, cols), (1, ld))

    def _one(self, desc, a, a_layout, b, b_layout, d, d_layout, i):
        a, b = (
            self._matrix(x, layout, i).astype(np.float64)
            for x, layout in ((a, a_layout), (b, b_layout))
        )
        a, b = (x.T if desc[op] else x for x, op in ((a, 3), (b, 4)))
        d = self._matrix(d, d_layout, i)
        (m, n), k = d.shape, a.shape[1]
        assert (a.shape, b.shape) == ((m, k), (k, n))
        if 17 in desc:
            rows = m if desc.get(31) == 3 else 1
            a = a * at(desc[17], np.float32, (rows, 1), (1, 0))
        if 18 in desc:
            cols = n if desc.get(32) == 3 else 1
            b = b * at(desc[18], np.float32, (1, cols), (0, 1))
        epilogue = desc[7]
        assert epilogue in EPILOGUES
        x = a @ b
        if epilogue & 4:
            x = x + at(desc[8], d.dtype, (m, 1), (1, 0)).astype(np.float64)
        if epilogue & 128:
            ld = desc[12]
            assert ld >= m and ld % (8 if epilogue & 96 else 128) == 0
        if epilogue & ~4 == 512:
            at(desc[8], d.dtype, (n,), (1,))[...] = b.sum(axis=0)
        elif epilogue & 136 == 136:  # dReLU
            bits = at(desc[11], np.uint8, (ld // 8, n), (1, ld // 8))
            x = x * np.unpackbits(bits, axis=0, bitorder="little")[:m]
        elif epilogue & 192 == 192:  # dGELU
            before = at(desc[11], d.dtype, (m, n), (1, ld)).astype(np.float64)
            x = x * gelu_slope(before)
        elif epilogue & 34:
            if epilogue & 128 and epilogue & 32:
                at(desc[11], d.dtype, (m, n), (1, ld))[...] = x
            elif epilogue & 128:
                bits = np.zeros((ld, n), bool)
                bits[:m] = x >= 0
                at(desc[11], np.uint8, (ld // 8, n), (1, ld // 8))[...] = np.packbits(
                    bits, axis=0, bitorder="little"
                )
            x = gelu(x) if epilogue & 32 else np.maximum(x, 0)
        if epilogue & 16:
            at(desc[8], d.dtype, (m,), (1,))[...] = x.sum(axis=1)
        d[...] = x


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x):
    t = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)


class FakeCuPy(types.ModuleType):
    """What the provider asks of CuPy."""

    ndarray = FakeArray
    may_share_memory = staticmethod(np.may_share_memory)
    lib = types.SimpleNamespace(
        stride_tricks=types.SimpleNamespace(
            as_strided=lambda x, *shape: np.lib.stride_tricks.as_strided(x, *shape, subok=True)
        )
    )

    def __init__(self):
        super().__init__("cupy")
        self.device_id = 0
        self.stream = types.SimpleNamespace(ptr=0, is_capturing=lambda: False)
        self.buffers = []
        runtime = types.SimpleNamespace(
            getDevice=lambda: self.device_id,
            setDevice=lambda i: None,
            runtimeGetVersion=lambda: 13000,
            getDeviceProperties=lambda i: {"name": b"a GPU"},
        )
        event = types.SimpleNamespace(record=lambda s: None, synchronize=lambda: None)
        self.times = iter(())
        self.cuda = types.SimpleNamespace(
            runtime=runtime,
            get_current_stream=lambda: self.stream,
            Event=lambda: event,
            get_elapsed_time=lambda a, b: next(self.times),
        )

    def ascontiguousarray(self, x):
        return np.ascontiguousarray(x).view(FakeArray)

    def get_default_memory_pool(self):
        def malloc(size):
            self.buffers.append(FakeArray(size, np.uint8))
            return self.buffers[-1].data

        return types.SimpleNamespace(malloc=malloc)


@pytest.fixture
def clean(monkeypatch):
    """A provider that has not looked for its library, with no library to find."""
    cupy = FakeCuPy()
    monkeypatch.setitem(vars(_device), "cupy", cupy)  # without asking for the real one
    monkeypatch.setattr(blas, "is_device_array", lambda x: isinstance(x, FakeArray))
    monkeypatch.setattr(blas, "_loaded", [])
    monkeypatch.setattr(blas, "_provider", blas.Provider("matrix products", "CuPy"))
    for name in ("nvmath", "nvmath.bindings", "nvmath.bindings.cublasLt"):
        monkeypatch.setitem(sys.modules, name, None)
    return cupy


@pytest.fixture
def fake(clean, monkeypatch):
    """The library's stand-in, with ``fake.cupy`` around it; leaves no descriptor behind."""
    library = FakeLibrary()
    bindings = types.ModuleType("nvmath.bindings")
    bindings.cublasLt = library
    nvmath = types.ModuleType("nvmath")
    nvmath.__version__ = "1.0.0"
    nvmath.bindings = bindings
    for module in (nvmath, bindings, library):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    library.cupy = clean
    library.array = lambda x: np.array(x).view(FakeArray)
    yield library
    if any(blas._loaded):
        blas._loaded[0]._plans.clear()
    assert library.live == {}


@pytest.fixture
def settings():
    """Undo what a test changes for all threads."""
    yield
    blas.allow_tf32(False)
    blas.autotune(False)
