"""Shape changes, joining and splitting, and their derivative rules."""

import math

import numpy as np

from rtxarr._device import is_array, is_device_array, namespace
from rtxarr.autograd._op import differentiable, explained
from rtxarr.dtypes import isdtype, result_type
from rtxarr.ops._check import check_count
from rtxarr.ops._elementwise import BFLOAT16, astype

__all__ = [
    "broadcast_arrays",
    "broadcast_shapes",
    "broadcast_to",
    "concat",
    "expand_dims",
    "flip",
    "matrix_transpose",
    "meshgrid",
    "moveaxis",
    "pad",
    "permute_dims",
    "repeat",
    "reshape",
    "roll",
    "squeeze",
    "stack",
    "tile",
    "transpose",
    "unstack",
]


_view = differentiable(movement=True, view=True)
_move = differentiable(movement=True)


def normalize_axis(axis, ndim):
    """Give an axis counted from the front."""
    if not isinstance(axis, (int, np.integer)):
        raise TypeError(f"axis must be an integer, got {axis!r}")
    if not ndim:
        raise ValueError(f"axis must be one of the array, which has none, got {axis}")
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis must lie in [-{ndim}, {ndim}), got {axis}")
    return axis % ndim


def listed_axes(axis, ndim) -> tuple[int, ...]:
    """Give one axis or several as non-negative integers in their order, without repeats."""
    axes = (axis,) if isinstance(axis, (int, np.integer)) else tuple(axis)
    wrapped = tuple(normalize_axis(a, ndim) for a in axes)
    if len(set(wrapped)) != len(wrapped):
        raise ValueError(f"axis must not name an axis twice, got {axis}")
    return wrapped


def normalize_axes(axis, ndim) -> tuple[int, ...]:
    """Give :func:`listed_axes` sorted; None names all axes."""
    return tuple(range(ndim)) if axis is None else tuple(sorted(listed_axes(axis, ndim)))


def only_axis(axis, ndim):
    """Give an axis counted from the front; None for the only one of a 1-D array."""
    if axis is None:
        if ndim != 1:
            raise ValueError(f"axis must be given for an array of {ndim} dimensions")
        return 0
    return normalize_axis(axis, ndim)


def common_axis(axis, x1, x2):
    """Give, as a negative number, an axis of two arrays that are broadcast against each other."""
    if axis >= 0 and x1.ndim != x2.ndim:
        raise ValueError(
            f"axis must be negative for arrays of {x1.ndim} and {x2.ndim} dimensions, got {axis}"
        )
    return axis if axis < 0 else axis - x1.ndim


def part_along(x, axis, start, stop):
    """Give the elements from ``start`` to ``stop`` along an axis counted from the front."""
    return x[(*(slice(None),) * axis, slice(start, stop), ...)]


@_view
def reshape(x, /, shape, *, copy=None):
    """Give ``x`` with another shape of the same size; one length may be -1.

    Parameters
    ----------
    x : array or Tensor
    shape : tuple of int
    copy : bool, optional
        True always copies, False refuses to; by default only when needed.
    """
    if isinstance(shape, int):
        shape = (shape,)
    if math.prod(shape) != x.size and -1 not in shape:
        raise ValueError(f"shape must hold {x.size} elements like {x.shape}, got {shape}")
    if copy is None and is_device_array(x):  # at a third of the cost
        return x.reshape(shape)
    return namespace(x).reshape(x, shape, copy=copy)


reshape.defvjps(x=lambda g, x_shape: reshape(g, x_shape))


@_view
def permute_dims(x, /, axes):
    """Reorder the axes.

    Parameters
    ----------
    x : array or Tensor
    axes : tuple of int
        Axis ``axes[i]`` of ``x`` becomes axis ``i``.
    """
    if sorted(normalize_axis(a, x.ndim) for a in axes) != list(range(x.ndim)):
        raise ValueError(f"axes must name each of the {x.ndim} axes once, got {axes}")
    return namespace(x).permute_dims(x, axes)


def _permute_rule(g, axes):
    order = [a % len(axes) for a in axes]
    return permute_dims(g, tuple(order.index(i) for i in range(len(order))))


