"""Features that nodes get from where they are in the graph."""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr import _device, ops
from rtxarr.geom._convert import to_scipy
from rtxarr.geom._graph import Graph

__all__ = ["degree_features", "laplacian_encoding"]

_DENSE = 1024  # nodes up to which all eigenvectors at once are the faster way


def degree_features(graph: Graph, max_degree: int, *, direction: str = "in") -> Any:
    """Give the degree of each node as a one among zeros.

    Parameters
    ----------
    graph : Graph
    max_degree : int
        Larger degrees count as this one.
    direction : {"in", "out"}, default "in"

    Returns
    -------
    array of float32, shape (n_dst or n_src, max_degree + 1)

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 0, 0]), np.array([1, 1, 1]), n_nodes=2)
    >>> geom.degree_features(graph, 2)
    array([[1., 0., 0.],
           [0., 0., 1.]], dtype=float32)
    """
    if direction not in ("in", "out"):
        raise ValueError(f"direction must be 'in' or 'out', got {direction!r}")
    degrees = graph.in_degrees if direction == "in" else graph.out_degrees
    xp = _device.namespace(degrees)
    degrees = xp.minimum(degrees, xp.full_like(degrees, max_degree))
    return ops.one_hot(degrees, max_degree + 1, dtype=xp.float32)


def laplacian_encoding(graph: Graph, k: int, *, weight: Any = None) -> Any:
    r"""Give each node its entries in the first eigenvectors of the graph's Laplacian.

    .. math:: L = I - D^{-1/2} \tfrac{1}{2} (A + A^\top) D^{-1/2}

    Parameters
    ----------
    graph : Graph
        Several edges between two nodes add up, and so do both ways.
    k : int
        How many eigenvectors, by rising eigenvalue, after the first one, which is trivial. Beyond
        the last there are zeros.
    weight : array, shape (n_edges,), optional
        Of the edges, finite and not negative; ones when left out.

    Returns
    -------
    array of float64, shape (n_nodes, k)
        Each eigenvector has length one, and its entry of the largest magnitude is positive: its
        sign means nothing, nor does the choice of vectors among those of one eigenvalue, so let
        signs change at random in training. Computed on the host: all eigenvectors of graphs with
        up to 1024 nodes, else the first ones by Lanczos' method from a fixed start.

    References
    ----------
    Dwivedi et al., "Benchmarking Graph Neural Networks", 2020, arXiv:2003.00982, section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> path = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 2]), n_nodes=3)
    >>> geom.laplacian_encoding(path, 1).round(3)
    array([[ 0.707],
           [-0.   ],
           [-0.707]])
    """
    from scipy import sparse
    from scipy.sparse.linalg import eigsh

    if not isinstance(k, (int, np.integer)) or k < 1:
        raise ValueError(f"k must be an int >= 1, got {k!r}")
    n = graph.n_nodes
    matrix = to_scipy(graph.replace(edges={}), weight).astype(np.float64)
    good = np.isfinite(matrix.data) & (matrix.data >= 0)
    if not good.all():
        raise ValueError(
            f"weight must be finite and not negative, got {matrix.data[~good][0]} at an edge to "
            f"node {matrix.tocoo().row[~good][0]}"
        )
    matrix = (matrix + matrix.T) / 2
    degree = np.asarray(matrix.sum(axis=1)).ravel()
    root = np.zeros(n)
    root[degree > 0] = degree[degree > 0] ** -0.5
    scaled = sparse.diags_array(root) @ matrix @ sparse.diags_array(root)
    # I - L: its largest eigenvalues are the smallest ones of L. A node without edges has 1 there.
    scaled = scaled + sparse.diags_array((degree == 0).astype(np.float64))
    if n <= _DENSE or k + 1 >= n:
        _, vectors = np.linalg.eigh(scaled.toarray())
    else:
        start = np.random.default_rng(0).standard_normal(n)
        values, vectors = eigsh(scaled, k=k + 1, which="LA", v0=start)
        vectors = vectors[:, np.argsort(values, kind="stable")]
    vectors = vectors[:, ::-1][:, 1 : k + 1]
    if vectors.size:
        magnitude = np.abs(vectors)
        # The first of those that are as large but for rounding.
        top = np.argmax(magnitude > magnitude.max(axis=0) * (1 - 1e-8), axis=0)
        vectors = vectors * np.where(np.take_along_axis(vectors, top[None], axis=0) < 0, -1.0, 1.0)
    out = np.zeros((n, k))
    out[:, : vectors.shape[1]] = vectors
    return _device.to_device(out, graph.device)
