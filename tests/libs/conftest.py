"""A cuBLASLt and a cuDNN that compute on the host what they are told, and the CuPy around them."""

import ctypes
import itertools
import sys
import threading
import types

import ml_dtypes
import numpy as np
import pytest

from rtxarr import _device
from rtxarr.libs import _cublaslt, _dnn, _serving, _tile_attention, blas, dnn
from rtxarr.nn import _fp8_attention
from rtxarr.ops import _attention, _conv
from rtxarr.ops._conv import _unfolded, _unfolded_input, _unfolded_weight
from rtxarr.ops._windows import Windows

from .products import poison_results

DTYPES = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16,
          28: ml_dtypes.float8_e4m3fn, 29: ml_dtypes.float8_e5m2}  # fmt: skip


# cublasLtEpilogue_t.
EPILOGUES = {1, 2, 4, 6, 32, 36, 130, 134, 136, 152, 160, 164, 192, 208, 256, 512}


class FakeArray(np.ndarray):
    """A NumPy array that says where it lies as CuPy's do; new memory is full of NaN."""

    device_id = 0

    def __new__(cls, *args):
        found = super().__new__(cls, *args)
        np.asarray(found).reshape(-1).view(np.uint8)[...] = 0xFF
        return found

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
        self.calls, self.scalars = [], []
        self.splits = (1, 1)  # of the algorithms that it finds
        self.most = 8  # that it names at once

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
        splits = [x for x in self.splits if x == 1 or self.preference.get(3) != 0]
        splits = splits[: self.most]
        for i, split in enumerate(splits):
            found[i]["algo"][:2] = 66, split
            found[i]["workspace"] = 1000
        ctypes.c_int32.from_address(count).value = len(splits)

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
        assert c_layout == d_layout
        desc, a_layout, b_layout, d_layout = (
            self.live[x] for x in (desc, a_layout, b_layout, d_layout)
        )
        self.calls.append((desc, a_layout, b_layout, d_layout))
        scalar = ctypes.c_double if desc[-1] == 1 else ctypes.c_float
        scale, share = (scalar.from_address(x).value for x in (alpha, beta))
        assert share in (0, 1) and (share or c == d)
        self.scalars.append((scale, share))
        for i in range(d_layout.get(5, 1)):
            added = scale, self._matrix(c, d_layout, i).astype(np.float64) if share else 0
            self._one(desc, a, a_layout, b, b_layout, d, d_layout, i, *added)

    def _matrix(self, address, layout, i):
        kind, rows, cols, ld = (layout[j] for j in range(-4, 0))
        assert ld >= rows
        dtype = np.dtype(DTYPES[kind])
        start = address + i * layout.get(6, 0) * dtype.itemsize
        return at(start, dtype, (rows, cols), (1, ld))

    def _one(self, desc, a, a_layout, b, b_layout, d, d_layout, i, scale, addend):
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
        x = scale * (a @ b) + addend
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

    def broadcast_to(self, x, shape):
        return np.broadcast_to(x, shape, subok=True)

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
    monkeypatch.setattr(_device, "devices", lambda: ["cpu"])  # nor for what it can load
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
def poisoned(monkeypatch):
    """CuPy; what cuBLASLt's provider returns lay in memory full of NaN."""
    found = pytest.importorskip("cupy")
    pytest.importorskip("nvmath")
    poison_results(monkeypatch)
    return found


@pytest.fixture
def settings():
    """Undo what a test changes for all threads."""
    yield
    blas.allow_tf32(False)
    blas.autotune(False)


# ------------------------------------------------------------------------------------- cuDNN


class NotSupported(Exception):
    pass


class FakeTensor:
    """A tensor of a graph: given if it has a number and no ``made``, else the result of that."""

    def __init__(self, made=None, dim=None, stride=None, data_type=None, uid=None):
        self.made, self.dim, self.stride, self.data_type = made, dim, stride, data_type
        self.uid, self.is_output = uid, False

    def _set(self, name, value):
        setattr(self, name, value)
        return self

    def set_uid(self, value):
        return self._set("uid", value)

    def set_output(self, value):
        return self._set("is_output", value)

    def set_dim(self, value):
        return self._set("dim", value)

    def set_stride(self, value):
        return self._set("stride", value)

    def set_data_type(self, value):
        return self._set("data_type", value)


