"""Layers that a library computes in one, forward and backward, against PyTorch on one GPU.

Perceptrons with the tanh form of GELU and with a gate (SwiGLU), in bfloat16, and a convolution with
bias, residual and ReLU, channels last. "apart" is rtxarr with each operation by itself. All sides
take turns in one process; figures are medians of milliseconds between events, with quartiles.
``--parts`` times the products and the passes of which the layers consist instead.
"""

import argparse
import json
import statistics

import rtxarr as rx
from rtxarr.kernels import activation as kernels
from rtxarr.libs import blas, dnn
from rtxarr.ops._conv import _sum_over_places
from rtxarr.ops._windows import make_windows

ROWS, WIDTH, INNER, GATED = 8192, 4096, 16384, 14336
IMAGE = (8, 320, 64, 64)


def gelu(x):
    return rx.gelu(x, approximate="tanh")


def draw(shape, scale=1.0):
    import cupy

    rng = cupy.random.default_rng(0)
    return (rng.standard_normal(shape, dtype="float32") * scale).astype(rx.bfloat16)


def both(forward, arrays, g):
    """Give a function that runs forward and backward, and one that runs forward only."""
    leaves = [rx.Tensor(a, requires_grad=True) for a in arrays]

    def step():
        for leaf in leaves:
            leaf.grad = None
        forward(*leaves).backward(g)

    def infer():
        with rx.no_grad():
            return forward(*leaves)

    return {"forward+backward": step, "forward": infer}


def torch_both(forward, arrays, g):
    import torch

    def given(a):
        return torch.from_dlpack(a.view("uint16")).view(torch.bfloat16)

    leaves, g = [given(a).clone().requires_grad_() for a in arrays], given(g)

    def step():
        for leaf in leaves:
            leaf.grad = None
        forward(*leaves).backward(g)

    def infer():
        with torch.no_grad():
            return forward(*leaves)

    return {"forward+backward": step, "forward": infer}


def perceptron(with_torch):
    up, down = draw((INNER, WIDTH), 0.02), draw((WIDTH, INNER), 0.02)
    x, b, c = draw((ROWS, WIDTH)), draw((INNER,)), draw((WIDTH,))

    def together(x, up, b, down, c):
        return rx.linear(rx.linear(x, up, b, activation="gelu_tanh"), down, c)

    def apart(x, up, b, down, c):
        return rx.linear(gelu(rx.linear(x, up, b)), down, c)

    given = (x, up, b, down, c), draw((ROWS, WIDTH))
    sides = {"rtxarr": both(together, *given), "apart": both(apart, *given)}
    if with_torch:
        from torch.nn import functional as F

        def theirs(x, up, b, down, c):
            return F.linear(F.gelu(F.linear(x, up, b), approximate="tanh"), down, c)

        sides["torch"] = torch_both(theirs, *given)
    return sides


def gated(with_torch):
    gate, up = draw((GATED, WIDTH), 0.02), draw((GATED, WIDTH), 0.02)
    x, down = draw((ROWS, WIDTH)), draw((WIDTH, GATED), 0.02)

    def together(x, gate, up, down):
        return rx.linear(rx.gated_linear(x, gate, up), down)

    def apart(x, gate, up, down):
        return rx.linear(rx.silu(rx.linear(x, gate)) * rx.linear(x, up), down)

    def halves(x, weight, down):
        return rx.linear(rx.swiglu(rx.linear(x, weight)), down)

    def halves_apart(x, weight, down):
        inner = rx.linear(x, weight)
        return rx.linear(inner[:, :GATED] * rx.silu(inner[:, GATED:]), down)

    given = (x, gate, up, down), draw((ROWS, WIDTH))
    sides = {"rtxarr": both(together, *given), "apart": both(apart, *given)}
    given_both = (x, draw((2 * GATED, WIDTH), 0.02), down), given[1]
    sides["swiglu"] = both(halves, *given_both)
    sides["swiglu apart"] = both(halves_apart, *given_both)
    if with_torch:
        from torch.nn import functional as F

        def theirs(x, gate, up, down):
            return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

        sides["torch"] = torch_both(theirs, *given)
    return sides


def convolution(with_torch):
    n, c, *size = IMAGE
    x, residual, g = (draw((n, *size, c)).transpose(0, 3, 1, 2) for _ in range(3))
    weight, b = draw((c, 3, 3, c), 0.02).transpose(0, 3, 1, 2), draw((c,))

    def together(x, weight, b, residual):
        return rx.conv2d(x, weight, b, padding=1, residual=residual, activation="relu")

    def apart(x, weight, b, residual):
        return rx.relu(rx.conv2d(x, weight, b, padding=1) + residual)

    given = (x, weight, b, residual), g
    sides = {"rtxarr": both(together, *given), "apart": both(apart, *given)}
    if with_torch:
        import torch
        from torch.nn import functional as F

        torch.backends.cudnn.benchmark = True

        def theirs(x, weight, b, residual):
            return F.relu(F.conv2d(x, weight, b, padding=1) + residual)

        sides["torch"] = torch_both(theirs, *given)
    return sides


