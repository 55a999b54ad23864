"""Affine maps and table look-ups, with rules for the gradient of each sample."""

import math

import numpy as np

from rtxarr._device import constant, is_device_array, namespace
from rtxarr._override import overridable
from rtxarr.autograd._op import differentiable
from rtxarr.autograd._tape import Tensor, raw
from rtxarr.dtypes import is_half
from rtxarr.kernels.segment import column_sums
from rtxarr.libs.blas import try_matmul
from rtxarr.ops._check import check_floating, check_index
from rtxarr.ops._elementwise import where
from rtxarr.ops._half import rounded_once, widen
from rtxarr.ops._index import _scatter_rows
from rtxarr.ops._linalg import matmul
from rtxarr.ops._manipulate import expand_dims, matrix_transpose, reshape
from rtxarr.ops._reduce import sum

__all__ = ["embedding"]  # `linear` as users know it takes an activation: _activated.py


def _rows(x):
    """Flatten all axes but the last, so that one matrix product does for all."""
    return x if x.ndim == 2 else reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def _affine(x, weight, bias):
    out = matmul(_rows(x), weight.T)
    if bias is not None:
        if bias.dtype == out.dtype:
            out += bias
        else:
            out = out + bias
    return out if x.ndim == 2 else reshape(out, (*x.shape[:-1], weight.shape[0]))


_affine_in_single = rounded_once(_affine)


def _affine_on_device(x, weight, bias):
    out = try_matmul(x, weight.T, bias=bias)
    # The product itself takes half precision and accumulates in float32.
    return _affine(x, weight, bias) if out is None else out


@differentiable
@overridable
def linear(x, weight, bias=None):
    """Give ``x @ weight.T + bias``.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, shape (..., in_features)
    weight : array or Tensor, shape (out_features, in_features)
    bias : array or Tensor, shape (out_features,), optional

    Returns
    -------
    array or Tensor, shape (..., out_features)
        Half-precision products accumulate in float32.
    """
    check_floating(x=x, weight=weight, bias=bias)
    if weight.ndim != 2:
        raise ValueError(f"weight must have shape (out_features, in_features), got {weight.shape}")
    if x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x must have shape (..., {weight.shape[1]}) for weight of shape {weight.shape}, got "
            f"{x.shape}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {weight.shape[:1]}, got {bias.shape}")
    return (_affine_on_device if is_device_array(x) else _affine_in_single)(x, weight, bias)


def _x_rule(g, weight, x_shape):
    out = matmul(_rows(g), weight)
    return out if len(x_shape) == 2 else reshape(out, x_shape)


def _weight_rule(g, x):
    return matmul(matrix_transpose(_rows(g)), _rows(x))


def _bias_rule(g):
    return _column_sums(_rows(g))


linear.defvjps(x=_x_rule, weight=_weight_rule, bias=_bias_rule)


def _column_sums(g):
    """Add up rows, half precision in float32 and without rounding the sums."""
    if is_device_array(g) and g.size:
        # CuPy would first write it all out as float32.
        ones = constant(g, np.ones, g.shape[0], dtype=g.dtype)
        out = try_matmul(ones, g, dtype=np.dtype("float32") if is_half(g.dtype) else None)
        return column_sums(g) if out is None else out
    return sum(widen(g), axis=0)


def _samples(x):
    """Give ``(batch, n, n_features)`` from ``(batch, ..., n_features)``."""
    if x.ndim < 2:
        raise ValueError(f"gradients of each sample need a batch axis, got shape {x.shape}")
    return reshape(x, (x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1]))


def _weight_per_sample(g, x):
    return matmul(matrix_transpose(_samples(g)), _samples(x))


def _bias_per_sample(g):
    return sum(widen(_samples(g)), axis=1)


linear.defper_sample(weight=_weight_per_sample, bias=_bias_per_sample)


@differentiable(movement=True)
def embedding(indices, weight, *, padding_index: int | None = None):
    """Look up rows of a table.

    Parameters
    ----------
    indices : array of int, any shape
        Rows to take, in ``[0, n_rows)``. On a GPU not checked, unless inside
        ``rtxarr.testing.check_values()``.
    weight : array or Tensor of a real floating dtype, shape (n_rows, n_features)
    padding_index : int in [0, n_rows), optional
        Row whose gradient is zero.

    Returns
    -------
    array or Tensor, shape (*indices.shape, n_features)

    Notes
    -----
    The gradient adds up in a fixed order: the same bits on every run.
    """
    check_floating(weight=weight)
    if weight.ndim != 2:
        raise ValueError(f"weight must have shape (n_rows, n_features), got {weight.shape}")
    n_rows, n_features = weight.shape
    check_index("indices", indices, n_rows)
    if padding_index is not None and not 0 <= padding_index < n_rows:
        raise ValueError(f"padding_index must lie in [0, {n_rows}), got {padding_index}")
    xp = namespace(indices, weight)
    rows = xp.take(weight, xp.reshape(indices, (-1,)), axis=0)
    return xp.reshape(rows, (*indices.shape, n_features))


def _without_padding(g, indices, padding_index):
    if padding_index is None:
        return g
    return where(expand_dims(indices == padding_index, axis=-1), 0, g)


def _embedding_rule(g, indices, weight_shape, padding_index):
    if padding_index is None or isinstance(g, Tensor):
        g = _without_padding(g, indices, padding_index)
        return _scatter_rows(g, raw(indices), tuple(weight_shape), from_end=False)
    rows = _scatter_rows(g, raw(indices), tuple(weight_shape), from_end=False)
    rows[padding_index, :] = 0  # cheaper than a pass over g
    return rows


embedding.defvjps(weight=_embedding_rule)


def _embedding_per_sample(g, indices, weight_shape, padding_index):
    """Scatter into a stack of tables, one for each sample."""
    n_rows, n_features = weight_shape
    n_samples = indices.shape[0]
    xp = namespace(indices)
    first = xp.arange(n_samples, dtype=xp.int64) * n_rows
    stacked = xp.astype(indices, xp.int64) + xp.reshape(first, (-1,) + (1,) * (indices.ndim - 1))
    g = _without_padding(g, indices, padding_index)
    rows = _scatter_rows(g, stacked, (n_samples * n_rows, n_features), from_end=False)
    return reshape(rows, (n_samples, n_rows, n_features))


embedding.defper_sample(weight=_embedding_per_sample)
