"""Scalar operations as LLVM assembly, to NumPy's bits; what is not here NumPy computes itself.

A value is the name of a register; one of a complex dtype is a pair of names. Values of float16 and
bfloat16 are computed in float32 and rounded after each operation.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rtxarr.polygraph._ir import MAPS
from rtxarr.polygraph.codegen import _fast

Value = Any  # str, or (str, str) for a complex number

_UNCHANGED = frozenset(("positive", "conj", "real"))
_ROUNDED = {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "roundeven"}
_FLOAT = frozenset(
    (
        *_UNCHANGED,
        *_ROUNDED,
        *"negative abs sign square reciprocal sqrt rsqrt isnan isinf isfinite signbit".split(),
        *"add subtract multiply divide maximum minimum copysign".split(),
        *"equal not_equal less less_equal greater greater_equal".split(),
        *"logical_not logical_and logical_or logical_xor where cast".split(),
    )
)
_INTEGER = frozenset(
    (
        *_UNCHANGED,
        *_ROUNDED,
        *"negative abs sign square isnan isinf isfinite add subtract multiply".split(),
        *"maximum minimum bitwise_invert bitwise_and bitwise_or bitwise_xor".split(),
        *"bitwise_left_shift bitwise_right_shift".split(),
        *"equal not_equal less less_equal greater greater_equal".split(),
        *"logical_not logical_and logical_or logical_xor where cast".split(),
    )
)
_BOOL = frozenset(
    (
        *"conj add multiply maximum minimum bitwise_invert bitwise_and bitwise_or".split(),
        *"bitwise_xor equal not_equal less less_equal greater greater_equal".split(),
        *"logical_not logical_and logical_or logical_xor where cast isnan isinf isfinite".split(),
    )
)
_COMPLEX = frozenset(
    (
        *"positive negative conj real imag add subtract where cast".split(),
        *"equal not_equal isnan isinf isfinite logical_not logical_and logical_or".split(),
    )
)


@functools.cache  # a dtype's name takes long to ask
def kind(dtype: np.dtype) -> str:
    """Return b (bool), i, u (integers), h (halves), f (float32, float64) or c (complex)."""
    return "h" if dtype.name in ("float16", "bfloat16") else dtype.kind


_NATIVE = {"b": _BOOL, "i": _INTEGER, "u": _INTEGER, "h": _FLOAT, "f": _FLOAT, "c": _COMPLEX}


def is_native(op: str, dtype: np.dtype, *, fast: bool = False) -> bool:
    """Tell whether ``op`` on values of ``dtype`` is written out here; all casts are."""
    if fast and op in _fast.OPERATIONS and kind(dtype) in "fh":
        return True
    return op == "cast" or op in _NATIVE.get(kind(dtype), ())


def llvm_type(dtype: np.dtype) -> str:
    """Return the type of a register; of one part, for a complex dtype."""
    if dtype.name == "bfloat16":
        return "i16"
    if dtype.kind in "iu":
        return f"i{8 * dtype.itemsize}"
    names = {"bool": "i1", "float16": "half", "float32": "float", "float64": "double"}
    return names.get(dtype.name) or {"complex64": "float", "complex128": "double"}[dtype.name]


def memory_type(dtype: np.dtype) -> str:
    return "i8" if dtype.kind == "b" else llvm_type(dtype)


def part(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the real part of a complex one."""
    return np.empty(0, dtype).real.dtype


_F32 = np.dtype("float32")
_WIDTH = {"float": "f32", "double": "f64"}
_INT_OF = {"half": "i16", "float": "i32", "double": "i64"}
_ORDER = {"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"}


