"""Adafactor: second moments of a matrix kept as a row and a column."""

import numbers
from collections.abc import Iterable
from functools import partial

from rtxarr._device import namespace
from rtxarr.ops._elementwise import clip
from rtxarr.optim._optimizer import Optimizer, Schedule, require


class Adafactor(Optimizer):
    """Adaptive steps with memory for a row and a column of each matrix.

    Parameters
    ----------
    params : iterable of Parameter, or of dict
        See :class:`Optimizer`. The last two axes of a parameter are the matrix; vectors and
        scalars keep all of their second moments.
    lr : float >= 0, or schedule, default 1e-2
    relative_step : bool, default True
        As in the paper: the rate of step ``t`` is ``min(lr, 1 / sqrt(t))`` times the root mean
        square of the parameter. Otherwise it is ``lr``.
    decay_exponent : float in [0, 1), default 0.8
        The second moments of step ``t`` decay by ``1 - t ** -decay_exponent``.
    clip_threshold : float > 0, default 1.0
        Largest root mean square of an update, before the rate.
    eps : (float, float), default (1e-30, 1e-3)
        Added to the squared gradient; smallest root mean square taken for a parameter.
    weight_decay : float >= 0, default 0
        A step multiplies the parameters by ``1 - lr * weight_decay``.

    References
    ----------
    Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018,
    arXiv:1804.04235, alg. 4 and 5.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Schedule = 1e-2,
        *,
        relative_step: bool = True,
        decay_exponent: float = 0.8,
        clip_threshold: float = 1.0,
        eps: tuple[float, float] = (1e-30, 1e-3),
        weight_decay: float = 0.0,
    ):
        super().__init__(
            params,
            lr=lr,
            relative_step=relative_step,
            decay_exponent=decay_exponent,
            clip_threshold=clip_threshold,
            eps=eps,
            weight_decay=weight_decay,
        )

    def check(self, settings):
        for name in ("lr", "weight_decay"):
            require(settings, name, 0)
        require(settings, "decay_exponent", 0, 1)
        threshold = settings["clip_threshold"]
        if not isinstance(threshold, numbers.Real) or not threshold > 0:
            raise ValueError(f"clip_threshold must be > 0, got {threshold!r}")
        eps = settings["eps"]
        if not isinstance(eps, (tuple, list)) or len(eps) != 2 or not all(e >= 0 for e in eps):
            raise ValueError(f"eps must be two numbers >= 0, got {eps!r}")

    def start(self, param, settings):
        xp = namespace(param)
        if param.ndim < 2:
            return {"mean_square": xp.zeros_like(param)}
        rows, columns = param.shape[:-1], (*param.shape[:-2], param.shape[-1])
        return {
            "row": xp.zeros(rows, dtype=param.dtype),
            "column": xp.zeros(columns, dtype=param.dtype),
        }

    def varying(self, step, settings):
        lr = settings["lr"]
        new = step ** -settings["decay_exponent"]
        return {
            "new": new,
            "keep": 1 - new,
            "rate": min(lr, step**-0.5) if settings["relative_step"] else lr,
            "shrink": 1 - lr * settings["weight_decay"],
        }

    def update(self, param, grad, state, settings):
        xp = namespace(param)
        eps1, eps2 = settings["eps"]
        moved = partial(_moved, keep=settings["keep"], new=settings["new"])
        square = grad * grad + eps1
        if param.ndim < 2:
            v = moved(state["mean_square"], square)
        else:
            row = moved(state["row"], xp.mean(square, axis=-1))
            column = moved(state["column"], xp.mean(square, axis=-2))
            row = row / xp.mean(row, axis=-1, keepdims=True)
            v = row[..., None] * column[..., None, :]
        update = grad / xp.sqrt(v)
        rate = settings["rate"]
        if settings["relative_step"]:
            # Root mean squares stay on the device, so no step waits for it.
            rate = clip(_rms(xp, param), min=eps2) * rate
        excess = clip(_rms(xp, update) / settings["clip_threshold"], min=1.0)
        if settings["weight_decay"]:
            param *= settings["shrink"]
        param -= rate / excess * update


def _moved(mean, value, *, keep, new):
    mean *= keep
    mean += new * value
    return mean


def _rms(xp, x):
    return xp.sqrt(xp.mean(x * x))
