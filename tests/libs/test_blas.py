"""Products through cuBLASLt: against float64, first with a stand-in on the host, then on a GPU."""

import re
import sys
import threading
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, libs
from rtxarr.libs import _cublaslt, blas
from rtxarr.ops import _linalg
from rtxarr.testing import assert_close

from .products import (
    EPILOGUES,
    FLOATS,
    LAYERS,
    check,
    gradient_sweep,
    host,
    layer_case,
    layer_sweep,
    poison,
    relu_case,
    sweep,
)

# --------------------------------------------------------- plain code, and the stand-in's host


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_plain_products(dtype, epilogue):
    sweep(np.asarray, dtype, epilogue, 60)


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_descriptors_say_what_was_asked(fake, dtype, epilogue):
    sweep(fake.array, dtype, epilogue, 150)
    assert len(fake.calls) > 100
    assert set(blas.status().refused) <= {"stacks that no single step describes"}


@pytest.mark.parametrize("epilogue", ["relu", "gelu"])
@pytest.mark.parametrize("shape", LAYERS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_layers(dtype, shape, epilogue):
    layer_case(np.random.default_rng(1), np.asarray, dtype, shape, epilogue)


@pytest.mark.parametrize("epilogue", ["relu", "gelu"])
@pytest.mark.parametrize("shape", LAYERS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_layers_of_the_stand_in(fake, dtype, shape, epilogue):
    layer_case(np.random.default_rng(1), fake.array, dtype, shape, epilogue)
    assert len(fake.calls) >= 3


@pytest.mark.parametrize("epilogue", ["relu", "gelu"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_random_layers(fake, dtype, epilogue):
    layer_sweep(np.asarray, dtype, epilogue, 15)
    layer_sweep(fake.array, dtype, epilogue, 30)
    assert len(fake.calls) > 100


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_of_plain_products(dtype):
    gradient_sweep(np.asarray, dtype, 60)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_relu_of_nan_and_zero(fake, dtype):
    relu_case(np.asarray, dtype)
    relu_case(fake.array, dtype)
    assert len(fake.calls) == 3


def test_wide_results_of_half_precision(fake):
    a = np.full((2, 5), 1.001, ml_dtypes.bfloat16)
    for array in (np.asarray, fake.array):
        out = blas.matmul(array(a), array(a.T), dtype="float32")
        assert out.dtype == np.float32
        assert_close(np.asarray(out), np.full((2, 2), 5, np.float32))
    assert len(fake.calls) == 1


@pytest.mark.parametrize("options", [{}, {"epilogue": "relu"}, {"scale": 0.5}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parts", [(), ("bias",), ("addend",), ("bias", "addend")], ids=str)
def test_products_into_given_memory(fake, dtype, parts, options):
    rng = np.random.default_rng(0)
    shapes = {"a": (6, 8), "b": (8, 16), "bias": (16,), "addend": (6, 16)}
    a, b, *more = (rng.standard_normal(shapes[n]).astype(dtype) for n in ("a", "b", *parts))
    want = blas.matmul(a, b, **dict(zip(parts, more, strict=True)), **options)
    a, b, *more = map(fake.array, (a, b, *more))
    out = poison(fake.array, (6, 16), dtype)
    given = dict(zip(parts, more, strict=True))
    assert blas.matmul_into(a, b, out, **given, **options) is out
    check(out, np.asarray(want, np.float64), 8)
    assert len(fake.calls) == 1


def test_products_into_given_memory_of_the_host():
    a, b = np.random.default_rng(0).standard_normal((2, 16, 16), dtype=np.float32)
    out = np.full((16, 16), np.nan, np.float32)
    assert blas.matmul_into(a, b, out) is out
    assert_close(out, a @ b, exact=True)
    # Rounded once only by way of another array, or with more than a product.
    halves = (x.astype(np.float16) for x in (a, b, out))
    assert blas.matmul_into(*halves) is None
    assert blas.matmul_into(a, b, out, bias=a[0]) is None


def test_layers_into_given_memory(fake):
    rng = np.random.default_rng(0)
    a, b = (fake.array(rng.standard_normal(s).astype("float32")) for s in ((6, 8), (8, 16)))
    out = poison(fake.array, (6, 16), "float32")
    found, aux = blas.matmul_with_aux(a, b, epilogue="gelu", out=out)
    assert found is out
    wanted = blas.matmul_with_aux(a, b, epilogue="gelu")
    for got, want in zip((out, aux), wanted, strict=True):
        assert_close(np.asarray(got), np.asarray(want), exact=True)


# --------------------------------------------------------------------------------------- plans


def test_a_plan_serves_all_that_lie_alike(fake):
    a, b = (fake.array(np.ones((8, 8), np.float32)) for _ in range(2))
    blas.matmul(a, b)
    plan = next(iter(blas._loaded[0]._plans.values()))
    for _ in range(3):
        blas.matmul(b.copy(), a.copy())
    assert fake.asked <= 3  # host memory may be aligned differently
    assert next(iter(blas._loaded[0]._plans.values())) is plan


def test_plan_keys_tell_problems_apart(fake):
    def ask(a, b, **options):
        before = fake.asked
        blas.matmul(a, b, **options)
        return fake.asked - before

    def aligned(shape, dtype=np.float32, offset=0):
        # Host memory lies anywhere; here an element away from a multiple of 4096 bytes.
        size = np.dtype(dtype).itemsize
        bytes_ = fake.cupy.ndarray(8192 + 4096, np.uint8)
        start = -bytes_.data.ptr % 4096 + offset * size
        n = int(np.prod(shape)) * size
        found = bytes_[start : start + n].view(dtype).reshape(shape)
        found[...] = 1
        return found

    a, b = aligned((8, 8)), aligned((8, 8))
    assert ask(a, b) == 1
    assert ask(aligned((8, 8)), aligned((8, 8))) == 0
    assert ask(a, b.T) == 1
    assert ask(a, b, tf32=True) == 1
    assert ask(a, b, epilogue="relu") == 1
    assert ask(a, b, bias=aligned((8,))) == 1
    assert ask(a, b, out=aligned((8, 8))) == 1
    assert ask(a, aligned((8, 8), offset=1)) == 1
    assert fake.preference[5] == fake.preference[8] == 4
    assert ask(aligned((4, 8)), b) == 1
    assert ask(aligned((8, 8), np.float16), aligned((8, 8), np.float16)) == 1
    assert fake.preference[5] == 256
    assert ask(a, b) == 0


def test_strict_float32_unless_asked(fake, settings):
    a = fake.array(np.ones((4, 4), np.float32))

    def compute(**options):
        blas.matmul(a, a, **options)
        return fake.calls[-1][0][-2]

    assert compute() == 68
    assert compute(tf32=True) == 77
    blas.allow_tf32(True)
    assert compute() == 77
    assert compute(tf32=False) == 68
    blas.matmul(a.astype(np.float64), a.astype(np.float64))
    assert fake.calls[-1][0][-2] == 70


@pytest.mark.parametrize(
    ("version", "splits", "k", "split"),
    [
        (130000, (2, 1), 9, 1),
        (130000, (2, 1), 8, 2),
        (130800, (2, 1), 9, 2),
        (130000, (4, 3), 9, 3),
    ],
)
def test_splits_that_lose_part_of_a_sum_are_passed_over(fake, version, splits, k, split):
    fake.version, fake.splits = version, splits
    a = fake.array(np.ones((k, k), np.float32))
    blas.matmul(a, a)
    plan = next(iter(blas._loaded[0]._plans.values()))
    chosen = (plan.algo - plan.results.ctypes.data) // 96
    assert plan.results["algo"][chosen, 1] == split
    assert len(fake.calls) == 1


def test_sums_that_every_algorithm_may_lose_part_of_are_not_split(fake):
    fake.splits = (4, 2, 1)
    fake.most = 2  # of the algorithms named at once
    a = fake.array(np.ones((9, 9), np.float32))
    assert blas.try_matmul(a, a) is None
    assert dict(blas.status().refused) == {"only algorithms that may lose part of a sum": 1}
    stack = fake.array(np.ones((2, 9, 9), np.float32))
    for left in (a, a[0], stack):
        got = blas.matmul(left, a)
        assert_close(np.asarray(got), np.full(got.shape, 9, np.float32))
    assert len(fake.calls) == 3
    assert sum(blas.status().refused.values()) == 1


def test_sums_that_can_only_be_split_go_elsewhere(fake):
    fake.splits = (4, 2)
    a = fake.array(np.ones((9, 9), np.float32))
    assert_close(np.asarray(blas.matmul(a, a)), np.full((9, 9), 9, np.float32))
    assert fake.calls == []
    (reason,) = blas.status().refused
    assert reason.startswith("no algorithm for float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(("k", "splits"), [(1030, (4, 3)), (1029, (4, 5)), (20_013, (5, 4))])
def test_such_sums_are_cut_into_pieces_if_they_are_long(fake, dtype, k, splits):
    fake.splits = splits
    rng = np.random.default_rng(k)
    a, b = (rng.integers(-1, 2, shape).astype(getattr(rx, dtype)) for shape in ((5, k), (k, 7)))
    bias = rng.integers(-3, 3, 7).astype(a.dtype)
    want = a.astype(np.float64) @ b.astype(np.float64) + bias
    want = want.astype(np.float32).astype(a.dtype)
    for left in (fake.array(a), fake.array(np.asfortranarray(a))):
        got = blas.try_matmul(left, fake.array(b), bias=fake.array(bias))
        assert got.dtype == a.dtype
        assert_close(np.asarray(got), want, exact=True)
    assert not blas.status().refused


@pytest.mark.parametrize(
    ("dtypes", "want"),
    [
        (("float32", "float64"), "float64"),
        (("bfloat16", "float32"), "float32"),
        (("float16", "bfloat16"), "float32"),
        (("int64", "bfloat16"), "bfloat16"),
        (("float16", "int8"), "float16"),
        (("bool", "float32"), "float32"),
    ],
)
def test_operands_of_two_dtypes_are_made_alike(fake, dtypes, want, monkeypatch):
    monkeypatch.setattr(_linalg, "_matmul", None)  # CuPy's
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 9, (4, 4)).astype(getattr(rx, name)) for name in dtypes)
    got = _linalg._matmul_on_device(fake.array(a), fake.array(b))
    assert got.dtype == getattr(rx, want)
    assert_close(host(got), a.astype(np.float64) @ b.astype(np.float64), exact=True)
    assert len(fake.calls) == 1


def test_plans_are_forgotten_in_order(fake, monkeypatch):
    monkeypatch.setattr(_cublaslt, "_MAX_PLANS", 3)
    for n in range(1, 8):
        blas.matmul(*[fake.array(np.ones((n, n), np.float32))] * 2)
    assert [key[4][0] for key in blas._loaded[0]._plans] == [5, 6, 7]


def test_streams_do_not_share_a_workspace(fake):
    library = blas._library()
    first = library.workspace(0, 11)
    assert library.workspace(0, 11) == first
    places = first, library.workspace(0, 12), library.workspace(1, 11)
    assert len({address for address, _ in places}) == 3
    own = fake.cupy.ndarray(blas.WORKSPACE_BYTES, np.uint8)
    with blas.use_workspace(own):
        assert library.workspace(0, 11)[0] == own.data.ptr
        found = []
        thread = threading.Thread(target=lambda: found.append(library.workspace(0, 11)))
        thread.start()
        thread.join()
        assert found == [first]
    assert library.workspace(0, 11) == first
    with pytest.raises(ValueError, match="buffer must hold 33554432 bytes, got 8"):
        blas.use_workspace(own[:8]).__enter__()


def test_threads_take_turns_with_the_workspace_of_a_stream(fake, monkeypatch):
    library = blas._library()
    pool = fake.cupy.get_default_memory_pool()

    def malloc(size):
        time.sleep(0.01)  # so that the others ask for it, too
        return pool.malloc(size)

    slow = types.SimpleNamespace(malloc=malloc)
    monkeypatch.setattr(fake.cupy, "get_default_memory_pool", lambda: slow)
    busy = threading.Lock()
    matmul = library._matmul

    def alone(*args):
        assert busy.acquire(blocking=False)
        time.sleep(0.001)
        matmul(*args)
        busy.release()

    monkeypatch.setattr(library, "_matmul", alone)
    a = fake.array(np.eye(4, dtype=np.float32))
    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(lambda i: blas.matmul(a, i * a), range(12)):
            assert got.shape == (4, 4)
    assert len(fake.cupy.buffers) == 1


def test_autotuning_keeps_the_fastest(fake, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path))
    blas.autotune(True)
    fake.cupy.times = iter([2.0, 1.0])
    fake.splits = (3, 1)
    a = fake.array(np.ones((9, 9), np.float32))
    assert_close(np.asarray(blas.matmul(a, a)), np.full((9, 9), 9, np.float32))
    assert len(list(tmp_path.iterdir())) == 1
    tuned = next(iter(blas._loaded[0]._plans.values()))
    assert tuned.algo == tuned.results.ctypes.data + 96
    blas._loaded[0]._plans.clear()
    # The stand-in for the timer has no more times: this comes from disk.
    assert_close(np.asarray(blas.matmul(a, a)), np.full((9, 9), 9, np.float32))
    found = next(iter(blas._loaded[0]._plans.values())).results
    assert found["algo"][0, 1] == 1


# ----------------------------------------------------------------------------------- fallbacks


def test_a_missing_library_warns_once(clean, capsys):
    a = np.ones((2, 3), np.float32).view(clean.ndarray)
    want = re.escape(
        "matrix products run through CuPy: nvmath-python is not installed; "
        "pip install --upgrade 'nvmath-python[cu13]'"
    )
    with pytest.warns(RuntimeWarning, match=want):
        out = blas.matmul(a, a.T)
    assert_close(np.asarray(out), np.full((2, 2), 3, np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert blas.try_matmul(a, a.T) is None
        blas.matmul_with_aux(a, a.T, epilogue="relu")
        blas.matmul_bias_grad(a, a.T)
        blas.prepare()
        with blas.use_workspace(types.SimpleNamespace(nbytes=blas.WORKSPACE_BYTES)):
            pass
    libs.show()
    assert re.match(r"matrix products: CuPy \(nvmath-python is not", capsys.readouterr().out)


def test_an_old_library_is_not_used(fake):
    fake.version = 110900
    a = fake.array(np.ones((2, 2), np.float32))
    with pytest.warns(RuntimeWarning, match=r"cuBLASLt 11.9.0 is older than 12.0.*pip install"):
        assert blas.try_matmul(a, a) is None


def test_bindings_that_do_not_import(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvmath.bindings", None)
    a = fake.array(np.ones((2, 2), np.float32))
    with pytest.warns(RuntimeWarning, match="nvmath-python"):
        assert blas.try_matmul(a, a) is None


def test_show_counts_what_went_elsewhere(fake, capsys):
    def refuse(*args):
        raise fake.cuBLASLtError("not supported")

    a = fake.array(np.ones((2, 2), np.int32))
    for _ in range(2):
        assert_close(np.asarray(blas.matmul(a, a)), np.full((2, 2), 2, np.int32))
    fake.matmul_algo_get_heuristic = refuse
    b = fake.array(np.ones((2, 2), np.float32))
    assert_close(np.asarray(blas.matmul(b, b)), np.full((2, 2), 2, np.float32))
    blas.matmul(b[:0], b)  # nothing to do, so nothing to count
    libs.show()
    assert capsys.readouterr().out.splitlines()[:3] == [
        "matrix products: cuBLASLt 13.0.0, through nvmath-python 1.0.0",
        "    2 by CuPy: dtypes int32 and int32",
        "    1 by CuPy: no algorithm for float32 with epilogue 1 (not supported)",
    ]


def test_show_without_a_gpu(clean, capsys, monkeypatch):
    monkeypatch.setattr(_device, "devices", lambda: ["cpu"])
    libs.show()
    assert capsys.readouterr().out.splitlines() == [
        "matrix products: NumPy (no GPU that CuPy can use)",
        "fused products: NumPy (no GPU that CuPy can use)",
        "attention and convolutions: NumPy (no GPU that CuPy can use)",
        "attention that cuDNN leaves: NumPy (no GPU that CuPy can use)",
        "Fourier transforms: NumPy (no GPU that CuPy can use)",
    ]


def test_refusals_when_started(fake, monkeypatch):
    a = fake.array(np.ones((2, 2), np.float32))
    library = blas._library()

    def fail(*args):
        raise fake.cuBLASLtError("not now")

    monkeypatch.setattr(library, "_matmul", fail)
    assert_close(np.asarray(blas.matmul(a, a)), np.full((2, 2), 2, np.float32))
    assert dict(blas.status().refused) == {"refused when started: not now": 1}
    monkeypatch.setattr(fake.cuBLASLtError, "status", 13)
    with pytest.raises(RuntimeError, match="cuBLASLt failed: not now"):
        blas.matmul(a.T, a)


def test_arrays_of_another_device(fake):
    a = fake.array(np.ones((2, 2), np.float32))
    a.device_id = 1
    assert blas.try_matmul(a, a) is None
    assert list(blas.status().refused) == ["an array that is not on the current device"]


def test_results_that_overlap_operands(fake):
    a = fake.array(np.arange(4, dtype=np.float32).reshape(2, 2))
    want = np.asarray(a @ a)
    assert blas.matmul(a, a, out=a) is a
    assert_close(np.asarray(a), want)
    assert fake.calls == []


@pytest.mark.parametrize("fake_arrays", [False, True])
def test_bad_arguments(fake, fake_arrays):
    array = fake.array if fake_arrays else np.asarray
    a = array(np.ones((2, 3), np.float32))
    b = array(np.ones((3, 4), np.float32))
    with pytest.raises(ValueError, match="epilogue must be 'relu', 'gelu' or None, got 'silu'"):
        blas.matmul(a, b, epilogue="silu")
    with pytest.raises(ValueError, match="epilogue must be 'relu' or 'gelu', got None"):
        blas.matmul_with_aux(a, b, epilogue=None)
    with pytest.raises(ValueError, match=r"operands must have shapes \(m, k\) and \(k, n\)"):
        blas.matmul_bias_grad(a, a)
    for out in (np.ones((4, 2), np.float32), np.ones((2, 4), np.float64)):
        with pytest.raises(ValueError, match=r"out must be float32 of shape \(2, 4\), got"):
            blas.matmul(a, b, out=array(out))
    with pytest.raises(ValueError, match=r"aux must be uint8 of shape \(2, 16\), got float32"):
        blas.matmul_drelu(a, b, b)
    with pytest.raises(ValueError, match=r"aux must be float32 of shape \(2, 4\), got float32"):
        blas.matmul_dgelu(a, b, b)
    with pytest.raises(TypeError, match="a and b must be arrays of uint8, got float32 and float32"):
        blas.matmul_fp8(a, b)
    a8, b8 = (array(np.ones(s, np.uint8)) for s in ((2, 3), (3, 4)))
    with pytest.raises(
        ValueError, match=r"scale_a must be float32 of shape \(\), \(1,\) or \(2, 1\)"
    ):
        blas.matmul_fp8(a8, b8, scale_a=a)
    b8 = array(np.ones((5, 3, 4), np.uint8))
    with pytest.raises(
        ValueError, match=r"scale_b must be .* \(\), \(1,\), \(1, 4\) or \(5, 1, 4\), got"
    ):
        blas.matmul_fp8(a8, b8, scale_b=a)
    for wrong in (array(np.ones((4, 2, 3), np.uint8)), a8[0], a8.T):
        with pytest.raises(ValueError, match=r"shapes \(\.\.\., m, k\) and \(\.\.\., k, n\), got"):
            blas.matmul_fp8(wrong, b8)
    b8 = b8[0]
    for formats in (("e4m3", "e3m4"), ("e4m3",), "e4m3", None):
        with pytest.raises(ValueError, match="formats must be two of"):
            blas.matmul_fp8(a8, b8, formats=formats)
    with pytest.raises(TypeError, match="a and b must be arrays of uint8, got list and uint8"):
        blas.matmul_fp8([[1]], b8)
    with pytest.raises(ValueError, match="scale_a must be float32 of shape .*, got float of None"):
        blas.matmul_fp8(a8, b8, scale_a=0.5)
    with pytest.raises(ValueError, match="dtype must be a floating dtype, got int32"):
        blas.matmul_fp8(a8, b8, dtype="int32")
    with pytest.raises(ValueError, match=r"bias must have shape \(4,\), got \(3,\)"):
        blas.matmul_fp8(a8, b8, bias=array(np.ones(3, np.float32)))


def test_a_bias_of_the_wrong_shape(fake):
    a = fake.array(np.ones((2, 2), np.float32))
    with pytest.raises(ValueError, match=r"bias must have shape \(2,\), got \(3,\)"):
        blas.matmul(a, a, bias=fake.array(np.ones(3, np.float32)))


# ---------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def cupy(poisoned):
    return poisoned


# What may leave a product to CuPy though cuBLASLt has one like it.
ALLOWED = {
    "stacks that no single step describes",
    "only algorithms that may lose part of a sum",
}


@pytest.fixture
def served(cupy):
    """Fail when a product that cuBLASLt should take went to CuPy."""
    before = blas.status().refused.copy()
    yield cupy
    assert set(blas.status().refused - before) <= ALLOWED


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_gpu_products(cupy, dtype, epilogue):
    before = blas.status().refused.copy()
    sweep(cupy.asarray, dtype, epilogue, 150, seed=5)
    reasons = blas.status().refused - before
    if dtype != "float64":  # it may have no epilogues
        assert set(reasons) <= ALLOWED


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", ["relu", "gelu"])
@pytest.mark.parametrize("shape", [*LAYERS, (512, 1024, 256)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gpu_layers(cupy, dtype, shape, epilogue):
    before = blas.status().refused.copy()
    layer_case(np.random.default_rng(1), cupy.asarray, dtype, shape, epilogue)
    if not any(n % 8 for n in shape):
        assert blas.status().refused == before


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", ["relu", "gelu"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gpu_random_layers(cupy, dtype, epilogue):
    layer_sweep(cupy.asarray, dtype, epilogue, 40, seed=6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_gpu_gradients_of_products(served, dtype):
    gradient_sweep(served.asarray, dtype, 100, seed=7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1024, 768, 4096), (4096, 8, 4096), (8, 4096, 8192 + 8)])
def test_gpu_larger_products(served, dtype, shape):
    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = (
        rng.standard_normal(s).astype(np.float32).astype(getattr(rx, dtype))
        for s in ((m, k), (k, n))
    )
    got = blas.matmul(served.asarray(a), served.asarray(b))
    a, b = (x.astype(np.float32) for x in (a, b))
    want = served.asarray(a, dtype="float64") @ served.asarray(b, dtype="float64")
    # Errors of sums are far smaller than the sum of the absolute values.
    check(got, served.asnumpy(want), np.full((m, n), 4 * np.sqrt(k)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("k", [8200, 20011, 65537])
def test_gpu_sums_over_many_rows_are_whole(served, dtype, k):
    """As of a weight's gradient; integers that all these dtypes hold, so that none may be lost.

    Whoever serves: cuBLASLt may have only algorithms that are not trusted with such sums.
    """
    rng = np.random.default_rng(0)
    a, b = np.zeros((k, 64)), rng.choice([-1.0, 1.0], (k, 48))
    rows = [*range(k - 100, k), *rng.choice(k - 100, 100, replace=False)]
    a[rows] = rng.choice([-1.0, 1.0], (200, 64))
    got = [
        blas.matmul(x.T, y)
        for x, y in (
            [served.asarray(v.astype(getattr(rx, dtype))) for v in (a, b)],
            [served.asarray(v.T.astype(getattr(rx, dtype), order="C")).T for v in (a, b)],
        )
    ]
    for product in got:
        np.testing.assert_array_equal(host(product), a.T @ b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gpu_relu_of_nan_and_zero(served, dtype):
    relu_case(served.asarray, dtype)


@pytest.mark.gpu
def test_gpu_float32_is_strict(served, settings):
    rng = np.random.default_rng(0)
    a = rng.standard_normal((512, 512)).astype(np.float32)
    want = a.astype(np.float64) @ a
    x = served.asarray(a)

    def error(**options):
        return np.abs(host(blas.matmul(x, x, **options)) - want).max()

    strict = error()
    assert strict < 2e-4 < error(tf32=True) < 0.2
    blas.allow_tf32(True)
    assert error() > strict
    assert error(tf32=False) == strict


@pytest.mark.gpu
def test_gpu_many_small_matrices(cupy):
    # More than some kernels take at a time: whoever computes it, the values must be right.
    a = cupy.arange(70000 * 16, dtype="float32").reshape(70000, 4, 4) % 7
    assert_close(blas.matmul(a, a), cupy.asnumpy(a) @ cupy.asnumpy(a), exact=True)


@pytest.mark.gpu
def test_gpu_more_elements_than_an_int32_counts(served):
    a = served.zeros((70000, 40000), dtype=rx.bfloat16)
    ones = served.asarray(np.ones((40000, 8), rx.bfloat16))
    a[-1], a[0] = ones[:, 0], served.asarray(np.full(40000, 2, rx.bfloat16))
    got = host(blas.matmul(a, ones))
    assert np.all(got[-1] == float(rx.bfloat16(40000))) and np.all(got[0] == 2 * got[-1])
    assert not got[1:-1].any()
    # Rows further apart than 2 GiB.
    thin = served.zeros((3, 2**31 // 2), dtype=rx.bfloat16)[:, :64]
    thin[...] = ones[:3, :1]
    assert np.all(host(blas.matmul(thin, thin.T)) == 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gpu_results_repeat_to_the_bit(served, dtype):
    rng = np.random.default_rng(0)
    x, w, bias = (
        served.asarray(rng.standard_normal(s).astype(np.float32).astype(getattr(rx, dtype)))
        for s in ((96, 8192), (80, 8192), (80,))
    )
    first = None
    for _ in range(5):
        out, aux = blas.matmul_with_aux(x, w.T, epilogue="gelu", bias=bias)
        both = (out, aux, *blas.matmul_dgelu(x, w.T, aux, bias_grad=True))
        both += blas.matmul_bias_grad(out.T, x)
        bits = [served.asnumpy(part).tobytes() for part in both]
        first = first or bits
        assert bits == first


@pytest.mark.gpu
def test_gpu_capture_and_replay(served):
    rng = np.random.default_rng(0)
    x, w, bias = (
        served.asarray(rng.standard_normal(s).astype(np.float32)).astype(rx.bfloat16)
        for s in ((64, 96), (128, 96), (128,))
    )
    c, d = (served.empty((64, n), dtype=rx.bfloat16) for n in (128, 64))
    bad_c, bad_d = (poison(served.asarray, x.shape, x.dtype) for x in (c, d))
    own = served.empty(blas.WORKSPACE_BYTES, dtype="uint8")

    def step():
        blas.matmul(x, w.T, bias=bias, epilogue="gelu", out=c)
        blas.matmul(c, c.T, out=d)

    served.cuda.Device().synchronize()
    stream = served.cuda.Stream(non_blocking=True)
    with stream, blas.use_workspace(own):
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
    for seed in range(3):
        new = np.random.default_rng(seed).standard_normal((64, 96)).astype(np.float32)
        x[...] = served.asarray(new).astype(rx.bfloat16)
        step()
        want = served.asnumpy(d)
        c[...], d[...] = bad_c, bad_d
        served.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_close(d, want, exact=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_gpu_namespace_multiplies_through_the_library(served, dtype, monkeypatch):
    """Values and gradients of ``matmul`` and ``linear`` over what a layer gets."""
    monkeypatch.setattr(served, "matmul", None)  # whoever calls it fails
    rng = np.random.default_rng(3)
    dtype = getattr(rx, dtype)
    for lead, k, n in (((5, 7), 33, 18), ((64,), 256, 128), ((2, 3, 20), 8, 1)):
        shapes = ((*lead, k), (n, k), (n,), (*lead, n))
        host_arrays = [rng.standard_normal(s).astype(np.float32).astype(dtype) for s in shapes]
        x, w, bias, g = (a.astype(np.float64) for a in host_arrays)
        tensors = [rx.Tensor(served.asarray(a), requires_grad=True) for a in host_arrays[:3]]
        out = rx.linear(*tensors)
        out.backward(served.asarray(host_arrays[3]))
        rows, rows_of_g = x.reshape(-1, k), g.reshape(-1, n)
        size = np.abs
        check(out.data, x @ w.T + bias, size(x) @ size(w.T) + size(bias))
        check(tensors[0].grad, g @ w, size(g) @ size(w))
        check(tensors[1].grad, rows_of_g.T @ rows, size(rows_of_g.T) @ size(rows))
        check(tensors[2].grad, rows_of_g.sum(0), size(rows_of_g).sum(0))
        check(rx.matmul(tensors[0].data, tensors[1].data.T), x @ w.T, size(x) @ size(w.T))


EINSUMS = {
    "ij,kj->ik": ((24, 33), (18, 33)),
    "bij,bjk->bik": ((3, 17, 40), (3, 40, 8)),
    "bhqd,bkhd->bhqk": ((2, 3, 9, 16), (2, 11, 3, 16)),
    "ji,kjl->lki": ((20, 7), (4, 20, 5)),
    "i,ij->j": ((30,), (30, 12)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("subscripts", EINSUMS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_gpu_einsum_multiplies_through_the_library(served, dtype, subscripts, monkeypatch):
    monkeypatch.setattr(served, "matmul", None)  # whoever calls it fails
    rng = np.random.default_rng(5)
    drawn = [rng.standard_normal(s).astype(getattr(rx, dtype)) for s in EINSUMS[subscripts]]
    tensors = [rx.Tensor(served.asarray(a), requires_grad=True) for a in drawn]
    a, b = (x.astype(np.float64) for x in drawn)
    out = rx.einsum(subscripts, *tensors)
    want = np.einsum(subscripts, a, b)
    check(out.data, want, np.einsum(subscripts, abs(a), abs(b)))
    g = rng.standard_normal(want.shape).astype(getattr(rx, dtype))
    out.backward(served.asarray(g))
    g, (left, right), result = g.astype(float), *(x.split(",") for x in subscripts.split("->"))
    for tensor, form, others in (
        (tensors[0], f"{result[0]},{right}->{left}", (g, b)),
        (tensors[1], f"{result[0]},{left}->{right}", (g, a)),
    ):
        check(tensor.grad, np.einsum(form, *others), np.einsum(form, *map(abs, others)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gpu_gradients_of_biases_are_not_rounded(served, dtype):
    g = served.full((2000, 3), 64, dtype=getattr(rx, dtype))
    x, weight = served.ones((2000, 2), g.dtype), served.ones((3, 2), g.dtype)
    bias = rx.Tensor(served.zeros(3, "float32"), requires_grad=True)
    with rx.autocast(dtype):
        rx.linear(rx.Tensor(x), rx.Tensor(weight), bias).backward(g)
    assert_close(host(bias.grad), np.full(3, 128000.0), exact=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_gpu_complex_products(served, dtype):
    rng = np.random.default_rng(4)
    a, b = (
        (rng.standard_normal(s) + 1j * rng.standard_normal(s)).astype(dtype)
        for s in ((3, 17, 40), (40, 9))
    )
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == "complex64" else {"rtol": 1e-12}
    for left in (served.asarray(a), served.asarray(a.swapaxes(1, 2).copy()).swapaxes(1, 2)):
        assert_close(served.asnumpy(blas.matmul(left, served.asarray(b))), a @ b, **tolerance)


@pytest.mark.gpu
def test_gpu_threads_do_not_mix_their_biases(served):
    x = served.zeros((64, 64), dtype="float32")
    wrong = []

    def work(number):
        bias = served.full(64, number, dtype="float32")
        served.cuda.Device().synchronize()
        with served.cuda.Stream(non_blocking=True) as stream:
            outs = [blas.matmul(x, x, bias=bias) for _ in range(300)]
            stream.synchronize()
            wrong.extend(number for out in outs if not bool((out == number).all()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.gpu
def test_gpu_autotuning(served, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path))
    blas.autotune(True)
    a = served.asarray(np.random.default_rng(0).standard_normal((304, 304)).astype(np.float32))
    want = host(a) @ host(a)
    for _ in range(2):
        check(blas.matmul(a, a), want, np.abs(want) + 30)
        assert len(list(tmp_path.iterdir())) == 1
        blas._loaded[0]._plans.clear()
