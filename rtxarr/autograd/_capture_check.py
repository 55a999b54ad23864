"""Find graphs that use memory which was given back while they were recorded.

A step that replaces an array (``w = w - rate * g``) instead of changing it leaves a graph that
goes on reading the old one. Its memory was not the graph's own, and was freed during the capture:
that is seen here.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from rtxarr import _device

__all__ = ["Watch"]


class Watch:
    """Notes the memory from before that this thread gives back inside the ``with`` block."""

    def __init__(self) -> None:
        self._made: set[int] = set()
        self._freed: dict[int, int] = {}  # address to size
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
                    watch._freed[options["mem_ptr"]] = options["mem_size"]

        self._hook = Hook()
        self._hook.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._hook.__exit__(*exc)

    def check(self, graph: Any) -> None:
        """Raise RuntimeError when ``graph`` (CuPy's) uses memory that was given back."""
        if not self._freed:
            return
        starts = np.array(sorted(self._freed), np.uint64)
        ends = starts + np.array([self._freed[int(p)] for p in starts], np.uint64)
        for words in _addresses(graph.graph):
            places = np.searchsorted(starts, words, side="right") - 1
            for word, place in zip(words, places, strict=True):
                if place >= 0 and word < ends[place]:
                    raise RuntimeError(
                        "the step lets go of an array from before it that it uses "
                        f"({int(ends[place] - starts[place])} bytes), so replays would use "
                        "whatever comes to lie there. Change arrays in place "
                        "(x[...] = ..., p.assign(...)) instead of replacing them, or pass them "
                        "as arguments; clear gradients at the step's beginning"
                    )


def _addresses(graph: int) -> Iterator[np.ndarray]:
    """Yield, for each node of a graph, the 8-byte words of its parameters."""
    driver = _device.driver

    def call(function, *args):
        error, *found = function(*args)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise OSError(f"{function.__name__} failed with {error.name}")
        return found[0] if len(found) == 1 else found

    handle = driver.CUgraph(graph)
    _, count = call(driver.cuGraphGetNodes, handle, 0)
    nodes, _ = call(driver.cuGraphGetNodes, handle, count)
    kinds = driver.CUgraphNodeType
    for node in nodes:
        kind = call(driver.cuGraphNodeGetType, node)
        if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            params = call(driver.cuGraphKernelNodeGetParams, node)
            yield _kernel_words(driver, params)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
            params = call(driver.cuGraphMemcpyNodeGetParams, node)
            yield np.array([int(params.srcDevice), int(params.dstDevice)], np.uint64)


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
