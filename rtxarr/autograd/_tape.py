"""Tensor and the nodes of the tape.

A tracked :class:`Tensor` points at the :class:`Node` that made it (or at its own
:class:`Leaf`), a node points at the nodes of its inputs, and nothing points back at a
tensor: the graph is acyclic and goes away by reference counting alone.
"""

from collections.abc import Iterator
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from rtxarr import _device
from rtxarr.autograd._mode import TRACED, state, witnesses
from rtxarr.dtypes import is_inexact

# Orders run downwards, so that a heap pops the newest node first.
orders = count(-1, -1)


class Leaf:
    """Where the gradient of a tensor that was not computed is collected.

    ``closed`` is set on the inputs of a transform such as ``grad`` once it is done: nothing
    outside can ask for their gradient any more.
    """

    __slots__ = ("grad", "closed", "__weakref__")

    def __init__(self):
        self.grad = None
        self.closed = False


class Node:
    """One recorded application of an operation.

    ``edges`` holds, for each tracked input, ``(target, slot, shape, dtype)``; ``saved`` what
    the rules ask for; ``guards`` the mutation versions of the saved tensors.
    """

    __slots__ = ("plan", "edges", "saved", "guards", "order", "outputs", "__weakref__")

    def __init__(self, plan, edges, saved, guards):
        self.plan = plan
        self.edges = edges
        self.saved = saved
        self.guards = guards
        self.order = next(orders)
        self.outputs = None  # [(shape, dtype), ...] when the operation has several outputs

    def __repr__(self):
        return f"<Node {self.plan.op.name}>"


