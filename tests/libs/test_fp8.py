"""Products of 8-bit matrices: against float64, first with a stand-in on the host, then on a GPU."""

import itertools
import math

import numpy as np
import pytest

from rtxarr.libs import blas

from .products import FP8_STACKS, fp8_case, fp8_stack_case, fp8_sweep


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e5m2")])
def test_fp8(fake, formats, by_row):
    rng = np.random.default_rng(2)
    fp8_case(rng, np.asarray, (5, 6, 7), formats, by_row, "float32", True)
    for array, contiguous in itertools.product((np.asarray, fake.array), (True, False)):
        fp8_case(rng, array, (33, 32, 48), formats, by_row, "bfloat16", True, contiguous)
        fp8_case(rng, array, (16, 16, 64), formats, by_row, "float32", False, contiguous)
    # Two of e5m2 are multiplied in float32.
    kinds = {layouts[0][-4] for _, *layouts in fake.calls}
    assert len(fake.calls) == 4
    assert kinds == ({0} if formats == ("e5m2", "e5m2") else kinds - {0})


@pytest.mark.parametrize("epilogue", ["relu", "gelu"])
def test_fp8_with_epilogues(fake, epilogue):
    rng, kinds = np.random.default_rng(3), ("e4m3", "e4m3")
    for array, biased in itertools.product((np.asarray, fake.array), (True, False)):
        fp8_case(rng, array, (33, 32, 48), kinds, False, "bfloat16", biased, epilogue=epilogue)
    assert len(fake.calls) == 2


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("stacks", FP8_STACKS, ids=str)
def test_fp8_stacks(fake, stacks, by_row):
    rng = np.random.default_rng(len(fake.calls))
    fp8_stack_case(rng, np.asarray, stacks, by_row, "float32", (5, 6, 7))
    assert fake.calls == []
    n_pairs = math.prod(np.broadcast_shapes(*stacks))
    one = not by_row or math.prod(stacks[1]) == 1
    for dtype, epilogue in itertools.product(("bfloat16", "float32"), (None, "gelu")):
        before = len(fake.calls)
        fp8_stack_case(rng, fake.array, stacks, by_row, dtype, epilogue=epilogue)
        made = fake.calls[before:]
        if one:
            assert made  # as many as the layout of stacks takes
        elif n_pairs <= 32:
            assert len(made) == n_pairs
        kinds = {layouts[0][-4] for _, *layouts in made}
        assert kinds == ({28} if one or n_pairs <= 32 else {0})
    refused = {} if one or n_pairs <= 32 else {"more than 32 fp8 products with a scale a row": 4}
    assert blas.status().refused == refused


@pytest.mark.parametrize("n_pairs", [6, 40])
def test_fp8_stacks_that_the_library_refuses(fake, monkeypatch, n_pairs):
    """One after the other, and in float32 where they are too many."""
    run = blas.CublasLt.run

    def refuse(library, a, b, *rest, **options):
        if a.ndim > 2 and a.dtype == np.uint8:
            raise blas.Unsupported("no stacks of 8-bit numbers")
        return run(library, a, b, *rest, **options)

    monkeypatch.setattr(blas.CublasLt, "run", refuse)
    fp8_stack_case(np.random.default_rng(0), fake.array, ((n_pairs,),) * 2, False, "bfloat16")
    assert [x[1][-4] for x in fake.calls] == ([28] * 6 if n_pairs == 6 else [0])
    assert blas.status().refused == ({} if n_pairs == 6 else {"no stacks of 8-bit numbers": 1})


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 0, 16, 16), (2, 16, 0, 16), (2, 16, 16, 0)])
def test_fp8_stacks_without_elements(fake, shape):
    stack, m, n, k = shape
    for array, by_row in itertools.product((np.asarray, fake.array), (False, True)):
        for stacks in (((stack,), (stack,)), ((stack,), ())):
            rng = np.random.default_rng(0)
            fp8_stack_case(rng, array, stacks, by_row, "bfloat16", (m, n, k))


def test_random_fp8(fake):
    """The library is told of formats, scales and accumulation as they were asked for."""
    served = 0
    for asked in fp8_sweep(fake.array, 150):
        made = [x for x in fake.calls if x[1][-4]]  # not in float32
        fake.calls.clear()
        if (asked["n"] % 16, asked["k"] % 16) == (0, 0):
            served += 1
            ((desc, *layouts),) = made
            kinds = [layout[-4] for layout in layouts[:2]]
            assert kinds == [{"e4m3": 28, "e5m2": 29}[name] for name in asked["formats"][::-1]]
            assert desc[25] == asked["fast"]
            assert (desc.get(31), desc.get(32)) == ((3, 3) if asked["by_row"] else (None, None))
        else:
            assert not made
    assert served > 90
    for _ in fp8_sweep(np.asarray, 40):
        pass


def test_fp8_takes_what_the_library_does_not(fake):
    fp8_case(np.random.default_rng(2), fake.array, (8, 9, 20), ("e4m3",) * 2, True, "float16", True)
    assert [layouts[0][-4] for _, *layouts in fake.calls] == [0]  # in float32
    assert "fp8 lengths that are not multiples of 16" in blas.status().refused


@pytest.mark.gpu
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
def test_gpu_fp8(poisoned, formats, by_row):
    rng = np.random.default_rng(2)
    on_hopper = poisoned.cuda.Device().compute_capability == "90"
    before = blas.status().refused.copy()
    for shape in ((16, 16, 16), (33, 32, 48), (128, 256, 512), (8, 9, 20)):
        for dtype, biased in (("bfloat16", True), ("bfloat16", False), ("float32", False)):
            asked = blas.status().refused.copy()
            fp8_case(rng, poisoned.asarray, shape, formats, by_row, dtype, biased)
            if by_row and dtype == "bfloat16" and shape[1] % 16 == 0 and on_hopper:
                assert not blas.status().refused - asked, shape
        for epilogue in ("relu", "gelu"):
            options = {"epilogue": epilogue, "fast": shape[0] == 128}
            fp8_case(rng, poisoned.asarray, shape, formats, by_row, "bfloat16", True, **options)
    case = (64, 32, 48), formats, by_row, "float16", False
    fp8_case(rng, poisoned.asarray, *case, contiguous=False)
    for stacks in FP8_STACKS:
        fp8_stack_case(rng, poisoned.asarray, stacks, by_row, "bfloat16", (64, 96, 128))
        fp8_stack_case(rng, poisoned.asarray, stacks, by_row, "float32", (16, 32, 48))
    if not by_row:  # with a scale a row, other results and epilogues may be refused
        reasons = set(blas.status().refused - before)
        assert reasons <= {"fp8 lengths that are not multiples of 16"}


@pytest.mark.gpu
def test_gpu_random_fp8(poisoned):
    on_hopper = poisoned.cuda.Device().compute_capability == "90"
    before = blas.status().refused.copy()
    for asked in fp8_sweep(poisoned.asarray, 250, seed=1):
        refused = blas.status().refused - before
        before = blas.status().refused.copy()
        whole = (asked["n"] % 16, asked["k"] % 16) == (0, 0)
        if on_hopper and whole and asked["dtype"] == "bfloat16" and not asked["by_row"]:
            assert not refused, asked
