"""One step of an optimizer in one launch: every array is read and written once.

The same formulas over arrays, in ``rtxarr.optim``, are the CPU path; there each is about a dozen
passes over memory, and would be a dozen launches for each parameter here.
"""

from __future__ import annotations

from typing import Any

from rtxarr._device import launch
from rtxarr.dtypes import accumulator

__all__ = ["adam_step", "lion_step", "sgd_step"]

# Elements that a thread updates, so that several loads are under way.
PER_THREAD = 4


def sgd_step(
    param: Any,
    grad: Any,
    velocity: Any | None,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
) -> None:
    """Update ``param`` and ``velocity`` in place; see :class:`rtxarr.optim.SGD`.

    Parameters
    ----------
    param, grad : CuPy array of a real floating dtype and one shape; ``param`` C-contiguous
    velocity : CuPy array, C-contiguous, or None when ``momentum`` is 0
        Of the shape of ``param``; float32 for the half types. The same holds for all state here.
    lr, momentum, nesterov, weight_decay
    """
    state = () if velocity is None else (velocity,)
    key = ("sgd", bool(momentum), nesterov)
    _update(key, param, grad, state, (lr, momentum, weight_decay))


def adam_step(
    param: Any,
    grad: Any,
    mean: Any,
    mean_square: Any,
    largest: Any | None,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Update ``param`` and the state in place; see :class:`rtxarr.optim.Adam`.

    Parameters
    ----------
    param, grad : as in :func:`sgd_step`
    mean, mean_square, largest : as ``velocity`` there
        ``largest`` is None without AMSGrad.
    step : int
        Number of this step, from 1.
    lr, betas, eps, weight_decay
    decoupled : bool
        Whether weight decay shrinks the parameter, instead of going into the gradient.
    """
    beta1, beta2 = betas
    numbers = (
        lr / (1 - beta1**step),
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        1 / (1 - beta2**step),
        eps,
        0.0 if decoupled else weight_decay,
        1 - lr * weight_decay if decoupled else 1.0,
    )
    state = (mean, mean_square) if largest is None else (mean, mean_square, largest)
    _update(("adam", largest is not None), param, grad, state, numbers)


def lion_step(
    param: Any,
    grad: Any,
    momentum: Any,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """Update ``param`` and ``momentum`` in place; see :class:`rtxarr.optim.Lion`.

    Parameters
    ----------
    param, grad, momentum : as ``param``, ``grad`` and ``velocity`` in :func:`sgd_step`
    lr, betas, weight_decay
    """
    beta1, beta2 = betas
    numbers = (lr, beta1, 1 - beta1, beta2, 1 - beta2, 1 - lr * weight_decay)
    _update(("lion",), param, grad, (momentum,), numbers)


def _update(key, param, grad, state, numbers):
    from rtxarr.kernels._optimizers_cuda import kernel

    scalar = accumulator(param.dtype).type
    arrays = [x.reshape(-1) for x in (param, grad, *state)]  # copies a grad that is not contiguous
    n_threads = -(-param.size // PER_THREAD)
    numbers = [scalar(x) for x in numbers]
    launch(kernel(*key, dtype=param.dtype), n_threads, (*arrays, *numbers))
