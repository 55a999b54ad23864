"""The cuTile kernels' machine code: what it expects at its start, and how it is kept on disk."""

import itertools
import struct
from importlib.metadata import distributions

import pytest

from rtxarr import _kernel_cache
from rtxarr.kernels.tile import _build
from rtxarr.kernels.tile._build import Matrix, Signature, Vector
from rtxarr.libs import tile


def signatures():
    """Give each kernel in the variants that differ most."""
    half, other, floats = Matrix("bfloat16"), Matrix("float16", 0), Vector("float32")
    loose = Matrix("bfloat16", 1, False)
    bias, scale = Vector("bfloat16"), Vector("bfloat16", True)
    e4m3 = Matrix("float8_e4m3fn")
    activation = _build.ACTIVATIONS
    for tiles in tile._TILES["linear"]:
        warps = 8 if tiles[0] == 128 else None
        yield Signature("linear", (half, half, bias, half, activation["gelu"], True, *tiles), warps)
    for name in list(activation)[1:]:
        parameters = half, half, half, bias, bias, half, activation[name], True
        yield Signature("gated_linear", (*parameters, *tile._TILES["gated_linear"][0]), 8)
    columns = Matrix("float16")
    yield Signature("linear", (other, other, 0, columns, 0, False, 128, 128, 64), 8)
    parameters = half, half, half, 0, 0, loose, activation["silu"], False
    yield Signature("gated_linear", (*parameters, *tile._TILES["gated_linear"][1]))
    for tiles in tile._TILES["norm_linear"]:
        warps = 8 if tiles[0] == 128 else None
        parameters = half, floats, floats, scale, scale, half, bias, half, True, True, True, True
        yield Signature("norm_linear", (*parameters, *tiles), warps)
    parameters = half, 0, floats, 0, 0, half, 0, half, False, False, False, False
    yield Signature("norm_linear", (*parameters, *tile._TILES["norm_linear"][0]), 8)
    for is_centred in (True, False):
        mean = floats if is_centred else 0
        parameters = half, mean, floats, "float32", is_centred, *tile._STATISTICS_TILE
        yield Signature("row_statistics", parameters)
    for fast in (True, False):
        for tiles in tile._TILES["fast fp8_rows" if fast else "fp8_rows"]:
            parameters = e4m3, e4m3, floats, floats, bias, half, True, True, True, fast
            yield Signature("fp8_rows", (*parameters, *tiles), 8 if tiles[0] == 128 else None)


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
        if isinstance(x, (Matrix, Vector)):
            sizes += [8] + [4] * (4 if isinstance(x, Matrix) else 2)
        elif isinstance(x, str):
            sizes.append(4)
    found = elf.parameters(name)
    assert [size for _, size in found] == sizes
    for (offset, size), (following, _) in itertools.pairwise(found):
        assert offset % size == 0
        assert offset + size <= following < offset + size + 8
    assert not any(elf.stack_bytes()), "registers are spilled"
    # From disk, without the compiler.
    monkeypatch.setattr(_build, "_export", None)
    assert _build.cubin(signature, "sm_90") == (name, code)


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
