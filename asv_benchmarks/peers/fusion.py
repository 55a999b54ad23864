"""Fused functions against CuPy eager, cupy.fuse, PyTorch (eager and compiled) and jax.jit.

Chain, softmax, LayerNorm, GroupNorm + SiLU and Adam are bound by the bytes that they move, so each
is shown beside the bandwidth of a copy. All contestants take turns in one process; figures are
medians over rounds. Further parts: the host time of a warm call on 4,096 elements, 200 shapes of
one pattern (how many compilations, and how far from a kernel with the sizes written into it), and
the time to compile each kernel. ``--dry`` only builds and compiles the kernels: it needs no GPU.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import rtxarr as rx
from rtxarr.polygraph import _cache, _cuda_backend
from rtxarr.polygraph._cuda_backend import CudaBackend
from rtxarr.polygraph.codegen import _maps, _nvrtc, _rows, _segments, _writer
from rtxarr.polygraph.codegen._launch import number_bytes

# ---------------------------------------------------------------------- the functions, once for all


def chain(xp, x):
    return xp.tanh(x * 1.5 + 0.5) * (1 / (1 + xp.exp(-x))) + x / 2


def softmax(xp, x):
    e = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return e / xp.sum(e, axis=-1, keepdims=True)


def layer_norm(xp, x, weight, bias):
    apart = x - xp.mean(x, axis=-1, keepdims=True)
    return apart / xp.sqrt(xp.mean(apart * apart, axis=-1, keepdims=True) + 1e-5) * weight + bias


def group_norm_silu(xp, x, weight, bias):
    n, c, h, w = x.shape
    groups = xp.reshape(x, (n, 32, -1))
    apart = groups - xp.mean(groups, axis=-1, keepdims=True)
    scale = xp.sqrt(xp.mean(apart * apart, axis=-1, keepdims=True) + 1e-5)
    y = xp.reshape(apart / scale, x.shape) * weight[:, None, None] + bias[:, None, None]
    return y / (1 + xp.exp(-y))


def adam(xp, p, g, m, v):
    m = m * 0.9 + g * 0.1
    v = v * 0.999 + g * g * 0.001
    return p - 1e-3 * (m / 0.1) / (xp.sqrt(v / 0.001) + 1e-8), m, v


# name: (function, shapes of its arguments, arrays of the first one's size read and written)
CASES = {
    "chain": (chain, [(4096, 8192)], 2),
    "softmax": (softmax, [(4096, 8192)], 2),
    "LayerNorm": (layer_norm, [(4096, 8192), (8192,), (8192,)], 2),
    "GroupNorm+SiLU": (group_norm_silu, [(16, 320, 64, 64), (320,), (320,)], 2),
    "Adam": (adam, [(33_554_432,)] * 4, 7),
}


# ----------------------------------------------------------------------------------- contestants


def ours(function, mode, backend=None):
    @functools.wraps(function)
    def plain(*arrays):
        return function(arrays[0].__array_namespace__(), *arrays)

    return rx.fuse(plain, mode=mode, backend=backend)


def contestants(function, arrays):
    """Give calls of the same function by each library, on arrays of its own."""
    import cupy

    found = {
        "rtxarr strict": functools.partial(ours(function, "strict"), *arrays),
        "rtxarr fast": functools.partial(ours(function, "fast"), *arrays),
        "cupy": functools.partial(function, cupy, *arrays),
    }
    if function in (chain, adam):  # its reductions have no keepdims

        @cupy.fuse
        def fused(*arrays):
            return function(cupy, *arrays)

        found["cupy.fuse"] = functools.partial(fused, *arrays)
    try:
        import torch
    except ImportError:
        print("torch is not installed")
    else:
        tensors = [torch.from_dlpack(x) for x in arrays]
        xp = _Torch(torch)
        found["torch"] = functools.partial(function, xp, *tensors)
        compiled = torch.compile(functools.partial(function, xp))
        found["torch.compile"] = functools.partial(compiled, *tensors)
    try:
        import jax
    except ImportError:
        print("jax is not installed")
    else:
        compiled = jax.jit(functools.partial(function, jax.numpy))
        found["jax.jit"] = functools.partial(compiled, *map(jax.dlpack.from_dlpack, arrays))
    return found


class _Torch:
    """PyTorch's functions with the names and arguments that the cases use."""

    def __init__(self, torch):
        self.exp, self.tanh, self.sqrt, self.reshape = (
            torch.exp, torch.tanh, torch.sqrt, torch.reshape,
        )  # fmt: skip
        self.max = lambda x, axis, keepdims: torch.amax(x, axis, keepdim=keepdims)
        self.sum = lambda x, axis, keepdims: torch.sum(x, axis, keepdim=keepdims)
        self.mean = lambda x, axis, keepdims: torch.mean(x, axis, keepdim=keepdims)


