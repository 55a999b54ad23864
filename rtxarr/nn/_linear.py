"""Linear maps, with a gate too, and tables of vectors."""

from collections.abc import Callable
from typing import Any

from rtxarr import ops
from rtxarr._device import Device
from rtxarr.nn._module import Module
from rtxarr.nn._parameter import Parameter
from rtxarr.nn._text import call_text
from rtxarr.nn.initializers import normal
from rtxarr.ops._activated import check_activation
from rtxarr.ops._check import check_sizes


class Linear(Module):
    """Linear map of the last axis: ``activation(x @ weight.T + bias)``.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool, default True
    activation : {"relu", "sigmoid", "silu", "gelu", "gelu_tanh"}, optional
        See :func:`rtxarr.linear`.
    weight_init, bias_init : str or callable, default "fan_in_uniform" and "zeros"
        See :mod:`rtxarr.nn.initializers`.
    dtype : dtype, default float32
    device : Device or str, default the current one
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For the first values.

    Attributes
    ----------
    weight : Parameter, shape (out_features, in_features)
    bias : Parameter, shape (out_features,), or None

    Examples
    --------
    >>> import rtxarr as rx
    >>> from rtxarr import nn
    >>> nn.Linear(3, 2)(rx.ones((5, 3), dtype="float32")).shape
    (5, 2)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        activation: str | None = None,
        weight_init: str | Callable = "fan_in_uniform",
        bias_init: str | Callable = "zeros",
        dtype: Any = None,
        device: str | Device | None = None,
        generator: Any = None,
    ):
        check_sizes(in_features=in_features, out_features=out_features)
        check_activation(activation)
        self.activation = activation
        options = {"dtype": dtype, "device": device, "generator": generator}
        self.in_features, self.out_features = in_features, out_features
        self.weight = Parameter((out_features, in_features), init=weight_init, **options)
        self.bias = Parameter((out_features,), init=bias_init, **options) if bias else None

    def forward(self, x):
        return ops.linear(x, self.weight, self.bias, activation=self.activation)

    def __repr__(self):
        bias = "" if self.bias is not None else ", bias=False"
        activation = "" if self.activation is None else f", activation={self.activation!r}"
        return f"Linear({self.in_features}, {self.out_features}{bias}{activation})"


class GatedLinear(Module):
    """Linear map times the activation of another: SwiGLU, GEGLU and others.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool, default True
    activation : {"relu", "sigmoid", "silu", "gelu", "gelu_tanh"}, default "silu"
        Of the gate; see :func:`rtxarr.gated_linear`.
    weight_init, bias_init : str or callable, default "fan_in_uniform" and "zeros"
        See :mod:`rtxarr.nn.initializers`.
    dtype : dtype, default float32
    device : Device or str, default the current one
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For the first values.

    Attributes
    ----------
    w_gate, w_up : Parameter, shape (out_features, in_features)
    b_gate, b_up : Parameter, shape (out_features,), or None

    Examples
    --------
    >>> import rtxarr as rx
    >>> from rtxarr import nn
    >>> mlp = nn.Sequential(nn.GatedLinear(4, 16, bias=False), nn.Linear(16, 4, bias=False))
    >>> mlp(rx.ones((5, 4), dtype="float32")).shape
    (5, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        activation: str = "silu",
        weight_init: str | Callable = "fan_in_uniform",
        bias_init: str | Callable = "zeros",
        dtype: Any = None,
        device: str | Device | None = None,
        generator: Any = None,
    ):
        check_sizes(in_features=in_features, out_features=out_features)
        check_activation(activation, optional=False)
        options = {"dtype": dtype, "device": device, "generator": generator}
        self.in_features, self.out_features = in_features, out_features
        self.activation = activation
        shape = out_features, in_features
        self.w_gate = Parameter(shape, init=weight_init, **options)
        self.w_up = Parameter(shape, init=weight_init, **options)
        self.b_gate = Parameter(shape[:1], init=bias_init, **options) if bias else None
        self.b_up = Parameter(shape[:1], init=bias_init, **options) if bias else None

    def forward(self, x):
        weights = self.w_gate, self.w_up, self.b_gate, self.b_up
        return ops.gated_linear(x, *weights, activation=self.activation)

    def __repr__(self):
        bias = "" if self.b_gate is not None else ", bias=False"
        activation = "" if self.activation == "silu" else f", activation={self.activation!r}"
        return f"GatedLinear({self.in_features}, {self.out_features}{bias}{activation})"


class Embedding(Module):
    """Table of vectors, looked up by number; see :func:`rtxarr.embedding`.

    Parameters
    ----------
    n_embeddings : int
        Numbers lie in ``[0, n_embeddings)``.
    n_features : int
        Length of a vector.
    padding_index : int, optional
        A number whose vector is not trained.
    weight_init : str or callable, default a standard normal distribution
        See :mod:`rtxarr.nn.initializers`.
    dtype : dtype, default float32
    device : Device or str, default the current one
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For the first values.

    Attributes
    ----------
    weight : Parameter, shape (n_embeddings, n_features)
    """

    def __init__(
        self,
        n_embeddings: int,
        n_features: int,
        *,
        padding_index: int | None = None,
        weight_init: str | Callable | None = None,
        dtype: Any = None,
        device: str | Device | None = None,
        generator: Any = None,
    ):
        check_sizes(n_embeddings=n_embeddings, n_features=n_features)
        self.n_embeddings, self.n_features = n_embeddings, n_features
        self.padding_index = padding_index
        self.weight = Parameter(
            (n_embeddings, n_features),
            init=normal(1.0) if weight_init is None else weight_init,
            dtype=dtype,
            device=device,
            generator=generator,
        )

    def forward(self, indices):
        return ops.embedding(indices, self.weight, padding_index=self.padding_index)

    def __repr__(self):
        return call_text(self, "n_embeddings", "n_features", "padding_index")
