"""Fourier transforms on the GPU, through plans that are kept."""

import contextlib
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, _replay, libs
from rtxarr.libs import _fft_plans
from rtxarr.libs import fft as provider
from rtxarr.libs._fft_plans import passes
from rtxarr.libs._status import Provider
from rtxarr.testing import assert_close

NAMES = ["fftn", "ifftn", "rfftn", "irfftn"]
SHAPES = [
    ((6,), (0,)), ((4, 7), (1,)), ((4, 7), (0,)), ((4, 6, 5), (0, 1, 2)), ((4, 6, 5), (1, 2)),
    ((4, 6, 5), (2, 0)), ((2, 3, 4, 5), (0, 1, 2, 3)), ((1, 1, 8), (1, 2)), ((0, 4), (1,)),
    ((3, 8, 6, 4), (1, 2)), ((2, 8, 6, 3), (2, 1)), ((5, 3, 7, 3), (1, 2)), ((6, 5, 1), (1,)),
    ((4, 1, 3, 2), (0, 2)), ((40, 6, 4), (1,)), ((1, 1), (0, 1)), ((3, 2, 2, 2, 2), (4, 0, 2)),
]  # fmt: skip


class FakeArray(np.ndarray):
    """A NumPy array that says where it lies as CuPy's do."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.__array_interface__["data"][0], device_id=0)

    def copy(self, order="C"):
        return np.array(self, order=order, copy=True, subok=True)


def at(layout, n, batch):
    """Return where the elements are, as cuFFT defines its advanced data layout."""
    embed, stride, dist = layout
    place = np.zeros((), np.int64)
    for i, m in enumerate(n):
        place = place[..., None] * (embed[i] if i else 1) + np.arange(m)
    return np.arange(batch).reshape(-1, *[1] * len(n)) * dist + place * stride


class FakePlan:
    """Gathers, transforms by NumPy without scales, and scatters."""

    made = 0
    copying = False  # tables of a plan to the GPU

    def __init__(self, n, embed, stride, dist, onembed, ostride, odist, kind, batch, *rest):
        assert len(n) == len(embed) == len(onembed) <= 3
        assert min(n) > 1
        assert rest[0] == "C"
        FakePlan.made += 1
        FakePlan.copying = True
        self.n, self.kind, self.batch = n, kind & 15, batch
        self.layouts = (embed, stride, dist), (onembed, ostride, odist)
        self.is_wide = "of 64 bits" in rest

    def fft(self, x, out, direction):
        assert not FakePlan.copying
        for array in (x, out):
            assert array.flags.c_contiguous
            assert array.data.ptr % np.result_type(array.dtype, np.complex64).itemsize == 0
        half = (*self.n[:-1], self.n[-1] // 2 + 1)
        taken, given = self.n, self.n
        axes = tuple(range(1, len(self.n) + 1))
        options = {"axes": axes, "norm": "backward" if direction < 0 else "forward"}
        if self.kind == 0xC:
            assert direction > 0 and x.dtype.kind == "c" and out.dtype.kind == "f"
            taken, name = half, "irfftn"
            options["s"] = self.n
        elif self.kind == 0xA:
            assert direction < 0 and x.dtype.kind == "f" and out.dtype.kind == "c"
            given, name = half, "rfftn"
        else:
            assert x.dtype == out.dtype and x.dtype.kind == "c"
            name = "fftn" if direction < 0 else "ifftn"
        x, out = (np.asarray(array).reshape(-1) for array in (x, out))
        places = at(self.layouts[0], taken, self.batch)
        results = at(self.layouts[1], given, self.batch)
        assert places.max() < x.size and results.max() < out.size
        assert np.unique(results).size == results.size == out.size
        out[results] = getattr(np.fft, name)(x[places], **options)
        if self.kind == 0xC:
            x[places] = np.nan


def wide_plan(
    n, embed, stride, dist, source, onembed, ostride, odist, result, batch, type_, **rest
):
    kinds = {"FF": 0x29, "fF": 0x2A, "Ff": 0x2C, "DD": 0x69, "dD": 0x6A, "Dd": 0x6C}
    assert type_ == ("F" if source in "fF" else "D")
    return FakePlan(
        n, embed, stride, dist, onembed, ostride, odist, kinds[source + result], batch,
        rest["order"], "of 64 bits",
    )  # fmt: skip


@pytest.fixture
def fake_cufft(monkeypatch):
    """A CuPy of NumPy's arrays, with new memory full of NaN."""

    def empty(shape, dtype):
        out = np.empty(shape, dtype)
        out[...] = np.nan
        return out.view(FakeArray)

    def synchronize():
        FakePlan.copying = False

    class Null(contextlib.AbstractContextManager):
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    null = Null()
    null.synchronize = synchronize
    cufft = types.SimpleNamespace(PlanNd=FakePlan, XtPlanNd=wide_plan, getVersion=lambda: 12103)
    stream = types.SimpleNamespace(ptr=5, synchronize=lambda: None, is_capturing=lambda: False)
    cupy = types.SimpleNamespace(
        empty=empty,
        asarray=lambda x: x.view(FakeArray),
        asnumpy=np.array,
        zeros=lambda shape, dtype: np.zeros(shape, dtype).view(FakeArray),
        multiply=np.multiply,
        cuda=types.SimpleNamespace(
            cufft=cufft,
            get_current_stream=lambda: stream,
            runtime=types.SimpleNamespace(runtimeGetVersion=lambda: 13000),
            Stream=types.SimpleNamespace(null=null),
        ),
    )
    monkeypatch.setitem(vars(_device), "cupy", cupy)
    monkeypatch.setattr(provider, "_loaded", [])
    monkeypatch.setattr(provider, "_provider", Provider("Fourier transforms", "CuPy or NumPy"))
    provider._thread.plans.clear()
    yield cupy
    provider._thread.plans.clear()


