"""Functions of arrays take the elementwise kernels where these fit, CuPy's functions elsewhere."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, nn
from rtxarr.autograd import _engine
from rtxarr.kernels import elementwise
from rtxarr.kernels.elementwise import BINARY, UNARY, preferred
from rtxarr.ops import _elementwise
from rtxarr.testing import assert_close

DTYPES = ["float32", "float16", "bfloat16"]
ROUNDED = ("exp", "log", "tanh")  # by two compilers' libraries


def is_host_array(x):
    return isinstance(x, np.ndarray)


class Spy:
    """Count calls of a function."""

    def __init__(self, function):
        self.function = function
        self.n_calls = 0

    def __call__(self, *args, **options):
        self.n_calls += 1
        return self.function(*args, **options)

    def new_calls(self):
        found, self.n_calls = self.n_calls, 0
        return found


@pytest.fixture
def launches(monkeypatch, poisoned_results):
    """Count launches."""
    spy = Spy(elementwise.launch)
    monkeypatch.setattr(elementwise, "launch", spy)
    return spy


def values(shape, dtype, seed=0):
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return x.astype(getattr(rx, dtype))


# ---------------------------------------------------------------------------------- on the CPU


@pytest.fixture
def stand_in(monkeypatch):
    """Let the kernels take what they are given: the results are marked by 7."""
    monkeypatch.setattr(_elementwise, "is_device_array", is_host_array)
    monkeypatch.setattr(elementwise, "is_device_array", is_host_array)
    monkeypatch.setattr(elementwise, "_FEWEST", 8)

    def run(kernel, like, arguments, *, dtype=None, out=None):
        return np.full(like.shape, 7, like.dtype if dtype is None else dtype)

    monkeypatch.setattr(elementwise, "_run", run)
    monkeypatch.setattr(elementwise, "_fits", lambda x: x.dtype != np.float64)


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_types_choose_once(stand_in, name):
    implementations = _elementwise._Implementations(name)
    large, small = np.ones(8, np.float32), np.ones(7, np.float32)
    plain = getattr(np, name)
    if name in UNARY:
        for _ in range(2):
            assert_close(implementations[np.ndarray,](large), np.full(8, 7, np.float32))
        assert_close(implementations[np.ndarray,](small), plain(small))
        return
    for other in (large, 2, 0.5):
        kinds = type(other)
        for _ in range(2):
            for types, pair in (
                ((np.ndarray, kinds), (large, other)),
                ((kinds, np.ndarray), (other, large)),
            ):
                assert_close(implementations[types](*pair), np.full(8, 7, np.float32))
        low = small if other is large else other
        assert_close(implementations[np.ndarray, kinds](small, low), plain(small, low))
        assert_close(implementations[kinds, np.ndarray](low, small), plain(low, small))
    # Other kinds of arguments are the library's.
    assert_close(implementations[np.ndarray, bool](large, True), plain(large, True))


def test_other_functions_stay(stand_in):
    sin = _elementwise._Implementations("sin")
    assert_close(sin[np.ndarray,](np.ones(8, np.float32)), np.sin(np.ones(8, np.float32)))
    assert preferred("sin", np.sin) is np.sin


def test_what_does_not_fit_is_the_librarys(stand_in):
    add, exp = preferred("add", np.add), preferred("exp", np.exp)
    x = np.ones((4, 4))
    assert_close(add(x, x), x + x)
    assert_close(exp(x), np.exp(x))
    assert_close(add(x, 2), x + 2)
    assert_close(add(2, x), x + 2)


def test_casts_and_bfloat16_numbers(stand_in):
    x = np.ones(8, rx.bfloat16)
    assert_close(rx.astype(x, "float32"), np.full(8, 7, np.float32))
    assert_close(rx.astype(x[:7], "float32"), np.ones(7, np.float32))
    assert_close(rx.astype(x, rx.float64), np.ones(8))
    assert_close(rx.multiply(x, 0.5), np.full(8, 7, rx.bfloat16))
    assert_close(rx.multiply(x[:7], 0.5), np.full(7, 0.5, rx.bfloat16))


def test_bfloat16_meets_what_it_met():
    x = np.ones(3, rx.bfloat16)
    for other in (x[0], x[:1], 1, 1.0, np.float32(1), np.ones(3, np.float32)):
        for got in (rx.add(x, other), rx.add(other, x)):
            wide = isinstance(other, (np.ndarray, np.generic)) and other.dtype == np.float32
            want = np.dtype(np.float32 if wide else rx.bfloat16)
            assert got.dtype == want
            assert_close(got, np.full(3, 2, want))


# ------------------------------------------------------------------------- in the simulator, and


@pytest.fixture
def small(monkeypatch, place):
    """Let the kernels take arrays of 8 elements, and NumPy's in the simulator."""
    monkeypatch.setattr(elementwise, "_FEWEST", 8)
    # What was chosen for types before is not used, nor is what is chosen here used later.
    chosen = _elementwise._Implementations
    monkeypatch.setattr(chosen, "__getitem__", chosen.__missing__, raising=False)
    monkeypatch.setattr(chosen, "__setitem__", lambda *_: None, raising=False)
    if place == "cpu":
        for module in (_elementwise, elementwise, _engine._device):
            monkeypatch.setattr(module, "is_device_array", is_host_array)


