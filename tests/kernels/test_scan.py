"""Running sums, products and extrema on a device, against NumPy in the widest type."""

import ml_dtypes
import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device
from rtxarr.kernels import scan as module
from rtxarr.kernels.scan import fits, scan
from rtxarr.testing import assert_close

REAL = ["float32", "float64", "float16", ml_dtypes.bfloat16]
COMPLEX = ["complex64", "complex128"]
# Those of the simulator, whose threads are threads of Python, and of integers.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DTYPES = [*REAL, *COMPLEX, "int64", "uint64"]

# Rows of a lane, of a warp, of a block; ragged ends of tiles and chunks; one block for each of many
# long rows; columns.
SMALL = [
    ((1,), 0),
    ((7,), 0),
    ((131,), 0),
    ((2, 67), 1),
    ((6, 35), 1),
    ((9, 3), 1),
    ((3, 1), 0),
    ((67, 3), 0),
    ((13, 1, 1), 0),
    ((2, 37, 16), 1),
]
LARGE = [
    *SMALL,
    ((3, 40), 1),
    ((4096,), 0),
    ((4097,), 0),
    ((10_000_019,), 0),
    ((3, 1_000_003), 1),
    ((600, 20_001), 1),
    ((600, 20_000), 1),
    ((100_003, 5), 1),
    ((1000, 333), 1),
    ((2_000_003, 2), 0),
    ((100_000, 64), 0),
    ((4, 5000, 24), 1),
    ((64, 100, 512), 1),
    ((3, 70_001, 9), 1),
]


def shapes(place, dtype="float32"):
    """Give all shapes; in the simulator, which takes long, every third for most types."""
    if place.kind != "cpu":
        return LARGE
    return SMALL if np.dtype(dtype) in ("float32", "float16") else SMALL[1::3]


def make(op, shape, dtype, seed=0):
    """Give numbers whose running sums and products no type has to round, as far as can be."""
    rng = np.random.default_rng(seed)
    dtype, n = np.dtype(dtype), int(np.prod(shape))
    if op in ("max", "min"):  # which only grow for long where large ones are rare
        x = np.exp(rng.exponential(size=shape)) * rng.choice([-1, 1], shape)
        if dtype.kind in "iu":
            return (x * 1e6).astype(np.int64).view(np.uint64).astype(dtype)
        x[rng.random(shape) < 0.5 / max(shape)] = np.nan
        return x.astype(dtype)
    if op == "prod":
        choices = [1, -1, 1j, -1j] if dtype.kind == "c" else [1, -1]
        if dtype.kind == "u":
            choices = [1, 3]
        return rng.choice(np.asarray(choices), n).reshape(shape).astype(dtype)
    sign = rng.choice([-1, 0, 1], (2, n)) if dtype.kind != "u" else rng.integers(0, 3, (2, n))
    # Of the sums, none is large: half types hold them.
    x = sign[0] + 1j * sign[1] if dtype.kind == "c" else sign[0]
    return x.reshape(shape).astype(dtype)


def reference(op, x, axis):
    if op in ("max", "min"):
        return (np.maximum if op == "max" else np.minimum).accumulate(x, axis=axis)
    kind = x.dtype.kind
    wide = {"c": np.complex128, "i": np.int64, "u": np.uint64}.get(kind, np.float64)
    run = np.cumsum if op == "sum" else np.cumprod
    with np.errstate(all="ignore"):
        return run(x.astype(wide), axis=axis, dtype=wide)


def run(op, x, axis, place):
    return _device.to_device(scan(op, _device.to_device(x, place), axis=axis), "cpu")


CASES = [("sum", d) for d in DTYPES]
CASES += [("prod", d) for d in ("float32", ml_dtypes.bfloat16, "complex64", "uint64")]
CASES += [("max", d) for d in ("float32", "float64", "float16", "int64", "uint64")]
CASES += [("min", d) for d in ("float32", ml_dtypes.bfloat16, "uint64")]


