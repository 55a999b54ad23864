"""The backward pass: nodes newest first, contributions in a fixed order."""

import functools
import threading
from heapq import heappop, heappush

import numpy as np

from rtxarr import _device
from rtxarr._allocation import owner_of
from rtxarr._out_of_memory import explain_out_of_memory
from rtxarr.autograd._mode import AUTOCAST, PROFILED, RECORDED, state, witness
from rtxarr.autograd._op import checksum
from rtxarr.autograd._tape import Leaf, Node, Tensor, make_tensor, raw
from rtxarr.dtypes import is_complex, is_floating, is_inexact
from rtxarr.kernels.elementwise import add_to

_FREED = object()
_accumulating = threading.Lock()  # threads that share parameters add to the same leaves


@functools.cache
def _ops():
    from rtxarr import ops  # they are made with the tape

    return ops


class Samples:
    """Leaves whose gradient is wanted for each sample; see ``per_sample_gradients``."""

    def __init__(self, leaves):
        self.leaves = leaves
        self.grads = {}

    def take(self, plan, k, leaf, g, saved, dtype):
        """Collect the per-sample gradient of tracked argument ``k`` instead of its sum."""
        rule = plan.per_sample_calls[k]
        if rule is None:
            argument = plan.op.variadic or plan.op.arg_names[plan.tracked[k]]
            raise TypeError(
                f"{plan.op.name}() has no per-sample rule for {argument!r}; use linear, conv, "
                "embedding or normalization layers, or add one with defper_sample"
            )
        grad = _cast(rule(g, saved), dtype)
        known = self.grads.get(leaf)
        self.grads[leaf] = grad if known is None else _sum(known, grad)


def accumulate_leaves(tensor, grad, *, retain_graph=False):
    """Run the tape below ``tensor`` and add to the ``grad`` of its leaves."""
    if tensor.node is None:
        raise RuntimeError("backward() needs a tensor that requires_grad, this one does not")
    # The one that is kept will do: leaves get a copy.
    start = _kept_start(tensor.data) if grad is None else None
    g = raw(_starting_gradient(tensor, grad)) if start is None else start
    leaves = _run([(tensor, g)], None, False, retain_graph, None)
    grads = _apart(leaves.values(), [g])
    with _accumulating:
        seen = witness()
        for leaf, g in zip(leaves, grads, strict=True):
            if seen is not None:
                seen.set_grad(leaf)
            leaf.grad = g if leaf.grad is None else _sum(leaf.grad, g)


def gradients(outputs, inputs, grads=None, *, create_graph=False, retain_graph=None):
    """Give the gradients of ``outputs`` with respect to ``inputs``.

    Parameters
    ----------
    outputs, inputs : sequence of Tensor
    grads : sequence of array or Tensor, optional
        One for each output, of its shape; ones for scalar outputs when left out.
    create_graph : bool, default False
        Record the backward pass, so that the result can be differentiated again.
    retain_graph : bool, default the value of ``create_graph``
        Keep what the graph saved for another pass.

    Returns
    -------
    list of array (Tensor when ``create_graph``) or None
        None for an input that the outputs do not depend on.
    """
    outputs, inputs = list(outputs), list(inputs)
    grads = [None] * len(outputs) if grads is None else list(grads)
    if len(grads) != len(outputs):
        raise ValueError(f"grads must have one entry for each output, got {len(grads)}")
    for place, tensor in enumerate(inputs):
        if not isinstance(tensor, Tensor) or tensor.node is None:
            raise ValueError(f"inputs[{place}] must be a Tensor that requires_grad")
    pairs = [
        (tensor, _starting_gradient(tensor, g))
        for tensor, g in zip(outputs, grads, strict=True)
        if isinstance(tensor, Tensor) and tensor.node is not None
    ]
    retain = create_graph if retain_graph is None else retain_graph
    wanted = {(tensor.node, tensor.slot): None for tensor in inputs}
    found = _run(pairs, wanted, create_graph, retain, None)
    found = [found.get((tensor.node, tensor.slot)) for tensor in inputs]
    return found if create_graph else _apart(found, [g for _, g in pairs])


