"""Attention against plain loops and PyTorch."""

import math
import tracemalloc

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.ops import _windows
from rtxarr.random import Generator
from rtxarr.testing import assert_close

rng = np.random.default_rng(10)
attention = rx.scaled_dot_product_attention


def make(*lead, n_heads=4, n_kv_heads=2, n_queries=5, n_keys=7, head_dim=3, value_dim=2):
    q = rng.standard_normal((*lead, n_heads, n_queries, head_dim))
    k = rng.standard_normal((*lead, n_kv_heads, n_keys, head_dim))
    v = rng.standard_normal((*lead, n_kv_heads, n_keys, value_dim))
    return q, k, v


def plain(q, k, v, mask=None, causal=False, offset=0, scale=None):
    group = q.shape[-3] // k.shape[-3]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    full = (*q.shape[:-1], k.shape[-2])
    bias = np.zeros(full)
    if mask is not None:
        bias = bias + (np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask)
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    for place in np.ndindex(*q.shape[:-1]):
        *lead, head, i = place
        shared = (*lead, head // group)
        weights = []
        for j in range(k.shape[-2]):
            hidden = causal and j > i + offset
            score = scale * (q[place] @ k[(*shared, j)]) + bias[(*place, j)]
            weights.append(0.0 if hidden else math.exp(score))
        if sum(weights):
            out[place] = np.array(weights) @ v[shared] / sum(weights)
    return out


MASKS = {
    "none": lambda shape: None,
    "matrix": lambda shape: rng.random(shape[-2:]) < 0.6,
    "keys of each sample": lambda shape: rng.random((*shape[:-3], 1, 1, shape[-1])) < 0.6,
    "added to each head": lambda shape: rng.standard_normal((shape[-3], 1, shape[-1])),
    "added to all": rng.standard_normal,
    "one number": lambda shape: np.array(0.3),
}


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_values(xp, lead, kind):
    q, k, v = make(*lead)
    mask = MASKS[kind]((*q.shape[:-1], k.shape[-2]))
    given = None if mask is None else xp.asarray(mask)
    got = attention(*map(xp.asarray, (q, k, v)), given, scale=0.7)
    assert_close(got, plain(q, k, v, mask, scale=0.7))


def test_mask_along_one_of_several_batch_axes():
    q, k, v = make(2, 3)
    mask = rng.random((2, 1, 1, 5, 7)) < 0.6
    assert_close(attention(q, k, v, mask), plain(q, k, v, mask))


@pytest.mark.parametrize("offset", [0, 2, -2])
@pytest.mark.parametrize("n_keys", [1, 5, 8])
def test_causal(xp, offset, n_keys):
    q, k, v = make(2, n_keys=n_keys)
    got = attention(*map(xp.asarray, (q, k, v)), causal=True, causal_offset=offset)
    assert_close(got, plain(q, k, v, causal=True, offset=offset))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("offset", [0, 2, -1])
@pytest.mark.parametrize("window", [1, 3, 20])
def test_window(xp, window, offset, causal):
    q, k, v = make(2)
    i, j = np.arange(5)[:, None], np.arange(7)[None, :]
    seen = np.broadcast_to(j > i + offset - window, (5, 7))
    options = {"causal": causal, "causal_offset": offset, "window": window}
    got = attention(*map(xp.asarray, (q, k, v)), **options)
    assert_close(got, plain(q, k, v, seen, causal=causal, offset=offset))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_key_lengths(xp, lead):
    q, k, v = make(*lead)
    lengths = rng.integers(0, 8, lead)
    seen = np.arange(7) < np.asarray(lengths)[..., None, None, None]
    got = attention(*map(xp.asarray, (q, k, v)), key_lengths=xp.asarray(lengths))
    assert_close(got, plain(q, k, v, np.broadcast_to(seen, (*lead, 1, 5, 7))))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 0}, ValueError, "window must be an int >= 1, got 0"),
        ({"window": 2.5}, ValueError, "window must be an int >= 1, got 2.5"),
        ({"key_lengths": [3, 4]}, TypeError, "key_lengths must be an array of an integer dtype"),
        ({"key_lengths": np.ones(2)}, TypeError, "got float64"),
        ({"key_lengths": np.ones(3, int)}, ValueError, r"shape \(2,\), got \(3,\)"),
    ],
)
def test_what_limits_keys_is_checked(options, error, message):
    with pytest.raises(error, match=message):
        attention(*make(2), **options)


