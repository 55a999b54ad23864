"""One edge from each node to itself: the same rule for all layers and all kinds of graphs.

A graph with loops has exactly one of each node. Of those it had before the last one by number
stays, with its weight; nodes that had none get one. Loops come after the other edges, by node.
"""

from typing import Any, NamedTuple

from rtxarr import _device
from rtxarr.geom import _edges
from rtxarr.geom._graph import Graph
from rtxarr.ops import astype, concat, reshape, scatter_max, take, where


class Looped(NamedTuple):
    """A graph with one loop at each node, and where its edges come from."""

    graph: Graph
    kept: Any  # numbers of the edges that are no loops, or None for all
    loops: Any  # for each node the number of the loop that stays, -1 for none; or None without any

    def weight(self, weight: Any, fill: float) -> Any:
        """Give the weights of the new graph's edges; new loops get ``fill``."""
        xp = _device.namespace(self.graph.indptr)
        new = xp.full(self.graph.n_dst, fill, dtype=weight.dtype)
        if self.loops is None:
            return concat([weight, new])
        old = take(weight, xp.where(self.loops < 0, 0, self.loops), axis=0)
        return concat([take(weight, self.kept, axis=0), where(self.loops < 0, new, old)])

    def features(self, x: Any) -> Any:
        """Give edge features; loops get the mean over the other edges that end at their node."""
        xp = _device.namespace(self.graph.indptr)
        kept = x if self.kept is None else take(x, self.kept, axis=0)
        none = xp.zeros((self.graph.n_dst, *x.shape[1:]), dtype=x.dtype)
        total = _edges.collect(concat([kept, none]), graph=self.graph)
        count = xp.where(self.graph.in_degrees > 1, self.graph.in_degrees - 1, 1)
        count = astype(reshape(count, (-1,) + (1,) * (x.ndim - 1)), x.dtype)
        return concat([kept, total / count])


def looped(graph: Graph) -> Looped:
    """Give the graph with one loop at each node; made once for each graph."""
    if not graph.is_nested:
        raise ValueError(
            "loops need sources and destinations that are the same nodes, got a bipartite graph: "
            "use add_self_loops=False"
        )
    return graph.once("looped", lambda: _with_loops(graph))


def _with_loops(graph):
    xp = _device.namespace(graph.indptr)
    n = graph.n_dst
    nodes = graph.once("nodes", lambda: xp.cumulative_sum(xp.ones_like(graph.in_degrees)) - 1)
    src, dst = graph.src, graph.dst
    (numbers,) = xp.nonzero(src == dst)
    kept = loops = None
    if numbers.shape[0]:
        (kept,) = xp.nonzero(src != dst)
        loops = scatter_max(numbers, xp.take(src, numbers), n)
        loops = xp.where(loops < 0, -1, loops)
        src, dst = xp.take(src, kept), xp.take(dst, kept)
    src, dst = xp.concat([src, nodes]), xp.concat([dst, nodes])
    new = Graph._of_edges(src, dst, graph.n_src, n)
    return Looped(new, kept, loops)
