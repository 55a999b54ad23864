"""Integer expressions for where in memory an element is, simplified as they are made.

Sizes are plain numbers; what varies are symbols, each known to lie in ``[0, size)``. That bound is
what lets ``(r * 8 + c) // 8`` become ``r``. Expressions are tuples in disguise: equal ones are
equal, so a set or a dict finds them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Expr:
    """A sum of terms and a number; what :func:`add` and the other functions take and give.

    ``terms`` has (atom, factor) pairs in a fixed order. An atom is a :class:`Symbol`, :class:`Div`
    or :class:`Mod`.
    """

    terms: tuple
    offset: int

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest value it can take."""
        low = high = self.offset
        for atom, factor in self.terms:
            least, most = atom.bounds
            low += min(factor * least, factor * most)
            high += max(factor * least, factor * most)
        return low, high


@dataclass(frozen=True, slots=True)
class Symbol:
    """A loop's counter, in ``[0, size)``."""

    name: str
    size: int

    @property
    def bounds(self) -> tuple[int, int]:
        return 0, max(self.size - 1, 0)


@dataclass(frozen=True, slots=True)
class Div:
    """``numerator // divisor``, rounded down; the numerator is not negative."""

    numerator: Expr
    divisor: int

    @property
    def bounds(self) -> tuple[int, int]:
        low, high = self.numerator.bounds
        return low // self.divisor, high // self.divisor


@dataclass(frozen=True, slots=True)
class Mod:
    """``numerator % divisor``; the numerator is not negative."""

    numerator: Expr
    divisor: int

    @property
    def bounds(self) -> tuple[int, int]:
        return 0, min(self.divisor - 1, self.numerator.bounds[1])


