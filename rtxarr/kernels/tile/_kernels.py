"""Products of matrices with their surroundings in one pass, as cuTile programs.

Each block computes one tile of the result, of ``tm`` rows and ``tn`` columns, and takes ``tk``
columns of the operands at a time. If it ``loops``, it goes on to other tiles and reads the next one
while it writes the last; of small tiles, or where operands pass through registers, the compiler
makes slow code then. Tiles that reach past an array are filled up with
zeros when they are read and cut when they are written, so all shapes are right. Sums are in
float32, in a fixed order. Arguments that are not arrays are constants of the program.
"""

from rtxarr._device import tile as ct
from rtxarr.kernels.tile._build import GELU, GELU_TANH, RELU, SIGMOID, SILU

ZERO = ct.PaddingMode.ZERO
APPROX = ct.RoundingMode.APPROX  # of a quotient: within two units in the last place
F32 = ct.float32
GROUP = 8  # rows of tiles that are computed together, so that operands are found in the cache


def _count(out, tm, tn):
    return ct.cdiv(out.shape[0], tm) * ct.cdiv(out.shape[1], tn)


def _place(index, out, tm, tn):
    """Give the row and column of a tile of the result, in the order in which they are computed."""
    m_tiles, n_tiles = ct.cdiv(out.shape[0], tm), ct.cdiv(out.shape[1], tn)
    group, rest = index // (GROUP * n_tiles), index % (GROUP * n_tiles)
    rows = min(m_tiles - group * GROUP, GROUP)
    return group * GROUP + rest % rows, rest // rows


def _columns(vector, j, tn):
    """Read what belongs to the columns of a tile, as a row."""
    return ct.load(vector, (j,), (tn,), padding_mode=ZERO).astype(F32)[None, :]


def _rows(vector, i, tm):
    """Read what belongs to the rows of a tile, as a column."""
    return ct.load(vector, (i,), (tm,), padding_mode=ZERO).astype(F32)[:, None]


def _inside(x, k, tk):
    """Tell which columns of a tile are columns of the array."""
    return (k * tk + ct.arange(tk, dtype=ct.int32) < x.shape[1])[None, :]


def _sigmoid(x):
    return ct.truediv(1.0, 1.0 + ct.exp(-x), rounding_mode=APPROX)


def _normal_cdf(x):
    # Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26: within 1e-7.
    z = ct.abs(x) * 0.7071067811865476
    t = ct.truediv(1.0, 1.0 + 0.3275911 * z, rounding_mode=APPROX)
    series = t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    tail = 0.5 * t * (0.254829592 + series) * ct.exp(-z * z)
    return ct.where(x < 0.0, tail, 1.0 - tail)


def _activate(x, activation):
    if activation == RELU:
        return ct.maximum(x, 0.0, propagate_nan=True)
    if activation == SIGMOID:
        return _sigmoid(x)
    if activation == SILU:
        return x * _sigmoid(x)
    if activation == GELU:
        return x * _normal_cdf(x)
    if activation == GELU_TANH:
        return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


def linear(x, weight, bias, out, activation, has_bias, loops, tm, tn, tk):
    """out = activation(x @ weight.T + bias)"""
    if loops:
        for index in range(ct.bid(0), _count(out, tm, tn), ct.num_blocks(0)):
            _linear(index, x, weight, bias, out, activation, has_bias, tm, tn, tk)
    else:
        _linear(ct.bid(0), x, weight, bias, out, activation, has_bias, tm, tn, tk)


def _linear(index, x, weight, bias, out, activation, has_bias, tm, tn, tk):
    i, j = _place(index, out, tm, tn)
    total = ct.zeros((tm, tn), dtype=F32)
    for k in range(ct.cdiv(x.shape[1], tk)):
        a = ct.load(x, (i, k), (tm, tk), padding_mode=ZERO)
        b = ct.load(weight, (k, j), (tk, tn), order=(1, 0), padding_mode=ZERO)
        total = ct.mma(a, b, total)
    if has_bias:
        total = total + _columns(bias, j, tn)
    ct.store(out, (i, j), _activate(total, activation).astype(out.dtype))


def gated_linear(
    x, weights, bias, gate_bias, out, activation, gate, has_bias, loops, tm, tn, tk
):  # fmt: skip
    """out = (x @ weights[1 - gate].T + bias) * activation(x @ weights[gate].T + gate_bias)"""
    more = bias, gate_bias, out, activation
    if loops:
        for index in range(ct.bid(0), _count(out, tm, tn), ct.num_blocks(0)):
            _gated_linear(index, x, weights, gate, more, has_bias, tm, tn, tk)
    else:
        _gated_linear(ct.bid(0), x, weights, gate, more, has_bias, tm, tn, tk)


def _gated_linear(index, x, weights, gate, more, has_bias, tm, tn, tk):
    i, j = _place(index, more[2], tm, tn)
    # One product of twice the width: two, one after the other, would wait for each other.
    total = ct.zeros((tm, 2 * tn), dtype=F32)
    for k in range(ct.cdiv(x.shape[1], tk)):
        a = ct.load(x, (i, k), (tm, tk), padding_mode=ZERO)
        b = ct.load(weights, (0, j, k), (2, tn, tk), padding_mode=ZERO)
        total = ct.mma(a, ct.transpose(ct.reshape(b, (2 * tn, tk))), total)
    value = ct.extract(total, (0, 1 - gate), (tm, tn))
    _store_gated(i, j, value, ct.extract(total, (0, gate), (tm, tn)), more, has_bias, tn)