def masked_gradients(outputs, inputs, grads, masks, *, create_graph=False):
    """Give the gradients of ``inputs``, and the masks that they come with.

    A mask is an array of bool, or None: outside of it a gradient is zero by design, as ``where``
    made it, whatever is not finite there. ``masks`` are those of ``grads``.
    """
    pairs = [(x, _starting_gradient(x, g)) for x, g in zip(outputs, grads, strict=True)]
    wanted = {(tensor.node, tensor.slot): None for tensor in inputs}
    backward = _Pass(pairs, wanted, create_graph, True, None)
    backward.keeps_masks = True
    found = _through(backward, pairs, masks)
    grads = [found.get((tensor.node, tensor.slot)) for tensor in inputs]
    return grads, [backward.found_masks.get(tensor.node) for tensor in inputs]


def per_sample_gradients(output, parameters, grad=None):
    """Give, for each sample of the batch, the gradient of ``output`` for each parameter.

    The hook sits before the contraction over the batch: the operation that uses a parameter
    gives one gradient for each leading index of its input instead of their sum.

    Parameters
    ----------
    output : Tensor
        Usually a sum of per-sample losses; with a mean, each gradient carries its ``1 / n``.
    parameters : iterable of Tensor
        Leaves, each used by operations with a per-sample rule (linear, convolution,
        embedding and normalization have one).
    grad : array, shape of ``output``, optional
        As in :meth:`Tensor.backward`.

    Returns
    -------
    list of array, shape (n_samples, \\*parameter.shape)
        None for a parameter that ``output`` does not depend on.

    Raises
    ------
    TypeError
        If an operation on the way has no per-sample rule for the parameter.
    """
    parameters = list(parameters)
    for place, p in enumerate(parameters):
        if type(getattr(p, "node", None)) is not Leaf:
            raise ValueError(f"parameters[{place}] must be a leaf tensor that requires_grad")
    samples = Samples({p.node for p in parameters})
    _run([(output, raw(_starting_gradient(output, grad)))], None, False, False, samples)
    return [samples.grads.get(p.node) for p in parameters]


def _starting_gradient(tensor, grad):
    data = tensor.data
    if grad is None:
        if data.size != 1 or is_complex(data.dtype):
            raise ValueError(
                "grad must be given for an output that is not a real scalar, got shape "
                f"{data.shape} and dtype {data.dtype}"
            )
        if _device.is_device_array(data):  # at half the cost of ones_like
            ones = _device.empty(data, data.shape, data.dtype)
            ones.fill(1)
            return ones
        return _device.namespace(data).ones_like(data)
    if not isinstance(grad, Tensor):
        xp = _device.namespace(data)
        grad = xp.asarray(grad, dtype=None if hasattr(grad, "dtype") else data.dtype)
    if grad.shape != data.shape:
        raise ValueError(f"grad must have the output's shape {data.shape}, got {grad.shape}")
    if is_complex(grad.dtype) and not is_complex(data.dtype):
        raise TypeError(f"grad must be real for a real output, got dtype {grad.dtype}")
    # A real one for a complex output would pass the conjugations by.
    return grad if grad.dtype == data.dtype else _cast(grad, data.dtype)


def _kept_start(data):
    """Give the gradient of a real scalar of a GPU with respect to itself, the same each time."""
    if data.ndim or not is_floating(data.dtype) or not _device.is_device_array(data):
        return None
    return _device.constant(data, np.ones, (), dtype=data.dtype)


def reaches_other_leaves(outputs, inputs):
    """Tell whether the graph of ``outputs`` reaches a leaf without passing ``inputs``."""
    stop = {tensor.node for tensor in inputs}
    stack = [t.node for t in outputs if isinstance(t, Tensor) and t.node is not None]
    seen = set(stop)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node) is Leaf:
            if not node.closed:
                return True
            continue
        stack.extend(edge[0] for edge in node.edges)
    return False


def _needed(outputs, wanted):
    """Nodes on a path from ``outputs`` to a wanted node (both ends included)."""
    needed = {node for node, _ in wanted}
    order, seen, stack = [], set(), [t.node for t, _ in outputs]
    while stack:
        node = stack.pop()
        if node in seen or type(node) is Leaf:
            continue
        seen.add(node)
        order.append(node)
        stack.extend(edge[0] for edge in node.edges)
    order.sort(key=lambda node: -node.order)  # oldest first: inputs before what uses them
    for node in order:
        if any(edge[0] in needed for edge in node.edges):
            needed.add(node)
    return needed


