"""Have CuPy's errors of a GPU without room say who holds it and what to try."""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["explain_out_of_memory", "explains_out_of_memory", "look_up_holders"]

# Says in a sentence who holds the memory of a device; empty for no answer.
_holders: Callable[[Any], str] = lambda device: ""  # noqa: E731


def look_up_holders(function: Callable[[Any], str]) -> None:
    """Have ``function(device)`` say in a sentence who holds the memory of a device."""
    global _holders
    _holders = function


def explain_out_of_memory(error: MemoryError, place: Any = None) -> None:
    """Have CuPy's error say what was asked for, who holds the rest, and what to try.

    Parameters
    ----------
    error : MemoryError
        Left as it is unless CuPy raised it and it was not explained before.
    place : Device, default the one that CuPy is using
    """
    cupy: Any = sys.modules.get("cupy")
    # Another thread may still be importing it.
    memory = getattr(getattr(cupy, "cuda", None), "memory", None)
    if memory is None or not isinstance(error, memory.OutOfMemoryError):
        return
    if str(error).startswith("no room"):
        return
    from rtxarr import _device

    if place is None:
        place = _device.Device("cuda", cupy.cuda.runtime.getDevice())
    stats = _device.memory_stats(place)
    mib = {name: f"{value / 2**20:,.0f} MiB" for name, value in stats.items()}
    holders = ""
    with contextlib.suppress(Exception):  # the error itself matters more than who is to blame
        holders = _holders(place)
    error.args = (
        f"no room for {error._size / 2**20:,.1f} MiB on {place!r}: {mib['free']} of "
        f"{mib['total']} are free, this process's arrays hold {mib['used']} and its pool keeps "
        f"{mib['pool']}. {holders}Use a smaller batch, rx.checkpoint, rx.autocast or a narrower "
        "dtype; drop arrays you no longer need, which `print(rx.memory.report())` lists; or see "
        "`nvidia-smi` for other processes",
    )


def explains_out_of_memory(function: Callable) -> Callable:
    """Explain CuPy's error of a function that allocates; see :func:`explain_out_of_memory`."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except MemoryError as error:
            explain_out_of_memory(error)
            raise

    return wrapper
