"""Defects that compilers of array code have had: none of them here.

Right values are NumPy's. Each test names the reports that it comes from.
"""

import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.polygraph import _ir as ir

from .fused import BACKENDS, assert_same, check
from .test_cuda_backend import kernels_of

f4, f2 = np.float32, np.float16


def fused_value(f, *args):
    """Give what a fused function gives, checked against the function by each back end."""
    return check(f, *args)(*args)


def test_a_python_float_does_not_widen_float32():
    """cupy#9400."""
    x = np.array([1, 2], f4)
    assert fused_value(lambda x, h: x * (2.0 * h), x, 1.0).dtype == f4
    assert fused_value(lambda x, h: x * (2.0 * h), x, np.float64(1)).dtype == np.float64


def test_zero_dimensional_float32_arrays_keep_float32():
    """cupy#8536."""

    def f(mu, dt, delta):
        return 1 + mu * dt * delta

    got = fused_value(f, np.asarray(0.1, f4), np.asarray(0.5, f4), np.full((2,), 9.999999e-7, f4))
    assert_same(got, np.ones(2, f4))


def test_integer_promotion_is_numpys():
    """numexpr gives int32 300 and int64, JAX 45."""
    assert_same(fused_value(lambda x: x * 3, np.array([100], np.int8)), np.array([44], np.int8))
    got = fused_value(np.add, np.array([100], np.uint64), np.array([99], np.int64))
    assert_same(got, np.array([199.0]))
    for backend in BACKENDS:
        with pytest.raises(OverflowError):
            rx.fuse(lambda x: x + 300, backend=backend)(np.array([1], np.uint8))


def test_a_number_out_of_range_is_refused_at_each_call():
    fused = rx.fuse(lambda x, n: x + n)
    x = np.array([1], np.uint8)
    assert_same(fused(x, 2), np.array([3], np.uint8))
    with pytest.raises(OverflowError):
        fused(x, 300)
    assert_same(fused(x, 4), np.array([5], np.uint8))


