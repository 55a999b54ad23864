"""Dynamic loss scaling for float16."""

import functools
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from rtxarr import _replay
from rtxarr._device import device_of, is_device_array, namespace, runs_kernels, to_device
from rtxarr._out_of_memory import explains_out_of_memory
from rtxarr._override import deferred, overridable, tracing
from rtxarr.autograd._tape import raw
from rtxarr.kernels.multi_tensor import (
    FOUND,
    find_not_finite,
    move_scale,
    on_one_gpu,
    scaled_copies,
)
from rtxarr.ops._half import widen
from rtxarr.optim._optimizer import Optimizer, require, require_keys

_SLOTS = 30  # optimizers that may share a scale


class LossScaler:
    """Scale the loss up, so that small gradients do not vanish in float16, and steps down again.

    A step whose gradients overflowed is left out, and the scale shrinks; after some steps without
    overflow it grows. The scale and what decides on it stay on the GPU: nothing waits for it, and
    a captured step does the same.

    Parameters
    ----------
    initial_scale : float > 0, default 65536
    growth : float > 1, default 2.0
        What the scale is multiplied by after ``growth_interval`` good steps in a row.
    backoff : float in (0, 1), default 0.5
        What it is multiplied by after a step with an infinite or NaN gradient.
    growth_interval : int > 0, default 2000
    device : Device or str, optional
        Where the losses will be. Without it the scale is made beside the first one, and a step that
        is captured or fused must have run before.

    Notes
    -----
    On a GPU the optimizers must be SGD, Adam, AdamW or Lion, over C-contiguous parameters.
    A schedule counts the steps that are left out, a parameter's own count of steps (which Adam
    corrects its means by) does not.

    References
    ----------
    Micikevicius et al., "Mixed Precision Training", 2017, arXiv:1710.03740, sec. 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import nn, optim
    >>> w = nn.Parameter(np.ones(3, "float32"))
    >>> optimizer, scaler = optim.SGD([w], lr=0.1), optim.LossScaler()
    >>> scaler.scale(rx.sum(w * w)).backward()
    >>> scaler.unscale(optimizer)  # only needed before clipping
    >>> norm = optim.clip_grad_norm([w], 10.0)
    >>> scaler.step(optimizer)
    >>> scaler.update()
    """

    def __init__(
        self,
        *,
        initial_scale: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
        device: Any = None,
    ):
        settings = {"initial_scale": initial_scale, "growth": growth, "backoff": backoff}
        for name in settings:
            require(settings, name, 0)
        _require_scale("initial_scale", initial_scale)
        if not growth > 1:
            raise ValueError(f"growth must be > 1, got {growth}")
        if not 0 < backoff < 1:
            raise ValueError(f"backoff must lie in (0, 1), got {backoff}")
        if not isinstance(growth_interval, int) or growth_interval < 1:
            raise ValueError(f"growth_interval must be an int > 0, got {growth_interval!r}")
        self.growth, self.backoff, self.growth_interval = growth, backoff, growth_interval
        self._initial = float(initial_scale), 0
        # The scale, the good steps since it changed, and a flag for each optimizer.
        self._state: Any = None
        self._slots: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._unscaled: set[Optimizer] = set()
        self._stepped: set[Optimizer] = set()
        if device is not None:
            self._begin(device)

    def _begin(self, device):
        state = np.zeros(FOUND + _SLOTS, np.float32)
        state[:2] = self._initial
        self._state = to_device(state, device)

    @property
    def current(self) -> Any:
        """The scale: an array of float32, shape (), where the loss is; it changes with updates."""
        if self._state is None:
            return np.asarray(self._initial[0], np.float32)
        return namespace(self._state).reshape(self._state[:1], ())

    def scale(self, loss: Any) -> Any:
        """Give the loss times the scale.

        Parameters
        ----------
        loss : Tensor or array of any real floating dtype
            float16 becomes float32, which holds the product.

        Returns
        -------
        Tensor or array
        """
        array = raw(loss)
        if self._state is None:
            if tracing() is not None:
                tracing().refuse("a LossScaler is used for the first time", once=True)
            if _replay.recorder() is not None and is_device_array(array):
                raise RuntimeError(
                    "a LossScaler is used for the first time in a step that is being captured, "
                    "so its scale would begin anew in each replay; make a step with it before"
                )
            if is_device_array(array):
                self._begin(device_of(array))
            else:
                self._begin("cpu")
                self._state = namespace(array).asarray(self._state)
        elif device_of(array) != device_of(self._state):
            raise ValueError(
                f"loss must be on {device_of(self._state)}, where the scale is, got one on "
                f"{device_of(array)}"
            )
        return loss * self.current

    @explains_out_of_memory
    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, so that they can be clipped before :meth:`step`.

        They become new arrays.
        """
        self._require_ready(optimizer)
        if tracing() is None:
            self._begin_unscaling(optimizer)
        else:  # the scaled gradients are looked at after the program, before the step
            begin = functools.partial(self._begin_unscaling, optimizer)
            tracing().defer(begin, optimizer._params(), changes=False)
        params = [p for p in optimizer._params() if p.grad is not None]
        if params:
            news = _unscaled(self._state[:1], *(p.grad for p in params))
            for param, new in zip(params, news, strict=True):
                param.grad = new

    def _begin_unscaling(self, optimizer):
        self._require_ready(optimizer)
        if optimizer in self._unscaled:
            raise RuntimeError("unscale() was called before for this optimizer, in this step")
        self._find(optimizer)
        self._unscaled.add(optimizer)
        _replay.on_failure(self._unscaled.clear)

    @deferred(lambda self, optimizer: optimizer._params())
    @explains_out_of_memory
    def step(self, optimizer: Optimizer) -> None:
        """Make a step of the optimizer with the unscaled gradients, if all of them are finite.

        On a GPU its kernels unscale them as they read them: the gradients stay as they are.
        """
        self._require_ready(optimizer)
        if runs_kernels(self._state):
            if optimizer not in self._unscaled:
                self._find(optimizer)
            still_scaled = int(optimizer not in self._unscaled)
            optimizer._step((self._state, self._slots[optimizer], still_scaled))
        else:
            if optimizer not in self._unscaled:
                self.unscale(optimizer)
            if self._state[FOUND + self._slots[optimizer]]:
                optimizer._follow()
            else:
                optimizer.step()
        self._stepped.add(optimizer)
        _replay.on_failure(self._stepped.clear)

    @deferred(lambda self: ())
    def update(self) -> None:
        """Shrink or grow the scale, once after the steps of all optimizers that share it."""
        if self._state is None:
            raise RuntimeError("scale() must be called before update()")
        self._unscaled.clear()
        self._stepped.clear()
        if runs_kernels(self._state):
            move_scale(self._state, self.growth, self.backoff, self.growth_interval)
            return
        xp = namespace(self._state)
        scale, n_good = float(self._state[0]), float(self._state[1]) + 1
        if xp.any(self._state[FOUND:] != 0):
            scale, n_good = scale * self.backoff, 0
        elif n_good >= self.growth_interval:
            scale, n_good = min(scale * self.growth, float(np.finfo(np.float32).max)), 0
        self._state[0], self._state[1] = scale, n_good
        self._state[FOUND:] = 0

    def state_dict(self) -> dict[str, Any]:
        """Give what :meth:`load_state_dict` needs to go on; its arrays change with updates."""
        if self._state is None:
            scale, n_good = (np.asarray(x, np.float32) for x in self._initial)
        else:
            scale = self.current
            n_good = namespace(scale).reshape(self._state[1:2], ())
        return {"scale": scale, "n_good_steps": n_good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; nothing changes when it does not fit."""
        require_keys("state", state, ("scale", "n_good_steps"))
        numbers = {name: float(value) for name, value in state.items()}
        for name in numbers:
            require(numbers, name, 0)
        _require_scale("scale", numbers["scale"])
        self._initial = numbers["scale"], int(numbers["n_good_steps"])
        if self._state is not None:
            self._state[0], self._state[1] = self._initial

    def _require_ready(self, optimizer):
        if self._state is None:
            raise RuntimeError("scale() must be called before the gradients of its loss are used")
        if optimizer in self._stepped:
            raise RuntimeError("step() was called before for this optimizer; call update() first")
        if optimizer not in self._slots:
            free = set(range(_SLOTS)) - set(self._slots.values())
            if not free:
                raise ValueError(f"a LossScaler serves at most {_SLOTS} optimizers")
            self._slots[optimizer] = min(free)

    def _find(self, optimizer):
        """Look for gradients that are not finite."""
        grads = [p.grad for p in optimizer._params() if p.grad is not None]
        if runs_kernels(self._state):
            if not on_one_gpu([self._state, *grads]):
                raise ValueError(
                    f"gradients must all be on {device_of(self._state)}, where the scale is"
                )
            find_not_finite(grads, self._state, self._slots[optimizer])
        elif not all(bool(namespace(g).all(namespace(g).isfinite(widen(g)))) for g in grads):
            self._state[FOUND + self._slots[optimizer]] = 1

    def __repr__(self):
        return (
            f"LossScaler(growth={self.growth}, backoff={self.backoff}, "
            f"growth_interval={self.growth_interval})"
        )


def _require_scale(name, value):
    if value == 0:
        raise ValueError(f"{name} must be > 0, got 0")
    with np.errstate(all="ignore"):
        held = np.float32(value)
    if held == 0 or np.isinf(held):
        raise ValueError(f"{name} must lie in the range of float32, got {value}")


@overridable
def _unscaled(scale, *grads):
    """Give gradients over ``scale``, of shape (1,): new arrays."""
    if runs_kernels(scale):
        return scaled_copies(grads, scale, inverse=True)
    xp = namespace(*grads)
    scale = xp.reshape(scale, ())
    return [xp.astype(widen(grad) / scale, grad.dtype) for grad in grads]