def _run(outputs, wanted, create_graph, retain_graph, samples):
    """Propagate ``(tensor, gradient)`` pairs; give leaf gradients, or the wanted ones."""
    return _through(_Pass(outputs, wanted, create_graph, retain_graph, samples), outputs)


def _through(backward, outputs, masks=None):
    previous = state.mode
    # Rules run in the dtypes of the forward pass.
    state.mode = previous & ~(AUTOCAST if backward.create_graph else AUTOCAST | RECORDED)
    try:
        return backward.run(outputs, masks)
    except MemoryError as error:
        explain_out_of_memory(error)
        raise
    finally:
        state.mode = previous


class _Pass:
    """One backward pass: what each node has received, and the nodes still to run."""

    def __init__(self, outputs, wanted, create_graph, retain_graph, samples):
        self.wanted = wanted
        self.needed = None if wanted is None else _needed(outputs, wanted)
        self.create_graph = create_graph
        self.retain_graph = retain_graph
        self.samples = samples
        self.grads: dict = {}  # node or leaf -> gradient (a list of them for several outputs)
        self.owned: set = set()  # targets whose buffer was allocated here: may be added into
        self.masks: dict = {}  # node -> elements outside which its gradient is zero by design
        self.found: dict = {}  # wanted (node, slot) -> gradient
        self.heap: list = []  # nodes by order: the newest first
        self.keeps_masks = False  # of the wanted gradients too
        self.found_masks: dict = {}

    def run(self, outputs, masks=None):
        for i, (tensor, g) in enumerate(outputs):
            if self.needed is None or tensor.node in self.needed:
                mask = None if masks is None else masks[i]
                self.deliver(tensor.node, tensor.slot, g, mask)
        heap, grads, visit = self.heap, self.grads, self.visit
        if state.mode & PROFILED:
            visit = state.profile.timed_visit(visit)
        while heap:
            node = heappop(heap)[1]
            g = grads.pop(node)
            if self.wanted is not None:
                self.collect(node, g)
                if not any(edge[0] in self.needed for edge in node.edges):
                    continue
            visit(node, g)
        if self.wanted is None:
            return grads
        for leaf, g in grads.items():
            self.collect(leaf, g)
        return self.found

    def collect(self, node, g):
        """Keep a gradient that was asked for."""
        parts = enumerate(g) if type(g) is list else ((0, g),)
        for slot, part in parts:
            if part is not None and (node, slot) in self.wanted:
                self.found[node, slot] = part
                if self.keeps_masks and type(g) is not list:
                    self.found_masks[node] = self.masks.get(node)

    def visit(self, node, g):
        """Run the rules of one node and hand on what they give."""
        plan = node.plan
        op = plan.op
        saved = node.saved
        if type(saved) is not tuple:
            saved = _restore(node, saved, self.retain_graph)
        for guard, version in node.guards:
            if type(guard) is not list or guard[0] != version:
                _check_unchanged(op, guard, version)
        if self.create_graph:
            saved = _as_tensors(node, saved)
        mask = self.masks.pop(node, None) if self.masks else None
        rows = None
        if mask is not None and plan.rows_call is not None:
            rows = plan.rows_call(mask, saved)
            saved = _without_rows(saved, rows, mask)
        conjugate = op.holomorphic and _is_complex(g)
        if conjugate:
            g = _conj(g)
        masks = None
        if op.takes_masks:
            joint, masks = plan.call.masked(g, saved, mask)
            mask = None
        else:
            joint = plan.call(g, saved) if plan.call is not None else None
        needed, samples = self.needed, self.samples
        for k, (target, slot, shape, dtype) in enumerate(node.edges):
            if needed is not None and target not in needed:
                continue
            if samples is not None and target in samples.leaves:
                samples.take(plan, k, target, g, saved, dtype)
                continue
            gx = plan.calls[k](g, saved) if joint is None else joint[plan.tracked[k]]
            if gx is None:
                continue
            if conjugate:
                gx = _conj(gx)
            passed = None if masks is None else masks[k]
            if rows is not None:
                gx, passed = _route_rows(plan, k, gx, rows, shape)
            elif mask is not None or plan.mask_calls[k] is not None:
                gx, passed = _route_mask(plan, k, g, gx, mask, saved, shape)
            if gx.shape != shape:
                gx = _fitted(plan, k, gx, shape)
            if gx.dtype is not dtype and gx.dtype != dtype:
                gx = _cast(gx, dtype)
            self.deliver(target, slot, gx, passed)
        if not self.retain_graph:
            node.saved = _FREED

    def deliver(self, target, slot, g, mask):
        """Add ``g`` to what output ``slot`` of ``target`` has received so far."""
        grads = self.grads
        known = grads.get(target)
        if known is None:
            grads[target] = g
            if type(target) is Node:
                heappush(self.heap, (target.order, target))
                if target.outputs is not None:
                    grads[target] = [None] * len(target.outputs)
                    grads[target][slot] = g
                    if mask is not None and target.plan.op.takes_masks:
                        self.masks[target] = [None] * len(target.outputs)
                        self.masks[target][slot] = mask
                elif mask is not None:
                    self.masks[target] = mask
            elif mask is not None and self.keeps_masks:
                self.masks[target] = mask
            return
        if type(known) is list:
            is_first = known[slot] is None
            known[slot] = g if is_first else _sum(known[slot], g)
            if target.plan.op.takes_masks and (mask is not None or target in self.masks):
                masks = self.masks.setdefault(target, [None] * len(known))
                both = None if mask is None or masks[slot] is None else masks[slot] | mask
                masks[slot] = mask if is_first else both
            return
        if not self.create_graph and target in self.owned:
            if not _device.is_device_array(known) or not add_to(known, g):
                known += g
            grads[target] = known
        else:
            grads[target] = _sum(known, g)
            self.owned.add(target)
        if self.masks and target in self.masks:
            if mask is None:
                del self.masks[target]
            else:
                self.masks[target] = self.masks[target] | mask


