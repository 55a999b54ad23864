"""What programs make of the library's own functions of memory: nodes, or calls.

Reductions over the edges of graphs become nodes, which fuse with what surrounds them. Products over
edges, convolutions and attention stay as they are, calls that a program makes on real arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rtxarr import dtypes
from rtxarr._override import overridable
from rtxarr.kernels._dense import packed
from rtxarr.libs import blas
from rtxarr.ops._activated import epilogue_of
from rtxarr.ops._attention import is_one_block
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._edge_order import as_stored, by_number, of_sources, rows_by_number
from rtxarr.polygraph._elementwise import as_array
from rtxarr.polygraph._linalg import matmul
from rtxarr.polygraph._trace import Concretization, Tracer, current

# Bytes that a multiprocessor has at hand: of more, features that lie apart are put side by side
# before rows of them are read for each edge.
_NEAR = 1 << 17

_RULES: dict[str, Callable] = {}
# For functions whose results do not lie in C order: from the node of a call and a result's number
# to the order of axes in which it does; see ``Opaque.order``.
_ORDERS: dict[str, Callable[[ir.Node, int], tuple[int, ...] | None]] = {}
_GIVE_NEW = frozenset(
    (
        "rtxarr.ops._activated._activated_linear",
        "rtxarr.ops._activated._gated_product",
        "rtxarr.ops._attention._attention",
        "rtxarr.ops._attention._attention_gradient",
        "rtxarr.ops._conv._convolution",
        "rtxarr.ops._conv._convolution_input",
        "rtxarr.ops._conv._convolution_weight",
        "rtxarr.ops._linear.linear",
    )
)


def take_over(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Return what a function gives on tracers; NotImplemented lets it run on them itself."""
    name = f"{function.__module__}.{function.__qualname__}"
    if name not in _RULES:
        raise Concretization(f"{name} reads arrays, which have no values yet")
    return _RULES[name](function, *args, **kwargs)


def _rule(name: str) -> Callable[[Callable], Callable]:
    def register(rule: Callable) -> Callable:
        _RULES[f"rtxarr.{name}"] = rule
        return rule

    return register


# ------------------------------------------------------------------------------ edges and rows


@_rule("kernels.segment.segment_reduce")
def _segment_reduce(function, op, values, indptr, *, indices=None, chunk=None):
    x, pointers = as_array(values).node, as_array(indptr).node
    if indices is not None:
        x = ir.gather(x, as_array(indices).node, 0)
    return current().fresh(_reduced(op, x, pointers))


def _reduced(op, x, pointers):
    wide = dtypes.accumulator(x.dtype) if op in ("sum", "mean") else x.dtype
    return ir.cast(ir.segment_reduce(op, ir.cast(x, wide), pointers), x.dtype)


@_rule("kernels.segment.spread")
def _spread(function, values, indptr, rows):
    n_values = rows.shape[0]
    return current().fresh(ir.spread(as_array(values).node, as_array(indptr).node, n_values))


@_rule("geom._graph._by_number")
def _by_number(function, stored, graph):
    return current().fresh(by_number(stored.node, graph))


@_rule("geom._graph._as_stored")
def _as_stored(function, values, graph):
    return current().fresh(as_stored(values.node, graph))


@overridable
def _row_by_row(x):
    return packed(x)


@_rule("kernels.spmm.spmm")
def _spmm(function, values, dense, indptr, indices, *, order=None, rows=None):
    weight, x = as_array(values).node, as_array(dense).node
    if x.op == "permute" and x.size * x.dtype.itemsize > _NEAR:
        x = _call(_row_by_row, (dense,), {}, [(x.dtype, x.shape)])[0].node
    if order is not None:
        weight = ir.gather(weight, as_array(order).node, 0)
    found = ir.gather(x, as_array(indices).node, 0)
    weight = ir.broadcast(ir.reshape(weight, (weight.size, 1)), found.shape)
    out = _reduced("sum", ir.map_node("multiply", weight, found), as_array(indptr).node)
    if rows is not None:
        out = _reduced("sum", out, as_array(rows).node)
    return current().fresh(out)


@_rule("kernels.scatter.scatter_reduce")
def _scatter_reduce(function, op, index, values, n_rows):
    sources = as_array(index).node, as_array(values).node
    return current().fresh(ir.scatter_reduce(op, *sources, n_rows))


@_rule("kernels.product.segment_product")
def _segment_product(function, values, indptr):
    result = values.dtype, (indptr.shape[0] - 1, values.shape[1])
    return _call(function, (values, indptr), {}, [result])[0]


@_rule("kernels.product.factors")
def _factors(function, values, indptr):
    result = dtypes.accumulator(values.dtype), (indptr.shape[0] - 1, values.shape[1])
    return tuple(_call(function, (values, indptr), {}, [result, result]))


@_rule("kernels.product.without")
def _without(function, number, code, x):
    return _call(function, (number, code, x), {}, [(number.dtype, number.shape)])[0]


