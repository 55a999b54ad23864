"""Splits of nodes and edges, and pairs of nodes without an edge."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr.autograd._tape import raw
from rtxarr.geom._graph import Graph, plain
from rtxarr.geom._subgraph import edge_subgraph, iota
from rtxarr.ops._check import generator_or_default

__all__ = [
    "LinkSplit",
    "Links",
    "negative_sampling",
    "random_link_split",
    "random_node_split",
]


def random_node_split(
    n_nodes: int,
    *,
    val: int | float,
    test: int | float,
    labels: Any = None,
    per_class: int | None = None,
    generator: Any = None,
) -> tuple[Any, Any, Any]:
    """Split nodes at random for training, validation and testing.

    Parameters
    ----------
    n_nodes : int
    val, test : int or float
        How many nodes, or which share of those that are split.
    labels : array of int, shape (n_nodes,), optional
        If given, only nodes with a label of at least 0 are split.
    per_class : int, optional
        If given, training has so many nodes of each class instead of all that is left.
    generator : Generator, default :func:`rtxarr.random.default_generator`

    Returns
    -------
    train, val, test : arrays of int64, shape (n,)
        Rising, without common nodes.

    References
    ----------
    Shchur et al., "Pitfalls of Graph Neural Network Evaluation", 2018, arXiv:1811.05868, section 3,
    on splits with equally many training nodes of each class.

    Examples
    --------
    >>> from rtxarr import geom
    >>> from rtxarr.random import Generator
    >>> parts = geom.random_node_split(10, val=0.2, test=3, generator=Generator(0))
    >>> [len(part) for part in parts]
    [5, 2, 3]
    """
    generator = generator_or_default(generator)
    if labels is None:
        if per_class is not None:
            raise ValueError("per_class needs labels, got none")
        order = generator.permutation(n_nodes)
    else:
        labels = plain(raw(labels))
        if tuple(labels.shape) != (n_nodes,):
            raise ValueError(f"labels must have shape ({n_nodes},), got {labels.shape}")
        (known,) = _device.namespace(labels).nonzero(labels >= 0)
        order = generator.permutation(known)
    xp = _device.namespace(order)
    n = order.shape[0]
    n_val, n_test = _sizes(val, test, n)
    chosen = order[:0]
    if per_class is not None:
        by_class = xp.argsort(xp.take(labels, order), stable=True)
        ordered = xp.take(xp.take(labels, order), by_class)
        rank = iota(ordered, n) - xp.searchsorted(ordered, ordered)
        first = xp.sort(xp.take(by_class, xp.nonzero(rank < per_class)[0]))
        short = int(xp.sum(rank == per_class - 1)) < _n_distinct(xp, ordered)
        if per_class < 1 or short:
            raise ValueError(
                "per_class must be at least 1 and no more than the smallest class has, got "
                f"{per_class}"
            )
        chosen = xp.take(order, first)
        rest = xp.ones_like(order, dtype=xp.bool)
        rest[first] = False
        order = xp.take(order, xp.nonzero(rest)[0])
    if n_val + n_test > order.shape[0]:
        raise ValueError(
            f"val and test must leave training some of {order.shape[0]} nodes, got {n_val} and "
            f"{n_test}"
        )
    if per_class is None:
        chosen = order[n_val + n_test :]
    return xp.sort(chosen), xp.sort(order[:n_val]), xp.sort(order[n_val : n_val + n_test])


def _n_distinct(xp, ordered):
    return int(xp.sum(ordered[1:] != ordered[:-1])) + min(ordered.shape[0], 1)


def _sizes(val, test, n):
    """Give both counts; that of shares which make up the whole is the whole."""
    val, test = _size("val", val, n), _size("test", test, n)
    n_val = math.floor(val + 0.5)
    return n_val, math.floor(val + test + 0.5) - n_val


def _size(name, part, n):
    if isinstance(part, float) and 0 <= part <= 1:
        return part * n
    if isinstance(part, (int, np.integer)) and not isinstance(part, bool) and part >= 0:
        return int(part)
    raise ValueError(f"{name} must be a count or a share in [0, 1], got {part!r}")


@dataclasses.dataclass(frozen=True)
class Links:
    """Pairs of nodes with an edge, and pairs without.

    Attributes
    ----------
    positive, negative : array of int64, shape (2, n_pairs)
        Sources and destinations.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> from rtxarr.random import Generator
    >>> src = np.arange(10)
    >>> ring = geom.Graph.from_edges(src, (src + 1) % 10, n_nodes=10)
    >>> split = geom.random_link_split(ring, val=0.2, test=0.3, generator=Generator(0))
    >>> split.val.positive.shape, split.val.negative.shape
    ((2, 2), (2, 2))
    """

    positive: Any
    negative: Any


@dataclasses.dataclass(frozen=True)
class LinkSplit:
    """What :func:`random_link_split` gives.

    Attributes
    ----------
    graph : Graph
        All nodes, and the edges that are in neither validation nor test: for passing messages.
    train : array of int64, shape (2, n_pairs)
        The pairs of nodes with an edge of ``graph``, each once and without loops. Draw others to
        compare them with by :func:`negative_sampling` of ``graph``, anew in each epoch.
    val, test : Links
        The negative pairs of both have no edge in the whole graph, and none is there twice.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> from rtxarr.random import Generator
    >>> src = np.arange(10)
    >>> ring = geom.Graph.from_edges(src, (src + 1) % 10, n_nodes=10)
    >>> split = geom.random_link_split(ring, val=0.2, test=0.3, generator=Generator(0))
    >>> split.train.shape, split.test.positive.shape
    ((2, 5), (2, 3))
    """

    graph: Graph
    train: Any
    val: Links
    test: Links


def random_link_split(
    graph: Graph,
    *,
    val: int | float,
    test: int | float,
    undirected: bool = False,
    negatives: float = 1.0,
    generator: Any = None,
) -> LinkSplit:
    """Split pairs of nodes with an edge at random, and draw pairs without one for the tests.

    Parameters
    ----------
    graph : Graph
        Several edges between two nodes are kept together, in one part. Loops stay in training and
        are no pairs. May be bipartite.
    val, test : int or float
        How many pairs, or which share of them.
    undirected : bool, default False
        Whether the edges from ``a`` to ``b`` and from ``b`` to ``a`` are kept together too; pairs
        then come once, the smaller node first.
    negatives : float, default 1
        For each pair of validation and test, how many without an edge.
    generator : Generator, default :func:`rtxarr.random.default_generator`

    Returns
    -------
    LinkSplit

    Raises
    ------
    ValueError
        When there are not enough pairs without an edge.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> from rtxarr.random import Generator
    >>> src = np.arange(10)
    >>> ring = geom.Graph.from_edges(src, (src + 1) % 10, n_nodes=10)
    >>> split = geom.random_link_split(ring, val=0.2, test=0.3, generator=Generator(0))
    >>> split.graph, split.val.positive.shape, split.test.negative.shape
    (Graph(10 nodes, 5 edges), (2, 2), (2, 3))
    """
    if not negatives >= 0:
        raise ValueError(f"negatives must be at least 0, got {negatives}")
    generator = generator_or_default(generator)
    cells = _Cells(graph, undirected)
    xp = _device.namespace(graph.indptr)
    edge_keys, is_pair = cells.keys(graph.src, graph.dst)
    pairs = _distinct(xp, edge_keys[is_pair])
    n_pairs = pairs.shape[0]
    n_val, n_test = _sizes(val, test, n_pairs)
    if n_val + n_test > n_pairs:
        raise ValueError(
            f"val and test must be at most the {n_pairs} pairs, got {n_val} and {n_test}"
        )
    order = generator.permutation(n_pairs, device=graph.device)
    part = xp.zeros_like(order)  # 0 for training
    part[order[:n_val]] = 1
    part[order[n_val : n_val + n_test]] = 2
    kept = xp.ones_like(edge_keys, dtype=xp.bool)
    if n_pairs:
        place = xp.minimum(xp.searchsorted(pairs, edge_keys), xp.full_like(edge_keys, n_pairs - 1))
        kept = ~is_pair | (xp.take(part, place) == 0)
    n_negative = tuple(math.floor(negatives * n + 0.5) for n in (n_val, n_test))
    free = cells.draw_free(sum(n_negative), pairs, generator)
    held_out = [
        Links(cells.pairs(xp.take(pairs, xp.nonzero(part == which)[0])), cells.pairs(keys))
        for which, keys in ((1, free[: n_negative[0]]), (2, free[n_negative[0] :]))
    ]
    train = cells.pairs(xp.take(pairs, xp.nonzero(part == 0)[0]))
    return LinkSplit(edge_subgraph(graph, kept), train, *held_out)


def negative_sampling(
    graph: Graph,
    n: int,
    *,
    undirected: bool = False,
    loops: bool = False,
    generator: Any = None,
) -> Any:
    """Draw pairs of nodes without an edge, each pair as likely and at most once.

    Parameters
    ----------
    graph : Graph
        May be bipartite.
    n : int
    undirected : bool, default False
        Leave out pairs with an edge from the destination to the source too; pairs then come with
        the smaller node first.
    loops : bool, default False
        Whether a node may be paired with itself.
    generator : Generator, default :func:`rtxarr.random.default_generator`

    Returns
    -------
    array of int64, shape (2, n)
        Sources and destinations. Nothing is drawn in vain: the numbers drawn count the pairs
        without an edge, so full graphs take no longer.

    Raises
    ------
    ValueError
        When there are fewer than ``n`` such pairs.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> from rtxarr.random import Generator
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 2]), n_nodes=3)
    >>> geom.negative_sampling(graph, 1, undirected=True, generator=Generator(0))
    array([[0],
           [2]])
    """
    cells = _Cells(graph, undirected, loops)
    keys, is_pair = cells.keys(graph.src, graph.dst)
    taken = _distinct(_device.namespace(keys), keys[is_pair])
    return cells.pairs(cells.draw_free(n, taken, generator_or_default(generator)))


class _Cells:
    """The pairs of nodes that may have an edge, numbered without gaps.

    With ``n`` nodes the pair of ``s`` and ``d`` has, directed, the number ``d * n + s``, or
    ``d * (n - 1)`` and the place of ``s`` among the other nodes where loops do not count;
    undirected, for ``s < d``, the number ``d * (d - 1) / 2 + s``, or ``d * (d + 1) / 2 + s`` with
    loops.
    """

    def __init__(self, graph: Graph, undirected: bool, loops: bool = False):
        if undirected and not graph.is_square:
            raise ValueError(f"undirected pairs are of one kind of nodes, got {graph}")
        self.graph, self.undirected = graph, undirected
        self.loops = loops or not graph.is_square  # of two kinds, no node is the other
        n_src, n_dst = graph.n_src, graph.n_dst
        if undirected:
            self.n = n_dst * (n_dst + 1) // 2 if self.loops else n_dst * (n_dst - 1) // 2
        else:
            self.n = n_dst * n_src if self.loops else n_dst * (n_src - 1)
        if self.n >= 2**63:
            raise ValueError(f"the pairs of {graph} cannot be numbered with 64 bits")

    def keys(self, src: Any, dst: Any) -> tuple[Any, Any]:
        """Give the number of each edge's pair, and whether it is one."""
        xp = _device.namespace(src)
        is_pair = xp.ones_like(src, dtype=xp.bool) if self.loops else src != dst
        if self.undirected:
            low, high = xp.minimum(src, dst), xp.maximum(src, dst)
            return high * (high + (1 if self.loops else -1)) // 2 + low, is_pair
        if self.loops:
            return dst * self.graph.n_src + src, is_pair
        return dst * (self.graph.n_src - 1) + src - xp.astype(src > dst, xp.int64), is_pair

    def pairs(self, keys: Any) -> Any:
        xp = _device.namespace(keys)
        if self.undirected:
            # The largest d with d * (d -+ 1) / 2 <= key; the root may be one off in float64.
            shift = 1 if self.loops else -1
            d = xp.astype((xp.sqrt(8.0 * xp.astype(keys, xp.float64) + 1) - shift) / 2, xp.int64)
            d = d - xp.astype(d * (d + shift) // 2 > keys, xp.int64)
            d = d + xp.astype((d + 1) * (d + 1 + shift) // 2 <= keys, xp.int64)
            return xp.stack([keys - d * (d + shift) // 2, d])
        width = self.graph.n_src - (0 if self.loops else 1)
        dst = keys // max(width, 1)
        src = keys - dst * width
        if not self.loops:
            src = src + xp.astype(src >= dst, xp.int64)
        return xp.stack([src, dst])

    def draw_free(self, n: int, taken: Any, generator: Any) -> Any:
        """Draw ``n`` numbers that are not among ``taken``, which rise."""
        n_free = self.n - taken.shape[0]
        if not 0 <= n <= n_free:
            raise ValueError(
                f"n must be at most {n_free}, the number of pairs without an edge, got {n}"
            )
        xp = _device.namespace(taken)
        # Number j of the free ones is j + i where i taken ones come before it.
        drawn = _draw_distinct(xp, n, n_free, generator, self.graph.device)
        before = taken - iota(taken, taken.shape[0])
        return drawn + xp.searchsorted(before, drawn, side="right")


def _draw_distinct(xp, n, high, generator, device):
    """Draw ``n`` different numbers below ``high``, all sets and orders as likely."""
    if high < 4 * n or n == 0:
        return generator.permutation(high if n else 0, device=device)[:n]
    drawn = generator.integers(0, high, (0,), device=device)
    while True:
        more = generator.integers(0, high, (n + n // 4 + 8,), device=device)
        drawn = xp.concat([drawn, more])
        order = xp.argsort(drawn, stable=True)
        ordered = xp.take(drawn, order)
        new = xp.concat([xp.ones_like(order[:1], dtype=xp.bool), ordered[1:] != ordered[:-1]])
        drawn = xp.take(drawn, xp.sort(order[new]))  # in the order in which they came first
        if drawn.shape[0] >= n:
            return drawn[:n]


def _distinct(xp, keys):
    keys = xp.sort(keys)
    new = xp.concat([xp.ones_like(keys[:1], dtype=xp.bool), keys[1:] != keys[:-1]])
    return keys[new]