def _store_gated(i, j, value, factor, more, has_bias, tn):
    bias, gate_bias, out, activation = more
    if has_bias:
        value = value + _columns(bias, j, tn)
        factor = factor + _columns(gate_bias, j, tn)
    ct.store(out, (i, j), (value * _activate(factor, activation)).astype(out.dtype))


def gated_linear_apart(
    x, weight, gate, bias, gate_bias, out, activation, has_bias, loops, tm, tn, tk
):  # fmt: skip
    """out = (x @ weight.T + bias) * activation(x @ gate.T + gate_bias)"""
    ct.static_assert(not loops, "each product would wait for the one before")
    i, j = _place(ct.bid(0), out, tm, tn)
    value = ct.zeros((tm, tn), dtype=F32)
    factor = ct.zeros((tm, tn), dtype=F32)
    for k in range(ct.cdiv(x.shape[1], tk)):
        a = ct.load(x, (i, k), (tm, tk), padding_mode=ZERO)
        w = ct.load(weight, (k, j), (tk, tn), order=(1, 0), padding_mode=ZERO)
        value = ct.mma(a, w, value)
        v = ct.load(gate, (k, j), (tk, tn), order=(1, 0), padding_mode=ZERO)
        factor = ct.mma(a, v, factor)
    _store_gated(i, j, value, factor, (bias, gate_bias, out, activation), has_bias, tn)


def norm_linear(
    x, mean, inverse, scale, shift, weight, bias, out,
    is_centred, has_scale, has_shift, has_bias, loops, tm, tn, tk,
):  # fmt: skip
    """out = ((x - mean) * inverse * scale + shift) @ weight.T + bias"""
    ct.static_assert(not loops, "the compiler would spill registers")
    i, j = _place(ct.bid(0), out, tm, tn)
    total = ct.zeros((tm, tn), dtype=F32)
    row_inverse = _rows(inverse, i, tm)
    for k in range(ct.cdiv(x.shape[1], tk)):
        a = ct.load(x, (i, k), (tm, tk), padding_mode=ZERO).astype(F32)
        if is_centred:
            a = a - _rows(mean, i, tm)
        a = a * row_inverse
        if has_scale:
            a = a * _columns(scale, k, tk)
        elif is_centred:
            # Past the end of a row stands -mean * inverse, which may be too large for a half.
            a = ct.where(_inside(x, k, tk), a, 0.0)
        if has_shift:
            a = a + _columns(shift, k, tk)
        b = ct.load(weight, (k, j), (tk, tn), order=(1, 0), padding_mode=ZERO)
        total = ct.mma(a.astype(x.dtype), b, total)
    if has_bias:
        total = total + _columns(bias, j, tn)
    ct.store(out, (i, j), total.astype(out.dtype))


def row_statistics(x, mean, inverse, eps, is_centred, tm, tk):
    """Give the mean of each row, if asked for, and 1 / sqrt(mean square about it + eps)."""
    i = ct.bid(0)
    n = x.shape[1]
    centre = ct.zeros((tm, 1), dtype=F32)
    if is_centred:
        total = ct.zeros((tm, tk), dtype=F32)
        for k in range(ct.cdiv(n, tk)):
            total = total + ct.load(x, (i, k), (tm, tk), padding_mode=ZERO).astype(F32)
        centre = ct.sum(total, axis=1, keepdims=True) / n
        ct.store(mean, (i,), ct.reshape(centre, (tm,)))
    squares = ct.zeros((tm, tk), dtype=F32)
    for k in range(ct.cdiv(n, tk)):
        a = ct.load(x, (i, k), (tm, tk), padding_mode=ZERO).astype(F32)
        if is_centred:
            a = ct.where(_inside(x, k, tk), a - centre, 0.0)
        squares = squares + a * a
    variance = ct.sum(squares, axis=1, keepdims=True) / n
    ct.store(inverse, (i,), ct.reshape(ct.rsqrt(variance + eps), (tm,)))


def fp8_rows(
    a, b, scale_a, scale_b, bias, out, by_row, by_column, has_bias, fast, loops, tm, tn, tk
):  # fmt: skip
    """out = (scale_a * a) @ (scale_b * b).T + bias, with a scale for each row of a and of b"""
    there = by_row, by_column, has_bias
    if loops:
        for index in range(ct.bid(0), _count(out, tm, tn), ct.num_blocks(0)):
            _fp8_rows(index, a, b, scale_a, scale_b, bias, out, there, fast, tm, tn, tk)
    else:
        _fp8_rows(ct.bid(0), a, b, scale_a, scale_b, bias, out, there, fast, tm, tn, tk)


def _fp8_rows(index, a, b, scale_a, scale_b, bias, out, there, fast, tm, tn, tk):
    by_row, by_column, has_bias = there
    i, j = _place(index, out, tm, tn)
    total = ct.zeros((tm, tn), dtype=F32)
    for k in range(ct.cdiv(a.shape[1], tk)):
        left = ct.load(a, (i, k), (tm, tk), padding_mode=ZERO)
        right = ct.load(b, (k, j), (tk, tn), order=(1, 0), padding_mode=ZERO)
        total = ct.mma(left, right, total, use_fast_acc=fast)
    if by_row:
        total = total * _rows(scale_a, i, tm)
    if by_column:
        total = total * _columns(scale_b, j, tn)
    if has_bias:
        total = total + _columns(bias, j, tn)
    ct.store(out, (i, j), total.astype(out.dtype))