def test_decoding_with_a_cache_gives_the_same_rows():
    q, k, v = make(2, n_queries=6, n_keys=6)
    whole = attention(q, k, v, causal=True)
    last = attention(q[..., 4:, :], k, v, causal=True, causal_offset=4)
    assert_close(last, whole[..., 4:, :])


def test_a_query_that_sees_nothing_gives_zeros_and_no_nan():
    q, k, v = (rx.Tensor(a, requires_grad=True) for a in make(2))
    seen = np.ones((5, 7), dtype=bool)
    seen[1] = False
    bias = rx.Tensor(np.where(seen, 0.0, -np.inf), requires_grad=True)
    for mask in (seen, bias):
        q.grad = k.grad = v.grad = None
        out = attention(q, k, v, mask)
        rx.sum(out * out).backward()
        assert_close(out.data[..., 1, :], np.zeros((2, 4, 2)))
        assert_close(q.grad[..., 1, :], np.zeros((2, 4, 3)))
        assert all(np.isfinite(t.grad).all() for t in (q, k, v))
    assert np.isfinite(bias.grad).all()


def test_large_scores_do_not_overflow():
    q, k, v = (a.astype("float32") for a in make(1))
    out = attention(q * 1e4, k * 1e4, v)
    best = np.argmax(q[:, ::2] @ np.swapaxes(k, -1, -2), axis=-1)
    assert np.isfinite(out).all()
    assert_close(out[:, ::2], np.take_along_axis(v, best[..., None], axis=-2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 300, 3000])
def test_blocks_change_nothing(monkeypatch, causal, size):
    """Batches and queries are cut into blocks, of 32 rows at least."""
    arrays = make(3, n_queries=70, n_keys=75)
    bias = rng.standard_normal((1, 4, 70, 1))

    def run():
        tensors = [rx.Tensor(a, requires_grad=True) for a in (*arrays, bias)]
        out = attention(*tensors, causal=causal, causal_offset=-3)
        rx.sum(out * out).backward()
        return [out.data, *(t.grad for t in tensors)]

    want = run()
    monkeypatch.setattr(_windows, "_BUFFER_SIZE_CPU", size)
    for got, expected in zip(run(), want, strict=True):
        assert_close(got, expected, rtol=1e-10)


@pytest.mark.parametrize("axis", [0, 2, 3])
def test_nothing_to_attend(axis):
    """No samples, no queries, no keys."""
    q, k, v = make(2)
    if axis == 3:
        k, v = k[:, :, :0], v[:, :, :0]
    elif axis == 2:
        q = q[:, :, :0]
    else:
        q, k, v = q[:0], k[:0], v[:0]
    tensors = [rx.Tensor(a, requires_grad=True) for a in (q, k, v)]
    out = attention(*tensors)
    rx.sum(out).backward()
    assert_close(out, np.zeros((*q.shape[:-1], 2)))
    for tensor in tensors:
        assert_close(tensor.grad, np.zeros(tensor.shape))


def test_strided_views():
    q, k, v = make(2, n_kv_heads=4)
    wanted = attention(q, k, v)
    swapped = [np.swapaxes(np.ascontiguousarray(np.swapaxes(a, 1, 2)), 1, 2) for a in (q, k, v)]
    assert_close(attention(*swapped), wanted)


def test_half_precision(check_half):
    check_half(lambda *a: attention(*a, causal=True), *make(2))
    check_half(attention, *make(2), rng.standard_normal((5, 7)))


def test_memory_is_that_of_a_block():
    q, k, v = (a.astype("float32") for a in make(2, n_queries=2048, n_keys=2048, head_dim=16))
    tensors = [rx.Tensor(a, requires_grad=True) for a in (q, k, v)]
    rx.sum(attention(*tensors)).backward()
    scores = 2 * 4 * 2048 * 2048 * 4
    for tensor in tensors:
        tensor.grad = None
    tracemalloc.start()
    out = attention(*tensors)
    kept, _ = tracemalloc.get_traced_memory()
    rx.sum(out).backward()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 2 * (out.data.nbytes + 4 * 2 * 4 * 2048)
    assert peak < scores / 8


# --------------------------------------------------------------------------------- dropout


