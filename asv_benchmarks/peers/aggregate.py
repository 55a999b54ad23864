"""Aggregation over the edges of a random graph, against PyG, torch.sparse and CuPy's sparse matrix.

The graph is made on the device: R-MAT's, which is skewed, or one with all edges equally likely.
Each side runs alone, and what it held is given back before the next one: some need most of the
memory. Figures are medians over rounds, with their quartiles, beside two floors: the bytes that
must move when no row is read twice from memory ("compulsory"), and when every edge reads its row
("no reuse"); on a skewed graph the cache gives many rows again, so the time may lie below the
second one. For forward and backward passes the floors count twice. ``error`` is that of some rows,
the longest among them, against float64. Memory is the peak of a round beyond what was there before
it.
"""

import argparse
import functools
import gc
import itertools
import json
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version

import numpy as np

import rtxarr as rx
from rtxarr import geom
from rtxarr.random import Generator

# What is done, in which type, and whether backward too.
CASES = [
    ("sum", "float32", False),
    ("mean", "float32", False),
    ("sum", "float16", False),
    ("sum", "bfloat16", False),
    ("sum", "float32", True),
    ("gcn", "float32", False),
    ("gcn", "float32", True),
    ("max", "float16", False),
    ("max", "float16", True),
    ("gat", "float16", False),
    ("gat", "float16", True),
    ("gatv2", "float16", False),
    ("gatv2", "float16", True),
    ("gatv2", "float32", True),
]
# Layers as large as their input, with four heads where there are any.
LAYERS = {"gcn": "GCNConv", "gat": "GATConv", "gatv2": "GATv2Conv"}


class Missing(Exception):
    """A side does not have an operation."""


def rmat(scale, edge_factor, device):
    """Give a graph of 2**scale nodes with the usual chances."""
    edges = geom.RMATEdges(scale, edge_factor, device=device)
    return geom.from_chunks(edges, n_nodes=edges.n_nodes, device=device)


def uniform(scale, edge_factor, device):
    """Give a graph of 2**scale nodes whose edges are any, each as likely."""
    rng, shape = Generator(1), (2, edge_factor << scale)
    edges = rng.integers(0, 1 << scale, shape, dtype="int32", device=device)
    return geom.Graph.from_edges(*edges, n_nodes=1 << scale)


GRAPHS = {"rmat": rmat, "uniform": uniform}


# ------------------------------------------------------------------------------------- the sides
# Each takes (op, graph, x, gradient or None) and gives a function that gives the result.


