"""Graphs from other libraries, and back.

Nothing of the other libraries is imported until a function needs it; objects are known by what they
have, not by their class. Arrays are taken over without a copy where their layout allows it: device
memory through DLPack, ``indices`` and values of sparse matrices as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rtxarr import _device, ops
from rtxarr.autograd._tape import raw
from rtxarr.geom._batch import Batch
from rtxarr.geom._graph import Graph
from rtxarr.geom._hetero import HeteroGraph
from rtxarr.geom._subgraph import iota

__all__ = [
    "from_cudf",
    "from_cugraph",
    "from_dgl",
    "from_networkx",
    "from_pyg",
    "from_scipy",
    "to_cudf",
    "to_cugraph",
    "to_networkx",
    "to_pyg",
    "to_scipy",
]

# ------------------------------------------------------------------------------ sparse matrices


def from_scipy(matrix: Any) -> Graph:
    """Take a sparse matrix as a graph: entry ``[d, s]`` is an edge from ``s`` to ``d``.

    Parameters
    ----------
    matrix : sparse matrix or array of SciPy or CuPy, shape (n_dst, n_src)
        So ``graph @ x`` is ``matrix @ x`` where all entries are ones. For the other convention, as
        in ``scipy.sparse.csgraph``, give ``matrix.T``.

    Returns
    -------
    Graph
        With the entries as ``edges["weight"]``. Every stored entry is an edge, also zeros and those
        that are stored twice, and edges are numbered in the order in which they are stored. CSR and
        CSC share their indices and values.

    Examples
    --------
    >>> from scipy import sparse
    >>> from rtxarr import geom
    >>> matrix = sparse.csr_array([[0, 2, 0], [1, 0, 3]])
    >>> graph = geom.from_scipy(matrix)
    >>> graph
    Graph(3 to 2 nodes, 3 edges, edges: weight)
    >>> (geom.to_scipy(graph) != matrix).nnz
    0
    """
    if not hasattr(matrix, "format") or not hasattr(matrix, "shape"):
        raise TypeError(f"matrix must be a sparse matrix, got {type(matrix).__name__}")
    n_dst, n_src = matrix.shape
    if matrix.format == "coo":
        edges = {"weight": matrix.data}
        return Graph.from_edges(matrix.col, matrix.row, n_src=n_src, n_dst=n_dst, edges=edges)
    if matrix.format not in ("csr", "csc"):
        matrix = matrix.tocsr()
    edges = {"weight": matrix.data}
    if matrix.format == "csc":
        return Graph(matrix.indptr, matrix.indices, n_src=n_dst, edges=edges).T
    return Graph(matrix.indptr, matrix.indices, n_src=n_src, edges=edges)


def to_scipy(graph: Graph, weight: Any = None) -> Any:
    """Give the graph's matrix, whose entry ``[d, s]`` is an edge from ``s`` to ``d``.

    Parameters
    ----------
    graph : Graph
    weight : array or Tensor, shape (n_edges,), optional
        By default ``graph.edges["weight"]``, or ones of float32 where there is none.

    Returns
    -------
    scipy.sparse.csr_array, shape (n_dst, n_src)
        Entries of several edges between two nodes are stored one after the other; arithmetic of
        SciPy's adds them up. They are stored by destination, so :func:`from_scipy` numbers the
        edges of a graph that is not ``is_ordered`` anew.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 0]), np.array([1, 1]), n_nodes=2)
    >>> geom.to_scipy(graph).toarray()
    array([[0., 0.],
           [2., 0.]], dtype=float32)
    """
    from scipy import sparse

    if weight is None and "weight" in graph.edges:
        weight = graph.edges["weight"]
    if weight is None:
        values = np.ones(graph.n_edges, dtype=np.float32)
    elif not _device.is_array(raw(weight)) or weight.shape != (graph.n_edges,):
        shape = getattr(weight, "shape", type(weight).__name__)
        raise ValueError(f"weight must be an array of shape ({graph.n_edges},), got {shape}")
    else:
        values = _host(graph.stored(raw(weight)))
    indices, indptr = _host(graph.indices), _host(graph.indptr)
    if graph.n_edges < 2**31:  # both of one type, or SciPy copies the larger one
        indptr = indptr.astype(indices.dtype)
    return sparse.csr_array((values, indices, indptr), shape=(graph.n_dst, graph.n_src))


# ------------------------------------------------------------------------------------- networkx


def from_networkx(
    graph: Any, *, nodes: Sequence[str] = (), edges: Sequence[str] = ()
) -> tuple[Graph, list]:
    """Take over a graph of networkx.

    Parameters
    ----------
    graph : networkx graph
        An edge of an undirected one becomes two, one each way; a loop stays one.
    nodes, edges : sequence of str
        Attributes to take over, which all nodes or edges must have.

    Returns
    -------
    graph : Graph
        Edges are numbered as networkx lists them, then the ways back of an undirected graph. A
        directed multigraph whose keys are ``0`` to ``n_edges - 1``, as :func:`to_networkx` makes
        them, has its edges numbered by them.
    ids : list
        The nodes of networkx in the order of their numbers here.

    Examples
    --------
    >>> import networkx as nx
    >>> from rtxarr import geom
    >>> graph, ids = geom.from_networkx(nx.Graph([("a", "b"), ("b", "b")]))
    >>> graph, ids
    (Graph(2 nodes, 3 edges), ['a', 'b'])
    """
    ids = list(graph.nodes)
    number = {node: i for i, node in enumerate(ids)}
    listed = [(number[u], number[v], data) for u, v, data in graph.edges(data=True)]
    if graph.is_multigraph() and graph.is_directed():
        keys = [key for _, _, key in graph.edges(keys=True)]
        if all(isinstance(key, int) for key in keys) and sorted(keys) == list(range(len(keys))):
            listed = [listed[i] for i in np.argsort(keys)]
    if not graph.is_directed():
        listed += [(v, u, data) for u, v, data in listed if u != v]
    src, dst = np.array([edge[:2] for edge in listed], dtype=np.int64).reshape(-1, 2).T
    made = Graph.from_edges(
        src,
        dst,
        n_nodes=len(ids),
        nodes={name: _column_of("node", name, [graph.nodes[i] for i in ids]) for name in nodes},
        edges={name: _column_of("edge", name, [data for _, _, data in listed]) for name in edges},
    )
    return made, ids


def _column_of(kind, name, rows):
    missing = [i for i, row in enumerate(rows) if name not in row]
    if missing:
        raise ValueError(f"every {kind} must have {name!r}, got {kind} {missing[0]} without it")
    return np.asarray([row[name] for row in rows])


def to_networkx(graph: Graph, ids: Sequence | None = None) -> Any:
    """Give the graph as one of networkx, which holds everything on the host.

    Parameters
    ----------
    graph : Graph
    ids : sequence, optional
        What the nodes are to be called; their numbers by default.

    Returns
    -------
    networkx.MultiDiGraph
        The keys of the edges are their numbers; the rows of the arrays of nodes and edges are their
        attributes, as Python numbers and lists.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 0]), np.array([1, 1]), n_nodes=3)
    >>> print(geom.to_networkx(graph))
    MultiDiGraph with 3 nodes and 2 edges
    """
    try:
        import networkx as nx
    except ImportError:
        raise ImportError("to_networkx needs networkx: pip install networkx") from None

    ids = range(graph.n_nodes) if ids is None else ids
    if len(ids) != graph.n_nodes or len(set(ids)) != len(ids):
        raise ValueError(f"ids must be {graph.n_nodes} different names, got {len(set(ids))}")
    out = nx.MultiDiGraph()
    for i, held in zip(ids, _rows(graph.nodes, graph.n_nodes), strict=True):
        out.add_node(i, **held)
    src, dst = _host(graph.src).tolist(), _host(graph.dst).tolist()
    held = _rows(graph.edges, graph.n_edges)
    for number, (u, v, data) in enumerate(zip(src, dst, held, strict=True)):
        out.add_edge(ids[u], ids[v], key=number, **data)
    return out


def _rows(arrays, n):
    """Give a dict of the entries of each row."""
    columns = {name: _host(x).tolist() for name, x in arrays.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(n)]


# ------------------------------------------------------------- PyTorch Geometric and DGL


def from_pyg(
    data: Any,
    *,
    nodes: Sequence[str] | None = None,
    edges: Sequence[str] | None = None,
    graph: Sequence[str] = (),
) -> Graph | HeteroGraph:
    """Take over a ``Data``, ``Batch`` or ``HeteroData`` of PyTorch Geometric.

    Parameters
    ----------
    data : Data, Batch or HeteroData
        Of it ``edge_index`` and the number of nodes are read.
    nodes, edges : sequence of str, optional
        What belongs to nodes and edges. It is not guessed from lengths: by default only ``x`` and
        ``pos``, and ``edge_attr``, ``edge_weight`` and ``time``, where they are.
    graph : sequence of str, default none
        What belongs to the graphs of a ``Batch``.

    Returns
    -------
    Graph, Batch or HeteroGraph
        Edges keep their numbers. Tensors are shared through DLPack, detached, on their device.

    Examples
    --------
    >>> from rtxarr import geom
    >>> from torch_geometric.datasets import TUDataset  # doctest: +SKIP
    >>> data = TUDataset("/tmp/data", "MUTAG")[0]  # doctest: +SKIP
    >>> geom.from_pyg(data)  # doctest: +SKIP
    Graph(17 nodes, 38 edges, nodes: x, edges: edge_attr)
    """
    if hasattr(data, "edge_types"):
        counts = {kind: _n_nodes(data[kind]) for kind in data.node_types}
        graphs = {
            tuple(relation): _taken_graph(
                data[relation], counts[relation[0]], counts[relation[2]], {}, edges
            )
            for relation in data.edge_types
        }
        held = {kind: _taken(data[kind], nodes, ("x", "pos")) for kind in counts}
        return HeteroGraph(graphs, counts, nodes=held)
    n = _n_nodes(data)
    made = _taken_graph(data, n, n, _taken(data, nodes, ("x", "pos")), edges)
    if getattr(data, "ptr", None) is None:
        return made
    return Batch(made, _array(data.ptr), graph=_taken(data, graph, ()))


def _n_nodes(store):
    if store.num_nodes is None:
        raise ValueError(f"num_nodes must be set where there are no arrays of nodes, got {store}")
    return int(store.num_nodes)


def _taken_graph(store, n_src, n_dst, nodes, edges):
    src, dst = _taken(store, ["edge_index"], ())["edge_index"]
    return Graph.from_edges(
        src,
        dst,
        n_src=n_src,
        n_dst=n_dst,
        nodes=nodes,
        edges=_taken(store, edges, ("edge_attr", "edge_weight", "time")),
    )


def _taken(store, names, usual):
    if names is None:
        names = [name for name in usual if getattr(store, name, None) is not None]
    missing = [name for name in names if getattr(store, name, None) is None]
    if missing:
        raise ValueError(f"the data must have {missing[0]!r}, got {store}")
    return {name: _array(getattr(store, name)) for name in names}


def to_pyg(graph: Graph | HeteroGraph) -> Any:
    """Give the graph as a ``Data``, or a :class:`HeteroGraph` as a ``HeteroData``.

    Parameters
    ----------
    graph : Graph, Batch or HeteroGraph

    Returns
    -------
    torch_geometric.data.Data or HeteroData
        With all arrays as tensors that share their memory, on their device. A batch has ``ptr`` and
        ``batch`` too.

    Examples
    --------
    >>> from rtxarr import geom
    >>> geom.to_pyg(geom.load_karate())  # doctest: +SKIP
    Data(edge_index=[2, 156], num_nodes=34, label=[34])
    """
    try:
        import torch
        from torch_geometric.data import Data, HeteroData
    except ImportError:
        raise ImportError("to_pyg needs torch and torch_geometric") from None

    def tensor(x):
        x = raw(x)
        if isinstance(x, np.ndarray) and not x.flags.writeable:
            x = x.copy()  # torch has no read-only tensors
        return torch.from_dlpack(x)

    def edge_index(part):
        return tensor(ops.stack([part.src, part.dst]))

    if isinstance(graph, HeteroGraph):
        out = HeteroData()
        for kind, n in graph.n_nodes.items():
            out[kind].num_nodes = n
            for name, x in graph.nodes[kind].items():
                out[kind][name] = tensor(x)
        for relation, part in graph.graphs.items():
            out[relation].edge_index = edge_index(part)
            for name, x in part.edges.items():
                out[relation][name] = tensor(x)
        return out
    held = [*graph.nodes.items(), *graph.edges.items()]
    if isinstance(graph, Batch):
        held += [*graph.graph.items(), ("ptr", graph.ptr), ("batch", graph.graph_ids)]
    names = [name for name, _ in held]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"a Data has one array of a name, got two called {', '.join(twice)}")
    arrays = {name: tensor(x) for name, x in held}
    return Data(edge_index=edge_index(graph), num_nodes=graph.n_nodes, **arrays)


def from_dgl(graph: Any) -> Graph | HeteroGraph:
    """Take over a graph of DGL, with all its features of nodes and edges.

    Parameters
    ----------
    graph : dgl.DGLGraph

    Returns
    -------
    Graph, or HeteroGraph where there are several kinds of nodes or edges
        Edges keep their numbers. Tensors are shared through DLPack, detached, on their device.

    Examples
    --------
    >>> import dgl  # doctest: +SKIP
    >>> from rtxarr import geom
    >>> geom.from_dgl(dgl.graph(([0, 1], [1, 2]), num_nodes=4))  # doctest: +SKIP
    Graph(4 nodes, 2 edges)
    """

    def part(relation):
        src, dst = graph.edges(etype=relation, order="eid")
        return Graph.from_edges(
            _array(src),
            _array(dst),
            n_src=graph.num_nodes(relation[0]),
            n_dst=graph.num_nodes(relation[2]),
            edges={name: _array(x) for name, x in graph.edges[relation].data.items()},
        )

    held = {
        kind: {name: _array(x) for name, x in graph.nodes[kind].data.items()}
        for kind in graph.ntypes
    }
    relations = list(graph.canonical_etypes)
    if len(graph.ntypes) == len(relations) == 1:
        return part(relations[0]).replace(nodes=held[graph.ntypes[0]])
    counts = {kind: graph.num_nodes(kind) for kind in graph.ntypes}
    return HeteroGraph({tuple(r): part(r) for r in relations}, counts, nodes=held)


# ----------------------------------------------------------------------------------- RAPIDS


def from_cudf(
    frame: Any, src: str, dst: str, *, ids: Any = None, edges: Sequence[str] = ()
) -> tuple[Graph, Any]:
    """Make a graph of a table of edges, whose nodes may be any integers or strings.

    Parameters
    ----------
    frame : DataFrame of cudf or pandas
    src, dst : str
        The columns with both ends of the edges.
    ids : array or column, shape (n_nodes,), optional
        All nodes, also those without edges, in the order in which they are to be numbered. By
        default those of the edges, sorted.
    edges : sequence of str
        Columns that belong to the edges.

    Returns
    -------
    graph : Graph
        Edge ``i`` is row ``i``.
    ids : array, shape (n_nodes,)
        What node ``i`` is called in the table.

    Raises
    ------
    ValueError
        When an edge has an end that is not in ``ids``, or ``ids`` has one twice, or a column has
        missing values.

    Examples
    --------
    A mapping of names to arrays does as well:

    >>> import numpy as np
    >>> from rtxarr import geom
    >>> table = {"from": np.array([30, 10]), "to": np.array([10, 20]), "w": np.array([1.0, 2.0])}
    >>> geom.from_cudf(table, "from", "to", edges=["w"])
    (Graph(3 nodes, 2 edges, edges: w), array([10, 20, 30]))
    """
    ends = [_ids_of(name, frame[name]) for name in (src, dst)]
    n_edges = ends[0].shape[0]
    xp = _device.namespace(*ends)
    both = _ids_of("src and dst together", xp.concat(ends))
    if ids is None:
        ids, place = xp.unique_inverse(both)
    else:
        ids = _ids_of("ids", ids)
        order = xp.argsort(ids, stable=True)
        known = xp.take(ids, order)
        if bool(xp.any(known[1:] == known[:-1])):
            raise ValueError("ids must hold each node once, got one twice")
        place = xp.searchsorted(known, both)
        if both.shape[0] and ids.shape[0]:
            place = xp.minimum(place, xp.full_like(place, ids.shape[0] - 1))
        strange = both[xp.take(known, place) != both] if ids.shape[0] else both
        if strange.shape[0]:
            raise ValueError(f"ids must hold every node of the edges, got none for {strange[0]}")
        place = xp.take(order, place) if both.shape[0] else place
    graph = Graph.from_edges(
        place[:n_edges],
        place[n_edges:],
        n_nodes=ids.shape[0],
        edges={name: _values(frame[name]) for name in edges},
    )
    return graph, ids


def to_cudf(
    graph: Graph, src: str = "src", dst: str = "dst", *, ids: Any = None, edges: Any = None
) -> Any:
    """Give the edges as a table, with a row for each in the order of their numbers.

    Parameters
    ----------
    graph : Graph
    src, dst : str
        What the columns with both ends are called.
    ids : array or column, shape (n_nodes,), optional
        What the nodes are called in the table, as :func:`from_cudf` gives it; their numbers by
        default. Nodes without edges are in no row, so keep ``ids`` for the way back.
    edges : sequence of str, optional
        Which arrays of the edges become columns; by default all that have one number an edge.

    Returns
    -------
    cudf.DataFrame

    Examples
    --------
    >>> from rtxarr import geom
    >>> frame = geom.to_cudf(geom.load_karate(device="cuda"))  # doctest: +SKIP
    >>> list(frame.columns)  # doctest: +SKIP
    ['src', 'dst']
    """
    try:
        import cudf
    except ImportError:
        raise ImportError(
            "to_cudf needs cudf: install rtxarr[rapids13] or rtxarr[rapids12]"
        ) from None

    columns = {src: graph.src, dst: graph.dst}
    if ids is not None:
        ids, n_nodes = _values(ids), graph.n_nodes
        if ids.shape != (n_nodes,):
            raise ValueError(f"ids must have an entry for each of {n_nodes} nodes, got {ids.shape}")
        columns = {name: ids[place] for name, place in columns.items()}
    if edges is None:
        edges = [name for name, x in graph.edges.items() if raw(x).ndim == 1]
    return cudf.DataFrame(columns | {name: raw(graph.edges[name]) for name in edges})


def from_cugraph(graph: Any) -> tuple[Graph, Any]:
    """Take over a graph of cugraph, isolated nodes and all.

    Parameters
    ----------
    graph : cugraph.Graph on one GPU

    Returns
    -------
    graph : Graph
        Made of the adjacency list, whose indices and weights it shares, so edges are numbered by
        their sources. Weights are ``edges["weight"]``. An edge of an undirected graph is there both
        ways.
    ids : array, shape (n_nodes,)
        What node ``i`` is called in cugraph, where it has renumbered them.

    Examples
    --------
    >>> import cugraph  # doctest: +SKIP
    >>> from rtxarr import geom
    >>> graph, ids = geom.from_cugraph(cugraph.datasets.karate.get_graph())  # doctest: +SKIP
    >>> graph  # doctest: +SKIP
    Graph(34 nodes, 156 edges, edges: weight)
    """
    offsets, indices, weights = graph.view_adj_list()
    offsets, indices = _values(offsets), _values(indices)
    edges = {} if weights is None else {"weight": _values(weights)}
    made = Graph(offsets, indices, n_src=offsets.shape[0] - 1, edges=edges).T
    ids = iota(made, made.n_nodes)
    if getattr(graph, "renumbered", False):
        import cudf

        frame = graph.unrenumber(cudf.DataFrame({"id": ids}), "id", preserve_order=True)
        ids = _values(frame["id"])
    return made, ids


def to_cugraph(graph: Graph, weight: Any = None) -> Any:
    """Give the graph as one of cugraph, made of its adjacency list: isolated nodes stay.

    Parameters
    ----------
    graph : Graph
    weight : array of floating dtype, shape (n_edges,), optional
        By default ``graph.edges["weight"]``, if there is one.

    Returns
    -------
    cugraph.Graph
        Directed; its nodes have the numbers that they have here.

    Examples
    --------
    >>> import cugraph  # doctest: +SKIP
    >>> from rtxarr import geom
    >>> karate = geom.to_cugraph(geom.load_karate(device="cuda"))  # doctest: +SKIP
    >>> cugraph.pagerank(karate)  # doctest: +SKIP
    """
    try:
        import cudf
        import cugraph
    except ImportError:
        raise ImportError(
            "to_cugraph needs cudf and cugraph: install rtxarr[rapids13] or rtxarr[rapids12]"
        ) from None

    if weight is None:
        weight = graph.edges.get("weight")
    n_nodes, out = graph.n_nodes, cugraph.Graph(directed=True)
    xp = _device.namespace(graph.indptr)
    by_source = graph.T
    # Offsets and indices of one type, the smallest that holds both.
    dtype = xp.int32 if max(n_nodes, graph.n_edges) < 2**31 else xp.int64
    out.from_cudf_adjlist(
        cudf.Series(xp.astype(by_source.indptr, dtype)),
        cudf.Series(xp.astype(by_source.indices, dtype, copy=False)),
        None if weight is None else cudf.Series(by_source.stored(raw(weight))),
    )
    return out


# ------------------------------------------------------------------------------- their arrays


def _array(x):
    """Share the memory of a tensor."""
    return ops.from_dlpack(x.detach() if hasattr(x, "detach") else x)


def _values(column):
    """Give the array of a column of a table, or an array as it is."""
    if _device.is_array(column):
        return column
    return column.values if _device.is_array(column.values) else np.asarray(column)


def _ids_of(name, column):
    values = _values(column)
    if values.dtype.kind not in "iuOUT":
        raise TypeError(
            f"{name} must hold integers or strings, got {values.dtype}: a column of integers with "
            "missing values is one of floats"
        )
    if values.dtype.kind == "O" and any(x is None or x != x for x in values):
        raise ValueError(f"{name} must have no missing values, got some")
    return values


def _host(x):
    return np.asarray(_device.to_device(raw(x), "cpu"))