class Assembly:
    """Lines of a function as they are written; names of registers and blocks are made here."""

    def __init__(self, *, contract: bool = False) -> None:
        self.lines: list[str] = []
        self.block = "entry"
        self.declared: set[str] = set()
        self._count = 0
        self._flag = "contract " if contract else ""

    def fresh(self, stem: str = "x") -> str:
        self._count += 1
        return f"{stem}{self._count}"

    def say(self, line: str) -> None:
        self.lines.append("  " + line)

    def let(self, text: str) -> str:
        """Write ``%new = text`` and return the name."""
        name = "%" + self.fresh()
        self.say(f"{name} = {text}")
        return name

    def start(self, block: str) -> None:
        self.lines.append(f"{block}:")
        self.block = block

    def intrinsic(self, name: str, kind_: str, *args: str) -> str:
        full = f"@llvm.{name}.{_WIDTH[kind_]}"
        types = ", ".join([kind_] * len(args))
        self.declared.add(f"declare {kind_} {full}({types})")
        return self.let(f"call {kind_} {full}({', '.join(f'{kind_} {a}' for a in args)})")

    # ------------------------------------------------------------------------------- halves

    def widen(self, x: str, dtype: np.dtype) -> str:
        """Return a half as float32."""
        if dtype.name == "float16":
            return self.let(f"fpext half {x} to float")
        bits = self.let(f"shl i32 {self.let(f'zext i16 {x} to i32')}, 16")
        return self.let(f"bitcast i32 {bits} to float")

    def narrow(self, x: str, dtype: np.dtype) -> str:
        """Return a float32 rounded to a half, to even."""
        if dtype.name == "float16":
            return self.let(f"fptrunc float {x} to half")
        bits = self.let(f"bitcast float {x} to i32")
        odd = self.let(f"and i32 {self.let(f'lshr i32 {bits}, 16')}, 1")
        up = self.let(f"add i32 {bits}, {self.let(f'add i32 {odd}, 32767')}")
        sign = self.let(f"and i32 {self.let(f'lshr i32 {bits}, 16')}, 32768")
        nan = self.let(f"or i32 {sign}, 32704")
        is_nan = self.let(f"fcmp uno float {x}, {x}")
        rounded = self.let(f"lshr i32 {up}, 16")
        return self.let(
            f"trunc i32 {self.let(f'select i1 {is_nan}, i32 {nan}, i32 {rounded}')} to i16"
        )

    def _float64_to_half(self, x: str) -> str:
        """Round a double to float16 once: by way of a float32 with a sticky last bit."""
        near = self.let(f"fptrunc double {x} to float")
        back = self.let(f"fpext float {near} to double")
        exact = self.let(f"fcmp ueq double {back}, {x}")
        bits = self.let(f"bitcast float {near} to i32")
        # Where it was rounded away from zero, step back: truncated, then made odd.
        size = self.intrinsic("fabs", "double", x)
        away = self.let(f"fcmp ogt double {self.intrinsic('fabs', 'double', back)}, {size}")
        cut = self.let(f"sub i32 {bits}, {self.let(f'zext i1 {away} to i32')}")
        odd = self.let(f"or i32 {cut}, 1")
        chosen = self.let(f"select i1 {exact}, i32 {bits}, i32 {odd}")
        return self.let(f"fptrunc float {self.let(f'bitcast i32 {chosen} to float')} to half")

    # -------------------------------------------------------------------------------- casts

    def cast(self, x: Value, old: np.dtype, new: np.dtype) -> Value:
        """Return ``x`` in another dtype."""
        if old == new:
            return x
        a, b = kind(old), kind(new)
        if a == "c":
            if b == "c":
                return tuple(self.cast(p, part(old), part(new)) for p in x)
            if b == "b":
                return self.truth(x, old)
            return self.cast(x[0], part(old), new)
        if b == "c":
            zero = "0.0"
            return self.cast(x, old, part(new)), zero
        if b == "b":
            return self.truth(x, old)
        if a == "h":
            return self.cast(self.widen(x, old), _F32, new)
        if b == "h":
            if new.name == "float16" and old == np.float64:
                return self._float64_to_half(x)
            return self.narrow(self.cast(x, old, _F32), new)
        return self.let(f"{_cast_word(old, new)} {llvm_type(old)} {x} to {llvm_type(new)}")

    def truth(self, x: Value, dtype: np.dtype) -> str:
        """Return whether ``x`` is not zero."""
        k = kind(dtype)
        if k == "b":
            return x
        if k == "c":
            parts = [self.truth(p, part(dtype)) for p in x]
            return self.let(f"or i1 {parts[0]}, {parts[1]}")
        if k == "h":
            return self.truth(self.widen(x, dtype), _F32)
        if k == "f":
            return self.let(f"fcmp une {llvm_type(dtype)} {x}, 0.0")
        return self.let(f"icmp ne {llvm_type(dtype)} {x}, 0")

    # ----------------------------------------------------------------------------- operations

    def apply(self, op: str, dtype: np.dtype, args: list[Value]) -> Value:
        """Return ``op`` on values of ``dtype`` (for ``where`` that of the two choices)."""
        k = kind(dtype)
        if op == "where":
            test, x, y = args
            if k == "c":
                return tuple(self._select(test, p, q, dtype) for p, q in zip(x, y, strict=True))
            return self._select(test, x, y, dtype)
        if op in _UNCHANGED and k != "c":
            return args[0]
        if op.startswith("logical"):
            return self._logical(op[8:], [self.truth(x, dtype) for x in args])
        if k == "c":
            return self._complex(op, dtype, args)
        if k == "h":
            return self._half(op, dtype, args)
        if k == "f":
            return self._float(op, dtype, args)
        return self._integer(op, dtype, args, k)

    def _select(self, test: str, x: str, y: str, dtype: np.dtype) -> str:
        t = llvm_type(dtype)
        return self.let(f"select i1 {test}, {t} {x}, {t} {y}")

    def _logical(self, word: str, args: list[str]) -> str:
        if word == "not":
            return self.let(f"xor i1 {args[0]}, true")
        return self.let(f"{word} i1 {args[0]}, {args[1]}")

    def _half(self, op: str, dtype: np.dtype, args: list[str]) -> str:
        if op == "signbit":
            bits = (
                args[0] if dtype.name == "bfloat16" else self.let(f"bitcast half {args[0]} to i16")
            )
            return self.let(f"icmp slt i16 {bits}, 0")
        if op in ("negative", "abs", "copysign"):
            return self._half_signs(op, dtype, args)
        wide = [self.widen(x, dtype) for x in args]
        if op in ("maximum", "minimum") and dtype.name == "float16":
            # NumPy takes the first of equal halves, but the second of equal float32.
            test = "oge" if op == "maximum" else "ole"
            first = self.let(f"fcmp {test} float {wide[0]}, {wide[1]}")
            nan = self.let(f"fcmp uno float {wide[0]}, {wide[0]}")
            return self._select(self.let(f"or i1 {first}, {nan}"), args[0], args[1], dtype)
        if op == "rsqrt":
            return self._half("reciprocal", dtype, [self._half("sqrt", dtype, args)])
        out = self._float(op, _F32, wide)
        if op == "sign" and dtype.name == "bfloat16":  # of ml_dtypes: zero keeps its sign
            zero = self.let(f"fcmp oeq float {wide[0]}, 0.0")
            out = self._select(zero, wide[0], out, _F32)
        return out if MAPS[op][1] == "bool" else self.narrow(out, dtype)

    def _half_signs(self, op: str, dtype: np.dtype, args: list[str]) -> str:
        """Change the sign by its bit: what is left, of a NaN too, stays."""
        is_f16 = dtype.name == "float16"
        bits = [self.let(f"bitcast half {x} to i16") if is_f16 else x for x in args]
        if op == "negative":
            out = self.let(f"xor i16 {bits[0]}, -32768")
        else:
            out = self.let(f"and i16 {bits[0]}, 32767")
            if op == "copysign":
                out = self.let(f"or i16 {out}, {self.let(f'and i16 {bits[1]}, -32768')}")
        return self.let(f"bitcast i16 {out} to half") if is_f16 else out

    def _float(self, op: str, dtype: np.dtype, args: list[str]) -> str:
        t, x, f = llvm_type(dtype), args[0], self._flag
        if op in _fast.OPERATIONS:
            return _fast.write(self, op, t, x)
        if op == "negative":
            return self.let(f"fneg {t} {x}")
        if op in ("abs", "sqrt", "copysign"):
            return self.intrinsic("fabs" if op == "abs" else op, t, *args)
        if op in _ROUNDED:
            return self.intrinsic(_ROUNDED[op], t, x)
        if op == "square":
            return self.let(f"fmul {f}{t} {x}, {x}")
        if op == "rsqrt":
            x, op = self.intrinsic("sqrt", t, x), "reciprocal"
        if op == "reciprocal":
            return self.let(f"fdiv {t} 1.0, {x}")
        if op in ("add", "subtract", "multiply", "divide"):
            word = {"subtract": "fsub", "multiply": "fmul", "divide": "fdiv"}.get(op, "fadd")
            return self.let(f"{word} {f}{t} {x}, {args[1]}")
        if op in ("maximum", "minimum"):
            # As x86 does: the second of two zeros. And the first, if it is NaN.
            test = "ogt" if op == "maximum" else "olt"
            first = self.let(f"fcmp {test} {t} {x}, {args[1]}")
            nan = self.let(f"fcmp uno {t} {x}, {x}")
            return self._select(self.let(f"or i1 {first}, {nan}"), x, args[1], dtype)
        if op == "sign":
            up = self.let(f"uitofp i1 {self.let(f'fcmp ogt {t} {x}, 0.0')} to {t}")
            down = self.let(f"uitofp i1 {self.let(f'fcmp olt {t} {x}, 0.0')} to {t}")
            nan = self.let(f"fcmp uno {t} {x}, {x}")
            return self._select(nan, x, self.let(f"fsub {t} {up}, {down}"), dtype)
        if op == "isnan":
            return self.let(f"fcmp uno {t} {x}, {x}")
        if op in ("isinf", "isfinite"):
            test = "oeq" if op == "isinf" else "olt"
            return self.let(f"fcmp {test} {t} {self.intrinsic('fabs', t, x)}, 0x7FF0000000000000")
        if op == "signbit":
            i = _INT_OF[t]
            return self.let(f"icmp slt {i} {self.let(f'bitcast {t} {x} to {i}')}, 0")
        test = {"equal": "oeq", "not_equal": "une"}.get(op) or "o" + _ORDER[op]
        return self.let(f"fcmp {test} {t} {x}, {args[1]}")

    def _integer(self, op: str, dtype: np.dtype, args: list[str], k: str) -> str:
        t, x = llvm_type(dtype), args[0]
        if op in _ROUNDED:
            return x
        if op in ("isnan", "isinf"):
            return "false"
        if op == "isfinite":
            return "true"
        if op == "negative":
            return self.let(f"sub {t} 0, {x}")
        if op == "bitwise_invert":
            return self.let(f"xor {t} {x}, -1")
        if op == "square":
            return self.let(f"mul {t} {x}, {x}")
        if op == "abs":
            if k == "u":
                return x
            below = self.let(f"icmp slt {t} {x}, 0")
            return self._select(below, self.let(f"sub {t} 0, {x}"), x, dtype)
        if op == "sign":
            up = self.let(f"zext i1 {self.let(f'icmp ne {t} {x}, 0')} to {t}")
            if k == "u":
                return up
            return self._select(self.let(f"icmp slt {t} {x}, 0"), "-1", up, dtype)
        y = args[1]
        if op in ("bitwise_left_shift", "bitwise_right_shift"):
            return self._shift(op, t, x, y, k)
        signed = "s" if k == "i" else "u"
        if op in ("maximum", "minimum"):
            test = f"icmp {signed}{'gt' if op == 'maximum' else 'lt'}"
            return self._select(self.let(f"{test} {t} {x}, {y}"), x, y, dtype)
        if MAPS[op][1] == "bool":
            test = {"equal": "eq", "not_equal": "ne"}.get(op) or signed + _ORDER[op]
            return self.let(f"icmp {test} {t} {x}, {y}")
        words = {"add": "add", "subtract": "sub", "multiply": "mul"}
        if k == "b":
            words = {"add": "or", "multiply": "and"}
        word = words.get(op) or op.removeprefix("bitwise_")
        return self.let(f"{word} {t} {x}, {y}")

    def _shift(self, op: str, t: str, x: str, y: str, k: str) -> str:
        """Shift; by the width or more, or by a negative number, all bits are shifted out."""
        width = int(t[1:])
        inside = self.let(f"icmp ult {t} {y}, {width}")
        if op == "bitwise_right_shift" and k == "i":
            by = self.let(f"select i1 {inside}, {t} {y}, {t} {width - 1}")
            return self.let(f"ashr {t} {x}, {by}")
        by = self.let(f"select i1 {inside}, {t} {y}, {t} 0")
        out = self.let(f"{'lshr' if op == 'bitwise_right_shift' else 'shl'} {t} {x}, {by}")
        return self.let(f"select i1 {inside}, {t} {out}, {t} 0")

    def _complex(self, op: str, dtype: np.dtype, args: list[Value]) -> Value:
        p, x = part(dtype), args[0]
        if op == "positive":
            return x
        if op in ("real", "imag"):
            return x[op == "imag"]
        if op == "conj":
            return x[0], self._float("negative", p, [x[1]])
        if op == "negative":
            return tuple(self._float(op, p, [a]) for a in x)
        if op in ("isnan", "isinf", "isfinite"):
            tests = [self._float(op, p, [a]) for a in x]
            return self.let(f"{'and' if op == 'isfinite' else 'or'} i1 {tests[0]}, {tests[1]}")
        pairs = [self._float(op, p, [a, b]) for a, b in zip(x, args[1], strict=True)]
        if op in ("equal", "not_equal"):
            return self.let(f"{'and' if op == 'equal' else 'or'} i1 {pairs[0]}, {pairs[1]}")
        return tuple(pairs)


def _cast_word(old: np.dtype, new: np.dtype) -> str:
    a, b = kind(old), kind(new)
    if a == "f" and b == "f":
        return "fpext" if new.itemsize > old.itemsize else "fptrunc"
    if a == "f":
        return "fptosi" if b == "i" else "fptoui"
    if b == "f":
        return "sitofp" if a == "i" else "uitofp"
    old_size = 0 if a == "b" else old.itemsize
    if new.itemsize > old_size:
        return "sext" if a == "i" else "zext"
    return "trunc" if new.itemsize < old_size else "bitcast"
