"""Exponentials and their kin written out, for mode "fast": LLVM makes vector instructions of them.

They are within 3 units in the last place. The polynomials interpolate at the nodes of Chebyshev,
computed in decimal arithmetic of 50 digits.
"""

from __future__ import annotations

import decimal
import math
import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rtxarr.polygraph.codegen._assembly import Assembly

OPERATIONS = frozenset(("exp", "expm1", "tanh", "erf"))

# (exp(r) - 1 - r) / r**2 for |r| up to log(2) / 2, by powers of r.
_EXP = {
    "float": (0.5, 0.16666573, 0.04166655, 0.008363774, 0.0013926927),
    "double": (
        0.5000000000000001,
        0.16666666666666669,
        0.04166666666662064,
        0.008333333333329793,
        0.0013888888918939168,
        0.00019841269864380513,
        2.4801518641395993e-05,
        2.75572664186123e-06,
        2.7621338669142925e-07,
        2.5101346928350342e-08,
    ),
}
# erf(x) / x - 1 for |x| up to 1, by powers of x**2.
_ERF = {
    "float": (
        0.12837917,
        -0.37612626,
        0.11283594,
        -0.026854211,
        0.0051890872,
        -0.00080168643,
        7.875875e-05,
    ),
    "double": (
        0.12837916709551258,
        -0.37612638903183543,
        0.11283791670945006,
        -0.02686617064323777,
        0.0052239776071164225,
        -0.0008548325975389692,
        0.00012055294904839707,
        -1.492473690741966e-05,
        1.6447424703317362e-06,
        -1.6208483801871705e-07,
        1.3720064546777686e-08,
        -7.795898827002142e-10,
    ),
}
# exp(x**2) * erfc(x) * (1 + 2 * x) from 1 to 4 or 6, by powers of (x - 2) / (x + 2).
_ERFCX = {
    "float": (
        1.2769784,
        -0.09276365,
        -0.16603062,
        0.16403839,
        -0.054204665,
        -0.0077985954,
        0.008444948,
    ),
    "double": (
        1.2769783815525286,
        -0.09276382658574624,
        -0.16603039761529106,
        0.16405128003350503,
        -0.05422000099178036,
        -0.008034015087659687,
        0.008722653862273692,
        0.001271339165754213,
        -0.0014568136425517457,
        -0.00045434493868878526,
        0.00020636426368347952,
        0.0001510872612051129,
        -1.505445743805316e-06,
        -3.6739685589621616e-05,
        -1.3377843610301066e-05,
        4.780167970665936e-06,
        4.567818384699565e-06,
    ),
}


class _Format:
    """What a float type is made of."""

    def __init__(self, type_: str, bits: int, exponent_bits: int) -> None:
        self.type, self.integer = type_, f"i{bits}"
        self.fraction_bits = bits - 1 - exponent_bits
        self.bias = (1 << (exponent_bits - 1)) - 1
        # Added to a number it leaves the nearest integer in the lowest bits.
        self.magic = 1.5 * 2.0**self.fraction_bits
        # Beyond these the exponential is infinite, or zero.
        self.most = (self.bias + 1) * math.log(2) + 1
        self.least = -(self.bias + self.fraction_bits) * math.log(2) - 1
        # log(2) in two parts; integers of up to 12 bits times the first are exact.
        with decimal.localcontext() as context:
            context.prec = 50
            log2 = decimal.Decimal(2).ln()
            scale = 2 ** (self.fraction_bits - 11)
            self.high = int(log2 * scale) / scale
            self.low = float(log2 - decimal.Decimal(self.high))


_FORMATS = {"float": _Format("float", 32, 8), "double": _Format("double", 64, 11)}


def hexadecimal(value: float, type_: str) -> str:
    """Return a number as LLVM reads it: with the bits of a double, rounded to the type before."""
    if type_ == "float":
        value = float(np.float32(value))
    return "0x" + struct.pack(">d", value).hex().upper()


