"""Random graphs whose degrees are spread as those of many real ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from rtxarr import _device
from rtxarr.geom._sampling import _integer
from rtxarr.random import Generator

__all__ = ["RMATEdges"]


class RMATEdges:
    """Edges of a recursive-matrix graph in chunks, for :func:`from_chunks`.

    Each edge falls, ``scale`` times, into one of the four quarters of what is left of the adjacency
    matrix. Few nodes get many edges; several edges between two nodes and loops occur.

    Parameters
    ----------
    scale : int
        The graph has ``2**scale`` nodes.
    edge_factor : int, default 16
        It has so many times as many edges.
    chances : tuple of four floats, default (0.57, 0.19, 0.19, 0.05)
        Of the quarters: small sources and destinations, small sources and large destinations, the
        other way round, and large ones.
    rename : bool, default True
        Whether nodes get their numbers by lot; otherwise small numbers have the most edges.
    size : int, default 2**24
        Edges of a chunk.
    seed : int, default 0
        With the other arguments it gives the same edges on every device.
    device : str or Device, default the current device

    References
    ----------
    Chakrabarti, Zhan and Faloutsos, "R-MAT: A Recursive Model for Graph Mining", 2004,
    doi:10.1137/1.9781611972740.43, section 3.1.

    Examples
    --------
    >>> from rtxarr import geom
    >>> edges = geom.RMATEdges(10, 8, device="cpu")
    >>> edges.n_nodes, edges.n_edges
    (1024, 8192)
    >>> graph = geom.from_chunks(edges, n_nodes=edges.n_nodes, device="cpu")
    >>> int(graph.in_degrees.max()) > 100
    True
    """

    def __init__(
        self,
        scale: int,
        edge_factor: int = 16,
        *,
        chances: tuple[float, float, float, float] = (0.57, 0.19, 0.19, 0.05),
        rename: bool = True,
        size: int = 2**24,
        seed: int = 0,
        device: Any = None,
    ):
        self.scale = _integer("scale", scale, 0, 48)
        self.edge_factor = _integer("edge_factor", edge_factor, 0, 2**15)
        if len(chances) != 4 or min(chances) < 0 or not math.isclose(sum(chances), 1, abs_tol=1e-6):
            raise ValueError(f"chances must be four that sum to 1, got {chances}")
        self.chances = tuple(chances)
        self.rename = rename
        self.size = _integer("size", size, 1, 2**62)
        self.seed = _integer("seed", seed, 0, 2**64)
        self.device = _device.device(device)

    @property
    def n_nodes(self) -> int:
        return 1 << self.scale

    @property
    def n_edges(self) -> int:
        return self.edge_factor << self.scale

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        names = None
        if self.rename:
            names = Generator(self.seed, key=(0,)).permutation(self.n_nodes, device=self.device)
        for i, start in enumerate(range(0, self.n_edges, self.size)):
            n = min(self.size, self.n_edges - start)
            ends = self._draw(n, Generator(self.seed, key=(1, i)))
            if names is not None:
                xp = _device.namespace(names)
                ends = tuple(xp.take(names, x) for x in ends)
            yield ends

    def _draw(self, n, rng):
        first, second, third, _ = itertools.accumulate(self.chances)
        with self.device:
            xp = _device.namespace()
            src, dst = (xp.zeros(n, dtype=xp.int64) for _ in range(2))
            for _ in range(self.scale):
                u = rng.uniform(n, dtype="float32", device=self.device)
                src = 2 * src + (u >= second)
                dst = 2 * dst + (((u >= first) & (u < second)) | (u >= third))
        return src, dst

    def __repr__(self) -> str:
        return f"RMATEdges({self.scale}, {self.edge_factor}, seed={self.seed})"
