"""Fused products against PyTorch's separate steps, and against rtxarr's own, on one GPU.

A gated pair is two products and a gate, or with ``torch stacked`` one product of twice the width
and a gate; a norm comes before its product; 8-bit products have a scale for each row. All sides
take turns in one process; figures are medians over rounds, with quartiles. With many rows the
tensor cores are the bound, with few the weights' way from memory, for which the GB/s stand.
"""

import argparse
import json
import statistics
import time
from importlib.metadata import PackageNotFoundError, version

import numpy as np
from ml_dtypes import float8_e4m3fn

import rtxarr as rx
from rtxarr.libs import blas, tile

# Rows, summed axis, columns of the result.
SHAPES = ((8192, 4096, 14336), (8192, 1024, 4096), (4096, 4096, 4096), (64, 4096, 14336))
# Tiles to try: rows, columns, depth, warps, and whether a block computes several.
TILES = {
    "linear": (
        (128, 128, 64, None, True), (128, 256, 64, 8, True), (64, 128, 64), (64, 64, 64)
    ),
    "gated_linear": (
        (128, 64, 64, None, True), (128, 128, 64, 8, True), (64, 128, 64), (64, 64, 64)
    ),
    "norm_linear": ((128, 256, 64, 8), (128, 128, 64, 8), (64, 128, 64)),
    "fp8_rows": ((128, 128, 128, 8, True), (64, 64, 128)),
    "fast fp8_rows": ((128, 256, 128, 8, True), (128, 128, 128, 8), (64, 64, 128)),
}  # fmt: skip


