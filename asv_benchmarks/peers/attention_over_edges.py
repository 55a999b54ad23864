"""Attention over the edges of an R-MAT graph: layers of GAT, GATv2 and the graph transformer.

Against PyG, and DGL where it is installed, with the parameters of ours. Figures are medians over
rounds, with their quartiles, beside two floors for the bytes of the layer: when no row is read
twice from memory ("compulsory"), and when every edge reads the rows that it needs ("no reuse"),
both with the products that make the rows. For forward and backward passes the floors count twice.
``error`` is that of some rows, the longest among them, against float64, and ``peak`` what was held
at once beyond the graph, ``x`` and the parameters: of training it should be no more than 1.3 times
``x``, the result and the graph's indices, which is printed beside it.

What to expect on an H200 at scale 22, 128 features and 4 heads, counted in bytes an edge of
float16 at 4.15 TB/s and no reuse: GAT reads 4 + 256 + 32 forward (4.8 ms), backward 4 + 32 and a
quarter to a half of 256 by destinations, and 4 + 256 + 64 by sources (7.0 to 8.0 ms); GATv2 4 + 256
(4.3 ms), then 4 + 256 and 4 + 512 + 32 (13.2 ms). A quarter to a half of the rows are in the cache,
and the products add 0.5 to 1.5 ms.
"""

import argparse
import gc
import json
import statistics
import sys
import time

import numpy as np
from aggregate import copy_rate, free, measure, rmat, to_torch, torch_run

import rtxarr as rx
from rtxarr import geom
from rtxarr.random import Generator

# The layer, the type, and whether backward too.
CASES = [
    ("gat", "float16", False),
    ("gat", "float16", True),
    ("gatv2", "float16", False),
    ("gatv2", "float16", True),
    ("dot", "float16", False),
    ("dot", "float16", True),
    ("gat", "float32", True),
    ("gatv2", "float32", True),
    ("dot", "float32", True),
]
# Rows that an edge reads, and products of all nodes' features with a matrix.
READS = {"gat": (1, 1), "gatv2": (1, 1), "dot": (2, 3)}


class Missing(Exception):
    """A side does not have a layer, or is not installed."""


# ------------------------------------------------------------------------------------- the sides
# Each takes (kind, layer, graph, x, gradient or None), the layer being ours, and gives a function
# that gives the result.


def made(kind, width, n_heads, dtype, device):
    """Give a layer of ours."""
    options = {"heads": n_heads, "dtype": dtype, "device": device, "generator": Generator(4)}
    n = width // n_heads
    if kind == "dot":
        return geom.TransformerConv(width, n, root_weight=False, **options)
    options |= {"add_self_loops": False, "bias": False}
    if kind == "gat":
        return geom.GATConv(width, n, **options)
    return geom.GATv2Conv(width, n, share_weights=True, **options)


def ours(kind, layer, graph, x, grad):
    data = x if grad is None else rx.Tensor(x, requires_grad=True)

    def run():
        if grad is None:
            with rx.no_grad():
                return layer(graph, data).data
        for tensor in (data, *layer.parameters()):
            tensor.grad = None
        out = layer(graph, data)
        out.backward(grad)
        return out.data

    return run


def pyg(kind, layer, graph, x, grad):
    try:
        import torch_geometric.nn as peers
    except ImportError as error:
        raise Missing(str(error)) from None
    import torch

    width, n = layer.in_channels, layer.out_channels
    if kind == "dot":
        theirs = peers.TransformerConv(width, n, layer.heads, root_weight=False)
    else:
        found = peers.GATConv if kind == "gat" else peers.GATv2Conv
        options = {} if kind == "gat" else {"share_weights": True}
        theirs = found(width, n, layer.heads, add_self_loops=False, bias=False, **options)
    x, grad = to_torch(x), None if grad is None else to_torch(grad)
    theirs = theirs.to(x.device, x.dtype)
    load(theirs, layer, {})
    edges = torch.stack([to_torch(graph.src), to_torch(graph.dst)])
    return torch_run(lambda x: theirs(x, edges), x, grad)


