"""A base for layers that are written as functions of an edge and its two nodes."""

from collections.abc import Sequence
from typing import Any, ClassVar

from rtxarr.autograd._tape import raw
from rtxarr.autograd._tree import flatten, unflatten
from rtxarr.geom import _messages
from rtxarr.geom._aggregate import aggregate
from rtxarr.nn import Module
from rtxarr.ops import concat, reshape

__all__ = ["MessagePassing"]


class MessagePassing(Module):
    """A layer that sends a message along each edge and reduces those that reach a node.

    Write :meth:`message`, and :meth:`update` or :meth:`aggregate` if need be, with any functions of
    ``rtxarr`` and any parameters. The messages of some destinations are made at a time, and again
    in the backward pass, so that there is never an array of all of them.

    Parameters
    ----------
    aggr : str or sequence of str, default "sum"
        An operation of :func:`rtxarr.geom.aggregate`. The results of several are concatenated along
        the last axis.

    Attributes
    ----------
    empty : float, default 0
        What destinations without edges get.
    width : int, default 1
        How many elements :meth:`message` makes for an edge at its widest, if more than it gets:
        with hidden layers. Only memory depends on it.

    Notes
    -----
    :meth:`message` must give each edge its message whatever other edges there are: statistics over
    a batch belong into :meth:`update`. Random numbers are fine.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import geom
    >>> class Flow(geom.MessagePassing):
    ...     def message(self, src, dst, edge):
    ...         return rx.tanh(src - dst) * edge
    ...
    ...     def update(self, out, dst):
    ...         return dst + out
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 0]), n_nodes=3)
    >>> layer = Flow(aggr="mean")
    >>> layer(graph, np.array([[1.0], [1.0], [5.0]]), np.array([[1.0], [2.0]]))
    array([[1.],
           [1.],
           [5.]])

    References
    ----------
    Gilmer et al., "Neural Message Passing for Quantum Chemistry", 2017, arXiv:1704.01212, eq. 1
    and 2.
    """

    aggr: str | tuple[str, ...] = "sum"
    empty: float = 0.0
    width: int = 1
    _is_plain: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        own = (cls.message, cls.aggregate)
        cls._is_plain = own == (MessagePassing.message, MessagePassing.aggregate)

    def __init__(self, *, aggr: str | Sequence[str] = "sum"):
        self.aggr = aggr if isinstance(aggr, str) else tuple(aggr)
        for op in (self.aggr,) if isinstance(self.aggr, str) else self.aggr:
            _messages.check_op(op)

    def message(self, src: Any, dst: Any, edge: Any) -> Any:
        """Give the messages of some edges; here, the rows of their sources.

        Parameters
        ----------
        src, dst, edge : array or Tensor, shape (n, ...)
            The rows of the sources, of the destinations and of the edges themselves; or tuples,
            lists or dicts of such arrays, as they were given to :meth:`propagate`.

        Returns
        -------
        array or Tensor, shape (n, ...)
        """
        return src

    def aggregate(self, messages: Any, indptr: Any) -> Any:
        """Reduce the messages ``indptr[i]:indptr[i + 1]`` of each of some destinations ``i``."""
        return self._by_op(lambda op: _messages.reduce_messages(op, messages, indptr, self.empty))

    def update(self, out: Any, dst: Any) -> Any:
        """Give the result for destinations, from what :meth:`aggregate` gave and their rows."""
        return out

    def propagate(self, graph: Any, x: Any, edge_attr: Any = None) -> Any:
        """Send messages along all edges.

        Parameters
        ----------
        graph : Graph
        x : array or Tensor, shape (n_nodes, ...), or a list or dict of them
            What nodes have. For sources and destinations that differ, a pair: a tuple of what the
            sources have and what the destinations have.
        edge_attr : array or Tensor, shape (n_edges, ...), or nested ones, optional
            What edges have, in the order of their numbers.

        Returns
        -------
        array or Tensor, shape (n_dst, ...)
        """
        src, dst = pair(graph, x)
        check_rows("edge_attr", edge_attr, graph.n_edges, "edges")
        if self._is_plain and not isinstance(src, (tuple, list, dict)):
            out = self._by_op(lambda op: aggregate(graph, src, op, empty=self.empty))
        else:
            message, edge = self.message, edge_attr
            if graph.mask is not None:
                message, edge = self._masked_message, (edge_attr, graph.mask)
            out = _messages.map_reduce(
                graph, message, self.aggregate, src, dst, edge, width=self.width
            )
        return self.update(out, dst)

    def _masked_message(self, src, dst, edge):
        edge, mask = edge
        messages = self.message(src, dst, edge)
        return messages * reshape(mask, (-1,) + (1,) * (messages.ndim - 1))

    def _by_op(self, reduced):
        if isinstance(self.aggr, str):
            return reduced(self.aggr)
        return concat([reduced(op) for op in self.aggr], axis=-1)

    def forward(self, graph: Any, x: Any, edge_attr: Any = None) -> Any:
        return self.propagate(graph, x, edge_attr)


def pair(graph: Any, x: Any) -> tuple[Any, Any]:
    """Give what sources and destinations have, out of the argument of a layer."""
    if isinstance(x, tuple):
        if len(x) != 2:
            raise ValueError(f"x must be an array or a pair for a layer, got {len(x)} arrays")
        src, dst = x
    else:
        if not graph.is_nested:
            raise ValueError(
                f"x must be a pair, of {graph.n_src} sources and {graph.n_dst} destinations, for a "
                "bipartite graph"
            )
        src = dst = x
        if not graph.is_square:
            check_rows("x", x, graph.n_src, "sources")
            first = [part if part is None else part[: graph.n_dst] for part in flatten(x)[0]]
            dst = unflatten(flatten(x)[1], first)
    check_rows("x", src, graph.n_src, "sources")
    check_rows("x", dst, graph.n_dst, "destinations")
    return src, dst


def check_rows(name: str, tree: Any, n: int, kind: str) -> None:
    """Refuse arrays that do not have a row for each node or edge."""
    for x in flatten(tree)[0]:
        if x is not None and (raw(x).ndim < 1 or x.shape[0] != n):
            raise ValueError(f"{name} must have a row for each of {n} {kind}, got {x.shape}")
