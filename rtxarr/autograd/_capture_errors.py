"""Errors of captures: where the step did what cannot be recorded, and what that is."""

import linecache
import traceback
from typing import Any

from rtxarr._replay import OncePerStep

__all__ = ["CaptureError", "Unsettled", "explained", "name_of"]


class CaptureError(RuntimeError):
    """A step cannot be recorded as a CUDA graph; the message says where and why."""


class Unsettled(Exception):
    """A step must first run eagerly once more; it has not done anything yet."""


_OURS = (
    "rtxarr.",
    "cupy",
    "cupyx",
    "array_api_compat",
    "numpy",
    "cuda.",
    "nvmath",
    "cudnn",
    "contextlib",
)
# What CuPy says in errors of its own.
_CAPTURING = ("stream is capturing", "during stream capture", "STREAM_CAPTURE", "StreamCapture")


def explained(error: BaseException, step: Any) -> BaseException:
    """Give the error to raise: the user's own, or where and why nothing can be recorded."""
    if isinstance(error, (CaptureError, MemoryError)):
        return error
    text = str(error)
    if isinstance(error, OncePerStep):
        return CaptureError(f"{name_of(step)} cannot be captured: {_line(error)} {text}")
    reads = any(words in text for words in _CAPTURING)
    if not reads and not type(error).__module__.startswith(("cupy", "cuda.")):
        return error
    if "cuBLAS" in text:
        why = "multiplies raw CuPy arrays through CuPy, which cannot be recorded; use rx.matmul"
    elif isinstance(error, NotImplementedError) or not reads:
        why = "calls what cannot be recorded"
    else:
        why = (
            "waits for the GPU or reads from it (a number, a comparison, a copy to the host, a "
            "size that depends on values), which a graph cannot do"
        )
    return CaptureError(f"{name_of(step)} cannot be captured: {_line(error)} {why} ({error})")


def name_of(step: Any) -> str:
    return getattr(step, "__qualname__", repr(step))


def _line(error):
    """Name the innermost line that is not this library's, nor those below."""
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [
        (frame, number)
        for frame, number in frames
        if not _is_ours(frame.f_globals.get("__name__", ""))
    ]
    frame, number = (own or frames)[-1]
    file = frame.f_code.co_filename
    text = linecache.getline(file, number).strip()
    return f"{file}:{number} `{text}`"


def _is_ours(module):
    return module.startswith(_OURS) and not module.startswith("rtxarr.recipes")