def test_dropout_drops_weights():
    n = 400
    q = np.zeros((1, 1, n, 2))
    v = np.eye(n)[None, None]  # the output shows the weights
    out = attention(q, q, v, dropout_rate=0.25, generator=Generator(5))
    assert_close(np.unique(np.round(out * n, 9)), np.round([0, 4 / 3], 9))
    assert abs((out == 0).mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / n**2)


def test_gradients_with_dropout(monkeypatch):
    monkeypatch.setattr(_windows, "_BUFFER_SIZE_CPU", 50)
    q, k, v = make(2, n_queries=3, n_keys=4)
    rx.testing.gradcheck(
        lambda *a: attention(*a, dropout_rate=0.3, generator=Generator(2)), (q, k, v)
    )


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_dropped_does_not_depend_on_the_blocks(causal, monkeypatch):
    q, k, v = make(2, n_queries=70, n_keys=70)

    def run():
        return attention(q, k, v, causal=causal, dropout_rate=0.3, generator=Generator(2))

    want = run()
    for size in (50, 70 * 70 * 5, 70 * 40):
        monkeypatch.setattr(_windows, "_BUFFER_SIZE_CPU", size)
        assert_close(run(), want)


def test_dropout_keeps_no_mask():
    q, k, v = (rx.Tensor(np.zeros((1, 4, 512, 2)), requires_grad=True) for _ in range(3))
    rx.sum(attention(q, k, v, dropout_rate=0.5)).backward()  # compile outside the count
    tracemalloc.start()
    out = attention(q, k, v, dropout_rate=0.5)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 4 * 512 * 512 / 2 + out.data.nbytes


# ---------------------------------------------------------------------------------- errors

Q, K, V = make(2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: attention(Q[0, 0], K, V), ValueError, r"q must have shape \(..., n_heads"),
        (lambda: attention(Q, K[0], V), ValueError, "k must have shape .* with the batch axes"),
        (lambda: attention(Q, K[..., :2], V), ValueError, "k must have shape .* head_dim of q"),
        (lambda: attention(Q, K, V[:, :, :3]), ValueError, "v must have the shape of k"),
        (
            lambda: attention(Q[:, :3], K, V),
            ValueError,
            "heads of q must be a multiple of that of k, got 3 and 2",
        ),
        (
            lambda: attention(Q, K, V, np.ones((5, 6), dtype=bool)),
            ValueError,
            r"attn_mask must broadcast to \(2, 4, 5, 7\), got \(5, 6\)",
        ),
        (
            lambda: attention(Q, K, V, np.ones((5, 7), dtype="int64")),
            TypeError,
            "attn_mask must be an array of bool or of a floating dtype, got int64",
        ),
        (lambda: attention(Q, K, V, dropout_rate=1.0), ValueError, r"rate must lie in \[0, 1\)"),
        (lambda: attention(Q, K, V.astype("int64")), TypeError, "v must have a real floating"),
        (lambda: attention(Q, K, V, scale=np.nan), ValueError, "scale must be finite, got nan"),
        (
            lambda: attention(Q, K, V, causal=True, causal_offset=0.5),
            TypeError,
            "causal_offset must be an int, got 0.5",
        ),
        (
            lambda: attention(Q, K, V, dropout_rate=0.5, generator=0),
            TypeError,
            "generator must be an rtxarr.random.Generator, got int",
        ),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --------------------------------------------------------------------------------- PyTorch


@pytest.mark.compare
@pytest.mark.parametrize("lead", [(3,), (2, 3)], ids=str)
def test_agreement_with_torch(against_torch, lead):
    import torch

    theirs = torch.nn.functional.scaled_dot_product_attention
    arrays = make(*lead)
    against_torch(attention, lambda *a: theirs(*a, enable_gqa=True), *arrays)
    against_torch(
        lambda *a: attention(*a, causal=True, scale=0.3),
        lambda *a: theirs(*a, is_causal=True, scale=0.3, enable_gqa=True),
        *arrays,
    )
    mask = rng.random((5, 7)) < 0.6
    mask[:, 0] = True
    against_torch(
        lambda *a: attention(*a, mask),
        lambda *a: theirs(*a, torch.tensor(mask), enable_gqa=True),
        *arrays,
    )
    bias = rng.standard_normal((*lead, 1, 5, 7))
    against_torch(attention, lambda *a: theirs(*a, enable_gqa=True), *arrays, bias)
