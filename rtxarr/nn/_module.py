"""Module: parameters, buffers and other modules as plain attributes."""

from collections.abc import Callable, Iterator, Mapping
from reprlib import recursive_repr
from typing import Any

import numpy as np

from rtxarr._device import Device, namespace
from rtxarr._device import to_device as move
from rtxarr.autograd._mode import PROFILED, profiles, state, witnesses
from rtxarr.dtypes import as_dtype, is_floating
from rtxarr.nn._parameter import Buffer, Parameter, replace_data

# How often an attribute of any module was set: what was made for modules as they were looks here.
changes = [0]


class Module:
    """A function with parameters.

    Set parameters, buffers and other modules as attributes in ``__init__``, directly or inside
    lists, tuples and dicts, and write :meth:`forward`. There is nothing else to call or declare.

    Attributes
    ----------
    training : bool, default True
        Set on the whole tree by :meth:`train` and :meth:`eval`; dropout and batch normalization
        look at it.

    Examples
    --------
    >>> import rtxarr as rx
    >>> from rtxarr import nn
    >>> class Residual(nn.Module):
    ...     def __init__(self, n_features, n_layers):
    ...         self.layers = [nn.Linear(n_features, n_features) for _ in range(n_layers)]
    ...
    ...     def forward(self, x):
    ...         for layer in self.layers:
    ...             x = x + rx.relu(layer(x))
    ...         return x
    >>> model = Residual(8, n_layers=2)
    >>> [name for name, _ in model.named_parameters()]
    ['layers.0.weight', 'layers.0.bias', 'layers.1.weight', 'layers.1.bias']
    >>> model
    Residual(
      (layers.0): Linear(8, 8)
      (layers.1): Linear(8, 8)
    )
    """

    training: bool = True
    _forward_hooks: tuple = ()

    def forward(self, *args, **kwargs):
        """Compute the output; to be defined by each module."""
        raise TypeError(f"{type(self).__name__} must define forward()")

    def __call__(self, *args, **kwargs):
        if witnesses and state.witness is not None:
            state.witness.call(self)
        if profiles and state.mode & PROFILED:
            out = state.profile.call_module(self, args, kwargs)
        else:
            out = self.forward(*args, **kwargs)
        for hook in self._forward_hooks:
            hook(self, args, out)
        return out

    def __setattr__(self, name, value):
        old = self.__dict__.get(name)
        if isinstance(old, (Parameter, Buffer)) and not isinstance(value, (type(old), type(None))):
            kind = type(old).__name__
            raise TypeError(
                f"{name} is a {kind}, got {type(value).__name__}; write new values with "
                f"{name}.assign(array), or set another {kind} or None"
            )
        object.__setattr__(self, name, value)
        changes[0] += 1

    # ------------------------------------------------------------------------------- trees

    def named_modules(self) -> Iterator[tuple[str, "Module"]]:
        """Yield ``(dotted name, module)``: this one, named ``""``, then all below, each once."""
        yield from _named_modules(self, "", set())

    def modules(self) -> Iterator["Module"]:
        """Yield this module and all below, each once."""
        found: dict[int, Module] = {}
        _add_modules(self, found, ())
        return iter(found.values())

    def named_children(self) -> Iterator[tuple[str, "Module"]]:
        """Yield ``(name, module)`` for the modules among the attributes."""
        return ((name, item) for name, item in _members(self) if isinstance(item, Module))

    def children(self) -> Iterator["Module"]:
        """Yield the modules among the attributes."""
        return (module for _, module in self.named_children())

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield ``(dotted name, parameter)``; a shared one once, under its first name."""
        return self._named(Parameter)

    def parameters(self) -> Iterator[Parameter]:
        """Yield all parameters, a shared one once."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Buffer]]:
        """Yield ``(dotted name, buffer)``; a shared one once, under its first name."""
        return self._named(Buffer)

    def buffers(self) -> Iterator[Buffer]:
        """Yield all buffers, a shared one once."""
        return (buffer for _, buffer in self.named_buffers())

    def _named(self, kind):
        seen = set()
        for prefix, module in self.named_modules():
            for name, item in _members(module):
                if isinstance(item, kind) and id(item) not in seen:
                    seen.add(id(item))
                    yield (f"{prefix}.{name}" if prefix else name), item

    # --------------------------------------------------------------------------- switches

    def train(self, mode: bool = True) -> "Module":
        """Set ``training`` on the whole tree; gives the module itself."""
        for module in self.modules():
            if module.training is not mode:
                module.training = mode
        return self

    def eval(self) -> "Module":
        """Set ``training`` to False on the whole tree; gives the module itself."""
        return self.train(False)

    def requires_grad_(self, flag: bool = True) -> "Module":
        """Train (or freeze) all parameters; gives the module itself."""
        for parameter in self.parameters():
            parameter.requires_grad = flag
        return self

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.grad = None

    def apply(self, function: Callable[["Module"], Any]) -> "Module":
        """Call ``function`` on every module below, then on this one; gives the module itself."""
        for module in reversed(list(self.modules())):
            function(module)
        return self

    def add_forward_hook(self, hook: Callable) -> Callable[[], None]:
        """Call ``hook(module, args, out)`` after each forward call.

        Returns
        -------
        callable
            Removes the hook.
        """
        self._forward_hooks = (*self._forward_hooks, hook)

        def remove():
            self._forward_hooks = tuple(h for h in self._forward_hooks if h is not hook)

        return remove

    # ------------------------------------------------------------------------ placement

    def to_device(self, device: str | Device) -> "Module":
        """Move parameters, their gradients and buffers; gives the module itself.

        An optimizer made before keeps its state where it was: make it after the move.
        """
        for tensor in (*self.parameters(), *self.buffers()):
            replace_data(tensor, move(tensor.data, device))
        return self

    def astype(self, dtype: Any) -> "Module":
        """Convert real parameters, gradients and buffers to a real floating-point dtype."""
        if not is_floating(as_dtype(dtype)):
            raise TypeError(f"dtype must be a real floating-point dtype, got {np.dtype(dtype)}")
        for tensor in (*self.parameters(), *self.buffers()):
            if is_floating(tensor.dtype):
                replace_data(tensor, namespace(tensor.data).astype(tensor.data, dtype))
        return self

    # ------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Give the arrays of all parameters and buffers by dotted name.

        Returns
        -------
        dict of str to array
            The arrays themselves, no copies: training goes on changing them. A shared one is
            there once, under its first name.
        """
        return {name: tensor.data for name, tensor in self._owned().items()}

    def _owned(self):
        """Give the parameters and buffers by dotted name."""
        owned = {}
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if name in owned:
                raise ValueError(
                    f"names must differ, got two arrays named {name!r}: keys of dicts become str, "
                    "and one with a dot can look like a path"
                )
            owned[name] = tensor
        return owned

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Copy the values of a state into the parameters and buffers, all of it or nothing.

        Parameters
        ----------
        state : mapping of str to array or Tensor
        strict : bool, default True
            Whether a name that only one side has is an error. Otherwise it is passed over; a
            wrong shape or dtype always is an error.

        Returns
        -------
        LoadResult
            ``missing`` and ``unexpected`` names.

        Raises
        ------
        CheckpointError
            Naming every missing, unexpected, mis-shaped and mis-typed array at once; nothing has
            changed then.
        """
        from rtxarr.data import load_into

        return load_into(self._owned(), state, strict=strict)

    # ------------------------------------------------------------------------------- text

    def summary(self, *example_inputs: Any) -> str:
        """Give a table of the layers, with the output shape and parameter count of each.

        Parameters
        ----------
        *example_inputs : array or Tensor
            For one call in evaluation mode; left out, the table has no shapes.
        """
        from rtxarr.nn._summary import summarize

        return summarize(self, example_inputs)

    @recursive_repr()
    def __repr__(self):
        lines = [
            f"  ({name}): " + repr(child).replace("\n", "\n  ")
            for name, child in self.named_children()
        ]
        name = type(self).__name__
        return "\n".join([f"{name}(", *lines, ")"]) if lines else f"{name}()"


