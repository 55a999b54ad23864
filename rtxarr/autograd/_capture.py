"""Whole steps as CUDA graphs: recorded once for each kind of arguments, then replayed.

The first call with arguments of a kind runs the step eagerly, on a stream of its own, and so
compiles, plans and creates what it needs. The second records it, into a memory pool that stays
with the graph, and starts the graph; later ones only start it. What the host does anew in each
step is the part of :mod:`rtxarr._replay`.
"""

import functools
import linecache
import threading
import traceback
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._replay import Recorder, keeping, recorder
from rtxarr.autograd._autocast import active_dtype
from rtxarr.autograd._capture_check import Watch
from rtxarr.autograd._mode import PROFILED, is_recording, profiles, state
from rtxarr.autograd._tape import Leaf, Tensor, make_tensor, store_of
from rtxarr.autograd._tree import flatten, unflatten
from rtxarr.libs import blas

__all__ = ["CaptureError", "Captured", "capture"]


class CaptureError(RuntimeError):
    """A step cannot be recorded as a CUDA graph; the message says where and why."""


def capture(step: Callable | None = None, *, max_graphs: int = 16, copy: bool = True) -> Any:
    """Give a function that does what ``step`` does, replayed as one CUDA graph on a GPU.

    Parameters
    ----------
    step : callable
        Any function of arrays, and of nested tuples, lists and dicts of them, that leaves all
        work to the GPU: a training step with its backward pass and optimizer, or a model's
        forward pass. Arguments that are no arrays are part of what is recorded: a number that
        varies should be an array, of no dimensions.
    max_graphs : int, default 16
        How many kinds of arguments (shapes, dtypes, numbers, modules in training mode or not) to
        keep graphs for; the one not used for longest goes.
    copy : bool, default True
        Whether results are copied out of the graph's memory. Otherwise the next call
        overwrites them.

    Returns
    -------
    Captured
        Gives what ``step`` gives, untracked. On a CPU it runs ``step`` itself.

    Raises
    ------
    CaptureError
        Where the step reads from the GPU, so that what it does may depend on the data, or calls
        what cannot be recorded, or gives a number that was computed on the host; naming the line.

    Notes
    -----
    The first call of a kind is eager, the second records. Results, random numbers and
    the states of optimizers are the same to the bit as those of eager calls. The Python code
    does not run in a replay: lists it appends to, counters and prints stand still.

    Arrays that the step finds elsewhere than in its arguments, such as parameters, are used
    where they are: change them in place (``p.assign(...)``, ``x[...] = ...``), in the step and
    outside. Arguments are copied to where the graph reads them, but for those that are the very
    array of the call before: these are read where they are, so refill one array to spare copies.
    After a call ``p.grad`` is the gradient of that call.

    Examples
    --------
    >>> import rtxarr as rx
    >>> @rx.capture
    ... def step(x):
    ...     return rx.sum(rx.tanh(x) ** 2)
    >>> float(step(rx.zeros(3)))
    0.0
    """
    if step is None:
        return functools.partial(capture, max_graphs=max_graphs, copy=copy)
    return Captured(step, max_graphs=max_graphs, copy=copy)


