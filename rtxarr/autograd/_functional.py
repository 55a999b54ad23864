"""Transforms of functions: gradients, products with Jacobians, and higher orders.

All are built on one reverse pass. A transform inside another one records its own backward
pass exactly when something outside depends on it.
"""

import functools
from collections.abc import Callable

import numpy as np

from rtxarr import _device
from rtxarr.autograd._engine import gradients, reaches_other_leaves
from rtxarr.autograd._mode import check_callable, enable_grad, is_recording
from rtxarr.autograd._op import differentiable
from rtxarr.autograd._tape import Leaf, Tensor, make_tensor, raw, store_of
from rtxarr.autograd._tree import flatten, unflatten
from rtxarr.dtypes import is_complex, is_inexact


@differentiable(movement=True, view=True)
def alias(x, /):
    """Give the same array as a new place in the graph."""
    return x


alias.defvjps(x=lambda g: g)


def stop_gradient(x):
    """Give ``x`` cut off from the graph; raw arrays are returned unchanged."""
    return x.detach() if isinstance(x, Tensor) else x


def _lift(value, name):
    """Make a tracked tensor of an input, as a new place in the graph around it."""
    if isinstance(value, Tensor):
        data = value.data
    else:
        data = value if _device.is_array(value) else _device.namespace().asarray(value)
    if not is_inexact(data.dtype):
        raise TypeError(
            f"{name} must have a floating-point or complex dtype to be differentiated, got "
            f"{data.dtype}"
        )
    if isinstance(value, Tensor) and value.node is not None:
        return alias(value)
    return make_tensor(data, Leaf(), 0, store_of(value) if isinstance(value, Tensor) else None)


class _Recorded:
    """One recorded call ``function(*args)`` with the chosen arguments tracked."""

    def __init__(self, function, args, kwargs, argnums, has_aux=False):
        check_callable("function", function)
        self.single = isinstance(argnums, int)
        positions = [argnums] if self.single else list(argnums)
        for p in positions:
            if not isinstance(p, int):
                raise TypeError(f"argnums must be an int or a tuple of them, got {argnums!r}")
            if not -len(args) <= p < len(args):
                raise ValueError(f"argnums names argument {p}, but {len(args)} were given")
        if len({p % len(args) for p in positions}) < len(positions):
            raise ValueError(f"argnums must not name an argument twice, got {argnums}")
        self.tracked_outside = is_recording()
        args = list(args)
        self.inputs, self.originals, self.structures = [], [], []
        with enable_grad():
            for p in positions:
                leaves, structure = flatten(args[p])
                lifted = [_lift(leaf, f"argument {p}") for leaf in leaves]
                self.structures.append((structure, len(leaves)))
                self.inputs += lifted
                self.originals += leaves
                args[p] = unflatten(structure, lifted)
            result = function(*args, **kwargs)
        self.aux = None
        if has_aux:
            result, self.aux = result
        self.result = result

    def needs_graph(self, outputs):
        """Close the inputs; tell whether gradients may be differentiated from outside."""
        for x in self.inputs:
            if type(x.node) is Leaf:
                x.node.closed = True
        if not self.tracked_outside:
            return False
        outside = any(isinstance(x, Tensor) and x.node is not None for x in self.originals)
        return outside or reaches_other_leaves(outputs, self.inputs)

    def pull_back(self, outputs, grads, create_graph, retain_graph=None):
        """Give the gradients in the structure of the chosen arguments."""
        found = gradients(
            outputs, self.inputs, grads, create_graph=create_graph, retain_graph=retain_graph
        )
        return self.pack(found)

    def pack(self, found):
        values = []
        for g, lifted, original in zip(found, self.inputs, self.originals, strict=True):
            if g is None:
                g = _device.namespace(lifted.data).zeros_like(lifted.data)
            values.append(_like_input(g, original))
        packed, start = [], 0
        for structure, n in self.structures:
            packed.append(unflatten(structure, values[start : start + n]))
            start += n
        return packed[0] if self.single else tuple(packed)


def _like_input(g, original):
    """Give a raw array for a raw input unless it carries a graph, a Tensor for a Tensor."""
    if isinstance(original, Tensor):
        return g if isinstance(g, Tensor) else make_tensor(g, None, 0, None)
    return g.data if isinstance(g, Tensor) and g.node is None else g


def _release(value, keep):
    """Give what a function returned to the outside: raw arrays unless tracked or a Tensor."""
    leaves, structure = flatten(value)
    given = [leaf if keep or not isinstance(leaf, Tensor) else leaf.detach() for leaf in leaves]
    return unflatten(structure, given)


def _outputs(recorded):
    """Give the tracked output tensors, and all outputs with their structure."""
    leaves, structure = flatten(recorded.result)
    return [t for t in leaves if isinstance(t, Tensor) and t.node is not None], leaves, structure


