"""Give Tensor its operators, properties and methods."""

from rtxarr import _device
from rtxarr.autograd._op import apply
from rtxarr.autograd._tape import Tensor, make_tensor
from rtxarr.ops import _elementwise as elementwise
from rtxarr.ops import _index as index
from rtxarr.ops import _linalg as linalg
from rtxarr.ops import _manipulate as manipulate


def _operator(function):
    """Give the two binary methods of an operator: ``self . other`` and ``other . self``."""
    op = getattr(function, "op", None)
    if op is None:
        return (lambda self, other: function(self, other)), (lambda self, other: function(other, self))
    return (
        lambda self, other: apply(op, (self, other), {}),
        lambda self, other: apply(op, (other, self), {}),
    )


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
Tensor.__hash__ = object.__hash__

Tensor.__neg__ = lambda self: elementwise.negative(self)
Tensor.__pos__ = lambda self: elementwise.positive(self)
Tensor.__abs__ = lambda self: elementwise.abs(self)
Tensor.__invert__ = lambda self: elementwise.bitwise_invert(self)
Tensor.__getitem__ = lambda self, key: index.getitem(self, index._unwrap(key))
Tensor.__setitem__ = index.set_item
