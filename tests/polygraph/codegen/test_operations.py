"""Every operation on every dtype: the text, run on the CPU, against NumPy."""

import functools

import numpy as np
import pytest

from rtxarr import dtypes
from rtxarr.polygraph import _index as ix
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._loops import Buffer, Loops, Phase, Statement
from rtxarr.polygraph.codegen import _operations as ops

from .. import loops_reference
from ..emulator import HAS_COMPILER, EmulatorBackend

DTYPES = [np.dtype(d) for d in dtypes.DTYPES.values()]
# NumPy's own functions are not rounded right either; theirs may also change with the processor.
INEXACT = frozenset(
    """exp expm1 log log1p log2 log10 erf sin cos tan asin acos atan sinh cosh tanh asinh acosh
    atanh sigmoid pow atan2 hypot logaddexp""".split()
)
N = 4096


def values(dtype, seed):
    """Numbers of a dtype with those among them where operations go wrong."""
    rng = np.random.default_rng(seed)
    kind = ops.kind(dtype)
    if kind == "b":
        return rng.integers(0, 2, N).astype(bool)
    if kind in "iu":
        limits = np.iinfo(dtype)
        special = [0, 1, 2, 3, 7, limits.min, limits.max, limits.max - 1]
        special += [limits.min + 1, max(limits.min, -1), max(limits.min, -2), limits.max // 2]
        x = rng.integers(max(limits.min, -70), 70, N).astype(dtype)
    elif kind == "c":
        part = np.empty(0, dtype).real.dtype
        x = np.empty(N, dtype)
        x.real, x.imag = values(part, seed), values(part, seed + 7)
        return x
    else:
        special = [0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, 1e-4, 3]
        x = (rng.standard_normal(N) * 2.0 ** rng.integers(-6, 7, N)).astype(dtype)
    x[: N // 2] = rng.choice(np.array(special, dtype), N // 2)
    return x


def one_kernel(sources, results):
    """Loops that compute ``results``, pairs of an operation's name and dtype, from ``sources``."""
    i = ix.symbol("i", N)
    buffers = [Buffer(f"in{k}", d, ir.input_node(k, d, (N,))) for k, d in enumerate(sources)]
    body = [Statement(f"v{k}", "load", (f"in{k}", i, None), d) for k, d in enumerate(sources)]
    names = [s.name for s in body]
    for number, (op, dtype) in enumerate(results):
        if op == "where":
            arguments = (names[2], *names[:2])
        elif op == "pow":  # NumPy refuses negative exponents of integers
            arguments = (names[0], names[3])
        else:
            arguments = tuple(names[: 1 if op == "cast" else ir.MAPS[op][0]])
        body.append(Statement(f"w{number}", op, arguments, dtype))
        out = Buffer(f"out{number}", dtype, ir.input_node(99, dtype, (N,)), is_output=True)
        buffers.append(out)
        body.append(Statement("", "store", (out.name, i, f"w{number}"), dtype))
    return Loops("map", 1, N, tuple(buffers), (Phase(tuple(body)),))


def result_dtype(op, dtype):
    if op == "where":
        return dtype
    shape = [ir.input_node(k, dtype, (1,)) for k in range(ir.MAPS[op][0])]
    return ir.map_node(op, *shape).dtype


@functools.cache
def kernels():
    """For each dtype the loops of all maps and of all casts from it."""
    found = {}
    for dtype in DTYPES:
        names = [op for op in ir.MAPS if ops.renders(op, dtype)]
        results = [(op, result_dtype(op, dtype)) for op in names]
        maps = one_kernel((dtype, dtype, np.dtype(bool), dtype), results)
        casts = one_kernel((dtype,), [("cast", d) for d in DTYPES])
        found[dtype.name] = names, maps, casts
    return found


@functools.cache
def built():
    """All of them in one run of the compiler."""
    backend = EmulatorBackend(seeds=(0,))
    return {id(x): backend.build(x) for _, *pair in kernels().values() for x in pair}


def run_both(loops, *inputs):
    got = [np.zeros(N, b.dtype) for b in loops.buffers if b.is_output]
    want = [np.zeros(N, b.dtype) for b in loops.buffers if b.is_output]
    built()[id(loops)](*inputs, *got)
    with np.errstate(all="ignore"):
        loops_reference.run(loops, *inputs, *want)
    return got, want


def apart(got, want, op=None):
    """How many representable numbers lie between two arrays; NaN and NaN are the same."""
    assert got.dtype == want.dtype
    if got.dtype.kind in "biu":
        return (got != want).astype(np.float64)
    if got.dtype.kind == "c":
        if op in ("multiply", "divide", "square"):  # NumPy's loops contract to fma or do not
            return ~np.isclose(got, want, rtol=1e3 * np.finfo(got.dtype).eps, equal_nan=True) + 0.0
        return np.maximum(apart(got.real, want.real), apart(got.imag, want.imag))
    bits = {2: np.int16, 4: np.int32, 8: np.int64}[got.dtype.itemsize]
    a, b = (x.view(bits).astype(object) for x in (got, want))
    least = -(2 ** (8 * got.dtype.itemsize - 1))
    a, b = (np.where(x < 0, least - x, x) for x in (a, b))
    both = np.isnan(got) & np.isnan(want)
    return np.where(both, 0, abs(a - b)).astype(np.float64)


needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")


@needs_compiler
@pytest.mark.parametrize("name", [d.name for d in DTYPES])
def test_maps(name):
    dtype = np.dtype(dtypes.DTYPES[name])
    names, loops, _ = kernels()[name]
    a, b = values(dtype, 1), values(dtype, 2)
    if dtype.kind in "iu":  # shifts by less than the width too
        b[::5] %= 9
    exponents = np.maximum(b, 0) if dtype.kind == "i" else b
    got, want = run_both(loops, a, b, values(np.dtype(bool), 3), exponents)
    for op, x, y in zip(names, got, want, strict=True):
        limit = 4 if op in INEXACT or (op == "abs" and dtype.kind == "c") else 0
        far = apart(x, y, op)
        worst = int(np.argmax(far))
        assert far[worst] <= limit, (
            f"{op}({a[worst]!r}, {b[worst]!r}) gives {x[worst]!r}, NumPy {y[worst]!r}"
        )


@needs_compiler
@pytest.mark.parametrize("name", [d.name for d in DTYPES])
def test_casts(name):
    dtype = np.dtype(dtypes.DTYPES[name])
    *_, loops = kernels()[name]
    a = values(dtype, 4)
    got, want = run_both(loops, a)
    for x, y, to in zip(got, want, DTYPES, strict=True):
        inside = np.ones(N, bool)
        if to.kind in "iu" and dtype.kind not in "biu":  # C says nothing of what does not fit
            real = a.real.astype(np.float64)
            limits = np.iinfo(to)
            inside = (real > float(limits.min) - 1) & (real < float(limits.max))
        far = np.where(inside, apart(x, y), 0)
        worst = int(np.argmax(far))
        assert far[worst] == 0, f"{a[worst]!r} to {to} gives {x[worst]!r}, NumPy {y[worst]!r}"
