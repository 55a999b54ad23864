"""Turn a plain array function into a differentiable operation.

An operation is a function over raw arrays plus a rule for each array argument. A rule is
called with the gradient ``g`` of the output and whatever else it names:

====================  ==========================================================
parameter of a rule   value
====================  ==========================================================
``g`` (first)         gradient of the output; a tuple when there are several
``out``               the output (saved)
an argument's name    that argument (saved)
``NAME_shape``        the shape of argument ``NAME`` (its array is not saved)
``NAME_dtype``        the dtype of argument ``NAME``
``NAME_device``       the name of the device of argument ``NAME``
``needs``             joint rules only: for each argument, whether it is tracked
====================  ==========================================================

Only what the rules of the tracked arguments name is kept until the backward pass. Rules
are written with operators and ``rtxarr`` functions, so that they run on raw arrays (first
order), on tensors (higher order) and on tracers alike. A rule may leave its gradient in the
broadcast shape and in another real dtype: the engine sums and casts it to the argument's.
For holomorphic operations on complex arrays a rule is written as for real ones; the engine
conjugates ``g`` before it and the result after it, so the gradient points uphill.
"""

import functools
import inspect
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr._device import device_of, is_array, is_device_array, to_device
from rtxarr._out_of_memory import explain_out_of_memory
from rtxarr.autograd._autocast import cast_arguments, policy_of
from rtxarr.autograd._mode import (
    AUTOCAST,
    OBSERVED,
    PROFILED,
    RECORDED,
    TRACED,
    WITNESSED,
    check_callable,
    state,
)
from rtxarr.autograd._tape import Node, Tensor, make_tensor, orders, store_of
from rtxarr.autograd._tape import raw as raw_of
from rtxarr.dtypes import is_inexact

OPS: dict[str, "Op"] = {}
EXPLAINED = (AttributeError, BufferError, TypeError, ValueError, IndexError, MemoryError)


class Op:
    """A differentiable operation: forward function, rules, and how its gradient travels.

    Attributes
    ----------
    elementwise : bool
        Output element ``i`` depends on input element ``i`` alone, so a gradient that
        ``where`` masked out stays masked.
    movement : bool
        The rule only moves gradient elements about (or adds them up).
    view : bool
        The output may share the first argument's memory. That the first argument itself is
        the output is seen without this.
    holomorphic : bool
        See the module's docstring.
    masks : dict
        For each argument that the operation selects from, a rule for the mask of the
        elements it took.
    rows : callable or None
        For operations along rows of the first argument: a rule giving the rows of which an element
        is in a mask of the output, of length one along each; then, in a tuple, the same in other
        shapes that saved values have.
    per_sample : dict
        For each argument, a rule giving one gradient for each leading index of the batch.
    policy : tuple or None
        What ``autocast`` does to the arguments; see ``_autocast.py``.
    takes_masks : bool
        Its rule is given the masks of the gradients that come, and gives those of its own.
    """

    takes_masks = False

    def __init__(self, fwd, *, elementwise, movement, view, holomorphic, precision=None):
        self.fwd = fwd
        self.name = fwd.__name__
        self.elementwise = elementwise
        self.movement = movement
        self.view = view
        self.holomorphic = holomorphic
        self.policy = policy_of(fwd, precision)
        self.rules: dict[str, Callable] = {}
        self.joint: Callable | None = None
        self.masks: dict[str, Callable] = {}
        self.rows: Callable | None = None
        self.per_sample: dict[str, Callable] = {}
        self.plans: dict[tuple, _Plan] = {}
        parameters = inspect.signature(fwd).parameters.values()
        self.arg_names = [p.name for p in parameters if p.kind in _POSITIONAL]
        self.variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.n_args = -1 if self.variadic else len(self.arg_names)
        self.static_names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

    def __repr__(self):
        return f"<Op {self.name}>"

    def plan(self, pattern):
        """What to save and which rules to run when the arguments in ``pattern`` are tracked."""
        plan = self.plans.get(pattern)
        if plan is None:
            plan = self.plans[pattern] = _Plan(self, pattern)
        return plan

    def bind(self, args, kwargs):
        """Move positional parameters given by keyword (or left out) to their places."""
        names = self.arg_names
        if self.variadic is not None:
            return args
        if len(args) > len(names):
            raise TypeError(
                f"{self.name}() takes {len(names)} positional arguments, got {len(args)}"
            )
        args = list(args)
        for name in names[len(args) :]:
            if name in kwargs:
                args.append(kwargs.pop(name))
            elif name in self.defaults:
                args.append(self.defaults[name])
            else:
                raise TypeError(f"{self.name}() is missing its argument {name!r}")
        return args


