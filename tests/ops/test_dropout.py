"""Dropout with a bias and a residual against its parts."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import nn
from rtxarr.random import Generator, default_generator
from rtxarr.testing import assert_close

rng = np.random.default_rng(31)
X, RESIDUAL = rng.standard_normal((2, 4, 5))
BIAS = rng.standard_normal(5)


def test_it_is_dropout_of_the_sum_added(xp):
    x, residual, bias = map(xp.asarray, (X, RESIDUAL, BIAS))
    got = rx.dropout_add(x, residual, 0.4, bias, generator=Generator(1))
    want = RESIDUAL + rx.dropout(X + BIAS, 0.4, generator=Generator(1))
    assert_close(got, want)
    got = rx.dropout_add(x, residual, 0.4, generator=Generator(1))
    assert_close(got, RESIDUAL + rx.dropout(X, 0.4, generator=Generator(1)))


def test_at_rate_zero_nothing_is_drawn():
    generator = Generator(0)
    before = generator.state_dict()
    got = rx.dropout_add(X, RESIDUAL, 0.0, BIAS, generator=generator)
    assert_close(got, RESIDUAL + X + BIAS)
    assert generator.state_dict() == before


def test_gradients():
    tensors = [rx.Tensor(a, requires_grad=True) for a in (X, RESIDUAL, BIAS)]
    x, residual, bias = tensors
    rx.sum(rx.dropout_add(x, residual, 0.4, bias, generator=Generator(2))).backward()
    kept = Generator(2).dropout_mask(X.shape, 0.4, device="cpu") / 0.6
    assert_close(x.grad, kept)
    assert_close(residual.grad, np.ones_like(X))
    assert_close(bias.grad, kept.sum(0))


def test_half_precision_is_rounded_once(check_half):
    check_half(lambda x: rx.dropout_add(x, x, 0.3, generator=Generator(0)), X)


def test_a_transformer_block_drops_the_same_as_before():
    """What both branches add, and nothing in evaluation mode."""
    block = nn.TransformerBlock(8, 2, dropout=0.3, generator=Generator(4), device="cpu")
    x = rng.standard_normal((2, 3, 8)).astype("float32")
    block.attention.dropout = 0.0
    source = Generator(4)
    source.load_state_dict(block.dropout.generator.state_dict())
    got = block(x)
    h = x + rx.dropout(block.attention(block.norm1(x)).data, 0.3, generator=source)
    branch = block.down(block.up(block.norm2(h)))  # `up` has the activation
    assert_close(got, h + rx.dropout(branch.data, 0.3, generator=source))
    block.eval()
    before = default_generator().state_dict()
    block(x)
    assert default_generator().state_dict() == before


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((X, X[0], 0.1), r"residual must have the shape of x, \(4, 5\), got \(5,\)"),
        ((X, X, 0.1, BIAS[:2]), r"bias must have shape \(5,\), got \(2,\)"),
        ((X, X, 1.0), r"rate must lie in \[0, 1\), got 1.0"),
    ],
)
def test_bad_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        rx.dropout_add(*arguments)
