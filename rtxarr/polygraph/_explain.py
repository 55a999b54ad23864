"""What programs do: kernels and what is in them, why results are kept, bytes, times.

``Fused.explain`` and ``Fused.profile`` give the texts of this file; ``to_html`` of each writes a
page with a picture of the graph (``_explain_page``).
"""

from __future__ import annotations

import functools
import statistics
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr.autograd._tree import flatten
from rtxarr.polygraph import _products
from rtxarr.polygraph._control_steps import title_of
from rtxarr.polygraph._cuda_backend import CudaBackend
from rtxarr.polygraph._ir import CONTROL, VIEWS, Node, behind_views
from rtxarr.polygraph._loops import Loops
from rtxarr.polygraph._program import Program, Step


class StepReport:
    """What one step of a program does.

    Attributes
    ----------
    name, title : str
    operations : list of str
        In the order in which they are computed, views left out.
    reads, writes : list of (str, Node)
        Arrays in memory, with their names in the program's text.
    why : dict of Node to str
        For each that it writes, why it is kept in memory.
    n_bytes : int
        Read and written, each array once; of an array that is only partly read, all.
    n_bytes_apart : int
        What the operations would read and write one at a time.
    source : callable
        Gives the generated text.
    """

    def __init__(self, program: Program, step: Step, order: dict[Node, int]) -> None:
        self.name, self.step = step.name, step
        members = sorted(step.group.members & order.keys(), key=order.__getitem__)
        self.members = members
        computed = [n for n in members if n.op not in VIEWS] or members
        self.operations = [describe(n) for n in computed]
        loops = step.loops
        is_view = loops is None and step.results[0].op in VIEWS
        if is_view:
            self.kind, self.title = "view", "a view"
        elif loops is None and step.results[0].op in CONTROL:
            self.kind = "eager"
            self.title = title_of(step.results[0], step.run, on_gpu=_on_gpu(program))
        elif loops is None and step.results[0].op == "item":
            self.kind, self.title = "eager", "one of several arrays"
        elif loops is None:
            self.kind, self.title = "eager", "run by a library"
        else:
            self.kind = loops.kind
            self.title = _title(loops)
        names = program._names
        arrays = [n for n in step.sources if n.op not in ("constant", "iota") and n.shape != ()]
        if step.results[0].op == "item":
            arrays = list(step.results[0].src)  # several arrays, which have no shape
        self.reads = [(names.get(n, ""), n) for n in dict.fromkeys(arrays)]
        self.writes = [(names.get(n, ""), n) for n in step.results]
        self.why = {n: program.why.get(n, "") for n in step.results}
        moved = [] if is_view else [n for _, n in (*self.reads, *self.writes)]
        self.n_bytes = sum(map(n_bytes_of, moved))
        self.n_bytes_apart = self.n_bytes if loops is None else sum(map(_bytes_alone, members))
        self.source: Callable[[], str] | None = None
        if loops is not None:
            self.source = functools.partial(program.backend.source, loops)

    def lines(self, rate: float | None, *, source: bool) -> list[str]:
        def listed(arrays):
            return ", ".join(f"{name} {shape_of(n)}" for name, n in arrays) or "nothing"

        lines = [f"{self.name}: {self.title}"]
        loops = self.step.loops
        if loops is not None and loops.members:
            lines.append(f"  computes {operation_counts(self.operations)}")
            lines += self._member_lines(loops.members, listed)
        else:
            lines.append(f"  reads {listed(self.reads)}")
            lines.append(f"  computes {' '.join(self.operations)}")
            for name, node in self.writes:
                why = f": {self.why[node]}" if self.why[node] else ""
                lines.append(f"  writes {name} {shape_of(node)}{why}")
        if self.kind != "view":
            lines.append(f"  moves {moved(self.n_bytes, self.n_bytes_apart, rate)}")
        if source and self.source is not None:
            lines += ["", *("    " + line for line in self.source().splitlines()), ""]
        return lines

    def _member_lines(self, members: Sequence[Loops], listed: Callable) -> list[str]:
        """Return a line for each of the maps that share the launch."""
        names = {n: name for name, n in (*self.reads, *self.writes)}
        lines = []
        for loops in members:
            ins = [(names[b.node], b.node) for b in loops.buffers if b.node in names]
            outs = [(names[b.node], b.node) for b in loops.buffers if b.is_output]
            ins = [pair for pair in ins if pair not in outs]
            lines.append(f"  reads {listed(ins)}; writes {listed(outs)}")
        return lines


