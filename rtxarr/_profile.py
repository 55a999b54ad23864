"""Where the time goes: by operation and by module, as a table and as a trace to look at."""

import json
import os
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rtxarr import _device
from rtxarr._replay import recorder
from rtxarr.autograd._mode import PROFILED, profiles, state


class Row(NamedTuple):
    """A line of the table of a :class:`profile`.

    Attributes
    ----------
    name : str
        An operation, with what it did ("backward", "recompute") behind it; or a module.
    calls : int
    host_ms, device_ms : float
        Of an operation, without what it called; of a module, with it.
    """

    name: str
    calls: int
    host_ms: float
    device_ms: float


class _Span:
    """One stretch of time; those that begin inside it are inner ones."""

    __slots__ = (
        *("kind", "name", "module", "parent", "start", "stop", "inner"),
        *("first", "last", "device_start", "device_stop", "device", "device_inner"),
    )

    def __init__(self, kind, name, module, parent):
        self.kind, self.name, self.module, self.parent = kind, name, module, parent
        self.stop = None  # until it is over
        self.inner = 0
        self.first = self.last = None
        self.device_start = self.device_stop = self.device = self.device_inner = 0.0


class profile:  # noqa: N801  (used like no_grad)
    """Take the time of operations, of their gradients and of modules in a ``with`` block.

    Parameters
    ----------
    nvtx : bool, default False
        Also open NVTX ranges, for Nsight Systems; needs CuPy.
    device : Device or str, default the current device
        On a GPU, device time is measured by CUDA events on the current stream.

    Notes
    -----
    Sees differentiable operations on tensors, in this thread; raw arrays pass by. A backward
    operation has the name of the forward one and counts for the module that called it; what a
    checkpoint repeats is "recompute". Device time lies between two events around an operation:
    where the host is slower than the GPU, it includes waiting for the host. Operations of a step
    that is being captured have host time alone, and its replays are ranges. ``str`` gives the
    table.

    Examples
    --------
    >>> import rtxarr as rx
    >>> from rtxarr import nn
    >>> model = nn.Sequential(nn.Linear(8, 8, device="cpu"), rx.relu)
    >>> with rx.profile(device="cpu") as p:
    ...     rx.sum(model(rx.ones((4, 8), dtype="float32", device="cpu"))).backward()
    >>> sorted(row.name for row in p.operations())
    ['linear', 'linear backward', 'relu', 'relu backward', 'sum', 'sum backward']
    >>> [row.name for row in p.modules()]
    ['Sequential', 'Sequential.layers.0']
    """

    def __init__(self, *, nvtx: bool = False, device: Any = None):
        self._place = _device.device(device)
        self._nvtx = _device.cupy.cuda.nvtx if nvtx else None
        self._spans: list[_Span] = []
        self._open: _Span | None = None
        self._names: dict[int, str] = {}  # of modules, by id
        self._roots: list[Any] = []  # keeps the ids taken
        self._modules: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of nodes
        self._total = self._began = 0
        self._origin: Any = None  # the event that device times count from, and its host time

    def __enter__(self) -> "profile":
        self._before = state.profile
        state.profile = self
        state.mode |= PROFILED
        profiles.append(self)
        if self._place.kind == "cuda":
            _device.synchronize(self._place)
            if self._origin is None:
                self._origin = self._event(), time.perf_counter_ns()
        self._began = time.perf_counter_ns()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._place.kind == "cuda":
            _device.synchronize(self._place)
            self._read_events()
        self._total += time.perf_counter_ns() - self._began
        profiles.remove(self)
        state.profile = self._before
        if self._before is None:
            state.mode &= ~PROFILED

    # --------------------------------------------------------------------------- recording

    def timed(self, op: Any) -> Any:
        """Give the forward function of an operation, which now takes its time."""

        def forward(*args, **kwargs):
            span = self._begin("recompute" if state.recomputing else "forward", op.name.lstrip("_"))
            try:
                return op.fwd(*args, **kwargs)
            finally:
                self._end(span)

        return forward

    def timed_visit(self, visit: Any) -> Any:
        """Give the function that runs the rules of a node, which now takes its time."""

        def timed(node, g):
            span = self._begin("backward", node.plan.op.name.lstrip("_"), self._modules.get(node))
            try:
                visit(node, g)
            finally:
                self._end(span)

        return timed

    def recorded(self, node: Any) -> None:
        """Note which module made a node."""
        if self._open is not None:
            self._modules[node] = self._open.module

    def call_module(self, module: Any, args: tuple, kwargs: dict) -> Any:
        """Run the forward function of a module."""
        name = self._name(module)
        span = self._begin("recomputed module" if state.recomputing else "module", name, name)
        try:
            return module.forward(*args, **kwargs)
        finally:
            self._end(span)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Take the time of a ``with`` block of your own, such as ``p.range("data")``."""
        span = self._begin("range", name)
        try:
            yield
        finally:
            self._end(span)

    def makers(self) -> dict[Any, Any]:
        """Give the module that made each node that lives, as far as it was noted."""
        below = (child for root in self._roots for _, child in root.named_modules())
        modules = {self._names.get(id(child)): child for child in below}
        return {node: modules[name] for node, name in self._modules.items() if name in modules}

    def _name(self, module):
        """Give the name of a module below the outermost one that was called."""
        name = self._names.get(id(module))
        if name is None:
            root = type(module).__name__
            same = sum(type(other) is type(module) for other in self._roots)
            root += f"-{same + 1}" if same else ""
            self._roots.append(module)
            for below, child in module.named_modules():
                self._names.setdefault(id(child), f"{root}.{below}" if below else root)
            name = self._names[id(module)]
        return name

    def _begin(self, kind, name, module=None):
        parent = self._open
        if module is None and parent is not None:
            module = parent.module
        self._open = span = _Span(kind, name, module, parent)
        self._spans.append(span)
        if self._nvtx is not None:
            self._nvtx.RangePush(f"{name} {kind}" if kind in _NAMED_KINDS else name)
        if self._origin is not None and recorder() is None:
            span.first = self._event()
        span.start = time.perf_counter_ns()
        return span

    def _end(self, span):
        span.stop = time.perf_counter_ns()
        if span.first is not None:
            span.last = self._event()
        if self._nvtx is not None:
            self._nvtx.RangePop()
        self._open = span.parent
        if span.parent is not None:
            span.parent.inner += span.stop - span.start

    def _event(self):
        event = _device.cupy.cuda.Event()
        event.record()
        return event

    def _read_events(self):
        elapsed = _device.cupy.cuda.get_elapsed_time
        for span in self._spans:
            if span.last is not None:
                span.device_start = elapsed(self._origin[0], span.first)
                span.device_stop = elapsed(self._origin[0], span.last)  # less exact in long blocks
                span.device = elapsed(span.first, span.last)
                span.first = span.last = None
                if span.parent is not None:
                    span.parent.device_inner += span.device

    # --------------------------------------------------------------------------- reading

    def _done(self):
        return [span for span in self._spans if span.stop is not None]

    @property
    def total_ms(self) -> float:
        """Milliseconds that the block took, until the device was done."""
        return self._total / 1e6

    def operations(self) -> list[Row]:
        """Give a row for each operation and what it did, the slowest first."""
        spans = [s for s in self._done() if s.kind in ("forward", *_NAMED_KINDS)]
        return self._rows(
            (f"{s.name} {s.kind}" if s.kind in _NAMED_KINDS else s.name, 1, *_own(s)) for s in spans
        )

    def ranges(self) -> list[Row]:
        """Give a row for each name given to :meth:`range`, all inside it included."""
        return self._rows(
            (s.name, 1, s.stop - s.start, s.device) for s in self._done() if s.kind == "range"
        )

    def modules(self) -> list[Row]:
        """Give a row for each module: its calls, and its operations' backward passes."""
        found = []
        known = set(self._names.values())
        for span in self._done():
            if span.kind == "module":
                found.append((span.name, 1, span.stop - span.start, span.device))
            elif span.kind in _NAMED_KINDS and span.module is not None:
                name = span.module
                while name:
                    if name in known:
                        found.append((name, 0, *_own(span)))
                    name = name.rpartition(".")[0]
        return self._rows(found)

    @staticmethod
    def _rows(parts: Iterable[tuple[str, int, float, float]]) -> list[Row]:
        sums: dict[str, list] = {}
        for name, calls, host_ns, device_ms in parts:
            known = sums.setdefault(name, [0, 0.0, 0.0])
            known[0] += calls
            known[1] += host_ns / 1e6
            known[2] += device_ms
        rows = [Row(name, *values) for name, values in sums.items()]
        return sorted(rows, key=lambda row: (-row.device_ms, -row.host_ms))

    def table(self, n_rows: int = 25) -> str:
        """Give the text of the tables, each cut after ``n_rows``."""
        operations = self.operations()
        known = sum(row.host_ms for row in operations)
        on_device = sum(row.device_ms for row in operations)
        lines = [f"{self.total_ms:,.2f} ms on {self._place}, {known:,.2f} of them in operations"]
        tables = {"operation": operations, "module": self.modules(), "range": self.ranges()}
        for title, rows in tables.items():
            if not rows:
                continue
            width = max(len(title), *(len(row.name) for row in rows[:n_rows]))
            lines += ["", f"{title:{width}}  {'calls':>7} {'host ms':>10} {'share':>6}"]
            lines[-1] += f" {'device ms':>10} {'share':>6}" if on_device else ""
            for row in rows[:n_rows]:
                line = f"{row.name:{width}}  {row.calls:7} {row.host_ms:10.3f} "
                line += f"{_percent(row.host_ms, self.total_ms)}"
                if on_device:
                    line += f" {row.device_ms:10.3f} {_percent(row.device_ms, on_device)}"
                lines.append(line)
            if len(rows) > n_rows:
                lines.append(f"... and {len(rows) - n_rows} more")
        return "\n".join(lines)

    __str__ = table

    def save(self, path: str | os.PathLike) -> None:
        """Write a trace that chrome://tracing and https://ui.perfetto.dev open.

        Parameters
        ----------
        path : path-like
            JSON in the trace event format: a row for the host and, on a GPU, one for the device.
        """
        spans = self._done()  # in the order in which they began
        on_device = [span for span in spans if span.device]
        origin = self._origin[1] if on_device else 0
        # The first operation may begin on either clock first.
        starts = [span.start for span in spans[:1]]
        starts += [origin + 1e6 * span.device_start for span in on_device[:1]]
        zero = min(starts, default=0)
        process = os.getpid()
        events: list[dict[str, Any]] = [_metadata(process, 0, "process_name", "rtxarr")]
        events.append(_metadata(process, 1, "thread_name", "host"))
        for span in spans:
            start = (span.start - zero) / 1e3
            events.append(_complete(span, process, 1, start, (span.stop - span.start) / 1e3))
        if self._origin is not None:
            events.append(_metadata(process, 2, "thread_name", str(self._place)))
            for span in on_device:
                start = (origin - zero) / 1e3 + 1e3 * span.device_start
                # Both ends on one scale, so that inner spans end no later than outer ones.
                duration = max(1e3 * (span.device_stop - span.device_start), 0.0)
                events.append(_complete(span, process, 2, start, duration))
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


_NAMED_KINDS = ("backward", "recompute")


def _own(span):
    """Give the host's nanoseconds and the device's milliseconds without those of inner spans."""
    return span.stop - span.start - span.inner, max(0.0, span.device - span.device_inner)


def _percent(part, whole):
    return f"{100 * part / whole:5.1f}%" if whole else f"{'-':>6}"


def _metadata(process, thread, kind, name):
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _complete(span, process, thread, start, duration):
    name = f"{span.name} {span.kind}" if span.kind in _NAMED_KINDS else span.name
    return {
        "name": name,
        "cat": span.kind,
        "ph": "X",
        "ts": max(start, 0.0),
        "dur": duration,
        "pid": process,
        "tid": thread,
        "args": {"module": span.module or ""},
    }
