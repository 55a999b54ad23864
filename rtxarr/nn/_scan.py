"""Recurrences over time as single operations: one node for a whole sequence.

Their rules go back through time over the activations, which the forward pass gives as outputs of
their own. ``kept`` is None, or tells which steps are there: the others carry the state on.
"""

from rtxarr._device import namespace
from rtxarr.autograd import custom_op as differentiable
from rtxarr.ops import (
    concat,
    expand_dims,
    matmul,
    matrix_transpose,
    reshape,
    sigmoid,
    stack,
    sum,
    tanh,
    where,
    zeros_like,
)


def _steps(n_steps, reverse):
    return range(n_steps - 1, -1, -1) if reverse else range(n_steps)


def _at(kept, t):
    return None if kept is None else expand_dims(kept[:, t], axis=-1)


def _choose(chosen, x, y):
    return x if chosen is None else where(chosen, x, y)


def _before(first, xs, reverse):
    """Give the state before each step."""
    first = expand_dims(first, axis=1)
    parts = [xs[:, 1:], first] if reverse else [first, xs[:, :-1]]
    return concat(parts, axis=1)


def _weight_gradient(g, states):
    """Sum outer products over batch and time."""
    return matmul(
        matrix_transpose(reshape(g, (-1, g.shape[-1]))), reshape(states, (-1, states.shape[-1]))
    )


def _quarters(x):
    n = x.shape[-1] // 4
    return [x[..., i * n : (i + 1) * n] for i in range(4)]


def _add(x, y):
    return y if x is None else x if y is None else x + y


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
    n_steps = gates.shape[1]
    n = h.shape[1]
    hs, cs, activations = [None] * n_steps, [None] * n_steps, [None] * n_steps
    weight = xp.matrix_transpose(weight)
    for t in _steps(n_steps, reverse):
        pre = gates[:, t] + matmul(h, weight)
        i, f, o = sigmoid(pre[:, :n]), sigmoid(pre[:, n : 2 * n]), sigmoid(pre[:, 3 * n :])
        g = tanh(pre[:, 2 * n : 3 * n])
        there = _at(kept, t)
        c = _choose(there, f * c + i * g, c)
        h = _choose(there, o * tanh(c), h)
        hs[t], cs[t] = h, c
        activations[t] = _choose(there, xp.concat([i, f, g, o], axis=1), xp.zeros_like(pre))
    return xp.stack(hs, axis=1), xp.stack(cs, axis=1), xp.stack(activations, axis=1)


@lstm_scan.defvjp
def _lstm_rule(g, out, h, c, weight, kept, reverse):
    g_hs, g_cs, g_activations = g
    hs, cs, activations = out
    n_steps = hs.shape[1]
    states, cells = _before(h, hs, reverse), _before(c, cs, reverse)
    roots = tanh(cs)
    g_h = g_c = None
    g_gates = [None] * n_steps
    for t in reversed(_steps(n_steps, reverse)):
        there = _at(kept, t)
        g_h = _add(g_h, None if g_hs is None else g_hs[:, t])
        g_c = _add(g_c, None if g_cs is None else g_cs[:, t])
        g_h = zeros_like(h) if g_h is None else g_h
        g_c = zeros_like(c) if g_c is None else g_c
        i, f, a, o = _quarters(activations[:, t])
        root = roots[:, t]
        g_new_h = _choose(there, g_h, 0)
        g_new_c = _choose(there, g_c, 0) + g_new_h * o * (1 - root * root)
        g_i, g_f, g_a, g_o = g_new_c * a, g_new_c * cells[:, t], g_new_c * i, g_new_h * root
        if g_activations is not None:
            more = _quarters(g_activations[:, t])
            g_i, g_f, g_a, g_o = g_i + more[0], g_f + more[1], g_a + more[2], g_o + more[3]
        g_pre = concat(
            [g_i * i * (1 - i), g_f * f * (1 - f), g_a * (1 - a * a), g_o * o * (1 - o)], axis=1
        )
        g_gates[t] = g_pre = _choose(there, g_pre, 0)
        g_h = matmul(g_pre, weight) + (0 if there is None else where(there, 0, g_h))
        g_c = g_new_c * f + (0 if there is None else where(there, 0, g_c))
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
    n_steps = gates.shape[1]
    n = h.shape[1]
    hs, activations = [None] * n_steps, [None] * n_steps
    weight = xp.matrix_transpose(weight)
    for t in _steps(n_steps, reverse):
        x, y = gates[:, t], matmul(h, weight)
        y = y if bias is None else y + bias
        r, z = sigmoid(x[:, :n] + y[:, :n]), sigmoid(x[:, n : 2 * n] + y[:, n : 2 * n])
        q = y[:, 2 * n :]
        a = tanh(x[:, 2 * n :] + r * q)
        there = _at(kept, t)
        h = _choose(there, (1 - z) * a + z * h, h)
        hs[t] = h
        step = xp.concat([r, z, a, q], axis=1)
        activations[t] = _choose(there, step, xp.zeros_like(step))
    return xp.stack(hs, axis=1), xp.stack(activations, axis=1)


@gru_scan.defvjp
def _gru_rule(g, out, h, weight, bias, kept, reverse):
    g_hs, g_activations = g
    hs, activations = out
    n_steps = hs.shape[1]
    states = _before(h, hs, reverse)
    g_h = None
    g_gates, g_products = [None] * n_steps, [None] * n_steps
    for t in reversed(_steps(n_steps, reverse)):
        there = _at(kept, t)
        g_h = _add(g_h, None if g_hs is None else g_hs[:, t])
        g_h = zeros_like(h) if g_h is None else g_h
        r, z, a, q = _quarters(activations[:, t])
        g_new = _choose(there, g_h, 0)
        g_z, g_a = g_new * (states[:, t] - a), g_new * (1 - z)
        if g_activations is not None:
            more = _quarters(g_activations[:, t])
            g_z, g_a = g_z + more[1], g_a + more[2]
        g_a = g_a * (1 - a * a)
        g_r, g_q = g_a * q, g_a * r
        if g_activations is not None:
            g_r, g_q = g_r + more[0], g_q + more[3]
        g_r, g_z = g_r * r * (1 - r), g_z * z * (1 - z)
        g_gates[t] = _choose(there, concat([g_r, g_z, g_a], axis=1), 0)
        g_products[t] = product = _choose(there, concat([g_r, g_z, g_q], axis=1), 0)
        g_h = g_new * z + matmul(product, weight) + (0 if there is None else where(there, 0, g_h))
    g_products = stack(g_products, axis=1)
    g_bias = None if bias is None else sum(g_products, axis=(0, 1))
    g_weight = _weight_gradient(g_products, states)
    return stack(g_gates, axis=1), g_h, g_weight, g_bias, None
