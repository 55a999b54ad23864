"""The simulator shows barriers that are missing, and says which thread failed."""

import numpy as np
import pytest

cuda = pytest.importorskip("numba.cuda")

pytestmark = pytest.mark.sim


def neighbours(barrier, backwards, n_blocks):
    """Let each thread of a block read what the next one wrote."""

    @cuda.jit
    def kernel(out):
        shared = cuda.shared.array(4, np.int64)
        i, n = cuda.threadIdx.x, cuda.blockDim.x
        shared[i] = i
        if barrier:
            cuda.syncthreads()
        out[cuda.blockIdx.x, i] = shared[i - 1 if backwards else (i + 1) % n]

    out = np.zeros((n_blocks, 4), np.int64)
    kernel[n_blocks, 4](out)
    return out


@pytest.mark.parametrize("backwards", [False, True])
def test_a_missing_barrier_shows(backwards):
    want = np.broadcast_to(np.roll(np.arange(4), 1 if backwards else -1), (2, 4))
    np.testing.assert_array_equal(neighbours(True, backwards, 2), want)
    wrong = (neighbours(False, backwards, 2) != want).sum(1)
    assert sorted(wrong) == [1, 3]  # a block in each order


def test_threads_that_end_early_hold_up_none():
    @cuda.jit
    def kernel(out):
        x, y, z = cuda.threadIdx.x, cuda.threadIdx.y, cuda.threadIdx.z
        if x + y < 3:
            counted = cuda.syncthreads_count(z == 0)
            out[x, y, z] = 10 * cuda.laneid + counted

    out = np.zeros((3, 2, 2), np.int64)
    kernel[(1, 1), (3, 2, 2)](out)
    lane = np.arange(12).reshape(2, 2, 3).T
    want = np.where(np.add.outer(range(3), range(2))[..., None] < 3, 10 * lane + 5, 0)
    np.testing.assert_array_equal(out, want)


def test_an_error_ends_the_block_and_names_the_thread():
    @cuda.jit
    def kernel(out):
        cuda.syncthreads()
        out[cuda.threadIdx.x + cuda.blockIdx.x] = 1
        cuda.syncthreads()
        out[0] += 1

    out = np.zeros(4, np.int64)
    with pytest.raises(IndexError) as error:
        kernel[2, 4](out)
    assert error.value.__notes__ == ["in thread [3, 0, 0] of block [1, 0, 0]"]
    kernel[1, 4](out)  # whose threads are those that were stopped
    assert out[0] == 5