class ProgramReport:
    """What a program does: its steps, and those of branches and loops in it (``parts``)."""

    def __init__(self, title: str, program: Program) -> None:
        self.title, self.program = title, program
        order = {n: i for i, n in enumerate(program.graph.nodes())}
        self.steps = [StepReport(program, step, order) for step in program.steps]
        self.parts = [
            ProgramReport(f"{title}, part {i}", part) for i, part in enumerate(program.parts)
        ]
        self.n_bytes = sum(s.n_bytes for s in self.steps)
        self.n_bytes_apart = sum(s.n_bytes_apart for s in self.steps)

    def lines(self, rate: float | None, *, source: bool) -> list[str]:
        kernels = sum(s.step.loops is not None for s in self.steps)
        inputs = ", ".join(shape_of(n) for n in self.program.graph.inputs)
        lines = [
            f"{self.title}: {kernels} kernel{'s' * (kernels != 1)},"
            f" {len(self.steps) - kernels} other steps; arguments {inputs or 'none'}",
            f"moves {moved(self.n_bytes, self.n_bytes_apart, rate)}",
            *self.program.notes,
            *_between(self.program),
            *_beside(self.program),
            "",
        ]
        for step in self.steps:
            lines += step.lines(rate, source=source)
        lines += ["", *self.program.text.rstrip().splitlines()]
        for part in self.parts:
            lines += ["", *part.lines(rate, source=source)]
        return lines


def _between(program: Program) -> list[str]:
    """Return what memory the steps' results for one another take."""
    total, most = program.n_between, program.most_between
    if not total:
        return []
    text = f"between the steps {in_bytes(total)}, at most {in_bytes(most)} at one time: "
    if (arena := program.arena) is None:
        return [text + "from the memory pool"]
    text += f"{in_bytes(arena.n_apart)}, at most {in_bytes(arena.floor)} at one time, in one block"
    return [text + f" of {in_bytes(arena.n_bytes)}"]


def _beside(program: Program) -> list[str]:
    """Return which steps run beside others, if any do."""
    if program.streams is None:
        return []
    steps = zip(program.streams.numbers, program.steps, strict=True)
    names = [step.name for number, step in steps if number and step.run is not None]
    n = len(program.streams.products)
    return [f"captured, on {n} streams: {', '.join(names)} beside the rest"]


class Explanation(str):
    """The text of :meth:`Fused.explain`; ``programs`` has it in parts."""

    name: str
    programs: list[ProgramReport]
    notes: list[str]
    rate: float | None

    def to_html(self, path: Any) -> None:
        """Write one page that needs no other file, with a picture of each program's graph."""
        from rtxarr.polygraph._explain_page import page

        with open(path, "w", encoding="utf-8") as file:
            file.write(page(self.name, self.programs, self.notes, self.rate))


class Profile(str):
    """The text of :meth:`Fused.profile`; ``seconds`` has each step's times in the order of rounds.

    Attributes
    ----------
    program : ProgramReport
    seconds : dict of str to list of float
    rate : float or None
        Bytes per second of a copy.
    """

    name: str
    program: ProgramReport
    seconds: dict[str, list[float]]
    rate: float | None

    def to_html(self, path: Any) -> None:
        """Write one page that needs no other file, with a picture of the program's graph."""
        from rtxarr.polygraph._explain_page import page

        with open(path, "w", encoding="utf-8") as file:
            file.write(page(self.name, [self.program], [], self.rate, seconds=self.seconds))


# ------------------------------------------------------------------------------- explaining


def explain_program(program: Program) -> str:
    """Return what a program does, as text."""
    return "\n".join(ProgramReport("program", program).lines(None, source=False))


def explain(fused: Any, *, source: bool, html: Any) -> Explanation:
    """Return what the programs of a fused function do; see :meth:`Fused.explain`."""
    reports, notes = [], []
    made = [m for found in list(fused._programs.values()) for m in found]
    for i, one in enumerate(made):
        for title, program in programs_of(one):
            word = f"program {i + 1}" + (f", {title}" if title else "")
            if isinstance(program, Program):
                reports.append(ProgramReport(word, program))
            else:
                notes.append(f"{word}: {program.explain()}")
        effects = getattr(one, "effects", ())
        notes += [f"after program {i + 1}: {_name_of(function)}" for function, *_ in effects]
    for why, n in fused.reasons.items():
        notes.append(f"eager: {why} ({n} kind{'s' * (n != 1)} of calls)")
    rate = _rate_of(reports)
    lines = [f"{fused!r}"]
    if rate:
        lines.append(f"a copy moves {rate / 1e9:.1f} GB/s")
    for report in reports:
        lines += ["", *report.lines(rate, source=source)]
    lines += ["", *notes] if notes else []
    if not reports and not notes:
        lines.append("it has not been called")
    out = Explanation("\n".join(lines))
    out.name, out.programs, out.notes, out.rate = _name_of(fused), reports, notes, rate
    if html is not None:
        out.to_html(html)
    return out


