"""Attention and convolutions through cuDNN on a GPU, with their gradients.

Arrays may lie in memory in the order of their axes or with channels (heads) last; a copy is made
only of what lies in neither. All plans accumulate in float32, give the same bits each time (unless
:func:`deterministic` says otherwise) and do not round float32 operands (unless
:func:`rtxarr.libs.blas.allow_tf32` does). Whatever cuDNN does not take goes through plain array
code, attention first through kernels of our own in cuTile (``pip install 'rtxarr[tile]'``);
:func:`rtxarr.libs.show` counts it.

When a convolution is first met its plans are timed, and the fastest is kept where compiled kernels
are, for the same GPU model and library: results are the same to the bit as long as it is kept.
"""

from rtxarr.libs._attention import (
    Dropout,
    deterministic,
    try_attention,
    try_attention_grad,
)
from rtxarr.libs._convolution import (
    try_convolution,
    try_convolution_input,
    try_convolution_weight,
)
from rtxarr.libs._dnn import status
from rtxarr.libs._serving import paged_attention, try_fp8_attention

__all__ = [
    "Dropout",
    "deterministic",
    "paged_attention",
    "status",
    "try_attention",
    "try_attention_grad",
    "try_convolution",
    "try_convolution_input",
    "try_convolution_weight",
    "try_fp8_attention",
]
