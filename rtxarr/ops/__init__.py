"""The namespace's functions and their derivative rules, one file a family."""

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
    _methods,  # noqa: F401  (gives Tensor its operators)
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
from rtxarr.ops._activated import *
from rtxarr.ops._activations import *
from rtxarr.ops._attention import *
from rtxarr.ops._conv import *
from rtxarr.ops._create import *
from rtxarr.ops._dropout import *
from rtxarr.ops._einsum import *
from rtxarr.ops._elementwise import *
from rtxarr.ops._gates import *
from rtxarr.ops._index import *
from rtxarr.ops._linalg import *
from rtxarr.ops._linear import *
from rtxarr.ops._losses import *
from rtxarr.ops._manipulate import *
from rtxarr.ops._matrix import *
from rtxarr.ops._norm import *
from rtxarr.ops._pool import *
from rtxarr.ops._reduce import *
from rtxarr.ops._resize import *
from rtxarr.ops._rotary import *
from rtxarr.ops._search import *
from rtxarr.ops._segment import *
from rtxarr.ops._soft_cross_entropy import *
from rtxarr.ops._sparse import *

__all__ = [
    *_activated.__all__,
    *_activations.__all__,
    *_attention.__all__,
    *_conv.__all__,
    *_create.__all__,
    *_dropout.__all__,
    *_einsum.__all__,
    *_elementwise.__all__,
    *_gates.__all__,
    *_index.__all__,
    *_linalg.__all__,
    *_linear.__all__,
    *_losses.__all__,
    *_manipulate.__all__,
    *_matrix.__all__,
    *_norm.__all__,
    *_pool.__all__,
    *_reduce.__all__,
    *_resize.__all__,
    *_rotary.__all__,
    *_search.__all__,
    *_segment.__all__,
    *_soft_cross_entropy.__all__,
    *_sparse.__all__,
]
