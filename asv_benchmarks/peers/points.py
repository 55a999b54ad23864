"""Nearest neighbours and points within a radius, against SciPy's tree and PyTorch by brute force.

The tree uses all cores; PyTorch, on the same device, looks at all distances in chunks: from every
50th point if there are many, and 50 times the time is given. Figures are medians over rounds.
"""

import argparse
import functools
import json
import statistics
import time

import numpy as np
from scipy.spatial import cKDTree

import rtxarr as rx
from rtxarr import geom
from rtxarr.random import Generator


def clusters(rng, n, n_clusters=100):
    """Give points of clusters whose densities are up to a million times those of others."""
    which = rng.integers(0, n_clusters, (n,), device="cpu")
    sizes = 10 ** -rng.uniform((n_clusters, 1), low=1, high=3, device="cpu")
    return rng.uniform((n_clusters, 3), device="cpu")[which] + (
        sizes[which] * rng.normal((n, 3), device="cpu")
    )


CLOUDS = {
    "cube": lambda rng, n: rng.uniform((n, 3), device="cpu"),
    "sphere": lambda rng, n: geom.normalize_points(
        (x := rng.normal((n, 3), device="cpu")) / np.linalg.norm(x, axis=1, keepdims=True)
    ),
    "clusters": clusters,
}


def measure(function, rounds, device):
    """Give the median of the seconds that a call takes."""
    times = []
    for _ in range(rounds + 1):
        rx.synchronize(device)
        start = time.perf_counter()
        function()
        rx.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first round warms up


def brute_force(x, k, device, share):
    """Give a search from one of ``share`` points; None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    points = torch.from_numpy(x).to(device)
    some = points[::share].contiguous()
    chunk = max(1, 2**28 // len(x))

    def search():
        for start in range(0, len(some), chunk):
            torch.cdist(some[start : start + chunk], points).topk(k, largest=False)
        if device == "cuda":
            torch.cuda.synchronize()

    return search


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda"], choices=["cpu", "cuda"])
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    n, k, report = options.points, options.k, []
    for name, make in CLOUDS.items():
        x = make(Generator(0), n).astype(np.float32)
        tree = cKDTree(x)
        r = float(np.median(tree.query(x[:: max(1, n // 1000)], k)[0][:, -1]))
        within = functools.partial(tree.query_ball_point, workers=-1, return_sorted=False)
        work = {
            ("cKDTree", "cpu", "knn"): functools.partial(tree.query, x, k, workers=-1),
            ("cKDTree", "cpu", "radius"): functools.partial(within, x, r),
        }
        for device in options.devices if len(rx.devices()) > 1 else ["cpu"]:
            here = rx.asarray(x, device=device)
            for what, function, amount in (
                ("knn", geom.knn, k),
                ("radius", geom.radius, r),
                ("1024 far", geom.farthest_point_sampling, 1024),
            ):
                work["rtxarr", device, what] = functools.partial(function, here, amount)
            share = 50 if n > 100_000 else 1
            if (device == "cuda" or n <= 20_000) and (search := brute_force(x, k, device, share)):
                work["torch", device, "knn"] = search
        for (library, device, what), function in work.items():
            seconds = measure(function, options.rounds, device)
            seconds *= share if library == "torch" else 1
            title = f"{library} {device} {name} {what}"
            report.append({"what": title, "seconds": seconds, "n": n, "k": k, "r": r})
            print(f"{title:28} {1e3 * seconds:10.1f} ms {n / seconds / 1e6:8.2f} M points/s")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
