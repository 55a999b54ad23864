"""Control flow that depends on values: branches and loops, also inside a traced function.

On arrays these are plain Python. On what is traced each becomes one node that holds the graphs of
its functions, so that the program decides as it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._override import tracing
from rtxarr.autograd import _conditional
from rtxarr.autograd._mode import is_recording
from rtxarr.autograd._tape import Tensor, make_tensor, raw
from rtxarr.autograd._tree import flatten, unflatten
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._ir import Graph, Node
from rtxarr.polygraph._trace import Tracer, current

__all__ = ["cond", "scan", "while_loop"]

MOST_UNROLLED = 8  # steps of a traced scan that become nodes of the graph they are in


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

    In a step that is being captured the GPU decides on a ``pred`` that is there, in each replay.

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
        if _conditional.decides(test):
            return _recorded_branch(test, then, otherwise, operands)
        return then(*operands) if bool(test) else otherwise(*operands)
    leaves, structure = flatten(operands)
    if any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
        return _select(test, then, otherwise, operands)
    then, otherwise = _with_numbers(then, operands), _with_numbers(otherwise, operands)
    leaves, structure = flatten([x for x in leaves if _is_array(x)])
    outside = _nodes(leaves)
    first = _Branch(then, structure, leaves, outside)
    second = _Branch(otherwise, structure, leaves, outside)
    if first.is_tracked or second.is_tracked:  # by a tensor that it found elsewhere
        return _select(test, then, otherwise, leaves)
    if first.signature != second.signature or first.structure != second.structure:
        raise TypeError(
            f"then and otherwise must give the same structure, dtypes and shapes, got "
            f"{_text(first.structure, first.signature)} and "
            f"{_text(second.structure, second.signature)}"
        )
    free = list(dict.fromkeys((*first.free, *second.free)))
    graphs = first.graph(free), second.graph(free)
    test_node = ir.reshape(ir.cast(test.node, bool), ())
    results = ir.control("cond", (test_node, *outside, *free), graphs, first.signature)
    return first.wrapped(results)


def _with_numbers(function, operands):
    """Return the function of the arrays among the operands, to which others are what they are."""
    leaves, structure = flatten(operands)
    if all(map(_is_array, leaves)):
        return function

    def call(*arrays):
        given = iter(arrays)
        return function(*unflatten(structure, [next(given) if _is_array(x) else x for x in leaves]))

    return call


def _select(test, then, otherwise, operands):
    from rtxarr.ops import where

    ours, structure = flatten(_apart(then, operands))
    theirs, other = flatten(_apart(otherwise, operands))
    if structure != other:
        raise TypeError("then and otherwise must give the same structure")
    made = [where(test, x, y) for x, y in zip(ours, theirs, strict=True)]
    for pair in zip(made, ours, theirs, strict=True):
        out, *both = map(raw, pair)
        if all(isinstance(x, Tracer) and x.is_scalar for x in both):
            out._cell.is_scalar = True
    return unflatten(structure, made)


def _apart(function, operands):
    """Call a branch; in a trace, where it must not write into arrays from outside."""
    if tracing() is None:
        return function(*operands)
    with current().inside(object()):
        return function(*operands)


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
        When the body changes the state's structure, dtypes or shapes; in a traced function, and
        where the GPU decides, also if the state holds a Tensor that requires a gradient.

    Notes
    -----
    In a step that is being captured the GPU decides on a test that is there, in each replay. The
    state is copied before, and numbers in it are arrays from then on.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr.polygraph import while_loop
    >>> while_loop(lambda x: x.max() < 100, lambda x: 3 * x, np.array([1.0, 2.0]))
    array([ 81., 162.])
    """
    leaves, structure = flatten((state,))
    inner = flatten(state)[1]
    if not _traced(leaves):
        return _plain_loop(go_on, body, state)
    if any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
        raise TypeError(
            "a traced while_loop has no gradient, and the state requires one; use scan, or "
            "stop_gradient"
        )
    outside = _nodes(leaves)
    test, step = (_Branch(f, structure, leaves, outside) for f in (go_on, body))
    if step.is_tracked:
        raise TypeError("a traced while_loop has no gradient, and body gives one that requires it")
    signature = tuple((n.dtype, n.shape) for n in outside)
    if step.signature != signature or step.structure != inner:
        raise TypeError(
            f"body must give what it gets, {_text(inner, signature)}, got "
            f"{_text(step.structure, step.signature)}"
        )
    if len(test.nodes) != 1 or test.nodes[0].size != 1:
        raise TypeError(f"go_on must give one bool, got {_text(test.structure, test.signature)}")
    test.nodes = [ir.reshape(ir.cast(test.nodes[0], bool), ())]
    free = list(dict.fromkeys((*test.free, *step.free)))
    graphs = test.graph(free), step.graph(free)
    results = ir.control("while_loop", (*outside, *free), graphs, signature)
    return step.wrapped(results)


