"""Functions of the arrays' namespace that have no node of their own: calls that a program makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rtxarr._device import namespace
from rtxarr.polygraph import _ir
from rtxarr.polygraph._trace import Tracer, current


def library(*arrays: Any, name: str, **options: Any) -> Any:
    """Run a function of the arrays' namespace."""
    function: Any = namespace(*arrays)
    for part in name.split("."):
        function = getattr(function, part)
    out = function(*arrays, **options)
    return tuple(out) if isinstance(out, (tuple, list)) else out


def called(name: str, arrays: Sequence[Tracer], options: dict, results: Any = None) -> Any:
    """Return what a function of the namespace gives, as a call; a tuple if it gives several.

    ``results`` has (dtype, shape) of each, where that is known without a try.
    """
    from rtxarr.polygraph._elementwise import layout_from  # which needs `library`

    single = True
    if results is None:
        out = library(*map(_stand_in, arrays), name=name, **options)
        single = not isinstance(out, tuple)
        results = [(o.dtype, o.shape) for o in ((out,) if single else out)]
    single = single and len(results) == 1
    named = tuple(sorted({"name": name, **options}.items()))
    nodes = _ir.call(
        library, [a.node for a in arrays], named, tuple((np.dtype(d), s) for d, s in results)
    )
    made = tuple(current().fresh(n, layout_from(n.shape, *arrays)) for n in nodes)
    return made[0] if single else made


def _stand_in(x: Tracer) -> np.ndarray:
    """Return an array of the dtype and shape of ``x`` that functions of matrices accept."""
    if x.ndim < 2:
        return np.ones(x.shape, x.dtype)
    eye = np.eye(*x.shape[-2:], dtype=x.dtype)
    return np.broadcast_to(eye, x.shape).copy()
