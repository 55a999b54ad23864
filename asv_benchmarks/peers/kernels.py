"""Kernels bound by memory, forward and backward, against PyTorch on the same GPU.

Times are the GPU's: events around several calls that wait behind other work, so that the host is
not measured; "called" is the time of a call as a program sees it. The bytes are the fewest that
must be moved: what is read and what is written, once each. They are set beside two copies measured
in the same way: one of 1 GiB, and one that moves as many bytes, which for small arrays waits for
its launch too and may find them in the cache. All contestants take turns; figures are medians over
rounds, with quartiles.
"""

import argparse
import json
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version

import numpy as np

import rtxarr as rx
from rtxarr import _device

# What one array of a case holds, in bytes.
LARGE = 1 << 29


class Queue:
    """Work that keeps the GPU busy while the host prepares what is timed."""

    def __init__(self):
        self.source = rx.zeros(1 << 28, dtype="float32", device="cuda")
        self.target = rx.zeros_like(self.source)

    def fill(self, seconds):
        for _ in range(1 + int(seconds / 500e-6)):  # of a copy of 1 GiB
            self.target[...] = self.source


def measure(functions, rounds, calls, queue):
    """Give, for each function, the seconds a call took in each round: the GPU's, and in all."""
    import cupy

    times = {name: ([], []) for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            rx.synchronize("cuda")
            start = time.perf_counter()
            for _ in range(calls):
                function()
            rx.synchronize("cuda")
            called = time.perf_counter() - start
            queue.fill(1.5 * called)
            first, last = cupy.cuda.Event(), cupy.cuda.Event()
            first.record()
            for _ in range(calls):
                function()
            last.record()
            last.synchronize()
            times[name][0].append(cupy.cuda.get_elapsed_time(first, last) / 1e3 / calls)
            times[name][1].append(called / calls)
    # The first round warms up.
    return {name: [values[1:] for values in both] for name, both in times.items()}


class Case:
    """One operation on arrays of one shape and dtype.

    ``ours`` and ``theirs`` each give functions (forward, backward); ``moved`` the bytes that
    these must move.
    """

    def __init__(self, name, dtype, shape):
        self.name, self.dtype, self.shape = name, dtype, shape
        self.n_bytes = int(np.prod(shape)) * (4 if dtype == "float32" else 2)

    def randn(self, *shape):
        import cupy

        values = cupy.random.standard_normal(int(np.prod(shape)), dtype=cupy.float32)
        return rx.astype(values.reshape(shape), self.dtype)

    def torch(self, array, *, requires_grad=False):
        """Give the same memory as a PyTorch tensor."""
        import torch

        bits = torch.from_dlpack(array.view("uint16") if self.dtype == "bfloat16" else array)
        tensor = bits.view(torch.bfloat16) if self.dtype == "bfloat16" else bits
        return tensor.detach().requires_grad_(requires_grad)

    def backward(self, out, inputs, grad):
        """Give PyTorch's backward pass alone."""
        import torch

        return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


class LayerNorm(Case):
    rms = False

    def __init__(self, name, dtype, shape):
        super().__init__(name, dtype, shape)
        self.arrays = [self.randn(*shape), self.randn(shape[-1]), self.randn(shape[-1])]
        self.grad = self.randn(*shape)

    def moved(self):
        return 2 * self.n_bytes, 3 * self.n_bytes

    def ours(self):
        from rtxarr.kernels import norm

        x, weight, bias = self.arrays
        bias = None if self.rms else bias
        n = self.shape[-1]
        centre, inverse = norm.empty_statistics(x, (x.ndim - 1,), centred=not self.rms)

        def forward():
            norm.normalize(x, weight, bias, centre, inverse, n_features=n, eps=1e-5)

        def backward():
            norm.normalize_gradient(
                self.grad, x, weight, centre, inverse, n_features=n, needs=(True, not self.rms)
            )

        return forward, backward

    def theirs(self):
        from torch.nn import functional

        x, weight, bias = (self.torch(a, requires_grad=True) for a in self.arrays)
        inputs = (x, weight) if self.rms else (x, weight, bias)
        function = functional.rms_norm if self.rms else functional.layer_norm

        def forward():
            return function(x, self.shape[-1:], *inputs[1:], eps=1e-5)

        return forward, self.backward(forward(), inputs, self.torch(self.grad))


class RMSNorm(LayerNorm):
    rms = True


class Softmax(Case):
    logarithm = False

    def __init__(self, name, dtype, shape):
        super().__init__(name, dtype, shape)
        self.x, self.grad = self.randn(*shape), self.randn(*shape)

    def moved(self):
        return 2 * self.n_bytes, 3 * self.n_bytes

    def ours(self):
        from rtxarr.kernels import softmax

        out = softmax.softmax(self.x, logarithm=self.logarithm)
        return (
            lambda: softmax.softmax(self.x, logarithm=self.logarithm),
            lambda: softmax.softmax_gradient(self.grad, out, logarithm=self.logarithm),
        )

    def theirs(self):
        import torch

        x = self.torch(self.x, requires_grad=True)
        function = torch.log_softmax if self.logarithm else torch.softmax

        def forward():
            return function(x, -1)

        return forward, self.backward(forward(), x, self.torch(self.grad))


class LogSoftmax(Softmax):
    logarithm = True


class CrossEntropy(Case):
    def __init__(self, name, dtype, shape):
        super().__init__(name, dtype, shape)
        self.x = self.randn(*shape)
        self.labels = rx.asarray(np.arange(shape[0]) % shape[1], device="cuda")

    def moved(self):
        return self.n_bytes, 2 * self.n_bytes

    def ours(self):
        from rtxarr.kernels import cross_entropy as kernels

        grad = rx.full(self.shape[0], 1 / self.shape[0], dtype="float32", device="cuda")
        options = {"label_smoothing": 0.0}
        _, lse = kernels.label_cross_entropy(self.x, self.labels, None, **options)
        return (
            lambda: kernels.label_cross_entropy(self.x, self.labels, None, **options),
            lambda: kernels.label_cross_entropy_gradient(
                self.x, lse, grad, grad, self.labels, **options
            ),
        )

    def theirs(self):
        import torch
        from torch.nn import functional

        x, labels = self.torch(self.x, requires_grad=True), torch.from_dlpack(self.labels)

        def forward():
            return functional.cross_entropy(x, labels)

        out = forward()
        return forward, self.backward(out, x, torch.ones_like(out))


class GroupNorm(Case):
    """``shape`` is (samples, channels, height, width); the channels are last in memory.

    The input counts as read twice, once for the statistics, though the cache may hold it.
    """

    last, silu = True, False

    def __init__(self, name, dtype, shape):
        super().__init__(name, dtype, shape)
        self.x, self.grad = self.image(), self.image()
        self.affine = [self.randn(shape[1]), self.randn(shape[1])]

    def image(self):
        n, channels, *spatial = self.shape
        if not self.last:
            return self.randn(*self.shape)
        return rx.moveaxis(self.randn(n, *spatial, channels), -1, 1)

    def moved(self):
        return 3 * self.n_bytes, 5 * self.n_bytes

    def ours(self):
        from rtxarr.kernels import group_norm as kernels

        x, options = self.x, {"n_groups": 32, "silu": self.silu}
        centre, inverse = (rx.empty((x.shape[0], 32), dtype="float32", device="cuda") for _ in "ab")
        statistics = centre, inverse
        kernels.group_normalize(x, *self.affine, *statistics, eps=1e-5, **options)

        def backward():
            kernels.group_normalize_gradient(
                self.grad, x, *self.affine, *statistics, needs=(True, True), **options
            )

        return (
            lambda: kernels.group_normalize(x, *self.affine, *statistics, eps=1e-5, **options),
            backward,
        )

    def theirs(self):
        from torch.nn import functional

        inputs = [self.torch(a, requires_grad=True) for a in (self.x, *self.affine)]

        def forward():
            out = functional.group_norm(inputs[0], 32, *inputs[1:])
            return functional.silu(out) if self.silu else out

        return forward, self.backward(forward(), inputs, self.torch(self.grad))


class GroupNormSiLU(GroupNorm):
    silu = True


class GroupNormFirst(GroupNorm):
    last = False


class EmbeddingGradient(Case):
    """``shape`` is (entries, rows of the table, features)."""

    def __init__(self, name, dtype, shape):
        super().__init__(name, dtype, shape)
        n, n_rows, n_features = shape
        self.n_bytes = (n + n_rows) * n_features * (4 if dtype == "float32" else 2)
        words = np.minimum(np.random.default_rng(0).zipf(1.2, n) - 1, n_rows - 1)
        self.index = rx.asarray(words, device="cuda")
        self.grad = self.randn(n, n_features)

    def moved(self):
        return None, self.n_bytes

    def ours(self):
        from rtxarr.kernels.scatter import scatter_reduce

        return None, lambda: scatter_reduce("sum", self.index, self.grad, self.shape[1])

    def theirs(self):
        import torch
        from torch.nn import functional

        weight = self.torch(self.randn(*self.shape[1:]), requires_grad=True)
        out = functional.embedding(torch.from_dlpack(self.index), weight)
        return None, self.backward(out, weight, self.torch(self.grad))


class Rotary(Case):
    """``shape`` is (samples, heads, steps, features)."""

    def __init__(self, name, dtype, shape):
        super().__init__(name, dtype, shape)
        self.x, self.grad = self.randn(*shape), self.randn(*shape)
        positions = rx.asarray(np.arange(shape[-2]), device="cuda")
        self.angles = rx.rotary_angles(positions, shape[-1])

    def moved(self):
        return 2 * self.n_bytes, 2 * self.n_bytes

    def ours(self):
        from rtxarr.kernels.rotary import rotate

        return (
            lambda: rotate(self.x, *self.angles, interleaved=False, inverse=False),
            lambda: rotate(self.grad, *self.angles, interleaved=False, inverse=True),
        )

    def theirs(self):
        import torch

        x, half = self.torch(self.x, requires_grad=True), self.shape[-1] // 2
        cos, sin = (torch.from_dlpack(a).to(x.dtype) for a in self.angles)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

        def forward():
            turned = torch.cat((-x[..., half:], x[..., :half]), -1)
            return x * cos + turned * sin

        return forward, self.backward(forward(), x, self.torch(self.grad))


class Dropout(Case):
    add = False

    def __init__(self, name, dtype, shape):
        super().__init__(name, dtype, shape)
        self.x, self.grad = self.randn(*shape), self.randn(*shape)
        self.residual = self.randn(*shape) if self.add else None
        self.bias = self.randn(shape[-1]) if self.add else None

    def moved(self):
        return (3 if self.add else 2) * self.n_bytes, 2 * self.n_bytes

    def ours(self):
        from rtxarr.kernels.dropout import dropout_add

        options = {"place": rx.random.Generator(0).dropout_place(self.x.size), "rate": 0.1}
        return (
            lambda: dropout_add(self.x, self.residual, self.bias, **options),
            lambda: dropout_add(self.grad, None, None, **options),
        )

    def theirs(self):
        from torch.nn import functional

        x = self.torch(self.x, requires_grad=True)
        residual, bias = (None if a is None else self.torch(a) for a in (self.residual, self.bias))

        def forward():
            if self.add:
                return residual + functional.dropout(x + bias, 0.1)
            return functional.dropout(x, 0.1)

        return forward, self.backward(forward(), x, self.torch(self.grad))


class DropoutAdd(Dropout):
    add = True


def rows(n, dtype):
    """Give how many rows of ``n`` elements make an array of the large size."""
    return LARGE // (n * (4 if dtype == "float32" else 2)), n


def cases(quick):
    for dtype in ("bfloat16", "float32"):
        for n in (1024,) if quick else (64, 1024, 4096, 8192, 32_768):
            for kind in (LayerNorm, RMSNorm, Softmax, LogSoftmax):
                if kind in (LayerNorm, Softmax) or n == 1024:
                    yield kind, dtype, rows(n, dtype)
        for n in (32_000,) if quick else (1000, 32_000, 50_257, 128_256):
            yield CrossEntropy, dtype, rows(n, dtype)
        for kind in (GroupNorm, GroupNormSiLU, GroupNormFirst):
            for shape in [(8, 320, 64, 64)] + [(64, 320, 128, 128)] * (not quick):
                yield kind, dtype, shape
        for kind in (Dropout, DropoutAdd):
            yield kind, dtype, rows(1024, dtype)
        yield Rotary, dtype, (32, 16, 4096 if dtype == "bfloat16" else 2048, 128)
        for n in (8192,) if quick else (8192, 65_536, 524_288):
            yield EmbeddingGradient, dtype, (n, 50_257, 512)


def run(kind, dtype, shape, ceiling, options, queue):
    case = kind(kind.__name__, dtype, shape)
    contestants = {"rtxarr": case.ours()}
    try:
        contestants["torch"] = case.theirs()
    except ImportError:
        contestants.pop("torch", None)
    found = []
    for i, way in enumerate(("forward", "backward")):
        functions = {name: both[i] for name, both in contestants.items() if both[i] is not None}
        if not functions:
            continue
        moved = case.moved()[i]
        record = {"operation": case.name, "pass": way, "dtype": dtype, "shape": list(shape)}
        record["bytes"], record["copy_bytes_per_s"] = moved, ceiling
        text = f"{case.name:18} {way:8} {dtype:8} {'x'.join(map(str, shape)):18}"
        functions["copy"] = copy(moved)
        times = measure(functions, options.rounds, 10, queue)
        same = statistics.median(times["copy"][0])
        for name, (values, called) in times.items():
            low, middle, high = statistics.quantiles(values, n=4)
            record[name] = {"median_s": middle, "quartiles_s": [low, high]}
            record[name]["called_s"] = statistics.median(called)
            record[name]["share_of_copy"] = moved / middle / ceiling
            record[name]["share_of_same_bytes"] = same / middle
            text += f" {name} {middle * 1e6:7.1f} us"
            if name != "copy":
                text += f" ({record[name]['called_s'] * 1e6:.0f} called)"
                text += f" {moved / middle / ceiling:4.2f} {same / middle:4.2f}"
        if "torch" in functions:
            record["ratio"] = record["torch"]["median_s"] / record["rtxarr"]["median_s"]
            text += f"  {record['ratio']:.2f}x"
        print(text, flush=True)
        found.append(record)
    return found


def copy(moved):
    """Give a function that reads and writes so many bytes in all."""
    source = rx.zeros(moved // 8, dtype="float32", device="cuda")
    target = rx.zeros_like(source)

    def function():
        target[...] = source

    return function


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one size of each")
    parser.add_argument("--only", default="", help="operations whose name has this in it")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if len(rx.devices()) < 2:
        sys.exit("needs a GPU")
    versions = {"python": sys.version.split()[0], "numpy": np.__version__}
    for name in ("torch", "cupy-cuda13x", "cupy-cuda12x"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    queue = Queue()
    times = measure({"copy": copy(1 << 31)}, options.rounds, 5, queue)
    ceiling = (1 << 31) / statistics.median(times["copy"][0])
    report = {"versions": versions, "device": _device._gpu_name(0), "cases": []}
    print(f"{report['device']}: a copy of 1 GiB moves {ceiling / 1e9:.0f} GB/s")
    print("Shares are of that, then of the time of a copy of as many bytes.")
    for kind, dtype, shape in cases(options.quick):
        if options.only.lower() in kind.__name__.lower():
            report["cases"] += run(kind, dtype, shape, ceiling, options, queue)
            _device.cupy.get_default_memory_pool().free_all_blocks()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
