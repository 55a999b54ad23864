"""Recurrences over time as single operations: one node for a whole sequence.

The forward pass gives the gates' activations as an output of their own, and the rules go back
through time over them. What does not depend on the step before is computed for all steps at once,
so that a step is a matrix product and a few elementwise operations, both ways. Half precision is
widened to float32 inside.

``kept`` is None, or tells which steps are there: the others carry the state on.
"""

from rtxarr._device import namespace
from rtxarr.autograd import custom_op as differentiable
from rtxarr.dtypes import result_type
from rtxarr.ops import (
    concat,
    expand_dims,
    matmul,
    matrix_transpose,
    reshape,
    stack,
    sum,
    tanh,
    where,
    zeros_like,
)
from rtxarr.ops._half import widen


def _steps(n_steps, reverse):
    return range(n_steps - 1, -1, -1) if reverse else range(n_steps)


def where_kept(kept, x, other=0):
    """Put ``other`` in the absent steps of ``x``, of shape (batch, time, n)."""
    return x if kept is None else where(expand_dims(kept, axis=-1), x, other)


def _carry(kept, t, new, old):
    return new if kept is None else where(kept[:, t, None], new, old)


def _before(first, xs, reverse):
    """Give the state before each step."""
    first = expand_dims(first, axis=1)
    parts = [xs[:, 1:, :], first] if reverse else [first, xs[:, :-1, :]]
    return concat(parts, axis=1)


def _received(g, gs, t, like):
    """Add what step ``t`` receives from outside to what it receives from the step after."""
    if gs is not None:
        return gs[:, t, :] if g is None else g + gs[:, t, :]
    return zeros_like(like) if g is None else g


def _weight_gradient(g, states):
    """Sum outer products over batch and time."""
    return matmul(
        matrix_transpose(reshape(g, (-1, g.shape[-1]))), reshape(states, (-1, states.shape[-1]))
    )


def _parts(x, n):
    """Cut the last axis into parts of length ``n``."""
    return [x[..., i : i + n] for i in range(0, x.shape[-1], n)]


