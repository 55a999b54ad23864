"""What programs saved for a GPU do beside starting their own kernels."""

import pytest

import rtxarr as rx
from rtxarr.kernels.segment import segment_reduce
from rtxarr.polygraph import ArraySpec, cond, fuse, while_loop

pytest.importorskip("cupy")

SQUARE = ArraySpec((64, 64), "float32")
NUMBERS = ArraySpec((9,), "int64")
EDGES = ArraySpec((300,), "float32"), ArraySpec((65,), "int64"), ArraySpec((300,), "int64")


def layer_norm(x):
    apart = x - rx.mean(x, axis=-1, keepdims=True)
    return apart / rx.sqrt(rx.mean(apart * apart, axis=-1, keepdims=True) + 1e-5)


def in_place(x, y):
    x += y


def sum_over_edges(x, weight, indptr, indices):
    message = rx.take(x, indices, axis=0) * weight[:, None]
    return rx.tanh(segment_reduce("sum", message, indptr))


def branch(x):
    return cond(rx.sum(x) > 0, lambda x: x + 1, lambda x: x - 1, x)


def loop(x):
    return while_loop(lambda x: rx.sum(x) < 9, lambda x: x + 1, x)


OWN_KERNELS = {
    "chain": (lambda x, scale: rx.tanh(x) * scale + 1, (SQUARE, 2.0)),
    "softmax": (lambda x: rx.softmax(x, axis=-1), (SQUARE,)),
    "layer norm": (layer_norm, (SQUARE,)),
    "sum of all": (rx.sum, (ArraySpec((640, 640), "float32"),)),
    "argmax": (lambda x: rx.argmax(x, axis=1), (SQUARE,)),
    "several": (lambda x: (x + 1, rx.sum(x, axis=0), rx.tanh(x).T), (SQUARE,)),
    "in place": (in_place, (SQUARE, SQUARE)),
    "concat": (lambda x, y: rx.concat([x, y], axis=1), (SQUARE, SQUARE)),
    "gather": (lambda x, i: rx.take(x, i, axis=0) * 2, (SQUARE, NUMBERS)),
    "graph": (sum_over_edges, (ArraySpec((64, 8), "float32"), *EDGES)),
}  # fmt: skip
OTHERS = {
    "product": (lambda x, y: rx.tanh(x @ y + 1), (SQUARE, SQUARE), ["matmul"]),
    "branch": (branch, (SQUARE,), ["cond"]),
    "loop": (loop, (SQUARE,), ["while_loop"]),
    "running sum": (lambda x: rx.cumulative_sum(x, axis=1), (SQUARE,), ["cumulative_sum"]),
    "sort": (lambda x: rx.sort(x, axis=1) + 1, (SQUARE,), ["call"]),
    "complex": (rx.exp, (ArraySpec((64,), "complex64"),), ["exp"]),
}  # fmt: skip


def steps_beside_kernels(program):
    """Return the operations of steps that are no kernels, also within branches and loops."""
    found = []
    for kind, *rest in program["steps"]:
        if kind == "node":
            number, inner = rest
            found.append(program["nodes"][number][0])
            for part in inner:
                found += steps_beside_kernels(part)
    return [op for op in found if op != "item"]


def saved(function, args):
    bundle = fuse(function).aot([args], targets="cuda", architectures=["sm_90"])
    (case,) = bundle.header["programs"]
    return case["program"]


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", OWN_KERNELS)
def test_programs_of_their_own_kernels_alone(name):
    program = saved(*OWN_KERNELS[name])
    assert any(kind == "kernel" for kind, *_ in program["steps"])
    assert steps_beside_kernels(program) == []
    assert program["copied"] == []
    assert [k for k, _ in program["updates"]] == [k for _, k in program["in_place"]]


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", OTHERS)
def test_steps_that_libraries_do(name):
    function, args, want = OTHERS[name]
    assert steps_beside_kernels(saved(function, args)) == want