@pytest.mark.parametrize("op, dtype", CASES, ids=[f"{op}-{np.dtype(d).name}" for op, d in CASES])
def test_values(place, op, dtype):
    for shape, axis in shapes(place, dtype):
        x = make(op, shape, dtype)
        got = run(op, x, axis, place)
        assert got.dtype == x.dtype and got.shape == shape
        want = reference(op, x, axis).astype(x.dtype)
        assert_close(got, want, exact=True)


@pytest.mark.parametrize(
    "op, dtype", [("sum", "float32"), ("sum", "float16"), ("prod", "float64"), ("max", "int64")]
)
def test_flipped_views_are_scanned_backwards_without_a_copy(place, op, dtype):
    for shape, axis in shapes(place):
        x = make(op, shape, dtype)
        got = scan(op, np.flip(_device.to_device(x, place), axis), axis=axis)
        if shape[axis] > 1:
            assert got.strides[axis] < 0
        want = reference(op, np.flip(x, axis), axis).astype(x.dtype)
        assert_close(_device.to_device(got, "cpu"), want, exact=True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "complex128"])
def test_rounding(place, dtype):
    """Numbers of one sign, so that errors are relative; half types are rounded once."""
    rng = np.random.default_rng(1)
    eps = float(ml_dtypes.finfo(dtype).eps)
    for shape, axis in shapes(place)[2:5]:
        x = rng.random(shape) / 8
        if np.dtype(dtype).kind == "c":
            x = x + 1j * rng.random(shape)
        x = x.astype(dtype)
        want = reference("sum", x, axis).astype(dtype)
        assert_close(run("sum", x, axis, place), want, rtol=eps if eps > 1e-4 else 100 * eps)


def test_half_sums_do_not_stall(place):
    for dtype, most in ((np.float16, 2048), (ml_dtypes.bfloat16, 256)):
        for shape in ((most + 9,), (most + 9, 2))[place.kind == "cpu" :]:
            x = np.ones(shape, dtype)
            want = np.cumsum(x.astype("float32"), axis=0).astype(dtype)
            assert want.astype("float32").max() > most
            assert_close(run("sum", x, 0, place), want, exact=True)


@pytest.mark.parametrize("op", ["sum", "prod"])
@pytest.mark.parametrize("shape, axis", [((35,), 0), ((150, 2), 0)])
def test_nan_and_infinities(place, op, shape, axis):
    rng = np.random.default_rng(2)
    for dtype in REAL[:2]:
        for special in ([np.nan], [-np.inf], [np.inf, -np.inf], [0.0, np.inf]):
            x = np.moveaxis(rng.choice([1.0, -1.0], shape), axis, 0)
            for i, value in zip(rng.permutation(shape[axis]), special, strict=False):
                x[i] = value
            x = np.moveaxis(x, 0, axis).astype(dtype)
            assert_close(run(op, x, axis, place), reference(op, x, axis).astype(dtype), exact=True)


@pytest.mark.parametrize("flipped", [False, True])
def test_identities_change_nothing(place, flipped):
    """Signs of zeros, and infinities among complex numbers, survive up to the first operation."""
    for n in (1, 37):
        x = np.full(n, -0.0, "float32")
        x = _device.to_device(x, place)
        got = scan("sum", x[::-1] if flipped else x, axis=0)
        assert np.signbit(_device.to_device(got, "cpu")).all()
        for dtype in COMPLEX:
            z = np.ones(n, dtype)
            z[n - 1 if flipped else 0] = complex(np.inf, 0)
            z = _device.to_device(z, place)
            got = _device.to_device(scan("prod", z[::-1] if flipped else z, axis=0), "cpu")
            assert (got == complex(np.inf, 0)).all()


