"""Random programs through ``rx.fuse``, held to NumPy: dtypes, shapes, bits, what is written.

``RTXARR_FUZZ=20000`` runs that many, ``RTXARR_FUZZ_FROM=n`` begins at another seed.
"""

import os
import warnings

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

from .random_programs import Random, copies

N = int(os.environ.get("RTXARR_FUZZ", "500"))
FIRST = int(os.environ.get("RTXARR_FUZZ_FROM", "0"))
PARTS = 10


def compare(got, want, loose):
    assert type(got) is type(want), (type(got), type(want))
    if not hasattr(want, "dtype"):
        assert got == want
        return
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    assert got.shape == want.shape, (got.shape, want.shape)
    if loose or want.dtype.kind == "c":  # NumPy's product depends on where the result goes
        scale = float(np.max(np.abs(np.nan_to_num(np.asarray(want, "c16"))), initial=1.0))
        if np.isfinite(scale):
            assert_close(got, want, atol=1e-5 * scale, rtol=1e-2)
        return
    if want.dtype == rx.bfloat16:  # whose NaN the next does not know
        got, want = got.astype("f4"), want.astype("f4")
    np.testing.assert_array_equal(got, want)
    if want.dtype.kind == "f":
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number])


def run(seed, backend):
    program = Random(seed)
    fused = rx.fuse(program, backend=backend)
    want_args = copies(program.args)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        want = program(*want_args)
        for _ in range(2):
            args = copies(program.args)
            got = fused(*args)
            for i, a, b in zip(program.results, got, want, strict=True):
                compare(a, b, i in program.loose)
            for a, b in zip(args, want_args, strict=True):
                compare(a, b, False)
    reasons = [r for r in fused.reasons if "reshape" not in r and "out of bounds" not in r]
    assert program.overlaps or not reasons, reasons


@pytest.mark.parametrize("backend", ["interpreter", None], ids=["interpreter", "kernels"])
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part, backend):
    n = N if backend == "interpreter" else min(N, max(100, N // 5))
    for seed in range(FIRST + n * part // PARTS, FIRST + n * (part + 1) // PARTS):
        try:
            run(seed, backend)
        except Exception as error:
            error.add_note(f"seed {seed}:\n{Random(seed)}")
            raise
