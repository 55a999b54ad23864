"""What a program is called by: Python text that takes arguments apart and puts results together.

The text of a call begins with what must hold for it; what does not gives ``MISS`` or ``EAGER``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._allocation import extent_of
from rtxarr.autograd import Tensor
from rtxarr.autograd._mode import witness, witnesses
from rtxarr.autograd._tape import make_tensor, mark_changed, store_of
from rtxarr.autograd._tree import unflatten
from rtxarr.polygraph._draws import Place
from rtxarr.polygraph._record import Output, Recording, own
from rtxarr.polygraph._scalar import NAMES
from rtxarr.polygraph._trace import Captured, ScalarSource, replay

MISS = object()  # what a program gives for a call that it does not hold for
EAGER = object()  # or that must run eagerly
_NONE: Mapping[int, str] = {}
# More pairs of arrays than this are not looked at one by one.
MANY_PAIRS = 256


def call_text(recording: Recording, leaves: Sequence, updates: Sequence) -> tuple[str, dict]:
    """Return the text of a call up to the program's result ``r``, and the names it uses."""
    trace, around = recording.trace, recording.surroundings
    names: dict[str, Any] = {**NAMES, "MISS": MISS, "EAGER": EAGER, "like": _like}
    names["shape_of"] = _shape_of
    lines = ["def run(L):"]
    if around.has_any:
        names["hold"] = around.hold
        lines.append("    if not hold(): return MISS")
    if recording.scalars:
        lines.append(f"    a = {''.join(f'L[{i}], ' for i in recording.scalars)}")
    first = len(lines)
    lines += guard_lines(trace.guards, names)
    for i, source in enumerate(trace.sources):
        if isinstance(source, ScalarSource):
            names[f"d{i}"] = source.dtype.type
            lines.append(f"    x{i} = d{i}({source.expression})")
    if lines[first:]:  # errors are the function's to raise, if they are errors to it
        inner = [f"    {line}" for line in lines[first:]]
        lines[first:] = ["    try:", *inner, "    except Exception: return EAGER"]
    places = []
    for i, source in enumerate(trace.sources):
        if isinstance(source, Place):  # last, when it is certain that the program will run
            names[f"reserve{i}"] = source.reserve
            places.append(f"    x{i} = reserve{i}()")
        elif isinstance(source, Captured):
            names[f"c{i}"] = source.array
            if source.holder is None:
                lines.append(f"    x{i} = c{i}")
                if not isinstance(source.array, np.generic):
                    names[f"m{i}"] = _shape_of(source.array)  # which may be set
                    lines.append(f"    if shape_of(x{i}) != m{i}: return MISS")
                continue
            names[f"h{i}"] = source.holder
            tracked = "is not" if source.holder.node is not None else "is"
            lines.append(f"    x{i} = h{i}.data")
            lines.append(f"    if x{i} is not c{i}:")
            lines.append(f"        if not like(x{i}, c{i}): return MISS")
            lines.append("        moved = True")
            lines.append(f"    if not (h{i}.node {tracked} None): return MISS")
        elif not isinstance(source, ScalarSource):
            data = ".data" if isinstance(leaves[source], Tensor) else ""
            lines.append(f"    x{i} = L[{source}]{data}")
    arguments = [f"x{i}" for i in range(len(trace.sources))]
    arrays = [
        i
        for i, s in enumerate(trace.sources)
        if not isinstance(s, Place) and not recording.is_scalar(s)
    ]
    written = [number for number, _ in updates]
    if updates:
        lines.insert(1, "    moved = False")
        if trace.on_numpy:
            lines += [f"    if not x{i}.flags.writeable: return EAGER" for i in written]
        lines += _overlap_lines(trace, written, arrays, names)
    lines += [*places, f"    r = program({', '.join(arguments)})"]
    tensors = tensors_of(trace, leaves, written)
    if tensors:
        names["changed"] = mark_changed
        lines += [f"    changed({word})" for word in tensors.values()]
    seen = [f"L[{i}]" for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    seen += [f"h{i}" for i in range(len(trace.sources)) if f"h{i}" in names]
    if seen:
        names["see"], names["witnesses"] = _see, witnesses
        lines.append(f"    if witnesses: see(({''.join(f'{word}, ' for word in seen)}))")
    return "\n".join(lines) + "\n", names


def guard_lines(guards: Sequence[tuple], names: dict) -> list[str]:
    """Return the lines that see whether numbers are those that the function decided by."""
    lines = []
    for k, (expression, value) in enumerate(guards):
        names[f"g{k}"] = value
        if value != value:
            test = f"({expression}) == ({expression})"
        elif type(value) is float and value == 0:  # which -0.0 equals
            test = f"repr({expression}) != {repr(value)!r}"
        else:
            test = f"({expression}) != g{k}"
        lines.append(f"    if {test}: return MISS")
    return list(dict.fromkeys(lines))


def _overlap_lines(trace: Any, written: list[int], arrays: list[int], names: dict) -> list[str]:
    """Return the lines that see whether an input that is written shares memory with another.

    Arrays that the function found are looked at here, and again when others are in their place.
    """
    names["overlap"] = _overlaps if trace.on_numpy else _overlaps_on_gpu
    names["some_overlap"] = some_overlap
    sources, all_written = trace.sources, set(written)
    others = [i for i in arrays if i not in all_written]
    found = {i for i in arrays if isinstance(sources[i], Captured)}
    if some_overlap(*([sources[i].array for i in x if i in found] for x in (written, others))):
        return ["    return EAGER"]
    if len(written) * len(arrays) > MANY_PAIRS:
        test = f"some_overlap({listed(written)}, {listed(others)})"
        moved = "moved and " if found.issuperset(arrays) else ""
        return [f"    if {moved}{test}: return EAGER"]
    lines, fixed = [], []
    for number in written:
        for other in arrays:
            if other == number or (other in all_written and other < number):
                continue
            test = f"overlap(x{number}, x{other})"
            if found.issuperset((number, other)):
                fixed.append(test)
            else:
                lines.append(f"    if {test}: return EAGER")
    return [*lines, f"    if moved and ({' or '.join(fixed)}): return EAGER"] if fixed else lines


def listed(numbers: Iterable[int]) -> str:
    return f"[{', '.join(f'x{i}' for i in numbers)}]"


def some_overlap(written: Sequence, others: Sequence) -> bool:
    """Tell whether the memory of an array that is written overlaps that of any other's."""
    extents = [(*extent_of(x), True) for x in written if x.size]
    extents += [(*extent_of(x), False) for x in others if x.size]
    end = end_of_written = 0
    for low, high, is_written in sorted(extents):
        if low < (end if is_written else end_of_written):
            return True
        end = max(end, high)
        if is_written:
            end_of_written = max(end_of_written, high)
    return False


def _shape_of(x: Any) -> tuple:
    """Return what of an array may be set: its shape, dtype and strides."""
    return x.shape, x.dtype, x.strides


def _overlaps(a: Any, b: Any) -> bool:
    return np.may_share_memory(a, b)


def _overlaps_on_gpu(a: Any, b: Any) -> bool:
    one, other = a.data.mem, b.data.mem
    if one.ptr + one.size <= other.ptr or other.ptr + other.size <= one.ptr:
        return False
    return _device.namespace(a).may_share_memory(a, b)


def _see(tensors: tuple) -> None:
    """Show tensors to the captured step of this thread, if there is one."""
    seen_by = witness()
    if seen_by is not None:
        seen_by.see(tensors)


def tensors_of(trace: Any, leaves: Sequence, numbers: Iterable[int]) -> dict[int, str]:
    """Return the text of the Tensor that an input is the array of, for those of ``numbers``."""
    found = {}
    for number in numbers:
        source = trace.sources[number]
        if isinstance(source, Captured):
            if isinstance(source.holder, Tensor):
                found[number] = f"h{number}"
        elif isinstance(source, int) and isinstance(leaves[source], Tensor):
            found[number] = f"L[{source}]"
    return found


def result_words(
    outputs: list[Output], names: dict, xp: Any, tensors: Mapping[int, str] = _NONE
) -> list[str]:
    """Return the text of each leaf of the result, made of the program's outputs ``r``.

    ``tensors`` has the text of the Tensors that inputs are the arrays of.
    """
    return [_word(k, out, names, xp, tensors) for k, out in enumerate(outputs)]


def result_text(
    outputs: list[Output],
    structure: Any,
    names: dict,
    xp: Any,
    tensors: Mapping[int, str] = _NONE,
) -> str:
    """Return the text that makes the result."""
    words = result_words(outputs, names, xp, tensors)
    if structure is None:
        return f"    return {words[0]}\n"
    kind, _, parts = structure
    if kind is tuple and all(p is None for p in parts):
        return f"    return ({''.join(w + ', ' for w in words)})\n"
    names["structure"], names["unflatten"] = structure, unflatten
    return f"    return unflatten(structure, [{', '.join(words)}])\n"


def _word(k: int, output: Output, names: dict, xp: Any, tensors: Mapping) -> str:
    if output.is_direct:
        return f"r[{output.source}]"
    if output.kind == "scalar":
        return output.source
    if output.kind == "leaf":
        return f"L[{output.source}]"
    if output.kind == "plain":
        names[f"p{k}"] = output.source
        return f"p{k}"
    word = f"r[{output.source}]" if output.kind == "root" else f"x{output.source}"
    if output.apart is not None:
        names["own"] = functools.partial(own, xp)
        others = [f"r[{n}]" if where == "r" else f"x{n}" for where, n in output.apart]
        word = f"own({', '.join([word, *others])})"
    if output.steps:
        names["replay"], names["xp"], names[f"s{k}"] = replay, xp, output.steps
        word = f"replay(s{k}, {word}, xp)"
    elif output.scalar:
        word = f"{word}[()]"
    if output.tensor:
        names["tensor"], names["store"] = make_tensor, store_of
        of = tensors.get(output.source) if output.kind == "input" else None
        word = f"tensor({word}, None, 0, {f'store({of})' if of else None})"
    return word


def _like(x: Any, known: Any) -> bool:
    """Tell whether another array may stand where one was."""
    return (
        type(x) is type(known)
        and x.dtype == known.dtype
        and x.shape == known.shape
        and x.strides == known.strides
    )
