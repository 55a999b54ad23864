"""Attention over several heads, and the transformer's block."""

import numbers
from collections.abc import Callable
from typing import Any

from rtxarr import ops
from rtxarr._device import Device
from rtxarr.nn._activations import GATED, LINEAR_ACTIVATIONS, get_activation
from rtxarr.nn._dropout import Dropout
from rtxarr.nn._linear import Linear
from rtxarr.nn._module import Module
from rtxarr.nn._norm import LayerNorm, RMSNorm
from rtxarr.nn._text import call_text
from rtxarr.ops._check import check_rate, check_sizes


class MultiHeadAttention(Module):
    """Attention of each step of a sequence to itself or to another sequence, in several heads.

    Parameters
    ----------
    n_features : int
        Features of the input and the output; a multiple of ``n_heads``.
    n_heads : int
    n_kv_heads : int, default ``n_heads``
        Heads of keys and values, a divisor of ``n_heads``: consecutive query heads share one.
    context_features : int, default ``n_features``
        Features of ``context``.
    causal : bool, default False
        Let step ``i`` see steps up to ``i`` only.
    dropout : float in [0, 1), default 0
        Rate for the attention's weights while training.
    bias : bool, default True
    weight_init : str or callable, default "xavier_uniform"
        See :mod:`rtxarr.nn.initializers`.
    dtype : dtype, default float32
    device : Device or str, default the current one
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For the first values and for dropout.

    Attributes
    ----------
    query, key, value, out : Linear

    Notes
    -----
    Call it as ``layer(x, context, attn_mask=attn_mask)``:

    - ``x``, shape (..., n_queries, n_features).
    - ``context``, shape (..., n_keys, context_features): where keys and values come from; ``x``
      itself when left out.
    - ``attn_mask``, broadcast to (..., n_heads, n_queries, n_keys): of bool, True where a step may
      look, or of a floating dtype, added to the scores.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762, sect. 3.2.
    Ainslie et al., "GQA", 2023, arXiv:2305.13245.
    """

    def __init__(
        self,
        n_features: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        context_features: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        weight_init: str | Callable = "xavier_uniform",
        dtype: Any = None,
        device: str | Device | None = None,
        generator: Any = None,
    ):
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        context_features = n_features if context_features is None else context_features
        check_sizes(
            n_features=n_features,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            context_features=context_features,
        )
        if n_features % n_heads:
            raise ValueError(
                f"n_features must be a multiple of n_heads, got {n_features} and {n_heads}"
            )
        if n_heads % n_kv_heads:
            raise ValueError(f"n_kv_heads must divide n_heads, got {n_kv_heads} and {n_heads}")
        self.n_features, self.n_heads, self.n_kv_heads = n_features, n_heads, n_kv_heads
        self.context_features = context_features
        self.causal = causal
        check_rate(dropout)
        self.dropout = dropout
        self.generator = generator
        options = {
            "bias": bias,
            "weight_init": weight_init,
            "dtype": dtype,
            "device": device,
            "generator": generator,
        }
        kv_features = n_features // n_heads * n_kv_heads
        self.query = Linear(n_features, n_features, **options)
        self.key = Linear(context_features, kv_features, **options)
        self.value = Linear(context_features, kv_features, **options)
        self.out = Linear(n_features, n_features, **options)

    def forward(self, x, context=None, *, attn_mask=None):
        context = x if context is None else context
        heads = ops.scaled_dot_product_attention(
            _split_heads(self.query(x), self.n_heads),
            _split_heads(self.key(context), self.n_kv_heads),
            _split_heads(self.value(context), self.n_kv_heads),
            attn_mask,
            causal=self.causal,
            dropout_rate=self.dropout if self.training else 0.0,
            generator=self.generator,
        )
        return self.out(_join_heads(heads))

    def __repr__(self):
        return call_text(self, "n_features", "n_heads", "causal", "dropout")


