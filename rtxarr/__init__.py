"""rtxarr: an array-API namespace with gradients, for machine learning on the GPU.

The functions here are those of the array API standard and the neural-network ones beyond it.
They take raw NumPy or CuPy arrays and give raw arrays; given a :class:`Tensor` they record what
they do, so that gradients of any order can be taken.
"""

import importlib

from numpy import e, inf, nan, newaxis, pi

from rtxarr import ops
from rtxarr._device import (
    Device,
    current_stream,
    device,
    device_of,
    devices,
    memory_stats,
    stream,
    synchronize,
)
from rtxarr._info import API_VERSION as __array_api_version__
from rtxarr._info import NamespaceInfo as __array_namespace_info__
from rtxarr._names import no_attribute
from rtxarr._out_of_memory import look_up_holders
from rtxarr._profile import profile
from rtxarr.autograd import (
    Tensor,
    autocast,
    capture,
    checkpoint,
    custom_op,
    enable_grad,
    grad,
    hessian,
    hvp,
    is_recording,
    jacobian,
    jvp,
    no_grad,
    stop_gradient,
    value_and_grad,
    vjp,
)
from rtxarr.dtypes import (
    bfloat16,
    bool,
    can_cast,
    complex64,
    complex128,
    finfo,
    float16,
    float32,
    float64,
    iinfo,
    int8,
    int16,
    int32,
    int64,
    isdtype,
    result_type,
    uint8,
    uint16,
    uint32,
    uint64,
)
from rtxarr.ops import *

__version__ = "0.1.0"

# Loaded on first use, so that importing rtxarr stays light.
_LAZY = (
    "autograd",
    "data",
    "fft",
    "geom",
    "libs",
    "linalg",
    "memory",
    "nn",
    "optim",
    "polygraph",
    "random",
    "testing",
)
_FROM_POLYGRAPH = ("fuse", "jit")

__all__ = [
    "Device",
    "Tensor",
    "__array_api_version__",
    "__array_namespace_info__",
    "__version__",
    "autocast",
    "bfloat16",
    "bool",
    "can_cast",
    "capture",
    "checkpoint",
    "complex64",
    "complex128",
    "current_stream",
    "custom_op",
    "device",
    "device_of",
    "devices",
    "e",
    "enable_grad",
    "finfo",
    "float16",
    "float32",
    "float64",
    "grad",
    "hessian",
    "hvp",
    "iinfo",
    "inf",
    "int8",
    "int16",
    "int32",
    "int64",
    "is_recording",
    "isdtype",
    "jacobian",
    "jvp",
    "memory_stats",
    "nan",
    "newaxis",
    "no_grad",
    "pi",
    "profile",
    "result_type",
    "stop_gradient",
    "stream",
    "synchronize",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "value_and_grad",
    "vjp",
    *ops.__all__,
    *_LAZY,
    *_FROM_POLYGRAPH,
]


def _who_holds(place):
    return importlib.import_module("rtxarr.memory").largest_holders(place)


look_up_holders(_who_holds)  # for the message when a GPU has no room


def __getattr__(name):
    if name in _LAZY:
        return importlib.import_module(f"rtxarr.{name}")
    if name in _FROM_POLYGRAPH:
        return getattr(importlib.import_module("rtxarr.polygraph"), name)
    raise no_attribute(__name__, name)


def __dir__():
    return sorted({*globals(), *_LAZY, *_FROM_POLYGRAPH})
