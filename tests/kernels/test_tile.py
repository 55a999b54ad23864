"""The cuTile kernels' machine code: what it expects at its start, and how it is kept on disk."""

import ctypes
import itertools
import struct
from importlib.metadata import distributions
from types import SimpleNamespace

import pytest

from rtxarr import _device, _kernel_cache
from rtxarr.kernels.tile import _attention_build, _build, _launch
from rtxarr.kernels.tile._build import Array, Signature
from rtxarr.libs import _tile_attention, tile


def vector(dtype, *, aligned=False):
    return Array(dtype, 1, 0, aligned)


def signatures():
    """Give each kernel in the variants that differ most."""
    half, columns, floats = Array("bfloat16"), Array("bfloat16", 2, 0), vector("float32")
    bias, scale, e4m3 = vector("bfloat16"), vector("bfloat16", aligned=True), Array("float8_e4m3fn")
    activation = _build.ACTIVATIONS

    def variants(name, parameters, tiles=None, *, plain=True):
        for choice in tile._TILES[tiles or name]:
            for loops in sorted({False, choice.loops and plain}):
                yield Signature(name, (*parameters, loops, *choice[:3]), choice.warps)

    yield from variants("linear", (half, half, bias, half, activation["gelu"], True))
    yield from variants("linear", (columns, columns, 0, half, 0, False), plain=False)
    pair = Array("bfloat16", 3, 2)
    for gate, name in enumerate(list(activation)[1:]):
        parameters = half, pair, bias, bias, half, activation[name], gate % 2, True
        yield from variants("gated_linear", parameters)
    parameters = columns, Array("bfloat16", 3, 1), 0, 0, half, activation["silu"], 1, False
    yield from variants("gated_linear", parameters, plain=False)
    parameters = half, half, columns, bias, bias, half, activation["silu"], True
    yield from variants("gated_linear_apart", parameters)
    for is_centred in (True, False):
        mean = floats if is_centred else 0
        parameters = (
            half,
            mean,
            floats,
            scale,
            scale,
            half,
            bias,
            half,
            is_centred,
            True,
            True,
            True,
        )
        yield from variants("norm_linear", parameters)
        parameters = half, mean, floats, 0, 0, half, 0, half, is_centred, False, False, False
        yield from variants("norm_linear", parameters)
        parameters = half, mean, floats, "float32", is_centred, *tile._STATISTICS_TILE
        yield Signature("row_statistics", parameters)
    for fast in (True, False):
        parameters = e4m3, e4m3, floats, floats, bias, half, True, True, True, fast
        yield from variants("fp8_rows", parameters, "fast fp8_rows" if fast else None)


class Elf:
    """What a cubin says of its kernel."""

    def __init__(self, code):
        (table,) = struct.unpack_from("<Q", code, 0x28)
        size, count, names = struct.unpack_from("<HHH", code, 0x3A)
        headers = [struct.unpack_from("<IIQQQQ", code, table + i * size) for i in range(count)]
        start = headers[names][4]
        self.sections = {}
        for name, _, _, _, offset, length in headers:
            end = code.index(b"\0", start + name)
            self.sections[code[start + name : end].decode()] = code[offset : offset + length]

    def attributes(self, section):
        data, place = self.sections[section], 0
        while place < len(data):
            form, kind, size = struct.unpack_from("<BBH", data, place)
            place += 4
            if form == 4:
                yield kind, data[place : place + size]
                place += size

    def parameters(self, name):
        """Give the offset and size of each parameter."""
        found = {}
        for kind, data in self.attributes(f".nv.info.{name}"):
            if kind == 0x45:  # EIATTR_KPARAM_INFO_V2
                _, ordinal, offset, size = struct.unpack_from("<IHHH", data)
                found[ordinal] = offset, size
        return [found[i] for i in range(len(found))]

    def stack_bytes(self):
        return [
            struct.unpack("<II", data)[1]
            for kind, data in self.attributes(".nv.info")
            if kind == 0x11  # EIATTR_FRAME_SIZE
        ]


HAS_COMPILER = {"cuda-tile", "nvidia-cuda-tileiras"} <= {x.name for x in distributions()}
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs cuda-tile[tileiras]")


