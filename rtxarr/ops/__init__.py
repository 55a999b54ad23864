"""The namespace's functions and their derivative rules, one file a family."""

from rtxarr.dtypes import float32
from rtxarr.ops._create import *
from rtxarr.ops._elementwise import *
from rtxarr.ops._index import *
from rtxarr.ops._linalg import *
from rtxarr.ops._manipulate import *
from rtxarr.ops._reduce import *
from rtxarr.ops._search import *
from rtxarr.ops._segment import *
from rtxarr.ops import _methods