def check(name, x, s, axes, norm, *, owned=False):
    """Compare with NumPy in float64; return the transform."""
    wide = x.astype(np.result_type(x.dtype, np.float64))
    theirs = norm
    if norm == "none":
        theirs = "backward" if name in ("fftn", "rfftn") else "forward"
    want = getattr(np.fft, name)(wide, s=s, axes=axes, norm=theirs)
    given = x.copy().view(FakeArray) if x.flags.c_contiguous else x.view(FakeArray)
    before = given.tobytes()
    given.flags.writeable = owned
    got = provider.transform(name, given, tuple(s), tuple(axes), norm, owned=owned)
    assert got.shape == want.shape
    wide = np.result_type(x.dtype, "c8")
    assert got.dtype == (wide.char.lower() if name == "irfftn" else wide)
    assert_close(np.asarray(got), want.astype(got.dtype))
    if not owned:
        assert given.tobytes() == before
        assert not np.shares_memory(got, given)
    return got


def array(name, rng, shape, *, single=False):
    x = rng.standard_normal(shape)
    if name != "rfftn":
        x = x + 1j * rng.standard_normal(shape)
    return x.astype(x.dtype.kind + str(x.itemsize // 2)) if single else x


def points(name, shape, axes, stretch=0):
    s = [shape[a] for a in axes]
    if name == "irfftn":
        s[-1] = 2 * (s[-1] - 1)
    return tuple(max(n + stretch, 1) for n in s)


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_plans_make_up_transforms(fake_cufft, name, norm):
    rng = np.random.default_rng(0)
    for shape, axes in SHAPES:
        for stretch in (0, 1, -1):
            x = array(name, rng, shape, single=stretch == 1)
            s = points(name, shape, axes, stretch)
            check(name, x, s, axes, norm)
            check(name, np.asfortranarray(x), s, axes, norm)
            check(name, x, s, axes, norm, owned=True)
            if name != "rfftn":
                check(name, x.real.copy(), s, axes, norm)


def random_case(rng):
    """Give the shape of an array, axes, and how many points to have along each of them."""
    shape = tuple(int(n) for n in rng.integers(1, 6, rng.integers(1, 6)))
    axes = rng.permutation(len(shape))[: rng.integers(1, len(shape) + 1)]
    axes = tuple(int(a) for a in axes)
    s = tuple(int(rng.integers(1, 7)) if rng.random() < 0.3 else shape[a] for a in axes)
    return shape, axes, s


@pytest.mark.parametrize("name", NAMES)
def test_random_transforms(fake_cufft, monkeypatch, name):
    rng = np.random.default_rng(3)
    for i in range(150):
        monkeypatch.setattr(_fft_plans, "_LARGE", int(rng.choice([1, 30, 1 << 22])))
        shape, axes, s = random_case(rng)
        x = array(name, rng, shape, single=bool(i % 2))
        if rng.random() < 0.3:
            x = np.repeat(x, 2, axis=0)[::2]
        check(name, x, s, axes, ["backward", "ortho", "forward", "none"][i % 4])


# ------------------------------------------------------------------------- without a plan


def check_all(**options):
    """Compare transforms of all kinds with NumPy."""
    rng = np.random.default_rng(8)
    for i, (shape, axes) in enumerate(SHAPES):
        for name in NAMES:
            x = array(name, rng, shape, single=i % 2 == 0)
            norm = ["backward", "ortho", "forward", "none"][i % 4]
            check(name, x, points(name, shape, axes, i % 3 - 1), axes, norm, **options)


@pytest.mark.parametrize("broken", ["attribute", "version"])
def test_a_missing_library_warns_once(fake_cufft, monkeypatch, capsys, broken):
    def fail(*args):
        raise ImportError('Failure finding "libcufft.so.12"\n  listdir("/lib"):')

    if broken == "attribute":
        cuda = type("cuda", (types.SimpleNamespace,), {"cufft": property(fail)})
        without = {k: v for k, v in vars(fake_cufft.cuda).items() if k != "cufft"}
        monkeypatch.setattr(fake_cufft, "cuda", cuda(**without))
    else:
        fake_cufft.cuda.cufft.getVersion = fail
    want = (
        r"Fourier transforms run through CuPy or NumPy: CuPy cannot use cuFFT \(Failure finding "
        r"\"libcufft.so.12\"\); pip install --upgrade 'cuda-toolkit\[cufft\]==13.\*'$"
    )
    FakePlan.made = 0
    with pytest.warns(RuntimeWarning, match=want) as caught:
        check_all()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_all(owned=True)
    libs.show()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("Fourier transforms: CuPy or NumPy (CuPy cannot use cuFFT (Failure")
    assert FakePlan.made == 0


@pytest.mark.parametrize("of_cupy", [True, False])
def test_what_has_no_plan_is_transformed_elsewhere(fake_cufft, capsys, of_cupy):
    asked = []

    def fail(*args):
        raise RuntimeError("CUFFT_INTERNAL_ERROR")

    class OfCuPy:
        def __getattr__(self, name):
            if not of_cupy:
                return lambda *args, **options: fail()
            asked.append(name)
            transform = getattr(np.fft, name)
            return lambda x, **options: transform(np.asarray(x), **options).view(FakeArray)

    fake_cufft.fft = OfCuPy()
    fake_cufft.cuda.cufft.PlanNd = fail
    want = r"CuPy or NumPy: no plan for C2C transforms \(CUFFT_INTERNAL_ERROR\); pip install"
    with pytest.warns(RuntimeWarning, match=want) as caught:
        check_all()
        check_all(owned=True)
    assert len(caught) == 1
    assert bool(asked) is of_cupy
    refused = provider.status().refused
    assert set(refused) == {
        f"no plan for {kind} transforms (CUFFT_INTERNAL_ERROR)" for kind in ("C2C", "R2C", "C2R")
    }
    libs.show()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4] == "Fourier transforms: cuFFT 12.1.3, through CuPy"
    n = refused["no plan for R2C transforms (CUFFT_INTERNAL_ERROR)"]
    assert lines[-1].startswith(f"    {n} by CuPy or NumPy: no plan for R2C")


def test_nothing_is_written_before_all_plans_are_made(fake_cufft):
    """Of four axes of halves that may be overwritten, the last plan is the one that fails."""
    made = []

    def fail(*args):
        made.append(args)
        if len(made) > 1:
            raise RuntimeError("CUFFT_INTERNAL_ERROR")
        return FakePlan(*args)

    fake_cufft.cuda.cufft.PlanNd = fail
    fake_cufft.fft = np.fft  # takes FakeArrays
    x = array("irfftn", np.random.default_rng(0), (3, 4, 5, 6))
    with pytest.warns(RuntimeWarning, match="no plan for C2"):
        check("irfftn", x, (3, 4, 5, 10), (0, 1, 2, 3), "ortho", owned=True)
    assert len(made) == 2


def test_a_plan_without_memory_is_no_missing_plan(fake_cufft):
    def fail(*args):
        raise MemoryError("no room")

    fake_cufft.cuda.cufft.PlanNd = fail
    with pytest.raises(MemoryError, match="no room"):
        check("fftn", np.ones((3, 4)), (4,), (1,), "ortho")


def test_a_graph_does_not_record_the_host(fake_cufft):
    def fail(*args):
        raise RuntimeError("CUFFT_INTERNAL_ERROR")

    fake_cufft.cuda.cufft.PlanNd = fail
    fake_cufft.cuda.get_current_stream().is_capturing = lambda: True
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(RuntimeError, match="cannot be captured; pip install"),
    ):
        check("fftn", np.ones((3, 4)), (4,), (1,), "ortho")


