"""Whether one kernel may stand in for another: both are run on the same inputs, between guards.

Arrays are copied into memory of their own with margins on both sides, at several alignments. The
margins around inputs hold NaN, so that a kernel which reads beyond its arrays gives another result;
results lie in memory that holds something else in each run, so that what is not written differs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rtxarr import _device, dtypes
from rtxarr._device import is_device_array, namespace
from rtxarr.polygraph import _index as ix
from rtxarr.polygraph._index import Expr
from rtxarr.polygraph._loops import Loops

MARGIN = 512  # bytes on each side of an array
_LINE = 64  # alignments are told from multiples of this
_FILLS = (0xFF, 0xA5)  # NaN or -1; a small number
_SHIFTS = (0, 1, 0, 3)  # elements past an aligned address


class Refused(RuntimeError):
    """Raised for a kernel that does not do what the one it should replace does."""


@dataclass
class Case:
    """Arguments of one call of a kernel.

    Attributes
    ----------
    name : str
    arguments : list
        Arrays and numbers of the inputs; for a result its shape.
    aliases : dict of int to int
        For each result that is written into an input, that input's place.
    """

    name: str
    arguments: list
    aliases: dict[int, int] = field(default_factory=dict)


def recorded(name: str, loops: Loops, arguments: Sequence[Any]) -> Case:
    """Return what a call of a kernel was given, with copies of its inputs."""
    copies: list[Any] = []
    aliases = {}
    for i, (buffer, x) in enumerate(zip(loops.buffers, arguments, strict=True)):
        if buffer.is_scalar:
            copies.append(x)
        elif buffer.is_output:
            copies.append(tuple(x.shape))
            for k, other in enumerate(arguments[:i]):
                if other is x and not loops.buffers[k].is_output:
                    aliases[i] = k
        else:
            copies.append(_like(x))
            copies[-1][...] = x
    return Case(name, copies, aliases)


def _like(x: Any) -> Any:
    """Return new memory for an array of the same strides, which may be zero or negative."""
    block, (at,) = _blocks([x], 0, _FILLS[0])
    return at


# --------------------------------------------------------------------------------- edge inputs


def index_buffers(loops: Loops) -> set[str]:
    """Return the names of the buffers whose values say where other memory is read."""
    if "indices" in loops.notes:  # of a kernel from a file, which has no statements
        return loops.notes["indices"]
    if loops.members:
        of_member = [(b, index_buffers(m)) for m in loops.members for b in m.buffers]
        nodes = {b.node for b, names in of_member if b.name in names}
        return {b.name for b in loops.buffers if b.node in nodes}
    statements = {}
    expressions: list[Expr] = []
    for s in loops.statements:
        statements[s.name] = s
        expressions += [a for a in s.args if isinstance(a, Expr)]
    of = {a.name: a.of for p in loops.phases for a in p.accumulators}
    of |= {scan.name: scan.of for scan in loops.scans}
    stack = [n for e in expressions for n in ix.names_in(e)]
    found = set() if loops.indptr is None else {loops.indptr}
    seen: set[str] = set()
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in of:
            stack.append(of[name])
        if name in statements:
            s = statements[name]
            if s.op in ("load", "scalar"):
                found.add(s.args[0])
            stack += [a for a in s.args if isinstance(a, str)]
    return found


def _casts_to_int(loops: Loops) -> bool:
    """Tell whether a float becomes an int: what NaN and infinity become is the processor's."""
    dtype_of: dict[str, np.dtype] = {}
    for phase in loops.phases:
        dtype_of |= {a.name: a.result for a in phase.accumulators}
    dtype_of |= {s.name: s.dtype for s in loops.statements}
    return any(map(_casts_to_int, loops.members)) or any(
        s.op == "cast" and s.dtype.kind in "iu" and dtype_of[s.args[0]].kind not in "iub"
        for s in loops.statements
    )


_KINDS = "random rising falling ties below zeros denormals infinities nan huge".split()


def edge_cases(loops: Loops, case: Case, *, tame: bool = False) -> Iterator[Case]:
    """Give variants of a case: NaN, infinities, denormals, zeros, ties and extreme integers.

    Arrays of indices keep their values. ``tame`` leaves out what may overflow.
    """
    kept = index_buffers(loops)
    kinds = [k for k in _KINDS if not (tame and k == "huge")]
    if _casts_to_int(loops):
        kinds = kinds[: kinds.index("infinities")]
    rng = np.random.default_rng(0)
    for kind in kinds:
        for share in (1.0,) if kind in ("rising", "falling") else (1.0, 0.1):
            arguments = []
            for buffer, x in zip(loops.buffers, case.arguments, strict=True):
                if not buffer.is_output and buffer.name not in kept:
                    if buffer.is_scalar:
                        x = _edge_values(rng, kind, buffer.dtype, (1,), share)[0]
                    else:
                        values = _edge_values(rng, kind, buffer.dtype, x.shape, share)
                        old, x = x, _like(x)
                        x[...] = namespace(old).asarray(values)
                arguments.append(x)
            yield Case(f"{kind}, {share:.0%}", arguments, case.aliases)


