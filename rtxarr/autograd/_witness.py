"""What a captured step uses and changes beside its arguments, as seen while it runs."""

from typing import Any

from rtxarr.autograd._mode import WITNESSED, state, witnesses
from rtxarr.autograd._tape import Leaf, Tensor

__all__ = ["Witness"]


class Witness:
    """Sees modules, parameters and gradients of the step run in the ``with`` block.

    Attributes
    ----------
    modules : dict
        By id, each module that was called, and whether it was in training then.
    tensors : dict
        By id, each leaf, parameter and buffer that an operation or an optimizer took.
    grads : dict
        By id, each leaf whose gradient was set, and what it was before.
    counters : dict
        By id, the mutation counter of each tensor that was changed.
    """

    def __init__(self) -> None:
        self.modules: dict[int, tuple[Any, bool]] = {}
        self.tensors: dict[int, Tensor] = {}
        self.grads: dict[int, tuple[Leaf, Any]] = {}
        self.counters: dict[int, list[int]] = {}
        self._before: Any = None

    def __enter__(self) -> "Witness":
        self._before = state.witness
        state.witness = self
        state.mode |= WITNESSED
        witnesses.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        witnesses.remove(self)
        state.witness = self._before
        if self._before is None:
            state.mode &= ~WITNESSED

    def call(self, module: Any) -> None:
        self.modules.setdefault(id(module), (module, module.training))

    def see(self, args: Any) -> None:
        for x in args:
            if isinstance(x, Tensor) and (type(x) is not Tensor or type(x.node) is Leaf):
                self.tensors.setdefault(id(x), x)

    def set_grad(self, leaf: Leaf) -> None:
        """Note that the gradient of a leaf is about to be set."""
        self.grads.setdefault(id(leaf), (leaf, leaf.grad))

    def change(self, counter: list[int]) -> None:
        self.counters.setdefault(id(counter), counter)

    def restore_grads(self) -> None:
        """Put the gradients back that were there before."""
        for leaf, grad in self.grads.values():
            leaf.grad = grad
