"""With NUMBA_ENABLE_CUDASIM=1 every kernel launch is simulated, so only the tests for that run."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

SIMULATING = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")

if SIMULATING:
    from . import turns

    turns.install()


def pytest_collection_modifyitems(config, items):
    if not SIMULATING:
        return
    here = Path(__file__).parent
    other = [i for i in items if here in i.path.parents and not i.get_closest_marker("sim")]
    config.hook.pytest_deselected(items=other)
    items[:] = [i for i in items if i not in other]


def poisoned(empty):
    """Give ``empty`` whose arrays hold garbage."""

    def call(*args, **kwargs):
        out = empty(*args, **kwargs)
        if out.size:
            out.reshape(-1).view(np.uint8)[...] = 0xA5
        return out

    return call


@pytest.fixture(
    params=[pytest.param("sim", marks=pytest.mark.sim), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def place(request, monkeypatch):
    """Give the device that kernels run on; what they do not write holds garbage."""
    from rtxarr import _device

    place = _device.device("cpu" if request.param == "sim" else "cuda:0")
    xp, empty = _device._device_namespace(place), _device.empty
    monkeypatch.setattr(xp, "empty", poisoned(xp.empty))
    for name, module in list(sys.modules.items()):  # all that have it by name
        for key in [k for k, v in vars(module).items() if v is empty] if "rtxarr." in name else ():
            monkeypatch.setattr(module, key, poisoned(empty))
    return place


@pytest.fixture
def skewed(place, monkeypatch):
    """Give a multigraph with loops, duplicates, isolated nodes and hubs.

    Hubs need pieces of pieces, both as destinations and as sources: in the simulator pieces are
    small. What is summed over all nodes goes round several times.
    """
    from rtxarr import geom
    from rtxarr.geom import _bins
    from rtxarr.kernels import edge_attention, edges

    hubs, n_nodes, n_edges = [9, 4, 5], 8, 6
    if place.kind == "cpu":
        monkeypatch.setattr(_bins, "_EDGES", 4)
        monkeypatch.setattr(_bins, "_PARTS", 2)
        monkeypatch.setattr(edge_attention, "_PARTS", 3)
        monkeypatch.setattr(edges, "_PARTS", 3)
    else:
        hubs, n_nodes, n_edges = [512, 513, 40_000, 1], 1000, 5000
    rng = np.random.default_rng(0)
    dst = np.concatenate([np.full(n, i) for i, n in enumerate(hubs)])
    dst = np.concatenate([dst, (n_nodes - 1) * rng.random(n_edges) ** 2]).astype(np.int64)
    src = ((n_nodes - 2) * rng.random(dst.size) ** 4).astype(np.int64)
    src[-3:], dst[-3:] = (1, 1, 2), (2, 2, 2)
    order = rng.permutation(dst.size)
    return geom.Graph.from_edges(src[order], dst[order], n_nodes=n_nodes)


@pytest.fixture(params=["numpy", "njit"])
def host_path(request, monkeypatch):
    """Make every CPU draw go through NumPy, or through numba's compiled code."""
    from rtxarr.kernels import philox

    monkeypatch.setattr(philox, "_COMPILED_FROM", 2**62 if request.param == "numpy" else -1)
    return request.param


@pytest.fixture
def poisoned_results(monkeypatch):
    """Let results of elementwise kernels hold 77 where nothing is written."""
    from rtxarr.kernels import elementwise

    make = elementwise._empty_like

    def poisoned(x, dtype):
        out = make(x, dtype)
        out[...] = 77
        return out

    monkeypatch.setattr(elementwise, "_empty_like", poisoned)
