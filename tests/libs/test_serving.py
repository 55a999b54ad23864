"""Attention for inference, of random forms: with a stand-in, then on a GPU.

Against float64, with poisoned memory.
"""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import nn
from rtxarr.libs import dnn

from .test_dnn import (
    bits,
    close,
    decoded,
    fp8_case,
    host,
    n_cases,
    random_heads,
    reference,
)

HALVES = ["float16", "bfloat16"]


@pytest.mark.parametrize("dtype", HALVES)
def test_one_query_a_sequence(cupy, dtype):
    """As decoding asks for: queries of a group of heads, and keys up to a length."""
    rng = np.random.default_rng(0)
    name, dtype = dtype, np.dtype(getattr(rx, dtype))
    for _ in range(n_cases(cupy, 9)):
        b, kv, group = (int(rng.choice(x)) for x in ([1, 3], [1, 2, 4], [1, 4, 8]))
        m, d = (int(rng.choice(x)) for x in ([2, 17, 128, 300], [40, 64, 128, 256]))
        q, g = (random_heads(cupy, rng, (b, kv * group, 1, d), dtype) for _ in range(2))
        k, v = (random_heads(cupy, rng, (b, kv, m, d), dtype) for _ in range(2))
        lengths = np.where(rng.random(b) < 0.2, 0, rng.integers(2, m + 1, b))
        hidden = np.arange(m) >= lengths[:, None, None, None]
        wide = [host(x).astype(np.float64) for x in (q, k, v, g)]
        want = reference(np, *wide, hidden, None, d**-0.5)
        tensors = [rx.Tensor(x, requires_grad=True) for x in (q, k, v)]
        before = dnn.status().refused.copy()
        out = rx.scaled_dot_product_attention(*tensors, key_lengths=cupy.asarray(lengths))
        assert dnn.status().refused == before
        assert out.dtype == dtype
        close(host(out.data), want[0], name)
        rx.sum(out * g).backward()  # by whom it may
        for tensor, expected in zip(tensors, want[2:], strict=False):
            close(host(tensor.grad), expected, name, 3)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_8_bits_of_any_form(cupy, causal):
    """Also of results that are too large for their scale, which become the largest there is."""
    rng = np.random.default_rng(3 + causal)
    for i in range(n_cases(cupy, 12)):
        kv, group = (int(rng.choice(x)) for x in ([1, 2], [1, 3]))
        b, n, m, d = (
            int(rng.choice(x))
            for x in ([1, 3], *2 * [[2, 9, 64, 100, 257]], [16, 32, 64, 96, 128, 256])
        )
        e = d if rng.random() < 0.7 else 64
        offset = int(rng.choice([0, 5, m]))
        codes, scales, out_scale, want = fp8_case(
            rng, (b, kv * group, kv, n, m, d, e), causal, offset
        )
        out_scale *= np.float32([1, 0.2][i % 2])
        arrays = [cupy.asarray(x) for x in (*codes, *scales, out_scale)]
        if rng.random() < 0.6:  # heads behind the sequence
            arrays[:3] = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in arrays[:3])
        options = {"scales": arrays[3:6], "out_scale": arrays[6], "causal": causal}
        before = dnn.status().refused.copy()
        out = nn.fp8_attention(*arrays[:3], **options, offset=offset)
        refused = dnn.status().refused - before
        assert d != e or d not in (64, 128) or not refused, refused
        got, most = decoded(out, out_scale), 448 * float(out_scale[0])
        assert got.shape == want.shape
        error = np.abs(got - np.clip(want, -most, most))
        # The weights are rounded to three bits, too: before anything is cut off.
        assert error.max() < 0.08 * abs(want).max()
        assert error.mean() < 0.04 * abs(want).mean()


@pytest.mark.gpu
def test_captured_decoding_follows_lengths_and_pages(gpu):
    """Of one graph: queries, keys, lengths and the table of pages change from replay to replay."""
    cupy = gpu
    rng = np.random.default_rng(5)
    b, kv, group, size, n_pages, d = 3, 2, 4, 16, 4, 64
    pages = [cupy.asarray(rng.standard_normal((16, kv, size, d)).astype(rx.bfloat16)) for _ in "kv"]
    sides = [
        cupy.asarray(rng.standard_normal((b, kv, size * n_pages, d)).astype(rx.bfloat16))
        for _ in "kv"
    ]

    def step(q, table, lengths):
        paged = dnn.paged_attention(q, *pages, table, lengths)
        beside = rx.scaled_dot_product_attention(q, *sides, key_lengths=lengths)
        return paged, beside

    before = dnn.status().refused.copy()
    with rx.device("cuda:0"):
        captured = rx.capture(step)
        for i in range(8):
            q = cupy.asarray(rng.standard_normal((b, kv * group, 1, d)).astype(rx.bfloat16))
            table = rng.permutation(16)[: b * n_pages].reshape(b, n_pages).astype(np.int32)
            lengths = rng.integers(0, size * n_pages + 1, b) * (i != 5)
            pages[0][...] *= -1  # where the graph reads
            arguments = q, *map(cupy.asarray, (table, lengths))
            got, want = captured(*arguments), step(*arguments)
            assert bits(got) == bits(want)
            hidden = np.arange(size * n_pages) >= lengths[:, None, None, None]
            whole = [host(x)[table].swapaxes(1, 2).reshape(b, kv, -1, d) for x in pages]
            q, *whole, k, v = (host(x).astype(np.float64) for x in (q, *whole, *sides))
            for found, (keys, values) in zip(got, (whole, (k, v)), strict=True):
                want = reference(np, q, keys, values, q, hidden, None, d**-0.5)[0]
                close(host(found), want, "bfloat16")
        assert captured.n_captures == 1
    assert dnn.status().refused - before == {}