def _sum(x, y):
    """Add two gradients: on the CPU by the operator, which is quicker, on a GPU by the kernel."""
    if not _device.is_device_array(x):
        return x + y
    ops = _ops()
    return ops.add(x, y)


def _restore(node, saved, keep):
    """Give the saved values of a node that does not hold them itself."""
    if saved is _FREED:
        raise RuntimeError(
            f"the graph was freed by an earlier backward pass (at {node.plan.op.name}); pass "
            "retain_graph=True to run through it twice"
        )
    return saved.value(keep)


def _check_unchanged(op, guard, version):
    """Compare a mutation counter (or, when debugging, the contents of an array)."""
    if type(guard) is list:
        if guard[0] != version:
            raise RuntimeError(
                f"a tensor saved for the gradient of {op.name}() was changed in place: it is at "
                f"version {guard[0]}, but version {version} was saved"
            )
    elif checksum(guard) != version:
        raise RuntimeError(
            f"an array saved for the gradient of {op.name}() was changed behind the tape's back"
        )


def _as_tensors(node, saved):
    """Wrap saved inputs and outputs in tensors that stand at their place in the graph."""
    ops = _ops()
    plan = node.plan
    edges = dict(zip(plan.tracked, node.edges, strict=True))

    def at(index, value):
        edge = edges.get(index)
        if edge is None:
            return value
        if value.dtype != edge[3]:  # autocast: the edge leads to what the value was cast from
            cast = Node(ops._half.lowered_op.plan((0,)), [edge], (), [])
            return make_tensor(value, cast, 0, None)
        return make_tensor(value, edge[0], edge[1], None)

    wrapped = []
    for value, origin in zip(saved, plan.inputs, strict=True):
        if origin == "out":
            if node.outputs is None:
                value = make_tensor(value, node, 0, None)
            else:
                value = tuple(
                    make_tensor(v, node if is_inexact(v.dtype) else None, slot, None)
                    for slot, v in enumerate(value)
                )
        elif isinstance(origin, int):
            value = at(origin, value)
        elif origin is not None:  # the variadic arrays
            first = len(plan.op.arg_names)
            value = tuple(at(first + i, v) for i, v in enumerate(value))
        wrapped.append(value)
    return tuple(wrapped)


def _is_complex(g):
    if type(g) is list:
        return any(part is not None and _is_complex(part) for part in g)
    dtype = g.dtype
    return dtype.kind == "c" if isinstance(dtype, np.dtype) else is_complex(dtype)


