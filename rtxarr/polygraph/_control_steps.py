"""How programs run branches and loops: by the host, which waits for each test, or by the GPU.

In a step that is being captured each is a node of its graph (:mod:`rtxarr.autograd._conditional`).
A loop over small arrays elsewhere on a GPU is captured for itself: its first call is the host's,
later ones are one launch, and no waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._replay import is_watched, kept_resources, n_swaps, recorder
from rtxarr.autograd import _conditional
from rtxarr.autograd._capture_errors import CaptureError
from rtxarr.kernels.transpose import contiguous
from rtxarr.polygraph import _interpret
from rtxarr.polygraph._ir import Graph, Node
from rtxarr.polygraph._ir import make as make_node

MOST_CAPTURED_BYTES = 16 << 20  # of a loop's arrays: a round over more takes longer than waiting
# Steps of a scan that are recorded one after the other. To let the GPU count takes 12 us a step
# more in each replay (on an H200), and 40 us a step less to record.
MOST_RECORDED = 1 << 15


def control_step(
    node: Node, run: Sequence[Callable], empty: Callable, make: Callable | None
) -> Callable:
    """Return what runs a branch or loop on arrays.

    Parameters
    ----------
    node : Node
    run : sequence of callable
        For each of its graphs, what runs it.
    empty : callable
        Makes an array of a shape and dtype.
    make : callable, optional
        Makes a program of a graph, where there is a compiler.
    """
    if node.op == "cond":
        return _branch(*run)
    if node.op == "while_loop":
        test, body = run
        made = None if make is None else functools.partial(_make_round, make, node)
        return _Loop(test, body, len(node.attrs[1].outputs), made)
    return _steps(node, run[0], empty)


def title_of(node: Node, run: Any, *, on_gpu: bool) -> str:
    """Return what a branch or loop is and how it runs, for :meth:`Fused.explain`."""
    by_gpu = on_gpu and _conditional.is_available()
    if node.op == "scan":
        n_steps = node.attrs[3]
        counted = by_gpu and n_steps > MOST_RECORDED
        return f"a scan of {n_steps} steps" + ", counted by the GPU where captured" * counted
    word = "branch" if node.op == "cond" else "loop"
    if not on_gpu:
        return f"a {word}"
    if not by_gpu:
        return f"a {word}; the host waits for each test: the driver is older than CUDA 12.8"
    text = f"a {word}; the GPU decides where captured, elsewhere the host waits for each test"
    if node.op == "cond":
        return text
    if run.is_captured:
        text = "a loop, captured for itself: the GPU decides"
    if run.round is not None:
        n_kernels = sum(step.loops is not None for step in run.round.steps)
        text += f"; {n_kernels} kernel{'s' * (n_kernels != 1)} a round, with the test"
    return text


def _make_round(make: Callable, node: Node) -> Any:
    """Return one program of a loop's round, which updates the state and gives the next test."""
    test, body = node.attrs
    new = dict(zip(body.inputs, body.outputs, strict=False))

    def rule(node, sources):
        if node.op == "input":
            return new.get(node, node)
        return make_node(node.op, sources, node.attrs, node.dtype, node.shape)

    (again,) = test.rewritten(rule).outputs
    updates = [(i, n) for i, n in enumerate(body.outputs) if n is not body.inputs[i]]
    return make(Graph(body.inputs, [again], updates))


def _branch(then: Callable, otherwise: Callable) -> Callable:
    def branch(test, *operands):
        operands = _arrays(operands, test)
        return _conditional.choose(test, lambda: then(*operands), lambda: otherwise(*operands))

    return branch


