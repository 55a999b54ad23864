"""Learning rates as functions of the step.

A schedule is called with the number of steps done and gives the rate of the next one::

    schedule = CosineSchedule(1e-3, n_steps=10_000, warmup=500)
    for step, batch in enumerate(batches):
        optimizer.lr = schedule(step)

An optimizer whose ``lr`` is a schedule does so itself. A schedule has no state: going on from a
checkpoint needs the step alone.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rtxarr.autograd import stop_gradient
from rtxarr.optim._optimizer import Schedule, require, require_keys


@dataclass(frozen=True)
class WarmupSchedule:
    """Rise linearly to ``lr``, then stay.

    Parameters
    ----------
    lr : float >= 0
    n_steps : int >= 0
        Steps until ``lr``.
    initial_lr : float >= 0, default 0.0
    """

    lr: float
    n_steps: int
    initial_lr: float = 0.0

    def __post_init__(self):
        _check(self, ("lr", "n_steps", "initial_lr"))

    def __call__(self, step: int) -> float:
        return _line(self.initial_lr, self.lr, step, self.n_steps)


@dataclass(frozen=True)
class CosineSchedule:
    """Fall from ``lr`` along half a cosine, once or in repeated periods.

    Parameters
    ----------
    lr : float >= 0
    n_steps : int > 0
        Length of the first period, warm-up included.
    final_lr : float >= 0, default 0.0
        Kept after the last period.
    warmup : int >= 0, default 0
        Steps of a linear rise from 0 to ``lr`` at the very start.
    n_periods : int > 0, default 1
        With more than one, each begins at ``lr`` again.
    period_factor : float >= 1, default 1.0
        Each period is this many times as long as the one before.

    References
    ----------
    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2016,
    arXiv:1608.03983, eq. 5.

    Examples
    --------
    >>> from rtxarr.optim import CosineSchedule
    >>> schedule = CosineSchedule(0.1, n_steps=100, warmup=10)
    >>> [round(schedule(step), 3) for step in (0, 5, 10, 55, 100)]  # optimizer.lr = schedule(step)
    [0.0, 0.05, 0.1, 0.05, 0.0]
    """

    lr: float
    n_steps: int
    final_lr: float = 0.0
    warmup: int = 0
    n_periods: int = 1
    period_factor: float = 1.0

    def __post_init__(self):
        _check(self, ("lr", "final_lr", "warmup"), positive=("n_steps", "n_periods"))
        if not self.warmup < self.n_steps:
            raise ValueError(f"warmup must be < n_steps, got {self.warmup} and {self.n_steps}")
        if not self.period_factor >= 1:
            raise ValueError(f"period_factor must be >= 1, got {self.period_factor}")

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return _line(0.0, self.lr, step, self.warmup)
        done: float = step - self.warmup
        length: float = self.n_steps - self.warmup
        for _ in range(self.n_periods):
            if done < length:
                return _half_cosine(self.lr, self.final_lr, done / length)
            done, length = done - length, length * self.period_factor
        return self.final_lr


@dataclass(frozen=True)
class OneCycleSchedule:
    """Rise to ``lr`` and fall far below the start, both along half a cosine.

    Parameters
    ----------
    lr : float >= 0
        The highest rate.
    n_steps : int > 1
    rise : float in (0, 1), default 0.3
        Share of the steps until the highest rate.
    initial_factor : float > 0, default 25.0
        The first rate is ``lr / initial_factor``.
    final_factor : float > 0, default 1e4
        The last is the first one divided by this.

    References
    ----------
    Smith and Topin, "Super-Convergence", 2017, arXiv:1708.07120.
    """

    lr: float
    n_steps: int
    rise: float = 0.3
    initial_factor: float = 25.0
    final_factor: float = 1e4

    def __post_init__(self):
        _check(self, ("lr",), positive=("n_steps", "initial_factor", "final_factor"))
        if not 0 < self.rise < 1 or not self.rise * self.n_steps > 1:
            raise ValueError(
                f"rise must lie in (0, 1) and take more than a step, got {self.rise} of "
                f"{self.n_steps} steps"
            )

    def __call__(self, step: int) -> float:
        top, last = self.rise * self.n_steps - 1, self.n_steps - 1
        first = self.lr / self.initial_factor
        if step <= top:
            return _half_cosine(first, self.lr, step / top)
        done = min(1.0, (step - top) / (last - top))
        return _half_cosine(self.lr, first / self.final_factor, done)


@dataclass(frozen=True)
class StepSchedule:
    """Multiply the rate by ``factor`` at given steps.

    Parameters
    ----------
    lr : float >= 0
    boundaries : sequence of int, increasing
        The first step of each new rate.
    factor : float > 0, default 0.1
    """

    lr: float
    boundaries: Sequence[int]
    factor: float = 0.1

    def __post_init__(self):
        _check(self, ("lr",), positive=("factor",))
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(f"boundaries must be increasing, got {self.boundaries}")

    def __call__(self, step: int) -> float:
        return self.lr * self.factor ** bisect.bisect_right(self.boundaries, step)


@dataclass(frozen=True)
class ExponentialSchedule:
    """Multiply the rate by ``factor`` every ``every`` steps, smoothly or in stairs.

    Parameters
    ----------
    lr : float >= 0
    factor : float > 0
    every : int > 0, default 1
    stairs : bool, default False
    """

    lr: float
    factor: float
    every: int = 1
    stairs: bool = False

    def __post_init__(self):
        _check(self, ("lr",), positive=("factor", "every"))

    def __call__(self, step: int) -> float:
        return self.lr * self.factor ** (step // self.every if self.stairs else step / self.every)


class ChainSchedule:
    """Run schedules one after the other, each from its own step 0.

    Parameters
    ----------
    *parts : (schedule, int)
        A schedule and for how many steps; the last one goes on for ever.

    Examples
    --------
    >>> from rtxarr.optim import ChainSchedule, StepSchedule, WarmupSchedule
    >>> schedule = ChainSchedule((WarmupSchedule(0.1, 4), 4), (StepSchedule(0.1, [10]), 100))
    >>> [round(schedule(step), 3) for step in (0, 2, 4, 14)]
    [0.0, 0.05, 0.1, 0.01]
    """

    def __init__(self, *parts: tuple[Schedule, int]):
        if not parts or not all(n > 0 for _, n in parts):
            raise ValueError(f"parts must be (schedule, n_steps > 0) pairs, got {parts}")
        self.schedules = [schedule for schedule, _ in parts]
        self.ends = list(accumulate(n for _, n in parts))

    def __call__(self, step: int) -> float:
        part = min(bisect.bisect_right(self.ends, step), len(self.schedules) - 1)
        return self.schedules[part](step - ([0, *self.ends][part]))

    def __repr__(self):
        return f"ChainSchedule({', '.join(map(repr, self.schedules))}, ends={self.ends})"


class PlateauSchedule:
    """Lower the rate when a measure has stopped improving.

    Called with the measure instead of the step: ``optimizer.lr = schedule(val_loss)``.

    Parameters
    ----------
    lr : float >= 0
    factor : float in (0, 1), default 0.1
    patience : int >= 0, default 10
        Calls without improvement that are let pass.
    threshold : float >= 0, default 1e-4
        Least relative improvement that counts.
    cooldown : int >= 0, default 0
        Calls after a change that do not count.
    min_lr : float >= 0, default 0.0
    mode : {"min", "max"}, default "min"
        Whether a lower or a higher measure is better.
    """

    def __init__(
        self,
        lr: float,
        *,
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
        mode: str = "min",
    ):
        self.lr, self.factor, self.patience, self.threshold = lr, factor, patience, threshold
        self.cooldown, self.min_lr, self.mode = cooldown, min_lr, mode
        _check(self, ("lr", "patience", "threshold", "cooldown", "min_lr"))
        if not 0 < factor < 1:
            raise ValueError(f"factor must lie in (0, 1), got {factor}")
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', got {mode!r}")
        self.best = math.inf if mode == "min" else -math.inf
        self.n_bad = 0
        self.n_resting = 0

    def __call__(self, measure: float) -> float:
        measure = float(stop_gradient(measure))
        self.n_resting = max(0, self.n_resting - 1)
        if self._improves(measure):
            self.best, self.n_bad = measure, 0
        elif self.n_resting == 0:
            self.n_bad += 1
        if self.n_bad > self.patience:
            self.lr = max(self.lr * self.factor, self.min_lr)
            self.n_bad, self.n_resting = 0, self.cooldown + 1 if self.cooldown else 0
        return self.lr

    def _improves(self, measure):
        margin = self.threshold * abs(self.best) if math.isfinite(self.best) else 0.0
        if self.mode == "min":
            return measure < self.best - margin
        return measure > self.best + margin

    def state_dict(self) -> dict[str, Any]:
        """Give what :meth:`load_state_dict` needs to go on."""
        return {name: getattr(self, name) for name in ("lr", "best", "n_bad", "n_resting")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        require_keys("state", state, sorted(self.state_dict()))
        for name in ("lr", "n_bad", "n_resting"):
            require(state, name, 0)
        if not isinstance(state["best"], float):
            raise TypeError(f"best must be a float, got {type(state['best']).__name__}")
        vars(self).update(state)


def _check(schedule, non_negative, positive=()):
    for name in (*non_negative, *positive):
        value = getattr(schedule, name)
        if not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
        holds = value > 0 if name in positive else value >= 0
        if not holds or value == math.inf:
            bound = "> 0" if name in positive else ">= 0"
            raise ValueError(f"{name} must be {bound} and finite, got {value}")


def _line(first, last, step, n_steps):
    return last if step >= n_steps else first + (last - first) * step / n_steps


def _half_cosine(first, last, done):
    return last + (first - last) * (1 + math.cos(math.pi * done)) / 2