class Tensor:
    """An array that records what is computed from it.

    Parameters
    ----------
    data : array
        NumPy or CuPy array (anything with the array API); not copied.
    requires_grad : bool, default False
        Collect a gradient in ``grad`` when :meth:`backward` reaches this tensor. Only
        real and complex floating-point data can require one.

    Attributes
    ----------
    data : array
        The raw array. Changing it behind the tape's back is not seen; use :meth:`assign`
        or ``t[index] = value``.
    grad : array or None
        Accumulated gradient of a leaf, with the shape and dtype of ``data``.

    Notes
    -----
    Arithmetic is never in place: ``t += u`` makes a new tensor. ``t[index] = value`` writes
    into the array of an untracked tensor; on a tracked one it is recorded and ``t`` becomes
    the updated copy, so views taken earlier keep the old values.

    Examples
    --------
    >>> import rtxarr as rx
    >>> x = rx.Tensor(rx.asarray([1.0, 2.0], device="cpu"), requires_grad=True)
    >>> rx.sum(x * x).backward()
    >>> x.grad
    array([2., 4.])
    """

    __slots__ = ("data", "node", "slot", "store", "__weakref__")
    # None makes NumPy and CuPy hand binary operators over to Tensor's reflected methods.
    __array_ufunc__ = None
    __array_priority__ = 1000

    def __init__(self, data, *, requires_grad: bool = False):
        self.store: list[int] | None = None
        if isinstance(data, Tensor):
            self.store = store_of(data)
            data = data.data
        elif not _device.is_array(data):
            data = _device.namespace().asarray(data)
        if isinstance(data, np.ndarray) and data.dtype.kind in "OSUMm":
            raise TypeError(f"data must hold numbers or bools, got dtype {data.dtype}")
        self.data = data
        self.slot = 0
        self.node: Leaf | Node | None = None
        if requires_grad:
            self.requires_grad = True

    shape = property(attrgetter("data.shape"), doc="Lengths of the axes.")
    dtype = property(attrgetter("data.dtype"), doc="Element type.")
    ndim = property(attrgetter("data.ndim"), doc="Number of axes.")
    size = property(attrgetter("data.size"), doc="Number of elements.")

    if TYPE_CHECKING:  # what rtxarr/ops/_methods.py attaches
        device: Any
        T: "Tensor"
        mT: "Tensor"

        def _operation(self, *args: Any, **options: Any) -> "Tensor": ...

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _operation
        __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _operation
        __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _operation
        __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _operation
        __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _operation
        __lt__ = __le__ = __gt__ = __ge__ = _operation
        __neg__ = __pos__ = __abs__ = __invert__ = __getitem__ = _operation
        sum = mean = var = std = prod = max = min = all = any = _operation
        argmax = argmin = astype = squeeze = reshape = to_device = _operation

        def __setitem__(self, key: Any, value: Any) -> None: ...
        def __iter__(self) -> Iterator["Tensor"]: ...
        def __len__(self) -> int: ...
        def __bool__(self) -> bool: ...
        def __int__(self) -> int: ...
        def __float__(self) -> float: ...
        def __complex__(self) -> complex: ...
        def __index__(self) -> int: ...

    @property
    def requires_grad(self) -> bool:
        """Whether operations on this tensor are recorded."""
        return self.node is not None

    @requires_grad.setter
    def requires_grad(self, value: bool):
        if type(self.node) is Node:
            raise RuntimeError(
                "requires_grad can only be changed on a leaf; use stop_gradient(x) for a tensor "
                "cut off from the graph"
            )
        if not value:
            self.node = None
        elif self.node is None:
            if not is_inexact(self.data.dtype):
                raise TypeError(
                    f"requires_grad needs a floating-point or complex tensor, got dtype "
                    f"{self.data.dtype}"
                )
            self.node = Leaf()

    @property
    def grad(self):
        if state.mode >= TRACED:
            state.tracing.reads_gradient(self)
        node = self.node
        return node.grad if type(node) is Leaf else None

    @grad.setter
    def grad(self, value):
        if type(self.node) is not Leaf:
            raise RuntimeError("grad can only be set on a leaf that requires_grad")
        if state.mode >= TRACED:
            state.tracing.sets_gradient(self)
        if value is not None:
            value = self._fitting("grad", value)
        if witnesses and state.witness is not None:
            state.witness.set_grad(self.node)
        self.node.grad = value

    def _fitting(self, name, value):
        """Give the raw array of ``value``, which must have this tensor's shape and dtype."""
        value = raw(value)
        if not _device.is_array(value):
            raise TypeError(f"{name} must be an array or Tensor, got {type(value).__name__}")
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ValueError(
                f"{name} must have shape {self.shape} and dtype {self.dtype}, got {value.shape} "
                f"and {value.dtype}"
            )
        return value

    def backward(self, grad=None, *, retain_graph: bool = False) -> None:
        """Add the gradient of this tensor to the ``grad`` of every leaf it came from.

        Parameters
        ----------
        grad : array, shape of this tensor, optional
            Gradient of what is being differentiated with respect to this tensor. May be
            left out when the tensor has one element and is real.
        retain_graph : bool, default False
            Keep what the graph saved, so that ``backward`` can run through it again.

        Raises
        ------
        RuntimeError
            If nothing here requires a gradient, a saved tensor was changed in place, or the
            graph was freed by an earlier call.
        """
        from rtxarr.autograd._engine import accumulate_leaves

        accumulate_leaves(self, grad, retain_graph=retain_graph)

    def detach(self) -> "Tensor":
        """Give an untracked tensor over the same memory."""
        return make_tensor(self.data, None, 0, store_of(self))

    def assign(self, value) -> "Tensor":
        """Replace the contents in place; a graph that saved the old ones will refuse to run.

        Parameters
        ----------
        value : array or Tensor, shape and dtype of this tensor
        """
        value = self._fitting("value", value)
        if state.mode & TRACED and (traced := state.tracing.lift(self)) is not self:
            traced.assign(value)
            return self
        if isinstance(self.data, np.generic):  # cannot be written into
            self.data = np.asarray(value).copy()
        else:
            self.data[...] = value
        mark_changed(self)
        return self

    def numpy(self) -> np.ndarray:
        """Copy to a NumPy array on the host (no copy when it is there already)."""
        data = self.data
        # Arrays of libraries other than CuPy know themselves how to become NumPy's.
        return np.asarray(_device.to_device(data, "cpu") if _device.is_device_array(data) else data)

    def item(self):
        """Give the only element as a Python number."""
        if self.data.size != 1:
            raise ValueError(f"item() needs one element, got shape {self.data.shape}")
        return self.numpy().reshape(()).item()


def store_of(tensor):
    """Give the mutation counter that ``tensor`` shares with its views: a list of one int."""
    if tensor.store is None:
        tensor.store = [0]
    return tensor.store


def mark_changed(tensor):
    """Count a change of the contents: a graph that saved the old ones will refuse to run."""
    store = store_of(tensor)
    store[0] += 1
    if witnesses and state.witness is not None:
        state.witness.change(store)


def raw(x):
    """Give the raw array of a Tensor, and anything else unchanged."""
    return x.data if isinstance(x, Tensor) else x


_new = object.__new__


def make_tensor(data, node, slot, store):
    """Build a Tensor without the checks of its constructor."""
    tensor = _new(Tensor)
    tensor.data = data
    tensor.node = node
    tensor.slot = slot
    tensor.store = store
    return tensor
