"""What a function of a graph does: its operations, seen on a small graph, and what they hold.

The function runs on a graph of some hundred nodes. Its numbers of nodes and edges are found again
in the shapes of all arrays, so that what is seen there holds for a graph of any size.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import is_device_array
from rtxarr.autograd._engine import gradients
from rtxarr.autograd._mode import PROFILED, profiles, state
from rtxarr.autograd._tape import Tensor, raw
from rtxarr.geom import _edges
from rtxarr.geom._graph import Graph
from rtxarr.nn import Module

# Nodes and edges of the small graph: two choices, since no width may be one of these numbers, or
# the sum of both.
_SIZES = ((257, 521), (263, 541))


class Held(NamedTuple):
    """An array of the traced function."""

    name: str
    shape: tuple[int, ...]  # as it would be on the real graph
    itemsize: int
    rows: str  # "nodes", "edges" or ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def width(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])


class Step(NamedTuple):
    """An operation of the traced function."""

    name: str
    is_backward: bool
    in_messages: bool
    of_graph: bool
    arrays: tuple[Held, ...]
    outputs: tuple[Held, ...]  # but views


class Trace(NamedTuple):
    """What a function of a graph does."""

    steps: list[Step]
    peak: int  # bytes above what the function was given
    graphs: int  # bytes of the indices and weights that are kept with the graph


def trace(
    graph: Graph, function: Callable, n_features: int, dtype: Any, edge: Any, backward: bool
) -> Trace:
    """Run ``function(graph, x)``, or with an array of edges, on a small graph.

    ``edge`` is the shape of a row of edges, or None.
    """
    small, sizes = _stand_in(graph, n_features)
    rng = np.random.default_rng(0)
    with graph.device:
        arrays = [_random(rng, small, (small.n_nodes, n_features), dtype)]
        if edge is not None:
            arrays.append(abs(_random(rng, small, (small.n_edges, *edge), dtype)))
        meter = _Meter(small, sizes, raw(small.indptr), arrays)
        given = [Tensor(x, requires_grad=backward) for x in arrays]
        modules = list(function.modules()) if isinstance(function, Module) else []
        modes = [module.training for module in modules]
        try:
            for module in modules:
                module.training = False
            with meter.recording():
                out = function(small, *given)
                if backward:
                    inputs = [*given, *_trained(function)]
                    meter.begin_backward()
                    wanted = [x for x in inputs if x.node is not None]
                    g = Tensor(raw(out) * 0 + 1, requires_grad=True)  # so that rules are seen
                    gradients([out], wanted, [g], create_graph=True)
            return Trace(meter.steps, meter.peak, meter.kept(graph))
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            meter.let_go()


def _trained(function):
    if not isinstance(function, Module):
        return []
    return [p for p in function.parameters() if p.requires_grad]


def _random(rng, graph, shape, dtype):
    from rtxarr.ops import asarray

    return raw(asarray(rng.standard_normal(shape), dtype=dtype, device=graph.device))


def _stand_in(graph, n_features):
    """Give a small graph, without loops, and what its sizes stand for."""
    if not graph.is_square:
        raise ValueError(
            f"graph must have sources that are its destinations to be planned for, got {graph}"
        )
    n, e = graph.n_nodes, graph.n_edges
    for small_n, small_e in _SIZES:
        sizes = {
            small_n: (n, "nodes"),
            small_e: (e, "edges"),
            small_n + small_e: (n + e, "edges"),  # with a loop at each node
            small_n + 1: (n + 1, "nodes"),
        }
        if n_features not in sizes:
            break
    rng = np.random.default_rng(0)
    src = rng.integers(0, small_n, small_e)
    dst = (src + rng.integers(1, small_n, small_e)) % small_n
    return Graph.from_edges(src, dst, n_nodes=small_n).to_device(graph.device), sizes


class _Meter:
    """Takes the place of a profile: sees operations, and adds up what is alive."""

    def __init__(self, graph, sizes, like, given=()):
        self.steps: list[Step] = []
        self.peak = 0
        self._graph, self._sizes = graph, sizes
        self._chunk = _edges.chunk_of(like)
        self._on_host = not is_device_array(like)
        self._alive: dict[int, int] = {}  # bytes of arrays, by the id of their owner
        self._total = 0
        self._nodes: dict[Any, bool] = {}  # of the forward pass, and whether they are messages
        self._attention: dict[Any, Step] = {}  # nodes of the forward pass whose rule is fused
        self._in_messages = False
        self._is_backward = False
        self._users: dict[int, int] = {}
        self._waiting: dict[int, int] = {}  # bytes of gradients, by the id of their node
        self._kept: dict[int, Any] = {}
        self._passing = {id(_owner(x)) for x in given}  # and of what the backward pass makes

    @contextmanager
    def recording(self) -> Iterator[None]:
        before, mode = state.profile, state.mode
        state.profile, state.mode = self, mode | PROFILED
        profiles.append(self)
        try:
            yield
        finally:
            profiles.remove(self)
            state.profile, state.mode = before, mode

    # ------------------------------------------------------------- what a profile is asked for

    def timed(self, op):
        def forward(*args, **kwargs):
            out = op.fwd(*args, **kwargs)
            self._see(op, args, kwargs, out if isinstance(out, tuple) else (out,))
            return out

        return forward

    def recorded(self, node):
        if not self._is_backward:
            self._nodes[node] = self._in_messages
            if self.steps and self.steps[-1].name in ATTENTION:
                self._attention.setdefault(node, self.steps[-1])

    def call_module(self, module, args, kwargs):
        return module.forward(*args, **kwargs)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        before, self._in_messages = self._in_messages, self._in_messages or name == "messages"
        try:
            yield
        finally:
            self._in_messages = before

    def timed_visit(self, visit):
        def timed(node, g):
            start = len(self.steps)
            self._in_messages = self._nodes.get(node, False)
            visit(node, g)
            forward = self._attention.get(node)
            if forward is not None and not self._on_host:
                self.steps[start:] = passes_back(forward)
            new = self.steps[start:]
            sizes = sorted(self._bounded(held) for step in new for held in step.outputs)
            if forward is not None and self._on_host:
                # The rule of attention is many operations, and lets go of what it is done with.
                sizes = sizes[-_HELD:]
            made = sum(sizes)
            made += max(map(self._extra, new), default=0)
            self.peak = max(self.peak, self._total + sum(self._waiting.values()) + made)
            self._waiting.pop(id(node), None)
            for target, _, shape, dtype in node.edges:
                held = self._held("", shape, np.dtype(dtype).itemsize)
                self._waiting[id(target)] = self._bounded(held)
            for owner in self._saved(node):
                self._users[owner] -= 1
                if self._users[owner] == 0:
                    self._total -= self._alive.pop(owner, 0)

        return timed

    # -------------------------------------------------------------------------------- the sums

    def let_go(self):
        """Keep nothing alive any longer: arrays that were watched hold the meter."""
        for held in (self._nodes, self._attention, self._kept):
            held.clear()

    def begin_backward(self):
        self._is_backward = True
        for node in self._nodes:
            for owner in self._saved(node):
                self._users[owner] = self._users.get(owner, 0) + 1

    def kept(self, graph):
        """Give the bytes of what is kept with the graph: other orders of edges, and weights."""
        total = 0
        for x in self._kept.values():
            if isinstance(x, Graph):
                n_edges = self._sizes.get(x.n_edges, (x.n_edges,))[0]
                total += n_edges * (graph.indices.dtype.itemsize + 8) + 8 * (graph.n_nodes + 1)
            else:
                total += self._of("", x).nbytes
        return total

    def _see(self, op, args, kwargs, outputs):
        of_graph = isinstance(kwargs.get("graph"), Graph)
        if of_graph and kwargs["graph"] is not self._graph:
            self._kept[id(kwargs["graph"])] = kwargs["graph"]
        arrays, made = [], []
        names = [*op.arg_names, *(len(args) - len(op.arg_names)) * [op.variadic or ""]]
        for name, x in zip(names, args, strict=False):
            for part in x if isinstance(x, (tuple, list)) else (x,):
                if hasattr(part, "dtype") and hasattr(part, "shape") and part.size > 1:
                    arrays.append(self._of(name, part))
                    key = id(_owner(part))
                    is_made = key in self._alive or key in self._passing
                    if of_graph and arrays[-1].rows == "edges" and not is_made:
                        self._kept.setdefault(key, part)
        owners = {id(_owner(x)) for x in args if hasattr(x, "dtype")}
        for x in outputs:
            owner = _owner(x)
            if id(owner) in owners or id(owner) in self._alive:
                continue
            made.append(self._of("", x))
            self._add(owner, self._bounded(made[-1]))
        step = Step(
            op.name.lstrip("_"),
            self._is_backward,
            self._in_messages,
            of_graph,
            tuple(arrays),
            tuple(made),
        )
        self.steps.append(step)
        if not self._is_backward:
            self.peak = max(self.peak, self._total + self._extra(step))

    def _add(self, owner, nbytes):
        if isinstance(owner, np.generic):
            return  # a number, which cannot be watched
        key = id(owner)
        if self._is_backward:  # its tape keeps what an ordinary one lets go of
            self._passing.add(key)
            weakref.finalize(owner, self._passing.discard, key).atexit = False
            return
        self._alive[key] = nbytes
        self._total += nbytes
        weakref.finalize(owner, self._drop, key).atexit = False

    def _drop(self, key):
        if not self._is_backward:
            self._total -= self._alive.pop(key, 0)

    def _saved(self, node):
        saved = node.saved if isinstance(node.saved, tuple) else ()
        parts = [p for x in saved for p in (x if isinstance(x, tuple) else (x,))]
        return {id(_owner(p)) for p in parts if hasattr(p, "dtype")} & self._alive.keys()

    def _extra(self, step):
        """Give the bytes that an operation needs while it runs: messages, wider half types."""
        if not step.of_graph or not step.arrays:
            return 0
        width = max(held.width for held in step.arrays)
        n_edges = max(n for n, rows in self._sizes.values() if rows == "edges")
        extra = 0
        if step.name == "gather_var":  # the means, as they are accumulated
            extra += sum(math.prod(x.shape) * max(x.itemsize, 4) for x in step.outputs)
        if step.name == "projected_attention" and not self._on_host:
            extra += 2 * step.outputs[1].nbytes  # the products with the vectors
        name = step.name.partition(" ")[0]  # without the pass of attention
        if not self._on_host and name in (*WITH_MESSAGES, *_PLAIN, *_KERNELS):
            return extra  # a kernel needs nothing else but its results
        if step.name in ATTENTION:
            extra += (_HELD - 1) * step.outputs[1].nbytes
        if step.name in WITH_MESSAGES:
            extra += WITH_MESSAGES[step.name] * min(n_edges * width, self._chunk) * 4
        if step.name == "matched_sum":  # how many reach the extremum, as int64
            extra += sum(8 * math.prod(held.shape) for held in step.outputs)
        if step.name not in _PLAIN:
            extra += sum(2 * held.nbytes for held in step.arrays if held.itemsize == 2)
        if self._on_host and step.name in IN_SCIPY:
            extra += n_edges * (8 + step.arrays[0].itemsize)  # wide indices, and ones or weights
        if self._on_host and step.name == "gather_extremum":
            extra += 2 * sum(held.nbytes for held in step.outputs)
        return extra

    def _bounded(self, held):
        """Messages are made some at a time."""
        if self._in_messages and held.rows == "edges":
            return min(held.nbytes, self._chunk * held.itemsize)
        return held.nbytes

    def _of(self, name, x):
        return self._held(name, x.shape, np.dtype(x.dtype).itemsize)

    def _held(self, name, shape, itemsize):
        rows = self._sizes[shape[0]][1] if shape and shape[0] in self._sizes else ""
        real = tuple(self._sizes[n][0] if n in self._sizes else n for n in shape)
        return Held(name, real, itemsize, rows)


# Operations that attend, and how many large arrays they hold on the CPU.
ATTENTION = {"additive_attention", "projected_attention", "mlp_attention", "dot_attention"}
_HELD = 5
# Operations that make messages of some destinations at a time on the CPU, and how many float32
# arrays of them; those that are sparse products of SciPy; those that need no wider copy of halves.
WITH_MESSAGES = {
    "additive_attention": 0,
    "projected_attention": 0,
    "mlp_attention": 3,
    "dot_attention": 2,
    "edge_dot": 2,
    "gated_dot": 3,
    "gated_sum": 3,
    "matched_sum": 5,
    "gather_var": 3,
    "difference_sum": 3,
}
IN_SCIPY = {"gather_sum", "gather_mean", "gather_var", "collect", "weighted_sum", *ATTENTION}
_KERNELS = {"gather_product", "gather_ranked", "share_sum", "tie_share", "weighted_sum"}
_PLAIN = {"gather_sum", "gather_mean", "gather_extremum", "collect", "spread", "numbered"}


def passes_back(forward: Step) -> list[Step]:
    """Give the two passes of the kernels that are the gradient of attention."""
    out, sums = forward.outputs
    grad = out._replace(name="grad")
    given = {x.name: x for x in forward.arrays}
    by_dst = [*forward.arrays, *(x._replace(name="own") for x in (grad, out, sums))]
    found = sums._replace(name="found")  # the logarithms, and as many more numbers
    by_src = [given["values"]._replace(name="own"), grad, found, found]
    for name, x in given.items():
        if name in ("src", "key"):
            by_src.append(x._replace(name="own"))
        elif name in ("dst", "query"):
            by_src.append(x._replace(name="theirs"))
        elif name == "edge":
            by_src.append(x)
    of_src = [x for name, x in given.items() if name in ("values", "src", "key")]
    of_dst = [x for name, x in given.items() if name in ("dst", "query", "edge")]
    projects = forward.name == "projected_attention"
    of_dst += 2 * [sums]
    if projects or (forward.name == "additive_attention" and "src" in given):
        of_dst += 2 * [sums]  # for the slopes of the scores
    if projects:
        of_dst += 4 * [sums]  # the products with the vectors once more, and their gradients
    return [
        Step(f"{forward.name} by {of}", True, False, True, tuple(arrays), tuple(made))
        for of, arrays, made in (("dst", by_dst, of_dst), ("src", by_src, of_src))
    ]


def _owner(x):
    """Give the array whose memory ``x`` looks at."""
    while getattr(x, "base", None) is not None and hasattr(x.base, "shape"):
        x = x.base
    return x
