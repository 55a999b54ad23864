"""Attention and convolutions through cuDNN: first with a stand-in on the host, then on a GPU.

Against float64, with poisoned memory.
"""

import concurrent.futures
import itertools
import math

import ml_dtypes
import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, nn
from rtxarr.libs import _dnn, blas, dnn
from rtxarr.libs._layout import Unsupported
from rtxarr.ops import _conv
from rtxarr.ops._conv import _unfolded, _unfolded_input, _unfolded_weight
from rtxarr.ops._windows import make_windows

# Relative to the largest element of a result.
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def close(got, want, dtype, allowed=1.0):
    xp = _device.namespace(want)
    got = got.astype("float64")
    assert got.shape == want.shape
    assert bool(xp.all(xp.isfinite(got) == xp.isfinite(want)))
    got, want = (xp.where(xp.isfinite(x), x, 0) for x in (got, want))
    error, scale = (float(xp.max(xp.abs(x))) for x in (got - want, want))
    assert error <= allowed * TOLERANCE[dtype] * scale + 1e-5


def n_cases(cupy, n):
    """Fewer with the stand-in, which is slow."""
    return n if hasattr(cupy, "RawKernel") else n // 3


def host(a):
    return a.get() if hasattr(a, "get") else np.asarray(a)


def bits(arrays):
    return [host(a).tobytes() for a in arrays]


# ---------------------------------------------------------------------------------- attention


def random_heads(cupy, rng, shape, dtype):
    """Store (batch, heads, seq_len, dim) in one of several ways."""
    b, h, s, d = shape
    values = cupy.asarray(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    way = rng.choice(["queries first", "heads first", "packed", "gaps", "one element off"])
    if way == "heads first":
        return values
    if way == "packed":  # as a third of one projection
        room = cupy.full((b, s, 3, h, d), np.nan, dtype)
        room[:, :, 1] = values.transpose(0, 2, 1, 3)
        return room[:, :, 1].transpose(0, 2, 1, 3)
    if way == "gaps":
        room = cupy.full((b, h, s, d + 3), np.nan, dtype)
        room[..., :d] = values
        return room[..., :d]
    if way == "one element off":
        room = cupy.empty(values.size + 1, dtype)[1:].reshape(shape)
        room[...] = values
        return room
    return values.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)


