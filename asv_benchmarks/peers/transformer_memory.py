"""Peak memory of a transformer's training step, against PyTorch on the same device.

Six pre-norm blocks between an embedding and a projection to the vocabulary, causal, without and
with dropout; a step is forward, cross entropy, backward and AdamW. Each side runs in a process of
its own and is measured by its own allocator, from before the model is made: NumPy by tracemalloc,
CuPy by a memory hook, PyTorch by its profiler on the CPU and by `max_memory_allocated` on a GPU.
The peak is that of the third step, when the optimizer's state is there. On a GPU that step is
captured unless told otherwise: a replay, for which all that the graph's memory pools have reserved
counts. PyTorch's is eager.
"""

import argparse
import json
import subprocess
import sys

SIZES = {
    "cpu": {"d_model": 256, "n_heads": 8, "seq_len": 128, "batch": 8, "vocabulary": 1000},
    "cuda": {"d_model": 1024, "n_heads": 16, "seq_len": 1024, "batch": 8, "vocabulary": 32000},
}
N_LAYERS = 6
N_STEPS = 3
RATES = (0.0, 0.1)


def tokens(sizes):
    import numpy as np

    shape = (sizes["batch"], sizes["seq_len"] + 1)
    drawn = np.random.default_rng(0).integers(0, sizes["vocabulary"], shape)
    return drawn[:, :-1].copy(), drawn[:, 1:].copy()


# ------------------------------------------------------------------------------------- rtxarr


def rtxarr_peak(device, sizes, options):
    import rtxarr as rx
    from rtxarr import nn, optim

    class Model(nn.Module):
        def __init__(self):
            d = sizes["d_model"]
            self.embedding = nn.Embedding(sizes["vocabulary"], d)
            self.blocks = [
                nn.TransformerBlock(d, sizes["n_heads"], causal=True, dropout=options.dropout)
                for _ in range(N_LAYERS)
            ]
            self.norm = nn.LayerNorm(d)
            self.out = nn.Linear(d, sizes["vocabulary"])

        def forward(self, x):
            x = self.embedding(x)
            for block in self.blocks:
                x = block(x)
            return self.out(self.norm(x))

    def train(reset, private=lambda: 0):
        with rx.device(device):
            model = Model()
            optimizer = optim.AdamW(model.parameters(), lr=1e-4)
            x, y = (rx.asarray(a, device=device) for a in tokens(sizes))

            def step(x, y):
                optimizer.zero_grad()
                with rx.autocast(None if options.precision == "float32" else options.precision):
                    loss = nn.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                return loss

            run = rx.capture(step) if options.captured else step
            for i in range(N_STEPS):
                if i == N_STEPS - 1:
                    reset()
                loss = run(x, y)
            if options.captured and device != "cpu":
                assert run.n_captures == 1
            return loss.item(), private()

    if device == "cpu":
        import tracemalloc

        train(lambda: None)  # imports and compiles, which tracemalloc would count too
        tracemalloc.start()
        loss, _ = train(tracemalloc.reset_peak)
        return tracemalloc.get_traced_memory()[1], loss

    import weakref

    import cupy

    class Peak(cupy.cuda.MemoryHook):
        used = peak = 0

        def malloc_postprocess(self, **kwargs):
            self.used += kwargs["mem_size"]
            self.peak = max(self.peak, self.used)

        def free_postprocess(self, **kwargs):
            self.used -= kwargs["mem_size"]

        def reset(self):
            self.peak = self.used

    pools = weakref.WeakSet()

    class Pool(cupy.cuda.MemoryPool):
        def __init__(self):
            super().__init__()
            pools.add(self)

    def unused():
        """Give the bytes that pools of graphs keep though no array lies there now."""
        return sum(pool.free_bytes() for pool in pools)

    cupy.cuda.MemoryPool = Pool
    hook = Peak()
    with hook:
        loss, kept = train(hook.reset, unused)
    return hook.peak + kept, loss


# -------------------------------------------------------------------------------------- torch


