"""Control flow that depends on values: branches and loops, also inside a traced function.

On arrays these are plain Python. On what is traced each becomes one node that holds the graphs of
its functions, so that the program decides as it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr.autograd._tape import Tensor, raw
from rtxarr.autograd._tree import flatten, unflatten
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._ir import Graph, Node
from rtxarr.polygraph._trace import Tracer, current, is_tracing

__all__ = ["cond", "scan", "while_loop"]


def cond(pred: Any, then: Callable, otherwise: Callable, *operands: Any) -> Any:
    """Run one of two functions.

    Parameters
    ----------
    pred : bool or array of bool, shape ()
    then, otherwise : callable
        Take ``*operands`` and give arrays, or nested tuples, lists and dicts of them; both of the
        same structure, dtypes and shapes. They must not write into arrays from outside.
    *operands : array, Tensor, or nested containers of them

    Returns
    -------
    What the function gives.

    Notes
    -----
    In a function traced by :func:`rtxarr.fuse` only the branch that is taken runs, but what depends
    on no operand is computed before. Where a Tensor there needs a gradient both run, and
    ``where`` chooses.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr.polygraph import cond
    >>> x = np.array([1.0, 2.0])
    >>> cond(x.sum() > 2, lambda x: x / 2, lambda x: x, x)
    array([0.5, 1. ])
    """
    test = raw(pred)
    if not isinstance(test, Tracer):
        return then(*operands) if bool(test) else otherwise(*operands)
    leaves, structure = flatten(operands)
    if any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
        return _select(test, then(*operands), otherwise(*operands))
    outside = _nodes(leaves)
    first = _Branch(then, structure, outside)
    second = _Branch(otherwise, structure, outside)
    if first.signature != second.signature or first.structure != second.structure:
        raise TypeError(
            f"then and otherwise must give the same structure, dtypes and shapes, got "
            f"{first.signature} and {second.signature}"
        )
    free = list(dict.fromkeys((*first.free, *second.free)))
    graphs = first.graph(free), second.graph(free)
    test_node = ir.reshape(ir.cast(test.node, bool), ())
    results = ir.control("cond", (test_node, *outside, *free), graphs, first.signature)
    return _wrap(first.structure, results)


def _select(test, a, b):
    from rtxarr.ops import where

    ours, structure = flatten(a)
    theirs, other = flatten(b)
    if structure != other:
        raise TypeError(f"then and otherwise must give the same structure, got {a!r} and {b!r}")
    return unflatten(structure, [where(test, x, y) for x, y in zip(ours, theirs, strict=True)])


def while_loop(go_on: Callable, body: Callable, state: Any) -> Any:
    """Repeat ``state = body(state)`` while ``go_on(state)``.

    Parameters
    ----------
    go_on : callable
        Takes the state, gives a bool or an array of bool of shape ().
    body : callable
        Takes the state, gives the next: of the same structure, dtypes and shapes.
    state : array, or nested containers of arrays

    Returns
    -------
    The last state.

    Raises
    ------
    TypeError
        When the body changes the state's structure, dtypes or shapes; in a traced function also if
        the state holds a Tensor that requires a gradient.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr.polygraph import while_loop
    >>> while_loop(lambda x: x.max() < 100, lambda x: 3 * x, np.array([1.0, 2.0]))
    array([ 81., 162.])
    """
    leaves, structure = flatten((state,))
    if not _traced(leaves):
        return _plain_loop(go_on, body, state)
    if any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
        raise TypeError(
            "a traced while_loop has no gradient, and the state requires one; use scan, or "
            "stop_gradient"
        )
    outside = _nodes(leaves)
    test, step = _Branch(go_on, structure, outside), _Branch(body, structure, outside)
    signature = tuple((n.dtype, n.shape) for n in outside)
    if step.signature != signature or (step.structure,) != structure[2]:
        raise TypeError(f"body must give what it gets, {signature}, got {step.signature}")
    if len(test.nodes) != 1 or test.nodes[0].size != 1:
        raise TypeError(f"go_on must give one bool, got {test.signature}")
    test.nodes = [ir.reshape(ir.cast(test.nodes[0], bool), ())]
    free = list(dict.fromkeys((*test.free, *step.free)))
    graphs = test.graph(free), step.graph(free)
    results = ir.control("while_loop", (*outside, *free), graphs, signature)
    return _wrap(step.structure, results)


def _plain_loop(go_on, body, state):
    signature = _signature(state)
    while bool(raw(go_on(state))):
        state = body(state)
        if _signature(state) != signature:
            raise TypeError(f"body must give what it gets, {signature}, got {_signature(state)}")
    return state


def _signature(state):
    leaves, structure = flatten((state,))
    return structure, tuple((x.dtype, x.shape) for x in map(_as_array, leaves))


def scan(body: Callable, state: Any, inputs: Any = None, *, length: int | None = None) -> Any:
    """Run ``state, out = body(state, x)`` for each ``x`` of ``inputs`` in turn.

    Parameters
    ----------
    body : callable
        Gives the next state, of the same structure, dtypes and shapes, and an output.
    state : array or Tensor, or nested containers of them
    inputs : array or Tensor, or nested containers of them, each of shape (n_steps, ...), optional
    length : int, optional
        Number of steps, where there are no inputs.

    Returns
    -------
    state
        The last one.
    outputs
        Of all steps, stacked: each of shape (n_steps, ...).

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr.polygraph import scan
    >>> state, sums = scan(lambda s, x: (s + x, s + x), np.array(0.0), np.array([1.0, 2.0, 3.0]))
    >>> sums
    array([1., 3., 6.])
    """
    from rtxarr.ops import stack

    leaves, structure = flatten((inputs,) if inputs is not None else ())
    lengths = {x.shape[0] for x in leaves} | ({length} if length is not None else set())
    if len(lengths) != 1:
        raise ValueError(f"inputs and length must agree on one number of steps, got {lengths}")
    (n_steps,) = lengths
    if n_steps < 1:
        raise ValueError("scan needs one step or more, got 0")
    outs = []
    for i in range(n_steps):
        (x,) = unflatten(structure, [leaf[i] for leaf in leaves]) if leaves else (None,)
        state, out = body(state, x)
        outs.append(flatten((out,)))
    stacked = [stack(column) for column in zip(*(found for found, _ in outs), strict=True)]
    (outputs,) = unflatten(outs[0][1], stacked)
    return state, outputs


# ---------------------------------------------------------------------------- parts of a trace


class _Branch:
    """A function traced on placeholders for its operands.

    ``free`` are the nodes from outside that it uses.
    """

    def __init__(self, function: Callable, structure: Any, outside: Sequence[Node]) -> None:
        self.places = [
            ir.make("input", (), (("operand", i),), n.dtype, n.shape) for i, n in enumerate(outside)
        ]
        trace = current()
        before = [cell.is_written for cell in trace.cells]
        out = function(*unflatten(structure, [trace.fresh(p) for p in self.places]))
        if [cell.is_written for cell in trace.cells][: len(before)] != before:
            raise TypeError("a function of cond or while_loop must not write into outer arrays")
        leaves, self.structure = flatten(out)
        self.nodes = _nodes(leaves)
        self.free = self._free()

    @property
    def signature(self) -> tuple:
        return tuple((n.dtype, n.shape) for n in self.nodes)

    def _free(self) -> list[Node]:
        """Return the nodes that depend on no operand and are used by nodes that do, or given."""
        inside = set()
        for node in ir.topological(self.nodes):
            if node in self.places or any(s in inside for s in node.src):
                inside.add(node)
        order = ir.topological(self.nodes)
        used = [s for n in order if n in inside for s in n.src] + list(self.nodes)
        return [n for n in dict.fromkeys(used) if n not in inside and n.op != "constant"]

    def graph(self, free: Sequence[Node]) -> Graph:
        """Return the graph on the operands and ``free``, in this order."""
        outer = [*self.places, *free]
        inputs = [ir.input_node(i, n.dtype, n.shape) for i, n in enumerate(outer)]
        new = dict(zip(outer, inputs, strict=True))
        stack = [(n, False) for n in self.nodes]
        while stack:
            node, ready = stack.pop()
            if node in new:
                continue
            if ready:
                sources = [new[s] for s in node.src]
                new[node] = ir.make(node.op, sources, node.attrs, node.dtype, node.shape)
            else:
                stack.append((node, True))
                stack.extend((s, False) for s in node.src)
        return Graph(inputs, [new[n] for n in self.nodes])


def _traced(leaves: Iterable[Any]) -> bool:
    return is_tracing() and any(isinstance(raw(x), Tracer) for x in leaves)


def _as_array(x: Any) -> Any:
    return raw(x) if hasattr(x, "dtype") else np.asarray(x)


def _nodes(leaves: Iterable[Any]) -> list[Node]:
    xp = _device.namespace(current().fresh(ir.constant(0, "int64")))
    return [(x if isinstance(x, Tracer) else xp.asarray(x)).node for x in map(raw, leaves)]


def _wrap(structure: Any, nodes: Sequence[Node]) -> Any:
    return unflatten(structure, [current().fresh(n) for n in nodes])
