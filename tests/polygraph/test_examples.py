"""The programs of several domains that the documentation shows."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom
from rtxarr.testing import assert_close

FOLDER = Path(__file__).parents[2] / "docs" / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def kinds_of(fused):
    (programs,) = fused._programs.values()
    return [step.loops.kind if step.loops else step.name for step in programs[0].program.steps]


def test_fourier_operator(rng):
    example = load("fourier_operator")
    parts, x = example.parameters(8, 4), rng.standard_normal((2, 16, 32, 8), dtype=np.float32)
    fused = rx.fuse(example.block)
    assert_close(fused(parts, x), example.block(parts, x), exact=True)
    assert not fused.reasons
    assert kinds_of(fused).count("map") == 3  # between the transforms, and after them


def test_spectral_graph(rng):
    example = load("spectral_graph")
    graph = geom.Graph.from_edges(*rng.integers(0, 40, (2, 300)), n_nodes=40)
    parts, x = example.parameters(16), rng.standard_normal((40, 16), dtype=np.float32)
    fused = rx.fuse(example.layer)
    assert_close(fused(parts, graph, x), example.layer(parts, graph, x))
    assert not fused.reasons


def test_diffusion_block(rng):
    example = load("diffusion_block")
    x, target = rng.standard_normal((2, 2, 8, 32), dtype=np.float32)
    condition = rng.standard_normal((2, 32), dtype=np.float32)
    losses = []
    for wrap in (lambda step: step, rx.jit):
        rx.random.seed(0)
        step = wrap(example.training_step(example.Block(32, 4), learning_rate=1e-2))
        losses.append([step(x, condition, target).item() for _ in range(4)])
    assert losses[0][0] > losses[0][-1]
    assert_close(np.array(losses[1]), np.array(losses[0]))
