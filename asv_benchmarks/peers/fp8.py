"""Linear layers in float32, bfloat16 by autocast and 8-bit floating point, forward and backward.

Captured steps, so the host does not count. Every side has float32 parameters, gets a bfloat16 input
and gives gradients of both; PyTorch's does the same under its autocast. Goal: 8-bit products at
1.7 times the speed of bfloat16; the layer also rounds its input, weight and gradient.
"""

import argparse
import json
import statistics
import time

import rtxarr as rx
from rtxarr import nn

SIZES = (4096, 8192)


def synchronize():
    rx.synchronize("cuda:0")


def sides(n):
    """Give each side's forward pass, and its forward and backward pass, of (n, n) @ (n, n)."""
    with rx.device("cuda:0"):
        generator = rx.random.Generator(0)
        x, g = (generator.normal((n, n), dtype="float32").astype(rx.bfloat16) for _ in range(2))
        layers = {
            "float32": (nn.Linear(n, n), None),
            "bfloat16": (nn.Linear(n, n), "bfloat16"),
            "fp8": (nn.Fp8Linear(n, n), "bfloat16"),
        }

    def captured(layer, dtype, backward):
        data = x if dtype else rx.astype(x, "float32")
        tensor = rx.Tensor(data, requires_grad=True)

        @rx.capture(copy=False)
        def step():
            tensor.grad = None
            layer.zero_grad()
            with rx.autocast(dtype):
                y = layer(tensor)
            if backward:
                y.backward(rx.astype(g, y.dtype, copy=False))
                return tensor.grad, layer.weight.grad
            return y

        return step

    found = {
        part: {name: captured(*side, backward) for name, side in layers.items()}
        for part, backward in (("forward", False), ("forward+backward", True))
    }
    try:
        import torch
    except ImportError:
        return found
    layer = torch.nn.Linear(n, n, device="cuda")
    tx = torch.randn(n, n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    tg = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)

    def forward():
        with torch.autocast("cuda", torch.bfloat16):
            return layer(tx)

    def both():
        tx.grad = layer.weight.grad = layer.bias.grad = None
        forward().backward(tg)

    found["forward"]["torch bfloat16"] = forward
    found["forward+backward"]["torch bfloat16"] = both
    return found


def measure(functions, rounds, calls=5):
    """Seconds a call takes on the device: the time of several, until all have ended."""
    times = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            synchronize()
            times[name].append((time.perf_counter() - start) / calls)
    return {name: values[1:] for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if len(rx.devices()) == 1:
        raise SystemExit("needs a GPU that CuPy can use")
    report = {"device": repr(rx.device("cuda")), "cases": []}
    print(report["device"])
    for n in SIZES:
        for part, functions in sides(n).items():
            n_products = 3 if "backward" in part else 1
            print(f"{n}^3, {part}")
            for name, values in measure(functions, options.rounds).items():
                low, middle, high = statistics.quantiles(values, n=4)
                rate = n_products * 2 * n**3 / middle / 1e12
                print(f"  {name:16} {middle * 1e3:8.3f} ms  {rate:7.0f} TFLOP/s")
                case = {"n": n, "part": part, "side": name, "seconds": middle}
                report["cases"].append(case | {"quartiles": [low, high]})
    rx.libs.show()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