def awkward(xp, base):
    """Give pairs of arguments that the kernels leave to the library."""
    row = base[:1]
    yield "row of 12", base[:, :12], row[:, :12]
    yield "short rows", xp.reshape(base, (32, 3)), xp.reshape(base, (-1,))[:3]
    yield "column", base, base[:, :1]
    yield "broadcast", base, xp.broadcast_to(row, base.shape)
    yield "backwards", base[::-1], base[::-1]
    yield "mirrored", base[:, ::-1], base
    yield "every other", base[:, ::2], base[:, ::2]
    yield "window", base[:, 1:9], base[:, 1:9]
    yield "shifted", xp.reshape(base, (-1,))[1:], xp.reshape(base, (-1,))[1:]
    yield "shifted second", xp.reshape(base, (-1,))[:-1], xp.reshape(base, (-1,))[1:]
    yield "another order", base, xp.asarray(base.T, copy=True, order="C").T
    yield "another type", base, xp.astype(base, xp.float64)
    yield "none", base[:0], base[:0]
    yield "none and a row", base[:0], row
    yield "no dimensions", base[0, 0], base[1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_arrays(place, small, launches, dtype):
    base = _device.to_device(values((6, 16), dtype), place)
    xp = _device.namespace(base)
    for title, x, y in awkward(xp, base):
        if dtype == "bfloat16" and title == "another type":
            continue  # which NumPy cannot promote
        for name in BINARY:
            plain = Spy(getattr(xp, name))
            got = preferred(name, plain)(x, y)
            assert (plain.n_calls, launches.new_calls()) == (1, 0), title
            assert_close(rx.Tensor(got).numpy(), rx.Tensor(plain.function(x, y)).numpy())
        fits = title in ("column", "broadcast", "short rows", "another order", "another type")
        if not fits and title != "shifted second":
            plain = Spy(xp.negative)
            preferred("negative", plain)(x)
            assert (plain.n_calls, launches.new_calls()) == (1, 0), title


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_stay_and_results_are_new(place, small, launches, dtype):
    host = values((4, 8), dtype)
    x = _device.to_device(host.copy(), place)
    results = (rx.add(x, x), rx.multiply(x, 2.0), rx.square(x), rx.add(x[:2], x[2:]))
    assert launches.new_calls() == 4
    for got in results:
        assert not np.shares_memory(got, x) if place == "cpu" else got.data.ptr != x.data.ptr
        got[...] = 0
        assert_close(rx.Tensor(x).numpy(), host, exact=True)
    turned = rx.add(x.T, x.T)
    assert launches.new_calls() == 1 and turned.strides == x.T.strides


def test_zeros_and_nans_of_extremes(place, small, launches):
    x = np.array([0.0, -0.0, np.nan, 1, np.nan, np.inf, -np.inf, 2], np.float32)
    y = np.array([-0.0, 0.0, 1, np.nan, np.nan, -np.inf, np.inf, 2], np.float32)
    on_x, on_y = (_device.to_device(a, place) for a in (x, y))
    for name in ("maximum", "minimum"):
        for dtype in DTYPES:
            pair = [rx.astype(a, getattr(rx, dtype)) for a in (on_x, on_y)]
            launches.new_calls()
            got = rx.Tensor(getattr(rx, name)(*pair)).numpy().astype(np.float32)
            assert launches.new_calls() == 1
            assert_close(got, getattr(np, name)(x, y), exact=True)
            if place != "cpu":  # Python's maximum of two zeros is the first
                assert_close(np.signbit(got[:2]), np.full(2, name == "minimum"), exact=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_take_the_kernels(place, small, launches, dtype):
    host = values((4, 8), dtype)

    def run(data):
        x = rx.Tensor(data, requires_grad=True)
        y = x * x + rx.square(x) + 2 * x - x / 2 + x**2
        (y + y * y).backward(rx.ones_like(y.data))
        return x.grad

    got = run(_device.to_device(host, place))
    assert launches.new_calls() > 20
    want = run(host.astype(np.float64))
    limits = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-1}
    scale = np.abs(want).max()
    assert_close(
        rx.Tensor(got).numpy().astype(np.float64), want, rtol=0, atol=limits[dtype] * scale
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_squares_are_rounded_as_products_are(place, small, launches, dtype):
    # Some products of halves are subnormal.
    x, g = (values((4, 8), dtype, seed) * np.asarray(2.0**-11, rx.float32) for seed in (0, 1))
    x, g = x.astype(getattr(rx, dtype)), g.astype(getattr(rx, dtype))
    tensor = rx.Tensor(_device.to_device(x, place), requires_grad=True)
    rx.square(tensor).backward(_device.to_device(g, place))
    assert launches.n_calls == (2 if dtype == "float32" else 3)
    two = np.asarray(2, x.dtype)
    assert_close(rx.Tensor(tensor.grad).numpy(), (two * (g * x)).astype(x.dtype), exact=True)


def test_sums_of_gradients_leave_what_was_given(place, small, launches):
    x = rx.Tensor(_device.to_device(values((4, 8), "float32"), place), requires_grad=True)
    given = rx.ones_like(x.data)
    (x + x + x + x).backward(given)
    (x + x + x + x).backward(given)
    assert_close(rx.Tensor(given).numpy(), np.ones((4, 8), np.float32), exact=True)
    assert_close(rx.Tensor(x.grad).numpy(), np.full((4, 8), 8, np.float32), exact=True)
    first = x.grad
    (x + x).backward(given)
    assert_close(rx.Tensor(first).numpy(), np.full((4, 8), 8, np.float32), exact=True)
    assert_close(rx.Tensor(x.grad).numpy(), np.full((4, 8), 10, np.float32), exact=True)


# ---------------------------------------------------------------------------------- on the GPU

SHAPE = (61, 2048)  # enough for the kernels


@pytest.fixture
def cupy():
    found = pytest.importorskip("cupy")
    with rx.device("cuda:0"):
        yield found


def host(x):
    return x.numpy() if isinstance(x, rx.Tensor) else x.get() if hasattr(x, "get") else x


def same_bits(got, *wants):
    """Check that each element is one of those in ``wants`` to the bit, but for which NaN it is."""
    got = host(got)
    kind = np.uint16 if got.itemsize == 2 else np.uint32
    same = np.zeros(got.shape, bool)
    for want in map(host, wants):
        assert got.dtype == want.dtype and got.shape == want.shape
        both = np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32))
        same |= both | (got.view(kind) == want.view(kind))
    assert same.all(), (got[~same][:5], [host(x)[~same][:5] for x in wants])


