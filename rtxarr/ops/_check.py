"""Checks of arguments that several families of operations share."""

import functools
import math
import numbers

import numpy as np

from rtxarr._checks import check_range, check_range_if_asked
from rtxarr._device import Device, device_of
from rtxarr.autograd._tape import raw
from rtxarr.dtypes import is_floating, is_integral


def check_floating(**arrays):
    """Raise TypeError unless each array (or None) holds real floating-point numbers."""
    for name, x in arrays.items():
        if x is None:
            continue
        dtype = getattr(x, "dtype", None)
        if dtype is None:
            raise TypeError(f"{name} must be an array or Tensor, got {type(x).__name__}")
        if not is_floating(dtype):
            raise TypeError(f"{name} must have a real floating-point dtype, got {dtype}")


def check_index(name, index, n):
    """Refuse anything but integers, and, as far as the host can see, any not in ``[0, n)``."""
    index = raw(index)
    if not hasattr(index, "dtype") or not is_integral(index.dtype):
        kind = getattr(index, "dtype", type(index).__name__)
        raise TypeError(f"{name} must be an array of integers, got {kind}")
    on_host = isinstance(index, (np.ndarray, np.generic))
    (check_range if on_host else check_range_if_asked)(name, index, 0, n)


def check_number(name, value, *, above=None, at_least=None):
    """Refuse an option that is no finite real number, or out of its range."""
    if type(value) is not float and not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if above is not None and not value > above:
        raise ValueError(f"{name} must be above {above}, got {value}")
    if at_least is not None and not value >= at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def check_count(name, value):
    """Refuse what is no integer of at least zero."""
    if not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {value}")


def check_sizes(**sizes):
    """Refuse what is no int of at least one."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def generator_or_default(generator):
    """Give the generator to draw from, refusing anything else."""
    if generator is None:
        return _random().default_generator()
    return checked_generator("generator", generator)


def checked_generator(name, generator):
    """Give a generator back, refusing anything else, such as NumPy's of the same name."""
    if not isinstance(generator, _random().Generator):
        kind = type(generator)
        room = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        raise TypeError(f"{name} must be an rtxarr.random.Generator, got {room}{kind.__qualname__}")
    return generator


@functools.cache
def _random():
    from rtxarr import random  # loaded on first use

    return random


def drawing_device(x):
    """Give where to draw numbers for the raw array ``x``: the host for unknown libraries."""
    place = device_of(x)
    return place if isinstance(place, Device) else "cpu"


def check_rate(rate):
    """Raise ValueError unless ``rate`` is a probability of dropping that leaves something."""
    if type(rate) is not float and not isinstance(rate, numbers.Real):
        raise TypeError(f"rate must be a number, got {type(rate).__name__}")
    if not 0 <= rate < 1:
        raise ValueError(f"rate must lie in [0, 1), got {rate}")
