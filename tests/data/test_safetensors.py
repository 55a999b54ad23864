"""The file format: against the safetensors package, and against hostile files."""

import contextlib
import hashlib
import json
import math
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from rtxarr.data import CheckpointError, load_arrays, load_checkpoint, save_arrays, save_checkpoint
from rtxarr.data._safetensors import write_file

NAMES = {
    "bool": np.dtype(bool),
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64")},
    **{name: np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64")},
    **{name: np.dtype(name) for name in ("float16", "float32", "float64")},
    **{name: np.dtype(name) for name in ("complex64", "complex128")},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
SHAPES = {"0-d": (), "empty": (0, 3), "one": (1,), "matrix": (3, 4), "3-d": (2, 3, 2)}


def random_array(dtype, shape, seed=0):
    """Any bit pattern, NaN payloads included."""
    n_bytes = math.prod(shape) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)
    if dtype.kind == "b":
        raw %= 2
    return raw.view(dtype).reshape(shape)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def write_raw(path, header, data=b"", *, length=None):
    """Write a file by hand; ``header`` is a dict, or the header's bytes."""
    if not isinstance(header, bytes):
        header = json.dumps(header).encode()
    length = len(header) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + header + data)
    return path


def described(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


# ------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", NAMES.values(), ids=NAMES)
def test_round_trip_keeps_every_bit(tmp_path, dtype, shape):
    x = random_array(dtype, shape)
    save_arrays(tmp_path / "f", {"x": x})
    got = load_arrays(tmp_path / "f")
    assert list(got) == ["x"]
    assert same_bits(got["x"], x)
    assert got["x"].flags.writeable


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[::-1, ::2],
        lambda x: np.broadcast_to(x[0], (5, 6)),
        lambda x: np.asfortranarray(x),
        lambda x: x.astype(x.dtype.newbyteorder(">")),
    ],
    ids=["transposed", "strided", "broadcast", "fortran", "big-endian"],
)
@pytest.mark.parametrize("dtype", ["float32", "complex128", "int16"])
def test_layout_does_not_matter(tmp_path, view, dtype):
    x = view(np.arange(24).reshape(4, 6).astype(dtype))
    save_arrays(tmp_path / "f", {"x": x})
    got = load_arrays(tmp_path / "f")["x"]
    assert got.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(got, x)


@pytest.mark.skip_xp("dask.array", reason="writing a lazy array computes it")
def test_arrays_of_any_library(tmp_path, xp):
    x = xp.reshape(xp.arange(6, dtype=xp.float32), (2, 3))
    save_arrays(tmp_path / "f", {"x": x})
    got = load_arrays(tmp_path / "f")["x"]
    assert same_bits(got, np.arange(6, dtype=np.float32).reshape(2, 3))


def test_wide_elements_lie_aligned(tmp_path):
    arrays = {
        "a": np.zeros(3, np.uint8),
        "b": np.zeros(5, np.float16),
        "c": np.zeros(2),
        "d": np.zeros(1, np.complex128),
        "e": np.zeros(3, np.float32),
    }
    save_arrays(tmp_path / "f", arrays)
    raw = (tmp_path / "f").read_bytes()
    n_header = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n_header])
    for name, x in arrays.items():
        assert (8 + n_header + header[name]["data_offsets"][0]) % min(x.itemsize, 8) == 0


def test_names_are_kept_as_they_are(tmp_path):
    names = ["", "a.b", "../../etc/passwd", "/abs", "a\nb", "ключ", "\U0001f600", '"', "\\", "a\0b"]
    save_arrays(tmp_path / "f", {name: np.array(i) for i, name in enumerate(names)})
    got = load_arrays(tmp_path / "f")
    assert {name: int(x) for name, x in got.items()} == {n: i for i, n in enumerate(names)}
    assert os.listdir(tmp_path) == ["f"]


def test_no_arrays(tmp_path):
    save_arrays(tmp_path / "f", {})
    assert load_arrays(tmp_path / "f") == {}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "complex128", "bool", "bfloat16", "float16"])
