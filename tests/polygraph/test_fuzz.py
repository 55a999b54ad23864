"""Random programs through ``rx.fuse``, held to NumPy: dtypes, shapes, bits, what is written.

``RTXARR_FUZZ=1000`` runs that many on every back end, ``RTXARR_FUZZ_FROM=n`` begins at another
seed; ``ci/nightly`` does so.
"""

import os
import warnings

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.polygraph import _interpret
from rtxarr.testing import assert_close

from . import emulator
from .codegen.test_operations import apart
from .random_programs import Random, copies, on_gpu

WANTED = os.environ.get("RTXARR_FUZZ")
N = {"interpreter": 500, "kernels": 100, "cuda": 40, "hip": 15, "metal": 15, "gpu": 90}
FIRST = int(os.environ.get("RTXARR_FUZZ_FROM", "0"))
PARTS = 10


def compare(got, want, loose, near=0):
    """See that two values are the same; ``near`` is by how many units in the last place not."""
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
        assert far.max(initial=0) <= near, (got, want)
        return
    if want.dtype == rx.bfloat16:  # whose NaN the next does not know
        got, want = got.astype("f4"), want.astype("f4")
    np.testing.assert_array_equal(got, want)
    if want.dtype.kind == "f":
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number])


def run(program, backend, take=copies, give=lambda x: x, units=2, eager=True):
    """Hold a fused program to NumPy; tell whether it was fused.

    ``take`` copies its arguments, ``give`` gives NumPy's. ``units`` are those in the last place by
    which functions may differ. Without ``eager``, what runs as it is is another library's.
    """
    fused = rx.fuse(program, backend=backend)
    want_args = copies(program.args)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        want = program(*want_args)
        for _ in range(2):
            args = take(program.args)
            try:
                got = fused(*args)
            except Exception as error:  # in the place of why it was not fused
                if eager or not fused.n_eager or fused.reasons:
                    raise
                assert "reshape" in str(error.__context__), error.__context__
            if fused.n_eager and not eager:
                break
            for i, a, b in zip(program.results, got, want, strict=True):
                near = units if i in program.near else 0
                compare(give(a), give(b), i in program.loose, near)
            for a, b in zip(args, want_args, strict=True):
                compare(give(a), give(b), False)
    reasons = [r for r in fused.reasons if "reshape" not in r and "out of bounds" not in r]
    assert program.overlaps or not reasons, reasons
    return not fused.n_eager


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


def check_on_gpu(program, take, give, backend=None):
    """Hold a program to NumPy on another library's arrays; tell if it was fused, None if left out.

    CuPy has no bfloat16, and what it does by itself is not what is held to NumPy.
    """
    if program.overlaps or any(getattr(x, "dtype", 0) == rx.bfloat16 for x in program.values):
        return None
    # CUDA's functions are within 3 units in the last place, NumPy's within 4.
    return run(program, backend, take=take, give=give, units=8, eager=False)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs_on_a_gpu(part):
    cupy = pytest.importorskip("cupy")
    found = []

    def take(args):
        return on_gpu(args, cupy)

    def give(x):
        return np.asarray(cupy.asnumpy(x))

    def check(program, _):
        found.append(check_on_gpu(program, take, give))

    each("gpu", part, check, device=True)
    n_run = len(found) - found.count(None)
    assert found.count(True) >= 0.8 * n_run > 0


@pytest.mark.parametrize("op", ["add", "multiply", "reshape", "where"])
def test_a_wrong_operation_is_found_by_what_gpus_are_held_to(op, monkeypatch):
    right = _interpret.RULES[op]

    def wrong(xp, node, *sources):
        out = right(xp, node, *sources)
        return xp.astype(
            xp.flip(out, axis=None) if op == "reshape" else xp.logical_not(out), out.dtype
        )

    monkeypatch.setitem(_interpret.RULES, op, wrong)

    def check(program, _):
        check_on_gpu(program, copies, np.asarray, "interpreter")

    with pytest.raises(AssertionError):
        for part in range(PARTS):
            each("gpu", part, check, device=True)
