"""Generated CUDA text run on the CPU: the back end that tests run fused programs on.

``g++`` compiles the very text that a GPU would get. Each thread of a block is a fibre; shared
memory starts as NaN, arrays lie before (or after) pages that may not be touched, and a scheduler
with a seed runs one warp far ahead of the others, so that a missing barrier or an index out of
range does not stay unseen.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np

from rtxarr.polygraph.codegen import _operations, _scans
from rtxarr.polygraph.codegen._dialects import DIALECTS
from rtxarr.polygraph.codegen._kernels import SHARED_LIMIT, generate
from rtxarr.polygraph.codegen._launch import number_bytes
from rtxarr.polygraph.codegen._maps import pattern
from rtxarr.polygraph.codegen._text import join_texts

HERE = Path(__file__).parent
HAS_COMPILER = shutil.which("g++") is not None
_lock = threading.RLock()


@functools.cache
def _folder():
    """Where compiled text is kept, by all processes with this version of the emulator."""
    names = ("gpu.h", "fibres.cpp", "metal_stdlib")
    sources = b"".join((HERE / name).read_bytes() for name in names)
    version = hashlib.sha256(sources).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"rtxarr-emulator-{os.getuid()}-{version}"
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def _one_process(digest):
    """Let other test processes wait for what this one compiles."""
    with (_folder() / f"{digest[:2]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_library(name, text, *, language="c++", flags=()):
    """Return the path of a library made of ``text``; an older one of the same text will do."""
    digest = hashlib.sha256(repr((text, flags)).encode()).hexdigest()[:24]
    target = _folder() / f"{name}-{digest}.so"
    with _one_process(digest), tempfile.TemporaryDirectory(dir=_folder()) as inside:
        if not target.exists():
            made = Path(inside) / "made.so"
            command = ["g++", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{HERE}"]
            command += ["-fwrapv", "-ffp-contract=off", "-fno-strict-aliasing"]
            command += [*flags, "-x", language, "-", "-o", str(made)]
            done = subprocess.run(command, input=text, capture_output=True, text=True)
            if done.returncode:
                wrong = _folder() / "wrong.cpp"
                wrong.write_text(text)
                raise AssertionError(f"{wrong} does not compile:\n{done.stderr[:3000]}")
            os.replace(made, target)
    return target


@functools.cache
def _fibres():
    path = compile_library("fibres", (HERE / "fibres.cpp").read_text(), flags=("-O2",))
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.gpu_launch.restype = ctypes.c_char_p
    library.gpu_guarded.restype = ctypes.c_void_p
    library.gpu_guarded.argtypes = (ctypes.c_size_t, ctypes.c_int)
    library.gpu_release.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library


def _thunk(launch, dialect):
    """Return the text of a function that takes the arguments' addresses."""
    values = [(a, f"*({a.type}*)a[{i}]") for i, a in enumerate(launch.arguments)]
    words, before = [value for _, value in values], ""
    if dialect.name == "metal":  # numbers are one structure
        numbers = ", ".join(value for a, value in values if "*" not in a.type)
        before = f"{launch.name}_numbers numbers = {{{numbers}}}; "
        words = [value for a, value in values if "*" in a.type]
        words += ["numbers", "gpu_shared", "threadIdx", "blockDim", "blockIdx"]
    call = f"{launch.name}({', '.join(words)});"
    return f'extern "C" void run_{launch.name}(void** a) {{ {before}{call} }}'


def _cluster(kernel, launch):
    """Return how many blocks of a launch are a cluster, as its text says."""
    found = re.search(rf"__global__ void([^;{{}}]*?) {launch.name}\(", kernel.body)
    blocks = re.search(r"__cluster_dims__\((\d+), 1, 1\)", found[1]) if found else None
    return int(blocks[1]) if blocks else 1


def _renamed(launch, name):
    """Return a launch of a changed text, in which all that has its name has another."""
    arguments = [
        dataclasses.replace(a, type=a.type.replace(launch.name, name)) for a in launch.arguments
    ]
    return dataclasses.replace(launch, name=name, arguments=tuple(arguments))


