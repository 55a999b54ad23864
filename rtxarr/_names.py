"""Help with names that are not known."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Give ``"; did you mean 'x'?"`` for the known name nearest to ``name``, or nothing."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


# What to write for the functions of NumPy that the array API standard names otherwise or lacks.
_INSTEAD_OF_NUMPY = {
    "absolute": "abs(x)",
    "allclose": "testing.assert_close(x, y)",
    "amax": "max(x)",
    "amin": "min(x)",
    "arccos": "acos(x)",
    "arccosh": "acosh(x)",
    "arcsin": "asin(x)",
    "arcsinh": "asinh(x)",
    "arctan": "atan(x)",
    "arctan2": "atan2(x, y)",
    "arctanh": "atanh(x)",
    "array": "asarray(x, copy=True)",
    "concatenate": "concat((x, y))",
    "conjugate": "conj(x)",
    "cross": "linalg.cross(x, y)",
    "cumprod": "cumulative_prod(x)",
    "cumsum": "cumulative_sum(x)",
    "diag": "linalg.diagonal(x)",
    "diagonal": "linalg.diagonal(x)",
    "dot": "matmul(x, y)",
    "hstack": "concat((x, y), axis=1)",
    "inner": "vecdot(x, y)",
    "invert": "bitwise_invert(x)",
    "mod": "remainder(x, y)",
    "norm": "linalg.vector_norm(x)",
    "outer": "linalg.outer(x, y)",
    "power": "pow(x, y)",
    "ravel": "reshape(x, (-1,))",
    "swapaxes": "moveaxis(x, source, destination)",
    "trace": "linalg.trace(x)",
    "true_divide": "divide(x, y)",
    "unique": "unique_values(x)",
    "vstack": "concat((x, y))",
}


def instead_of_numpy(name: str) -> str:
    """Give ``": write rtxarr.f(x)"`` for a NumPy function without a namesake, or nothing."""
    instead = _INSTEAD_OF_NUMPY.get(name)
    return f": write rtxarr.{instead}" if instead else ""
