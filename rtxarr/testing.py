"""Checks for code built on rtxarr: comparisons, gradients against finite differences.

Everything here reads array values back to the host.
"""

from collections.abc import Callable, Sequence

import numpy as np

from rtxarr import _device, autograd, dtypes
from rtxarr._checks import check_values
from rtxarr.autograd._tape import raw
from rtxarr.autograd._tree import flatten

__all__ = [
    "AWKWARD_SHAPES",
    "TOLERANCES",
    "assert_close",
    "check_values",
    "gradcheck",
    "gradgradcheck",
]

TOLERANCES = {
    "float64": (1e-12, 1e-12),
    "complex128": (1e-12, 1e-12),
    "float32": (1e-5, 1e-6),
    "complex64": (1e-5, 1e-6),
    "float16": (2e-3, 2e-3),
    "bfloat16": (1.6e-2, 1.6e-2),
}
"""Relative and absolute tolerance of :func:`assert_close` by dtype; others compare exactly."""

AWKWARD_SHAPES = ((), (0,), (1,), (0, 3), (3, 0), (1, 1), (5, 1, 4), (2, 3, 5))
"""Scalar, empty, single, broadcastable and plain shapes to test functions with."""


def _host(x):
    x = raw(x)
    return np.asarray(_device.to_device(x, "cpu") if _device.is_device_array(x) else x)


def assert_close(
    actual, desired, *, rtol: float | None = None, atol: float | None = None, exact: bool = False
) -> None:
    """Raise AssertionError unless two arrays agree in shape and, within tolerance, in value.

    Parameters
    ----------
    actual, desired : array, Tensor or nested sequence
        Compared on the host; NaN equals NaN.
    rtol, atol : float, optional
        From :data:`TOLERANCES` by the dtype of ``actual`` when left out.
    exact : bool, default False
        Compare bits (of equal dtypes) instead.
    """
    got, want = _host(actual), _host(desired)
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape} differs from the desired {want.shape}")
    if exact:
        if got.dtype != want.dtype and hasattr(desired, "dtype"):
            raise AssertionError(f"dtype {got.dtype} differs from the desired {want.dtype}")
        if got.dtype.name == "bfloat16":  # whose NaN NumPy does not take for one
            got, want = got.astype("float32"), want.astype("float32")
        np.testing.assert_array_equal(got, want)
        return
    known = TOLERANCES.get(got.dtype.name, (0, 0))
    rtol = known[0] if rtol is None else rtol
    atol = known[1] if atol is None else atol
    if got.dtype.name == "bfloat16":
        got = got.astype("float32")
    if want.dtype.name == "bfloat16":
        want = want.astype("float32")
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def _inexact_outputs(value):
    return [x for x in flatten(value)[0] if dtypes.is_inexact(raw(x).dtype)]


def _differentiated(args):
    """Give the places of the arguments that are differentiated."""
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            "args must be a tuple with an entry for each argument of the function, "
            f"got {type(args).__name__}"
        )
    places = [
        i
        for i, a in enumerate(args)
        if _device.is_array(a) and np.dtype(a.dtype).name in ("float64", "complex128")
    ]
    if not places:
        raise ValueError("args must hold at least one float64 or complex128 array")
    return places


def _random_like(outputs, seed):
    rng = np.random.default_rng(seed)
    values = []
    for out in outputs:
        value = rng.standard_normal(out.shape)
        if np.dtype(out.dtype).kind == "c":
            value = value + 1j * rng.standard_normal(out.shape)
        values.append(_device.namespace(raw(out)).asarray(value, dtype=out.dtype))
    return values


def gradcheck(
    function: Callable,
    args: Sequence,
    *,
    eps: float = 1e-6,
    rtol: float = 1e-6,
    atol: float = 1e-7,
    seed: int = 0,
) -> None:
    """Compare the gradient of ``function`` with central differences.

    Parameters
    ----------
    function : callable
        Takes ``args``, returns an array or nested containers of them.
    args : tuple or list
        float64 and complex128 arrays are differentiated, everything else is passed on.
        Keep away from kinks: ``eps`` must not step over one.
    eps : float, default 1e-6
        Half the distance between the two points of a difference.
    rtol, atol : float
        Largest error allowed, relative to the largest element of a gradient and absolute.
    seed : int
        Of the random weights with which the outputs are summed into one number.

    Raises
    ------
    AssertionError
        Naming the argument and the element where the two differ most, or a gradient of
        another shape or dtype than its argument.
    ValueError
        When there is nothing to differentiate.
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    places = _differentiated(args)
    weights = _random_like(_inexact_outputs(function(*args)), seed)

    def call(*chosen):
        full = list(args)
        for place, value in zip(places, chosen, strict=True):
            full[place] = value
        return _inexact_outputs(function(*full))

    def total(chosen):
        parts = zip(call(*chosen), weights, strict=True)
        return sum(float(np.sum(np.real(np.conj(_host(w)) * _host(out)))) for out, w in parts)

    values = [args[p] for p in places]
    _, pull_back = autograd.vjp(call, *values)
    computed = pull_back(weights)
    for which, (place, value, got) in enumerate(zip(places, values, computed, strict=True)):
        if got.shape != value.shape or got.dtype != value.dtype:
            raise AssertionError(
                f"the gradient of argument {place} has shape {got.shape} and dtype {got.dtype}, "
                f"the argument {value.shape} and {value.dtype}"
            )
        want = _differences(total, values, which, eps)
        error = np.abs(_host(got) - want)
        limit = atol + rtol * np.max(np.abs(want), initial=0.0)
        if want.size and not np.max(error) <= limit:
            worst = np.unravel_index(
                np.nanargmax(np.where(np.isnan(error), np.inf, error)), error.shape
            )
            raise AssertionError(
                f"the gradient of argument {place} at {tuple(map(int, worst))} is "
                f"{_host(got)[worst]}, finite differences give {want[worst]} "
                f"(error {error[worst]:.3g}, allowed {limit:.3g})"
            )


def _differences(total, values, which, eps):
    """Differentiate ``total`` for each element of ``values[which]``."""
    xp = _device.namespace(values[which])
    base = _host(values[which])
    found = np.zeros_like(base)
    for index in np.ndindex(base.shape):
        steps = (eps, 1j * eps) if base.dtype.kind == "c" else (eps,)
        for step in steps:
            ends = []
            for sign in (1, -1):
                moved = base.copy()
                moved[index] += sign * step
                chosen = list(values)
                chosen[which] = xp.asarray(moved)
                ends.append(total(chosen))
            slope = (ends[0] - ends[1]) / (2 * eps)
            found[index] += slope if step == eps else 1j * slope
    return found


def gradgradcheck(
    function: Callable,
    args: Sequence,
    *,
    eps: float = 1e-6,
    rtol: float = 1e-6,
    atol: float = 1e-6,
    seed: int = 0,
) -> None:
    """Compare the second derivatives of ``function`` with differences of its gradient.

    Parameters and exceptions are those of :func:`gradcheck`; the gradient pulled back through
    ``function`` is itself checked, with respect to ``args`` and to what is pulled back.
    """
    places = _differentiated(args)
    pulled = _random_like(_inexact_outputs(function(*args)), seed + 1)

    def gradient(*everything):
        full = list(everything[: len(args)])

        def inner(*chosen):
            for place, value in zip(places, chosen, strict=True):
                full[place] = value
            return _inexact_outputs(function(*full))

        _, pull_back = autograd.vjp(inner, *[full[p] for p in places])
        return pull_back(list(everything[len(args) :]))

    gradcheck(gradient, [*args, *pulled], eps=eps, rtol=rtol, atol=atol, seed=seed)
