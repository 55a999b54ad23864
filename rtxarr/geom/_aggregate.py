"""Aggregation of what sources send to destinations, without an array of messages."""

import math
import numbers
from typing import Any

from rtxarr import _device
from rtxarr._override import tracing
from rtxarr.autograd._tape import raw
from rtxarr.dtypes import is_complex, is_inexact, result_type
from rtxarr.geom import _edges, _messages, _products, _ranks
from rtxarr.ops import astype, concat, log, reshape, stack
from rtxarr.ops._check import check_number

__all__ = ["aggregate", "degree_scalers", "edge_softmax", "sddmm"]


def aggregate(
    graph: Any,
    x: Any,
    op: str = "sum",
    *,
    weight: Any = None,
    empty: float = 0.0,
    q: float | None = None,
    n_slices: int = 1,
) -> Any:
    """Reduce, for each destination, the rows of its sources.

    Parameters
    ----------
    graph : Graph
    x : array or Tensor of a floating or complex dtype, shape (n_src, ...)
        Complex numbers can be added up and averaged.
    op : str, default "sum"
        "sum", "mean", "max" or "min"; "var", the mean squared deviation from the mean, and "std",
        its root; "mul", the product; "softmax", the sum of the messages, each times its share in
        the sum of all their exponentials, feature by feature; "median", that of an even number of
        messages being the mean of the two in the middle; "quantile", with ``q``.
    weight : array or Tensor, shape (n_edges,) or (n_edges, n_heads, ...), optional
        What the row of an edge's source is multiplied with, in the order of the edges' numbers;
        its axes after the first are the first ones of a row. The mean is that of the products: it
        is divided by the number of edges, not by the sum of the weights.
    empty : float, default 0
        What destinations without edges get, whatever the operation.
    q : float in [0, 1], for "quantile" alone
        Which one: 0 is the minimum and 1 the maximum, and between two messages it is interpolated.
    n_slices : int, default 1
        Do so many parts of the last axis one after the other, which needs less memory on the way
        and gives the same bits; :func:`plan` says how many.

    Returns
    -------
    array or Tensor, shape (n_dst, ...)
        Infinities are numbers like others. Half types are accumulated in float32 and rounded once.

    Notes
    -----
    Edges are taken in a fixed order, and equal inputs give equal bits. Where several edges reach
    the maximum or minimum they share its gradient evenly, as those of :func:`rtxarr.max` do; the
    slope of "std" at zero is taken as zero. The variance is the mean squared deviation itself, not
    the difference of two large numbers. A product leaves the range of its type only if its value
    does, and zeros among the messages leave its gradient whole. A NaN among the messages wins in
    all operations; where several of them are the one of a quantile, they share its gradient evenly.

    Without weights only "softmax" makes messages, and with them all but "sum" and "mean": those of
    some destinations at a time, and in the backward pass again.

    References
    ----------
    Corso et al., "Principal Neighbourhood Aggregation for Graph Nets", 2020, arXiv:2004.05718, for
    several operations at once. Li et al., "DeeperGCN", 2020, arXiv:2006.07739, eq. 5, for
    "softmax".

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 1, 2]), np.array([2, 2, 0]), n_nodes=3)
    >>> x = np.array([1.0, 4.0, -7.0])
    >>> geom.aggregate(graph, x, "max")
    array([-7.,  0.,  4.])
    >>> geom.aggregate(graph, x, weight=np.array([0.5, 0.5, 1.0]))
    array([-7. ,  0. ,  2.5])
    """
    if (op == "quantile") != (q is not None):
        raise ValueError(f"'quantile' alone takes q, in [0, 1], got op={op!r} and q={q!r}")
    if q is not None:
        _check_quantile(q)
    else:
        _messages.check_op(op, (*_messages.OPS, "quantile"))
    check_nodes("x", x, graph, graph.n_src, "sources")
    if graph.mask is not None:
        weight = _masked(graph.mask, weight)
    if n_slices != 1:
        return _in_slices(graph, x, op, n_slices, weight=weight, empty=empty, q=q)
    if weight is None:
        out = _unweighted(graph, x, op, empty, q)
        if out is not None:
            return out
        return _messages.map_reduce(
            graph,
            lambda src, dst, edge: src,
            lambda rows, indptr: _messages.reduce_messages(op, rows, indptr, empty, q=q),
            x,
            None,
            None,
        )
    check_weight(graph, x, weight)
    x, weight = _of_one_dtype(x, weight)
    if op in ("sum", "mean"):
        out = _weighted(graph, x, weight)
        if op == "mean":
            out = out / reshape(_edges.counts(graph, out.dtype), (-1,) + (1,) * (out.ndim - 1))
        return _filled(graph, out, empty)
    trailing = (1,) * (x.ndim - weight.ndim)
    return _messages.map_reduce(
        graph,
        lambda src, dst, edge: src * reshape(edge, edge.shape + trailing),
        lambda rows, indptr: _messages.reduce_messages(op, rows, indptr, empty, q=q),
        x,
        None,
        weight,
    )