def layer_of(library, op, width, **options):
    if op != "gcn":
        options["heads"] = 4
    kind = getattr(library, LAYERS[op])
    return kind(width, width // options.get("heads", 1), add_self_loops=False, **options)


def ours(op, graph, x, grad, *, bias=False):
    layer = None
    if bias and op not in LAYERS:
        raise Missing("only layers have a bias")
    if op in LAYERS:
        options = {"bias": bias, "device": graph.device, "dtype": x.dtype}
        layer = layer_of(geom, op, x.shape[1], **options)
    data = x if grad is None else rx.Tensor(x, requires_grad=True)

    def forward():
        if layer is not None:
            return layer(graph, data)
        return geom.aggregate(graph, data, op)

    def run():
        if grad is None:
            with rx.no_grad():
                out = forward()
            return out.data if isinstance(out, rx.Tensor) else out
        data.grad = None
        if layer is not None:
            layer.zero_grad()
        out = forward()
        out.backward(grad)
        return out.data

    return run


def pyg(op, graph, x, grad, *, cached=False):
    import torch
    import torch_geometric.nn as peers

    if cached and op != "gcn":
        raise Missing("only GCN has something to keep")
    edges = torch.stack([to_torch(graph.src), to_torch(graph.dst)])
    x, grad = to_torch(x), None if grad is None else to_torch(grad)
    if op in LAYERS:
        options = {"cached": True} if cached else {}
        layer = layer_of(peers, op, x.shape[1], bias=False, **options).to(x.device, x.dtype)
    else:
        layer = peers.SimpleConv(aggr=op)
    return torch_run(lambda x: layer(x, edges), x, grad)


def torch_sparse(op, graph, x, grad):
    import torch

    if op not in ("sum", "mean", "gcn"):
        raise Missing("its products only add up")
    x, grad = to_torch(x), None if grad is None else to_torch(grad)
    weight = torch.ones(graph.n_edges, dtype=x.dtype, device=x.device)
    if op == "gcn":
        _, weight = geom.gcn_norm(graph, add_self_loops=False)
        weight = to_torch(graph.stored(weight))
    pointers, indices = to_torch(graph.indptr).int(), to_torch(graph.indices)
    matrix = torch.sparse_csr_tensor(pointers, indices, weight, (graph.n_dst, graph.n_src))
    if op == "gcn":
        layer = torch.nn.Linear(x.shape[1], x.shape[1], bias=False, device=x.device)
        return torch_run(lambda x: matrix @ layer(x), x, grad)
    if op == "mean":
        count = to_torch(graph.in_degrees).clamp(min=1)[:, None]
        return torch_run(lambda x: (matrix @ x) / count, x, grad)
    return torch_run(lambda x: matrix @ x, x, grad)


def torch_run(forward, x, grad):
    import torch

    def run():
        if grad is None:
            with torch.no_grad():
                return forward(x)
        leaf.grad = None
        out = forward(leaf)
        out.backward(grad)
        return out.detach()

    leaf = x if grad is None else x.clone().requires_grad_()
    return run


def cupyx(op, graph, x, grad):
    import cupyx.scipy.sparse as sparse

    if op not in ("sum", "mean") or grad is not None or x.dtype != np.float32:
        raise Missing("it adds up float32 and float64, without gradients")
    ones = rx.ones(graph.n_edges, dtype="float32", device=graph.device)
    shape = (graph.n_dst, graph.n_src)
    matrix = sparse.csr_matrix((ones, graph.indices, graph.indptr.astype(np.int32)), shape=shape)
    matrix.has_canonical_format = True  # else it would add duplicate edges up first
    count = rx.where(graph.in_degrees == 0, 1, graph.in_degrees)[:, None].astype(np.float32)
    return lambda: matrix @ x if op == "sum" else (matrix @ x) / count


SIDES = {
    "rtxarr": ours,
    "rtxarr biased": functools.partial(ours, bias=True),
    "torch.sparse": torch_sparse,
    "PyG": pyg,
    "PyG cached": functools.partial(pyg, cached=True),
    "cupyx": cupyx,
}


def to_torch(x):
    """Give an array as PyTorch's, without a copy."""
    import torch

    if x.dtype.itemsize == 2:  # bfloat16 does not pass through DLPack from all libraries
        kind = torch.bfloat16 if x.dtype.name == "bfloat16" else torch.float16
        return torch.from_dlpack(x.view(np.int16)).view(kind)
    return torch.from_dlpack(x)


# ----------------------------------------------------------------------------------- measurement


def measure(run, rounds, device, most_s):
    """Give the seconds of each round; fewer rounds where they would take more than ``most_s``."""
    times = []
    for i in range(rounds + 2):
        rx.synchronize(device)
        start = time.perf_counter()
        out = run()
        rx.synchronize(device)
        times.append(time.perf_counter() - start)
        del out
        if i >= 4 and sum(times) > most_s:
            break
    return times[2:]  # the first rounds warm up


def peak_of(run, device):
    """Give the most memory that is held at a time during one round, beyond what is held before."""
    torch = sys.modules.get("torch")
    cuda = device == "cuda" and torch is not None
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with rx.memory.peak(device) as peak:
        run()
        rx.synchronize(device)
    theirs = torch.cuda.max_memory_allocated() - before if cuda else 0
    return peak.bytes - peak.before + theirs


def error_of(out, op, graph, x, rows):
    """Give the largest error of some rows, as a share of the largest element of each."""
    worst = 0.0
    for row in rows:
        start, stop = int(graph.indptr[row]), int(graph.indptr[row + 1])
        messages = rx.astype(x[graph.indices[start:stop]], "float64")
        want = np.asarray(rx.Tensor(getattr(rx, op)(messages, axis=0)).numpy())
        got = out[row]
        got = got.double().cpu().numpy() if hasattr(got, "cpu") else rx.Tensor(got).numpy()
        worst = max(worst, float(np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()))
    return worst


def free(device):
    """Give back what the last side held."""
    gc.collect()
    torch = sys.modules.get("torch")
    if device == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        if torch is not None:
            torch.cuda.empty_cache()


def floors(graph, x, backward):
    """Give the bytes with each row read once, and with one read for each edge."""
    n, row = graph.n_edges, x.shape[1] * x.dtype.itemsize
    compulsory = 4 * n + graph.n_dst * (8 + 2 * row)
    without_reuse = n * (4 + row) + graph.n_dst * (8 + row)
    return (1 + backward) * compulsory, (1 + backward) * without_reuse


def copy_rate(device):
    """Give the bytes a second that a copy moves."""
    source = rx.zeros(2**28 if device == "cuda" else 2**23, dtype="float32", device=device)
    target = rx.zeros_like(source)

    def copy():
        target[...] = source

    return 2 * source.nbytes / statistics.median(measure(copy, 10, device, 1.0))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=int, default=22, help="the graph has 2**scale nodes")
    parser.add_argument("--edge-factor", type=int, default=16)
    parser.add_argument("--graph", choices=list(GRAPHS), default="rmat")
    parser.add_argument("--features", type=int, nargs="+", default=[128])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=95, help="no side begins after that")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cuda where there is one")
    parser.add_argument("--ops", nargs="+", choices=["sum", "mean", "max", *LAYERS])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--forward", action="store_true", help="without backward passes")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--json", help="also write the figures to this file, as they come")
    options = parser.parse_args()
    begun = time.perf_counter()
    device = options.device or ("cuda" if len(rx.devices()) > 1 else "cpu")
    versions = {"python": sys.version.split()[0], "numpy": np.__version__}
    for name in ("torch", "torch-geometric", "cupy-cuda13x", "cupy-cuda12x", "numba-cuda"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    rate = copy_rate(device)
    with rx.device(device):
        graph = GRAPHS[options.graph](options.scale, options.edge_factor, device)
        degrees = graph.in_degrees
        rows = {int(degrees.argmax())}
        rng = Generator(3)
        for row in rx.Tensor(rng.integers(0, graph.n_nodes, 64, device="cpu")).numpy():
            rows |= {int(row)} if int(degrees[int(row)]) else set()
    report = {
        "versions": versions, "device": device, "copy_bytes_per_s": rate, "cases": [],
        "graph": {"n_nodes": graph.n_nodes, "n_edges": graph.n_edges, "max": int(degrees.max())},
    }  # fmt: skip
    print(f"{device}: a copy moves {rate / 1e9:.0f} GB/s; {report['graph']}", flush=True)
    free(device)
    for n_features, (op, dtype, backward) in itertools.product(options.features, CASES):
        if (options.ops and op not in options.ops) or (backward and options.forward):
            continue
        if options.dtypes and dtype not in options.dtypes:
            continue
        title = f"{op} {dtype} {'forward+backward' if backward else 'forward'}, F={n_features}"
        with rx.device(device):
            shape = graph.n_nodes, n_features
            x = rx.astype(Generator(2).normal(shape, dtype="float32", device=device), dtype)
            grad = rx.ones(x.shape, dtype=x.dtype, device=device) if backward else None
        bounds = [n / rate for n in floors(graph, x, backward)]
        case = {"case": title, "floors_s": bounds, "sides": {}}
        report["cases"].append(case)
        print(f"{title}: floors {1e3 * bounds[0]:.2f} and {1e3 * bounds[1]:.2f} ms", flush=True)
        for side in options.sides:
            if time.perf_counter() - begun > options.seconds:
                found = {"skipped": f"{options.seconds} s are over"}
            else:
                found = one(side, op, graph, x, grad, device, options.rounds, sorted(rows))
            case["sides"][side] = found
            show(side, found, case, bounds)
            if options.json:
                with open(options.json, "w") as file:
                    json.dump(report, file, indent=1)
        del x, grad
        free(device)


def one(side, op, graph, x, grad, device, rounds, rows):
    """Measure one side; what goes wrong is noted, and the next one runs."""
    start = time.perf_counter()
    try:
        with rx.device(device):
            run = SIDES[side](op, graph, x, grad)
            found = {}
            if op not in LAYERS:
                found["error"] = error_of(run(), op, graph, x, rows)
            times = measure(run, rounds, device, 3.0)
            found["peak_bytes"] = peak_of(run, device)
        low, middle, high = statistics.quantiles(times, n=4)
        found |= {"median_s": middle, "quartiles_s": [low, high], "rounds": len(times)}
    except Missing as error:
        found = {"missing": str(error)}
    except Exception as error:  # noqa: BLE001  (whatever a side raises, the others still run)
        found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    run = None
    free(device)
    return found | {"whole_s": time.perf_counter() - start}


def show(side, found, case, bounds):
    if "median_s" not in found:
        print(f"  {side:13} {found.get('failed') or found.get('missing') or found['skipped']}")
        return
    low, high = found["quartiles_s"]
    middle = found["median_s"]
    text = f"  {side:13} {1e3 * middle:9.3f} ms ({1e3 * low:.3f} - {1e3 * high:.3f})"
    text += f"  x{middle / bounds[0]:.2f} and x{middle / bounds[1]:.2f} of the floors"
    own = case["sides"].get("rtxarr", {}).get("median_s")
    if own and side != "rtxarr":
        found["ratio"] = middle / own
        text += f"  {middle / own:.2f} times ours"
    text += f"  {found['peak_bytes'] / 2**20:.0f} MiB more"
    if "error" in found:
        text += f"  error {found['error']:.1e}"
    print(text, flush=True)


if __name__ == "__main__":
    main()
