"""Host time of recording and running back a chain of small operations, against PyTorch.

50 x (multiply, tanh) on 8 float64 elements on the CPU. All sides take turns in one process;
each figure is the median over rounds of the time an operation takes, with the quartiles.
"""

import argparse
import json
import platform
import statistics
import time

import numpy as np

import rtxarr as rx

N_PAIRS = 50


def sides():
    values = np.random.default_rng(0).standard_normal(8)
    x = rx.Tensor(values, requires_grad=True)
    ones = np.ones(8)

    def numpy_chain():
        y = values
        for _ in range(N_PAIRS):
            y = np.tanh(y * values)

    def forward():
        y = x
        for _ in range(N_PAIRS):
            y = rx.tanh(y * values)
        return y

    def no_grad():
        with rx.no_grad():
            forward()

    found = {
        "numpy": numpy_chain,
        "rtxarr no_grad": no_grad,
        "rtxarr forward": forward,
        "rtxarr forward+backward": lambda: forward().backward(ones),
    }
    try:
        import torch
    except ImportError:
        return found, {}
    torch.set_num_threads(1)
    a, w = torch.tensor(values, requires_grad=True), torch.tensor(values)
    g = torch.ones(8, dtype=torch.float64)

    def torch_forward():
        y = a
        for _ in range(N_PAIRS):
            y = torch.tanh(y * w)
        return y

    found["torch forward"] = torch_forward
    found["torch forward+backward"] = lambda: torch_forward().backward(g)
    return found, {"torch": torch.__version__}


def measure(functions, rounds, calls=20):
    """Give, for each function, the microseconds an operation took in each round."""
    times = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                function()
            times[name].append((time.perf_counter() - start) / calls / (2 * N_PAIRS) * 1e6)
    return {name: values[1:] for name, values in times.items()}  # the first round warms up


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    functions, peers = sides()
    times = measure(functions, options.rounds)
    versions = {"numpy": np.__version__, "python": platform.python_version(), **peers}
    print(f"{N_PAIRS} x (multiply, tanh), 8 elements, us an operation; {versions}")
    figures = {}
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        figures[name] = {"median": middle, "quartiles": [low, high]}
        print(f"{name:26} {middle:6.2f}   ({low:.2f} - {high:.2f})")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"versions": versions, "us_per_operation": figures}, file, indent=1)


if __name__ == "__main__":
    main()