def draw(shape, kind):
    """Give random numbers; many rows are a few over and over, which are soon drawn."""
    rng = np.random.default_rng(0)
    some = rng.standard_normal((min(64, shape[0]), *shape[1:]), dtype=np.float32).astype(kind)
    return np.concatenate([some] * -(-shape[0] // len(some)))[: shape[0]]


def ours(m, k, n, array):
    """Give, for each kind of product, our kernel and our separate steps."""
    x, weight, bias, scale = (
        array(draw(shape, rx.bfloat16)) for shape in ((m, k), (2 * n, k), (2 * n,), (k,))
    )
    half, half_bias = weight[:n], bias[:n]
    a, b = (array(draw(shape, float8_e4m3fn).view(np.uint8)) for shape in ((m, k), (n, k)))
    scales = {
        "scale_a": array(np.full((m, 1), 0.5, np.float32)),
        "scale_b": array(np.full((1, n), 0.5, np.float32)),
    }
    fused = {
        "linear + gelu": lambda: tile.linear(x, half, half_bias, activation="gelu"),
        "swiglu": lambda: tile.gated_linear(x, weight, bias),
        "rms norm + linear": lambda: tile.norm_linear(x, half, half_bias, scale=scale),
        "layer norm + linear": lambda: tile.norm_linear(
            x, half, half_bias, norm="layer", scale=scale, shift=scale
        ),
        "fp8 rows": lambda: tile.matmul_fp8_rows(a, b.T, **scales),
        "fp8 rows, fast": lambda: tile.matmul_fp8_rows(a, b.T, **scales, fast=True),
    }
    in_steps = {
        "linear + gelu": lambda: rx.gelu(rx.linear(x, half, half_bias)),
        "swiglu": lambda: rx.swiglu(rx.linear(x, weight, bias)),
        "rms norm + linear": lambda: rx.linear(rx.rms_norm(x, scale), half, half_bias),
        "layer norm + linear": lambda: rx.linear(rx.layer_norm(x, scale, scale), half, half_bias),
        "fp8 rows": lambda: blas.matmul_fp8(a, b.T, **scales),
        "fp8 rows, fast": lambda: blas.matmul_fp8(a, b.T, **scales, fast=True),
    }
    return {
        what: {"rtxarr.libs.tile": fused[what], "rtxarr in steps": in_steps[what]} for what in fused
    }


def theirs(m, k, n):
    """Give the same by PyTorch; nothing without it."""
    try:
        import torch
    except ImportError:
        return {}
    functional = torch.nn.functional
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x, weight, bias, scale = (torch.randn(s, **options) for s in ((m, k), (2 * n, k), 2 * n, k))
    half, half_bias, gate, gate_bias = weight[:n], bias[:n], weight[n:], bias[n:]
    a, b = (torch.randn(s, **options).to(torch.float8_e4m3fn) for s in ((m, k), (n, k)))
    scale_a, scale_b = (torch.full(s, 0.5, device="cuda") for s in ((m, 1), (1, n)))

    def stacked():
        value, gate = functional.linear(x, weight, bias).chunk(2, dim=-1)
        return value * functional.silu(gate)

    def fp8(fast):
        options = {"scale_a": scale_a, "scale_b": scale_b, "use_fast_accum": fast}
        return torch._scaled_mm(a, b.T, **options, out_dtype=torch.bfloat16)

    calls = {
        "linear + gelu": {"torch": lambda: functional.gelu(functional.linear(x, half, half_bias))},
        "swiglu": {
            "torch": lambda: (
                functional.linear(x, half, half_bias)
                * functional.silu(functional.linear(x, gate, gate_bias))
            ),
            "torch stacked": stacked,
        },
        "rms norm + linear": {
            "torch": lambda: functional.linear(functional.rms_norm(x, (k,), scale), half, half_bias)
        },
        "layer norm + linear": {
            "torch": lambda: functional.linear(
                functional.layer_norm(x, (k,), scale, scale), half, half_bias
            )
        },
        "fp8 rows": {"torch": lambda: fp8(False)},
        "fp8 rows, fast": {"torch": lambda: fp8(True)},
    }

    def without_grad(function):
        def call():
            with torch.no_grad():
                return function()

        return call

    found = {}
    for what, sides in calls.items():
        found[what] = {name: without_grad(call) for name, call in sides.items()}
        try:
            found[what]["torch"]()
        except RuntimeError as error:  # of scales for rows, without fast accumulation
            print(f"torch has no {what}: {str(error).splitlines()[0]}")
            del found[what]
    return found


def with_tiles(function, kernel, choice):
    """Let a function use one choice of tiles."""

    def call():
        before = tile._TILES[kernel]
        tile._TILES[kernel] = (tile.Tile(*choice),)
        try:
            return function()
        finally:
            tile._TILES[kernel] = before

    return call


def kernel_of(what):
    if "fp8" in what:
        return "fast fp8_rows" if "fast" in what else "fp8_rows"
    return {"linear + gelu": "linear", "swiglu": "gated_linear"}.get(what, "norm_linear")


def device_times(functions, rounds, calls=5):
    """Seconds a call takes on the device: the time of several, until all have ended."""
    times = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            rx.synchronize("cuda:0")
            start = time.perf_counter()
            for _ in range(calls):
                function()
            rx.synchronize("cuda:0")
            times[name].append((time.perf_counter() - start) / calls)
    return {name: values[1:] for name, values in times.items()}


def work_of(what, m, k, n):
    """Give the operations of a call, and the bytes of the weights."""
    pair = 2 if what == "swiglu" else 1
    return 2 * m * k * n * pair, n * k * pair * (1 if "fp8" in what else 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kinds", nargs="+", help="the products to time; all by default")
    parser.add_argument("--tiles", action="store_true", help="time other tiles instead of peers")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if len(rx.devices()) == 1:
        raise SystemExit("needs a GPU that CuPy can use")
    if missing := tile.status().missing:
        print(f"left out: {missing}")
        return
    versions = {}
    for name in ("torch", "cupy-cuda13x", "cuda-tile", "nvidia-cuda-tileiras", "nvmath-python"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            print(f"{name} is not installed")
    report = {"device": repr(rx.device("cuda")), "versions": versions, "cases": []}
    print(report["device"], versions)
    for shape in SHAPES:
        import cupy

        peers = {} if options.tiles else theirs(*shape)
        for what, sides in ours(*shape, cupy.asarray).items():
            if options.kinds and what not in options.kinds:
                continue
            functions = sides | peers.get(what, {})
            if options.tiles:
                call, kernel = sides["rtxarr.libs.tile"], kernel_of(what)
                functions = {str(x): with_tiles(call, kernel, x) for x in TILES[kernel]}
            flops, n_bytes = work_of(what, *shape)
            case = {"case": what, "shape": shape, "unit": "TFLOP/s"}
            times = device_times(functions, options.rounds)
            for name, values in times.items():
                low, middle, high = statistics.quantiles([flops / t / 1e12 for t in values], n=4)
                case[name] = {"median": middle, "quartiles": [low, high]}
                print(
                    f"{what:20} {str(shape):20} {name:30} {middle:7.0f} TFLOP/s "
                    f"({low:.0f} - {high:.0f})  {n_bytes * middle * 1e3 / flops:6.0f} GB/s"
                )
            report["cases"].append(case)
        del peers
    rx.libs.show()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
