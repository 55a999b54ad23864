"""Philox-4x32-10 and what is made of its words, written once for NumPy, the CPU and the GPU.

Everything here is integer arithmetic or single, correctly rounded additions, multiplications,
divisions and square roots in a written order. So the three builds of these functions give the same
bits: no library's log or cos takes part, and no compiler may contract a product and a sum,
because ``Arithmetic`` names the rounded operations explicitly.

References
----------
Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
doi:10.1145/2063384.2063405 (Philox). Wichura, "Algorithm AS 241: the percentage points of the
normal distribution", Applied Statistics 37 (1988), doi:10.2307/2347330 (PPND16). Lemire, "Fast
random integer generation in an interval", 2019, arXiv:1805.10941 (``bounded``).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

_U = np.uint64  # numba turns a uint64 with a bare integer into a float64
_MASK = _U(0xFFFFFFFF)
_MAX = _U(0xFFFFFFFFFFFFFFFF)
_S32 = _U(32)
_ONE = _U(1)
_ZERO = _U(0)
_MUL0, _MUL1 = _U(0xD2511F53), _U(0xCD9E8D57)
_WEYL0, _WEYL1 = _U(0x9E3779B9), _U(0xBB67AE85)
# Changes the stream for the words that replace a rejected one.
_RETRY = _U(0xA5A5A5A500000000)

_SQRT_HALF = 0.7071067811865476
_LN2 = 0.6931471805599453


class Arithmetic(NamedTuple):
    """Operations of float64 (mul32, add32: of float32) that round once, never contracted."""

    mul: Callable
    add: Callable
    div: Callable
    sqrt: Callable
    frexp: Callable
    select: Callable  # select(condition, x, y)
    mul32: Callable
    add32: Callable
    product: Callable  # high and low word of the product of two words


def product(a: Any, b: Any) -> Any:
    """Return the high and the low half of the product of two 32-bit words, as uint64."""
    whole = a * b
    return whole >> _S32, whole & _MASK


def build(jit: Callable, arithmetic: Arithmetic) -> SimpleNamespace:
    """Return the functions below, each passed through ``jit``."""
    mul, add, div, sqrt, frexp, select, _, _, product = arithmetic

    @jit
    def philox(block, stream, key):
        """Return the four 32-bit words of a counter, as uint64.

        The counter's words, lowest first, are ``block``'s low and high and ``stream``'s low and
        high half; ``key`` holds the two key words.
        """
        c0, c1 = block & _MASK, block >> _S32
        c2, c3 = stream & _MASK, stream >> _S32
        k0, k1 = key & _MASK, key >> _S32
        for _ in range(10):
            high0, low0 = product(_MUL0, c0)
            high1, low1 = product(_MUL1, c2)
            c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
            k0 = (k0 + _WEYL0) & _MASK
            k1 = (k1 + _WEYL1) & _MASK
        return c0, c1, c2, c3

    @jit
    def multiply(a, b):
        """Return the high and the low half of the 128-bit product, without overflow."""
        a0, a1, b0, b1 = a & _MASK, a >> _S32, b & _MASK, b >> _S32
        low, cross0, cross1 = a0 * b0, a0 * b1, a1 * b0
        middle = (low >> _S32) + (cross0 & _MASK) + (cross1 & _MASK)
        high = a1 * b1 + (cross0 >> _S32) + (cross1 >> _S32) + (middle >> _S32)
        return high, ((middle & _MASK) << _S32) | (low & _MASK)

    @jit
    def log(x):
        """Return the natural logarithm of ``x > 0``, to two units in the last place."""
        m, exponent = frexp(x)
        small = m < _SQRT_HALF
        m = select(small, mul(m, 2.0), m)
        exponent = select(small, exponent - 1, exponent)
        # log m = 2 (s + s**3/3 + s**5/5 + ...) with |s| < 0.172: eleven terms reach 2**-54.
        s = div(m - 1.0, m + 1.0)
        z = mul(s, s)
        t = add(mul(z, 1 / 21), 1 / 19)
        t = add(mul(z, t), 1 / 17)
        t = add(mul(z, t), 1 / 15)
        t = add(mul(z, t), 1 / 13)
        t = add(mul(z, t), 1 / 11)
        t = add(mul(z, t), 1 / 9)
        t = add(mul(z, t), 1 / 7)
        t = add(mul(z, t), 1 / 5)
        t = add(mul(z, t), 1 / 3)
        s = mul(s, 2.0)
        return add(mul(np.float64(exponent), _LN2), add(s, mul(s, mul(z, t))))

    @jit
    def horner(x, c0, c1, c2, c3, c4, c5, c6, c7):
        t = add(mul(x, c7), c6)
        t = add(mul(x, t), c5)
        t = add(mul(x, t), c4)
        t = add(mul(x, t), c3)
        t = add(mul(x, t), c2)
        t = add(mul(x, t), c1)
        return add(mul(x, t), c0)

    @jit
    def central(q):
        """AS 241 for ``q = p - 1/2`` with ``|q| <= 0.425``."""
        r = 0.180625 - mul(q, q)
        above = horner(
            r,
            3.3871328727963666080e0,
            1.3314166789178437745e2,
            1.9715909503065514427e3,
            1.3731693765509461125e4,
            4.5921953931549871457e4,
            6.7265770927008700853e4,
            3.3430575583588128105e4,
            2.5090809287301226727e3,
        )
        below = horner(
            r,
            1.0,
            4.2313330701600911252e1,
            6.8718700749205790830e2,
            5.3941960214247511077e3,
            2.1213794301586595867e4,
            3.9307895800092710610e4,
            2.8729085735721942674e4,
            5.2264952788528545610e3,
        )
        return div(mul(q, above), below)

    @jit
    def middle(r):
        """AS 241 for ``r = sqrt(-log p)`` up to 5, the upper tail's value."""
        r = r - 1.6
        above = horner(
            r,
            1.42343711074968357734e0,
            4.63033784615654529590e0,
            5.76949722146069140550e0,
            3.64784832476320460504e0,
            1.27045825245236838258e0,
            2.41780725177450611770e-1,
            2.27238449892691845833e-2,
            7.74545014278341407640e-4,
        )
        below = horner(
            r,
            1.0,
            2.05319162663775882187e0,
            1.67638483018380384940e0,
            6.89767334985100004550e-1,
            1.48103976427480074590e-1,
            1.51986665636164571966e-2,
            5.47593808499534494600e-4,
            1.05075007164441684324e-9,
        )
        return div(above, below)

    @jit
    def far(r):
        """AS 241 for ``r = sqrt(-log p)`` beyond 5, the upper tail's value."""
        r = r - 5.0
        above = horner(
            r,
            6.65790464350110377720e0,
            5.46378491116411436990e0,
            1.78482653991729133580e0,
            2.96560571828504891230e-1,
            2.65321895265761230930e-2,
            1.24266094738807843860e-3,
            2.71155556874348757815e-5,
            2.01033439929228813265e-7,
        )
        below = horner(
            r,
            1.0,
            5.99832206555887937690e-1,
            1.36929880922735805310e-1,
            1.48753612908506148525e-2,
            7.86869131145613259100e-4,
            1.84631831751005468180e-5,
            1.42151175831644588870e-7,
            2.04426310338993978564e-15,
        )
        return div(above, below)

    @jit
    def quantile(p):
        """Return the standard normal quantile of one ``p`` in (0, 1)."""
        q = p - 0.5
        if abs(q) <= 0.425:
            return central(q)
        r = sqrt(-log(p if q < 0.0 else 1.0 - p))
        z = middle(r) if r <= 5.0 else far(r)
        return -z if q < 0.0 else z

    @jit
    def bounded(word, stream, key, span):
        """Return one integer in [0, span) from a 64-bit word, without bias; span 0 means 2**64."""
        if span == _ZERO:
            return word
        value, rest = multiply(word, span)
        if rest < span:
            threshold = (_MAX - span + _ONE) % span
            while rest < threshold:
                c0, c1, _, _ = philox(word, stream ^ _RETRY, key)
                word = c0 | (c1 << _S32)
                value, rest = multiply(word, span)
        return value

    return SimpleNamespace(**locals())