class FakeGraph:
    """What rtxarr asks of ``cudnn.pygraph``, computing on the host in float64."""

    def __init__(self, library, **options):
        self.library, self.options = library, options
        self.tensors, self.chosen, self.barred = [], None, set()

    def _new(self, *args, **options):
        self.tensors.append(FakeTensor(*args, **options))
        return self.tensors[-1]

    def tensor(self, *, dim, stride, data_type, name, uid):
        assert len(dim) == len(stride) and min(dim) > 0
        return self._new(None, dim, stride, data_type, uid)

    def _op(self, name, n_results=1, **options):
        found = [self._new((name, i, options)) for i in range(n_results)]
        return found if n_results > 1 else found[0]

    def sdpa(self, **options):
        if options.get("paged_attention_k_table") is not None:
            assert options.pop("generate_stats") is False
            return self._op("paged", 2, **options)
        assert options.pop("generate_stats") is True
        return self._op("sdpa", 2, **options)

    def sdpa_fp8(self, **options):
        assert options.pop("generate_stats") is False
        return self._op("fp8", 4, **options)

    def sdpa_backward(self, **options):
        self.library.deterministic.append(options["use_deterministic_algorithm"])
        if options.get("dBias") is not None:
            options["dBias"].made = ("sdpa_backward", 3, options)
        return self._op("sdpa_backward", 3, **options)

    def conv_fprop(self, **options):
        return self._op("conv_fprop", **options)

    def conv_dgrad(self, **options):
        return self._op("conv_dgrad", **options)

    def conv_wgrad(self, **options):
        return self._op("conv_wgrad", **options)

    def bias(self, *, input, bias):
        return self._op("add", a=input, b=bias)

    def add(self, *, a, b):
        return self._op("add", a=a, b=b)

    def relu(self, *, input):
        return self._op("relu", input=input)

    def swish(self, *, input):
        return self._op("swish", input=input)

    # ------------------------------------------------------------------------- planning

    def validate(self):
        self.library.planned += 1
        numbered = sorted(t.uid for t in self.tensors if t.uid is not None)
        assert numbered == list(range(1, len(numbered) + 1))

    def build_operation_graph(self):
        pass

    def create_execution_plans(self, modes):
        assert modes == ["A", "FALLBACK"]
        if not self.library.engines:
            raise NotSupported("no engine proposed a plan")

    def deselect_numeric_notes(self, notes):
        self.library.unwanted = set(notes)
        for i, (_, has) in enumerate(self.library.engines):
            if has & set(notes):
                self.barred.add(i)

    def get_execution_plan_count(self):
        return len(self.library.engines)

    def get_engine_and_knobs_at_index(self, i):
        return self.library.engines[i][0], {}

    def build_plan_at_index(self, i):
        if i in self.barred:
            raise ValueError("excluded")
        self.chosen = self.library.engines[i][0]

    def get_workspace_size(self):
        return 1000

    def serialize(self, *, as_bytes):
        assert as_bytes
        name = f"plan {len(self.library.kept)} of engine {self.chosen}".encode()
        self.library.kept[name] = self.tensors, self.chosen
        return name

    def deserialize(self, handle, content):
        if content not in self.library.kept:
            raise RuntimeError("of another build")
        self.tensors, self.chosen = self.library.kept[content]

    # ------------------------------------------------------------------------ executing

    def execute(self, pack, workspace, handle):
        assert workspace and handle.owner == threading.get_ident()
        assert all(pointer % 16 == 0 for pointer in pack.values())
        self.library.started.append((self.chosen, self))
        given = {}
        for t in self.tensors:
            if t.uid is not None:
                given[t.uid] = at(pack[t.uid], KINDS[t.data_type], t.dim, t.stride)
        values = {}
        for t in self.tensors:
            if t.is_output:
                given[t.uid][...] = self._value(t, given, values)

    def _value(self, t, given, values):
        if t is None or not isinstance(t, FakeTensor):
            return t
        if t.made is None:
            return given[t.uid].astype(np.float64)
        name, i, options = t.made
        key = id(options)
        if key not in values:
            options = {
                k: v if k == "dBias" else self._value(v, given, values) for k, v in options.items()
            }
            if name in ("conv_dgrad", "conv_wgrad"):
                options["shape"] = tuple(t.dim)
            elif name == "sdpa_backward" and options.get("dBias") is not None:
                options["mask_shape"] = options["dBias"].dim
            values[key] = globals()["compute_" + name](**options)
        return values[key][i] if isinstance(values[key], tuple) else values[key]