class Captured:
    """A step and the graphs recorded of it; see :func:`capture`.

    Attributes
    ----------
    n_graphs : int
        How many are held.
    n_captures : int
        How many were recorded so far.
    """

    def __init__(self, step: Callable, *, max_graphs: int = 16, copy: bool = True):
        if not callable(step):
            raise TypeError(f"step must be callable, got {type(step).__name__}")
        if not isinstance(max_graphs, int) or max_graphs < 1:
            raise ValueError(f"max_graphs must be an int >= 1, got {max_graphs!r}")
        functools.update_wrapper(self, step)
        self._step = step
        self._copy = copy
        self._max_graphs = max_graphs
        # By kind of arguments: a graph, or the arrays among those of its eager call.
        self._known: OrderedDict[tuple, _Graph | list] = OrderedDict()
        self._lock = threading.RLock()
        self._streams: dict[int, Any] = {}
        self._workspaces: dict[int, Any] = {}
        self._resources: dict[Any, Any] = {}
        self._last_stream: Any = None
        self._modules: list | None = None
        self._n_new = 0
        self.n_captures = 0

    @property
    def n_graphs(self) -> int:
        return sum(isinstance(one, _Graph) for one in self._known.values())

    def pool_bytes(self, place: Any) -> int:
        """Give the bytes that the graphs on a device keep in memory pools of their own."""
        graphs = [one for one in list(self._known.values()) if isinstance(one, _Graph)]
        if not graphs or place.kind == "cpu":
            return 0
        with place:
            return sum(graph.pool.total_bytes() for graph in graphs)

    def clear(self) -> None:
        """Forget all graphs and give their memory back."""
        with self._lock:
            self._known.clear()
            self._resources.clear()

    def __repr__(self):
        return f"<Captured {_name(self._step)}, {self.n_graphs} graphs>"

    def __get__(self, owner, kind=None):
        return self if owner is None else types.MethodType(self, owner)

    def __call__(self, *args, **kwargs):
        if recorder() is not None:  # part of a larger step
            return self._step(*args, **kwargs)
        leaves, structure = flatten((args, kwargs))
        place = _place(leaves)
        if place.kind == "cpu":
            return _untracked(self._step(*args, **kwargs))
        with self._lock:
            if _device.device() == place:
                return self._run(leaves, structure, place.index)
            with place:
                return self._run(leaves, structure, place.index)

    def _run(self, leaves, structure, device_id):
        if self._modules is None:
            self._modules = _modules(self._step, leaves)
        kinds = [_kind(x) for x in leaves]
        switches = tuple([module.training for module in self._modules])
        key = (structure, device_id, is_recording(), active_dtype(), switches, *kinds)
        try:
            known = self._known.get(key)
        except TypeError:
            for x in leaves:
                if not _is_array(x):
                    _require_hashable(x)
            raise
        if known is None:
            result = self._eager(leaves, structure)
            self._keep(key, _device_arrays(leaves))
            return result
        stream = _device.cupy.cuda.get_current_stream()
        self._follow(stream)
        if isinstance(known, _Graph):
            self._known.move_to_end(key)
            if known.take(leaves, stream):
                if profiles and state.mode & PROFILED:
                    with state.profile.range(f"replay of {_name(self._step)}"):
                        return known.replay(stream)
                return known.replay(stream)
            bound = known.still_bound(leaves)
        else:
            now = _device_arrays(leaves)
            bound = {i for i, x in enumerate(now) if x is not None and x is known[i]}
        graph = self._record(leaves, structure, bound)
        self._keep(key, graph)
        return graph.replay(stream, first=True)

    def _keep(self, key, graph):
        self._known[key] = graph
        self._known.move_to_end(key)
        while len(self._known) > self._max_graphs:
            self._known.popitem(last=False)
        self._n_new = 0 if isinstance(graph, _Graph) else self._n_new + 1
        if self._n_new == 2 * self._max_graphs:
            warnings.warn(
                f"{self!r} got {self._n_new} kinds of arguments in a row that it had no graph for, "
                "so it runs eagerly: numbers that vary should be arrays, shapes few",
                RuntimeWarning,
                stacklevel=5,
            )

    def _follow(self, stream):
        """Wait on ``stream`` for what was started on another: graphs share their inputs."""
        last = self._last_stream
        if last is not None and last.ptr != stream.ptr:
            stream.wait_event(last.record())
        self._last_stream = stream

    def _own_stream(self):
        device_id = _device.cupy.cuda.runtime.getDevice()
        if device_id not in self._streams:
            self._streams[device_id] = _device.cupy.cuda.Stream(non_blocking=True)
        return self._streams[device_id]

    def _workspace(self):
        """Give what the graphs' matrix products use, one at a time."""
        cupy = _device.cupy
        device_id = cupy.cuda.runtime.getDevice()
        if device_id not in self._workspaces:
            self._workspaces[device_id] = cupy.empty(blas.WORKSPACE_BYTES, np.uint8)
        return self._workspaces[device_id]

    def _eager(self, leaves, structure):
        current, own = _device.cupy.cuda.get_current_stream(), self._own_stream()
        self._follow(current)
        self._modules = _modules(self._step, leaves)
        own.wait_event(current.record())
        try:
            with own, keeping(self._resources), blas.use_workspace(self._workspace()):
                args, kwargs = unflatten(structure, [_on_device(x) for x in leaves])
                return _untracked(self._step(*args, **kwargs))
        finally:
            current.wait_event(own.record())

    def _record(self, leaves, structure, bound):
        cupy = _device.cupy
        # What the eager call left in the pool is of no use to a graph, which has its own.
        cupy.get_default_memory_pool().free_all_blocks()
        graph = _Graph(leaves, bound, self._copy)
        own = self._own_stream()
        own.wait_event(cupy.cuda.get_current_stream().record())
        args, kwargs = unflatten(structure, graph.arguments(leaves))
        watch = Watch()
        with (
            own,
            keeping(self._resources),
            cupy.cuda.using_allocator(graph.pool.malloc),
            blas.use_workspace(self._workspace()),
            graph.recorder,
            watch,
        ):
            own.begin_capture()
            try:
                outputs = _untracked(self._step(*args, **kwargs))
                graph.set_outputs(outputs)
                graph.set_state(self._modules)
                found = own.end_capture()
            except BaseException as error:
                _abandon(own)
                graph.recorder.fail()
                raise _explained(error, self._step) from error
        try:
            watch.check(found)
        except RuntimeError as error:
            graph.recorder.fail()
            raise CaptureError(f"{_name(self._step)}: {error}") from None
        graph.graph = found
        self.n_captures += 1
        return graph


