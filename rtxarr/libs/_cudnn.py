"""cuDNN through its Python frontend: plans kept by problem and on disk, a handle a thread.

A problem is a named tuple that says all a plan depends on, and describes itself as a graph whose
tensors are numbered from 1 in the order in which their addresses are given.
"""

from __future__ import annotations

import atexit
import collections
import hashlib
import logging
import statistics
import threading
from typing import Any, NamedTuple

from rtxarr import _kernel_cache
from rtxarr._replay import kept_resources
from rtxarr.libs._layout import Unsupported

__all__ = ["Cudnn", "Graph", "Spec"]

_log = logging.getLogger("rtxarr")
_MIN_VERSION, _MIN_FRONTEND = 91600, (1, 32)
_MAX_PLANS = 4096
_MAX_CANDIDATES = 8
# Where so many problems in a row were met once only, as those of a sequence that grows, plans are
# not made (that takes up to a second) before a problem is met so often.
_N_FLEETING, _N_MET = 64, 3
# Plans of the frontend's own engines compile kernels through other packages.
_BACKEND_ENGINES = range(10_000)
_MAX_TUNED_WORKSPACE = 1 << 30  # bytes, of plans of which there are others
# Candidates are timed over so many runs, and those that take less than so many times as long as the
# fastest so often more.
_N_RUNS, _CLOSE, _N_TURNS = 3, 1.2, 5
# What no plan may do, and what plans for strict float32 may not do either.
_UNSOUND = ("NONDETERMINISTIC", "REDUCED_PRECISION_REDUCTION", "FFT", "WINOGRAD",
            "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6", "WINOGRAD_TILE_13x13")  # fmt: skip
_INEXACT = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS")
_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT", "int32": "INT32",
          "e4m3": "FP8_E4M3"}  # fmt: skip


class Spec(NamedTuple):
    """A tensor: element type, and lengths and strides (in elements) of its axes."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Graph:
    """A frontend graph whose tensors get their numbers in the order of the calls."""

    def __init__(self, dnn: Any, graph: Any) -> None:
        self.dnn, self.graph = dnn, graph
        self.n_tensors = 0

    def _number(self) -> int:
        self.n_tensors += 1
        return self.n_tensors

    def type(self, name: str) -> Any:
        return getattr(self.dnn.data_type, _TYPES[name])

    def tensor(self, spec: Spec, name: str) -> Any:
        """Declare an input."""
        return self.graph.tensor(
            dim=list(spec.shape),
            stride=list(spec.strides),
            data_type=self.type(spec.dtype),
            name=name,
            uid=self._number(),
        )

    def output(self, tensor: Any, spec: Spec) -> None:
        """Say where a result goes."""
        tensor.set_uid(self._number())
        tensor.set_output(True).set_dim(list(spec.shape)).set_stride(list(spec.strides))
        tensor.set_data_type(self.type(spec.dtype))


class _Plan:
    """A finished plan, ready to be started by any handle of its device."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self.workspace = int(graph.get_workspace_size())
        self.n_starts = 0
        self._lock = threading.Lock()
        # The public way to start a plan describes each array anew, for 30 us.
        self._quick = getattr(getattr(graph, "_lowered_graph", None), "_execute", None)

    def start(self, handle: Any, pointers: tuple[int, ...], workspace: int) -> None:
        pack = dict(enumerate(pointers, 1))
        with self._lock:
            self.n_starts += 1
            if self._quick is not None:
                try:
                    self._quick(pack, workspace, handle.backend_handle, None, None, None)
                    return
                except TypeError:  # another version takes other arguments
                    self._quick = None
            self._graph.execute(pack, workspace, handle=handle)


class _Thread(threading.local):
    device_id: int | None = None

    def __init__(self) -> None:
        self.handles: dict[int, Any] = {}