@np.errstate(divide="ignore")
def reference(cupy, q, k, v, grad, hidden, added, scale):
    """Give attention, the logarithms of its sums, and the gradients of q, k, v and scores."""
    q, k, v, grad = (x.astype("float64") for x in (q, k, v, grad))
    n_kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (cupy.repeat(x, group, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) * scale
    if added is not None:
        scores = scores + added.astype("float64")
    scores = cupy.where(hidden, -np.inf, scores)
    top = scores.max(axis=-1, keepdims=True)
    top = cupy.where(cupy.isfinite(top), top, 0)
    probs = cupy.exp(scores - top)
    total = probs.sum(axis=-1, keepdims=True)
    logs = cupy.where(total > 0, cupy.log(total) + top, -np.inf)[..., 0]
    probs = probs / cupy.where(total > 0, total, 1)
    out = probs @ v
    of_scores = probs * (grad @ v.swapaxes(-1, -2) - (grad * out).sum(axis=-1, keepdims=True))

    def shared(x):
        return x.reshape(x.shape[0], n_kv_heads, group, *x.shape[2:]).sum(axis=2)

    of_k = shared(of_scores.swapaxes(-1, -2) @ q) * scale
    of_v = shared(probs.swapaxes(-1, -2) @ grad)
    return out, logs, of_scores @ k * scale, of_k, of_v, of_scores


def attention_case(cupy, rng, dtype, option):
    b, kv, g = (int(rng.choice(n)) for n in ([1, 2, 3], [1, 2, 4], [1, 1, 2, 3]))
    n, m = (int(rng.choice([2, 7, 64, 100, 128, 200, 257])) for _ in range(2))
    d, e = (int(x) for x in rng.choice([8, 40, 64, 72, 128, 256], 2))
    if rng.random() < 0.6:
        m, e = n, d
    causal, offset, window, mask, lengths = False, 0, None, None, None
    if "causal" in option:
        causal, offset = True, int(rng.choice([0, 0, 3, max(0, m - n), m]))
    if "window" in option:
        n, m = min(n, m), max(n, m)
        offset = m - n if causal else 0
        window = int(rng.integers(1, n + 1))
    if "lengths" in option:
        lengths = rng.integers(1, m + 1, b)
        lengths[rng.random(b) < 0.2] = 0
    i, j = np.arange(n)[:, None], np.arange(m)[None, :]
    hidden = np.zeros((b, 1, n, m), bool)
    if causal:
        hidden |= j > i + offset
    if window is not None:
        hidden |= j <= i + offset - window
    if lengths is not None:
        hidden |= j >= lengths[:, None, None, None]
        lengths = cupy.asarray(lengths)
    hidden = cupy.asarray(hidden)
    added = None
    lead = [(b, kv * g), (1, kv * g), (b, 1), (1, 1)][rng.integers(4)]
    if "bool" in option:
        shape = (*lead, *((n, m), (1, m), (n, 1))[rng.integers(3)])
        mask = cupy.asarray(rng.random(shape) < 0.7)
        if shape[2] > 1:
            mask[:, :, int(rng.integers(n))] = False
        hidden = hidden | ~mask
    elif "added" in option:
        values = rng.standard_normal((*lead, n, m)).astype(np.float32)
        values[rng.random(values.shape) < 0.2] = -np.inf
        mask = added = cupy.asarray(values).astype("float32" if "wide" in option else dtype)
        hidden = hidden | (added == -np.inf)
    q, k, v, grad = (
        random_heads(cupy, rng, shape, dtype)
        for shape in ((b, kv * g, n, d), (b, kv, m, d), (b, kv, m, e), (b, kv * g, n, e))
    )
    options = {"causal": causal, "offset": offset, "window": window}
    options["scale"] = float(rng.choice([d**-0.5, 0.3]))
    return (q, k, v, mask, lengths), grad, options, hidden, added


OPTIONS = ["plain", "causal", "window", "causal window", "lengths", "causal lengths", "bool",
           "bool window", "causal bool", "added", "causal added", "added wide"]  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attention(served, dtype, option, seed):
    cupy = served
    rng = np.random.default_rng(seed + 100 * OPTIONS.index(option))
    name, dtype = dtype, np.dtype(getattr(rx, dtype))
    for _ in range(n_cases(cupy, 3)):
        arrays, grad, options, hidden, added = attention_case(cupy, rng, dtype, option)
        q, k, v, mask, _ = arrays
        want = reference(cupy, q, k, v, grad, hidden, added, options["scale"])
        found = dnn.try_attention(*arrays, **options)
        assert found is not None, dnn.status().refused
        out, sums = found
        close(out, want[0], name)
        close(sums, want[1], "float16")
        of_mask = added is not None and added.dtype == dtype
        grads = dnn.try_attention_grad(grad, out, sums, *arrays, **options, of_mask=of_mask)
        assert grads is not None, dnn.status().refused
        for got, x, expected in zip(grads, (q, k, v), want[2:], strict=False):
            assert got.shape == x.shape and got.dtype == dtype
            close(got, expected, name, 2.5)  # the output is rounded before
        if of_mask:
            axes = tuple(i for i, n in enumerate(mask.shape) if n == 1)
            expected = want[5].sum(axis=axes, keepdims=True)
            close(grads[3], cupy.where(mask == -np.inf, 0, expected), name, 4)
        again = dnn.try_attention_grad(grad, out, sums, *arrays, **options, of_mask=of_mask)
        parts = [x for x in grads if x is not None]
        assert bits(parts) == bits(x for x in again if x is not None)


def test_attention_to_arrays_that_begin_anywhere(served):
    """What is known of arrays that lie alike does not tell where they begin."""
    cupy = served
    rng = np.random.default_rng(6)
    shape = (2, 4, 33, 16)
    options = {"causal": True, "offset": 0, "window": None, "scale": 0.25}
    values = [rng.standard_normal(shape).astype(np.float16) for _ in "qkv"]
    found = []
    for start in (0, 1, 0):
        arrays = []
        for x in values:
            room = cupy.zeros(x.size + 8, np.float16)
            first = start + (0 if hasattr(cupy, "RawKernel") else -room.data.ptr % 16 // 2)
            arrays.append(room[first : first + x.size].reshape(shape))
            arrays[-1][...] = cupy.asarray(x)
        found.append(bits(dnn.try_attention(*arrays, None, None, **options)))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("share", [300_000, 70_000])
def test_attention_gradients_in_parts(served, monkeypatch, share):
    """Samples, then heads, whose scores do not fit into memory together."""
    cupy = served
    rng = np.random.default_rng(1)
    shapes = [(3, 8, 100, 64), (3, 4, 130, 64), (3, 4, 130, 64), (3, 8, 100, 64)]
    q, k, v, grad = (random_heads(cupy, rng, s, rx.bfloat16) for s in shapes)
    mask = cupy.asarray(rng.random((3, 8, 1, 130)) < 0.7)
    arrays = (q, k, v, mask, None)
    options = {"causal": True, "offset": 30, "window": None, "scale": 0.125}
    out, sums = dnn.try_attention(*arrays, **options)
    want = dnn.try_attention_grad(grad, out, sums, *arrays, **options, of_mask=False)
    library = _dnn.library()
    monkeypatch.setattr(library, "memory", lambda i: 16 * 2 * share)
    runs = []
    run = library.run
    monkeypatch.setattr(library, "run", lambda *args: runs.append(args) or run(*args))
    got = dnn.try_attention_grad(grad, out, sums, *arrays, **options, of_mask=False)
    assert len(runs) == {300_000: 3, 70_000: 12}[share]
    assert bits(got[:3]) == bits(want[:3])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attention_of_tensors(served, dtype):
    """Values, gradients and their gradients through the namespace, against float64 on the CPU."""
    cupy = served
    rng = np.random.default_rng(2)
    shapes = [(2, 50, 4, 32), (2, 60, 2, 32), (2, 60, 2, 32), (2, 4, 50, 32)]
    arrays = [rng.standard_normal(s).astype(getattr(rx, dtype)) for s in shapes]
    lengths = np.array([60, 41])

    def loss(q, k, v, g, n):
        heads = (rx.moveaxis(x, 1, 2) for x in (q, k, v))
        options = {"causal": True, "causal_offset": 10, "key_lengths": n}
        return rx.sum(rx.scaled_dot_product_attention(*heads, **options) * g)

    def curved(*args):
        grads = rx.grad(loss, argnums=(0, 1, 2))(*args)
        return sum(rx.sum(rx.astype(x, rx.float32) ** 2) for x in grads)

    on_host = [a.astype(np.float64) for a in arrays]
    on_device = [cupy.asarray(a) for a in arrays]
    for function in (loss, curved):
        want = rx.grad(function, argnums=(0, 1, 2))(*on_host, lengths)
        got = rx.grad(function, argnums=(0, 1, 2))(*on_device, cupy.asarray(lengths))
        for a, b in zip(got, want, strict=True):
            allowed = 1 if function is loss else 3
            close(host(a.data if hasattr(a, "grad") else a), b, dtype, allowed)


def test_attention_left_to_the_namespace(cupy):
    """What cuDNN does not take gives the same through CuPy, and is counted."""
    rng = np.random.default_rng(3)
    q, k, v = (cupy.asarray(rng.standard_normal((2, 4, 9, 8)).astype(np.float32)) for _ in "qkv")
    half = [x.astype(rx.float16) for x in (q, k, v)]
    cases = {
        "attention in float32": ((q, k, v), {}),
        "attention with dropout": (half, {"dropout_rate": 0.5}),
        "a causal offset below zero": (half, {"causal": True, "causal_offset": -2}),
        "heads whose dimension is not a multiple of 8, at most 256": (
            [x[..., :5] for x in half],
            {},
        ),
    }
    for reason, (arrays, options) in cases.items():
        before = dnn.status().refused[reason]
        out = rx.scaled_dot_product_attention(*arrays, **options)
        assert dnn.status().refused[reason] == before + 1
        if "dropout_rate" not in options:
            wide = [host(x).astype(np.float64) for x in arrays]
            close(host(out), rx.scaled_dot_product_attention(*wide, **options), "float16")


def paged_case(cupy, rng, dtype):
    """Give arguments in pages, and the same keys and values side by side in float64."""
    b, kv, g, n, size, most = (
        int(rng.choice(x)) for x in ([1, 3], [1, 2], [1, 4], [1, 1, 4, 33], [1, 16, 64], [3, 9])
    )
    d = int(rng.choice([40, 64, 128]))
    lengths = rng.integers(1, most * size + 1, b)
    lengths[rng.random(b) < 0.2] = 0
    n_pages = b * most + 2
    table = rng.permutation(n_pages)[: b * most].reshape(b, most).astype(np.int32)
    pages = [
        rng.standard_normal((n_pages, kv, size, d)).astype(np.float32).astype(dtype) for _ in "kv"
    ]
    sides = [
        x[table].swapaxes(1, 2).reshape(b, kv, most * size, d).astype(np.float64) for x in pages
    ]
    q = random_heads(cupy, rng, (b, kv * g, n, d), dtype)
    arrays = (q, *map(cupy.asarray, pages), cupy.asarray(table), cupy.asarray(lengths))
    return arrays, sides, lengths


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_paged_attention(served, dtype, causal):
    cupy = served
    rng = np.random.default_rng(7 + causal)
    for _ in range(n_cases(cupy, 6)):
        arrays, (k, v), lengths = paged_case(cupy, rng, np.dtype(getattr(rx, dtype)))
        q = host(arrays[0]).astype(np.float64)
        n, m = q.shape[2], k.shape[2]
        hidden = np.arange(m) >= lengths[:, None, None, None]
        if causal:
            last = np.arange(n)[:, None] - n + lengths[:, None, None, None]
            hidden = hidden | (np.arange(m) > last)
        want = reference(np, q, k, v, q, hidden, None, 0.2)[0]
        out = dnn.paged_attention(*arrays, causal=causal, scale=0.2)
        assert out.dtype == arrays[0].dtype
        close(host(out), want, dtype)
        plain = dnn.paged_attention(*map(host, arrays), causal=causal, scale=0.2)
        close(plain, want, dtype)


def fp8_case(rng, shape, causal, offset):
    """Give codes of q, k and v, their scales, that of the result, and what that is in float64."""
    b, h, kv, n, m, d, e = shape
    scales = [np.array([x], np.float32) for x in rng.uniform(0.02, 0.05, 3)]
    codes = [
        (rng.standard_normal(s) / scale).astype(ml_dtypes.float8_e4m3fn)
        for s, scale in zip(((b, h, n, d), (b, kv, m, d), (b, kv, m, e)), scales, strict=True)
    ]
    wide = [x.astype(np.float64) * scale for x, scale in zip(codes, scales, strict=True)]
    hidden = np.arange(m) > np.arange(n)[:, None] + (offset if causal else m)
    want = reference(np, *wide, np.zeros((b, h, n, e)), hidden, None, d**-0.5)[0]
    out_scale = np.array([abs(want).max(initial=1) / 400], np.float32)
    return [x.view(np.uint8) for x in codes], scales, out_scale, want


def decoded(codes, scale):
    assert codes.dtype == np.uint8
    return host(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 2, 100, 130, 64), (1, 2, 2, 257, 257, 128)], ids=str)
