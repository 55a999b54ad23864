"""Random numbers in traced functions: drawn by the program, from where its generators stand.

While a function is traced its generators are set aside: what it draws moves copies of their places.
Each draw becomes a call that reads where it begins from an input of the program, which a run fills
by moving the generator itself, in the order of the draws. The numbers are those that the function
would draw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr import _replay
from rtxarr import random as _random
from rtxarr._device import _SIMULATING, device, is_device_array
from rtxarr.kernels import philox
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._trace import Concretization, Trace, Tracer


class Place:
    """An input: where a draw begins, as an array of uint64 (offset, stream and key)."""

    __slots__ = ("generator", "kind", "n", "on_numpy")

    def __init__(self, generator: Any, kind: str, n: int, on_numpy: bool) -> None:
        self.generator = generator
        self.kind = kind
        self.n = n
        self.on_numpy = on_numpy

    def reserve(self) -> Any:
        """Move the generator past the draw, and return where it begins."""
        if not self.on_numpy and _replay.recorder() is not None:
            return self.generator._reserve_in_memory(self.kind, self.n)
        place, start = self.generator._reserve(self.kind, self.n)
        found = np.array([start, place.stream, place.key], np.uint64)
        return found if self.on_numpy else _replay.from_host(lambda: found)


class Draws:
    """The generators of one trace, and what was drawn."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._places: dict[tuple, ir.Node] = {}
        self._before: dict[Any, Any] = {}  # where this thread had set generators back to

    def reserve(self, generator: Any, kind: str, n: int) -> Callable[..., Tracer]:
        """Set ``n`` values aside; return what draws those from ``shift`` on.

        A generator that was set back, to repeat a computation, finds what it drew before.
        """
        if self._trace.scope is not None:
            raise Concretization("it draws random numbers in a branch or loop")
        if generator not in self._before:
            self._before[generator] = _random._thread.replayed.get(generator)
            _random._thread.replayed[generator] = generator._place().copy()
        _, start = generator._reserve(kind, n)
        key = generator, start, kind, n
        if key not in self._places:
            source = Place(generator, kind, n, self._trace.on_numpy)
            self._places[key] = self._trace._new_input(source, np.dtype(np.uint64), (3,))
        place = self._places[key]

        def draw(n, dtype, params, target, shift=0):
            if (target.kind == "cpu") is not self._trace.on_numpy:
                raise Concretization(f"it draws numbers on {target}, where its arrays are not")
            options = (("kind", kind), ("n", n), ("dtype", dtype), ("params", params))
            (node,) = ir.call(draw_at, (place,), (*options, ("shift", shift)), [(dtype, (n,))])
            return self._trace.fresh(node)

        return draw

    def restore(self) -> None:
        """Let the generators stand where they stood."""
        for generator, before in self._before.items():
            if before is None:
                _random._thread.replayed.pop(generator, None)
            else:
                _random._thread.replayed[generator] = before
        self._before.clear()


def draw_at(place: Any, *, kind: str, n: int, dtype: Any, params: tuple, shift: int) -> Any:
    """Return numbers of a stream from where an input says that a draw begins."""
    if is_device_array(place) or _SIMULATING:
        return philox.fill_from_memory(kind, n, dtype, params, place=place, shift=shift)
    offset, stream, key = place
    options = {"key": key, "stream": stream, "offset": int(offset) + shift}
    return philox.fill(kind, n, dtype, params, device=device("cpu"), **options)
