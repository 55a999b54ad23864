"""Kernels on an NVIDIA GPU: CUDA text, the same for all shapes of a pattern, compiled by NVRTC."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rtxarr.polygraph import _cache, _gpu_memory
from rtxarr.polygraph._cuda_start import Gpu, launcher
from rtxarr.polygraph._ir import Graph, Node
from rtxarr.polygraph._loops import Loops
from rtxarr.polygraph._products import fuse_products, has_products
from rtxarr.polygraph._schedule import is_pointwise, is_reduction
from rtxarr.polygraph._streams import Streams
from rtxarr.polygraph.codegen import _kernels, _maps, _nvrtc, _operations, _scans
from rtxarr.polygraph.codegen._dialects import CUDA
from rtxarr.polygraph.codegen._text import Kernel


class CudaBackend:
    """Runs kernels on CuPy arrays.

    Parameters
    ----------
    mode : str, default "strict"
        "strict": each operation is rounded as CuPy rounds it. "fast": products and sums may be
        rounded together, and halves stay float32 inside a kernel.
    gpu : object, optional
        What loads and starts kernels: an object like :class:`Gpu`.
    """

    streams = Streams  # for steps that may run beside one another
    arena_limit = _gpu_memory.ARENA_LIMIT

    def __init__(self, mode: str = "strict", gpu: Any = None) -> None:
        self.strict = mode == "strict"
        self._gpu = gpu

    @functools.cached_property
    def gpu(self) -> Any:
        return self._gpu or Gpu()

    @functools.cached_property
    def empty(self) -> Callable:
        """Makes an uninitialized array of a shape and dtype."""
        return self.gpu.empty

    def new(self, shape: tuple[int, ...], dtype: Any) -> Callable[[], Any] | None:
        """Return what gives small uninitialized arrays of one kind; None for large ones."""
        return self.gpu.new(shape, dtype)

    def arena(self, n_bytes: int, parts: Sequence) -> tuple[Callable, Callable | None]:
        """Return what gives arrays that lie in one block, and what takes them back."""
        return self.gpu.arena(n_bytes, parts)

    def fuses(self, op: str, dtype: Any) -> bool:
        """Tell whether a map, cast or reduction of values of ``dtype`` can be in a kernel."""
        return _operations.fuses(op, np.dtype(dtype))

    def scan_refusal(self, scans: Any, rows: int, cols: int) -> str:
        """Return why a kernel cannot contain scans, (operation, dtype), of such rows, or ""."""
        return _scans.refusal(scans, rows, cols, strict=self.strict)

    def rewrite(self, graph: Graph, strides: Mapping[Node, tuple]) -> tuple[Graph, list[str]]:
        """Return a graph to run in a graph's place, and what is different about it.

        ``strides`` are those of inputs that are not contiguous, in elements.
        """
        if self.strict:
            notes = ['products take in nothing in mode "strict"'] if has_products(graph) else []
            return graph, notes

        def is_computed(node: Node) -> bool:
            return is_pointwise(node, self) or is_reduction(node, self)

        return fuse_products(graph, strides, is_computed)

    def generate(self, loops: Loops) -> Kernel:
        """Return the text of a kernel and how it is started."""
        device = self.gpu.current_device()
        return _kernels.generate(
            loops, CUDA, strict=self.strict, shared_limit=self.gpu.shared_limit(device),
            clusters=_kernels.has_clusters(self.gpu.capability(device)),
        )  # fmt: skip

    def source(self, loops: Loops) -> str:
        """Return the CUDA text of a kernel."""
        return self.generate(loops).text

    def pattern(self, loops: Loops) -> tuple[Hashable, int] | None:
        """Return what is the same for maps that can share a launch, and how many can."""
        return _maps.pattern(loops, self.generate(loops)) if loops.kind == "map" else None

    def build(self, loops: Loops) -> Callable:
        """Return a function of the arrays and NumPy scalars of ``loops.buffers``, in order.

        It starts the kernel on the current stream. Kernels are compiled beside one another, in
        threads; the first call waits.
        """
        kernel = self.generate(loops)
        cc = self.gpu.capability(self.gpu.current_device())
        code = _pool().submit(self.machine_code, kernel, cc)
        return self._launcher(kernel, {cc: code})

    def build_text(self, loops: Loops, text: str) -> Callable:
        """Return the same made of a changed text with the entry points of :meth:`source`.

        Raises
        ------
        CompileError
            When the text does not compile.
        """
        kernel = dataclasses.replace(self.generate(loops), head=text, snippets=(), bodies=())
        cc = self.gpu.capability(self.gpu.current_device())
        self.machine_code(kernel, cc)
        return self._launcher(kernel, {})

    def machine_code(self, kernel: Kernel, cc: tuple[int, int]) -> bytes:
        """Return the cubin of a kernel for a compute capability."""
        return machine_code(kernel.text, cc, strict=self.strict)

    def _launcher(self, kernel: Kernel, codes: Mapping) -> Callable:
        return launcher(self.gpu, kernel, functools.partial(self.machine_code, kernel), codes)


def machine_code(text: str, cc: tuple[int, int], *, strict: bool) -> bytes:
    """Return the cubin of CUDA text, from the cache or freshly compiled."""
    key = _cache.digest(text, cc, _nvrtc.options(cc, strict=strict), _nvrtc.version())
    return _cache.kernels.get(key, lambda: _nvrtc.compile_text(text, cc, strict=strict)[0])


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, 8), thread_name_prefix="nvrtc")
