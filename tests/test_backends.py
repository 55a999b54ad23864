"""The `xp` fixture catches what it is there to catch."""

from pathlib import Path

import numpy as np
import pytest

import rtxarr


def call_as_rtxarr(source, **names):
    """Evaluate an expression as if a file of the package held it."""
    file = Path(rtxarr.__path__[0]) / "_planted.py"
    return eval(compile(source, str(file), "eval"), names)


def backend_of(request):
    return request.node.callspec.params["xp"]


def test_reads_inside_the_package_are_refused_over_dask(xp, request):
    x = xp.asarray([1.0, 2.0])
    if backend_of(request) == "dask.array":
        with pytest.raises(AssertionError, match="reads array values on the host"):
            call_as_rtxarr("float(x[0])", x=x)
    else:
        assert call_as_rtxarr("float(x[0])", x=x) == 1.0
    assert float(x[0]) == 1.0  # a test may


def test_writes_to_an_input_are_refused_over_read_only_numpy(xp, request):
    x = xp.ones(2)
    if backend_of(request) == "numpy:readonly":
        with pytest.raises(ValueError, match="read-only"):
            x[0] = 2.0
    elif isinstance(x, np.ndarray):
        x[0] = 2.0
        assert x.tolist() == [2.0, 1.0]


def test_only_the_standard_is_there_over_array_api_strict(xp, request):
    assert hasattr(xp, "nansum") == (backend_of(request) != "array_api_strict")
