"""The functions of ``rtxarr`` by family, for the table on top of their page."""

from rtxarr.ops import (
    _activated,
    _activations,
    _attention,
    _conv,
    _create,
    _dropout,
    _einsum,
    _elementwise,
    _gates,
    _index,
    _linalg,
    _linear,
    _losses,
    _manipulate,
    _matrix,
    _norm,
    _pool,
    _reduce,
    _resize,
    _rotary,
    _search,
    _segment,
    _soft_cross_entropy,
    _sparse,
)

_SEGMENTS = [name for name in _segment.__all__ if name.startswith("segment_")]
_GRADIENTS = [
    *("Tensor", "grad", "value_and_grad", "jacobian", "hessian", "jvp", "vjp", "hvp"),
    *("autocast", "checkpoint", "custom_op", "stop_gradient"),
    *("no_grad", "enable_grad", "is_recording"),
]
_DEVICES = ["Device", "device", "devices", "device_of", "to_device"]
_STREAMS = [
    "stream",
    "current_stream",
    "synchronize",
    "memory_stats",
    "capture",
    "fuse",
    "jit",
    "profile",
]
_DTYPES = ["astype", "can_cast", "finfo", "iinfo", "isdtype", "result_type"]
_ELSEWHERE = {*_SEGMENTS, *_DEVICES, *_DTYPES}


def _of(*modules):
    names = [name for module in modules for name in module.__all__]
    return sorted(name for name in names if name not in _ELSEWHERE)


FAMILIES = {
    "Creation": _of(_create),
    "Elementwise": _of(_elementwise),
    "Reductions and cumulative sums": _of(_reduce),
    "Shape and joining": _of(_manipulate),
    "Indexing and scatter": _of(_index, _segment),
    "Segments and sparse products": [*_SEGMENTS, *_of(_sparse)],
    "Sorting, searching and sets": _of(_search),
    "Linear algebra": _of(_linalg, _einsum, _matrix),
    "Neural networks: activations and dropout": _of(_activations, _gates, _dropout),
    "Neural networks: linear maps and attention": _of(_activated, _linear, _attention, _rotary),
    "Neural networks: convolutions": _of(_conv),
    "Neural networks: pooling and resizing": _of(_pool, _resize),
    "Neural networks: normalization": _of(_norm),
    "Neural networks: losses": _of(_losses, _soft_cross_entropy),
    "Gradients": _GRADIENTS,
    "Devices and streams": [*_DEVICES, *_STREAMS],
    "Element types": _DTYPES,
}
"""Every class and function of ``rtxarr`` is in one of them."""
