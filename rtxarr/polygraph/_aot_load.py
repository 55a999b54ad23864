"""Programs from files: rebuilt step by step from data, with machine code put in place of compilers.

Nothing of a file is run as Python. The text of a program is written anew, by the code that writes
it for a fused function, from nodes and steps that were checked one by one.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

import rtxarr
from rtxarr import _device
from rtxarr._out_of_memory import explain_out_of_memory
from rtxarr.autograd._tape import mark_changed
from rtxarr.autograd._tree import flatten, unflatten
from rtxarr.kernels import philox
from rtxarr.polygraph import _aot_data as data
from rtxarr.polygraph import _bundle, _cpu_memory, _cuda_start, _gpu_memory
from rtxarr.polygraph import _index as ix
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._admission import bytes_of
from rtxarr.polygraph._aot_kind import FORMAT, cpu_levels, kind_of, read_kind
from rtxarr.polygraph._bundle import BundleError
from rtxarr.polygraph._call_text import (
    MANY_PAIRS,
    MISS,
    guard_lines,
    listed,
    result_words,
    some_overlap,
)
from rtxarr.polygraph._draws import Place
from rtxarr.polygraph._interpret import RULES
from rtxarr.polygraph._ir import CONTROL, VIEWS, Graph, Node
from rtxarr.polygraph._loops import Buffer, Loops
from rtxarr.polygraph._program import Program, Step, eager_step
from rtxarr.polygraph._record import Output
from rtxarr.polygraph._scalar import NAMES
from rtxarr.polygraph._schedule import EAGER, Group
from rtxarr.polygraph._trace import Captured, ScalarSource
from rtxarr.polygraph.codegen._launch import Argument, Launch, Launches
from rtxarr.random import Generator, default_generator

__all__ = ["BundleError", "Loaded", "load"]

_MOST_QUICK = 256  # kinds of plain arguments, with their strides, that are looked up at once
_OVERLAP = object()  # what a program gives for arguments that it cannot write into


def load(path: str | PathLike, *, target: str | None = None, key: bytes | None = None) -> Loaded:
    """Return the function of a file that ``f.aot(...).save(path)`` wrote.

    Needs no compiler: neither NVRTC nor numba nor LLVM, unless the function draws random numbers;
    then numba-cuda for a GPU, and numba for more than 65,536 at a time on a CPU. On a GPU, steps
    that are no kernels of the program may need one, too: what CuPy and this library compile then.

    Parameters
    ----------
    path : str or path
    target : {"cpu", "numpy", "cuda"}, optional
        Which of the file's targets to load; by default all that this machine can run.
    key : bytes, optional
        The secret that the file was written with.

    Returns
    -------
    Loaded
        Takes the arguments that the function took, of the kinds it was compiled for, and gives the
        same results to the bit. Its results are untracked.

    Raises
    ------
    BundleError
        Naming the file, where it is cut off, was changed, is of another version, holds nothing that
        this machine can run, or draws random numbers on a GPU without numba-cuda.

    Notes
    -----
    Machine code does whatever it does: checksums find damage, but anyone can write a file with
    right ones. Load files that you trust, or that were written with a ``key``.
    """
    header, parts = _bundle.read(path, key)
    if header.get("format") != FORMAT or header.get("rtxarr") != rtxarr.__version__:
        raise BundleError(
            f"{path} was written by rtxarr {header.get('rtxarr')} (format {header.get('format')}), "
            f"and this is rtxarr {rtxarr.__version__} (format {FORMAT}): save it anew"
        )
    try:
        return _loaded(path, header, parts, target)
    except BundleError:
        raise
    except Exception as error:
        raise BundleError(f"{path} does not hold programs as they are: {error}") from error


def _loaded(path: Any, header: dict, parts: dict, target: str | None) -> Loaded:
    about = header["targets"]
    if target is not None and target not in about:
        raise BundleError(f"{path} has {', '.join(about)}, got target={target!r}")
    makers: dict[str, Any] = {}
    reasons = []
    for name in about if target is None else (target,):
        reason = _MAKERS[name].misfit(about[name])
        if reason:
            reasons.append(reason)
        else:
            makers[name] = _MAKERS[name](about[name], parts, header["mode"])
    if not makers:
        raise BundleError(f"{path} {'; it '.join(reasons)}")
    unknown = {case["target"] for case in header["programs"]} - about.keys()
    if unknown:
        raise ValueError(f"programs for {unknown}")
    arrays: dict[str, Any] = {}
    generators = list(map(_generator, header["generators"]))
    cases = [
        _Case(case, makers[case["target"]], parts, arrays, generators)
        for case in header["programs"]
        if case["target"] in makers
    ]
    if any(case.draws and not case.on_numpy for case in cases) and not find_spec("numba_cuda"):
        raise BundleError(
            f"{path} draws random numbers on a GPU, by kernels that numba-cuda compiles, and there "
            "is none here: install numba-cuda"
        )
    return Loaded(str(header["name"]), cases, generators)


def _generator(state: dict | None) -> Generator:
    """Return the default generator, or a new one that stands where a saved one stood."""
    if state is None:
        return default_generator()
    made = Generator(0)
    made.load_state_dict(state)
    return made


class Loaded:
    """A function from a file; see :func:`load`.

    Attributes
    ----------
    programs : list
        One for each kind of arguments.
    generators : list of Generator
        Those that the function finds and draws from, in the order in which it first does so. They
        begin where they stood when the function was saved; the default generator is this
        process's own.
    """

    def __init__(self, name: str, cases: list[_Case], generators: list[Generator]) -> None:
        self.__name__ = name
        self.programs = cases
        self.generators = generators
        self._programs: dict[tuple, list[_Case]] = {}
        for case in cases:
            self._programs.setdefault(case.key, []).append(case)
        self._quick: dict[tuple, _Case] = {}
        self._by_value = sorted({case.by_value for case in cases})

    def __repr__(self) -> str:
        n = len(self.programs)
        return f"<Loaded {self.__name__}, {n} program{'s' * (n != 1)}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            parts: list[Any] | None = None if kwargs else []
            if parts is not None:
                for x in args:
                    kind = type(x)
                    if kind is np.ndarray:
                        parts += (x.dtype, x.shape, x.strides)
                    elif kind is float or kind is int:
                        parts.append(kind)
                    else:
                        parts = None
                        break
                else:
                    case = self._quick.get(tuple(parts))
                    if case is not None:
                        out = case.run(args)
                        if out is not MISS and out is not _OVERLAP:
                            return out
            return self._call(args, kwargs, parts)
        except MemoryError as error:
            explain_out_of_memory(error)
            raise

    def _call(self, args: tuple, kwargs: dict, parts: list | None) -> Any:
        """Call with arguments of any kind; ``parts`` are what quick look-ups find a program by."""
        leaves, structure = flatten((args, dict(sorted(kwargs.items()))))
        for by_value in self._by_value:
            key = by_value, structure, *[kind_of(x, by_value) for x in leaves]
            for case in self._programs.get(key, ()):
                out = case.run(leaves)
                if out is _OVERLAP:
                    raise ValueError(
                        f"{self.__name__}() writes into arguments that share memory with others, "
                        "which it was not compiled for"
                    )
                if out is not MISS:
                    if parts is not None and not by_value and len(self._quick) < _MOST_QUICK:
                        self._quick[tuple(parts)] = case
                    return out
        raise TypeError(self._unknown(leaves))

    def _unknown(self, leaves: Sequence[Any]) -> str:
        try:
            got = ", ".join(str(kind_of(x, False)) for x in leaves)
        except TypeError as error:
            got = str(error)
        known = "; ".join(dict.fromkeys(str(case) for case in self.programs))
        return f"{self.__name__}() was compiled for ({known}), got ({got})"

    def explain(self) -> str:
        """Return the text of each program."""
        lines = [repr(self)]
        for case in self.programs:
            lines += ["", f"({case})", case.program.text]
        return "\n".join(lines)


class _Draw(NamedTuple):
    """An input that says where a draw begins: of a generator, or of the argument of that number."""

    generator: Generator | int
    kind: str
    n: int
    on_numpy: bool


class _Case:
    """A program for one kind of arguments."""

    def __init__(self, case: dict, maker: Any, parts: dict, arrays: dict, generators: list) -> None:
        self.on_numpy = case["target"] != "cuda"
        self.generators = generators
        structure = data.decode_structure(case["structure"])
        kinds = [read_kind(x, case["target"]) for x in case["leaves"]]
        if data.n_leaves(structure) != len(kinds):
            raise ValueError("arguments that do not fit their containers")
        self.kinds = kinds
        self.by_value = bool(case["by_value"])
        self.key = self.by_value, structure, *kinds
        numbers = [data.index_of(i, len(kinds)) for i in case["numbers"]]
        n = len(numbers)
        sources = [self._source(s, n, maker, parts, arrays) for s in case["sources"]]
        self.draws = any(isinstance(s, _Draw) for s in sources)
        guards = [
            (data.checked_expression(e, n), data.decode(value)) for e, value in case["guards"]
        ]
        self.program = _LoadedProgram(case["program"], maker)
        graph = self.program.graph
        if len(graph.inputs) != len(sources):
            raise ValueError("a program with other inputs than it is given")
        for node, source in zip(graph.inputs, sources, strict=True):
            self._check(node, source)
        outputs = [self._output(o, n) for o in case["outputs"]]
        result = data.decode_structure(case["result"])
        if data.n_leaves(result) != len(outputs):
            raise ValueError("results that do not fit their containers")
        names: dict[str, Any] = {**NAMES, "MISS": MISS, "OVERLAP": _OVERLAP, "xp": maker.xp}
        lines = ["def run(L):", *self._arguments(sources, guards, numbers, names, maker.xp)]
        words = result_words(outputs, names, maker.xp)
        names["result"] = functools.partial(unflatten, result)
        names["program"] = self.program.run
        lines += [f"    return result([{', '.join(words)}])", ""]
        self.text = "\n".join(lines)
        exec(compile(self.text, "<loaded call>", "exec"), names)
        self.run: Callable = names["run"]

    def _arguments(
        self, sources: list, guards: list, numbers: list[int], names: dict, xp: Any
    ) -> list[str]:
        """Return the lines that take the arguments apart, up to the program's result ``r``."""
        lines = []
        if numbers:
            lines.append(f"    a = {''.join(f'L[{i}], ' for i in numbers)}")
        lines += guard_lines(guards, names)
        arrays, places = [], []
        names["Place"] = Place
        for i, source in enumerate(sources):
            if isinstance(source, _Draw):  # last, when it is certain that the program will run
                generator, *rest = source
                names[f"g{i}_"] = generator
                word = f"L[{generator}]" if isinstance(generator, int) else f"g{i}_"
                places.append(f"    x{i} = Place({word}, {', '.join(map(repr, rest))}).reserve()")
                continue
            if isinstance(source, ScalarSource):
                names[f"d{i}"] = source.dtype.type
                lines.append(f"    x{i} = d{i}({source.expression})")
                continue
            if i not in self.program.graph.scalars:
                arrays.append(i)
            if isinstance(source, Captured):
                names[f"x{i}"] = source.array
            else:
                data = ".data" if self.kinds[source].kind == "tensor" else ""
                lines.append(f"    x{i} = L[{source}]{data}")
        written = [number for number, _ in self.program.graph.updates]
        names["overlap"] = xp.may_share_memory
        names["some_overlap"] = some_overlap
        if len(written) * len(arrays) > MANY_PAIRS:
            others = [i for i in arrays if i not in set(written)]
            test = f"some_overlap({listed(written)}, {listed(others)})"
            lines.append(f"    if {test}: return OVERLAP")
        else:
            for i in written:
                for other in arrays:
                    if other != i and (other not in written or other > i):
                        lines.append(f"    if overlap(x{i}, x{other}): return OVERLAP")
        lines += places
        lines.append(f"    r = program({', '.join(f'x{i}' for i in range(len(sources)))})")
        names["changed"] = mark_changed
        for i in written:
            if isinstance(sources[i], int) and self.kinds[sources[i]].kind == "tensor":
                lines.append(f"    changed(L[{sources[i]}])")
        return lines

    def __str__(self) -> str:
        return ", ".join(map(str, self.kinds))

    def _source(self, source: list, n: int, maker: Any, parts: dict, arrays: dict) -> Any:
        kind, *rest = source
        if kind == "leaf":
            return data.index_of(rest[0], len(self.kinds))
        if kind == "number":
            return ScalarSource(data.checked_expression(rest[0], n), data.dtype_of(rest[1]))
        if kind == "constant":
            return Captured(data.decode(rest[0]))
        if kind == "draw":
            return self._draw(*rest)
        if kind != "array":
            raise ValueError(f"not a source: {kind!r}")
        name, dtype, shape, strides = rest
        if name not in arrays:
            array = _array(parts[name], data.dtype_of(dtype), data.shape_of(shape), strides)
            arrays[name] = maker.to_device(array)
        return Captured(arrays[name])

    def _draw(self, where: str, number: int, kind: str, n: int) -> _Draw:
        generator: Generator | int
        if where == "leaf":
            generator = data.index_of(number, len(self.kinds))
            good = self.kinds[generator].kind == "generator"
        else:
            generator = self.generators[data.index_of(number, len(self.generators))]
            good = where == "saved"
        if not good or kind not in philox.KINDS:
            raise ValueError(f"not a draw: {where!r} {kind!r}")
        return _Draw(generator, kind, data.index_of(n, 1 << 62), self.on_numpy)

    def _check(self, node: Node, source: Any) -> None:
        """See that an input is of the dtype and shape that the program takes it for."""
        shape: tuple[int, ...] | None
        if isinstance(source, ScalarSource):
            dtype, shape = source.dtype, ()
        elif isinstance(source, Captured):
            dtype, shape = source.array.dtype, source.array.shape
        elif isinstance(source, _Draw):
            dtype, shape = np.dtype(np.uint64), (3,)
        else:
            dtype, shape = self.kinds[source].dtype, self.kinds[source].shape
        if (dtype, shape) != (node.dtype, node.shape):
            raise ValueError(f"an input {node} that is given {dtype}{shape}")

    def _output(self, o: dict, n: int) -> Output:
        """Return how one leaf of the result is made, checked."""
        kind, source = o["kind"], o["source"]
        graph = self.program.graph
        sizes = {"r": len(graph.outputs), "x": len(graph.inputs)}
        if kind == "scalar":
            source = data.checked_expression(source, n)
        elif kind == "plain":
            source = data.decode(source)
        elif kind == "leaf":
            source = data.index_of(source, len(self.kinds))
        elif kind in ("root", "input"):
            source = data.index_of(source, sizes["r" if kind == "root" else "x"])
        else:
            raise ValueError(f"not a kind of result: {kind!r}")
        apart = o["apart"]
        if apart is not None:
            apart = [(where, data.index_of(i, sizes[where])) for where, i in apart]
        steps = tuple([data.decode_view(s) for s in o["steps"]])
        flags = {flag: bool(o[flag]) for flag in ("tensor", "scalar")}
        return Output(kind, source, steps, apart=apart, **flags)


