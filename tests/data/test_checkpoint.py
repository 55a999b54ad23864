"""Checkpoints: round trips, all-or-nothing loads, and saves cut short at any moment."""

import errno
import json
import math
import os
import subprocess
import sys
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rtxarr.autograd import Tensor
from rtxarr.data import (
    CheckpointError,
    load_arrays,
    load_checkpoint,
    load_into,
    save_arrays,
    save_checkpoint,
)
from rtxarr.data._atomic import atomic_write
from rtxarr.data._safetensors import write_file


def training_state():
    rng = np.random.default_rng(0)
    return {
        "model": {
            "layers.0.weight": rng.normal(size=(4, 3)).astype(np.float32),
            "layers.0.scale": np.ones(4, ml_dtypes.bfloat16),
            "n_seen": np.array(7),
        },
        "optimizer": {
            "step": 3,
            "groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}, {"lr": 0.1, "betas": (0.0, 0.0)}],
            "state": {"layers.0.weight": [rng.normal(size=(4, 3)), np.zeros(0)]},
        },
        "schedule": {"best": math.inf, "history": [], "name": "plateau", "last": None},
        "generator": {"seed": 2**64 - 1, "counter": 2**100, "active": True},
        "loader": {"epoch": 2, "position": 64},
    }


def assert_same(got, want):
    """Equal to the bit, types included."""
    if isinstance(want, (np.ndarray, np.generic)):
        assert isinstance(got, np.ndarray)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.tobytes() == want.tobytes()
        return
    assert type(got) is type(want)
    if isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            assert_same(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)
    elif isinstance(want, float):
        assert math.isnan(got) if math.isnan(want) else got.hex() == want.hex()
    else:
        assert got == want


# ------------------------------------------------------------------------------- round trips


def test_round_trip(tmp_path):
    save_checkpoint(tmp_path / "c.safetensors", training_state())
    assert_same(load_checkpoint(tmp_path / "c.safetensors"), training_state())
    assert os.listdir(tmp_path) == ["c.safetensors"]


def test_arrays_are_named_by_their_place(tmp_path):
    save_checkpoint(tmp_path / "c", training_state())
    assert load_arrays(tmp_path / "c").keys() == {
        "model.layers.0.weight",
        "model.layers.0.scale",
        "model.n_seen",
        "optimizer.state.layers.0.weight.0",
        "optimizer.state.layers.0.weight.1",
    }
    with safetensors.safe_open(tmp_path / "c", "np") as file:
        weight = file.get_tensor("model.layers.0.weight")
        state = json.loads(file.metadata()["rtxarr.state"])
    np.testing.assert_array_equal(weight, training_state()["model"]["layers.0.weight"])
    assert state["state"]["loader"] == {"epoch": 2, "position": 64}


def test_names_that_collide_are_told_apart(tmp_path):
    state = {"a": {"b.c": np.zeros(1), "b": {"c": np.ones(1)}}, "a.b": {"c": np.full(1, 2.0)}}
    save_checkpoint(tmp_path / "c", state)
    assert_same(load_checkpoint(tmp_path / "c"), state)


def test_keys_that_look_like_our_own(tmp_path):
    state = {"$array": "x", "$$": 1, "$float": {"$tuple": [1]}, "": {"": np.ones(1)}}
    save_checkpoint(tmp_path / "c", state)
    assert_same(load_checkpoint(tmp_path / "c"), state)


def test_tensors_are_stored_as_their_data(tmp_path):
    save_checkpoint(tmp_path / "c", {"w": Tensor(np.arange(3.0))})
    assert_same(load_checkpoint(tmp_path / "c"), {"w": np.arange(3.0)})


def test_numpy_scalars_become_arrays(tmp_path):
    state = {"f": np.float64(0.1), "i": np.int32(3), "b": np.bool_(True)}
    save_checkpoint(tmp_path / "c", state)
    assert_same(load_checkpoint(tmp_path / "c"), {k: np.asarray(v) for k, v in state.items()})


