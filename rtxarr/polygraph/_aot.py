"""Fused functions compiled ahead of time, for processes that have no compiler.

A bundle holds, for each kind of arguments that it was made for, the program as data: its kernels'
machine code, the operations of the array library that run between them, and how arguments and
results are taken apart and put together. No Python code and no pickle is in it. ``_aot_load`` makes
functions of it.
"""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

import rtxarr
from rtxarr import _device
from rtxarr.autograd import Tensor, no_grad
from rtxarr.autograd._tree import flatten
from rtxarr.polygraph import _aot_data as data
from rtxarr.polygraph import _bundle
from rtxarr.polygraph._admission import index_buffers
from rtxarr.polygraph._aot_data import NotSaved
from rtxarr.polygraph._aot_kind import FORMAT, cpu_levels, kind_of
from rtxarr.polygraph._backends import input_strides
from rtxarr.polygraph._draws import Place
from rtxarr.polygraph._ir import Graph, Node
from rtxarr.polygraph._loops import Loops
from rtxarr.polygraph._program import Program, Step
from rtxarr.polygraph._record import SCALARS, Recording, fetch
from rtxarr.polygraph._trace import Captured, Concretization, ScalarSource
from rtxarr.random import Generator, default_generator

__all__ = ["ArraySpec", "Bundle", "aot"]

TARGETS = ("cpu", "numpy", "cuda")


class ArraySpec(NamedTuple):
    """What is to be known of an array before there is one; it is C-contiguous.

    Parameters
    ----------
    shape : tuple of int
    dtype : str or dtype
    """

    shape: tuple[int, ...]
    dtype: Any


class Bundle:
    """Programs of one function, ready to be saved; made by :func:`aot`.

    Attributes
    ----------
    header : dict
        What is saved, but for arrays and machine code.
    parts : dict of str to bytes
        These.
    """

    def __init__(self, header: dict, parts: dict[str, bytes]) -> None:
        self.header = header
        self.parts = parts

    def __repr__(self) -> str:
        size = sum(map(len, self.parts.values()))
        n = len(self.header["programs"])
        return f"<Bundle of {self.header['name']}, {n} programs, {size} bytes>"

    def save(self, path: str | PathLike, *, key: bytes | None = None) -> None:
        """Write a file for :func:`rtxarr.polygraph.load`.

        Parameters
        ----------
        path : str or path
            Replaced at once, if it is there.
        key : bytes, optional
            A secret. A file that is written with one is loaded with the same one only, so that
            nobody without it can change the file unseen.
        """
        _bundle.write(path, self.header, self.parts, key)


