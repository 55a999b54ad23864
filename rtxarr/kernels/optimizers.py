"""One step of an optimizer for many parameters in one launch: every array is read and written once.

The same formulas over arrays, in ``rtxarr.optim``, are the CPU path; there each is about a dozen
passes over memory, and would be a dozen launches for each parameter here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import launch
from rtxarr._replay import from_host, recorder
from rtxarr.dtypes import accumulator
from rtxarr.kernels.multi_tensor import Table, _blocks, addresses, upload

__all__ = ["Rows", "Scaling", "step_all"]

# How many arrays of state a kernel has, by its name and flags.
N_STATES = {
    ("sgd", False, False): 0,
    ("sgd", True, False): 1,
    ("sgd", True, True): 1,
    ("adam", False): 2,
    ("adam", True): 3,
    ("adamw", False): 2,
    ("adamw", True): 3,
    ("lion",): 1,
}


def _sgd(step, s):
    return s["lr"], s["momentum"], s["weight_decay"]


def _adam(step, s, decoupled=False):
    (beta1, beta2), lr, weight_decay = s["betas"], s["lr"], s["weight_decay"]
    return (
        lr / (1 - beta1**step),
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        1 / (1 - beta2**step),
        s["eps"],
        0.0 if decoupled else weight_decay,
        1 - lr * weight_decay if decoupled else 1.0,
    )


def _adamw(step, s):
    return _adam(step, s, decoupled=True)


def _lion(step, s):
    (beta1, beta2), lr = s["betas"], s["lr"]
    return lr, beta1, 1 - beta1, beta2, 1 - beta2, 1 - lr * s["weight_decay"]


_NUMBERS: dict[str, Callable] = {"sgd": _sgd, "adam": _adam, "adamw": _adamw, "lion": _lion}
N_NUMBERS = {"sgd": 3, "adam": 9, "adamw": 9, "lion": 6}


class Scaling(NamedTuple):
    """How a step treats gradients of a scaled loss; see :class:`rtxarr.optim.LossScaler`.

    Attributes
    ----------
    state : array of float32
        The scale and the flags of gradients that are not finite; see ``multi_tensor.FOUND``.
    slot : int
        Which flag.
    still_scaled : int
        1 if the gradients are to be divided by the scale, else 0.
    skipped : array of int64, shape (n_params,)
        Steps that each parameter's count has too many: this one is added where it is left out.
    """

    state: Any
    slot: int
    still_scaled: int
    skipped: Any


class Rows:
    """Parameters that one launch updates, and the words of their table, of which few change.

    Parameters
    ----------
    key : tuple
        Name of the optimizer and flags, one of ``N_STATES``.
    dtype : dtype
        Of the parameters and gradients; state is of the one that it is accumulated in.
    param : array of int64, shape (n_rows,)
        Addresses of the parameters; see ``multi_tensor``.
    state : sequence of array of int64, shape (n_rows,)
        Those of each kind of state.
    sizes : tuple of int
        Their elements.
    numbered : sequence of int
        Places of the rows in ``Scaling.skipped``.
    """

    def __init__(
        self,
        key: tuple,
        dtype: np.dtype,
        param: np.ndarray,
        state: Sequence[np.ndarray],
        sizes: tuple[int, ...],
        numbered: Sequence[int] = (),
    ) -> None:
        self.key, self.dtype, self.param, self.state = key, dtype, param, state
        self.sizes, self.numbered, self.n_rows = sizes, numbered, len(sizes)
        self.scalar = accumulator(dtype)
        self.n_words = -(-self.n_rows * N_NUMBERS[key[0]] * self.scalar.itemsize // 8)
        self._words: _Words | None = None

    def words(self) -> _Words:
        """Give the words of a step: those of the last one, but to steps that are captured."""
        if recorder() is not None:  # a replay may come after other steps
            return _Words(self)
        if self._words is None:
            self._words = _Words(self)
        return self._words


class _Words:
    """What the kernels read of ``Rows``: addresses and sizes, kinds of numbers and these."""

    def __init__(self, rows: Rows) -> None:
        n = rows.n_rows
        unset, tail = np.zeros(n, np.int64), np.zeros(n + rows.n_words, np.int64)
        self.blocks, lengths = _blocks(rows.sizes)
        self.all = np.concatenate((rows.param, unset, *rows.state, lengths, tail))
        self.grads = self.all[n : 2 * n]
        self.tail = self.all.size - tail.size
        self.sets = self.all[self.tail : self.tail + n]
        self.numbers = self.all[self.tail + n :].view(rows.scalar)
        self.has_sets = False


def step_all(
    rows: Rows,
    grads: Sequence,
    owners: Callable[[], tuple[list[int], list[tuple[int, Mapping[str, Any]]]]],
    *,
    scaling: Scaling | None = None,
) -> None:
    """Update parameters and their state in place.

    Parameters
    ----------
    rows : Rows
    grads : sequence of array
        Of the parameters, C-contiguous.
    owners : callable
        Counts the step and gives the kinds of numbers that there are, each as the number of its
        step and its settings, after a list that says which one each row has. It runs once for each
        step, eager or replayed.
    scaling : Scaling, optional
    """
    from rtxarr.kernels._optimizers_cuda import count_steps, kernel

    name, n_rows, scalar, dtype = rows.key[0], rows.n_rows, rows.scalar, rows.dtype
    compute = _NUMBERS[name]
    step = kernel(*rows.key, dtype=dtype, scaled=scaling is not None)

    if scaling is None:
        words = rows.words()
        words.grads[:] = addresses(grads)

        def make():
            sets, kinds = owners()
            if len(kinds) > 1 or words.has_sets:
                words.sets[:] = sets
                words.has_sets = len(kinds) > 1
            numbers = list(chain(*(compute(*kind) for kind in kinds)))
            words.numbers[: len(numbers)] = numbers
            return words.all

        table = Table(from_host(make), n_rows, words.blocks, words.tail)
        table.launch(step, table.rest(n_rows, scalar))
        return

    corrects = name.startswith("adam")

    def scaled_tail():
        sets, kinds = owners()
        words = np.zeros(5 * n_rows + rows.n_words, np.int64)
        words[:n_rows] = rows.numbered
        if corrects:
            exact = [(s["lr"], *s["betas"], count) for count, s in kinds]
            words[n_rows : 5 * n_rows].view(np.float64)[:] = [x for i in sets for x in exact[i]]
        numbers = [compute(*kind) for kind in kinds]
        flat = [x for i in sets for x in numbers[i]]
        words[5 * n_rows :].view(scalar)[: len(flat)] = flat
        return words

    columns = [rows.param, addresses(grads), *rows.state]
    table = upload(columns, rows.sizes, scaled_tail)
    state, slot, still_scaled, skipped = scaling
    numbers = table.rest(5 * n_rows, scalar)
    where = table.words[table.tail : table.tail + n_rows]
    exact = table.words[table.tail + n_rows : table.tail + 5 * n_rows].view(np.float64)
    count = count_steps(dtype, corrects=corrects)
    launch(count, n_rows, (where, exact, numbers, skipped, state, slot))
    table.launch(step, numbers, state, slot, still_scaled)
