"""Index expressions: what they simplify to, and that they give the same numbers."""

import math
import random

import pytest

from rtxarr.polygraph import _index as ix
from rtxarr.polygraph._index import (
    ZERO,
    add,
    evaluate,
    floordiv,
    mod,
    mul,
    number,
    ravel,
    symbol,
    unravel,
)


def test_a_row_and_a_column_come_apart():
    r, c = symbol("r", 5), symbol("c", 8)
    flat = add(mul(r, 8), c)
    assert floordiv(flat, 8) == r
    assert mod(flat, 8) == c


def test_a_counter_of_one_element_is_zero():
    assert symbol("r", 1) == ZERO


@pytest.mark.parametrize("seed", range(200))
def test_unravelled_axes_ravel_back(seed):
    rng = random.Random(seed)
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 5))]
    i = symbol("i", math.prod(shape))
    assert ravel(unravel(i, shape), shape) == i


@pytest.mark.parametrize("seed", range(200))
def test_expressions_give_the_numbers_of_plain_arithmetic(seed):
    rng = random.Random(seed)
    shape = [rng.randint(1, 5) for _ in range(4)]
    size = math.prod(shape)
    axes = list(unravel(symbol("i", size), shape))
    order = rng.sample(range(4), 4)
    moved = ravel([axes[k] for k in order], [shape[k] for k in order])
    divisor, offset = rng.randint(1, 12), rng.randint(0, 7)
    moved = add(moved, mul(axes[0], rng.randint(0, 9)), number(offset))
    for i in range(size):
        values = {"i": i}
        plain = evaluate(moved, values)
        for made, want in (
            (floordiv(moved, divisor), plain // divisor),
            (mod(moved, divisor), plain % divisor),
        ):
            assert evaluate(made, values) == want


def test_what_is_assumed_simplifies_and_is_released():
    c = ix.add(ix.symbol("c", 1000), ix.number(-1))
    at = ix.ravel((ix.symbol("r", 5), ix.assumed(c, 999)), (5, 999))
    row, column = ix.unravel(at, (5, 999))
    assert row == ix.symbol("r", 5)
    assert ix.released(column) == c
    assert ix.assumed(ix.symbol("c", 7), 9) == ix.symbol("c", 7)
    moved = ix.substitute(column, "c", ix.symbol("k", 1000))
    assert ix.names_in(moved) == {"k"}
    assert ix.evaluate(ix.released(moved), {"k": 4}) == 3