def test_device_arrays(tmp_path, dtype):
    import cupy

    x = random_array(NAMES[dtype], (4, 6))
    save_arrays(tmp_path / "f", {"x": cupy.asarray(x), "t": cupy.asarray(x).T[::2]})
    got = load_arrays(tmp_path / "f", device="cuda:0")
    assert isinstance(got["x"], cupy.ndarray)
    assert same_bits(got["x"].get(), x)
    assert same_bits(got["t"].get(), x.T[::2])


@pytest.mark.parametrize(
    ("arrays", "error", "match"),
    [
        ({"x": np.array(["text"])}, TypeError, "'x' must have one of the dtypes .* got <U4"),
        ({"x": np.array([None])}, TypeError, "got object"),
        ({"x": np.zeros(2, np.longdouble)}, TypeError, "'x' must have one of the dtypes"),
        ({"x": [1.0]}, TypeError, "'x' must be an array, got list"),
        ({3: np.zeros(2)}, TypeError, "names of arrays must be str, got 3"),
        ({"__metadata__": np.zeros(2)}, ValueError, "no array can be named '__metadata__'"),
        ({"\ud800": np.zeros(2)}, UnicodeEncodeError, "surrogates"),
    ],
    ids=["str", "object", "longdouble", "list", "int name", "metadata", "surrogate"],
)
def test_refuses_to_write(tmp_path, arrays, error, match):
    save_arrays(tmp_path / "f", {"x": np.ones(2)})
    with pytest.raises(error, match=match):
        save_arrays(tmp_path / "f", arrays)
    assert os.listdir(tmp_path) == ["f"]
    np.testing.assert_array_equal(load_arrays(tmp_path / "f")["x"], np.ones(2))


# ------------------------------------------------------------------- the safetensors package

SHARED = [name for name in NAMES if name not in ("bfloat16", "complex128") and "8_" not in name]


@pytest.mark.parametrize("name", SHARED)
def test_safetensors_reads_ours(tmp_path, name):
    x = random_array(NAMES[name], (3, 2))
    save_arrays(tmp_path / "f", {"x": x, "scalar": x[0, 0]})
    got = safetensors.numpy.load_file(tmp_path / "f")
    assert same_bits(got["x"], x)
    assert same_bits(got["scalar"], np.asarray(x[0, 0]))


def test_safetensors_reads_ours_without_a_numpy_dtype(tmp_path):
    arrays = {name: random_array(NAMES[name], (3, 2)) for name in ("bfloat16", "float8_e4m3")}
    arrays["complex128"] = random_array(NAMES["complex128"], (3,))
    save_arrays(tmp_path / "f", arrays)
    got = dict(safetensors.deserialize((tmp_path / "f").read_bytes()))
    for name, code, shape in (
        ("bfloat16", "BF16", [3, 2]),
        ("float8_e4m3", "F8_E4M3", [3, 2]),
        ("complex128", "F64", [3, 2]),
    ):
        assert (got[name]["dtype"], got[name]["shape"]) == (code, shape)
        assert bytes(got[name]["data"]) == arrays[name].tobytes()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", SHARED)
def test_reads_safetensors_files(tmp_path, name, shape):
    arrays = {"x": random_array(NAMES[name], shape), "z": np.arange(3, dtype=np.int8)}
    safetensors.numpy.save_file(arrays, tmp_path / "f", metadata={"format": "np"})
    got = load_arrays(tmp_path / "f")
    assert got.keys() == arrays.keys()
    assert same_bits(got["x"], arrays["x"])
    with pytest.raises(CheckpointError, match="f: holds arrays but no state"):
        load_checkpoint(tmp_path / "f")


# ---------------------------------------------------------------------------- hostile files


