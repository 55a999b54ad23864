"""Every kernel compiles to machine code with no GPU: no calls, no spills, no stray float64."""

import importlib.util
import itertools
import pkgutil
import re

import pytest

import rtxarr.kernels
from rtxarr import _compile

from .every_kernel import (
    CASES,
    edge_attention_back_cases,
    edge_attention_cases,
    gather_cases,
    group_norm_cluster_cases,
    optimizers_cases,
    segment_cases,
    transpose_cases,
)

pytestmark = [
    pytest.mark.skipif(
        not (importlib.util.find_spec("numba_cuda") and importlib.util.find_spec("cuda")),
        reason="needs numba-cuda with nvJitLink",
    ),
]

ARCHITECTURES = [(8, 0), (9, 0), (10, 0)]

# Kernels whose arithmetic is float64 whatever they store; see _philox_core.
COMPUTE_IN_FLOAT64 = ("normal32", "exponential32")

# The widest heads, the most frequencies and sums of wide rows, on the oldest device: 20 bytes.
_WIDEST = "bfloat16-512-Variant(kind='mlp'"
MAY_SPILL = (f"by-destinations-{_WIDEST}", f"by-sources-{_WIDEST}", "forward-16", "forward-32")
MAY_SPILL += ("backward-1024-float32",)
# Counters of a tile's loop, a few bytes.
MAY_SPILL_ON_ALL = ("gathered-",)


def test_every_kernel_file_is_covered():
    modules = [m.name for m in pkgutil.iter_modules(rtxarr.kernels.__path__)]
    assert {name for name in modules if name.endswith("_cuda")} == set(CASES)


def parameter_types(signature):
    """Return the PTX parameter types that ``launch`` passes for a signature."""
    names = {"float64": "f64", "float32": "f32", "int64": "u64", "uint64": "u64"}
    found = []
    for described in signature:
        if isinstance(described, str):
            found.append(names[described])
        else:
            found += ["u64"] * (5 + 2 * described[1])
    return found


def check_that_sums_are_rounded_apart(ptx, title):
    """The assembler fuses a product with a sum or not, depending on what is around them."""
    products = set(re.findall(r"mul\.f(?:32|64)\s+(%\w+)", ptx))
    sums = re.findall(r"(?:add|sub)\.f(?:32|64)\s+%\w+, ([^;]+);", ptx)
    assert not products & {x for operands in sums for x in operands.split(", ")}, title


