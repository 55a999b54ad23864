"""Batches of seeds with their neighbourhoods, in a seeded order and resumable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr.autograd._tape import raw
from rtxarr.data import DataLoader
from rtxarr.geom._sampling import Sample, _HopSampler, check_nodes, on_host

__all__ = ["NeighborLoader"]


class NeighborLoader(DataLoader):
    """Go through seeds in batches, sampling around each and gathering what belongs to the nodes.

    Parameters
    ----------
    sampler : NeighborSampler or LaborSampler
    seeds : array of int, shape (n_seeds,), or of bool, shape (n_nodes,)
        The nodes to train on.
    batch_size : int
    nodes : mapping of str to array, optional
        Gathered for all nodes of a sample: arrays with a row for each node of the graph, in the
        host's memory or on the GPU. The graph's own ``nodes`` by default.
    targets : mapping of str to array, optional
        Gathered for the seeds alone.
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

    def __init__(
        self,
        sampler: _HopSampler,
        seeds: Any,
        batch_size: int,
        *,
        nodes: Mapping[str, Any] | None = None,
        targets: Mapping[str, Any] | None = None,
        pin: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        prefetch: int = 2,
    ):
        graph = sampler.graph
        if _device.is_array(seeds) and seeds.dtype == np.bool:
            if seeds.shape != (graph.n_nodes,):
                raise ValueError(
                    f"seeds must have an entry for each of {graph.n_nodes} nodes, got shape "
                    f"{seeds.shape}"
                )
            (seeds,) = _device.namespace(seeds).nonzero(seeds)
        seeds = check_nodes("seeds", seeds, graph)
        super().__init__(
            seeds,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            device=graph.device,
            prefetch=prefetch,
        )
        self.sampler = sampler
        self.nodes = _rows("nodes", graph.nodes if nodes is None else nodes, graph.n_nodes)
        self.targets = _rows("targets", targets or {}, graph.n_nodes)
        if pin and _device.is_device_array(graph.indptr):
            self.nodes, self.targets = (
                {name: _pinned(x, graph.device) for name, x in arrays.items()}
                for arrays in (self.nodes, self.targets)
            )
        if both := self.nodes.keys() & self.targets.keys():
            raise ValueError(f"nodes and targets must have different names, got {sorted(both)}")

    def __repr__(self) -> str:
        return f"NeighborLoader({self.sampler!r}, {self.n_samples} seeds, {self.batch_size})"

    def _make(self, job: tuple[int, np.ndarray]) -> tuple[int, Any]:
        """Make a batch; the loader's loop, order and state are those of DataLoader."""
        epoch, indices = job
        with self.device:
            xp = _device.namespace(self.dataset)
            seeds = xp.take(self.dataset, xp.asarray(indices))
            sample = self.sampler(seeds, epoch=epoch)
            return len(indices), (sample, self._gather(sample))

    def _gather(self, sample: Sample) -> dict[str, Any]:
        wanted = [(name, x, sample.nodes) for name, x in self.nodes.items()]
        wanted += [(name, x, sample.seeds) for name, x in self.targets.items()]
        found = {}
        for name, x, nodes in wanted:
            if not _device.is_device_array(x) and _device.is_device_array(nodes):
                nodes = np.asarray(on_host(nodes))  # the features stay in the host's memory
            rows = _device.namespace(x).take(x, nodes, axis=0)
            found[name] = _device.to_device(rows, self.device)
        return found


def _pinned(x, device):
    """Give an array of the host as one of the GPU, in page-locked memory."""
    if _device.is_device_array(x) or x.size == 0:
        return _device.to_device(x, device)
    pinned = _device.empty_pinned(x.shape, x.dtype)
    pinned[...] = x
    return _device.mapped(pinned, device)


def _rows(name, arrays, n_nodes):
    arrays = {key: raw(x) for key, x in arrays.items()}
    for key, x in arrays.items():
        if not _device.is_array(x) or x.ndim < 1 or x.shape[0] != n_nodes:
            raise ValueError(
                f"{name}[{key!r}] must be an array with a row for each of {n_nodes} nodes, got "
                f"{getattr(x, 'shape', type(x).__name__)}"
            )
    return arrays
