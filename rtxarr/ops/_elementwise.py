"""Elementwise functions of the standard, and their derivative rules."""

import numpy as np

from rtxarr import dtypes
from rtxarr._device import full_scalar, is_array, is_device_array, namespace, to_device
from rtxarr.autograd._op import differentiable, nondifferentiable
from rtxarr.autograd._tape import raw
from rtxarr.kernels import elementwise as kernels

__all__ = [
    "abs",
    "acos",
    "acosh",
    "add",
    "asin",
    "asinh",
    "astype",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "ceil",
    "clip",
    "conj",
    "copysign",
    "cos",
    "cosh",
    "divide",
    "equal",
    "exp",
    "expm1",
    "floor",
    "floor_divide",
    "greater",
    "greater_equal",
    "hypot",
    "imag",
    "isfinite",
    "isinf",
    "isnan",
    "less",
    "less_equal",
    "log",
    "log10",
    "log1p",
    "log2",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "multiply",
    "negative",
    "nextafter",
    "not_equal",
    "positive",
    "pow",
    "real",
    "reciprocal",
    "remainder",
    "round",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "subtract",
    "tan",
    "tanh",
    "trunc",
    "where",
]

# A set: asking for membership does not compare with the dtypes of other libraries, which warn.
BFLOAT16 = frozenset((np.dtype(dtypes.bfloat16),))
_OBJECTS = np.dtype(object)  # the only one


class _Implementations(dict):
    """A namespace's function by the types of its arguments: spares two look-ups a call."""

    def __init__(self, name):
        self._name = name

    def __missing__(self, types):
        name = self._name

        def function(*args):
            found = getattr(namespace(*args), name)
            if any(is_array(a) for a in args):  # else it depends on the current device
                if all(is_device_array(a) or type(a) in (int, float) for a in args):
                    found = kernels.preferred(name, found)
                self[types] = found
            return found(*args)

        return function


def _unary(name, summary, rule=None, *, holomorphic=True, view=False, of_complex=None):
    """Make the one-argument function ``name``; ``rule`` is its gradient, None for zero.

    ``of_complex`` corrects what the namespace gives for a complex array.
    """

    implementations = _Implementations(name)

    def function(x, /):
        out = implementations[type(x)](x)
        if of_complex is not None and dtypes.is_complex(out.dtype):
            return of_complex(x, out)
        return out

    rules = {"x": rule} if rule else {}
    return _finish(function, name, summary, ("x",), rules, holomorphic, view)


def _binary(name, summary, rule1=None, rule2=None, *, holomorphic=True):
    """Make the two-argument function ``name``, with broadcasting and promotion."""
    implementations = _Implementations(name)

    def function(x1, x2, /):
        dtype1, dtype2 = getattr(x1, "dtype", None), getattr(x2, "dtype", None)
        if (dtype1 is not dtype2 or type(x1) is not type(x2)) and (
            dtype1 in BFLOAT16 or dtype2 in BFLOAT16
        ):
            out = _with_number(name, x1, x2)
            if out is not None:
                return out
            x1, x2 = _align(x1, x2)
        try:
            return implementations[type(x1), type(x2)](x1, x2)
        except ValueError:
            _refuse_shapes(x1, x2)
            raise

    rules = {"x1": rule1, "x2": rule2} if rule1 else {}
    return _finish(function, name, summary, ("x1", "x2"), rules, holomorphic)


def _with_number(name, x1, x2):
    """Give ``name`` of a large GPU array and a Python number, which the kernel takes; or None."""
    if name not in kernels.BINARY:
        return None
    array, number = (x1, x2) if hasattr(x1, "dtype") else (x2, x1)
    if type(number) not in (int, float) or not is_device_array(array):
        return None
    return kernels.binary(name)(x1, x2)


def _refuse_shapes(x1, x2):
    """Raise ValueError if two arrays do not broadcast."""
    shapes = [getattr(x, "shape", ()) for x in (x1, x2)]
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"x1 and x2 must have shapes that broadcast, got {shapes[0]} and {shapes[1]}"
        ) from None


