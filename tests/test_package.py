"""The shape of the package: what importing it loads, who imports whom, what is public."""

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rtxarr

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "rtxarr").rglob("*.py"))
MAX_LINES = 850

DOMAINS = ("geom", "diffuse", "rl", "multimodal", "privacy", "robust", "compress", "auto")
# A module may use the rooms of its own rank and of lower ranks.
RANKS = {
    "_allocation": 0,
    "_checks": 0,
    "_compile": 0,
    "_device": 0,
    "_kernel_cache": 0,
    "_launch": 0,
    "_names": 0,
    "_override": 0,
    "_host": 0,
    "_out_of_memory": 0,
    "_replay": 0,
    "dtypes": 1,
    "kernels": 2,
    "libs": 2,
    "_random_place": 3,
    "random": 3,
    "tape": 3,
    "ops": 4,
    "_info": 2,
    "autograd": 5,
    "fft": 5,
    "linalg": 5,
    "memory": 6,
    "_profile": 6,
    "polygraph": 6,
    "testing": 6,
    "nn": 7,
    "optim": 7,
    "data": 7,
    "distributed": 8,
    "inference": 8,
    **dict.fromkeys(DOMAINS, 9),
    "recipes": 10,
    "cli": 11,
}
# `import rtxarr` brings the namespace and the transforms.
NAMESPACE_RANK = RANKS["autograd"]
# The part of autograd that operations are made with; ops/ is built on it.
TAPE = {f"rtxarr.autograd.{name}" for name in ("_autocast", "_mode", "_op", "_tape")}
# A Tensor's methods import the engine, the operations and the namespace when they are called.
TENSOR_METHODS = {"rtxarr.autograd._tape", "rtxarr.ops._methods"}

PUBLIC_MODULES = (
    "rtxarr",
    "rtxarr.autograd",
    "rtxarr.data",
    "rtxarr.dtypes",
    "rtxarr.fft",
    "rtxarr.libs",
    "rtxarr.libs.blas",
    "rtxarr.libs.tile",
    "rtxarr.linalg",
    "rtxarr.memory",
    "rtxarr.nn",
    "rtxarr.optim",
    "rtxarr.random",
    "rtxarr.testing",
)


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path):
    """Yield (line, dotted name) for each import in the file, also inside functions."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, node.module] if node.module else base)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                is_module = is_source(name) or base == "rtxarr"
                yield node.lineno, name if is_module else base


def is_source(name):
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def room_of(name):
    """Name the room of a module of rtxarr; None for what `rtxarr` itself re-exports."""
    if name in TAPE:
        return "tape"
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in RANKS else None


def violations(rule):
    """List the imports for which ``rule(module, imported)`` gives a complaint."""
    found = []
    for path in SOURCES:
        for line, imported in imported_modules(path):
            complaint = rule(module_name(path), imported)
            if complaint:
                found.append(f"{path.relative_to(ROOT)}:{line}: {complaint}")
    return found


def device_imports(module, imported):
    library = imported.partition(".")[0]
    if library in ("cupy", "cupyx", "numba", "cuda") and module != "rtxarr._device":
        return f"only _device.py imports {library}"
    if library == "array_api_compat" and room_of(module) not in ("_device", "dtypes"):
        return "only _device.py and dtypes.py import array_api_compat"
    if library in ("cudnn", "nvmath") and room_of(module) != "libs":
        return f"only libs imports {library}"
    return None


def upward_imports(module, imported):
    room = room_of(module)
    if imported.partition(".")[0] != "rtxarr" or room is None:
        return None
    target = room_of(imported)
    if module in TENSOR_METHODS and target in (None, "autograd", "ops"):
        return None
    if RANKS.get(target, NAMESPACE_RANK) > RANKS[room]:
        return f"{room} may not use {imported}, which lies above it"
    return None


def private_imports(module, imported):
    room, target = room_of(module), room_of(imported)
    if target is None or room is None or room == target or RANKS[room] < RANKS["polygraph"]:
        return None
    if RANKS[room] == RANKS[target] and any(p.startswith("_") for p in imported.split(".")[2:]):
        return f"{room} may not use the private file {imported} of its neighbour"
    return None


@pytest.mark.parametrize("rule", [device_imports, upward_imports, private_imports])
def test_imports_keep_to_the_rooms(rule):
    assert violations(rule) == []


@pytest.mark.parametrize(
    ("rule", "module", "imported"),
    [
        (device_imports, "rtxarr.kernels.segment", "numba.cuda"),
        (device_imports, "rtxarr.nn._layers", "array_api_compat"),
        (device_imports, "rtxarr.ops._linear", "nvmath.bindings"),
        (upward_imports, "rtxarr.libs.blas", "rtxarr.random"),
        (upward_imports, "rtxarr.kernels.segment", "rtxarr.ops"),
        (upward_imports, "rtxarr.ops._elementwise", "rtxarr.autograd._engine"),
        (upward_imports, "rtxarr.ops._elementwise", "rtxarr"),
        (upward_imports, "rtxarr.nn", "rtxarr.geom"),
        (private_imports, "rtxarr.optim._sgd", "rtxarr.nn._module"),
        (private_imports, "rtxarr.geom", "rtxarr.rl._replay"),
    ],
)
def test_rules_refuse_planted_imports(rule, module, imported):
    assert rule(module, imported)


def test_every_room_is_ranked():
    rooms = {path.relative_to(ROOT / "rtxarr").parts[0].removesuffix(".py") for path in SOURCES}
    assert rooms - {"__init__"} <= set(RANKS)


def test_import_loads_nothing_heavy():
    code = "import sys, rtxarr; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    heavy = {"cuda", "cupy", "matplotlib", "numba", "nvmath", "scipy", "torch", "typer"}
    loaded = set(out.stdout.split())
    assert "rtxarr" in loaded
    assert loaded & heavy == set()


def test_files_are_short():
    lengths = {p.relative_to(ROOT): len(p.read_text().splitlines()) for p in SOURCES}
    assert {path: n for path, n in lengths.items() if n > MAX_LINES} == {}


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_public_names_exist_and_are_documented(name):
    module = importlib.import_module(name)
    assert module.__doc__
    assert len(module.__all__) == len(set(module.__all__))
    missing = [n for n in module.__all__ if not hasattr(module, n)]
    assert missing == []
    values = {n: getattr(module, n) for n in module.__all__}
    undocumented = [n for n, v in values.items() if callable(v) and not v.__doc__]
    assert undocumented == []


def test_version_is_the_one_in_the_metadata():
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert rtxarr.__version__ == metadata["project"]["version"]


def test_type_marker_is_shipped():
    assert (Path(rtxarr.__file__).parent / "py.typed").exists()


def test_the_documentation_has_each_function_in_one_family(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    families = importlib.import_module("families").FAMILIES
    public = [name for name in rtxarr.__all__ if not name.startswith("_")]
    functions = [name for name in public if callable(getattr(rtxarr, name))]
    listed = [name for names in families.values() for name in names]
    assert sorted(listed) == sorted(set(functions) - set(rtxarr.dtypes.DTYPES))