def test_attention_in_8_bits(served, shape, causal):
    cupy, offset = served, shape[4] - shape[3]
    rng = np.random.default_rng(0)
    codes, scales, out_scale, want = fp8_case(rng, (*shape, shape[5]), causal, offset)
    arrays = [cupy.asarray(x.swapaxes(1, 2).copy()).swapaxes(1, 2) for x in codes]
    options = {"scales": tuple(map(cupy.asarray, scales)), "causal": causal, "offset": offset}
    found = dnn.try_fp8_attention(*arrays, out_scale=cupy.asarray(out_scale), **options)
    again = nn.fp8_attention(*arrays, out_scale=cupy.asarray(out_scale), **options)
    assert bits([found]) == bits([again])
    assert found.shape == want.shape
    got = decoded(found, out_scale)
    assert np.abs(got - want).max() < 0.08 * abs(want).max()
    assert np.abs(got - want).mean() < 0.04 * abs(want).mean()


def within_a_rounding(codes, out_scale, want):
    """Compare with float64, rounded to three bits of fraction."""
    got, most = decoded(codes, out_scale), 448 * float(out_scale[0])
    assert got.shape == want.shape
    want = np.clip(want, -most, most)
    assert np.all(np.abs(got - want) <= 0.0626 * np.abs(want) + float(out_scale[0]) / 1000)


