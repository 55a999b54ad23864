"""The invariants of the tape, one test or more each, and what users trip over."""

import copy
import gc
import math
import pickle
import threading
import time
import tracemalloc
from contextlib import nullcontext

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.autograd._op import differentiable
from rtxarr.autograd._tape import Leaf, Node
from rtxarr.testing import assert_close


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request):
    with rx.device(request.param):
        yield request.param


def leaf(values, dtype="float64"):
    return rx.Tensor(rx.asarray(values, dtype=getattr(rx, dtype)), requires_grad=True)


FLOATS = ["float16", "bfloat16", "float32", "float64"]


# I1: a gradient has the shape and dtype of what it belongs to


@pytest.mark.parametrize("dtype", [*FLOATS, "complex64", "complex128"])
def test_gradient_has_shape_and_dtype_of_its_tensor(device, dtype):
    x = leaf([[1.0], [2.0]], dtype)
    y = leaf([1.0, 2.0, 3.0], "float64" if dtype == "complex128" else "float32")
    out = rx.sum(rx.tanh(x * y) + x)
    rx.real(out).backward() if dtype.startswith("c") else out.backward()
    assert x.grad.shape == x.shape and x.grad.dtype == x.dtype
    assert y.grad.shape == y.shape and y.grad.dtype == y.dtype


def test_the_gradient_of_a_scalar_may_be_written_into(device):
    """It begins as a one that is kept, of which leaves get copies."""
    for function in (rx.positive, lambda x: rx.reshape(x, (1,)), lambda x: x):
        for _ in range(2):
            x = leaf(3.0, "float32")
            out = function(x)
            out.backward()
            assert_close(x.grad, np.float32(1))
            x.grad[...] = 7


@pytest.mark.parametrize("name", ["where", "maximum"])
def test_float32_gradients_stay_float32(device, name):
    x = leaf([1.0, 2.0, 3.0], "float32")
    y = rx.where(x > 0, x, 2 * x) if name == "where" else rx.maximum(x, 2.0)
    rx.sum(y).backward()
    assert x.grad.dtype == rx.float32


# I2: contributions add up in a fixed order


