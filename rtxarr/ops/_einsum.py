"""Einstein summation, taken apart into matrix products, sums and moves of axes.

All of it is made of differentiable operations, so it has no derivative rule of its own.
"""

import functools
import math
import re
import string

import numpy as np

from rtxarr import dtypes
from rtxarr.autograd._op import explained
from rtxarr.autograd._tape import raw
from rtxarr.ops._elementwise import astype, multiply
from rtxarr.ops._half import lowered
from rtxarr.ops._linalg import matmul
from rtxarr.ops._manipulate import moveaxis, permute_dims, reshape
from rtxarr.ops._matrix import diagonal
from rtxarr.ops._reduce import sum

__all__ = ["einsum"]

_TERM = re.compile(r"([A-Za-z]*)(\.\.\.)?([A-Za-z]*)")


@explained
def einsum(subscripts: str, /, *operands):
    """Sum products of elements over the indices that the result does not keep.

    Parameters
    ----------
    subscripts : str
        One group of letters for each operand, a letter for each axis, joined by commas; then
        "->" and the letters of the result. Without "->" the result keeps, in alphabetical
        order, the letters that occur once. "..." stands for the remaining axes, which are
        broadcast; a letter twice in one group takes the diagonal.
    *operands : array or Tensor
        Axes of one letter have one length, or length one.

    Returns
    -------
    array or Tensor
        Integers keep their dtype. Half-precision products accumulate in float32; what is
        passed on between two products is rounded.

    Notes
    -----
    Sums over shared indices become matrix products. Three operands and more are paired in the
    order that ``numpy.einsum_path`` finds: the best one up to four, a greedy one beyond.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> x = np.arange(6.0).reshape(2, 3)
    >>> rx.einsum("ij,kj->ik", x, x)
    array([[ 5., 14.],
           [14., 50.]])
    """
    if not isinstance(subscripts, str):
        raise TypeError(f"subscripts must be a str, got {type(subscripts).__name__}")
    for place, x in enumerate(operands):
        if not hasattr(x, "shape"):
            raise TypeError(f"operand {place} must be an array, got {type(x).__name__}")
    operands = lowered(*operands)
    terms, result, sizes, steps = _plan(subscripts, tuple(tuple(x.shape) for x in operands))
    if any(x.dtype != operands[0].dtype for x in operands[1:]):
        dtype = dtypes.result_type(*(x.dtype for x in operands))
        operands = tuple(astype(x, dtype, copy=False) for x in operands)
    pending = []
    for x, term in zip(operands, terms, strict=True):
        x, term = _take_diagonals(x, term)
        pending.append(_drop_broadcast(x, term, sizes))
    for step in steps:
        group = [pending[i] for i in step]
        pending = [part for i, part in enumerate(pending) if i not in step]
        while len(group) > 1:
            (x1, term1), (x2, term2), *group = group
            keep = set(result).union(*(term for _, term in (*group, *pending)))
            group = [_multiply(x1, term1, x2, term2, keep), *group]
        pending += group
    x, term = pending[0]
    x, term = _sum_out(x, term, set(result))
    return _reorder(x, term, result)


# ------------------------------------------------------------------ reading subscripts


@functools.lru_cache(maxsize=1024)
def _plan(subscripts, shapes):
    """Give each operand's letters, those of the result, their sizes, and what to pair when."""
    left, arrow, right = subscripts.replace(" ", "").partition("->")
    groups = left.split(",")
    if len(groups) != len(shapes):
        raise ValueError(
            f"subscripts must have a group for each operand, got {len(groups)} in "
            f"{subscripts!r} for {len(shapes)} operands"
        )
    parsed = [_parse(group, subscripts) for group in groups]
    unused = [c for c in string.ascii_letters if c not in subscripts]
    counts = []
    for place, ((first, dots, last), shape) in enumerate(zip(parsed, shapes, strict=True)):
        counts.append(len(shape) - len(first) - len(last))
        if counts[-1] < 0 or (counts[-1] and not dots):
            raise ValueError(
                f"operand {place} must have {len(first) + len(last)} dimensions for "
                f"{groups[place]!r}, got shape {shape}"
            )
    n_broadcast = max(counts)
    if n_broadcast > len(unused):
        raise ValueError(f"subscripts leave too few letters for '...', got {subscripts!r}")
    broadcast = "".join(unused[:n_broadcast])
    terms = [
        first + broadcast[n_broadcast - n :] + last
        for (first, _, last), n in zip(parsed, counts, strict=True)
    ]
    if arrow:
        first, dots, last = _parse(right, subscripts)
        if n_broadcast and not dots:
            raise ValueError(f"the result must have '...' as the operands do, got {subscripts!r}")
        result = first + (broadcast if dots else "") + last
        for letter in result:
            if result.count(letter) > 1 or not any(letter in term for term in terms):
                raise ValueError(
                    f"letters of the result must be in an operand, and once in the result, got "
                    f"{letter!r} in {subscripts!r}"
                )
    else:
        letters = "".join(first + last for first, _, last in parsed)
        result = broadcast + "".join(c for c in sorted(letters) if letters.count(c) == 1)
    return terms, result, _sizes(terms, shapes), _pairing(terms, result, shapes)