def _edge_values(rng, kind: str, dtype: np.dtype, shape: tuple, share: float) -> np.ndarray:
    """Return random numbers with a share of special ones among them, the first and last always."""
    if dtype.kind == "c":
        part = np.empty(0, dtype).real.dtype
        real, imag = (_edge_values(rng, kind, part, shape, share) for _ in range(2))
        out = np.empty(shape, dtype)
        out.real, out.imag = real, imag
        return out
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if kind in ("rising", "falling"):  # the last or the first of each row is its greatest
        ends = (0, 50) if kind == "rising" else (50, 0)
        return np.linspace(*ends, math.prod(shape)).reshape(shape).astype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        special: list[Any] = [info.min, info.max, 0, 1, info.max - 1, info.min + 1]
        base = rng.integers(max(info.min, -50), 50, shape).astype(dtype)
        if kind == "random":
            return base
        below = [info.min, info.min // 2, info.min + 1]
        special = {"zeros": [0], "ties": [3], "below": below}.get(kind, special)
    else:
        finfo = dtypes.finfo(dtype)
        base = rng.standard_normal(shape).astype(dtype)
        tiny, top = float(finfo.smallest_normal), float(finfo.max)
        special = {
            "random": [0.5, -0.25],
            "ties": [1.0],
            "below": [-3.0, -3.5, -7.0],
            "zeros": [0.0, -0.0],
            "denormals": [tiny / 4, -tiny / 2, tiny],
            "infinities": [np.inf, -np.inf],
            "nan": [np.nan],
            "huge": [top, -top, top / 2],
        }[kind]
    values = np.asarray(special, dtype)[rng.integers(0, len(special), shape)]
    flat = np.where(rng.random(shape) < share, values, base).reshape(-1)
    if flat.size:
        flat[[0, -1]] = values.reshape(-1)[[0, -1]]
    return flat.reshape(shape)


# ------------------------------------------------------------------------------ guarded memory


def bytes_of(shape: tuple, strides: tuple, itemsize: int) -> tuple[int, int]:
    """Return how many bytes an array takes, and the place of its first element among them."""
    if 0 in shape:
        return 0, 0
    extents = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    low = sum(e for e in extents if e < 0)
    return sum(e for e in extents if e > 0) - low + itemsize, -low


def _view(block: Any, offset: int, shape: tuple, dtype: Any, strides: tuple) -> Any:
    if is_device_array(block):
        return type(block)(shape, dtype, memptr=block.data + offset, strides=strides)
    return np.ndarray(shape, dtype, buffer=block, offset=offset, strides=strides)


def _address(block: Any) -> int:
    return block.data.ptr if is_device_array(block) else block.ctypes.data


def _blocks(arrays: Sequence[Any], shift: int, fill: int) -> tuple[list[Any], list[Any]]:
    """Return for each array memory filled with a byte, and an array of its strides therein."""
    blocks, places = [], []
    for x in arrays:
        size, first = bytes_of(x.shape, x.strides, x.dtype.itemsize)
        block = namespace(x).full(2 * MARGIN + size + 2 * _LINE, fill, dtype=np.uint8)
        begin = _address(block) + MARGIN
        begin += -begin % _LINE + shift * x.dtype.itemsize - _address(block)
        blocks.append(block)
        places.append(_view(block, begin + first, x.shape, x.dtype, x.strides))
    return blocks, places


class Outcome:
    """What a kernel left behind in one run."""

    def __init__(self, results: list[Any], trouble: str) -> None:
        self.results = results
        self.trouble = trouble


def run(kernel: Callable, loops: Loops, case: Case, *, fill: int, shift: int) -> Outcome:
    """Run a kernel on copies of a case's inputs; say whether it wrote where it must not.

    Parameters
    ----------
    fill : int
        The byte that results and margins hold before.
    shift : int
        How many elements past an aligned address arrays begin.
    """
    xp, arguments, checks, results = _set_up(loops, case, fill, shift)
    try:
        with np.errstate(all="ignore"):
            kernel(*arguments)
    except Exception as error:  # of whatever kind: a kernel that raises is not taken
        return Outcome([], f"it raised {type(error).__name__}: {error}")
    for name, block, before, written in checks:
        changed = block != before
        if written is not None:  # only what lies around a result must be as it was
            changed[written] = False
        if bool(xp.any(changed)):
            what = "memory outside of" if written is not None else "its input or around"
            return Outcome([], f"it wrote to {what} {name}")
    return Outcome(results, "")


def _set_up(loops: Loops, case: Case, fill: int, shift: int) -> tuple:
    given = {i: x for i, x in enumerate(case.arguments) if _device.is_array(x)}
    given = {i: x for i, x in given.items() if not loops.buffers[i].is_scalar}
    xp = namespace(*given.values())
    outputs = {}
    for i, buffer in enumerate(loops.buffers):
        if buffer.is_output and i not in case.aliases:
            outputs[i] = xp.empty(case.arguments[i], dtype=buffer.dtype)
    both = {**given, **outputs}
    blocks, places = _blocks(list(both.values()), shift, fill)
    at = dict(zip(both, places, strict=True))
    block_of = dict(zip(both, blocks, strict=True))
    for i, x in given.items():
        at[i][...] = x
    for i, k in case.aliases.items():
        at[i], block_of[i] = at[k], block_of[k]
    written = {id(block_of[i]): i for i in (*outputs, *case.aliases)}
    checks = []
    for i in both:
        block, x = block_of[i], at[i]
        part = None
        if id(block) in written:
            size, first = bytes_of(x.shape, x.strides, x.dtype.itemsize)
            begin = _address(x) - first - _address(block)
            part = slice(begin, begin + size)
        checks.append((loops.buffers[i].name, block, xp.asarray(block, copy=True), part))
    arguments = [at.get(i, x) for i, x in enumerate(case.arguments)]
    results = [at[i] for i, b in enumerate(loops.buffers) if b.is_output]
    return xp, arguments, checks, results


# --------------------------------------------------------------------------------- comparisons


def difference(got: Any, want: Any, rtol: float = 0.0) -> str:
    """Return how two results differ, "" if they do not; NaN is NaN whatever its bits.

    Parameters
    ----------
    rtol : float, default 0
        The largest relative difference allowed; at zero all bits must be the same.
    """
    xp = namespace(got, want)
    got, want = (xp.reshape(xp.ascontiguousarray(x), (-1,)) for x in (got, want))
    if not got.size:
        return ""
    if got.dtype.kind == "c":
        part = np.empty(0, got.dtype).real.dtype
        got, want = got.view(part), want.view(part)
    bits = np.dtype(f"u{got.dtype.itemsize}")
    same = got.view(bits) == want.view(bits)
    if got.dtype.kind not in "iub":
        same |= (got != got) & (want != want)
        if rtol:
            a, b = (x.astype(np.float64) for x in (got, want))
            with np.errstate(all="ignore"):
                near = xp.abs(a - b) <= rtol * xp.maximum(xp.abs(a), xp.abs(b))
            same |= (a == b) | (near & xp.isfinite(a) & xp.isfinite(b))
    if bool(xp.all(same)):
        return ""
    place = int(xp.argmin(same))
    return f"it gives {got[place]} where {want[place]} is right, at element {place}"


def admit(
    loops: Loops,
    incumbent: Callable,
    candidate: Callable,
    cases: Sequence[Case],
    *,
    rtol: float = 0.0,
    n_runs: int = 4,
) -> int:
    """Check that ``candidate`` does what ``incumbent`` does; return the number of its runs.

    Each case is run at two alignments with different bytes in the memory of the results, the first
    one ``n_runs`` times: equal inputs must give equal bits each time.

    Raises
    ------
    Refused
        Saying what is wrong and on which inputs.
    """
    n = 0
    for number, case in enumerate(cases):
        right: dict[int, Outcome] = {}  # by alignment, which may change the order of sums
        first: dict[int, Outcome] = {}
        for k in range(n_runs if number == 0 else 2):
            shift = _SHIFTS[k % len(_SHIFTS)]
            if shift not in right:
                right[shift] = run(incumbent, loops, case, fill=_FILLS[0], shift=shift)
                trouble = right[shift].trouble
                if trouble:
                    raise RuntimeError(f"the kernel in place fails on {case.name}: {trouble}")
            got = run(candidate, loops, case, fill=_FILLS[1 - k % 2], shift=shift)
            n += 1
            wrong = got.trouble or _any_difference(got, right[shift], rtol)
            if shift in first and not wrong:
                wrong = _any_difference(got, first[shift], 0.0)
                wrong = wrong and f"{wrong} as it gave before"
            if wrong:
                raise Refused(f"{wrong} (inputs: {case.name})")
            first.setdefault(shift, got)
    return n


def _any_difference(got: Outcome, want: Outcome, rtol: float) -> str:
    for i, (a, b) in enumerate(zip(got.results, want.results, strict=True)):
        wrong = difference(a, b, rtol)
        if wrong:
            return f"out{i}: {wrong}"
    return ""


def times(loops: Loops, kernels: Sequence[Callable], case: Case) -> list[float]:
    """Return the least seconds of a call of each kernel, measured in turn."""
    arguments = _set_up(loops, case, 0, 0)[1]
    on_gpu = any(is_device_array(x) for x in arguments)

    def seconds(kernel: Callable, n: int) -> float:
        start = time.perf_counter()
        for _ in range(n):
            kernel(*arguments)
        if on_gpu:
            _device.synchronize()
        return (time.perf_counter() - start) / n

    once = max(min(seconds(kernel, 1) for kernel in kernels for _ in range(2)), 1e-7)
    n = max(1, min(200, int(1e-3 / once)))
    rounds = [[seconds(kernel, n) for kernel in kernels] for _ in range(11)]
    return [min(column) for column in zip(*rounds, strict=True)]