def _check_quantile(q):
    if not isinstance(q, numbers.Real):
        raise TypeError(f"q must be a number, got {type(q).__name__}")
    if not 0 <= q <= 1:
        raise ValueError(f"q must lie in [0, 1], got {q}")


def weighted_sum(graph: Any, x: Any, weight: Any, bias: Any) -> Any:
    """Give the weighted sum of rows, plus a bias that may be None."""
    if bias is None or weight is None or graph.mask is not None:
        return _plus(aggregate(graph, x, weight=weight), bias)
    check_nodes("x", x, graph, graph.n_src, "sources")
    check_weight(graph, x, weight)
    if not _edges.adds_bias(raw(weight), raw(x), raw(bias)):
        return _plus(aggregate(graph, x, weight=weight), bias)
    return _edges.biased_sum(weight, x, bias, graph=graph)


def _plus(out, bias):
    return out if bias is None else out + bias


def _of_one_dtype(a, b):
    if a.dtype == b.dtype:
        return a, b
    dtype = result_type(a.dtype, b.dtype)
    return [astype(x, dtype, copy=False) for x in (a, b)]


def _masked(mask, weight):
    return mask if weight is None else weight * reshape(mask, (-1,) + (1,) * (weight.ndim - 1))


def _in_slices(graph, x, op, n_slices, *, weight, **options):
    if weight is not None and weight.ndim >= x.ndim:
        raise ValueError(
            f"weight must have fewer axes than x to do x in slices, got {tuple(weight.shape)} and "
            f"{tuple(x.shape)}"
        )
    columns = slices_of(x.shape[-1] if x.ndim > 1 else 1, n_slices)
    if x.ndim == 1:
        return aggregate(graph, x, op, weight=weight, **options)
    parts = [aggregate(graph, x[..., c], op, weight=weight, **options) for c in columns]
    return concat(parts, axis=-1)


