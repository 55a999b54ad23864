"""Batches of seeds with their neighbourhoods, in a seeded order and resumable."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr.autograd._tape import raw
from rtxarr.data import DataLoader
from rtxarr.geom._graph import plain
from rtxarr.geom._hetero_sampling import HeteroNeighborSampler
from rtxarr.geom._links import LinkSampler, _check_edges
from rtxarr.geom._sampling import _HopSampler, _integer, check_nodes, on_host
from rtxarr.geom._temporal import TemporalSampler

__all__ = ["HeteroNeighborLoader", "LinkLoader", "NeighborLoader"]


_BULK = 16  # batches whose samples a GPU draws in one go


class _SampleLoader(DataLoader):
    """Goes through items in batches, samples around each, and gathers rows of arrays."""

    _items: str
    _batch: Callable[[Any, Any], Any]

    def __init__(self, sampler, items, batch_size, device, pin, bulk, options):
        super().__init__(items, batch_size, device=device, **options)
        self.sampler = sampler
        is_gpu = _device.is_device_array(items)
        self._pin = pin and is_gpu
        self.bulk = _integer("bulk", (_BULK if is_gpu else 1) if bulk is None else bulk, 1, 2**31)

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({self.sampler!r}, {self.n_samples} {self._items}, {self.batch_size})"

    def _jobs(self, epoch: int, position: int) -> Iterator[Any]:
        """Yield the samples of the batches, drawn for some of them at a time."""
        batches = (indices for _, indices in super()._jobs(epoch, position))
        while group := list(itertools.islice(batches, self.bulk)):
            with self.device:
                xp = _device.namespace(self.dataset)
                indices = xp.asarray(np.concatenate(group))
                items = xp.take(self.dataset, indices)
                samples = self._draw(items, indices, epoch)
            ends = np.cumsum([len(one) for one in group])
            for one, end, sample in zip(group, ends.tolist(), samples, strict=True):
                yield items[end - len(one) : end], sample

    def _draw(self, items, indices, epoch):
        if items.shape[0] <= self.batch_size:
            return [self.sampler(items, epoch=epoch)]
        return self.sampler.bulk(items, self.batch_size, epoch=epoch)

    def _make(self, job: Any) -> tuple[int, Any]:
        """Make a batch; the loader's loop, order and state are those of DataLoader."""
        items, sample = job
        with self.device:
            return items.shape[0], self._batch(items, sample)

    def _held(self, name, arrays, n, what="node"):
        """Check arrays with a row for each node, or each edge, and put them where they are read."""
        arrays = {key: raw(x) for key, x in (arrays or {}).items()}
        for key, x in arrays.items():
            if not _device.is_array(x) or x.ndim < 1 or x.shape[0] != n:
                raise ValueError(
                    f"{name}[{key!r}] must be an array with a row for each of {n} {what}s, got "
                    f"{getattr(x, 'shape', type(x).__name__)}"
                )
        return {key: self._put(x) if self._pin else x for key, x in arrays.items()}

    def _put(self, x):
        """Give an array of the host as one of the GPU, in page-locked memory."""
        if _device.is_device_array(x) or x.size == 0:
            return _device.to_device(x, self.device)
        pinned = _device.empty_pinned(x.shape, x.dtype)
        pinned[...] = x
        return _device.mapped(pinned, self.device)

    def _gather(self, arrays, rows):
        found, there = {}, None
        for name, x in arrays.items():
            place = rows
            if not _device.is_device_array(x) and _device.is_device_array(rows):
                # These stay in the host's memory, which is told once which rows are wanted.
                there = np.asarray(on_host(rows)) if there is None else there
                place = there
            gathered = _device.namespace(x).take(x, place, axis=0)
            found[name] = _device.to_device(gathered, self.device)
        return found


def _chosen(seeds, graph, name="seeds", n_nodes=None):
    """Give seeds, also of a mask, as numbers where the graph is."""
    n = graph.n_nodes if n_nodes is None else n_nodes
    if _device.is_array(seeds) and seeds.dtype == np.bool:
        if seeds.shape != (n,):
            raise ValueError(
                f"{name} must have an entry for each of {n} nodes, got shape {seeds.shape}"
            )
        (seeds,) = _device.namespace(seeds).nonzero(seeds)
    return check_nodes(name, seeds, graph, n_nodes=n)


def _require_different(nodes, targets, names="nodes and targets"):
    if both := nodes.keys() & targets.keys():
        raise ValueError(f"{names} must have different names, got {sorted(both)}")


