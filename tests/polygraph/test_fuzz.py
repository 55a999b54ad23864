"""Random programs through ``rx.fuse``, held to NumPy: dtypes, shapes, bits, what is written.

``RTXARR_FUZZ=1000`` runs that many on every back end, ``RTXARR_FUZZ_FROM=n`` begins at another
seed; ``ci/nightly`` does so.
"""

import os
import warnings

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

from . import emulator
from .codegen.test_operations import apart
from .random_programs import Random, copies, on_gpu

WANTED = os.environ.get("RTXARR_FUZZ")
N = {"interpreter": 500, "kernels": 100, "cuda": 40, "hip": 15, "metal": 15, "gpu": 90}
FIRST = int(os.environ.get("RTXARR_FUZZ_FROM", "0"))
PARTS = 10


def compare(got, want, loose, near=False):
    assert type(got) is type(want), (type(got), type(want))
    if not hasattr(want, "dtype"):
        assert got == want
        return
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    assert got.shape == want.shape, (got.shape, want.shape)
    if loose or want.dtype.kind == "c":  # NumPy's product depends on where the result goes
        size = np.abs(np.asarray(want, "c16"))
        scale = float(np.max(size, initial=1.0, where=np.isfinite(size)))
        parts = (lambda x: x.real, lambda x: x.imag) if want.dtype.kind == "c" else (np.asarray,)
        for part in parts:  # an infinite one says nothing of the other
            assert_close(part(got), part(want), atol=1e-5 * scale, rtol=1e-2)
        return
    if near:
        far = apart(np.atleast_1d(got), np.atleast_1d(want))
        assert far.max(initial=0) <= 2, (got, want)
        return
    if want.dtype == rx.bfloat16:  # whose NaN the next does not know
        got, want = got.astype("f4"), want.astype("f4")
    np.testing.assert_array_equal(got, want)
    if want.dtype.kind == "f":
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number])


def run(program, backend, take=copies, give=lambda x: x):
    """Hold a fused program to NumPy; ``take`` copies its arguments, ``give`` gives NumPy's."""
    fused = rx.fuse(program, backend=backend)
    want_args = copies(program.args)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        want = program(*want_args)
        for _ in range(2):
            args = take(program.args)
            got = fused(*args)
            for i, a, b in zip(program.results, got, want, strict=True):
                compare(give(a), give(b), i in program.loose, i in program.near)
            for a, b in zip(args, want_args, strict=True):
                compare(give(a), give(b), False)
    reasons = [r for r in fused.reasons if "reshape" not in r and "out of bounds" not in r]
    assert program.overlaps or not reasons, reasons


def each(name, part, check, *, device=False):
    """Check the programs of a part; a failure says its program."""
    n = int(WANTED or N[name])
    for seed in range(FIRST + n * part // PARTS, FIRST + n * (part + 1) // PARTS):
        program = Random(seed, device=device)
        try:
            check(program, seed)
        except Exception as error:
            error.add_note(f"seed {seed}:\n{program}")
            raise


@pytest.mark.parametrize("name", ["interpreter", "kernels"])
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part, name):
    backend = "interpreter" if name == "interpreter" else None
    each(name, part, lambda program, _: run(program, backend))


@pytest.mark.skipif(not emulator.HAS_COMPILER, reason="needs g++")
@pytest.mark.parametrize("name", ["cuda", "hip", "metal"])
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs_on_the_emulator(part, name):
    limit = {} if name == "cuda" else {"shared_limit": 32 << 10}

    def check(program, seed):
        run(program, emulator.EmulatorBackend(dialect=name, seeds=(0, seed + 1), **limit))

    each(name, part, check, device=True)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs_on_a_gpu(part):
    cupy = pytest.importorskip("cupy")

    def check(program, seed):
        with_bfloat16 = any(getattr(x, "dtype", None) == rx.bfloat16 for x in program.values)
        if not program.overlaps and not with_bfloat16:
            run(
                program,
                None,
                take=lambda args: on_gpu(args, cupy),
                give=lambda x: np.asarray(cupy.asnumpy(x)),
            )

    each("gpu", part, check, device=True)