def _finish(function, name, summary, args, rules, holomorphic, view=False):
    function.__name__ = function.__qualname__ = name
    shape = "any shape" if len(args) == 1 else "broadcast against each other"
    function.__doc__ = (
        f"{summary}\n\nParameters\n----------\n{', '.join(args)} : array or Tensor, {shape}\n"
    )
    if not rules:
        return nondifferentiable(function)
    op = differentiable(function, elementwise=True, holomorphic=holomorphic, view=view)
    op.defvjps(**rules)
    return op


def _align(*values):
    """Convert values to their common dtype where one is bfloat16, which NumPy cannot promote."""
    dtype = dtypes.result_type(*values)
    like = next(v for v in values if is_array(v))
    return [full_scalar(like, v, dtype) for v in values]


# ------------------------------------------------------------------ arithmetic
#
# Rules run on raw arrays, whose operators are their library's: on the CPU the quickest way. On a
# GPU the functions here are, as they have the kernels.


def _times(x, y):
    return multiply(x, y) if is_device_array(x) else x * y


def _over(x, y):
    return divide(x, y) if is_device_array(x) else x / y


def _minus(x):
    return negative(x) if is_device_array(x) else -x


def _twice(g, x):
    """Give ``2 * (g * x)``."""
    if not is_device_array(g):
        return 2 * (g * x)
    # In one launch where that has the bits of two: halves would be rounded once, not twice.
    if is_device_array(x) and g.dtype == np.float32:
        out = kernels.scaled_product(g, x, 2)
        if out is not None:
            return out
    return multiply(multiply(g, x), 2)


add = _binary("add", "Add ``x2`` to ``x1``.", lambda g: g, lambda g: g)
subtract = _binary("subtract", "Subtract ``x2`` from ``x1``.", lambda g: g, lambda g: _minus(g))
multiply = _binary(
    "multiply",
    "Multiply ``x1`` by ``x2``.",
    lambda g, x2: _times(g, x2),
    lambda g, x1: _times(g, x1),
)
divide = _binary(
    "divide",
    "Divide ``x1`` by ``x2``.",
    lambda g, x2: _over(g, x2),
    lambda g, out, x2: _minus(_over(_times(g, out), x2)),
)
floor_divide = _binary("floor_divide", "Divide and round down.")
remainder = _binary(
    "remainder",
    "Give the remainder of division, with the sign of ``x2``.",
    lambda g: g,
    lambda g, x1, x2: -g * floor(x1 / x2),
)
negative = _unary("negative", "Negate each element.", lambda g: _minus(g))
positive = _unary("positive", "Give each element unchanged.", lambda g: g)


def _abs_rule(g, x, out):
    return g * (x / where(out == 0, 1, out) if dtypes.is_complex(x.dtype) else sign(x))


abs = _unary("abs", "Give the absolute value.", _abs_rule, holomorphic=False)
square = _unary("square", "Square each element.", lambda g, x: _twice(g, x))
reciprocal = _unary("reciprocal", "Give one over each element.", lambda g, out: -(g * out * out))
sqrt = _unary("sqrt", "Give the square root.", lambda g, out: _over(_times(g, 0.5), out))


def _pow_base(g, x1, x2):
    if isinstance(x2, (int, float, complex)):
        return g * 0 if x2 == 0 else _twice(g, x1) if x2 == 2 else g * (x2 * x1 ** (x2 - 1))
    zero = x2 == 0  # 0 ** -1 must not turn the zero derivative into a NaN
    return g * where(zero, 0, x2 * x1 ** where(zero, 1, x2 - 1))


def _pow_exponent(g, out, x1):
    if isinstance(x1, (int, float, complex)):
        x1 = namespace(raw(g)).asarray(x1)
    return where(x1 == 0, 0, g * out * log(where(x1 == 0, 1, x1)))