_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


class _Plan:
    """Straight-line code for one operation and one choice of tracked arguments.

    ``save(raw, out, static)`` gives the tuple to keep; ``calls[k](g, saved)`` the gradient of
    tracked argument ``k``, or ``call(g, saved)`` the sequence of all of them (joint rules).
    ``inputs`` lists, for each saved value, the argument it is, ``"out"`` or None.
    """

    def __init__(self, op, tracked):
        self.op = op
        self.tracked = tracked
        self._sources: list[str] = []  # expressions, in the order they are saved
        self.inputs: list = []
        self._environment: dict = {"default": op.defaults}
        self.call = None
        self.calls = []
        self.mask_calls: list = []
        self.per_sample_calls: list = []
        self.rows_call = self._compile(op.rows) if op.rows is not None else None
        if op.joint is not None:
            needs = tuple(i in tracked for i in range(max((*tracked, len(op.arg_names) - 1)) + 1))
            self.call = self._compile(op.joint, needs)
        for argument in tracked:
            name = op.variadic or op.arg_names[argument]
            if op.joint is None:
                if name not in op.rules:
                    raise TypeError(f"{op.name}() is not differentiable in its argument {name!r}")
                self.calls.append(self._compile(op.rules[name]))
            self.mask_calls.append(self._compile(op.masks[name]) if name in op.masks else None)
            rule = op.per_sample.get(name)
            self.per_sample_calls.append(self._compile(rule) if rule else None)
        body = "".join(source + ", " for source in self._sources)
        self.save = eval(f"lambda raw, out, static: ({body})", self._environment)
        self.guarded = [i for i in self.inputs if isinstance(i, int)]
        self.guards_all = op.variadic is not None and op.variadic in self.inputs
        self.saves_out = "out" in self.inputs

    def _compile(self, rule, needs=None):
        words = []
        for name in list(inspect.signature(rule).parameters)[1:]:
            if name == "needs":
                words.append(f"needs={needs!r}")
            else:
                words.append(f"{name}=saved[{self._slot(name)}]")
        key = f"rule{len(self._environment)}"
        self._environment[key] = rule
        return eval(f"lambda g, saved: {key}(g, {', '.join(words)})", self._environment)

    def _slot(self, name):
        """Give the place of ``name`` among the saved values, adding it when it is new."""
        source, origin = self._expression(name)
        if source not in self._sources:
            self._sources.append(source)
            self.inputs.append(origin)
        return self._sources.index(source)

    def _expression(self, name):
        op = self.op
        if name == "out":
            return "out", "out"
        if name in op.arg_names:
            index = op.arg_names.index(name)
            return f"raw[{index}]", index
        if name == op.variadic:
            return f"tuple(raw[{len(op.arg_names)}:])", name
        if name in op.static_names:
            default = f", default[{name!r}]" if name in op.defaults else ""
            return f"static.get({name!r}{default})", None
        for suffix in ("_shape", "_dtype", "_device"):
            stem = name.removesuffix(suffix)
            if name.endswith(suffix) and stem in (*op.arg_names, op.variadic):
                attribute = suffix[1:]
                self._environment["meta"] = _meta
                if stem == op.variadic:
                    values = f"raw[{len(op.arg_names)}:]"
                    return f"tuple(meta(a, {attribute!r}) for a in {values})", None
                return f"meta(raw[{op.arg_names.index(stem)}], {attribute!r})", None
        raise TypeError(f"the rule of {op.name}() asks for {name!r}, which is no parameter of it")