@pytest.mark.parametrize(
    ("header", "data", "match"),
    [
        ({"x": described(end=7)}, b"\0" * 7, "must take 8 bytes"),
        ({"x": described()}, b"\0" * 7, "must take 8 bytes, got 7: truncated"),
        ({"x": described()}, b"\0" * 9, "got 9: something follows"),
        (
            {"x": described(), "y": described(begin=4, end=12)},
            b"\0" * 12,
            "'y' must begin at byte 8, got 4: overlaps",
        ),
        (
            {"x": described(), "y": described(begin=12, end=20)},
            b"\0" * 20,
            "'y' must begin at byte 8, got 12: leaves a gap",
        ),
        ({"x": described(begin=4, end=12)}, b"\0" * 12, "must begin at byte 0, got 4"),
        ({"x": described(begin=8, end=0)}, b"\0" * 8, r"must be \[begin, end\]"),
        ({"x": described(begin=-8, end=0)}, b"\0" * 8, r"must be \[begin, end\]"),
        ({"x": described(begin=0.0, end=8)}, b"\0" * 8, r"must be \[begin, end\]"),
        ({"x": described(begin=False, end=8)}, b"\0" * 8, r"must be \[begin, end\]"),
        ({"x": {**described(), "data_offsets": [0]}}, b"\0" * 8, r"must be \[begin, end\]"),
        ({"x": {**described(), "data_offsets": 8}}, b"\0" * 8, r"must be \[begin, end\]"),
        ({"x": described(shape=(-1, -2))}, b"\0" * 8, "must be up to 64 sizes"),
        ({"x": described(shape=(2.0,))}, b"\0" * 8, "must be up to 64 sizes"),
        ({"x": described(shape=(1,) * 65, end=4)}, b"\0" * 4, "must be up to 64 sizes"),
        ({"x": described(shape=(2**63, 0), end=0)}, b"", "must be up to 64 sizes"),
        ({"x": described(shape=(2**62, 2**62, 0), end=0)}, b"", "is too large"),
        ({"x": {**described(), "shape": 2}}, b"\0" * 8, "must be up to 64 sizes"),
        ({"x": {**described(), "shape": None}}, b"\0" * 8, "must be up to 64 sizes"),
        ({"x": described(dtype="F128")}, b"\0" * 8, "must be one of BOOL, .* got 'F128'"),
        ({"x": described(dtype="float32")}, b"\0" * 8, "got 'float32'"),
        ({"x": described(dtype=["F32"])}, b"\0" * 8, "must be one of"),
        ({"x": {**described(), "more": 1}}, b"\0" * 8, "nothing else"),
        ({"x": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, "must have a dtype"),
        ({"x": [1, 2]}, b"\0" * 8, "must have a dtype"),
        ({"x": described(dtype="BOOL", shape=(8,))}, b"\2" * 8, "bytes 0 and 1 alone"),
        ({"__metadata__": {"a": 1}}, b"", "must map strings to strings"),
        ({"__metadata__": ["a"]}, b"", "must map strings to strings"),
        ({"__metadata__": None}, b"", "must map strings to strings"),
        (b"[]", b"", "must begin with '{'"),
        (b" {}", b"", "must begin with '{'"),
        (b"", b"", "must begin with '{'"),
        (b"{", b"", "the header must be JSON"),
        (b"{}{}", b"", "the header must be JSON"),
        (b"{'x': 1}", b"", "the header must be JSON"),
        (b'{"x": \xff}', b"", "must be UTF-8"),
        (b'{"\\ud800": 1}', b"", "must be JSON.*surrogates"),
        (b'{"x": 1, "x": 2}', b"", "has the key 'x' twice"),
        (b'{"__metadata__": {}, "__metadata__": {}}', b"", "'__metadata__' twice"),
        (b'{"x": {"dtype": "F32", "dtype": "F32"}}', b"", "'dtype' twice"),
        (b'{"x": NaN}', b"", "finite numbers, got NaN"),
        (b'{"x": -Infinity}', b"", "finite numbers, got -Infinity"),
        (b'{"x": 1e999}', b"", "finite numbers, got 1e999"),
        (b'{"x": ' + b"9" * 5000 + b"}", b"", "must be JSON"),
        (b'{"x": ' + b"[" * 100_000, b"", "nested too deeply"),
        (b'{"x": ' * 100_000, b"", "nested too deeply"),
        ({"__metadata__": {"rtxarr.sha256": "0" * 64}}, b"", "checksum is not in its place"),
        ({"__metadata__": {"rtxarr.complex128": "[1]"}}, b"", "must be a list of names"),
        ({"__metadata__": {"rtxarr.complex128": "{}"}}, b"", "must be a list of names"),
        ({"__metadata__": {"rtxarr.complex128": '["x"]'}}, b"", "must name float64 arrays"),
        ({"__metadata__": {"rtxarr.complex128": '["x","x"]'}}, b"", "names an array twice"),
        (
            {"__metadata__": {"rtxarr.complex128": '["x"]'}, "x": described()},
            b"\0" * 8,
            "must name float64 arrays",
        ),
    ],
)
def test_malformed_files_are_refused(tmp_path, header, data, match):
    path = write_raw(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError, match=match) as caught:
        load_arrays(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "at least 8 bytes, got 0"),
        (b"1234567", "at least 8 bytes, got 7"),
        (b"\xff" * 8 + b"{}", "at most 100,000,000 bytes, got 18,446,744,073,709,551,615"),
        ((100_000_001).to_bytes(8, "little") + b"{}", "at most 100,000,000 bytes"),
        ((1000).to_bytes(8, "little") + b"{}", "must take 1,000 bytes but only 2 follow"),
        (b"\x80\x04\x95\x10\0\0\0\0\0\0\0pickle", "at most|but only"),
    ],
    ids=["empty", "short", "huge header", "just too large", "truncated", "pickle"],
)
def test_a_bad_header_length_is_refused(tmp_path, content, match):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointError, match=match):
        load_arrays(tmp_path / "f")


