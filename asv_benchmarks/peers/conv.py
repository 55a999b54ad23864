"""3 x 3 convolutions with channels last, forward and both gradients, against PyTorch on one GPU.

All sides take turns in one process, called directly and replayed as CUDA graphs; PyTorch with
``torch.backends.cudnn.benchmark``. Figures are medians over rounds, with quartiles.
"""

import argparse
import json

from attention import captured, summary, times, torch_captured

import rtxarr as rx
from rtxarr.libs import dnn
from rtxarr.ops._windows import make_windows

CASES = [(8, 320, 64), (8, 640, 32), (8, 1280, 16)]  # batch, channels in and out, height = width


def rtxarr_sides(case, dtype):
    import cupy

    n, c, size = case
    rng = cupy.random.default_rng(0)
    x, weight, y = (
        rng.standard_normal(shape, dtype="float32").astype(getattr(rx, dtype)).transpose(0, 3, 1, 2)
        for shape in ((n, size, size, c), (c, 3, 3, c), (n, size, size, c))
    )
    options = {"windows": make_windows((3, 3), (size, size), 1, 1, 1), "groups": 1}
    return {
        "forward": lambda: rx.conv2d(x, weight, padding=1),
        "of the input": lambda: dnn.try_convolution_input(
            y, weight, spatial=(size,) * 2, **options
        ),
        "of the weight": lambda: dnn.try_convolution_weight(x, y, channels_last=True, **options),
    }


def torch_sides(case, dtype):
    import torch

    torch.backends.cudnn.benchmark = True
    n, c, size = case
    make = {"dtype": getattr(torch, dtype), "device": "cuda"}
    x, weight, y = (
        torch.randn(shape, **make).to(memory_format=torch.channels_last)
        for shape in ((n, c, size, size), (c, c, 3, 3), (n, c, size, size))
    )
    conv = torch.nn.functional.conv2d
    gradient = torch.ops.aten.convolution_backward
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return {
        "forward": lambda: conv(x, weight, padding=1),
        "of the input": lambda: gradient(y, x, weight, *rest, [True, False, False])[0],
        "of the weight": lambda: gradient(y, x, weight, *rest, [False, True, False])[1],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if len(rx.devices()) == 1:
        raise SystemExit("needs a GPU that CuPy can use")
    report = {"device": repr(rx.device("cuda")), "dtype": options.dtype, "cases": []}
    rx.libs.show()
    try:
        import torch
    except ImportError:
        torch = None
        print("torch is not installed")
    for case in CASES:
        n, c, size = case
        flops = 2 * n * size * size * c * c * 9
        theirs = torch_sides(case, options.dtype) if torch else {}
        for what, function in rtxarr_sides(case, options.dtype).items():
            for way, record in (("called", None), ("replayed", captured)):
                functions = {"rtxarr": record(function) if record else function}
                if torch:
                    functions["torch"] = torch_captured(theirs[what]) if record else theirs[what]
                figures = times(functions, options.rounds, 50)
                figures = {name: summary(values) for name, values in figures.items()}
                report["cases"].append({"case": case, "what": what, "way": way, "ms": figures})
                base = figures.get("torch", {}).get("median")
                for name, figure in figures.items():
                    ms = figure["median"]
                    low, high = figure["quartiles"]
                    ratio = "" if base is None else f"  speed {base / ms:5.2f} of torch"
                    print(
                        f"{case!s:14} {what:14} {way:9} {name:7} {ms:7.4f} ms "
                        f"({low:.4f} - {high:.4f}) {flops / ms / 1e9:5.0f} TFLOP/s{ratio}"
                    )
    rx.libs.show()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
