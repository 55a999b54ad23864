"""Kernels against their CPU twins: in the simulator on a few threads, on a GPU at full size."""

import ml_dtypes
import numpy as np
import pytest

from rtxarr import _device
from rtxarr._device import device, runs_kernels
from rtxarr.kernels import philox, scatter, segment
from rtxarr.kernels.philox import _U
from rtxarr.kernels.scatter import scatter_reduce
from rtxarr.kernels.segment import segment_reduce
from rtxarr.testing import assert_close

HALVES = [np.float16, ml_dtypes.bfloat16]


def put(x, place):
    return x if place == "cpu" else _device.to_device(x, place)


def size(place, small, large):
    return small if place == "cpu" else large


# ------------------------------------------------------------------------------- random numbers

INFINITE = (-np.inf, np.inf)
DRAWS = {
    "word32": (["uint32"], ()),
    "below32": (["bool"], (_U(3 << 30),)),
    "uniform32": (["float32", *HALVES], tuple(np.float32(x) for x in (3, -1, -1, 1.5))),
    "uniform64": (["float64"], (3.0, -1.0, -1.0, 1.9999999999999998)),
    "normal32": (["float32", *HALVES], (0.0, 1.0, 2.0, 0.5, *INFINITE)),
    "normal64": (["float64"], (0.0, 1.0, 2.0, 0.5, *INFINITE)),
    "exponential32": (["float32", *HALVES], (2.0,)),
    "exponential64": (["float64"], (2.0,)),
    "signed64": (["int8", "int32", "int64"], (_U(100), np.int64(-50))),
    "unsigned64": (["uint8", "uint32"], (_U(200), _U(7))),
}
CASES = [(kind, dtype) for kind, (dtypes, _) in DRAWS.items() for dtype in dtypes]


@pytest.mark.parametrize(
    "kind, dtype", CASES, ids=[f"{kind}-{np.dtype(dtype).name}" for kind, dtype in CASES]
)
def test_draws_have_the_bits_of_numpys(place, kind, dtype):
    dtype, params = np.dtype(dtype), DRAWS[kind][1]
    key, stream = _U(0x123456789ABCDEF0), _U(0x0FEDCBA987654321)
    step = philox.words_per_value(kind)
    for offset in range(0, 4, step):
        for n in (1, 2, 5, size(place, 40, 1_000_003)):
            got = philox.fill(
                kind, n, dtype, params, key=key, stream=stream, offset=offset, device=place
            )
            words = philox.stream_words(offset, n * step, key=key, stream=stream)
            full = (*params, *(params[-1:] or (_U(0),)) * (6 - len(params)))
            want = philox._fill_numpy(kind, words, dtype, full, key, stream)
            assert runs_kernels(got)
            assert got.dtype == dtype
            assert_close(got, want, exact=True)


def test_rejected_integers_have_the_bits_of_numpys(place):
    """Of this span a quarter of the words are rejected."""
    key, stream, span = _U(1), _U(2), _U(3 << 62)
    n = size(place, 40, 100_000)
    got = philox.fill(
        "unsigned64", n, np.dtype("uint64"), (span, _U(0)), key=key, stream=stream, offset=0,
        device=place,
    )  # fmt: skip
    words = philox.stream_words(0, 2 * n, key=key, stream=stream)
    params = (span, *(_U(0),) * 5)
    want = philox._fill_numpy("unsigned64", words, np.dtype("uint64"), params, key, stream)
    assert_close(got, want, exact=True)


# ------------------------------------------------------------------------ segments and scatters


def make_segments(lengths, n_features, dtype):
    """Return small integers, whose sums no type has to round, and row pointers."""
    rng = np.random.default_rng(0)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return rng.integers(0, 2, (int(indptr[-1]), n_features)).astype(dtype), indptr


VALUES = ["float32", "float64", "float16", ml_dtypes.bfloat16, "int32", "uint8"]
REDUCTIONS = [(op, t) for op in ("sum", "max", "min") for t in VALUES]
REDUCTIONS += [("mean", t) for t in ("float32", "float16", ml_dtypes.bfloat16)]
NAMES = [f"{op}-{np.dtype(t).name}" for op, t in REDUCTIONS]