def _wide(x: Any, dtype: Any) -> ir.Node:
    return ir.cast(as_array(x).node, dtypes.accumulator(dtype))


@_rule("geom._edges.weighted_sum")
def _weighted_sum(function, weight, x, *, graph):
    dtype = _result_type(weight, x)
    kept = ("weights", id(weight))
    if kept in graph._kept or kept in graph.__dict__.get("T", graph)._kept:  # sorted once
        stored = graph.once(("stored", id(weight)), lambda: graph.stored(weight))
    else:
        stored = graph.stored(as_array(weight))
    weights = _wide(stored, dtype)
    found = of_sources(_wide(x, dtype), graph)
    ones = (1,) * (len(found.shape) - len(weights.shape))
    weights = ir.broadcast(ir.reshape(weights, (*weights.shape, *ones)), found.shape)
    product = ir.map_node("multiply", weights, found)
    out = _reduced("sum", product, as_array(graph.indptr).node)
    return current().fresh(ir.cast(out, dtype))


@_rule("geom._edges.edge_dot")
def _edge_dot(function, u, v, *, graph):
    dtype = _result_type(u, v)
    left = of_sources(_wide(u, dtype), graph)
    # The sum over features is no reduction of edges: a row is read for each of them.
    right = ir.gather(_wide(v, dtype), as_array(graph._rows).node, 0)
    product = ir.map_node("multiply", left, right)
    out = ir.reduce_node("sum", product, (len(product.shape) - 1,))
    return graph._by_number(current().fresh(ir.cast(out, dtype)))


@_rule("geom._edges.spread")
def _spread_numbered(function, x, *, graph):
    return current().fresh(rows_by_number(as_array(x).node, graph))


@_rule("geom._edges.collect")
def _collect(function, values, *, graph):
    stored = graph.stored(as_array(values)).node
    return current().fresh(_reduced("sum", stored, as_array(graph.indptr).node))


# ------------------------------------------------------------------------- calls of the library


