"""Numbers among the arguments of a traced function: they vary without a new program.

A :class:`Scalar` stands for a Python number. What Python computes from it is computed by Python
again at each call, from the text of an expression, and goes to the kernels as a number. Where the
function decides by a scalar, or needs its very value, that becomes a guard: the program holds for
calls whose scalars give the same.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr.polygraph import _trace

NAMES: dict[str, Any] = {
    "inf": math.inf,
    "nan": math.nan,
    "abs": abs,
    "round": round,
    "divmod": divmod,
    "type": type,
}
"""What expressions may use beside the scalars, which are ``a[0]``, ``a[1]``, ..."""


def text_of(value: Any) -> str:
    """Return the expression of a number or a Scalar."""
    if isinstance(value, Scalar):
        return value.expression
    if isinstance(value, complex):
        return f"complex({value.real!r}, {value.imag!r})"
    return f"({value!r})"


class Scalar:
    """A number that varies from call to call; see the module's docstring.

    Attributes
    ----------
    value : bool, int, float or complex
        What it is in the call that is traced.
    expression : str
    """

    __slots__ = ("value", "expression")
    __array_priority__ = 3000

    def __init__(self, value: Any, expression: str) -> None:
        self.value = value
        self.expression = expression

    # So that ``isinstance`` tells of it what it tells of the number.
    __class__ = property(lambda self: type(self.value))  # type: ignore[assignment]

    def known(self) -> Any:
        """Return the value, which the program then holds for alone."""
        trace = _trace.current()
        trace.guards.append((self.expression, self.value))
        return self.value

    def __repr__(self) -> str:
        return f"Scalar({self.value!r}, {self.expression!r})"

    def __str__(self) -> str:
        return str(self.known())

    def __format__(self, spec: str) -> str:
        return format(self.known(), spec)

    def __bool__(self) -> bool:
        trace = _trace.current()
        outcome = bool(self.value)
        trace.guards.append((f"(True if {self.expression} else False)", outcome))
        return outcome

    def __float__(self) -> float:
        return float(self.known())

    def __int__(self) -> int:
        return int(self.known())

    def __complex__(self) -> complex:
        return complex(self.known())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.known(), dtype)

    def __index__(self) -> int:
        return operator.index(self.known())

    def __hash__(self) -> int:
        return hash(self.known())

    def __trunc__(self) -> int:
        return math.trunc(self.known())

    def __floor__(self) -> int:
        return math.floor(self.known())

    def __ceil__(self) -> int:
        return math.ceil(self.known())

    def __round__(self, digits: int | None = None) -> Any:
        if digits is None:
            return Scalar(round(self.value), f"round({self.expression})")
        return Scalar(round(self.value, digits), f"round({self.expression}, {text_of(digits)})")

    @property
    def real(self) -> Any:
        return Scalar(self.value.real, f"{self.expression}.real")

    @property
    def imag(self) -> Any:
        return Scalar(self.value.imag, f"{self.expression}.imag")

    def conjugate(self) -> Any:
        """Return the complex conjugate, as Python's numbers do."""
        return Scalar(self.value.conjugate(), f"{self.expression}.conjugate()")

    def is_integer(self) -> bool:
        """Tell whether it is a whole number, as Python's numbers do."""
        return self.known().is_integer()

    def bit_length(self) -> int:
        """Return the number of bits, as Python's ints do."""
        return self.known().bit_length()

    def __neg__(self):
        return Scalar(-self.value, f"(-{self.expression})")

    def __pos__(self):
        return Scalar(+self.value, f"(+{self.expression})")

    def __abs__(self):
        return Scalar(abs(self.value), f"abs({self.expression})")

    def __invert__(self):
        return Scalar(~self.value, f"(~{self.expression})")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        from rtxarr.polygraph._protocols import array_ufunc

        return array_ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(self, function, types, args, kwargs):
        from rtxarr.polygraph._protocols import array_function

        return array_function(function, args, kwargs)


def _with_tensor(name: str, x: Any, y: Any) -> Any:
    """Apply an operator to a Tensor and a Scalar."""
    import rtxarr

    function = getattr(rtxarr, _FUNCTIONS[name])
    if name == "pow":  # its rule and NumPy's own choice depend on the exponent
        y = y.known() if isinstance(y, Scalar) else y
    return function(x, y)


_FUNCTIONS = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow",
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}
_SIGNS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "and_": "&",
    "or_": "|",
    "xor": "^",
    "lshift": "<<",
    "rshift": ">>",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
}


def _is_number(x: Any) -> bool:
    return isinstance(x, Scalar) or type(x) in (bool, int, float, complex)


def _operator(name: str) -> tuple[Callable, Callable]:
    compute, sign = getattr(operator, name), _SIGNS[name]

    def combine(x, y):
        left = x.value if isinstance(x, Scalar) else x
        right = y.value if isinstance(y, Scalar) else y
        made = Scalar(compute(left, right), f"({text_of(x)} {sign} {text_of(y)})")
        if name == "pow":  # of ints and of floats it may be of another type for other values
            _trace.current().guards.append((f"type({made.expression})", type(made.value)))
        return made

    def forward(self, other):
        if _is_number(other):
            return combine(self, other)
        return _with_tensor(name, self, other) if _is_tensor(other) else NotImplemented

    def reflected(self, other):
        if _is_number(other):
            return combine(other, self)
        return _with_tensor(name, other, self) if _is_tensor(other) else NotImplemented

    return forward, reflected


def _is_tensor(x: Any) -> bool:
    from rtxarr.autograd import Tensor

    return isinstance(x, Tensor)


for _name in _SIGNS:
    _forward, _reflected = _operator(_name)
    setattr(Scalar, f"__{_name.strip('_')}__", _forward)
    if _name not in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Scalar, f"__r{_name.strip('_')}__", _reflected)
del _name, _forward, _reflected

numbers.Number.register(Scalar)