def test_loaded_arrays_can_be_written(tmp_path):
    save_checkpoint(tmp_path / "c", {"w": np.zeros(3), "z": np.zeros(2, complex)})
    loaded = load_checkpoint(tmp_path / "c")
    loaded["w"] += 1
    loaded["z"] += 1
    assert_same(load_checkpoint(tmp_path / "c"), {"w": np.zeros(3), "z": np.zeros(2, complex)})


@pytest.mark.gpu
def test_device_arrays(tmp_path):
    import cupy

    save_checkpoint(tmp_path / "c", {"w": cupy.arange(3.0), "inner": [cupy.ones(2)]})
    assert_same(load_checkpoint(tmp_path / "c"), {"w": np.arange(3.0), "inner": [np.ones(2)]})
    loaded = load_checkpoint(tmp_path / "c", device="cuda:0")
    assert isinstance(loaded["inner"][0], cupy.ndarray)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | text
    | npst.arrays(
        st.sampled_from(["float32", "float64", "int64", "bool", "complex128"]),
        npst.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3),
    )
)
keys = text | st.sampled_from(["a", "a.b", "b", "$array", "$float", "$tuple", "$$a"])
states = st.dictionaries(
    keys,
    st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(keys, inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
        ),
        max_leaves=12,
    ),
    max_size=4,
)


@given(state=states)
def test_any_state_round_trips(tmp_path_factory, state):
    path = tmp_path_factory.getbasetemp() / "any"
    save_checkpoint(path, state)
    assert_same(load_checkpoint(path), state)


# ----------------------------------------------------------------------------- refused states


@pytest.mark.parametrize(
    ("state", "error", "match"),
    [
        ([1], TypeError, "state must be a dict, got list"),
        ({"a": {1: 2}}, TypeError, "keys of state must be str, got 1 in 'a'"),
        ({1: 2}, TypeError, "keys of state must be str, got 1 in state itself"),
        ({"a": [1, {2}]}, TypeError, "got set at 'a.1'"),
        ({"a": b"bytes"}, TypeError, "got bytes at 'a'"),
        ({"a": len}, TypeError, "got builtin_function_or_method at 'a'"),
        ({"a": 1j}, TypeError, "got complex at 'a'"),
        ({"a": np.array([None])}, TypeError, "'a' must have one of the dtypes"),
    ],
    ids=["list", "int key", "top key", "set", "bytes", "function", "complex", "object array"],
)
def test_refuses_to_save(tmp_path, state, error, match):
    save_checkpoint(tmp_path / "c", {"old": 1})
    with pytest.raises(error, match=match):
        save_checkpoint(tmp_path / "c", state)
    assert load_checkpoint(tmp_path / "c") == {"old": 1}


def test_refuses_a_state_that_contains_itself(tmp_path):
    state = {}
    state["a"] = state
    with pytest.raises(ValueError, match="nested at most 64 deep"):
        save_checkpoint(tmp_path / "c", state)


def test_the_deepest_state_that_is_saved_can_be_loaded(tmp_path):
    state = {"x": 1}
    for _ in range(63):
        state = {"a": state}
    save_checkpoint(tmp_path / "c", state)
    assert load_checkpoint(tmp_path / "c") == state