@dataclass(frozen=True)
class Opaque:
    """A function of arrays with its other arguments: what a node of a call refers to.

    Attributes
    ----------
    function : callable
    places : tuple of int
        Where among the arguments the arrays are.
    args : tuple
        The arguments, None in place of the arrays.
    options : tuple of (str, object)
    """

    function: Callable
    places: tuple[int, ...]
    args: tuple
    options: tuple[tuple[str, Any], ...]

    def __repr__(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @property
    def __name__(self) -> str:
        return self.function.__name__.lstrip("_")

    @property
    def gives_new(self) -> bool:
        """Whether what it gives is no memory of its arrays."""
        return repr(self) in _GIVE_NEW

    @property
    def into(self) -> Callable | None:
        """What does the same and writes the first result to ``out``; it gives None if it cannot."""
        options = dict(self.options)
        if repr(self) == "rtxarr.ops._linear.linear":
            return _linear_into
        if repr(self) == "rtxarr.ops._activated._activated_linear" and not options["keep"]:
            return functools.partial(_linear_into, activation=options["activation"])
        return None

    def order(self, call: ir.Node, number: int) -> tuple[int, ...] | None:
        """Return the order of axes in which a result is expected in memory; None: as they are."""
        rule = _ORDERS.get(repr(self))
        return None if rule is None else rule(call, number)

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        args = list(self.args)
        for place, array in zip(self.places, arrays, strict=True):
            args[place] = array
        out = self.function(*args, **dict(self.options))
        if isinstance(out, (tuple, list)):
            return tuple(x for x in out if x is not None)
        return (out,)


def _call(function: Callable, args: Sequence, options: dict, results: Sequence) -> list[Tracer]:
    """Make a call of ``function``, whose results but None are (dtype, shape)."""
    places = tuple(i for i, x in enumerate(args) if hasattr(x, "dtype"))
    rest = tuple(None if i in places else x for i, x in enumerate(args))
    opaque = Opaque(function, places, rest, tuple(sorted(options.items())))
    sources = [as_array(args[i]).node for i in places]
    return [current().fresh(n) for n in ir.call(opaque, sources, (), results)]


@_rule("ops._linalg.matmul")
def _matmul(function, x1, x2):
    return matmul(x1, x2)  # of half precision as it is: it is rounded once by itself


def _fits(x, weight, bias):
    fits = weight.ndim == 2 and x.shape[-1:] == weight.shape[1:]
    fits = fits and (bias is None or bias.shape == weight.shape[:1])
    return fits and all(dtypes.is_floating(v.dtype) for v in (x, weight, bias) if v is not None)


@_rule("ops._linear.linear")
def _linear(function, x, weight, bias=None):
    dtype = _result_type(x, weight, bias)
    if not _fits(x, weight, bias):
        return NotImplemented  # it says what is wrong
    if current().on_numpy and not dtypes.is_half(dtype):
        return NotImplemented  # the product, and the bias in the kernel that reads it
    result = dtype, (*x.shape[:-1], weight.shape[0])
    return _call(function, (x, weight, bias), {}, [result])[0]


def _linear_into(x, weight, bias=None, *, out, activation=None):
    options = {} if bias is None else {"bias": bias}
    if activation is not None:
        options["epilogue"] = epilogue_of(activation, out.dtype)
        if options["epilogue"] is None:
            return None
    found = blas.matmul_into(x, weight.T, out, **options)
    return None if found is None else (found,)


@_rule("ops._activated._activated_linear")
def _activated_linear(function, x, weight, bias=None, *, activation, keep=False):
    if not _fits(x, weight, bias):
        return NotImplemented
    result = _result_type(x, weight, bias), (*x.shape[:-1], weight.shape[0])
    options = {"activation": activation, "keep": keep}
    found = _call(function, (x, weight, bias), options, [result] * (1 + keep))
    return tuple(found) if keep else found[0]


@_rule("ops._activated._gated_product")
def _gated_product(function, x, w_gate, w_up, b_gate, b_up, *, activation):
    arrays = x, w_gate, w_up, b_gate, b_up
    if not _fits(x, w_gate, b_gate):
        return NotImplemented
    result = _result_type(*arrays), (*x.shape[:-1], w_gate.shape[0])
    return _call(function, arrays, {"activation": activation}, [result])[0]


def _result_type(*arrays):
    return dtypes.result_type(*(x.dtype for x in arrays if x is not None))


@_rule("ops._conv._convolution")
def _convolution(function, x, weight, bias=None, residual=None, **options):
    shape = x.shape[0], weight.shape[0], *options["windows"].counts(x.shape[2:])
    arrays = x, weight, bias, residual
    return _call(function, arrays, options, [(_result_type(*arrays), shape)])[0]


@_rule("ops._conv._convolution_input")
def _convolution_input(function, y, weight, bias=None, *, windows, groups, spatial):
    shape = y.shape[0], weight.shape[1] * groups, *spatial
    options = {"windows": windows, "groups": groups, "spatial": tuple(spatial)}
    return _call(function, (y, weight, bias), options, [(_result_type(y, weight, bias), shape)])[0]


@_rule("ops._conv._convolution_weight")
def _convolution_weight(function, x, y, *, windows, groups, last=None):
    shape = y.shape[1], x.shape[1] // groups, *windows.kernel
    options = {"windows": windows, "groups": groups, "last": last}
    return _call(function, (x, y), options, [(_result_type(x, y), shape)])[0]


def _is_apart(q: Any, k: Any) -> bool:
    """Tell whether attention is better in nodes: no kernel of a GPU's library takes it."""
    # On the CPU, products of arrays that lie otherwise have other bits.
    return not current().on_numpy and not dtypes.is_half(q.dtype) and is_one_block(q, k)


@_rule("ops._attention._attention")
def _attention(function, q, k, v, mask, kept, lengths, **options):
    if kept is not None or _is_apart(q, k):  # its random numbers are nodes
        return NotImplemented
    dtype = _result_type(q, k, v)
    shape = q.shape[:3]
    results = [(dtype, (*shape, v.shape[-1])), (dtypes.accumulator(dtype), shape)]
    return tuple(_call(function, (q, k, v, mask, None, lengths), options, results))


_BSHD = (0, 2, 1, 3)  # arrays (batch, heads, seq, dim) that lie as (batch, seq, heads, dim)


def _order_of_attention(call, number):
    return _BSHD if number == 0 else None


def _order_of_gradient(call, number):
    """Gradients lie as what they are gradients of."""
    x = call.src[3 + number] if number < 3 else None
    return _BSHD if x is not None and x.op == "permute" and x.attrs == (_BSHD,) else None


_ORDERS["rtxarr.ops._attention._attention"] = _order_of_attention
_ORDERS["rtxarr.ops._attention._attention_gradient"] = _order_of_gradient


@_rule("ops._attention._attention_gradient")
def _attention_gradient(function, of_out, out, lse, q, k, v, mask, lengths, **options):
    if _is_apart(q, k):
        return NotImplemented
    arrays = (q, k, v, mask) if options["needs"][3] else (q, k, v)
    results = [(x.dtype, x.shape) for x in arrays]
    found = _call(function, (of_out, out, lse, q, k, v, mask, lengths), options, results)
    return [*found, None, None] if len(found) == 4 else [*found, None, None, None]


@_rule("optim._clip._clipped")
def _clipped(function, max_norm, *grads):
    wide = {dtypes.accumulator(g.dtype) for g in grads}
    if current().on_numpy or len(wide) > 1:
        return NotImplemented
    # All gradients in three launches, with the bits of the step that is not traced.
    scaled = [(g.dtype, g.shape) for g in grads] if max_norm < float("inf") else []
    return _call(function, (max_norm, *grads), {}, [(wide.pop(), ()), *scaled])


@_rule("optim._loss_scaler._unscaled")
def _unscaled(function, scale, *grads):
    if current().on_numpy:
        return NotImplemented
    return _call(function, (scale, *grads), {}, [(g.dtype, g.shape) for g in grads])
