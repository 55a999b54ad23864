"""A graph of a billion edges on one GPU: making it, the mean over neighbours, three SAGE layers.

The graph is R-MAT, made of chunks that are drawn on the device, so no list of all edges is ever
there. Each side is a process of its own, since some need most of the memory. torch.sparse takes the
mean as a product with a matrix of ones over degrees: as users write it, and into an array that is
there, which needs a third of the memory. ``error`` is that of some rows, the longest among them,
against float64. Figures are medians over rounds, with their quartiles, beside the floor of bytes
when every edge reads its row; for the layers that is three means, and their products' reads and
writes. On the CPU take a small scale.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from aggregate import copy_rate, error_of, floors, free, measure, ours, to_torch

import rtxarr as rx
from rtxarr import geom, nn
from rtxarr.random import Generator

SIDES = ["torch.sparse", "rtxarr"]


class SAGE(nn.Module):
    """Three layers of means, as for inference."""

    def __init__(self, width, options):
        self.first, self.second, self.last = (
            geom.SAGEConv(width, width, **options) for _ in range(3)
        )

    def forward(self, graph, x):
        for layer in (self.first, self.second):
            x = rx.relu(layer(graph, x))
        return self.last(graph, x)


def torch_means(graph, x):
    """Give the ways to take the mean by torch.sparse, the one that needs least memory first."""
    import torch

    x = to_torch(x)
    degrees = to_torch(graph.in_degrees)
    # One over the degree of each edge's destination, in the order of the edges.
    weight = degrees.clamp(min=1).to(x.dtype).reciprocal().repeat_interleave(degrees)
    pointers, indices = to_torch(graph.indptr).int(), to_torch(graph.indices)
    matrix = torch.sparse_csr_tensor(pointers, indices, weight, (graph.n_dst, graph.n_src))
    del degrees
    free(x.device.type)  # what making the weights took

    def into_array():
        out = torch.zeros((graph.n_dst, x.shape[1]), dtype=x.dtype, device=x.device)
        return lambda: torch.addmm(out, matrix, x, beta=0, out=out)

    yield "torch.sparse, into an array", into_array()
    yield "torch.sparse", lambda: matrix @ x


def describe(name, seconds, graph, x, rate, n_means=1, products=0, error=None):
    """Print a line and give the figures."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    row = graph.n_dst * x.shape[1] * x.dtype.itemsize
    floor = (n_means * floors(graph, x, False)[1] + products * 4 * row) / rate
    figures = {
        "name": name, "dtype": x.dtype.name, "ms": 1e3 * middle,
        "quartiles": [1e3 * low, 1e3 * high], "of_floor": middle / floor,
        "edges_per_s": n_means * graph.n_edges / middle, "error": error,
    }  # fmt: skip
    print(
        f"{name:28} {x.dtype.name:9} {1e3 * middle:9.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f}), "
        f"{middle / floor:.2f} of the floor without reuse, {figures['edges_per_s']:.3g} edges/s"
        + ("" if error is None else f", error {error:.1e}"),
        flush=True,
    )
    return figures


def one(side, options, device):
    """Measure one side, and give its figures."""
    found = []
    rate = copy_rate(device)
    edges = geom.RMATEdges(options.scale, options.edge_factor)
    rx.synchronize(device)
    start = time.perf_counter()
    graph = geom.from_chunks(edges, n_nodes=edges.n_nodes, keep_numbers=False)
    rx.synchronize(device)
    seconds = time.perf_counter() - start
    peak = rx.memory_stats(device)["pool"] / 2**30
    print(f"{side}: {graph!r} on {device} in {seconds:.1f} s, the pool then {peak:.1f} GiB")
    print(f"a copy moves {rate / 1e12:.2f} TB/s")
    degrees = graph.in_degrees
    rows = [int(rx.argmax(degrees)), graph.n_dst // 3, graph.n_dst // 2]
    rows = [row for row in rows if int(degrees[row])]
    for kind in ["float16", "float32"] if device == "cuda" else ["float32"]:
        x = Generator(0).normal((graph.n_src, options.features), dtype="float32")
        x = rx.astype(x, kind, copy=False)
        free(device)
        if side == "rtxarr":
            means = iter([("mean", ours("mean", graph, x, None))])
        else:
            means = torch_means(graph, x)
        try:
            for name, run in means:
                error = error_of(run(), "mean", graph, x, rows)
                times = measure(run, options.rounds, device, 60.0)
                found.append(describe(name, times, graph, x, rate, error=error))
                run = None
                free(device)
        except RuntimeError as error:  # out of memory, or a type that cuSPARSE does not take
            if side == "rtxarr":
                raise
            left = rx.memory_stats(device)["free"] / 2**30
            print(f"{side} {kind} failed with {left:.1f} GiB free: {str(error).splitlines()[0]}")
        if side == "rtxarr" and not any("SAGE" in figures["name"] for figures in found):
            model = SAGE(options.features, {"dtype": kind})
            model.eval()
            with rx.no_grad():
                times = measure(lambda m=model, x=x: m(graph, x), options.rounds, device, 60.0)
            found.append(describe("SAGE, 3 layers", times, graph, x, rate, 3, 3))
        means = run = x = None
        free(device)
    return {"build_s": seconds, "copy_tb_s": rate / 1e12, "runs": found}


def compare(sides):
    """Print how many times as fast as each way of torch.sparse our mean is."""
    for theirs in sides.get("torch.sparse", {}).get("runs", []):
        for our in sides.get("rtxarr", {}).get("runs", []):
            if our["name"] == "mean" and our["dtype"] == theirs["dtype"]:
                ratio = theirs["ms"] / our["ms"]
                print(f"{theirs['name']} {our['dtype']} takes {ratio:.2f} times the time of ours")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=int, help="default 26 on a GPU and 14 on the CPU")
    parser.add_argument("--edge-factor", type=int, default=16)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    device = "cuda" if len(rx.devices()) > 1 else "cpu"
    options.scale = options.scale or (26 if device == "cuda" else 14)
    report = {"scale": options.scale, "edge_factor": options.edge_factor}
    report |= {"features": options.features, "sides": {}}
    if len(options.sides) == 1:
        try:
            with rx.device(device):
                report["sides"][options.sides[0]] = one(options.sides[0], options, device)
        except ImportError as error:
            print(f"{options.sides[0]} is left out: {error}")
    else:
        with tempfile.TemporaryDirectory() as folder:
            for side in options.sides:
                path = Path(folder) / f"{side}.json"
                extra = ["--sides", side, "--json", str(path)]
                subprocess.run([sys.executable, __file__, *sys.argv[1:], *extra], check=False)
                if path.exists():
                    report["sides"] |= json.loads(path.read_text(encoding="utf-8"))["sides"]
        compare(report["sides"])
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