@pytest.mark.parametrize("shape, axis", [((0,), 0), ((3, 0), 1), ((3, 0), 0), ((0, 4), 0)])
def test_nothing(place, shape, axis):
    assert run("sum", np.zeros(shape), axis, place).shape == shape


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_layouts(place, dtype):
    x = _device.to_device(make("sum", (3, 5, 8), dtype), place)
    xp = _device.namespace(x)
    views = [
        x.T,
        x[:, 1:, :],
        x[1:, ::2, 1::2],
        xp.broadcast_to(x[:1], x.shape),
        x[::-1, :, ::-1],
        x.reshape(-1)[1:],  # not at a multiple of 16 bytes
        x.reshape(-1)[1:][::-1],
    ]
    for view in views:
        for axis in range(view.ndim):
            got = _device.to_device(scan("sum", view, axis=axis), "cpu")
            host = np.asarray(_device.to_device(view, "cpu"))
            assert_close(got, reference("sum", host, axis).astype(dtype), exact=True)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_place_in_memory_does_not_matter(place, dtype):
    rng = np.random.default_rng(0)
    for shape in ((3, 64), (3, 35)):
        x = rng.random(shape).astype(dtype)
        apart = _device.to_device(np.concatenate([[0], x.reshape(-1)]).astype(dtype), place)
        got = scan("sum", apart[1:].reshape(shape), axis=1)
        assert_close(_device.to_device(got, "cpu"), run("sum", x, 1, place), exact=True)


def test_what_fits(place):
    x = _device.to_device(np.zeros(3), place)
    for dtype in DTYPES:
        assert fits(x, np.dtype(dtype))
    for dtype in ("int32", "bool", "uint8"):
        assert not fits(x, np.dtype(dtype))
    assert not fits(np.zeros(3), np.dtype("float32")) or place.kind == "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64"])
@pytest.mark.parametrize(
    "shape, axis",
    [((5_000_011,), 0), ((40, 100_001), 1), ((500_000, 3), 0), ((8, 30_000, 16), 1)],
)
def test_every_run_gives_the_same_bits(dtype, shape, axis):
    rng = np.random.default_rng(3)
    x = rx.asarray(rng.standard_normal(shape), dtype=dtype, device="cuda:0")
    for op in ("sum", "prod"):
        for view in (x, _device.namespace(x).flip(x, axis=axis)):
            bits = {
                _device.to_device(scan(op, view, axis=axis), "cpu").tobytes() for _ in range(20)
            }
            assert len(bits) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "complex128", "uint64"])
@pytest.mark.parametrize("shape, axis", [((100,), 0), ((1_000_003,), 0), ((50_000, 6), 0)])
def test_scans_can_be_captured(dtype, shape, axis):
    cupy = pytest.importorskip("cupy")
    x = cupy.asarray(make("sum", shape, dtype))

    def step():
        return scan("sum", x, axis=axis), scan("sum", cupy.flip(x, axis), axis=axis)

    with cupy.cuda.Stream(non_blocking=True) as stream:
        step()
        want = [one.copy() for one in step()]
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        try:
            got = step()
        finally:
            graph = stream.end_capture()
        for one in got:
            one[...] = 77
        graph.launch(stream)
        stream.synchronize()
        for one, other in zip(got, want, strict=True):
            assert_close(one, other, exact=True)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_functions_and_their_gradients(place, dtype):
    """The gradient of a running sum is one from the end, over flipped views."""
    x = rx.Tensor(_device.to_device(make("sum", (2, 19), dtype), place), requires_grad=True)
    grad = make("sum", (2, 20), dtype, seed=1)
    out = rx.cumulative_sum(x, axis=1, include_initial=True)
    host = _device.to_device(x.data, "cpu")
    want = np.cumsum(host, axis=1, dtype="float32").astype(dtype)
    assert_close(out.data, np.concatenate([np.zeros((2, 1), dtype), want], axis=1), exact=True)
    out.backward(_device.to_device(grad, place))
    want = np.cumsum(grad[:, :0:-1], axis=1, dtype="float32")[:, ::-1].astype(dtype)
    assert_close(x.grad, want, exact=True)


