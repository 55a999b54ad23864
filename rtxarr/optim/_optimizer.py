"""What all optimizers share: parameter groups, state, and the walk over the parameters."""

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rtxarr import _replay
from rtxarr._device import (
    device_of,
    is_array,
    is_device_array,
    namespace,
    runs_kernels,
    to_device,
)
from rtxarr._names import did_you_mean
from rtxarr._out_of_memory import explains_out_of_memory
from rtxarr._override import deferred, tracing
from rtxarr.autograd import Tensor
from rtxarr.autograd._mode import witness
from rtxarr.autograd._tape import mark_changed
from rtxarr.dtypes import accumulator, is_floating
from rtxarr.kernels.multi_tensor import (
    addresses,
    batches,
    contiguous,
    gpu_of,
    made_contiguous,
    on_gpu,
    sizes_of,
)
from rtxarr.kernels.optimizers import N_STATES, Rows, Scaling, step_all
from rtxarr.ops._half import widen

Schedule = Callable[[int], float]


class Optimizer:
    """Base of the optimizers: change parameters by their gradients.

    Parameters
    ----------
    params : iterable of Parameter, or of dict
        A dict is a group: its parameters under ``"params"``, and settings of its own.
    **settings
        Settings of the groups that do not have their own; ``lr`` is one, and may be a schedule:
        a function of the number of steps done that gives the rate of the next.

    Attributes
    ----------
    groups : list of dict
        ``params`` and the settings of each group, which may be changed between steps.

    Notes
    -----
    A subclass checks its settings in :meth:`check`, makes what it remembers of a parameter in
    :meth:`start` and writes its formula in :meth:`update`; it may name a GPU kernel in
    :meth:`kernel`. Where parameters are float16 or bfloat16, state is float32 and the update is
    computed in float32.
    """

    def __init__(self, params: Iterable, **settings: Any):
        self._n_steps = 0
        self._schedule = _schedule(settings["lr"])
        if self._schedule is not None:
            settings["lr"] = _rate(self._schedule, 0)
        self._lr = settings["lr"]
        self.groups = _grouped(params, settings, self.check)
        self.state: dict[Tensor, dict[str, Any]] = {}
        self._plan: _Plan | None = None
        # On each GPU that a scaled step ran on: steps left out of each parameter's count, and the
        # state of a loss scale of 1.
        self._skipped: dict[int | None, tuple[Any, Any]] = {}

    # --------------------------------------------------------------- what a subclass defines

    # Whether an element's update depends on nothing but its own gradient and state.
    elementwise = False

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError for settings outside their ranges."""

    def start(self, param: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Give the arrays to remember of the raw array ``param``."""
        return {}

    def varying(self, step: int, settings: Mapping[str, Any]) -> dict[str, float]:
        """Give the numbers of step ``step``, from 1, that differ from step to step.

        :meth:`update` finds them in its settings; in a captured step they are arrays of no
        dimensions there, on the GPU.
        """
        return {"lr": settings["lr"]}

    def update(self, param: Any, grad: Any, state: dict, settings: Mapping[str, Any]) -> None:
        """Change the raw array ``param`` and those of ``state`` in place; leave ``grad`` alone.

        ``state["step"]`` is the number of this step, from 1; not in a captured step.
        """
        raise TypeError(f"{type(self).__name__} must define update()")

    def kernel(self, settings: Mapping[str, Any]) -> tuple | None:
        """Name the kernel that does the same for many parameters at once; None if there is none.

        One of ``N_STATES`` in ``rtxarr.kernels.optimizers``; state is in the order of its arrays.
        """
        return None

    # ---------------------------------------------------------------------------------- use

    @deferred(lambda self: self._params())
    def step(self) -> None:
        """Update every parameter that has a gradient; the others are passed over."""
        self._step(None)

    def _step(self, scaling: tuple[Any, int, int] | None) -> None:
        """Update; ``scaling`` is the first three of :class:`Scaling`."""
        shape, params, grads = [], [], []
        for group in self.groups:
            found = [p.grad for p in group["params"]]
            live = [p for p, grad in zip(group["params"], found, strict=True) if grad is not None]
            params += live
            grads += [grad for grad in found if grad is not None]
            shape.append((self.kernel(group), len(live)))
        if (seen := witness()) is not None:
            seen.see(params)
        arrays = [p.data for p in params]
        plan = self._plan
        if plan is None or not plan.holds(shape, params, arrays):
            plan = self._plan = self._planned(shape, params, arrays)
        if scaling is not None and plan.alone:
            param = params[plan.alone[0]]
            raise TypeError(
                f"a scaled step on a GPU needs a kernel: one of SGD, Adam, AdamW and Lion, and "
                f"parameters that are C-contiguous; got {type(self).__name__} and a parameter of "
                f"shape {param.shape} and strides {param.data.strides}"
            )
        self._follow()
        for batch in plan.batches:
            self._step_together(batch, [grads[i] for i in batch.places], scaling)
        for i in plan.alone:
            state, group = self.state[params[i]], self.groups[plan.groups[i]]
            self._step_alone(arrays[i], grads[i], state, group)
        for param in params:
            mark_changed(param)

    @explains_out_of_memory
    def _planned(self, shape, params, arrays):
        """Sort the parameters into those that step together and those that step alone."""
        groups = [i for i, (_, n) in enumerate(shape) for _ in range(n)]
        rows, alone = [], []
        places = {param: i for i, param in enumerate(self._params())}
        if any(counts.shape[0] != len(places) for counts, _ in self._skipped.values()):
            raise RuntimeError("no parameters may be added or removed after a scaled step")
        for i, (param, data) in enumerate(zip(params, arrays, strict=True)):
            state = self.state.get(param)
            if state is None:
                state = self.state[param] = self._started(param, self.groups[groups[i]])
            key, own = shape[groups[i]][0], list(state.values())[1:]
            fits = key is not None and runs_kernels(data) and len(own) == N_STATES[key]
            if fits and all(map(contiguous, (data, *own))):
                rows.append((data, own, key, i, places[param], state, groups[i] << 40))
            else:
                alone.append(i)
        found = []
        for key, group in batches(rows, lambda row: (row[2], row[0].dtype)):
            data, own, _, live, numbered, states, bases = zip(*group, strict=True)
            param, *state = [addresses(column) for column in (data, *zip(*own, strict=True))]
            given = Rows(key[0], data[0].dtype, param, state, sizes_of(data), numbered)
            found.append(_Batch(given, data[0], live, states, bases))
        return _Plan(shape, params, arrays, groups, found, alone)

    def _step_together(self, batch, grads, scaling):
        def owners():
            for state in batch.states:
                state["step"] += 1
            _replay.on_failure(partial(_uncount, batch.states))
            keys = [
                state["step"] + base for state, base in zip(batch.states, batch.bases, strict=True)
            ]
            kinds = {key: i for i, key in enumerate(dict.fromkeys(keys))}
            sets = [kinds[key] for key in keys]
            low = (1 << 40) - 1
            return sets, [(key & low, self.groups[key >> 40]) for key in kinds]

        grads = made_contiguous(grads)  # alive until the launch
        device = gpu_of(batch.first)
        with on_gpu(device):
            scaling = self._full_scaling(batch.first, device, scaling)
            step_all(batch.rows, grads, owners, scaling=scaling)

    def _full_scaling(self, param, device, scaling):
        """Give how this step treats the counts of steps: None as long as none was left out."""
        if device not in self._skipped:
            if scaling is None:
                return None
            self._require_eager("is scaled for the first time")
            xp = namespace(param)
            counts = xp.zeros(len(self._params()), dtype=xp.int64)
            unscaled = xp.zeros(3, dtype=xp.float32)
            unscaled[0] = 1
            self._skipped[device] = counts, unscaled
        counts, unscaled = self._skipped[device]
        return Scaling(*(scaling or (unscaled, 0, 0)), counts)

    def _started(self, param, group):
        if is_device_array(param.data):
            self._require_eager("begins for a parameter")
        return {"step": 0, **self.start(widen(param.data), group)}

    def _require_eager(self, what):
        if _replay.recorder() is not None:
            raise RuntimeError(
                f"{type(self).__name__} {what} in a step that is being captured, so its state "
                "would begin anew in each replay; make a step with the same gradients before"
            )

    def _step_alone(self, data, grad, state, group):
        if _replay.recorder() is not None and is_device_array(data):
            settings = {**group, **self._varying_on_gpu(data, state, group)}
            if data.size:
                self._update_wide(data, grad, _Stepless(state), settings)
            return
        state["step"] += 1
        if data.size == 0:
            return
        settings = {**group, **self.varying(state["step"], group)}
        pieces = [(data, grad, state)]
        if self.elementwise and isinstance(data, np.ndarray) and data.flags.c_contiguous:
            pieces = _pieces(data, grad, state)
        for piece in pieces:
            self._update_wide(*piece, settings)

    def _varying_on_gpu(self, data, state, group):
        names = tuple(self.varying(1, group))

        def make():
            state["step"] += 1
            _replay.on_failure(partial(_uncount, [state]))
            numbers = self.varying(state["step"], group)
            return np.array([numbers[name] for name in names], accumulator(data.dtype))

        values = _replay.from_host(make)
        return {name: values[i] for i, name in enumerate(names)}

    def _update_wide(self, data, grad, state, settings):
        wide = widen(data)
        self.update(wide, widen(grad), state, settings)
        if wide is not data:
            data[...] = namespace(data).astype(wide, data.dtype)

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        for group in self.groups:
            for param in group["params"]:
                if param.node is not None:
                    param.grad = None

    @property
    def lr(self) -> float:
        """The learning rate; setting it sets that of every group.

        A group that was given its own keeps the ratio to the optimizer's. It may be set to a
        schedule, a function of the number of steps done, which then gives the rate of each step.
        """
        return self._lr

    @lr.setter
    def lr(self, value: float | Schedule) -> None:
        if tracing() is not None:
            tracing().refuse("it sets the learning rate: set it outside, or once to a schedule")
        if _replay.recorder() is not None:
            raise RuntimeError(
                "lr cannot be set in a step that is being captured: replays would not see it. Set "
                "it outside, before each call, or once to a schedule: optimizer.lr = schedule"
            )
        schedule = _schedule(value)
        self._set_lr(value if schedule is None else _rate(schedule, self._n_steps))
        self._schedule = schedule

    def _set_lr(self, value):
        for group in self.groups:
            self.check({**group, "lr": value})
        for group in self.groups:
            group["lr"] = value * group["lr_ratio"]
        self._lr = value

    def _follow(self):
        """Count the step, and take its rate from the schedule; in a captured one at each replay."""

        def follow():
            if self._schedule is not None:
                self._set_lr(_rate(self._schedule, self._n_steps))
            self._n_steps += 1

        follow()
        if _replay.recorder() is not None:
            _replay.on_replay(follow)
            _replay.on_failure(partial(setattr, self, "_n_steps", self._n_steps - 1))

    def state_dict(self) -> dict[str, Any]:
        """Give everything that :meth:`load_state_dict` needs to go on, to the bit.

        Returns
        -------
        dict
            The settings of the groups, and the state by the parameter's place. Arrays are the
            optimizer's own, no copies: they change with the next step. With a schedule, the
            number of steps done too.
        """
        places = {param: str(i) for i, param in enumerate(self._params())}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.groups]
        state = {places[param]: dict(values) for param, values in self.state.items()}
        if self._skipped:  # waits for the GPU
            skipped = sum(to_device(counts, "cpu") for counts, _ in self._skipped.values())
            for place, values in state.items():
                values["step"] -= int(skipped[int(place)])
        counted = {} if self._schedule is None else {"n_steps": self._n_steps}
        return {"lr": self._lr, "groups": groups, "state": state, **counted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` of an optimizer of the same groups gave.

        A schedule stays, and goes on from the number of steps done.

        Parameters
        ----------
        state : dict
            Arrays are copied, to the devices of the parameters.

        Raises
        ------
        ValueError
            When the groups, their settings or the state do not fit; nothing has changed then.
        """
        counted = ["n_steps"] if isinstance(state, Mapping) and "n_steps" in state else []
        require_keys("state", state, ("lr", "groups", "state", *counted))
        for name in ("lr", *counted):
            require(state, name, 0)
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
        # Of a state from before the rate was a schedule, each parameter's count is left.
        steps = max((values["step"] for values in loaded.values()), default=0)
        self._n_steps = int(state.get("n_steps", steps))
        # What graphs of captured steps hold is filled, not dropped.
        for param, values in zip(params, owners, strict=True):
            if param in self.state and param not in loaded:
                loaded[param] = self._started(param, values)
        self.state = {param: _taken(self.state.get(param), new) for param, new in loaded.items()}
        self._plan = None
        for counts, _ in self._skipped.values():
            counts[...] = 0

    def _params(self):
        return [param for group in self.groups for param in group["params"]]

    def __repr__(self):
        shown = []
        for group in self.groups:
            values = [f"{k}={v}" for k, v in group.items() if k not in ("params", "lr_ratio")]
            shown.append(f"{len(group['params'])} parameters, {', '.join(values)}")
        return f"{type(self).__name__}({'; '.join(shown)})"


class _Batch(NamedTuple):
    """Parameters that one launch updates, the first being on their GPU.

    ``places`` are among the parameters that have gradients; ``bases`` are the index of each one's
    group, times 2**40.
    """

    rows: Rows
    first: Any
    places: tuple[int, ...]
    states: tuple[dict, ...]
    bases: tuple[int, ...]


class _Plan(NamedTuple):
    """How to update parameters, as long as the same ones with the same arrays have gradients.

    ``shape`` has the kernel and the number of parameters of each group.
    """

    shape: list[tuple]
    params: list[Tensor]
    arrays: list
    groups: list[int]
    batches: list[_Batch]
    alone: list[int]

    def holds(self, shape, params, arrays):
        return (
            shape == self.shape
            and all(map(operator.is_, params, self.params))
            and all(map(operator.is_, arrays, self.arrays))
        )


class _Stepless(dict):
    """State without the number of the step, which a captured step must not read on the host."""

    def __init__(self, state):
        super().__init__((name, x) for name, x in state.items() if name != "step")

    def __missing__(self, name):
        raise RuntimeError(
            f"update() asks for state[{name!r}] in a step that is being captured, where it would "
            "stay the same in each replay: let varying() compute what depends on it"
        )


def _uncount(states):
    for state in states:
        state["step"] -= 1


def _schedule(lr):
    """Give what computes the rate from the number of steps done; None for a number."""
    if not callable(lr):
        return None
    if hasattr(lr, "patience"):
        raise TypeError(
            f"{type(lr).__name__} needs a measure: set optimizer.lr = schedule(measure) instead"
        )
    return lr


def _rate(schedule, n_steps):
    """Give the schedule's rate of the step after ``n_steps``."""
    rate = schedule(n_steps)
    require({"lr": rate}, "lr", 0)
    return rate


def _taken(old, new):
    """Give the new state in the memory of the old, which captured steps know, if it is alike."""
    if old is None or _kinds(old) != _kinds(new):
        return new
    for name, value in new.items():
        if is_array(value):
            old[name][...] = value
        else:
            old[name] = value
    return old


def _kinds(state):
    return {
        name: (x.shape, x.dtype, device_of(x)) if is_array(x) else None for name, x in state.items()
    }


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
            fresh[name] = int(value)
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