def _plain_loop(go_on, body, state):
    signature = _signature(state)
    while True:
        test = raw(go_on(state))
        if _conditional.decides(test):
            return _recorded_loop(test, go_on, body, state)
        if not bool(test):
            return state
        state = body(state)
        found = _signature(state)
        if found != signature:
            raise TypeError(
                f"body must give what it gets, {_text(*signature)}, got {_text(*found)}"
            )


def _recorded_loop(test, go_on, body, state):
    """Let the GPU repeat ``body``, in the step that is being captured."""
    leaves, structure = flatten((state,))
    _require_untracked("while_loop", leaves)
    tensors = [isinstance(x, Tensor) for x in leaves]

    def given(arrays):
        return unflatten(structure, list(map(_as_tensor, arrays, tensors)))[0]

    def again(*arrays):
        return _test_array(raw(go_on(given(arrays))), test)

    def step(*arrays):
        new, found = flatten((body(given(arrays)),))
        _require_untracked("while_loop", new)
        if found != structure:
            raise TypeError("body must give a state of the structure of the one it gets")
        return _on_gpu(new, test)

    turn = _conditional.turn_of(again, step)
    return given(_conditional.loop(_test_array(test, test), turn, _on_gpu(leaves, test)))


def _recorded_branch(test, then, otherwise, operands):
    """Let the GPU choose, in the step that is being captured."""
    leaves = flatten(operands)[0]
    if is_recording() and any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
        return _select(test, then, otherwise, operands)
    forms = []

    def run(function):
        found, structure = flatten(function(*operands))
        _require_untracked("cond", found)
        forms.append((structure, [isinstance(x, Tensor) for x in found]))
        if structure != forms[0][0]:
            raise TypeError("then and otherwise must give the same structure")
        return _on_gpu(found, test)

    test = _test_array(test, test)
    made = _conditional.branch(test, lambda: run(then), lambda: run(otherwise))
    structure, tensors = forms[0]
    return unflatten(structure, list(map(_as_tensor, made, tensors)))


def _require_untracked(name, leaves):
    if any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
        raise TypeError(
            f"a {name} whose test is on the GPU has no gradient in a step that is being captured, "
            "and gives or takes a tensor that requires one: use "
            + ("scan, or stop_gradient" if name == "while_loop" else "where, or give it as operand")
        )


def _test_array(test, like):
    (array,) = _on_gpu([test], like)
    if array.size != 1:
        raise TypeError(f"a test must be one bool, got an array of shape {array.shape}")
    return array.reshape(())


def _on_gpu(leaves, like):
    """Return the arrays of leaves, numbers as arrays where ``like`` is."""
    found = []
    for x in map(raw, leaves):
        if not _device.is_device_array(x):
            host = np.asarray(x)
            if host.ndim or host.dtype.kind == "O":
                raise TypeError(
                    "branches and loops whose test is on the GPU must take and give arrays on it, "
                    f"and numbers, got {type(x).__name__}"
                )
            x = _device.full_scalar(like, host.item(), host.dtype)
        found.append(x)
    return found


def _signature(state):
    leaves, structure = flatten(state)
    return structure, tuple((x.dtype, x.shape) for x in map(_as_array, leaves))


class _Kind(str):
    __repr__ = str.__str__


def _text(structure, signature):
    """Say what a state is made of, such as ``(float64[3], {'n': int64[]})``."""
    kinds = [_Kind(f"{dtype}{list(shape)}") for dtype, shape in signature]
    return repr(unflatten(structure, kinds))


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
    leaves, structure = flatten((inputs,) if inputs is not None else ())
    lengths = {x.shape[0] for x in leaves} | ({length} if length is not None else set())
    if len(lengths) != 1:
        raise ValueError(f"inputs and length must agree on one number of steps, got {lengths}")
    (n_steps,) = lengths
    if n_steps < 1:
        raise ValueError("scan needs one step or more, got 0")
    carried = flatten((state,))[0]
    tracked = any(isinstance(x, Tensor) and x.requires_grad for x in (*carried, *leaves))
    if n_steps > MOST_UNROLLED and _traced((*carried, *leaves)) and not tracked:
        found = _scan_node(body, (state,) if inputs is None else (state, inputs), n_steps)
        if found is not None:
            return found
    return _unrolled(body, state, leaves, structure, n_steps)


def _unrolled(body, state, leaves, structure, n_steps):
    from rtxarr.ops import stack

    outs = []
    for i in range(n_steps):
        (x,) = unflatten(structure, [leaf[i] for leaf in leaves]) if leaves else (None,)
        state, out = body(state, x)
        outs.append(flatten((out,)))
    stacked = [stack(column) for column in zip(*(found for found, _ in outs), strict=True)]
    (outputs,) = unflatten(outs[0][1], stacked)
    return state, outputs


