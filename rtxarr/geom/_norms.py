"""Normalisation over the nodes of each graph of a batch.

For statistics over all nodes together, :class:`rtxarr.nn.BatchNorm` takes rows of nodes as they
are, and :class:`rtxarr.nn.LayerNorm` works on each node by itself.
"""

from typing import Any

from rtxarr import _device
from rtxarr.autograd._tape import raw
from rtxarr.geom._batch import check_pointers
from rtxarr.geom._edges import owners
from rtxarr.geom._layer import Layer
from rtxarr.nn import Parameter
from rtxarr.ops import mean, segment_mean, sqrt, sum, take
from rtxarr.ops._half import rounded_once

__all__ = ["GraphLayerNorm", "GraphNorm", "InstanceNorm", "PairNorm"]

_CALL = """

    Notes
    -----
    Call it as ``layer(x, ptr)``, with ``x`` of shape (n_nodes, channels) and ``ptr``, int64 of
    shape (n_graphs + 1,): graph ``i`` has the nodes ``ptr[i]:ptr[i + 1]``. Without ``ptr`` all
    nodes are of one graph. It must rise from 0 to ``n_nodes``, which is checked on the host, and
    on a GPU inside :func:`rtxarr.testing.check_values`. Half types are computed in float32 and
    rounded once.
"""


def _ptr(x, ptr):
    """Check the graphs' boundaries, or make those of one graph; gives them with nodes' graphs."""
    data = raw(x)
    xp = _device.namespace(data)
    if x.ndim != 2:
        raise ValueError(f"x must have shape (n_nodes, channels), got {tuple(x.shape)}")
    if ptr is None:
        return None, None
    check_pointers(raw(ptr), x.shape[0])
    ptr = xp.astype(raw(ptr), xp.int64, copy=False)
    return ptr, owners(ptr, x.shape[0])


def _mean(x, ptr, rows):
    """Give each node the mean over its graph, feature by feature."""
    if ptr is None:
        return mean(x, axis=0, keepdims=True)
    return take(segment_mean(x, ptr), rows, axis=0)


class _Affine(Layer):
    """Normalised features times ``weight`` plus ``bias``."""

    _shown = ("channels", "eps")

    def __init__(self, channels: int, *, eps: float = 1e-5, dtype: Any = None, device: Any = None):
        self.channels, self.eps = channels, eps
        self.weight = Parameter((channels,), init="ones", dtype=dtype, device=device)
        self.bias = Parameter((channels,), init="zeros", dtype=dtype, device=device)

    def forward(self, x: Any, ptr: Any = None) -> Any:
        ptr, rows = _ptr(x, ptr)
        return self._normalize(x, ptr=ptr, rows=rows)

    def _normalize(self, x, *, ptr, rows):
        return self._scaled(rounded_once(self._normalized)(x, ptr=ptr, rows=rows))

    def _scaled(self, x):
        return x * self.weight + self.bias


class GraphNorm(_Affine):
    """Subtract a learned share of the graph's mean and divide by the deviation that is left.

    Parameters
    ----------
    channels : int
    eps : float > 0, default 1e-5
        Added to the variance.
    dtype : dtype, default float32
    device : Device or str, default the current one

    Attributes
    ----------
    weight, bias, mean_scale : Parameter, shape (channels,)
    """

    def __init__(self, channels: int, *, eps: float = 1e-5, dtype: Any = None, device: Any = None):
        super().__init__(channels, eps=eps, dtype=dtype, device=device)
        self.mean_scale = Parameter((channels,), init="ones", dtype=dtype, device=device)

    def _normalized(self, x, *, ptr, rows):
        x = x - _mean(x, ptr, rows) * self.mean_scale
        return x / sqrt(_mean(x * x, ptr, rows) + self.eps)


class InstanceNorm(_Affine):
    """Subtract the graph's mean and divide by its deviation, feature by feature.

    Parameters
    ----------
    channels : int
    eps : float > 0, default 1e-5
        Added to the variance.
    dtype : dtype, default float32
    device : Device or str, default the current one

    Attributes
    ----------
    weight, bias : Parameter, shape (channels,)
    """

    def _normalized(self, x, *, ptr, rows):
        x = x - _mean(x, ptr, rows)
        return x / sqrt(_mean(x * x, ptr, rows) + self.eps)


class GraphLayerNorm(_Affine):
    """Subtract the mean over all nodes and features of the graph and divide by the deviation.

    Parameters
    ----------
    channels : int
    eps : float > 0, default 1e-5
        Added to the variance.
    dtype : dtype, default float32
    device : Device or str, default the current one

    Attributes
    ----------
    weight, bias : Parameter, shape (channels,)
    """

    def _normalized(self, x, *, ptr, rows):
        x = x - _mean(mean(x, axis=1, keepdims=True), ptr, rows)
        return x / sqrt(_mean(mean(x * x, axis=1, keepdims=True), ptr, rows) + self.eps)


class PairNorm(Layer):
    """Centre the nodes of a graph and keep the mean squared length of their rows.

    Parameters
    ----------
    scale : float, default 1
        The root of that mean.
    scale_individually : bool, default False
        Scale the row of each node to this length instead.
    eps : float > 0, default 1e-5
        Added to the mean square.
    """

    _shown = ("scale", "scale_individually", "eps")

    def __init__(self, *, scale: float = 1.0, scale_individually: bool = False, eps: float = 1e-5):
        self.scale, self.scale_individually, self.eps = scale, scale_individually, eps

    def forward(self, x: Any, ptr: Any = None) -> Any:
        ptr, rows = _ptr(x, ptr)
        return rounded_once(self._normalized)(x, ptr=ptr, rows=rows)

    def _normalized(self, x, *, ptr, rows):
        x = x - _mean(x, ptr, rows)
        square = sum(x * x, axis=1, keepdims=True)
        if self.scale_individually:
            return self.scale * x / (self.eps + sqrt(square))
        return self.scale * x / sqrt(self.eps + _mean(square, ptr, rows))


_REFERENCES = {
    GraphNorm: 'Cai et al., "GraphNorm: A Principled Approach to Accelerating Graph Neural Network '
    'Training",\n    2020, arXiv:2009.03294, eq. 8.',
    InstanceNorm: 'Ulyanov, Vedaldi and Lempitsky, "Instance Normalization", 2016, '
    "arXiv:1607.08022.",
    GraphLayerNorm: 'Ba, Kiros and Hinton, "Layer Normalization", 2016, arXiv:1607.06450, over a '
    "graph.",
    PairNorm: 'Zhao and Akoglu, "PairNorm: Tackling Oversmoothing in GNNs", 2019, '
    "arXiv:1909.12223,\n    eq. 10 and 11.",
}
_EXAMPLES = {
    GraphNorm: "GraphNorm(1)",
    InstanceNorm: "InstanceNorm(1)",
    GraphLayerNorm: "GraphLayerNorm(1)",
    PairNorm: "PairNorm()",
}
_EXAMPLE = """
    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import geom
    >>> x = np.array([[1.0], [3.0], [10.0], [10.0]])
    >>> out = geom.{call}(x, np.array([0, 2, 4]))
    >>> np.round(rx.Tensor(out).numpy().T, 4)
    array([[-1.,  1.,  0.,  0.]])
"""
for _layer in _REFERENCES:
    _layer.__doc__ = (
        f"{(_layer.__doc__ or '').rstrip()}{_CALL}\n    References\n    ----------\n    "
        f"{_REFERENCES[_layer]}\n{_EXAMPLE.format(call=_EXAMPLES[_layer])}"
    )
del _layer
