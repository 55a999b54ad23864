"""How cuDNN is found, what it is asked for, and which plans are kept, with a stand-in."""

import concurrent.futures
import types
import warnings

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _replay, libs
from rtxarr.libs import _cudnn, _dnn, blas, dnn
from rtxarr.ops._windows import make_windows

# ------------------------------------------------------------------------- finding the library


def attend(cupy, dtype=rx.float16, n_queries=8, **options):
    q = cupy.ones((2, 4, n_queries, 16), dtype)
    k = cupy.ones((2, 4, 8, 16), dtype)
    options = {"causal": False, "offset": 0, "window": None, "scale": 0.25, **options}
    mask, lengths = options.pop("mask", None), options.pop("lengths", None)
    return dnn.try_attention(q, k, k, mask, lengths, **options)


def convolve(cupy, x=(2, 4, 6, 6), weight=(8, 4, 3, 3), dtype=rx.float32, **options):
    padding = options.pop("padding", 1)
    windows = make_windows(weight[2:], x[2:], options.pop("stride", 1), padding, 1)
    arrays = (cupy.ones(s, dtype) for s in (x, weight))
    return dnn.try_convolution(*arrays, windows=windows, groups=1, **options)


def test_a_missing_library_warns_once(bare_dnn, capsys):
    assert attend(bare_dnn, rx.float32) is None  # float32 would not have used it
    want = (
        "attention and convolutions run through CuPy: nvidia-cudnn-frontend is not installed; "
        "pip install --upgrade nvidia-cudnn-cu13 nvidia-cudnn-frontend"
    )
    with pytest.warns(RuntimeWarning, match=want):
        assert attend(bare_dnn) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert convolve(bare_dnn) is None
        assert attend(bare_dnn) is None
    libs.show()
    assert "convolutions: CuPy (nvidia-cudnn-frontend is not" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "frontend", "text"),
    [
        (91500, "1.32.0", "cuDNN 9.15.0 is older than 9.16"),
        (91900, "1.18.0", "nvidia-cudnn-frontend 1.18.0 is older than 1.32"),
    ],
)
def test_an_old_library_is_not_used(fake_dnn, version, frontend, text):
    fake_dnn.version, fake_dnn.__version__ = version, frontend
    with pytest.warns(RuntimeWarning, match=f"{text}.*pip install"):
        assert convolve(fake_dnn.cupy) is None


def test_a_frontend_without_its_library(fake_dnn, monkeypatch):
    def absent():
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    fake_dnn.backend_version = absent
    with pytest.warns(RuntimeWarning, match=r"cannot use cuDNN \(Unable to find.*pip install"):
        assert convolve(fake_dnn.cupy) is None


def test_show_counts_what_went_elsewhere(fake_dnn, capsys):
    cupy = fake_dnn.cupy
    for _ in range(2):
        assert attend(cupy, rx.float32) is None
    assert convolve(cupy, x=(0, 4, 6, 6)) is None  # nothing to do, so nothing to count
    assert convolve(cupy) is not None
    libs.show()
    assert capsys.readouterr().out.splitlines()[-4:-2] == [
        "attention and convolutions: cuDNN 9.19.0, through nvidia-cudnn-frontend 1.32.0",
        "    2 by CuPy: attention in float32",
    ]