@needs_compiler
@pytest.mark.parametrize(
    "signature", list(signatures()), ids=lambda s: f"{s.name}-{s.parameters[-3:]}"
)
def test_machine_code(signature, tmp_path, monkeypatch):
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path))
    name, code = _build.cubin(signature, "sm_90")
    elf = Elf(code)
    assert name == signature.name
    assert f".text.{name}" in elf.sections
    sizes = []
    for x in signature.parameters:
        if isinstance(x, Array):
            sizes += [8] + [4] * (2 * x.n_dims)
        elif isinstance(x, str):
            sizes.append(4)
    found = elf.parameters(name)
    assert [size for _, size in found] == sizes
    for (offset, size), (following, _) in itertools.pairwise(found):
        assert offset % size == 0
        assert offset + size <= following < offset + size + 8
    assert not any(elf.stack_bytes()), "registers are spilled"
    assert b".f64" not in elf.sections[".nv_debug_ptx_txt"], "arithmetic in float64"
    # From disk, without the compiler.
    monkeypatch.setattr(_build, "_export", None)
    assert _build.cubin(signature, "sm_90") == (name, code)


def attention_programs():
    """Give each program of attention in the variants that differ most."""
    half, logs = Array("bfloat16", 4, 3), Array("float32", 3, 2, False)
    seed, no_seed = (0, *["uint64"] * 3, "uint32"), (0,) * 5
    in_memory = Array("uint64", 1, 0, False), 0, 0, 0, "uint32"
    lengths = vector("int32")
    bias, seen = Array("bfloat16", 4, 3, False), Array("bool_", 4, 3, False)
    anywhere, alike, at_blocks = range(3)
    on, off = (True,), (False,)
    variants = [
        # The mask and lengths, random words, shift and window; the mask's kind and axes, whether
        # there are lengths, an end in a tile, a causal bound, a window, dropout, a place in memory;
        # where rows begin, and the heads of a group.
        ((0, 0), seed, (0, 0), (0, *off * 8, *on, *off, at_blocks, 1)),
        ((0, 0), in_memory, ("int32", 0), (0, *off * 6, *on, *off, *on * 2, alike, 2)),
        ((bias, lengths), seed, ("int32",) * 2, (2, *on * 9, *off, anywhere, 3)),
        ((seen, 0), no_seed, (0, 0), (1, *on, *off * 2, *on, *off, *on, *off * 4, anywhere, 1)),
    ]
    results = {
        "attention": (half, logs),
        "attention_queries": (half, logs, half, logs, half),
        "attention_keys": (logs, half, logs, half, half),
    }
    for name, own in results.items():
        for dim, tiles in _tile_attention._TILES[name].items():
            for arrays, words, shift, constants in variants[: 4 if dim == 64 else 1]:
                scalars = *words, "float32", "float32", *shift
                parameters = *[half] * 3, *arrays, *scalars, *own, *constants, dim, dim, *tiles[:2]
                yield _attention_build.Program(name, parameters, tiles.warps, tiles.blocks)


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize(
    "program", list(attention_programs()), ids=lambda s: f"{s.name}-{s.parameters[-17:]}"
)
def test_machine_code_of_attention(program, arch, tmp_path, monkeypatch):
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path))
    name, code = _attention_build.cubin(program, arch)
    elf = Elf(code)
    assert name == program.name
    assert f".text.{name}" in elf.sections
    if arch == "sm_90":
        sizes = []
        for x in program.parameters:
            if isinstance(x, Array):
                sizes += [8] + [4] * (2 * x.n_dims)
            elif isinstance(x, str):
                sizes.append(8 if x == "uint64" else 4)
        assert [size for _, size in elf.parameters(name)] == sizes
        # With all kinds of masks, and random words that lie anywhere, a few numbers do not fit.
        assert max(elf.stack_bytes()) <= 64, "registers are spilled"
        per_block = _launch._n_threads(code)
        assert per_block >= 32 * program.warps
        assert per_block % 128 == 0
    assert b".f64" not in elf.sections[".nv_debug_ptx_txt"], "arithmetic in float64"
    assert b"atom" not in elf.sections[".nv_debug_ptx_txt"], "sums in any order"
    monkeypatch.setattr(_attention_build, "_export", None)  # from disk, without the compiler
    assert _attention_build.cubin(program, arch) == (name, code)