def _parse(group, subscripts):
    match = _TERM.fullmatch(group)
    if match is None:
        raise ValueError(
            f"subscripts must consist of letters, ',', '->' and '...', got {subscripts!r}"
        )
    return match[1], match[2], match[3]


def _pairing(terms, result, shapes):
    n = len(terms)
    if n < 3:
        return [tuple(range(n))] if n == 2 else []
    stand_ins = [np.broadcast_to(np.zeros(()), shape) for shape in shapes]
    expression = f"{','.join(terms)}->{result}"
    path, _ = np.einsum_path(expression, *stand_ins, optimize="optimal" if n <= 4 else "greedy")
    return path[1:]


def _sizes(terms, shapes):
    sizes: dict[str, int] = {}
    for place, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        here: dict[str, int] = {}
        for letter, n in zip(term, shape, strict=True):
            if here.setdefault(letter, n) != n:
                raise ValueError(
                    f"the axes of {letter!r} must have one length in operand {place}, got "
                    f"shape {shape}"
                )
            known = sizes.setdefault(letter, n)
            if known == 1:
                sizes[letter] = n
            elif n not in (1, known):
                raise ValueError(
                    f"axes of one letter must have one length, got {known} and {n} (in operand "
                    f"{place} of shape {shape}, letters {term!r})"
                )
    return sizes


# ------------------------------------------------------------------------------ steps


def _take_diagonals(x, term):
    """Leave each letter once: where it is repeated, take the diagonal (a new last axis)."""
    for letter in dict.fromkeys(term):
        while term.count(letter) > 1:
            i = term.index(letter)
            j = term.index(letter, i + 1)
            x = diagonal(moveaxis(x, (i, j), (-2, -1)))
            term = "".join(c for k, c in enumerate(term) if k not in (i, j)) + letter
    return x, term


def _drop_broadcast(x, term, sizes):
    """Remove the axes of length one that are longer in another operand."""
    kept = [i for i, c in enumerate(term) if x.shape[i] == sizes[c]]
    if len(kept) == len(term):
        return x, term
    return reshape(x, tuple(x.shape[i] for i in kept)), "".join(term[i] for i in kept)


def _sum_out(x, term, keep):
    """Sum over the axes whose letters are not in ``keep``."""
    axes = tuple(i for i, c in enumerate(term) if c not in keep)
    if not axes:
        return x, term
    # Integers keep their dtype; sum would widen them.
    dtype = None if dtypes.is_inexact(raw(x).dtype) else x.dtype
    return sum(x, axis=axes, dtype=dtype), "".join(c for c in term if c in keep)


def _reorder(x, term, wanted):
    if term == wanted:
        return x
    return permute_dims(x, tuple(term.index(c) for c in wanted))


def _multiply(x1, term1, x2, term2, keep):
    """Multiply two operands and sum over the letters that are not in ``keep``."""
    x1, term1 = _sum_out(x1, term1, keep | set(term2))
    x2, term2 = _sum_out(x2, term2, keep | set(term1))
    stack = [c for c in term1 if c in term2 and c in keep]
    paired = [c for c in term1 if c in term2 and c not in keep]
    own1 = [c for c in term1 if c not in term2]
    own2 = [c for c in term2 if c not in term1]
    result = "".join(stack + own1 + own2)
    sizes = dict(zip(term1 + term2, (*x1.shape, *x2.shape), strict=True))
    if not paired:
        # Elementwise: axes of length one where only the other operand has the letter.
        return multiply(_spread(x1, term1, result), _spread(x2, term2, result)), result
    x1 = _as_matrices(x1, term1, stack, own1, paired, sizes)
    x2 = _as_matrices(x2, term2, stack, paired, own2, sizes)
    product = matmul(x1, x2)
    shape = tuple(sizes[c] for c in result)
    return (product if product.shape == shape else reshape(product, shape)), result


def _spread(x, term, result):
    x = _reorder(x, term, "".join(c for c in result if c in term))
    shape, lengths = [], iter(x.shape)
    for c in result:
        shape.append(next(lengths) if c in term else 1)
    return x if x.shape == tuple(shape) else reshape(x, tuple(shape))


def _as_matrices(x, term, stack, rows, columns, sizes):
    """Order the axes as ``stack``, ``rows``, ``columns`` and merge each of the last two."""
    x = _reorder(x, term, "".join(stack + rows + columns))
    shape = (
        *(sizes[c] for c in stack),
        math.prod(sizes[c] for c in rows),
        math.prod(sizes[c] for c in columns),
    )
    return x if x.shape == shape else reshape(x, shape)