def _meta(value, attribute):
    if attribute == "device":
        return str(device_of(value))
    return getattr(value, attribute, () if attribute == "shape" else None)


_SHOWN = OBSERVED | PROFILED
_new = object.__new__


def apply(op: Op, args, kwargs):
    """Run ``op`` on arguments of which at least one is a Tensor; give tensors."""
    mode = state.mode
    edges: Any = ()
    tracked: Any = ()
    if len(args) != op.n_args:
        args = op.bind(args, kwargs)
        if op.variadic is not None:
            edges, tracked = [], []  # a tuple is copied for each of many arguments
    if mode >= TRACED:
        args = [state.tracing.lift(x) for x in args]
        kwargs = {name: state.tracing.lift(x) for name, x in kwargs.items()}
    if kwargs:
        kwargs = {k: x.data if isinstance(x, Tensor) else x for k, x in kwargs.items()}
    raw: list[Any] = []
    dtype = None
    for arg in args:
        if isinstance(arg, Tensor):
            data, node = arg.data, arg.node
            if node is not None:
                tracked += (len(raw),)
                dtype = data.dtype
                edges += ((node, arg.slot, data.shape, dtype),)
            raw.append(data)
        else:
            raw.append(arg)
    fwd = op.fwd
    if mode > RECORDED:
        if mode & AUTOCAST and op.policy is not None:
            cast_arguments(op.policy, args, raw)
        if mode & WITNESSED:
            state.witness.see(args)
        if mode & PROFILED:
            fwd = state.profile.timed(op)
        if tracked and mode & RECORDED and state.frame is not None:
            state.frame.begin(op, tracked, raw, kwargs)
    try:
        out = fwd(*raw, **kwargs) if kwargs else fwd(*raw)
    except EXPLAINED as error:
        explain(error, op.fwd, raw, kwargs)
        raise
    shared = (op.view or out is raw[0]) and isinstance(args[0], Tensor)
    store: list[int] | None = store_of(args[0]) if shared else None
    several = isinstance(out, tuple)
    node = None
    # What is tracked is inexact, so a result of its dtype is, too: one call less.
    if tracked and mode & RECORDED and (several or out.dtype is dtype or is_inexact(out.dtype)):
        if op.variadic is not None:
            tracked = tuple(tracked)
        plan = op.plans.get(tracked) or op.plan(tracked)
        guards: Any = [] if plan.guards_all else ()
        for index in range(len(args)) if plan.guards_all else plan.guarded:
            arg = args[index]
            if isinstance(arg, Tensor):
                counter = arg.store
                if counter is None:
                    counter = arg.store = [0]
                guards += ((counter, counter[0]),)
        if plan.saves_out:
            if store is None:
                store = [0]
            guards += ((store, store[0]),)
        node = _new(Node)  # the calls that this spares are a tenth of a small operation
        node.plan, node.edges, node.guards = plan, edges, guards
        node.saved = plan.save(raw, out, kwargs)
        node.order, node.outputs = next(orders), None
        if several:
            node.outputs = [(o.shape, o.dtype) for o in out]
        if mode & _SHOWN:
            _observe(node, mode)
    if several:
        return _wrap_outputs(out, node, store)
    tensor = _new(Tensor)
    tensor.data, tensor.node, tensor.slot, tensor.store = out, node, 0, store
    return tensor


def _wrap_outputs(out, node, store):
    wrapped = []
    for slot, value in enumerate(out):
        known = node if node is not None and is_inexact(value.dtype) else None
        wrapped.append(make_tensor(value, known, slot, store))
    names = getattr(type(out), "_fields", None)
    return type(out)(*wrapped) if names else tuple(wrapped)


def _observe(node, mode):
    if mode & PROFILED:
        state.profile.recorded(node)
    if state.checksums:
        node.guards = (*node.guards, *((v, checksum(v)) for v in _arrays(node.saved)))
    if state.frame is not None:
        state.frame.add(node)


