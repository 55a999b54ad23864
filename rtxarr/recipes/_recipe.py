"""What every recipe gives to the training loop."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import rtxarr as rx
from rtxarr.optim import LossScaler, clip_grad_norm
from rtxarr.recipes._config import Config


class Recipe:
    """A model, its data, and how one epoch of training goes.

    A subclass builds everything in ``__init__`` on the current device, and sets ``model``. Random
    numbers come from explicit generators or :func:`rtxarr.random.default_generator`, which the
    loop seeds before and saves.

    Attributes
    ----------
    name : str
        What ``rtx train`` calls it.
    Config : type
        Its settings; one of them is ``epochs``.
    model : Module
    optimizer : Optimizer
    scaler : LossScaler or None
        What :meth:`minimize` scales the loss with, for float16.
    capture : bool
        Whether :meth:`captured` makes CUDA graphs; the loop sets it.
    fuse : bool
        Whether it makes fused programs; the loop sets it.
    fuses : bool
        Whether it does unless told otherwise, on a GPU: where steps were measured to be faster so.
    metric : str
        What is measured beside the loss, the more the better, from 0 to 1.
    baselines : dict
        For ``"loss"`` and for ``metric``, ``(value, name)`` of what to compare the curves with.
    files : tuple of str
        What :meth:`finish` leaves. A finished run that is resumed calls it where one is missing,
        or where none is named.
    stateful : tuple of str
        The attributes, each with ``state_dict`` and ``load_state_dict``, that a resumed run needs.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Config]]
    metric: ClassVar[str] = "accuracy"
    fuses: ClassVar[bool] = False
    stateful: ClassVar[tuple[str, ...]] = ("model", "optimizer")
    files: ClassVar[tuple[str, ...]] = ()
    model: Any
    optimizer: Any
    scaler: Any = None
    capture: bool = False
    fuse: bool = False
    baselines: Mapping[str, tuple[float, str]] = MappingProxyType({})

    def __init__(self, config: Any, *, seed: int):
        raise TypeError(f"{type(self).__name__} must define __init__")

    def train_epoch(self, epoch: int, progress: Callable[[float], None]) -> tuple[Any, Any]:
        """Train for one epoch, counted from 0; give the mean loss and metric while training.

        ``progress(fraction)`` may be called on the way.
        """
        raise TypeError(f"{type(self).__name__} must define train_epoch()")

    def captured(self, method: Callable) -> Callable:
        """Give a method as one CUDA graph, or as a fused program, if this run has its steps so.

        What it is called with may be another array each time; whatever else it reads must stay
        where it is.
        """
        if not (self.capture or self.fuse):
            return method
        graphs = self.__dict__.setdefault("_graphs", {})
        if method.__name__ not in graphs:
            made = rx.jit(method, capture=self.capture) if self.fuse else rx.capture(method)
            graphs[method.__name__] = made
        return graphs[method.__name__]

    @property
    def captures(self) -> bool:
        """Whether :meth:`captured` has given anything but the method itself."""
        return "_graphs" in self.__dict__

    @staticmethod
    def loss_scaler(config: Any) -> LossScaler | None:
        """Give what scales losses in the precision of ``config``, if anything does."""
        return LossScaler(device=rx.device()) if config.precision == "float16" else None

    def minimize(self, loss: Any, *, max_norm: float | None = None) -> None:
        """Make one step of the optimizer, with gradients of at most ``max_norm`` together."""
        scaler, optimizer = self.scaler, self.optimizer
        (loss if scaler is None else scaler.scale(loss)).backward()
        if max_norm is not None:
            if scaler is not None:
                scaler.unscale(optimizer)
            clip_grad_norm(self.model.parameters(), max_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    def evaluate(self, part: str) -> tuple[Any, Any]:
        """Give the loss and metric on ``"val"`` or ``"test"``, without dropout."""
        raise TypeError(f"{type(self).__name__} must define evaluate()")

    def rank(self, entry: dict[str, Any]) -> tuple[float, ...]:
        """Give what is largest for the epoch whose parameters are kept, from its metrics."""
        return entry[f"val_{self.metric}"], -entry["val_loss"]

    def finish(self, folder: Path) -> list[str]:
        """Leave something of the trained model in ``folder``; give lines to print."""
        return []

    def state(self) -> dict[str, Any]:
        """Give all that :meth:`load_state` needs to go on, to the bit."""
        return {name: getattr(self, name).state_dict() for name in self._stateful()}

    def _stateful(self):
        return (*self.stateful, "scaler") if self.scaler is not None else self.stateful

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where the recipe that gave ``state`` stood."""
        names = self._stateful()
        if not isinstance(state, Mapping) or set(state) != set(names):
            got = list(state) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"state must be a dict of {', '.join(names)}, got {got}")
        for name in names:
            getattr(self, name).load_state_dict(state[name])