def kinds(jit: Callable, arithmetic: Arithmetic, core: SimpleNamespace) -> dict[str, Callable]:
    """Return what a draw of each kind makes of its word: ``value(w, stream, key, p0, ..., p5)``.

    Words of 32 bits serve the kinds that end in 32, words of 64 bits the others. Each uses
    the first few parameters.
    """
    mul, add, _, _, _, select, mul32, add32, _ = arithmetic
    quantile, log, bounded = core.quantile, core.log, core.bounded

    @jit
    def word32(w, stream, key, p0, p1, p2, p3, p4, p5):
        return w

    @jit
    def below32(w, stream, key, threshold, p1, p2, p3, p4, p5):
        return w < threshold

    @jit
    def clip(x, low, high):
        x = select(x < low, low, x)
        return select(x > high, high, x)

    # Uniform draws are multiples of 2**-24 or 2**-53 in [0, 1) before scaling. Rounding could
    # leave [low, high), so ``first`` and ``last`` are the end points of the result's type.

    @jit
    def uniform32(w, stream, key, width, low, first, last, p4, p5):
        u = np.float32(w >> _U(8)) * np.float32(2.0**-24)
        return clip(add32(mul32(u, width), low), first, last)

    @jit
    def uniform64(w, stream, key, width, low, first, last, p4, p5):
        u = np.float64(w >> _U(11)) * 2.0**-53
        return clip(add(mul(u, width), low), first, last)

    # Odd multiples of 2**-33 or 2**-53: inside (0, 1), symmetric about 1/2, and exact in float64.

    @jit
    def open32(w):
        return (np.float64(w) + 0.5) * 2.0**-32

    @jit
    def open64(w):
        return (np.float64(w >> _U(12)) + 0.5) * 2.0**-52

    @jit
    def gaussian(u, start, width, std, mean, first, last):
        # Probabilities from start to start + width; all of (0, 1) unless truncated.
        return clip(add(mul(quantile(add(mul(u, width), start)), std), mean), first, last)

    @jit
    def normal32(w, stream, key, start, width, std, mean, first, last):
        return gaussian(open32(w), start, width, std, mean, first, last)

    @jit
    def normal64(w, stream, key, start, width, std, mean, first, last):
        return gaussian(open64(w), start, width, std, mean, first, last)

    @jit
    def exponential32(w, stream, key, scale, p1, p2, p3, p4, p5):
        return mul(-log(open32(w)), scale)

    @jit
    def exponential64(w, stream, key, scale, p1, p2, p3, p4, p5):
        return mul(-log(open64(w)), scale)

    @jit
    def signed64(w, stream, key, span, low, p2, p3, p4, p5):
        return np.int64(bounded(w, stream, key, span)) + low

    @jit
    def unsigned64(w, stream, key, span, low, p2, p3, p4, p5):
        return bounded(w, stream, key, span) + low

    return {
        "word32": word32,
        "below32": below32,
        "uniform32": uniform32,
        "uniform64": uniform64,
        "normal32": normal32,
        "normal64": normal64,
        "exponential32": exponential32,
        "exponential64": exponential64,
        "signed64": signed64,
        "unsigned64": unsigned64,
    }
