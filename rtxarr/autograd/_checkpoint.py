"""Trade time for memory: run a function again in the backward pass instead of saving.

A checkpointed call records its nodes as usual but lets go of the arrays they saved. The first time
the backward pass asks for one, the call is repeated, under the random numbers of the first time,
and each node picks up the values of its twin. The repetition ends where the last of them is there:
what only makes the result is not run again. The graph itself stays, so closures, dropout, nesting
and higher derivatives need no special case.
"""

import contextlib

import numpy as np

from rtxarr._device import is_array
from rtxarr.autograd._autocast import active_dtype, autocast
from rtxarr.autograd._mode import check_callable, enable_grad, state, watching
from rtxarr.autograd._tape import Leaf, Tensor, make_tensor, store_of
from rtxarr.autograd._tree import flatten, unflatten

_FEW = 64  # bytes


class _Enough(BaseException):
    """Ends a repetition; no Exception, so that what it passes through does not handle it."""


class _Frame:
    """One checkpointed call: how to repeat it, and the saved values that this brought back.

    Attributes
    ----------
    steps : list of str
        The operations of the first run that were recorded; calls of frames inside count as one.
    places : set of int
        Those whose saved values were let go.
    last : int
        The last of ``places``.
    last_begun : int
        Which operation of tracked arguments, from 1, made that node; 0 for a call of a frame inside
        and for what runs otherwise.
    kept : _Kept
        What :func:`repeated` gave.
    given : _Kept or None
        What it is to give: this call is part of the repetition of one around it.
    found : dict or None
        Saved values by place, while a backward pass picks them up.
    """

    def __init__(self, function, args, kwargs):
        self.function = function
        leaves, self.structure = flatten((args, kwargs))
        # Raw data only: holding the input tensors would keep the graph before this call alive.
        self.arguments = [
            ((leaf.data, leaf.node is not None) if isinstance(leaf, Tensor) else leaf)
            for leaf in leaves
        ]
        stores = [store_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        self.guards = [(store, store[0]) for store in stores]
        self.steps = []
        self.places = set()
        self.last = self.last_begun = self._n_begun = 0
        self._begun = None
        self.kept, self.given = _Kept(), None
        self.found = None
        self.draws = None
        self.low = active_dtype()

    def begin(self, op, tracked, raw, kwargs):
        """Note an operation of tracked arguments that is about to run."""
        self._n_begun += 1
        self._begun = op

    def add(self, node):
        """Take the saved arrays away from a node of the first run."""
        if not _saves_little(node):
            node.saved = self._place(self._n_begun if node.plan.op is self._begun else 0)
        self.steps.append(node.plan.op.name)

    def add_frame(self, frame):
        """Take the arguments away from a checkpointed call inside this one."""
        frame.arguments = self._place(0)
        if self.given is not None:
            frame.given = self.given.inside.get(len(self.steps))
        self.kept.inside[len(self.steps)] = frame.kept
        self.steps.append(_NAME)

    def keep(self, make):
        values = self.kept.values
        values.append(make() if self.given is None else self.given.values[len(values)])
        return values[-1]

    def _place(self, begun):
        self.last, self.last_begun = len(self.steps), begun
        self.places.add(self.last)
        return _Place(self, self.last)

    def value(self, place, keep):
        """Give the saved values of ``place``, repeating the call when they are gone."""
        if self.found is None or place not in self.found:
            self._repeat()
        return self.found[place] if keep else self.found.pop(place)

    def _repeat(self):
        from rtxarr import random

        arguments = self.arguments
        if isinstance(arguments, _Place):
            arguments = arguments.value(keep=True)
        for store, version in self.guards:
            if store[0] != version:
                raise RuntimeError("an argument of a checkpointed call was changed in place")
        leaves = [
            make_tensor(a[0], Leaf() if a[1] else None, 0, None) if type(a) is tuple else a
            for a in arguments
        ]
        args, kwargs = unflatten(self.structure, leaves)
        twin = _Twin(self)
        with (
            enable_grad(),
            autocast(self.low),
            watching(frame=twin, recomputing=True),
            random.replay_draws(self.draws),
            contextlib.suppress(_Enough),
        ):
            self.function(*args, **kwargs)
        if twin.n_steps <= self.last:
            raise RuntimeError(
                "a checkpointed function must do the same each time: it recorded "
                f"{len(self.steps)} operations at first, {twin.n_steps} when repeated"
            )
        self.found = twin.found


class _Twin:
    """Collects what the nodes of a repeated call save."""

    def __init__(self, frame):
        self.frame = frame
        self.found = {}
        self.n_steps = self._n_begun = 0
        self._values = iter(frame.kept.values)

    def begin(self, op, tracked, raw, kwargs):
        """End the repetition before the last operation that counts, if its result does not."""
        self._n_begun += 1
        frame = self.frame
        if self._n_begun == frame.last_begun and self.n_steps == frame.last:
            plan = op.plan(tracked)
            if not plan.saves_out:
                self._take(op.name, plan.save(raw, None, kwargs))

    def add(self, node):
        self._take(node.plan.op.name, node.saved)

    def add_frame(self, frame):
        frame.given = self.frame.kept.inside.get(self.n_steps)
        self._take(_NAME, frame.arguments)

    def keep(self, make):
        return next(self._values)

    def _take(self, name, saved):
        place, frame = self.n_steps, self.frame
        if place > frame.last:
            return  # the function has handled the end
        if frame.steps[place] != name:
            raise RuntimeError(
                "a checkpointed function must do the same each time: its operation "
                f"{place + 1} was {frame.steps[place]}() at first, {name}() when repeated"
            )
        self.n_steps += 1
        if place in frame.places:
            self.found[place] = saved
        if place == frame.last:
            raise _Enough


class _Kept:
    """What :func:`repeated` gave in a call, and in the checkpointed calls inside, by place."""

    def __init__(self):
        self.values = []
        self.inside = {}


class _Place:
    """Stands for saved values that a frame can bring back."""

    __slots__ = ("frame", "index")

    def __init__(self, frame, index):
        self.frame = frame
        self.index = index

    def value(self, keep):
        return self.frame.value(self.index, keep)


_PLAIN = (
    *(type(None), bool, int, float, complex, str, slice, type(...), type),
    *(np.dtype, np.generic),
)


def _saves_little(node):
    """Tell whether a node saves nothing but numbers and the like, and options of a few bytes."""
    return all(
        _is_plain(value, of_option=origin is None)
        for origin, value in zip(node.plan.inputs, node.saved, strict=True)
    )


def _is_plain(value, of_option):
    if isinstance(value, (tuple, list)):
        return all(_is_plain(part, of_option) for part in value)
    if isinstance(value, _PLAIN):
        return True
    return of_option and is_array(value) and getattr(value, "nbytes", _FEW + 1) <= _FEW


def checkpoint(function, /, *args, **kwargs):
    """Call ``function`` without keeping what its gradient needs; repeat the call for that.

    Parameters
    ----------
    function : callable
        Must do the same each time it is called; random numbers from an rtxarr generator are
        repeated by themselves. The repetition ends, by an exception that is no ``Exception``,
        before what only the result needs, such as the last product of a block.
    *args, **kwargs
        Passed on. Tensors in nested tuples, lists and dicts are found; tensors that the
        function closes over are differentiated too.

    Returns
    -------
    what ``function`` returns

    References
    ----------
    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv:1604.06174.
    """
    from rtxarr import random  # loaded on first use

    check_callable("function", function)
    frame = _Frame(function, args, kwargs)
    if state.frame is not None:
        state.frame.add_frame(frame)
    with watching(frame=frame), random.record_draws() as draws:
        result = function(*args, **kwargs)
    frame.draws = draws
    return result


_NAME = checkpoint.__name__


def repeated(make):
    """Give ``make()``, or in a repetition of a checkpointed call what it gave the first time.

    For small state that changes from call to call.
    """
    return make() if state.frame is None else state.frame.keep(make)


def is_recomputing() -> bool:
    """Tell whether a checkpointed call is being repeated: skip side effects then."""
    return state.recomputing