def _array(part: Any, dtype: np.dtype, shape: tuple, strides: list | None) -> np.ndarray:
    """Return an array of the bytes of a part, in memory of its own."""
    values = np.frombuffer(part, dtype).reshape(shape)
    if strides is None:
        return values.copy()
    steps = tuple(map(int, strides))
    if len(steps) != len(shape):
        raise ValueError("an array with other strides than axes")
    size, first = bytes_of(shape, steps, dtype.itemsize)
    if size > values.nbytes + 4096 * max(values.nbytes, 1):
        raise ValueError("an array that is spread too far")
    out = np.ndarray(shape, dtype, buffer=bytearray(size), offset=first, strides=steps)
    out[...] = values
    return out


# ----------------------------------------------------------------------------------- programs


class _LoadedProgram(Program):
    """A program made of data."""

    def __init__(self, given: dict, maker: Any) -> None:
        self.backend = maker
        self.why = {}
        self.parts = []
        n_inputs = given["n_inputs"]
        self._nodes: list[Node] = []
        self._given = given["nodes"]
        controls = {s[1] for s in given["steps"] if s[0] == "node" and s[2]}
        parts = {
            s[1]: [_LoadedProgram(p, maker) for p in s[2]]
            for s in given["steps"]
            if s[0] == "node" and s[2]
        }
        for i, described in enumerate(self._given):
            graphs = [p.graph for p in parts[i]] if i in controls else []
            self._nodes.append(self._node(i, described, n_inputs, graphs))
        node = self._node_at
        inputs = self._nodes[:n_inputs]
        updates = [(data.index_of(k, n_inputs), node(i)) for k, i in given["updates"]]
        scalars = [data.index_of(k, n_inputs) for k in given["scalars"]]
        self.graph = Graph(inputs, [node(i) for i in given["outputs"]], updates, scalars)
        self.disjoint = bool(given["disjoint"])
        self.copied = {data.index_of(i, len(self.graph.outputs)) for i in given["copied"]}
        self.in_place = {node(i): data.index_of(k, n_inputs) for i, k in given["in_place"]}
        if any(inputs[k].shape != n.shape for n, k in self.in_place.items()):
            raise ValueError("a result that does not fit where it is written")
        self.steps = self._read_steps(given["steps"], parts)
        self.assemble()

    def _node_at(self, i: Any) -> Node:
        return self._nodes[data.index_of(i, len(self._nodes))]

    def _node(self, i: int, described: list, n_inputs: int, graphs: list[Graph]) -> Node:
        op, sources, attrs, dtype, shape = described
        if (op == "input") is not (i < n_inputs):
            raise ValueError("a program whose inputs do not come first")
        dtype = None if dtype is None else data.dtype_of(dtype)
        src = tuple([self._nodes[data.index_of(s, i)] for s in sources])
        attrs = data.decode(attrs)
        if op == "result":
            return ir.make("result", (), (i,), dtype, data.shape_of(shape))
        if op == "input":
            return ir.input_node(data.index_of(attrs[0], n_inputs), dtype, data.shape_of(shape))
        if op not in RULES and op not in CONTROL:
            raise ValueError(f"not an operation: {op!r}")
        data.check_attrs(op, attrs)
        return ir.make(op, src, (*graphs, *attrs), dtype, data.shape_of(shape))

    def _read_steps(self, given: list, parts: dict[int, list]) -> list[Step]:
        node, steps = self._node_at, []
        read = {node(i) for s in given if s[0] == "kernel" for i in s[2]}
        made = {n for n in self._nodes if n.op in ("input", "constant", "iota")}
        for k, (kind, *rest) in enumerate(given):
            if kind == "kernel":
                kernel, source_ids, result_ids = rest
                sources, results = (tuple(map(node, ids)) for ids in (source_ids, result_ids))
                loops = _loops(kernel, sources, results)
                name, run = f"kernel{k}", self.backend.kernel(kernel, loops)
                group = _group(kernel.get("places", ((), ())), sources, results)
            elif kind == "node":
                result, loops, group = node(rest[0]), None, Group(EAGER)
                sources, results, name = result.src, (result,), f"{result.op}{k}"
                if result.op in CONTROL:
                    run = self.control_step(result, parts[rest[0]])
                elif result.op in VIEWS and result.ndim and result not in read:
                    run = None
                else:
                    run = eager_step(result, contiguous=result in read)
            else:
                raise ValueError(f"not a step: {kind!r}")
            if not made.issuperset(sources) or not made.isdisjoint(results):
                raise ValueError(f"steps out of order, at {name}")
            made.update(results)
            steps.append(Step(name, run, sources, results, loops, group))
        if not made.issuperset(self.graph.roots):
            raise ValueError("a program that does not compute its results")
        return steps


