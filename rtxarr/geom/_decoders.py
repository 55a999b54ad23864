"""Scores of links: logits of pairs of nodes, made of what stands for the nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rtxarr._checks import check_range_if_asked
from rtxarr.autograd._tape import raw
from rtxarr.geom._layer import Layer, linear, made, sizes
from rtxarr.geom._messages import root
from rtxarr.nn import Parameter
from rtxarr.nn.initializers import uniform, xavier_uniform
from rtxarr.ops import abs, concat, cos, relu, reshape, sin, sum, take

__all__ = ["ComplEx", "DistMult", "DotDecoder", "MLPDecoder", "RotatE", "TransE"]


def _ends(x, pairs):
    """Give the rows of the sources and of the destinations of pairs."""
    x_src, x_dst = x if isinstance(x, tuple) else (x, x)
    if len(pairs) != 2 or raw(pairs[0]).shape != raw(pairs[1]).shape:
        raise ValueError(
            "pairs must be sources and destinations, as many of each, got "
            f"{getattr(pairs, 'shape', len(pairs))}"
        )
    for ends, nodes in ((x_src, pairs[0]), (x_dst, pairs[1])):
        check_range_if_asked("pairs", raw(nodes), 0, ends.shape[0])
    return take(x_src, pairs[0], axis=0), take(x_dst, pairs[1], axis=0)


class DotDecoder(Layer):
    """The logit of a link is ``x_s . x_d``.

    Notes
    -----
    Call it as ``decoder(x, pairs)``, with ``x`` of shape (n_nodes, n_features), or a pair for
    sources and destinations, and integers of shape (2, n_pairs): sources and destinations. It gives
    shape (n_pairs,).

    References
    ----------
    Kipf and Welling, "Variational Graph Auto-Encoders", 2016, arXiv:1611.07308, eq. 2.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> x = np.array([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]])
    >>> geom.DotDecoder()(x, np.array([[0, 1], [1, 2]]))
    array([2., 3.])
    """

    _shown = ()

    def forward(self, x: Any, pairs: Any) -> Any:
        src, dst = _ends(x, pairs)
        return sum(src * dst, axis=-1)


class MLPDecoder(Layer):
    """The logit of a link is ``w . relu(W (x_s, x_d) + b) + c``.

    Parameters
    ----------
    in_channels : int, or pair of int for sources and destinations
    hidden_channels : int
    dtype : dtype, default float32
    device : Device or str, default the current one
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For the first values.

    Notes
    -----
    Call it as :class:`DotDecoder`. It tells ``(s, d)`` from ``(d, s)``.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import geom
    >>> decoder = geom.MLPDecoder(8, 16)
    >>> decoder(rx.ones((5, 8), dtype="float32"), np.array([[0, 1, 4], [1, 2, 0]])).shape
    (3,)
    """

    _shown = ("in_channels", "hidden_channels")

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        hidden_channels: int,
        *,
        dtype: Any = "float32",
        device: Any = None,
        generator: Any = None,
    ):
        self.in_channels, self.hidden_channels = in_channels, hidden_channels
        options = made(dtype, device, generator)
        n_src, n_dst = sizes(in_channels)
        self.hidden = linear(n_src + n_dst, hidden_channels, **options)
        self.out = linear(hidden_channels, 1, **options)

    def forward(self, x: Any, pairs: Any) -> Any:
        hidden = relu(self.hidden(concat(_ends(x, pairs), axis=-1)))
        return reshape(self.out(hidden), (-1,))


_EMBEDDINGS = ("rel_emb.weight", "rel_emb_im.weight")


class _Relational(Layer):
    """Something that stands for each relation, and a score of two nodes and that."""

    _shown: tuple[str, ...] = ("n_features", "n_relations")
    _even = False
    _score: Callable[[Any, Any, Any], Any]

    def __init__(
        self,
        n_features: int,
        n_relations: int,
        *,
        dtype: Any = "float32",
        device: Any = None,
        generator: Any = None,
    ):
        if self._even and n_features % 2:
            raise ValueError(
                f"n_features must be even, halves of complex numbers, got {n_features}"
            )
        self.n_features, self.n_relations = n_features, n_relations
        shape, init = self._relations()
        self.weight = Parameter(shape, init=init, **made(dtype, device, generator))

    def _relations(self):
        init = xavier_uniform(in_axis=1, out_axis=0)
        return (self.n_relations, self.n_features), init

    def forward(self, x: Any, pairs: Any, edge_type: Any) -> Any:
        src, dst = _ends(x, pairs)
        check_range_if_asked("edge_type", raw(edge_type), 0, self.n_relations)
        return self._score(src, take(self.weight, edge_type, axis=0), dst)

    def _from_pyg(self, arrays):
        known = {name: x for name, x in arrays.items() if not name.startswith("node_emb")}
        parts = [known.pop(name) for name in _EMBEDDINGS if name in known]
        return known | ({"weight": concat(parts, axis=1)} if parts else {})

    def _halves(self, x):
        half = self.n_features // 2
        return x[:, :half], x[:, half:]


class DistMult(_Relational):
    """The logit of a link of kind ``r`` is ``sum_i x_si w_ri x_di``: the same both ways.

    Parameters
    ----------
    n_features : int
    n_relations : int
        Kinds of links.
    dtype : dtype, default float32
    device : Device or str, default the current one
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For the first values.

    Attributes
    ----------
    weight : Parameter, shape (n_relations, n_features)

    Notes
    -----
    Call it as ``decoder(x, pairs, edge_type)``, as :class:`DotDecoder`, with the kind of each pair:
    integers of shape (n_pairs,) in ``[0, n_relations)``.

    References
    ----------
    Yang et al., "Embedding Entities and Relations for Learning and Inference in Knowledge Bases",
    2014, arXiv:1412.6575, eq. 2 with a diagonal matrix.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import geom
    >>> decoder = geom.DistMult(8, 3)
    >>> decoder(rx.ones((5, 8), dtype="float32"), np.array([[0], [1]]), np.array([2])).shape
    (1,)
    """

    def _score(self, src, relation, dst):
        return sum(src * relation * dst, axis=-1)


class ComplEx(_Relational):
    """The logit of a link of kind ``r`` is ``Re sum_i x_si w_ri conj(x_di)``, of complex numbers.

    Parameters
    ----------
    n_features : int
        Even: real parts, and then as many imaginary ones.
    n_relations, dtype, device, generator
        As of :class:`DistMult`, which it is called as.

    Attributes
    ----------
    weight : Parameter, shape (n_relations, n_features)

    References
    ----------
    Trouillon et al., "Complex Embeddings for Simple Link Prediction", 2016, arXiv:1606.06357, eq.
    9 to 11.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import geom
    >>> decoder = geom.ComplEx(8, 3)
    >>> decoder(rx.ones((5, 8), dtype="float32"), np.array([[0], [1]]), np.array([2])).shape
    (1,)
    """

    _even = True

    def _score(self, src, relation, dst):
        (a, b), (u, v), (c, d) = (self._halves(x) for x in (src, relation, dst))
        return sum((a * u - b * v) * c + (a * v + b * u) * d, axis=-1)


class TransE(_Relational):
    """The logit of a link of kind ``r`` is ``-||x_s + w_r - x_d||``.

    Parameters
    ----------
    n_features : int
    n_relations : int
        Kinds of links.
    p : {1, 2}, default 1
        Which norm.
    dtype, device, generator
        As of :class:`DistMult`, which it is called as.

    Attributes
    ----------
    weight : Parameter, shape (n_relations, n_features)

    References
    ----------
    Bordes et al., "Translating Embeddings for Modeling Multi-relational Data", 2013, section 2.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import geom
    >>> decoder = geom.TransE(8, 3)
    >>> decoder(rx.ones((5, 8), dtype="float32"), np.array([[0], [1]]), np.array([2])).shape
    (1,)
    """

    _shown = ("n_features", "n_relations", "p")
    _dgl_names = {"rel_emb.weight": "weight"}

    def __init__(
        self,
        n_features: int,
        n_relations: int,
        *,
        p: int = 1,
        dtype: Any = "float32",
        device: Any = None,
        generator: Any = None,
    ):
        if p not in (1, 2):
            raise ValueError(f"p must be 1 or 2, got {p!r}")
        self.p = p
        super().__init__(n_features, n_relations, dtype=dtype, device=device, generator=generator)

    def _score(self, src, relation, dst):
        apart = src + relation - dst
        if self.p == 1:
            return -sum(abs(apart), axis=-1)
        return -root(sum(apart * apart, axis=-1))


class RotatE(_Relational):
    """The logit of a link of kind ``r`` is ``-sum_i |x_si exp(i w_ri) - x_di|``.

    Parameters
    ----------
    n_features : int
        Even: real parts, and then as many imaginary ones.
    n_relations, dtype, device, generator
        As of :class:`DistMult`, which it is called as.

    Attributes
    ----------
    weight : Parameter, shape (n_relations, n_features // 2)
        Angles, at first uniform from all.

    References
    ----------
    Sun et al., "RotatE: Knowledge Graph Embedding by Relational Rotation in Complex Space", 2019,
    arXiv:1902.10197, eq. 3.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import geom
    >>> decoder = geom.RotatE(8, 3)
    >>> decoder(rx.ones((5, 8), dtype="float32"), np.array([[0], [1]]), np.array([2])).shape
    (1,)
    """

    _even = True

    def _relations(self):
        return (self.n_relations, self.n_features // 2), uniform(-math.pi, math.pi)

    def _score(self, src, relation, dst):
        (a, b), (c, d) = self._halves(src), self._halves(dst)
        real = a * cos(relation) - b * sin(relation) - c
        imaginary = a * sin(relation) + b * cos(relation) - d
        return -sum(root(real * real + imaginary * imaginary), axis=-1)
