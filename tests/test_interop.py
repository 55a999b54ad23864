"""Arrays of other libraries come in, and ours go out, without a copy."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close


class Foreign:
    """What cudf, cugraph and the like give: DLPack and nothing else."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_dlpack_objects_are_taken_over_without_a_copy():
    source = np.arange(4.0)
    for taken in (rx.from_dlpack(Foreign(source)), rx.asarray(Foreign(source))):
        assert isinstance(taken, np.ndarray)
        source[0] += 1
        assert taken[0] == source[0]
    copied = rx.from_dlpack(Foreign(source), copy=True)
    source[1] = 50.0
    assert copied[1] == 1.0


def test_numpy_takes_tensors_without_a_copy():
    x = rx.Tensor(np.arange(3.0))
    for view in (np.asarray(x), np.from_dlpack(x)):
        view.flags.writeable or x.data.__setitem__(0, x.data[0])
        assert np.shares_memory(view, x.data)
    assert np.asarray(x, dtype="float32").dtype == np.float32


def test_from_dlpack_names_what_it_needs():
    with pytest.raises(TypeError, match="x must have __dlpack__, got list"):
        rx.from_dlpack([1, 2])


@pytest.mark.compare
def test_torch_tensors_share_memory_both_ways():
    torch = pytest.importorskip("torch")
    theirs = torch.arange(4, dtype=torch.float32)
    ours = rx.asarray(theirs)
    theirs[0] = 7
    assert isinstance(ours, np.ndarray)
    assert isinstance(rx.from_dlpack(theirs), np.ndarray)
    assert float(ours[0]) == 7
    back = torch.from_dlpack(rx.Tensor(np.arange(4.0)))
    assert back.dtype == torch.float64 and back.tolist() == [0, 1, 2, 3]


@pytest.mark.compare
def test_bfloat16_of_torch_shares_memory():
    torch = pytest.importorskip("torch")
    theirs = torch.ones(3, dtype=torch.bfloat16)
    ours = rx.asarray(theirs)
    theirs[0] = 7
    assert ours.dtype == rx.bfloat16 and ours.astype(np.float32).tolist() == [7, 1, 1]
    bits = torch.from_dlpack(ours.view("int16"))
    assert bits.view(torch.bfloat16).tolist() == [7, 1, 1]


@pytest.mark.compare
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_of_torch_that_require_gradients_are_refused(dtype):
    torch = pytest.importorskip("torch")
    with pytest.raises(BufferError, match="requires? grad"):
        rx.from_dlpack(torch.ones(3, dtype=getattr(torch, dtype), requires_grad=True))


def test_bfloat16_tensors_say_how_to_hand_them_over():
    with pytest.raises(BufferError, match=r"x.data.view\('int16'\)"):
        rx.Tensor(np.ones(3, rx.bfloat16)).__dlpack__()


def test_memory_of_other_devices_is_refused():
    class Elsewhere(Foreign):
        def __dlpack_device__(self):
            return 8, 0

    with pytest.raises(BufferError, match="x must lie on the CPU or on a CUDA device, got.* 8"):
        rx.from_dlpack(Elsewhere(np.ones(3)))


class OnGpu:
    """What numba's device arrays give: the CUDA array interface and nothing else."""

    def __init__(self, array):
        self._array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


@pytest.mark.gpu
def test_objects_with_the_cuda_array_interface_are_taken_over_without_a_copy():
    x = rx.arange(4.0, device="cuda:0")
    for place in ("cpu", "cuda:0"):
        with rx.device(place):
            taken = rx.asarray(OnGpu(x))
        assert taken.data.ptr == x.data.ptr


@pytest.mark.gpu
def test_cuda_array_interface_and_dlpack_on_the_gpu():
    import cupy

    with rx.device("cuda:0"):
        x = rx.Tensor(rx.arange(4.0))
        assert cupy.asarray(x).data.ptr == x.data.data.ptr
        assert cupy.from_dlpack(x).data.ptr == x.data.data.ptr
        assert rx.from_dlpack(Foreign(x.data)).data.ptr == x.data.data.ptr
        with pytest.raises(TypeError, match="x.numpy"):
            np.asarray(x)
        assert_close(x.numpy(), [0, 1, 2, 3])
    assert not hasattr(rx.Tensor(np.ones(1)), "__cuda_array_interface__")


@pytest.mark.gpu
def test_gradients_cross_devices():
    x = rx.Tensor(np.array([1.0, 2.0]), requires_grad=True)
    y = x.to_device("cuda:0")
    assert y.device == "cuda:0"
    rx.sum(y * y).backward()
    assert isinstance(x.grad, np.ndarray)
    assert_close(x.grad, [2.0, 4.0])


@pytest.mark.gpu
def test_mixed_devices_are_refused():
    with pytest.raises(TypeError, match="to_device") as caught:
        rx.ones(2, device="cpu") + rx.Tensor(rx.ones(2, device="cuda:0"))
    assert "float64 array of shape (2,) on cuda:0" in caught.value.__notes__[0]
