"""What each operation is in C-like text, for each kind of number.

The text calls functions of ``_snippets`` where an operator of C does something else than NumPy.
Values of float16 and bfloat16 are held as float32 and rounded after each operation that can leave
the type; complex numbers are structs of two floats.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import numpy as np

from rtxarr.polygraph._ir import MAPS
from rtxarr.polygraph.codegen._snippets import SNIPPETS

C_NAMES = {
    "bool": "bool", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64",
    "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64",
    "complex64": "c64", "complex128": "c128",
}  # fmt: skip
HALVES = ("float16", "bfloat16")


def stored(dtype: np.dtype) -> str:
    """Return the type of ``dtype`` in memory."""
    return C_NAMES[dtype.name]


def value(dtype: np.dtype) -> str:
    """Return the type of ``dtype`` in registers."""
    return "f32" if dtype.name in HALVES else C_NAMES[dtype.name]


@functools.cache  # a dtype's name takes long to ask
def kind(dtype: np.dtype) -> str:
    """Return b (bool), i, u (integers), h (halves), f, d (float32, float64) or c (complex)."""
    if dtype.name in HALVES:
        return "h"
    return {"float32": "f", "float64": "d"}.get(dtype.name, dtype.kind)


def zero(dtype: np.dtype) -> str:
    return f"{value(dtype)}{{}}" if kind(dtype) == "c" else f"({value(dtype)})0"


def literal(number: float, dtype: np.dtype) -> str:
    return f"{number!r}f" if kind(dtype) in "hf" else repr(number)


# Functions of the C library, which end in "f" for float32.
_LIBRARY = {
    **dict.fromkeys(("exp", "expm1", "log", "log1p", "log2", "log10", "erf", "sin", "cos")),
    **dict.fromkeys(("tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh")),
    **dict.fromkeys(("atanh", "floor", "ceil", "trunc", "sqrt", "atan2", "hypot", "copysign")),
    **dict.fromkeys(("nextafter", "fmod")),
    "round": "rint",
    "abs": "fabs",
}
# Of halves these give halves: there is nothing to round.
_EXACT = frozenset(
    [
        "positive",
        "negative",
        "abs",
        "sign",
        "floor",
        "ceil",
        "trunc",
        "round",
        "conj",
        "real",
        "maximum",
        "minimum",
        "copysign",
        "where",
    ]
)
_COMPARISONS = {
    "equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<=",
    "greater": ">", "greater_equal": ">=",
}  # fmt: skip
_BITS = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
_FLOATS, _INTEGERS, _REALS = "hfd", "iu", "biuhfd"

# operation: {kinds: text}; "$lib$name" is a function of the C library, "#name" a snippet.
_TABLE: dict[str, dict[str, str]] = {
    "positive": {"iuhfdc": "{0}"},
    "negative": {"hfd": "-{0}", "iu": "#negated({0})", "c": "#negated_c({0})"},
    "sign": {"hfdiu": "#sign_of({0})"},
    "square": {"hfd": "{0} * {0}", "iu": "#product({0}, {0})", "c": "#times({0}, {0})"},
    "reciprocal": {"hfd": "1.0f / {0}"},
    "sigmoid": {"hfd": "#sigmoid({0})"},
    # Of mode "fast", see _reciprocals.
    "rough_exp": {"hf": "ROUGH_EXP({0})"},
    "rough_divide": {"hf": "{0} * RECIPROCAL({1})"},
    "rough_reciprocal": {"hf": "RECIPROCAL({0})"},
    "rough_sigmoid": {"hf": "RECIPROCAL(1.0f + ROUGH_EXP(-{0}))"},
    "conj": {"iuhfd": "{0}", "c": "#conjugate({0})"},
    "real": {"iuhfd": "{0}", "c": "{0}.re"},
    "imag": {"c": "{0}.im"},
    "bitwise_invert": {"b": "!{0}", "iu": "~{0}"},
    "logical_not": {"b": "!{0}"},
    "isnan": {"hfd": "{0} != {0}", "biu": "false", "c": "{0}.re != {0}.re || {0}.im != {0}.im"},
    "isinf": {"hfd": "#is_infinite({0})", "biu": "false"},
    "isfinite": {"hfd": "{0} - {0} == 0", "biu": "true"},
    "signbit": {"hfd": "#sign_bit({0})", "biu": "{0} < ({T})0"},
    "add": {"b": "{0} || {1}", "hfd": "{0} + {1}", "iu": "#sum({0}, {1})", "c": "#plus({0}, {1})"},
    "subtract": {"hfd": "{0} - {1}", "iu": "#difference({0}, {1})", "c": "#minus({0}, {1})"},
    "multiply": {
        "b": "{0} && {1}",
        "hfd": "{0} * {1}",
        "iu": "#product({0}, {1})",
        "c": "#times({0}, {1})",
    },
    "divide": {"hfd": "{0} / {1}", "c": "#over({0}, {1})"},
    "floor_divide": {"hfd": "#floor_divide_f({0}, {1})", "iu": "#floor_divide({0}, {1})"},
    "remainder": {"hfd": "#modulo_f({0}, {1})", "iu": "#modulo({0}, {1})"},
    "pow": {"hfd": "$pow({0}, {1})", "iu": "#power({0}, {1})"},
    "maximum": {"b": "{0} || {1}", "iuhfd": "#maximum({0}, {1})"},
    "minimum": {"b": "{0} && {1}", "iuhfd": "#minimum({0}, {1})"},
    "logaddexp": {"hfd": "#log_add_exp({0}, {1})"},
    "bitwise_left_shift": {"iu": "#shift_left({0}, {1})"},
    "bitwise_right_shift": {"iu": "#shift_right({0}, {1})"},
    "logical_and": {"b": "{0} && {1}", "iuhfd": "{0} != ({T})0 && {1} != ({T})0"},
    "logical_or": {"b": "{0} || {1}", "iuhfd": "{0} != ({T})0 || {1} != ({T})0"},
    "logical_xor": {"b": "{0} != {1}", "iuhfd": "({0} != ({T})0) != ({1} != ({T})0)"},
    "where": {"biuhfdc": "{0} ? {1} : {2}"},
    "equal": {"biuhfd": "{0} == {1}", "c": "{0}.re == {1}.re && {0}.im == {1}.im"},
    "not_equal": {"biuhfd": "{0} != {1}", "c": "{0}.re != {1}.re || {0}.im != {1}.im"},
}
_TABLE |= {
    name: {"biuhfd": f"{{0}} {sign} {{1}}"}
    for name, sign in _COMPARISONS.items()
    if name not in _TABLE
}
_TABLE |= {name: {"biu": f"{{0}} {sign} {{1}}"} for name, sign in _BITS.items()}
_TABLE |= {
    name: {"hfd": f"${c or name}({', '.join(['{0}', '{1}'][: MAPS[name][0]])})"}
    for name, c in _LIBRARY.items()
    if name in MAPS
}
_TABLE["abs"] |= {"i": "#absolute({0})", "u": "{0}", "b": "{0}", "c": "$hypot({0}.re, {0}.im)"}
for _name in ("floor", "ceil", "trunc", "round"):
    _TABLE[_name]["biu"] = "{0}"
# The step from one half to the next is not that of float32.
_TABLE["nextafter"] = {"fd": "$nextafter({0}, {1})"}

_FOR_DOUBLES = re.compile(f"#({'|'.join(name for name in SNIPPETS if f'{name}_d' in SNIPPETS)})\\(")


def renders(op: str, dtype: np.dtype) -> bool:
    """Tell whether there is text for a map (or ``cast``) whose last source is of ``dtype``."""
    if dtype.name not in C_NAMES:
        return False
    if op in ("cast", "rsqrt"):
        return op == "cast" or kind(dtype) in _FLOATS
    return any(kind(dtype) in kinds for kinds in _TABLE.get(op, ()))


# Reductions, with the kinds of number that they are written for.
_REDUCTIONS = {
    **dict.fromkeys(("sum", "prod"), "iufdc"),
    **dict.fromkeys(("max", "min", "argmax", "argmin"), "biuhfd"),
    **dict.fromkeys(("any", "all"), "b"),
    "segment_reduce": "iufd",
}


def fuses(op: str, dtype: np.dtype, lacks: frozenset[str] = frozenset()) -> bool:
    """Tell whether a map, cast or reduction of values of ``dtype`` can be in a kernel.

    ``lacks`` has the operations and dtypes that a language does not have.
    """
    word = "hypot" if op == "abs" and kind(dtype) == "c" else op
    if word in lacks or dtype.name in lacks:
        return False
    if op in _REDUCTIONS:
        return dtype.name in C_NAMES and kind(dtype) in _REDUCTIONS[op]
    return renders(op, dtype)


def rounded(text: str, dtype: np.dtype) -> str:
    """Return ``text``, a float32 value, rounded to a half."""
    return f"#round_{stored(dtype)}({text})"


def map_text(op: str, sources: Sequence[str], dtype: np.dtype, *, strict: bool) -> str:
    """Return the text of a map on named values, the last of ``dtype``.

    In it, "$name" stands for a function of the C library for this type, "#name" for a snippet.
    """
    if op == "rsqrt":
        root = f"$sqrt({sources[0]})"
        if kind(dtype) == "h" and strict:
            root = rounded(root, dtype)
        text = f"{literal(1.0, dtype)} / {root}"
    else:
        (text,) = (t for kinds, t in _TABLE[op].items() if kind(dtype) in kinds)
        if kind(dtype) == "d":
            text = _FOR_DOUBLES.sub(r"#\1_d(", text.replace("1.0f", "1.0"))
        text = text.format(*sources, T=value(dtype))
    if kind(dtype) in "hf" or dtype.name == "complex64":
        text = re.sub(r"\$(\w+)", r"$\1f", text)
    if kind(dtype) == "h" and strict and op not in _EXACT and MAPS[op][1] != "bool":
        text = rounded(text, dtype)
    if kind(dtype) in "iu" and MAPS[op][1] == "same" and op != "where":
        text = f"({value(dtype)})({text})"  # C computes in int
    return text


def cast_text(source: str, old: np.dtype, new: np.dtype) -> str:
    """Return the text of a value of dtype ``old`` cast to ``new``."""
    before, after = kind(old), kind(new)
    if after == "c":
        part = {"complex64": "f32", "complex128": "f64"}[new.name]
        parts = (f"{source}.re", f"{source}.im") if before == "c" else (source, "0")
        return f"{value(new)}{{({part}){parts[0]}, ({part}){parts[1]}}}"
    if before == "c":
        if after == "b":
            return f"{source}.re != 0 || {source}.im != 0"
        source, before = f"{source}.re", "d" if old.name == "complex128" else "f"
    if after == "b":
        return f"{source} != ({C_NAMES[old.name] if before not in 'hc' else 'f32'})0"
    if after == "h":
        if before == "h" and old == new:
            return source
        if before == "d" and new.name == "float16":  # rounds once
            return f"#round_f16_d({source})"
        return rounded(f"(f32){source}", new)
    return f"({value(new)}){source}"