def torch_peak(device, sizes, options):
    import torch
    from torch import nn

    class Block(nn.Module):
        """What `rtxarr.nn.TransformerBlock` computes."""

        def __init__(self, d, n_heads):
            super().__init__()
            self.n_heads = n_heads
            self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.query, self.key, self.value = (nn.Linear(d, d) for _ in range(3))
            self.out = nn.Linear(d, d)
            self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
            self.dropout = nn.Dropout(options.dropout)

        def attend(self, x):
            batch, seq_len, d = x.shape
            q, k, v = (
                layer(x).view(batch, seq_len, self.n_heads, -1).transpose(1, 2)
                for layer in (self.query, self.key, self.value)
            )
            y = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=options.dropout
            )
            return self.out(y.transpose(1, 2).reshape(batch, seq_len, d))

        def forward(self, x):
            x = x + self.dropout(self.attend(self.norm1(x)))
            return x + self.dropout(self.mlp(self.norm2(x)))

    def train(reset):
        d = sizes["d_model"]
        model = nn.Sequential(
            nn.Embedding(sizes["vocabulary"], d),
            *(Block(d, sizes["n_heads"]) for _ in range(N_LAYERS)),
            nn.LayerNorm(d),
            nn.Linear(d, sizes["vocabulary"]),
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        x, y = (torch.as_tensor(a, device=device) for a in tokens(sizes))
        is_low = options.precision != "float32"
        for step in range(N_STEPS):
            if step == N_STEPS - 1:
                reset()
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=is_low):
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
        return loss.item()

    if device != "cpu":
        loss = train(lambda: torch.cuda.reset_peak_memory_stats())
        return torch.cuda.max_memory_allocated(), loss

    from torch.profiler import ProfilerActivity, profile, record_function

    def mark():
        with record_function("last step"):
            pass

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = train(mark)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    start = next(e.start_ns() for e in events if e.name() == "last step")
    used = peak = 0
    for event in events:
        if event.name() == "[memory]":
            used += event.nbytes()
            if event.start_ns() >= start:
                peak = max(peak, used)
    return peak, loss


# ------------------------------------------------------------------------------------- report


def run(side, device, dropout, options):
    """Measure one side in a fresh process; None when it is not installed."""
    command = [sys.executable, __file__, "--side", side, "--device", device]
    command += ["--dropout", str(dropout), "--precision", options.precision]
    command += [f"--{'' if options.captured else 'no-'}captured"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{side}:", done.stderr.splitlines()[-1] if done.stderr else "failed")
        return None
    return json.loads(done.stdout.splitlines()[-1])


def versions():
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for name in ("rtxarr", "numpy", "torch", "cupy-cuda13x", "cupy-cuda12x"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="cpu or cuda; all there are by default")
    parser.add_argument("--dropout", type=float, help="a rate; 0 and 0.1 by default")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--captured", action=argparse.BooleanOptionalAction, default=True,
        help="on a GPU: the replay of a captured step, beside PyTorch's eager one",
    )  # fmt: skip
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--side", choices=["rtxarr", "torch"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        measure = rtxarr_peak if options.side == "rtxarr" else torch_peak
        peak, loss = measure(options.device, SIZES[options.device], options)
        print(json.dumps({"peak_bytes": peak, "loss": loss}))
        return

    import rtxarr as rx

    devices = ["cpu", *(["cuda"] if len(rx.devices()) > 1 else [])]
    report = {"versions": versions(), "n_layers": N_LAYERS, "sizes": SIZES, "cases": []}
    print(f"peak MiB of a training step in {options.precision}; goal: at most 1.05 times torch's")
    print(f"{'device':8} {'step':>8} {'dropout':>8} {'rtxarr':>10} {'torch':>10} {'ratio':>7}")
    for device in [options.device] if options.device else devices:
        step = "captured" if options.captured and device != "cpu" else "eager"
        for dropout in RATES if options.dropout is None else [options.dropout]:
            sides = {side: run(side, device, dropout, options) for side in ("rtxarr", "torch")}
            case = {
                "device": device, "step": step, "precision": options.precision, "dropout": dropout,
                **sides, "ratio": None,
            }  # fmt: skip
            mib = [f"{s['peak_bytes'] / 2**20:.1f}" if s else "-" for s in sides.values()]
            if all(sides.values()):
                case["ratio"] = sides["rtxarr"]["peak_bytes"] / sides["torch"]["peak_bytes"]
            report["cases"].append(case)
            ratio = f"{case['ratio']:.3f}" if case["ratio"] else "-"
            print(f"{device:8} {step:>8} {dropout:8} {mib[0]:>10} {mib[1]:>10} {ratio:>7}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
