"""Adam, AdamW, and Lion."""

from collections.abc import Iterable

from rtxarr._device import namespace
from rtxarr.ops._elementwise import sign
from rtxarr.optim._optimizer import Optimizer, Schedule, require


class Adam(Optimizer):
    """Steps scaled by running estimates of the gradient's mean and mean square.

    Parameters
    ----------
    params : iterable of Parameter, or of dict
        See :class:`Optimizer`.
    lr : float >= 0, or schedule, default 1e-3
    betas : (float, float), each in [0, 1), default (0.9, 0.999)
        Decay of the mean and of the mean square.
    eps : float >= 0, default 1e-8
        Added to the root of the mean square.
    weight_decay : float >= 0, default 0
        Times the parameters, added to the gradient; see :class:`AdamW` for the decoupled kind.
    amsgrad : bool, default False
        Divide by the largest mean square so far.

    References
    ----------
    Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014, arXiv:1412.6980, alg. 1.
    AMSGrad: Reddi et al., "On the Convergence of Adam and Beyond", 2019, arXiv:1904.09237, alg. 2.
    """

    elementwise = True

    def __init__(
        self,
        params: Iterable,
        lr: float | Schedule = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ):
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad
        )

    def check(self, settings):
        for name in ("lr", "eps", "weight_decay"):
            require(settings, name, 0)
        _check_betas(settings)

    def start(self, param, settings):
        names = ["mean", "mean_square", *(["largest"] if settings["amsgrad"] else [])]
        return {name: namespace(param).zeros_like(param) for name in names}

    def update(self, param, grad, state, settings):
        if settings["weight_decay"]:
            grad = grad + settings["weight_decay"] * param
        _adam_update(param, grad, state, settings)

    def varying(self, step, settings):
        beta1, beta2 = settings["betas"]
        # They make up for starting at zero: m / (1 - beta1**t), v / (1 - beta2**t).
        return {
            "rate": settings["lr"] / (1 - beta1**step),
            "bias2": 1 - beta2**step,
            "shrink": 1 - settings["lr"] * settings["weight_decay"],
        }

    def kernel(self, settings):
        return "adam", bool(settings["amsgrad"])


class AdamW(Adam):
    """Adam with decoupled weight decay: it shrinks the parameters, not through the gradient.

    Parameters
    ----------
    params : iterable of Parameter, or of dict
        See :class:`Optimizer`.
    lr : float >= 0, or schedule, default 1e-3
    betas : (float, float), each in [0, 1), default (0.9, 0.999)
    eps : float >= 0, default 1e-8
    weight_decay : float >= 0, default 1e-2
        A step multiplies the parameters by ``1 - lr * weight_decay``.
    amsgrad : bool, default False

    References
    ----------
    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2017, arXiv:1711.05101, alg. 2,
    with the decay multiplied by the rate.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Schedule = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
    ):
        super().__init__(
            params, lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad
        )

    def update(self, param, grad, state, settings):
        param *= settings["shrink"]
        _adam_update(param, grad, state, settings)

    def kernel(self, settings):
        return "adamw", bool(settings["amsgrad"])


def _adam_update(param, grad, state, settings):
    xp = namespace(param)
    beta1, beta2 = settings["betas"]
    m, v = state["mean"], state["mean_square"]
    m *= beta1
    m += (1 - beta1) * grad
    v *= beta2
    v += (1 - beta2) * grad * grad
    if settings["amsgrad"]:
        largest = state["largest"]
        largest[...] = v = xp.maximum(largest, v)
    root = xp.sqrt(v / settings["bias2"]) + settings["eps"]
    param -= settings["rate"] * m / root


class Lion(Optimizer):
    """Steps of one size for all parameters: the sign of a momentum.

    Parameters
    ----------
    params : iterable of Parameter, or of dict
        See :class:`Optimizer`.
    lr : float >= 0, or schedule, default 1e-4
        Three to ten times smaller than a good one for AdamW.
    betas : (float, float), each in [0, 1), default (0.9, 0.99)
        Weight of the momentum in the step, and its decay.
    weight_decay : float >= 0, default 0
        A step multiplies the parameters by ``1 - lr * weight_decay``.

    References
    ----------
    Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, arXiv:2302.06675, alg. 2.
    """

    elementwise = True

    def __init__(
        self,
        params: Iterable,
        lr: float | Schedule = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)

    def check(self, settings):
        for name in ("lr", "weight_decay"):
            require(settings, name, 0)
        _check_betas(settings)

    def start(self, param, settings):
        return {"momentum": namespace(param).zeros_like(param)}

    def varying(self, step, settings):
        shrink = 1 - settings["lr"] * settings["weight_decay"]
        return {"lr": settings["lr"], "shrink": shrink}

    def update(self, param, grad, state, settings):
        beta1, beta2 = settings["betas"]
        m = state["momentum"]
        direction = sign(beta1 * m + (1 - beta1) * grad)
        param *= settings["shrink"]
        param -= settings["lr"] * direction
        m *= beta2
        m += (1 - beta2) * grad

    def kernel(self, settings):
        return ("lion",)


def _check_betas(settings):
    betas = settings["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, got {betas!r}")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must lie in [0, 1), got {betas}")