class NeighborLoader(_SampleLoader):
    """Go through seeds in batches, sampling around each and gathering what belongs to the nodes.

    Parameters
    ----------
    sampler : NeighborSampler, LaborSampler or TemporalSampler
    seeds : array of int, shape (n_seeds,), or of bool, shape (n_nodes,)
        The nodes to train on.
    batch_size : int
    times : array of numbers, shape (n_seeds,), for a TemporalSampler alone
        The moment of each seed.
    nodes : mapping of str to array, optional
        Gathered for all nodes of a sample: arrays with a row for each node of the graph, in the
        host's memory or on the GPU. The graph's own ``nodes`` by default.
    targets : mapping of str to array, optional
        Gathered for the seeds alone.
    bulk : int, default 16 on a GPU and 1 on the CPU
        For how many batches samples are drawn in one go, which changes nothing in them.
    pin : bool, default False
        Copy arrays in the host's memory to page-locked memory once, from which the GPU takes the
        rows that it needs by itself. Otherwise the host gathers them for it, and waits for the
        sample to know which. Without a meaning where the graph is in the host's memory.
    shuffle, seed, drop_last, prefetch
        As of :class:`~rtxarr.data.DataLoader`; so are ``state_dict``, ``len`` and ``epoch``.

    Notes
    -----
    Gives ``(sample, arrays)``: a :class:`Sample`, and a dict with the gathered arrays by name,
    where the graph is. What is sampled follows from the sampler's seed, the epoch and the seeds: a
    loader that goes on from a ``state_dict`` gives the same batches. With a graph in the host's
    memory a thread works ahead.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([1, 2, 3]), np.array([0, 0, 2]), n_nodes=4)
    >>> sampler = geom.NeighborSampler(graph, [2])
    >>> x, y = np.arange(4.0)[:, None], np.arange(4)
    >>> loader = geom.NeighborLoader(
    ...     sampler, np.arange(4), 2, nodes={"x": x}, targets={"y": y}, shuffle=False
    ... )
    >>> for sample, arrays in loader:
    ...     print(sample.nodes, arrays["y"], (sample.graphs[0] @ arrays["x"])[:, 0])
    [0 1 2] [0 1] [3. 0.]
    [2 3] [2 3] [3. 0.]
    """

    _items = "seeds"

    def __init__(
        self,
        sampler: _HopSampler | TemporalSampler,
        seeds: Any,
        batch_size: int,
        *,
        times: Any = None,
        nodes: Mapping[str, Any] | None = None,
        targets: Mapping[str, Any] | None = None,
        bulk: int | None = None,
        pin: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        prefetch: int = 2,
    ):
        graph = sampler.graph
        options = {
            "shuffle": shuffle, "seed": seed, "drop_last": drop_last, "prefetch": prefetch,
        }  # fmt: skip
        seeds = _chosen(seeds, graph)
        super().__init__(sampler, seeds, batch_size, graph.device, pin, bulk, options)
        if isinstance(sampler, TemporalSampler) != (times is not None):
            raise ValueError(
                "times must be given for a TemporalSampler, and for no other sampler, got "
                f"{sampler!r} and {'none' if times is None else 'some'}"
            )
        self.times = None
        if times is not None:
            times = plain(raw(times))
            if not _device.is_array(times) or times.shape != seeds.shape:
                got = getattr(times, "shape", type(times).__name__)
                raise ValueError(f"times must have shape {seeds.shape}, one a seed, got {got}")
            self.times = _device.to_device(times, graph.device)
        self.nodes = self._held("nodes", graph.nodes if nodes is None else nodes, graph.n_nodes)
        self.targets = self._held("targets", targets, graph.n_nodes)
        _require_different(self.nodes, self.targets)

    def _draw(self, items, indices, epoch):
        if self.times is None:
            return super()._draw(items, indices, epoch)
        return self.sampler.bulk(items, self.times[indices], self.batch_size, epoch=epoch)

    def _batch(self, seeds, sample):
        found = self._gather(self.nodes, sample.nodes) | self._gather(self.targets, seeds)
        return sample, found


