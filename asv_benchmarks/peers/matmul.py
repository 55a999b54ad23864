"""Matrix products, with and without bias and GELU, against PyTorch and CuPy on one GPU.

The host time of a call shows at 64 x 64, the rate at 4096 and 8192. All sides take turns in one
process; figures are medians over rounds, with quartiles. A rate is bounded by the tensor cores
(float16 and bfloat16) or the plain ones (float32), and near 8192 by the power limit.

The goal's row is the product with bias and GELU at 8192: bfloat16 at PyTorch's speed, and products
of 8-bit numbers, rounded before, at 1.7 times that of bfloat16.
"""

import argparse
import json
import statistics
import time
from importlib.metadata import PackageNotFoundError, version

import rtxarr as rx
from rtxarr.libs import blas

DTYPES = ("bfloat16", "float16", "float32")
SIZES = (4096, 8192)


def sides(n, m, dtype):
    """Give each contestant's product, and its product with bias and GELU, of (m, n) @ (n, n)."""
    import cupy

    rng = cupy.random.default_rng(0)
    x, w, bias = (
        rng.standard_normal(s, dtype="float32").astype(getattr(rx, dtype))
        for s in ((m, n), (n, n), (n,))
    )
    plain = {
        "rtxarr.libs.blas": lambda: blas.matmul(x, w.T),
        "cupy": lambda: cupy.matmul(x, w.T),
    }
    fused = {"rtxarr.libs.blas": lambda: blas.matmul(x, w.T, bias=bias, epilogue="gelu")}
    linear = {
        "rtxarr.libs.blas": lambda: blas.matmul(x, w.T, bias=bias),
        "cupy": lambda: cupy.matmul(x, w.T) + bias,
    }
    try:
        import torch
    except ImportError:
        return {"matmul": plain, "linear": linear, "linear + gelu": fused}
    torch.backends.cuda.matmul.allow_tf32 = False
    tx, tw, tb = (
        torch.as_tensor(a.astype("float32"), device="cuda").to(getattr(torch, dtype))
        for a in (x, w, bias)
    )
    functional = torch.nn.functional

    def without_grad(function):
        def call():
            with torch.no_grad():
                return function()

        return call

    plain["torch"] = without_grad(lambda: tx @ tw.T)
    linear["torch"] = without_grad(lambda: functional.linear(tx, tw, tb))
    fused["torch"] = without_grad(
        lambda: functional.gelu(functional.linear(tx, tw, tb), approximate="tanh")
    )
    return {"matmul": plain, "linear": linear, "linear + gelu": fused}


def goal(n):
    """Give bfloat16 and 8-bit products with bias and GELU, of (n, n) @ (n, n)."""
    import cupy

    from rtxarr.kernels import fp8

    rng = cupy.random.default_rng(0)
    x, w = (rng.standard_normal((n, n), dtype="float32") for _ in range(2))
    scale = cupy.full(1, 0.01, dtype="float32")
    x8, w8 = (fp8.quantize(a, scale, "e4m3", cupy.zeros(1, "float32")) for a in (x, w))
    bias = cupy.zeros(n, rx.bfloat16)
    functions = sides(n, n, "bfloat16")["linear + gelu"]
    for fast in (False, True):
        functions[f"fp8, fast={fast}"] = lambda fast=fast: blas.matmul_fp8(
            x8, w8.T, scale_a=scale, scale_b=scale, bias=bias, epilogue="gelu", fast=fast
        )
    return functions


def synchronize():
    import cupy

    cupy.cuda.Device().synchronize()


def host_times(functions, rounds, calls=200):
    """Microseconds until a call returns, on an idle queue short enough not to fill up."""
    times = {name: [] for name in functions}
    for _ in range(rounds + 2):
        for name, function in functions.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            times[name].append((time.perf_counter() - start) / calls * 1e6)
            synchronize()
    return {name: values[2:] for name, values in times.items()}


def device_times(functions, rounds, calls=3):
    """Seconds a call takes on the device: the time of several, until all have ended."""
    times = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            synchronize()
            times[name].append((time.perf_counter() - start) / calls)
    return {name: values[1:] for name, values in times.items()}


def summary(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartiles": [low, high]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if len(rx.devices()) == 1:
        raise SystemExit("needs a GPU that CuPy can use")
    versions = {}
    for name in ("torch", "cupy-cuda13x", "cupy-cuda12x", "nvmath-python", "nvidia-cublas"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            print(f"{name} is not installed")
    report = {"device": repr(rx.device("cuda")), "versions": versions, "cases": []}
    print(report["device"], versions)
    rx.libs.show()

    def add(what, dtype, shape, unit, figures, base="torch"):
        report["cases"].append(
            {"case": what, "dtype": dtype, "shape": shape, "unit": unit, **figures}
        )
        least = figures.get(base, {}).get("median")
        for name, figure in figures.items():
            low, high = figure["quartiles"]
            ratio = "" if least is None else f"  {figure['median'] / least:5.2f} of {base}"
            print(
                f"{what:14} {dtype:9} {str(shape):20} {name:17} {figure['median']:8.1f} {unit} "
                f"({low:.1f} - {high:.1f}){ratio}"
            )

    for dtype in DTYPES:
        for what, functions in sides(64, 64, dtype).items():
            times = host_times(functions, options.rounds)
            figures = {name: summary(values) for name, values in times.items()}
            add(f"host {what}", dtype, [64, 64, 64], "us", figures)
    for dtype in DTYPES:
        for n in SIZES:
            for what, functions in sides(n, n, dtype).items():
                times = device_times(functions, options.rounds)
                figures = {
                    name: summary([2 * n**3 / seconds / 1e12 for seconds in values])
                    for name, values in times.items()
                }
                add(what, dtype, [n, n, n], "TFLOP/s", figures)
    n = 8192
    times = device_times(goal(n), options.rounds)
    figures = {
        name: summary([2 * n**3 / seconds / 1e12 for seconds in values])
        for name, values in times.items()
    }
    add("goal", "bf16, fp8", [n, n, n], "TFLOP/s", figures, base="rtxarr.libs.blas")
    # One row: the weights are read once, so memory is the bound.
    for dtype in DTYPES:
        n = 8192
        times = device_times(sides(n, 1, dtype)["matmul"], options.rounds, calls=20)
        size = n * n * (4 if dtype == "float32" else 2)
        figures = {
            name: summary([size / seconds / 1e9 for seconds in values])
            for name, values in times.items()
        }
        add("one row", dtype, [1, n, n], "GB/s", figures)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
