"""Programs of several domains: as they are, captured, and fused, against PyTorch's.

A layer of a network of signals on a graph (FFT, attention over edges, a gate), a block of a Fourier
neural operator, and the training step of a block of a diffusion transformer; they are under
``docs/examples``. All take turns in one process; figures are medians over rounds, with quartiles.
Results of the fused programs are compared with those of the functions first. With ``--device cpu``
nothing is captured, and sizes are smaller.
"""

import argparse
import importlib.util
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np

import rtxarr as rx
from rtxarr import geom

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SIZES = {  # by device: nodes, edges, times; fields, side, channels, modes; images, tokens, width
    "cuda": {"graph": (50_000, 1_000_000, 64), "operator": (16, 256, 64, 24)},
    "cpu": {"graph": (2_000, 20_000, 64), "operator": (4, 64, 32, 12)},
}
BLOCKS = {"cuda": (32, 256, 1152, 16, "bfloat16"), "cpu": (2, 64, 128, 4, "float32")}


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def moved(tree, device):
    return {name: rx.asarray(array, device=device) for name, array in tree.items()}


# ------------------------------------------------------------------------------- ours, and theirs


def our_graph(device):
    n_nodes, n_edges, n_times = SIZES[device]["graph"]
    module, rng = example("spectral_graph"), np.random.default_rng(0)
    edges = rng.integers(0, n_nodes, (2, n_edges))
    edges = edges[:, np.argsort(edges[1], kind="stable")]
    graph = geom.Graph.from_edges(*edges, n_nodes=n_nodes).to_device(device)
    parts = moved(module.parameters(n_times), device)
    x = rx.asarray(rng.standard_normal((n_nodes, n_times), dtype=np.float32), device=device)
    return lambda parts, x: module.layer(parts, graph, x), (parts, x), (edges, parts, x)


def their_graph(given, torch):
    edges, parts, x = given
    src, dst = (torch.from_numpy(e).to(x.device) for e in edges)
    n_heads = parts["source"].shape[0]

    def layer(parts, x):
        n_nodes, n_times = x.shape
        waves = torch.fft.rfft(torch.tanh(x), dim=1)
        filtered = torch.fft.irfft(waves * parts["filter"], n=n_times, dim=1)
        heads = filtered.view(n_nodes, n_heads, -1)
        source = (heads * parts["source"]).sum(2)
        target = (heads * parts["target"]).sum(2)
        logits = torch.nn.functional.leaky_relu(source[src] + target[dst], 0.2)
        index = dst[:, None].expand_as(logits)
        top = torch.zeros_like(target).scatter_reduce(0, index, logits, "amax", include_self=False)
        share = (logits - top[dst]).exp()
        share = share / torch.zeros_like(target).index_add(0, dst, share)[dst]
        heard = torch.zeros_like(heads).index_add(0, dst, share[:, :, None] * heads[src])
        both = torch.cat([heard.view(x.shape), x], 1)
        gate = torch.sigmoid(both @ parts["gate"])
        return (1 - gate) * x + gate * torch.tanh(both @ parts["candidate"])

    return layer, (parts, x)


def our_operator(device):
    n_fields, side, n_channels, n_modes = SIZES[device]["operator"]
    module, rng = example("fourier_operator"), np.random.default_rng(0)
    parts = moved(module.parameters(n_channels, n_modes), device)
    x = rng.standard_normal((n_fields, side, side, n_channels), dtype=np.float32)
    x = rx.asarray(x, device=device)
    return module.block, (parts, x), (parts, x)


def their_operator(given, torch):
    parts, x = given

    def block(parts, x):
        size, m = x.shape[1:3], parts["modes"].shape[1]
        waves = torch.fft.rfftn(x, dim=(1, 2), norm="ortho")
        low = torch.cat([waves[:, :m, :m], waves[:, -m:, :m]], 1)
        mixed = torch.einsum("byxi,yxio->byxo", low, parts["modes"])
        waves = torch.zeros_like(waves)
        waves[:, :m, :m], waves[:, -m:, :m] = mixed[:, :m], mixed[:, m:]
        smooth = torch.fft.irfftn(waves, s=size, dim=(1, 2), norm="ortho")
        return torch.nn.functional.gelu(smooth + x @ parts["weight"] + parts["bias"])

    return block, (parts, x)


def our_block(device):
    n_images, n_tokens, width, n_heads, dtype = BLOCKS[device]
    module, rng = example("diffusion_block"), np.random.default_rng(0)
    dtype = rx.dtypes.DTYPES[dtype]
    rx.random.seed(0)
    with rx.device(device):
        step = module.training_step(module.Block(width, n_heads, dtype=dtype))
    shapes = (n_images, n_tokens, width), (n_images, width), (n_images, n_tokens, width)
    arrays = [rng.standard_normal(s, dtype=np.float32).astype(dtype) for s in shapes]
    arrays = tuple(rx.asarray(a, device=device) for a in arrays)
    return step, arrays, arrays