def slices_of(n_features: int, n_slices: int) -> list[slice]:
    """Cut columns into runs of about one length."""
    if not isinstance(n_slices, int) or isinstance(n_slices, bool) or n_slices < 1:
        raise ValueError(f"n_slices must be an int >= 1, got {n_slices!r}")
    width = max(1, -(-n_features // n_slices))
    return [slice(at, at + width) for at in range(0, n_features, width)] or [slice(0, 0)]


def _unweighted(graph, x, op, empty, q):
    rows = reshape(x, (graph.n_src, math.prod(x.shape[1:])))
    if op == "sum":
        out = _edges.gather_sum(rows, graph=graph)
    elif op == "mean":
        out = _edges.gather_mean(rows, graph=graph)
    elif op in ("max", "min"):
        out = _edges.gather_extremum(rows, graph=graph, op=op, empty=empty)
    elif op in ("var", "std"):
        out = _edges.gather_var(rows, graph=graph)
        out = _messages.root(out) if op == "std" else out
    elif op == "mul" and tracing() is None and _products.fits(rows, graph.indptr):
        out = _products.gather_product(rows, graph=graph)
    elif op in ("median", "quantile") and _ranks.fits(rows):
        out = _ranks.gather_quantile(rows, graph, 0.5 if q is None else q)
    else:
        return None
    out = reshape(out, (graph.n_dst, *x.shape[1:]))
    if op == "mul":
        return _edges.fill_empty(graph, out, empty)
    return out if op in ("max", "min") else _filled(graph, out, empty)


def _weighted(graph, x, weight):
    if weight.ndim == 1 and x.ndim == 2:
        return _edges.weighted_sum(weight, x, graph=graph)
    n_heads, n_features = math.prod(weight.shape[1:]), math.prod(x.shape[weight.ndim :])
    heads = reshape(x, (graph.n_src, n_heads, n_features))
    out = _edges.weighted_sum(reshape(weight, (graph.n_edges, n_heads)), heads, graph=graph)
    return reshape(out, (graph.n_dst, *x.shape[1:]))


def _filled(graph, out, empty):
    return out if empty == 0 else _edges.fill_empty(graph, out, empty)


def check_nodes(name, x, graph, n, kind):
    data = _floating(name, x)
    if data.ndim < 1 or data.shape[0] != n:
        raise ValueError(f"{name} must have a row for each of {n} {kind}, got {tuple(data.shape)}")
    _check_place(name, data, graph)


def check_edges(name, values, graph, *, real=False):
    data = _floating(name, values)
    if real and is_complex(data.dtype):
        raise TypeError(f"{name} must be an array of a real floating dtype, got {data.dtype}")
    if data.ndim < 1 or data.shape[0] != graph.n_edges:
        raise ValueError(
            f"{name} must have an entry for each of {graph.n_edges} edges, got {tuple(data.shape)}"
        )
    _check_place(name, data, graph)


def _floating(name, x):
    """Give the raw array, which must be of a floating dtype."""
    data = raw(x)
    if not _device.is_array(data) or not is_inexact(data.dtype):
        kind = getattr(data, "dtype", type(data).__name__)
        raise TypeError(f"{name} must be an array of a floating dtype, got {kind}")
    return data


def _check_place(name, x, graph):
    place, wanted = _device.device_of(x), graph.device
    if place is not wanted and place != wanted:
        raise ValueError(f"{name} must be on {graph.device}, where the graph is, got {place}")


def check_weight(graph, x, weight):
    check_edges("weight", weight, graph)
    if tuple(weight.shape[1:]) != tuple(x.shape[1 : weight.ndim]):
        raise ValueError(
            f"weight must have the first axes of a row of x, of shape {tuple(x.shape[1:])}, after "
            f"that of the edges, got {tuple(weight.shape)}"
        )


# ------------------------------------------------------------------------------- values of edges


def sddmm(graph: Any, u: Any, v: Any, op: str = "dot") -> Any:
    """Give each edge a function of its source's row and its destination's.

    Parameters
    ----------
    graph : Graph
    u : array or Tensor, shape (n_src, ...)
        Of the sources.
    v : array or Tensor of the dtype of ``u``, shape (n_dst, ...)
        Of the destinations, with rows of the same shape.
    op : {"dot", "add", "sub", "mul", "div"}, default "dot"
        "dot" is the inner product along the last axis; the others go element by element, as in
        ``u - v``.

    Returns
    -------
    array or Tensor, shape (n_edges, ...)
        In the order of the edges' numbers.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 1]), n_nodes=2)
    >>> geom.sddmm(graph, np.array([[1.0, 2.0], [3.0, 4.0]]), np.ones((2, 2)))
    array([3., 7.])
    """
    if op not in ("dot", "add", "sub", "mul", "div"):
        raise ValueError(f"op must be one of dot, add, sub, mul, div, got {op!r}")
    check_nodes("u", u, graph, graph.n_src, "sources")
    check_nodes("v", v, graph, graph.n_dst, "destinations")
    if u.shape[1:] != v.shape[1:]:
        raise ValueError(
            f"u and v must have rows of one shape, got {tuple(u.shape[1:])} and "
            f"{tuple(v.shape[1:])}"
        )
    if op != "dot":
        a, b = _edges.spread(u, graph=graph.T), _edges.spread(v, graph=graph)
        return {"add": _add, "sub": _sub, "mul": _mul, "div": _div}[op](a, b)
    if u.ndim < 2:
        raise ValueError(f"'dot' needs rows, got u of shape {tuple(u.shape)}")
    u, v = _of_one_dtype(u, v)
    heads, width = u.shape[1:-1], u.shape[-1]
    if len(heads) < 2:
        return _edges.edge_dot(u, v, graph=graph)
    u, v = (reshape(a, (a.shape[0], math.prod(heads), width)) for a in (u, v))
    return reshape(_edges.edge_dot(u, v, graph=graph), (graph.n_edges, *heads))


def _add(a, b):
    return a + b


def _sub(a, b):
    return a - b


def _mul(a, b):
    return a * b


def _div(a, b):
    return a / b


def edge_softmax(graph: Any, logits: Any) -> Any:
    """Give the softmax over the edges that end at each destination.

    Parameters
    ----------
    graph : Graph
    logits : array or Tensor of a real floating dtype, shape (n_edges, ...)
        In the order of the edges' numbers.

    Returns
    -------
    array or Tensor, shape of ``logits``
        A destination all of whose edges have ``-inf`` gives zeros, with a gradient of zero.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 1, 0]), np.array([1, 1, 0]), n_nodes=2)
    >>> geom.edge_softmax(graph, np.array([2.0, 2.0, -np.inf]))
    array([0.5, 0.5, 0. ])
    """
    check_edges("logits", logits, graph)
    rows = reshape(logits, (graph.n_edges, math.prod(logits.shape[1:])))
    return reshape(_edges.softmax_over_edges(rows, graph=graph), logits.shape)


# --------------------------------------------------------------------------------------- degrees


def degree_scalers(
    graph: Any, scalers: Any, *, mean_degree: float = 1.0, mean_log_degree: float = 1.0
) -> Any:
    """Give factors that depend on the number of a destination's edges.

    Parameters
    ----------
    graph : Graph
    scalers : sequence of str
        "identity", 1; "amplification", ``log(d + 1) / mean_log_degree``; "attenuation", its
        inverse; "linear", ``d / mean_degree``; "inverse_linear", its inverse. The inverses take a
        ``d`` of 0 as 1.
    mean_degree, mean_log_degree : float > 0, default 1
        The means of ``d`` and ``log(d + 1)`` over the nodes that a model is trained on. Those that
        no scaler divides by are not looked at.

    Returns
    -------
    array of float64, shape (n_dst, n_scalers)

    References
    ----------
    Corso et al., "Principal Neighbourhood Aggregation for Graph Nets", 2020, arXiv:2004.05718,
    eq. 5.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([0, 0]), n_nodes=2)
    >>> geom.degree_scalers(graph, ["identity", "linear"], mean_degree=0.5)
    array([[1., 4.],
           [1., 0.]])
    """
    check_mean_degrees(scalers, mean_degree, mean_log_degree)
    xp = _device.namespace(graph.indptr)
    degree = xp.astype(graph.in_degrees, xp.float64)
    known = {
        "identity": lambda: xp.ones_like(degree),
        "amplification": lambda: log(degree + 1) / mean_log_degree,
        "attenuation": lambda: mean_log_degree / log(xp.where(degree == 0, 1, degree) + 1),
        "linear": lambda: degree / mean_degree,
        "inverse_linear": lambda: mean_degree / xp.where(degree == 0, 1, degree),
    }
    for name in scalers:
        if name not in known:
            raise ValueError(f"scalers must be among {', '.join(known)}, got {name!r}")
    return stack([known[name]() for name in scalers], axis=1)


def check_mean_degrees(scalers: Any, mean_degree: float, mean_log_degree: float) -> None:
    """Refuse a mean that one of the scalers asks for and that is no positive number."""
    if {"linear", "inverse_linear"}.intersection(scalers):
        check_number("mean_degree", mean_degree, above=0)
    if {"amplification", "attenuation"}.intersection(scalers):
        check_number("mean_log_degree", mean_log_degree, above=0)
