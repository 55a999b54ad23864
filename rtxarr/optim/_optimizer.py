"""What all optimizers share: parameter groups, state, and the walk over the parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rtxarr._device import device_of, is_array, namespace, runs_kernels, to_device
from rtxarr._names import did_you_mean
from rtxarr.autograd import Tensor
from rtxarr.autograd._tape import mark_changed
from rtxarr.dtypes import is_floating
from rtxarr.ops._half import widen


class Optimizer:
    """Base of the optimizers: change parameters by their gradients.

    Parameters
    ----------
    params : iterable of Parameter, or of dict
        A dict is a group: its parameters under ``"params"``, and settings of its own.
    **settings
        Settings of the groups that do not have their own; ``lr`` is one.

    Attributes
    ----------
    groups : list of dict
        ``params`` and the settings of each group, which may be changed between steps.

    Notes
    -----
    A subclass checks its settings in :meth:`check`, makes what it remembers of a parameter in
    :meth:`start` and writes its formula in :meth:`update`; it may have a GPU kernel in
    :meth:`launch`. Where parameters are float16 or bfloat16, state is float32 and the update is
    computed in float32.
    """

    def __init__(self, params: Iterable, **settings: Any):
        self._lr = settings["lr"]
        self.groups = _grouped(params, settings, self.check)
        self.state: dict[Tensor, dict[str, Any]] = {}

    # --------------------------------------------------------------- what a subclass defines

    # Whether an element's update depends on nothing but its own gradient and state.
    elementwise = False

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError for settings outside their ranges."""

    def start(self, param: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Give the arrays to remember of the raw array ``param``."""
        return {}

    def update(self, param: Any, grad: Any, state: dict, settings: Mapping[str, Any]) -> None:
        """Change the raw array ``param`` and those of ``state`` in place; leave ``grad`` alone.

        ``state["step"]`` is the number of this step, from 1.
        """
        raise TypeError(f"{type(self).__name__} must define update()")

    def launch(self, param: Any, grad: Any, state: dict, settings: Mapping[str, Any]) -> bool:
        """Do the same in one kernel, also on float16 and bfloat16; False if there is none."""
        return False

    # ---------------------------------------------------------------------------------- use

    def step(self) -> None:
        """Update every parameter that has a gradient; the others are passed over."""
        for group in self.groups:
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                if param not in self.state:
                    self.state[param] = self._started(param, group)
                self._step_one(param.data, grad, self.state[param], group)
                mark_changed(param)

    def _started(self, param, group):
        return {"step": 0, **self.start(widen(param.data), group)}

    def _step_one(self, data, grad, state, group):
        state["step"] += 1
        if data.size == 0:
            return
        if runs_kernels(data) and data.flags.c_contiguous and self.launch(data, grad, state, group):
            return
        pieces = [(data, grad, state)]
        if self.elementwise and isinstance(data, np.ndarray) and data.flags.c_contiguous:
            pieces = _pieces(data, grad, state)
        for piece in pieces:
            self._update_wide(*piece, group)

    def _update_wide(self, data, grad, state, group):
        wide = widen(data)
        self.update(wide, widen(grad), state, group)
        if wide is not data:
            data[...] = namespace(data).astype(wide, data.dtype)

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        for param in self._params():
            if param.requires_grad:
                param.grad = None

    @property
    def lr(self) -> float:
        """The learning rate; setting it sets that of every group.

        A group that was given its own keeps the ratio to the optimizer's.
        """
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.groups:
            self.check({**group, "lr": value})
        for group in self.groups:
            group["lr"] = value * group["lr_ratio"]
        self._lr = value

    def state_dict(self) -> dict[str, Any]:
        """Give everything that :meth:`load_state_dict` needs to go on, to the bit.

        Returns
        -------
        dict
            The settings of the groups, and the state by the parameter's place. Arrays are the
            optimizer's own, no copies: they change with the next step.
        """
        places = {param: str(i) for i, param in enumerate(self._params())}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.groups]
        state = {places[param]: dict(values) for param, values in self.state.items()}
        return {"lr": self._lr, "groups": groups, "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` of an optimizer of the same groups gave.

        Parameters
        ----------
        state : dict
            Arrays are copied, to the devices of the parameters.

        Raises
        ------
        ValueError
            When the groups, their settings or the state do not fit; nothing has changed then.
        """
        require_keys("state", state, ("lr", "groups", "state"))
        require(state, "lr", 0)
        groups = _fitting_groups(self.groups, state["groups"])
        for group in groups:
            self.check(group)
            require(group, "lr_ratio", 0)
        params = self._params()
        owners = [
            values
            for values, group in zip(groups, self.groups, strict=True)
            for _ in group["params"]
        ]
        loaded = {}
        for place, values in dict(state["state"]).items():
            if place not in map(str, range(len(params))):
                raise ValueError(f"state must be of {len(params)} parameters, got place {place!r}")
            param = params[int(place)]
            fresh = self._started(param, owners[int(place)])
            loaded[param] = _filled(f"state {place}", fresh, values)
        for group, values in zip(self.groups, groups, strict=True):
            group.update(values)
        self._lr = state["lr"]
        self.state = loaded

    def _params(self):
        return [param for group in self.groups for param in group["params"]]

    def __repr__(self):
        shown = []
        for group in self.groups:
            values = [f"{k}={v}" for k, v in group.items() if k not in ("params", "lr_ratio")]
            shown.append(f"{len(group['params'])} parameters, {', '.join(values)}")
        return f"{type(self).__name__}({'; '.join(shown)})"


def _pieces(data, grad, state):
    """Cut a step over NumPy arrays so that its temporaries stay in the processor's cache."""
    if data.size <= 2 * _PIECE:
        yield data, grad, state
        return
    data, grad = data.reshape(-1), grad.reshape(-1)
    flat = {name: x.reshape(-1) if is_array(x) else x for name, x in state.items()}
    for start in range(0, data.size, _PIECE):
        cut = slice(start, start + _PIECE)
        parts = {name: x[cut] if is_array(x) else x for name, x in flat.items()}
        yield data[cut], grad[cut], parts


_PIECE = 2**16


def require(settings: Mapping[str, Any], name: str, low: float, high: float | None = None) -> None:
    """Raise ValueError unless a setting lies in ``[low, infinity)`` or ``[low, high)``."""
    value = settings[name]
    if not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not low <= value or not (value < float("inf") if high is None else value < high):
        bounds = f">= {low} and finite" if high is None else f"in [{low}, {high})"
        raise ValueError(f"{name} must be {bounds}, got {value}")


def require_params(params: Iterable) -> list[Tensor]:
    """Give the parameters as a list, refusing anything else."""
    if not _may_hold_parameters(params):
        raise TypeError(
            "params must be an iterable of Parameters, as model.parameters() gives it, "
            f"got {type(params).__name__}"
        )
    params = list(params)
    for place, param in enumerate(params):
        if not isinstance(param, Tensor):
            raise TypeError(f"params[{place}] must be a Parameter, got {type(param).__name__}")
        if not is_floating(param.dtype):
            raise TypeError(f"params[{place}] must be real floating-point, got {param.dtype}")
    return params


def _may_hold_parameters(params):
    return isinstance(params, Iterable) and not (
        isinstance(params, (Tensor, Mapping)) or is_array(params)
    )


def _grouped(params, settings, check):
    """Give the list of groups, each with all settings, after checking everything."""
    if _may_hold_parameters(params):
        params = list(params)
    in_groups = isinstance(params, list) and params and all(isinstance(p, Mapping) for p in params)
    check(settings)
    groups: list[dict] = []
    for place, own in enumerate(params if in_groups else [{"params": params}]):
        _check_names(place, own, settings)
        group = {**settings, **own, "params": require_params(own["params"])}
        check(group)
        if "lr" in own and settings["lr"] == 0:
            raise ValueError("lr must be > 0 when a group has a rate of its own, got 0")
        group["lr_ratio"] = own["lr"] / settings["lr"] if "lr" in own else 1.0
        groups.append(group)
    everything = [param for group in groups for param in group["params"]]
    if not everything:
        raise ValueError("params must hold at least one Parameter, got none")
    if len(set(everything)) < len(everything):
        raise ValueError("params must hold each Parameter once, got one twice")
    return groups


def _check_names(place, own, settings):
    if "params" not in own:
        raise ValueError(f"group {place} must have 'params', got {', '.join(own)}")
    for name in own:
        if name != "params" and name not in settings:
            hint = did_you_mean(name, settings)
            raise ValueError(f"group {place} may set {', '.join(settings)}, got {name!r}{hint}")


def require_keys(name: str, state: Any, keys: Iterable[str]) -> None:
    """Raise unless a loaded state is a dict of just these keys."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{name} must be a dict, got {type(state).__name__}")
    if set(state) != set(keys):
        raise ValueError(f"{name} must have {', '.join(keys)}, got {', '.join(map(str, state))}")


def _fitting_groups(groups, loaded):
    """Give the loaded settings of all groups if they are those of ``groups``."""
    if not isinstance(loaded, (list, tuple)):
        raise TypeError(f"groups must be a list, got {type(loaded).__name__}")
    if len(loaded) != len(groups):
        raise ValueError(f"state must have {len(groups)} groups, got {len(loaded)}")
    fitting = []
    for place, (group, values) in enumerate(zip(groups, loaded, strict=True)):
        require_keys(f"group {place}", values, [name for name in group if name != "params"])
        fitting.append({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    return fitting


def _filled(place, fresh, values):
    """Give ``fresh`` state with the loaded values copied in."""
    require_keys(place, values, list(fresh))
    for name, value in values.items():
        target = fresh[name]
        if not is_array(target):
            require({name: value}, name, 0)
            fresh[name] = value
        elif not is_array(value):
            raise TypeError(f"{name} of {place} must be an array, got {type(value).__name__}")
        elif value.shape != target.shape or value.dtype != target.dtype:
            raise ValueError(
                f"{name} of {place} must have shape {target.shape} and dtype {target.dtype}, "
                f"got {value.shape} and {value.dtype}"
            )
        else:
            target[...] = to_device(value, device_of(target))
    return fresh