pow = _binary("pow", "Raise ``x1`` to the power ``x2``.", _pow_base, _pow_exponent)

# ------------------------------------------------- exponentials and logarithms


def _with_real_part(xp, x, part):
    """Give ``x`` with ``part`` as real part; to subtract keeps the sign of an imaginary zero."""
    return x - (xp.real(x) - part)


def _complex_expm1(x, out):
    # CuPy's is exp(x) - 1 everywhere, NumPy's gives NaN for infinities.
    xp = namespace(x)
    a, b = xp.real(x), xp.imag(x)
    near = xp.abs(a) < 40
    within = xp.where(near, a, 0)
    part = xp.expm1(within) * xp.cos(b) - 2 * xp.sin(0.5 * b) ** 2
    return xp.where(near, _with_real_part(xp, out, part), xp.exp(x) - 1)[()]


def _complex_log1p(x, out):
    # NumPy's and CuPy's real part is log(abs(1 + x)), with the error of that sum.
    xp = namespace(x)
    a, b = xp.real(x), xp.imag(x)
    near = xp.abs(x) < 0.5
    part = 0.5 * xp.log1p(xp.where(near, a * (2 + a) + b * b, 0))
    return xp.where(near, _with_real_part(xp, out, part), out)[()]


exp = _unary("exp", "Give the exponential.", lambda g, out: _times(g, out))
expm1 = _unary(
    "expm1",
    "Give ``exp(x) - 1``, exact near zero.",
    lambda g, out: g * (out + 1),
    of_complex=_complex_expm1,
)
log = _unary("log", "Give the natural logarithm.", lambda g, x: _over(g, x))
log1p = _unary(
    "log1p",
    "Give ``log(1 + x)``, exact near zero.",
    lambda g, x: g / (x + 1),
    of_complex=_complex_log1p,
)
log2 = _unary("log2", "Give the base-2 logarithm.", lambda g, x: g / (x * 0.6931471805599453))
log10 = _unary("log10", "Give the base-10 logarithm.", lambda g, x: g / (x * 2.302585092994046))


def _log_add_share(g, x, out):
    # Where both are -inf the difference is NaN and the gradient zero.
    difference = x - out
    return g * exp(where(isnan(difference), -np.inf, difference))


logaddexp = _binary(
    "logaddexp",
    "Give ``log(exp(x1) + exp(x2))`` without overflow.",
    lambda g, x1, out: _log_add_share(g, x1, out),
    lambda g, x2, out: _log_add_share(g, x2, out),
)

# ------------------------------------------- trigonometric and hyperbolic ones

sin = _unary("sin", "Give the sine.", lambda g, x: g * cos(x))
cos = _unary("cos", "Give the cosine.", lambda g, x: -(g * sin(x)))
tan = _unary("tan", "Give the tangent.", lambda g, out: g * (1 + out * out))
asin = _unary("asin", "Give the inverse sine.", lambda g, x: g / sqrt(1 - x * x))
acos = _unary("acos", "Give the inverse cosine.", lambda g, x: -g / sqrt(1 - x * x))
atan = _unary("atan", "Give the inverse tangent.", lambda g, x: g / (1 + x * x))
atan2 = _binary(
    "atan2",
    "Give the angle of the point ``(x2, x1)``.",
    lambda g, x1, x2: g * x2 / (x1 * x1 + x2 * x2),
    lambda g, x1, x2: -g * x1 / (x1 * x1 + x2 * x2),
)
sinh = _unary("sinh", "Give the hyperbolic sine.", lambda g, x: g * cosh(x))
cosh = _unary("cosh", "Give the hyperbolic cosine.", lambda g, x: g * sinh(x))
tanh = _unary("tanh", "Give the hyperbolic tangent.", lambda g, out: g * (1 - out * out))
asinh = _unary("asinh", "Give the inverse hyperbolic sine.", lambda g, x: g / sqrt(x * x + 1))
acosh = _unary(
    "acosh", "Give the inverse hyperbolic cosine.", lambda g, x: g / (sqrt(x - 1) * sqrt(x + 1))
)
atanh = _unary("atanh", "Give the inverse hyperbolic tangent.", lambda g, x: g / (1 - x * x))
hypot = _binary(
    "hypot",
    "Give ``sqrt(x1**2 + x2**2)`` without overflow.",
    lambda g, x1, out: g * x1 / where(out == 0, 1, out),
    lambda g, x2, out: g * x2 / where(out == 0, 1, out),
)