def _name_of(function: Any) -> str:
    function = getattr(function, "func", function)  # of a partial
    return getattr(function, "__name__", repr(function))


def programs_of(made: Any) -> list[tuple[str, Any]]:
    """Return the programs of one kind of calls, each with what it is for."""
    program = getattr(made, "program", None)
    backward = getattr(made, "_backward", None)
    if backward is None:
        return [("", program)] if program is not None else []
    passes = [("backward", p.program) for p in list(backward.programs.values())]
    return [("forward", program), *passes]


# -------------------------------------------------------------------------------- profiling


def profile(fused: Any, args: tuple, kwargs: dict, *, rounds: int, html: Any = None) -> Profile:
    """Measure the steps of the program for these arguments; see :meth:`Fused.profile`."""
    made = _program_for_call(fused, args, kwargs)
    program = getattr(made, "program", None)
    if not isinstance(program, Program):
        raise ValueError(f"{_name_of(fused)} runs as it is for these arguments: see explain()")
    clock = _EventClock() if _on_gpu(program) else _HostClock()
    seconds: dict[str, list[float]] = {step.name: [] for step in program.steps}
    values = dict(program._values)
    for step in program.steps:
        if step.name in values:
            values[step.name] = clock.timed(step.name, values[step.name])
    exec(compile(program.text, "<profiled program>", "exec"), values)
    names = {**made.run.__globals__, "program": values["program"]}
    run = types.FunctionType(made.run.__code__, names)
    leaves, _ = flatten((args, kwargs))
    whole = []
    for _ in range(rounds + 2):
        start = clock.now()
        run(leaves)
        took, parts = clock.finish(start)
        whole.append(took)
        for name, value in parts.items():
            seconds[name].append(value)
    report = ProgramReport("program", program)
    rate = _rate_of([report])
    seconds = {name: found[2:] for name, found in seconds.items() if found}  # two warm up
    out = Profile("\n".join(_profile_lines(fused, report, seconds, whole[2:], rate)))
    out.name, out.program, out.seconds, out.rate = _name_of(fused), report, seconds, rate
    if html is not None:
        out.to_html(html)
    return out


def _profile_lines(fused, report, seconds, whole, rate):
    whole_time = statistics.median(whole)
    lines = [
        f"{_name_of(fused)}: {len(whole)} calls of {in_time(whole_time)} (median), by steps"
        + (f"; a copy moves {rate / 1e9:.1f} GB/s" if rate else "")
    ]
    table = [("step", "median", "quartiles", "share", "GB/s", "")]
    for step in report.steps:
        if step.name in seconds:
            low, middle, high = quartiles(seconds[step.name])
            share = f"{middle / whole_time:.0%}"
            speed = f"{step.n_bytes / middle / 1e9:.1f}" if middle else ""
            spread = f"{in_time(low)} - {in_time(high)}"
            table.append((step.name, in_time(middle), spread, share, speed, step.title))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        lines.append("  ".join(w.ljust(n) for w, n in zip(row, widths, strict=True)).rstrip())
    return lines


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _program_for_call(fused: Any, args: tuple, kwargs: dict) -> Any:
    """Call, and return what ran."""
    fused(*args, **kwargs)  # makes the program, if there is none yet
    found: list[Any] = []

    def watched(made, run):
        def wrapper(leaves):
            found.append(made)
            return run(leaves)

        return wrapper

    everything = [m for programs in list(fused._programs.values()) for m in programs]
    runs = [(made, made.__dict__.get("run")) for made in everything]
    for made in everything:
        made.run = watched(made, made.run)
    try:
        fused(*args, **kwargs)
    finally:
        for made, run in runs:
            if run is None:
                del made.run
            else:
                made.run = run
    return found[-1] if found else None  # others before it did not hold


class _HostClock:
    """Times steps that are over when they return."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}

    def now(self) -> float:
        self._parts = {}
        return time.perf_counter()

    def finish(self, start: float) -> tuple[float, dict[str, float]]:
        return time.perf_counter() - start, self._parts

    def timed(self, name: str, function: Callable) -> Callable:
        def run(*arrays, **options):
            start = time.perf_counter()
            out = function(*arrays, **options)
            self._parts[name] = self._parts.get(name, 0) + time.perf_counter() - start
            return out

        return run


class _EventClock:
    """Times steps on a GPU, between events on the stream."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, Any, Any]] = []

    @staticmethod
    def _mark() -> Any:
        event = _device.cupy.cuda.Event()
        event.record()
        return event

    def now(self) -> Any:
        self._marks = []
        return self._mark()

    def finish(self, start: Any) -> tuple[float, dict[str, float]]:
        end = self._mark()
        end.synchronize()

        def between(a, b):
            return _device.cupy.cuda.get_elapsed_time(a, b) / 1e3

        parts: dict[str, float] = {}
        for name, a, b in self._marks:
            parts[name] = parts.get(name, 0) + between(a, b)
        return between(start, end), parts

    def timed(self, name: str, function: Callable) -> Callable:
        def run(*arrays, **options):
            start = self._mark()
            out = function(*arrays, **options)
            self._marks.append((name, start, self._mark()))
            return out

        return run


