"""Thread-local switches of the tape, and the blocks that set them."""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

# Bits of the mode. The path of an operation looks at this one number: without any of the bits
# above RECORDED there is nothing but to make a node, or not.
RECORDED = 1  # make nodes
OBSERVED = 2  # show each new node to what follows
AUTOCAST = 4  # cast the arguments of operations
PROFILED = 8  # take the time
WITNESSED = 16  # show what a captured step uses and changes
TRACED = 32  # the tensors stand for those of a function that is being traced


class _State(threading.local):
    mode = RECORDED
    frame = None  # the checkpoint whose nodes are being made
    checksums = False  # guard saved arrays by their contents too
    recomputing = False  # a checkpointed call is being repeated
    low = None  # the dtype that autocast casts to, None when it is off
    casts = None  # what autocast has cast in the outermost of its blocks
    profile: Any = None  # what takes the time
    witness: Any = None  # what sees the step that is captured
    tracing: Any = None  # what gives the tensors of a traced function

    def __init__(self):
        self.blocks: list[tuple[Block, Any]] = []  # those begun, and what was set before each


state = _State()

# Those that take the time in any thread: asking whether there is one costs next to nothing.
profiles: list[Any] = []
# Likewise those that see a captured step.
witnesses: list[Any] = []


def witness() -> Any:
    """Return what sees the captured step of this thread; None when there is none."""
    return state.witness if witnesses else None


def is_recording() -> bool:
    """Tell whether operations on tensors are being recorded in this thread."""
    return bool(state.mode & RECORDED)


class Block:
    """Set one switch inside a ``with`` block or a decorated function; nests and restores.

    A subclass says in :meth:`_swap` how to set its switch and what it was before.
    """

    def __init__(self, value: Any):
        self._value = value

    @staticmethod
    def _swap(value):
        raise TypeError("Block is a base class")

    def __enter__(self):
        state.blocks.append((self, self._swap(self._value)))
        return self

    def __exit__(self, *exc):
        blocks = state.blocks
        for i in range(len(blocks) - 1, -1, -1):
            if blocks[i][0] is self:
                break
        else:
            return False  # begun in another thread, where it changes nothing here
        before = blocks.pop(i)[1]
        for j in range(i, len(blocks)):  # it ends out of turn, as one in a generator may
            if type(blocks[j][0]) is type(self):
                blocks[j] = (blocks[j][0], before)
                return False
        self._swap(before)
        return False

    def __call__(self, function):
        return decorate(function, functools.partial(type(self), self._value))


class _Recording(Block):
    @staticmethod
    def _swap(value):
        mode = state.mode
        state.mode = mode & ~RECORDED | value
        return mode & RECORDED


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
    return _Recording(0) if function is None else _Recording(0)(function)


def enable_grad(function: Callable | None = None):
    """Switch recording on, also inside a ``no_grad`` block."""
    return _Recording(RECORDED) if function is None else _Recording(RECORDED)(function)


def check_callable(name: str, function: Any) -> None:
    """Raise TypeError unless ``function`` can be called."""
    if not callable(function):
        raise TypeError(f"{name} must be callable, got {type(function).__name__}")


def decorate(function: Callable, block: Callable) -> Callable:
    """Run each call of a function, or each stretch of a generator, inside ``block()``."""
    check_callable("function", function)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"function must not be async, got {function.__name__}(): what else runs while it "
            "waits would see the switch; use a with block between two awaits"
        )
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generate(*args, **kwargs):
            return (yield from _drive(function(*args, **kwargs), block))

        return generate

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        with block():
            return function(*args, **kwargs)

    return wrapper


def _drive(generator, block):
    """Go through a generator inside the block while it runs, and outside between."""
    resume, value = generator.send, None
    while True:
        with block():
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
        self._previous = {name: getattr(state, name) for name in self._switches}
        self._set(self._switches)
        return self

    def __exit__(self, *exc):
        self._set(self._previous)
        return False

    @staticmethod
    def _set(switches):
        for name, value in switches.items():
            setattr(state, name, value)
        observed = state.checksums or state.frame is not None
        state.mode = state.mode & ~OBSERVED | (OBSERVED if observed else 0)


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
