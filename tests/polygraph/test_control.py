"""Branches and loops: on arrays, in programs, and what they refuse."""

import array_api_compat.numpy as xp
import numpy as np
import pytest

import rtxarr as rx
from rtxarr.polygraph import _interpret
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._control import cond, scan, while_loop
from rtxarr.polygraph._program import Program
from rtxarr.polygraph._trace import Captured, Trace
from rtxarr.testing import assert_close

from .test_program import Reference


def traced(function, *arrays):
    """Give what a function gives on arrays, by a program and by the interpreter."""
    with Trace(xp) as trace:
        inputs = [trace.input(i, a.dtype, a.shape, a.strides) for i, a in enumerate(arrays)]
        out = function(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        graph = ir.Graph(trace.inputs, [o.node for o in outs])
        arrays += tuple(s.array for s in trace.sources if isinstance(s, Captured))
    got = Program(graph, Reference())(*arrays)
    for a, b in zip(got, _interpret.run(graph, arrays, np), strict=True):
        assert_close(a, b)
    return got[0] if len(got) == 1 else tuple(got)


def halve_if_large(x):
    return cond(rx.sum(x) > 2, lambda x: x / 2, lambda x: x * 3, x)


@pytest.mark.parametrize("values", [[1.0, 2.0], [0.5, 0.5]])
def test_a_branch_is_chosen_as_the_program_runs(values):
    x = np.array(values)
    assert_close(traced(halve_if_large, x), halve_if_large(x))


def test_both_branches_belong_to_one_program():
    with Trace(xp) as trace:
        out = halve_if_large(trace.input(0, np.dtype("f8"), (2,), (8,)))
        graph = ir.Graph(trace.inputs, [out.node])
    program = Program(graph, Reference())
    for x in (np.array([1.0, 2.0]), np.array([0.5, 0.5])):
        assert_close(program(x)[0], halve_if_large(x))
    assert len(program.parts) == 2


def test_a_branch_uses_what_is_around_it():
    def f(x, y):
        z = rx.exp(y)
        return cond(x[0] > 0, lambda x: x + z, lambda x: z, x)

    for first in (1.0, -1.0):
        x, y = np.array([first, 2.0]), np.array([0.5, 0.25])
        assert_close(traced(f, x, y), f(x, y))


def test_branches_give_containers():
    def f(x):
        out = cond(x[0] > 0, lambda x: {"a": x, "b": (x[0],)}, lambda x: {"a": -x, "b": (x[1],)}, x)
        return out["a"], out["b"][0]

    x = np.array([-1.0, 2.0])
    a, b = traced(f, x)
    assert_close(a, -x)
    assert_close(b, x[1])


def test_branches_of_other_shapes_are_refused():
    with pytest.raises(TypeError, match="then and otherwise must give the same structure"):
        traced(lambda x: cond(x[0] > 0, lambda x: x, lambda x: x[:1], x), np.ones(2))


def test_a_branch_that_needs_a_gradient_is_selected():
    def f(x):
        return rx.grad(lambda x: rx.sum(cond(x[0] > 0, lambda x: x * x, lambda x: 3 * x, x)))(x)

    with Trace(xp) as trace:
        out = f(trace.input(0, np.dtype("f8"), (2,), (8,)))
        graph = ir.Graph(trace.inputs, [out.node])
    for x in (np.array([1.0, 2.0]), np.array([-1.0, 2.0])):
        assert_close(_interpret.run(graph, [x], np)[0], f(x))


def test_a_loop_runs_as_often_as_its_values_ask():
    def f(x, factor):
        def body(state):
            n, x = state
            return n + 1, x * factor

        return while_loop(lambda state: rx.max(state[1]) < 100, body, (rx.asarray(0), x))

    x, factor = np.array([1.0, 2.0]), np.array(3.0)
    n, y = traced(f, x, factor)
    assert n == 4
    assert_close(y, np.array([81.0, 162.0]))


def test_a_loop_on_arrays_checks_its_state():
    with pytest.raises(TypeError, match=r"gets, float64\[2\], got float64\[1\]$"):
        while_loop(lambda x: True, lambda x: x[:1], np.ones(2))
    with pytest.raises(TypeError, match=r"gets, {'n': int64\[\]}, got \[float64\[2\]\]$"):
        while_loop(lambda s: True, lambda s: [np.ones(2)], {"n": np.int64(0)})


def test_a_traced_loop_says_what_its_state_must_be():
    x = np.ones(2)
    with pytest.raises(TypeError, match=r"gets, float64\[2\], got \(float64\[2\], float64\[2\]\)$"):
        traced(lambda x: while_loop(lambda x: rx.max(x) < 3, lambda x: (x, x), x), x)
    with pytest.raises(TypeError, match="got int .rx.asarray makes one of a number"):
        traced(lambda x: while_loop(lambda s: s[1] < 3, lambda s: s, (x, 0)), x)


def test_a_scan_has_a_gradient():
    def f(x):
        return scan(lambda s, x: (s * x, s), rx.asarray(1.0, device="cpu"), x)[0]

    x = np.array([2.0, 3.0, 4.0])
    assert_close(rx.grad(f)(x), np.array([12.0, 8.0, 6.0]))
    state, seen = scan(lambda s, x: (s + x, s), np.array(0.0), x)
    assert_close(seen, np.array([0.0, 2.0, 5.0]))
    assert state == 9


def test_a_long_scan_is_one_node():
    def f(x, y):
        def body(state, x):
            total, n = state
            total = rx.tanh(total + x["a"] * y)
            return (total, n + 1), {"total": total, "n": n, "two": (x["b"], 2 * x["b"])}

        state = rx.zeros_like(x[0]), rx.asarray(0, device="cpu")
        (total, n), seen = scan(body, state, {"a": x, "b": x[:, 0]})
        return total, n, seen["total"], seen["n"], *seen["two"]

    x, y = np.random.default_rng(0).standard_normal((20, 3)), np.array([0.5, 1.0, 2.0])
    for got, want in zip(traced(f, x, y), f(x, y), strict=True):
        assert_close(got, want)
    with Trace(xp) as trace:
        out = f(*(trace.input(i, a.dtype, a.shape, a.strides) for i, a in enumerate((x, y))))
        graph = ir.Graph(trace.inputs, [o.node for o in out])
    assert [n.op for n in graph.nodes()].count("scan") == 1
    assert [n.op for n in graph.nodes()].count("tanh") == 0


def test_a_scan_without_inputs():
    def f(x):
        return scan(lambda s, _: (s * 0.5, rx.sum(s)), x, length=12)

    x = np.array([1.0, 2.0])
    got = traced(lambda x: (f(x)[0], f(x)[1]), x)
    for a, b in zip(got, f(x), strict=True):
        assert_close(a, b)


def test_a_scan_that_changes_its_state_is_refused():
    with pytest.raises(TypeError, match="a state like the one it gets"):
        traced(lambda x: scan(lambda s, _: (s[:1], s), x, length=12)[0], np.ones(2))


def test_tensors_stay_tensors_in_branches():
    @rx.fuse
    def f(x):
        return cond(x[0] > 0, lambda x: x + 1, lambda x: x - 1, x)

    for first in (1.0, -1.0):
        x = rx.Tensor(np.array([first, 2.0]))
        got = f(x)
        assert isinstance(got, rx.Tensor)
        assert_close(got.data, (x + first).data)


@pytest.mark.parametrize("kind", ["cond", "while_loop", "scan"])
def test_parts_take_views(kind):
    def f(x, y):
        if kind == "cond":
            return cond(x[0, 0] > 0, lambda x: x.T + y[::-1], lambda x: x.T, x.T)
        if kind == "while_loop":
            return while_loop(lambda x: rx.max(x) < 50, lambda x: (2 * x).T + y, x[::-1])
        return scan(lambda s, row: ((2 * s).T, row + s[0]), x.T, rx.broadcast_to(y, (9, 3)))[1]

    x, y = np.arange(1.0, 10).reshape(3, 3), np.array([1.0, 2.0, 4.0])
    assert_close(rx.fuse(f)(x, y), f(x, y))
    assert_close(rx.fuse(f)(x.T, y[::-1]), f(x.T, y[::-1]))


APART = {
    "a loop of no rounds": lambda x: (
        while_loop(lambda s: s[0] < 0, lambda s: s * 2, 2 * x),
        2 * x,
    ),
    "two loops": lambda x: tuple(
        while_loop(lambda s, n=n: s[0] < n, lambda s: s * 2, 2 * x) for n in (0, 1)
    ),
    "a state made twice": lambda x: while_loop(
        lambda s: s[0][0] < 99, lambda s: (2 * s[0], 2 * s[0]), (x + 1, x + 2)
    ),
    "a state that moves on": lambda x: (
        while_loop(lambda s: s[0][0] < 99, lambda s: (2 * s[0], s[0], s[1]), (x + 1, x + 2, x + 3))
        + (x + 1, x + 2)
    ),
    "a branch": lambda x: (cond(x[0] > 0, lambda s: s, lambda s: 2 * s, 2 * x), 2 * x),
    "a branch in a branch": lambda x: (
        cond(x[0] > 0, lambda s: cond(s[0] > 0, lambda s: s, lambda s: -s, s), lambda s: s, 2 * x),
        (2 * x)[::-1],
    ),
}


@pytest.mark.parametrize("f", APART.values(), ids=APART)
def test_results_share_no_memory(f):
    """As those of the function do not: what it computes twice the program computes once."""
    x = np.array([5.0, 6.0])
    for function in (f, rx.fuse(f), rx.fuse(f, backend="interpreter")):
        found = function(x)
        for i, a in enumerate(found):
            assert not any(np.shares_memory(a, b) for b in (x, *found[:i]))


def test_parts_in_parts_use_what_is_around_them():
    """Their operands are their own, those of the part around them that part's."""

    def f(x, y):
        def body(state):
            n, x, y = state
            again = lambda s: (s[0] + 1, 2 * s[1] + x, s[2] - s[1] * y)  # noqa: E731
            inner = while_loop(lambda s: s[0] < 3, again, (0 * n, x, y))
            chosen = cond(x[0] > 0, lambda n, a, b: a + y - x, lambda n, a, b: b * x, n, y, x)
            last, _ = scan(lambda s, row: (s + x * row, row - y), y, rx.stack([x] * 9))
            return n + 1, inner[1] + chosen, rx.tanh(inner[2] + last)

        return while_loop(lambda s: s[0] < 3, body, (0 * x[0], x, y))[1:]

    x, y = np.array([0.5, 1.0, -1.0]), np.array([2.0, 1.0, 0.25])
    for got, want in zip(rx.fuse(f)(x, y), f(x, y), strict=True):
        assert_close(got, want)


def test_what_leaves_a_branch_otherwise_than_as_its_result_is_refused():
    def f(x):
        seen = []
        y = cond(x[0] > 0, lambda s: (seen.append(3 * s), 2 * s)[1], lambda s: s, x)
        return y + seen[-1]

    x = np.array([1.0, 2.0])
    fused = rx.fuse(f)
    with pytest.warns(RuntimeWarning, match="what a function of a branch or loop computes"):
        assert_close(fused(x), f(x))
