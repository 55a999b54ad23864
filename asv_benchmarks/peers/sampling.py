"""Neighbour sampling and random walks on an R-MAT graph, on a GPU and on the CPU.

No other library's sampler installs without a compiler, so the CPU path, one thread of compiled
code, is what the GPU is measured against; both draw the same edges, which is checked. Sampling is
in bulk: many batches in one call. Figures are medians over rounds.
"""

import argparse
import functools
import json
import statistics
import time

import numpy as np

import rtxarr as rx
from rtxarr import geom
from rtxarr.random import Generator


def rmat(scale, edge_factor, device):
    """Give a graph of 2**scale nodes with the usual chances."""
    edges = geom.RMATEdges(scale, edge_factor, device=device)
    return geom.from_chunks(edges, n_nodes=edges.n_nodes, device=device)


def measure(function, rounds, device):
    """Give the median of the seconds that a call takes, and what it gives."""
    times = []
    for i in range(rounds + 1):
        rx.synchronize(device)
        start = time.perf_counter()
        result = function(epoch=i)
        rx.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), result  # the first round warms up


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=int, default=18)
    parser.add_argument("--edge-factor", type=int, default=16)
    parser.add_argument("--fanout", type=int, nargs="+", default=[15, 10, 5])
    parser.add_argument("--seeds", type=int, default=1024, help="of a batch")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64], help="of a call")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda"], choices=["cpu", "cuda"])
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    devices = options.devices if len(rx.devices()) > 1 else ["cpu"]
    graph = rmat(options.scale, options.edge_factor, "cpu")
    print(f"{graph!r}, the largest degree {int(graph.in_degrees.max())}")
    seeds = Generator(2).integers(
        0, graph.n_nodes, options.seeds * max(options.batches), device="cpu"
    )
    weight = Generator(3).uniform(graph.n_edges, device="cpu")
    report, first = [], {}
    for device in devices:
        here = graph.to_device(rx.device(device))
        moved = rx.asarray(seeds, device=device)
        weights = rx.asarray(weight, device=device)
        samplers = {
            "uniform": geom.NeighborSampler(here, options.fanout),
            "with replacement": geom.NeighborSampler(here, options.fanout, replace=True),
            "weighted": geom.NeighborSampler(here, options.fanout, weight=weights),
            "labor": geom.LaborSampler(here, options.fanout),
        }
        for n_batches in options.batches:
            some = moved[: options.seeds * n_batches]
            for name, sampler in samplers.items():
                bulk = functools.partial(sampler.bulk, some, options.seeds)
                seconds, samples = measure(bulk, options.rounds, device)
                n = sum(ids.shape[0] for sample in samples for ids in sample.edge_ids)
                last = np.asarray(rx.Tensor(samples[-1].nodes).numpy())
                same = np.array_equal(last, first.setdefault((name, n_batches), last))
                assert same, f"{name} differs"
                show(report, device, name, n_batches, n, seconds, "edges")
            for name, p in (("walks", 1.0), ("node2vec", 0.5)):
                walk = functools.partial(geom.random_walk, here, some, 40, p=p, q=2 / p - 1)
                seconds, walks = measure(walk, options.rounds, device)
                n = int(rx.count_nonzero(walks[:, 1:] >= 0))
                show(report, device, name, n_batches, n, seconds, "steps")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


def show(report, device, name, n_batches, n, seconds, unit):
    report.append(
        {"device": device, "what": name, "batches": n_batches, unit: n, "seconds": seconds}
    )
    title = f"{device} {name:17} {n_batches:4} batches {n:>11} {unit}"
    print(f"{title} {1e3 * seconds:9.2f} ms {n / seconds / 1e6:9.1f} M/s")


if __name__ == "__main__":
    main()
