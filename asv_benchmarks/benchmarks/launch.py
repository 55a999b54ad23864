"""Host time of what every call pays: finding the namespace, launching a kernel."""

import time

import numpy as np

from rtxarr import _device


class Namespace:
    """Reference: 150 ns for one array."""

    def setup(self):
        self.x = np.ones(3)

    def time_one_array(self):
        _device.namespace(self.x)

    def time_two_arrays_and_a_number(self):
        _device.namespace(self.x, self.x, 1.0)

    def time_is_array(self):
        _device.is_array(self.x)


def _add_kernel():
    cuda = _device.cuda

    @cuda.jit
    def add(x, y, out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = x[i] + y[i]

    return add


class Launch:
    """Microseconds of host time of a warm launch; reference: 8 with three arrays."""

    unit = "us"
    n_calls = 2000

    def setup(self):
        if len(_device.devices()) < 2:
            raise NotImplementedError("needs a CUDA device")
        import cupy

        self.cupy = cupy
        self.kernel = _add_kernel()
        self.arrays = tuple(cupy.ones(1024, dtype=cupy.float32) for _ in range(3))
        self.grid = tuple(cupy.ones((32, 32), dtype=cupy.float32) for _ in range(3))
        _device.launch(self.kernel, 1024, self.arrays)

    def _host_time(self, call):
        """Return the median over nine runs; the kernel is too short to hold the host up."""
        runs = []
        for _ in range(9):
            _device.synchronize("cuda:0")
            start = time.perf_counter()
            for _ in range(self.n_calls):
                call()
            runs.append((time.perf_counter() - start) / self.n_calls * 1e6)
        _device.synchronize("cuda:0")
        return sorted(runs)[4]

    def track_three_arrays(self):
        kernel, arrays = self.kernel, self.arrays
        return self._host_time(lambda: _device.launch(kernel, 1024, arrays))

    def track_three_arrays_on_a_stream(self):
        kernel, arrays = self.kernel, self.arrays
        with self.cupy.cuda.Stream(non_blocking=True):
            return self._host_time(lambda: _device.launch(kernel, 1024, arrays))

    def track_cupy_ufunc(self):
        """The same work through CuPy, for comparison in one run."""
        x, y, out = self.arrays
        return self._host_time(lambda: self.cupy.add(x, y, out=out))


for _name in ("three_arrays", "three_arrays_on_a_stream", "cupy_ufunc"):
    getattr(Launch, f"track_{_name}").unit = "us"