def test_many_duplicates_are_refused_fast(tmp_path):
    keys = ",".join(f'"{i}":0' for i in range(200_000))
    path = write_raw(tmp_path / "f", f'{{{keys},"199999":0}}'.encode())
    with pytest.raises(CheckpointError, match="'199999' twice"):
        load_arrays(path)


def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="must be a regular file"):
        load_arrays(tmp_path / "pipe")


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_arrays(tmp_path / "missing")


def test_a_file_cut_while_it_is_read(tmp_path, monkeypatch):
    path = write_raw(tmp_path / "f", {"x": described()}, b"\0" * 8)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-2])

    class Stat:
        st_size = size

    monkeypatch.setattr(os, "fstat", lambda descriptor: Stat)
    with pytest.raises(CheckpointError, match="was cut while it was read"):
        load_arrays(path)


def test_every_single_byte_matters(tmp_path):
    path = tmp_path / "f"
    save_checkpoint(path, {"w": np.arange(3, dtype=np.float32), "lr": 0.1, "z": np.array(1j)})
    good = path.read_bytes()
    for i in range(len(good)):
        for flip in (0x01, 0x20):
            bad = bytearray(good)
            bad[i] ^= flip
            path.write_bytes(bad)
            with pytest.raises(CheckpointError):
                load_checkpoint(path)