def on_host(name, *arguments):
    """Give what NumPy does: unlike CuPy, it keeps the smallest numbers, which have fewer digits."""
    arrays = [x.get() for x in arguments if hasattr(x, "get")]
    with np.errstate(all="ignore"):
        out = getattr(np, name)(*[x.get() if hasattr(x, "get") else x for x in arguments])
    return out.astype(arrays[0].dtype)


def hard(dtype, seed, n=None):
    """Give numbers of all sizes, with zeros, infinities and NaNs."""
    n = SHAPE[0] * SHAPE[1] if n is None else n
    rng = np.random.default_rng(seed)
    kind = np.uint32 if dtype == "float32" else np.uint16
    bits = rng.integers(0, np.iinfo(kind).max, n, dtype=kind, endpoint=True)
    x = bits.view(getattr(rx, dtype))
    x[: n // 2] = rng.standard_normal(n // 2).astype(np.float32).astype(x.dtype)
    x[:5] = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32).astype(x.dtype)
    return rng.permutation(x).reshape(SHAPE if n == SHAPE[0] * SHAPE[1] else (n,))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_gpu_results_equal_cupys_or_numpys(cupy, launches, name, dtype):
    x, y = (cupy.asarray(hard(dtype, seed)) for seed in (0, 1))
    plain, function = getattr(cupy, name), getattr(rx, name)
    if name in UNARY:
        got = function(x)
        assert launches.new_calls() == 1
        if name in ROUNDED:
            got, want = (host(a).astype(np.float32) for a in (got, on_host(name, x)))
            rtol = 5e-7 if dtype == "float32" else float(rx.finfo(getattr(rx, dtype)).eps)
            assert_close(got, want, rtol=rtol, atol=1e-37 if dtype != "float16" else 1e-7)
        else:
            same_bits(got, plain(x), on_host(name, x))
        return
    batch, rows = x[:60].reshape(3, 20, 2048), y[:3].reshape(3, 1, 2048)
    alike = ((x, y), (x.T, y.T), (x, x), (x, y[0, 1]), (y[3, 3], x))
    for a, b in (*alike, (x, y[1]), (y[:1], x), (batch, rows), (rows, batch), (batch, y[0])):
        same_bits(function(a, b), plain(a, b), on_host(name, a, b))
        assert launches.new_calls() == 1
    for number in (0.3, -2, 1, 0.0):
        one = cupy.asarray(number, x.dtype)
        same_bits(function(x, number), plain(x, one), on_host(name, x, one))
        same_bits(function(number, x), plain(one, x), on_host(name, one, x))
        assert launches.new_calls() == 2