def test_gradients_are_bitwise_repeatable(device):
    values = np.random.default_rng(0).standard_normal(1000).tolist()

    def gradient():
        x = leaf(values, "float32")
        y = x * 1.7
        parts = [rx.sin(y * float(k)) for k in range(1, 9)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part * y
        rx.sum(total[rx.asarray([0, 0, 5, 999, 5])]).backward()
        return rx.Tensor(x.grad).numpy()

    first = gradient()
    for _ in range(4):
        assert_close(gradient(), first, exact=True)


def test_nodes_run_newest_first():
    order = []

    @rx.custom_op
    def traced(x, tag):
        return x + 0.0

    def rule(g, tag):
        order.append(tag)
        return g

    traced.defvjps(x=rule)
    x = leaf([1.0])
    a = traced(x, "a")
    b = traced(a, "b")
    c = traced(a, "c")
    rx.sum(traced(b, "d") + c).backward()
    assert order == ["d", "c", "b", "a"]


# I3: an incoming gradient is never written


def test_an_incoming_gradient_is_never_written(device):
    x = leaf([1.0, 2.0])
    g = rx.asarray([1.0, 1.0])
    y = x + x
    (y + y + y).backward(g)
    assert_close(g, [1.0, 1.0], exact=False)
    assert_close(x.grad, [6.0, 6.0])


def test_two_leaves_do_not_share_a_gradient_buffer(device):
    x, y = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    rx.sum(x + y).backward()
    rx.sum(x * 1).backward()
    assert_close(x.grad, [2.0, 2.0])
    assert_close(y.grad, [1.0, 1.0])


def test_gradient_of_a_broadcast_can_be_written(device):
    x = leaf([1.0, 2.0, 3.0])
    rx.sum(x).backward()
    x.grad[0] = 5.0
    assert_close(x.grad, [5.0, 1.0, 1.0])


def test_gradients_share_no_memory(device):
    x, y, g = leaf([1.0, 2.0]), leaf([3.0, 4.0]), rx.asarray([1.0, 1.0])
    (rx.reshape(x, (2,)) + y).backward(g)
    x.grad *= 2
    assert_close(x.grad, [2.0, 2.0])
    assert_close(y.grad, [1.0, 1.0])
    assert_close(g, [1.0, 1.0])
    of_x, of_y = rx.grad(lambda x, y: rx.sum(x + y), (0, 1))(x.data, y.data)
    of_x += 1  # a broadcast view could not be written into
    assert_close(of_x, [2.0, 2.0])
    assert_close(of_y, [1.0, 1.0])


def test_a_given_gradient_may_be_a_tensor(device):
    x = leaf([1.0, 2.0])
    (x * 3).backward(leaf([1.0, 2.0]))
    assert not isinstance(x.grad, rx.Tensor)
    assert_close(x.grad, [3.0, 6.0])


def test_a_complex_gradient_of_a_real_output_is_refused():
    x = leaf([1.0, 2.0])
    with pytest.raises(TypeError, match="grad must be real for a real output, got dtype complex"):
        (x * 3).backward(np.array([1.0, 1j]))


@pytest.mark.parametrize("shape", [(7,), (1,), ()], ids=str)
def test_a_rule_of_another_shape_is_named(shape):
    @rx.custom_op
    def twice(x):
        return 2 * x

    twice.defvjps(x=lambda g: np.ones(shape))
    with pytest.raises(ValueError, match="does not fit an argument of shape") as error:
        rx.sum(twice(leaf([1.0, 2.0]))).backward()
    assert "from the rule of twice() for its argument 'x'" in error.value.__notes__


@pytest.mark.parametrize("data", ["text", None, [object()], np.array(["2020"], "M8[Y]")])
def test_what_is_no_number_is_refused(data):
    with pytest.raises(TypeError, match="data must hold numbers or bools, got dtype"):
        rx.Tensor(data)


# I4: a saved tensor that was changed is noticed


def change_by_setitem(y):
    y[0] = 7.0


def change_by_assign(y):
    y.assign(rx.zeros_like(y.data))


@pytest.mark.parametrize("change", [change_by_setitem, change_by_assign])
def test_changed_saved_tensor_is_refused(device, change):
    x, y = leaf([1.0, 2.0]), rx.Tensor(rx.asarray([3.0, 4.0]))
    z = rx.sum(x * y)
    change(y)
    with pytest.raises(RuntimeError, match=r"gradient of multiply\(\).*version 1, but version 0"):
        z.backward()


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y[1:],
        lambda y: rx.reshape(y, (2, 1)),
        lambda y: y.detach(),
        lambda y: rx.flip(y),
        lambda y: rx.real(y),
        lambda y: rx.astype(y, y.dtype, copy=False),
        lambda y: y.to_device(y.device),
        lambda y: rx.Tensor(y),
    ],
    ids=["slice", "reshape", "detach", "flip", "real", "astype", "to_device", "Tensor"],
)
def test_change_through_a_view_is_noticed(device, view):
    x, y = leaf([1.0, 2.0]), rx.Tensor(rx.asarray([3.0, 4.0]))
    v = view(y)
    z = rx.sum(x * y)
    v[...] = 0.0
    with pytest.raises(RuntimeError, match="changed in place"):
        z.backward()


def test_change_of_a_complex_tensor_through_its_parts_is_noticed():
    for part in (rx.real, rx.imag):
        x, y = leaf([1.0, 2.0]), rx.Tensor(np.array([3.0 + 1j, 4.0]))
        z = rx.real(rx.sum(x * y))
        part(y)[...] = 0.0
        with pytest.raises(RuntimeError, match="changed in place"):
            z.backward()


def test_assign_writes_into_a_scalar_that_others_look_at(device):
    x = rx.Tensor(rx.asarray(1.0))
    view = x.detach()
    x.assign(rx.asarray(2.0))
    assert_close(view.data, 2.0)
    assert_close(rx.Tensor(np.float64(1.0)).assign(np.float64(2.0)).data, 2.0)