def _spread(g, factors):
    """Multiply ``g (..., n)`` with each part of ``factors (..., m * n)``."""
    n = g.shape[-1]
    parts = reshape(factors, (*factors.shape[:-1], factors.shape[-1] // n, n))
    return reshape(expand_dims(g, axis=-2) * parts, factors.shape)


def _sigmoid(xp, x):
    # One pass of tanh; what this loses far from zero is below one unit in the last place of 1.
    return 0.5 * xp.tanh(0.5 * x) + 0.5


@differentiable
def lstm_scan(gates, h, c, weight, kept=None, /, *, reverse=False):
    """Run a long short-term memory over time.

    Parameters
    ----------
    gates : array, shape (batch, time, 4 * n_features)
        What the input adds to the input, forget, cell and output gates, biases included.
    h, c : array, shape (batch, n_features)
        State before the first step.
    weight : array, shape (4 * n_features, n_features)
    kept : array of bool, shape (batch, time), optional

    Returns
    -------
    (hs, cs, activations) : arrays, shape (batch, time, n_features), and four times that

    References
    ----------
    Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; Gers et al., "Learning to Forget",
    2000.
    """
    xp = namespace(gates, h, c, weight)
    dtype = result_type(gates.dtype, h.dtype, c.dtype, weight.dtype)
    gates, h, c, weight = map(widen, (gates, h, c, weight))
    n_steps, n = gates.shape[1], h.shape[1]
    hs, cs, activations = [None] * n_steps, [None] * n_steps, [None] * n_steps
    weight = xp.matrix_transpose(weight)
    for t in _steps(n_steps, reverse):
        pre = gates[:, t, :] + matmul(h, weight)
        i_f, a, o = (
            _sigmoid(xp, pre[:, : 2 * n]),
            xp.tanh(pre[:, 2 * n : 3 * n]),
            _sigmoid(xp, pre[:, 3 * n :]),
        )
        c = _carry(kept, t, i_f[:, n:] * c + i_f[:, :n] * a, c)
        h = _carry(kept, t, o * xp.tanh(c), h)
        hs[t], cs[t], activations[t] = h, c, xp.concat([i_f, a, o], axis=1)
    activations = where_kept(kept, xp.stack(activations, axis=1))
    outputs = xp.stack(hs, axis=1), xp.stack(cs, axis=1), activations
    return tuple(xp.astype(x, dtype, copy=False) for x in outputs)


@lstm_scan.defvjp
def _lstm_rule(g, out, h, c, weight, kept, reverse):
    g_hs, g_cs, g_activations = map(widen, g)
    hs, cs, activations = map(widen, out)
    h, c, weight = map(widen, (h, c, weight))
    n_steps, n = hs.shape[1:]
    i, f, a, o = _parts(activations, n)
    states, cells, root = _before(h, hs, reverse), _before(c, cs, reverse), tanh(cs)
    slopes = concat([i * (1 - i), f * (1 - f), 1 - a * a, o * (1 - o)], axis=-1)
    by_c = where_kept(kept, concat([a, cells, i], axis=-1) * slopes[..., : 3 * n])
    by_h = where_kept(kept, root * slopes[..., 3 * n :])
    c_by_h = where_kept(kept, o * (1 - root * root))
    f = where_kept(kept, f, 1)
    more = None if g_activations is None else where_kept(kept, g_activations * slopes)

    g_h = g_c = None
    g_gates = [None] * n_steps
    for t in reversed(_steps(n_steps, reverse)):
        g_h, g_c = _received(g_h, g_hs, t, h), _received(g_c, g_cs, t, c)
        g_c = g_c + g_h * c_by_h[:, t, :]
        g_pre = concat([_spread(g_c, by_c[:, t, :]), g_h * by_h[:, t, :]], axis=1)
        g_gates[t] = g_pre = g_pre if more is None else g_pre + more[:, t, :]
        g_h = _carry(kept, t, matmul(g_pre, weight), g_h)
        g_c = g_c * f[:, t, :]
    g_gates = stack(g_gates, axis=1)
    return g_gates, g_h, g_c, _weight_gradient(g_gates, states), None


@differentiable
def gru_scan(gates, h, weight, bias=None, kept=None, /, *, reverse=False):
    """Run a gated recurrent unit over time.

    Parameters
    ----------
    gates : array, shape (batch, time, 3 * n_features)
        What the input adds to the reset and update gates and to the candidate.
    h : array, shape (batch, n_features)
        State before the first step.
    weight, bias : array, shape (3 * n_features, n_features) and (3 * n_features,)
    kept : array of bool, shape (batch, time), optional

    Returns
    -------
    (hs, activations) : arrays, shape (batch, time, n_features), and four times that

    References
    ----------
    Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", 2014, arXiv:1406.1078;
    with the reset gate applied after the product, as cuDNN has it.
    """
    xp = namespace(gates, h, weight)
    dtype = result_type(gates.dtype, h.dtype, weight.dtype)
    gates, h, weight, bias = map(widen, (gates, h, weight, bias))
    n_steps, n = gates.shape[1], h.shape[1]
    hs, activations = [None] * n_steps, [None] * n_steps
    weight = xp.matrix_transpose(weight)
    for t in _steps(n_steps, reverse):
        x, y = gates[:, t, :], matmul(h, weight)
        y = y if bias is None else y + bias
        r_z = _sigmoid(xp, x[:, : 2 * n] + y[:, : 2 * n])
        z, q = r_z[:, n:], y[:, 2 * n :]
        a = xp.tanh(x[:, 2 * n :] + r_z[:, :n] * q)
        h = _carry(kept, t, a + z * (h - a), h)
        hs[t], activations[t] = h, xp.concat([r_z, a, q], axis=1)
    outputs = xp.stack(hs, axis=1), where_kept(kept, xp.stack(activations, axis=1))
    return tuple(xp.astype(x, dtype, copy=False) for x in outputs)


@gru_scan.defvjp
def _gru_rule(g, out, h, weight, bias, kept, reverse):
    g_hs, g_activations = map(widen, g)
    hs, activations = map(widen, out)
    h, weight = widen(h), widen(weight)
    n_steps, n = hs.shape[1:]
    r, z, a, q = _parts(activations, n)
    states = _before(h, hs, reverse)
    # The gates receive g_h times these, and the products of the state the same but for q.
    by_a, by_z = (1 - z) * (1 - a * a), (states - a) * z * (1 - z)
    by_r = by_a * q * r * (1 - r)
    of_gates = where_kept(kept, concat([by_r, by_z, by_a], axis=-1))
    of_products = where_kept(kept, concat([by_r, by_z, by_a * r], axis=-1))
    z_kept = where_kept(kept, z)
    if g_activations is not None:
        g_r, g_z, g_a, g_q = _parts(g_activations, n)
        g_a = g_a * (1 - a * a)
        g_r, g_z = (g_r + g_a * q) * r * (1 - r), g_z * z * (1 - z)
        more_gates = where_kept(kept, concat([g_r, g_z, g_a], axis=-1))
        more_products = where_kept(kept, concat([g_r, g_z, g_q + g_a * r], axis=-1))

    g_h = None
    g_states, g_products = [None] * n_steps, [None] * n_steps
    for t in reversed(_steps(n_steps, reverse)):
        g_states[t] = g_h = _received(g_h, g_hs, t, h)
        product = _spread(g_h, of_products[:, t, :])
        g_products[t] = product = (
            product if g_activations is None else product + more_products[:, t, :]
        )
        g_h = _carry(kept, t, g_h * z_kept[:, t, :] + matmul(product, weight), g_h)
    g_gates = _spread(stack(g_states, axis=1), of_gates)
    g_gates = g_gates if g_activations is None else g_gates + more_gates
    g_products = stack(g_products, axis=1)
    g_bias = None if bias is None else sum(g_products, axis=(0, 1))
    return g_gates, g_h, _weight_gradient(g_products, states), g_bias, None