def test_every_truncation_and_any_tail_is_refused(tmp_path):
    path = tmp_path / "f"
    save_checkpoint(path, {"w": np.arange(3, dtype=np.float32), "lr": 0.1})
    good = path.read_bytes()
    for n in range(len(good)):
        path.write_bytes(good[:n])
        with pytest.raises(CheckpointError):
            load_checkpoint(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(CheckpointError, match="something follows"):
        load_checkpoint(path)


def test_the_checksum_can_be_computed_by_hand(tmp_path):
    path = tmp_path / "f"
    save_arrays(path, {"w": np.arange(3)})
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    digest = header["__metadata__"]["rtxarr.sha256"]
    assert raw.count(digest.encode()) == 1
    zeroed = raw.replace(digest.encode(), b"0" * 64)
    assert hashlib.sha256(zeroed).hexdigest() == digest


# ----------------------------------------------------------------------------------- fuzzing


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "f"


@pytest.fixture(scope="module")
def saved(scratch):
    arrays = {"a.b": np.arange(3, dtype=np.float32), "c": np.array(True), "z": np.zeros((0, 2))}
    save_checkpoint(scratch, {**arrays, "n": [1, 2.5, None], "t": (1, math.inf)})
    return scratch.read_bytes()


@settings(max_examples=400)
@given(data=st.data())
def test_mutations_raise_nothing_but_checkpoint_errors(scratch, saved, data):
    content = bytearray(saved)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        match data.draw(st.sampled_from(["set", "cut", "insert", "delete", "copy"])):
            case "set":
                content[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
            case "cut":
                del content[at:]
            case "insert":
                content[at:at] = data.draw(st.binary(max_size=9))
            case "delete":
                del content[at : at + data.draw(st.integers(1, 20))]
            case "copy":
                content[at:at] = content[: data.draw(st.integers(0, 60))]
    scratch.write_bytes(content)
    if content == saved:
        load_checkpoint(scratch)
    else:
        with pytest.raises(CheckpointError):
            load_checkpoint(scratch)
        with contextlib.suppress(CheckpointError):
            load_arrays(scratch)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["F32", "BOOL", "I64", "U8", "BF16", "C64", "F4"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
sizes = st.lists(st.integers(0, 4), max_size=3) | json_values
entries = (
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F64", "U8", "BOOL", "F16", "I64", "F4", "F128"]),
            "shape": sizes,
            "data_offsets": st.lists(st.integers(0, 24), min_size=2, max_size=2) | sizes,
        }
    )
    | json_values
)
headers = st.dictionaries(
    st.text(max_size=3) | st.just("__metadata__"), entries, max_size=3
) | st.dictionaries(
    st.just("__metadata__"),
    st.dictionaries(
        st.sampled_from(["rtxarr.sha256", "rtxarr.complex128", "rtxarr.state", "a"]),
        st.text(max_size=8) | json_values.map(json.dumps),
    ),
    max_size=1,
)


@settings(max_examples=400)
@given(header=headers, n_data=st.integers(0, 24))
def test_any_header_is_read_as_safetensors_reads_it_or_refused(scratch, header, n_data):
    write_raw(scratch, header, b"\1" * n_data)
    with pytest.raises(CheckpointError):
        load_checkpoint(scratch)
    try:
        got = load_arrays(scratch)
    except CheckpointError:
        return
    # What we accept, the reference accepts too.
    want = dict(safetensors.deserialize(scratch.read_bytes()))
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert x.tobytes() == bytes(want[name]["data"])


@settings(max_examples=200)
@given(
    state=st.recursive(
        json_values,
        lambda inner: (
            st.dictionaries(
                st.sampled_from(["version", "state", "$array", "$float", "$tuple", "$$a"]), inner
            )
            | st.sampled_from(["w", "nan", 1])
            | st.lists(inner, max_size=2)
        ),
        max_leaves=6,
    ),
    keep=st.integers(1, 200),
)
def test_any_state_is_a_dict_or_refused(scratch, state, keep):
    for content in (state, {"version": 1, "state": {"a": {"$array": "w"}, "b": state}}):
        text = json.dumps(content)[:keep]
        write_file(scratch, {"w": np.zeros(2)}, {"rtxarr.state": text})
        try:
            got = load_checkpoint(scratch)
        except CheckpointError:
            continue
        assert got["a"].shape == (2,)


@st.composite
def valid_files(draw):
    """Headers that keep all rules, so that acceptance is tried as well."""
    header, begin = {}, 0
    for name in draw(st.lists(st.text(max_size=3), unique=True, max_size=4)):
        code, size = draw(st.sampled_from([("F32", 4), ("U8", 1), ("F16", 2), ("I64", 8)]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        end = begin + math.prod(shape) * size
        header[name] = described(code, shape, begin, end)
        begin = end
    shuffled = draw(st.permutations(sorted(header)))
    return {name: header[name] for name in shuffled}, begin


@given(file=valid_files())
def test_valid_headers_are_accepted(scratch, file):
    header, n_data = file
    data = bytes(i % 256 for i in range(n_data))
    write_raw(scratch, header, data)
    want = dict(safetensors.deserialize(scratch.read_bytes()))
    got = load_arrays(scratch)
    assert got.keys() == header.keys() == want.keys()
    for name, x in got.items():
        assert list(x.shape) == want[name]["shape"] == header[name]["shape"]
        assert x.tobytes() == bytes(want[name]["data"])