def test_what_is_no_array_is_refused_as_value_and_gradient():
    x = leaf([1.0])
    with pytest.raises(TypeError, match="value must be an array or Tensor, got float"):
        x.assign(3.0)
    with pytest.raises(TypeError, match="grad must be an array or Tensor, got list"):
        x.grad = [1.0]


def test_parameter_updated_between_forward_and_backward(device):
    w = leaf([1.0, 2.0])
    z = rx.sum(w * w)
    w.assign(w.data * 0.5)
    with pytest.raises(RuntimeError, match="changed in place"):
        z.backward()


def test_changed_variadic_argument_is_refused():
    @rx.custom_op
    def product(*factors):
        return factors[0] * factors[1]

    product.defvjp(lambda g, factors: (g * factors[1], g * factors[0]))
    x, y = leaf([1.0, 2.0]), rx.Tensor(np.array([3.0, 4.0]))
    z = rx.sum(product(x, y))
    y[0] = 7.0
    with pytest.raises(RuntimeError, match="changed in place"):
        z.backward()


def test_saved_output_then_overwritten_gives_the_right_value(device):
    x = leaf(1.0)
    y = rx.exp(x)
    z = y * y
    y[...] = 0.0  # recorded: y becomes an updated copy, z keeps what it saved
    z.backward()
    assert_close(x.grad, 2 * np.exp(2.0))


def test_setitem_is_differentiable(device):
    x, v = leaf([1.0, 2.0, 3.0]), leaf([10.0])
    y = x * 2
    y[1:2] = v * 3
    rx.sum(y * y).backward()
    assert_close(y.data, [2.0, 30.0, 6.0])
    assert_close(x.grad, [8.0, 0.0, 24.0])
    assert_close(v.grad, [180.0])


def test_writing_into_a_leaf_is_refused_while_recording(device):
    x = leaf([1.0, 2.0])
    with pytest.raises(RuntimeError, match="index_update"):
        x[0] = 5.0
    with rx.no_grad():
        x[0] = 5.0
    assert_close(x.data, [5.0, 2.0])


def test_debug_mutation_finds_writes_behind_the_tape(device):
    x = leaf([1.0, 2.0])
    with rx.autograd.debug_mutation():
        y = rx.exp(x)
    y.data[0] = 0.0
    with pytest.raises(RuntimeError, match=r"exp\(\) was changed behind"):
        rx.sum(y).backward()


# I5: no node when nothing requires a gradient


def test_no_node_without_a_tracked_input(device):
    x = rx.Tensor(rx.ones(3))
    assert (x * 2).node is None
    with rx.no_grad():
        assert (leaf([1.0]) * 2).node is None
    assert rx.stop_gradient(leaf([1.0])).node is None
    assert (leaf([1.0]) > 0).node is None


# I6: the graph goes away by reference counting, and the backward pass frees what it saved


def _nodes():
    return sum(type(o) in (Node, Leaf, rx.Tensor) for o in gc.get_objects())


def test_no_reference_cycles(device):
    gc.collect()
    gc.disable()
    try:
        before = _nodes()
        x = leaf([0.5, 1.0])
        y = rx.sum(rx.exp(x) * rx.max(x) + rx.stack([x, x])[0])
        y.backward()
        (g,) = rx.autograd.gradients([rx.sum(rx.exp(x) ** 2)], [x], create_graph=True)
        rx.hessian(lambda v: rx.sum(rx.exp(v)))(x.data)
        rx.checkpoint(rx.exp, x)
        del x, y, g
        assert _nodes() == before
    finally:
        gc.enable()


def test_backward_frees_what_was_saved():
    x = leaf(np.ones(500_000))
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        y = rx.sum(rx.exp(x) * rx.sin(x))
        saved = tracemalloc.get_traced_memory()[0]
        y.backward()
        x.grad = None
        freed = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert saved > 8e6  # exp(x) and sin(x) at 4 MB each
    assert freed < 1e5