# ------------------------------------------------------- choosing and rounding


def _larger_share(g, mine, other):
    # A NaN is propagated by the forward function, so it also takes the gradient.
    wins = (mine > other) | isnan(mine)
    return where(wins, g, where(mine == other, 0.5 * g, 0))


maximum = _binary(
    "maximum",
    "Give the larger of the two; ties share the gradient evenly.",
    lambda g, x1, x2: _larger_share(g, x1, x2),
    lambda g, x1, x2: _larger_share(g, x2, x1),
)
minimum = _binary(
    "minimum",
    "Give the smaller of the two; ties share the gradient evenly.",
    lambda g, x1, x2: _larger_share(g, -x1, -x2),
    lambda g, x1, x2: _larger_share(g, -x2, -x1),
)
copysign = _binary(
    "copysign",
    "Give the magnitude of ``x1`` with the sign of ``x2``.",
    lambda g, x1, out: g * sign(x1) * sign(out),
    lambda g: g * 0,
)


@nondifferentiable
def sign(x, /):
    """Give -1, 0 or 1 (``x / abs(x)`` for complex numbers).

    Parameters
    ----------
    x : array or Tensor, any shape
    """
    xp = namespace(x)
    if is_device_array(x) and x.dtype.kind == "f":
        # array_api_compat's finds NaN by a mask, which waits for the GPU.
        return xp.where(xp.isnan(x), x, (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype))
    return xp.sign(x)


signbit = _unary("signbit", "Tell whether the sign bit is set.")
floor = _unary("floor", "Round down.")
ceil = _unary("ceil", "Round up.")
trunc = _unary("trunc", "Round towards zero.")


@nondifferentiable
def round(x, /):
    """Round to the nearest integer, halves to even.

    Parameters
    ----------
    x : array or Tensor, any shape
    """
    xp = namespace(x)
    out = xp.round(x)
    # CuPy gives float32 for bfloat16.
    return out if getattr(x, "dtype", out.dtype) == out.dtype else xp.astype(out, x.dtype)


nextafter = _binary("nextafter", "Give the next representable value from ``x1`` towards ``x2``.")

# --------------------------------------------------------------------- complex

conj = _unary("conj", "Give the complex conjugate.", lambda g: conj(g), holomorphic=False)
real = _unary("real", "Give the real part.", lambda g: g, holomorphic=False, view=True)
imag = _unary("imag", "Give the imaginary part.", lambda g: g * 1j, holomorphic=False, view=True)

# ---------------------------------------------------------- tests and logic

equal = _binary("equal", "Tell where ``x1 == x2``.")
not_equal = _binary("not_equal", "Tell where ``x1 != x2``.")
less = _binary("less", "Tell where ``x1 < x2``.")
less_equal = _binary("less_equal", "Tell where ``x1 <= x2``.")
greater = _binary("greater", "Tell where ``x1 > x2``.")
greater_equal = _binary("greater_equal", "Tell where ``x1 >= x2``.")
isfinite = _unary("isfinite", "Tell which elements are finite.")
isinf = _unary("isinf", "Tell which elements are infinite.")
isnan = _unary("isnan", "Tell which elements are NaN.")
logical_and = _binary("logical_and", "Give the logical AND.")
logical_or = _binary("logical_or", "Give the logical OR.")
logical_xor = _binary("logical_xor", "Give the logical XOR.")
logical_not = _unary("logical_not", "Give the logical NOT.")
bitwise_and = _binary("bitwise_and", "Give the bitwise AND.")
bitwise_or = _binary("bitwise_or", "Give the bitwise OR.")
bitwise_xor = _binary("bitwise_xor", "Give the bitwise XOR.")
bitwise_invert = _unary("bitwise_invert", "Flip every bit.")
bitwise_left_shift = _binary("bitwise_left_shift", "Shift the bits of ``x1`` left by ``x2``.")
bitwise_right_shift = _binary("bitwise_right_shift", "Shift the bits of ``x1`` right by ``x2``.")