class EmulatorBackend:
    """Runs kernels on NumPy arrays; the interface of a back end.

    Parameters
    ----------
    mode : str
        "strict" or "fast".
    seeds : sequence of int
        Each kernel is run once with each and must give the same bits. 0 runs warps in turn.
    dialect : str
        "cuda", "hip" or "metal".
    """

    def __init__(
        self,
        *,
        mode="strict",
        seeds=(1,),
        dialect="cuda",
        shared_limit=SHARED_LIMIT,
        clusters=False,
    ):
        self.strict = mode == "strict"
        self.seeds = seeds
        self.dialect = DIALECTS[dialect]
        self.shared_limit = shared_limit
        self.clusters = clusters
        self.kernels = {}  # entry points by name, compiled
        self.waiting = []  # kernels that are not
        self.all_kernels = []

    def fuses(self, op, dtype):
        return _operations.fuses(op, np.dtype(dtype), self.dialect.lacks)

    def scan_refusal(self, scans, rows, cols):
        if any(dtype.name in self.dialect.lacks for _, dtype in scans):
            return "the language lacks the dtype"
        return _scans.refusal(scans, rows, cols, strict=self.strict)

    def empty(self, shape, dtype):
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = 0xA5
        return array

    def generate(self, loops):
        return generate(
            loops, self.dialect, strict=self.strict, shared_limit=self.shared_limit,
            clusters=self.clusters,
        )  # fmt: skip

    def source(self, loops):
        return self.generate(loops).text

    def pattern(self, loops):
        return pattern(loops, self.generate(loops)) if loops.kind == "map" else None

    def build(self, loops):
        """Return what runs a kernel; the first run of any compiles all that were built before."""
        kernel = self.generate(loops)
        self.waiting.append(kernel)
        self.all_kernels.append(kernel)
        return functools.partial(self.run, kernel, loops)

    def build_all(self, many):
        return [self.build(loops) for loops in many]

    def build_text(self, loops, text):
        """Build a kernel from a text that was changed by hand."""
        return self.build_texts([(loops, text)])[0]

    def build_texts(self, many):
        """Build kernels from pairs of loops and changed text, in one run of the compiler."""
        kernels = []
        for loops, text in many:
            kernel = self.generate(loops)
            digest = hashlib.sha256(text.encode()).hexdigest()[:8]
            names = {x.name: f"{x.name}_{digest}" for x in kernel.launches}
            for old, new in names.items():
                text = text.replace(old, new)
            launches = [_renamed(x, names[x.name]) for x in kernel.launches]
            head, at, body = text.partition('extern "C" __global__')
            kernels.append(
                dataclasses.replace(
                    kernel, head=head, snippets=(), bodies=(at + body,), launches=tuple(launches)
                )
            )
        self.waiting += kernels
        self.compile()
        return [
            functools.partial(self.run, k, loops)
            for k, (loops, _) in zip(kernels, many, strict=True)
        ]

    def compile(self):
        """Compile what is waiting, in one run of the compiler for each width of indices."""
        with _lock:
            kernels, self.waiting = self.waiting, []
            names = {launch.name for k in kernels for launch in k.launches}
            if names <= self.kernels.keys():
                return
            for head in dict.fromkeys(k.head for k in kernels):
                some = list(dict.fromkeys(k for k in kernels if k.head == head))
                thunks = dict.fromkeys(_thunk(x, k.dialect) for k in some for x in k.launches)
                text = "\n".join([f'#include "{self._header}"', join_texts(some), *thunks, ""])
                text = text.replace(
                    "extern __shared__ __align__(16) unsigned char shared_memory[];",
                    "unsigned char* const shared_memory = gpu_shared;",
                ).replace("[[threadgroup(0)]]", "")
                _fibres()
                library = ctypes.CDLL(str(compile_library("kernels", text, flags=("-O1",))))
                for k in some:
                    for launch in k.launches:
                        self.kernels[launch.name] = getattr(library, f"run_{launch.name}")

    _header = "gpu.h"

    def run(self, kernel, loops, *arrays):
        """Run a kernel on arrays and numbers in the order of ``loops.buffers``."""
        self.compile()
        results = []
        for seed in self.seeds:
            with _lock, _Memory(loops, arrays, at_end=seed % 2 == 1 or seed == 0) as memory:
                self._launch(kernel, memory, seed)
                memory.check()
                results.append(memory.outputs())
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert a.tobytes() == b.tobytes(), "the result depends on the order of threads"
        _write(loops, arrays, results[0])

    def _launch(self, kernel, memory, seed):
        plain = "BARRIER" not in kernel.body and "shuffled" not in kernel.body
        packed = kernel.packed and all(
            memory.address(i) % size == 0 for i, size in kernel.alignments
        )
        scratch = [memory.scratch(n) for n in kernel.scratch]
        for launch in kernel.launches:
            values = []
            for a in launch.arguments:
                if a.kind == "buffer":
                    values.append(memory.value(a.value))
                elif a.kind == "packed":
                    values.append(int(packed).to_bytes(4, "little"))
                elif a.kind == "table":
                    rows = kernel.table.arrays
                    addresses = b"".join(memory.value(i) for row in rows for i in row)
                    values.append(addresses + kernel.table.rest)
                elif a.kind == "scratch":
                    values.append(scratch[a.value].to_bytes(8, "little"))
                else:
                    values.append(number_bytes(a, wide=kernel.wide))
            held = [ctypes.create_string_buffer(v, max(len(v), 16)) for v in values]
            pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
            problem = _fibres().gpu_launch(
                ctypes.cast(self.kernels[launch.name], ctypes.c_void_p), pointers,
                (ctypes.c_uint * 3)(*launch.grid, 1), (ctypes.c_uint * 3)(*launch.block, 1),
                ctypes.c_uint(launch.shared), ctypes.c_uint(seed), ctypes.c_int(plain),
                ctypes.c_uint(_cluster(kernel, launch)),
            )  # fmt: skip
            if problem:
                raise AssertionError(f"{launch.name}: {problem.decode()}")