def test_second_backward_needs_retain_graph(device):
    x = leaf([2.0])
    y = rx.sum(x * x)
    y.backward(retain_graph=True)
    y.backward()
    assert_close(x.grad, [8.0])
    with pytest.raises(RuntimeError, match="retain_graph"):
        y.backward()


def test_a_long_chain_is_released_without_recursion():
    x = leaf([1.0])
    y = x
    for _ in range(100_000):
        y = y + 1.0
    y.backward(np.ones(1))
    assert_close(x.grad, [1.0])
    y = x
    for _ in range(100_000):
        y = y * 1.0
    del y


# I7: nothing waits for the device


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:cupyx.allow_synchronize")
def test_forward_and_backward_do_not_wait_for_the_device():
    cupyx = pytest.importorskip("cupyx")
    with rx.device("cuda:0"):
        x, w = leaf(np.ones((8, 4)), "float32"), leaf(np.ones((4, 4)), "float32")
        for context in (nullcontext(), cupyx.allow_synchronize(False)):  # the first compiles
            with context:
                y = rx.logsumexp(rx.tanh(x @ w) + rx.where(x > 0, x, 0), axis=-1)
                rx.sum(rx.max(y) * y).backward()


def test_forward_and_backward_read_no_values():
    """The same over lazy arrays, whose values are not there yet."""
    dask = pytest.importorskip("dask")
    import dask.array as da

    x = rx.Tensor(da.ones((8, 4)), requires_grad=True)
    y = rx.sum(rx.where(x > 0, rx.tanh(x) * 2, 0) + rx.exp(x))
    with dask.config.set(scheduler=lambda *_, **__: pytest.fail("a value was read")):
        y.backward(da.ones(()))
    assert_close(
        np.asarray(x.grad.compute()), np.full((8, 4), 2 * (1 - np.tanh(1) ** 2) + np.exp(1))
    )


# I8: sums over broadcast axes accumulate in float32


@pytest.mark.parametrize(("dtype", "n"), [("float16", 4096), ("bfloat16", 1024)])
def test_broadcast_gradients_accumulate_in_float32(device, dtype, n):
    b = leaf([1.0], dtype)
    x = rx.astype(rx.ones((n, 1)), b.dtype)
    rx.sum(rx.astype(b * x, rx.float32)).backward()
    assert float(rx.astype(b.grad, rx.float64)[0]) == n


def test_half_reductions_accumulate_in_float32(device):
    x = rx.full(70000, 0.5, dtype=rx.float16)
    assert float(rx.sum(x)) == 35008  # 35000 rounded to float16
    assert float(rx.mean(x)) == 0.5


# I9: integers never require a gradient, and None means zero


def test_integers_cannot_require_a_gradient(device):
    for dtype in ("int32", "bool"):
        with pytest.raises(TypeError, match="floating-point or complex"):
            rx.Tensor(rx.ones(3, dtype=getattr(rx, dtype)), requires_grad=True)
    with pytest.raises(TypeError, match="argument 0 must have a floating-point"):
        rx.grad(lambda x: rx.sum(x))(rx.asarray([1, 2]))


def test_untouched_inputs_have_no_gradient(device):
    x, y = leaf([1.0]), leaf([1.0])
    assert rx.autograd.gradients([rx.sum(x * 2)], [x, y])[1] is None
    assert_close(rx.grad(lambda a, b: rx.sum(a), 1)(x.data, y.data), [0.0])


def test_one_output_of_several_can_be_used(device):
    x = leaf([[3.0, 1.0], [1.0, 2.0]])
    first, _ = rx.unstack(x)
    rx.sum(first).backward()
    assert_close(x.grad, [[1.0, 1.0], [0.0, 0.0]])


# I10: what where masked out does not reach the gradient