def compute_add(a, b):
    return a + b


def compute_relu(input):
    return np.maximum(input, 0)


def compute_swish(input):
    return input / (1 + np.exp(-input))


def compute_conv_fprop(image, weight, padding, stride, dilation):
    windows = Windows(
        weight.shape[2:], tuple(stride), tuple((p, p) for p in padding), tuple(dilation)
    )
    return _unfolded(image, weight, None, windows=windows, groups=image.shape[1] // weight.shape[1])


def compute_conv_dgrad(loss, filter, padding, stride, dilation, shape):
    windows = Windows(
        filter.shape[2:], tuple(stride), tuple((p, p) for p in padding), tuple(dilation)
    )
    groups = shape[1] // filter.shape[1]
    return _unfolded_input(loss, filter, None, windows=windows, groups=groups, spatial=shape[2:])


def compute_conv_wgrad(image, loss, padding, stride, dilation, shape):
    windows = Windows(shape[2:], tuple(stride), tuple((p, p) for p in padding), tuple(dilation))
    return _unfolded_weight(image, loss, windows=windows, groups=image.shape[1] // shape[1])


def scores_of(q, k, attn_scale, bias, seq_len_kv, left, right, alignment):
    group = q.shape[1] // k.shape[1]
    k = np.repeat(k, group, axis=1)
    scores = q @ k.swapaxes(-1, -2) * attn_scale
    if bias is not None:
        assert bias.shape[2:] == scores.shape[2:]  # cuDNN's gradients are wrong otherwise
        scores = scores + bias
    i, j = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[None, :]
    if alignment == "BOTTOM_RIGHT":
        assert bias is None and q.shape[2] <= k.shape[2]
        i = i + k.shape[2] - q.shape[2]
    if right is not None:
        scores = np.where(j <= i + right, scores, -np.inf)
    if left is not None:
        assert left > 0 and q.shape[2] <= k.shape[2]
        scores = np.where(j > i - left, scores, -np.inf)
    if seq_len_kv is not None:
        scores = np.where(j < seq_len_kv, scores, -np.inf)
    return scores, group


def compute_sdpa(
    q, k, v, attn_scale, bias=None, use_padding_mask=False, seq_len_q=None, seq_len_kv=None,
    diagonal_band_left_bound=None, diagonal_band_right_bound=None, diagonal_alignment=None,
):  # fmt: skip
    assert seq_len_q is None or np.all(seq_len_q == q.shape[2])
    assert seq_len_kv is None or np.all((seq_len_kv > 0) & (seq_len_kv <= k.shape[2]))
    scores, group = scores_of(
        q, k, attn_scale, bias, seq_len_kv, diagonal_band_left_bound, diagonal_band_right_bound,
        diagonal_alignment,
    )  # fmt: skip
    with np.errstate(invalid="ignore"):  # NaN where nothing is seen, as cuDNN gives
        probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total = probs.sum(axis=-1, keepdims=True)
    logs = np.log(total) + scores.max(axis=-1, keepdims=True)
    return probs / total @ np.repeat(v, group, axis=1), logs


def compute_fp8(
    q, k, v, attn_scale, descale_q, descale_k, descale_v, descale_s, scale_s, scale_o,
    right_bound=None,
):  # fmt: skip
    arrays = (q * descale_q, k * descale_k, v * descale_v)
    alignment = None if right_bound is None else "TOP_LEFT"
    out, _ = compute_sdpa(
        *arrays, attn_scale, None, False, None, None, None, right_bound, alignment
    )
    assert np.allclose(descale_s * scale_s, 1)
    return np.clip(out * scale_o, -448, 448), None, None, None


def compute_paged(
    q, k, v, attn_scale, use_padding_mask, seq_len_q, seq_len_kv, paged_attention_k_table,
    paged_attention_v_table, paged_attention_max_seq_len_kv, diagonal_band_right_bound=None,
    diagonal_alignment=None,
):  # fmt: skip
    n_batch, n_heads, n_queries, dim = q.shape
    n_keys = paged_attention_max_seq_len_kv
    assert use_padding_mask and np.all((seq_len_kv > 0) & (seq_len_kv <= n_keys))
    assert diagonal_alignment == (None if diagonal_band_right_bound is None else "BOTTOM_RIGHT")
    out = np.full(q.shape, np.nan)
    for b in range(n_batch):
        n = int(seq_len_kv[b].item())
        rows = paged_attention_k_table[b, 0, :, 0].astype(int)[: -(-n // k.shape[2])]
        keys, values = (
            np.repeat(
                x[rows].swapaxes(0, 1).reshape(x.shape[1], -1, dim)[:, :n], n_heads // x.shape[1], 0
            )
            for x in (k, v)
        )
        scores = q[b] @ keys.swapaxes(-1, -2) * attn_scale
        if diagonal_band_right_bound is not None:
            i = np.arange(n_queries)[:, None] + n - n_queries
            scores = np.where(np.arange(n) <= i, scores, -np.inf)
        with np.errstate(invalid="ignore"):
            probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[b] = probs / probs.sum(axis=-1, keepdims=True) @ values
    return out, None


def compute_sdpa_backward(
    q, k, v, o, dO, stats, attn_scale, use_deterministic_algorithm, bias=None, dBias=None,
    mask_shape=None, use_padding_mask=False, seq_len_q=None, seq_len_kv=None,
    diagonal_band_left_bound=None, diagonal_band_right_bound=None, diagonal_alignment=None,
):  # fmt: skip
    assert stats.shape[2:] == (q.shape[2], 1)
    scores, group = scores_of(
        q, k, attn_scale, bias, seq_len_kv, diagonal_band_left_bound, diagonal_band_right_bound,
        diagonal_alignment,
    )  # fmt: skip
    keys, values = (np.repeat(x, group, axis=1) for x in (k, v))
    probs = np.exp(scores - stats)
    of_scores = probs * (dO @ values.swapaxes(-1, -2) - (dO * o).sum(axis=-1, keepdims=True))

    def shared(x):
        b, h, n, d = x.shape
        return x.reshape(b, h // group, group, n, d).sum(axis=2)

    of_k = shared(of_scores.swapaxes(-1, -2) @ q) * attn_scale
    of_v = shared(probs.swapaxes(-1, -2) @ dO)
    of_mask = of_scores
    if mask_shape is not None:
        axes = tuple(i for i, n in enumerate(mask_shape) if n != of_scores.shape[i])
        of_mask = of_scores.sum(axis=axes, keepdims=True)
    return of_scores @ keys * attn_scale, of_k, of_v, of_mask


KINDS = {"HALF": np.float16, "BFLOAT16": ml_dtypes.bfloat16, "FLOAT": np.float32,
         "INT32": np.int32, "FP8_E4M3": ml_dtypes.float8_e4m3fn}  # fmt: skip


class FakeDnn(types.ModuleType):
    """What rtxarr asks of the ``cudnn`` package."""

    cudnnGraphNotSupportedError = NotSupported

    def __init__(self):
        super().__init__("cudnn")
        self.__version__ = "1.32.0"
        self.version = 91900
        self.engines = [(9, set())]  # with the notes of their plans
        self.planned, self.started, self.kept, self.deterministic = 0, [], {}, []

        def names(*words):
            return types.SimpleNamespace(**{word: word for word in words})

        self.data_type = names(*KINDS)
        self.heur_mode = names("A", "B", "FALLBACK")
        self.diagonal_alignment = names("TOP_LEFT", "BOTTOM_RIGHT")
        self.numerical_note = names(
            "TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "FFT",
            "NONDETERMINISTIC", "WINOGRAD", "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6",
            "WINOGRAD_TILE_13x13",
        )  # fmt: skip

    def backend_version(self):
        return self.version

    def create_handle(self):
        return types.SimpleNamespace(owner=threading.get_ident(), stream=0)

    def set_stream(self, handle, stream):
        handle.stream = stream

    def pygraph(self, **options):
        return FakeGraph(self, **options)


class FakeDnnCuPy(FakeCuPy):
    """CuPy's functions as NumPy's, with new memory full of NaN."""

    def __init__(self):
        super().__init__()
        properties = {"name": b"a GPU", "major": 9, "minor": 0, "multiProcessorCount": 132,
                      "totalGlobalMem": 1 << 37}  # fmt: skip
        self.cuda.runtime.getDeviceProperties = lambda i: properties
        self.times = itertools.repeat(1.0)

    def __getattr__(self, name):
        function = getattr(np, name)
        if not callable(function) or isinstance(function, type):
            return function

        def on_device(*args, **options):
            found = function(*args, **options)
            return found.view(FakeArray) if isinstance(found, np.ndarray) else found

        return on_device

    def empty(self, shape, dtype=float):
        found = np.empty(shape, dtype)
        found.reshape(-1).view(np.uint8)[...] = 255
        return found.view(FakeArray)


@pytest.fixture
def bare_dnn(monkeypatch):
    """A cuDNN provider that has not looked for its library, with no library to find."""
    cupy = FakeDnnCuPy()
    monkeypatch.setitem(vars(_device), "cupy", cupy)
    monkeypatch.setattr(_device, "devices", lambda: ["cpu"])
    monkeypatch.setattr(_serving, "is_device_array", lambda x: isinstance(x, FakeArray))
    for module in (_attention, _conv, _fp8_attention):
        monkeypatch.setattr(module, "is_device_array", lambda x: isinstance(x, FakeArray))
    monkeypatch.setattr(_dnn, "loaded", [])
    monkeypatch.setattr(_tile_attention, "_missing", lambda: "cuda-tile is not looked for")
    monkeypatch.setattr(_dnn, "provider", blas.Provider("attention and convolutions", "CuPy"))
    monkeypatch.setenv("RTXARR_CACHE_DIR", "")
    monkeypatch.setitem(sys.modules, "cudnn", None)
    return cupy


@pytest.fixture
def fake_dnn(bare_dnn, monkeypatch):
    """The library's stand-in, with ``fake_dnn.cupy`` around it."""
    library = FakeDnn()
    library.cupy = bare_dnn
    monkeypatch.setitem(sys.modules, "cudnn", library)
    return library


class Poisoned:
    """CuPy whose new arrays are full of NaN."""

    def __init__(self, cupy):
        self._cupy = cupy

    def __getattr__(self, name):
        return getattr(self._cupy, name)

    def empty(self, shape, dtype=float):
        found = self._cupy.empty(shape, dtype)
        stream = self._cupy.cuda.get_current_stream()
        self._cupy.cuda.runtime.memsetAsync(found.data.ptr, 255, found.nbytes, stream.ptr)
        return found


@pytest.fixture(params=["stand-in", pytest.param("cupy", marks=pytest.mark.gpu)])
def cupy(request, monkeypatch):
    """CuPy, with poisoned memory for whatever the library returns or works in."""
    if request.param == "stand-in":
        return request.getfixturevalue("fake_dnn").cupy
    return request.getfixturevalue("gpu")


@pytest.fixture
def gpu(monkeypatch):
    found = pytest.importorskip("cupy")
    pytest.importorskip("cudnn")
    library = _dnn.library()
    assert library is not None, dnn.status().lines()
    monkeypatch.setattr(library, "cupy", Poisoned(found))
    # Of problems that each are met once there are many.
    monkeypatch.setattr(library, "_is_fleeting", lambda key: False)
    return found


@pytest.fixture
def served(cupy):
    """Fail when anything went to CuPy."""
    before = dnn.status().refused.copy()
    yield cupy
    assert dnn.status().refused - before == {}
