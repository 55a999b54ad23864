"""Calling a module with other parameters."""

from collections.abc import Mapping
from typing import Any

from rtxarr.autograd import Tensor
from rtxarr.nn._module import Module
from rtxarr.nn._parameter import Buffer, Parameter


def functional_call(module: Module, parameters: Mapping[str, Any], *args: Any, **kwargs: Any):
    """Call a module as a function of its parameters.

    Parameters
    ----------
    module : Module
    parameters : mapping of str to array or Tensor
        Values to use in place of the parameters and buffers of these dotted names, for this call.
    *args, **kwargs
        Handed to the module.

    Returns
    -------
    what the module returns

    Examples
    --------
    >>> import rtxarr as rx
    >>> from rtxarr import nn
    >>> model = nn.Linear(3, 1)
    >>> def loss(parameters, x):
    ...     return rx.sum(nn.functional_call(model, parameters, x) ** 2)
    >>> x = rx.ones((2, 3), dtype="float32")
    >>> gradients = rx.grad(loss)(model.state_dict(), x)
    >>> {name: g.shape for name, g in gradients.items()}
    {'weight': (1, 3), 'bias': (1,)}
    """
    members = dict((*module.named_parameters(), *module.named_buffers()))
    unknown = [name for name in parameters if name not in members]
    if unknown:
        raise ValueError(
            f"parameters must be named {', '.join(members)}, got {', '.join(map(str, unknown))}"
        )
    for name, value in parameters.items():
        if value.shape != members[name].shape:
            raise ValueError(f"{name} must have shape {members[name].shape}, got {value.shape}")
    values = {
        id(members[name]): value if isinstance(value, Tensor) else Tensor(value)
        for name, value in parameters.items()
    }
    return _twin(module, values, {})(*args, **kwargs)


def _twin(item, values, made):
    """Copy a tree of modules with other tensors in it.

    A copy, since a checkpointed call inside the module is repeated after this call.
    """
    if isinstance(item, (Parameter, Buffer)):
        return values.get(id(item), item)
    if isinstance(item, Module):
        if id(item) not in made:
            twin = made[id(item)] = object.__new__(type(item))
            for name, value in vars(item).items():
                vars(twin)[name] = _twin(value, values, made)
        return made[id(item)]
    if type(item) in (list, tuple):
        return type(item)(_twin(part, values, made) for part in item)
    if type(item) is dict:
        return {key: _twin(part, values, made) for key, part in item.items()}
    return item
