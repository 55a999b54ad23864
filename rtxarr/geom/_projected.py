"""Weighted sums over edges, times a matrix: on a GPU the product runs while edges are gathered."""

from typing import Any

from rtxarr._override import tracing
from rtxarr.autograd import is_recording
from rtxarr.autograd._autocast import active_dtype
from rtxarr.autograd._op import differentiable
from rtxarr.autograd._tape import Tensor, raw
from rtxarr.geom import _edges
from rtxarr.geom._aggregate import check_nodes, check_weight, weighted_sum
from rtxarr.geom._bins import bins
from rtxarr.kernels import gather_product as kernels
from rtxarr.ops import linear, matmul, matrix_transpose


def fits(graph: Any, x: Any, matrix: Any) -> bool:
    """Tell whether sums and product may be one kernel's, and are faster so."""
    if graph.mask is not None or tracing() is not None or active_dtype() is not None:
        return False
    return _fit(graph, raw(x), raw(matrix))


def _fit(graph, x, matrix):
    return kernels.fits(x, matrix.T, graph.n_dst)


def projected_sum(graph: Any, x: Any, weight: Any, matrix: Any, bias: Any) -> Any:
    """Give the weighted sums of sources' rows, times a matrix, plus a bias that may be None.

    ``matrix`` has shape (out_features, in_features).
    """
    if weight is None:
        return linear(weighted_sum(graph, x, None, None), matrix, bias)
    check_nodes("x", x, graph, graph.n_src, "sources")
    check_weight(graph, x, weight)
    keep = is_recording() and isinstance(matrix, Tensor) and matrix.requires_grad
    return projected_rows(weight, x, matrix, bias, graph=graph, keep=keep)[0]


@differentiable
def projected_rows(weight, x, matrix, bias=None, /, *, graph, keep):
    """Give the products and, to ``keep``, the sums that the matrix's gradient needs."""
    stored, order = _edges._as_stored(weight, graph)
    of_one_dtype = stored.dtype == x.dtype and (bias is None or bias.dtype == x.dtype)
    if order is None and of_one_dtype and _fit(graph, x, matrix):
        options = {"bias": bias, "keep": keep}
        edges = graph.indptr, graph.indices, bins(graph)
        return kernels.gather_product(x, *edges, stored, matrix.T, **options)
    sums = _edges.weighted_sum(weight, x, graph=graph)
    return linear(sums, matrix, bias), sums


def _rows_rule(g, weight, matrix, graph):
    """Turned round, the gradient is such a product again."""
    return projected_rows(weight, g[0], matrix_transpose(matrix), graph=graph.T, keep=False)[0]


def _matrix_rule(g, weight, x, out, graph):
    g, sums = g[0], raw(out[1])
    if isinstance(g, Tensor) or not sums.shape[0]:
        sums = _edges.weighted_sum(weight, x, graph=graph)
    return matmul(matrix_transpose(g), sums)


projected_rows.defvjps(
    weight=lambda g, x, matrix, graph: _edges.edge_dot(x, matmul(g[0], matrix), graph=graph),
    x=_rows_rule,
    matrix=_matrix_rule,
    bias=lambda g: g[0],  # the engine sums it up
)
