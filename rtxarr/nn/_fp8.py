"""Linear layers whose matrix products take 8-bit floating-point numbers, scaled by their past."""

import math
import numbers
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import Device, device_of, is_device_array, namespace
from rtxarr._replay import moment
from rtxarr.autograd import custom_op as differentiable
from rtxarr.autograd import is_recomputing, is_recording
from rtxarr.autograd._autocast import active_dtype
from rtxarr.autograd._checkpoint import repeated
from rtxarr.autograd._tape import Tensor, raw, store_of
from rtxarr.kernels import fp8
from rtxarr.libs.blas import matmul_fp8
from rtxarr.nn._linear import Linear
from rtxarr.nn._parameter import Buffer, replace_data
from rtxarr.ops._check import check_floating
from rtxarr.ops._linear import _column_sums

_X, _WEIGHT, _GRAD = range(3)  # what has a scale of its own
_KINDS = ("e4m3", "e4m3", "e5m2")


class _Rounded:
    """The codes of a weight, what they were made of, and their scale.

    Attributes
    ----------
    codes : array of uint8, shape (out_features, in_features)
    turned : array of uint8, shape (in_features, out_features), or None
        The transpose, for the gradient of the input.
    scale : array of float32, shape (1,)
    origin : tuple
    """

    __slots__ = ("__weakref__", "codes", "origin", "scale", "turned")

    def __init__(self, codes, turned, scale, origin):
        self.codes, self.turned, self.scale, self.origin = codes, turned, scale, origin


class _Kept:
    """Where a layer finds the codes of its weight again; a copy of the layer finds none."""

    def __init__(self):
        self.find: Callable[[], _Rounded | None] = lambda: None

    def __reduce__(self):
        return _Kept, ()


class _Scaled(NamedTuple):
    """Codes of the transpose of the rows of the input (or None), and their scale."""

    turned: Any
    scale: Any


def _rows(x):
    return x.reshape(-1, x.shape[-1])


@differentiable(precision="any")
def fp8_linear(x, weight, bias, codes, of_x, of_weight, grad_scale, round_grad, /, *, dtype):
    """Multiply the codes of ``x`` and ``weight``; the arrays themselves only say what to return.

    Parameters
    ----------
    x, weight, bias : array, as in :func:`rtxarr.linear`
    codes : array of uint8
        Of the rows of ``x``.
    of_x : _Scaled
    of_weight : _Rounded
    grad_scale : array of float32, shape (1,)
    round_grad : callable
        ``round_grad(g, grad_scale, turned=...)`` gives the codes of the gradient.
    dtype : dtype
        Of the result.
    """
    # The library adds a bias of the result's dtype, if that is a half one.
    inside = bias is not None and dtype != np.float32
    out = matmul_fp8(
        codes,
        of_weight.codes.T,
        formats=_KINDS[:2],
        scale_a=of_x.scale,
        scale_b=of_weight.scale,
        dtype=dtype,
        bias=bias.astype(dtype, copy=False) if inside else None,
    )
    if bias is not None and not inside:
        out += bias
    return out.reshape(*x.shape[:-1], weight.shape[0])


@fp8_linear.defvjp
def _fp8_linear_rule(
    g, x_shape, x_dtype, weight_dtype, of_x, of_weight, grad_scale, round_grad, needs
):
    if is_recording():
        raise TypeError(
            "fp8 layers can be differentiated once: rounding to 8 bits has no second derivative"
        )
    grads: list = [None] * 8
    g = _rows(g)
    codes, turned = round_grad(g, grad_scale, turned=needs[1])
    options = {"formats": (_KINDS[_GRAD], "e4m3"), "scale_a": grad_scale}
    if needs[0]:
        dtype = np.float32 if x_dtype == np.float64 else x_dtype
        b = of_weight.turned.T
        grads[0] = matmul_fp8(codes, b, scale_b=of_weight.scale, dtype=dtype, **options)
        grads[0] = grads[0].reshape(x_shape)
    if needs[1]:
        b = of_x.turned.T
        grads[1] = matmul_fp8(turned, b, scale_b=of_x.scale, dtype=weight_dtype, **options)
    if needs[2]:
        grads[2] = _column_sums(g)
    return grads


