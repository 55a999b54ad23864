"""Whole steps as CUDA graphs: recorded once for each kind of arguments, then replayed.

The first call with arguments of a kind runs the step eagerly, and so compiles, plans and creates
what it needs. It stays on the current stream: what it leaves behind, such as gradients and the
states of optimizers, lives in memory that CuPy reuses in the order of the stream it was taken on.
The second records the step on a stream of its own, into a memory pool that stays with the graph,
and starts the graph; later ones only start it. What the host does anew in each step is the part of
:mod:`rtxarr._replay`; what the step uses beside its arguments is seen by a :class:`Witness`.
"""

import functools
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._allocation import apart
from rtxarr._out_of_memory import explain_out_of_memory
from rtxarr._replay import Recorder, keeping, kept_resources, n_swaps, recorder, settings
from rtxarr.autograd._autocast import active_dtype
from rtxarr.autograd._capture_arguments import (
    array_of,
    copy_of,
    device_arrays,
    is_copied,
    kind,
    on_device,
    place_of,
    require_hashable,
    untracked,
)
from rtxarr.autograd._capture_check import Watch
from rtxarr.autograd._capture_errors import CaptureError, Unsettled, explained, name_of
from rtxarr.autograd._capture_places import Places, modules_of
from rtxarr.autograd._mode import PROFILED, is_recording, profiles, state
from rtxarr.autograd._tape import Leaf, Tensor, make_tensor
from rtxarr.autograd._tree import flatten, unflatten
from rtxarr.autograd._witness import Witness
from rtxarr.libs import blas

