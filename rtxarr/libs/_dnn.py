"""Finding cuDNN, and counting what it was not asked for."""

from __future__ import annotations

import threading
from typing import Any

from rtxarr import _device
from rtxarr.libs._cudnn import Cudnn
from rtxarr.libs._layout import Unsupported
from rtxarr.libs._status import Provider

__all__ = ["MAX_SIZE", "check", "library", "refuse", "status"]

MAX_SIZE = 2**31  # elements of one array
provider = Provider("attention and convolutions", "CuPy")
loaded: list[Cudnn | None] = []  # empty until it is looked for
_loading = threading.Lock()


def _load() -> Cudnn | None:
    """Look for the library, once; warn if it is not there."""
    with _loading:
        if not loaded:
            cupy = _device.cupy
            try:
                found = Cudnn(cupy)
            except ImportError as error:
                absent = (error.name or "").partition(".")[0] == "cudnn"
                reason = "is not installed" if absent else f"does not import ({error})"
            except Exception as error:  # of the library that is not found, too
                reason = f"cannot use cuDNN ({error})"
            else:
                provider.library = repr(found)
                loaded.append(found)
                return found
            loaded.append(None)
            major = cupy.cuda.runtime.runtimeGetVersion() // 1000
            provider.is_missing(
                f"nvidia-cudnn-frontend {reason}",
                f"pip install --upgrade nvidia-cudnn-cu{major} nvidia-cudnn-frontend",
            )
        return loaded[0]


def library() -> Cudnn | None:
    return loaded[0] if loaded else _load()


def status() -> Provider:
    """Return what serves attention and convolutions on a GPU, and what went to CuPy instead."""
    if len(_device.devices()) > 1:
        library()
    return provider


def refuse(reason: Unsupported, taken_by: str = "") -> None:
    """Count what cuDNN was not asked for, and by which other library it was taken, if one did."""
    if text := str(reason):
        provider.refused[text] += 1
        if taken_by:
            provider.elsewhere[taken_by, text] += 1


def check(dnn: Cudnn, *arrays: Any) -> None:
    """Refuse what is not on the current device, is too large or has no elements."""
    device_id = dnn.cupy.cuda.runtime.getDevice()
    for x in arrays:
        if x is None:
            continue
        if type(x) is not dnn.array:
            raise Unsupported("an array that is not CuPy's")
        if x.data.device_id != device_id:
            raise Unsupported("an array that is not on the current device")
        if x.size >= MAX_SIZE:
            raise Unsupported(f"arrays of {MAX_SIZE} elements or more")
        if x.size == 0:
            raise Unsupported("")