@pytest.mark.parametrize("seed", range(8))
def test_attention_in_8_bits_on_the_cpu(seed):
    rng = np.random.default_rng(seed)
    kv, group = rng.integers(1, 4, 2)
    b, n, m, d, e = (int(rng.choice(x)) for x in ([0, 1, 2], *2 * [[1, 5, 33]], *2 * [[3, 16, 20]]))
    causal, offset = bool(rng.random() < 0.6), int(rng.integers(-2, 4))
    codes, scales, out_scale, want = fp8_case(rng, (b, kv * group, kv, n, m, d, e), causal, offset)
    for factor in (1, 0.1):  # then what is too large becomes the largest
        by = out_scale * np.float32(factor)
        out = nn.fp8_attention(*codes, scales=scales, out_scale=by, causal=causal, offset=offset)
        within_a_rounding(out, by, want)


FP8_LEFT = {
    "heads in 8 bits whose dimension is not a multiple of 16": ((2, 4, 2, 9, 12, 20, 32), 3),
    "a causal offset below zero": ((1, 4, 4, 9, 12, 32, 16), -3),
    "": ((0, 4, 4, 9, 12, 32, 16), 0),
}


@pytest.mark.parametrize("reason", FP8_LEFT)
def test_attention_in_8_bits_that_cudnn_does_not_take(cupy, reason):
    shape, offset = FP8_LEFT[reason]
    rng = np.random.default_rng(1)
    codes, scales, out_scale, want = fp8_case(rng, shape, True, offset)
    arrays = [cupy.asarray(x) for x in (*codes, *scales, out_scale)]
    before = dnn.status().refused[reason]
    options = {"scales": arrays[3:6], "out_scale": arrays[6], "causal": True, "offset": offset}
    out = nn.fp8_attention(*arrays[:3], **options)
    assert dnn.status().refused[reason] == before + bool(reason)
    within_a_rounding(out, out_scale, want)


