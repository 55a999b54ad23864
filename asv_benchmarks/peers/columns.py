"""Sums over columns in fused functions, against PyTorch's sums and a copy.

Each call has arrays of its own, so many that none is in the cache from the call before. Figures are
medians over rounds of the time on the GPU, which works off copies while the host runs ahead; shares
are those of a copy's bytes in a second.
"""

import argparse
import itertools
import json
import statistics

import numpy as np

import rtxarr as rx

IN_TURN = 2**29  # bytes of the arrays of one case, at least


def total(x):
    return rx.sum(x, axis=-2)


def total_of_products(x, y, z):
    return rx.sum(x * y * z, axis=-2)


def products_and_total(x, y):
    z = x * y
    return z, rx.sum(z, axis=-2)


def normal_rows(x, y):
    """The gradients of a scale and a shift that follow a norm."""
    mean = rx.mean(rx.astype(x, rx.float32), axis=-1, keepdims=True)
    return rx.sum(y, axis=-2), rx.sum(y * rx.astype(x - rx.astype(mean, x.dtype), y.dtype), axis=-2)


CASES = {  # function, arrays read, arrays written
    "sum": (total, 1, 0),
    "sum of products": (total_of_products, 3, 0),
    "products and their sum": (products_and_total, 2, 1),
    "sums by normal rows": (normal_rows, 2, 0),
}
SHAPES = [(4096, 1152), (16384, 1152), (65536, 1152), (32, 256, 1152), (8192, 4608)]


def theirs(name, torch):
    def total_of_products(x, y, z):
        return (x * y * z).sum(-2)

    return {"sum": lambda x: x.sum(-2), "sum of products": total_of_products}.get(name)


def measure(functions, rounds, calls, copy):
    """Give the median seconds of a call of each function on the GPU."""
    import cupy

    times = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            first, last = cupy.cuda.Event(), cupy.cuda.Event()
            for _ in range(8):
                copy()
            first.record()
            for _ in range(calls):
                function()
            last.record()
            last.synchronize()
            times[name].append(cupy.cuda.get_elapsed_time(first, last) / 1e3 / calls)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    import cupy

    try:
        import torch
    except ImportError:
        torch = None
    source = cupy.zeros(2**28, np.float32)
    target = cupy.empty_like(source)

    def copy():
        target[...] = source

    seconds = measure({"copy": copy}, 5, 4, copy)["copy"]
    rate = 2 * source.nbytes / seconds
    print(f"{rx.device('cuda:0')!r}, a copy moves {rate / 1e12:.2f} TB/s")
    report = {"copy": rate, "cases": {}}
    for (name, (f, n_read, n_written)), shape, dtype in itertools.product(
        CASES.items(), SHAPES, ("bfloat16", "float32")
    ):
        kind = np.dtype(rx.dtypes.DTYPES[dtype])
        size = int(np.prod(shape)) * kind.itemsize
        n_sets = max(IN_TURN // (size * n_read), 2)
        normal = cupy.random.standard_normal
        sets = [
            [normal(shape, dtype=np.float32).astype(kind) for _ in range(n_read)]
            for _ in range(n_sets)
        ]
        functions = {}
        for mode in ("strict", "fast"):
            fused, in_turn = rx.fuse(f, mode=mode), itertools.cycle(sets)
            fused(*sets[0])
            functions[mode] = lambda fused=fused, in_turn=in_turn: fused(*next(in_turn))
        if torch is not None and (g := theirs(name, torch)) is not None:
            of_torch = itertools.cycle(
                [[torch.from_dlpack(x.view("u2")).view(torch.bfloat16) for x in arrays]
                 if dtype == "bfloat16" else [torch.from_dlpack(x) for x in arrays]
                 for arrays in sets]
            )  # fmt: skip
            functions["torch"] = lambda g=g, of_torch=of_torch: g(*next(of_torch))
        found = measure(functions, options.rounds, options.calls, copy)
        moved = size * (n_read + n_written)
        words = [f"{k} {v * 1e6:.1f} us, {moved / v / rate:.2f}" for k, v in found.items()]
        print(f"{name}, {dtype} {shape}: {'; '.join(words)}")
        report["cases"][f"{name}, {dtype} {shape}"] = {"bytes": moved, **found}
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