REFUSED = {
    "attention in float64": lambda x: attend(x, rx.float64),
    "a single query, without key_lengths": lambda x: attend(x, n_queries=1),
    "a causal offset below zero": lambda x: attend(x, causal=True, offset=-1),
    "a scale that is not positive": lambda x: attend(x, scale=-1.0),
    "a mask with key_lengths": lambda x: attend(
        x, mask=x.ones((1, 1, 8, 8), bool), lengths=x.ones(2, int)
    ),
    "a mask of bfloat16 for float16": lambda x: attend(x, mask=x.ones((1, 1, 8, 8), rx.bfloat16)),
    "a window with key_lengths": lambda x: attend(x, window=3, lengths=x.ones(2, int)),
    "a window that ends behind the keys": lambda x: attend(x, window=3, causal=True, offset=2),
    "a window shorter than the causal offset": lambda x: attend(
        x, n_queries=4, window=2, causal=True, offset=2
    ),
    "convolutions in float64": lambda x: convolve(x, dtype=rx.float64),
    "convolutions in float32 and float16": lambda x: convolve(x, bias=x.ones(8, rx.float16)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_say_why(fake_dnn, reason):
    assert REFUSED[reason](fake_dnn.cupy) is None
    assert dnn.status().refused == {reason: 1}
    assert fake_dnn.started == []


def test_gradients_of_masks_that_are_left_out(fake_dnn):
    cupy = fake_dnn.cupy
    q = cupy.ones((2, 4, 8, 16), rx.float16)
    options = {"causal": False, "offset": 0, "window": None, "scale": 0.25}
    for shape, dtype, reason in (
        ((1, 1, 8, 8), rx.float32, "the gradient of a mask of float32 for float16"),
        ((1, 1, 1, 8), rx.float16, "the gradient of a mask that is broadcast along queries"),
    ):
        mask = cupy.ones(shape, dtype)
        out, sums = dnn.try_attention(q, q, q, mask, None, **options)
        arrays = (q, out, sums, q, q, q, mask, None)
        assert dnn.try_attention_grad(*arrays, **options, of_mask=True) is None
        assert any(text.startswith(reason) for text in dnn.status().refused)
        assert dnn.try_attention_grad(*arrays, **options, of_mask=False) is not None


def test_arrays_elsewhere(fake_dnn):
    cupy = fake_dnn.cupy
    windows = make_windows((3, 3), (6, 6), 1, 1, 1)
    x, weight = cupy.ones((2, 4, 6, 6)).astype("float32"), cupy.ones((8, 4, 3, 3)).astype("float32")
    x.device_id = 1
    assert dnn.try_convolution(x, weight, windows=windows, groups=1) is None
    assert dnn.try_convolution(weight, np.asarray(x), windows=windows, groups=1) is None
    assert dnn.status().refused == {
        "an array that is not on the current device": 1,
        "an array that is not CuPy's": 1,
    }


def test_a_problem_without_a_plan_is_asked_for_once(fake_dnn):
    fake_dnn.engines = []
    assert attend(fake_dnn.cupy) is attend(fake_dnn.cupy) is None
    assert dnn.status().refused == {"no plan for attention in float16": 2}
    fake_dnn.engines = [(20_500, set()), (3, {"NONDETERMINISTIC"})]
    assert convolve(fake_dnn.cupy) is None
    assert "no plan for a convolution in float32" in dnn.status().refused
    assert fake_dnn.planned == 2


# --------------------------------------------------------------------------------------- plans


def test_a_plan_serves_all_that_lie_alike(fake_dnn):
    cupy = fake_dnn.cupy

    def plans(call):
        before = fake_dnn.planned
        assert call() is not None
        return fake_dnn.planned - before

    assert plans(lambda: convolve(cupy)) == 1
    assert plans(lambda: convolve(cupy)) == 0
    assert plans(lambda: convolve(cupy, bias=cupy.ones(8, rx.float32))) == 1
    assert plans(lambda: convolve(cupy, activation="relu")) == 1
    assert plans(lambda: convolve(cupy, stride=2)) == 1
    assert plans(lambda: convolve(cupy, dtype=rx.bfloat16)) == 1
    assert plans(lambda: convolve(cupy, x=(3, 4, 6, 6))) == 1
    assert plans(lambda: attend(cupy)) == 1
    assert plans(lambda: attend(cupy)) == 0
    assert plans(lambda: attend(cupy, causal=True)) == 1
    assert plans(lambda: attend(cupy, causal=True, offset=1)) == 1
    assert plans(lambda: attend(cupy, causal=True, offset=7)) == 0  # all keys are seen
    assert plans(lambda: attend(cupy, window=3)) == 1
    assert plans(lambda: attend(cupy, window=8)) == 0
    assert plans(lambda: attend(cupy, scale=0.5)) == 1
    assert plans(lambda: attend(cupy, lengths=cupy.ones(2, int))) == 1
    assert plans(lambda: attend(cupy, mask=cupy.ones((1, 1, 1, 8), bool))) == 1
    assert plans(lambda: attend(cupy, mask=cupy.ones((1, 1, 8, 1), bool))) == 0
    assert _dnn.library().n_plans() == 13


def test_more_kinds_of_problems_than_are_kept(fake_dnn, monkeypatch):
    monkeypatch.setattr(_cudnn, "_MAX_PLANS", 1)
    assert convolve(fake_dnn.cupy) is not None
    assert convolve(fake_dnn.cupy, stride=2) is None
    assert convolve(fake_dnn.cupy) is not None
    assert dnn.status().refused == {"more than 1 kinds of problems": 1}


def test_problems_that_are_met_once_get_no_plans_in_the_long_run(fake_dnn, monkeypatch):
    """As those of a sequence that grows: each plan would take longer than what it is for."""
    monkeypatch.setattr(_cudnn, "_N_FLEETING", 4)
    served = [attend(fake_dnn.cupy, n_queries=n) is not None for n in range(2, 12)]
    assert served == 4 * [True] + 6 * [False]
    assert dnn.status().refused == {"problems that differ from call to call": 6}
    with _replay.keeping({}):  # as in the eager call of a captured step
        assert attend(fake_dnn.cupy, n_queries=40) is not None
    served = [attend(fake_dnn.cupy, n_queries=20) is not None for _ in range(4)]
    assert served == [False, False, True, True]
    assert attend(fake_dnn.cupy, n_queries=30) is not None  # as they have settled


@pytest.mark.parametrize("known", [True, False])
def test_the_quick_way_to_start_a_plan(fake_dnn, monkeypatch, known):
    """The frontend's own, if it takes what it took."""
    calls = []

    def attach(graph, handle, content):
        def execute(pack, workspace, handle, *rest):
            calls.append((handle, rest))
            if not known:
                raise TypeError("incompatible function arguments")
            graph.execute(pack, workspace, handles[0])

        deserialize(graph, handle, content)
        handles.append(handle)
        handle.backend_handle = 5
        graph._lowered_graph = types.SimpleNamespace(_execute=execute)

    handles = []
    graph = type(fake_dnn.pygraph())
    deserialize = graph.deserialize
    monkeypatch.setattr(graph, "deserialize", attach)
    for _ in range(2):
        assert float(convolve(fake_dnn.cupy)[0, 0, 2, 2]) == 36
    assert calls == (2 if known else 1) * [(5, (None, None, None))]


def test_what_plans_may_do(fake_dnn):
    never = {"NONDETERMINISTIC", "REDUCED_PRECISION_REDUCTION", "WINOGRAD", "FFT"}
    rounding = {"TENSOR_CORE", "DOWN_CONVERT_INPUTS"}
    convolve(fake_dnn.cupy)
    assert never | rounding < fake_dnn.unwanted
    convolve(fake_dnn.cupy, dtype=rx.bfloat16)
    assert never < fake_dnn.unwanted and not rounding & fake_dnn.unwanted
    blas.allow_tf32(True)
    try:
        convolve(fake_dnn.cupy)
        assert not rounding & fake_dnn.unwanted
    finally:
        blas.allow_tf32(False)


def test_gradients_of_attention_in_a_fixed_order_unless_told(fake_dnn):
    cupy = fake_dnn.cupy
    q = cupy.ones((2, 4, 8, 16), rx.float16)
    options = {"causal": False, "offset": 0, "window": None, "scale": 0.25, "of_mask": False}
    sums = cupy.ones((2, 4, 8), rx.float32)
    try:
        for enabled in (True, False, True):
            dnn.deterministic(enabled)
            dnn.try_attention_grad(q, q, sums, q, q, q, None, None, **options)
    finally:
        dnn.deterministic(True)
    assert fake_dnn.deterministic == [True, False]


def test_candidates_are_timed_and_the_fastest_is_kept(fake_dnn, monkeypatch, tmp_path):
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path))
    fake_dnn.engines = [(1, set()), (20_900, set()), (2, set()), (3, {"WINOGRAD"}), (4, set())]
    fake_dnn.cupy.times = iter([3.0, 1.0, 2.0])
    want = np.asarray(convolve(fake_dnn.cupy))
    assert {engine for engine, _ in fake_dnn.started} == {1, 2, 4}
    for _ in range(2):  # in this process, then in another one
        fake_dnn.started.clear()
        np.testing.assert_array_equal(np.asarray(convolve(fake_dnn.cupy)), want)
        assert [engine for engine, _ in fake_dnn.started] == [2]
        monkeypatch.setattr(_dnn, "loaded", [])
    assert fake_dnn.planned == 1
    # What is kept but not usable is chosen anew.
    fake_dnn.kept.clear()
    monkeypatch.setattr(_dnn, "loaded", [])
    fake_dnn.cupy.times = iter([1.0, 2.0, 3.0])
    np.testing.assert_array_equal(np.asarray(convolve(fake_dnn.cupy)), want)
    assert fake_dnn.planned == 2