def aot(
    fused: Any,
    signatures: Sequence[tuple | dict],
    *,
    targets: str | Sequence[str] | None = None,
    architectures: Sequence[str] = ("sm_80", "sm_90", "sm_100"),
    level: str | None = None,
) -> Bundle:
    """Compile a fused function for given kinds of arguments.

    Parameters
    ----------
    fused : Fused
        Its arguments may be arrays, numbers, generators of random numbers, strings, None, and
        tuples, lists and dicts of them.
    signatures : sequence of tuple or dict
        Arguments, by place or by name, for each kind to compile for: arrays or an
        :class:`ArraySpec` in their place; numbers, which may vary later, of the type they will be.
    targets : str or sequence of str, optional
        "cpu": machine code for x86-64 under Linux; "numpy": the operations of NumPy, for any
        processor; "cuda": machine code for NVIDIA GPUs. By default what the arrays of the
        signatures are for.
    architectures : sequence of str
        GPUs to compile for: "sm_90" code runs on compute capabilities 9.0 and above, below 10.
    level : str, optional
        The processors to compile for: "x86-64-v2", "x86-64-v3" or "x86-64-v4"; by default the
        third, or what this processor has.

    Returns
    -------
    Bundle
        With ``save(path)``.

    Raises
    ------
    NotSaved
        Where the function calls what is not part of this library, changes what it finds, or gives
        objects that are no arrays and numbers. A step of :func:`rtxarr.jit` is refused.

    Notes
    -----
    Arrays and numbers that the function finds elsewhere than in its arguments, such as parameters,
    are saved as they are now; generators of random numbers with the place at which they stand, but
    for the default one, which is that of the process that loads the file.

    Examples
    --------
    >>> import rtxarr as rx
    >>> from rtxarr.polygraph import ArraySpec, fuse
    >>> f = fuse(lambda x, scale: rx.tanh(x) * scale)
    >>> bundle = f.aot([(ArraySpec((4, 8), "float32"), 2.0)], targets="numpy")
    >>> len(bundle.header["programs"])
    1
    """
    if isinstance(signatures, (str, bytes)) or not all(
        isinstance(s, (tuple, dict)) and not isinstance(s, ArraySpec) for s in signatures
    ):
        raise TypeError("signatures must be a list of tuples or dicts of arguments")
    if not signatures:
        raise ValueError("signatures must not be empty")
    calls = [((), dict(sorted(s.items()))) if isinstance(s, dict) else (s, {}) for s in signatures]
    if targets is None:
        targets = _usual_targets(calls)
    targets = (targets,) if isinstance(targets, str) else tuple(targets)
    unknown = [t for t in targets if t not in TARGETS]
    if unknown or not targets:
        raise ValueError(f"targets must be among {', '.join(TARGETS)}, got {targets}")
    writers = {
        "cpu": lambda: _Cpu(fused.mode, level),
        "numpy": lambda: _Numpy(),
        "cuda": lambda: _Cuda(fused.mode, architectures),
    }
    parts: dict[str, bytes] = {}
    arrays: dict[int, tuple[str, Any]] = {}  # by id: the part's name, and the array
    generators: list[Generator] = []
    programs, about = [], {}
    for target in targets:
        writer = writers[target]()
        made = [_Saved(fused, call, target, writer, arrays, generators) for call in calls]
        parts |= writer.parts()
        about[target] = writer.about()
        programs += [saved.description() for saved in made]
    for name, array in arrays.values():
        parts[name] = _host(array).tobytes()
    header = {
        "format": FORMAT,
        "rtxarr": rtxarr.__version__,
        "name": getattr(fused, "__name__", "function"),
        "mode": fused.mode,
        "targets": about,
        "generators": [None if g is default_generator() else g.state_dict() for g in generators],
        "programs": programs,
    }
    return Bundle(header, parts)


def _usual_targets(calls: Sequence[tuple]) -> tuple[str, ...]:
    leaves = [x.data if isinstance(x, Tensor) else x for call in calls for x in _flat(call)[0]]
    if any(map(_device.is_device_array, leaves)):
        return ("cuda",)
    return ("cpu",) if _Cpu.is_possible() else ("numpy",)


def _flat(call: tuple) -> tuple[list, Any]:
    """Return the leaves and structure of a call's arguments; an ArraySpec is a leaf."""

    def stand_in(x: Any) -> Any:
        if isinstance(x, ArraySpec):
            return np.empty(x.shape, x.dtype)
        if isinstance(x, dict):
            return {k: stand_in(v) for k, v in x.items()}
        if type(x) in (tuple, list):
            return type(x)(map(stand_in, x))
        return x

    return flatten(stand_in(call))


def _host(array: Any) -> np.ndarray:
    return np.ascontiguousarray(array.get() if _device.is_device_array(array) else array)


