"""Gradients of random fused functions are the tape's, but for the order of sums; kernels' the same.

``RTXARR_FUZZ=n`` tries that many, ``RTXARR_FUZZ_FROM=n`` begins at another seed (``ci/nightly``).
"""

import os

import numpy as np
import pytest

import rtxarr as rx

from .fused import assert_same

N = int(os.environ.get("RTXARR_FUZZ", "150"))
FIRST = int(os.environ.get("RTXARR_FUZZ_FROM", "0"))
PARTS = 5


class Random:
    """A random function of two arrays, all of whose values are tame."""

    def __init__(self, seed):
        self.rng = rng = np.random.default_rng(seed)
        n, m = (int(k) for k in rng.integers(1, 6, 2))
        dtype = rng.choice(["f4", "f8"])
        shapes = [(n, m), self.pick([(n, m), (1, m), (n, 1), (m,), ()])]
        self.args = [rng.normal(size=s).astype(dtype) for s in shapes]
        self.constant = rng.normal(size=(m, m)).astype(dtype)
        self.index = rng.integers(0, n, 4)
        self.steps = [self._step(i) for i in range(2, 2 + int(rng.integers(2, 8)))]
        self.chosen = rng.choice(len(self.steps), min(2, len(self.steps)), replace=False).tolist()

    def pick(self, choices):
        return choices[self.rng.integers(len(choices))]

    def _step(self, n):
        i, j = (int(k) for k in self.rng.integers(0, n, 2))
        low, axis = float(self.rng.normal()), int(self.rng.integers(-1, 2))
        most = int(self.index.max())
        one = {
            "tanh": lambda v: rx.tanh(v[i]),
            "gauss": lambda v: rx.exp(-v[i] * v[i]),
            "sin": lambda v: rx.sin(v[i]) * low,
            "sqrt": lambda v: rx.sqrt(v[i] * v[i] + 1),
            "relu": lambda v: rx.maximum(v[i], 0) + rx.minimum(v[i], low),
            "where": lambda v: rx.where(v[i] > low, v[i], rx.square(v[i])),
            "clip": lambda v: rx.clip(v[i], -1, 1) * 2,
            "softmax": lambda v: rx.softmax(v[i], axis=-1),
            "norm": lambda v: rx.layer_norm(v[i] * 2) if v[i].ndim else v[i],
            "gelu": lambda v: rx.gelu(v[i]),
            "sum": lambda v: (
                rx.sum(v[i], axis=axis % max(v[i].ndim, 1), keepdims=True) if v[i].ndim else v[i]
            ),
            "mean": lambda v: rx.mean(v[i]) + rx.max(v[i]),
            "var": lambda v: rx.var(v[i]),
            "matmul": lambda v: (
                v[i] @ self.constant
                if v[i].ndim == 2 and v[i].shape[1] == len(self.constant)
                else v[i] * 2
            ),
            "transpose": lambda v: v[i].T if v[i].ndim == 2 else v[i] + 1,
            "slice": lambda v: v[i][::-1] if v[i].ndim else v[i],
            "take": lambda v: (
                rx.take(v[i], self.index, axis=0)
                if v[i].ndim == 2 and v[i].shape[0] > most
                else -v[i]
            ),
            "made": lambda v: (  # an index that each call makes
                v[i][np.array(most), np.arange(v[i].shape[1])[::-1]] * low
                if v[i].ndim == 2 and v[i].shape[0] > most
                else v[i] * np.array(low, v[i].dtype)
            ),
            "along": lambda v: (
                rx.take_along_axis(v[i], np.arange(v[i].shape[0])[:, None] % v[i].shape[1], axis=1)
                if v[i].ndim == 2
                else v[i]
            ),
            "labels": lambda v: (
                rx.cross_entropy(v[i], np.arange(v[i].shape[0]) % v[i].shape[1], reduction="none")
                if v[i].ndim == 2
                else v[i] * 0.5
            ),
            "reshape": lambda v: rx.reshape(v[i], (-1,)) if v[i].ndim == 2 else v[i],
            "running": lambda v: rx.cumulative_sum(v[i], axis=0) if v[i].ndim else v[i],
        }
        two = {
            "add": lambda v: v[i] + v[j],
            "multiply": lambda v: v[i] * v[j],
            "divide": lambda v: v[i] / (v[j] * v[j] + 1),
            "concat": lambda v: rx.concat([v[i], v[j] * low], axis=0),
        }
        self.name = self.pick([*one, *two, *two])
        step = {**one, **two}[self.name]

        def careful(v):
            try:
                return step(v)
            except (ValueError, TypeError) as error:
                if any(word in str(error) for word in ("broadcast", "dimension", "shape", "axis")):
                    return v[i]
                raise

        return careful

    def __call__(self, *args):
        v = list(args)
        for step in self.steps:
            v.append(step(v))
        return [v[2 + k] for k in self.chosen] + [v[-1]]


def total(results):
    out = 0
    for k, x in enumerate(results):
        out = out + rx.sum(x * np.cos(np.arange(x.size, dtype=x.dtype) + k).reshape(x.shape))
    return out


@pytest.mark.parametrize("backend", ["interpreter", None], ids=["interpreter", "kernels"])
@pytest.mark.parametrize("part", range(PARTS))
def test_random_gradients(part, backend):
    n = N if backend == "interpreter" else max(N // 5, 1)
    for seed in range(FIRST + n * part // PARTS, FIRST + n * (part + 1) // PARTS):
        program = Random(seed)
        fused = rx.fuse(program, backend=backend)

        def both(f):
            def loss(*args):
                if seed % 2:  # noqa: B023
                    args = [a * 1.5 for a in args]  # whence gradients pass, with their masks
                return total(f(*args))

            def slope(*args):
                return sum(rx.sum(g * g) for g in rx.grad(loss, (0, 1))(*args))

            first = rx.value_and_grad(loss, (0, 1))(*program.args)  # noqa: B023
            return first, rx.grad(slope, (0, 1))(*program.args)  # noqa: B023

        try:
            with np.errstate(all="ignore"):
                got = both(fused)
                if backend is None:
                    assert_same(got, both(rx.fuse(program, backend="interpreter")))
                want = both(program)
            assert fused.n_eager == 0, fused.reasons
            scale = max(float(np.abs(g).max()) for g in want[0][1])
            for a, b in zip((got[0][0], *got[0][1]), (want[0][0], *want[0][1]), strict=True):
                assert type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
                tolerance = 2e-5 if b.dtype == np.float32 else 1e-12
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale)
            scale = max(float(np.abs(g).max()) for g in want[1])
            for a, b in zip(got[1], want[1], strict=True):
                tolerance = 1e-3 if b.dtype == np.float32 else 1e-9
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
