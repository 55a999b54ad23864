"""Programs whose products take in what is around them, on the host, and what they call."""

import numpy as np

import rtxarr as rx
from rtxarr.polygraph import _products
from rtxarr.polygraph._cpu_backend import CpuBackend
from rtxarr.polygraph._cuda_backend import CudaBackend
from rtxarr.polygraph._explain import programs_of

HALVES = ["float16", "bfloat16"]
FLOATS = ["float32", *HALVES]
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2, "float64": 1e-12}


class Backend(CpuBackend):
    """Runs on NumPy's arrays what the pass makes for a GPU."""

    rewrite = CudaBackend.rewrite
    strict = False


def array(*shape, dtype="float32", seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return values.astype(getattr(rx, dtype))


def programs(fused):
    return [p for made in fused._programs.values() for m in made for _, p in programs_of(m)]


def calls(fused):
    """Return in words what products take in, in the order in which they run."""
    found = []
    for program in programs(fused):
        for step in program.steps:
            node = step.results[0]
            if node.op == "matmul":
                found.append("matmul")
            elif node.op == "call" and node.attrs[0] in _products.FUNCTIONS:
                found.append(_products.described(node))
            elif node.op == "call":
                found.append("linear")
    return found


def wide(x):
    x = x.data if isinstance(x, rx.Tensor) else x
    return np.asarray(x).astype(np.float64)


def on_gpu(cupy, arrays):
    """Return arrays on a GPU whose free memory holds NaN."""
    arrays = [cupy.asarray(a) for a in arrays]
    for size in (1 << 12, 1 << 16, 1 << 20):
        for x in [cupy.full(size, np.nan, "float32") for _ in range(8)]:
            del x
    return arrays