# ------------------------------------------------------------------------------- quantities


def _on_gpu(program: Program) -> bool:
    return isinstance(program.backend, CudaBackend)


def _rate_of(reports: Iterable[ProgramReport]) -> float | None:
    """Return the bytes per second of a copy where the programs run."""
    places = {_on_gpu(report.program) for report in reports}
    return copy_rate("cuda" if places.pop() else "cpu") if len(places) == 1 else None


@functools.cache
def copy_rate(device: str) -> float:
    """Return how many bytes a second a copy reads and writes, measured once."""
    if device == "cpu":
        from rtxarr.polygraph._cpu_start import n_threads

        n = n_threads()
        source = np.ones((n, 2**24 // n), np.float32)
        target = np.empty_like(source)
        with ThreadPoolExecutor(n) as pool:

            def once():
                start = time.perf_counter()
                list(pool.map(np.copyto, target, source))
                return time.perf_counter() - start

            return 2 * source.nbytes / min(once() for _ in range(8))
    source = _device.cupy.ones(2**28, np.float32)
    target, clock = _device.cupy.empty_like(source), _EventClock()
    times = []
    for _ in range(8):
        start = clock.now()
        target[...] = source
        times.append(clock.finish(start)[0])
    return 2 * source.nbytes / min(times)


def n_bytes_of(node: Node) -> int:
    return node.size * node.dtype.itemsize if node.dtype is not None else 0


def _bytes_alone(node: Node) -> int:
    """Return what one operation reads and writes by itself; views are free."""
    if node.op in VIEWS:
        return 0
    total = n_bytes_of(node)
    for source in node.src:
        base = behind_views(source)
        if base.op not in ("constant", "iota"):
            total += min(n_bytes_of(base), n_bytes_of(source))
    return total


def describe(node: Node) -> str:
    """Return an operation with what it depends on besides arrays."""
    if node.op == "cast":
        return f"cast to {node.dtype}"
    if node.op == "segment_reduce":
        return f"segment {node.attrs[0]}"
    if node.op == "constant":
        return f"{node.attrs[0]!s}"
    if node.op == "input":
        return f"x{node.attrs[0]}"
    if node.op == "call" or (node.op == "item" and node.src[0].op == "call"):
        call = node if node.op == "call" else node.src[0]
        if call.attrs[0] in _products.FUNCTIONS:
            return _products.described(call)
        function, options, _ = call.attrs
        return dict(options).get("name", getattr(function, "__name__", "call"))
    return node.op


def shape_of(node: Node) -> str:
    if node.dtype is None:
        return "several arrays"
    return f"{node.dtype}[{', '.join(map(str, node.shape))}]"


def _title(loops: Any) -> str:
    if loops.kind == "map":
        return f"map over {loops.cols} elements"
    if loops.kind == "maps":
        least, most = (f(m.cols for m in loops.members) for f in (min, max))
        sizes = f"{most}" if least == most else f"{least} to {most}"
        return f"{len(loops.members)} maps over {sizes} element{'s' * (most > 1)}, in one launch"
    if loops.kind == "segments":
        wide = f", {loops.features} features" if loops.features > 1 else ""
        return f"{loops.cols} edges of {loops.rows} rows{wide}"
    passes = sum(bool(phase.body) for phase in loops.phases)
    what = ("row" if loops.kind == "rows" else "column") + "s" * (loops.rows != 1)
    return f"{loops.rows} {what} of {loops.cols}, {passes} pass{'es' * (passes != 1)}"


def moved(n_bytes: int, apart: int, rate: float | None) -> str:
    text = in_bytes(n_bytes)
    if apart > n_bytes:
        text += f" (one operation at a time: {in_bytes(apart)})"
    return text + (f"; at the rate of a copy {in_time(n_bytes / rate)}" if rate else "")


def in_bytes(n: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.0f} {unit}" if unit == "bytes" else f"{n:.3g} {unit}"
        n /= 1000
    raise AssertionError("the loop returns")


def in_time(seconds: float) -> str:
    for unit, scale in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    raise AssertionError("the loop returns")


def operation_counts(operations: Sequence[str]) -> str:
    counts = Counter(operations)
    return ", ".join(f"{op} x {n}" if n > 1 else op for op, n in counts.items())