class NotCopied(FakeArray):
    def copy(self, order="C"):
        raise AssertionError("a copy")


def test_axes_at_the_end_of_memory_are_not_moved(fake_cufft):
    shape = (5, 16, 12, 8)
    (one,) = passes("rfftn", shape, (16, 12), (1, 2))
    assert (one.kind, one.n, one.batch, one.order) == ("R2C", (16, 12), 40, (0, 3, 1, 2))
    assert (one.source, one.result) == (((16, 12), 1, 192), ((16, 7), 1, 112))
    (one,) = passes("irfftn", (5, 16, 7, 8), (16, 12), (1, 2))
    assert (one.source, one.result) == (((16, 7), 1, 112), ((16, 12), 1, 192))
    x = np.random.default_rng(0).standard_normal((5, 8, 16, 12)).astype("f4")
    x = x.view(NotCopied).transpose(0, 2, 3, 1)
    spectrum = provider.transform("rfftn", x, (16, 12), (1, 2), "none")
    assert spectrum.transpose(0, 3, 1, 2).flags.c_contiguous
    spectrum = spectrum.view(NotCopied)
    out = provider.transform("irfftn", spectrum, (16, 12), (1, 2), "backward", owned=True)
    assert out.transpose(0, 3, 1, 2).flags.c_contiguous
    assert_close(np.asarray(out), np.asarray(x))
    spectrum = provider.transform("fftn", x, (16, 12), (1, 2), "ortho")
    assert spectrum.transpose(0, 3, 1, 2).flags.c_contiguous


