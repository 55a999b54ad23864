"""What each node gives, said by NumPy: the definition that every code generator is held to.

It runs on the arrays of any namespace with the array API, so it is also how a node is run that no
kernel was generated for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rtxarr import dtypes
from rtxarr._device import is_device_array
from rtxarr.autograd import _conditional
from rtxarr.kernels import scan
from rtxarr.polygraph._ir import MAPS, REDUCES, SCANS, TRANSFORMS, Graph, Node, sharing


def evaluate(node: Node, sources: Sequence[Any], xp: Any, *, owned: bool = False) -> Any:
    """Return what ``node`` gives on the arrays ``sources``.

    Parameters
    ----------
    node : Node
        Any but an input.
    sources : sequence of array
        With the dtypes and shapes of ``node.src``; a tuple for the source of an ``item``.
    xp : module
        Their namespace.
    owned : bool, default False
        That nobody needs the sources any more: a transform may write to them.

    Returns
    -------
    array, or for a ``call`` tuple of array
        It may share memory with the sources, which are left alone.
    """
    options = {"owned": True} if owned and node.op in TRANSFORMS else {}
    with np.errstate(all="ignore"):
        out = RULES[node.op](xp, node, *sources, **options)
    if isinstance(out, np.generic):
        out = np.asarray(out)
    if node.dtype is not None and out.dtype != node.dtype:  # CuPy gives float32 for bfloat16
        out = xp.astype(out, node.dtype)
    return out


def run(graph: Graph, inputs: Sequence[Any], xp: Any) -> list[Any]:
    """Return the outputs of ``graph``, and write its updates into ``inputs`` after all reads."""
    values: dict[Node, Any] = {}
    nodes = graph.nodes()
    uses = _uses(graph, nodes)
    for node in nodes:
        if node.op == "input":
            values[node] = inputs[node.attrs[0]]
            continue
        values[node] = evaluate(node, [values[s] for s in node.src], xp)
        for s in node.src:
            uses[s] -= 1
            if not uses[s]:
                del values[s]
    written = [(inputs[number], values[node]) for number, node in graph.updates]
    if len(written) > 1:  # one may be a view of what another writes
        written = [(to, xp.asarray(value, copy=True)) for to, value in written]
    outputs = [values[node] for node in graph.outputs]
    shared = range(len(outputs)) if graph.updates else sharing(graph.outputs, graph.outputs)
    for i in shared:  # with what is written, or another output
        outputs[i] = xp.asarray(outputs[i], copy=True)
    for to, value in written:
        to[...] = value
    return outputs


def _uses(graph: Graph, nodes: Sequence[Node]) -> dict[Node, int]:
    uses = dict.fromkeys(nodes, 0)
    for node in nodes:
        for s in node.src:
            uses[s] += 1
    for node in graph.roots:
        uses[node] += 1
    return uses


# --------------------------------------------------------------------------- leaves and maps


def _constant(xp, node):
    (value,) = node.attrs
    if xp.__name__ == "array_api_compat.cupy":  # no copy from the host, which a graph cannot do
        return xp.full((), value.item(), dtype=node.dtype)
    return xp.asarray(value)


def _iota(xp, node):
    (axis,) = node.attrs
    shape = tuple(n if i == axis else 1 for i, n in enumerate(node.shape))
    line = xp.reshape(xp.astype(xp.arange(node.shape[axis]), node.dtype), shape)
    return xp.broadcast_to(line, node.shape)


def _map(xp, node, *sources):
    return getattr(xp, node.op)(*sources)


def _cast(xp, node, x):
    if x.dtype.kind == "c" and node.dtype.kind not in "cb":
        x = xp.real(x)
    return xp.astype(x, node.dtype)


def _sign(xp, node, x):
    if isinstance(x, (np.ndarray, np.generic)):
        return np.sign(x)
    if x.dtype.kind in "iubc":
        return xp.sign(x)
    # array_api_compat's finds NaN by a mask, which waits for a GPU.
    up, down = x > 0, x < 0
    return xp.where(xp.isnan(x), x, xp.astype(up, x.dtype) - xp.astype(down, x.dtype))


def _rsqrt(xp, node, x):
    return xp.reciprocal(xp.sqrt(x))


def _special(name):
    def rule(xp, node, x):
        from rtxarr._device import special

        wide = xp.astype(x, np.float32) if dtypes.is_half(x.dtype) else x
        return getattr(special(x), name)(wide)

    return rule


def _sigmoid(xp, node, x):
    wide = xp.astype(x, np.float32) if dtypes.is_half(x.dtype) else x
    small = xp.exp(-xp.abs(wide))
    return xp.where(wide >= 0, xp.ones_like(wide), small) / (1 + small)


# ------------------------------------------------------------------------ reductions, scans


def _reduce(xp, node, x):
    (axes,) = node.attrs
    op = node.op
    if op in ("sum", "prod"):
        return getattr(xp, op)(x, axis=axes, dtype=x.dtype)
    if op.startswith("arg"):
        return getattr(xp, op)(x, axis=axes[0])
    return getattr(xp, op)(x, axis=axes)


def _scan(xp, node, x):
    (axis,) = node.attrs
    op = node.op.removeprefix("cumulative_")
    if op in ("max", "min"):
        out = scan.running_extrema(op, x, axis=axis)
        return out.copy() if is_device_array(x) and not out.flags.c_contiguous else out
    if scan.fits(x, x.dtype):  # CuPy's order varies between runs
        out = scan.scan(op, x, axis=axis)
        return out if out.flags.c_contiguous else out.copy()
    return getattr(xp, node.op)(x, axis=axis, dtype=x.dtype)


# ------------------------------------------------------------------------------------ views


def _reshape(xp, node, x):
    return xp.reshape(x, node.shape)


def _broadcast(xp, node, x):
    return xp.broadcast_to(x, node.shape)


def _permute(xp, node, x):
    return xp.permute_dims(x, node.attrs[0])


def key_of(starts: Sequence[int], steps: Sequence[int], lengths: Sequence[int]) -> tuple:
    """Return the index that takes ``lengths`` elements from ``starts``, ``steps`` apart."""
    parts = []
    for start, step, length in zip(starts, steps, lengths, strict=True):
        if length == 0:
            parts.append(slice(0, 0, 1))
            continue
        stop = start + step * length
        parts.append(slice(start, None if stop < 0 else stop, step))
    return tuple(parts)


def _slice(xp, node, x):
    return x[key_of(*node.attrs, node.shape)]


# --------------------------------------------------------------------------------- indexing


def _concat(xp, node, *parts):
    return xp.concat(parts, axis=node.attrs[0])


def _update(xp, node, x, value):
    out = xp.asarray(x, copy=True)
    out[key_of(*node.attrs, value.shape)] = value
    return out


def _gather(xp, node, x, index):
    (axis,) = node.attrs
    flat = xp.take(x, xp.reshape(index, (-1,)), axis=axis)
    return xp.reshape(flat, node.shape)


def _take_along(xp, node, x, index):
    return xp.take_along_axis(x, index, axis=node.attrs[0])


def _scatter_add(xp, node, x, index, values):
    from rtxarr.ops._segment import scatter_add_rows

    (axis,) = node.attrs
    rows = xp.moveaxis(values, axis, 0)
    flat = xp.reshape(rows, (rows.shape[0], math.prod(rows.shape[1:])))
    added = scatter_add_rows(flat, index, x.shape[axis])
    shape = (x.shape[axis], *rows.shape[1:])
    return x + xp.moveaxis(xp.reshape(added, shape), 0, axis)


def _spread(xp, node, x, indptr):
    counts = indptr[1:] - indptr[:-1]
    if is_device_array(x):
        rows = xp.searchsorted(indptr[1:], xp.arange(node.shape[0]), side="right")
    else:
        rows = xp.repeat(xp.arange(x.shape[0]), counts)
    return xp.take(x, rows, axis=0)


def _segment_reduce(xp, node, values, indptr):
    from rtxarr.ops import _segment

    (op,) = node.attrs
    shape = values.shape
    rows = xp.reshape(values, (shape[0], math.prod(shape[1:])))
    return xp.reshape(getattr(_segment, f"segment_{op}")(rows, indptr), node.shape)


def _scatter_reduce(xp, node, index, values):
    from rtxarr.kernels.scatter import scatter_reduce

    return scatter_reduce(node.attrs[0], index, values, node.shape[0])


# ----------------------------------------------------------------- products, transforms, calls


def _matmul(xp, node, a, b):
    from rtxarr.ops import matmul

    return matmul(a, b)


def _transform(xp, node, x, *, owned=False):
    axes, lengths, norm = node.attrs
    name = f"{node.op}n"
    if is_device_array(x):
        from rtxarr.libs.fft import transform

        return transform(name, x, lengths, axes, norm, owned=owned)
    if norm == "none":  # NumPy's names for where it scales
        norm = "forward" if node.op.startswith("i") else "backward"
    return getattr(xp.fft, name)(x, s=lengths, axes=axes, norm=norm)


def _call(xp, node, *sources):
    function, options, _ = node.attrs
    out = function(*sources, **dict(options))
    return out if isinstance(out, tuple) else (out,)


def _item(xp, node, results):
    return results[node.attrs[0]]


def _cond(xp, node, test, *operands):
    then, otherwise = (functools.partial(run, graph, operands, xp) for graph in node.attrs)
    return tuple(_conditional.choose(test, then, otherwise))


def _while_loop(xp, node, *operands):
    test, body = node.attrs
    state, rest = operands[: len(body.outputs)], operands[len(body.outputs) :]
    found = _conditional.repeat(
        lambda *state: run(test, (*state, *rest), xp)[0],
        lambda *state: run(body, (*state, *rest), xp),
        state,
    )
    return tuple(found)


def _scan_rows(xp, node, *operands):
    body, n_state, n_inputs, n_steps = node.attrs
    outs = [xp.empty((n_steps, *n.shape), dtype=n.dtype) for n in body.inputs[len(operands) :]]
    return scan_rows(lambda *xs: run(body, xs, xp), operands, outs, n_state, n_inputs)


def scan_rows(step, operands, outs, n_state, n_inputs):
    """Call ``step`` on the state, rows of inputs, what stays, and rows of ``outs`` to fill."""
    state, inputs = operands[:n_state], operands[n_state : n_state + n_inputs]
    rest = operands[n_state + n_inputs :]
    for i in range((*inputs, *outs)[0].shape[0]):
        rows = (x[i, ...] for x in inputs), (out[i, ...] for out in outs)
        state = step(*state, *rows[0], *rest, *rows[1])
    return (*state, *outs)


RULES: dict[str, Callable] = {
    **dict.fromkeys(MAPS, _map),
    **dict.fromkeys(REDUCES, _reduce),
    **dict.fromkeys(SCANS, _scan),
    **dict.fromkeys(TRANSFORMS, _transform),
    "constant": _constant,
    "iota": _iota,
    "cast": _cast,
    "sign": _sign,
    "rsqrt": _rsqrt,
    "erf": _special("erf"),
    "sigmoid": _sigmoid,
    "reshape": _reshape,
    "broadcast": _broadcast,
    "permute": _permute,
    "slice": _slice,
    "concat": _concat,
    "update": _update,
    "gather": _gather,
    "take_along": _take_along,
    "scatter_add": _scatter_add,
    "spread": _spread,
    "segment_reduce": _segment_reduce,
    "scatter_reduce": _scatter_reduce,
    "matmul": _matmul,
    "call": _call,
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan_rows,
    "item": _item,
}