MASKED = {
    "sqrt": (lambda x: rx.where(x >= 0, x, rx.sqrt(-x)), 1.0, 1.0),
    "log": (lambda x: rx.where(x > 0, rx.log(x), 0.0), 0.0, 0.0),
    "divide": (lambda x: rx.where(x != 0, 1.0 / x, 3.0 * x), 0.0, 3.0),
    "chain": (lambda x: rx.where(x > 0, rx.log(rx.sqrt(x) * 2), x), 0.0, 1.0),
    "broadcast": (
        lambda x: rx.sum(rx.where(rx.asarray([False, False]), rx.sqrt(x), x * 2)),
        0.0,
        4.0,
    ),
    "view": (
        lambda x: rx.sum(rx.where(rx.asarray([[False]]), rx.reshape(rx.log(x), (1, 1)), x)),
        0.0,
        1.0,
    ),
    "nested": (lambda x: rx.where(x > 0, rx.where(x > -1, rx.log(x), x), 5 * x), 0.0, 5.0),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_masked_out_nan_has_zero_gradient(device, name):
    function, at, want = MASKED[name]
    x = leaf(at)
    function(x).backward()
    assert_close(x.grad, want)
    assert_close(rx.grad(function)(rx.asarray(at)), want)


@pytest.mark.parametrize("reduce", [rx.sum, rx.mean])
def test_masked_out_nan_has_zero_gradient_through_a_sum(device, reduce):
    x = leaf([[-1.0, 4.0], [4.0, 4.0]])
    with np.errstate(invalid="ignore"):
        rows = reduce(rx.sqrt(x), axis=1)
        rx.sum(rx.where(rx.asarray([False, True]), rows, 0.0)).backward()
    share = 0.25 if reduce is rx.sum else 0.125
    assert_close(x.grad, [[0.0, 0.0], [share, share]])


WEIGHT = [0.5, 2.0, -1.0, 1.0]
ALONG_ROWS = {
    "softmax": lambda x: rx.softmax(x),
    "softmax of columns": lambda x: rx.softmax(x.T, axis=0).T,
    "log_softmax": lambda x: rx.log_softmax(x),
    "logsumexp": lambda x: rx.logsumexp(x, axis=1, keepdims=True),
    "layer_norm": lambda x: rx.layer_norm(x, rx.asarray(WEIGHT)),
    "rms_norm": lambda x: rx.rms_norm(x),
    "group_norm": lambda x: rx.group_norm(x, 2, rx.asarray(WEIGHT)),
    "prod": lambda x: rx.prod(x, axis=1, keepdims=True),
    "prod of columns": lambda x: rx.expand_dims(rx.prod(x.T, axis=0), axis=1),
    "max": lambda x: rx.max(x, axis=-1, keepdims=True),
    "std": lambda x: rx.std(x, axis=1, keepdims=True),
    "var": lambda x: rx.expand_dims(rx.var(x, axis=1), axis=-1),
    "norm": lambda x: rx.linalg.vector_norm(x, axis=1, keepdims=True),
    "norm of columns": lambda x: rx.expand_dims(rx.linalg.vector_norm(x.T, axis=0), axis=1),
    "cumulative_prod": lambda x: rx.cumulative_prod(x, axis=1),
    "two": lambda x: rx.softmax(rx.layer_norm(rx.log(x) + 2)),
}


@pytest.mark.parametrize("name", ALONG_ROWS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_masked_out_rows_of_nan_have_zero_gradients(device, name):
    function = ALONG_ROWS[name]
    good = rx.asarray([[0.3, 2.0, 1.5, 0.7], [1.0, 0.2, 0.4, 3.0]])
    bad = rx.asarray([[np.nan, 1.0, 2.0, 0.0], [np.inf, 1.0, -1.0, 2.0]])
    kept = rx.asarray([[True], [False], [True], [False]])

    def loss(x, kept):
        return rx.sum(rx.where(kept, function(x), 0.0) ** 2)

    rows = rx.stack([good[0], bad[0], good[1], bad[1]])
    want = rx.grad(loss)(good, rx.asarray([[True], [True]]))
    got = rx.grad(loss)(rows, kept)
    assert_close(got[::2], want)
    assert_close(got[1::2], [[0.0] * 4] * 2)
    second = rx.grad(lambda x: rx.sum(rx.grad(loss)(x, kept)[::2] ** 2))(rows)
    assert_close(second[1::2], [[0.0] * 4] * 2)
    again = rx.grad(lambda x: rx.sum(rx.grad(loss)(x, rx.asarray([[True], [True]])) ** 2))(good)
    assert_close(second[::2], again)


@pytest.mark.parametrize("norm", [rx.layer_norm, lambda x, w: rx.group_norm(x, 2, w)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_masked_out_rows_add_nothing_to_the_weight_of_a_norm(device, norm):
    x = rx.asarray([[0.3, 2.0, 1.5, 0.7], [np.nan, np.inf, 0.0, 0.0]])
    weight = leaf([1.0, 2.0, 3.0, 4.0])
    rx.sum(rx.where(rx.asarray([[True], [False]]), norm(leaf(x), weight), 0.0) ** 2).backward()
    alone = leaf([1.0, 2.0, 3.0, 4.0])
    rx.sum(norm(leaf(x[:1]), alone) ** 2).backward()
    assert_close(weight.grad, alone.grad)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_masked_out_nan_has_zero_second_derivative(device):
    second = rx.grad(rx.grad(lambda x: rx.where(x > 0, rx.log(x), x**2)))
    assert_close(second(rx.asarray(0.0)), 2.0)
    assert_close(second(rx.asarray(2.0)), -0.25)


def test_unmasked_contribution_is_not_masked(device):
    x = leaf([4.0, 9.0])
    s = rx.sqrt(x)
    rx.sum(rx.where(rx.asarray([True, False]), s, 0.0) + s).backward()
    assert_close(x.grad, [0.5, 1 / 6])


# I11: recording is per thread


def test_threads_add_to_a_shared_leaf():
    class Slow(np.ndarray):
        def __add__(self, other):
            time.sleep(1e-3)
            return super().__add__(other)

    w = leaf([1.0])
    w.grad = np.zeros(1).view(Slow)
    threads = [threading.Thread(target=lambda: rx.sum(w * 1.0).backward()) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert_close(np.asarray(w.grad), [8.0])


def test_threads_do_not_mix_their_gradients():
    wrong = []

    def work(k):
        for _ in range(50):
            x = leaf(np.full(10, float(k)))
            rx.sum(x * x * x).backward()
            if not np.allclose(x.grad, 3.0 * k * k):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


# I12: ties share the gradient evenly


@pytest.mark.parametrize("name", ["max", "min"])
def test_ties_share_the_gradient(device, name):
    x = leaf([[1.0, 1.0, 1.0], [2.0, 0.0, 2.0], [0.0, 0.0, 3.0]])
    rx.sum(getattr(rx, name)(x, axis=1)).backward()
    want = {
        "max": [[1 / 3, 1 / 3, 1 / 3], [0.5, 0, 0.5], [0, 0, 1]],
        "min": [[1 / 3, 1 / 3, 1 / 3], [0, 1, 0], [0.5, 0.5, 0]],
    }
    assert_close(x.grad, want[name])


def test_elementwise_ties_share_the_gradient(device):
    x, y = leaf([1.0, 2.0, 3.0]), leaf([1.0, 5.0, 0.0])
    rx.sum(rx.maximum(x, y)).backward()
    assert_close(x.grad, [0.5, 0.0, 1.0])
    assert_close(y.grad, [0.5, 1.0, 0.0])


def test_scatter_and_segment_ties_share_the_gradient(device):
    x = leaf([[2.0], [2.0], [1.0]])
    rx.sum(rx.scatter_max(x, rx.asarray([0, 0, 0]), 1)).backward()
    assert_close(x.grad, [[0.5], [0.5], [0.0]])
    x = leaf([[2.0], [2.0], [1.0]])
    rx.sum(rx.segment_min(x, rx.asarray([0, 2, 3]))).backward()
    assert_close(x.grad, [[0.5], [0.5], [1.0]])


def test_nan_takes_the_gradient_of_max(device):
    x = leaf([1.0, np.nan, 3.0])
    y = rx.max(x)
    assert np.isnan(float(y.data))
    y.backward()
    assert_close(x.grad, [0.0, 1.0, 0.0])


# Tensors as arrays


def test_raw_arrays_come_back_raw_and_tensors_as_tensors(device):
    raw = rx.ones(3)
    assert not isinstance(rx.tanh(raw), rx.Tensor)
    for out in (
        rx.tanh(rx.Tensor(raw)),
        rx.sum(rx.Tensor(raw)),
        raw + rx.Tensor(raw),
        rx.argmax(rx.Tensor(raw)),
        rx.where(raw > 0, rx.Tensor(raw), 0),
        rx.concat([raw, rx.Tensor(raw)]),
        rx.Tensor(raw) > 0,
        rx.zeros_like(rx.Tensor(raw)),
    ):
        assert isinstance(out, rx.Tensor)


@pytest.mark.parametrize("operator", ["+", "-", "*", "/", "//", "%", "**", "@", "<", "=="])
def test_operators_meet_arrays_on_either_side(device, operator):
    a, b = rx.asarray([3.0, 2.0]), rx.asarray([2.0, 4.0])
    want = eval(f"a {operator} b")
    for left, right in ((rx.Tensor(a), b), (a, rx.Tensor(b)), (rx.Tensor(a), rx.Tensor(b))):
        got = eval(f"left {operator} right", {"left": left, "right": right})
        assert isinstance(got, rx.Tensor)
        assert_close(got, want)


def test_python_scalars_are_weak(device):
    for dtype in FLOATS:
        x = leaf([1.0, 2.0], dtype)
        for y in (x + 1, 2.0 * x, x / 3, 1 - x, x**2, rx.maximum(x, 0.5), rx.where(x > 1, x, 0)):
            assert y.dtype == x.dtype, (dtype, y.dtype)


def test_what_an_operator_cannot_take_raises_type_error():
    with pytest.raises(TypeError, match="unsupported operand"):
        leaf([1.0]) + "text"
    with pytest.raises(TypeError):
        leaf([1.0]) @ None


def test_augmented_assignment_makes_a_new_tensor(device):
    x = leaf([1.0, 2.0])
    y = x
    y += 1
    assert y is not x
    assert_close(x.data, [1.0, 2.0])
    rx.sum(y * y).backward()
    assert_close(x.grad, [4.0, 6.0])


def test_conversions(device):
    x = rx.Tensor(rx.asarray([[1.0, 2.0], [3.0, 4.0]]))
    assert len(x) == 2 and [r.shape for r in x] == [(2,), (2,)]
    assert float(x[0, 0]) == 1.0 and int(x[1, 1]) == 4 and bool(x[0, 1])
    assert x[0, 0].item() == 1.0
    assert_close(x.numpy(), [[1.0, 2.0], [3.0, 4.0]])
    assert_close(x.T.numpy(), [[1.0, 3.0], [2.0, 4.0]])
    assert_close(x.mT.numpy(), [[1.0, 3.0], [2.0, 4.0]])
    assert x.device == device
    assert "Tensor([[1., 2.]" in repr(x) and "requires_grad=True" in repr(leaf([1.0]))
    assert x.__array_namespace__() is rx
    with pytest.raises(TypeError, match="one element"):
        float(x)
    with pytest.raises(TypeError, match="integer 0-d"):
        range(rx.Tensor(rx.asarray(1.5)))
    with pytest.raises(TypeError, match="0-d"):
        len(rx.Tensor(rx.asarray(1.0)))


def test_numpy_conversion_refuses_to_lose_a_graph():
    assert_close(np.asarray(rx.Tensor(np.ones(2))), [1.0, 1.0])
    with pytest.raises(TypeError, match="the graph would be lost"):
        np.asarray(leaf([1.0]))


def test_number_conversion_refuses_to_lose_a_graph():
    x = leaf([1.0, 2.0])
    with pytest.raises(TypeError, match="does not become float by itself: the graph would be lost"):
        x * math.sin(x[0])
    with pytest.raises(TypeError, match="complex"):
        complex(x[0])
    with pytest.raises((TypeError, ValueError)):
        np.zeros(2)[0] = x[0]
    assert int(x[1]) == 2 and bool(x[0]) and math.sin(rx.stop_gradient(x[0])) == math.sin(1.0)


def test_tensors_of_one_element_are_formatted_as_numbers():
    x = leaf([1.0, 2.0])
    assert f"{x[1]:.3f}" == "2.000" and f"{rx.sum(x):6.1e}" == "3.0e+00"
    assert f"{x[0]}" == str(x[0])
    with pytest.raises(ValueError):
        f"{x:.3f}"
    with pytest.raises(BufferError, match="stop_gradient"):
        np.from_dlpack(leaf([1.0]))


def test_dlpack_shares_memory(device):
    x = rx.Tensor(rx.asarray([1.0, 2.0]))
    y = rx.from_dlpack(x)
    y[0] = 9.0
    assert float(x.data[0]) == 9.0


def test_copies_and_pickles_of_leaves(device):
    x = leaf([1.0, 2.0])
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert y.requires_grad and y.data is not x.data
        rx.sum(y * 2).backward()
        assert x.grad is None
        assert_close(y.data, x.data, exact=True)
    with pytest.raises(RuntimeError, match="only a leaf"):
        copy.deepcopy(x * 2)


def test_backward_refuses_what_makes_no_sense(device):
    with pytest.raises(RuntimeError, match="requires_grad"):
        rx.Tensor(rx.ones(1)).backward()
    with pytest.raises(ValueError, match="not a real scalar"):
        (leaf([1.0, 2.0]) * 2).backward()
    with pytest.raises(ValueError, match=r"shape \(2,\), got \(3,\)"):
        (leaf([1.0, 2.0]) * 2).backward(rx.ones(3))
    with pytest.raises(ValueError, match="grad must have shape"):
        leaf([1.0]).grad = rx.ones(2)
    with pytest.raises(ValueError, match="value must have shape"):
        leaf([1.0]).assign(rx.ones(2))
    with pytest.raises(RuntimeError, match="only be changed on a leaf"):
        (leaf([1.0]) * 2).requires_grad = False


def test_tensor_moves_between_devices():
    x = leaf([1.0, 2.0])
    y = x.to_device("cpu")
    rx.sum(y * y).backward()
    assert_close(x.grad, [2.0, 4.0])


def test_per_sample_gradients_without_a_rule_name_the_operation():
    w = leaf([1.0, 2.0])
    with pytest.raises(TypeError, match=r"multiply\(\) has no per-sample rule for 'x2'"):
        rx.autograd.per_sample_gradients(rx.sum(rx.ones((3, 2), device="cpu") * w), [w])


def test_a_real_gradient_may_be_given_for_a_complex_output():
    z = rx.Tensor(np.asarray([1 + 2j, 3j]), requires_grad=True)
    (z * z).backward(np.ones(2))
    assert_close(z.grad, np.asarray([2 - 4j, -6j]))


def test_gradients_that_are_parts_of_one_array_are_not_copied():
    whole = np.zeros((2, 3))

    @differentiable
    def split(a, b):
        return a + b

    split.defvjp(lambda g: (whole[0], whole[1]))
    a, b = (rx.Tensor(np.ones(3), requires_grad=True) for _ in range(2))
    rx.sum(split(a, b)).backward()
    assert np.shares_memory(a.grad, whole)
    assert np.shares_memory(b.grad, whole)
    assert not np.shares_memory(a.grad, b.grad)


def test_reductions_of_numpy_say_what_to_write():
    x = rx.Tensor(np.ones(3), requires_grad=True)
    for function in (np.max, np.sum, np.mean):
        with pytest.raises(TypeError, match=f"write rx.{function.__name__}"):
            function(x)
