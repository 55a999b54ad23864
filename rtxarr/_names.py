"""Help with names that are not known."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Give ``"; did you mean 'x'?"`` for the known name nearest to ``name``, or nothing."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


# What to write for the functions of NumPy that the array API standard names otherwise or lacks.
_NUMPY = {
    "absolute": "rtxarr.abs(x)",
    "allclose": "rtxarr.testing.assert_close(x, y)",
    "amax": "rtxarr.max(x)",
    "amin": "rtxarr.min(x)",
    "arccos": "rtxarr.acos(x)",
    "arccosh": "rtxarr.acosh(x)",
    "arcsin": "rtxarr.asin(x)",
    "arcsinh": "rtxarr.asinh(x)",
    "arctan": "rtxarr.atan(x)",
    "arctan2": "rtxarr.atan2(x, y)",
    "arctanh": "rtxarr.atanh(x)",
    "array": "rtxarr.asarray(x, copy=True)",
    "concatenate": "rtxarr.concat((x, y))",
    "conjugate": "rtxarr.conj(x)",
    "cross": "rtxarr.linalg.cross(x, y)",
    "cumprod": "rtxarr.cumulative_prod(x)",
    "cumsum": "rtxarr.cumulative_sum(x)",
    "diag": "rtxarr.linalg.diagonal(x)",
    "diagonal": "rtxarr.linalg.diagonal(x)",
    "dot": "rtxarr.matmul(x, y)",
    "hstack": "rtxarr.concat((x, y), axis=1)",
    "inner": "rtxarr.vecdot(x, y)",
    "invert": "rtxarr.bitwise_invert(x)",
    "mod": "rtxarr.remainder(x, y)",
    "norm": "rtxarr.linalg.vector_norm(x)",
    "outer": "rtxarr.linalg.outer(x, y)",
    "power": "rtxarr.pow(x, y)",
    "ravel": "rtxarr.reshape(x, (-1,))",
    "swapaxes": "rtxarr.moveaxis(x, source, destination)",
    "trace": "rtxarr.linalg.trace(x)",
    "true_divide": "rtxarr.divide(x, y)",
    "unique": "rtxarr.unique_values(x)",
    "vstack": "rtxarr.concat((x, y))",
}

# Likewise for the random functions of NumPy, which here are methods of a generator.
_RANDOM = {
    "RandomState": "rtxarr.random.Generator(seed)",
    "choice": "rtxarr.random.default_generator().choice(x, size)",
    "default_rng": "rtxarr.random.Generator(seed)",
    "exponential": "rtxarr.random.default_generator().exponential(shape)",
    "integers": "rtxarr.random.default_generator().integers(low, high, shape)",
    "normal": "rtxarr.random.default_generator().normal(shape)",
    "permutation": "rtxarr.random.default_generator().permutation(x)",
    "rand": "rtxarr.random.default_generator().uniform(shape)",
    "randint": "rtxarr.random.default_generator().integers(low, high, shape)",
    "randn": "rtxarr.random.default_generator().normal(shape)",
    "random": "rtxarr.random.default_generator().uniform(shape)",
    "shuffle": "rtxarr.random.default_generator().permutation(x)",
    "standard_normal": "rtxarr.random.default_generator().normal(shape)",
    "uniform": "rtxarr.random.default_generator().uniform(shape)",
}

# And for the modules that other libraries have and this one does without.
_NN = {
    "BCEWithLogitsLoss": "rtxarr.nn.binary_cross_entropy_with_logits(logits, targets)",
    "BatchNorm1d": "rtxarr.nn.BatchNorm(n_channels)",
    "BatchNorm2d": "rtxarr.nn.BatchNorm(n_channels)",
    "BatchNorm3d": "rtxarr.nn.BatchNorm(n_channels)",
    "CrossEntropyLoss": "rtxarr.nn.cross_entropy(logits, labels)",
    "HuberLoss": "rtxarr.nn.huber_loss(prediction, target)",
    "Identity": "rtxarr.nn.Sequential()",
    "KLDivLoss": "rtxarr.nn.kl_div(log_probs, target)",
    "L1Loss": "rtxarr.nn.l1_loss(prediction, target)",
    "MSELoss": "rtxarr.nn.mse_loss(prediction, target)",
    "ModuleDict": "a dict of modules",
    "ModuleList": "a list of modules",
    "MultiheadAttention": "rtxarr.nn.MultiHeadAttention(n_features, n_heads)",
    "NLLLoss": "rtxarr.nn.nll_loss(log_probs, labels)",
    "ParameterDict": "a dict of parameters",
    "ParameterList": "a list of parameters",
    "SmoothL1Loss": "rtxarr.nn.smooth_l1_loss(prediction, target)",
    "init": "rtxarr.nn.initializers",
}

_INSTEAD = {
    "rtxarr": _NUMPY,
    "rtxarr.linalg": _NUMPY,
    "rtxarr.nn": _NN,
    "rtxarr.random": _RANDOM,
}


def no_attribute(module: str, name: str) -> AttributeError:
    """Make the error for a name that a module lacks, with what to write instead if known."""
    instead = _INSTEAD[module].get(name)
    hint = f": write {instead}" if instead else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