@differentiable(elementwise=True)
def where(condition, x1, x2, /):
    """Take elements of ``x1`` where ``condition`` holds and of ``x2`` elsewhere.

    Parameters
    ----------
    condition : array of bool
    x1, x2 : array, Tensor or scalar
        All three are broadcast against each other.

    Notes
    -----
    The gradient of what was not taken is zero even where its own derivative is NaN or
    infinite: the mask travels back through elementwise operations, views, sums and means, and a
    mask of whole rows through norms, softmax and reductions.
    """
    if getattr(x1, "dtype", None) in BFLOAT16 or getattr(x2, "dtype", None) in BFLOAT16:
        x1, x2 = _align(x1, x2)
        # CuPy gives float32 for two bfloat16 arrays.
        return namespace(x1).where(condition, x1, x2).astype(x1.dtype, copy=False)
    out = namespace(condition, x1, x2).where(condition, x1, x2)
    if out.dtype is _OBJECTS:
        raise TypeError(
            f"x1 and x2 must be arrays or numbers, got {type(x1).__name__} and {type(x2).__name__}"
        )
    return out


where.defvjps(
    x1=lambda g, condition: where(condition, g, 0),
    x2=lambda g, condition: where(condition, 0, g),
)
where.defmasks(
    x1=lambda g, condition: condition,
    x2=lambda g, condition: logical_not(condition),
)


@differentiable(elementwise=True)
def clip(x, /, min=None, max=None):
    """Limit each element to ``[min, max]``; the gradient passes where nothing was cut off.

    Parameters
    ----------
    x : array or Tensor
    min, max : array, Tensor, scalar or None
        Broadcast against ``x``; the result has the shape and dtype of ``x``.
    """
    if getattr(x, "dtype", None) in BFLOAT16:
        low = dtypes.finfo(x.dtype).min if min is None else min
        high = dtypes.finfo(x.dtype).max if max is None else max
        return minimum(maximum(x, full_scalar(x, low, x.dtype)), full_scalar(x, high, x.dtype))
    xp = namespace(x, min, max)
    if is_device_array(x) and x.dtype.kind == "f":
        # array_api_compat's copies by a mask, which waits for the GPU.
        low, high = (
            xp.astype(bound, x.dtype) if hasattr(bound, "dtype") else bound for bound in (min, max)
        )
        out = x if low is None else xp.maximum(x, low)
        out = out if high is None else xp.minimum(out, high)
        return xp.asarray(x, copy=True) if out is x else out
    return xp.clip(x, min, max)


def _clip_inside(g, x, min, max):
    inside = True if min is None else x >= min
    return where(inside if max is None else inside & (x <= max), g, 0)


clip.defvjps(
    x=_clip_inside,
    min=lambda g, x, min, max: where((x < min) if max is None else (x < min) & (min <= max), g, 0),
    max=lambda g, x, max: where(x > max, g, 0),
)


@differentiable(elementwise=True)
def astype(x, dtype, /, *, copy=True, device=None):
    """Convert ``x`` to ``dtype``; between inexact types the gradient is converted back.

    Parameters
    ----------
    x : array or Tensor
    dtype : dtype
    copy : bool, default True
        Copy even when ``x`` already has that dtype.
    device : Device or str, optional
        Where to put the result; the device of ``x`` by default.
    """
    if device is not None:
        x = to_device(x, device)
    return kernels.cast(x, dtype, copy=copy)


astype.defvjps(x=lambda g: g)
