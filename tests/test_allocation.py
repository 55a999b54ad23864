"""Where the memory of an array lies."""

import numpy as np
import pytest

from rtxarr._allocation import allocation_of, extent_of, owner_of


def test_views_have_the_owner_and_allocation_of_what_they_look_at():
    x = np.zeros((4, 6), "float32")
    for view in (x, x.T, x[1:, ::2], x.reshape(-1)[3:].view("int32")):
        assert owner_of(view) == id(x)
        assert allocation_of(view) == (id(x), 96)
    assert owner_of(x.copy()) != id(x)


@pytest.mark.parametrize(
    ("view", "first", "end"),
    [
        (lambda x: x, 0, 96),
        (lambda x: x.T, 0, 96),
        (lambda x: x[1:3], 24, 72),
        (lambda x: x[:, 1:3], 4, 84),
        (lambda x: x[::-1, ::-2], 4, 96),
        (lambda x: x[2:3, 3:4].reshape(()), 60, 64),
        (lambda x: np.broadcast_to(x[:1, :1], (5, 7)), 0, 4),
        (lambda x: x[:0], 0, 4),
    ],
    ids=["whole", "transposed", "rows", "columns", "reversed", "element", "repeated", "empty"],
)
def test_extents(view, first, end):
    x = np.zeros((4, 6), "float32")
    start = x.ctypes.data
    assert extent_of(view(x)) == (start + first, start + end)
