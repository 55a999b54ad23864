"""Putting the outputs of several layers together."""

from collections.abc import Sequence
from typing import Any

from rtxarr.geom._layer import Layer, linear, made
from rtxarr.nn import LSTM
from rtxarr.ops import concat, max, softmax, stack, sum

__all__ = ["JumpingKnowledge"]

_MODES = ("cat", "max", "lstm")


class JumpingKnowledge(Layer):
    """Put the outputs of several layers together, node by node.

    Parameters
    ----------
    mode : {"cat", "max", "lstm"}
        One after the other; the largest of each feature; or an average with weights from a
        bidirectional LSTM over the layers.
    channels, n_layers : int, for "lstm" alone
        Features of each output, and number of outputs.
    dtype : dtype, default float32
    device : Device or str, default the current one
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For the first values.

    Attributes
    ----------
    lstm : LSTM with ``n_layers * channels // 2`` features a direction, for "lstm" alone
    att : Linear, for "lstm" alone

    Notes
    -----
    Call it as ``layer(outputs)`` with a sequence of arrays of shape (n_nodes, channels); gives
    (n_nodes, channels), or for "cat" the sum of all channels.

    References
    ----------
    Xu et al., "Representation Learning on Graphs with Jumping Knowledge Networks", 2018,
    arXiv:1806.03536, section 4.1.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> geom.JumpingKnowledge("max")([np.array([[1.0, 5.0]]), np.array([[2.0, 3.0]])])
    array([[2., 5.]])
    """

    _shown = ("mode",)
    _dgl_names = {}

    def __init__(
        self,
        mode: str,
        *,
        channels: int | None = None,
        n_layers: int | None = None,
        dtype: Any = None,
        device: Any = None,
        generator: Any = None,
    ):
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(_MODES)}, got {mode!r}")
        self.mode = mode
        if mode == "lstm":
            if channels is None or n_layers is None:
                raise ValueError("'lstm' needs channels and n_layers")
            options = made(dtype, device, generator)
            width = n_layers * channels // 2
            self.lstm = LSTM(channels, width, bidirectional=True, **options)
            self.att = linear(2 * width, 1, **options)

    def forward(self, outputs: Sequence[Any]) -> Any:
        if not len(outputs):
            raise ValueError("outputs must have at least one array, got none")
        if self.mode == "cat":
            return concat(list(outputs), axis=-1)
        layers = stack(list(outputs), axis=1)
        if self.mode == "max":
            return max(layers, axis=1)
        weight = softmax(self.att(self.lstm(layers)[0]), axis=1)
        return sum(weight * layers, axis=1)