class _Memory:
    """Copies of arrays in guarded memory; arrays that overlap share a copy."""

    def __init__(self, loops, arrays, *, at_end):
        self.loops, self.arrays, self.at_end = loops, arrays, at_end
        self.blocks, self.places, self.scratches = [], {}, []

    def __enter__(self):
        spans = []
        for i, (b, x) in enumerate(zip(self.loops.buffers, self.arrays, strict=True)):
            if not b.is_scalar:
                assert x.dtype == b.dtype, (b, x.dtype)
                low, high = np.lib.array_utils.byte_bounds(x) if x.size else (x.ctypes.data,) * 2
                spans.append((low, high, i, x.ctypes.data))
        spans.sort(key=lambda span: span[:2])
        for low, high, i, data in spans:
            if self.blocks and low < self.blocks[-1][1] and low < high:
                block = self.blocks[-1]
                block[1] = max(block[1], high)
            else:
                block = [low, high, None]
                self.blocks.append(block)
            self.places[i] = block, data
        for block in self.blocks:
            # Keep the address's place in a line of 16 bytes.
            shift = block[0] % 16
            size = block[1] - block[0] + shift
            base = _fibres().gpu_guarded(size, self.at_end)
            block[2] = base + shift
            block.append((base, size))
            ctypes.memset(base, 0xC3, -(-size // 16) * 16)
            ctypes.memmove(block[2], block[0], block[1] - block[0])
        return self

    def check(self):
        """See that nothing was written between an array and the page after it."""
        for low, high, at, (base, size) in self.blocks:
            after = at + high - low
            around = ctypes.string_at(base, at - base)
            around += ctypes.string_at(after, base + -(-size // 16) * 16 - after)
            assert not around.strip(b"\xc3"), "a thread wrote beside an array"

    def __exit__(self, *exc):
        for *_, (base, size) in self.blocks:
            _fibres().gpu_release(base, size)
        for base, size in self.scratches:
            _fibres().gpu_release(base, size)

    def scratch(self, size):
        base = _fibres().gpu_guarded(size, self.at_end)
        ctypes.memset(base, 0xFF, size)
        self.scratches.append((base, size))
        return base

    def address(self, i):
        block, data = self.places[i]
        return block[2] + data - block[0]

    def value(self, i):
        b, x = self.loops.buffers[i], self.arrays[i]
        if b.is_scalar:
            return np.asarray(x, b.dtype).tobytes()
        return self.address(i).to_bytes(8, "little")

    def outputs(self):
        """Return the bytes of every copy, all of which are compared and written back."""
        return [
            np.frombuffer(ctypes.string_at(block[2], block[1] - block[0]), np.uint8)
            for block in self.blocks
        ]


def _write(loops, arrays, contents):
    """Copy what kernels left in memory to the arrays that are outputs."""
    memory = _Memory(loops, arrays, at_end=True)
    with memory:
        for block, content in zip(memory.blocks, contents, strict=True):
            ctypes.memmove(block[2], content.ctypes.data, content.size)
        for i, (b, x) in enumerate(zip(loops.buffers, arrays, strict=True)):
            if b.is_output and x.size:
                kind = ctypes.c_ubyte * max(x.nbytes, 1)
                low, high = np.lib.array_utils.byte_bounds(x) if x.size else (0, 0)
                block, _ = memory.places[i]
                raw = (ctypes.c_ubyte * (high - low)).from_address(block[2] + low - block[0])
                copy = np.ndarray(
                    x.shape, x.dtype, buffer=raw, offset=x.ctypes.data - low, strides=x.strides
                )
                x[...] = copy
                del kind