class _Writer:
    """Writes arithmetic on one float type."""

    def __init__(self, asm: Assembly, type_: str) -> None:
        self.asm, self.type, self.format = asm, type_, _FORMATS[type_]

    def number(self, value: float) -> str:
        return hexadecimal(value, self.type)

    def do(self, word: str, x: str, y: str) -> str:
        return self.asm.let(f"{word} {self.type} {x}, {y}")

    def add(self, x: str, y: str) -> str:
        return self.do("fadd", x, y)

    def multiply(self, x: str, y: str) -> str:
        return self.do("fmul", x, y)

    def fused(self, x: str, y: str, z: str) -> str:
        """Return ``x * y + z``."""
        return self.asm.intrinsic("fmuladd", self.type, x, y, z)

    def choose(self, test: str, x: str, y: str) -> str:
        return self.asm.let(f"select i1 {test}, {self.type} {x}, {self.type} {y}")

    def less(self, x: str, y: str) -> str:
        return self.asm.let(f"fcmp olt {self.type} {x}, {y}")

    def polynomial(self, x: str, coefficients: tuple[float, ...]) -> str:
        *rest, last = coefficients
        out = self.number(last)
        for c in reversed(rest):
            out = self.fused(out, x, self.number(c))
        return out

    def reduced(self, x: str) -> tuple[str, str]:
        """Return the integer ``n`` and ``exp(r) - 1`` where ``x`` is ``n * log(2) + r``."""
        f = self.format
        for bound, test in ((f.most, "ogt"), (f.least, "olt")):  # NaN stays
            beyond = self.asm.let(f"fcmp {test} {self.type} {x}, {self.number(bound)}")
            x = self.choose(beyond, self.number(bound), x)
        shifted = self.fused(x, self.number(1 / math.log(2)), self.number(f.magic))
        whole = self.do("fsub", shifted, self.number(f.magic))
        r = self.fused(whole, self.number(-f.high), x)
        r = self.fused(whole, self.number(-f.low), r)
        q = self.polynomial(r, _EXP[self.type])
        grown = self.fused(self.multiply(r, r), q, r)
        integer = f.integer
        bits = self.asm.let(f"bitcast {self.type} {shifted} to {integer}")
        magic = struct.unpack(*((">i", struct.pack(">f", f.magic)) if self.type == "float" else
                                (">q", struct.pack(">d", f.magic))))[0]  # fmt: skip
        return self.asm.let(f"sub {integer} {bits}, {magic}"), grown

    def power_of_two(self, n: str) -> str:
        f = self.format
        biased = self.asm.let(f"add {f.integer} {n}, {f.bias}")
        bits = self.asm.let(f"shl {f.integer} {biased}, {f.fraction_bits}")
        return self.asm.let(f"bitcast {f.integer} {bits} to {self.type}")

    def exp(self, x: str) -> str:
        n, grown = self.reduced(x)
        # In two steps: the power itself may be no number while the product is one.
        half = self.asm.let(f"ashr {self.format.integer} {n}, 1")
        rest = self.asm.let(f"sub {self.format.integer} {n}, {half}")
        first, second = self.power_of_two(half), self.power_of_two(rest)
        y = self.add(grown, self.number(1))
        return self.multiply(self.multiply(y, first), second)

    def expm1(self, x: str) -> str:
        n, grown = self.reduced(x)
        half = self.asm.let(f"ashr {self.format.integer} {n}, 1")
        rest = self.asm.let(f"sub {self.format.integer} {n}, {half}")
        first, second = self.power_of_two(half), self.power_of_two(rest)
        # 2**n * grown + (2**n - 1), where the first factor is taken out so that 2**n may overflow.
        inverse = self.power_of_two(self.asm.let(f"sub {self.format.integer} 0, {half}"))
        inner = self.fused(second, grown, self.do("fsub", second, inverse))
        out = self.multiply(first, inner)
        # Of what is tiny that is itself, with its sign and for zero too.
        size = self.asm.intrinsic("fabs", self.type, x)
        return self.choose(self.less(size, self.number(1e-30)), x, out)

    def tanh(self, x: str) -> str:
        size = self.asm.intrinsic("fabs", self.type, x)
        most = self.number(22)
        capped = self.choose(self.asm.let(f"fcmp ogt {self.type} {size}, {most}"), most, size)
        grown = self.expm1(self.add(capped, capped))
        out = self.do("fdiv", grown, self.add(grown, self.number(2)))
        return self.asm.intrinsic("copysign", self.type, out, x)

    def erf(self, x: str) -> str:
        size, square = self.asm.intrinsic("fabs", self.type, x), self.multiply(x, x)
        near = self.fused(self.polynomial(square, _ERF[self.type]), x, x)
        most = self.number(4 if self.type == "float" else 6)
        capped = self.choose(self.asm.let(f"fcmp ogt {self.type} {size}, {most}"), most, size)
        t = self.do(
            "fdiv", self.do("fsub", capped, self.number(2)), self.add(capped, self.number(2))
        )
        scaled = self.polynomial(t, _ERFCX[self.type])
        scaled = self.do("fdiv", scaled, self.fused(capped, self.number(2), self.number(1)))
        decay = self.exp(self.multiply(capped, self.do("fsub", self.number(-0.0), capped)))
        far = self.do("fsub", self.number(1), self.multiply(decay, scaled))
        far = self.asm.intrinsic("copysign", self.type, far, x)
        is_near = self.less(size, self.number(1))
        return self.choose(is_near, near, far)


def write(asm: Assembly, op: str, type_: str, x: str) -> str:
    """Write one of ``OPERATIONS`` on a float or double; return the result's name."""
    return getattr(_Writer(asm, type_), op)(x)