class _Graph:
    """One recorded step: where its inputs and outputs lie, and its memory."""

    def __init__(self, leaves, bound, copy):
        cupy = _device.cupy
        self.graph: Any = None
        self.pool = cupy.cuda.MemoryPool()
        self.recorder = Recorder()
        self._copy = copy
        # Arguments that are read where they are, and the graph's own arrays for the others.
        self.bound = {i: _array(leaves[i]) for i in bound}
        self._inputs: list[tuple[int, Any]] = []
        for i, x in enumerate(leaves):
            if _is_array(x) and i not in bound:
                self._inputs.append((i, _copy_of(_array(x))))

    def arguments(self, leaves):
        """Give the leaves with the graph's own arrays in place of those that are copied."""
        found = list(leaves)
        for i, buffer in self._inputs:
            x = leaves[i]
            found[i] = make_tensor(buffer, None, 0, None) if isinstance(x, Tensor) else buffer
        return found

    def set_outputs(self, outputs):
        self._leaves, self._structure = flatten(outputs)
        for x in self._leaves:
            if not _is_array(x) and not isinstance(x, (str, bool, type(None))):
                raise CaptureError(
                    f"the step gives {x!r}, which was computed on the host and would stay as it "
                    "is in every replay; give an array instead"
                )

    def set_state(self, modules):
        """Note the parameters and buffers that a replay may change, and their gradients."""
        owned = {}
        for module in modules:
            for x in (*module.parameters(), *module.buffers()):
                owned[id(x)] = x
        self._counters = [store_of(x) for x in owned.values()]
        self._grads = [(x.node, x.node.grad) for x in owned.values() if type(x.node) is Leaf]

    def still_bound(self, leaves):
        """Give the places of the bound arguments that are where they were."""
        return {i for i, x in self.bound.items() if _array(leaves[i]).data.ptr == x.data.ptr}

    def take(self, leaves, stream):
        """Copy the arguments in; False when one that is bound has moved."""
        for i, x in self.bound.items():
            if _array(leaves[i]).data.ptr != x.data.ptr:
                return False
        for i, buffer in self._inputs:
            x = _array(leaves[i])
            if isinstance(x, np.ndarray):
                buffer.set(x)
            elif x._c_contiguous and buffer._c_contiguous:
                buffer.data.copy_from_device_async(x.data, x.nbytes, stream)
            else:
                buffer[...] = x
        return True

    def replay(self, stream, *, first=False):
        if not first:
            self.recorder.refresh()
            for counter in self._counters:
                counter[0] += 1
            for leaf, grad in self._grads:
                leaf.grad = grad
        self.recorder.upload()
        self.graph.launch(stream)
        if not self._copy:
            return unflatten(self._structure, self._leaves)
        copies = []
        for x in self._leaves:
            if isinstance(x, Tensor):
                copies.append(make_tensor(x.data.copy(), None, 0, None))
            else:
                copies.append(x.copy() if _is_array(x) else x)
        return unflatten(self._structure, copies)


# ------------------------------------------------------------------------------------ arguments


def _is_array(x):
    """Tell whether an argument is copied or bound: no parameter, which is used where it is."""
    if isinstance(x, Tensor):
        return x.node is None
    return _device.is_array(x)


def _array(x):
    return x.data if isinstance(x, Tensor) else x


def _kind(x):
    """Give what two arguments must have in common for one graph."""
    if isinstance(x, Tensor):
        if x.node is None:
            return Tensor, _kind(x.data)
        if type(x.node) is not Leaf:
            raise ValueError(
                "arguments of a captured step must not be parts of a graph, as no gradient can "
                "go through it; got a computed Tensor: pass x.detach()"
            )
        return Tensor, id(x)
    if _device.is_device_array(x):
        strides = None if x._c_contiguous else x.strides
        return x.shape, x.dtype, x.data.device_id, strides
    if _device.is_array(x):
        return x.shape, x.dtype
    return type(x), x


