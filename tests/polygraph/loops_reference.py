"""Kernels run as they are written, by NumPy on whole grids of counters: slow and plain.

Code generators are tested against :func:`run`. It works in the order of a kernel's phases; a
statement is one NumPy operation on values of shape (rows, cols), (rows, 1) or (1, 1).
"""

from __future__ import annotations

import numpy as np

from rtxarr._device import namespace
from rtxarr.polygraph import _index, _interpret
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._ir import REPEATED


def memory(array):
    """Return all memory that an array spans as one flat array, and where its first element is."""
    if array.size == 0:
        return np.empty(0, array.dtype), 0
    extents = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    low, high = sum(e for e in extents if e < 0), sum(e for e in extents if e > 0)
    size = array.dtype.itemsize
    lowest = tuple(
        slice(n - 1, n) if s < 0 else slice(0, 1)
        for n, s in zip(array.shape, array.strides, strict=True)
    )
    flat = np.lib.stride_tricks.as_strided(
        array[(..., *lowest)].reshape(1), ((high - low) // size + 1,), (size,)
    )
    return flat, -low // size


class _Kernel:
    """The state of one run: memory, and the values of the statements of the current pass."""

    def __init__(self, loops, arrays):
        self.loops = loops
        self.scalars, self.memory = {}, {}
        self.scanned = {}
        for buffer, array in zip(loops.buffers, arrays, strict=True):
            if buffer.is_scalar:
                self.scalars[buffer.name] = np.asarray(array, buffer.dtype)[()]
            else:
                assert array.dtype == buffer.dtype, (buffer, array.dtype)
                self.memory[buffer.name] = memory(array)

    def execute(self, statements, values, counters):
        """Run statements in order; ``values`` is read and extended."""
        for s in statements:
            result = self.one(s, values, counters)
            if s.op != "store":
                shape = np.broadcast_shapes(result.shape, *(c.shape for c in counters.values()))
                assert result.dtype == s.dtype, (s, result.dtype)
                values[s.name] = np.broadcast_to(result, shape)

    def number(self, expr, values, counters):
        integers = {k: v.astype(np.int64) for k, v in values.items() if v.dtype.kind in "iu"}
        shape = np.broadcast_shapes(*(c.shape for c in counters.values()))
        return np.broadcast_to(
            np.asarray(_index.evaluate(expr, {**integers, **counters}), np.int64), shape
        )

    def one(self, s, values, counters):
        if s.op == "load":
            name, expr, mask = s.args
            flat, origin = self.memory[name]
            places = self.number(expr, values, counters) + origin
            good = np.broadcast_to(True if mask is None else values[mask], places.shape)
            assert ((places >= 0) & (places < flat.size))[good].all(), f"{s} is out of bounds"
            loaded = np.zeros(places.shape, s.dtype)
            loaded[good] = flat[places[good]]
            return loaded
        if s.op == "store":
            name, expr, value = s.args
            flat, origin = self.memory[name]
            places = self.number(expr, values, counters) + origin
            assert ((places >= 0) & (places < flat.size)).all(), f"{s} is out of bounds"
            assert values[value].dtype == flat.dtype, s
            flat[places] = values[value]
            return None
        if s.op == "scalar":
            return np.asarray(self.scalars[s.args[0]])
        if s.op == "index":
            return self.number(s.args[0], values, counters).astype(s.dtype)
        if s.op == "in_range":
            expr, low, high = s.args
            number = self.number(expr, values, counters)
            return (number >= low) & (number < high)
        if s.op == "divides":
            return self.number(s.args[0], values, counters) % s.args[1] == 0
        if s.op == "scanned":
            return self.scanned[s.name]
        sources = [values[name] for name in s.args]
        shape = np.broadcast_shapes(*(x.shape for x in sources))
        sources = [np.broadcast_to(x, shape) for x in sources]
        nodes = [ir.input_node(i, x.dtype, shape) for i, x in enumerate(sources)]
        node = ir.cast(nodes[0], s.dtype) if s.op == "cast" else ir.map_node(s.op, *nodes)
        if node is nodes[0]:
            return sources[0]
        return np.asarray(_interpret.evaluate(node, sources, namespace(*sources)))


def reduce(op, values, dtype, result):
    """Return the reduction along the last axis, kept with length one."""
    if values.shape[-1] == 0 and op in ("max", "min", "mean"):  # only rows of segments
        info = np.finfo(result) if np.issubdtype(result, np.floating) else np.iinfo(result)
        extremes = (-np.inf, np.inf) if isinstance(info, np.finfo) else (info.min, info.max)
        value = {"max": extremes[0], "min": extremes[1], "mean": 0}[op]
        return np.full((*values.shape[:-1], 1), value, result)
    if op in ("sum", "prod", "mean"):
        total = getattr(np, "prod" if op == "prod" else "sum")(
            values, axis=-1, keepdims=True, dtype=dtype
        )
        return (total / dtype.type(values.shape[-1]) if op == "mean" else total).astype(result)
    return getattr(np, op)(values, axis=-1, keepdims=True).astype(result)


def running(scan, values):
    """Return running totals along the last axis."""
    order = slice(None, None, -1 if scan.backwards else 1)
    accumulate = getattr(np, REPEATED[scan.op]).accumulate
    return accumulate(values[:, order], axis=-1, dtype=scan.dtype)[:, order]


def _passes(kernel, row_counters, c):
    loops = kernel.loops
    rows = {}
    kernel.execute(loops.before, rows, row_counters)
    for phase in loops.phases:
        values = dict(rows)
        counters = {**row_counters, "i" if loops.kind == "map" else "c": c}
        kernel.execute(phase.body, values, counters)
        shape = np.broadcast_shapes(*(x.shape for x in counters.values()))
        for a in phase.accumulators:
            whole = np.broadcast_to(values[a.of], shape)
            rows[a.name] = reduce(a.op, whole, a.dtype, a.result)
        for scan in phase.scans:
            whole = np.broadcast_to(values[scan.of], shape)
            kernel.scanned[scan.name] = running(scan, whole)
        kernel.execute(phase.after, rows, row_counters)


def run(loops, *arrays):
    """Run a kernel on arrays (and numbers, for scalars) in the order of ``loops.buffers``."""
    kernel = _Kernel(loops, arrays)
    if loops.kind == "map":
        assert loops.rows == 1 and len(loops.phases) == 1
        _passes(kernel, {}, np.arange(loops.cols))
    elif loops.kind in ("rows", "columns"):
        _passes(kernel, {"r": np.arange(loops.rows)[:, None]}, np.arange(loops.cols)[None, :])
    else:
        assert loops.kind == "segments", loops.kind
        flat, origin = kernel.memory[loops.indptr]
        indptr = flat[origin : origin + loops.rows + 1]
        for r in range(loops.rows):
            counters = {"r": np.full((1, 1), r), "f": np.arange(loops.features)[:, None]}
            _passes(kernel, counters, np.arange(indptr[r], indptr[r + 1])[None, :])
