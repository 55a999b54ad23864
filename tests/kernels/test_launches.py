"""Kernels over graphs ask for blocks and grids that a GPU has, whatever the sizes are."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda")  # which the plans take their widths from

from rtxarr._device import launch_shape  # noqa: E402
from rtxarr.geom import _bins  # noqa: E402
from rtxarr.kernels import _heads, gather, segment  # noqa: E402
from rtxarr.kernels._plan import plan_rows  # noqa: E402

DTYPES = ["float32", "float64", "float16", ml_dtypes.bfloat16]
SIZES = [1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 33, 64, 100, 128, 150, 256, 1000, 1024, 4096]
COUNTS = [1, 2, 63, 64, 65, 1000, 3_000_000]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Deal out as for a GPU, in the simulator too."""
    monkeypatch.setattr(_heads, "_SIMULATING", False)
    monkeypatch.setattr("rtxarr.kernels._plan._SIMULATING", False)
    monkeypatch.setattr("rtxarr.kernels._gather_cuda.THREADS", 256)
    monkeypatch.setattr(gather, "_LANES", 128)
    _heads.plan_heads.cache_clear()
    yield
    _heads.plan_heads.cache_clear()


def check(grid, block):
    """Check the limits of all GPUs, here and where launches do."""
    grid = grid if isinstance(grid, tuple) else (grid,)
    assert min(grid) >= 1 and grid[0] < 2**31 and max(grid[1:], default=1) <= 65535, grid
    assert min(block) >= 1 and math.prod(block) <= 1024 and max(block) <= 1024, block
    assert max(block[2:], default=1) <= 64, block
    assert launch_shape(grid, block) == (grid, block)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_heads(dtype):
    n_dealt = 0
    for n_heads, n_features, wide in itertools.product(SIZES, SIZES, (False, True)):
        if wide and n_features * np.dtype(dtype).itemsize % 16:
            continue
        plan = _heads.plan_heads(np.dtype(dtype), n_heads, n_features, wide=wide)
        if plan is None:  # the kernels refuse them
            assert n_features > 100
            continue
        n_dealt += 1
        assert plan.lanes * plan.kept >= n_features
        for n_items in COUNTS:
            grid = plan.grid(n_items)
            assert grid[0] * plan.items >= n_items and grid[1] * plan.heads >= n_heads
            check(grid, plan.block)
    assert n_dealt > 200


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32])
def test_threads_that_share_edges(lanes):
    for n_heads, n_items in itertools.product(SIZES, COUNTS):
        plan = _heads.share_edges(n_heads, lanes)
        check(plan.grid(n_items), plan.block)


def test_gathered_rows():
    for n_features, width, n_items in itertools.product(SIZES, (1, 2, 4, 8), COUNTS):
        block = gather._block(n_features, width)
        check(-(-n_items // block[1]), block)
        block = segment.row_block(n_features, width)
        check(-(-n_items // block[1]), block)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_rows(dtype):
    for n, wide, n_rows in itertools.product([*SIZES, 100_000], (False, True), COUNTS):
        plan = plan_rows(n, np.dtype(dtype), wide=wide, loose=not wide)
        check(plan.blocks(n_rows), plan.block)


def test_levels_have_an_item_for_each_row():
    """So that grids are empty for graphs without rows alone, which start nothing."""
    for degrees in ([0], [1], [0, 600, 3], [40_000], [512, 513]):
        levels = _bins.deal_out(np.concatenate([[0], np.cumsum(degrees)]))
        for level in levels:
            assert level.rows.shape[0] >= max(1, level.n_pieces)
        assert levels[-1].n_pieces == 0
