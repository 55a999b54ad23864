"""``rx.fuse``: what a function finds outside of itself: names, tensors, modules, objects."""

import gc
import threading
import warnings
import weakref

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import nn

from .fused import assert_same, check

rng = np.random.default_rng(0)


def array(*shape, dtype="float32"):
    return rng.normal(size=shape).astype(dtype)


# ------------------------------------------------------------------------- guards, captures

G = 2
TABLE = np.arange(3.0)


def test_global_numbers_are_read_anew():
    global G

    def f(x):
        return x * G

    fused = rx.fuse(f)
    for value in (2, 5, 2):
        G = value
        assert_same(fused(np.ones(2)), f(np.ones(2)))


def test_closures_are_read_anew():
    scale = 1.5

    def f(x):
        return x * scale

    fused = rx.fuse(f)
    for value in (1.5, 3.0):
        scale = value
        assert_same(fused(np.ones(2)), f(np.ones(2)))


def test_captured_arrays_are_held_by_reference():
    global TABLE

    def f(x):
        return x + TABLE

    fused = rx.fuse(f)
    assert_same(fused(np.ones(3)), f(np.ones(3)))
    TABLE[0] = 10
    assert_same(fused(np.ones(3)), f(np.ones(3)))
    TABLE = np.zeros(3)
    assert_same(fused(np.ones(3)), f(np.ones(3)))


def test_captured_arrays_are_written():
    hits = np.zeros(3)

    def f(x):
        np.add(hits, x, out=hits)
        return hits * 2

    fused = rx.fuse(f)
    for _ in range(3):
        fused(np.ones(3))
    np.testing.assert_array_equal(hits, 3.0)