def test_candidates_that_are_close_are_timed_in_turn(fake_dnn, monkeypatch, tmp_path):
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path))
    fake_dnn.engines = [(1, set()), (2, set()), (3, set()), (4, set())]
    # At first the third seems the fastest; the second is too slow to be looked at again.
    turns = [1.0, 1.0, 0.9] * 4 + [1.0, 1.0, 5.0]
    fake_dnn.cupy.times = iter([1.0, 1.3, 0.9, 1.0, *turns])
    convolve(fake_dnn.cupy)
    assert next(fake_dnn.cupy.times, None) is None
    fake_dnn.started.clear()
    convolve(fake_dnn.cupy)
    assert [engine for engine, _ in fake_dnn.started] == [4]


def test_nothing_is_timed_while_capturing(fake_dnn, monkeypatch, tmp_path):
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path))
    fake_dnn.engines = [(1, set()), (2, set())]
    fake_dnn.cupy.stream.is_capturing = lambda: True
    convolve(fake_dnn.cupy)
    assert [engine for engine, _ in fake_dnn.started] == [1]
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_timed_where_nothing_is_kept(fake_dnn):
    """The choice would differ from process to process, and so would the last bits."""
    fake_dnn.engines = [(1, set()), (2, set())]
    convolve(fake_dnn.cupy)
    assert [engine for engine, _ in fake_dnn.started] == [1]


def test_each_thread_has_a_handle(fake_dnn):
    """The stand-in fails when a handle is used by another thread."""
    convolve(fake_dnn.cupy)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: convolve(fake_dnn.cupy), range(12)))
    assert all(result is not None for result in results)


def test_the_stream_is_followed(fake_dnn):
    streams = []
    fake_dnn.set_stream = lambda handle, stream: streams.append(stream)
    convolve(fake_dnn.cupy)
    fake_dnn.cupy.stream.ptr = 77
    convolve(fake_dnn.cupy)
    assert streams == [0, 77]
