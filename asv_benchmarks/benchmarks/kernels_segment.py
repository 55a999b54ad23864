"""Segment reductions and scatters, as the memory bandwidth they reach."""

import time

import numpy as np

from rtxarr import _device
from rtxarr.kernels.scatter import scatter_reduce
from rtxarr.kernels.segment import segment_reduce


def random_segments(n_segments, n_features, dtype, skew, device, seed=0):
    """Return values and row pointers with eight rows a segment on average.

    With ``skew`` one segment owns half of all rows.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.poisson(4 if skew else 8, n_segments)
    if skew:
        lengths[n_segments // 2] = 4 * n_segments
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = rng.standard_normal((int(indptr[-1]), n_features), dtype=np.float32)
    return _device.to_device(values.astype(dtype), device), _device.to_device(indptr, device)


class _Bandwidth:
    """GB/s of values read once and results written once, beside that of a copy."""

    timeout = 600

    def _rate(self, call, n_bytes):
        call()  # compiles
        runs = []
        for _ in range(5):
            _device.synchronize(self.place)
            start = time.perf_counter()
            call()
            _device.synchronize(self.place)
            runs.append(time.perf_counter() - start)
        return n_bytes / sorted(runs)[2] / 1e9


class Segment(_Bandwidth):
    params = (
        ["cpu", "cuda:0"],
        ["float32", "float16"],
        ["sum", "max"],
        [False, True],
        [10_000, 1_000_000],
    )
    param_names = ["device", "dtype", "op", "skew", "n_segments"]

    def setup(self, device, dtype, op, skew, n_segments):
        if device not in _device.devices():
            raise NotImplementedError("needs a CUDA device")
        if device == "cpu" and n_segments > 100_000:
            raise NotImplementedError("needs a GPU's speed")
        self.place = _device.device(device)
        self.values, self.indptr = random_segments(n_segments, 128, dtype, skew, self.place)

    def track_reduce(self, device, dtype, op, skew, n_segments):
        moved = self.values.nbytes + self.indptr.nbytes + n_segments * 128 * self.values.itemsize
        return self._rate(lambda: segment_reduce(op, self.values, self.indptr), moved)

    def track_copy(self, device, dtype, op, skew, n_segments):
        return self._rate(self.values.copy, 2 * self.values.nbytes)

    track_reduce.unit = track_copy.unit = "GB/s"


class Scatter(_Bandwidth):
    params = (["cpu", "cuda:0"], ["sum", "max"], [100_000, 10_000_000])
    param_names = ["device", "op", "n_values"]

    def setup(self, device, op, n_values):
        if device not in _device.devices():
            raise NotImplementedError("needs a CUDA device")
        if device == "cpu" and n_values > 1_000_000:
            raise NotImplementedError("needs a GPU's speed")
        self.place = _device.device(device)
        rng = np.random.default_rng(0)
        self.n_rows = n_values // 8
        self.index = _device.to_device(rng.integers(0, self.n_rows, n_values), device)
        values = rng.standard_normal((n_values, 64), dtype=np.float32)
        self.values = _device.to_device(values, device)

    def track_reduce(self, device, op, n_values):
        moved = self.values.nbytes + self.index.nbytes + self.n_rows * 64 * 4
        return self._rate(lambda: scatter_reduce(op, self.index, self.values, self.n_rows), moved)

    track_reduce.unit = "GB/s"
