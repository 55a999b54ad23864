"""Elementwise functions of large arrays at the memory bandwidth.

CuPy's kernels give each thread one element, which takes 40 % of the bandwidth for float32 and 20 %
for the half types; here a thread takes 16 bytes. Small arrays are left to CuPy, as are those that
have gaps, lie otherwise than each other, or begin between multiples of 16 bytes: all functions
here give None for them, at little cost.

Half precision is computed in float32 and rounded once; a Python number is rounded to the type of
the array first, as NumPy does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._device import is_device_array, launch, namespace
from rtxarr.dtypes import FLOATING, is_half
from rtxarr.kernels._dense import _address
from rtxarr.kernels.multi_tensor import contiguous

__all__ = [
    "BINARY",
    "UNARY",
    "add_to",
    "binary",
    "cast",
    "convert",
    "preferred",
    "scaled_product",
    "unary",
]

UNARY = ("abs", "exp", "log", "negative", "sqrt", "square", "tanh")
BINARY = ("add", "divide", "maximum", "minimum", "multiply", "subtract")

# From this many elements on CuPy's kernels take longer than a launch.
_FEWEST = 65_536
_NUMBERS = (int, float)
_TAKEN = FLOATING - {np.dtype("float64")}


def preferred(name: str, otherwise: Callable) -> Callable:
    """Return ``otherwise``, but with the kernel where it fits.

    Parameters
    ----------
    name : str
        Any function's; of those neither in ``UNARY`` nor in ``BINARY`` ``otherwise`` is returned.
    otherwise : callable
        CuPy's function, of arrays and Python numbers.
    """
    if name not in UNARY + BINARY:
        return otherwise
    kernel: Callable = unary(name) if name in UNARY else binary(name)

    def function(*operands):
        out = kernel(*operands)
        return otherwise(*operands) if out is None else out

    return function


@functools.cache
def unary(name: str) -> Callable[[Any], Any]:
    """Return ``function(x)``, which gives an array like ``x`` or None.

    Parameters
    ----------
    name : str
        One of ``UNARY``.
    """

    def function(x):
        if x.size < _FEWEST or not _fits(x):
            return None
        from rtxarr.kernels._elementwise_cuda import unary as kernel

        return _run(kernel(name, x.dtype), x, (_address(x),))

    return function


@functools.cache
def binary(name: str) -> Callable[[Any, Any], Any]:
    """Return ``function(x, y)``, which gives an array or None.

    Parameters
    ----------
    name : str
        One of ``BINARY``. The operands are two arrays of one type, or an array and a Python number.
        The arrays are alike; or one has a single element, or the same everywhere, or rows that each
        meet as many of the other's, such as (n_columns,) or (n_batches, 1, n_columns).
    """

    def function(x, y):
        if type(y) in _NUMBERS:
            return with_number(x, y, "number second")
        if type(x) in _NUMBERS:
            return with_number(y, x, "number first")
        n = x.size
        if n < _FEWEST and y.size < _FEWEST:
            return None
        if _are_alike(x, y):
            return run(x, y, "arrays")
        if n >= y.size and _is_one(y, x):
            return run(x, y, "one second")
        if _is_one(x, y):
            return run(y, x, "one first")
        return with_row(x, y, "second") if n > y.size else with_row(y, x, "first")

    def with_row(x, y, side):
        if not contiguous(x) or not contiguous(y) or not _fits(x):
            return None
        if y.dtype != x.dtype or _place(y) != _place(x) or _address(y) % 16:
            return None
        found = row_plan(x.dtype, side, y.shape, x.shape)
        if found is None:
            return None
        kernel, *sizes = found
        out = _empty_like(x, x.dtype)
        addresses = (_address(x), _address(y), _address(out))
        launch(kernel, tuple(sizes[:2]), (*addresses, *sizes))
        return out

    @functools.lru_cache(maxsize=256)
    def row_plan(dtype, side, of_row, shape):
        """Give the kernel, columns, rows and repeats; None for rows that it does not take."""
        from rtxarr.kernels._elementwise_cuda import binary_with_row

        kernel = binary_with_row(name, dtype, side)
        n_columns, repeats = _row_of(of_row, shape)
        if not n_columns or n_columns % kernel.per_thread:
            return None
        n_rows = math.prod(shape) // n_columns
        n_columns //= kernel.per_thread
        return None if n_rows > _most_rows(n_columns) else (kernel, n_columns, n_rows, repeats)

    def run(x, y, form):
        if not _fits(x) or y.dtype != x.dtype or _place(y) != _place(x):
            return None
        if form == "arrays" and _address(y) % 16:
            return None
        from rtxarr.kernels._elementwise_cuda import binary as kernel

        return _run(kernel(name, x.dtype, form), x, (_address(x), _address(y)))

    def with_number(x, number, form):
        if x.size < _FEWEST or not _fits(x):
            return None
        from rtxarr.kernels._elementwise_cuda import binary as kernel

        number = _rounded(number, x.dtype)
        return _run(kernel(name, x.dtype, form), x, (_address(x), number))

    return function


def scaled_product(x: Any, y: Any, number: float) -> Any:
    """Give ``number * (x * y)``, or None.

    Parameters
    ----------
    x, y : array
        As for ``binary("multiply")``.
    number : float
    """
    if x.size < y.size or not _are_alike(x, y) and _is_one(x, y):
        x, y = y, x
    if x.size < _FEWEST or not _fits(x) or y.dtype != x.dtype or _place(y) != _place(x):
        return None
    alike = _are_alike(x, y)
    if _address(y) % 16 if alike else not _is_one(y, x):
        return None
    from rtxarr.kernels._elementwise_cuda import scaled_product as kernel

    run = kernel(x.dtype, "arrays" if alike else "one")
    return _run(run, x, (_address(x), _address(y), _rounded(number, x.dtype)))


def add_to(total: Any, x: Any) -> bool:
    """Add ``x`` to ``total`` in place, if the kernels take them; tell whether they did."""
    if total.size < _FEWEST or not _are_alike(total, x) or not _fits(total):
        return False
    if x.dtype != total.dtype or _place(x) != _place(total) or _address(x) % 16:
        return False
    addresses = (_address(total), _address(x))
    if 0 < abs(addresses[0] - addresses[1]) < total.size * total.itemsize:
        return False  # other threads would change what is still to be read
    from rtxarr.kernels._elementwise_cuda import binary as kernel

    _run(kernel("add", total.dtype, "arrays"), total, addresses, out=total)
    return True


def cast(x: Any, dtype: Any, *, copy: bool = True) -> Any:
    """Give ``x`` in another type: by the kernel where it fits, else by its own library.

    Parameters
    ----------
    x : array
    dtype : dtype
    copy : bool, default True
        Copy even when ``x`` already has that type.
    """
    if is_device_array(x) and x.size >= _FEWEST:
        out = convert(x, np.dtype(dtype))
        if out is not None:
            return out
    return namespace(x).astype(x, dtype, copy=copy)


def convert(x: Any, dtype: Any) -> Any:
    """Give ``x`` as float32 or a half type, rounded to nearest, or None.

    Parameters
    ----------
    x : array
    dtype : NumPy dtype
        Float32 for half types, a half type for float32.
    """
    if x.size < _FEWEST or (dtype == np.float32) == (x.dtype == np.float32):
        return None
    if not (dtype == np.float32 or is_half(dtype)) or not _fits(x):
        return None
    from rtxarr.kernels._elementwise_cuda import conversion as kernel

    return _run(kernel(x.dtype, dtype), x, (_address(x),), dtype=dtype)


# ------------------------------------------------------------------------------- operands


def _fits(x):
    """Tell whether all of ``x`` can be read 16 bytes at a time on the current GPU."""
    if x.dtype not in _TAKEN or not _is_dense(x) or _address(x) % 16:
        return False
    if _device._SIMULATING:
        return True
    return is_device_array(x) and x.data.device_id == _device.cupy.cuda.runtime.getDevice()


def _are_alike(x, y):
    """Tell whether elements with one index lie equally far from where the arrays begin."""
    if x.shape != y.shape:
        return False
    return x.strides == y.strides or (contiguous(x) and contiguous(y))


def _is_one(x, like):
    """Tell whether ``x`` is one element everywhere, and broadcast gives the shape of ``like``."""
    if x.size == 1:
        return x.ndim <= like.ndim
    return x.shape == like.shape and not any(x.strides)


def _row_of(rows, whole):
    """Return the length of rows of one shape and how often each comes in another; 0, 0 for none.

    In C order the axes of the rows are those of the whole, then ones, then those of the whole.
    """
    if len(rows) > len(whole):
        return 0, 0
    axis, shape = len(whole), (1,) * (len(whole) - len(rows)) + rows
    length = repeats = 1
    while axis and shape[axis - 1] == whole[axis - 1]:
        axis -= 1
        length *= shape[axis]
    while axis and shape[axis - 1] == 1:
        axis -= 1
        repeats *= whole[axis]
    return (length, repeats) if shape[:axis] == whole[:axis] else (0, 0)


def _most_rows(n_columns):
    """Return how many rows a launch can have: 65,535 blocks, of several rows if those are short."""
    return 65_535 * (256 // min(256, 1 << (n_columns - 1).bit_length()))


def _is_dense(x):
    """Tell whether the elements lie side by side, in whatever order of the axes."""
    if contiguous(x):
        return True
    expected = x.itemsize
    for stride, n in sorted(zip(x.strides, x.shape, strict=True)):
        if n > 1:
            if stride != expected:
                return False
            expected *= n
    return True


def _place(x):
    return None if isinstance(x, (np.ndarray, np.generic)) else x.data.device_id


def _rounded(number, dtype):
    # Zeros apart, which are equal whatever their sign.
    return _rounded_of_sign(number, dtype, not number and math.copysign(1, number) < 0)


@functools.lru_cache(maxsize=1024)
def _rounded_of_sign(number, dtype, is_negative):
    with np.errstate(over="ignore"):
        return np.float32(np.asarray(number, dtype))


def _run(kernel, like, arguments, *, dtype=None, out=None):
    if out is None:
        out = _empty_like(like, like.dtype if dtype is None else dtype)
    n = like.size
    launch(kernel, -(-n // kernel.per_thread), (*arguments, _address(out), n))
    return out


def _empty_like(x, dtype):
    if isinstance(x, np.ndarray):
        return np.empty_like(x, dtype)
    if contiguous(x):
        return _device.cupy.ndarray(x.shape, dtype)
    return _device.cupy.empty_like(x, dtype)
