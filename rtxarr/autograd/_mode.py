"""Thread-local switches of the tape: recording, and what to do with each new node."""

import functools
import inspect
import threading
from collections.abc import Callable

OFF, ON, OBSERVED = 0, 1, 2


class _State(threading.local):
    mode = ON  # OFF: no nodes; ON: nodes; OBSERVED: nodes, each shown to what follows
    frame = None  # the checkpoint whose nodes are being made
    checksums = False  # guard saved arrays by their contents too
    recomputing = False  # a checkpointed call is being repeated

    def __init__(self):
        self.blocks: list[tuple[_Recording, int]] = []  # those begun, and the mode before each


state = _State()


def _recording_mode():
    return OBSERVED if state.checksums or state.frame is not None else ON


def is_recording() -> bool:
    """Tell whether operations on tensors are being recorded in this thread."""
    return state.mode != OFF


class _Recording:
    """Set recording inside a ``with`` block or a decorated function; nests and restores."""

    def __init__(self, on: bool):
        self._on = on

    def __enter__(self):
        state.blocks.append((self, state.mode))
        state.mode = _recording_mode() if self._on else OFF
        return self

    def __exit__(self, *exc):
        blocks = state.blocks
        if blocks and blocks[-1][0] is self:
            state.mode = blocks.pop()[1]
            return False
        # Of a generator that ends out of turn, or in another thread (where it changes nothing).
        for i in range(len(blocks) - 2, -1, -1):
            if blocks[i][0] is self:
                blocks[i + 1] = (blocks[i + 1][0], blocks[i][1])
                del blocks[i]
                break
        return False

    def __call__(self, function):
        return _decorate(function, self._on)


def no_grad(function: Callable | None = None):
    """Switch recording off: as a ``with`` block, ``@no_grad`` or ``@no_grad()``.

    A decorated generator runs without recording, who takes its items does not. A ``with`` block
    around a ``yield`` or an ``await`` is still open while other code of the thread runs.

    Examples
    --------
    >>> import rtxarr as rx
    >>> x = rx.Tensor(rx.ones(3), requires_grad=True)
    >>> with rx.no_grad():
    ...     y = x * 2
    >>> y.requires_grad
    False
    """
    return _Recording(False) if function is None else _decorate(function, False)


def enable_grad(function: Callable | None = None):
    """Switch recording on, also inside a ``no_grad`` block."""
    return _Recording(True) if function is None else _decorate(function, True)


def _decorate(function, on):
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"function must not be async, got {function.__name__}(): what else runs while it "
            "waits would see the switch; use a with block between two awaits"
        )
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generate(*args, **kwargs):
            return (yield from _drive(function(*args, **kwargs), on))

        return generate

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        with _Recording(on):
            return function(*args, **kwargs)

    return wrapper


def _drive(generator, on):
    """Go through a generator with recording set while it runs, and not between."""
    resume, value = generator.send, None
    while True:
        with _Recording(on):
            try:
                item = resume(value)
            except StopIteration as end:
                return end.value
        try:
            resume, value = generator.send, (yield item)
        except BaseException as error:  # GeneratorExit too: the generator may have to clean up
            resume, value = generator.throw, error


class watching:
    """Set the active checkpoint ``frame`` and the other switches for a ``with`` block."""

    def __init__(self, **switches):
        self._switches = switches

    def __enter__(self):
        self._previous = {name: getattr(state, name) for name in (*self._switches, "mode")}
        for name, value in self._switches.items():
            setattr(state, name, value)
        if state.mode != OFF:
            state.mode = _recording_mode()
        return self

    def __exit__(self, *exc):
        for name, value in self._previous.items():
            setattr(state, name, value)
        return False


def debug_mutation():
    """Compare the contents of saved arrays before they are used, for a ``with`` block.

    Every array that the tape saves in the block is copied to the host and summed up, and again
    when the backward pass uses it: slow, but it also finds writes behind the tape's back
    (``x.data[0] = 1``, another library, a stray kernel).

    Examples
    --------
    >>> import rtxarr as rx
    >>> x = rx.Tensor(rx.ones(3, device="cpu"), requires_grad=True)
    >>> with rx.autograd.debug_mutation():
    ...     y = rx.exp(x)
    >>> y.data[0] = 0.0
    >>> rx.sum(y).backward()
    Traceback (most recent call last):
        ...
    RuntimeError: an array saved for the gradient of exp() was changed behind the tape's back
    """
    return watching(checksums=True)
