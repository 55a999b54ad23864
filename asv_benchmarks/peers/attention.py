"""Causal and full attention, forward and with its gradients, against PyTorch on one GPU.

All sides take turns in one process, called directly and replayed as CUDA graphs; figures are
medians over rounds, with quartiles. rtxarr's gradients give the same bits each time, unless they
are added up in any order, as PyTorch's default ones are; "fixed order" is PyTorch with
deterministic algorithms. A rate counts the products that are needed: half of them when causal, and
2.5 times as many backward as forward. With ``--dropout`` rtxarr's own kernel computes it, with
``--blocks`` beside the blocks of scores that replace it.
"""

import argparse
import functools
import json
import statistics
import time

import rtxarr as rx
from rtxarr.libs import _tile_attention, dnn

CASES = [  # batch, heads, sequence, head dimension, causal
    (16, 16, 4096, 128, False),
    (16, 16, 4096, 128, True),
    (8, 16, 1024, 64, True),
]


def rtxarr_sides(case, dtype, rate, blocks):
    import cupy

    b, h, s, d, causal = case
    rng = cupy.random.default_rng(0)
    q, k, v, g = (
        rng.standard_normal((b, s, h, d), dtype="float32").astype(getattr(rx, dtype))
        for _ in range(4)
    )
    q, k, v, g = (x.transpose(0, 2, 1, 3) for x in (q, k, v, g))
    tensors = [rx.Tensor(x, requires_grad=True) for x in (q, k, v)]

    def attention(q, k, v):
        return rx.scaled_dot_product_attention(q, k, v, causal=causal, dropout_rate=rate)

    def forward():
        return attention(q, k, v)

    def both():
        for tensor in tensors:
            tensor.grad = None
        attention(*tensors).backward(g)

    def in_any_order():
        dnn.deterministic(False)
        both()
        dnn.deterministic(True)

    def in_blocks(function):
        def call():
            missing = _tile_attention._missing
            _tile_attention._missing = lambda: "left out"
            try:
                function()
            finally:
                _tile_attention._missing = missing

        return call

    sides = {
        "forward": {"rtxarr": forward},
        "forward+backward": {"rtxarr": both},
    }
    if not rate:  # cuDNN's
        sides["forward+backward"]["any order"] = in_any_order
    elif blocks:
        for functions in sides.values():
            functions["in blocks"] = in_blocks(functions["rtxarr"])
    return sides


def torch_sides(case, dtype, rate):
    import torch

    b, h, s, d, causal = case
    make = {"dtype": getattr(torch, dtype), "device": "cuda"}
    q, k, v, g = (torch.randn((b, s, h, d), **make).transpose(1, 2) for _ in range(4))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    attention = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, is_causal=causal, dropout_p=rate
    )

    def forward():
        with torch.no_grad():
            return attention(q, k, v)

    def both():
        for leaf in leaves:
            leaf.grad = None
        attention(*leaves).backward(g)

    def in_fixed_order():
        torch.use_deterministic_algorithms(True)
        try:
            both()
        finally:
            torch.use_deterministic_algorithms(False)

    return {
        "forward": {"torch": forward},
        "forward+backward": {"torch": both, "torch, fixed order": in_fixed_order},
    }


def captured(function):
    """Record a function as a CUDA graph, with CuPy's memory in a pool of its own."""
    import cupy

    pool, stream = cupy.cuda.MemoryPool(), cupy.cuda.Stream(non_blocking=True)
    with stream, cupy.cuda.using_allocator(pool.malloc):
        function()
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        function()
        graph = stream.end_capture()
    return lambda held=(pool, function): graph.launch(stream)  # the memory of what it reads


def torch_captured(function):
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return lambda held=function: graph.replay()  # the memory of what it reads


def synchronize():
    import cupy

    cupy.cuda.Device().synchronize()


def times(functions, rounds, calls):
    """Milliseconds a call takes, the queue being full."""
    found = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            function()
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            synchronize()
            found[name].append((time.perf_counter() - start) / calls * 1e3)
    return {name: values[1:] for name, values in found.items()}


def summary(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartiles": [low, high]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--dropout", type=float, default=0.0, help="the rate of dropped weights")
    parser.add_argument("--blocks", action="store_true", help="also without a kernel of our own")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if len(rx.devices()) == 1:
        raise SystemExit("needs a GPU that CuPy can use")
    report = {"device": repr(rx.device("cuda")), "dtype": options.dtype, "cases": []}
    report["dropout"] = rate = options.dropout
    rx.libs.show()
    try:
        import torch
    except ImportError:
        torch = None
        print("torch is not installed")
    for case in CASES:
        b, h, s, d, causal = case
        ours = rtxarr_sides(case, options.dtype, rate, options.blocks)
        theirs = torch_sides(case, options.dtype, rate) if torch else {}
        for what, functions_of in ours.items():
            flops = 4 * b * h * s * s * d * (0.5 if causal else 1)
            flops *= 3.5 if "backward" in what else 1
            for way, record in (("called", None), ("replayed", captured)):
                functions = {
                    name: record(function) if record else function
                    for name, function in functions_of.items()
                    if name != "in blocks" or not record
                }
                for name, function in theirs.get(what, {}).items():
                    functions[name] = torch_captured(function) if record else function
                calls = 5 if flops > 1e12 else 50
                figures = times(functions, options.rounds, calls)
                figures = {name: summary(values) for name, values in figures.items()}
                report["cases"].append({"case": case, "what": what, "way": way, "ms": figures})
                base = figures.get("torch", {}).get("median")
                for name, figure in figures.items():
                    ms = figure["median"]
                    low, high = figure["quartiles"]
                    ratio = "" if base is None else f"  speed {base / ms:5.2f} of torch"
                    print(
                        f"{case!s:30} {what:17} {way:9} {name:18} {ms:8.3f} ms "
                        f"({low:.3f} - {high:.3f}) {flops / ms / 1e9:6.0f} TFLOP/s{ratio}"
                    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