def _require_hashable(x):
    try:
        hash(x)
    except TypeError:
        raise TypeError(
            "arguments of a captured step must be arrays, or nested tuples, lists and dicts of "
            f"them, or hashable, got {type(x).__name__}"
        ) from None


def _place(leaves):
    for x in leaves:
        x = _array(x)
        if _device.is_device_array(x):
            return _device.device_of(x)
    return _device.device()


def _device_arrays(leaves):
    """Give the arrays on the GPU among the arguments, None for what is none."""
    return [
        x if _is_array(leaf) and _device.is_device_array(x := _array(leaf)) else None
        for leaf in leaves
    ]


def _on_device(x):
    """Give host arrays as the graph will see them."""
    if isinstance(x, Tensor):
        return x if _device.is_device_array(x.data) else Tensor(_on_device(x.data))
    return _device.to_device(x, _device.device()) if isinstance(x, np.ndarray) else x


def _copy_of(x):
    cupy = _device.cupy
    if isinstance(x, np.ndarray):
        return cupy.asarray(x)
    out = cupy.empty_like(x)
    out[...] = x
    return out


def _untracked(tree):
    """Give results without their graph, whose memory goes back."""
    leaves, structure = flatten(tree)
    return unflatten(structure, [x.detach() if isinstance(x, Tensor) else x for x in leaves])


def _modules(step, leaves):
    """Find the modules that a step can see, whose training mode changes what it does."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo = [(step, 2), *((x, 1) for x in leaves)]
    while todo:
        x, depth = todo.pop()
        if id(x) in seen or isinstance(x, (str, bytes, int, float, type, types.ModuleType)):
            continue
        seen.add(id(x))
        kind = type(x)
        if isinstance(getattr(kind, "training", None), bool) and hasattr(kind, "modules"):
            found.update((id(module), module) for module in x.modules())
        elif isinstance(x, (list, tuple, set)):
            todo += [(y, depth) for y in x]
        elif isinstance(x, dict):
            todo += [(y, depth) for y in x.values()]
        else:
            todo += [(y, depth - 1) for y in _parts(x, depth)]
    return list(found.values())


def _parts(x, depth):
    """Give what a function closes over and names, what a method belongs to, or an object holds."""
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, types.MethodType):
        return [x.__self__, *_parts(x.__func__, depth)]
    if isinstance(x, types.FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or () if _filled(cell)]
        known = x.__globals__
        named = [known[name] for name in x.__code__.co_names if name in known] if depth else []
        return [*cells, *named, *(x.__defaults__ or ())]
    if depth and not _device.is_array(x):
        return list(getattr(x, "__dict__", {}).values())
    return []


def _filled(cell):
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


# ------------------------------------------------------------------------------------- failures


def _abandon(stream):
    """End a capture that failed, so that the stream can be used again."""
    try:
        if stream.is_capturing():
            stream.end_capture()
    except Exception:  # the error of the capture that it ends
        return


_OURS = ("rtxarr.", "cupy", "cupyx", "array_api_compat", "numpy", "cuda.", "nvmath", "cudnn")


def _explained(error, step):
    """Give the error to raise: the user's own, or where and why nothing can be recorded."""
    if isinstance(error, CaptureError):
        return error
    reads = "captur" in str(error)
    if not (reads or isinstance(error, NotImplementedError) or "CUDA" in type(error).__name__):
        return error
    if "cuBLAS" in str(error):
        why = "multiplies raw CuPy arrays through CuPy, which cannot be recorded; use rx.matmul"
    elif isinstance(error, NotImplementedError) or not reads:
        why = "calls what cannot be recorded"
    else:
        why = (
            "waits for the GPU or reads from it (a number, a comparison, a copy to the host, a "
            "size that depends on values), which a graph cannot do"
        )
    return CaptureError(f"{_name(step)} cannot be captured: {_line(error)} {why} ({error})")


def _name(step):
    return getattr(step, "__qualname__", repr(step))


def _line(error):
    """Name the innermost line that is not this library's, nor those below."""
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [
        (frame, number)
        for frame, number in frames
        if not _is_ours(frame.f_globals.get("__name__", ""))
    ]
    frame, number = (own or frames)[-1]
    file = frame.f_code.co_filename
    text = linecache.getline(file, number).strip()
    return f"{file}:{number} `{text}`"


def _is_ours(module):
    return module.startswith(_OURS) and not module.startswith("rtxarr.recipes")