def their_block(given, torch):
    x, condition, target = (a.clone() for a in given)
    n_heads = BLOCKS["cuda" if x.is_cuda else "cpu"][3]
    functional = torch.nn.functional

    class Block(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.condition = torch.nn.Linear(width, 6 * width)
            self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
            self.up, self.down = (
                torch.nn.Linear(width, 4 * width),
                torch.nn.Linear(4 * width, width),
            )

        def forward(self, x, condition):
            b, n, w = x.shape
            parts = self.condition(functional.silu(condition)).view(b, 6, 1, w)
            shift_a, scale_a, gate_a, shift_b, scale_b, gate_b = parts.unbind(1)
            h = functional.layer_norm(x, (w,)) * (1 + scale_a) + shift_a
            q, k, v = self.qkv(h).view(b, n, 3, n_heads, -1).permute(2, 0, 3, 1, 4)
            heard = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
            x = x + gate_a * self.out(heard.reshape(b, n, w))
            h = functional.layer_norm(x, (w,)) * (1 + scale_b) + shift_b
            return x + gate_b * self.down(functional.gelu(self.up(h), approximate="tanh"))

    block = Block(x.shape[-1]).to(x.device, x.dtype)
    fused = {"fused": True} if x.is_cuda else {}
    optimizer = torch.optim.AdamW(block.parameters(), 1e-4, **fused)

    def loss(x, condition, target):
        return (block(x, condition) - target).float().square().mean()

    def step(run):
        optimizer.zero_grad(set_to_none=True)
        run(x, condition, target).backward()
        optimizer.step()

    return loss, step


CASES = {
    "signals on a graph": (our_graph, their_graph),
    "Fourier operator": (our_operator, their_operator),
    "diffusion block, training": (our_block, their_block),
}


# ------------------------------------------------------------------------------------ measuring


def ways(title, device):
    """Give the functions of no arguments that take turns, and what was left out."""
    ours, theirs = CASES[title]
    f, arguments, given = ours(device)
    trains = theirs is their_block
    fused = rx.jit(ours(device)[0] if trains else f)
    want, got = f(*arguments), fused(*arguments)
    difference = float(abs(_array(want) - _array(got)).max())
    if fused.reasons:
        raise SystemExit(f"{title} was not fused: {fused.reasons}")
    found = {"rtxarr": lambda: f(*arguments), "rtxarr fused": lambda: fused(*arguments)}
    if device == "cuda":
        captured = rx.capture(ours(device)[0] if trains else f)
        found["rtxarr captured"] = lambda: captured(*arguments)
    left_out = {}
    try:
        import torch
    except ImportError:
        return found, {"torch": "not installed"}, difference
    g, rest = theirs(_to_torch(given, torch), torch)

    def run(h):
        return (lambda: rest(h)) if trains else (lambda: h(*rest))

    found["torch"] = run(g)
    try:
        found["torch.compile"] = run(torch.compile(g))
        found["torch.compile"]()
    except Exception as error:  # no compiler for it
        del found["torch.compile"]
        left_out["torch.compile"] = f"{type(error).__name__}: {str(error)[:100]}"
    return found, left_out, difference


def _array(x):
    x = x.data if isinstance(x, rx.Tensor) else x
    return np.asarray(rx.to_device(x, "cpu"))


def _to_torch(tree, torch):
    if isinstance(tree, dict):
        return {name: _to_torch(x, torch) for name, x in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_to_torch(x, torch) for x in tree)
    if isinstance(tree, np.ndarray) and tree.dtype.kind == "i":
        return tree  # the edges, which are sorted on the host
    if str(tree.dtype) == "bfloat16":
        return _to_torch(tree.astype("float32"), torch).to(torch.bfloat16)
    return torch.from_dlpack(tree).clone()


def measure(functions, rounds, calls, wait):
    """Give, for each function, the seconds a call took in each round."""
    times = {name: [] for name in functions}
    for _ in range(rounds + 2):
        for name, function in functions.items():
            wait()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            wait()
            times[name].append((time.perf_counter() - start) / calls)
    return {name: values[2:] for name, values in times.items()}  # the first rounds warm up


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if options.device == "cuda" and len(rx.devices()) < 2:
        parser.exit(1, "needs a GPU, or --device cpu\n")
    on_gpu = options.device == "cuda"
    name = repr(rx.device("cuda:0")) if on_gpu else platform.processor() or platform.machine()
    report = {"device": name, "numpy": np.__version__, "cases": {}}
    print(name, "sizes", SIZES[options.device], BLOCKS[options.device])

    def wait():
        if on_gpu:
            rx.synchronize("cuda")

    for title in CASES:
        if options.only not in (None, title):
            continue
        functions, left_out, difference = ways(title, options.device)
        times = measure(functions, options.rounds, options.calls, wait)
        base = statistics.median(times["rtxarr fused"])
        print(f"{title}, a call; fused and not differ by {difference:.1e}:")
        for way, values in times.items():
            low, middle, high = (x * 1e3 for x in statistics.quantiles(values, n=4))
            ratio = middle / 1e3 / base
            print(f"  {way:16} {middle:9.3f} ms ({low:.3f} - {high:.3f}) {ratio:6.2f} x fused")
        for way, reason in left_out.items():
            print(f"  {way:16} left out: {reason}")
        report["cases"][title] = {"seconds": times, "difference": difference, "left_out": left_out}
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
