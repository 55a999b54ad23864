"""What the host does anew before each replay of a captured step.

A captured step repeats the launches it recorded, with the very arguments they had. What changes
from step to step on the host, such as the place in a stream of random numbers or a learning rate,
must therefore reach the kernels through memory: :func:`from_host`. In an eager step it is a plain
copy to the GPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._allocation import apart

__all__ = [
    "Cursor",
    "OncePerStep",
    "Recorder",
    "branch",
    "from_host",
    "is_watched",
    "keeping",
    "kept_resources",
    "moment",
    "n_swaps",
    "on_branch",
    "on_failure",
    "on_replay",
    "once",
    "recorder",
    "set_apart",
    "settings",
    "swapped",
    "watching",
]

_BLOCK_BYTES = 1 << 16  # copies up to this size are staged at once, so the host may go on
_ALIGNMENT = 16


class _Thread(threading.local):
    recorder: Recorder | None = None
    resources: dict[Any, Any] | None = None
    branch: tuple[int, ...] = ()


_thread = _Thread()


def recorder() -> Recorder | None:
    """Return what notes the host's part of the step that this thread is capturing, if any."""
    return _thread.recorder


_n_replays = 0  # of all graphs: they change parameters without the host's knowing


def moment() -> tuple[Recorder | None, int]:
    """Return something that differs between captures, and before and after a replay.

    What was made of parameters at one moment is not to be used at another.
    """
    return _thread.recorder, _n_replays


_n_swaps = 0  # of kernels in running programs: graphs recorded before hold the old ones


def swapped() -> None:
    """Let captured steps be recorded anew at their next call: a kernel was replaced."""
    global _n_swaps
    _n_swaps += 1


def n_swaps() -> int:
    """Return how often a kernel of a running program was replaced."""
    return _n_swaps


_settings: frozenset[str] = frozenset()


def set_apart(name: str, *, is_usual: bool) -> None:
    """Note a setting of all threads that results depend on: graphs are of one each."""
    global _settings
    _settings = _settings - {name} if is_usual else _settings | {name}


def settings() -> frozenset[str]:
    """Return the settings that are not as they are by default."""
    return _settings


_n_watching = 0  # who look at the calls of kernels, which replays make without the host
_watching = threading.Lock()


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Let loops of programs call their kernels from the host, in all threads."""
    global _n_watching
    with _watching:
        _n_watching += 1
    try:
        yield
    finally:
        with _watching:
            _n_watching -= 1


def is_watched() -> bool:
    """Tell whether the host is to call kernels that it could replay."""
    return _n_watching > 0


def from_host(make: Callable[[], np.ndarray]) -> Any:
    """Return what ``make()`` gives, on the current GPU; in a captured step, at each replay.

    Parameters
    ----------
    make : callable
        Gives a NumPy array of at most 64 KiB, each time of one shape and dtype. It may change
        the host's state: it runs once for each step, eager or replayed, and in the same order.

    Returns
    -------
    CuPy array
    """
    values = np.ascontiguousarray(make())
    current = _thread.recorder
    if current is not None:
        return current.section(values, make)
    if _device._SIMULATING:  # its GPU's memory is the host's
        return values
    out = _device.cupy.ndarray(values.shape, values.dtype)
    _copy(out, values, values.nbytes)
    return out


def on_replay(function: Callable[[], None]) -> None:
    """Call ``function`` before each replay of the step being captured; nothing when none is."""
    once("the host counts or changes something")
    if _thread.recorder is not None:
        _thread.recorder.updates.append(function)


class OncePerStep(RuntimeError):
    """What the host does once for each step stands in a branch or loop that the GPU decides."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} in a branch or loop whose test is on the GPU: the host cannot know how often"
        )


def once(what: str) -> None:
    """Refuse ``what`` where the step being captured may do it another number of times."""
    if _thread.recorder is not None and _thread.recorder.depth:
        raise OncePerStep(what)


def on_failure(undo: Callable[[], None]) -> None:
    """Call ``undo``, last come first, if the capture fails; nothing when none is under way."""
    if _thread.recorder is not None:
        _thread.recorder.undo.append(undo)


def kept_resources() -> dict[Any, Any] | None:
    """Return where the captured step that runs keeps what its graphs use; None outside of one.

    Filled by its eager call too, so that what cannot be made during a capture is there.
    """
    return _thread.resources


@contextlib.contextmanager
def keeping(resources: dict[Any, Any]) -> Iterator[None]:
    """Let what this thread does keep things in ``resources``."""
    before = _thread.resources
    _thread.resources = resources
    try:
        yield
    finally:
        _thread.resources = before


def branch() -> tuple[int, ...]:
    """Return which of the streams of a captured program this thread gives work to; () for its own.

    What works in memory of its own cannot be used on two of them.
    """
    return _thread.branch