def _arrays(values):
    for value in values:
        if isinstance(value, tuple):
            yield from _arrays(value)
        elif hasattr(value, "dtype") and hasattr(value, "shape"):
            yield value


def checksum(array) -> int:
    """Give a CRC-32 of the contents of a raw array (copied to the host if need be)."""
    return zlib.crc32(np.ascontiguousarray(to_device(array, "cpu")).tobytes())


def differentiable(
    fwd: Callable | None = None,
    *,
    elementwise: bool = False,
    movement: bool = False,
    view: bool = False,
    holomorphic: bool = True,
    precision: str | None = None,
):
    """Make a differentiable operation out of a function over raw arrays.

    Parameters
    ----------
    fwd : callable
        Takes arrays (and plain values) as positional parameters and options as
        keyword-only ones; returns an array or a tuple of arrays. It may call numba
        kernels: it never sees a Tensor.
    elementwise : bool, default False
        Each element of the output depends on one element of each input: a gradient that
        ``where`` masked out stays masked.
    movement : bool, default False
        The rules only move the elements of a gradient, or add them up.
    view : bool, default False
        The output may share the memory of the first argument.
    holomorphic : bool, default True
        Rules for complex arrays are written as for real ones, and conjugated for you.
    precision : {"float32", "low", "any"}, default "float32"
        What it gets inside :class:`autocast` in place of half precision ("float32") or of float32
        ("low"); "any": what it is given.

    Returns
    -------
    callable
        The same function, also accepting tensors. ``defvjps(x=rule, ...)`` attaches the
        derivative rule of each argument that has one; ``defvjp(rule)`` one rule that gives the
        gradients of all arguments; ``defper_sample(x=rule, ...)`` those that give one gradient
        for each sample.

    Notes
    -----
    A rule takes the gradient ``g`` of the output (a tuple when there are several) and then, by
    name, whatever it needs: the output ``out``, an argument or option of the function, or an
    argument's ``x_shape``, ``x_dtype`` and ``x_device``. Only what it names is kept for it. It
    gives the gradient of the argument, and may leave it in the shape of the output where the
    function broadcast. Written with operators and ``rtxarr`` functions, it can itself be
    differentiated. Check it with :func:`rtxarr.testing.gradcheck`.

    Examples
    --------
    >>> import rtxarr as rx
    >>> @rx.custom_op
    ... def smooth_abs(x, *, eps=0.1):
    ...     return (x * x + eps) ** 0.5
    >>> smooth_abs.defvjps(x=lambda g, x, out: g * x / out)
    >>> x = rx.asarray([[0.3, -1.0]], device="cpu")
    >>> rx.testing.gradcheck(smooth_abs, (x,))
    >>> rx.testing.gradgradcheck(smooth_abs, (x,))
    """
    options: dict[str, Any] = {
        "elementwise": elementwise,
        "movement": movement,
        "view": view,
        "holomorphic": holomorphic,
        "precision": precision,
    }
    if fwd is None:
        return lambda function: differentiable(function, **options)
    check_callable("fwd", fwd)
    op = Op(fwd, **options)

    @functools.wraps(fwd)
    def call(*args, **kwargs):
        for arg in args:
            if isinstance(arg, Tensor):
                return apply(op, args, kwargs)
        if kwargs:
            for arg in kwargs.values():
                if isinstance(arg, Tensor):
                    return apply(op, args, kwargs)
        try:
            return fwd(*args, **kwargs)
        except EXPLAINED as error:
            explain(error, fwd, args, kwargs)
            raise

    def defvjps(**rules):
        """Attach a rule ``(g, ...) -> gradient`` for each named argument."""
        _check_names(op, rules)
        op.rules.update(rules)
        _register(op)

    def defvjp(rule):
        """Attach one rule ``(g, ...) -> gradients`` for all arguments, in their order."""
        op.joint = rule
        _register(op)
        return rule

    def defper_sample(**rules):
        """Attach a rule ``(g, ...) -> (batch, *shape)`` for each named argument."""
        _check_names(op, rules)
        op.per_sample.update(rules)

    def defmasks(**rules):
        """Attach a rule giving the elements taken from each named argument."""
        _check_names(op, rules)
        op.masks.update(rules)

    def defrows(rule):
        """Attach the rule giving the rows of the first argument that elements of a mask are in."""
        op.rows = rule

    call.op = op
    call.defrows = defrows
    call.defvjps = defvjps
    call.defvjp = defvjp
    call.defper_sample = defper_sample
    call.defmasks = defmasks
    return call