permute_dims.defvjps(x=_permute_rule)


@_view
def moveaxis(x, source, destination, /):
    """Move axes to other places and keep the order of the rest.

    Parameters
    ----------
    x : array or Tensor
    source, destination : int or tuple of int
    """
    return namespace(x).moveaxis(x, source, destination)


moveaxis.defvjps(x=lambda g, source, destination: moveaxis(g, destination, source))


@_view
def matrix_transpose(x, /):
    """Swap the last two axes.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, m)

    Returns
    -------
    array or Tensor, shape (..., m, n)
    """
    if x.ndim == 2 and is_device_array(x):
        return x.T
    return namespace(x).matrix_transpose(x)


matrix_transpose.defvjps(x=lambda g: matrix_transpose(g))


@_view
def expand_dims(x, /, axis=0):
    """Insert axes of length one.

    Parameters
    ----------
    x : array or Tensor
    axis : int or tuple of int, default 0
        Places of the new axes in the result.
    """
    if isinstance(axis, tuple):
        return np.expand_dims(x, axis) if isinstance(x, np.ndarray) else _expand_all(x, axis)
    return namespace(x).expand_dims(x, axis=axis)


def _expand_all(x, axes):
    ndim = x.ndim + len(axes)
    axes = sorted(normalize_axis(a, ndim) for a in axes)
    for axis in axes:
        x = namespace(x).expand_dims(x, axis=axis)
    return x


expand_dims.defvjps(x=lambda g, x_shape: reshape(g, x_shape))


@_view
def squeeze(x, /, axis):
    """Remove axes of length one.

    Parameters
    ----------
    x : array or Tensor
    axis : int or tuple of int

    Raises
    ------
    ValueError
        When one of them has another length.
    """
    axes = normalize_axes(axis, x.ndim)
    if any(x.shape[a] != 1 for a in axes):
        raise ValueError(f"axis must name axes of length one, got {axis} of shape {x.shape}")
    return namespace(x).squeeze(x, axis=axes)


squeeze.defvjps(x=lambda g, x_shape: reshape(g, x_shape))


@_view
def broadcast_to(x, /, shape):
    """Repeat ``x`` along axes of length one (and new leading ones) to fill ``shape``.

    Parameters
    ----------
    x : array or Tensor
    shape : tuple of int

    Notes
    -----
    The result is a view whose elements share memory: do not write into it.
    """
    try:
        return namespace(x).broadcast_to(x, shape)
    except ValueError:
        raise ValueError(f"x of shape {x.shape} does not broadcast to shape {shape}") from None


broadcast_to.defvjps(x=lambda g: g)  # the engine sums over the broadcast axes


@explained
def broadcast_arrays(*arrays):
    """Broadcast all arrays against each other.

    Parameters
    ----------
    *arrays : array or Tensor

    Returns
    -------
    tuple of array or Tensor, all of one shape
    """
    shape = broadcast_shapes(*(a.shape for a in arrays))
    return tuple(broadcast_to(a, shape) for a in arrays)


@explained
def broadcast_shapes(*shapes):
    """Give the shape that arrays of ``shapes`` broadcast to.

    Parameters
    ----------
    *shapes : tuple of int

    Returns
    -------
    tuple of int
    """
    return np.broadcast_shapes(*shapes)


@_view
def flip(x, /, *, axis=None):
    """Reverse the order of the elements along axes.

    Parameters
    ----------
    x : array or Tensor
    axis : int or tuple of int, optional
        All axes by default.
    """
    return namespace(x).flip(x, axis=axis)


flip.defvjps(x=lambda g, axis: flip(g, axis=axis))


@_move
def roll(x, /, shift, *, axis=None):
    """Shift the elements along axes, those pushed out coming back at the other end.

    Parameters
    ----------
    x : array or Tensor
    shift : int or tuple of int
        By how many places, one number for each axis.
    axis : int or tuple of int, optional
        The flattened array by default.
    """
    shifts = shift if isinstance(shift, (tuple, list)) else (shift,)
    if not all(isinstance(n, (int, np.integer)) for n in shifts):
        raise TypeError(f"shift must be an int or a tuple of them, got {shift!r}")
    return namespace(x).roll(x, shift, axis=axis)


