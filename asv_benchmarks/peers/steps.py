"""Whole training steps, eager, as one CUDA graph, and fused too, against PyTorch's.

A small perceptron (batch 64, 256-256-256-10, Adam, float32), where the host decides, and a
transformer block (8 x 1024 x 1024, 16 heads, causal, AdamW, bfloat16), where the kernels do. All
take turns in one process, in blocks of steps with one synchronisation at the end of each block;
figures are medians over rounds, with quartiles. A chain of small operations shows what a captured
call costs the host, and each kernel in it the device. Needs a GPU.
"""

import argparse
import functools
import json
import platform
import statistics
import time

import numpy as np

import rtxarr as rx
from rtxarr import nn, optim

WIDTHS = (256, 256, 256, 10)


OURS = {
    "eager": lambda step: step,
    "captured": rx.capture,
    "fused": rx.jit,
    "fused fast": functools.partial(rx.jit, mode="fast"),
}


def our_perceptron(way):
    layers = [nn.Linear(a, b) for a, b in zip(WIDTHS[:-1], WIDTHS[1:], strict=True)]
    model = nn.Sequential(layers[0], rx.relu, layers[1], rx.relu, layers[2])
    optimizer = optim.Adam(model.parameters())
    rng = rx.random.Generator(0)
    x, labels = rng.normal((64, 256), dtype=rx.float32), rng.integers(0, 10, (64,))

    def step(x, labels):
        optimizer.zero_grad()
        loss = rx.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    run = OURS[way](step)
    return lambda: run(x, labels)


def our_block(way):
    block = nn.TransformerBlock(1024, 16, causal=True, dtype=rx.bfloat16)
    optimizer = optim.AdamW(block.parameters())
    values = rx.random.Generator(0).normal((8, 1024, 1024), dtype=rx.float32)
    x = rx.Tensor(values.astype(rx.bfloat16), requires_grad=True)

    def step():
        optimizer.zero_grad()
        x.grad = None
        loss = rx.mean(rx.astype(block(x), rx.float32) ** 2)
        loss.backward()
        optimizer.step()
        return loss

    return OURS[way](step)


def their_perceptron(way):
    import torch
    from torch import nn as tnn

    layers = [tnn.Linear(a, b) for a, b in zip(WIDTHS[:-1], WIDTHS[1:], strict=True)]
    model = tnn.Sequential(layers[0], tnn.ReLU(), layers[1], tnn.ReLU(), layers[2]).cuda()
    x = torch.randn(64, 256, device="cuda")
    labels = torch.randint(0, 10, (64,), device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), capturable=True, fused=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return _their_graph(step) if way == "graph" else step


def their_block(way):
    import torch
    from torch import nn as tnn
    from torch.nn import functional as F

    class Block(tnn.Module):
        def __init__(self, width=1024, n_heads=16):
            super().__init__()
            self.n_heads = n_heads
            self.norm1, self.norm2 = tnn.LayerNorm(width), tnn.LayerNorm(width)
            self.qkv, self.out = tnn.Linear(width, 3 * width), tnn.Linear(width, width)
            self.up, self.down = tnn.Linear(width, 4 * width), tnn.Linear(4 * width, width)

        def forward(self, x):
            b, t, d = x.shape
            parts = self.qkv(self.norm1(x)).view(b, t, 3, self.n_heads, d // self.n_heads)
            heads = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
            x = x + self.out(heads.transpose(1, 2).reshape(b, t, d))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    block = Block().cuda().bfloat16()
    optimizer = torch.optim.AdamW(block.parameters(), fused=True, capturable=True)
    x = torch.randn(8, 1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    run = torch.compile(block) if way == "compile" else block

    def step():
        optimizer.zero_grad(set_to_none=True)
        x.grad = None
        run(x).float().square().mean().backward()
        optimizer.step()

    return _their_graph(step) if way == "graph" else step


def _their_graph(step):
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return lambda held=step: graph.replay()  # the memory of what it reads


CASES = {
    "perceptron": (our_perceptron, their_perceptron, ("eager", "graph"), 50),
    "transformer block": (our_block, their_block, ("eager", "graph", "compile"), 10),
}


def contestants(ours, theirs, ways):
    found = {f"rtxarr {way}": ours(way) for way in OURS}
    left_out = {}
    for way in ways:
        try:
            found[f"torch {way}"] = theirs(way)
            found[f"torch {way}"]()
        except Exception as error:  # a peer of another version, or none
            found.pop(f"torch {way}", None)
            left_out[f"torch {way}"] = f"{type(error).__name__}: {error}"
    return found, left_out


def measure(functions, rounds, calls):
    """Give, for each function, the seconds a call took in each round."""
    times = {name: [] for name in functions}
    for _ in range(rounds + 2):
        for name, function in functions.items():
            rx.synchronize("cuda")
            start = time.perf_counter()
            for _ in range(calls):
                function()
            rx.synchronize("cuda")
            times[name].append((time.perf_counter() - start) / calls)
    return {name: values[2:] for name, values in times.items()}  # the first rounds warm up


def overheads():
    """Give the microseconds of host time of a captured call, and of each kernel in one."""

    def chain(n):
        def step(x):
            for _ in range(n):
                x = rx.tanh(x)
            return x

        run = rx.capture(step, copy=False)
        x = rx.zeros(1024, dtype=rx.float32)
        for _ in range(3):
            run(x)
        return lambda: run(x)

    short, long = chain(10), chain(510)
    times = measure({"short": short, "long": long}, 10, 100)
    each = [(b - a) / 500 * 1e6 for a, b in zip(times["short"], times["long"], strict=True)]
    host = []
    for _ in range(10):
        rx.synchronize("cuda")
        start = time.perf_counter()
        for _ in range(20):
            short()
        host.append((time.perf_counter() - start) / 20 * 1e6)
    rx.synchronize("cuda")
    return {"host us a call": host, "us a kernel": each}


def show(title, values, unit, scale, against=None):
    low, middle, high = (x * scale for x in statistics.quantiles(values, n=4))
    ratio = "" if against is None else f"{middle / scale / against:7.2f} x rtxarr captured"
    print(f"  {title:18} {middle:9.2f} {unit} ({low:.2f} - {high:.2f}) {ratio}")
    return {"median": middle, "quartiles": [low, high], "unit": unit}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=[*CASES, "overheads"])
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if len(rx.devices()) < 2:
        parser.exit(1, "needs a GPU\n")
    report = {"device": repr(rx.device("cuda:0")), "cases": {}, "left_out": {}}
    report["versions"] = {"python": platform.python_version(), "numpy": np.__version__}
    try:
        import torch
    except ImportError:
        pass
    else:
        report["versions"]["torch"] = torch.__version__
    print(report["device"], report["versions"])
    for title, (ours, theirs, ways, calls) in CASES.items():
        if options.only not in (None, title):
            continue
        functions, left_out = contestants(ours, theirs, ways)
        times = measure(functions, options.rounds, calls)
        base = statistics.median(times["rtxarr captured"])
        print(f"{title}, a step:")
        report["cases"][title] = {
            name: show(name, values, "us", 1e6, base) for name, values in times.items()
        }
        report["left_out"][title] = left_out
        for name, reason in left_out.items():
            print(f"  {name:18} left out: {reason}")
    if options.only in (None, "overheads"):
        print("captured calls:")
        report["cases"]["overheads"] = {
            name: show(name, values, "us", 1) for name, values in overheads().items()
        }
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