def test_attention_in_8_bits_without_the_library(bare_dnn):
    codes, scales, out_scale, want = fp8_case(
        np.random.default_rng(2), (2, 4, 2, 9, 12, 32, 16), False, 0
    )
    arrays = [bare_dnn.asarray(x) for x in (*codes, *scales, out_scale)]
    with pytest.warns(RuntimeWarning, match="nvidia-cudnn-frontend is not installed"):
        out = nn.fp8_attention(*arrays[:3], scales=arrays[3:6], out_scale=arrays[6])
    within_a_rounding(out, out_scale, want)


def test_bad_arguments_of_attention_in_8_bits():
    codes, one = np.ones((2, 4, 3, 16), np.uint8), np.ones(1, np.float32)
    scales = (one, one, one)
    with pytest.raises(TypeError, match="q, k and v must be uint8, got float32, uint8 and uint8"):
        nn.fp8_attention(codes.astype("f4"), codes, codes, scales=scales, out_scale=one)
    for k, v in ((codes[:, :3], codes[:, :3]), (codes, codes[:, :, :2]), (codes[0], codes[0])):
        with pytest.raises(ValueError, match="q, k and v must have shapes"):
            nn.fp8_attention(codes, k, v, scales=scales, out_scale=one)
    with pytest.raises(TypeError, match="q, k and v must be uint8, got list, uint8 and uint8"):
        nn.fp8_attention(codes.tolist(), codes, codes, scales=scales, out_scale=one)
    with pytest.raises(TypeError, match="scales must be three arrays, got NoneType"):
        nn.fp8_attention(codes, codes, codes, scales=None, out_scale=one)
    with pytest.raises(TypeError, match="offset must be an int, got float"):
        nn.fp8_attention(codes, codes, codes, scales=scales, out_scale=one, offset=1.5)
    with pytest.raises(ValueError, match="scales must be three arrays, got 2"):
        nn.fp8_attention(codes, codes, codes, scales=scales[:2], out_scale=one)
    with pytest.raises(ValueError, match=r"scales\[1\] must be float32 of one element, got 0.5"):
        nn.fp8_attention(codes, codes, codes, scales=(one, 0.5, one), out_scale=one)
    with pytest.raises(ValueError, match=r"out_scale must be .* got float32 of shape \(2,\)"):
        nn.fp8_attention(codes, codes, codes, scales=scales, out_scale=np.ones(2, "f4"))


def test_paged_attention_of_what_cudnn_does_not_take(cupy):
    rng = np.random.default_rng(0)
    arrays, (k, v), lengths = paged_case(cupy, rng, np.dtype("float32"))
    q = host(arrays[0]).astype(np.float64)
    hidden = np.arange(k.shape[2]) >= lengths[:, None, None, None]
    want = reference(np, q, k, v, q, hidden, None, q.shape[3] ** -0.5)[0]
    before = sum(dnn.status().refused.values())
    close(host(dnn.paged_attention(*arrays)), want, "float32")
    assert sum(dnn.status().refused.values()) == before + 1


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (1, np.ones((3, 2, 16, 4)), "k_pages and v_pages must have shape"),
        (1, np.ones((3, 3, 16, 8)), "a divisor of 4 heads"),
        (
            3,
            np.ones((2, 2), np.int64),
            "page_table must be int32 of shape .2, max_pages., got int64",
        ),
        (4, np.ones(3, int), r"key_lengths must have shape \(2,\), got \(3,\)"),
    ],
)
def test_bad_pages_are_refused(place, value, message):
    pages = np.ones((3, 2, 16, 8))
    arrays = [np.ones((2, 4, 1, 8)), pages, pages, np.ones((2, 2), np.int32), np.ones(2, int)]
    arrays[place] = value
    if place == 1:
        arrays[2] = value
    with pytest.raises(ValueError, match=message):
        dnn.paged_attention(*arrays)


