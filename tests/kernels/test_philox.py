"""Philox against Random123's published vectors; the transforms against SciPy."""

import os
import subprocess
import sys

import numpy as np
import pytest
from scipy import special

from rtxarr._device import device
from rtxarr.kernels import philox
from rtxarr.kernels._philox_core import _U

# Random123, kat_vectors: philox4x32 10: counter words, key words, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def _pairs(words):
    w = [int(x, 16) for x in words.split()]
    return [_U(low | high << 32) for low, high in zip(w[::2], w[1::2], strict=True)]


@pytest.mark.parametrize("counter, key, want", KNOWN, ids=["zeros", "ones", "pi"])
def test_known_answers(counter, key, want):
    got = philox.philox(*_pairs(counter), *_pairs(key))
    assert " ".join(f"{int(w):08x}" for w in got) == want


def _fill(kind, n, dtype, params, *, offset, key=5, stream=9):
    place = {"key": _U(key), "stream": _U(stream), "offset": offset, "device": device("cpu")}
    return philox.fill(kind, n, np.dtype(dtype), params, **place)


def test_known_answer_of_a_draw(host_path):
    """The first block of stream 0 under key 0."""
    got = _fill("word32", 4, "uint32", (), offset=0, key=0, stream=0)
    assert " ".join(f"{w:08x}" for w in got) == KNOWN[0][2]


INFINITE = (-np.inf, np.inf)
KINDS = {
    "word32": ("uint32", ()),
    "below32": ("bool", (_U(3 << 30),)),
    "uniform32": ("float32", tuple(np.float32(x) for x in (3, -1, -1, 1.9999999))),
    "uniform64": ("float64", (3.0, -1.0, -1.0, 1.9999999999999998)),
    "normal32": ("float32", (0.0, 1.0, 2.0, 0.5, *INFINITE)),
    "normal64": ("float64", (0.0, 1.0, 2.0, 0.5, *INFINITE)),
    "exponential32": ("float32", (2.0,)),
    "exponential64": ("float64", (2.0,)),
    "signed64": ("int16", (_U(600), np.int64(-300))),
    "unsigned64": ("uint64", (_U(3 << 62), _U(7))),  # rejects a quarter of the words
}


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_code_gives_numpys_bits(kind, monkeypatch):
    dtype, params = KINDS[kind]
    step = philox.words_per_value(kind)
    for offset in range(0, 8, step):
        for n in (1, 2, 3, 7, 1001):
            monkeypatch.setattr(philox, "_COMPILED_FROM", 2**62)
            want = _fill(kind, n, dtype, params, offset=offset)
            monkeypatch.setattr(philox, "_COMPILED_FROM", -1)
            got = _fill(kind, n, dtype, params, offset=offset)
            assert got.dtype == want.dtype == np.dtype(dtype)
            assert got.shape == want.shape == (n,)
            assert got.tobytes() == want.tobytes(), (offset, n)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_may_be_cut_anywhere(host_path, kind):
    dtype, params = KINDS[kind]
    step = philox.words_per_value(kind)
    whole = _fill(kind, 50, dtype, params, offset=4)
    for cut in (1, 2, 3, 4, 31):
        rest = _fill(kind, 50 - cut, dtype, params, offset=4 + cut * step)
        assert rest.tobytes() == whole[cut:].tobytes()


def test_log_is_good_to_two_units_in_the_last_place():
    near_one = 1 - 2.0 ** -np.arange(1, 53)
    x = np.concatenate([10.0 ** -np.arange(0.5, 308), np.linspace(0.5, 0.999, 10_000), near_one])
    want = np.log(x)
    error = np.abs(philox._core.log(x) - want) / np.spacing(np.abs(want))
    assert error.max() <= 2


def test_log_of_one_is_zero():
    assert philox._core.log(np.ones(1))[0] == 0.0


def test_quantile_agrees_with_scipy():
    p = np.concatenate([np.linspace(0.001, 0.999, 9999), 10.0 ** -np.arange(1.0, 300)])
    np.testing.assert_allclose(philox._quantile(p), special.ndtri(p), rtol=2e-15, atol=1e-15)


def test_quantile_of_one_number_is_that_of_an_array():
    p = np.concatenate([np.linspace(0.001, 0.999, 999), 10.0 ** -np.arange(1.0, 300)])
    assert (philox._quantile(p) == [philox._core.quantile(x) for x in p]).all()


def test_multiply_gives_all_128_bits():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 2**64, (2, 100), dtype=np.uint64)
    high, low = philox._core.multiply(a, b)
    for i in range(100):
        assert (int(high[i]) << 64 | int(low[i])) == int(a[i]) * int(b[i])


def test_children_differ_from_parent_and_each_other():
    key, stream = _U(1), _U(2)
    children = [philox.derive(key, stream, i) for i in range(1000)]
    assert len({(int(k), int(s)) for k, s in children}) == 1000
    own = {int(w) for w in philox.stream_words(0, 4000, key=key, stream=stream)}
    assert not own & {int(k) & 0xFFFFFFFF for k, _ in children}


def test_compiled_code_is_found_by_the_next_process(tmp_path):
    script = (
        "import rtxarr as rx\n"
        "x = rx.random.Generator(3).normal((70_000,), device='cpu')\n"
        "from rtxarr.kernels._philox_njit import normal64\n"
        "hits, misses = normal64.stats.cache_hits, normal64.stats.cache_misses\n"
        "print(float(x[-1]), sum(hits.values()), sum(misses.values()))\n"
    )
    place = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    found = [
        subprocess.run(
            [sys.executable, "-c", script], env=place, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    (first, *counts), (second, *again) = found
    assert first == second
    assert (counts, again) == (["0", "1"], ["1", "0"])
