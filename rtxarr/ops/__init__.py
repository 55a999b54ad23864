"""The namespace's functions and their derivative rules, one file a family."""

from rtxarr.ops import (
    _activations,
    _create,
    _elementwise,
    _index,
    _linalg,
    _manipulate,
    _methods,
    _reduce,
    _search,
    _segment,
)
from rtxarr.ops._activations import *
from rtxarr.ops._create import *
from rtxarr.ops._elementwise import *
from rtxarr.ops._index import *
from rtxarr.ops._linalg import *
from rtxarr.ops._manipulate import *
from rtxarr.ops._reduce import *
from rtxarr.ops._search import *
from rtxarr.ops._segment import *

__all__ = [
    *_activations.__all__,
    *_create.__all__,
    *_elementwise.__all__,
    *_index.__all__,
    *_linalg.__all__,
    *_manipulate.__all__,
    *_reduce.__all__,
    *_search.__all__,
    *_segment.__all__,
]