class _Saved:
    """A program for one kind of arguments, and what is saved of it."""

    def __init__(
        self, fused: Any, call: tuple, target: str, writer: Any, arrays: dict, generators: list
    ) -> None:
        leaves, self.structure = _flat(call)
        # Others stand for generators, so that one which the function finds too is another.
        leaves = [Generator(0) if isinstance(x, Generator) else x for x in leaves]
        self.leaves = leaves
        self.target = target
        self.arrays = arrays
        self.generators = generators
        kind = "cuda" if target == "cuda" else "cpu"
        xp = _device._device_namespace(_device.Device(kind, 0))
        with no_grad(), _assumed(kind):
            self.recording, self.by_value = _recorded(fused._function, leaves, self.structure, xp)
        recording = self.recording
        nodes, self.outputs = recording.outputs(recording.result)
        self.updates = recording.updates()
        strides = input_strides(recording.trace)
        if strides is None:
            raise NotSaved("arrays must be of this machine's byte order and in whole strides")
        graph = recording.graph(nodes, self.updates)
        self.program = writer.program(graph, strides)

    def description(self) -> dict:
        recording = self.recording
        by_value = self.by_value
        return {
            "target": self.target,
            "structure": data.encode_structure(self.structure),
            "leaves": [kind_of(x, by_value).described() for x in self.leaves],
            "by_value": by_value,
            "numbers": list(recording.scalars),
            "guards": [[e, data.encode(v)] for e, v in recording.trace.guards],
            "sources": [self._source(s) for s in recording.trace.sources],
            "outputs": [self._output(o) for o in self.outputs],
            "result": data.encode_structure(recording.structure),
            "program": _program(self.program),
        }

    def _source(self, source: Any) -> Any:
        if isinstance(source, ScalarSource):
            return ["number", source.expression, source.dtype.name]
        if isinstance(source, Captured):
            array = fetch(source, ())
            if isinstance(array, np.generic):
                return ["constant", data.encode(array)]
            name = f"array {len(self.arrays)}"
            name, _ = self.arrays.setdefault(id(array), (name, array))
            contiguous = array.flags.c_contiguous
            strides = None if contiguous else list(array.strides)
            return ["array", name, array.dtype.name, list(array.shape), strides]
        if isinstance(source, Place):
            return ["draw", *self._generator(source.generator), source.kind, source.n]
        return ["leaf", source]

    def _generator(self, generator: Generator) -> tuple[str, int]:
        """Return where a generator is to be found: among the arguments, or in the file."""
        for i, x in enumerate(self.leaves):
            if x is generator:
                return "leaf", i
        if not any(g is generator for g in self.generators):
            self.generators.append(generator)
        return "saved", next(i for i, g in enumerate(self.generators) if g is generator)

    def _output(self, output: Any) -> dict:
        source = output.source
        if output.kind == "plain":
            if callable(source):
                raise NotSaved(f"a result must be an array or a number, got {source!r}")
            source = data.encode(source)
        return {
            "kind": output.kind,
            "source": source,
            "steps": [data.encode_view(s) for s in output.steps],
            "apart": None if output.apart is None else [list(a) for a in output.apart],
            "tensor": bool(output.tensor),
            "scalar": bool(output.scalar),
        }


@contextlib.contextmanager
def _assumed(kind: str) -> Iterator[None]:
    """Take a device of a kind for the current one, whether or not there is such a device."""
    device = _device.device()
    found = device if device.kind == kind else _device.Device(kind, 0)
    token = _device._entered.set((*_device._entered.get(), (found, None)))
    try:
        yield
    finally:
        _device._entered.reset(token)


def _recorded(function: Callable, leaves: Sequence, structure: Any, xp: Any) -> tuple:
    """Trace a function; give also whether the numbers among its arguments are fixed."""
    try:
        try:
            return Recording(function, leaves, structure, xp), False
        except Exception:
            if not any(type(x) in SCALARS for x in leaves):
                raise
            return Recording(function, leaves, structure, xp, plain=True), True
    except Concretization as error:
        why = str(error).removesuffix(": use rx.jit")
        raise NotSaved(f"the function cannot be saved: {why}") from error


# ----------------------------------------------------------------------------------- programs


def _program(program: Program) -> dict:
    """Return a program as data: the nodes that its steps leave in memory, and the steps."""
    graph = program.graph
    ids: dict[Node, int] = {}
    nodes: list[Any] = []
    parts = list(program.parts)

    def add(node: Node, description: Any) -> int:
        ids[node] = len(nodes)
        dtype = None if node.dtype is None else node.dtype.name
        nodes.append([*description, dtype, list(node.shape)])
        return ids[node]

    def known(node: Node) -> int:
        """Return the number of a node; leaves are added when they are met."""
        if node in ids:
            return ids[node]
        if node.op not in ("constant", "iota"):
            raise NotSaved(f"a program with an unknown source cannot be saved: {node}")
        return add(node, [node.op, [], data.encode(node.attrs)])

    for node in graph.inputs:
        add(node, ["input", [], data.encode(node.attrs)])
    steps: list[list[Any]] = []
    for step in program.steps:
        sources = [known(n) for n in step.sources]
        if step.loops is not None:
            results = [add(n, ["result", [], [len(nodes)]]) for n in step.results]
            kernel: Any = step.run  # an _Unbuilt
            description = {**kernel.description(), "places": _places(step)}
            steps.append(["kernel", description, sources, results])
            continue
        (node,) = step.results
        attrs = [a for a in node.attrs if not isinstance(a, Graph)]
        inner = [_program(parts.pop(0)) for a in node.attrs if isinstance(a, Graph)]
        add(node, [node.op, sources, data.encode(attrs)])
        steps.append(["node", ids[node], inner])
    return {
        "nodes": nodes,
        "n_inputs": len(graph.inputs),
        "steps": steps,
        "outputs": [known(n) for n in graph.outputs],
        "updates": [[number, known(n)] for number, n in graph.updates],
        "scalars": sorted(graph.scalars),
        "in_place": [[ids[n], number] for n, number in program.in_place.items()],
        "disjoint": program.disjoint,
        "copied": sorted(program.copied),
    }


