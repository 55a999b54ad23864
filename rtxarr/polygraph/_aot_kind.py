"""What a program of a file holds for: kinds of arguments, processors."""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import numpy as np

from rtxarr import _device
from rtxarr.autograd import Tensor
from rtxarr.polygraph import _aot_data as data
from rtxarr.random import Generator

FORMAT = 2

_NUMBERS = {"float": float, "int": int, "complex": complex}
_LEVELS = {
    "x86-64-v2": ("SSE42", "POPCNT"),
    "x86-64-v3": ("AVX2", "FMA3", "F16C"),
    "x86-64-v4": ("AVX512_SKX",),
}


def cpu_levels() -> list[str]:
    """Return the levels of the x86-64 psABI that this processor has, the lowest first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    has = np._core._multiarray_umath.__cpu_features__  # type: ignore[attr-defined]
    found = []
    for level, features in _LEVELS.items():
        if not all(has.get(f) for f in features):
            break
        found.append(level)
    return found


class Kind(NamedTuple):
    """What of an argument is part of the key of a program.

    ``kind`` is "array", "tensor", "scalar" (NumPy's), "generator", "number" (which may vary) or
    "value" (which is part of the program).
    """

    kind: str
    dtype: Any = None
    shape: tuple | None = None
    strides: tuple | None = None  # None: C-contiguous
    value: Any = None
    on_gpu: bool = False

    def described(self) -> list:
        """Return it as JSON."""
        if self.kind == "number":
            return ["number", self.dtype]
        if self.kind == "value":
            return ["value", self.value]
        if self.kind == "generator":
            return ["generator"]
        strides = None if self.strides is None else list(self.strides)
        return [self.kind, self.dtype.name, list(self.shape or ()), strides]

    def __str__(self) -> str:
        if self.kind in ("number", "value"):
            return str(self.dtype if self.kind == "number" else self.value)
        if self.kind == "generator":
            return "Generator"
        return f"{self.dtype.name}{list(self.shape or ())}"


def kind_of(x: Any, by_value: bool) -> Kind:
    """Return the kind of an argument; ``by_value`` says that numbers do not vary."""
    if isinstance(x, Tensor):
        return _of_array("tensor", x.data)
    if isinstance(x, np.generic):
        return Kind("scalar", x.dtype, ())
    if isinstance(x, Generator):
        return Kind("generator")
    if _device.is_array(x):
        return _of_array("array", x)
    name = type(x).__name__
    if not by_value and _NUMBERS.get(name) is type(x):
        return Kind("number", name)
    # The type too: 1, 1.0 and True are equal.
    return Kind("value", value=repr((name, data.encode(x))))


def _of_array(kind: str, x: Any) -> Kind:
    contiguous = isinstance(x, np.generic) or x.flags.c_contiguous
    strides = None if contiguous else tuple(x.strides)
    return Kind(kind, x.dtype, tuple(x.shape), strides, None, _device.is_device_array(x))


def read_kind(x: Any, target: str) -> Kind:
    """Return a kind from JSON."""
    kind, *rest = x
    if kind == "number":
        if rest[0] not in _NUMBERS:
            raise ValueError(f"not a type of numbers: {rest[0]!r}")
        return Kind("number", rest[0])
    if kind == "value":
        return Kind("value", value=str(rest[0]))
    if kind == "generator":
        return Kind("generator")
    if kind not in ("array", "tensor", "scalar"):
        raise ValueError(f"not a kind of arguments: {kind!r}")
    dtype, shape, strides = rest
    if kind == "scalar":
        return Kind(kind, data.dtype_of(dtype), ())
    strides = None if strides is None else tuple(map(int, strides))
    return Kind(kind, data.dtype_of(dtype), data.shape_of(shape), strides, None, target == "cuda")