def dgl(kind, layer, graph, x, grad):
    try:
        import dgl as library
        from dgl.nn import pytorch as peers
    except ImportError as error:
        raise Missing(str(error)) from None
    if kind == "dot":
        raise Missing("its DotGatConv takes the values for the keys")
    width, n = layer.in_channels, layer.out_channels
    found = peers.GATConv if kind == "gat" else peers.GATv2Conv
    options = {} if kind == "gat" else {"share_weights": True}
    theirs = found(width, n, layer.heads, bias=False, allow_zero_in_degree=True, **options)
    x, grad = to_torch(x), None if grad is None else to_torch(grad)
    theirs = theirs.to(x.device, x.dtype)
    names = {"lin": "fc", "att_src": "attn_l", "att_dst": "attn_r"}
    load(theirs, layer, names if kind == "gat" else {"lin_l": "fc_src", "att": "attn"})
    edges = library.graph((to_torch(graph.src), to_torch(graph.dst)), num_nodes=graph.n_nodes)
    return torch_run(lambda x: theirs(edges, x).flatten(1), x, grad)


def load(theirs, layer, names):
    """Copy our parameters, under other names where they have them."""
    own = theirs.state_dict()
    for name, value in layer.state_dict().items():
        first, _, rest = name.partition(".")
        target = ".".join(filter(None, (names.get(first, first), rest)))
        if target in own:  # a matrix that is shared is there under two names
            own[target].copy_(to_torch(value))


SIDES = {"rtxarr": ours, "PyG": pyg, "DGL": dgl}


# ----------------------------------------------------------------------------------- measurement


def expected(kind, layer, graph, x, row):
    """Give a row of the result in float64."""
    start, stop = int(graph.indptr[row]), int(graph.indptr[row + 1])

    def host(x):
        return np.asarray(rx.astype(rx.Tensor(x), "float64").numpy())

    def product(part, rows):
        out = rows @ host(part.weight.data).T
        out = out if part.bias is None else out + host(part.bias.data)
        return out.reshape(len(rows), layer.heads, layer.out_channels)

    theirs, own = host(x[graph.indices[start:stop]]), host(x[row : row + 1])
    if kind == "dot":
        values = product(layer.lin_value, theirs)
        logits = (product(layer.lin_key, theirs) * product(layer.lin_query, own)).sum(-1)
        logits /= np.sqrt(layer.out_channels)
    elif kind == "gat":
        values = product(layer.lin, theirs)
        logits = (values * host(layer.att_src.data)).sum(-1)
        logits = leaky(logits + (product(layer.lin, own) * host(layer.att_dst.data)).sum(-1))
    else:
        values = product(layer.lin_l, theirs)
        logits = (leaky(values + product(layer.lin_l, own)) * host(layer.att.data)).sum(-1)
    weight = np.exp(logits - logits.max(0))
    return ((weight / weight.sum(0))[..., None] * values).sum(0).reshape(-1)


def leaky(x):
    return np.where(x > 0, x, 0.2 * x)


def error_of(out, kind, layer, graph, x, rows):
    """Give the largest error of some rows, as a share of the largest element of each."""
    worst = 0.0
    for row in rows:
        want, got = expected(kind, layer, graph, x, row), out[row]
        got = got.double().cpu().numpy() if hasattr(got, "cpu") else rx.Tensor(got).numpy()
        worst = max(worst, float(np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()))
    return worst


def floors(kind, graph, x, backward):
    """Give the bytes with each row read once, and with those that it needs read by each edge."""
    n_reads, n_products = READS[kind]
    n, row = graph.n_edges, x.shape[1] * x.dtype.itemsize
    products = graph.n_nodes * (n_products + 1) * row
    compulsory = products + 4 * n + graph.n_dst * (8 + (1 + n_products) * row)
    without_reuse = products + n * (4 + n_reads * row) + graph.n_dst * (8 + n_products * row)
    return (1 + backward) * compulsory, (1 + backward) * without_reuse


def peak_of(side, run, device):
    """Give the bytes that a call holds at once beyond what there was."""
    if device == "cpu":
        return None
    if side == "rtxarr":
        with rx.memory.peak() as peak:
            out = run()
        del out
        return peak.bytes - peak.before
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = run()
    del out
    return torch.cuda.max_memory_allocated() - before


