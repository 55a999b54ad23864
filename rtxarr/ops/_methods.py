"""Give Tensor its operators, properties and methods."""

import copy

import numpy as np

from rtxarr import _device
from rtxarr._info import check_api_version
from rtxarr.autograd._op import apply
from rtxarr.autograd._tape import Leaf, Tensor
from rtxarr.dtypes import bfloat16
from rtxarr.ops import _create as create
from rtxarr.ops import _elementwise as elementwise
from rtxarr.ops import _index as index
from rtxarr.ops import _linalg as linalg
from rtxarr.ops import _manipulate as manipulate
from rtxarr.ops import _reduce as reduce
from rtxarr.ops import _search as search

_COMMON = {Tensor, np.ndarray, int, float}


def _operand(x):
    """Tell whether an operator may take ``x``; others get NotImplemented and Python's error."""
    return isinstance(x, (Tensor, int, float, complex)) or _device.is_array(x)


def _operator(function):
    """Give the two binary methods of an operator: ``self . other`` and ``other . self``."""
    op = getattr(function, "op", None)

    def forward(self, other):
        if type(other) not in _COMMON and not _operand(other):
            return NotImplemented
        return function(self, other) if op is None else apply(op, (self, other), {})

    def reflected(self, other):
        if type(other) not in _COMMON and not _operand(other):
            return NotImplemented
        return function(other, self) if op is None else apply(op, (other, self), {})

    return forward, reflected


def _method(function):
    """Give a method that calls ``function`` on the tensor."""

    def method(self, *args, **kwargs):
        if "out" in kwargs:  # np.max(x) calls x.max(axis=None, out=None)
            raise TypeError(
                "a Tensor takes no out=, and NumPy's functions take no Tensor: write "
                f"rx.{function.__name__}(x)"
            )
        return function(self, *args, **kwargs)

    method.__doc__ = f"See :func:`rtxarr.{function.__name__}`."
    return method


def _reshape(self, *shape):
    """See :func:`rtxarr.reshape`; takes a tuple or separate lengths."""
    return manipulate.reshape(self, shape[0] if len(shape) == 1 else shape)


def _transpose(self):
    if self.ndim != 2:
        raise ValueError(f"x.T needs two dimensions, got {self.ndim}; use x.mT or permute_dims")
    return manipulate.transpose(self)


def _array_namespace(self, /, *, api_version=None):
    import rtxarr

    check_api_version(api_version)
    return rtxarr


def _array(self, dtype=None, copy=None):
    if self.node is not None:
        raise TypeError(
            "a tensor that requires grad does not become an array by itself: the graph would be "
            "lost; use x.numpy() or rx.stop_gradient(x)"
        )
    if _device.is_device_array(self.data):
        raise TypeError(
            "a tensor on the GPU does not become a NumPy array by itself; use x.numpy()"
        )
    return np.array(self.data, dtype=dtype, copy=copy)


def _dlpack(self, **options):
    if self.node is not None:
        raise BufferError("a tensor that requires grad has no DLPack; use rx.stop_gradient(x)")
    if self.dtype == bfloat16 and isinstance(self.data, np.ndarray):
        raise BufferError(
            "NumPy has no DLPack for bfloat16; hand over x.data.view('int16') and view it as "
            "bfloat16 there"
        )
    return _exported(self).__dlpack__(**options)


def _exported(self):
    """Give the data as an array of a kind that has DLPack: NumPy's scalars have not."""
    return np.asarray(self.data) if isinstance(self.data, np.generic) else self.data


def _iterate(self):
    if self.ndim == 0:
        raise TypeError("iteration over a 0-d tensor")
    return iter(manipulate.unstack(self))


def _length(self):
    if self.ndim == 0:
        raise TypeError("len() of a 0-d tensor")
    return self.shape[0]


def _scalar(kind):
    def convert(self):
        if self.size != 1:
            raise TypeError(
                f"only a tensor of one element becomes {kind.__name__}, got {self.shape}"
            )
        if self.node is not None and kind in (float, complex):  # math.sin(x), array[0] = x
            raise TypeError(
                f"a tensor that requires grad does not become {kind.__name__} by itself: the graph "
                "would be lost; use x.item() or rx.stop_gradient(x)"
            )
        return kind(self.item())

    return convert


def _format(self, spec):
    return format(self.item(), spec) if spec and self.size == 1 else format(str(self), spec)


