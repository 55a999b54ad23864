"""Saved programs that draw random numbers: those of the function, from the same place."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.polygraph import ArraySpec, BundleError, NotSaved, _aot_load, _bundle, load
from rtxarr.random import Generator

from .test_aot import needs_code, same, targets
from .test_cuda_backend import FakeGpu
from .test_draws import DRAWS


def roundtrip(function, arguments, path, target):
    fused = rx.fuse(function)
    fused.aot([arguments], targets=target).save(path)
    return fused, load(path)


@targets
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_the_fused_function(name, target, tmp_path):
    x = np.random.default_rng(0).standard_normal((5, 4))
    rng = Generator(1)
    rng.uniform(3, dtype="float32")  # it stands at an odd word
    before = rng.state_dict()
    fused, loaded = roundtrip(lambda x: DRAWS[name](rng, x), (x,), tmp_path / "f", target)
    assert rng.state_dict() == before
    for _ in range(3):
        got, want = loaded(x), fused(x)
        if target == "numpy":  # its sums are in another order than those of kernels
            np.testing.assert_allclose(got, want, rtol=1e-12)
        else:
            same(got, want)
    (theirs,) = loaded.generators
    assert theirs.state_dict() == rng.state_dict()
    theirs.load_state_dict(before)
    rng.load_state_dict(before)
    np.testing.assert_allclose(loaded(x), DRAWS[name](rng, x), rtol=1e-12)


@targets
def test_the_default_generator_is_the_process_own(target, tmp_path):
    fused, loaded = roundtrip(lambda x: rx.dropout(x, 0.5), (np.ones(100),), tmp_path / "f", target)
    assert loaded.generators == [rx.random.default_generator()]
    for seed in (3, 4):
        rx.random.seed(seed)
        got = [loaded(np.ones(100)) for _ in range(2)]
        rx.random.seed(seed)
        same(got, [rx.dropout(np.ones(100), 0.5) for _ in range(2)])


@targets
def test_generators_among_the_arguments(target, tmp_path):
    found = Generator(7)

    def f(x, first, second):
        return x + first.uniform(x.shape) - second.normal(x.shape) * found.uniform(x.shape)

    spec = ArraySpec((6,), "float64")
    # One that is given twice and found too is three to the program.
    fused, loaded = roundtrip(f, (spec, found, found), tmp_path / "f", target)
    assert [g.state_dict() for g in loaded.generators] == [Generator(7).state_dict()]
    x = np.linspace(0, 1, 6)
    for given in ((Generator(1), Generator(2)), (Generator(3),) * 2, (loaded.generators[0],) * 2):
        ours = given[0] is loaded.generators[0]
        states = [g.state_dict() for g in given]
        got = loaded(x, *given)
        after = [g.state_dict() for g in given]
        for g, state in zip(given, states, strict=True):
            g.load_state_dict(state)
        if ours:
            found.load_state_dict(states[0])
            given = found, found
        same(got, f(x, *given))
        assert [g.state_dict() for g in given] == after
    with pytest.raises(TypeError, match=r"compiled for \(float64\[6\], Generator, Generator\)"):
        loaded(x, Generator(0), 3)


@targets
def test_several_programs_share_their_generators(target, tmp_path):
    a, b = Generator(1), Generator(2)
    fused = rx.fuse(lambda x: x + a.uniform(x.shape) * b.uniform(x.shape))
    fused.aot([(ArraySpec((n,), "float64"),) for n in (3, 4)], targets=target).save(tmp_path / "f")
    loaded = load(tmp_path / "f")
    assert len(loaded.generators) == 2
    for n in (3, 4, 3):
        same(loaded(np.ones(n)), fused(np.ones(n)))


@targets
def test_a_call_that_is_refused_draws_nothing(target, tmp_path):
    rng = Generator(1)

    def f(x, y):
        x += rng.uniform(x.shape) * y

    x = np.ones(8)
    _, loaded = roundtrip(f, (x, x.copy()), tmp_path / "f", target)
    before = loaded.generators[0].state_dict()
    with pytest.raises(ValueError, match="share memory with others"):
        loaded(x, x)
    with pytest.raises(TypeError, match="was compiled for"):
        loaded(x, 2 * x[:3])
    assert loaded.generators[0].state_dict() == before
    assert np.array_equal(x, np.ones(8))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda header: header["generators"][0].pop("key"),
        lambda header: header["generators"].pop(),
        lambda header: header["generators"][0].update(offset=-1),
        lambda header: of_draw(header).__setitem__(1, "elsewhere"),
        lambda header: of_draw(header).__setitem__(1, "leaf"),
        lambda header: of_draw(header).__setitem__(2, 1),
        lambda header: of_draw(header).__setitem__(3, "print(1)"),
        lambda header: of_draw(header).__setitem__(4, -1),
        lambda header: of_draw(header).__setitem__(4, "8"),
        lambda header: options(header)["n"].__setitem__(1, 9),
        lambda header: options(header)["kind"].__setitem__(1, "none"),
        lambda header: options(header)["params"].__setitem__(1, ["x"]),
    ],
)
def test_damaged_draws_are_refused_by_name(spoil, tmp_path):
    rng = Generator(1)
    bundle = rx.fuse(lambda x: x + rng.uniform(8)).aot([(np.ones(8),)], targets="numpy")
    spoil(bundle.header)
    _bundle.write(tmp_path / "f.rtx", bundle.header, bundle.parts, None)
    with pytest.raises(BundleError, match=r"f\.rtx does not hold programs as they are"):
        load(tmp_path / "f.rtx")


def of_draw(header):
    (found,) = [s for s in header["programs"][0]["sources"] if s[0] == "draw"]
    return found


def options(header):
    nodes = header["programs"][0]["program"]["nodes"]
    (attrs,) = [node[2] for node in nodes if node[0] == "call"]
    return {name: pair for pair in attrs[1] for name in pair[:1]}


def test_steps_are_refused_by_name():
    model = rx.nn.Linear(3, 1)
    optimizer = rx.optim.SGD(model.parameters(), lr=0.1)

    @rx.jit
    def step(x):
        optimizer.zero_grad()
        rx.sum(model(x)).backward()
        optimizer.step()

    with pytest.raises(NotSaved, match="a step of rx.jit cannot be saved.*save rx.fuse"):
        step.aot([(np.ones((2, 3), "float32"),)])


@pytest.mark.nvrtc
def test_draws_on_a_gpu_need_numba_cuda(tmp_path, monkeypatch):
    pytest.importorskip("cupy")
    from rtxarr.polygraph import _cuda_start

    rng = Generator(1)
    bundle = rx.fuse(lambda x: x + rng.uniform(8)).aot(
        [(ArraySpec((8,), "float64"),)], targets="cuda", architectures=["sm_90"]
    )
    bundle.save(tmp_path / "f.rtx")
    monkeypatch.setattr(_cuda_start, "Gpu", FakeGpu)
    load(tmp_path / "f.rtx")
    monkeypatch.setattr(_aot_load, "find_spec", lambda name: None)
    with pytest.raises(BundleError, match=r"f\.rtx draws random numbers on a GPU.*numba-cuda"):
        load(tmp_path / "f.rtx")


@pytest.mark.gpu
@pytest.mark.parametrize("name", DRAWS)
def test_draws_on_a_gpu(name, tmp_path):
    cupy = pytest.importorskip("cupy")
    x = cupy.asarray(np.random.default_rng(0).standard_normal((5, 4)))
    rng = Generator(1)
    fused = rx.fuse(lambda x: DRAWS[name](rng, x))
    options = {"architectures": [f"sm_{cupy.cuda.Device().compute_capability}"]}
    with rx.device("cpu"):  # where functions are compiled for says where they draw
        rx.fuse(lambda x: DRAWS[name](rng, x)).aot([(x,)], targets="cuda", **options)
    with rx.device("cuda"):
        fused.aot([(x,)], targets="cuda", **options).save(tmp_path / "f")
        loaded = load(tmp_path / "f")
        for _ in range(2):
            got, want = loaded(x), fused(x)
            assert cupy.asnumpy(got).tobytes() == cupy.asnumpy(want).tobytes()
    assert not fused.reasons
    assert loaded.generators[0].state_dict() == rng.state_dict()


@needs_code
def test_what_a_step_computes_can_be_saved(tmp_path):
    """The way that the refusal names: what changes is taken and given, draws too."""
    rng = Generator(3)
    x = np.random.default_rng(0).standard_normal((6, 4)).astype("float32")

    def loss(w):
        return rx.sum(rx.dropout(rx.tanh(x @ w), 0.5, generator=rng) ** 2)

    def step(w, rate):
        return w - rate * rx.grad(loss)(w)

    w = np.ones((4, 2), "float32")
    fused, loaded = roundtrip(step, (w, 0.1), tmp_path / "f", "cpu")
    a = b = w
    for rate in (0.1, 0.2, 0.05):
        a, b = loaded(a, rate), fused(b, rate)
        same(a, b)