@pytest.mark.parametrize("n_features", [1, 3, 8, 40])
@pytest.mark.parametrize("op, dtype", REDUCTIONS, ids=NAMES)
def test_segments_match_the_host(place, monkeypatch, op, dtype, n_features):
    if place == "cpu":  # one long segment is enough for the simulator
        monkeypatch.setattr(segment, "_CHUNK", 4)
        lengths = [2, 0, 9]
    else:
        lengths = [2, 0, 3, 1024, 1025, 5000, 0, *range(30)]
    values, indptr = make_segments(lengths, n_features, dtype)
    if np.dtype(dtype) == np.uint8 and op == "sum":
        values[values.shape[0] // 2 :] = 0  # the sums fit
        values[20:] = 0
    got = segment_reduce(op, put(values, place), put(indptr, place))
    want = segment._reduce_host(op, values, indptr, None, got.shape)
    assert got.dtype == values.dtype
    assert_close(got, want)
    if op != "mean":
        assert_close(got, want, exact=True)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_gathered_rows_match_the_host(place, monkeypatch, op, index_dtype):
    monkeypatch.setattr(segment, "_CHUNK", 4)
    values, indptr = make_segments([2, 0, 9], 4, "float32")
    indices = np.random.default_rng(1).permutation(11).astype(index_dtype)
    got = segment_reduce(op, put(values, place), put(indptr, place), indices=put(indices, place))
    assert_close(got, segment._reduce_host(op, values, indptr, indices, got.shape))


def test_short_segments_have_the_bits_of_the_host(place):
    """Both add the rows of a segment in order, in float32."""
    values, indptr = make_segments([3, 40], 4, "float32")
    values += np.random.default_rng(2).standard_normal(values.shape).astype(np.float32)
    got = segment_reduce("sum", put(values, place), put(indptr, place))
    assert_close(got, segment._reduce_host("sum", values, indptr, None, (2, 4)), exact=True)


def test_nan_wins_on_the_device(place):
    values = np.array([[np.nan], [1.0], [2.0], [np.nan]], dtype=np.float32)
    indptr = np.array([0, 2, 4])
    for op in ("max", "min"):
        assert np.isnan(_host(segment_reduce(op, put(values, place), put(indptr, place)))).all()


def test_rows_that_are_not_aligned(place):
    """A view that starts off a 16-byte boundary, and one that is not contiguous."""
    values, indptr = make_segments([2, 3], 4, "float32")
    want = segment._reduce_host("sum", values, indptr, None, (2, 4))
    flat = put(np.concatenate([np.zeros(1, np.float32), values.ravel()]), place)
    for view in (flat[1:].reshape(5, 4), put(np.ascontiguousarray(values.T), place).T):
        assert_close(segment_reduce("sum", view, put(indptr, place)), want, exact=True)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_scatters_match_the_host(place, monkeypatch, op):
    monkeypatch.setattr(scatter, "_CHUNK_OF_FEW", 2)
    n_values, n_rows = size(place, (11, 6), (5000, 300))
    rng = np.random.default_rng(3)
    index = rng.integers(0, n_rows - 1, n_values)
    values = rng.integers(0, 5, (n_values, 4)).astype(np.float32)
    order = np.argsort(index, kind="stable")
    indptr = np.searchsorted(index[order], np.arange(n_rows + 1)).astype(np.int64)
    got = scatter_reduce(op, put(index, place), put(values, place), n_rows)
    assert_close(got, segment._reduce_host(op, values, indptr, order, (n_rows, 4)))


def test_nothing_to_do_launches_nothing(place):
    values, indptr = np.ones((0, 3), np.float32), np.zeros(3, np.int64)
    got = segment_reduce("sum", put(values, place), put(indptr, place))
    assert_close(got, np.zeros((2, 3), np.float32), exact=True)
    assert segment_reduce("sum", put(values[:, :0], place), put(indptr, place)).shape == (2, 0)
    key = {"key": _U(0), "stream": _U(0), "offset": 0, "device": place}
    assert philox.fill("word32", 0, np.dtype("uint32"), (), **key).shape == (0,)


def _host(x):
    return _device.to_device(x, "cpu")


# ------------------------------------------------------------------------------------ a GPU only


@pytest.mark.gpu
def test_repeated_runs_give_equal_bits():
    rng = np.random.default_rng(4)
    values = rng.standard_normal((100_000, 32)).astype(np.float32)
    index = np.minimum(rng.zipf(1.3, 100_000), 5000) - 1
    values, index = put(values, device("cuda:0")), put(index, device("cuda:0"))
    first = scatter_reduce("sum", index, values, 5000)
    for _ in range(3):
        assert_close(scatter_reduce("sum", index, values, 5000), first, exact=True)


@pytest.mark.gpu
def test_the_batch_does_not_change_a_segments_bits():
    rng = np.random.default_rng(5)
    lengths = np.array([3, 5000, 100, 2000])
    values = rng.standard_normal((lengths.sum(), 8)).astype(np.float32)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    gpu = device("cuda:0")
    whole = segment_reduce("sum", put(values, gpu), put(indptr, gpu))
    for i, (a, b) in enumerate(zip(indptr[:-1], indptr[1:], strict=True)):
        alone = segment_reduce("sum", put(values[a:b], gpu), put(np.array([0, b - a]), gpu))
        assert_close(alone[0], whole[i], exact=True)
