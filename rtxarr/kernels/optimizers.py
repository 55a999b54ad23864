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
from rtxarr.dtypes import accumulator
from rtxarr.kernels.multi_tensor import upload

__all__ = ["Scaling", "step_all"]

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


def step_all(
    key: tuple,
    dtype: np.dtype,
    columns: Sequence[np.ndarray],
    sizes: tuple[int, ...],
    owners: Callable[[], tuple[list[int], list[tuple[int, Mapping[str, Any]]]]],
    *,
    numbered: Sequence[int] = (),
    scaling: Scaling | None = None,
) -> None:
    """Update parameters and their state in place.

    Parameters
    ----------
    key : tuple
        Name of the optimizer and flags, one of ``N_STATES``.
    dtype : dtype
        Of the parameters and gradients; state is of the one that it is accumulated in.
    columns : sequence of array of int64, shape (n_rows,)
        Addresses of the parameters, their gradients, and for each kind of state the arrays; see
        ``multi_tensor``.
    sizes : tuple of int
        Their elements.
    owners : callable
        Counts the step and gives the kinds of numbers that there are, each as the number of its
        step and its settings, after a list that says which one each row has. It runs once for each
        step, eager or replayed.
    numbered : sequence of int
        Places of the rows in ``scaling.skipped``.
    scaling : Scaling, optional
    """
    from rtxarr.kernels._optimizers_cuda import count_steps, kernel

    name, n_rows = key[0], len(sizes)
    scalar = accumulator(dtype)
    compute, n_numbers = _NUMBERS[name], N_NUMBERS[name]
    n_words = -(-n_rows * n_numbers * scalar.itemsize // 8)
    step = kernel(*key, dtype=dtype, scaled=scaling is not None)

    if scaling is None:

        def tail():
            sets, kinds = owners()
            words = np.zeros(n_rows + n_words, np.int64)
            words[:n_rows] = sets
            numbers = list(chain(*(compute(*kind) for kind in kinds)))
            words[n_rows:].view(scalar)[: len(numbers)] = numbers
            return words

        table = upload(columns, sizes, tail)
        table.launch(step, table.rest(n_rows, scalar))
        return

    corrects = name.startswith("adam")

    def scaled_tail():
        sets, kinds = owners()
        words = np.zeros(5 * n_rows + n_words, np.int64)
        words[:n_rows] = numbered
        if corrects:
            exact = [(s["lr"], *s["betas"], count) for count, s in kinds]
            words[n_rows : 5 * n_rows].view(np.float64)[:] = [x for i in sets for x in exact[i]]
        numbers = [compute(*kind) for kind in kinds]
        flat = [x for i in sets for x in numbers[i]]
        words[5 * n_rows :].view(scalar)[: len(flat)] = flat
        return words

    table = upload(columns, sizes, scaled_tail)
    state, slot, still_scaled, skipped = scaling
    numbers = table.rest(5 * n_rows, scalar)
    where = table.words[table.tail : table.tail + n_rows]
    exact = table.words[table.tail + n_rows : table.tail + 5 * n_rows].view(np.float64)
    count = count_steps(dtype, corrects=corrects)
    launch(count, n_rows, (where, exact, numbers, skipped, state, slot))
    table.launch(step, numbers, state, slot, still_scaled)