class LinkLoader(_SampleLoader):
    """Go through edges in batches, with pairs that are none, sampling around the ends of all.

    Parameters
    ----------
    sampler : LinkSampler
    edges : array of int, shape (n_edges,), or of bool, shape (sampler.graph.n_edges,)
        The numbers of the edges to train on.
    batch_size : int
        Edges of a batch.
    nodes : mapping of str to array, optional
        Gathered for all nodes of a sample; see :class:`NeighborLoader`. The own ``nodes`` of the
        graph that is sampled from by default.
    links : mapping of str to array, optional
        Gathered for the edges of a batch, the pairs that are none left out: arrays with a row for
        each edge of ``sampler.graph``.
    bulk, pin, shuffle, seed, drop_last, prefetch
        As of :class:`NeighborLoader`.

    Notes
    -----
    Gives ``(sample, arrays)``: a :class:`LinkSample`, and a dict with the gathered arrays.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 0, 2]), np.array([1, 2, 3]), n_nodes=5)
    >>> sampler = geom.LinkSampler(geom.NeighborSampler(graph, [-1]))
    >>> loader = geom.LinkLoader(
    ...     sampler, np.array([2, 0]), 1, nodes={"x": np.arange(5.0)}, shuffle=False
    ... )
    >>> for sample, arrays in loader:  # the edge, and its source with another node
    ...     print(arrays["x"][sample.src], arrays["x"][sample.dst][:1], sample.labels)
    [2. 2.] [3.] [1. 0.]
    [0. 0.] [1.] [1. 0.]
    """

    _items = "edges"

    def __init__(
        self,
        sampler: LinkSampler,
        edges: Any,
        batch_size: int,
        *,
        nodes: Mapping[str, Any] | None = None,
        links: Mapping[str, Any] | None = None,
        bulk: int | None = None,
        pin: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        prefetch: int = 2,
    ):
        graph, around = sampler.graph, sampler.sampler.graph
        options = {
            "shuffle": shuffle, "seed": seed, "drop_last": drop_last, "prefetch": prefetch,
        }  # fmt: skip
        if _device.is_array(edges) and edges.dtype == np.bool:
            if edges.shape != (graph.n_edges,):
                raise ValueError(
                    f"edges must have an entry for each of {graph.n_edges} edges, got shape "
                    f"{edges.shape}"
                )
            (edges,) = _device.namespace(edges).nonzero(edges)
        edges = _check_edges(edges, graph)
        super().__init__(sampler, edges, batch_size, graph.device, pin, bulk, options)
        self.nodes = self._held("nodes", around.nodes if nodes is None else nodes, graph.n_nodes)
        self.links = self._held("links", links, graph.n_edges, "edge")
        _require_different(self.nodes, self.links, "nodes and links")

    def _batch(self, edges, sample):
        found = self._gather(self.nodes, sample.sample.nodes) | self._gather(self.links, edges)
        return sample, found


class HeteroNeighborLoader(_SampleLoader):
    """Go through seeds of one kind in batches, sampling over several kinds of nodes and edges.

    Parameters
    ----------
    sampler : HeteroNeighborSampler
    kind : str
        Of the seeds.
    seeds : array of int, shape (n_seeds,), or of bool, shape (n_nodes,)
    batch_size : int
    nodes : mapping of str to mapping of str to array, optional
        For kinds of nodes, arrays gathered for all nodes of that kind of a sample; see
        :class:`NeighborLoader`. The graph's own ``nodes`` by default.
    targets : mapping of str to array, optional
        Gathered for the seeds alone.
    bulk, pin, shuffle, seed, drop_last, prefetch
        As of :class:`NeighborLoader`.

    Notes
    -----
    Gives ``(sample, arrays, targets)``: a :class:`HeteroSample`, the gathered arrays by kind and
    name, and those of the seeds by name.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.HeteroGraph.from_edges(
    ...     {("author", "writes", "paper"): (np.array([0, 1, 1]), np.array([0, 0, 1]))},
    ...     n_nodes={"author": 2, "paper": 2},
    ...     nodes={"author": {"age": np.array([30, 50])}},
    ... )
    >>> sampler = geom.HeteroNeighborSampler(graph, [-1])
    >>> loader = geom.HeteroNeighborLoader(
    ...     sampler, "paper", np.arange(2), 1, targets={"y": np.array([7, 8])}, shuffle=False
    ... )
    >>> for sample, arrays, targets in loader:
    ...     print(sample.nodes["author"], arrays["author"]["age"], targets["y"])
    [0 1] [30 50] [7]
    [1] [50] [8]
    """

    _items = "seeds"

    def __init__(
        self,
        sampler: HeteroNeighborSampler,
        kind: str,
        seeds: Any,
        batch_size: int,
        *,
        nodes: Mapping[str, Mapping[str, Any]] | None = None,
        targets: Mapping[str, Any] | None = None,
        bulk: int | None = None,
        pin: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        prefetch: int = 2,
    ):
        graph, counts = sampler.graph, sampler.graph.n_nodes
        options = {
            "shuffle": shuffle, "seed": seed, "drop_last": drop_last, "prefetch": prefetch,
        }  # fmt: skip
        nodes = graph.nodes if nodes is None else nodes
        for name in (kind, *nodes):
            if name not in counts:
                raise ValueError(f"kinds must be of {', '.join(counts)}, got {name!r}")
        some = next(iter(graph.graphs.values()))
        seeds = _chosen(seeds, some, n_nodes=counts[kind])
        super().__init__(sampler, seeds, batch_size, some.device, pin, bulk, options)
        self.kind = kind
        self.nodes = {
            name: self._held(f"nodes[{name!r}]", arrays, counts[name])
            for name, arrays in nodes.items()
        }
        self.targets = self._held("targets", targets, counts[kind])

    def _draw(self, items, indices, epoch):
        return self.sampler.bulk(self.kind, items, self.batch_size, epoch=epoch)

    def _batch(self, seeds, sample):
        found = {name: self._gather(x, sample.nodes[name]) for name, x in self.nodes.items()}
        return sample, found, self._gather(self.targets, seeds)