class _Loop:
    """Runs a loop on its state and what stays the same.

    Attributes
    ----------
    round : Program or None
        What the GPU runs in each round, once it is made: before a capture.
    """

    def __init__(
        self, test: Callable, body: Callable, n_state: int, make: Callable | None = None
    ) -> None:
        self._test, self._body, self._n_state, self._make = test, body, n_state, make
        self._captured: Any = None  # False where that cannot be
        self.round: Any = None
        self._n_swaps = 0

    def __call__(self, *operands: Any) -> Sequence:
        operands = tuple(_arrays(operands))
        if self._is_worth_capturing(operands):
            from rtxarr.autograd import capture

            if self._captured is None:
                self._captured = capture(self.run)
            try:
                return self._captured(*operands)
            except CaptureError:
                self._captured = False
        return self.run(*operands)

    def run(self, *operands: Any) -> Sequence:
        ready = [x if x.flags.c_contiguous else contiguous(x) for x in operands]
        state, rest = ready[: self._n_state], ready[self._n_state :]
        if _conditional.is_to_be_captured(state[0]):
            self._prepare(state, rest)
        turn = None
        if self.round is not None and self._n_swaps == n_swaps():
            turn = lambda *held: self.round.run(*held, *rest)[0]  # noqa: E731
        return _conditional.repeat(
            lambda *state: self._test(*state, *rest)[0],
            lambda *state: self._body(*state, *rest),
            state,
            turn,
        )

    def _prepare(self, state: Sequence, rest: Sequence) -> None:
        """Make the program of a round, and load what it needs: before a capture."""
        if self.round is None and self._make is not None:
            self._n_swaps = n_swaps()
            self.round = self._make()
            _conditional.rehearse(lambda: self.round.run(*(x.copy() for x in state), *rest))

    @property
    def is_captured(self) -> bool:
        """Whether there is a graph of the loop alone."""
        return bool(self._captured) and self._captured.n_graphs > 0

    def _is_worth_capturing(self, operands: Sequence) -> bool:
        return (
            self._captured is not False
            and _device.is_device_array(operands[0])
            and recorder() is None
            and kept_resources() is None
            and not is_watched()
            and _conditional.is_available()
            and sum(x.nbytes for x in operands) <= MOST_CAPTURED_BYTES
        )


def _steps(node: Node, step: Callable, empty: Callable) -> Callable:
    graph, n_state, n_inputs, n_steps = node.attrs

    def steps(*operands):
        operands = _arrays(operands)
        slots = graph.inputs[len(operands) :]
        outs = [empty((n_steps, *n.shape), n.dtype) for n in slots]
        if n_steps > MOST_RECORDED and _conditional.decides((*operands, *outs)[0]):
            rows = [empty(n.shape, n.dtype) for n in slots]
            return _recorded_steps(step, operands, outs, rows, *node.attrs[1:])
        return _interpret.scan_rows(step, operands, outs, n_state, n_inputs)

    return steps


def _recorded_steps(step, operands, outs, slots, n_state, n_inputs, n_steps):
    """Let the GPU count the steps: a graph of so many kernels would take long to record."""
    state, inputs = operands[:n_state], operands[n_state : n_state + n_inputs]
    rest = operands[n_state + n_inputs :]
    xp = _device.namespace(*outs, *operands)
    count = _device.full_scalar((*operands, *outs)[0], 0, np.int64).reshape(1)

    def body(i, *state):
        rows = [xp.take(x, i, axis=0)[0, ...] for x in inputs]
        state = step(*state, *rows, *rest, *slots)
        for out, slot in zip(outs, slots, strict=True):
            out[i] = slot[None]
        return (i + 1, *state)

    turn = _conditional.turn_of(lambda i, *state: i < n_steps, body)
    _, *state = _conditional.loop(count < n_steps, turn, (count, *state))
    return (*state, *outs)


def _arrays(operands: Sequence, *like: Any) -> Sequence:
    """Return operands with arrays in place of numbers, where the other arrays are."""
    if not any(isinstance(x, np.generic) for x in operands):
        return operands
    near = next((x for x in (*operands, *like) if _device.is_device_array(x)), None)
    if near is None:
        return operands
    return [
        _device.full_scalar(near, x.item(), x.dtype) if isinstance(x, np.generic) else x
        for x in operands
    ]