def test_arrays_made_inside_start_anew_at_each_call():
    def f(x):
        total = np.zeros(3)
        np.add(total, x, out=total)
        return total

    fused = rx.fuse(f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(3):
            np.testing.assert_array_equal(fused(np.ones(3)), 1.0)


def test_arrays_made_inside_and_filled_by_numpy():
    def f(x):
        table = np.zeros(3)
        y = x + table
        table += 5
        return y, x + table

    fused = rx.fuse(f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(3):
            assert_same(fused(np.ones(3)), f(np.ones(3)))


def test_new_arrays_of_rtxarr_can_be_filled():
    def f(x):
        out = rx.zeros((3, 2), device="cpu")
        out[:, 0] = x
        out[:, 1] = rx.arange(3, device="cpu") + 1
        return out

    check(f, np.ones(3))


def test_attributes_of_objects_are_guarded():
    class Scaler:
        def __init__(self):
            self.scale = 2.0

        def __call__(self, x):
            return x * self.scale

    s = Scaler()
    fused = rx.fuse(s)
    assert_same(fused(np.ones(2)), np.full(2, 2.0))
    s.scale = 3.0
    assert_same(fused(np.ones(2)), np.full(2, 3.0))


def test_methods():
    class Model:
        def __init__(self):
            self.w = np.arange(3.0)

        @rx.fuse
        def forward(self, x):
            return x * self.w

    m = Model()
    assert_same(m.forward(np.ones(3)), m.w)
    m.w = m.w + 1
    assert_same(m.forward(np.ones(3)), m.w)


def test_functions_called_by_the_function_are_followed():
    factor = [2.0]

    def inner(x):
        return x * factor[0]

    fused = rx.fuse(lambda x: inner(x) + 1)
    assert_same(fused(np.ones(2)), np.full(2, 3.0))
    factor[0] = 4.0
    assert_same(fused(np.ones(2)), np.full(2, 5.0))


def test_a_fused_function_within_another():
    inner = rx.fuse(lambda x: x * 2)
    outer = rx.fuse(lambda x: inner(x) + 1)
    assert_same(outer(np.ones(2)), np.full(2, 3.0))
    assert inner.n_traces == 0


def test_programs_go_with_their_function():
    fused = rx.fuse(lambda x: x + 1)
    fused(np.ones(2))
    gone = weakref.ref(fused)
    del fused
    gc.collect()
    assert gone() is None


# ------------------------------------------------------------------------ tensors and modules


def test_tensors_give_tensors():
    def f(x, y):
        return rx.tanh(x) @ y, x.sum(axis=0)

    check(f, rx.Tensor(array(3, 4)), rx.Tensor(array(4, 2)), exact=False)


@pytest.mark.parametrize("training", [True, False])
def test_modules_are_fused(training):
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    model.train() if training else model.eval()
    x = rx.Tensor(array(5, 4))
    fused = rx.fuse(model)
    with rx.no_grad():
        for _ in range(2):
            assert_same(fused(x), model(x), exact=False)
        for p in model.parameters():
            p.assign(p.data * 0.5)
        assert_same(fused(x), model(x), exact=False)
    assert fused.n_traces == 1
    assert fused.n_eager == 0, fused.reasons


def test_a_module_whose_mode_changes_is_traced_anew():
    class Switch(nn.Module):
        def forward(self, x):
            return x * 2 if self.training else x

    model = Switch()
    fused = rx.fuse(model)
    x = rx.Tensor(array(3))
    assert_same(fused(x), model(x))
    model.eval()
    assert_same(fused(x), model(x))
    model.train()
    assert_same(fused(x), model(x))
    assert fused.n_traces == 2


def test_a_module_as_an_argument():
    model = nn.Linear(3, 2)
    fused = rx.fuse(lambda model, x: model(x))
    x = rx.Tensor(array(4, 3))
    with rx.no_grad():
        assert_same(fused(model, x), model(x), exact=False)


class Box:
    __slots__ = ("tensor", "seen")


def test_the_data_of_a_tensor_is_read_anew():
    box = Box()
    box.tensor = rx.Tensor(np.ones(3))
    fused = rx.fuse(lambda x: x + box.tensor.data * 2)
    for value in (1.0, 4.0):
        box.tensor.assign(np.full(3, value))
        assert_same(fused(np.zeros(3)), np.full(3, 2 * value))
    assert fused.n_traces == 1


def test_other_threads_see_the_data_of_tensors_during_a_trace():
    box = Box()
    box.tensor, box.seen = rx.Tensor(np.ones(3)), []

    def look():
        box.seen.append(type(box.tensor.data))

    def f(x):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return x * box.tensor.data

    rx.fuse(f)(np.ones(3))
    assert box.seen == [np.ndarray]
    assert type(rx.Tensor.__dict__["data"]) is not property


# ------------------------------------------------------------- objects that the function finds


class Model:
    def __init__(self):
        self.a, self.b = np.arange(4.0).reshape(2, 2), np.ones((2, 2))
        self.parts = {"scale": 2.0}
        self.n_calls = 0

    def product(self, x):
        return x @ (self.a @ self.b) * self.parts["scale"]

    def count(self, x):
        self.n_calls += 1
        return x * 2

    def remember(self, x):
        self.last = x * 2
        return self.last + 1

    def once(self, x):
        if not hasattr(self, "table"):
            self.table = np.arange(2.0)
        return x + self.table


def test_what_is_computed_of_arrays_in_objects_is_computed_anew():
    model = Model()
    fused = rx.fuse(model.product)
    for _ in range(3):
        assert_same(fused(np.eye(2)), model.product(np.eye(2)))
        model.a += 1
    model.b = np.full((2, 2), 3.0)
    assert_same(fused(np.eye(2)), model.product(np.eye(2)))
    model.parts["scale"] = 5.0
    assert_same(fused(np.eye(2)), model.product(np.eye(2)))
    assert fused.n_eager == 0
    assert type(model) is Model


def test_arrays_in_modules_too():
    class Shift(nn.Module):
        def __init__(self):
            self.table = np.ones(2, "f4")

        def forward(self, x):
            return x + self.table * 2

    module = Shift()
    fused = rx.fuse(module)
    x = rx.Tensor(np.zeros(2, "f4"))
    for value in (2.0, 4.0):
        assert_same(fused(x).data, np.full(2, value, "f4"))
        module.table += 1
    assert fused.n_traces == 1


@pytest.mark.parametrize("name", ["count", "remember"])
def test_a_function_that_changes_an_object_runs_as_it_is(name):
    model, plain = Model(), Model()
    fused = rx.fuse(getattr(model, name))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(5):
            assert_same(fused(np.ones(2)), getattr(plain, name)(np.ones(2)))
    assert len(seen) == 1 and "it sets" in str(seen[0].message)
    assert model.n_calls == plain.n_calls
    assert fused.n_eager == 5
    if name == "remember":
        assert_same(model.last, plain.last)


def test_a_list_that_is_appended_to_gets_arrays():
    seen = []

    def f(x):
        seen.append(x.sum())
        return x + 1

    fused = rx.fuse(f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            fused(np.ones(3))
    assert seen == [3.0] * 4


def test_a_function_inside_that_sets_a_name_around_it():
    n_calls = 0

    def f(x):
        def count():
            nonlocal n_calls
            n_calls += 1

        count()
        return x + 1

    fused = rx.fuse(f)
    with pytest.warns(RuntimeWarning, match=r"count\(\) sets n_calls outside of it"):
        fused(np.ones(3))
    fused(np.ones(3))
    assert n_calls == 2


def test_what_changes_in_the_first_call_alone_is_fused_then():
    model = Model()
    fused = rx.fuse(model.once)
    for _ in range(3):
        assert_same(fused(np.ones(2)), np.array([1.0, 2.0]))
    assert fused.n_eager == 1
    assert not fused.reasons


def test_objects_that_were_there_are_given():
    model = Model()
    fused = rx.fuse(lambda m, x: (m, x + 1, np.float32, "text", slice(2)))
    assert fused(model, np.ones(2))[0] is model