def _places(step: Step) -> list[list[int]]:
    """Return numbers of the places at which a map reads and writes, -1 for several or others."""
    if step.group.kind != "map":
        return [[], []]
    need, outputs = step.group.need, step.group.outputs
    numbers = {frozenset((place,)): k for k, place in enumerate(dict.fromkeys(outputs.values()))}
    read = [numbers.get(frozenset(need.get(n, ())), -1) for n in step.sources]
    return [read, [numbers[frozenset((outputs[n],))] for n in step.results]]


class _Unbuilt:
    """Stands for a kernel in a program that is saved and never run."""

    def __init__(self, loops: Loops, more: Callable[[], dict]) -> None:
        self.loops = loops
        self._more = more

    def __call__(self, *arguments: Any) -> None:
        raise RuntimeError("a program that was made to be saved cannot run")

    def description(self) -> dict:
        loops = self.loops
        indices = index_buffers(loops)
        return {
            "kind": loops.kind,
            "rows": loops.rows,
            "cols": loops.cols,
            "features": loops.features,
            "buffers": [
                [b.name, b.dtype.name, b.is_output, b.is_scalar, b.name in indices]
                for b in loops.buffers
            ],
            **self._more(),
        }


class _StepByStep(Program):
    """A program that runs one operation of the array library after the other."""

    def __init__(self, graph: Graph, backend: Any) -> None:
        self.graph = graph
        self.backend = backend
        self.disjoint = True
        self.why: dict = {}
        self.in_place: dict = {}
        self.copied: set = set()
        self.parts: list[Program] = []
        self.steps = []
        for i, node in enumerate(self.graph.nodes()):
            if node.op not in ("input", "constant", "iota"):
                parts = [_StepByStep(a, backend) for a in node.attrs if isinstance(a, Graph)]
                self.parts += parts
                self.steps.append(Step(f"{node.op}{i}", None, node.src, (node,)))


