"""Array backends for the `xp` fixture, and the markers that need something special.

`RTXARR_TEST_BACKENDS=cupy,numpy` runs only these backends; it also reaches
`array_api_strict:strictest` (no boolean indexing, no data-dependent shapes, no
extensions), which is not among the default ones.
"""

import contextlib
import gc
import importlib
import importlib.util
import os
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from array_api_compat import array_namespace

import rtxarr

PACKAGE = Path(rtxarr.__path__[0])
DEFAULT_BACKENDS = ("numpy", "numpy:readonly", "array_api_strict", "dask.array", "cupy")

os.environ.setdefault("MPLBACKEND", "Agg")
hypothesis.settings.register_profile("rtxarr", deadline=None, derandomize=True)
hypothesis.settings.load_profile("rtxarr")


def _has_gpu():
    """Tell whether CuPy can use a device; that it imports says nothing."""
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    return cupy.is_available()


def _has_nvrtc():
    try:
        return importlib.util.find_spec("cuda.bindings.nvrtc") is not None
    except ModuleNotFoundError:
        return False


def _backends():
    wanted = os.environ.get("RTXARR_TEST_BACKENDS")
    for name in wanted.split(",") if wanted else DEFAULT_BACKENDS:
        yield pytest.param(name, id=name, marks=[pytest.mark.gpu] if name == "cupy" else [])


def pytest_collection_modifyitems(items):
    missing = {
        "gpu": None if _has_gpu() else "needs a CUDA device and cupy",
        "compare": None if importlib.util.find_spec("torch") else "needs torch",
        "nvrtc": None if _has_nvrtc() else "needs NVRTC",
        "sim": None
        if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
        else "needs NUMBA_ENABLE_CUDASIM=1",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))

    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # at the end nobody waits


def pytest_collection_finish():
    gc.freeze()  # the tests themselves, which would take each gc.collect() a quarter of a second


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes():
    """Let BLAS run in one thread: there is a process for each core."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let idle processes take tests of busy ones, where no other way was asked for."""
    if config.option.dist == "load":
        from xdist.scheduler import WorkStealingScheduling

        return WorkStealingScheduling(config, log)
    return None


class _ReadOnlyNumPy:
    """NumPy whose functions return read-only arrays, to catch writes to an input."""

    def __init__(self):
        self._numpy = array_namespace(np.empty(0))

    def __getattr__(self, name):
        attribute = getattr(self._numpy, name)
        if not callable(attribute) or isinstance(attribute, type):
            return attribute

        def read_only(*args, **kwargs):
            result = attribute(*args, **kwargs)
            if isinstance(result, np.ndarray):
                result.flags.writeable = False
            return result

        return read_only


def _get_unless_hidden(graph, keys, **kwargs):
    """Compute a dask graph, unless the library itself asked for the values.

    On a GPU that would be a silent wait for the device. `rtxarr.testing` may: it compares.
    """
    import dask

    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            if path.name == "testing.py":
                break
            raise AssertionError(f"{path}:{frame.f_lineno} reads array values on the host")
        frame = frame.f_back
    return dask.get(graph, keys, **kwargs)


@contextlib.contextmanager
def _strict_flags(xp, variant):
    if variant == "strictest":
        with xp.ArrayAPIStrictFlags(
            boolean_indexing=False, data_dependent_shapes=False, enabled_extensions=()
        ):
            yield
    else:
        yield


@pytest.fixture(params=list(_backends()))
def xp(request):
    """Array namespace under test: make inputs with it, hand them to rtxarr."""
    backend = request.param
    for marker in request.node.iter_markers("skip_xp"):
        if backend in marker.args:
            pytest.skip(marker.kwargs.get("reason", f"not over {backend}"))
    module, _, variant = backend.partition(":")
    if variant == "readonly":
        yield _ReadOnlyNumPy()
        return
    namespace = array_namespace(pytest.importorskip(module).empty(0))
    if module == "dask.array":
        import dask

        with dask.config.set(scheduler=_get_unless_hidden):
            yield namespace
    else:
        with _strict_flags(namespace, variant):
            yield namespace
