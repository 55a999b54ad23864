"""Modules: layers with parameters, losses and initializers.

Losses are functions, as in ``nn.cross_entropy(model(x), labels)``. Sequences come with the batch
first, images as (batch, channels, height, width). :class:`BatchNorm` takes any number of axes, and
activations are functions of ``rtxarr``, as ``rx.relu``, or the modules here.
"""

from rtxarr._names import no_attribute
from rtxarr.nn import initializers
from rtxarr.nn._activations import (
    ELU,
    GELU,
    Hardswish,
    LeakyReLU,
    LogSoftmax,
    Mish,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from rtxarr.nn._attention import MultiHeadAttention, TransformerBlock
from rtxarr.nn._containers import Flatten, Sequential
from rtxarr.nn._conv import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from rtxarr.nn._dropout import Dropout
from rtxarr.nn._fp8 import Fp8Linear
from rtxarr.nn._fp8_attention import fp8_attention
from rtxarr.nn._functional import functional_call
from rtxarr.nn._linear import Embedding, GatedLinear, Linear
from rtxarr.nn._module import Module
from rtxarr.nn._norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from rtxarr.nn._parameter import Buffer, Parameter
from rtxarr.nn._pooling import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
)
from rtxarr.nn._recurrent import GRU, LSTM
from rtxarr.ops import (
    accuracy,
    binary_cross_entropy_with_logits,
    cosine_similarity,
    cross_entropy,
    huber_loss,
    kl_div,
    l1_loss,
    mse_loss,
    nll_loss,
    smooth_l1_loss,
)

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BatchNorm",
    "Buffer",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Dropout",
    "ELU",
    "Embedding",
    "Flatten",
    "Fp8Linear",
    "GELU",
    "GRU",
    "GatedLinear",
    "GroupNorm",
    "Hardswish",
    "LSTM",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Mish",
    "Module",
    "MultiHeadAttention",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
    "TransformerBlock",
    "accuracy",
    "binary_cross_entropy_with_logits",
    "cosine_similarity",
    "cross_entropy",
    "fp8_attention",
    "functional_call",
    "huber_loss",
    "initializers",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "nll_loss",
    "smooth_l1_loss",
]


def __getattr__(name):
    raise no_attribute(__name__, name)
