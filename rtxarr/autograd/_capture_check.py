"""Find graphs that use memory which was given back while they were recorded.

A step that replaces an array (``w = w - rate * g``) instead of changing it leaves a graph that
goes on reading the old one. Its memory was not the graph's own, and was freed during the capture:
that is seen here.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._allocation import extent_of

__all__ = ["Watch"]

_ALL = 2**62


class Watch:
    """Notes the memory from before that this thread gives back inside the ``with`` block.

    Parameters
    ----------
    stream : CuPy stream
        That is captured.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._made: set[int] = set()
        # Address to size, and how many nodes the graph had then: only those can use it.
        self._freed: dict[int, tuple[int, int]] = {}
        self._hook: Any = None

    def __enter__(self) -> "Watch":
        watch = self

        class Hook(_device.cupy.cuda.MemoryHook):
            name = "rtxarr capture"

            def malloc_postprocess(self, **options):
                watch._made.add(options["mem_ptr"])
                watch._freed.pop(options["mem_ptr"], None)

            def free_postprocess(self, **options):
                if options["mem_ptr"] not in watch._made:
                    watch._freed[options["mem_ptr"]] = options["mem_size"], watch._n_nodes()

        self._hook = Hook()
        self._hook.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._hook.__exit__(*exc)

    def _n_nodes(self) -> int:
        # Runs where an array ends, which must not raise: when in doubt, all nodes are meant.
        driver = _device.driver
        error, *found = driver.cuStreamGetCaptureInfo(driver.CUstream(self._stream.ptr))
        if error != driver.CUresult.CUDA_SUCCESS:
            return _ALL
        if not int(found[2]):
            return 0
        error, _, count = driver.cuGraphGetNodes(found[2], 0)
        return count if error == driver.CUresult.CUDA_SUCCESS else _ALL

    def check(self, graph: Any, recorder: Any) -> Callable[[Any], bool]:
        """Give what tells whether a graph (CuPy's) uses the memory of an array.

        Tables of addresses that its kernels read are in the memory of ``recorder``, which also
        knows the graphs of its branches and loops.

        Raises
        ------
        RuntimeError
            When it uses memory that was given back.
        """
        used: list[tuple[int | None, Any]] = [(None, words) for words in recorder.words()]
        used += enumerate(_addresses(graph.graph))
        for body in recorder.bodies:
            used += [(None, words) for words in _addresses(body)]
        self._refuse_freed(used)
        known = np.unique(np.concatenate([words for _, words in used])) if used else np.empty(0)

        def uses(array: Any) -> bool:
            first, last = np.searchsorted(known, np.array(extent_of(array), np.uint64))
            return bool(first < last)

        return uses

    def _refuse_freed(self, used: list) -> None:
        freed = {start: found for start, found in self._freed.items() if found[1]}
        if not freed:
            return
        starts = np.array(sorted(freed), np.uint64)
        sizes, counts = np.array([freed[int(p)] for p in starts], np.uint64).T
        ends = starts + sizes
        for place, words in used:
            index = np.searchsorted(starts, words, side="right") - 1
            hit = (index >= 0) & (words < ends[index])
            if place is not None:
                hit &= place < counts[index]
            if hit.any():
                size = int(sizes[index[hit][0]])
                raise RuntimeError(
                    f"the step lets go of an array from before it that it uses ({size} bytes), so "
                    "replays would use whatever comes to lie there. Change arrays in place "
                    "(x[...] = ..., p.assign(...)) instead of replacing them, or pass them as "
                    "arguments; clear gradients at the step's beginning"
                )


def _call(function: Any, *args: Any) -> Any:
    error, *found = function(*args)
    if error != _device.driver.CUresult.CUDA_SUCCESS:
        raise OSError(f"{function.__name__} failed with {error.name}")
    return found[0] if len(found) == 1 else found


def _addresses(graph: Any) -> Iterator[np.ndarray]:
    """Yield, for each node of a graph as they were made, the 8-byte words of its parameters."""
    driver = _device.driver
    handle = driver.CUgraph(int(graph))
    _, count = _call(driver.cuGraphGetNodes, handle, 0)
    nodes, _ = _call(driver.cuGraphGetNodes, handle, count)
    kinds = driver.CUgraphNodeType
    for node in nodes:
        kind = _call(driver.cuGraphNodeGetType, node)
        words: list[int] = []
        if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            yield _kernel_words(driver, _call(driver.cuGraphKernelNodeGetParams, node))
            continue
        if kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
            params = _call(driver.cuGraphMemcpyNodeGetParams, node)
            words = [int(params.srcDevice), int(params.dstDevice)]
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
            words = [int(_call(driver.cuGraphMemsetNodeGetParams, node).dst)]
        yield np.array(words, np.uint64)


def _kernel_words(driver: Any, params: Any) -> np.ndarray:
    if int(params.func):
        describe, function = driver.cuFuncGetParamInfo, params.func
    else:
        describe, function = driver.cuKernelGetParamInfo, params.kern
    pointers = int(params.kernelParams or 0)
    found = []
    index = 0
    while pointers:
        error, _, size = describe(function, index)
        if error != driver.CUresult.CUDA_SUCCESS:
            break  # there are no more
        address = ctypes.c_void_p.from_address(pointers + 8 * index).value
        if address and size >= 8:
            found.append(np.frombuffer(ctypes.string_at(address, size // 8 * 8), np.uint64))
        index += 1
    return np.concatenate(found) if found else np.empty(0, np.uint64)
