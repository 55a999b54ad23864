"""Branches and loops of captured steps whose tests are on the GPU: conditional nodes of the graph.

What a branch or a round of a loop does is recorded once, into a graph of the node's own; a kernel
tells the node whether to run it (again). So the host waits for nothing, and the step can be a CUDA
graph whatever its data say. That takes a driver of CUDA 12.8 (IF nodes with an else); elsewhere a
test on the GPU is read, which a capture refuses.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rtxarr import _allocation, _device
from rtxarr._replay import OncePerStep, kept_resources, recorder
from rtxarr.autograd._mode import witness

__all__ = [
    "branch",
    "choose",
    "decides",
    "is_available",
    "is_to_be_captured",
    "loop",
    "rehearse",
    "repeat",
    "turn_of",
]

_FIRST_DRIVER = 12080

# Calls what only the driver can make: it gives the function when the module is loaded.
_SETTER = b"""
.version 7.0
.target sm_50
.address_size 64

.extern .func cudaGraphSetConditional (.param .b64 node, .param .b32 value);

.visible .entry set_condition (.param .u64 node, .param .u64 test)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [node];
    ld.param.u64 %rd2, [test];
    cvta.to.global.u64 %rd3, %rd2;
    ld.global.u8 %r1, [%rd3];
    {
        .param .b64 first;
        .param .b32 second;
        st.param.b64 [first], %rd1;
        st.param.b32 [second], %r1;
        call.uni cudaGraphSetConditional, (first, second);
    }
    ret;
}
\0"""


def decides(test: Any) -> bool:
    """Tell whether a branch or loop on ``test`` is to be a node of the step being captured."""
    return recorder() is not None and _device.is_device_array(test) and is_available()


def loop(test: Any, turn: Callable, state: Sequence) -> list:
    """Record rounds for as long as tests hold; return where the last state will be.

    Parameters
    ----------
    test : CuPy array, shape ()
        Whether there is a first round.
    turn : callable
        Takes the arrays of the state, puts the next there, and gives the test of another round.
        See :func:`turn_of`.
    state : sequence of CuPy array
        Is copied; the copies are what a round reads, and what it leaves the next.
    """
    held = [x.copy() for x in state]
    node = _Node("WHILE", test, 1)
    with node.body(0), _leaving_no_gradients():
        node.set(turn(*held))
    return held


def turn_of(go_on: Callable, body: Callable) -> Callable:
    """Return a round of ``state = body(*state)`` while ``go_on(*state)``, as :func:`loop` takes it.

    It raises TypeError when ``body`` changes the number, the dtypes or the shapes of the arrays.
    """

    def turn(*held):
        new = list(body(*held))
        _require_like(new, held, "body must give what it gets")
        _write(new, held)
        return go_on(*held)

    return turn


def branch(test: Any, then: Callable, otherwise: Callable) -> list:
    """Record ``then() if test else otherwise()``; return where the arrays that it gives will be.

    Raises
    ------
    TypeError
        When the functions give other numbers of arrays, dtypes or shapes.
    """
    node = _Node("IF", test, 2)
    with node.body(0), _leaving_no_gradients():
        given = [x.copy() for x in then()]
    with node.body(1), _leaving_no_gradients():
        new = list(otherwise())
        _require_like(new, given, "then and otherwise must give the same")
        for x, to in zip(new, given, strict=True):
            to[...] = x
    return given


# ------------------------------------------------------------------------ recorded, or by the host


class _Thread(threading.local):
    is_rehearsing = False


_thread = _Thread()


def choose(test: Any, then: Callable, otherwise: Callable) -> Sequence:
    """Return ``then() if test else otherwise()``: recorded where the GPU decides.

    The functions give arrays and do nothing else.
    """
    if decides(test):
        return branch(test, then, otherwise)
    chosen, other = (then, otherwise) if bool(test) else (otherwise, then)
    if is_to_be_captured(test):
        rehearse(other)
    return chosen()


def repeat(
    go_on: Callable, body: Callable, state: Sequence, turn: Callable | None = None
) -> Sequence:
    """Repeat ``state = body(*state)`` while ``go_on(*state)``: recorded where the GPU decides.

    The functions take and give arrays and do nothing else; ``turn`` does a round at once, as
    :func:`loop` takes it.
    """
    test = go_on(*state)
    if decides(test):
        return loop(test, turn or turn_of(go_on, body), state)
    if _thread.is_rehearsing:
        return body(*state)
    if turn is None and is_to_be_captured(test) and not bool(test):
        rehearse(lambda: body(*state))
    while bool(test):
        state = body(*state)
        test = go_on(*state)
    return state


def is_to_be_captured(array: Any) -> bool:
    """Tell whether this is the eager call of a captured step, which will decide on the GPU."""
    eager = kept_resources() is not None and recorder() is None
    return eager and _device.is_device_array(array) and is_available()


def rehearse(function: Callable) -> None:
    """Run what the eager call leaves out, each loop once: its kernels are loaded, its plans made.

    Some of that cannot be done during a capture.
    """
    before = _thread.is_rehearsing
    _thread.is_rehearsing = True
    try:
        _setter(_device.cupy.cuda.runtime.getDevice())
        function()
    finally:
        _thread.is_rehearsing = before


@contextlib.contextmanager
def _leaving_no_gradients() -> Iterator[None]:
    """Refuse what the ``with`` block does to gradients of tensors that outlive it.

    It is recorded once, so that those of other rounds would not be added.
    """
    seen = witness()
    if seen is None:
        yield
        return
    tensors, grads = {*seen.tensors}, {key: leaf.grad for key, (leaf, _) in seen.grads.items()}
    yield
    for key in seen.tensors.keys() - tensors:
        _forget(seen.tensors, key)
    for key in [*seen.grads]:
        _forget(seen.grads, key)
    for key, (leaf, _) in seen.grads.items():
        if key not in grads or leaf.grad is not grads[key]:
            raise OncePerStep("changes the gradient of a tensor from outside")


def _forget(known: dict, key: int) -> None:
    """Leave a tensor or leaf out of what a witness saw, if nobody else holds it."""
    found = known.pop(key)
    x, *rest = found if isinstance(found, tuple) else (found,)
    alive = weakref.ref(x)
    del found, x
    if (x := alive()) is not None:
        known[key] = (x, *rest) if rest else x


def _require_like(new, old, text):
    kinds = [[(x.dtype, tuple(x.shape)) for x in arrays] for arrays in (old, new)]
    if kinds[0] != kinds[1]:
        wanted, got = ([f"{dtype}{list(shape)}" for dtype, shape in found] for found in kinds)
        raise TypeError(f"{text}, {', '.join(wanted)}, got {', '.join(got)}")


def _write(new, held):
    """Put the new state in the old one's place, of which the new may still be made."""
    owners = {_allocation.allocation_of(x)[0] for x in held}
    pairs = [(x, to) for x, to in zip(new, held, strict=True) if x is not to]
    fresh = [x.copy() if _allocation.allocation_of(x)[0] in owners else x for x, _ in pairs]
    for x, (_, to) in zip(fresh, pairs, strict=True):
        to[...] = x


