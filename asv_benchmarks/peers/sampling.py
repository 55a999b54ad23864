"""Neighbour sampling and random walks on an R-MAT graph, on a GPU, on the CPU, and by PyG.

Sampling is in bulk: many batches in one call, which the CPU shares among threads; walks take one
thread there. The GPU and the CPU draw the same edges, which is checked. PyG samples on the CPU,
through pyg-lib or torch-sparse, whichever is installed: a loader whose batches arrive in this
process, by its number of workers, and the sampler alone in as many processes, which give nothing
back but a count. Every side counts each edge once in each hop that draws it. PyG draws at a node in
the hop after it is first reached, our blocks in every later hop too, so the same batch has more
edges with us: both edges and batches a second are compared. Figures are medians over rounds.
"""

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import time
import warnings
from concurrent.futures import ProcessPoolExecutor

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


# ------------------------------------------------------------------------------------------- PyG


def pyg(edge_index, n_nodes, seeds, size, fanout, workers, rounds, most_s):
    """Give of each way to run PyG's sampler its name, batches, edges and the median seconds.

    This runs in a process of its own, which forks workers and so must not have used a GPU.
    """
    import torch
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.sampler import NeighborSampler, NodeSamplerInput
    from torch_geometric.typing import WITH_PYG_LIB

    warnings.simplefilter("ignore", UserWarning)  # torch-sparse is to go
    data = Data(edge_index=torch.from_numpy(edge_index), num_nodes=n_nodes)
    seeds, found = torch.from_numpy(seeds), []
    name = "PyG, pyg-lib" if WITH_PYG_LIB else "PyG, torch-sparse"

    def run(what, loader, n_batches, count):
        times = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            n = sum(count(batch) for batch in loader)
            times.append(time.perf_counter() - start)
            if len(times) > 1 and sum(times) > most_s / (len(workers) + 1):
                break
        found.append((f"{name}, {what}", n_batches, n, statistics.median(times[1:])))

    sampler = NeighborSampler(data, fanout)

    def draw(batch):
        nodes = seeds[batch[0] * size : (batch[0] + 1) * size]
        return sampler.sample_from_nodes(NodeSamplerInput(None, nodes)).row.numel()

    for n in workers:
        # Four batches a worker: they sample batches, not parts of one.
        n_batches = min(4 * max(n, 1), len(seeds) // size)
        options = {"num_workers": n, "persistent_workers": n > 0}
        options |= {"multiprocessing_context": "fork"} if n > 0 else {}
        alone = torch.utils.data.DataLoader(range(n_batches), collate_fn=draw, **options)
        if n == max(workers):
            run(f"{n} samplers", alone, n_batches, int)
        options |= {"batch_size": size, "input_nodes": seeds[: n_batches * size]}
        loader = NeighborLoader(data, fanout, **options)
        run(f"loader of {n}", loader, n_batches, lambda batch: batch.edge_index.shape[1])
        del loader, alone  # and their workers
    return found


def pyg_rates(graph, seeds, options):
    """Measure PyG; nothing where it is not installed."""
    n_cores = len(os.sched_getaffinity(0))
    workers = sorted({n_cores, n_cores // 2, n_cores // 4, 0}, reverse=True)
    edge_index = np.stack([np.asarray(x, dtype=np.int64) for x in (graph.src, graph.dst)])
    arguments = edge_index, graph.n_nodes, np.asarray(rx.Tensor(seeds).numpy()), options.seeds
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        job = pool.submit(pyg, *arguments, options.fanout, workers, options.rounds, options.pyg_s)
        try:
            return job.result()
        except ImportError as error:
            print(f"PyG's sampler is left out: {error}")
            return []


# --------------------------------------------------------------------------------------- the rest


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=int, default=18)
    parser.add_argument("--edge-factor", type=int, default=16)
    parser.add_argument("--fanout", type=int, nargs="+", default=[15, 10, 5])
    parser.add_argument("--seeds", type=int, default=1024, help="of a batch")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64], help="of a call")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--pyg-s", type=float, default=25.0, help="for all of PyG, about; 0 leaves it out"
    )
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda"], choices=["cpu", "cuda"])
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    report, first = [], {}
    # PyG's sampler and ours on the CPU need it there; a GPU makes a large one in a second.
    on_cpu = "cpu" in options.devices or options.pyg_s > 0
    place = "cpu" if on_cpu else "cuda"
    graph = rmat(options.scale, options.edge_factor, place)
    print(f"{graph!r}, the largest degree {int(graph.in_degrees.max())}", flush=True)
    seeds = Generator(2).integers(
        0, graph.n_nodes, options.seeds * max(options.batches), device="cpu"
    )
    for found in pyg_rates(graph, seeds, options) if options.pyg_s > 0 else []:
        show(report, "cpu", *found, "edges")
    weight = Generator(3).uniform(graph.n_edges, device="cpu")
    for device in options.devices if len(rx.devices()) > 1 else ["cpu"]:
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
    compare(report)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


def show(report, device, name, n_batches, n, seconds, unit):
    report.append(
        {"device": device, "what": name, "batches": n_batches, unit: n, "seconds": seconds}
    )
    title = f"{device} {name:30} {n_batches:4} batches {n:>11} {unit}"
    print(f"{title} {1e3 * seconds:9.2f} ms {n / seconds / 1e6:9.1f} M/s", flush=True)


def compare(report):
    """Print how many times as fast ours is as the fastest loader and samplers of PyG."""
    theirs = [case for case in report if case["what"].startswith("PyG")]
    for word in ("loader", "samplers"):
        some = [case for case in theirs if word in case["what"]]
        if not some:
            continue
        best = max(some, key=lambda case: case["edges"] / case["seconds"])
        for case in report:
            if case["what"] != "uniform":
                continue
            edges, batches = (
                (case[unit] / case["seconds"]) / (best[unit] / best["seconds"])
                for unit in ("edges", "batches")
            )
            print(
                f"{case['device']}, {case['batches']} batches: {edges:.0f} times the edges and "
                f"{batches:.0f} times the batches a second of {best['what']}"
            )


if __name__ == "__main__":
    main()
