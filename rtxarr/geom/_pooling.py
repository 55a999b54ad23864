"""Pooling: one row for each graph of a batch, or fewer nodes for each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rtxarr import _device, ops
from rtxarr.autograd._tape import raw
from rtxarr.geom._batch import Batch, check_pointers
from rtxarr.geom._layer import Layer
from rtxarr.geom._subgraph import iota, subgraph
from rtxarr.nn import LSTM, Buffer, Module, Parameter
from rtxarr.nn.initializers import uniform
from rtxarr.ops._check import check_sizes

__all__ = [
    "SAGPooling",
    "Set2Set",
    "TopKPooling",
    "global_attention",
    "global_max",
    "global_mean",
    "global_sum",
]


def global_sum(x: Any, ptr: Any) -> Any:
    """Add up the rows of each graph.

    Parameters
    ----------
    x : array or Tensor, shape (n_nodes, ...)
    ptr : array of int64, shape (n_graphs + 1,)
        As :attr:`Batch.ptr`. It says how many graphs there are, so that those without nodes count,
        wherever they are. On a GPU its values are read, to refuse those that do not rise from 0 to
        ``n_nodes``, inside :func:`rtxarr.testing.check_values` only.

    Returns
    -------
    array or Tensor, shape (n_graphs, ...)
        Zero for a graph without nodes.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> geom.global_sum(np.array([1.0, 2.0, 3.0]), np.array([0, 2, 2, 3]))
    array([3., 0., 3.])
    """
    return ops.segment_sum(x, _checked(x, ptr))


def global_mean(x: Any, ptr: Any) -> Any:
    """Average the rows of each graph; see :func:`global_sum`.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> geom.global_mean(np.array([1.0, 2.0, 3.0]), np.array([0, 2, 2, 3]))
    array([1.5, 0. , 3. ])
    """
    return ops.segment_mean(x, _checked(x, ptr))


def global_max(x: Any, ptr: Any, *, empty: float = 0.0) -> Any:
    """Give the largest entries of each graph; see :func:`global_sum`.

    Parameters
    ----------
    x : array or Tensor, shape (n_nodes, ...)
    ptr : array of int64, shape (n_graphs + 1,)
    empty : float, default 0
        For a graph without nodes. Infinities among ``x`` stay.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> geom.global_max(np.array([-1.0, -2.0, -np.inf]), np.array([0, 2, 2, 3]))
    array([ -1.,   0., -inf])
    """
    out = ops.segment_max(x, _checked(x, ptr))
    has_nodes = _column(ptr[1:] > ptr[:-1], x.ndim)
    return ops.where(has_nodes, out, empty)


def global_attention(x: Any, score: Any, ptr: Any) -> Any:
    r"""Average the rows of each graph with the softmax of their scores as weights.

    .. math:: y_g = \sum_{i \in g} \frac{e^{s_i}}{\sum_{j \in g} e^{s_j}} x_i

    Parameters
    ----------
    x : array or Tensor, shape (n_nodes, n_features)
    score : array or Tensor, shape (n_nodes,) or (n_nodes, n_features)
        Nodes of score -inf have no weight; a graph of them alone gives zero.
    ptr : array of int64, shape (n_graphs + 1,)

    Returns
    -------
    array or Tensor, shape (n_graphs, n_features)

    References
    ----------
    Li, Tarlow, Brockschmidt and Zemel, "Gated Graph Sequence Neural Networks", 2016,
    arXiv:1511.05493, eq. 7.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> x, score = np.array([[1.0], [3.0], [5.0]]), np.array([0.0, 0.0, -np.inf])
    >>> geom.global_attention(x, score, np.array([0, 2, 3]))
    array([[2.],
           [0.]])
    """
    if score.shape != x.shape and score.shape != x.shape[:1]:
        raise ValueError(f"score must have shape {x.shape[:1]} or {x.shape}, got {score.shape}")
    weight = _softmax(score, _checked(x, ptr))
    return ops.segment_sum(x * _column(weight, x.ndim), ptr)


def _softmax(score, ptr):
    """Softmax within segments; zero throughout where all are -inf."""
    owner = _owner(ptr, score.shape[0])
    xp = _device.namespace(ptr)
    top = ops.segment_max(raw(score), ptr)
    top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
    power = ops.exp(score - xp.take(top, owner, axis=0))
    total = ops.segment_sum(power, ptr)
    return power / ops.take(ops.where(total == 0, 1, total), owner, axis=0)


def _owner(ptr, n):
    xp = _device.namespace(ptr)
    return xp.searchsorted(ptr, iota(ptr, n), side="right") - 1


def _column(x, ndim):
    return ops.reshape(x, (*x.shape, *(1,) * (ndim - x.ndim)))


def _checked(x, ptr):
    """Give ``ptr`` if it fits ``x``."""
    check_pointers(raw(ptr), x.shape[0])
    return ptr


class Set2Set(Layer):
    r"""Pooling by attention whose query is made step by step by an LSTM.

    Each step takes :math:`q = \mathrm{LSTM}(q^*)` and then :math:`q^* = [q, r]`, where :math:`r` is
    :func:`global_attention` of the rows with the scores :math:`x_i \cdot q`.

    Parameters
    ----------
    in_channels : int
    n_steps : int
    dtype, device, generator
        Of the LSTM; see :class:`rtxarr.nn.LSTM`.

    References
    ----------
    Vinyals, Bengio and Kudlur, "Order Matters: Sequence to Sequence for Sets", 2016,
    arXiv:1511.06391, eq. 3 to 7.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> pool = geom.Set2Set(4, n_steps=3)
    >>> pool(np.ones((5, 4), np.float32), np.array([0, 2, 2, 5])).shape
    (3, 8)
    """

    _dgl_names = {}

    def __init__(self, in_channels: int, *, n_steps: int, **options: Any):
        check_sizes(in_channels=in_channels, n_steps=n_steps)
        self.in_channels, self.n_steps = in_channels, n_steps
        self.lstm = LSTM(2 * in_channels, in_channels, **options)

    def forward(self, x, ptr):
        if x.ndim != 2 or x.shape[1] != self.in_channels:
            raise ValueError(f"{self!r} got x of shape {x.shape}")
        owner = _owner(_checked(x, ptr), x.shape[0])
        n_graphs = ptr.shape[0] - 1
        xp = _device.namespace(raw(x))
        query = xp.zeros((n_graphs, 2 * self.in_channels), dtype=x.dtype)
        state = None
        for _ in range(self.n_steps):
            out, state = self.lstm(query[:, None, :], state)
            q = out[:, 0, :]
            score = ops.sum(x * ops.take(q, owner, axis=0), axis=1)
            query = ops.concat([q, global_attention(x, score, ptr)], axis=1)
        return query

    def __repr__(self):
        return f"Set2Set({self.in_channels}, n_steps={self.n_steps})"


class TopKPooling(Layer):
    r"""Keep the nodes of each graph whose features lie most along a learned direction.

    .. math:: s = \tanh(X p / \lVert p \rVert), \qquad X' = (X \odot s)_{\mathrm{top}}

    Parameters
    ----------
    in_channels : int
    ratio : float in (0, 1] or int >= 1, default 0.5
        A float keeps ``ceil(ratio * n)`` of the ``n`` nodes of a graph, an int so many at most.
    dtype, device, generator
        Of the parameter.

    Attributes
    ----------
    weight : Parameter, shape (in_channels,)

    References
    ----------
    Gao and Ji, "Graph U-Nets", 2019, arXiv:1905.05178, eq. 2.
    Cangea et al., "Towards Sparse Hierarchical Graph Classifiers", 2018, arXiv:1811.01287.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> pair = geom.Graph.from_edges(np.array([0]), np.array([1]), n_nodes=2)
    >>> batch = geom.Batch.from_graphs([pair, pair])
    >>> pooled, x, nodes = geom.TopKPooling(3, ratio=1)(batch, np.ones((4, 3), np.float32))
    >>> pooled, x.shape, nodes
    (Batch(2 graphs, 2 nodes, 0 edges), (2, 3), array([0, 2]))
    """

    def __init__(
        self,
        in_channels: int,
        *,
        ratio: float | int = 0.5,
        dtype: Any = None,
        device: Any = None,
        generator: Any = None,
    ):
        check_sizes(in_channels=in_channels)
        self.in_channels, self.ratio = in_channels, _check_ratio(ratio)
        bound = 1 / math.sqrt(in_channels)
        self.weight = Parameter(
            (in_channels,),
            init=uniform(-bound, bound),
            dtype=dtype,
            device=device,
            generator=generator,
        )

    def forward(self, batch: Batch, x: Any) -> tuple[Batch, Any, Any]:
        """Give the smaller batch, its features, and which nodes they were.

        Of equal scores the node with the smaller number comes first. The nodes of a graph come by
        falling score, and the arrays of nodes, edges and graphs with them.
        """
        score = ops.tanh(x @ self.weight / ops.sqrt(ops.sum(self.weight * self.weight)))
        return _keep_top(batch, x, score, self.ratio)

    def _from_pyg(self, arrays):
        return {name.removeprefix("select."): x[0] for name, x in arrays.items()}

    def __repr__(self):
        return f"TopKPooling({self.in_channels}, ratio={self.ratio})"


class SAGPooling(Layer):
    r"""Keep the nodes of each graph that a graph layer scores highest.

    .. math:: s = \tanh(\pm \mathrm{gnn}(G, X)), \qquad X' = (X \odot s)_{\mathrm{top}}

    Parameters
    ----------
    gnn : Module or callable
        ``gnn(graph, x)`` gives one number a node, shape (n_nodes, 1) or (n_nodes,).
    ratio : float in (0, 1] or int >= 1, default 0.5
        As for :class:`TopKPooling`.

    Attributes
    ----------
    gnn : Module or callable
    sign : Buffer, shape (1,)
        One, but for loaded parameters of PyTorch Geometric's layer, which has a weight here of
        which only the sign matters.

    References
    ----------
    Lee, Lee and Kang, "Self-Attention Graph Pooling", 2019, arXiv:1904.08082, eq. 3.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> pair = geom.Graph.from_edges(np.array([0]), np.array([1]), n_nodes=2)
    >>> pool = geom.SAGPooling(lambda graph, x: (graph @ x)[:, 0])
    >>> pool(geom.Batch.from_graphs([pair]), np.ones((2, 3)))[2]
    array([1])
    """

    def __init__(self, gnn: Callable, *, ratio: float | int = 0.5):
        self.gnn, self.ratio = gnn, _check_ratio(ratio)
        self.sign = Buffer([1.0])

    def forward(self, batch: Batch, x: Any) -> tuple[Batch, Any, Any]:
        """Do as :meth:`TopKPooling.forward` does."""
        score = ops.reshape(self.gnn(batch, x), (batch.n_nodes,))
        score = ops.tanh(ops.astype(self.sign, score.dtype) * score)
        return _keep_top(batch, x, score, self.ratio)

    def _from_pyg(self, arrays):
        if "select.weight" in arrays:  # of one number, of which the size is divided out
            weight = arrays.pop("select.weight")
            arrays["sign"] = (weight[0] / abs(weight[0])).astype(self.sign.dtype)
        return arrays

    def __repr__(self):
        return Module.__repr__(self)


def _check_ratio(ratio):
    fits = 0 < ratio <= 1 if isinstance(ratio, float) else isinstance(ratio, int) and ratio >= 1
    if not fits:
        raise ValueError(f"ratio must be a float in (0, 1] or an int >= 1, got {ratio!r}")
    return ratio


def _keep_top(batch, x, score, ratio):
    ptr, values = batch.ptr, raw(score)
    xp = _device.namespace(ptr, values)
    size = ptr[1:] - ptr[:-1]
    if isinstance(ratio, int):
        count = xp.minimum(size, xp.full_like(size, ratio))
    else:
        share = xp.astype(size, xp.float64) * ratio
        count = xp.astype(xp.ceil(share - 1e-9), xp.int64)  # 0.1 * 30 is a little more than 3
    order = xp.argsort(-values, stable=True)
    order = xp.take(order, xp.argsort(xp.take(batch.graph_ids, order), stable=True))
    owner = batch.graph_ids  # also of `order`, which keeps graphs in their order
    rank = iota(ptr, batch.n_nodes) - xp.take(ptr, owner)
    nodes = xp.take(order, xp.nonzero(rank < xp.take(count, owner))[0])
    kept = xp.concat([xp.zeros_like(ptr[:1]), xp.cumulative_sum(count)])
    x = ops.take(x, nodes, axis=0) * _column(ops.take(score, nodes, axis=0), x.ndim)
    return Batch(subgraph(batch, nodes), kept, graph=batch.graph), x, nodes
