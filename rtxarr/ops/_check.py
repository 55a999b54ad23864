"""Checks of arguments that several families of operations share."""

import numpy as np

from rtxarr._checks import check_range, check_range_if_asked
from rtxarr.autograd._tape import raw
from rtxarr.dtypes import is_floating, isdtype


def check_floating(**arrays):
    """Raise TypeError unless each array (or None) holds real floating-point numbers."""
    for name, x in arrays.items():
        if x is None:
            continue
        if not hasattr(x, "dtype"):
            raise TypeError(f"{name} must be an array or Tensor, got {type(x).__name__}")
        if not is_floating(x.dtype):
            raise TypeError(f"{name} must have a real floating-point dtype, got {x.dtype}")


def check_index(name, index, n):
    """Refuse anything but integers, and, as far as the host can see, any not in ``[0, n)``."""
    index = raw(index)
    if not hasattr(index, "dtype") or not isdtype(index.dtype, "integral"):
        kind = getattr(index, "dtype", type(index).__name__)
        raise TypeError(f"{name} must be an array of integers, got {kind}")
    on_host = isinstance(index, (np.ndarray, np.generic))
    (check_range if on_host else check_range_if_asked)(name, index, 0, n)


def check_rate(rate):
    """Raise ValueError unless ``rate`` is a probability of dropping that leaves something."""
    if not 0 <= rate < 1:
        raise ValueError(f"rate must lie in [0, 1), got {rate}")