def test_refuses_a_state_too_large_for_the_header(tmp_path):
    with pytest.raises(ValueError, match="at most 100,000,000 bytes"):
        save_checkpoint(tmp_path / "c", {"log": "x" * 100_000_001})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "must be JSON"),
        ("[]", "must have version 1"),
        ('{"version":2,"state":{}}', "must have version 1"),
        ('{"state":{}}', "must have version 1"),
        ('{"version":1}', "must be a dict, got NoneType"),
        ('{"version":1,"state":{}}', "does not mention 1 of the arrays"),
        ('{"version":1,"state":{"$array":"w"}}', "must be a dict, got ndarray"),
        ('{"version":1,"state":{"a":{"$array":"v"}}}', r"has '\$array' with"),
        ('{"version":1,"state":{"a":{"$array":["w"]}}}', r"has '\$array' with"),
        ('{"version":1,"state":{"a":{"$array":"w","b":1}}}', r"has '\$array' with"),
        ('{"version":1,"state":{"a":{"$array":"w"},"b":{"$array":"w"}}}', r"has '\$array' with"),
        ('{"version":1,"state":{"a":{"$float":"1"}}}', r"has '\$float' with"),
        ('{"version":1,"state":{"a":{"$tuple":1}}}', r"has '\$tuple' with"),
        ('{"version":1,"state":{"a":{"$other":1}}}', r"has '\$other' with"),
        ('{"version":1,"state":{"a":1,"a":2}}', "the key 'a' twice"),
        ('{"version":1,"state":{"a":NaN}}', "finite numbers, got NaN"),
        ('{"version":1,"state":{"a":' + "[" * 66 + "]" * 66 + "}}", "nested at most 64 deep"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_malformed_states_are_refused(tmp_path, content, match):
    path = tmp_path / "c"
    write_file(path, {"w": np.zeros(2)}, {"rtxarr.state": content})
    with pytest.raises(CheckpointError, match=match) as caught:
        load_checkpoint(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_state_without_a_checksum_is_refused(tmp_path):
    header = json.dumps({"__metadata__": {"rtxarr.state": '{"version":1,"state":{}}'}}).encode()
    (tmp_path / "c").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="must carry a checksum"):
        load_checkpoint(tmp_path / "c")


def test_a_changed_learning_rate_is_noticed(tmp_path):
    path = tmp_path / "c"
    save_checkpoint(path, {"lr": 0.125})
    path.write_bytes(path.read_bytes().replace(b"0.125", b"0.725"))
    with pytest.raises(CheckpointError, match="checksum does not match"):
        load_checkpoint(path)


# ---------------------------------------------------------------------------------- load_into


def model():
    return {"w": np.zeros((2, 3), np.float32), "inner": {"b": np.zeros(3)}, "step": 0, "best": None}


def test_load_into_writes_in_place():
    target = model()
    w, inner = target["w"], target["inner"]
    loaded = {
        "w": np.ones((2, 3), np.float32),
        "inner": {"b": np.arange(3.0)},
        "step": 5,
        "best": 0.5,
    }
    assert load_into(target, loaded) == ([], [])
    assert target["w"] is w
    assert target["inner"] is inner
    assert_same(target, loaded)


def test_load_into_takes_the_targets_own_arrays():
    target = {"a": np.zeros(2), "b": np.ones(2), "c": np.arange(3.0)}
    load_into(target, {"a": target["b"], "b": target["a"], "c": target["c"][::-1]})
    assert [x.tolist() for x in target.values()] == [[1, 1], [0, 0], [2, 1, 0]]


def test_load_into_assigns_to_tensors_and_replaces_scalars():
    tensor = Tensor(np.zeros(2))
    target = {"t": tensor, "s": np.float32(0), "list": [1], "zero": np.zeros(())}
    load_into(
        target,
        {"t": np.ones(2), "s": np.asarray(2, np.float32), "list": [], "zero": np.ones(())},
    )
    assert target["t"] is tensor
    assert_same(np.asarray(tensor.data), np.ones(2))
    assert (target["s"], target["list"], target["zero"]) == (2, [], 1)


def test_load_into_names_every_fault_and_changes_nothing():
    target = {
        **model(),
        "only_here": np.zeros(1),
        "kind": np.zeros(1),
        "plain": 3,
        "sealed": np.zeros(1),
        "tree": {"x": 1},
    }
    target["sealed"].flags.writeable = False
    before = {"w": target["w"].copy(), "step": target["step"]}
    loaded = {
        "w": np.ones((3, 2), np.float64),
        "inner": {"b": np.arange(4.0), "more": 1},
        "step": 5,
        "best": 0.5,
        "kind": 3,
        "plain": np.zeros(1),
        "sealed": np.zeros(1),
        "tree": 1,
    }
    with pytest.raises(CheckpointError) as caught:
        load_into(target, loaded)
    assert str(caught.value).splitlines() == [
        "the loaded state does not fit:",
        "  only_here: missing",
        "  tree.x: missing",
        "  inner.more: unexpected",
        "  tree: unexpected",
        "  w: must have shape (2, 3), got (3, 2) and dtype float32, got float64",
        "  inner.b: must have shape (3,), got (4,)",
        "  kind: must be an array, got int",
        "  plain: must be int, got an array",
        "  sealed: is read-only",
    ]
    assert_same({"w": target["w"], "step": target["step"]}, before)


def test_load_into_without_strict_passes_over_missing_and_unexpected_keys():
    target = model()
    result = load_into(target, {"step": 5, "more": {"x": 1}}, strict=False)
    assert result.missing == ["w", "inner.b", "best"]
    assert result.unexpected == ["more.x"]
    assert target["step"] == 5
    with pytest.raises(CheckpointError, match="w: must have shape"):
        load_into(target, {"w": np.zeros(1, np.float32)}, strict=False)


@pytest.mark.gpu
def test_load_into_moves_to_the_targets_device():
    import cupy

    target = {"w": cupy.zeros(3), "h": np.zeros(2)}
    w = target["w"]
    load_into(target, {"w": np.arange(3.0), "h": cupy.ones(2)})
    assert target["w"] is w
    assert_same(w.get(), np.arange(3.0))
    assert_same(target["h"], np.ones(2))


# ----------------------------------------------------------------------------- saves cut short


@pytest.mark.parametrize("n_whole", [0, 1, 2])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch, n_whole):
    path = tmp_path / "c"
    old = {"w": np.arange(1000.0), "v": np.ones(10), "step": 1}
    save_checkpoint(path, old)
    monkeypatch.setattr("rtxarr.data._safetensors.atomic_write", _full_after(n_whole))
    with pytest.raises(OSError, match="No space left on device"):
        save_checkpoint(path, {**old, "step": 2})
    assert_same(load_checkpoint(path), old)
    assert os.listdir(tmp_path) == ["c"]