__all__ = ["CaptureError", "Captured", "capture"]


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
        Branches and loops are said with :func:`rtxarr.polygraph.cond` and ``while_loop``.

    Notes
    -----
    The first call of a kind is eager, the second records. Results, random numbers and
    the states of optimizers are the same to the bit as those of eager calls. The Python code
    does not run in a replay: lists it appends to, counters and prints stand still.

    Arrays that the step finds elsewhere than in its arguments, such as parameters, are used
    where they are: change them in place (``p.assign(...)``, ``x[...] = ...``) in the step; one
    that was replaced between two calls makes the step be recorded anew. Arguments are copied to
    where the graph reads them, but for those that are the very array of the call before: these
    are read where they are, so refill one array to spare copies. A step must not write into its
    arguments. After a call ``p.grad`` is the gradient of that call.

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
    is_recording : bool
        Whether one is being recorded now.
    """

    is_recording = False

    def __init__(self, step: Callable, *, max_graphs: int = 16, copy: bool = True):
        if not callable(step):
            raise TypeError(f"step must be callable, got {type(step).__name__}")
        if not isinstance(max_graphs, int) or max_graphs < 1:
            raise ValueError(f"max_graphs must be an int >= 1, got {max_graphs!r}")
        functools.update_wrapper(self, step, updated=())
        self._step = step
        self._copy = copy
        self._max_graphs = max_graphs
        self._cases: list[_Case] = []  # the one used last comes last
        self._by_key: dict[tuple, list[_Case]] = {}
        self._lock = threading.RLock()
        self._streams: dict[int, Any] = {}
        self._workspaces: dict[int, Any] = {}
        self._last_streams: dict[int, tuple] = {}
        self._n_new = 0
        self.n_captures = 0

    @property
    def n_graphs(self) -> int:
        return sum(case.graph is not None for case in [*self._cases])

    def pool_bytes(self, place: Any) -> int:
        """Give the bytes that the graphs on a device keep in memory pools of their own."""
        # Without the lock: who asks may have run out of memory in a step of another's.
        graphs = [graph for case in [*self._cases] if (graph := case.graph) is not None]
        if not graphs or place.kind == "cpu":
            return 0
        with place:
            return sum(graph.pool.total_bytes() for graph in graphs)

    def clear(self) -> None:
        """Forget all graphs and give their memory back."""
        with self._lock:
            self._cases.clear()
            self._by_key.clear()

    def __repr__(self):
        return f"<Captured {name_of(self._step)}, {self.n_graphs} graphs>"

    def __get__(self, owner, kind=None):
        return self if owner is None else types.MethodType(self, owner)

    def __call__(self, *args, **kwargs):
        if recorder() is not None or kept_resources() is not None:  # part of a larger step
            return untracked(self._step(*args, **kwargs))
        leaves, structure = flatten((args, kwargs))
        leaves = [np.asarray(x) if isinstance(x, np.generic) else x for x in leaves]
        place = place_of(leaves)
        if place.kind == "cpu":
            return untracked(self._step(*args, **kwargs))
        try:
            with self._lock:
                if _device.device() == place:
                    return self._run(leaves, structure, place.index)
                with place:
                    return self._run(leaves, structure, place.index)
        except MemoryError as error:
            explain_out_of_memory(error, place)
            raise

    def _run(self, leaves, structure, device_id):
        kinds = [kind(x) for x in leaves]
        key = (structure, device_id, is_recording(), active_dtype(), settings(), *kinds)
        case = self._find(key, leaves)
        if case is None:
            return self._eager(key, leaves, structure)
        stream = _device.cupy.cuda.get_current_stream()
        self._follow(stream)
        if case is not self._cases[-1]:
            self._cases.remove(case)
            self._cases.append(case)
        graph = case.graph
        if graph is not None and graph.is_current() and graph.take(leaves, stream):
            if profiles and state.mode & PROFILED:
                with state.profile.range(f"replay of {name_of(self._step)}"):
                    return graph.replay(stream)
            return graph.replay(stream)
        try:
            self._record(case, leaves, structure)
        except Unsettled:
            self._drop(case)
            return self._eager(key, leaves, structure)
        return case.graph.replay(stream, first=True)

    def _find(self, key, leaves):
        """Give the case of a key whose modules are in the mode that they were in; None for none."""
        try:
            cases = self._by_key.get(key, ())
        except TypeError:
            for x in leaves:
                if not is_copied(x):
                    require_hashable(x)
            raise
        for case in cases:
            for module, training in case.modules:
                if module.training is not training:
                    break
            else:
                return case
        return None

    def _keep(self, case):
        self._cases.append(case)
        self._by_key.setdefault(case.key, []).append(case)
        if len(self._cases) > self._max_graphs:
            self._drop(self._cases[0])
        self._n_new += 1
        if self._n_new == 2 * self._max_graphs:
            warnings.warn(
                f"{self!r} got {self._n_new} kinds of arguments in a row that it had no graph for, "
                "so it runs eagerly: numbers that vary should be arrays, shapes few",
                RuntimeWarning,
                stacklevel=5,
            )

    def _drop(self, case):
        self._cases.remove(case)
        rest = self._by_key[case.key]
        rest.remove(case)
        if not rest:
            del self._by_key[case.key]

    def _follow(self, stream):
        """Wait on ``stream`` for what was started on another: graphs share their inputs."""
        cuda = _device.cupy.cuda
        device_id = cuda.runtime.getDevice()
        # Handle 2 means another stream in each thread.
        name = stream.ptr, threading.get_ident() if stream.ptr == 2 else 0
        last = self._last_streams.get(device_id)
        if last is not None and last[0] != name:
            if 2 in (last[0][0], name[0]):
                cuda.Device().synchronize()
            else:
                stream.wait_event(last[1].record())
        self._last_streams[device_id] = name, stream

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
            with apart():
                self._workspaces[device_id] = cupy.empty(blas.WORKSPACE_BYTES, np.uint8)
        return self._workspaces[device_id]

    def _eager(self, key, leaves, structure):
        self._follow(_device.cupy.cuda.get_current_stream())
        modules, seen, resources = modules_of(self._step, leaves), Witness(), {}
        with keeping(resources), blas.use_workspace(self._workspace()), seen:
            args, kwargs = unflatten(structure, [on_device(x) for x in leaves])
            result = untracked(self._step(*args, **kwargs))
        modules = [*{**seen.modules, **modules}.values()]
        self._keep(_Case(key, modules, seen.tensors, device_arrays(leaves), resources))
        return result

    def _record(self, case, leaves, structure):
        cupy = _device.cupy
        now = device_arrays(leaves)
        if case.graph is None:
            bound = {i for i, x in enumerate(now) if x is not None and x is case.arrays[i]}
        else:
            bound = case.graph.still_bound(leaves)
        case.graph = None
        # What the eager call left in the pool is of no use to a graph, which has its own.
        cupy.get_default_memory_pool().free_all_blocks()
        graph = _Graph(leaves, bound, self._copy)
        own = self._own_stream()
        own.wait_event(cupy.cuda.get_current_stream().record())
        args, kwargs = unflatten(structure, graph.arguments(leaves))
        before = {i: x.data for i, x in case.tensors.items()}
        places = Places(self._step, leaves)
        watch, seen = Watch(own), Witness()
        with (
            own,
            keeping(case.resources),
            cupy.cuda.using_allocator(graph.pool.malloc),
            blas.use_workspace(self._workspace()),
            graph.recorder,
            watch,
            seen,
        ):
            own.begin_capture()
            self.is_recording = True
            try:
                outputs = untracked(self._step(*args, **kwargs))
                graph.set_outputs(outputs)
                found = own.end_capture()
            except BaseException as error:
                _abandon(own)
                _undo(graph, seen)
                raise explained(error, self._step) from error
            finally:
                self.is_recording = False
        try:
            graph.set_state(case.tensors, before, seen)
            uses = watch.check(found, graph.recorder)
            places.keep(map(uses, places.arrays))
        except RuntimeError as error:
            _undo(graph, seen)
            raise CaptureError(f"{name_of(self._step)}: {error}") from None
        graph.graph, graph.places = found, places
        case.graph = graph
        case.arrays = [None] * len(leaves)
        case.tensors = graph.tensors()
        self.n_captures += 1
        self._n_new = 0


class _Case:
    """What is known of calls of one kind, with modules in one mode.

    Attributes
    ----------
    key : tuple
    modules : list of (Module, bool)
        Those that the step may call, and whether they trained when it began.
    tensors : dict
        By id, the leaves, parameters and buffers that the eager call took.
    arrays : list
        The arrays on the GPU among the eager call's arguments, until there is a graph.
    resources : dict
        What the step keeps from its eager call on.
    graph : _Graph or None
    """

    def __init__(self, key, modules, tensors, arrays, resources):
        self.key = key
        self.modules = modules
        self.tensors = tensors
        self.arrays = arrays
        self.resources = resources
        self.graph: Any = None


class _Graph:
    """One recorded step: where its inputs and outputs lie, its memory, and what it changes."""

    def __init__(self, leaves, bound, copy):
        cupy = _device.cupy
        self.graph: Any = None
        self.places: Any = None
        self.pool = cupy.cuda.MemoryPool()
        self.recorder = Recorder()
        self._n_swaps = n_swaps()
        self._copy = copy
        # Arguments that are read where they are, and the graph's own arrays for the others.
        self.bound = {i: array_of(leaves[i]) for i in bound}
        self._inputs: list[tuple[int, Any]] = []
        with cupy.cuda.using_allocator(self.pool.malloc):
            for i, x in enumerate(leaves):
                if is_copied(x) and i not in bound:
                    self._inputs.append((i, copy_of(array_of(x))))

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
            if not is_copied(x) and not isinstance(x, (str, bool, type(None), Tensor)):
                raise CaptureError(
                    f"the step gives {x!r}, which was computed on the host and would stay as it "
                    "is in every replay; give an array instead"
                )

    def set_state(self, known, before, seen):
        """Note what of the eager call's tensors the graph uses, and what it changed.

        Other leaves were made by the step itself, and are gone.
        """
        self._state = []
        self._grads = []
        for i, x in known.items():
            if i not in seen.tensors:
                continue
            if x.data is not before[i]:
                raise RuntimeError(
                    f"the step gives a {type(x).__name__} of shape {x.shape} another array, which "
                    "a replay does not; change it in place: p.assign(...)"
                )
            self._state.append((x, x.data, x.node is None))
            if type(x.node) is Leaf and id(x.node) in seen.grads:
                self._grads.append((x, x.node.grad))
        self._counters = list(seen.counters.values())

    def tensors(self):
        return {id(x): x for x, _, _ in self._state}

    def is_current(self):
        """Tell whether what it uses is where it was, and parameters are as trainable."""
        if self._n_swaps != n_swaps():
            return False
        for x, data, frozen in self._state:
            if x.data is not data or (x.node is None) is not frozen:
                return False
        return self.places.are_unchanged()

    def still_bound(self, leaves):
        """Give the places of the bound arguments that are where they were."""
        return {i for i, x in self.bound.items() if array_of(leaves[i]).data.ptr == x.data.ptr}

    def take(self, leaves, stream):
        """Copy the arguments in; False when one that is bound has moved."""
        for i, x in self.bound.items():
            if array_of(leaves[i]).data.ptr != x.data.ptr:
                return False
        for i, buffer in self._inputs:
            x = array_of(leaves[i])
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
            for x, grad in self._grads:
                x.node.grad = grad
        self.recorder.upload()
        self.graph.launch(stream)
        self.recorder.started(stream)
        if not self._copy:
            return unflatten(self._structure, self._leaves)
        copies = []
        for x in self._leaves:
            if isinstance(x, Tensor):
                copies.append(make_tensor(x.data.copy(order="K"), None, 0, None))
            else:
                copies.append(x.copy(order="K") if is_copied(x) else x)
        return unflatten(self._structure, copies)


def _abandon(stream):
    """End a capture that failed, so that the stream can be used again."""
    try:
        if stream.is_capturing():
            stream.end_capture()
    except Exception:  # the error of the capture that it ends
        return


def _undo(graph, seen):
    """Take back what the host did in a capture that came to nothing."""
    graph.recorder.fail()
    seen.restore_grads()
