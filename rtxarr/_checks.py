"""Checks that read array data; those that would wait for the GPU are off unless asked for."""

import threading
from contextlib import contextmanager


class _State(threading.local):
    enabled = False


_state = _State()


@contextmanager
def check_values():
    """Check index ranges and row pointers on a GPU too, in a ``with`` block, by reading them.

    Examples
    --------
    >>> import rtxarr as rx
    >>> values, index = rx.ones(2), rx.asarray([0, 5])
    >>> try:
    ...     with rx.testing.check_values():
    ...         rx.scatter_add(values, index, 3)
    ... except IndexError as error:
    ...     print(error)
    index must lie in [0, 3), got values from 0 to 5
    """
    before = _state.enabled
    _state.enabled = True
    try:
        yield
    finally:
        _state.enabled = before


def values_are_checked() -> bool:
    """Tell whether this is inside :func:`check_values`."""
    return _state.enabled


def check_range_if_asked(name: str, index, low: int, high: int) -> None:
    """Do :func:`check_range` inside :func:`check_values`, else nothing."""
    if _state.enabled:
        check_range(name, index, low, high)


def check_range(name: str, index, low: int, high: int) -> None:
    """Raise IndexError when ``index`` leaves ``[low, high)``."""
    if index.size == 0:
        return
    smallest, largest = int(index.min()), int(index.max())
    if smallest < low or largest >= high:
        raise IndexError(
            f"{name} must lie in [{low}, {high}), got values from {smallest} to {largest}"
        )