def test_how_many_threads_a_block_has():
    def code(*shape):
        return b"\x7fELF" + b"\x04\x10\x0c\x00" + struct.pack("<III", *shape) + b"more"

    assert _launch._n_threads(code(256, 1, 1)) == 256
    assert _launch._n_threads(code(256, 2, 1) + code(384, 1, 1)) == 384
    assert _launch._n_threads(b"\x7fELF") == 0  # the driver is asked


def test_keys_of_the_families_are_apart(monkeypatch):
    """A change of one leaves the other's machine code valid."""
    for build in (_build, _attention_build):
        monkeypatch.setattr(build, "version", lambda name: "1.7.0")
    first, second = list(attention_programs())[:2]
    keys = {_attention_build.cache_key(s, arch) for s in (first, second) for arch in ("a", "b")}
    keys.add(_attention_build.cache_key(first._replace(blocks=3), "a"))
    keys.add(_build.cache_key(first, "a"))
    monkeypatch.setattr(_attention_build, "_sources", lambda: b"other")
    keys.add(_attention_build.cache_key(first, "a"))
    assert len(keys) == 7


def test_cache_keys_tell_programs_apart(monkeypatch):
    monkeypatch.setattr(_build, "version", lambda name: "1.7.0")
    found = [_build.cache_key(s, "sm_90") for s in signatures()]
    assert len(set(found)) == len(found)
    first = next(signatures())
    assert _build.cache_key(first, "sm_90") == found[0]
    assert _build.cache_key(first._replace(warps=4), "sm_90") != found[0]
    assert _build.cache_key(first, "sm_100") != found[0]
    monkeypatch.setattr(_build, "version", lambda name: "1.8.0")
    assert _build.cache_key(first, "sm_90") != found[0]
    monkeypatch.setattr(_build, "version", lambda name: "1.7.0")
    monkeypatch.setattr(_build, "_sources", lambda: b"other")
    assert _build.cache_key(first, "sm_90") != found[0]


def test_machine_code_comes_from_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(_build, "version", lambda name: "1.7.0")
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path))
    signature = next(signatures())
    compiled = []
    monkeypatch.setattr(_build, "_export", lambda *args: compiled.append(args) or b"\x7fELF")
    for _ in range(2):
        assert _build.cubin(signature, "sm_90") == ("linear", b"\x7fELF")
    assert compiled == [(signature, "sm_90")]
    key = _build.cache_key(signature, "sm_90")
    (tmp_path / key).write_bytes(b"damaged")
    assert _build.cubin(signature, "sm_90") == ("linear", b"\x7fELF")
    assert len(compiled) == 2
    assert _kernel_cache.load(key) == ("linear", b"\x7fELF")


def test_how_a_kernel_is_started(monkeypatch):
    """With a driver's stand-in that reads what it is given, as the real one does."""
    started = []

    def start(handle, *shape_to_stream):
        *shape, shared, stream, pointers, extra = shape_to_stream
        addresses = (ctypes.c_void_p * 4).from_address(pointers)
        address, wide = (ctypes.c_int64.from_address(addresses[i]).value for i in (0, 3))
        rows, bits = (ctypes.c_int32.from_address(addresses[i]).value for i in (1, 2))
        started.append((handle, shape, shared, stream, extra, address, rows, bits, wide))

    class Module:
        def load(self, code):
            self.code = code

        def get_function(self, name):
            return SimpleNamespace(ptr=7, name=name, module=self)

    driver = SimpleNamespace(
        launchKernel=start,
        funcGetAttribute=lambda attribute, kernel: {(0, 7): 384}[attribute, kernel],
        CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK=0,
    )
    cuda = SimpleNamespace(
        driver=driver,
        function=SimpleNamespace(Module=Module),
        runtime=SimpleNamespace(getDevice=lambda: 1, setDevice={1: None}.get),
        Device=lambda i: SimpleNamespace(compute_capability="90"),
        get_current_stream=lambda: SimpleNamespace(ptr=11),
    )
    monkeypatch.setitem(vars(_device), "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(_launch, "cubin", lambda signature, arch: (signature.name, arch.encode()))
    loaded = _launch.load(Signature("linear", ()), 1)
    assert (loaded.owner.name, loaded.owner.module.code) == ("linear", b"sm_90")
    _launch.launch(loaded, 5, [2**40 + 1, 300, 0xFFFFFFFF, 2**33])
    grid_and_block = [5, 1, 1, 384, 1, 1]
    assert started == [(7, grid_and_block, 0, 11, 0, 2**40 + 1, 300, -1, 2**33)]
