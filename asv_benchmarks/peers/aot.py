"""How long a process without compilers takes to load fifty kernels compiled ahead of time.

One process compiles a fused function of fifty kernels and saves it. Others, each new, have no
numba or LLVM to import: they load the file, call it, and load it again, and say whether NVRTC was
loaded by then (CuPy may do so for itself). Figures are medians and ranges over processes, in
milliseconds of wall time.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import rtxarr as rx

LOADING = """
import json, sys, time

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "llvmlite", "numba_cuda"):
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Nothing())
import numpy as np
import rtxarr as rx
from rtxarr.polygraph import load

path, device = sys.argv[1:]
x = rx.asarray(np.load(path + ".npy"), device=device)
rx.synchronize(device)

def spent(function):
    start = time.perf_counter()
    result = function()
    rx.synchronize(device)
    return (time.perf_counter() - start) * 1e3, result

def has_nvrtc():
    maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
    return "libnvrtc" in maps

before = has_nvrtc()
first, loaded = spent(lambda: load(path))
call, y = spent(lambda: loaded(x))
again, y = spent(lambda: loaded(x))
second, _ = spent(lambda: load(path))
total = float(np.sum(rx.asarray(y, device="cpu")))
print(json.dumps([first, call, again, second, before, has_nvrtc(), total]))
"""


def layers(x):
    weight = x
    for k in range(50):  # the products keep the maps apart
        x = rx.tanh(x * (k + 1)) @ weight
    return x


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) / 8
    here = rx.asarray(x, device=options.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layers.rtx"
        bundle = rx.fuse(layers).aot([(here,)])
        bundle.save(path)
        np.save(f"{path}.npy", x)
        command = [sys.executable, "-c", LOADING, str(path), options.device]
        found = []
        for _ in range(options.rounds):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout))
            print("a process:", *(f"{ms:.2f}" for ms in found[-1][:4]), "ms", flush=True)
        print(f"{rx.device(options.device)!r}: {path.stat().st_size / 1024:.0f} KiB")
    report = {}
    names = "load, in a new process", "first call", "second call", "load again"
    for name, values in zip(names, zip(*found, strict=True), strict=False):
        report[name] = {"median_ms": statistics.median(values), "range_ms": [*map(float, values)]}
        print(
            f"{name:24} {statistics.median(values):8.2f} ms ({min(values):.2f} - {max(values):.2f})"
        )
    print(f"NVRTC was loaded: before {found[0][4]}, after {found[0][5]}")
    want = float(np.sum(rx.asarray(rx.fuse(layers)(here), device="cpu")))
    if any(values[-1] != want for values in found):
        raise SystemExit(f"other processes give other results: {want}, {[v[-1] for v in found]}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
