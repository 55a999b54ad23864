"""Stochastic gradient descent, and RMSprop."""

from collections.abc import Iterable

from rtxarr._device import namespace
from rtxarr.optim._optimizer import Optimizer, Schedule, require


class SGD(Optimizer):
    """Stochastic gradient descent with momentum.

    Parameters
    ----------
    params : iterable of Parameter, or of dict
        See :class:`Optimizer`.
    lr : float >= 0, or schedule
    momentum : float in [0, 1), default 0
    nesterov : bool, default False
        Look ahead along the velocity; needs ``momentum``.
    weight_decay : float >= 0, default 0
        Times the parameters, added to the gradient.

    References
    ----------
    Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013,
    ICML; as usual with the rate applied to the velocity, not inside it.
    """

    elementwise = True

    def __init__(
        self,
        params: Iterable,
        lr: float | Schedule,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ):
        super().__init__(
            params, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay
        )

    def check(self, settings):
        require(settings, "lr", 0)
        require(settings, "momentum", 0, 1)
        require(settings, "weight_decay", 0)
        if settings["nesterov"] and settings["momentum"] == 0:
            raise ValueError("momentum must be > 0 with nesterov, got 0")

    def start(self, param, settings):
        return {"velocity": namespace(param).zeros_like(param)} if settings["momentum"] else {}

    def update(self, param, grad, state, settings):
        momentum = settings["momentum"]
        if settings["weight_decay"]:
            grad = grad + settings["weight_decay"] * param
        if momentum:
            velocity = state["velocity"]
            velocity *= momentum
            velocity += grad
            grad = grad + momentum * velocity if settings["nesterov"] else velocity
        param -= settings["lr"] * grad

    def kernel(self, settings):
        return "sgd", bool(settings["momentum"]), bool(settings["nesterov"])


class RMSprop(Optimizer):
    """Divide the gradient by a running root mean square of it.

    Parameters
    ----------
    params : iterable of Parameter, or of dict
        See :class:`Optimizer`.
    lr : float >= 0, or schedule, default 1e-2
    alpha : float in [0, 1), default 0.99
        Decay of the mean square.
    eps : float >= 0, default 1e-8
        Added to the root.
    momentum : float in [0, 1), default 0
    centered : bool, default False
        Divide by the standard deviation instead, taking the squared running mean off.
    weight_decay : float >= 0, default 0
        Times the parameters, added to the gradient.

    References
    ----------
    Tieleman and Hinton, "Neural Networks for Machine Learning", lecture 6.5, 2012. Centered:
    Graves, "Generating Sequences With Recurrent Neural Networks", 2013, arXiv:1308.0850, eq. 38-45.
    """

    elementwise = True

    def __init__(
        self,
        params: Iterable,
        lr: float | Schedule = 1e-2,
        *,
        alpha: float = 0.99,
        eps: float = 1e-8,
        momentum: float = 0.0,
        centered: bool = False,
        weight_decay: float = 0.0,
    ):
        super().__init__(
            params,
            lr=lr,
            alpha=alpha,
            eps=eps,
            momentum=momentum,
            centered=centered,
            weight_decay=weight_decay,
        )

    def check(self, settings):
        for name in ("lr", "eps", "weight_decay"):
            require(settings, name, 0)
        for name in ("alpha", "momentum"):
            require(settings, name, 0, 1)

    def start(self, param, settings):
        names = ["mean_square"]
        if settings["centered"]:
            names.append("mean")
        if settings["momentum"]:
            names.append("velocity")
        return {name: namespace(param).zeros_like(param) for name in names}

    def update(self, param, grad, state, settings):
        xp = namespace(param)
        alpha = settings["alpha"]
        if settings["weight_decay"]:
            grad = grad + settings["weight_decay"] * param
        mean_square = state["mean_square"]
        mean_square *= alpha
        mean_square += (1 - alpha) * grad * grad
        if settings["centered"]:
            mean = state["mean"]
            mean *= alpha
            mean += (1 - alpha) * grad
            scaled = grad / (xp.sqrt(mean_square - mean * mean) + settings["eps"])
        else:
            scaled = grad / (xp.sqrt(mean_square) + settings["eps"])
        if settings["momentum"]:
            velocity = state["velocity"]
            velocity *= settings["momentum"]
            velocity += scaled
            scaled = velocity
        param -= settings["lr"] * scaled
