"""polygraph: one IR that fuses array code into kernels.

A function of arrays is run once on tracers (``_trace``), which note what it does as a graph
(``_ir``); passes rewrite the graph, and a program of kernels is made of it.
"""

import importlib
from typing import Any

from rtxarr.polygraph import _methods  # noqa: F401  (gives tracers their methods)

# Public names, loaded on first use, and where they are.
_WHERE = {
    "ArraySpec": "_aot",
    "Bundle": "_aot",
    "BundleError": "_aot_load",
    "Fused": "_fuse",
    "Jitted": "_jit",
    "Loaded": "_aot_load",
    "NotSaved": "_aot",
    "Patch": "_patch",
    "Refused": "_patch",
    "aot": "_aot",
    "cache_info": "_cache",
    "cond": "_control",
    "fuse": "_fuse",
    "jit": "_jit",
    "load": "_aot_load",
    "patch": "_patch",
    "scan": "_control",
    "while_loop": "_control",
}

__all__ = [*_WHERE]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        found = getattr(importlib.import_module(f"rtxarr.polygraph.{_WHERE[name]}"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