def value_and_grad(
    function: Callable, argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False
) -> Callable:
    """Make a function that gives ``function``'s value and its gradient.

    Parameters
    ----------
    function : callable
        Returns a real scalar, or ``(scalar, aux)`` with ``has_aux``.
    argnums : int or tuple of int, default 0
        Which arguments to differentiate; each an array, Tensor, scalar, or nested tuples,
        lists and dicts of them.
    has_aux : bool, default False

    Returns
    -------
    callable
        Same arguments; gives ``(value, gradient)``, or ``((value, aux), gradient)``. Raw
        arrays in give raw gradients out.

    Raises
    ------
    ValueError
        If the value is not a real scalar.
    TypeError
        If an argument to differentiate has an integer or bool dtype.
    """
    check_callable("function", function)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        recorded = _Recorded(function, args, kwargs, argnums, has_aux)
        value = recorded.result
        shape = getattr(value, "shape", None)
        if shape != () or is_complex(value.dtype):
            got = type(value).__name__ if shape is None else f"shape {shape}, dtype {value.dtype}"
            raise ValueError(f"the function to differentiate must return a real scalar, got {got}")
        outputs = [value] if isinstance(value, Tensor) and value.node is not None else []
        keep = recorded.needs_graph(outputs)
        grad = recorded.pull_back(outputs, None, keep)
        value = _public(value, keep, args, kwargs)
        return ((value, recorded.aux) if has_aux else value), grad

    return wrapper


def _public(value, keep, args, kwargs):
    """Give a result as a raw array when all that came in was raw and nothing is tracked."""
    if not isinstance(value, Tensor):
        return value
    if keep:
        return value
    tensors = any(isinstance(x, Tensor) for x in flatten((args, list(kwargs.values())))[0])
    return value.detach() if tensors else value.data


def grad(
    function: Callable, argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False
) -> Callable:
    """Make a function that gives the gradient of ``function``; see :func:`value_and_grad`.

    Returns
    -------
    callable
        Gives the gradient, or ``(gradient, aux)`` with ``has_aux``.

    Examples
    --------
    >>> import rtxarr as rx
    >>> float(rx.grad(lambda x: x**3)(2.0))
    12.0
    >>> float(rx.grad(rx.grad(lambda x: x**3))(2.0))
    12.0
    """
    both = value_and_grad(function, argnums, has_aux=has_aux)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return wrapper


def vjp(function: Callable, *primals):
    """Give ``function(*primals)`` and a function that pulls gradients back through it.

    Parameters
    ----------
    function : callable
        Returns an array or nested containers of arrays.
    *primals : array, Tensor, or nested containers of them

    Returns
    -------
    value
        What ``function`` returned.
    pull_back : callable
        Takes gradients in the structure of ``value``, gives a tuple with one gradient (in
        the structure of the argument) for each primal. May be called more than once.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> value, pull_back = rx.vjp(lambda x: x**3, np.asarray([1.0, 2.0]))
    >>> pull_back(np.asarray([1.0, 1.0]))
    (array([ 3., 12.]),)
    """
    recorded = _Recorded(function, primals, {}, tuple(range(len(primals))))
    tracked, leaves, structure = _outputs(recorded)
    keep = recorded.needs_graph(tracked)

    def pull_back(grads):
        given, given_structure = flatten(grads)
        if given_structure != structure:
            raise ValueError("grads must have the structure of the function's value")
        pairs = [
            (leaf, g)
            for leaf, g in zip(leaves, given, strict=True)
            if isinstance(leaf, Tensor) and leaf.node is not None
        ]
        graph = keep or any(isinstance(g, Tensor) and g.node is not None for g in given)
        return recorded.pull_back(
            [p[0] for p in pairs], [p[1] for p in pairs], graph, retain_graph=True
        )

    value = unflatten(structure, [_public(leaf, keep, primals, {}) for leaf in leaves])
    return value, pull_back