def _check_names(op, rules):
    known = [*op.arg_names, *([op.variadic] if op.variadic else [])]
    for name in rules:
        if name not in known:
            raise TypeError(f"{op.name}() has no argument {name!r}, only {', '.join(known)}")


def _register(op):
    op.plans.clear()
    if (op.fwd.__module__ or "").startswith("rtxarr."):
        OPS[op.name] = op


def _describe(value):
    # NumPy's types of numbers have these attributes, too.
    if hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type):
        place = f" on {device_of(value)}" if is_device_array(value) else ""
        return f"{value.dtype} array of shape {tuple(value.shape)}{place}"
    if isinstance(value, tuple) and any(hasattr(v, "shape") for v in value):
        return f"({', '.join(map(_describe, value))})"
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."


def explain(error, fwd, args, kwargs):
    """Add to an error of an array library which function got what, or who holds the memory.

    Raises
    ------
    TypeError
        In place of an AttributeError of an argument that is no array.
    """
    if getattr(error, "__notes__", None):
        return  # said already, nearer to where it happened
    if isinstance(error, MemoryError):
        explain_out_of_memory(error)
    try:
        signature = inspect.signature(fwd)
        bound = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:
        return
    if isinstance(error, AttributeError) and hasattr(np.ndarray, str(error.name)):
        for name, value in bound.items():
            if value is None and signature.parameters[name].default is None:
                continue  # left out, and the None that was asked may be another's
            values = value if isinstance(value, (list, tuple)) else ()
            for x in (value, *values):
                if x is error.obj and not isinstance(x, Tensor) and not is_array(x):
                    verb = "be" if x is value else "hold"
                    plural = "an array" if x is value else "arrays"
                    raise TypeError(
                        f"{name} must {verb} {plural}, got {type(x).__name__}"
                    ) from None
    parts = [f"{name}: {_describe(value)}" for name, value in bound.items()]
    error.add_note(f"in {fwd.__name__}({', '.join(parts)})")


def explained(function: Callable) -> Callable:
    """Have errors of a function that is no operation say which arguments it got."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except EXPLAINED as error:
            explain(error, function, args, kwargs)
            raise

    return call


def nondifferentiable(fwd: Callable) -> Callable:
    """Let a function over raw arrays take tensors; what it returns is untracked."""

    @functools.wraps(fwd)
    def call(*args, **kwargs):
        tensors = False
        for arg in args:
            if isinstance(arg, Tensor):
                tensors = True
                break
        if not tensors:
            for arg in kwargs.values():
                if isinstance(arg, Tensor):
                    tensors = True
                    break
        if tensors:
            if state.mode >= TRACED:
                args = [state.tracing.lift(a) for a in args]
                kwargs = {name: state.tracing.lift(a) for name, a in kwargs.items()}
            args = [raw_of(a) for a in args]
            kwargs = {name: raw_of(a) for name, a in kwargs.items()}
        try:
            out = fwd(*args, **kwargs)
        except EXPLAINED as error:
            explain(error, fwd, args, kwargs)
            raise
        return _wrap_untracked(out) if tensors else out

    return call


def _wrap_untracked(out):
    if isinstance(out, tuple):
        values = [_wrap_untracked(o) for o in out]
        return type(out)(*values) if hasattr(out, "_fields") else tuple(values)
    if hasattr(out, "dtype") and hasattr(out, "shape"):
        return make_tensor(out, None, 0, None)
    return out