def test_integer_division_and_remainder_take_the_sign_of_the_divisor():
    """numexpr#413, numexpr#365."""
    assert_same(fused_value(lambda x: x % 360, np.array([-135])), np.array([225]))
    a, b = np.array([7, -7]), np.array([-2, 2])
    assert_same(fused_value(lambda a, b: (a // b, a % b), a, b), (a * 0 - 4, np.array([-1, 1])))


def test_integer_division_by_zero_gives_zero():
    """JAX gives -2."""
    got = fused_value(lambda x, y: (x // y, x % y), np.array([1]), np.array([0]))
    assert_same(got, (np.array([0]), np.array([0])))


def test_negative_integer_powers_are_refused():
    """cupy#9111; JAX and numba give garbage."""
    with pytest.raises(ValueError, match="negative integer powers"):
        rx.fuse(lambda x: x**-1)(np.array([2]))
    fused = rx.fuse(lambda x, n: x**n)
    assert_same(fused(np.array([2]), 3), np.array([8]))
    with pytest.raises(ValueError, match="negative integer powers"):
        fused(np.array([2]), -1)


def test_integer_powers_are_exact():
    """cupy#2189: computed in double precision."""
    assert fused_value(lambda x: x**2, np.array([123456789]))[0] == 15241578750190521
    assert fused_value(lambda x: x**3, np.array([12345678]))[0] == 12345678**3 % 2**64


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
def test_maxima_keep_nan(dtype):
    """tinygrad#862, numexpr#535, numba's parallel maximum."""
    nan = np.nan
    a, b = np.array([nan, 1], dtype), np.array([2, nan], dtype)
    assert np.isnan(fused_value(np.maximum, a, b)).all()
    assert np.isnan(fused_value(np.minimum, a, b)).all()
    assert np.isnan(fused_value(np.max, np.array([1, nan], dtype)))
    assert np.isnan(fused_value(lambda x: x.min(axis=0), np.array([[1], [nan]], dtype))[0])
    assert fused_value(np.argmax, np.array([1, nan, 3], dtype)) == 1
    assert fused_value(np.argmin, np.array([1, 3, nan, nan], dtype)) == 2


def test_reductions_of_nothing():
    """numexpr#64, pytorch#197095."""
    assert_same(fused_value(lambda x: x.sum(0), np.zeros((0, 3))), np.zeros(3))
    assert_same(fused_value(lambda x: x.prod(0), np.zeros((0, 3))), np.ones(3))
    for backend in BACKENDS:
        with pytest.raises(ValueError, match="zero-size array"):
            rx.fuse(lambda x: x.max(), backend=backend)(np.zeros(0))


def test_negative_strides():
    """numexpr#63."""
    got = fused_value(lambda x: x[::-1] - 0.25, np.arange(4.0))
    assert_same(got, np.array([2.75, 1.75, 0.75, -0.25]))
    got = fused_value(lambda x: x - 0.25, np.arange(4.0)[::-1])
    assert_same(got, np.array([2.75, 1.75, 0.75, -0.25]))


def test_overlapping_writes_read_first():
    """pytorch#197829."""

    def f(x):
        x[1:] = x[:-1].copy()
        return x

    got = fused_value(f, np.arange(6).reshape(3, 2))
    assert_same(got, np.array([[0, 1], [0, 1], [2, 3]]))

    def g(x):
        x[1:] = x[:-1]
        x[:-1] += x[1:]
        return x

    check(g, np.arange(20000.0).reshape(-1, 4))


def test_copies_are_made_before_their_source_changes():
    """pytorch#198131, pytorch#198101, pytorch#94777."""

    def f(dst, src):
        dst[:] = src
        src += 1

    check(f, np.zeros(5), np.arange(5.0))
    dst, src = np.zeros(5), np.arange(5.0)
    rx.fuse(f)(dst, src)
    assert_same(dst, np.arange(5.0))


@pytest.mark.slow
def test_more_elements_than_32_bits_count():
    """cupy#9187, cupy#7539, chainer#8385."""
    x = np.broadcast_to(np.int8(1), (2**31 + 8,))
    assert rx.fuse(lambda x: x.sum(dtype=np.int64))(x) == 2147483656


def test_strided_offsets_beyond_32_bits():
    """cupy#8130, cupy#8150."""
    memory = np.zeros(2**31 + 16, np.int8)  # not touched but for its ends
    memory[-1] = 5
    x = np.lib.stride_tricks.as_strided(memory, (2,), (2**31 + 15,))
    assert_same(fused_value(lambda x: x * 2, x), np.array([0, 10], np.int8))


def test_casts_to_half_precision_round():
    """pytorch#185337, pytorch#183761, pytorch#136181, pytorch#195223."""
    got = fused_value(lambda x: (x / 7).astype(f2).astype(f4), np.arange(3, dtype=f4))
    assert_same(got, np.array([0, 0.14282227, 0.28564453], f4))


@pytest.mark.parametrize("dtype", [f2, rx.bfloat16])
def test_half_precision_rounds_after_each_operation(dtype):
    x = np.array([2049, 257]).astype(dtype)
    got = fused_value(lambda x: x + 1 - x, x)
    assert_same(got, x + 1 - x)
    rng = np.random.default_rng(0)
    y = rng.normal(size=4096).astype(dtype)
    check(lambda y: (y * y + y) * y - y / 3, y)


@pytest.mark.parametrize("dtype", ["?", np.int8, np.int32, f2, f4, rx.bfloat16])
def test_clipping_between_two_bounds_has_numpys_dtype(dtype):
    """NumPy takes all three to one dtype, which is never bfloat16."""
    x = np.array([-3, 0, 2, 5]).astype(dtype)
    for other in (f4, rx.bfloat16):
        y = x.astype(other)
        check(lambda x, y: (np.clip(x, 0.5, y), np.clip(y, x, y), x.clip(y, None)), x, y)
    check(lambda x: (np.clip(x, 0, 1), np.clip(x, [1, 0, 0, 1], f2(2))), x)


def test_the_gradient_of_where_ignores_what_is_not_taken():
    """jax#1052, jax#347, jax#20601, tinygrad#12409, autograd#802."""

    def f(x):
        return rx.sum(rx.where(x >= 0, x, rx.sqrt(-x)))

    x = np.ones(1)
    assert_same(check(rx.grad(f), x)(x), np.ones(1))
    assert_same(rx.grad(rx.fuse(f))(x), np.ones(1))


def test_gradients_keep_float32():
    """autograd#163, autograd#671."""

    def f(x):
        return rx.sum(rx.where(x > 0, x, 2 * x)) + rx.max(x)

    x = np.ones(3, f4)
    assert fused_value(rx.grad(f), x).dtype == f4
    assert rx.grad(rx.fuse(f))(x).dtype == f4


def test_a_saved_value_that_is_changed_is_noticed():
    """chainer#2353."""

    def f(x):
        y = rx.exp(x)
        z = y * y
        y[...] = 0.0
        return rx.sum(z)

    x = np.ones(1)
    assert rx.grad(f)(x)[0] == pytest.approx(2 * np.exp(2.0))
    assert rx.grad(rx.fuse(f))(x)[0] == pytest.approx(2 * np.exp(2.0))


G = 2


def test_globals_are_not_baked_in():
    """numba#9304."""
    global G
    fused = rx.fuse(lambda x: x * G)
    x = np.asarray([3])
    G = 2
    assert fused(x) == 6
    G = 5
    assert fused(x) == 15


def test_one_function_from_many_threads():
    """numexpr#80, numexpr#569, numexpr#547, numba-cuda#180."""
    fused = rx.fuse(lambda x, y: (np.sqrt(x * x + y), (x - y).sum(axis=0)))
    wrong = []

    def work(n):
        rng = np.random.default_rng(n)
        for _ in range(20):
            x, y = rng.random((2, n + 1, 5))
            got, want = fused(x, y), fused._function(x, y)
            if (got[0] != want[0]).any() or not np.allclose(got[1], want[1]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# What is said beside the table.


def test_sums_of_narrow_integers_and_of_half_precision():
    assert fused_value(np.sum, np.full(300, 100, np.int8)) == 30000
    assert fused_value(np.sum, np.full(300, 100, np.int8)).dtype == np.int64
    assert fused_value(np.sum, np.full(300, 100, np.uint8)).dtype == np.uint64
    ones = np.ones(70000, f2)
    assert fused_value(np.sum, ones) == np.inf
    assert fused_value(np.sum, ones).dtype == f2
    assert fused_value(np.mean, ones) == 1


def test_signs_rounding_and_clipping():
    assert np.isnan(fused_value(np.sign, np.array([np.nan]))[0])
    halves = np.array([0.5, 1.5, 2.5, -0.5])
    assert_same(fused_value(np.round, halves), np.array([0.0, 2.0, 2.0, -0.0]))
    got = fused_value(lambda x: x.clip(-5, 5), np.array([-100, 100, 3], np.int8))
    assert_same(got, np.array([-5, 5, 3], np.int8))


_PROCESS = """
import numpy as np
import {xp} as xp
import rtxarr as rx
from rtxarr.polygraph import cache_info
f = rx.fuse(lambda x: np.sqrt(x * 3.25 + 1) - x)
x = xp.arange(5000, dtype="f4")
assert (f(x) == xp.sqrt(x * np.float32(3.25) + 1) - x).all()
assert not f.reasons, f.reasons
print(cache_info().compiled)
"""


def _compiled_by(folder, n, xp="numpy"):
    """Start processes together; return how many kernels they compiled."""
    own = {**os.environ, "RTXARR_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", _PROCESS.format(xp=xp)]
    started = [
        subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True) for _ in range(n)
    ]
    found = [p.communicate()[0] for p in started]
    assert all(p.returncode == 0 for p in started)
    return sum(map(int, found))


def test_processes_that_need_one_kernel_compile_it_once(tmp_path):
    """cupy#9463, DeepGEMM#301, flashinfer#4062, pytorch#156010."""
    assert _compiled_by(tmp_path, 3) == 1


@pytest.mark.gpu
def test_gpu_sixteen_processes_compile_a_kernel_once(tmp_path):
    assert _compiled_by(tmp_path, 16, "cupy") == 1


def test_a_kernel_is_found_by_the_next_process(tmp_path):
    """cupy#7391, chainer#1348; other tools and devices have other keys: test_cache."""
    assert _compiled_by(tmp_path, 1) == 1
    assert _compiled_by(tmp_path, 1) == 0
    (file,) = (f for f in tmp_path.rglob("polygraph-*") if f.stat().st_size > 100)
    file.write_bytes(file.read_bytes()[:-50])
    assert _compiled_by(tmp_path, 1) == 1


def test_a_reduction_fills_the_gpu():
    """cupy#9008: 4 blocks, on a GPU of 132 processors."""
    x, n = ir.input_node(0, "f4", (4096, 512)), ir.input_node(1, "f4", (4096,))
    total = ir.reduce_node("sum", x, (1,))
    (kernel,) = kernels_of(ir.Graph([x, n], [ir.map_node("greater", total, n)]))
    assert math.prod(kernel.launches[0].grid) >= 132
