"""Changes of point clouds, for training: small functions of an explicit generator.

All take points of shape (n_points, n_axes) and keep their dtype and device. They are made of
differentiable operations, so a Tensor gives a Tensor. With ``ptr`` each cloud is changed by itself.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rtxarr import _device, ops
from rtxarr.autograd._tape import raw
from rtxarr.geom._points import checked_ptr, cloud_of
from rtxarr.geom._sampling import _integer, like, on_host
from rtxarr.ops._check import checked_generator
from rtxarr.random import Generator

__all__ = [
    "center_points",
    "drop_points",
    "flip_points",
    "jitter_points",
    "normalize_points",
    "rotate_points",
    "sample_points",
    "scale_points",
    "shear_points",
    "translate_points",
]


def _clouds(x, ptr):
    """Return where clouds begin, the number of clouds, and a function that gives points theirs."""
    array = raw(x)
    if array.ndim != 2:
        raise ValueError(f"x must have shape (n_points, n_axes), got {tuple(array.shape)}")
    if ptr is None:
        return None, 1, lambda values: values
    ptr = checked_ptr("ptr", ptr, array)
    cloud = cloud_of(ptr, array)
    return ptr, ptr.shape[0] - 1, lambda values: ops.take(values, cloud, axis=0)


def _uniform(rng, shape, low, high, x):
    array = raw(x)
    values = rng.uniform(shape, device=_device.device_of(array)) * (high - low) + low
    return _device.namespace(values).astype(values, array.dtype)


def center_points(x: Any, *, ptr: Any = None) -> Any:
    """Move each cloud so that its mean is the origin.

    Parameters
    ----------
    x : array or Tensor of floats, shape (n_points, n_axes)
    ptr : array of int, shape (n_clouds + 1,), optional
        Where each cloud begins, and the end; one cloud by default.

    Returns
    -------
    array or Tensor, shape (n_points, n_axes)

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> geom.center_points(np.array([[1.0, 0.0], [3.0, 4.0]]))
    array([[-1., -2.],
           [ 1.,  2.]])
    """
    ptr, _, each = _clouds(x, ptr)
    if ptr is None:
        return x - ops.mean(x, axis=0, keepdims=True) if x.shape[0] else x
    return x - each(ops.segment_mean(x, ptr))


def normalize_points(x: Any, *, ptr: Any = None) -> Any:
    """Move each cloud's mean to the origin, and scale it so that its furthest point has length 1.

    Parameters
    ----------
    x, ptr
        As for :func:`center_points`.

    Returns
    -------
    array or Tensor, shape (n_points, n_axes)
        A cloud whose points coincide is zero.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> geom.normalize_points(np.array([[1.0], [3.0], [8.0]]))
    array([[-0.75],
           [-0.25],
           [ 1.  ]])
    """
    if x.shape[0] == 0:
        return x
    x = center_points(x, ptr=ptr)
    ptr, _, each = _clouds(x, ptr)
    squares = ops.sum(x * x, axis=1, keepdims=True)
    if ptr is None:
        furthest = ops.max(squares, axis=0, keepdims=True)
    else:
        furthest = each(ops.segment_max(squares, ptr))
    return x / ops.sqrt(ops.where(furthest == 0, 1, furthest))


def rotate_points(x: Any, rng: Generator, *, axis: int | None = None, ptr: Any = None) -> Any:
    """Turn each cloud about the origin.

    Parameters
    ----------
    x : array or Tensor of floats, shape (n_points, 2) or (n_points, 3)
    rng : Generator
    axis : int, optional
        Turn about this axis, of three, all angles being as likely. By default all rotations are.
    ptr : array of int, shape (n_clouds + 1,), optional
        Where each cloud begins, and the end; one cloud by default.

    Returns
    -------
    array or Tensor, shape (n_points, n_axes)

    References
    ----------
    Shoemake, "Uniform random rotations", Graphics Gems III, 1992,
    doi:10.1016/B978-0-08-050755-2.50036-1.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> from rtxarr.random import Generator
    >>> turned = geom.rotate_points(np.array([[0.0, 0, 3]]), Generator(0))
    >>> round(float(np.linalg.norm(turned)), 12)
    3.0
    """
    checked_generator("rng", rng)
    _, n, each = _clouds(x, ptr)
    n_axes = x.shape[1]
    if n_axes not in (2, 3) or (axis is not None and (n_axes != 3 or axis not in (0, 1, 2))):
        raise ValueError(
            f"x must have two axes, or three and axis be one of them, got {n_axes} and {axis}"
        )
    u = rng.uniform((n, 3), device="cpu")
    if n_axes == 3 and axis is None:
        a, b = 2 * math.pi * u[:, 1], 2 * math.pi * u[:, 2]
        p, q = np.sqrt(1 - u[:, 0]), np.sqrt(u[:, 0])
        i, j, k, r = p * np.sin(a), p * np.cos(a), q * np.sin(b), q * np.cos(b)
        rows = [
            [1 - 2 * (j * j + k * k), 2 * (i * j - k * r), 2 * (i * k + j * r)],
            [2 * (i * j + k * r), 1 - 2 * (i * i + k * k), 2 * (j * k - i * r)],
            [2 * (i * k - j * r), 2 * (j * k + i * r), 1 - 2 * (i * i + j * j)],
        ]
        matrices = np.moveaxis(np.array(rows), -1, 0)
    else:
        angle = 2 * math.pi * u[:, 0]
        matrices = np.tile(np.eye(n_axes), (n, 1, 1))
        first, second = [a for a in range(n_axes) if a != axis]
        matrices[:, first, first] = matrices[:, second, second] = np.cos(angle)
        matrices[:, first, second], matrices[:, second, first] = -np.sin(angle), np.sin(angle)
    return _apply(x, matrices, each, ptr)


def shear_points(x: Any, rng: Generator, *, limit: float = 0.2, ptr: Any = None) -> Any:
    """Add to each coordinate of a cloud's points shares of the others.

    Parameters
    ----------
    x : array or Tensor of floats, shape (n_points, n_axes)
    rng : Generator
    limit : float, default 0.2
        Shares are uniform in [-limit, limit).
    ptr : array of int, shape (n_clouds + 1,), optional
        Where each cloud begins, and the end; one cloud by default.

    Returns
    -------
    array or Tensor, shape (n_points, n_axes)

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> from rtxarr.random import Generator
    >>> geom.shear_points(np.zeros((4, 3)), Generator(0)).shape
    (4, 3)
    """
    checked_generator("rng", rng)
    _positive("limit", limit)
    _, n, each = _clouds(x, ptr)
    n_axes = x.shape[1]
    shares = rng.uniform((n, n_axes, n_axes), -limit, limit, device="cpu")
    shares[:, range(n_axes), range(n_axes)] = 1
    return _apply(x, shares, each, ptr)


def _apply(x, matrices, each, ptr):
    matrices = like(raw(x), matrices.astype(raw(x).dtype))
    if ptr is None:
        return ops.matmul(x, matrices[0].T)
    return ops.sum(each(matrices) * x[:, None, :], axis=2)


def scale_points(
    x: Any,
    rng: Generator,
    *,
    low: float = 0.8,
    high: float = 1.25,
    per_axis: bool = False,
    ptr: Any = None,
) -> Any:
    """Scale each cloud by a number that is uniform in [low, high).

    Parameters
    ----------
    x : array or Tensor of floats, shape (n_points, n_axes)
    rng : Generator
    low, high : float, default 0.8 and 1.25
    per_axis : bool, default False
        Whether each axis has a number of its own.
    ptr : array of int, shape (n_clouds + 1,), optional
        Where each cloud begins, and the end; one cloud by default.

    Returns
    -------
    array or Tensor, shape (n_points, n_axes)

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> from rtxarr.random import Generator
    >>> x = geom.scale_points(np.array([[1.0, 2.0]]), Generator(0))
    >>> float(x[0, 1] / x[0, 0])
    2.0
    """
    checked_generator("rng", rng)
    if not (low < high and math.isfinite(high - low)):
        raise ValueError(f"low must be less than high, both finite, got {low} and {high}")
    _, n, each = _clouds(x, ptr)
    return x * each(_uniform(rng, (n, x.shape[1] if per_axis else 1), low, high, x))


def translate_points(x: Any, rng: Generator, *, limit: float = 0.1, ptr: Any = None) -> Any:
    """Move each cloud, along each axis by a number that is uniform in [-limit, limit).

    Parameters
    ----------
    x : array or Tensor of floats, shape (n_points, n_axes)
    rng : Generator
    limit : float, default 0.1
    ptr : array of int, shape (n_clouds + 1,), optional
        Where each cloud begins, and the end; one cloud by default.

    Returns
    -------
    array or Tensor, shape (n_points, n_axes)

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> from rtxarr.random import Generator
    >>> x = geom.translate_points(np.array([[0.0], [3.0]]), Generator(0))
    >>> round(float(x[1, 0] - x[0, 0]), 12)
    3.0
    """
    checked_generator("rng", rng)
    _positive("limit", limit)
    _, n, each = _clouds(x, ptr)
    return x + each(_uniform(rng, (n, x.shape[1]), -limit, limit, x))


def flip_points(x: Any, rng: Generator, *, axis: int, p: float = 0.5, ptr: Any = None) -> Any:
    """Mirror each cloud along an axis with probability ``p``.

    Parameters
    ----------
    x : array or Tensor of floats, shape (n_points, n_axes)
    rng : Generator
    axis : int
    p : float in [0, 1], default 0.5
    ptr : array of int, shape (n_clouds + 1,), optional
        Where each cloud begins, and the end; one cloud by default.

    Returns
    -------
    array or Tensor, shape (n_points, n_axes)

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> from rtxarr.random import Generator
    >>> geom.flip_points(np.array([[1.0, 2.0]]), Generator(0), axis=0, p=1.0)
    array([[-1.,  2.]])
    """
    checked_generator("rng", rng)
    _, n, each = _clouds(x, ptr)
    if not -x.shape[1] <= axis < x.shape[1]:
        raise ValueError(f"axis must lie in [{-x.shape[1]}, {x.shape[1]}), got {axis}")
    signs = np.ones((n, x.shape[1]))
    signs[rng.bernoulli(p, n, device="cpu"), axis] = -1
    return x * each(like(raw(x), signs.astype(raw(x).dtype)))


def jitter_points(x: Any, rng: Generator, *, std: float = 0.01, limit: float = 0.05) -> Any:
    """Move each point by normal numbers, cut off at a limit.

    Parameters
    ----------
    x : array or Tensor of floats, shape (n_points, n_axes)
    rng : Generator
    std : float, default 0.01
    limit : float, default 0.05
        No coordinate changes by more.

    Returns
    -------
    array or Tensor, shape (n_points, n_axes)

    References
    ----------
    Qi, Su, Mo and Guibas, "PointNet: deep learning on point sets for 3D classification and
    segmentation", 2017, arXiv:1612.00593, section 5.1.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> from rtxarr.random import Generator
    >>> x = geom.jitter_points(np.zeros((100, 3)), Generator(0), limit=0.02)
    >>> bool(abs(x).max() <= 0.02)
    True
    """
    checked_generator("rng", rng)
    _positive("std", std)
    _positive("limit", limit)
    array = raw(x)
    place = _device.device_of(array)
    moves = rng.normal(array.shape, 0.0, std, dtype=array.dtype, device=place)
    return x + ops.clip(moves, -limit, limit)


def drop_points(x: Any, rng: Generator, *, rate: float, ptr: Any = None) -> Any:
    """Choose the points that are left when each is dropped with probability ``rate``.

    Parameters
    ----------
    x : array or Tensor, shape (n_points, n_axes)
    rng : Generator
    rate : float in [0, 1)
    ptr : array of int, shape (n_clouds + 1,), optional
        Where each cloud begins, and the end; one cloud by default. A cloud that would lose all
        its points keeps the first.

    Returns
    -------
    array of int64, shape (n_kept,)
        Their numbers, rising: ``x[kept]`` are the points. On a GPU this waits for it.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> from rtxarr.random import Generator
    >>> x = np.zeros((6, 3))
    >>> kept = geom.drop_points(x, Generator(0), rate=0.5)
    >>> x[kept].shape
    (2, 3)
    """
    checked_generator("rng", rng)
    if not 0 <= rate < 1:
        raise ValueError(f"rate must lie in [0, 1), got {rate}")
    array = raw(x)
    bounds, _, _ = _clouds(x, np.array([0, array.shape[0]]) if ptr is None else ptr)
    kept = rng.dropout_mask(array.shape[0], rate, device="cpu")
    bounds = np.asarray(on_host(bounds))
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        if end > begin and not kept[begin:end].any():
            kept[begin] = True
    return like(array, np.flatnonzero(kept))


def sample_points(x: Any, n: int, rng: Generator, *, ptr: Any = None) -> Any:
    """Choose ``n`` points of each cloud, all different and each set as likely.

    Parameters
    ----------
    x : array or Tensor, shape (n_points, n_axes)
    n : int
    rng : Generator
    ptr : array of int, shape (n_clouds + 1,), optional
        Where each cloud begins, and the end; one cloud by default.

    Returns
    -------
    array of int64, shape (n_clouds * n,)
        Their numbers, cloud by cloud: ``x[chosen]`` are the points.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> from rtxarr.random import Generator
    >>> geom.sample_points(np.zeros((5, 3)), 2, Generator(0))
    array([3, 4])
    """
    checked_generator("rng", rng)
    n = _integer("n", n, 0, 2**31)
    array = raw(x)
    bounds, _, _ = _clouds(x, np.array([0, array.shape[0]]) if ptr is None else ptr)
    bounds = np.asarray(on_host(bounds))
    chosen = []
    for cloud, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        if end - begin < n:
            raise ValueError(
                f"n must be at most {end - begin}, the number of points of cloud {cloud}, got {n}"
            )
        chosen.append(begin + rng.permutation(int(end - begin), device="cpu")[:n])
    return like(array, np.concatenate([np.zeros(0, np.int64), *chosen]))


def _positive(name, value):
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, got {value}")
