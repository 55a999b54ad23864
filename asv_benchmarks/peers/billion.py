"""A graph of a billion edges on one GPU: making it, the mean over neighbours, three SAGE layers.

The graph is R-MAT, made of chunks that are drawn on the device, so no list of all edges is ever
there. Figures are medians over rounds, with their quartiles, beside the floor of bytes when every
edge reads its row; for the layers that is three means, and their products' reads and writes.
torch.sparse runs in float32, the type in which cuSPARSE is fast. On the CPU take a small scale.
"""

import argparse
import json
import statistics
import time

from aggregate import copy_rate, error_of, floors, free, measure, ours, torch_sparse

import rtxarr as rx
from rtxarr import geom, nn
from rtxarr.random import Generator


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


def describe(name, seconds, graph, x, rate, n_means=1, products=0):
    """Print a line and give the figures."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    row = graph.n_dst * x.shape[1] * x.dtype.itemsize
    floor = (n_means * floors(graph, x, False)[1] + products * 4 * row) / rate
    figures = {
        "name": name, "dtype": x.dtype.name, "ms": 1e3 * middle,
        "quartiles": [1e3 * low, 1e3 * high], "of_floor": middle / floor,
        "edges_per_s": n_means * graph.n_edges / middle,
    }  # fmt: skip
    print(
        f"{name:14} {x.dtype.name:9} {1e3 * middle:9.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f}), "
        f"{middle / floor:.2f} of the floor without reuse, {figures['edges_per_s']:.3g} edges/s",
        flush=True,
    )
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=int, help="default 26 on a GPU and 14 on the CPU")
    parser.add_argument("--edge-factor", type=int, default=16)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    device = "cuda" if len(rx.devices()) > 1 else "cpu"
    scale = options.scale or (26 if device == "cuda" else 14)
    found = []
    with rx.device(device):
        rate = copy_rate(device)
        edges = geom.RMATEdges(scale, options.edge_factor)
        rx.synchronize(device)
        start = time.perf_counter()
        graph = geom.from_chunks(edges, n_nodes=edges.n_nodes, keep_numbers=False)
        rx.synchronize(device)
        seconds = time.perf_counter() - start
        peak = rx.memory_stats(device)["pool"] / 2**30
        print(f"{graph!r} on {device} in {seconds:.1f} s, the pool then {peak:.1f} GiB")
        print(f"a copy moves {rate / 1e12:.2f} TB/s")
        degrees = graph.in_degrees
        rows = [int(rx.argmax(degrees)), graph.n_dst // 3, graph.n_dst // 2]
        rows = [row for row in rows if int(degrees[row])]
        free(device)
        kinds = ["float16", "float32"] if device == "cuda" else ["float32"]
        for kind in kinds:
            x = rx.astype(
                Generator(0).normal((graph.n_src, options.features), dtype="float32"), kind
            )
            run = ours("mean", graph, x, None)
            out = run()
            error = error_of(out, "mean", graph, x, rows)
            del out
            times = measure(run, options.rounds, device, 60.0)
            found.append({**describe("mean", times, graph, x, rate), "error": error})
            if kind == kinds[0]:
                model = SAGE(options.features, {"dtype": kind})
                model.eval()
                with rx.no_grad():
                    times = measure(lambda m=model, x=x: m(graph, x), options.rounds, device, 60.0)
                found.append(describe("SAGE, 3 layers", times, graph, x, rate, 3, 3))
            if kind == "float32":
                del run
                free(device)  # what the pool keeps of results, which torch cannot use
                try:
                    run = torch_sparse("mean", graph, x, None)
                    times = measure(run, options.rounds, device, 60.0)
                    found.append(describe("torch.sparse", times, graph, x, rate))
                except ImportError as error:
                    print(f"torch.sparse is left out: {error}")
                except RuntimeError as error:
                    print(f"torch.sparse failed: {str(error).splitlines()[0]}")
            run = x = None
            free(device)
    if options.json:
        sizes = {"scale": scale, "edge_factor": options.edge_factor, "features": options.features}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({**sizes, "build_s": seconds, "copy_tb_s": rate / 1e12, "runs": found}, file)


if __name__ == "__main__":
    main()
