"""Steps of SGD and Adam, and clipping by the norm, against PyTorch on the same device.

Many small parameters show the host time of a step, large ones the memory bandwidth: a step of Adam
on float32 reads 16 bytes and writes 12 for each parameter, one of SGD with momentum reads 12 and
writes 8, clipping reads 8 and writes 4. Both sides take turns in one process; figures are medians
over rounds, with quartiles. A step's time is that of many in a row; on a GPU also the host's part,
until the call returns, and the GPU's part, behind a queue of copies that hides the host's.
"""

import argparse
import json
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version

import numpy as np

import rtxarr as rx
from rtxarr import nn, optim

BYTES = {"SGD": 20, "Adam": 28, "AdamW": 28, "clip": 12}
CASES = {
    "cpu": {"100 of 64": (100, (8, 8)), "4 of 1024 x 1024": (4, (1024, 1024))},
    "cuda": {
        "100 of 64": (100, (8, 8)),
        "200, 33.5 million": (200, (164, 1024)),
        "8 of 4096 x 4096": (8, (4096, 4096)),
    },
}


def ours(kind, n, shape, device):
    params = [nn.Parameter(shape, init="normal", device=device) for _ in range(n)]
    for param in params:
        param.grad = rx.full(shape, 0.01, dtype="float32", device=device)
    if kind == "clip":
        return lambda: optim.clip_grad_norm(params, 1.0)
    if kind == "SGD":
        return optim.SGD(params, lr=1e-3, momentum=0.9).step
    return getattr(optim, kind)(params).step


def theirs(kind, n, shape, device, **options):
    import torch

    params = [torch.randn(shape, device=device, requires_grad=True) for _ in range(n)]
    for param in params:
        param.grad = torch.full(shape, 0.01, device=device)
    if kind == "clip":
        return lambda: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
    if kind == "SGD":
        return torch.optim.SGD(params, lr=1e-3, momentum=0.9, **options).step
    return getattr(torch.optim, kind)(params, **options).step


def contestants(kind, n, shape, device):
    found = {"rtxarr": ours(kind, n, shape, device)}
    try:
        found["torch"] = theirs(kind, n, shape, device)
        if kind != "clip":
            found["torch fused"] = theirs(kind, n, shape, device, fused=True)
    except ImportError:
        print("torch is not installed")
    return found


def measure(functions, device, rounds, calls):
    """Give, for each function, the seconds a call took in each round: whole, and on the host."""
    times = {name: [] for name in functions}
    host = {name: [] for name in functions}
    for _ in range(rounds + 2):
        for name, function in functions.items():
            rx.synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                function()
            host[name].append((time.perf_counter() - start) / calls)
            rx.synchronize(device)
            times[name].append((time.perf_counter() - start) / calls)
    # The first rounds warm up.
    return ({name: values[2:] for name, values in kind.items()} for kind in (times, host))


def measure_on_gpu(functions, rounds, calls, busy_s, copy):
    """Give the seconds of a call on the GPU, which works off copies while the host runs ahead."""
    import cupy

    n_copies = int(2 * busy_s / copy.seconds) + 2
    times = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            first, last = cupy.cuda.Event(), cupy.cuda.Event()
            for _ in range(n_copies):
                copy()
            first.record()
            for _ in range(calls):
                function()
            last.record()
            last.synchronize()
            times[name].append(cupy.cuda.get_elapsed_time(first, last) / 1e3 / calls)
    return times


class Copy:
    """A copy of 1 GiB (128 MiB on a CPU): the ceiling of what moves bytes."""

    def __init__(self, device):
        self.source = rx.zeros(2**28 if device == "cuda" else 2**25, dtype="float32", device=device)
        self.target = rx.zeros_like(self.source)
        times, _ = measure({"copy": self}, device, 10, 5)
        self.seconds = statistics.median(times["copy"])
        self.bytes_per_s = 2 * self.source.nbytes / self.seconds

    def __call__(self):
        self.target[...] = self.source


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", default=list(BYTES), choices=list(BYTES))
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda"], choices=["cpu", "cuda"])
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    devices = options.devices if len(rx.devices()) > 1 else ["cpu"]
    versions = {"python": sys.version.split()[0], "numpy": np.__version__}
    for name in ("torch", "cupy-cuda13x", "cupy-cuda12x"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    report = {"versions": versions, "cases": []}
    for device in devices:
        copy = Copy(device)
        print(f"{device}: a copy moves {copy.bytes_per_s / 1e9:.0f} GB/s")
        for title, (n, shape) in CASES[device].items():
            for kind in options.kinds:
                report["cases"].append(compare(kind, title, n, shape, device, options, copy))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


def compare(kind, title, n, shape, device, options, copy):
    calls = 10 if n > 10 else 3
    functions = contestants(kind, n, shape, device)
    times, host = measure(functions, device, options.rounds, calls)
    found = {"whole": times}
    if device == "cuda":
        busy = calls * max(statistics.median(values) for values in host.values())
        found["host"] = host
        found["gpu"] = measure_on_gpu(functions, options.rounds, calls, busy, copy)
    case = {"device": device, "kind": kind, "parameters": title}
    case["copy_bytes_per_s"] = copy.bytes_per_s
    for name in functions:
        shown = []
        case[name] = {}
        for part, values in found.items():
            low, middle, high = statistics.quantiles(values[name], n=4)
            case[name][part] = {"median_s": middle, "quartiles_s": [low, high]}
            shown.append(f"{part} {middle * 1e6:7.0f} us ({low * 1e6:.0f} - {high * 1e6:.0f})")
        best = case[name].get("gpu", case[name]["whole"])["median_s"]
        rate = BYTES[kind] * n * np.prod(shape) / best / 1e9
        print(f"  {kind:6} {title:18} {name:12} {'  '.join(shown)}  {rate:6.0f} GB/s", flush=True)
    return case


if __name__ == "__main__":
    main()
