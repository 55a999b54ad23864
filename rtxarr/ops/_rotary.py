"""Rotary position embedding, and its derivative rule."""

from rtxarr._device import namespace
from rtxarr.autograd._op import differentiable, explained, nondifferentiable
from rtxarr.dtypes import accumulator
from rtxarr.kernels import rotary as kernels
from rtxarr.ops._check import check_floating, check_number
from rtxarr.ops._half import widen
from rtxarr.ops._manipulate import reshape

__all__ = ["rotary_angles", "rotary_embedding"]


@nondifferentiable
def rotary_angles(positions, head_dim: int, *, base: float = 10_000.0):
    """Give the cosines and sines that :func:`rotary_embedding` turns by.

    Parameters
    ----------
    positions : array of int or float, any shape
        Places in the sequence.
    head_dim : int, even
        Elements to turn.
    base : float, above 1, default 10000
        Pair ``i`` turns by ``position * base ** (-2 * i / head_dim)``.

    Returns
    -------
    cos, sin : array of float32, shape (*positions.shape, head_dim // 2)

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> cos, sin = rx.rotary_angles(np.arange(5), 8)
    >>> cos.shape
    (5, 4)
    """
    if not isinstance(head_dim, int) or head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even and at least 2, got {head_dim!r}")
    check_number("base", base, above=1)
    xp = namespace(positions)
    steps = xp.arange(head_dim // 2, dtype=xp.float32, device=getattr(positions, "device", None))
    # In float32 the angle of a far position would be off by whole turns at the fast pairs: it is
    # the position that must be exact, so the product is made in float64.
    speeds = base ** (-2 / head_dim * xp.astype(steps, xp.float64))
    angles = xp.astype(positions, xp.float64)[..., None] * speeds
    return xp.astype(xp.cos(angles), xp.float32), xp.astype(xp.sin(angles), xp.float32)


@differentiable
def _rotate(x, cos, sin, /, *, interleaved, inverse):
    """Turn pairs of elements along the last axis; the other way for ``inverse``."""
    if kernels.fits(x):
        return kernels.rotate(x, cos, sin, interleaved=interleaved, inverse=inverse)
    return _formula(x, cos, sin, interleaved, inverse)


def _pairs(x, n_pairs, interleaved):
    """Give the first and the second of each pair, and what is in none."""
    turned, rest = x[..., : 2 * n_pairs], x[..., 2 * n_pairs :]
    if interleaved:
        pairs = reshape(turned, (*x.shape[:-1], n_pairs, 2))
        return pairs[..., 0], pairs[..., 1], rest
    return turned[..., :n_pairs], turned[..., n_pairs:], rest


def _formula(x, cos, sin, interleaved, inverse):
    xp, dtype = namespace(x, cos, sin), accumulator(x.dtype)
    cos, sin = (xp.astype(t, dtype, copy=False) for t in (cos, sin))
    a, b, rest = _pairs(xp.astype(x, dtype, copy=False), cos.shape[-1], interleaved)
    if inverse:
        sin = -sin
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        out = reshape(xp.stack((first, second), axis=-1), (*x.shape[:-1], 2 * cos.shape[-1]))
    else:
        out = xp.concat((first, second), axis=-1)
    return xp.astype(xp.concat((out, rest), axis=-1), x.dtype, copy=False)


def _cos_rule(g, x, cos_shape, interleaved):
    n = cos_shape[-1]
    (a, b, _), (up, right, _) = (_pairs(widen(t), n, interleaved) for t in (x, g))
    return up * a + right * b


def _sin_rule(g, x, sin_shape, interleaved, inverse):
    n = sin_shape[-1]
    (a, b, _), (up, right, _) = (_pairs(widen(t), n, interleaved) for t in (x, g))
    return up * b - right * a if inverse else right * a - up * b


_rotate.defvjps(
    x=lambda g, cos, sin, interleaved, inverse: _rotate(
        g, cos, sin, interleaved=interleaved, inverse=not inverse
    ),
    cos=_cos_rule,
    sin=_sin_rule,
)


@explained
def rotary_embedding(x, cos, sin, *, interleaved: bool = False):
    """Turn pairs of features by angles that grow with the position in the sequence.

    The product of two vectors turned so depends on the distance between their positions alone.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, shape (..., head_dim)
        Queries or keys.
    cos, sin : array or Tensor, broadcast to (..., n_pairs)
        As :func:`rotary_angles` gives them, for example of shape (n_steps, n_pairs) for ``x`` of
        shape (..., n_heads, n_steps, head_dim). ``2 * n_pairs`` is at most ``head_dim``; features
        beyond are left as they are.
    interleaved : bool, default False
        Whether features ``2 * i`` and ``2 * i + 1`` make a pair, as in the paper, or features
        ``i`` and ``i + n_pairs``.

    Returns
    -------
    array or Tensor, shape and dtype of ``x``
        Computed in float32 for the half types.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
    arXiv:2104.09864, eq. 34.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> x = np.ones((2, 3, 5, 8), dtype="float32")
    >>> rx.rotary_embedding(x, *rx.rotary_angles(np.arange(5), 8)).shape
    (2, 3, 5, 8)
    """
    check_floating(x=x, cos=cos, sin=sin)
    if cos.shape != sin.shape or cos.ndim < 1:
        raise ValueError(f"cos and sin must have one shape, got {cos.shape} and {sin.shape}")
    n_pairs, shape = cos.shape[-1], tuple(x.shape)
    if x.ndim < 1 or not 0 < 2 * n_pairs <= shape[-1]:
        raise ValueError(
            f"cos and sin must turn 2 features of x or more, and no more than it has, got shapes "
            f"{tuple(cos.shape)} and {shape}"
        )
    leading = (1,) * (x.ndim - cos.ndim) + tuple(cos.shape[:-1])
    if len(leading) != x.ndim - 1 or any(
        c not in (1, n) for c, n in zip(leading, shape[:-1], strict=True)
    ):
        raise ValueError(
            f"cos and sin must broadcast to {(*shape[:-1], n_pairs)}, got {tuple(cos.shape)}"
        )
    return _rotate(x, cos, sin, interleaved=bool(interleaved), inverse=False)