def _members(module):
    """Yield ``(name, item)`` for the parameters, buffers and modules among the attributes."""
    for name, value in vars(module).items():
        yield from _unnest(name, value)


def _unnest(name, value, above=()):
    if isinstance(value, (Parameter, Buffer, Module)):
        yield name, value
    elif isinstance(value, (list, tuple, dict)) and not any(value is one for one in above):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from _unnest(f"{name}.{key}", part, (*above, value))


def _add_modules(item, found, above):
    """Add the modules in ``item`` to those found by their ``id``, as ``_named_modules`` does.

    Names take twice as long to make as the walk.
    """
    if isinstance(item, Module):
        if id(item) in found:
            return
        found[id(item)] = item
        parts, above = vars(item).values(), ()
    elif any(item is one for one in above):
        return
    else:
        parts, above = item.values() if isinstance(item, dict) else item, (*above, item)
    for part in parts:
        if type(part) not in _LEAVES and part is not _NOTHING and isinstance(part, _HOLDERS):
            _add_modules(part, found, above)


_HOLDERS = Module, list, tuple, dict
# Most of what a module has: told at less cost than what may hold another.
_LEAVES, _NOTHING = frozenset((Parameter, bool, int, float, str, type(None))), ()


def _named_modules(module, prefix, seen):
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, child in module.named_children():
        yield from _named_modules(child, f"{prefix}.{name}" if prefix else name, seen)
