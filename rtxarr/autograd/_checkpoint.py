"""Trade time for memory: run a function again in the backward pass instead of saving.

A checkpointed call records its nodes as usual but lets go of what they saved. The first time
the backward pass asks for a saved value, the call is repeated, under the random numbers of
the first time, and each node picks up the values of its twin. The graph itself stays, so
closures, dropout, nesting and higher derivatives need no special case.
"""

from rtxarr.autograd._autocast import active_dtype, autocast
from rtxarr.autograd._mode import enable_grad, state, watching
from rtxarr.autograd._tape import Leaf, Tensor, make_tensor, store_of
from rtxarr.autograd._tree import flatten, unflatten


class _Frame:
    """One checkpointed call: how to repeat it, and the saved values that this brought back."""

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
        self.count = 0  # nodes of the first run; frames inside count as one
        self.found = None  # saved values by place while a backward pass picks them up
        self.draws = None
        self.low = active_dtype()

    def add(self, node):
        """Take the saved values away from a node of the first run."""
        node.saved = _Place(self, self.count)
        self.count += 1

    def add_frame(self, frame):
        """Take the arguments away from a checkpointed call inside this one."""
        frame.arguments = _Place(self, self.count)
        self.count += 1

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
        twin = _Twin()
        with (
            enable_grad(),
            autocast(self.low),
            watching(frame=twin, recomputing=True),
            random.replay_draws(self.draws),
        ):
            self.function(*args, **kwargs)
        if len(twin.found) != self.count:
            raise RuntimeError(
                f"a checkpointed function must do the same each time: it recorded {self.count} "
                f"operations at first, {len(twin.found)} when repeated"
            )
        self.found = dict(enumerate(twin.found))


class _Twin:
    """Collects what the nodes of a repeated call save."""

    def __init__(self):
        self.found = []

    def add(self, node):
        self.found.append(node.saved)

    def add_frame(self, frame):
        self.found.append(frame.arguments)


class _Place:
    """Stands for saved values that a frame can bring back."""

    __slots__ = ("frame", "index")

    def __init__(self, frame, index):
        self.frame = frame
        self.index = index

    def value(self, keep):
        return self.frame.value(self.index, keep)


def checkpoint(function, /, *args, **kwargs):
    """Call ``function`` without keeping what its gradient needs; repeat the call for that.

    Parameters
    ----------
    function : callable
        Must do the same each time it is called; random numbers from an rtxarr generator are
        repeated by themselves.
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

    frame = _Frame(function, args, kwargs)
    if state.frame is not None:
        state.frame.add_frame(frame)
    with watching(frame=frame), random.record_draws() as draws:
        result = function(*args, **kwargs)
    frame.draws = draws
    return result


def is_recomputing() -> bool:
    """Tell whether a checkpointed call is being repeated: skip side effects then."""
    return state.recomputing