def _roll_rule(g, shift, axis):
    back = tuple(-s for s in shift) if isinstance(shift, tuple) else -shift
    return roll(g, back, axis=axis)


roll.defvjps(x=_roll_rule)


@_move
def tile(x, repetitions, /):
    """Put copies of ``x`` side by side, ``repetitions[i]`` of them along axis ``i``.

    Parameters
    ----------
    x : array or Tensor
    repetitions : tuple of int
        Shorter than the number of axes, it is for the last ones; longer, axes are put in front.
    """
    if not isinstance(repetitions, (tuple, list)):
        raise TypeError(f"repetitions must be a tuple of ints, got {repetitions!r}")
    for n in repetitions:
        check_count("repetitions", n)
    return namespace(x).tile(x, repetitions)


def _tile_rule(g, x_shape, repetitions):
    from rtxarr.ops._reduce import sum

    ndim = max(len(repetitions), len(x_shape))
    reps = (1,) * (ndim - len(repetitions)) + tuple(repetitions)
    shape = (1,) * (ndim - len(x_shape)) + tuple(x_shape)
    split = [n for pair in zip(reps, shape, strict=True) for n in pair]
    return reshape(sum(reshape(g, tuple(split)), axis=tuple(range(0, 2 * ndim, 2))), x_shape)


tile.defvjps(x=_tile_rule)


@_move
def repeat(x, repeats, /, *, axis=None):
    """Repeat each element along one axis (of the flattened array by default).

    Parameters
    ----------
    x : array or Tensor
    repeats : int or array of int, shape (x.shape[axis],)
    axis : int, optional
    """
    xp = namespace(x)
    if not is_array(repeats):
        check_count("repeats", repeats)
    else:
        if not isdtype(repeats.dtype, "integral"):
            raise TypeError(f"repeats must hold integers, got {repeats.dtype}")
        repeats = xp.astype(repeats, xp.int64, copy=False)  # NumPy refuses uint64
    return xp.repeat(x, repeats, axis=axis)


def _repeat_rule(g, x_shape, repeats, axis):
    from rtxarr.ops._reduce import sum
    from rtxarr.ops._segment import segment_sum

    flat = axis is None
    shape = (math.prod(x_shape),) if flat else tuple(x_shape)
    axis = 0 if flat else axis % len(shape)
    if isinstance(repeats, int):
        split = (*shape[:axis], shape[axis], repeats, *shape[axis + 1 :])
        return reshape(sum(reshape(g, split), axis=axis + 1), x_shape)
    xp = namespace(repeats)
    counts = xp.broadcast_to(repeats, (shape[axis],))
    indptr = xp.cumulative_sum(xp.astype(counts, xp.int64), include_initial=True)
    rows = moveaxis(segment_sum(moveaxis(g, axis, 0), indptr), 0, axis)
    return reshape(rows, x_shape)


repeat.defvjps(x=_repeat_rule)


@differentiable
def _concat(*arrays, axis=0):
    """Join arrays along an existing axis."""
    if axis is not None:
        ndim = arrays[0].ndim
        axis = normalize_axis(axis, ndim)
        shapes = [a.shape for a in arrays]
        if any(
            s[:axis] + s[axis + 1 :] != shapes[0][:axis] + shapes[0][axis + 1 :] for s in shapes
        ):
            raise ValueError(
                f"arrays must have equal shapes except along axis {axis}, got {shapes}"
            )
    return namespace(*arrays).concat(arrays, axis=axis)


def _concat_rule(g, arrays_shape, axis, needs):
    if axis is None:
        shapes = [(math.prod(s),) for s in arrays_shape]
        axis = 0
    else:
        shapes = arrays_shape
        axis %= len(shapes[0])
    start, grads = 0, []
    for place, (shape, whole) in enumerate(zip(shapes, arrays_shape, strict=True)):
        needed = place < len(needs) and needs[place]  # shorter: it ends with the last tracked one
        stop = start + shape[axis]
        part = part_along(g, axis, start, stop) if needed else None
        grads.append(reshape(part, whole) if needed and part.shape != whole else part)
        start = stop
    return grads