def _as_index(self):
    if self.ndim != 0 or np.dtype(self.dtype).kind not in "iu":
        raise TypeError(f"only an integer 0-d tensor is an index, got {self.dtype}, {self.shape}")
    return self.item()


def _represent(self):
    body = np.array2string(self.numpy(), separator=", ", prefix="Tensor(")
    place = "" if self.device == "cpu" else f", device={str(self.device)!r}"
    tracked = ", requires_grad=True" if self.node is not None else ""
    return f"Tensor({body}, dtype={self.dtype}{place}{tracked})"


def _deepcopy(self, memo):
    if self.node is not None and type(self.node) is not Leaf:
        raise RuntimeError("only a leaf can be copied deeply; use rx.stop_gradient(x) first")
    new = copy.copy(self)
    new.data = _device.namespace(self.data).asarray(self.data, copy=True)
    memo[id(self)] = new
    return new


def _reduce_leaf(self, protocol):
    if self.node is not None and type(self.node) is not Leaf:
        raise RuntimeError("only a leaf can be copied or pickled; use rx.stop_gradient(x) first")
    return _rebuild, (type(self), self.data, self.node is not None)


def _rebuild(kind, data, requires_grad):
    tensor = Tensor.__new__(kind)
    Tensor.__init__(tensor, data, requires_grad=requires_grad)
    return tensor


for _name, _function in {
    "add": elementwise.add,
    "sub": elementwise.subtract,
    "mul": elementwise.multiply,
    "truediv": elementwise.divide,
    "floordiv": elementwise.floor_divide,
    "mod": elementwise.remainder,
    "pow": elementwise.pow,
    "matmul": linalg.matmul,
    "and": elementwise.bitwise_and,
    "or": elementwise.bitwise_or,
    "xor": elementwise.bitwise_xor,
    "lshift": elementwise.bitwise_left_shift,
    "rshift": elementwise.bitwise_right_shift,
}.items():
    _forward, _reflected = _operator(_function)
    setattr(Tensor, f"__{_name}__", _forward)
    setattr(Tensor, f"__r{_name}__", _reflected)

for _name, _function in {
    "eq": elementwise.equal,
    "ne": elementwise.not_equal,
    "lt": elementwise.less,
    "le": elementwise.less_equal,
    "gt": elementwise.greater,
    "ge": elementwise.greater_equal,
}.items():
    setattr(Tensor, f"__{_name}__", _operator(_function)[0])

for _name, _function in {
    "sum": reduce.sum,
    "mean": reduce.mean,
    "var": reduce.var,
    "std": reduce.std,
    "prod": reduce.prod,
    "max": reduce.max,
    "min": reduce.min,
    "all": reduce.all,
    "any": reduce.any,
    "argmax": search.argmax,
    "argmin": search.argmin,
    "astype": elementwise.astype,
    "squeeze": manipulate.squeeze,
    "__neg__": elementwise.negative,
    "__pos__": elementwise.positive,
    "__abs__": elementwise.abs,
    "__invert__": elementwise.bitwise_invert,
}.items():
    setattr(Tensor, _name, _method(_function))

Tensor.__hash__ = object.__hash__
Tensor.__getitem__ = lambda self, key: index.getitem(self, index.unwrap(key))
Tensor.__setitem__ = index.set_item
Tensor.__iter__ = _iterate
Tensor.__len__ = _length
Tensor.__bool__ = _scalar(bool)
Tensor.__int__ = _scalar(int)
Tensor.__float__ = _scalar(float)
Tensor.__complex__ = _scalar(complex)
Tensor.__index__ = _as_index
Tensor.__repr__ = _represent
Tensor.__format__ = _format
Tensor.__deepcopy__ = _deepcopy
Tensor.__reduce_ex__ = _reduce_leaf
Tensor.__array__ = _array
Tensor.__array_namespace__ = _array_namespace
Tensor.__dlpack__ = _dlpack
Tensor.__dlpack_device__ = lambda self: _exported(self).__dlpack_device__()
Tensor.reshape = _reshape
Tensor.to_device = _method(create.to_device)
Tensor.device = property(lambda self: _device.device_of(self.data), doc="Where the data lives.")
Tensor.T = property(_transpose, doc="Transpose of a matrix.")
Tensor.mT = property(manipulate.matrix_transpose, doc="Last two axes swapped.")
Tensor.__cuda_array_interface__ = property(
    lambda self: self.data.__cuda_array_interface__, doc="CUDA array interface of the data."
)