# ------------------------------------------------------------------------------------- measuring


def measure(functions, rounds, calls):
    """Give, for each function, the seconds of a call in each round: whole, and on the host."""
    whole = {name: [] for name in functions}
    host = {name: [] for name in functions}
    for _ in range(rounds + 3):
        for name, function in functions.items():
            rx.synchronize("cuda")
            start = time.perf_counter()
            for _ in range(calls):
                function()
            host[name].append((time.perf_counter() - start) / calls)
            rx.synchronize("cuda")
            whole[name].append((time.perf_counter() - start) / calls)
    return ({name: values[3:] for name, values in kind.items()} for kind in (whole, host))


def on_gpu(functions, rounds, calls):
    """Give, for each function, the GPU's seconds of a call in each round, however slow the host."""
    import cupy

    before = cupy.zeros(2**27, "float32")  # copied while the host starts what is timed
    found = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            before.copy()
            start.record()
            for _ in range(calls):
                function()
            end.record()
            end.synchronize()
            found[name].append(cupy.cuda.get_elapsed_time(start, end) / calls / 1e3)
    return {name: values[1:] for name, values in found.items()}


def random_arrays(shapes):
    rng = rx.random.Generator(0)
    with rx.device("cuda"):
        arrays = [rng.normal(shape, dtype="float32") for shape in shapes]
    return [abs(x) if i == 3 else x for i, x in enumerate(arrays)]  # Adam's second moment


def cases(options):
    copy_of = random_arrays([(2**28,)])[0]
    target = rx.empty_like(copy_of)

    def copy():
        target[...] = copy_of

    found = {}
    for name, (function, shapes, n_passes) in CASES.items():
        arrays = random_arrays(shapes)
        functions = contestants(function, arrays) | {"copy of 1 GiB": copy}
        whole, _ = measure(functions, options.rounds, 20)
        medians = {k: statistics.median(v) for k, v in whole.items()}
        rate = 2 * copy_of.nbytes / medians.pop("copy of 1 GiB")
        n_bytes = n_passes * arrays[0].nbytes
        print(f"{name}: a copy moves {rate / 1e12:.2f} TB/s")
        for who, seconds in medians.items():
            print(
                f"  {who:14} {seconds * 1e3:8.4f} ms  {n_bytes / seconds / rate:5.2f} of the copy"
                f"  {medians['rtxarr fast'] / seconds:6.2f} of rtxarr fast's speed"
            )
        found[name] = {"seconds": medians, "copy_bytes_per_s": rate, "bytes": n_bytes}
    return found


def host_time(options):
    """Host microseconds of a warm call of the chain on 4,096 elements."""
    functions = contestants(chain, random_arrays([(4096,)]))
    _, host = measure(functions, options.rounds, 200)
    found = {name: statistics.median(values) for name, values in host.items()}
    for name, seconds in found.items():
        print(f"  {name:14} {seconds * 1e6:7.2f} us on the host")
    return found


# ---------------------------------------------------------------------------------- many shapes


def steps_of(fused):
    return [s for programs in fused._programs.values() for s in programs[0].program.steps]