def test_complex_ones_along_the_first_axes_of_large_arrays_are_not_moved(fake_cufft, monkeypatch):
    (one,) = passes("fftn", (16, 12, 40), (16, 12), (0, 1))
    assert one.order == (2, 0, 1)
    monkeypatch.setattr(_fft_plans, "_LARGE", 16 * 12 * 40)
    (one,) = passes("fftn", (16, 12, 40), (16, 12), (0, 1))
    assert (one.order, one.batch, one.source) == (None, 40, ((16, 12), 40, 1))
    (one,) = passes("fftn", (2, 16, 12, 40), (16, 12), (1, 2))
    assert one.order is not None
    (one,) = passes("rfftn", (16, 12, 40), (16, 12), (0, 1))
    assert one.order is not None


def test_arrays_that_start_between_complex_numbers_are_copied(fake_cufft):
    x = np.random.default_rng(0).standard_normal(13).astype("f4")
    x = x[1:] if x.ctypes.data % 8 == 0 else x[:12]
    assert x.ctypes.data % 8
    got = provider.transform("rfftn", x.view(FakeArray), (12,), (0,), "backward")
    assert_close(np.asarray(got), np.fft.rfft(x.astype("f8")).astype("c8"))


def test_large_arrays_get_plans_of_64_bits(fake_cufft):
    class Shape:  # of an array that there is no memory for
        dtype = np.dtype("c8")
        data = types.SimpleNamespace(device_id=0)

    for shape, is_wide in (((1 << 21, 1 << 10), True), ((1 << 20, 1 << 10), False)):
        (one,) = passes("fftn", shape, shape[1:], (1,))
        assert provider._plan(fake_cufft.cuda.cufft, one, Shape()).is_wide is is_wide
        (one,) = passes("rfftn", shape, shape[:1], (0,))
        real = Shape()
        real.dtype = np.dtype("f4")
        assert provider._plan(fake_cufft.cuda.cufft, one, real).is_wide is is_wide
    assert not FakePlan.copying