def _scan_node(body, tree, n_steps):
    """Make one node of all steps; ``tree`` holds the state and, if there are any, the inputs.

    Give None where the results need a gradient.
    """
    leaves, structure = flatten(tree)
    n_state = len(flatten((tree[0],))[0])
    nodes = _nodes(leaves)
    rows = [_first_row(n) for n in nodes[n_state:]]
    step = _Branch(
        lambda state, x=None: body(state, x), structure, leaves, (*nodes[:n_state], *rows)
    )
    if step.is_tracked:
        return None
    kind, _, parts = step.structure or (None, None, ())
    if kind is not tuple or len(parts) != 2:
        raise TypeError("body must give two things, the state and an output")
    if parts[0] != structure[2][0] or step.signature[:n_state] != tuple(
        (n.dtype, n.shape) for n in nodes[:n_state]
    ):
        raise TypeError(f"body must give a state like the one it gets, got {step.signature}")
    graph = step.graph(step.free)
    outs = graph.outputs[n_state:]
    n_inputs = len(graph.inputs)
    slots = [ir.input_node(n_inputs + i, n.dtype, n.shape) for i, n in enumerate(outs)]
    updates = [(n_inputs + i, n) for i, n in enumerate(outs)]
    graph = Graph((*graph.inputs, *slots), graph.outputs[:n_state], updates)
    results = [*step.signature[:n_state]]
    results += [(n.dtype, (n_steps, *n.shape)) for n in outs]
    attrs = graph, n_state, len(rows), n_steps
    return step.wrapped(ir.control("scan", (*nodes, *step.free), attrs, results))


def _first_row(node: Node) -> Node:
    zeros, ones = (0,) * node.ndim, (1,) * node.ndim
    row = ir.slice_node(node, zeros, ones, (1, *node.shape[1:]))
    return ir.reshape(row, node.shape[1:])


# ---------------------------------------------------------------------------- parts of a trace


_count = itertools.count()


class _Branch:
    """A function traced on placeholders: those of ``leaves`` whose nodes are ``outside``.

    ``free`` are the nodes from outside that it uses; ``is_tracked`` tells whether what it gives
    needs a gradient.
    """

    def __init__(
        self, function: Callable, structure: Any, leaves: Sequence, outside: Sequence[Node]
    ) -> None:
        # Of one kind, operands of a branch in another would be those of the other.
        name = "operand", next(_count)
        self.places = [
            ir.make("input", (), ((*name, i),), n.dtype, n.shape) for i, n in enumerate(outside)
        ]
        trace = current()
        arrays = list(map(trace.fresh, self.places))
        given = [_as_tensor(a, isinstance(x, Tensor)) for a, x in zip(arrays, leaves, strict=True)]
        with trace.inside(self):
            found, self.structure = flatten(function(*unflatten(structure, given)))
        self.is_tracked = any(isinstance(x, Tensor) and x.requires_grad for x in found)
        self.nodes = _nodes(found)
        self.tensors = [isinstance(x, Tensor) for x in found]
        self.free = self._free()

    @property
    def signature(self) -> tuple:
        return tuple((n.dtype, n.shape) for n in self.nodes)

    def wrapped(self, nodes: Sequence[Node]) -> Any:
        """Return arrays and tensors that hold ``nodes`` as the function returned its own."""
        arrays = map(current().fresh, nodes)
        return unflatten(
            self.structure, [_as_tensor(a, t) for a, t in zip(arrays, self.tensors, strict=True)]
        )

    def _free(self) -> list[Node]:
        """Return the nodes that depend on no operand and are used by nodes that do, or given.

        What comes of numbers alone is not among them: it is made inside.
        """
        order = ir.topological(self.nodes)
        varying, inside = set(self.places), set(self.places)
        for node in order:
            if any(s in varying for s in node.src):
                varying.add(node)
            opaque = node.op in ("input", "call", *ir.CONTROL)
            if node in varying or (not opaque and all(s in inside for s in node.src)):
                inside.add(node)
        used = [s for n in order if n in varying for s in n.src] + list(self.nodes)
        return [n for n in dict.fromkeys(used) if n not in inside]

    def graph(self, free: Sequence[Node]) -> Graph:
        """Return the graph on the operands and ``free``, in this order."""
        return Graph(*ir.cut([*self.places, *free], self.nodes))


def _traced(leaves: Iterable[Any]) -> bool:
    return tracing() is not None and any(isinstance(raw(x), Tracer) for x in leaves)


def _as_array(x: Any) -> Any:
    return raw(x) if hasattr(x, "dtype") else np.asarray(x)


def _is_array(x: Any) -> bool:
    return isinstance(x, (Tensor, Tracer)) or _device.is_array(x)


def _nodes(leaves: Iterable[Any]) -> list[Node]:
    leaves = list(leaves)
    for x in leaves:
        if not _is_array(x):
            raise TypeError(
                "branches and loops of a traced function must take and give arrays, "
                f"got {type(x).__name__} (rx.asarray makes one of a number)"
            )
    xp = _device.namespace(current().fresh(ir.constant(0, "int64")))
    return [(x if isinstance(x, Tracer) else xp.asarray(x)).node for x in map(raw, leaves)]


def _as_tensor(array: Any, wanted: bool) -> Any:
    return make_tensor(array, None, 0, None) if wanted else array