@pytest.mark.parametrize("cc", ARCHITECTURES, ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
@pytest.mark.parametrize("module", CASES)
def test_kernels_compile_and_assemble(module, cc):
    # Variants of a kernel differ little between devices: each on one.
    start, every = {(9, 0): (0, 2), (8, 0): (1, 4), (10, 0): (3, 4)}[cc]
    for title, kernel, signature in itertools.islice(CASES[module](), start, None, every):
        needed = re.search(r"sm_(\d+)$", title)
        if needed and cc < divmod(int(needed[1]), 10):
            continue
        entry, ptx = _compile.compile_ptx(kernel, signature, cc)
        header = ptx[ptx.index(f".entry {entry}(") :].split(")", 1)[0]
        assert re.findall(r"\.param \.(\w+)", header) == parameter_types(signature), title
        assert not re.search(r"^\s*call", ptx, re.MULTILINE), f"{title} calls a function"
        uses_float64 = "float64" in str(signature) + title or title.startswith(COMPUTE_IN_FLOAT64)
        if not uses_float64:
            assert not re.search(r"\b(add|sub|mul|div|fma|sqrt|cvt\S*)\.\S*f64", ptx), title
        if not (cc == (10, 0) and title.endswith("-back-rows")):  # the assembler's to remove
            assert ".local" not in ptx, f"{title} keeps an array in memory"
        if "philox" in module:
            assert "fma" not in ptx, f"{title} contracts a product and a sum"
        if module == "_optimizers_cuda" and "count" not in title:  # which is float64 to the end
            check_that_sums_are_rounded_apart(ptx, title)
        cubin, log = _compile.assemble(ptx, cc)
        assert cubin[:4] == b"\x7fELF"
        spills = re.findall(r"(\d+) bytes spill", log)
        assert spills, f"the assembler's report lacks spills: {log}"
        if not title.startswith(MAY_SPILL_ON_ALL + MAY_SPILL * (cc == (8, 0))):
            assert set(spills) == {"0"}, f"{title} spills: {log}"


def test_kernels_say_that_they_run_in_clusters():
    for title, kernel, signature in itertools.islice(group_norm_cluster_cases(), 2):
        ptx = _compile.compile_ptx(kernel, signature, (9, 0))[1]
        assert re.search(r"\)\s+\.explicitcluster\s+\.reqnctapercluster 8, 1, 1\s", ptx), title
        assert ptx.count("barrier.cluster.arrive") == ptx.count("barrier.cluster.wait") == 2, title
    title, kernel, signature = next(transpose_cases())
    assert "cluster" not in _compile.compile_ptx(kernel, signature, (9, 0))[1], title


def test_wide_kernels_move_16_bytes():
    loads = {"float32": "ld.global.nc.v4.f32", "float16": "ld.global.nc.v4.b32"}
    for title, kernel, signature in segment_cases():
        if "-wide-rows" in title:
            ptx = _compile.compile_ptx(kernel, signature, (9, 0))[1]
            name = signature[0][0]
            assert loads.get(name, loads["float16"]) in ptx, title
            assert "st.global.v4" in ptx, title


def test_gathered_rows_are_read_16_bytes_at_a_time():
    for title, kernel, signature in gather_cases():
        if title in ("sum-float32-4", "sum-float16-8", "max-float16-8", "max-float64-2"):
            ptx = _compile.compile_ptx(kernel, signature, (9, 0))[1]
            loads = re.findall(r"ld\.global\.v(\d)\.[buf](\d+)", ptx)
            assert len(loads) == 7, title  # four, and up to three more
            assert all(int(n) * int(bits) == 128 for n, bits in loads), title
            assert "st.global.v" in ptx, title


def test_tiles_are_read_and_written_16_bytes_at_a_time():
    """All loads of a thread come before the first that it keeps: they are under way together."""
    for title, kernel, signature in transpose_cases():
        if title.endswith("-in-out"):
            ptx = _compile.compile_ptx(kernel, signature, (9, 0))[1]
            wide = r"(\w+)\.global\S*\.v(\d)\.[bf](\d+)"
            found = [(name, int(n) * int(bits)) for name, n, bits in re.findall(wide, ptx)]
            assert {bits for _, bits in found} == {128}, title
            n_loads = [name for name, _ in found].count("ld")
            assert n_loads == (8 if title.startswith("float64-8") else 4), title
            last = max(m.start() for m in re.finditer(r"ld\.global", ptx))
            assert last < ptx.index("st.shared"), title


@pytest.mark.parametrize("cases", [edge_attention_cases, edge_attention_back_cases])
def test_heads_are_read_16_bytes_at_a_time(cases):
    for title, kernel, signature in cases():
        if "-32-" in title and "additive" in title:
            ptx = _compile.compile_ptx(kernel, signature, (9, 0))[1]
            loads = re.findall(r"ld\.global\.v4\.[uf]32", ptx)
            assert len(loads) >= 4, title  # those of four edges are under way together
            assert "st.global.v4" in ptx or title.startswith("by-destinations"), title


def test_many_tensors_are_moved_16_bytes_at_a_time():
    """All arrays of a step: as many wide loads as there are, and as many wide stores less one."""
    for title, kernel, signature in optimizers_cases():
        if title.startswith("('adam', ") and "-float32" in title:
            ptx = _compile.compile_ptx(kernel, signature, (9, 0))[1]
            assert len(re.findall(r"ld\.global\.v4", ptx)) >= 4, title
            assert len(re.findall(r"st\.global\.v4", ptx)) >= 3, title
            assert ".local" not in ptx, title