def specialised(backend, loops):
    """Return a kernel's text with the sizes written into it instead of passed."""
    kernel = backend.generate(loops)
    text = kernel.text
    for launch, body in zip(kernel.launches, kernel.bodies, strict=True):
        lines = []
        for a in launch.arguments:
            if a.kind == "number" and a.name != "padded":  # a test that compilers shall not know
                lines.append(f"  const Index {a.name} = {a.value};")
            elif a.kind == "divisor":
                words = np.frombuffer(number_bytes(a, wide=kernel.wide), "u4")
                lines.append(f"  const Divisor {a.name} = {{{', '.join(map(str, words))}}};")
            elif a.kind == "packed":
                lines.append(f"  const int packed = {int(kernel.packed)};")
            else:
                continue
            body_now = re.sub(
                rf"\b{a.type} {a.name}([,)])", rf"{a.type} {a.name}_\1", body, count=1
            )
            text, body = text.replace(body, body_now), body_now
        text = text.replace(body, body.replace(") {\n", ") {\n" + "\n".join(lines) + "\n", 1))
    return text


def shapes(n):
    rng = np.random.default_rng(0)
    return [(int(rng.integers(512, 8192)), int(rng.integers(256, 8192))) for _ in range(n)]


def many_shapes(options):
    """Softmax of 200 shapes: compilations, and the time beside kernels made for each shape.

    Times are the GPU's: small kernels take less than it takes to start them.
    """
    os.environ["RTXARR_CACHE_DIR"] = ""
    backend = CudaBackend("fast")
    before = _cache.cache_info().compiled
    fused = ours(softmax, "fast", backend)
    steps = []
    with ThreadPoolExecutor() as pool:
        for shape in shapes(options.shapes):
            fused.clear()
            fused(*random_arrays([shape]))
            steps += steps_of(fused)
        total = _cache.cache_info().compiled - before
        loops = [step.loops for step in steps]
        texts = [specialised(backend, each) for each in loops]
        own = list(pool.map(backend.build_text, loops, texts))
    ratios = {}
    for shape, step, kernel in zip(shapes(options.shapes), steps, own, strict=True):
        (x,) = random_arrays([shape])
        out = rx.empty_like(x)
        functions = {"generic": lambda: step.run(x, out), "own": lambda: kernel(x, out)}  # noqa: B023
        medians = {k: statistics.median(v) for k, v in on_gpu(functions, 5, 20).items()}
        ratios[shape] = medians["generic"] / medians["own"]
    print(f"{len(ratios)} shapes: {total} compilations")
    print(
        f"  against kernels of each shape: median {statistics.median(ratios.values()):.3f}, "
        f"largest {max(ratios.values()):.3f}, above 1.05:",
        *(f"{n} x {m} ({r:.3f})" for (n, m), r in ratios.items() if r > 1.05),
    )
    return {"compilations": total, "ratios": list(ratios.values())}


# ------------------------------------------------------------------------ choices of the generator


