"""With NUMBA_ENABLE_CUDASIM=1 every kernel launch is simulated, so only the tests for that run."""

import os
from pathlib import Path

import pytest

SIMULATING = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


def pytest_collection_modifyitems(config, items):
    if not SIMULATING:
        return
    here = Path(__file__).parent
    other = [i for i in items if here in i.path.parents and not i.get_closest_marker("sim")]
    config.hook.pytest_deselected(items=other)
    items[:] = [i for i in items if i not in other]


@pytest.fixture(params=["numpy", "njit"])
def host_path(request, monkeypatch):
    """Make every CPU draw go through NumPy, or through numba's compiled code."""
    from rtxarr.kernels import philox

    monkeypatch.setattr(philox, "_COMPILED_FROM", 2**62 if request.param == "numpy" else -1)
    return request.param
