"""Whole graphs, layer by layer: with features in the host's memory, or over several parts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from rtxarr import _device
from rtxarr._checks import check_range
from rtxarr.autograd import no_grad
from rtxarr.autograd._tape import raw
from rtxarr.dtypes import isdtype
from rtxarr.geom._blocks import Block, Cut, cut, edge_arrays, on_host
from rtxarr.geom._graph import Graph
from rtxarr.geom._stream import parts_on
from rtxarr.ops import concat, take

__all__ = ["LocalExchange", "PartitionedGraph", "Shard", "infer_layerwise"]

_LIMIT = {"cpu": 2**28, "cuda": 2**32}


@no_grad()
def infer_layerwise(
    layers: Sequence[Callable[[Graph, Any], Any]],
    graph: Graph,
    x: Any,
    *,
    device: Any = None,
    memory_limit: int | None = None,
    out: Any = None,
    scratch: str | os.PathLike | None = None,
    progress: bool | Callable[[int, float], None] = False,
) -> Any:
    """Run layers over a whole graph whose features stay in the host's memory.

    Each layer is done for all nodes before the next one, for a run of destinations at a time: the
    rows of their sources are brought to the device, and their results back.

    Parameters
    ----------
    layers : sequence of callables
        Each is called as ``layer(block, x)``, with a graph of some destinations and all edges that
        end there, its arrays of edges among ``block.edges``, and the rows of its sources, the
        destinations first. It gives a row for each destination: a layer of this package, or a
        function with one in it, such as ``lambda g, x: rx.relu(conv(g, x))``. Call ``model.eval()``
        before.
    graph : Graph
        Its sources are its destinations. Kept in the host's memory.
    x : NumPy array, shape (n_nodes, ...)
        May be mapped from a file.
    device : Device or str, default that of ``graph``
        Where the layers run, and their parameters are.
    memory_limit : int, bytes, default 256 MiB on the CPU and 4 GiB on a GPU
        Of the rows of sources on the device, of two runs on a GPU: one is copied, through pinned
        memory, while the other is worked on. A destination whose sources need more is done all the
        same.
    out : NumPy array, optional
        Where the last layer's result goes, also mapped from a file.
    scratch : path-like, optional
        A folder for files with the results of the layers between, which are in memory otherwise.
    progress : bool or callable, default False
        Whether to write it to the standard error; or called as ``progress(layer, fraction)``.

    Returns
    -------
    NumPy array, shape (n_nodes, ...)

    Notes
    -----
    Each node gets what the layers give on the whole graph: sums over edges have the same order and
    the same bits, GCN's weights are those of the whole graph. The products of matrices may round
    otherwise, as their numbers of rows differ. A layer that goes several steps, such as
    :class:`APPNP`, is refused, having no sources for the second one.

    References
    ----------
    Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs", 2017,
    arXiv:1706.02216, algorithm 1: its outer loop.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> ring = geom.Graph.from_edges(np.arange(6), np.arange(1, 7) % 6, n_nodes=6)
    >>> layers = [lambda graph, x: graph @ x] * 2
    >>> geom.infer_layerwise(layers, ring, np.arange(6.0)[:, None], memory_limit=64)[:, 0]
    array([4., 5., 0., 1., 2., 3.])
    """
    graph_device = graph.device
    graph = on_host(graph)
    if not isinstance(x, np.ndarray) or x.ndim < 1 or x.shape[0] != graph.n_nodes:
        raise ValueError(
            f"x must be a NumPy array with a row for each of {graph.n_nodes} nodes, got "
            f"{getattr(x, 'shape', type(x).__name__)}"
        )
    place = graph_device if device is None else _device.device(device)
    limit = _LIMIT[getattr(place, "kind", "cpu")] if memory_limit is None else memory_limit
    report = _reporter(progress, len(layers))
    for number, layer in enumerate(layers):
        last = number == len(layers) - 1
        path = None if last or scratch is None else Path(scratch) / f"layer-{number + 1}.npy"
        size = int(limit // max(1, 2 * x.itemsize * int(np.prod(x.shape[1:]))))
        x = _one_layer(
            layer, graph, x, place, size, out if last else None, path, partial(report, number)
        )
    return x


def _one_layer(layer, graph, x, place, size, out, path, report):
    runs = _runs(graph, max(1, size))

    def make(run):
        part = cut(graph, np.arange(*run))
        return part, x[part.sources], edge_arrays(graph, part)

    for run, (part, rows, edges) in zip(runs, _moved(place, make, runs), strict=True):
        found = raw(layer(Block.of(graph, part, place, edges), rows))
        if found.shape[:1] != (run[1] - run[0],):
            raise ValueError(
                f"a layer must give a row for each of {run[1] - run[0]} destinations, got shape "
                f"{tuple(found.shape)}"
            )
        if run[0] == 0:
            out = _target(out, path, (graph.n_nodes, *found.shape[1:]), found.dtype)
        out[run[0] : run[1]] = _device.to_device(found, "cpu")
        report(run[1] / max(1, graph.n_nodes))
    return out


def _moved(place, make, runs):
    """Yield cuts, which stay on the host, with their arrays on the device."""
    kept: list[Cut] = []

    def arrays(run):
        part, rows, edges = make(run)
        kept.append(part)
        return part.indptr, part.indices, part.edge_ids, rows, edges

    for indptr, indices, ids, rows, edges in parts_on(place, arrays, runs):
        part = kept.pop(0)._replace(indptr=indptr, indices=indices, edge_ids=ids)
        yield part, rows, edges


def _target(out, path, shape, dtype):
    if path is not None:
        return np.lib.format.open_memmap(path, "w+", dtype=dtype, shape=shape)
    if out is None:
        return np.empty(shape, dtype=dtype)
    if not isinstance(out, np.ndarray) or out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out must be a NumPy array of shape {shape} and {dtype}, got {out!r}")
    return out


def _runs(graph, size):
    """Cut the destinations into runs with up to ``size`` of them and their edges."""
    work = graph.indptr + np.arange(graph.n_dst + 1)
    runs, row = [], 0
    while row < graph.n_dst or not runs:
        stop = int(np.searchsorted(work, work[row] + size, side="right")) - 1
        stop = min(max(stop, row + 1), graph.n_dst)
        runs.append((row, stop))
        row = max(stop, row + 1)
    return runs


def _reporter(progress, n_layers):
    if callable(progress):
        return progress
    if not progress:
        return lambda number, fraction: None

    def report(number, fraction):
        end = "\n" if fraction >= 1 and number == n_layers - 1 else ""
        text = f"\rlayer {number + 1} of {n_layers} {100 * fraction:4.0f} %{end}"
        sys.stderr.write(text)
        sys.stderr.flush()

    return report


# -------------------------------------------------------------------------------- several parts


class Exchange(Protocol):
    """What carries rows between the parts of a graph.

    Attributes
    ----------
    n_parts : int
    local : sequence of int
        The parts that this process has.
    """

    n_parts: int
    local: Sequence[int]

    def __call__(self, pieces: Mapping[int, list[Any]]) -> dict[int, list[Any]]:
        """Give each local part, from each part, what that has for it.

        ``pieces[p][q]`` is what local part ``p`` has for part ``q``, one array for each of
        ``n_parts``; of the result ``[p][q]`` is what ``p`` got from ``q``.
        """
        ...


class LocalExchange:
    """All parts in one process, on one device.

    Parameters
    ----------
    n_parts : int
    """

    def __init__(self, n_parts: int):
        self.n_parts = n_parts
        self.local = range(n_parts)

    def __call__(self, pieces: Mapping[int, list[Any]]) -> dict[int, list[Any]]:
        return {p: [pieces[q][p] for q in self.local] for p in self.local}


class Shard(NamedTuple):
    """One part of a graph.

    Attributes
    ----------
    graph : Graph
        The part's nodes as destinations, with all their edges. Its sources are the part's nodes and
        then the halo.
    nodes : array of int64, shape (n_dst,)
        The part's nodes, rising.
    halo : array of int64, shape (n_src - n_dst,)
        Nodes of other parts, by part, rising.
    sends : tuple of array of int64
        For each part the places, among ``nodes``, of those in its halo.
    """

    graph: Graph
    nodes: Any
    halo: Any
    sends: tuple[Any, ...]


class PartitionedGraph:
    """A graph in parts that exchange the rows of their borders before each layer.

    Parameters
    ----------
    graph : Graph
        Its sources are its destinations.
    parts : array of int, shape (n_nodes,)
        The part of each node, as :func:`partition` gives it.
    exchange : object, default :class:`LocalExchange`
        What carries rows between parts, and says which parts this process has: ``n_parts``,
        ``local`` and a call with ``{part: [array for each part]}`` that gives the same of what was
        received.

    Attributes
    ----------
    shards : dict of int to Shard
        Those of this process, on the device of ``graph``.
    n_parts : int

    Notes
    -----
    Each node gets what it gets on the whole graph; see :func:`infer_layerwise`. Gradients go
    through :meth:`propagate`, so a model may be trained on parts too.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> ring = geom.Graph.from_edges(np.arange(6), np.arange(1, 7) % 6, n_nodes=6)
    >>> parts = geom.PartitionedGraph(ring, geom.partition(ring, 2, method="ranges"))
    >>> parts
    PartitionedGraph(6 nodes in 2 parts, 2 rows exchanged)
    >>> parts.infer([lambda graph, x: graph @ x], np.arange(6.0))
    array([5., 0., 1., 2., 3., 4.])
    """

    def __init__(self, graph: Graph, parts: Any, *, exchange: Exchange | None = None):
        place = graph.device
        if not _device.is_array(parts) or not isdtype(parts.dtype, "integral"):
            raise TypeError(f"parts must be an array of integers, got {parts!r}")
        if parts.shape != (graph.n_dst,):
            raise ValueError(
                f"parts must have an entry for each of {graph.n_dst} nodes, got shape {parts.shape}"
            )
        parts = _device.to_device(parts, "cpu")
        whole = on_host(graph)
        n_parts = int(parts.max(initial=0)) + 1
        self.exchange = LocalExchange(n_parts) if exchange is None else exchange
        self.n_parts, self.n_nodes, self.device = self.exchange.n_parts, graph.n_nodes, place
        check_range("parts", parts, 0, self.n_parts)
        cuts = [cut(whole, np.flatnonzero(parts == p), parts) for p in range(self.n_parts)]
        self.shards: dict[int, Shard] = {}
        for p in self.exchange.local:
            own = cuts[p].own
            sends = (np.searchsorted(own, c.halo[parts[c.halo] == p]) for c in cuts)
            edges = edge_arrays(whole, cuts[p])
            moved = {name: _device.to_device(x, place) for name, x in edges.items()}
            self.shards[p] = Shard(
                Block.of(whole, cuts[p], place, moved),
                _device.to_device(own, place),
                _device.to_device(cuts[p].halo, place),
                tuple(_device.to_device(x, place) for x in sends),
            )

    def __repr__(self):
        n_rows = sum(shard.halo.shape[0] for shard in self.shards.values())
        return (
            f"PartitionedGraph({self.n_nodes} nodes in {self.n_parts} parts, {n_rows} rows "
            "exchanged)"
        )

    def scatter(self, x: Any) -> dict[int, Any]:
        """Give the rows of each part of this process, of an array or Tensor of all nodes."""
        if x.shape[0] != self.n_nodes:
            raise ValueError(f"x must have a row for each of {self.n_nodes} nodes, got {x.shape}")
        return {p: take(x, shard.nodes, axis=0) for p, shard in self.shards.items()}

    def gather(self, rows: Mapping[int, Any]) -> Any:
        """Put the rows of all parts together; for a process that has all parts."""
        if len(self.shards) != self.n_parts:
            raise RuntimeError(f"this process has {len(self.shards)} of {self.n_parts} parts")
        nodes = concat([shard.nodes for shard in self.shards.values()])
        xp = _device.namespace(nodes)
        return take(concat([rows[p] for p in self.shards]), xp.argsort(nodes), axis=0)

    def propagate(self, layer: Callable[[Graph, Any], Any], rows: Mapping[int, Any]) -> dict:
        """Exchange borders, and run a layer on each part of this process.

        Parameters
        ----------
        layer : callable
            Called as ``layer(graph, x)`` with the graph of a :class:`Shard` and the rows of its
            sources.
        rows : dict of int to array or Tensor
            Of each part's nodes.

        Returns
        -------
        dict of int to array or Tensor
            New rows of each part's nodes.
        """
        got = self.exchange(
            {
                p: [take(rows[p], places, axis=0) for places in shard.sends]
                for p, shard in self.shards.items()
            }
        )
        return {
            p: layer(shard.graph, concat([rows[p], *got[p]])) for p, shard in self.shards.items()
        }

    @no_grad()
    def infer(self, layers: Sequence[Callable[[Graph, Any], Any]], x: Any) -> Any:
        """Run layers one after the other; see :func:`infer_layerwise` for what they may be.

        Parameters
        ----------
        layers : sequence of callables
        x : array or Tensor, shape (n_nodes, ...)

        Returns
        -------
        array or Tensor, shape (n_nodes, ...)
            Of all nodes; where several processes share the parts, use :meth:`scatter` and
            :meth:`propagate` instead.
        """
        rows = self.scatter(x)
        for layer in layers:
            rows = self.propagate(layer, rows)
        return self.gather(rows)
