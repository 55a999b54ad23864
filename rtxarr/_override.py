"""The function that this thread is tracing, if any: what takes over for arrays without values.

What acts on arrays without taking one, such as drawing random numbers, asks :func:`tracing`.
Functions that read memory themselves are :func:`overridable`: an argument that only stands for an
array answers for them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["deferred", "overridable", "tracing"]


class _Thread(threading.local):
    trace: Any = None


thread = _Thread()


def tracing() -> Any:
    """Return the trace that this thread is making, or None."""
    return thread.trace


def overridable(function: Callable) -> Callable:
    """Let the arguments' ``__rtxarr_function__(function, args, kwargs)`` give the result.

    Asked is the first that has it, of the arguments and what is in tuples and lists among them,
    while a function is traced. After NotImplemented the function runs as it is.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if thread.trace is not None:
            for x in (*args, *kwargs.values()):
                for one in x if isinstance(x, (tuple, list)) else (x,):
                    if hasattr(type(one), "__rtxarr_function__"):
                        out = one.__rtxarr_function__(function, args, kwargs)
                        return function(*args, **kwargs) if out is NotImplemented else out
        return function(*args, **kwargs)

    return call


def deferred(changed: Callable) -> Callable[[Callable], Callable]:
    """Let a method that changes tensors be called after a traced step, and not while it is traced.

    ``changed`` takes the arguments of the method and gives the tensors.
    """

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def call(*args: Any) -> Any:
            if thread.trace is None:
                return method(*args)
            return thread.trace.defer(functools.partial(method, *args), changed(*args))

        return call

    return decorate