@pytest.mark.gpu
def test_gpu_casts_equal_cupys(cupy, launches):
    for dtype in DTYPES:
        x = cupy.asarray(hard(dtype, 2))
        for other in DTYPES:
            kind = np.dtype(getattr(rx, other))
            same_bits(rx.astype(x, kind), x.astype(kind))
            same_bits(rx.astype(x.T, kind), x.T.astype(kind))
            crosses = (dtype == "float32") != (other == "float32")
            assert launches.new_calls() == 2 * crosses


@pytest.mark.gpu
def test_gpu_small_and_awkward_arrays_are_cupys(cupy, launches):
    x = cupy.asarray(values((255, 257), "float32"))  # 65,535
    same_bits(rx.add(x, x), x + x)
    wide = cupy.asarray(values(SHAPE, "float32"))
    for a, b in ((wide, wide[:, :1]), (wide[::-1], wide), (wide[:, ::2], wide[:, ::2])):
        same_bits(rx.multiply(a, b), a * b)
    assert launches.n_calls == 0


@pytest.mark.gpu
def test_gpu_other_streams(cupy, launches):
    host = values((1 << 22,), "float32")
    x = cupy.asarray(host)
    cupy.cuda.Device().synchronize()
    for _ in range(3):
        with _device.stream() as stream:
            y = cupy.zeros_like(x)
            for _ in range(20):  # busy while the launches below are put in line
                y += x
            got = rx.multiply(rx.astype(rx.add(y, x), rx.float16), 2.0)
            y[...] = 0
            del y
        stream.synchronize()
        want = host.copy()
        for _ in range(20):
            want += host
        want = (want.astype(np.float16) * np.float16(2)).astype(np.float16)
        assert_close(cupy.asnumpy(got), want, exact=True)
    assert launches.n_calls == 9


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_captured_equals_eager(cupy, dtype):
    kind = getattr(rx, dtype)

    def step(x, y):
        x, y = rx.Tensor(x), rx.Tensor(y)
        z = rx.tanh(x * y + 0.5) - rx.maximum(x, y) / 3
        wide = rx.astype(z, "float32") if dtype != "float32" else rx.astype(z, rx.float16)
        return z, wide, rx.exp(-rx.abs(z)) + rx.sqrt(rx.square(x))

    captured = rx.capture(step)
    pool = cupy.get_default_memory_pool()
    used = []
    for seed in range(6):
        x, y = (cupy.asarray(values(SHAPE, "float32", 2 * seed + i)).astype(kind) for i in (0, 1))
        got = captured(x, y)
        for mine, its in zip(got, step(x, y), strict=True):
            same_bits(mine, its)
        del got, mine, its, x, y
        used.append(pool.used_bytes())
    assert captured.n_graphs == 1
    assert len(set(used[3:])) == 1


@pytest.mark.gpu
def test_gpu_captured_training_equals_eager(cupy):
    def train(capture):
        rng = rx.random.Generator(1)
        first, second = (nn.Linear(512, 512, generator=rng) for _ in range(2))
        parameters = [*first.parameters(), *second.parameters()]

        def step(x):
            for p in parameters:
                p.grad = None
            with rx.autocast("bfloat16"):
                h = first(x)
                h = h + rx.tanh(second(rx.relu(h))) * h
                loss = rx.mean(rx.square(rx.astype(h, "float32")))
            loss.backward()
            return [loss.data, *(p.grad for p in parameters)]

        run = rx.capture(step) if capture else step
        data = rx.random.Generator(2)
        return [
            [rx.Tensor(a).numpy().copy() for a in run(data.normal((512, 512)))] for _ in range(4)
        ]

    for got, want in zip(train(True), train(False), strict=True):
        for mine, its in zip(got, want, strict=True):
            assert mine.tobytes() == its.tobytes()


@pytest.mark.gpu
def test_gpu_arrays_of_another_device_are_cupys(cupy, launches):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device(1):
        x = cupy.ones(SHAPE, np.float32)
    assert elementwise.unary("negative")(x) is None
    assert elementwise.convert(x, np.dtype(np.float16)) is None
    assert not elementwise.add_to(x, x)
    assert launches.n_calls == 0
