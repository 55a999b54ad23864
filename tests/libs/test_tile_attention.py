"""Attention in cuTile: against float64, by an emulator of cuTile on the host, then on a GPU."""

import importlib.util
import itertools
import types

import ml_dtypes
import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device
from rtxarr.kernels import philox
from rtxarr.kernels.dropout import threshold
from rtxarr.kernels.tile._build import Array
from rtxarr.libs import _dnn, _tile_attention, dnn, tile
from rtxarr.libs._tile_attention import Dropout, Problem, Tiles

from .test_tile import at

HALVES = ["float16", "bfloat16"]
MISSING = _tile_attention._missing
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}  # relative to the largest, at least one
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32,
         "bool_": np.bool, "int32": np.int32, "int64": np.int64, "uint32": np.uint32,
         "uint64": np.uint64}  # fmt: skip


# ----------------------------------------------------------------------------------- an emulator


class Loaded(np.ndarray):
    """A tile; one element of it keeps its dtype, as in cuTile."""

    def item(self):
        (found,) = np.asarray(self).reshape(-1)
        return found


class Emulator(types.ModuleType):
    """What the kernels use of ``cuda.tile``, on NumPy arrays, one block after another."""

    float32, int32, int64 = np.float32, np.int32, np.int64
    uint32, uint64 = np.uint32, np.uint64
    PaddingMode = types.SimpleNamespace(ZERO="zero")
    where, zeros, full, log2, maximum, reshape, transpose, max, static_iter = map(
        staticmethod,
        (
            np.where, np.zeros, np.full, np.log2, np.maximum, np.reshape, np.transpose, np.max,
            iter,
        ),
    )  # fmt: skip

    def __init__(self):
        super().__init__("cuda.tile")
        self.block = 0

    def bid(self, axis):
        assert axis == 0
        return np.int32(self.block)

    @staticmethod
    def arange(size, *, dtype):
        assert size & (size - 1) == 0
        return np.arange(size, dtype=dtype)

    @staticmethod
    def exp2(x, *, flush_to_zero):
        return np.exp2(x)

    @staticmethod
    def sum(x, axis, *, keepdims=False):
        return np.sum(x, axis, keepdims=keepdims, dtype=x.dtype)

    @staticmethod
    def astype(x, dtype):
        return np.asarray(x).astype(dtype)[()]

    @staticmethod
    def cdiv(a, b):
        return -(-a // b)

    @staticmethod
    def _part(array, index, shape):
        assert all(n & (n - 1) == 0 for n in shape)
        start = [i * n for i, n in zip(index, shape, strict=True)]
        assert all(0 <= i < n for i, n in zip(start, array.shape, strict=True)), "tile outside"
        return tuple(slice(i, i + n) for i, n in zip(start, shape, strict=True))

    def load(self, array, index, shape, *, padding_mode=None):
        values = array[self._part(array, index, shape)]
        assert padding_mode == "zero" or values.shape == shape
        found = np.zeros(shape, array.dtype)
        found[tuple(slice(n) for n in values.shape)] = values
        return found.view(Loaded)

    def store(self, array, index, values):
        assert values.dtype == array.dtype
        target = array[self._part(array, index, values.shape)]
        target[...] = values[tuple(slice(n) for n in target.shape)]

    @staticmethod
    def mma(a, b, total):
        assert a.dtype == b.dtype
        assert a.dtype.itemsize == 2
        assert total.dtype == np.float32
        return total + a.astype(np.float32) @ b.astype(np.float32)


@pytest.fixture
def kernels(monkeypatch):
    """The kernels' functions, made with the emulator, which is their ``ct``."""
    monkeypatch.setitem(vars(_device), "tile", Emulator())
    spec = importlib.util.find_spec("rtxarr.kernels.tile._attention")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Launcher:
    """Run a program as the GPU does: from addresses, shapes and strides alone."""

    def __init__(self, kernels):
        self.kernels = kernels
        self.started = []

    def __call__(self, program, n_blocks, values):
        self.started.append((program, n_blocks))
        values = iter(values)
        args = []
        for x in program.parameters:
            if isinstance(x, Array):
                address = next(values)
                shape, strides = ([next(values) for _ in range(x.n_dims)] for _ in range(2))
                assert strides[x.major] == 1
                assert all(0 < n < 2**31 for n in shape)
                assert all(0 <= n < 2**31 for n in strides)
                array = at(address, NUMPY[x.dtype], shape, strides)
                if x.aligned:
                    assert address % 16 == 0
                    assert all(step * array.itemsize % 16 == 0 for step in strides[:-1])
                args.append(array)
            elif isinstance(x, str):
                bits = f"uint{8 * np.dtype(x).itemsize}"
                args.append(np.array(next(values), bits).view(x)[()])
            else:
                args.append(x)
        assert next(values, None) is None
        for block in range(n_blocks):
            self.kernels.ct.block = block
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                getattr(self.kernels, program.name)(*args)


def empty(cupy):
    """Give memory full of NaN."""

    def poisoned(shape, dtype):
        out = cupy.ndarray(shape, dtype)
        out.view(np.uint8)[...] = 0xFF
        return out

    return poisoned


@pytest.fixture
def emulated(bare_dnn, kernels, monkeypatch):
    """cuTile on the host, without a cuDNN; small tiles, so that there are several."""
    monkeypatch.setattr(_tile_attention, "_missing", lambda: "")
    monkeypatch.setattr(_tile_attention, "_empty", empty(bare_dnn))
    monkeypatch.setattr(_tile_attention, "load", lambda program, device_id: program)
    monkeypatch.setattr(tile, "_processors", lambda device_id: 132)
    few = {dim: Tiles(16, 32, 4) for dim in (64, 128, 256)}
    monkeypatch.setattr(_tile_attention, "_TILES", dict.fromkeys(_tile_attention._TILES, few))
    monkeypatch.setattr(_dnn, "loaded", [None])
    monkeypatch.setattr(
        _tile_attention, "_provider", tile.Provider("attention that cuDNN leaves", "blocks")
    )
    bare_dnn.launcher = Launcher(kernels)
    monkeypatch.setattr(_tile_attention, "launch", bare_dnn.launcher)
    _tile_attention._load.cache_clear()
    yield bare_dnn
    _tile_attention._load.cache_clear()


# ------------------------------------------------------------------------------------- references


def host(x):
    return (x.get() if hasattr(x, "get") else np.asarray(x)).astype(np.float64)


def reference(q, k, v, g, *, seen, added, kept, rate, scale):
    """Attention, the logarithms of its sums, and the gradients by q, k and v, in float64."""
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = q @ keys.swapaxes(-1, -2) * scale + added
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    probs = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = probs.sum(axis=-1, keepdims=True)
    probs = probs / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        logs = np.log(total[..., 0]) + np.where(np.isfinite(top), top, 0)[..., 0]
    weights = probs * kept / (1 - rate)
    out = weights @ values
    of_values = weights.swapaxes(-1, -2) @ g
    of_probs = g @ values.swapaxes(-1, -2) * kept / (1 - rate)
    of_scores = probs * (of_probs - (g * out).sum(axis=-1, keepdims=True))
    of_keys = of_scores.swapaxes(-1, -2) @ q * scale

    def shared(x):
        b, h, n, d = x.shape
        return x.reshape(b, h // group, group, n, d).sum(axis=2)

    return out, logs, of_scores @ keys * scale, shared(of_keys), shared(of_values)


def stored(array, values, way):
    """Store (batch, heads, seq_len, dim) in one of several ways."""
    if way == "queries first":
        return array(np.ascontiguousarray(values.swapaxes(1, 2))).transpose(0, 2, 1, 3)
    if way == "gaps":
        wide = np.full((*values.shape[:3], values.shape[3] + 3), np.nan, values.dtype)
        wide[..., :-3] = values
        return array(wide)[..., :-3]
    return array(values)


def case(rng, array, dtype, shape, *, causal=False, offset=0, window=None, lengths=None,
         mask=None, rate=0.0, start=0, in_memory=False, way="queries first", dim=None):  # fmt: skip
    """Compare one attention and its gradients; return them."""
    b, h, kv, n, m, d = shape
    e = dim or d
    dtype = np.dtype(getattr(rx, dtype))
    q, k, v, g = (
        rng.standard_normal(s).astype(dtype)
        for s in ((b, h, n, d), (b, kv, m, d), (b, kv, m, e), (b, h, n, e))
    )
    rows, keys = np.arange(n)[:, None] + offset, np.arange(m)
    seen = np.ones((b, h, n, m), np.bool)
    if causal:
        seen &= keys <= rows
    if window is not None:
        seen &= keys > rows - window
    if lengths is not None:
        seen &= keys < np.asarray(lengths)[:, None, None, None]
    added = np.zeros((1, 1, 1, 1))
    if mask is not None and mask.dtype == np.bool_:
        seen &= mask
    elif mask is not None:
        added = mask.astype(np.float64)
        seen &= added > -np.inf
        added = np.where(np.isfinite(added), added, 0)
    kept, dropout = np.ones(seen.shape), None
    if rate:
        rng_of_weights = rx.random.Generator(int(rng.integers(2**60)))
        rng_of_weights.dropout_mask(start, rate, device="cpu")
        twin = rx.random.Generator(0)
        twin.load_state_dict(rng_of_weights.state_dict())
        place = twin.dropout_place(b * n * h * m)
        kept = rng_of_weights.dropout_mask((b, n, h, m), rate, device="cpu").swapaxes(1, 2)
        place = array(np.array(place, np.uint64)) if in_memory else place
        dropout = Dropout(place, int(threshold(rate)), rate)
    problem = Problem(causal, offset, window, 0.3, dropout)
    arrays = [stored(array, x, way) for x in (q, k, v)]
    arrays += [x if x is None else array(x) for x in (mask, lengths)]
    out, logs = _tile_attention.forward(*arrays, problem)
    grads = _tile_attention.backward(
        stored(array, g, way), out, logs, *arrays, problem, of_mask=False
    )
    want = reference(*(x.astype(np.float64) for x in (q, k, v, g)), seen=seen, added=added,
                     kept=kept, rate=rate, scale=0.3)  # fmt: skip
    found = out, logs, *grads[:3]
    for name, x, y in zip(("out", "logs", "q", "k", "v"), found, want, strict=True):
        assert x.shape == y.shape
        x = host(x)
        assert np.array_equal(np.isfinite(x), np.isfinite(y)), name
        x, y = (np.where(np.isfinite(z), z, 0) for z in (x, y))
        # Where one key is seen, scores have no gradient, but out is rounded all the same.
        bound = TOLERANCE[dtype.name] * max(3 if name in "qk" else 1, np.abs(y).max())
        assert np.abs(x - y).max() <= bound, f"{name}: {np.abs(x - y).max()} over {bound}"
    return found


def random_case(rng, array, sizes, dims=(16, 20, 64, 72)):
    """Compare an attention with options drawn at random."""
    b, kv, group = (int(rng.choice(x)) for x in ([1, 2, 3], [1, 2], [1, 1, 3]))
    n, m, d, e = (int(rng.choice(x)) for x in (sizes, sizes, dims, dims))
    options = {"dtype": str(rng.choice(HALVES)), "way": str(rng.choice(["", "gaps"]))}
    options["way"] = options["way"] or "queries first"
    if rng.random() < 0.5:
        options.update(causal=True)
    if rng.random() < 0.4:
        options.update(window=int(rng.integers(1, m + 2)))
    options.update(offset=int(rng.integers(-3, max(1, m - n) + 3)))
    if rng.random() < 0.4:
        kind = rng.choice([np.int32, np.int64, np.int16])
        options.update(lengths=rng.integers(0, m + 3, b).astype(kind))
    if rng.random() < 0.5:
        lies = tuple(int(x) if rng.random() < 0.6 else 1 for x in (b, kv * group, n, m))
        mask = rng.standard_normal(lies).astype(np.float32)
        kind = rng.choice(["bool", "float32", "half"])
        options.update(mask=mask > -1 if kind == "bool" else mask)
        if kind == "half":
            options.update(mask=mask.astype(getattr(rx, options["dtype"])))
    if rng.random() < 0.7:
        options.update(rate=float(rng.choice([0.1, 0.5])), start=int(rng.integers(0, 9)))
        options.update(in_memory=bool(rng.integers(0, 2)))
    return case(rng, array, shape=(b, kv * group, kv, n, m, d), dim=e, **options)


# ------------------------------------------------------------------------------------- on the host


@pytest.mark.parametrize("seed", range(12))
def test_random_attention(emulated, seed):
    rng = np.random.default_rng(seed)
    for _ in range(3):
        random_case(rng, emulated.asarray, [1, 3, 16, 33, 50])


def test_rows_that_are_long_at_one_end(emulated):
    """Masks that hide all of a tile before, behind and between what is seen."""
    rng = np.random.default_rng(20)
    mask = np.zeros((1, 1, 40, 100), np.bool)
    mask[..., :10, 70:80], mask[..., 10:20, :3], mask[..., 30:, [0, 99]] = True, True, True
    for rate in (0.0, 0.3):
        case(rng, emulated.asarray, "float16", (2, 2, 1, 40, 100, 32), mask=mask, rate=rate)
        added = np.where(mask, 5, -np.inf).astype(np.float32)
        case(rng, emulated.asarray, "float16", (2, 2, 1, 40, 100, 32), mask=added, rate=rate)


def dropped_case(array, n_keys, start, *, in_memory=False, n_queries=21, dtype="float16"):
    """Read off the result which weights were dropped; compare with the generator's own mask."""
    shape = b, h, n, m = 2, 3, n_queries, n_keys
    dtype = np.dtype(getattr(rx, dtype))
    generator = rx.random.Generator(7)
    generator.dropout_mask(start, 0.5, device="cpu")
    place = np.array([start, *generator.dropout_place(0)[1:]], np.uint64)
    place = array(place) if in_memory else tuple(place)
    want = generator.dropout_mask((b, n, h, m), 0.25, device="cpu").swapaxes(1, 2)
    problem = Problem(False, 0, None, 1.0, Dropout(place, int(threshold(0.25)), 0.25))
    q, k = (array(np.zeros((b, h, x, 8), dtype)) for x in (n, m))
    v = array(np.broadcast_to(np.eye(m, dtype=dtype), (b, h, m, m)).copy())
    out, logs = _tile_attention.forward(q, k, v, None, None, problem)
    np.testing.assert_array_equal(host(out) != 0, want)
    # The gradient by the values of ones is the sum of each key's weights.
    ones = array(np.ones((b, h, n, m), dtype))
    *_, of_v, _ = _tile_attention.backward(
        ones, out, logs, q, k, v, None, None, problem, of_mask=False
    )
    sums = want.sum(axis=2)[..., None] / (0.75 * m) * np.ones(m)
    np.testing.assert_allclose(host(of_v), sums, rtol=2e-3)
    return shape


DROPPED = list(itertools.product((96, 97, 98, 99), (0, 1, 2, 3)))


@pytest.mark.parametrize("in_memory", [False, True], ids=["numbers", "in memory"])
@pytest.mark.parametrize(("n_keys", "start"), DROPPED)
def test_which_weights_are_dropped(emulated, n_keys, start, in_memory):
    dropped_case(emulated.asarray, n_keys, start, in_memory=in_memory)


def test_random_words_far_along_the_stream(emulated):
    """Places beyond 32 bits, in high words of the stream and of the key."""
    for offset in (2**34 - 8, 2**34 - 7):
        place = np.uint64(offset), np.uint64(2**63 + 5), np.uint64(2**64 - 3)
        q, k = (emulated.asarray(np.zeros((1, 1, x, 8), np.float16)) for x in (2, 32))
        v = emulated.asarray(np.eye(32, dtype=np.float16)[None, None])
        problem = Problem(False, 0, None, 1.0, Dropout(place, 2**31, 0.5))
        out, _ = _tile_attention.forward(q, k, v, None, None, problem)
        words = philox.stream_words(offset, 64, key=place[2], stream=place[1])
        np.testing.assert_array_equal(host(out)[0, 0] != 0, (words < 2**31).reshape(2, 32))


# ------------------------------------------------------------------------ through the namespace


def heads_of(array, rng, *shapes, dtype="bfloat16"):
    return [array(rng.standard_normal(s).astype(getattr(rx, dtype))) for s in shapes]


def with_gradients(arrays, g, seed, **options):
    """Give attention with dropout and its gradients, through the namespace."""
    q, k, v = (rx.Tensor(x, requires_grad=True) for x in arrays)
    generator = rx.random.Generator(seed)
    generator.dropout_mask(seed, 0.5, device="cpu")
    out = rx.scaled_dot_product_attention(q, k, v, dropout_rate=0.3, generator=generator, **options)
    rx.sum(out * g).backward()
    return [host(x) for x in (out.data, q.grad, k.grad, v.grad)], generator.state_dict()


def same_as_blocks_case(array, monkeypatch, seed, n, m, group):
    """Seeds mean the same as where scores are computed in blocks or no table of bits is left."""
    rng = np.random.default_rng(seed)
    b, kv, d = 2, 2, 32
    shapes = (b, kv * group, n, d), (b, kv, m, d), (b, kv, m, d), (b, kv * group, n, d)
    *arrays, g = heads_of(array, rng, *shapes)
    options = {"causal": True, "causal_offset": m - n}
    if seed == 1:
        options["key_lengths"] = array(np.array([m - 1, 20]))
    counts = dnn.status().elsewhere
    before = counts.total()
    got, state = with_gradients(arrays, g, seed, **options)
    assert counts.total() - before == 2
    with monkeypatch.context() as patch:
        patch.setattr(_tile_attention, "_missing", lambda: "absent")
        want, state_of_blocks = with_gradients(arrays, g, seed, **options)
        assert counts.total() - before == 2
    monkeypatch.setattr(_tile_attention, "_MOST_BITS", 0)
    anew, _ = with_gradients(arrays, g, seed, **options)
    assert [x.tobytes() for x in anew] == [x.tobytes() for x in got]
    assert state == state_of_blocks
    for x, y in zip(got, want, strict=True):
        assert np.abs(x - y).max() <= 2e-2 * max(1, np.abs(y).max())


SEEDS = [(0, 20, 36, 1), (1, 17, 33, 2), (2, 40, 40, 3)]


@pytest.mark.parametrize(("seed", "n", "m", "group"), SEEDS)
def test_seeds_mean_the_same(emulated, monkeypatch, seed, n, m, group):
    same_as_blocks_case(emulated.asarray, monkeypatch, seed, n, m, group)
    assert dnn.status().elsewhere == {("cuda-tile", "attention with dropout"): 4}
    assert dnn.status().refused == {"attention with dropout": 6}


def test_what_cudnn_leaves(emulated, monkeypatch, capsys):
    """It is counted by whom it was taken, and why not by whom it was not."""
    rng = np.random.default_rng(22)
    q, k, v = heads_of(emulated.asarray, rng, *[(1, 2, 20, 16)] * 3)
    lengths = emulated.asarray(np.array([7], np.int32))
    mask = emulated.asarray(rng.random((20, 20)) < 0.8)
    attention = rx.scaled_dot_product_attention
    attention(q, k, v, mask, key_lengths=lengths)
    attention(q, k, v, causal=True, causal_offset=-2)
    wide = emulated.asarray(np.zeros((1, 2, 20, 264), rx.bfloat16))
    attention(q, k, wide, dropout_rate=0.5)
    attention(*(x.astype(np.float32) for x in (q, k, v)), dropout_rate=0.5)
    assert dnn.status().elsewhere == {
        ("cuda-tile", "a mask with key_lengths"): 1,
        ("cuda-tile", "a causal offset below zero"): 1,
    }
    assert _tile_attention._provider.refused == {"heads of more than 256": 1}
    dnn.status().library = "cuDNN 9"
    dnn.status().missing = ""
    assert dnn.status().lines()[1:] == [
        "    1 by cuda-tile: a causal offset below zero",
        "    1 by cuda-tile: a mask with key_lengths",
        "    2 by CuPy: attention with dropout",
    ]


def test_gradients_that_are_left_to_blocks(emulated):
    """That of a mask, and those of gradients, with the weights that the kernel dropped."""
    rng = np.random.default_rng(23)
    q, k, v, g = heads_of(emulated.asarray, rng, *[(1, 2, 20, 16)] * 4, dtype="float16")
    bias = emulated.asarray(rng.standard_normal((2, 20, 20)).astype(np.float32))

    def loss(q, k, v, bias):
        generator = rx.random.Generator(3)
        options = {"dropout_rate": 0.5, "generator": generator}
        return rx.sum(rx.scaled_dot_product_attention(q, k, v, bias, **options) * g)

    got = rx.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, bias)
    wide = [host(x) for x in (q, k, v, bias)]
    g = host(g)
    want = rx.grad(loss, argnums=(0, 1, 2, 3))(*wide)
    for x, y in zip(got, want, strict=True):
        assert np.abs(host(x) - y).max() <= 3e-2 * max(1, np.abs(y).max())
    assert _tile_attention._provider.refused == {"the gradient of a mask": 1}


def test_what_is_refused(emulated, monkeypatch):
    def reason(q=None, k=None, mask=None, **options):
        q = np.zeros((1, 1, 20, 16), np.float16) if q is None else q
        q = emulated.asarray(q)
        k = q if k is None else k
        problem = Problem(False, 0, None, 1.0, None)._replace(**options)
        before = _tile_attention._provider.refused.copy()
        args = q, k, k, mask, None, problem
        assert _tile_attention.attempt(_tile_attention.forward, *args) is None
        return list((_tile_attention._provider.refused - before).elements())

    half = np.zeros((1, 1, 20, 16), np.float16)
    assert reason(half.astype(np.float32)) == []  # as cuDNN counts it
    assert reason(half[:0]) == []
    assert reason(scale=float("inf")) == ["a scale that is not finite"]
    assert reason(k=half) == ["k that is not a CuPy array"]
    far = emulated.asarray(half.copy())
    far.device_id = 1
    assert reason(k=far) == ["k that is not on the current device"]
    mask = emulated.asarray(np.zeros((1, 1, 1, 20)))
    assert reason(mask=mask) == ["a mask of float64"]
    almost_one = Dropout((np.uint64(0),) * 3, 0, 1 - 1e-12)
    assert reason(dropout=almost_one) == ["a dropout rate of almost one"]
    traced = Dropout(None, 2**31, 0.5)
    assert reason(dropout=traced) == ["random numbers of a function that is traced"]
    long = emulated.asarray(np.broadcast_to(half[:, :, :1], (1, 1, 20000, 16)).copy())
    assert reason(half[:, :, :1], k=long) == ["few blocks with many keys each"]
    assert reason(window=2**30) == ["a causal offset or window of 2**30 or more"]
    monkeypatch.setattr(_tile_attention, "_MAX_ELEMENTS", 320)
    wider = emulated.asarray(np.zeros((1, 1, 20, 17), np.float16))[..., :16]
    assert reason(k=wider) == ["k that spans 320 elements or more"]
    assert not emulated.launcher.started


def test_a_program_without_its_compiler(emulated, monkeypatch):
    def missing(program, device_id):
        raise FileNotFoundError("'tileiras' compiler not found")

    def broken(program, device_id):
        raise RuntimeError("no such instruction\nand more")

    q = emulated.asarray(np.ones((1, 1, 20, 16), np.float16))
    monkeypatch.setattr(_tile_attention, "load", missing)
    for _ in range(2):  # not looked for again
        rx.scaled_dot_product_attention(q, q, q, dropout_rate=0.5)
    assert _tile_attention._provider.refused == {"cuda-tile without its compiler": 2}
    _tile_attention._load.cache_clear()
    monkeypatch.setattr(_tile_attention, "load", broken)
    with pytest.warns(RuntimeWarning, match=r"attention does not compile \(no such instruction\)"):
        rx.scaled_dot_product_attention(q, q, q, dropout_rate=0.5)


def test_without_the_library(bare_dnn, monkeypatch):
    """All is as without it, but for a line that says so."""
    monkeypatch.setattr(_dnn, "loaded", [None])
    monkeypatch.setattr(tile, "_look", lambda: ("", "cuda-tile is not installed"))
    monkeypatch.setattr(_tile_attention, "_missing", MISSING.__wrapped__)
    monkeypatch.setattr(_device, "devices", lambda: ["cpu", "cuda:0"])
    q = bare_dnn.asarray(np.ones((1, 1, 20, 16), np.float16))
    rx.scaled_dot_product_attention(q, q, q, dropout_rate=0.5)
    assert _dnn.provider.refused == {"attention with dropout": 1}
    assert _tile_attention.status().lines() == [
        "attention that cuDNN leaves: blocks of scores (cuda-tile is not installed; "
        "pip install --upgrade 'cuda-tile[tileiras]')"
    ]


# ---------------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def gpu(monkeypatch):
    """Move arrays to the GPU; results begin as NaN, and nothing may be computed in blocks."""
    found, reason = tile._look()
    if not found:
        pytest.skip(reason)
    cupy = _device.cupy
    provider = tile.Provider("attention that cuDNN leaves", "blocks of scores")
    monkeypatch.setattr(_tile_attention, "_provider", provider)
    monkeypatch.setattr(_tile_attention, "_empty", empty(cupy))
    yield cupy.asarray
    assert not provider.refused


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_random_attention_on_a_gpu(gpu, seed):
    random_case(np.random.default_rng(seed), gpu, [1, 5, 64, 100, 129, 256, 300])


LARGE = [
    ("bfloat16", (2, 4, 2, 1000, 1100, 64), {"causal": True, "offset": 100, "rate": 0.1}),
    ("float16", (1, 2, 2, 600, 1024, 128), {"rate": 0.5, "window": 300}),
    ("bfloat16", (2, 4, 1, 257, 515, 160), {"lengths": np.array([515, 300]), "rate": 0.1}),
    ("bfloat16", (2, 2, 2, 640, 640, 128), {"causal": True, "rate": 0.1, "start": 2}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "shape", "options"), LARGE, ids=lambda x: str(x)[:30])
def test_large_attention_on_a_gpu(gpu, dtype, shape, options):
    first, second = (case(np.random.default_rng(5), gpu, dtype, shape, **options) for _ in "ab")
    for x, y in zip(first, second, strict=True):
        assert host(x).tobytes() == host(y).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize(("n_keys", "start"), DROPPED)
def test_which_weights_are_dropped_on_a_gpu(gpu, n_keys, start):
    dropped_case(gpu, n_keys, start, n_queries=150, in_memory=bool(start & 1))


@pytest.mark.gpu
@pytest.mark.parametrize(("seed", "n", "m", "group"), SEEDS)
def test_seeds_mean_the_same_on_a_gpu(gpu, monkeypatch, seed, n, m, group):
    provider = tile.Provider("attention and convolutions", "CuPy")
    monkeypatch.setattr(_dnn, "provider", provider)
    same_as_blocks_case(gpu, monkeypatch, seed, n, m, group)


@pytest.mark.gpu
def test_captured_dropout_on_a_gpu(gpu, monkeypatch):
    """Offsets advance on the GPU; another draw leaves them anywhere within a block of words."""
    monkeypatch.setattr(_tile_attention, "_empty", _device.cupy.ndarray)
    q, k, v, g = heads_of(gpu, np.random.default_rng(24), *[(2, 2, 72, 32)] * 4)
    generators = [rx.random.Generator(9) for _ in "ab"]

    def step(generator, q, k, v):
        noise = rx.dropout(q[0, 0, :1, :3], 0.5, generator=generator)
        q, k, v = (rx.Tensor(x, requires_grad=True) for x in (q, k, v))
        out = rx.scaled_dot_product_attention(
            q, k, v, causal=True, dropout_rate=0.3, generator=generator
        )
        rx.sum(out * g).backward()
        return out.data, q.grad, k.grad, v.grad, noise

    with rx.device("cuda:0"):
        captured = rx.capture(lambda q, k, v: step(generators[0], q, k, v))
        for _ in range(6):
            got, want = captured(q, k, v), step(generators[1], q, k, v)
            for x, y in zip(got, want, strict=True):
                assert host(x).tobytes() == host(y).tobytes()
    assert generators[0].state_dict() == generators[1].state_dict()