def _full_after(n_whole):
    """Make atomic_write whose file takes ``n_whole`` writes, and half of the next one."""

    @contextmanager
    def failing(path):
        with atomic_write(path) as file:
            yield Full(file)

    class Full:
        def __init__(self, file):
            self.file = file
            self.seek = file.seek
            self.n_left = n_whole

        def write(self, data):
            data = memoryview(data)
            if self.n_left == 0:
                self.file.write(data[: len(data) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.n_left -= 1
            return self.file.write(data)

    return failing


# Forks a process that saves without pause, kills it at a random moment, and looks at what is there.
# One line a round: the last step whose save had returned, the step found, whether a temporary
# file was left (so the kill fell into a save).
KILL = """
import os, random, signal, sys, time
import numpy as np
from rtxarr.data import load_checkpoint, save_checkpoint

folder, n_rounds = sys.argv[1], int(sys.argv[2])
path = os.path.join(folder, "c.safetensors")
rng = random.Random(0)
step = 0

def save():
    w = np.full(150_000, step, np.float32)
    save_checkpoint(path, {"step": step, "w": w, "m": [np.full(9, step)]})

save()
for _ in range(n_rounds):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        while True:
            step += 1
            save()
            os.write(write, step.to_bytes(8, "little"))
    os.close(write)
    saved = int.from_bytes(os.read(read, 8), "little")  # it is at work
    time.sleep(rng.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while data := os.read(read, 8):
        saved = int.from_bytes(data, "little")
    os.close(read)
    state = load_checkpoint(path)
    step = state["step"]
    assert (state["w"] == step).all() and state["w"].size == 150_000, state
    assert (state["m"][0] == step).all(), state
    leftovers = [name for name in os.listdir(folder) if name.endswith(".tmp")]
    for name in leftovers:
        os.unlink(os.path.join(folder, name))
    print(saved, step, len(leftovers), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_killing_a_saver_at_50_random_moments(tmp_path):
    command = [sys.executable, "-c", KILL, str(tmp_path), "50"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rounds = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(rounds) == 50
    for saved, found, _ in rounds:
        assert found in (saved, saved + 1)  # the last one that was finished, or the one in progress
    assert sum(leftover for _, _, leftover in rounds) >= 10  # kills did fall into saves


def test_save_arrays_is_atomic_too(tmp_path, monkeypatch):
    save_arrays(tmp_path / "f", {"x": np.ones(2)})

    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rtxarr.data._atomic.os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        save_arrays(tmp_path / "f", {"x": np.zeros(2)})
    assert_same(load_arrays(tmp_path / "f"), {"x": np.ones(2)})