@contextlib.contextmanager
def on_branch(number: int) -> Iterator[None]:
    """Note that what this thread does goes to stream ``number`` of a captured program."""
    before = _thread.branch
    _thread.branch = (*before, number)
    try:
        yield
    finally:
        _thread.branch = before


def _copy(out: Any, values: np.ndarray, n_bytes: int) -> None:
    """Start a copy to the GPU. ``values`` is pageable, so it may be changed on return."""
    runtime = _device.cupy.cuda.runtime
    stream = _device.cupy.cuda.get_current_stream().ptr
    start = values.__array_interface__["data"][0]  # at less cost than values.ctypes
    runtime.memcpyAsync(out.data.ptr, start, n_bytes, runtime.memcpyHostToDevice, stream)


class Cursor:
    """A number that a captured step goes on counting in, on the GPU.

    Attributes
    ----------
    words : array of uint64
        The number comes first.
    """

    words: Any

    def __init__(self) -> None:
        self._value = 0
        self._event: Any = None

    def begin(self, value: int) -> None:
        """Note what the host hands over to the next replay."""
        self._value = value
        self._event = None

    def started(self, stream: Any) -> None:
        """Note that the step was started."""
        self._event = stream.record()

    def read(self) -> int:
        """Return the number, once the step has run."""
        if self._event is not None:
            self._event.synchronize()
            # The current stream may be being captured.
            with _device.cupy.cuda.Stream(non_blocking=True) as stream:
                self._value = int(self.words[:1].get(stream=stream)[0])
            self._event = None
        return self._value


class _Block:
    """Memory on the GPU, its image on the host, and how much of it is taken."""

    def __init__(self, n_bytes: int) -> None:
        with apart():  # it is filled before a replay, which must not write over it
            self.device = _device.cupy.empty(n_bytes, np.uint8)
        self.host = np.zeros(n_bytes, np.uint8)
        self.used = 0


class Recorder:
    """The host's part of one captured step; as a context manager, of what this thread does.

    Attributes
    ----------
    updates : list of callable
        To be called before each replay, in order.
    undo : list of callable
        To be called, in reverse, if the capture fails.
    bodies : list
        The graphs of branches and loops that were recorded.
    depth : int
        How many of them what is being recorded is inside of.
    cursors : dict of object to Cursor
        Of what is counted in branches and loops.
    """

    def __init__(self) -> None:
        self.updates: list[Callable[[], None]] = []
        self.undo: list[Callable[[], None]] = []
        self.bodies: list[Any] = []
        self.depth = 0
        self.cursors: dict[Any, Cursor] = {}
        self._streams: list[Any] = []
        self._blocks = [_Block(_BLOCK_BYTES)]

    def __enter__(self) -> Recorder:
        if _thread.recorder is not None:
            raise RuntimeError("a step that is being captured cannot capture another")
        _thread.recorder = self
        return self

    def __exit__(self, *exc: object) -> None:
        _thread.recorder = None

    def section(self, values: np.ndarray, make: Callable[[], np.ndarray]) -> Any:
        """Return memory on the GPU that holds ``values``, and ``make()`` at each replay."""
        n_bytes = values.nbytes
        taken = -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        block = self._blocks[-1]
        if block.used + taken > block.host.size:
            block = _Block(max(_BLOCK_BYTES, taken))
            self._blocks.append(block)
        part = slice(block.used, block.used + n_bytes)
        block.used += taken
        host = block.host[part].view(values.dtype).reshape(values.shape)
        host[...] = values

        def update() -> None:
            host[...] = make()

        self.updates.append(update)
        return block.device[part].view(values.dtype).reshape(values.shape)

    @contextlib.contextmanager
    def inside(self, graph: Any) -> Iterator[Any]:
        """Note that what is recorded in the ``with`` block is ``graph``; give a stream for it.

        One for each depth: what a body frees is then not used for what lies around it, which a
        loop's next round may still read.
        """
        self.bodies.append(graph)
        if self.depth == len(self._streams):
            self._streams.append(_device.cupy.cuda.Stream(non_blocking=True))
        self.depth += 1
        try:
            yield self._streams[self.depth - 1]
        finally:
            self.depth -= 1

    def fail(self) -> None:
        """Undo what the host did in a capture that came to nothing."""
        for undo in reversed(self.undo):
            undo()

    def words(self) -> list[np.ndarray]:
        """Give what lies in the memory that is filled from the host, in words of 8 bytes."""
        return [block.host[: block.used].view(np.uint64) for block in self._blocks if block.used]

    def refresh(self) -> None:
        """Do the host's part of one more step."""
        global _n_replays
        _n_replays += 1
        for update in self.updates:
            update()

    def upload(self) -> None:
        """Copy what the host has made to the GPU, on the current stream."""
        for block in self._blocks:
            if block.used:
                _copy(block.device, block.host, block.used)

    def started(self, stream: Any) -> None:
        """Note that the step was started on a stream."""
        for cursor in self.cursors.values():
            cursor.started(stream)