def _conj(g):
    ops = _ops()
    if type(g) in (list, tuple):
        return [None if part is None else _conj(part) for part in g]
    return ops.conj(g)


def _cast(g, dtype):
    ops = _ops()
    if _is_complex(g) and not is_complex(dtype):
        g = ops.real(g)
    return ops.astype(g, dtype, copy=False)


def _fitted(plan, k, gx, shape):
    """Sum what a rule gave to the shape of its argument, or say whose rule it was."""
    try:
        return unbroadcast(gx, shape)
    except ValueError as error:
        argument = plan.op.variadic or plan.op.arg_names[plan.tracked[k]]
        error.add_note(f"from the rule of {plan.op.name}() for its argument {argument!r}")
        raise


def unbroadcast(g, shape):
    """Sum ``g`` over the axes along which an array of ``shape`` was broadcast."""
    ops = _ops()
    axes, keepdims = _broadcast_axes(g.shape, shape)
    if axes:
        g = ops.sum(g, axis=axes, keepdims=keepdims)
    return g if g.shape == shape else ops.reshape(g, shape)


@functools.lru_cache(maxsize=1024)
def _broadcast_axes(of_gradient, shape):
    """Give the axes to sum over, and whether to keep them with length one."""
    extra = len(of_gradient) - len(shape)
    if extra < 0 or any(n not in (1, of_gradient[extra + i]) for i, n in enumerate(shape)):
        raise ValueError(
            f"a gradient of shape {of_gradient} does not fit an argument of shape {shape}"
        )
    axes = tuple(range(extra)) + tuple(
        extra + i for i, n in enumerate(shape) if n == 1 and of_gradient[extra + i] != 1
    )
    return axes, len(axes) > extra


def _apart(grads, given):
    """Give gradients that can be written into: no two share memory, or one with ``given``."""
    taken: dict[int, list] = {}  # by the array whose memory they look at
    for g in given:
        taken.setdefault(owner_of(g), []).append(g)
    own = []
    for g in grads:
        if g is not None and not isinstance(g, (Tensor, np.generic)):
            strides, others = getattr(g, "strides", None), taken.get(owner_of(g))
            if (others and _may_overlap(g, others)) or (strides and 0 in strides and g.size > 1):
                g = _device.namespace(g).asarray(g, copy=True)
            taken.setdefault(owner_of(g), []).append(g)
        own.append(g)
    return own


def _may_overlap(x, others):
    """Tell whether ``x`` and any of the others may have elements in common."""
    look = getattr(_device.namespace(x), "may_share_memory", None)
    return look is None or any(look(x, other) for other in others)


def _route_mask(plan, k, g, gx, mask, saved, shape):
    """Zero what ``where`` masked out and say which elements of the input remain."""
    ops = _ops()
    op = plan.op
    if plan.mask_calls[k] is not None:
        chosen = ops.broadcast_to(plan.mask_calls[k](g, saved), g.shape)
        mask = chosen if mask is None else mask & chosen
    if op.elementwise:
        gx = ops.where(mask, gx, 0)
        passed = mask
    elif op.movement and plan.call is None:
        counts = plan.calls[k](ops.astype(mask, np.float32), tuple(map(raw, saved)))
        passed = counts != 0
    else:
        return gx, None
    passed = raw(passed)
    if passed.shape != shape:
        passed = unbroadcast(ops.astype(passed, np.float32), shape) != 0
    return gx, passed


def _without_rows(saved, rows, mask):
    """Give saved values with zeros in the rows that were masked out, which may hold anything."""
    ops = _ops()
    masks = (*(rows if type(rows) is tuple else (rows,)), mask)  # statistics have a shape of rows

    def cleared(value):
        if getattr(value, "ndim", 0) and is_inexact(value.dtype):
            for known in masks:
                if known.ndim == value.ndim and all(
                    n in (1, size) for n, size in zip(known.shape, value.shape, strict=True)
                ):
                    return ops.where(known, value, 0)
        return value

    return tuple(map(cleared, saved))


def _route_rows(plan, k, gx, rows, shape):
    """Zero the rows that were masked out; parameters have gradients without them already."""
    ops = _ops()
    if plan.tracked[k] != 0:
        return gx, None
    rows = rows[0] if type(rows) is tuple else rows
    return ops.where(rows, gx, 0), ops.broadcast_to(rows, shape)