def test_plans_are_told_apart(fake_cufft):
    rng = np.random.default_rng(0)
    FakePlan.made = 0
    for _ in range(2):
        for shape in ((4, 6), (6, 4), (4, 6, 1)):
            for dtype in ("f4", "f8"):
                x = rng.standard_normal(shape).astype(dtype)
                check("rfftn", x, shape[1:2], (1,), "ortho")
    assert FakePlan.made == 4
    fake_cufft.cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=6)
    check("rfftn", rng.standard_normal((4, 6)), (6,), (1,), "ortho")
    assert FakePlan.made == 5


def test_a_captured_step_has_a_plan_for_each_branch(fake_cufft):
    x = np.random.default_rng(0).standard_normal((4, 6))
    FakePlan.made = 0
    with _replay.keeping({}):
        for stream in (5, 6):  # the eager call and the capture are on different streams
            fake_cufft.cuda.get_current_stream = lambda ptr=stream: types.SimpleNamespace(ptr=ptr)
            for branches, made in (((), 1), ((1,), 2), ((1, 1), 3), ((), 3)):
                with contextlib.ExitStack() as entered:
                    for number in branches:
                        entered.enter_context(_replay.on_branch(number))
                    check("rfftn", x, (6,), (1,), "ortho")
                assert FakePlan.made == (made if stream == 5 else 3)


def test_plans_are_kept_with_the_captured_step():
    made = []

    def make():
        made.append(object())
        return made[-1]

    own = {}
    with _replay.keeping(own):
        first = provider._kept(("a",), make)
        with _replay.keeping({}):
            assert provider._kept(("a",), make) is not first
        assert provider._kept(("a",), make) is first
    assert list(own.values()) == [first]
    assert _replay.kept_resources() is None
    outside = provider._kept(("a",), make)
    assert outside is not first
    for i in range(provider._MOST):
        provider._kept((i,), make)
    assert provider._kept(("a",), make) is not outside
    provider._thread.plans.clear()


