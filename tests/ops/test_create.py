"""Creation functions, conversion and devices."""

import copy
import pickle

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_creation_on_a_device(device):
    for made, want in (
        (rx.zeros((2, 3), device=device), np.zeros((2, 3))),
        (rx.ones(4, dtype=rx.float32, device=device), np.ones(4, "float32")),
        (rx.full((2,), 7, device=device), np.full(2, 7)),
        (rx.arange(1, 10, 3, device=device), np.arange(1, 10, 3)),
        (rx.arange(3.0, device=device), np.arange(3.0)),
        (rx.linspace(0, 1, 5, device=device), np.linspace(0, 1, 5)),
        (rx.linspace(0, 1, 4, endpoint=False, device=device), np.linspace(0, 1, 4, endpoint=False)),
        (rx.eye(3, 4, k=1, device=device), np.eye(3, 4, 1)),
        (rx.asarray([[1, 2], [3, 4]], device=device), np.array([[1, 2], [3, 4]])),
        (rx.asarray(2.5, dtype=rx.float32, device=device), np.float32(2.5)),
    ):
        assert rx.device_of(made) == device
        assert_close(made, np.asarray(want), exact=True)
    assert rx.empty((2, 0), device=device).shape == (2, 0)
    with rx.device(device):
        assert rx.device_of(rx.zeros(1)) == device


@pytest.mark.parametrize("device", DEVICES)
def test_likes_follow_their_input(device):
    x = rx.ones((2, 3), dtype=rx.float32, device=device)
    for function in (rx.zeros_like, rx.ones_like, rx.empty_like):
        made = function(x)
        assert made.shape == (2, 3) and made.dtype == rx.float32
        assert rx.device_of(made) == device
        assert rx.device_of(function(x, device="cpu", dtype=rx.int64)) == "cpu"
    assert_close(rx.full_like(x, 3), np.full((2, 3), 3.0))
    assert isinstance(rx.zeros_like(rx.Tensor(x)), rx.Tensor)


def test_asarray_copies_only_when_it_must():
    x = np.arange(3.0)
    assert np.shares_memory(rx.asarray(x), x)
    assert not np.shares_memory(rx.asarray(x, copy=True), x)
    assert rx.asarray(x, dtype=rx.float32).dtype == np.float32
    with pytest.raises(ValueError):
        rx.asarray(x, dtype=rx.float32, copy=False)
    with pytest.raises(ValueError):
        rx.asarray([1, 2], copy=False)


def test_asarray_of_tensors():
    t = rx.Tensor(np.arange(3.0), requires_grad=True)
    assert rx.asarray(t) is t
    cast = rx.asarray(t, dtype=rx.float32)
    rx.sum(cast * cast).backward()
    assert_close(t.grad, 2 * np.arange(3.0))
    assert_close(rx.asarray([rx.Tensor(np.asarray(1.0)), 2.0]), [1.0, 2.0])
    with pytest.raises(TypeError, match="rx.stack"):
        rx.asarray([t, t])


def test_asarray_refuses_what_is_no_number():
    for value in (object(), "text", None, ["a", "b"]):
        with pytest.raises(TypeError, match="obj must hold numbers"):
            rx.asarray(value, device="cpu")


def test_to_device_is_no_copy_at_home():
    x = np.ones(3)
    assert rx.to_device(x, "cpu") is x
    with pytest.raises(ValueError, match="device must be"):
        rx.to_device(x, "tpu")


def test_namespace_info():
    info = rx.__array_namespace_info__()
    assert rx.__array_api_version__ == "2025.12"
    assert info.default_dtypes()["real floating"] == rx.float64
    assert info.default_device() == rx.device()
    assert "cpu" in info.devices()
    assert set(info.dtypes(kind="bool")) == {"bool"}
    assert set(info.dtypes(kind=("signed integer",))) == {"int8", "int16", "int32", "int64"}
    assert "bfloat16" not in info.dtypes()
    assert info.capabilities()["boolean indexing"] is True
    x = rx.Tensor(np.ones(1))
    assert x.__array_namespace__(api_version="2024.12") is rx
    with pytest.raises(ValueError, match="api_version must be one of"):
        x.__array_namespace__(api_version="1999.1")


@pytest.mark.parametrize("dtype", [object, "U3", "M8[s]"])
def test_dtypes_of_no_numbers_are_refused(dtype):
    with pytest.raises(TypeError, match="dtype must be of numbers or bools"):
        rx.zeros(2, dtype=dtype, device="cpu")
    with pytest.raises(TypeError, match="dtype must be of numbers or bools, got <U1"):
        rx.full(2, "a", device="cpu")


def test_a_step_of_zero_is_refused():
    with pytest.raises(ValueError, match="step must not be 0"):
        rx.arange(0, 3, 0)


@pytest.mark.gpu
def test_mixing_devices_is_refused():
    with pytest.raises(TypeError, match="to_device"):
        rx.add(rx.ones(2, device="cpu"), rx.ones(2, device="cuda:0"))


def test_devices_are_strings_that_numpy_takes():
    cpu = rx.device("cpu")
    assert np.ones(2, device=cpu).to_device(cpu).device == cpu
    assert pickle.loads(pickle.dumps(cpu)) == copy.deepcopy(cpu) == "cpu"
    assert {cpu: 1}["cpu"] == 1