class Cudnn:
    """The loaded library, bound to CuPy.

    Raises
    ------
    ImportError
        When nvidia-cudnn-frontend is not installed.
    RuntimeError
        When cuDNN is not found, or either is too old.
    """

    def __init__(self, cupy: Any) -> None:
        import cudnn

        version = cudnn.backend_version()
        self.version = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        if version < _MIN_VERSION:
            raise RuntimeError(f"cuDNN {self.version} is older than 9.16")
        self.frontend_version = cudnn.__version__
        if tuple(int(n) for n in self.frontend_version.split(".")[:2]) < _MIN_FRONTEND:
            raise RuntimeError(f"nvidia-cudnn-frontend {self.frontend_version} is older than 1.32")
        # What it reports there we get as an exception too.
        logging.getLogger("cudnn").addHandler(logging.NullHandler())
        self._dnn = cudnn
        self._refusals = (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError)
        self.cupy = cupy
        self.array = cupy.ndarray
        self._current_device = cupy.cuda.runtime.getDevice
        self._current_stream = cupy.cuda.get_current_stream
        self._plans: dict[tuple, _Plan | str] = {}
        self._recent: collections.deque = collections.deque(maxlen=_N_FLEETING)
        self._n_met: collections.Counter = collections.Counter()
        self._devices: dict[int, Any] = {}
        atexit.register(self._forget)  # the frontend reports what is left at exit as leaks
        self._lock = threading.RLock()
        self._thread = _Thread()

    def __repr__(self) -> str:
        return f"cuDNN {self.version}, through nvidia-cudnn-frontend {self.frontend_version}"

    def _forget(self):
        self._plans.clear()
        self._recent.clear()

    # ------------------------------------------------------------------------ running

    def run(self, problem: Any, pointers: tuple[int, ...]) -> None:
        """Solve a problem on the current device and stream.

        Parameters
        ----------
        problem : named tuple
            With ``name()``, ``describe(graph)``, ``strict`` (float32 operands are not rounded)
            and ``tuned`` (candidates are timed when it is first met).
        pointers : tuple of int
            Addresses of its tensors, multiples of 16.

        Raises
        ------
        Unsupported
            Before anything is written, when there is no plan for it.
        """
        device_id = self._current_device()
        stream = self._current_stream()
        handle = self._handle(device_id, stream.ptr)
        plan = self._plans.get((device_id, problem))
        if plan is None:
            plan = self._new_plan(device_id, problem, handle, stream, pointers)
        if isinstance(plan, str):
            raise Unsupported(plan)
        self._start(plan, handle, pointers)

    def _start(self, plan, handle, pointers):
        # Freed for what follows on the same stream, in a captured graph too.
        workspace = self.cupy.empty(plan.workspace, "uint8") if plan.workspace else None
        plan.start(handle, pointers, 0 if workspace is None else workspace.data.ptr)

    def _handle(self, device_id, stream):
        """Return this thread's handle of the current device, set to the stream."""
        thread = self._thread
        if thread.device_id != device_id:
            # Makes the device's context this thread's; CuPy does so only when it needs it.
            self.cupy.cuda.runtime.setDevice(device_id)
            thread.device_id = device_id
        handle = thread.handles.get(device_id)
        if handle is None:
            handle = thread.handles[device_id] = self._dnn.create_handle()
        self._dnn.set_stream(handle, stream)
        return handle

    def memory(self, device_id: int) -> int:
        """Return how many bytes of memory a device has."""
        return int(self._properties(device_id)["totalGlobalMem"])

    def _properties(self, device_id):
        if device_id not in self._devices:
            self._devices[device_id] = self.cupy.cuda.runtime.getDeviceProperties(device_id)
        return self._devices[device_id]

    # ----------------------------------------------------------------------- planning

    def n_plans(self) -> int:
        return sum(type(plan) is _Plan for plan in self._plans.values())

    def _new_plan(self, device_id, problem, handle, stream, pointers):
        with self._lock:
            key = (device_id, problem)
            if key in self._plans:
                return self._plans[key]
            if len(self._plans) >= _MAX_PLANS:  # never dropped: a captured graph may use them
                return f"more than {_MAX_PLANS} kinds of problems"
            if self._is_fleeting(key):
                return "problems that differ from call to call"
            try:
                plan = self._make(device_id, problem, handle, stream, pointers)
                self._recent.append(plan)
            except self._refusals as error:
                _log.debug("cuDNN refused %s: %s", problem, error)
                plan = f"no plan for {problem.name()}"
            self._plans[key] = plan
            return plan

    def _is_fleeting(self, key):
        recent = self._recent
        if kept_resources() is not None:  # a graph will start it again and again
            return False
        if len(recent) < _N_FLEETING or any(plan.n_starts > 1 for plan in recent):
            return False
        if len(self._n_met) > _MAX_PLANS:
            self._n_met.clear()
        self._n_met[key] += 1
        return self._n_met[key] < _N_MET

    def _make(self, device_id, problem, handle, stream, pointers):
        """Take the plan that was kept for this kind of GPU, or choose one and keep it."""
        digest = self._digest(device_id, problem)
        kept = _kernel_cache.load(digest)
        if kept is not None:
            try:
                return self._restore(handle, kept[1])
            except self._refusals:
                pass  # of another build of the library: plan anew
        found = self._candidates(device_id, problem, handle)
        first = next(found)
        capturing = stream.is_capturing()
        # Timed only where the choice is kept, so that later runs give the same bits.
        if problem.tuned and not capturing and _kernel_cache.cache_dir() is not None:
            first = self._fastest([first, *found], handle, stream, pointers)
        if not capturing:
            _kernel_cache.store(digest, "cuDNN", first)
        return self._restore(handle, first)

    def _digest(self, device_id, problem):
        properties = self._properties(device_id)
        device = tuple(properties[x] for x in ("name", "major", "minor", "multiProcessorCount"))
        known = (self.version, self.frontend_version, device, type(problem).__name__, problem)
        return hashlib.sha256(repr(known).encode()).hexdigest()

    def _candidates(self, device_id, problem, handle):
        """Yield plans that may be used, the one deemed fastest first, in serialized form."""
        dnn = self._dnn
        float32 = dnn.data_type.FLOAT
        graph = dnn.pygraph(
            name="rtxarr",
            io_data_type=float32,
            intermediate_data_type=float32,
            compute_data_type=float32,
            handle=handle,
        )
        problem.describe(Graph(dnn, graph))
        graph.validate()
        graph.build_operation_graph()
        modes = dnn.heur_mode
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        unwanted = _UNSOUND + _INEXACT if problem.strict else _UNSOUND
        notes = [getattr(dnn.numerical_note, name) for name in unwanted]
        graph.deselect_numeric_notes(notes)
        most = _MAX_TUNED_WORKSPACE if problem.tuned else self.memory(device_id)
        n, refused = 0, None
        for i in range(graph.get_execution_plan_count()):
            try:
                if graph.get_engine_and_knobs_at_index(i)[0] not in _BACKEND_ENGINES:
                    continue
                graph.build_plan_at_index(i)
                if graph.get_workspace_size() > most:
                    continue
                plan = graph.serialize(as_bytes=True)
            except self._refusals as error:
                refused = error
                continue
            yield plan
            n += 1
            if n == _MAX_CANDIDATES:
                break
        if n == 0:
            raise refused or ValueError("only plans that are not exact or not deterministic")

    def _restore(self, handle, content):
        graph = self._dnn.pygraph(handle=handle)
        graph.deserialize(handle, content)
        return _Plan(graph)

    def _fastest(self, candidates, handle, stream, pointers):
        """Time candidates on the caller's arrays; those that are close more than once, in turn."""
        times: dict[int, list[float]] = {}
        plans = {}
        for i, candidate in enumerate(candidates):
            try:
                plans[i] = self._restore(handle, candidate)
                self._start(plans[i], handle, pointers)
                times[i] = [self._time(plans[i], handle, stream, pointers)]
            except (*self._refusals, MemoryError):
                continue
        least = min((x for (x,) in times.values()), default=0.0)
        close = [i for i, (x,) in times.items() if x <= _CLOSE * least]
        for _ in range(_N_TURNS if len(close) > 1 else 0):
            for i in close:
                times[i].append(self._time(plans[i], handle, stream, pointers))
        best, fastest = 0, float("inf")
        for i in close:
            elapsed = statistics.median(times[i][-_N_TURNS:])
            # Not for what may be noise: the order of the library's is the same each time.
            if elapsed < 0.99 * fastest:
                best, fastest = i, elapsed
        return candidates[best]

    def _time(self, plan, handle, stream, pointers):
        start, stop = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        # Behind a first run, so that the time to start the others does not count.
        self._start(plan, handle, pointers)
        start.record(stream)
        for _ in range(_N_RUNS):
            self._start(plan, handle, pointers)
        stop.record(stream)
        stop.synchronize()
        return self.cupy.cuda.get_elapsed_time(start, stop)