class _Numpy:
    """Saves programs without kernels."""

    def program(self, graph: Graph, strides: Sequence[tuple | None]) -> Program:
        return _StepByStep(graph, self)

    def empty(self, shape: tuple, dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def parts(self) -> dict[str, bytes]:
        return {}

    def about(self) -> dict:
        return {}


class _Kernels(_Numpy):
    """Saves programs with kernels."""

    def program(self, graph: Graph, strides: Sequence[tuple | None]) -> Program:
        return Program(graph, self, strides=strides)


class _Cpu(_Kernels):
    """Saves programs with machine code for x86-64: one image with the kernels of all."""

    def __init__(self, mode: str, level: str | None) -> None:
        from rtxarr.polygraph._cpu_backend import CpuBackend

        if not self.is_possible():
            raise NotSaved(
                'targets "cpu" needs x86-64, Linux and llvmlite 0.45 or newer; use "numpy"'
            )
        levels = cpu_levels()
        self.level = level or levels[min(len(levels) - 1, 1)]
        if self.level not in ("x86-64-v2", "x86-64-v3", "x86-64-v4"):
            raise ValueError(f'level must be "x86-64-v2", "-v3" or "-v4", got {level!r}')
        self._backend = CpuBackend(mode)
        self._numbers: dict[str, int] = {}  # of each text, its number in the image

    @staticmethod
    def is_possible() -> bool:
        """Tell whether machine code can be made here."""
        from rtxarr.polygraph.codegen import _llvm

        return sys.platform == "linux" and bool(cpu_levels()) and _llvm.is_available()

    def fuses(self, op: str, dtype: Any) -> bool:
        return self._backend.fuses(op, dtype)

    def build(self, loops: Loops) -> _Unbuilt:
        from rtxarr.polygraph._cpu_backend import steps_of

        text, numbers = self._backend.written(loops)
        function = self._numbers.setdefault(text, len(self._numbers))
        words = [list(n.origin) if hasattr(n, "origin") else int(n) for n in numbers]
        more = {"function": f"k{function}", "numbers": words, "steps": steps_of(loops)}
        return _Unbuilt(loops, lambda: more)

    def _linked(self) -> Any:
        from rtxarr.polygraph.codegen import _image, _llvm

        try:
            image = _image.link(_llvm.object_code(list(self._numbers), self.level))
        except ValueError as error:
            raise NotSaved(f"machine code cannot be saved: {error}") from None
        unknown = sorted(image.imports.keys() - _image.SYMBOLS)
        if unknown:
            raise NotSaved(f"machine code for {self.level} needs {', '.join(unknown)}()")
        return image

    def parts(self) -> dict[str, bytes]:
        self.image = self._linked()
        return {"cpu code": self.image.code}

    def about(self) -> dict:
        return {
            "machine": platform.machine(),
            "system": sys.platform,
            "level": self.level,
            "numpy": int(np.__version__.split(".")[0]),
            "head": object.__basicsize__,
            "entries": self.image.entries,
            "imports": self.image.imports,
        }


class _Cuda(_Kernels):
    """Saves programs with machine code for NVIDIA GPUs: a part for each kernel and architecture."""

    # Bytes of shared memory that a block can have, by compute capability (CUDA C++ Programming
    # Guide, "Technical specifications per compute capability").
    _SHARED = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99}

    def __init__(self, mode: str, architectures: Sequence[str]) -> None:
        self._mode = mode
        self.capabilities = [_capability(a) for a in architectures]
        if not self.capabilities:
            raise ValueError("architectures must not be empty")
        least = min(self._SHARED.get(cc, 99 if cc[0] == 12 else 227) for cc in self.capabilities)
        self._shared_limit = least * 1024
        self._numbers: dict[str, int] = {}

    def fuses(self, op: str, dtype: Any) -> bool:
        from rtxarr.polygraph.codegen import _operations

        return _operations.fuses(op, np.dtype(dtype))

    def build(self, loops: Loops) -> _Unbuilt:
        from rtxarr.polygraph.codegen import _kernels
        from rtxarr.polygraph.codegen._dialects import CUDA

        strict = self._mode == "strict"
        kernel = _kernels.generate(
            loops, CUDA, strict=strict, shared_limit=self._shared_limit,
            clusters=all(map(_kernels.has_clusters, self.capabilities)),
        )  # fmt: skip
        number = self._numbers.setdefault(kernel.text, len(self._numbers))
        launches = [
            [x.name, x.grid, x.block, x.shared, [list(map(_plain, a)) for a in _arguments(x)]]
            for x in kernel.launches
        ]
        return _Unbuilt(
            loops,
            lambda: {
                "code": number,
                "wide": kernel.wide,
                "launches": launches,
                "scratch": list(kernel.scratch),
                "packed": kernel.packed,
                "alignments": kernel.alignments,
            },
        )

    def parts(self) -> dict[str, bytes]:
        from rtxarr.polygraph._cuda_backend import machine_code

        strict = self._mode == "strict"
        wanted = [(text, n, cc) for text, n in self._numbers.items() for cc in self.capabilities]
        with ThreadPoolExecutor(4) as pool:
            codes = pool.map(lambda w: machine_code(w[0], w[2], strict=strict), wanted)
            return {
                f"cuda {n} {_architecture(cc)}": code
                for (_, n, cc), code in zip(wanted, codes, strict=True)
            }

    def about(self) -> dict:
        return {"architectures": [_architecture(cc) for cc in self.capabilities]}


def _arguments(launch: Any) -> list[tuple]:
    return [(a.kind, a.type, a.name, a.value) for a in launch.arguments]


def _plain(x: Any) -> Any:
    return x if isinstance(x, str) else int(x)


def _capability(architecture: str) -> tuple[int, int]:
    digits = architecture.removeprefix("sm_")
    if not (architecture.startswith("sm_") and digits.isdigit() and len(digits) >= 2):
        raise ValueError(f'architectures must be like "sm_90", got {architecture!r}')
    return int(digits[:-1]), int(digits[-1])


def _architecture(cc: tuple[int, int]) -> str:
    return f"sm_{cc[0]}{cc[1]}"
