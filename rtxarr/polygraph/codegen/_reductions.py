"""Reductions in text: what a running value is, and how two are combined."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rtxarr.polygraph._loops import Accumulator
from rtxarr.polygraph.codegen import _operations as ops


@dataclass(frozen=True)
class Reduction:
    """An accumulator in text: its running type and value, how two are combined."""

    name: str
    type: str
    empty: str
    accumulator: Accumulator

    @property
    def running(self) -> str:
        return f"{self.name}_sum"

    def combine(self, a: str, b: str) -> str:
        op, kind = self.accumulator.op, ops.kind(self.accumulator.dtype)
        if op in ("sum", "prod", "mean"):
            sign, names = ("*", ("product", "times")) if op == "prod" else ("+", ("sum", "plus"))
            if kind in "iu":
                return f"#{names[0]}({a}, {b})"
            return f"#{names[1]}({a}, {b})" if kind == "c" else f"{a} {sign} {b}"
        if op in ("any", "all"):  # not || and &&: every lane must come to an exchange in b
            return f"{a} {'|' if op == 'any' else '&'} {b}"
        if op in ("max", "min"):
            return f"#{'maximum' if op == 'max' else 'minimum'}({a}, {b})"
        return f"#first_{op[3:]}({a}, {b})"

    def element(self, counter: str) -> str:
        """Return the value of one element, ready to be combined."""
        of = self.accumulator.of
        return f"{self.type}{{{of}, {counter}}}" if self.is_found else of

    @property
    def is_found(self) -> bool:
        return self.accumulator.op.startswith("arg")

    def result(self, running: str) -> str:
        """Return the statement that names the value of a whole row, which is in ``running``."""
        a = self.accumulator
        kind = ops.value(a.result)
        text = f"{running}.at" if self.is_found else running
        if a.op == "mean":
            text = f"(count ? {text} / ({self.type})count : {ops.zero(a.dtype)})"
        return f"const {kind} {self.name} = {text if self.is_complex else f'({kind}){text}'};"

    @property
    def is_complex(self) -> bool:
        return ops.kind(self.accumulator.dtype) == "c"


_LEAST = {"int8": -(2**7), "int16": -(2**15), "int32": "(-2147483647 - 1)"}
_LEAST["int64"] = "(i64)((u64)1 << 63)"


def extreme(dtype: np.dtype, *, least: bool) -> str:
    """Return the least or the greatest number of a dtype."""
    kind = ops.kind(dtype)
    if kind == "b":
        return "false" if least else "true"
    if kind in "hf":
        return f"F32_OF_BITS({'0xff800000u' if least else '0x7f800000u'})"
    if kind == "d":
        return f"F64_OF_BITS({'0xfff0000000000000ull' if least else '0x7ff0000000000000ull'})"
    if kind == "u":
        return f"({ops.value(dtype)}){'0' if least else '-1'}"
    return str(_LEAST[dtype.name]) if least else f"({ops.value(dtype)}){np.iinfo(dtype).max}"


def reduction(a: Accumulator) -> Reduction:
    value = ops.value(a.dtype)
    if a.op.startswith("arg"):
        return Reduction(a.name, f"#Found<{value}>", f"#Found<{value}>{{{value}{{}}, -1}}", a)
    empty = {
        "sum": ops.zero(a.dtype),
        "mean": ops.zero(a.dtype),
        "prod": f"{value}{{1, 0}}" if ops.kind(a.dtype) == "c" else f"({value})1",
        "any": "false",
        "all": "true",
        "max": "" if ops.kind(a.dtype) == "c" else extreme(a.dtype, least=True),
        "min": "" if ops.kind(a.dtype) == "c" else extreme(a.dtype, least=False),
    }[a.op]
    return Reduction(a.name, value, empty, a)