class Fp8Linear(Linear):
    """Linear layer that multiplies 8-bit floating-point numbers.

    Input and weight are rounded to e4m3, the gradient of the output to e5m2, each divided by a
    scale of its own first. The scale follows the largest size that the tensor had in the steps
    before (delayed scaling), so that nothing waits for the sizes of this step; in the first step it
    is that of the tensor itself. Everything stays on the device.

    Parameters
    ----------
    in_features, out_features : int
        Multiples of 16, and as many rows of the input, for the tensor cores; anything else is
        multiplied in float32.
    bias : bool, default True
    n_steps : int, at least 1, default 16
        How many steps of the past the scales look at.
    margin : float, at least 1, default 1.0
        Room above the largest size of the past. What is larger becomes the largest number of the
        format.
    weight_init, bias_init, dtype, device, generator
        As in :class:`Linear`.

    Attributes
    ----------
    weight, bias : Parameter
        Float32 or half precision, as in :class:`Linear`; so are their gradients.
    amax_history : Buffer of float32, shape (3, n_steps)
        The largest sizes of the input, the weight and the output's gradient, the newest last.
    scales : Buffer of float32, shape (3, 4)
        The scales, in the first column; zero before the first step.
    amax : Buffer of float32, shape (3, 4)
        The largest sizes of this step, in the first column.

    Notes
    -----
    The recipe: a scale is the largest size that the tensor had in the last ``n_steps`` calls in
    training mode, times ``margin``, over the largest number of its format (448 for e4m3, 57344 for
    e5m2); the size is found while the tensor is rounded, and counts from the next call on. Input,
    weight and gradient are read once each, for their codes and those of their transposes, which the
    gradients' products need. The weight is rounded once for all calls that one backward pass goes
    through, and for good in evaluation mode, where the scales stay what they are; a captured step
    rounds it each time. All products add in float32.

    The result has the dtype of the input (float32 for float64), or that of
    :class:`rtxarr.autocast`. The first step reads the state on the host. Runs on NumPy and CuPy
    arrays; on a GPU before compute capability 8.9, and on the CPU, the codes are multiplied in
    float32, with the same rounding.

    References
    ----------
    Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv:2209.05433.

    Examples
    --------
    >>> import rtxarr as rx
    >>> from rtxarr import nn
    >>> layer = nn.Fp8Linear(32, 16, device="cpu")
    >>> layer(rx.ones((64, 32), dtype="float32", device="cpu")).shape
    (64, 16)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        n_steps: int = 16,
        margin: float = 1.0,
        weight_init: str | Callable = "fan_in_uniform",
        bias_init: str | Callable = "zeros",
        dtype: Any = None,
        device: str | Device | None = None,
        generator: Any = None,
    ):
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            weight_init=weight_init,
            bias_init=bias_init,
            dtype=dtype,
            device=device,
            generator=generator,
        )
        if not isinstance(n_steps, int) or n_steps < 1:
            raise ValueError(f"n_steps must be an int >= 1, got {n_steps!r}")
        if not isinstance(margin, numbers.Real) or not 1 <= margin < math.inf:
            raise ValueError(f"margin must be at least 1 and finite, got {margin!r}")
        place = device_of(self.weight.data)
        self.n_steps, self.margin = n_steps, margin
        self.amax_history = Buffer(np.zeros((3, n_steps), np.float32), device=place)
        self.amax = Buffer(np.zeros((3, 4), np.float32), device=place)
        self.scales = Buffer(np.zeros((3, 4), np.float32), device=place)
        self._limits = tuple(fp8.LARGEST[kind] / margin for kind in _KINDS)
        self._unsure = {_X, _WEIGHT, _GRAD}  # those that may have no scale yet
        self._kept = _Kept()

    def forward(self, x):
        check_floating(x=x)
        if not (isinstance(raw(x), np.ndarray) or is_device_array(raw(x))):
            raise TypeError(f"x must be a NumPy or CuPy array, got {type(raw(x)).__name__}")
        if x.ndim < 1 or x.shape[-1] != self.in_features:
            raise ValueError(f"x must have shape (..., {self.in_features}), got {x.shape}")
        self._stay_single()
        recorded = is_recording()
        for_x = recorded and isinstance(x, Tensor) and x.requires_grad
        for_weight = recorded and self.weight.requires_grad
        rows = _rows(raw(x))
        scales, round_grad = repeated(lambda: self._begin(rows))
        of_x, of_weight, of_grad = (scales[i, :1] for i in range(3))
        codes, turned = self._round(_X, rows, of_x, turned=for_weight)
        weight = repeated(lambda: self._round_weight(of_weight, turned=for_x))
        dtype = active_dtype() or raw(x).dtype
        dtype = np.dtype("float32") if dtype == np.float64 else dtype
        return fp8_linear(
            x,
            self.weight,
            self.bias,
            codes,
            _Scaled(turned, of_x),
            weight,
            of_grad,
            round_grad,
            dtype=dtype,
        )

    def _begin(self, rows):
        """Give a copy of the scales, for one call, and what rounds the gradient that comes back."""
        if self.training:
            fp8.advance(self.amax_history.data, self.amax.data, self.scales.data, self._limits)
        self._see(_X, rows)
        self._see(_WEIGHT, self.weight.data)
        first = _GRAD in self._unsure
        round_grad = self._round_first_gradient if first else self._round_gradient
        return self.scales.data.copy(), round_grad

    def _round(self, place, array, scale, *, turned):
        """Give the codes of a matrix, and of its transpose or None; note its largest size."""
        xp = namespace(array)
        array = xp.asarray(array, dtype=np.float32) if array.dtype == np.float64 else array
        amax = self.amax.data[place, :1]
        if not self.training or is_recomputing():
            amax = xp.zeros_like(amax)
        array = array if array.flags.c_contiguous else array.copy(order="C")
        codes = fp8.quantize(array, scale, _KINDS[place], amax, turned=turned)
        return codes if turned else (codes, None)

    def _round_weight(self, scale, *, turned):
        """Give the codes of the weight: those of an earlier call while nothing has changed.

        In training they live as long as a graph that needs them, so that a captured step and an
        eager one make new ones at the same time; in evaluation, until something changes.
        """
        now = moment()
        weight = self.weight.data
        counts = store_of(self.weight)[0], store_of(self.scales)[0], self.training
        known = self._kept.find()
        if (
            known is not None
            and known.origin[0] is weight
            and known.origin[1:] == (counts, now)
            and (known.turned is not None or not turned)
        ):
            return known
        found = _Rounded(
            *self._round(_WEIGHT, weight, scale, turned=turned), scale, (weight, counts, now)
        )
        # What a graph is recorded with belongs to it.
        lasting = not self.training and now[0] is None
        self._kept.find = (lambda: found) if lasting else weakref.ref(found)
        return found

    def _round_gradient(self, g, scale, *, turned):
        return self._round(_GRAD, g, scale, turned=turned)

    def _round_first_gradient(self, g, scale, *, turned):
        """Round the gradient of a call from a time when it may have had no scale yet."""
        self._see(_GRAD, g)
        scale[...] = namespace(scale).where(scale > 0, scale, self.scales.data[_GRAD, :1])
        return self._round(_GRAD, g, scale, turned=turned)

    def _see(self, place, array):
        """Make the scale of a tensor that has no past from the tensor itself.

        The host looks once whether there is a past: a state may have been loaded.
        """
        if place not in self._unsure:
            return
        self._unsure.discard(place)
        if float(self.scales.data[place, 0]) > 0:
            return
        sizes = namespace(array).abs(array).astype(np.float32)
        size = float(sizes.max()) if sizes.size else 0.0
        scale = size / self._limits[place] if 0 < size < math.inf else 1.0
        self.scales.data[place, 0] = scale

    def _stay_single(self):
        """Undo what ``astype`` of a whole model does to the state."""
        for buffer in (self.amax_history, self.amax, self.scales):
            if buffer.dtype != np.float32:
                replace_data(buffer, buffer.data.astype(np.float32))

    def __repr__(self):
        return "Fp8" + super().__repr__()