# ------------------------------------------------------------------------------- the driver's part


@functools.cache
def is_available() -> bool:
    """Tell whether the driver and its bindings have conditional nodes with two branches."""
    if not hasattr(_device.driver, "cuGraphConditionalHandleCreate"):
        return False
    return bool(_device.cupy.cuda.runtime.driverGetVersion() >= _FIRST_DRIVER)


@functools.cache
def _setter(device_id: int) -> Any:
    """Return the kernel that tells a node what its test is."""
    module = _device.cupy.cuda.function.Module()
    module.load(_SETTER)
    return module.get_function("set_condition")


class _Node:
    """A conditional node at the end of what the current stream has captured so far.

    Parameters
    ----------
    kind : {"IF", "WHILE"}
    test : CuPy array, shape ()
    n_bodies : int
    """

    def __init__(self, kind: str, test: Any, n_bodies: int) -> None:
        driver = _device.driver
        context = _call(driver.cuCtxGetCurrent)
        graph = _capturing()[0]
        self._handle = _call(driver.cuGraphConditionalHandleCreate, graph, context, 0, 0)
        self.set(test)
        params = driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = self._handle
        kinds = driver.CUgraphConditionalNodeType
        params.conditional.type = getattr(kinds, f"CU_GRAPH_COND_TYPE_{kind}")
        params.conditional.size = n_bodies
        params.conditional.ctx = context
        graph, before = _capturing()
        node = _call(_newest("cuGraphAddNode"), graph, *before, params)
        self._bodies = list(params.conditional.phGraph_out)
        flags = driver.CUstreamUpdateCaptureDependencies_flags
        _call(
            _newest("cuStreamUpdateCaptureDependencies"),
            _current_stream(),
            [node],
            None,
            1,
            flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES,
        )

    def set(self, test: Any) -> None:
        """Record that the node's test is what ``test`` holds by then."""
        cupy = _device.cupy
        if test.dtype != np.bool or not test.flags.c_contiguous:
            test = cupy.ascontiguousarray(test.astype(np.bool))
        setter = _setter(test.data.device_id)
        setter((1,), (1,), (np.uint64(int(self._handle)), test))

    @contextlib.contextmanager
    def body(self, number: int) -> Iterator[None]:
        """Record what is done in the ``with`` block as one of the node's bodies."""
        driver, graph = _device.driver, self._bodies[number]
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        step: Any = recorder()
        with step.inside(graph) as stream:
            own = driver.CUstream(stream.ptr)
            _call(driver.cuStreamBeginCaptureToGraph, own, graph, None, None, 0, relaxed)
            try:
                with stream:
                    yield
            except BaseException:
                driver.cuStreamEndCapture(own)  # the error of a capture is the one that ended it
                raise
            _call(driver.cuStreamEndCapture, own)


def _current_stream() -> Any:
    return _device.driver.CUstream(_device.cupy.cuda.get_current_stream().ptr)


def _capturing() -> tuple[Any, tuple]:
    """Return the graph that the current stream captures into, and what a new node comes after."""
    found = _call(_newest("cuStreamGetCaptureInfo", "_v3"), _current_stream())
    _, _, graph, nodes, edges, n = found
    return graph, (nodes, edges, n)


def _newest(name: str, suffix: str = "_v2") -> Any:
    """Return the function that knows of edges' data: of CUDA 13, or of 12 by its own name."""
    return getattr(_device.driver, name + suffix, None) or getattr(_device.driver, name)


def _call(function: Any, *args: Any) -> Any:
    error, *found = function(*args)
    if error != _device.driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function.__name__} failed with {error.name}")
    return found[0] if len(found) == 1 else found
