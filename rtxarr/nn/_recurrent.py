"""Recurrent layers over sequences: LSTM and GRU."""

from collections.abc import Callable
from typing import Any

from rtxarr import ops
from rtxarr._device import Device, namespace
from rtxarr.autograd._tape import raw
from rtxarr.nn._dropout import Dropout
from rtxarr.nn._module import Module
from rtxarr.nn._parameter import Parameter
from rtxarr.nn._scan import gru_scan, lstm_scan, where_kept
from rtxarr.nn._text import call_text
from rtxarr.ops._check import check_floating, check_sizes


class _Direction(Module):
    """The parameters of one layer in one direction; gates are stacked along the first axis."""

    def __init__(self, n_gates, in_features, n_features, bias, weight_init, options):
        rows = n_gates * n_features
        self.weight_ih = Parameter((rows, in_features), init=weight_init, **options)
        self.weight_hh = Parameter((rows, n_features), init=weight_init, **options)
        self.bias_ih = Parameter((rows,), init="zeros", **options) if bias else None
        self.bias_hh = Parameter((rows,), init="zeros", **options) if bias else None


class _Recurrent(Module):
    n_gates: int

    def __init__(
        self,
        in_features: int,
        n_features: int,
        *,
        n_layers: int = 1,
        bidirectional: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        weight_init: str | Callable = "fan_in_uniform",
        dtype: Any = None,
        device: str | Device | None = None,
        generator: Any = None,
    ):
        check_sizes(in_features=in_features, n_features=n_features, n_layers=n_layers)
        self.in_features, self.n_features, self.n_layers = in_features, n_features, n_layers
        self.bidirectional = bidirectional
        self.bias = bias
        self.dropout = dropout
        self.between = Dropout(dropout, generator=generator)
        options = {"dtype": dtype, "device": device, "generator": generator}
        n_directions = 2 if bidirectional else 1
        self.layers = [
            [
                _Direction(self.n_gates, n_inputs, n_features, bias, weight_init, options)
                for _ in range(n_directions)
            ]
            for n_inputs in (in_features, *(n_layers - 1) * [n_directions * n_features])
        ]

    def _run(self, x, state, lengths):
        """Give the outputs, and the last states as a list over layers and directions."""
        kept = None if lengths is None else _kept(x, lengths)
        x = where_kept(kept, x)  # a NaN in an absent step must reach no gradient
        last = []
        for place, directions in enumerate(self.layers):
            if place:
                x = self.between(x)
            outputs = []
            for reverse, weights in enumerate(directions):
                start = [s[len(last)] for s in state]
                hs, *end = self._scan(weights, x, start, kept, bool(reverse))
                # Absent steps carry the state on, so the last one is at the end all the same.
                last.append([part[:, 0 if reverse else -1] for part in (hs, *end)])
                outputs.append(hs)
            x = ops.concat(outputs, axis=-1) if self.bidirectional else outputs[0]
            x = where_kept(kept, x)
        return x, last

    def _check(self, x):
        if x is None:
            raise TypeError("x must be an array or Tensor, got None")
        check_floating(x=x)
        if x.ndim != 3 or x.shape[2] != self.in_features or x.shape[1] == 0:
            raise ValueError(
                f"x must have shape (batch, time >= 1, {self.in_features}), got {x.shape}"
            )

    def _start(self, name, x, state):
        """Give the first state, zeros when it is left out, after checking its shape."""
        shape = (self.n_layers * (2 if self.bidirectional else 1), x.shape[0], self.n_features)
        if state is None:
            data = raw(x)
            return namespace(data).zeros(shape, dtype=self.layers[0][0].weight_hh.dtype)
        if state.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {state.shape}")
        return state

    def __repr__(self):
        names = ("in_features", "n_features", "n_layers", "bidirectional", "bias", "dropout")
        return call_text(self, *names)


class LSTM(_Recurrent):
    n_gates = 4

    def forward(self, x, state: tuple | None = None, *, lengths: Any = None):
        self._check(x)
        h, c = (None, None) if state is None else state
        starts = (self._start("h", x, h), self._start("c", x, c))
        out, last = self._run(x, starts, lengths)
        h, c = (ops.stack(parts, axis=0) for parts in zip(*last, strict=True))
        return out, (h, c)

    def _scan(self, weights, x, start, kept, reverse):
        # Both biases are only ever added up; there are two to match other libraries' files.
        bias = weights.bias_ih + weights.bias_hh if self.bias else None
        gates = ops.linear(x, weights.weight_ih, bias)
        hs, cs, _ = lstm_scan(gates, *start, weights.weight_hh, kept, reverse=reverse)
        return hs, cs


class GRU(_Recurrent):
    n_gates = 3

    def forward(self, x, state: Any = None, *, lengths: Any = None):
        self._check(x)
        out, last = self._run(x, (self._start("h", x, state),), lengths)
        return out, ops.stack([h for (h,) in last], axis=0)

    def _scan(self, weights, x, start, kept, reverse):
        gates = ops.linear(x, weights.weight_ih, weights.bias_ih)
        scan = gru_scan(gates, *start, weights.weight_hh, weights.bias_hh, kept, reverse=reverse)
        return scan[:1]


def _kept(x, lengths):
    """Tell which steps are there, shape (batch, time)."""
    lengths = raw(lengths)
    xp = namespace(raw(x), lengths)
    lengths = xp.asarray(lengths)
    if lengths.shape != x.shape[:1] or not xp.isdtype(lengths.dtype, "integral"):
        raise ValueError(
            f"lengths must be integers of shape ({x.shape[0]},), got dtype {lengths.dtype} and "
            f"shape {lengths.shape}"
        )
    return xp.arange(x.shape[1])[None, :] < lengths[:, None]


_DOC = """{summary}

    Parameters
    ----------
    in_features, n_features : int
        Features of a step of the input, and of the state.
    n_layers : int, default 1
        Layers on top of each other.
    bidirectional : bool, default False
        Run a second time backwards; outputs have twice the features then.
    bias : bool, default True
    dropout : float in [0, 1), default 0
        Rate of the dropout between layers.
    weight_init : str or callable, default "fan_in_uniform"
        See :mod:`rtxarr.nn.initializers`.
    dtype : dtype, default float32
    device : Device or str, default the current one
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For the first values and for dropout.

    Attributes
    ----------
    layers : list of list of Module
        ``layers[i][j]`` has the parameters ``weight_ih``, ``weight_hh``, ``bias_ih`` and
        ``bias_hh`` of layer ``i`` in direction ``j``, with the gates stacked in the order
        {order}, as in PyTorch.

    Notes
    -----
    Call it as ``out, state = layer(x, state, lengths=lengths)``:

    - ``x``, shape (batch, time, in_features). The batch always comes first.
    - ``state``: {state}, each of shape (n_layers * n_directions, batch, n_features), layers
      outside; zeros when left out.
    - ``lengths``: array of int, shape (batch,), how many steps of each sequence count. What comes
      after them changes nothing, ``out`` is zero there, and ``state`` is that of the last step that
      counts.
    - ``out``, shape (batch, time, n_features), or twice the features when bidirectional.
    """

LSTM.__doc__ = _DOC.format(
    summary="Long short-term memory.",
    order="input, forget, cell, output",
    state="the pair ``(h, c)``",
)
GRU.__doc__ = _DOC.format(
    summary="Gated recurrent unit.",
    order="reset, update, candidate",
    state="``h``",
)
