"""Mixed precision: in which precision each operation runs inside ``autocast``.

Arguments are cast on the way into an operation, and what it records remembers the dtype they had:
the backward pass casts each gradient back, so that of a float32 parameter arrives in float32.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rtxarr._replay import moment
from rtxarr.autograd._mode import AUTOCAST, Block, state
from rtxarr.autograd._tape import Tensor, store_of
from rtxarr.dtypes import bfloat16, is_half
from rtxarr.kernels.elementwise import cast

# ------------------------------------------------------------------------------- the table
#
# In neither list: an operation runs in what it gets, and half precision meeting float32 gives
# float32. So do activations, which compute in float32 and round once, normalizations, whose
# statistics are float32, and what only moves elements. Losses compute in float32 from what they
# get and stay there; see `ops/_losses.py`.

# Products run in low precision and accumulate in float32. With the number of leading arguments to
# cast: the mask of attention stays what it is.
LOW = {
    "_activated_linear": 3,
    "_attention": 3,
    "_convolution": 4,
    "_convolution_input": 3,
    "_lowered": 1,
    "linear": 3,
    "matmul": 2,
}
# Operations that lose much to rounding, or overflow, run in float32.
FULL = frozenset(
    (
        # powers, exponentials, logarithms and what grows like them
        *("pow", "reciprocal", "exp", "expm1", "log", "log1p", "log2", "log10", "logaddexp"),
        *("acos", "asin", "cosh", "sinh", "tan", "softplus", "log_sigmoid"),
        # sums over many elements
        *("sum", "mean", "var", "std", "prod", "cumulative_sum", "cumulative_prod", "vecdot"),
        *("logsumexp", "softmax", "log_softmax", "soft_cross_entropy"),
        # decompositions, which no library has for half precision
        *("_cholesky", "det", "eig", "eigh", "eigvals", "eigvalsh", "inv", "pinv", "qr"),
        *("slogdet", "solve", "svd", "svdvals", "vector_norm"),
    )
)

Policy = tuple[bool, int]
"""Whether to cast to the low dtype (else to float32), and how many leading arguments."""

_FULL: Policy = (False, 2**31)
_DECLARED: dict[str, Policy | None] = {"low": (True, 2**31), "float32": _FULL, "any": None}


def policy_of(function: Callable, declared: str | None) -> Policy | None:
    """Give the policy of an operation: what was declared, or what the table says of it.

    An operation that is not of this library runs in float32, as it may not know half precision.
    """
    if declared is not None:
        if declared not in _DECLARED:
            raise ValueError(f"precision must be 'low', 'float32' or 'any', got {declared!r}")
        return _DECLARED[declared]
    if not (function.__module__ or "").startswith("rtxarr."):  # None where code was executed
        return _FULL
    name = function.__name__
    if name in LOW:
        return True, LOW[name]
    return _FULL if name in FULL else None


# ------------------------------------------------------------------------------- the block


class autocast(Block):  # noqa: N801  (used like no_grad)
    """Run products in half precision and delicate operations in float32: a block or decorator.

    Parameters
    ----------
    dtype : {"bfloat16", "float16"} or dtype, or None
        None switches it off inside another block.

    Notes
    -----
    Acts, in this thread, on operations of which at least one argument is a :class:`Tensor`, and
    leaves float64 and complex numbers alone. Matrix products, linear layers, convolutions and
    attention get their arguments in ``dtype``; powers, exponentials, sums, softmax and losses
    work in float32; other operations run in what they get, and where half precision meets
    float32 the result is float32. ``rtxarr/autograd/_autocast.py`` has the table. A
    :func:`custom_op` runs in float32 unless it says otherwise.

    Parameters stay float32, and so do their gradients. A parameter, or a tensor that was computed,
    is cast once in the outermost block, however many operations use it, and a parameter again when
    it has changed. The backward pass follows the dtypes of the forward one,
    inside a block or outside. With float16, scale the loss, as small gradients vanish.

    Examples
    --------
    >>> import rtxarr as rx
    >>> from rtxarr import nn
    >>> layer = nn.Linear(4, 2, device="cpu")
    >>> with rx.autocast("bfloat16"):
    ...     y = layer(rx.ones((3, 4), dtype="float32", device="cpu"))
    ...     loss = rx.mse_loss(y, rx.zeros((3, 2), dtype="float32", device="cpu"))
    >>> str(y.dtype), str(loss.dtype)
    ('bfloat16', 'float32')
    >>> loss.backward()
    >>> str(layer.weight.grad.dtype)
    'float32'

    References
    ----------
    Micikevicius et al., "Mixed Precision Training", 2017, arXiv:1710.03740.
    """

    def __init__(self, dtype: Any):
        if dtype is not None:
            try:
                found = np.dtype(dtype)
            except TypeError:
                found = None
            if found is None or not is_half(found):
                raise TypeError(f"dtype must be bfloat16, float16 or None, got {dtype!r}")
            dtype = found
        super().__init__(dtype)

    @staticmethod
    def _swap(value):
        before = active_dtype()
        state.low = value
        state.mode = state.mode & ~AUTOCAST | (0 if value is None else AUTOCAST)
        return before

    def __enter__(self):
        if state.casts is None:
            state.casts = {}
        return super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        if not any(isinstance(block, autocast) for block, _ in state.blocks):
            state.casts = None
        return False


def active_dtype() -> np.dtype | None:
    """Give the low dtype of the block that is active in this thread; None when none is."""
    return state.low if state.mode & AUTOCAST else None


# ------------------------------------------------------------------------------- the casts

_SINGLE = np.dtype("float32")
_CAST = frozenset((_SINGLE, np.dtype("float16"), np.dtype(bfloat16)))
_MEANT = frozenset(map(np.dtype, ("float64", "complex64", "complex128")))


def cast_arguments(policy: Policy, args: Any, raw: list) -> None:
    """Cast the raw arguments of an operation in place, as its policy says."""
    low, count = policy
    target = state.low if low else _SINGLE
    places = []
    for place, x in enumerate(raw[:count]):
        dtype = getattr(x, "dtype", None)
        if dtype is target or not isinstance(dtype, np.dtype):
            continue
        if dtype in _MEANT:
            return  # for all of them
        if dtype in _CAST and dtype != target:
            places.append(place)
    for place in places:
        raw[place] = _cast(args[place], raw[place], target)


def _cast(arg, data, dtype):
    """Give ``data``, that of ``arg``, in ``dtype``; the one there is where several use it.

    Of a plain untracked tensor a new one each time: it may look at a buffer that is refilled.
    """
    casts = state.casts
    shared = isinstance(arg, Tensor) and (arg.node is not None or type(arg) is not Tensor)
    if casts is None or not shared:
        return cast(data, dtype)
    key, version = id(arg), store_of(arg)[0]
    # A captured step must make what it uses, and what it changes is cast anew.
    now = moment()
    known = casts.get(key)
    if (
        known is not None
        and known.data is data
        and known.version == version
        and known.cast.dtype == dtype
        and known.moment == now
    ):
        return known.cast
    made = cast(data, dtype)
    owner = weakref.ref(arg, lambda _: casts.pop(key, None))
    casts[key] = _Known(owner, data, version, now, made)
    return made


class _Known(NamedTuple):
    """A cast, and what must not have changed since."""

    owner: Any
    data: Any
    version: int
    moment: tuple
    cast: Any
