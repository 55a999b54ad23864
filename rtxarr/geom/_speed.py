"""How fast a device moves bytes and multiplies matrices: known, or measured once."""

import functools
import os
import time
from typing import NamedTuple

import numpy as np

from rtxarr import _device
from rtxarr._device import Device

# Bytes a second of a copy, read and written, as measured; others are measured on first use.
_KNOWN = {"NVIDIA H200": 4.15e12}

_COPIED = {"cpu": 2**26, "cuda": 2**29}
_MULTIPLIED = {"cpu": 512, "cuda": 4096}


class Speed(NamedTuple):
    """What a device can do."""

    bandwidth: float  # bytes a second, read and written
    flops: float  # of a product of float32 matrices, a second
    cache: int  # bytes; 0 where it is not known


@functools.cache
def speed_of(place: Device) -> Speed:
    """Give what a device can do; the first call takes a second or less."""
    bandwidth = _KNOWN.get(_device._gpu_name(place.index)) if place.kind == "cuda" else None
    with place:
        return Speed(bandwidth or _copy_rate(place), _product_rate(place), _cache(place))


def _copy_rate(place):
    n = _COPIED[place.kind]
    xp = _device.namespace()
    source, target = xp.zeros(n, dtype=xp.uint8), xp.ones(n, dtype=xp.uint8)

    def copy():
        target[...] = source

    return 2 * n / _seconds(place, copy)


def _product_rate(place):
    n = _MULTIPLIED[place.kind]
    x = _device.namespace().ones((n, n), dtype=np.float32)
    return 2 * n**3 / _seconds(place, lambda: x @ x)


def _seconds(place, work):
    """Give the shortest of some times; the first call is left out."""
    found = []
    for _ in range(6):
        _device.synchronize(place)
        start = time.perf_counter()
        work()
        _device.synchronize(place)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def _cache(place):
    if place.kind == "cuda":
        return int(_device.cupy.cuda.Device(place.index).attributes["L2CacheSize"])
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or os.sysconf("SC_LEVEL2_CACHE_SIZE")
    except (AttributeError, OSError, ValueError):  # not Linux
        return 0