@contextlib.contextmanager
def chosen(batch, factor):
    """Let threads take ``batch`` packets at once, and ``factor`` times as many share a row."""
    modules = (_maps, _rows, _segments, _writer)
    before, shape_of = _rows.BATCH, _rows.Rows.shape

    def shape(self):
        found = shape_of(self)
        threads = min(max(int(found.threads * factor), 1), 1024)
        return found._replace(threads=threads, rows=max(256 // threads, 1))

    for module in modules:
        module.BATCH = batch
    _rows.Rows.shape = shape
    try:
        yield
    finally:
        for module in modules:
            module.BATCH = before
        _rows.Rows.shape = shape_of


def sweep(options):
    """Time each case with other choices than the generator's: what may be set better."""
    found = {}
    for name, (function, shapes_of_case, n_passes) in CASES.items():
        arrays = random_arrays(shapes_of_case)
        functions = {}
        for batch in (1, 2, 4):
            for factor in (0.5, 1, 2):
                with chosen(batch, factor):
                    call = functools.partial(ours(function, "fast", CudaBackend("fast")), *arrays)
                    call()
                functions[f"{batch} packets, {factor} x threads"] = call
        whole, _ = measure(functions, options.rounds, 20)
        medians = {k: statistics.median(v) for k, v in whole.items()}
        print(name)
        for what, seconds in sorted(medians.items(), key=lambda item: item[1]):
            rate = n_passes * arrays[0].nbytes / seconds
            print(f"  {what:26} {seconds * 1e3:8.4f} ms  {rate / 1e12:.2f} TB/s")
        found[name] = medians
    return found


# ------------------------------------------------------------------------------ compiling, dry


class NoGpu:
    """Stands in for a GPU where kernels are only built."""

    def __init__(self, cc=(9, 0)):
        self.cc = cc
        self.current_stream = self.start = self.scratch = None
        self.empty = np.empty

    def new(self, shape, dtype):
        return None

    def current_device(self):
        return 0

    def capability(self, device_id):
        return self.cc

    def shared_limit(self, device_id):
        return 227 << 10


class Dry(CudaBackend):
    """Builds and compiles kernels, which then do nothing; says what the compiler says."""

    def __init__(self, mode, cc):
        super().__init__(mode, NoGpu(cc))
        self.said = []

    def build(self, loops):
        kernel = self.generate(loops)
        start = time.perf_counter()
        code, log = _nvrtc.compile_text(
            kernel.text, self.gpu.cc, strict=self.strict, more=("--ptxas-options=-v",)
        )
        seconds = time.perf_counter() - start
        self.said.append(
            {
                "kind": loops.kind,
                "rows": loops.rows,
                "cols": loops.cols,
                "seconds": seconds,
                "bytes": len(code),
                "registers": [int(n) for n in re.findall(r"Used (\d+) registers", log)],
                "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", log))),
                "launches": [(x.grid, x.block, x.shared) for x in kernel.launches],
            }
        )
        own = specialised(self, loops)
        _nvrtc.compile_text(own, self.gpu.cc, strict=self.strict)
        return lambda *arrays: None


def compile_all(ccs):
    """Compile the kernels of all cases; returns what was made of them."""
    found = {}
    for cc in ccs:
        for mode in ("strict", "fast"):
            for name, (function, shapes, _) in CASES.items():
                backend = Dry(mode, cc)
                arrays = [np.empty(shape, "float32") for shape in shapes]
                ours(function, mode, backend)(*arrays)
                found[f"{name}, {mode}, sm_{cc[0]}{cc[1]}"] = backend.said
                for k in backend.said:
                    print(f"{name:15} {mode:6} sm_{cc[0]}{cc[1]}", *k.values())
    seconds = [k["seconds"] for said in found.values() for k in said]
    print(f"cold compilation: median {statistics.median(seconds):.2f} s a kernel")
    return found


def explain_all(path):
    """Write the explanations of all cases, and of the calls they are for, to a file."""
    with open(path, "w") as file:
        for name, (function, shapes, _) in CASES.items():
            for mode in ("strict", "fast"):
                fused = ours(function, mode)
                arrays = random_arrays(shapes)
                fused(*arrays)
                profile = fused.profile(*arrays)
                file.write(f"{name}, {mode}\n\n{fused.explain()}\n\n{profile}\n\n\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--dry", action="store_true", help="only build and compile the kernels")
    parser.add_argument("--sweep", action="store_true", help="only try the generator's choices")
    parser.add_argument("--explain", help="write what each fused function does to this file")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if options.explain:
        explain_all(options.explain)
        return
    if options.dry:
        report = {"compiled": compile_all([(8, 0), (9, 0), (10, 0)])}
        for batch, factor in ((1, 2), (4, 0.5)):
            with chosen(batch, factor):
                compile_all([(9, 0)])
    elif options.sweep:
        report = {"sweep": sweep(options)}
    else:
        device = _cuda_backend.Gpu()
        report = {"compiled": compile_all([device.capability(device.current_device())])}
        report["cases"] = cases(options)
        report["host"] = host_time(options)
        report["shapes"] = many_shapes(options)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
