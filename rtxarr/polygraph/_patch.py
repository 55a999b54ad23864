"""Other kernels for running programs: checked aside, put in by one assignment, taken back at once.

A program is a function whose kernels are its global names (``Program._values["kernel0"]``), so a
call that is under way or comes next finds either the old kernel or the new one, whole. Captured
steps hold launches of the old one: they are recorded anew at their next call.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from os import PathLike
from typing import Any, NamedTuple

from rtxarr import _replay
from rtxarr._device import namespace
from rtxarr.polygraph import _admission
from rtxarr.polygraph._admission import Case, Refused, difference, edge_cases
from rtxarr.polygraph._explain import programs_of
from rtxarr.polygraph._program import Program

__all__ = ["Patch", "Refused", "patch", "slots_of"]

_lock = threading.RLock()  # held for assignments alone, never while a kernel runs
_MOST_RECORDED = 4


class Slot:
    """One kernel of a program.

    Attributes
    ----------
    program : Program
    name : str
    loops : Loops
        What the kernel computes.
    kernel : callable
        What is in place.
    patches : list of Patch
        Those in force, the last one on top.
    """

    def __init__(self, program: Program, name: str, loops: Any) -> None:
        self.program = program
        self.name = name
        self.loops = loops
        self.kernel: Callable = program._values[name]
        self.patches: list[Patch] = []
        self.is_busy = False

    def call(self, function: Callable) -> None:
        """Let the program call ``function`` from now on."""
        self.program._values[self.name] = function


def _programs(target: Any) -> Iterator[Program]:
    """Give a program with its parts, or those of what was compiled of a function."""
    if isinstance(target, Program):
        yield target
        for part in target.parts:
            yield from _programs(part)
    elif hasattr(target, "_programs"):
        for made in itertools.chain(*list(target._programs.values())):
            for _, program in programs_of(made):
                yield from _programs(program)


def slots_of(target: Any) -> list[Slot]:
    """Return the kernels of a program, or of all programs that a fused function has so far.

    With those of branches, loops and gradients.
    """
    found: list[Slot] = []
    for program in dict.fromkeys(_programs(target)):
        with _lock:
            known: dict[str, Slot] = program.__dict__.setdefault("_slots", {})
            for step in program.steps:
                if step.loops is not None and step.name not in known:
                    known[step.name] = Slot(program, step.name, step.loops)
            found += known.values()
    return found


class Patch:
    """A kernel put in another's place; made by :func:`patch`.

    Attributes
    ----------
    kernel : str
    state : {"canary", "live", "rolled back"}
        While it is a canary, some of its calls are checked.
    n_calls, n_checked : int
        Calls as a canary, and how many of them were checked.
    seconds : tuple of float, or None
        Times of a call of the old and of the new kernel, the least of several rounds.
    journal : list of dict
        What was done, and when.
    """

    def __init__(self, slot: Slot, candidate: Callable, journal: Any) -> None:
        self._slot = slot
        self._incumbent = slot.kernel
        self._candidate = candidate
        self._path = journal
        self.kernel = slot.name
        self.state = "new"
        self.n_calls = 0
        self.n_checked = 0
        self.seconds: tuple[float, float] | None = None
        self.journal: list[dict] = []

    def __repr__(self) -> str:
        return f"<Patch of {self.kernel}, {self.state}>"

    def note(self, event: str, **more: Any) -> None:
        """Add a line to the journal."""
        entry = {"time": datetime.now(UTC).isoformat(), "event": event, "kernel": self.kernel}
        entry |= more
        with _lock:
            self.journal.append(entry)
            if self._path is not None:
                with open(self._path, "a", encoding="utf-8") as f:
                    f.write(json.dumps(entry) + "\n")

    def rollback(self) -> None:
        """Put the kernel back that was there before.

        Raises
        ------
        RuntimeError
            When a later patch of the same kernel is in force: take that one back first.
        """
        if self._take_out("by request"):
            return
        if self.state == "rolled back":
            return
        raise RuntimeError(f"{self.kernel} was patched again: roll the later patch back first")

    def _put_in(self, function: Callable) -> None:
        with _lock:
            if self._slot.kernel is not self._incumbent:
                raise RuntimeError(f"{self.kernel} was replaced while its patch was being checked")
            self.state = "live" if function is self._candidate else "canary"
            self._slot.kernel = self._candidate
            self._slot.patches.append(self)
            self._slot.call(function)
            _replay.swapped()

    def _take_out(self, why: str) -> bool:
        with _lock:
            if self.state not in ("canary", "live") or self._slot.patches[-1] is not self:
                return False
            self.state = "rolled back"
            self._slot.patches.pop()
            self._slot.kernel = self._incumbent
            self._slot.call(self._incumbent)
            _replay.swapped()
        self.note("rolled back", why=why)
        return True

    def _promote(self, canary: Callable) -> None:
        with _lock:
            before = self.state
            if before == "rolled back":
                return
            self.state = "live"
            if self._slot.program._values[self.kernel] is canary:
                self._slot.call(self._candidate)
        if before == "canary":
            self.note("live", n_calls=self.n_calls, n_checked=self.n_checked)


class _Canary:
    """Runs a new kernel, and on some calls the old one too: if they differ, the old one stays."""

    def __init__(self, patch: Patch, n_calls: int, every: int, rtol: float) -> None:
        self.patch = patch
        self.last = n_calls
        self.every = every
        self.rtol = rtol
        self.count = itertools.count()
        self.old, self.new = patch._incumbent, patch._candidate
        buffers = patch._slot.loops.buffers
        self.outputs = [i for i, b in enumerate(buffers) if b.is_output]

    def __call__(self, *arguments: Any) -> None:
        if _replay.recorder() is not None:  # nothing can be compared in a capture
            self.new(*arguments)
            return
        number = next(self.count)
        patch = self.patch
        if patch.state == "rolled back":
            self.old(*arguments)
            return
        patch.n_calls = max(patch.n_calls, number + 1)
        if number >= self.last:
            patch._promote(self)
            self.new(*arguments)
        elif number % self.every:
            self.new(*arguments)
        else:
            self.compare(arguments)

    def compare(self, arguments: Sequence[Any]) -> None:
        """Run both kernels; leave the results of the old one where they differ."""
        theirs = list(arguments)
        for i in self.outputs:
            out = arguments[i]
            shared = [k for k, x in enumerate(arguments[:i]) if x is out]
            xp = namespace(out)
            theirs[i] = xp.asarray(out, copy=True) if shared else xp.empty_like(out)
            for k in shared:
                theirs[k] = theirs[i]
        self.old(*theirs)
        try:
            self.new(*arguments)
            found = (difference(arguments[i], theirs[i], self.rtol) for i in self.outputs)
            wrong = next(filter(None, found), "")
        except Exception as error:
            wrong = f"it raised {type(error).__name__}: {error}"
        self.patch.n_checked += 1
        if not wrong:
            return
        for i in self.outputs:
            arguments[i][...] = theirs[i]
        if self.patch._take_out(wrong):
            warnings.warn(
                f"the patch of {self.patch.kernel} was rolled back: {wrong}",
                RuntimeWarning,
                stacklevel=3,
            )


class _Options(NamedTuple):
    rtol: float
    edges: bool
    n_runs: int
    max_slowdown: float | None
    canary: int
    check_every: int
    journal: str | PathLike | None


class _Recorder:
    """Copies what a kernel is called with, of one thread or of all."""

    def __init__(self, slot: Slot, thread: int | None) -> None:
        self.slot = slot
        self.kernel = slot.program._values[slot.name]  # the kernel itself, or a canary
        self.thread = thread
        self.cases: list[Case] = []
        self.some = threading.Event()

    def __call__(self, *arguments: Any) -> None:
        mine = self.thread is None or self.thread == threading.get_ident()
        if mine and len(self.cases) < _MOST_RECORDED and _replay.recorder() is None:
            name = f"recorded {len(self.cases)}"
            self.cases.append(_admission.recorded(name, self.slot.loops, arguments))
            self.some.set()
        self.kernel(*arguments)


def patch(
    target: Any,
    kernel: str,
    replacement: Any,
    *,
    calls: Sequence[tuple] | None = None,
    timeout: float = 10.0,
    rtol: float = 0.0,
    edges: bool = True,
    n_runs: int = 4,
    max_slowdown: float | None = 0.05,
    canary: int = 100,
    check_every: int = 10,
    journal: str | PathLike | None = None,
) -> Patch:
    """Replace one kernel of a running program, if another does the same.

    Parameters
    ----------
    target : Fused, Loaded or Program
        What runs; other threads may be calling it.
    kernel : str
        The kernel's name in the program's text, such as ``"kernel0"``.
    replacement : callable, str or back end
        Takes the arrays and numbers of the kernel's buffers, inputs first; or the text of the
        kernel, compiled by the program's back end; or a back end that is to build it.
    calls : sequence of tuple, optional
        Arguments of ``target``, which is called with each to see what the kernel is given. By
        default the next calls of any thread are recorded.
    timeout : float, seconds, default 10
        How long to wait for a call to record.
    rtol : float, default 0
        The largest relative difference of a result. At zero all bits must be the same but those of
        NaN.
    edges : bool, default True
        Whether to check on NaN, infinities, denormals, zeros, ties and extreme integers, too.
    n_runs : int, default 4
        How often the first recorded call is repeated, to find races.
    max_slowdown : float or None, default 0.05
        By how much more time the new kernel may take; None does not measure.
    canary : int, default 100
        How many calls of the new kernel are watched; 0 for none.
    check_every : int, default 10
        The share of these calls that are run by the old kernel too, and compared.
    journal : path, optional
        A file that gets a line of JSON for each thing done.

    Returns
    -------
    Patch
        With ``rollback()``.

    Raises
    ------
    Refused
        When the new kernel gives other results, writes elsewhere, raises, or takes longer. The
        program has not been touched then.

    Notes
    -----
    A kernel that reads memory that is not there, or does not end, cannot be stopped on a GPU: it
    ends the process's use of that GPU. Check such text on the CPU before.
    """
    if check_every < 1 or canary < 0 or n_runs < 1:
        raise ValueError(
            "check_every and n_runs must be at least 1 and canary not negative, got "
            f"{check_every}, {n_runs}, {canary}"
        )
    slots = slots_of(target)
    named = [s for s in slots if s.name == kernel]
    if not named:
        known = ", ".join(dict.fromkeys(s.name for s in slots)) or "none: call it first"
        raise ValueError(f"kernel must be one of the program's ({known}), got {kernel!r}")
    with _replay.watching():
        slot, cases = _recorded(target, named, calls, timeout)
    with _lock:
        if slot.is_busy:
            raise RuntimeError(f"another patch of {kernel} is being checked")
        slot.is_busy = True
    options = _Options(rtol, edges, n_runs, max_slowdown, canary, check_every, journal)
    try:
        return _checked(slot, replacement, cases, options)
    finally:
        slot.is_busy = False


def _recorded(target, slots, calls, timeout) -> tuple[Slot, list[Case]]:
    """Return the kernel that is called, of those of one name, and what with."""
    thread = None if calls is None else threading.get_ident()
    with _lock:
        recorders = [_Recorder(slot, thread) for slot in slots]
        for r in recorders:
            r.slot.call(r)
    try:
        if calls is not None:
            for arguments in calls:
                target(*arguments)
        else:
            end = time.monotonic() + timeout
            while not any(r.cases for r in recorders) and time.monotonic() < end:
                recorders[0].some.wait(0.001 if len(recorders) > 1 else timeout)
    finally:
        with _lock:
            for r in recorders:
                if r.slot.program._values[r.slot.name] is r:
                    r.slot.call(r.kernel)
    found = [r for r in recorders if r.cases]
    if len(found) != 1:
        what = "no call ran" if not found else f"{len(found)} programs ran in these calls"
        raise RuntimeError(f"a patch is of one kernel, but {what} {slots[0].name}")
    return found[0].slot, found[0].cases


def _built(slot: Slot, replacement: Any) -> tuple[Callable, dict]:
    backend = slot.program.backend
    if isinstance(replacement, str):
        digest = hashlib.sha256(replacement.encode()).hexdigest()
        return backend.build_text(slot.loops, replacement), {"text": digest}
    if hasattr(replacement, "build"):
        return replacement.build(slot.loops), {"backend": type(replacement).__name__}
    if not callable(replacement):
        raise TypeError(
            f"replacement must be callable, a text or a back end, got {type(replacement).__name__}"
        )
    return replacement, {"function": getattr(replacement, "__qualname__", repr(replacement))}


def _checked(slot: Slot, replacement: Any, recorded: list[Case], options: _Options) -> Patch:
    """Build, check and put in a kernel."""
    incumbent, loops = slot.kernel, slot.loops
    try:
        candidate, about = _built(slot, replacement)
    except TypeError:
        raise
    except Exception as error:
        made = Patch(slot, incumbent, options.journal)
        made.note("refused", why=f"it was not built: {error}"[:1000])
        raise Refused(f"{slot.name} was not replaced: it was not built: {error}") from error
    made = Patch(slot, candidate, options.journal)
    rtol = options.rtol
    cases = list(recorded)
    if options.edges:
        cases += edge_cases(loops, recorded[0], tame=rtol > 0)
    try:
        n = _admission.admit(loops, incumbent, candidate, cases, rtol=rtol, n_runs=options.n_runs)
        if options.max_slowdown is not None:
            old, new = _admission.times(loops, (incumbent, candidate), recorded[0])
            made.seconds = old, new
            if new > old * (1 + options.max_slowdown):
                raise Refused(f"it takes {new * 1e6:.1f} us and the old one {old * 1e6:.1f} us")
    except Refused as error:
        made.note("refused", why=str(error), **about)
        raise Refused(f"{slot.name} was not replaced: {error}") from None
    made.note("checked", n_cases=len(cases), n_runs=n, seconds=made.seconds, **about)
    watched = _Canary(made, options.canary, options.check_every, rtol)
    made._put_in(watched if options.canary else candidate)
    made.note("swapped", state=made.state)
    return made