def one(side, kind, layer, graph, x, grad, device, rounds, rows):
    """Measure one side; what goes wrong is noted, and the next one runs."""
    start = time.perf_counter()
    try:
        with rx.device(device):
            run = SIDES[side](kind, layer, graph, x, grad)
            found = {"error": error_of(run(), kind, layer, graph, x, rows)}
            found["peak_bytes"] = peak_of(side, run, device)
            times = measure(run, rounds, device, 3.0)
        low, middle, high = statistics.quantiles(times, n=4)
        found |= {"median_s": middle, "quartiles_s": [low, high], "rounds": len(times)}
    except Missing as error:
        found = {"missing": str(error)}
    except Exception as error:  # noqa: BLE001  (whatever a side raises, the others still run)
        found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    run = None
    free(device)
    return found | {"whole_s": time.perf_counter() - start}


def show(side, found, case):
    if "median_s" not in found:
        print(f"  {side:7} {found.get('failed') or found.get('missing') or found['skipped']}")
        return
    (low, high), middle, bounds = found["quartiles_s"], found["median_s"], case["floors_s"]
    text = f"  {side:7} {1e3 * middle:9.3f} ms ({1e3 * low:.3f} - {1e3 * high:.3f})"
    text += f"  x{middle / bounds[0]:.2f} and x{middle / bounds[1]:.2f} of the floors"
    own = case["sides"].get("rtxarr", {}).get("median_s")
    if own and side != "rtxarr":
        found["ratio"] = middle / own
        text += f"  {middle / own:.2f} times ours"
    if found["peak_bytes"] is not None:
        text += f"  peak {found['peak_bytes'] / 2**20:,.0f} MiB"
    print(f"{text}  error {found['error']:.1e}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=int, default=22, help="the graph has 2**scale nodes")
    parser.add_argument("--edge-factor", type=int, default=16)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=95, help="no side begins after that")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cuda where there is one")
    parser.add_argument("--kinds", nargs="+", choices=list(READS), default=list(READS))
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--json", help="also write the figures to this file, as they come")
    options = parser.parse_args()
    begun = time.perf_counter()
    device = options.device or ("cuda" if len(rx.devices()) > 1 else "cpu")
    rate = copy_rate(device)
    with rx.device(device):
        graph = rmat(options.scale, options.edge_factor, device)
        degrees = graph.in_degrees
        drawn = rx.Tensor(Generator(3).integers(0, graph.n_nodes, 64, device="cpu")).numpy()
        rows = sorted({int(degrees.argmax()), *(int(i) for i in drawn if int(degrees[int(i)]))})
    report = {
        "device": device, "copy_bytes_per_s": rate, "python": sys.version.split()[0], "cases": [],
        "graph": {"n_nodes": graph.n_nodes, "n_edges": graph.n_edges, "max": int(degrees.max())},
    }  # fmt: skip
    print(f"{device}: a copy moves {rate / 1e9:.0f} GB/s; {report['graph']}", flush=True)
    for kind, dtype, backward in CASES:
        if kind not in options.kinds:
            continue
        with rx.device(device):
            shape = graph.n_nodes, options.features
            x = rx.astype(Generator(2).normal(shape, dtype="float32", device=device), dtype)
            grad = rx.ones(x.shape, dtype=x.dtype, device=device) if backward else None
            layer = made(kind, options.features, options.heads, dtype, device)
        bounds = [n / rate for n in floors(kind, graph, x, backward)]
        graph_bytes = graph.indptr.nbytes + graph.indices.nbytes
        title = f"{kind} {dtype} {'forward+backward' if backward else 'forward'}"
        case = {
            "case": title, "floors_s": bounds, "bytes": 2 * x.nbytes + graph_bytes, "sides": {},
        }  # fmt: skip
        report["cases"].append(case)
        text = f"{title}: floors {1e3 * bounds[0]:.2f} and {1e3 * bounds[1]:.2f} ms"
        print(f"{text}; x, result and graph {case['bytes'] / 2**20:,.0f} MiB", flush=True)
        for side in options.sides:
            if time.perf_counter() - begun > options.seconds:
                found = {"skipped": f"{options.seconds} s are over"}
            else:
                found = one(side, kind, layer, graph, x, grad, device, options.rounds, rows)
            case["sides"][side] = found
            show(side, found, case)
            if options.json:
                with open(options.json, "w") as file:
                    json.dump(report, file, indent=1)
        del x, grad, layer
        gc.collect()
        free(device)


if __name__ == "__main__":
    main()