def poisoned(cupy):
    """Leave NaN in the memory that is given out next."""
    for n in (1 << 10, 1 << 16, 1 << 22):
        cupy.full(n, np.nan)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["backward", "ortho", "forward", "none"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("single", [True, False])
def test_gpu_transforms_match_numpy(monkeypatch, name, norm, single):
    cupy = _device.cupy
    rng = np.random.default_rng(0)
    for large in (1 << 22, 1):
        monkeypatch.setattr(_fft_plans, "_LARGE", large)
        for shape, axes in (*SHAPES, ((5, 32, 24, 16), (1, 2)), ((3, 20, 64), (1,))):
            for stretch in (0, 1, -1):
                x = array(name, rng, shape, single=single)
                s = points(name, shape, axes, stretch)
                theirs = norm
                if norm == "none":
                    theirs = "backward" if name in ("fftn", "rfftn") else "forward"
                wide = x.astype(np.result_type(x.dtype, "f8"))
                want = getattr(np.fft, name)(wide, s=s, axes=axes, norm=theirs)
                strided = cupy.zeros((*shape[:-1], 2 * shape[-1]), x.dtype)[..., ::2]
                strided[...] = cupy.asarray(x)
                for given in (cupy.asarray(x), cupy.asarray(np.asfortranarray(x)), strided):
                    poisoned(cupy)
                    got = provider.transform(name, given, s, axes, norm)
                    assert got.dtype == f"{want.dtype.kind}{want.itemsize >> single}"
                    tolerance = (1e-5 if single else 1e-13) * max(np.abs(want).max(initial=0), 1)
                    assert_close(cupy.asnumpy(got), want, rtol=0, atol=tolerance)
                    assert_close(cupy.asnumpy(given), x, exact=True)
                owned = provider.transform(name, cupy.asarray(x), s, axes, norm, owned=True)
                assert owned.tobytes() == got.tobytes()


def differentiated(name, x, g, s, axes, norm):
    """Give a transform, and the gradient of ``x`` for one of the result."""
    x = rx.Tensor(x, requires_grad=True)
    out = getattr(rx.fft, name)(x, s=s, axes=axes, norm=norm)
    out.backward(g)
    return out.data, x.grad


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_gpu_random_transforms_and_gradients(monkeypatch, name):
    """Against NumPy, and gradients against those of float64 on the CPU."""
    cupy = _device.cupy
    rng = np.random.default_rng(8)
    for i in range(60):
        monkeypatch.setattr(_fft_plans, "_LARGE", int(rng.choice([1, 30, 1 << 22])))
        shape, axes, s = random_case(rng)
        single = bool(i % 2)
        x = array(name, rng, shape, single=single)
        norm = ("backward", "ortho", "forward")[i % 3]
        wide = x.astype(np.result_type(x.dtype, "f8"))
        want = getattr(np.fft, name)(wide, s=s, axes=axes, norm=norm)
        g = rng.standard_normal(want.shape)
        if name != "irfftn":
            g = g + 1j * rng.standard_normal(want.shape)
        if single:
            g = g.astype(f"{g.dtype.kind}{g.itemsize // 2}")
        wide_g = g.astype(np.result_type(g.dtype, "f8"))
        wants = want, differentiated(name, wide, wide_g, s, axes, norm)[1]
        order = rng.permutation(len(shape))  # of the axes in memory
        given = cupy.asarray(x.transpose(order).copy()).transpose(np.argsort(order).tolist())
        if rng.random() < 0.3:
            given = cupy.repeat(given, 2, axis=0)[::2]
        poisoned(cupy)
        gots = differentiated(name, given, cupy.asarray(g), s, axes, norm)
        for got, want, like in zip(gots, wants, (g, x), strict=True):
            assert got.dtype == like.dtype
            tolerance = (1e-5 if single else 1e-13) * max(np.abs(want).max(initial=0), 1)
            assert_close(cupy.asnumpy(got), want, rtol=0, atol=tolerance)
        assert_close(cupy.asnumpy(given), x, exact=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("library", ["missing", "without plans"])
def test_gpu_transforms_without_plans_match_numpy(monkeypatch, name, library):
    def fail(*args, **options):
        raise RuntimeError("CUFFT_INTERNAL_ERROR")

    cupy = _device.cupy
    found = types.SimpleNamespace(PlanNd=fail, XtPlanNd=fail)
    monkeypatch.setattr(provider, "_loaded", [found if library != "missing" else None])
    own = Provider("Fourier transforms", "CuPy or NumPy")
    own.refused["warned before"] = 1
    monkeypatch.setattr(provider, "_provider", own)
    rng = np.random.default_rng(9)
    for i, (shape, axes) in enumerate(SHAPES):
        x = array(name, rng, shape, single=i % 2 == 0)
        s, norm = points(name, shape, axes, i % 3 - 1), ["backward", "ortho", "forward"][i % 3]
        with cupy.cuda.Stream(non_blocking=True) as stream:
            poisoned(cupy)
            got = provider.transform(name, cupy.asarray(x), s, axes, norm)
            stream.synchronize()
        wide = x.astype(np.result_type(x.dtype, "f8"))
        want = getattr(np.fft, name)(wide, s=s, axes=axes, norm=norm)
        assert got.dtype == f"{want.dtype.kind}{want.itemsize >> (i % 2 == 0)}"
        tolerance = (1e-13 if i % 2 else 1e-5) * max(np.abs(want).max(initial=0), 1)
        assert_close(cupy.asnumpy(got), want, rtol=0, atol=tolerance)
    if library == "missing":
        with pytest.raises(RuntimeError, match="cannot be captured"):
            capture_one(cupy, name)


def capture_one(cupy, name):
    x = cupy.ones((4, 6), "complex64" if name != "rfftn" else "float32")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        try:
            provider.transform(name, x, (6,), (1,), "ortho")
        finally:
            stream.end_capture()


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_gpu_transforms_where_arrays_start_between_complex_numbers(name):
    cupy = _device.cupy
    rng = np.random.default_rng(2)
    x = array(name, rng, (6, 9), single=True)
    flat = cupy.zeros(x.size + 1, x.dtype)
    given = flat[1:].reshape(x.shape)
    given[...] = cupy.asarray(x)
    for axes in ((1,), (0,), (0, 1)):
        want = getattr(np.fft, name)(x.astype(np.result_type(x.dtype, "f8")), axes=axes)
        got = getattr(rx.fft, name)(given, axes=axes)
        assert_close(cupy.asnumpy(got), want, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_gpu_threads_have_plans_of_their_own():
    cupy = _device.cupy
    rng = np.random.default_rng(4)
    xs = [cupy.asarray(rng.standard_normal((6, 64, 48, 8)).astype("f4")) for _ in range(4)]
    wants = [np.fft.rfftn(cupy.asnumpy(x).astype("f8"), axes=(1, 2)) for x in xs]

    def work(i):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(20):
                spectrum = rx.fft.rfftn(xs[i], axes=(1, 2))
                back = rx.fft.irfftn(spectrum, s=(64, 48), axes=(1, 2))
            stream.synchronize()
            return cupy.asnumpy(spectrum), cupy.asnumpy(back)

    cupy.cuda.Device().synchronize()
    with ThreadPoolExecutor(4) as pool:
        for x, want, (spectrum, back) in zip(xs, wants, pool.map(work, range(4)), strict=True):
            assert_close(spectrum, want, rtol=1e-4, atol=1e-3)
            assert_close(back, cupy.asnumpy(x), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_gpu_new_plans_are_used_at_once_on_streams_of_their_own():
    cupy = _device.cupy
    rng = np.random.default_rng(6)
    x = cupy.asarray(rng.standard_normal((20, 400)))
    host = cupy.asnumpy(x)
    for n in range(4, 204):  # lengths that need tables of all kinds
        name, other = (("rfftn", "irfftn"), ("fftn", "ifftn"))[n % 2]
        part, captured = x[:, :n], n % 5 == 0

        def step(x, name=name, other=other, n=n):
            waves = provider.transform(name, x, (n,), (1,), "none")
            return waves, provider.transform(other, waves, (n,), (1,), "backward")

        provider._thread.plans.clear()  # their memory is used again
        cupy.cuda.Device().synchronize()
        with rx.device("cuda:0"), cupy.cuda.Stream(non_blocking=True) as stream:
            run = rx.capture(step) if captured else step
            for _ in range(3):
                waves, back = run(part)
            stream.synchronize()
        want = (np.fft.rfft if n % 2 == 0 else np.fft.fft)(host[:, :n])
        assert_close(cupy.asnumpy(waves), want, rtol=0, atol=1e-11)
        assert_close(cupy.asnumpy(back.real), host[:, :n], rtol=0, atol=1e-13)


@pytest.mark.gpu
def test_gpu_steps_with_equal_plans_come_and_go():
    """Plans of a step that is gone leave those of the next alone."""
    cupy = _device.cupy
    rng = np.random.default_rng(7)
    with rx.device("cuda:0"):
        for i in range(60):
            z = rng.standard_normal((5, 4, 2)) + 1j * rng.standard_normal((5, 4, 2))
            norm = ("backward", "ortho", "forward")[i % 3]

            def step(x, norm=norm):
                back = rx.fft.irfftn(x, s=(4,), axes=(1,), norm=norm)
                return back, rx.fft.rfftn(back, axes=(1,), norm=norm)

            run, x = rx.capture(step), cupy.asarray(z)
            for _ in range(3):
                back, waves = run(x)
            want = np.fft.irfftn(z, s=(4,), axes=(1,), norm=norm)
            assert_close(cupy.asnumpy(back), want, rtol=0, atol=1e-13)
            want = np.fft.rfftn(want, axes=(1,), norm=norm)
            assert_close(cupy.asnumpy(waves), want, rtol=0, atol=1e-13)
            if i % 4 == 0:
                cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.gpu
def test_gpu_plans_of_64_bits():
    cupy = _device.cupy
    if cupy.cuda.runtime.memGetInfo()[0] < 60 << 30:
        pytest.skip("needs 60 GB of GPU memory")
    n = 1 << 10
    x = cupy.zeros((1 << 21, n), "c8")
    x[-1, 1] = 1
    out = rx.fft.fft(x, axis=1)
    want = np.exp(-2j * np.pi * np.arange(n) / n)
    assert_close(cupy.asnumpy(out[-1]), want.astype("c8"), rtol=1e-5, atol=1e-5)
    assert not bool(out[:-1].any())
    del x, out
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.gpu
def test_gpu_captured_transforms_work_in_memory_of_their_own():
    cupy = _device.cupy
    rng = np.random.default_rng(1)

    def step(x):
        spectrum = rx.fft.rfftn(x, axes=(1, 2), norm="ortho")
        back = rx.fft.irfftn(spectrum * 2, s=x.shape[1:3], axes=(1, 2), norm="ortho")
        return spectrum, back, rx.fft.fft(x, axis=1)

    with rx.device("cuda:0"):
        run = rx.capture(step)
        for i in range(6):
            x = cupy.asarray(rng.standard_normal((3, 30, 14, 6)).astype(np.float32))
            for got, want in zip(run(x), step(x), strict=True):
                assert got.tobytes() == want.tobytes(), i
            for _ in range(80):  # eager plans come and go
                step(cupy.ones((2, int(rng.integers(2, 200)), 8, 2), "float32"))
        assert run.n_captures == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_gpu_captured_gradients_of_gradients(name):
    """Have the bits of eager ones, which are those of NumPy in float64."""
    cupy = _device.cupy
    rng = np.random.default_rng(11)

    def loss(x):
        out = getattr(rx.fft, name)(x, axes=(2, 0), norm="ortho")
        return rx.sum(rx.abs(out) ** 4)

    def penalty(x):
        return rx.sum(rx.abs(rx.grad(loss)(x)) ** 2)

    with rx.device("cuda:0"):
        run = rx.capture(rx.grad(penalty))
        for _ in range(4):
            x = array(name, rng, (6, 3, 5))
            got = run(cupy.asarray(x))
            assert_close(got, rx.grad(penalty)(cupy.asarray(x)), exact=True)
            want = rx.grad(penalty)(x)
            assert_close(got, want, rtol=0, atol=1e-11 * np.abs(want).max())
        assert run.n_captures == 1