# ------------------------------------------------------------------------------- convolutions


def random_image(cupy, rng, shape, dtype, last):
    values = cupy.asarray(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    axes = (0, *range(2, len(shape)), 1)
    if last == "gaps":
        room = cupy.full((*shape[:-1], shape[-1] + 1), np.nan, dtype)
        room[..., :-1] = values
        return room[..., :-1]
    return values.transpose(axes).copy().transpose(np.argsort(axes).tolist()) if last else values


def convolution_case(rng, n_axes):
    groups = int(rng.choice([1, 1, 1, 2, 8]))
    n = int(rng.choice([2, 3]))
    c, k = (groups * int(x) for x in rng.choice([1, 3, 8, 16], 2))
    if groups == 1 and rng.random() < 0.3:
        c, k = (int(x) for x in rng.choice([5, 32, 64], 2))
    spatial = tuple(int(x) for x in rng.integers(5, 14, n_axes))
    kernel = tuple(int(x) for x in rng.integers(1, 5, n_axes))
    stride, dilation = (tuple(int(x) for x in rng.choice([1, 1, 2, 3], n_axes)) for _ in "ab")
    padding = [int(x) for x in rng.integers(0, 4, n_axes)] if rng.random() < 0.7 else "same"
    windows = make_windows(kernel, spatial, stride, padding, dilation)
    return n, c, k, groups, spatial, kernel, windows


@pytest.mark.parametrize("last", [False, True, "gaps"])
@pytest.mark.parametrize("n_axes", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_convolutions(served, dtype, n_axes, last):
    cupy = served
    rng = np.random.default_rng(n_axes + 10 * (last is True))
    name, dtype = dtype, np.dtype(getattr(rx, dtype))
    left = n_cases(cupy, 6)
    while left:
        n, c, k, groups, spatial, kernel, windows = convolution_case(rng, n_axes)
        if min(windows.counts(spatial)) < 1:
            continue
        left -= 1
        shapes = ((n, c, *spatial), (k, c // groups, *kernel), (n, k, *windows.counts(spatial)))
        x, weight, y = (random_image(cupy, rng, s, dtype, last) for s in shapes)
        if rng.random() < 0.3:
            weight = cupy.ascontiguousarray(weight)
        bias = cupy.asarray(rng.standard_normal(k).astype(np.float32)).astype(dtype)
        bias = bias if rng.random() < 0.7 else None
        options = {"windows": windows, "groups": groups}
        wide = [a if a is None else a.astype("float64") for a in (x, weight, y, bias)]
        allowed = 1 if name != "float32" else math.sqrt(c // groups * math.prod(kernel)) / 4 + 1

        def check(got, want, allowed=allowed):
            assert got is not None, dnn.status().refused
            assert got.dtype == dtype
            close(got, want, name, allowed)

        out = dnn.try_convolution(x, weight, bias, **options)
        check(out, _unfolded(*wide[:2], wide[3], **options))
        if last is True and 1 not in out.shape:
            assert out.transpose(0, *range(2, out.ndim), 1).flags.c_contiguous
        out = dnn.try_convolution_input(y, weight, spatial=spatial, **options)
        check(out, _unfolded_input(wide[2], wide[1], None, spatial=spatial, **options))
        out = dnn.try_convolution_weight(x, y, **options, channels_last=False)
        assert out.flags.c_contiguous
        check(out, _unfolded_weight(wide[0], wide[2], **options), 2 * allowed)
        again = dnn.try_convolution_weight(x, y, **options, channels_last=False)
        assert bits([out]) == bits([again])


def fused_convolutions(cupy, dtype, activation, allowed=1.0, orders=(True, False)):
    """Convolve with all that may be added, channels last or not, and compare with float64."""
    rng = np.random.default_rng(0)
    name, dtype = dtype, np.dtype(getattr(rx, dtype))
    windows = make_windows((3, 3), (9, 11), 1, 1, 1)
    for last in orders:
        x, weight, residual = (
            random_image(cupy, rng, s, dtype, last)
            for s in ((2, 16, 9, 11), (24, 16, 3, 3), (2, 24, 9, 11))
        )
        bias = cupy.asarray(rng.standard_normal(24).astype(np.float32)).astype(dtype)
        for b, r in itertools.product((None, bias), (None, residual)):
            out = dnn.try_convolution(
                x, weight, b, windows=windows, groups=1, residual=r, activation=activation
            )
            assert out.dtype == dtype
            wide = [a if a is None else a.astype("float64") for a in (x, weight, b)]
            want = _unfolded(*wide, windows=windows, groups=1)
            want = want if r is None else want + r.astype("float64")
            if activation == "relu":
                want = cupy.maximum(want, 0)
            elif activation == "silu":
                want = want / (1 + cupy.exp(-want))
            close(out, want, name, 5 if name == "float32" else allowed)


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_fused_convolutions(served, dtype, activation):
    fused_convolutions(served, dtype, activation, orders=(True,))


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_convolutions_whose_channels_come_first(cupy, dtype, activation):
    """There cuDNN has plans for a bias, not for all else."""
    fused_convolutions(cupy, dtype, activation, 2, orders=(False,))


@pytest.fixture
def unfused(cupy, monkeypatch):
    """Leave no plan for a convolution and what is added to it."""
    library = _dnn.library()
    run = library.run

    def run_alone(problem, pointers):
        if any(x is not None for x in (problem.bias, problem.residual, problem.activation)):
            raise Unsupported("no plan for it")
        run(problem, pointers)

    monkeypatch.setattr(library, "run", run_alone)
    return cupy


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_convolutions_that_are_not_fused(unfused, dtype, activation):
    before = dnn.status().refused.copy()
    fused_convolutions(unfused, dtype, activation, 2)  # rounded twice
    refused = dnn.status().refused - before
    assert sum(refused.values()) == (6 if activation is None else 8)
    added = "bias and residual and activation" if activation else "bias and residual"
    assert refused[f"{added} after a convolution in {dtype}: no plan for it"] == 2


def test_convolutions_with_a_bias_are_not_unfolded(unfused, monkeypatch):
    x, weight, bias = (unfused.ones(s, np.float32) for s in ((2, 4, 6, 6), (8, 4, 3, 3), (8,)))
    monkeypatch.setattr(_conv, "_unfolded", None)
    out = rx.conv2d(x, weight, bias, padding=1)
    assert float(out[1, 3, 2, 2]) == 4 * 9 + 1 and float(out[0, 0, 0, 0]) == 4 * 4 + 1


def test_memory_order_of_gradients(fake_dnn):
    """Channels stay last in the results if they are in the inputs."""
    cupy = fake_dnn.cupy
    rng = np.random.default_rng(0)
    for last, weight_last in itertools.product((False, True), repeat=2):
        x = random_image(cupy, rng, (2, 4, 6, 5), np.dtype("float32"), last)
        weight = random_image(cupy, rng, (8, 4, 3, 3), np.dtype("float32"), weight_last)
        x, weight = (rx.Tensor(a, requires_grad=True) for a in (x, weight))
        out = rx.conv2d(x, weight, padding=1)
        rx.sum(out * out).backward()
        for a, is_last in ((out.data, last), (x.grad, last), (weight.grad, weight_last)):
            a = a.transpose(0, 2, 3, 1) if is_last else a
            assert a.flags.c_contiguous
    assert dnn.status().refused == {}


@pytest.mark.gpu
def test_float32_is_strict_unless_tf32_is_allowed(gpu):
    cupy = gpu
    rng = np.random.default_rng(0)
    x, weight = (
        random_image(cupy, rng, s, np.float32, True) for s in ((4, 64, 32, 32), (64, 64, 3, 3))
    )
    options = {"windows": make_windows((3, 3), (32, 32), 1, 1, 1), "groups": 1}
    want = _unfolded(x.astype("float64"), weight.astype("float64"), None, **options)

    def error():
        return float(cupy.abs(dnn.try_convolution(x, weight, **options) - want).max())

    strict = error()
    try:
        blas.allow_tf32(True)
        rounded = error()
    finally:
        blas.allow_tf32(False)
    assert strict < 2e-4 < rounded < 0.5
    assert error() == strict


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_of_tensors(served, dtype, transposed):
    """Values, gradients and their gradients through the namespace, against float64 on the CPU."""
    cupy = served
    rng = np.random.default_rng(4)
    arrays = [
        rng.standard_normal(s).astype(getattr(rx, dtype))
        for s in ((2, 8, 9, 8), (8, 8, 3, 3), (8,))
    ]
    function = rx.conv_transpose2d if transposed else rx.conv2d

    def loss(x, weight, bias):
        return rx.sum(rx.astype(function(x, weight, bias, stride=2, padding=1), rx.float32) ** 2)

    def curved(*args):
        grads = rx.grad(loss, argnums=(0, 1, 2))(*args)
        return sum(rx.sum(rx.astype(x, rx.float32) ** 2) for x in grads)

    wide = [a.astype(np.float64) for a in arrays]
    given = [cupy.asarray(a) for a in arrays]
    for f, allowed in ((loss, 4), (curved, 8)):
        want = rx.grad(f, argnums=(0, 1, 2))(*wide)
        got = rx.grad(f, argnums=(0, 1, 2))(*given)
        for a, b in zip(got, want, strict=True):
            close(host(a.data if hasattr(a, "grad") else a), b, dtype, allowed)


# ----------------------------------------------------------------------- capture and disk


@pytest.mark.gpu
def test_capture_and_replay(gpu):
    cupy = gpu
    rng = np.random.default_rng(0)
    heads = (2, 4, 100, 64)
    q, k, v, grad = (random_heads(cupy, rng, heads, rx.bfloat16) for _ in range(4))
    windows = make_windows((3, 3), (12, 12), 1, 1, 1)
    x, weight = (
        random_image(cupy, rng, s, rx.bfloat16, True) for s in ((2, 16, 12, 12), (24, 16, 3, 3))
    )
    conv = {"windows": windows, "groups": 1}
    options = {"causal": True, "offset": 0, "window": None, "scale": 0.125}
    results = []

    def step():
        out, sums = dnn.try_attention(q, k, v, None, None, **options)
        grads = dnn.try_attention_grad(
            grad, out, sums, q, k, v, None, None, **options, of_mask=False
        )
        y = dnn.try_convolution(x, weight, **conv)
        of_x = dnn.try_convolution_input(y, weight, **conv, spatial=(12, 12))
        of_weight = dnn.try_convolution_weight(x, y, **conv)
        results[:] = [out, sums, *grads[:3], y, of_x, of_weight]

    step()
    pool = cupy.cuda.MemoryPool()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        step()
        graph = stream.end_capture()
    captured = list(results)
    for seed in range(3):
        new = np.random.default_rng(seed)
        for a in (q, x):
            a[...] = cupy.asarray(new.standard_normal(a.shape).astype(np.float32)).astype(a.dtype)
        step()
        want = bits(results)
        for a in captured:
            a[...] = np.nan
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert bits(captured) == want


@pytest.mark.gpu
def test_plans_first_met_while_capturing(gpu):
    cupy = gpu
    windows = make_windows((3, 3), (10, 14), 1, 1, 1)
    x, weight = (cupy.ones(s, rx.float16) for s in ((2, 8, 10, 14), (8, 8, 3, 3)))
    pool = cupy.cuda.MemoryPool()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        out = dnn.try_convolution(x, weight, windows=windows, groups=1)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert float(out[0, 0, 4, 4]) == 72


def test_plans_are_kept_on_disk(cupy, tmp_path, monkeypatch):
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path))
    rng = np.random.default_rng(0)
    x, weight = (
        random_image(cupy, rng, s, rx.bfloat16, True) for s in ((2, 16, 12, 12), (24, 16, 3, 3))
    )
    windows = make_windows((3, 3), (12, 12), 1, 1, 1)
    library = _dnn.library()
    plans = []
    candidates = library._candidates
    monkeypatch.setattr(library, "_candidates", lambda *a: plans.append(a) or candidates(*a))
    results = []
    for _ in range(2):
        monkeypatch.setattr(library, "_plans", {})
        results.append(dnn.try_convolution(x, weight, windows=windows, groups=1))
    assert len(plans) == 1
    assert bits(results[:1]) == bits(results[1:])
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-7])
    monkeypatch.setattr(library, "_plans", {})
    dnn.try_convolution(x, weight, windows=windows, groups=1)
    assert len(plans) == 2


@pytest.mark.gpu
def test_threads_and_streams(gpu):
    """Each thread has a handle of its own, and follows its stream."""
    cupy = gpu
    rng = np.random.default_rng(0)
    windows = make_windows((3, 3), (32, 32), 1, 1, 1)
    weight = random_image(cupy, rng, (32, 32, 3, 3), rx.bfloat16, True)
    images = [random_image(cupy, rng, (4, 32, 32, 32), rx.bfloat16, True) for _ in range(8)]
    want = [bits([dnn.try_convolution(x, weight, windows=windows, groups=1)]) for x in images]
    cupy.cuda.Device().synchronize()

    def work(i):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(20):
                out = dnn.try_convolution(images[i], weight, windows=windows, groups=1)
            stream.synchronize()
            return bits([out])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(8))) == want