def jvp(function: Callable, primals, tangents):
    """Give ``function(*primals)`` and its derivative along ``tangents``.

    The derivative is the transpose of the reverse pass, itself differentiated in reverse: the
    pulled-back gradient is linear in what is pulled back.

    Parameters
    ----------
    function : callable
        Returns an array or nested containers of arrays.
    primals, tangents : tuple of array, Tensor, or nested containers
        The same structure and shapes.

    Returns
    -------
    value, derivative
        Both in the structure of what ``function`` returns.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> x, along = np.asarray([1.0, 2.0]), np.asarray([1.0, 0.0])
    >>> rx.jvp(lambda x: x**3, (x,), (along,))
    (array([1., 8.]), array([3., 0.]))
    """
    primals, tangents = _as_arguments("primals", primals), _as_arguments("tangents", tangents)
    recorded = _Recorded(function, primals, {}, tuple(range(len(primals))))
    directions, structure = flatten(tangents)
    if structure != flatten(primals)[1]:
        raise ValueError("tangents must have the structure of primals")
    for i, (v, x) in enumerate(zip(directions, recorded.inputs, strict=True)):
        if tuple(getattr(v, "shape", ())) != x.shape:
            raise ValueError(f"tangent {i} must have shape {x.shape}, got {np.shape(raw(v))}")
    tracked, leaves, structure = _outputs(recorded)
    keep = recorded.needs_graph(tracked) or any(
        isinstance(v, Tensor) and v.node is not None for v in directions
    )
    with enable_grad():
        probes = [
            make_tensor(_device.namespace(t.data).zeros_like(t.data), Leaf(), 0, None)
            for t in tracked
        ]
        for probe in probes:
            probe.node.closed = True
        pulled = gradients(tracked, recorded.inputs, probes, create_graph=True)
        pairs = [
            (g, v)
            for g, v in zip(pulled, directions, strict=True)
            if isinstance(g, Tensor) and g.node is not None
        ]
        found = gradients(
            [p[0] for p in pairs], probes, [_direction(*p) for p in pairs], create_graph=keep
        )
    derivatives = iter(found)
    pushed = []
    for leaf in leaves:
        known = next(derivatives) if isinstance(leaf, Tensor) and leaf.node is not None else None
        if known is None:
            known = _device.namespace(raw(leaf)).zeros_like(raw(leaf))
        pushed.append(known)
    value = unflatten(structure, [_public(leaf, keep, primals, {}) for leaf in leaves])
    return value, unflatten(structure, [_public(p, keep, (primals, tangents), {}) for p in pushed])


def _as_arguments(name, given):
    if not isinstance(given, (tuple, list)):
        raise TypeError(
            f"{name} must be a tuple with an entry for each argument of the function, "
            f"got {type(given).__name__}"
        )
    return tuple(given)


def _direction(g, v):
    """Give a tangent as an array of the gradient's dtype."""
    return v if isinstance(v, Tensor) else _device.namespace(g.data).asarray(v, dtype=g.dtype)


def hvp(function: Callable, primals, tangents):
    """Give the Hessian of a scalar function times a vector.

    Parameters
    ----------
    function : callable
        Returns a real scalar.
    primals, tangents : tuple of array, Tensor, or nested containers
        Where, and along what.

    Returns
    -------
    tuple
        One product in the structure of each primal.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> x, along = np.asarray([1.0, 2.0]), np.asarray([1.0, 1.0])
    >>> rx.hvp(lambda x: rx.sum(x**3), (x,), (along,))
    (array([ 6., 12.]),)
    """
    primals = _as_arguments("primals", primals)
    gradient = grad(function, tuple(range(len(primals))))
    return jvp(gradient, primals, tangents)[1]


def jacobian(function: Callable, argnums: int | tuple[int, ...] = 0) -> Callable:
    """Make a function that gives all partial derivatives of an array-valued ``function``.

    Parameters
    ----------
    function : callable
        Returns one real array.
    argnums : int or tuple of int, default 0

    Returns
    -------
    callable
        Gives, for each chosen array, an array of shape ``(*output_shape, *input_shape)``. One
        reverse pass is run for each output element.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> rx.jacobian(lambda x: x**3)(np.asarray([1.0, 2.0]))
    array([[ 3.,  0.],
           [ 0., 12.]])
    """
    check_callable("function", function)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        from rtxarr import ops

        recorded = _Recorded(function, args, kwargs, argnums)
        value = recorded.result
        if not hasattr(value, "shape"):
            raise ValueError(f"the function must return one array, got {type(value).__name__}")
        tracked = [value] if isinstance(value, Tensor) and value.node is not None else []
        keep = recorded.needs_graph(tracked)
        data = raw(value)
        xp = _device.namespace(data)
        rows = [[] for _ in recorded.inputs]
        for i in range(data.size):
            probe = xp.reshape(xp.astype(xp.arange(data.size) == i, data.dtype), data.shape)
            found = [None] * len(rows)
            if tracked:
                found = gradients(
                    tracked, recorded.inputs, [probe], create_graph=keep, retain_graph=True
                )
            for row, g, x in zip(rows, found, recorded.inputs, strict=True):
                row.append(xp.zeros_like(x.data) if g is None else g)
        whole = []
        for row, x in zip(rows, recorded.inputs, strict=True):
            shape = (*data.shape, *x.shape)
            whole.append(
                ops.reshape(ops.stack(row), shape) if row else xp.zeros(shape, dtype=x.dtype)
            )
        return recorded.pack(whole)

    return wrapper


def hessian(function: Callable, argnums: int = 0) -> Callable:
    """Make a function that gives all second derivatives of a scalar ``function``.

    Parameters
    ----------
    function : callable
        Returns a real scalar.
    argnums : int, default 0
        Which argument, one array, to differentiate.

    Returns
    -------
    callable
        Gives an array of shape ``(*input_shape, *input_shape)``.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> rx.hessian(lambda x: x[0] ** 2 * x[1])(np.asarray([1.0, 3.0]))
    array([[6., 2.],
           [2., 0.]])
    """
    return jacobian(grad(function, argnums), argnums)