class Loaded(Symbol):
    """A number read from memory in a kernel, under the name it has there; in ``[0, size)``."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Assumed:
    """An expression that lies in ``[0, size)`` where it matters: elsewhere nothing is read."""

    inner: Expr
    size: int

    @property
    def bounds(self) -> tuple[int, int]:
        return 0, max(self.size - 1, 0)


ZERO = Expr((), 0)


def number(value: int) -> Expr:
    return Expr((), value)


def symbol(name: str, size: int) -> Expr:
    """Return a counter; of one element it is always zero."""
    return ZERO if size == 1 else Expr(((Symbol(name, size), 1),), 0)


def loaded(name: str, size: int) -> Expr:
    return Expr(((Loaded(name, size), 1),), 0)


def assumed(x: Expr, size: int) -> Expr:
    """Return ``x``, which is taken to lie in ``[0, size)`` until it is :func:`released`."""
    low, high = x.bounds
    if low >= 0 and high < size:
        return x
    return ZERO if size == 1 else Expr(((Assumed(x, size), 1),), 0)


def released(x: Expr) -> Expr:
    """Return ``x`` without assumptions; what was simplified by them stays so."""
    parts = [number(x.offset)]
    for atom, factor in x.terms:
        if type(atom) is Assumed:
            part = released(atom.inner)
        elif type(atom) in (Div, Mod):
            inner = released(atom.numerator)
            part = (floordiv if type(atom) is Div else mod)(inner, atom.divisor)
        else:
            part = Expr(((atom, 1),), 0)
        parts.append(mul(part, factor))
    return add(*parts)


def add(*parts: Expr) -> Expr:
    factors: dict = {}
    offset = 0
    for part in parts:
        offset += part.offset
        for atom, factor in part.terms:
            factors[atom] = factors.get(atom, 0) + factor
    terms = [(atom, factor) for atom, factor in factors.items() if factor]
    return Expr(tuple(sorted(_joined(terms), key=_order)), offset)


def _order(term: tuple) -> tuple:
    atom, factor = term
    return -factor, type(atom).__name__, repr(atom)


def _joined(terms: list[tuple]) -> list[tuple]:
    """Make ``x`` of ``(x // n) * n + x % n``, where both are there."""
    while True:
        pairs = (
            (i, j)
            for i, (rest, m) in enumerate(terms)
            if type(rest) is Mod
            for j, (whole, n) in enumerate(terms)
            if n == m * rest.divisor
            and floordiv(rest.numerator, rest.divisor) == Expr(((whole, 1),), 0)
        )
        found = next(pairs, None)
        if found is None:
            return terms
        (rest, m) = terms[found[0]]
        kept = [t for k, t in enumerate(terms) if k not in found]
        both = add(Expr(tuple(kept), 0), mul(rest.numerator, m))
        if both.offset:  # cannot be carried by terms: leave the pair as it is
            return terms
        terms = list(both.terms)


def mul(x: Expr, factor: int) -> Expr:
    if factor == 0:
        return ZERO
    return Expr(tuple((atom, f * factor) for atom, f in x.terms), x.offset * factor)


def _split(x: Expr, divisor: int) -> tuple[Expr, Expr] | None:
    """Part into a multiple of ``divisor`` and a rest known to lie in ``[0, divisor)``."""
    whole = tuple((a, f) for a, f in x.terms if f % divisor == 0)
    rest = tuple((a, f) for a, f in x.terms if f % divisor)
    quotient, offset = divmod(x.offset, divisor)
    rest_part = Expr(rest, offset)
    low, high = rest_part.bounds
    if low < 0 or high >= divisor:
        return None
    return Expr(whole, quotient * divisor), rest_part


def _coarse(x: Expr, divisor: int) -> tuple[int, Expr, Expr] | None:
    """Write ``x`` as ``g * whole + rest`` with ``g`` a divisor of ``divisor``, rest in [0, g)."""
    for g in sorted({math.gcd(f, divisor) for _, f in x.terms}, reverse=True):
        if g > 1 and (parts := _split(x, g)) is not None:
            whole, rest = parts
            terms = tuple((a, f // g) for a, f in whole.terms)
            return g, Expr(terms, whole.offset // g), rest
    return None


def floordiv(x: Expr, divisor: int) -> Expr:
    """Return ``x // divisor`` for ``x`` that is not negative."""
    if divisor == 1:
        return x
    parts = _split(x, divisor)
    if parts is not None:
        whole, _ = parts
        return Expr(tuple((a, f // divisor) for a, f in whole.terms), whole.offset // divisor)
    divided = tuple((a, f // divisor) for a, f in x.terms if f % divisor == 0)
    if divided:
        rest = Expr(tuple((a, f) for a, f in x.terms if f % divisor), x.offset)
        if rest.bounds[0] >= 0:
            return add(Expr(divided, 0), floordiv(rest, divisor))
    if len(x.terms) == 1 and not x.offset:
        ((atom, factor),) = x.terms
        common = math.gcd(factor, divisor)
        if common > 1:
            return floordiv(Expr(((atom, factor // common),), 0), divisor // common)
        if type(atom) is Div and factor == 1:
            return floordiv(atom.numerator, atom.divisor * divisor)
        if type(atom) is Mod and factor == 1 and atom.divisor % divisor == 0:
            return mod(floordiv(atom.numerator, divisor), atom.divisor // divisor)
    if (coarse := _coarse(x, divisor)) is not None:
        g, whole, _ = coarse
        return floordiv(whole, divisor // g)
    return Expr(((Div(x, divisor), 1),), 0)


def mod(x: Expr, divisor: int) -> Expr:
    """Return ``x % divisor`` for ``x`` that is not negative."""
    if divisor == 1:
        return ZERO
    parts = _split(x, divisor)
    if parts is not None:
        return parts[1]
    x = Expr(tuple((a, f) for a, f in x.terms if f % divisor), x.offset % divisor)
    low = x.bounds[0]
    if low < 0:  # a numerator is not negative
        x = Expr(x.terms, x.offset - low // divisor * divisor)
    if len(x.terms) == 1 and not x.offset:
        ((atom, factor),) = x.terms
        if type(atom) is Mod and factor == 1 and atom.divisor % divisor == 0:
            return mod(atom.numerator, divisor)
    if (coarse := _coarse(x, divisor)) is not None:
        g, whole, rest = coarse
        return add(mul(mod(whole, divisor // g), g), rest)
    return Expr(((Mod(x, divisor), 1),), 0)


def unravel(flat: Expr, shape: Sequence[int]) -> tuple[Expr, ...]:
    """Return the index along each axis of element ``flat`` in row-major order."""
    axes = []
    for i, length in enumerate(shape):
        inner = math.prod(shape[i + 1 :])
        index = floordiv(flat, inner) if inner else ZERO
        axes.append(index if i == 0 else mod(index, length) if length else ZERO)
    if shape and shape[0] == 1:
        axes[0] = ZERO
    return tuple(axes)


def ravel(axes: Sequence[Expr], shape: Sequence[int]) -> Expr:
    """Return the place in row-major order of the element at ``axes``."""
    return add(ZERO, *(mul(a, math.prod(shape[i + 1 :])) for i, a in enumerate(axes)))


def substitute(x: Expr, name: str, value: Expr) -> Expr:
    """Return ``x`` with ``value`` in place of the counter ``name``."""
    parts = [number(x.offset)]
    for atom, factor in x.terms:
        if type(atom) is Div:
            part = floordiv(substitute(atom.numerator, name, value), atom.divisor)
        elif type(atom) is Mod:
            part = mod(substitute(atom.numerator, name, value), atom.divisor)
        elif type(atom) is Assumed:
            part = assumed(substitute(atom.inner, name, value), atom.size)
        elif atom.name == name:
            part = value
        else:
            part = Expr(((atom, 1),), 0)
        parts.append(mul(part, factor))
    return add(*parts)


def names_in(x: Expr) -> set[str]:
    """Return the names of the counters and loaded numbers in ``x``."""
    found: set[str] = set()
    for atom, _ in x.terms:
        if type(atom) is Assumed:
            found |= names_in(atom.inner)
        else:
            found |= names_in(atom.numerator) if type(atom) in (Div, Mod) else {atom.name}
    return found


def length(x: Expr) -> int:
    """Return how many terms ``x`` has, those inside of others too."""
    total, stack = 0, [x]
    while stack:
        for atom, _ in stack.pop().terms:
            total += 1
            if type(atom) in (Div, Mod):
                stack.append(atom.numerator)
            elif type(atom) is Assumed:
                stack.append(atom.inner)
    return total


def has_assumptions(x: Expr) -> bool:
    """Tell whether ``x`` is what it is in a part of its counters' range only."""
    return any(
        type(atom) is Assumed or (type(atom) in (Div, Mod) and has_assumptions(atom.numerator))
        for atom, _ in x.terms
    )


def evaluate(x: Expr, values: dict[str, int]) -> int:
    """Return the number that ``x`` is for these counters."""

    def atom_value(atom):
        if type(atom) is Div:
            return evaluate(atom.numerator, values) // atom.divisor
        if type(atom) is Mod:
            return evaluate(atom.numerator, values) % atom.divisor
        return values[atom.name]

    return x.offset + sum(factor * atom_value(atom) for atom, factor in x.terms)