def parts():
    """Give what an epilogue does beside the product and the passes that it stands for."""
    import cupy

    x, w, ones = draw((ROWS, WIDTH)), draw((INNER, WIDTH), 0.02), cupy.ones(ROWS, rx.bfloat16)
    b, g, down = draw((INNER,)), draw((ROWS, WIDTH)), draw((WIDTH, INNER), 0.02)
    _, aux = blas.matmul_with_aux(x, w.T, epilogue="gelu", bias=b)
    of_inner = blas.matmul(g, down)

    def sums(x):
        return blas.matmul(ones, x, dtype="float32")

    def kernels_dgelu():
        out = kernels.activation_gradient("gelu_tanh", aux, blas.matmul(g, down))
        return out, sums(out)

    before = blas.matmul(x, w.T, bias=b)
    n, c, *size = IMAGE
    image, of_image = draw((n, *size, c)).transpose(0, 3, 1, 2), draw((n, *size, c))
    of_image = of_image.transpose(0, 3, 1, 2)
    kernel = draw((c, 3, 3, c), 0.02).transpose(0, 3, 1, 2)
    windows = {"windows": make_windows((3, 3), size, 1, 1, 1), "groups": 1}
    return {
        "gradients of a convolution": {
            "ReLU": lambda: kernels.activation_gradient("relu", image, of_image),
            "of the bias": lambda: _sum_over_places(of_image),
            "of the bias, by sum": lambda: rx.sum(of_image, axis=(0, 2, 3)),
            "of the input": lambda: dnn.try_convolution_input(
                of_image, kernel, spatial=tuple(size), **windows
            ),
            "of the weight": lambda: dnn.try_convolution_weight(
                image, of_image, channels_last=True, **windows
            ),
        },
        "GELU alone": {
            "rtxarr": lambda: gelu(before),
            "pass": lambda: kernels.activation("gelu_tanh", before),
        },
        "GELU, its argument kept": {
            "epilogue": lambda: blas.matmul_with_aux(x, w.T, epilogue="gelu", bias=b),
            "apart": lambda: kernels.activation("gelu_tanh", blas.matmul(x, w.T, bias=b)),
        },
        "GELU": {
            "epilogue": lambda: blas.matmul(x, w.T, bias=b, epilogue="gelu"),
            "product": lambda: blas.matmul(x, w.T, bias=b),
        },
        "ReLU": {
            "epilogue": lambda: blas.matmul(x, w.T, bias=b, epilogue="relu"),
            "apart": lambda: kernels.activation("relu", blas.matmul(x, w.T, bias=b)),
        },
        "dGELU and bias": {
            "epilogue": lambda: blas.matmul_dgelu(g, down, aux, bias_grad=True),
            "dGELU alone, sums": lambda: sums(blas.matmul_dgelu(g, down, aux)),
            "apart": kernels_dgelu,
        },
        "bias of a weight's": {
            "epilogue": lambda: blas.matmul_bias_grad(of_inner.T, x),
            "apart": lambda: (blas.matmul(of_inner.T, x), sums(of_inner)),
        },
    }


def times(functions, rounds, calls=2):
    """Milliseconds a call takes on the device, for each round."""
    import cupy

    found = {name: [] for name in functions}
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    for _ in range(rounds + 1):
        for name, function in functions.items():
            start.record()
            for _ in range(calls):
                function()
            end.record()
            end.synchronize()
            found[name].append(cupy.cuda.get_elapsed_time(start, end) / calls)
    return {name: values[1:] for name, values in found.items()}


def copy_bandwidth(n_bytes=1 << 30):
    import cupy

    source, target = (cupy.zeros(n_bytes, "uint8") for _ in range(2))
    ms = statistics.median(times({"copy": lambda: cupy.copyto(target, source)}, 5, 5)["copy"])
    return 2 * n_bytes / ms / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if len(rx.devices()) == 1:
        raise SystemExit("needs a GPU that CuPy can use")
    try:
        import torch
    except ImportError:
        torch = None
        print("torch is not installed")
    report = {"device": repr(rx.device("cuda")), "copy GB/s": copy_bandwidth(), "cases": []}
    print(report["device"], f"copy {report['copy GB/s']:.0f} GB/s")

    def add(what, functions, calls=2):
        case = {"case": what, "unit": "ms"}
        for name, values in times(functions, options.rounds, calls).items():
            low, middle, high = statistics.quantiles(values, n=4)
            case[name] = {"median": middle, "quartiles": [low, high]}
            print(f"{what:36} {name:18} {middle:8.4f} ms ({low:.4f} to {high:.4f})")
        report["cases"].append(case)

    if options.parts:
        for what, functions in parts().items():
            add(what, functions)
    else:
        for make in (perceptron, gated, convolution):
            sides = make(torch is not None)
            for which in ("forward+backward", "forward"):
                functions = {name: found[which] for name, found in sides.items()}
                add(f"{make.__name__}, {which}", functions, 20 if make is convolution else 2)
            del sides
    rx.libs.show()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
