"""Random numbers in fused functions: those of the function run as it is, at each call."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.random import Generator
from rtxarr.testing import assert_close

DRAWS = {
    "uniform": lambda rng, x: x + rng.uniform(x.shape, -1, 2),
    "normal": lambda rng, x: x * rng.normal(x.shape, dtype=np.float32) + rng.normal(3)[0],
    "odd then even": lambda rng, x: x + rng.uniform(1, dtype=np.float32) + rng.uniform(x.shape),
    "integers": lambda rng, x: x + rng.integers(0, 9, x.shape),
    "bernoulli": lambda rng, x: rx.where(rng.bernoulli(0.5, x.shape), x, 0),
    "exponential": lambda rng, x: x + rng.exponential(x.shape, 2.0),
    "permutation": lambda rng, x: rx.take(x, rng.permutation(x.shape[0]), axis=0),
    "choice": lambda rng, x: rx.take(x, rng.choice(x.shape[0], 4), axis=0),
    "dropout": lambda rng, x: rx.dropout(x, 0.5, generator=rng),
    "dropout_add": lambda rng, x: rx.dropout_add(x, 2 * x, 0.25, generator=rng),
    "attention": lambda rng, x: rx.scaled_dot_product_attention(
        *[rx.reshape(x, (1, 1, *x.shape))] * 3, dropout_rate=0.5, generator=rng
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_the_function(name):
    x = np.random.default_rng(0).standard_normal((5, 4))
    ours, others = Generator(1), Generator(1)
    fused = rx.fuse(lambda x: DRAWS[name](ours, x))
    for _ in range(3):
        assert_close(fused(x), DRAWS[name](others, x), rtol=1e-12)
        assert ours.state_dict() == others.state_dict()
    assert not fused.reasons
    assert fused.n_traces == 1


def test_the_default_generator_can_be_seeded():
    fused = rx.fuse(lambda x: rx.dropout(x, 0.5))
    x = np.ones(100)
    rx.random.seed(3)
    first, second = fused(x), fused(x)
    rx.random.seed(3)
    assert_close(first, rx.dropout(x, 0.5), exact=True)
    assert_close(second, rx.dropout(x, 0.5), exact=True)
    assert not np.array_equal(first, second)


def test_a_generator_among_the_arguments():
    fused = rx.fuse(lambda x, rng: x + rng.uniform(x.shape))
    x, first, second = np.zeros(6), Generator(1), Generator(2)
    for rng, seed in ((first, 1), (second, 2)):
        assert_close(fused(x, rng), Generator(seed).uniform(6), exact=True)
    assert_close(fused(x, first), Generator(1).uniform(12)[6:], exact=True)


def test_a_generator_made_inside_starts_anew():
    fused = rx.fuse(lambda x: x + Generator(5).uniform(x.shape))
    x = np.zeros(6)
    assert_close(fused(x), fused(x), exact=True)
    assert_close(fused(x), Generator(5).uniform(6), exact=True)


def test_a_checkpoint_draws_its_numbers_again():
    rng = Generator(4)

    def loss(x, checkpointed):
        def part(x):
            return rx.dropout(rx.tanh(x), 0.5, generator=rng)

        return rx.sum((rx.checkpoint(part, x) if checkpointed else part(x)) ** 2)

    x = np.random.default_rng(0).standard_normal(50)
    place = rng.state_dict()
    want = rx.grad(loss)(x, False)
    after = rng.state_dict()
    rng.load_state_dict(place)
    fused = rx.fuse(lambda x: rx.grad(loss)(x, True))
    assert_close(fused(x), want)
    assert rng.state_dict() == after
    assert not fused.reasons


def test_a_fused_function_in_a_checkpoint():
    rng = Generator(4)
    fused = rx.fuse(lambda x: rx.dropout(x, 0.5, generator=rng))
    x = rx.Tensor(np.ones(50), requires_grad=True)
    out = rx.checkpoint(lambda x: fused(x) * x, x)
    rx.sum(out).backward()
    assert_close(x.grad, 2 * out.data)


@pytest.mark.parametrize("what", ["spawn", "state", "load"])
def test_what_moves_generators_otherwise_runs_as_it_is(what):
    rng = Generator(0)

    def f(x):
        if what == "spawn":
            return x + rng.spawn(1)[0].uniform(3)
        if what == "state":
            return x + rng.state_dict()["offset"] + rng.uniform(3)
        rng.load_state_dict(Generator(7).state_dict())
        return x + rng.uniform(3)

    fused = rx.fuse(f)
    with pytest.warns(RuntimeWarning, match="generator"):
        first = fused(np.zeros(3))
    second = fused(np.zeros(3))
    rng = Generator(0)
    assert_close(first, f(np.zeros(3)), exact=True)
    assert_close(second, f(np.zeros(3)), exact=True)