def _group(places: Sequence, sources: Sequence[Node], results: Sequence[Node]) -> Group:
    """Return what is known of where a saved kernel reads and writes: at one place or not."""
    group = Group(EAGER)
    read, written = (map(int, numbers) for numbers in places)
    group.need = {n: {ix.number(k)} for n, k in zip(sources, read, strict=False) if k >= 0}
    group.outputs = {n: ix.number(k) for n, k in zip(results, written, strict=False)}
    return group


def _loops(kernel: dict, sources: Sequence[Node], results: Sequence[Node]) -> Loops:
    """Return what is known of a saved kernel, without its statements."""
    nodes = [*sources, *results]
    buffers, kept = [], set()
    for i, (name, dtype, is_output, is_scalar, is_index) in enumerate(kernel["buffers"]):
        buffer = Buffer(str(name), data.dtype_of(dtype), nodes[i], is_output, is_scalar)
        if buffer.dtype != nodes[i].dtype or bool(is_output) is not (i >= len(sources)):
            raise ValueError("a kernel that is given other arrays than it takes")
        buffers.append(buffer)
        if is_index:
            kept.add(buffer.name)
    if len(buffers) != len(nodes) or kernel["kind"] not in ("map", "rows", "columns", "segments"):
        raise ValueError("a kernel that is given other arrays than it takes")
    rows, cols, features = (data.index_of(kernel[k], 1 << 62) for k in ("rows", "cols", "features"))
    notes = {"indices": kept}
    return Loops(kernel["kind"], rows, cols, tuple(buffers), (), (), features, None, notes)


