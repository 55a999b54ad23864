"""A step of SGD and AdamW, against PyTorch on the same device.

Many small parameters show the host time of a step, few large ones the memory bandwidth: a step of
AdamW on float32 reads 16 bytes and writes 12 for each parameter, one of SGD with momentum reads 12
and writes 8. Both sides take turns in one process; figures are medians over rounds, with quartiles.
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

BYTES = {"SGD": 20, "AdamW": 28}
CASES = {
    "cpu": {"100 of 64": (100, (8, 8)), "4 of 1024 x 1024": (4, (1024, 1024))},
    "cuda": {"100 of 64": (100, (8, 8)), "8 of 4096 x 4096": (8, (4096, 4096))},
}


def ours(kind, n, shape, device):
    params = [nn.Parameter(shape, init="normal", device=device) for _ in range(n)]
    for param in params:
        param.grad = rx.full(shape, 0.01, dtype="float32", device=device)
    if kind == "SGD":
        return optim.SGD(params, lr=1e-3, momentum=0.9).step
    return optim.AdamW(params).step


def theirs(kind, n, shape, device, **options):
    import torch

    params = [torch.randn(shape, device=device, requires_grad=True) for _ in range(n)]
    for param in params:
        param.grad = torch.full(shape, 0.01, device=device)
    if kind == "SGD":
        return torch.optim.SGD(params, lr=1e-3, momentum=0.9, **options).step
    return torch.optim.AdamW(params, **options).step


def contestants(kind, n, shape, device):
    found = {"rtxarr": ours(kind, n, shape, device)}
    try:
        found["torch"] = theirs(kind, n, shape, device)
        found["torch fused"] = theirs(kind, n, shape, device, fused=True)
    except ImportError:
        print("torch is not installed")
    return found


def measure(functions, device, rounds, calls):
    """Give, for each function, the seconds a call took in each round."""
    times = {name: [] for name in functions}
    for _ in range(rounds + 2):
        for name, function in functions.items():
            rx.synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                function()
            rx.synchronize(device)
            times[name].append((time.perf_counter() - start) / calls)
    return {name: values[2:] for name, values in times.items()}  # the first rounds warm up


def copy_rate(device):
    """Bytes a second that a copy of 1 GiB reads and writes: the ceiling."""
    source = rx.zeros(2**28 if device == "cuda" else 2**25, dtype="float32", device=device)
    target = rx.zeros_like(source)

    def copy():
        target[...] = source

    seconds = statistics.median(measure({"copy": copy}, device, 10, 5)["copy"])
    return 2 * source.nbytes / seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    devices = ["cpu", *(["cuda"] if len(rx.devices()) > 1 else [])]
    versions = {"python": sys.version.split()[0], "numpy": np.__version__}
    for name in ("torch", "cupy-cuda13x", "cupy-cuda12x"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    report = {"versions": versions, "cases": []}
    for device in devices:
        ceiling = copy_rate(device)
        print(f"{device}: a copy moves {ceiling / 1e9:.0f} GB/s")
        for title, (n, shape) in CASES[device].items():
            for kind in BYTES:
                calls = 10 if n > 10 else 3
                functions = contestants(kind, n, shape, device)
                times = measure(functions, device, options.rounds, calls)
                case = {"device": device, "optimizer": kind, "parameters": title}
                case["copy_bytes_per_s"] = ceiling
                for name, values in times.items():
                    low, middle, high = statistics.quantiles(values, n=4)
                    case[name] = {"median_s": middle, "quartiles_s": [low, high]}
                    rate = BYTES[kind] * n * np.prod(shape) / middle / 1e9
                    print(
                        f"  {kind:6} {title:18} {name:12} {middle * 1e6:9.0f} us "
                        f"({low * 1e6:.0f} - {high * 1e6:.0f})  {rate:6.0f} GB/s"
                    )
                report["cases"].append(case)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