@pytest.mark.parametrize("dtype", ["int8", "uint32", "uint64", "float16", "float32"])
def test_extrema_of_every_type_and_their_gradients(place, dtype):
    x = make("max", (3, 29), "float64").astype("float32")
    x = np.clip(np.nan_to_num(x), 0, 99).astype(dtype)
    for name, f in (("max", np.maximum), ("min", np.minimum)):
        run = getattr(rx, f"cumulative_{name}")
        got = run(_device.to_device(x, place), axis=1)
        assert_close(_device.to_device(got, "cpu"), f.accumulate(x, axis=1), exact=True)
        if np.dtype(dtype).kind != "f":
            continue
        tensor = rx.Tensor(_device.to_device(x, place), requires_grad=True)
        rx.sum(run(tensor, axis=1)).backward()
        first = np.array([[row.tolist().index(v) for v in f.accumulate(row)] for row in x])
        want = np.stack([np.bincount(row, minlength=29) for row in first])
        assert_close(_device.to_device(tensor.grad, "cpu"), want.astype(dtype), exact=True)


def test_types_of_functions(place):
    x = _device.to_device(np.asarray([3, 4, 5], np.int8), place)
    assert_close(rx.cumulative_prod(x), np.asarray([3, 12, 60]), exact=True)
    assert rx.cumulative_sum(_device.to_device(np.ones(3, np.uint8), place)).dtype == np.uint64
    got = rx.cumulative_prod(x, dtype=rx.float32, include_initial=True)
    assert_close(got, np.asarray([1, 3, 12, 60], "float32"), exact=True)
    with pytest.raises(ValueError, match="axis must be given for an array of 0 dimensions"):
        rx.cumulative_sum(x[0, ...])
    for wrong in (np.ones(3, bool), np.ones(3, "complex64")):
        with pytest.raises(TypeError, match="x must hold real numbers, got"):
            rx.cumulative_max(_device.to_device(wrong, place))
    with pytest.raises(TypeError, match="'min' takes real numbers, got complex64"):
        scan("min", _device.to_device(np.ones(3, "complex64"), place), axis=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_fused_scans_have_the_bits_of_eager_ones(dtype):
    rng = np.random.default_rng(4)
    x = rx.asarray(rng.standard_normal((300, 5001)), dtype=dtype, device="cuda:0")

    def f(x):
        return rx.flip(rx.cumulative_sum(rx.flip(2 * x, axis=1), axis=1), axis=1) + x

    fused = rx.fuse(f)
    assert_close(fused(x), fused(x), exact=True)
    assert_close(
        rx.fuse(lambda x: rx.cumulative_sum(x, axis=0))(x), scan("sum", x, axis=0), exact=True
    )
    if dtype != "complex64":
        g = lambda x: rx.cumulative_max(rx.cumulative_min(x, axis=0)[:, ::-1], axis=1)  # noqa: E731
        assert_close(rx.fuse(g)(x), g(x), exact=True)


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=lambda d: np.dtype(d).name)
def test_blocks_agree_on_the_number_of_tiles(dtype, monkeypatch):
    """Or else barriers would not meet; and the totals of a row fit in a block."""
    pytest.importorskip("numba_cuda")
    monkeypatch.setattr("rtxarr.kernels._plan._SIMULATING", False)
    dtype = np.dtype(dtype)
    for registers, shared, lanes, chunks in ((16, 128, 256, 1024), (8, 4, 4, 3)):
        monkeypatch.setattr(module, "_REGISTERS", registers)
        monkeypatch.setattr(module, "_SHARED", shared)
        monkeypatch.setattr(module, "_LANES", lanes)
        places = [(False, False)]
        if dtype.itemsize <= 4:
            places += [(True, False), (False, True)]
        for wide, loose in places:
            for n in (*range(1, 700), 1024, 2048, 4096, 5000, 100_000):
                plan = module.row_plan(n, dtype, wide, loose)
                assert plan.resident or plan.groups == 1
                assert plan.resident or n > chunks
                if registers == 16:
                    assert plan.threads % 32 == 0 and plan.threads <= 256


def test_bad_input_is_refused():
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match="op must be 'sum', 'prod', 'max' or 'min', got 'mean'"):
        scan("mean", x, axis=0)
    for axis in (2, -1):
        with pytest.raises(ValueError, match=f"axis must be from 0 to 1, got {axis}"):
            scan("sum", x, axis=axis)