# -------------------------------------------------------------------------------------- targets


class _Numpy:
    """What runs programs without kernels, and makes arrays for those with."""

    def __init__(self, about: dict, parts: dict, mode: str) -> None:
        self.xp = _device.namespace(np.empty(0))

    @staticmethod
    def misfit(about: dict) -> str:
        """Return why this machine cannot run what was saved, or nothing."""
        return ""

    def empty(self, shape: tuple, dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def to_device(self, array: np.ndarray) -> Any:
        return array

    def kernel(self, kernel: dict, loops: Loops) -> Callable:
        raise ValueError("a kernel without machine code")


class _Cpu(_Numpy):
    """Starts machine code of the processor."""

    arena_limit = 0.0

    def __init__(self, about: dict, parts: dict, mode: str) -> None:
        from rtxarr.polygraph.codegen import _image

        super().__init__(about, parts, mode)
        code = bytes(parts["cpu code"])
        entries = {k: data.index_of(at, len(code)) for k, at in about["entries"].items()}
        imports = {k: data.index_of(at, len(code) - 7) for k, at in about["imports"].items()}
        self._code = _image.Code(_image.Image(code, entries, imports))

    @staticmethod
    def misfit(about: dict) -> str:
        here = f"{platform.machine()} under {sys.platform}"
        there = f"{about['machine']} under {about['system']}"
        if here != there:
            return f"holds machine code for {there}, and this is {here}"
        if about["level"] not in cpu_levels():
            return (
                f"holds machine code for {about['level']}, and this processor has "
                f"{', '.join(cpu_levels()) or 'no such level'}"
            )
        head, numpy = object.__basicsize__, int(np.__version__.split(".")[0])
        if (about["head"], about["numpy"]) != (head, numpy):
            return (
                f"holds machine code for NumPy {about['numpy']} and objects with heads of "
                f"{about['head']} bytes, and here they are NumPy {numpy} and {head}"
            )
        return ""

    def arena(self, n_bytes: int, parts: Sequence) -> tuple[Callable, Callable | None]:
        return _cpu_memory.arena(n_bytes, parts)

    def kernel(self, kernel: dict, loops: Loops) -> Callable:
        from rtxarr.polygraph._cpu_start import starter
        from rtxarr.polygraph.codegen._ufuncs import address

        numbers = [address(*n) if isinstance(n, list) else int(n) for n in kernel["numbers"]]
        steps = [(str(over), data.index_of(k, 1 << 16)) for over, k in kernel["steps"]]
        return starter(self._code, kernel["function"], numbers, loops, steps)


class _Cuda(_Numpy):
    """Starts machine code of an NVIDIA GPU."""

    arena_limit = _gpu_memory.ARENA_LIMIT

    def __init__(self, about: dict, parts: dict, mode: str) -> None:
        self._about, self._parts = about, parts
        self._gpu = _cuda_start.Gpu()
        self.empty, self.arena = self._gpu.empty, self._gpu.arena  # type: ignore[method-assign]
        self.xp = _device._device_namespace(_device.Device("cuda"))

    @staticmethod
    def other(about: dict, cc: tuple[int, int]) -> str:
        there = ", ".join(about["architectures"])
        return f"holds machine code for {there}, and this GPU is sm_{cc[0]}{cc[1]}"

    @staticmethod
    def misfit(about: dict) -> str:
        try:
            gpu = _cuda_start.Gpu()
            cc = gpu.capability(gpu.current_device())
        except Exception as error:
            return f"holds machine code for NVIDIA GPUs, and none can be used here: {error}"
        return "" if _fitting(about["architectures"], cc) else _Cuda.other(about, cc)

    def to_device(self, array: np.ndarray) -> Any:
        return _device.to_device(array, _device.device("cuda"))

    def kernel(self, kernel: dict, loops: Loops) -> Callable:
        launches = []
        for name, grid, block, shared, arguments in kernel["launches"]:
            read = tuple([Argument(str(k), str(t), str(n), int(v)) for k, t, n, v in arguments])
            grid, block = ((int(x), int(y)) for x, y in (grid, block))
            launches.append(Launch(str(name), grid, block, int(shared), read))
            if any(a.kind == "buffer" and not 0 <= a.value < len(loops.buffers) for a in read):
                raise ValueError("a kernel that takes other arrays than it is given")
        made = Launches(
            wide=bool(kernel["wide"]),
            launches=tuple(launches),
            scratch=tuple(map(int, kernel["scratch"])),
            packed=bool(kernel["packed"]),
            alignments=tuple([(int(i), int(n)) for i, n in kernel["alignments"]]),
        )
        code = functools.partial(self._machine_code, int(kernel["code"]))
        return _cuda_start.launcher(self._gpu, made, code)

    def _machine_code(self, number: int, cc: tuple[int, int]) -> bytes:
        found = _fitting(self._about["architectures"], cc)
        if found is None:
            raise BundleError(self.other(self._about, cc))
        return bytes(self._parts[f"cuda {number} {found}"])


def _fitting(architectures: Sequence[str], cc: tuple[int, int]) -> str | None:
    """Return the architecture whose code runs on a GPU: the same major, the highest minor."""
    found = [a for a in architectures if int(a[3:-1]) == cc[0] and int(a[-1]) <= cc[1]]
    return max(found, key=lambda a: int(a[-1]), default=None)


_MAKERS: dict[str, Any] = {"cpu": _Cpu, "numpy": _Numpy, "cuda": _Cuda}
