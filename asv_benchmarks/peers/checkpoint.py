"""Activation checkpointing of a 12-layer transformer: memory, time, and equal gradients.

Forward and backward of pre-norm blocks with dropout between an embedding and a projection to the
vocabulary, without and with a checkpoint around each block, in turn. The activations are the most
that a step holds on top of the parameters, its gradients included, by a hook of CuPy's memory pool
or by tracemalloc. Goals: at most 0.35 times those without checkpoints in at most 1.35 times the
time, and gradients equal to the bit.
"""

import argparse
import json
import statistics
import time
import tracemalloc

SIZES = {
    "cpu": {"d_model": 64, "n_heads": 4, "seq_len": 64, "batch": 16, "vocabulary": 64},
    "cuda": {"d_model": 512, "n_heads": 8, "seq_len": 1024, "batch": 16, "vocabulary": 512},
}
N_LAYERS = 12
GOALS = {"memory": 0.35, "time": 1.35}


def make_model(sizes, rate):
    import rtxarr as rx
    from rtxarr import nn

    class Model(nn.Module):
        def __init__(self):
            d = sizes["d_model"]
            self.embedding = nn.Embedding(sizes["vocabulary"], d)
            self.blocks = [
                nn.TransformerBlock(d, sizes["n_heads"], causal=True, dropout=rate)
                for _ in range(N_LAYERS)
            ]
            self.norm = nn.LayerNorm(d)
            self.out = nn.Linear(d, sizes["vocabulary"])

        def forward(self, x, checkpointed):
            x = self.embedding(x)
            for block in self.blocks:
                x = rx.checkpoint(block, x) if checkpointed else block(x)
            return self.out(self.norm(x))

    return Model()


def most_held(function, device):
    """Call ``function`` and give the most bytes that it held at a time."""
    import rtxarr as rx

    if device != "cpu":
        with rx.memory.peak() as peak:
            function()
        return peak.bytes - peak.before
    tracemalloc.start()
    function()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def run(device, rate, precision, rounds):
    import numpy as np

    import rtxarr as rx

    sizes = SIZES[device]
    drawn = np.random.default_rng(0).integers(
        0, sizes["vocabulary"], (sizes["batch"], sizes["seq_len"] + 1)
    )

    with rx.device(device):
        rx.random.seed(0)
        model = make_model(sizes, rate)
        x, y = (rx.asarray(part.copy(), device=device) for part in (drawn[:, :-1], drawn[:, 1:]))

        def step(checkpointed):
            rx.random.seed(1)  # the same dropout for both
            model.zero_grad()
            with rx.autocast(None if precision == "float32" else precision):
                loss = rx.cross_entropy(model(x, checkpointed), y)
            loss.backward()

        def timed(checkpointed):
            rx.synchronize()
            start = time.perf_counter()
            step(checkpointed)
            rx.synchronize()
            return time.perf_counter() - start

        figures, grads = {}, {}
        for checkpointed in (False, True):
            step(checkpointed)  # compiles, and makes the pool's blocks
            model.zero_grad()
            held = most_held(lambda c=checkpointed: step(c), device)
            grads[checkpointed] = [rx.Tensor(p.grad).numpy() for p in model.parameters()]
            figures[checkpointed] = {"activations_bytes": held, "ms": []}
        for _ in range(rounds):
            for checkpointed in (False, True):
                figures[checkpointed]["ms"].append(1000 * timed(checkpointed))
    equal = all(a.tobytes() == b.tobytes() for a, b in zip(grads[False], grads[True], strict=True))
    plain, less = figures[False], figures[True]
    return {
        "device": str(rx.device(device)),
        "dropout": rate,
        "precision": precision,
        "plain": plain,
        "checkpointed": less,
        "memory_ratio": less["activations_bytes"] / plain["activations_bytes"],
        "time_ratio": statistics.median(less["ms"]) / statistics.median(plain["ms"]),
        "equal_to_the_bit": equal,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--precision", default="float32", help="float32, bfloat16 or float16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()

    import rtxarr as rx

    device = options.device or ("cuda" if len(rx.devices()) > 1 else "cpu")
    report = run(device, options.dropout, options.precision, options.rounds)
    report |= {"rtxarr": rx.__version__, "n_layers": N_LAYERS, "sizes": SIZES[device]}
    print(f"{report['device']}, {N_LAYERS} layers, dropout {options.dropout}, {options.precision}")
    for name in ("plain", "checkpointed"):
        low, middle, high = statistics.quantiles(report[name]["ms"], n=4)
        mib = report[name]["activations_bytes"] / 2**20
        print(f"{name:14} {mib:10.1f} MiB  {middle:8.2f} ms   ({low:.2f} - {high:.2f})")
    for name, goal in GOALS.items():
        print(f"{name} ratio {report[f'{name}_ratio']:.3f}, goal at most {goal}")
    print("gradients equal to the bit:", report["equal_to_the_bit"])
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
