"""Linear layers whose matrix products take 8-bit floating-point numbers, scaled by their past."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr import ops
from rtxarr._device import Device, device_of, is_device_array, namespace
from rtxarr.autograd import custom_op as differentiable
from rtxarr.autograd import is_recomputing, is_recording
from rtxarr.autograd._autocast import active_dtype
from rtxarr.autograd._tape import raw
from rtxarr.kernels import fp8
from rtxarr.libs.blas import matmul_fp8
from rtxarr.nn._linear import Linear
from rtxarr.nn._parameter import Buffer, replace_data
from rtxarr.ops._check import check_floating

_X, _WEIGHT, _GRAD = range(3)  # what has a scale of its own
_KINDS = ("e4m3", "e4m3", "e5m2")


def _rows(x):
    return x.reshape(-1, x.shape[-1])


@differentiable(precision="any")
def fp8_linear(x, weight, bias, codes, turned, scales, layer, /, *, dtype):
    """Multiply the codes of ``x`` and ``weight``; the arrays themselves only say what to return.

    Parameters
    ----------
    x, weight, bias : array, as in :func:`rtxarr.linear`
    codes : tuple of array of uint8
        Of the rows of ``x`` and of the weight.
    turned : tuple of array of uint8
        Of their transposes, for the gradients.
    scales : array of float32, shape (3, 4)
    layer : Fp8Linear
        What rounds the gradient.
    dtype : dtype
        Of the result.
    """
    a, b = codes
    # The library adds a bias of the result's dtype, if that is a half one.
    inside = bias is not None and dtype != np.float32
    out = matmul_fp8(
        a,
        b.T,
        formats=_KINDS[:2],
        scale_a=scales[_X, :1],
        scale_b=scales[_WEIGHT, :1],
        dtype=dtype,
        bias=bias.astype(dtype, copy=False) if inside else None,
    )
    if bias is not None and not inside:
        out += bias
    return out.reshape(*x.shape[:-1], weight.shape[0])


@fp8_linear.defvjp
def _fp8_linear_rule(g, x_shape, x_dtype, weight_dtype, turned, scales, layer, needs):
    if is_recording():
        raise TypeError(
            "fp8 layers can be differentiated once: rounding to 8 bits has no second derivative"
        )
    of_x = of_weight = of_bias = None
    codes, codes_turned = layer.quantize(_GRAD, _rows(g), scales, turned=True)
    kinds = (_KINDS[_GRAD], "e4m3")
    scale = scales[_GRAD, :1]
    if needs[0]:
        dtype = np.float32 if x_dtype == np.float64 else x_dtype
        b = turned[_WEIGHT].T
        of_x = matmul_fp8(
            codes, b, formats=kinds, scale_a=scale, scale_b=scales[_WEIGHT, :1], dtype=dtype
        ).reshape(x_shape)
    if needs[1]:
        b = turned[_X].T
        of_weight = matmul_fp8(
            codes_turned,
            b,
            formats=kinds,
            scale_a=scale,
            scale_b=scales[_X, :1],
            dtype=weight_dtype,
        )
    if needs[2]:
        of_bias = ops.sum(ops.astype(_rows(g), "float32", copy=False), axis=0)
    return of_x, of_weight, of_bias, None, None, None, None


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
    The result has the dtype of the input (float32 for float64), or that of
    :class:`rtxarr.autocast`. In evaluation mode the scales stay what they are. The first step reads
    the state on the host. Runs on NumPy and CuPy arrays; on a GPU before compute
    capability 8.9, and on the CPU, the codes are multiplied in float32, with the same rounding.

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
        if not 1 <= margin < math.inf:
            raise ValueError(f"margin must be at least 1 and finite, got {margin!r}")
        place = device_of(self.weight.data)
        self.n_steps, self.margin = n_steps, margin
        self.amax_history = Buffer(np.zeros((3, n_steps), np.float32), device=place)
        self.amax = Buffer(np.zeros((3, 4), np.float32), device=place)
        self.scales = Buffer(np.zeros((3, 4), np.float32), device=place)
        self._limits = tuple(fp8.LARGEST[kind] / margin for kind in _KINDS)
        self._unsure = {_X, _WEIGHT, _GRAD}  # those that may have no scale yet

    def forward(self, x):
        check_floating(x=x)
        if not (isinstance(raw(x), np.ndarray) or is_device_array(raw(x))):
            raise TypeError(f"x must be a NumPy or CuPy array, got {type(raw(x)).__name__}")
        if x.ndim < 1 or x.shape[-1] != self.in_features:
            raise ValueError(f"x must have shape (..., {self.in_features}), got {x.shape}")
        self._stay_single()
        if self.training and not is_recomputing():
            fp8.advance(self.amax_history.data, self.amax.data, self.scales.data, self._limits)
        arrays = _rows(raw(x)), self.weight.data
        for place, array in enumerate(arrays):
            self._see(place, array)
        scales = self.scales.data.copy()  # those of this call, for its backward pass
        turn = is_recording()
        found = [self.quantize(i, array, scales, turned=turn) for i, array in enumerate(arrays)]
        codes, turned = zip(*found, strict=True) if turn else (tuple(found), None)
        dtype = active_dtype() or raw(x).dtype
        dtype = np.dtype("float32") if dtype == np.float64 else dtype
        return fp8_linear(x, self.weight, self.bias, codes, turned, scales, self, dtype=dtype)

    def quantize(self, place: int, array: Any, scales: Any, *, turned: bool) -> Any:
        """Give the codes of a matrix, and note its largest size."""
        if place == _GRAD:
            self._see(_GRAD, array, scales)
        xp = namespace(array)
        array = xp.asarray(array, dtype=np.float32) if array.dtype == np.float64 else array
        amax = self.amax.data[place, :1]
        if not self.training:
            amax = xp.zeros_like(amax)
        array = array if array.flags.c_contiguous else array.copy(order="C")
        return fp8.quantize(array, scales[place, :1], _KINDS[place], amax, turned=turned)

    def _see(self, place, array, scales=None):
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
        if scales is not None:
            scales[place, 0] = scale

    def _stay_single(self):
        """Undo what ``astype`` of a whole model does to the state."""
        for buffer in (self.amax_history, self.amax, self.scales):
            if buffer.dtype != np.float32:
                replace_data(buffer, buffer.data.astype(np.float32))

    def __repr__(self):
        return "Fp8" + super().__repr__()