_concat.defvjp(_concat_rule)


@explained
def concat(arrays, /, *, axis=0):
    """Join arrays along an existing axis; None flattens them first.

    Parameters
    ----------
    arrays : sequence of array or Tensor
        Equal shapes except along ``axis``; dtypes are promoted.
    axis : int or None, default 0
    """
    arrays = _sequence(arrays)
    if any(getattr(a, "dtype", None) in BFLOAT16 for a in arrays):
        dtype = result_type(*(a.dtype for a in arrays))
        arrays = [astype(a, dtype, copy=False) for a in arrays]
    return _concat(*arrays, axis=axis)


def _sequence(arrays):
    arrays = list(arrays)
    if not arrays:
        raise ValueError("arrays must hold at least one array, got none")
    return arrays


@explained
def stack(arrays, /, *, axis=0):
    """Join arrays of one shape along a new axis.

    Parameters
    ----------
    arrays : sequence of array or Tensor, all of one shape
    axis : int, default 0
        Place of the new axis in the result.
    """
    arrays = _sequence(arrays)
    if any(a.shape != arrays[0].shape for a in arrays):
        raise ValueError(f"arrays must have one shape, got {[a.shape for a in arrays]}")
    axis = normalize_axis(axis, arrays[0].ndim + 1)
    return concat([expand_dims(a, axis=axis) for a in arrays], axis=axis)


@explained
def unstack(x, /, *, axis=0):
    """Split an array along one axis into arrays without that axis.

    Parameters
    ----------
    x : array or Tensor
    axis : int, default 0

    Returns
    -------
    tuple of array or Tensor
    """
    axis = normalize_axis(axis, x.ndim)
    rows = moveaxis(x, axis, 0) if axis else x
    return tuple(rows[i, ...] for i in range(rows.shape[0]))


@explained
def meshgrid(*arrays, indexing="xy"):
    """Make coordinate arrays of a grid from 1-D coordinate vectors; gives a tuple.

    Parameters
    ----------
    *arrays : array or Tensor, 1-D
    indexing : {"xy", "ij"}, default "xy"
        Whether the first two axes are swapped ("xy") or in the order given ("ij").
    """
    if indexing not in ("xy", "ij"):
        raise ValueError(f"indexing must be 'xy' or 'ij', got {indexing!r}")
    n = len(arrays)
    shape = [a.size for a in arrays]
    order = list(range(n))
    if indexing == "xy" and n > 1:
        order[0], order[1] = 1, 0
    full = [0] * n
    for i, place in enumerate(order):
        full[place] = shape[i]
    return tuple(
        broadcast_to(
            reshape(a, tuple(-1 if axis == order[i] else 1 for axis in range(n))), tuple(full)
        )
        for i, a in enumerate(arrays)
    )


@_move
def pad(x, /, widths, *, constant_values=0):
    """Surround an array with a constant.

    Parameters
    ----------
    x : array or Tensor
    widths : sequence of (int, int), one pair for each axis
        How many elements to add before and after.
    constant_values : scalar, default 0
    """
    xp = namespace(x)
    if not hasattr(widths, "__len__"):
        raise TypeError(f"widths must be a pair of counts for each axis, got {widths!r}")
    if len(widths) != x.ndim or any(a < 0 or b < 0 for a, b in widths):
        raise ValueError(f"widths must give {x.ndim} pairs of counts >= 0, got {widths}")
    shape = tuple(n + a + b for n, (a, b) in zip(x.shape, widths, strict=True))
    out = xp.full(shape, constant_values, dtype=x.dtype)
    out[tuple(slice(a, a + n) for n, (a, _) in zip(x.shape, widths, strict=True))] = x
    return out


pad.defvjps(
    x=lambda g, x_shape, widths: g[
        tuple(slice(a, a + n) for n, (a, _) in zip(x_shape, widths, strict=True))
    ]
)


@_view
def transpose(x, /):
    """Reverse the order of all axes.

    Parameters
    ----------
    x : array or Tensor
    """
    if is_device_array(x):
        return x.T
    return namespace(x).permute_dims(x, tuple(range(x.ndim))[::-1])


transpose.defvjps(x=lambda g: transpose(g))
