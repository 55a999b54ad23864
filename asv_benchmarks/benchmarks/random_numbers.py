"""Random numbers drawn per second, on the CPU and on a GPU."""

import time

from rtxarr import _device
from rtxarr.random import Generator

DRAWS = {
    "uniform32": lambda rng, n: rng.uniform(n, dtype="float32"),
    "uniform64": lambda rng, n: rng.uniform(n),
    "normal32": lambda rng, n: rng.normal(n, dtype="float32"),
    "normal64": lambda rng, n: rng.normal(n),
    "integers": lambda rng, n: rng.integers(0, 1000, n),
    "dropout_mask": lambda rng, n: rng.dropout_mask(n, 0.5),
    "permutation": lambda rng, n: rng.permutation(n),
}


class Draws:
    """Million numbers per second."""

    params = (list(DRAWS), ["cpu", "cuda:0"], [1000, 1_000_000, 100_000_000])
    param_names = ["draw", "device", "n"]
    timeout = 600

    def setup(self, draw, device, n):
        if device not in _device.devices():
            raise NotImplementedError("needs a CUDA device")
        if device == "cpu" and n > 10_000_000:
            raise NotImplementedError("needs a GPU's speed")
        self.place = _device.device(device)
        self.rng = Generator(0)
        with self.place:
            DRAWS[draw](self.rng, n)  # compile outside the clock
        _device.synchronize(self.place)

    def track_rate(self, draw, device, n):
        repeats = max(1, 10_000_000 // n) if device == "cpu" else max(10, 1_000_000 // n)
        repeats = min(repeats, 1000)
        with self.place:
            start = time.perf_counter()
            for _ in range(repeats):
                DRAWS[draw](self.rng, n)
            _device.synchronize(self.place)
            return n * repeats / (time.perf_counter() - start) / 1e6

    track_rate.unit = "million/s"


class SmallDraws:
    """Time of one small draw on the CPU."""

    def setup(self):
        self.rng = Generator(0)
        self.place = _device.device("cpu")

    def time_scalar(self):
        self.rng.uniform((), device=self.place)

    def time_mask_of_1024(self):
        self.rng.dropout_mask((64, 16), 0.5, device=self.place)

    def time_generator_with_key(self):
        Generator(0, key=(1, 2))
