"""Blocks of memory come back when no array uses them, and only then."""

import threading

import numpy as np
import pytest

from rtxarr.polygraph import _cpu_memory as memory

FLOAT = np.dtype("f8")


@pytest.fixture(autouse=True)
def nothing_kept():
    memory.release()
    yield
    memory.release()


def address(x):
    return x.__array_interface__["data"][0]


def test_arrays_are_plain():
    x = memory.empty((512, 512), FLOAT)
    assert type(x) is np.ndarray
    assert x.flags.c_contiguous
    assert x.flags.writeable
    assert (x.shape, x.dtype) == ((512, 512), FLOAT)


def test_a_block_is_used_again():
    x = memory.empty((512, 512), FLOAT)
    where = address(x)
    del x
    assert memory.n_kept() == 512 * 512 * 8
    assert address(memory.empty((512, 500), FLOAT)) == where
    assert address(memory.empty((256, 256), FLOAT)) != where  # too small for it


@pytest.mark.parametrize(
    "view", [lambda x: x[3:], lambda x: x.T, lambda x: x.reshape(-1)[:1], memoryview, np.asarray]
)
def test_views_keep_a_block(view):
    x = memory.empty((512, 512), FLOAT)
    looking = view(x)
    del x
    assert memory.n_kept() == 0
    del looking
    assert memory.n_kept() > 0


def test_small_arrays_have_their_own_memory():
    x = memory.empty((8,), FLOAT)
    assert x.flags.owndata


def test_what_is_kept_is_limited(monkeypatch):
    monkeypatch.setattr(memory, "MOST_KEPT", 8 << 20)
    for k in range(20):
        arrays = [memory.empty((1 << 17, k + 1), FLOAT) for _ in range(3)]
        del arrays
        assert memory.n_kept() <= 8 << 20
    x = memory.empty((1 << 17, 2), FLOAT)
    where = address(x)
    del x  # what nobody asked for made room for it
    assert address(memory.empty((1 << 17, 2), FLOAT)) == where


def test_threads_never_share_a_block():
    wrong = []

    def work(k):
        for i in range(200):
            x = memory.empty((1 << 17, 1 + i % 3), FLOAT)
            x[:] = k
            y = memory.empty((1 << 17, 1), FLOAT)
            y[:] = -k
            if x[::4096].min() != k or x[::4096].max() != k:
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
