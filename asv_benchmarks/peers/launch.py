"""Host time of a warm kernel launch, against other ways to launch the same kernel.

One numba kernel over three float32 arrays of 1024 elements. `rtxarr` is `launch()` with all it
looks up; `driver`, `cuda.core`, `ctypes` and `cupy.driver` start the compiled kernel with its
arguments at hand; `numba` is numba's own dispatcher; the last are CuPy's. All take turns in one
process; the clock stops before the device is waited for. Needs a GPU.
"""

import argparse
import ctypes
import json
import platform
import statistics
import time

import numpy as np

from rtxarr import _device

N = 1024
GRID, BLOCK = (4, 1, 1), (256, 1, 1)
RAW = """extern "C" __global__ void add(const float* x, const float* y, float* out, long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + y[i];
}"""


def add_kernel():
    cuda = _device.cuda

    @cuda.jit
    def add(x, y, out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = x[i] + y[i]

    return add


def contestants():
    """Give functions that launch once, by name, and why others are left out."""
    import cupy
    from cuda import core
    from cuda.bindings import driver

    kernel = add_kernel()
    arrays = tuple(cupy.ones(N, dtype=cupy.float32) for _ in range(3))
    loaded = _device._load_kernel(kernel, arrays, 0)
    flat = [v for a in arrays for v in (0, 0, a.size, a.itemsize, a.data.ptr, *a.shape, *a.strides)]
    ready = _device.Call(loaded, ((4,), (256,)), arrays, cupy.ndarray, "add")
    addresses = [a.data.ptr for a in arrays]
    function = driver.CUfunction(loaded.handle)
    config = core.LaunchConfig(grid=GRID, block=BLOCK)
    raw = cupy.RawKernel(RAW, "add")
    count = np.int64(N)

    def through_driver():
        ready.write(ready.buffer, ready.start, *addresses)
        driver.cuLaunchKernel(function, *GRID, *BLOCK, 0, 0, ready.address, 0)

    def through_cupy():
        ready.write(ready.buffer, ready.start, *addresses)
        cupy.cuda.driver.launchKernel(loaded.handle, *GRID, *BLOCK, 0, 0, ready.address, 0)

    library = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, *[pointer] * 3]

    def through_ctypes():
        ready.write(ready.buffer, ready.start, *addresses)
        library.cuLaunchKernel(loaded.handle, *GRID, *BLOCK, 0, 0, ready.address, None)

    found = {
        "rtxarr": lambda: _device.launch(kernel, N, arrays),
        "driver": through_driver,
        "cuda.core": lambda: core.launch(core.LEGACY_DEFAULT_STREAM, config, loaded.owner, *flat),
        "cupy.driver": through_cupy,
        "ctypes": through_ctypes,
        "numba": lambda: kernel[4, 256](*arrays),
        "cupy RawKernel": lambda: raw((4,), (256,), (*arrays, count)),
        "cupy a + b": lambda: arrays[0] + arrays[1],
    }
    left_out = {}
    for name, call in list(found.items()):
        arrays[2].fill(7)
        try:
            call()
            right = name == "cupy a + b" or bool((arrays[2] == 2).all())
        except Exception as error:  # a peer of another version: say so and go on
            left_out[name] = f"{type(error).__name__}: {error}"
        else:
            if not right:
                left_out[name] = "wrong result"
        if name in left_out:
            del found[name]
    return found, left_out


def measure(functions, rounds, calls):
    """Give, for each function, the microseconds a call took in each round."""
    times = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            _device.synchronize("cuda:0")
            start = time.perf_counter()
            for _ in range(calls):
                function()
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    _device.synchronize("cuda:0")
    return {name: values[1:] for name, values in times.items()}  # the first round warms up


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if len(_device.devices()) < 2:
        parser.exit(1, "needs a GPU\n")
    functions, left_out = contestants()
    times = measure(functions, options.rounds, options.calls)
    versions = {"numpy": np.__version__, "python": platform.python_version()}
    place = repr(_device.device("cuda:0"))
    print(f"host time of a warm launch, three arrays, us; {place}, {versions}")
    figures = {}
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        figures[name] = {"median": middle, "quartiles": [low, high]}
        print(f"{name:15} {middle:7.2f}   ({low:.2f} - {high:.2f})")
    for name, reason in left_out.items():
        print(f"{name:15} left out: {reason}")
    if options.json:
        with open(options.json, "w") as file:
            found = {"device": place, "versions": versions, "us": figures, "left_out": left_out}
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
