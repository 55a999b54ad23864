"""Exponential moving average of parameters."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rtxarr import _replay
from rtxarr._device import device_of, is_array, is_device_array, namespace, runs_kernels, to_device
from rtxarr._out_of_memory import explains_out_of_memory
from rtxarr._override import deferred
from rtxarr.autograd._mode import witness
from rtxarr.autograd._tape import mark_changed
from rtxarr.kernels.multi_tensor import Averaging, average, averaging, contiguous
from rtxarr.ops._half import widen
from rtxarr.optim._optimizer import require, require_keys, require_params


class _Plan(NamedTuple):
    """How to update, as long as ``arrays`` are the averages and the parameters' arrays."""

    arrays: list
    together: list[Averaging]
    alone: list[int]


class ExponentialMovingAverage:
    """Running averages of parameters, often better in use than the last ones.

    Parameters
    ----------
    params : iterable of Parameter
    decay : float in [0, 1), default 0.999
    warmup : bool, default False
        Use ``min(decay, (1 + n) / (10 + n))`` at update ``n``, so that the first values are
        forgotten soon.

    Attributes
    ----------
    averages : list of array
        In the order of ``params``; float32 for float16 and bfloat16 parameters.

    Examples
    --------
    >>> from rtxarr import nn, optim
    >>> model = nn.Linear(3, 1)
    >>> ema = optim.ExponentialMovingAverage(model.parameters(), decay=0.99)
    >>> ema.update()  # after each optimizer.step()
    >>> with ema.averaged():  # the model computes with the averages in here
    ...     shape = model(model.weight).shape
    """

    @explains_out_of_memory
    def __init__(self, params: Iterable, decay: float = 0.999, *, warmup: bool = False):
        if not 0 <= decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {decay}")
        self.params = require_params(params)
        self.decay = decay
        self.warmup = warmup
        self.n_updates = 0
        self._plan: _Plan | None = None
        self.averages = [namespace(p.data).asarray(widen(p.data), copy=True) for p in self.params]

    @deferred(lambda self: ())
    @explains_out_of_memory
    def update(self) -> None:
        """Move the averages towards the parameters: ``a = decay * a + (1 - decay) * p``."""
        self._count(1)
        _replay.on_replay(partial(self._count, 1))
        _replay.on_failure(partial(self._count, -1))
        if (seen := witness()) is not None:
            seen.see(self.params)
        arrays = [p.data for p in self.params]
        plan = self._plan
        if plan is None or not all(map(operator.is_, (*self.averages, *arrays), plan.arrays)):
            plan = self._plan = self._planned(arrays)
        average(plan.together, self._weights)
        for i in plan.alone:
            target = self.averages[i]
            keep, new = self._weights_for(target)
            target *= keep
            target += new * widen(arrays[i])

    def _planned(self, arrays):
        together, alone = [], []
        for i, pair in enumerate(zip(self.averages, arrays, strict=True)):
            fits = runs_kernels(pair[0]) and all(map(contiguous, pair))
            (together if fits else alone).append(i)
        launches = averaging([self.averages[i] for i in together], [arrays[i] for i in together])
        return _Plan([*self.averages, *arrays], launches, alone)

    def _count(self, n):
        self.n_updates += n

    def _weights(self):
        n = self.n_updates
        decay = min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay
        return decay, 1 - decay

    def _weights_for(self, target):
        if _replay.recorder() is None or not is_device_array(target):
            return self._weights()
        return _replay.from_host(lambda: np.array(self._weights(), target.dtype))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averages in place of the parameters for a ``with`` block."""
        originals, copies = [param.data for param in self.params], self._copies()
        for param, values in zip(self.params, copies, strict=True):
            param.data = values
            mark_changed(param)
        try:
            yield
        finally:
            for param, original in zip(self.params, originals, strict=True):
                param.data = original
                mark_changed(param)

    @explains_out_of_memory
    def _copies(self):
        pairs = zip(self.params, self.averages, strict=True)
        return [namespace(x).astype(x, param.dtype, copy=True) for param, x in pairs]

    def state_dict(self) -> dict[str, Any]:
        """Give what :meth:`load_state_dict` needs to go on; its arrays change with updates."""
        averages = {str(i): values for i, values in enumerate(self.averages)}
        return {"n_updates": self.n_updates, "averages": averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; nothing changes when it does not fit."""
        require_keys("state", state, ("n_updates", "averages"))
        require(state, "n_updates", 0)
        loaded = state["averages"]
        if not isinstance(loaded, Mapping) or set(loaded) != {
            str(i) for i in range(len(self.averages))
        }:
            raise ValueError(f"state must have {len(self.averages)} averages, got {len(loaded)}")
        for i, old in enumerate(self.averages):
            new = loaded[str(i)]
            if not is_array(new):
                raise TypeError(f"average {i} must be an array, got {type(new).__name__}")
            if new.shape != old.shape or new.dtype != old.dtype:
                raise ValueError(
                    f"average {i} must have shape {old.shape} and dtype {old.dtype}, got "
                    f"{new.shape} and {new.dtype}"
                )
        for i, old in enumerate(self.averages):
            old[...] = to_device(loaded[str(i)], device_of(old))
        self.n_updates = state["n_updates"]