def _split_heads(x, n_heads):
    """Give (..., n_heads, n_steps, head_dim) from (..., n_steps, n_features)."""
    if x.ndim < 2:
        raise ValueError(f"x must have shape (..., n_steps, n_features), got {x.shape}")
    x = ops.reshape(x, (*x.shape[:-1], n_heads, x.shape[-1] // n_heads))
    return ops.moveaxis(x, -2, -3)


def _join_heads(x):
    x = ops.moveaxis(x, -3, -2)
    return ops.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))


class TransformerBlock(Module):
    """Attention and a two-layer perceptron, each normalized first and added to what came in.

    Parameters
    ----------
    n_features, n_heads : int
    n_kv_heads : int, default ``n_heads``
        See :class:`MultiHeadAttention`.
    mlp_ratio : float > 0, default 4.0
        The perceptron's inner features, in multiples of ``n_features``.
    activation : str or callable, default "gelu"
        A function's name in ``rtxarr``, or "gelu_tanh". Of those, :func:`rtxarr.linear` may take in
        "relu" and "gelu_tanh". With "glu", "geglu" and "swiglu" half of the inner layer gates the
        other half.
    norm : {"layer_norm", "rms_norm"}, default "layer_norm"
    causal : bool, default False
        Let step ``i`` see steps up to ``i`` only.
    dropout : float in [0, 1), default 0
        Rate for the attention's weights and for what both branches add.
    bias : bool, default True
    dtype : dtype, default float32
    device : Device or str, default the current one
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For the first values and for dropout.

    Notes
    -----
    Call it as ``block(x, attn_mask=attn_mask)`` with ``x`` of shape (..., n_steps, n_features); see
    :class:`MultiHeadAttention`.

    References
    ----------
    Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020,
    arXiv:2002.04745, fig. 1b.
    """

    def __init__(
        self,
        n_features: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        mlp_ratio: float = 4.0,
        activation: str | Callable = "gelu",
        norm: str = "layer_norm",
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        dtype: Any = None,
        device: str | Device | None = None,
        generator: Any = None,
    ):
        check_sizes(n_features=n_features, n_heads=n_heads)
        norms = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
        if norm not in norms:
            raise ValueError(f"norm must be one of {', '.join(norms)}, got {norm!r}")
        if not isinstance(mlp_ratio, numbers.Real) or not mlp_ratio > 0:
            raise ValueError(f"mlp_ratio must be > 0, got {mlp_ratio!r}")
        self.n_features, self.n_heads = n_features, n_heads
        self.activation = get_activation(activation)
        place = {"dtype": dtype, "device": device}
        options = {**place, "bias": bias, "generator": generator}
        n_inner = round(mlp_ratio * n_features)
        n_up = 2 * n_inner if activation in GATED else n_inner
        self.norm1 = norms[norm](n_features, **place)
        self.attention = MultiHeadAttention(
            n_features, n_heads, n_kv_heads=n_kv_heads, causal=causal, dropout=dropout, **options
        )
        self.norm2 = norms[norm](n_features, **place)
        taken_in = None
        if isinstance(activation, str) and activation in LINEAR_ACTIVATIONS:
            taken_in = activation
        self.up = Linear(n_features, n_up, activation=taken_in, **options)
        self.down = Linear(n_inner, n_features, **options)
        self.dropout = Dropout(dropout, generator=generator)

    def forward(self, x, *, attn_mask=None):
        x = self._add(x, self.attention(self.norm1(x), attn_mask=attn_mask))
        inner = self.up(self.norm2(x))
        # Another layer, without this attribute, may have taken the place of the first one.
        if getattr(self.up, "activation", None) is None:
            inner = self.activation(inner)
        return self._add(x, self.down(inner))

    def _add(self, x, branch):
        """Add what a branch gives, after dropout."""
        dropout = self.dropout
        rate = dropout.rate if dropout.training else 0.0
        return ops.dropout_add(branch, x, rate, generator=dropout.generator)
