"""Machine code that needs no linker: an object file laid out once, put into memory as it is.

:func:`link` takes an ELF object of x86-64 apart, lays its sections out one after the other and
fills in all distances between them. What the code calls outside of itself (``malloc``, ``memset``)
goes through a table of addresses at its end. :class:`Code` copies such an image to memory, fills in
the table, and makes it executable.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

SYMBOLS = frozenset("malloc free memset memcpy memmove fmod fmodf fma fmaf".split())
"""What an image may call."""

_SHF_WRITE, _SHF_ALLOC = 1, 2
_NOBITS = 8
_PC32, _PLT32, _PC64 = 2, 4, 24  # R_X86_64_...
_GOT = (9, 41, 42)  # GOTPCREL, GOTPCRELX, REX_GOTPCRELX
_PROT_READ, _PROT_EXEC = 1, 4


class Image(NamedTuple):
    """Code that runs wherever it is put.

    Attributes
    ----------
    code : bytes
    entries : dict of str to int
        Where its functions begin.
    imports : dict of str to int
        Where the address of each function that it calls belongs.
    """

    code: bytes
    entries: dict[str, int]
    imports: dict[str, int]


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


def link(content: bytes) -> Image:
    """Lay out an ELF object; ValueError where it needs more than distances inside of itself."""
    if content[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", content, 18)[0] != 62:
        raise ValueError("the object file is not of ELF for x86-64")
    first, (size, n, names) = (
        struct.unpack_from("<Q", content, 40)[0],
        struct.unpack_from("<HHH", content, 58),
    )
    sections = [
        _Section._make(struct.unpack_from("<IIQQQQIIQQ", content, first + i * size))
        for i in range(n)
    ]

    def name_of(table: int, at: int) -> str:
        start = sections[table].offset + at
        return content[start : content.index(b"\0", start)].decode()

    code = bytearray()
    places = {}
    for i, s in enumerate(sections):
        title = name_of(names, s.name)
        if not s.flags & _SHF_ALLOC or title == ".eh_frame" or not s.size:
            continue
        if s.flags & _SHF_WRITE or s.kind == _NOBITS:
            raise ValueError(f"the object file has data that changes, in {title}")
        code += b"\0" * (-len(code) % max(s.alignment, 1))
        places[i] = len(code)
        code += content[s.offset : s.offset + s.size]

    (symbols,) = [s for s in sections if s.kind == 2]
    entries, known, missing = {}, {}, {}
    for k in range(symbols.size // 24):
        name, info, _, at, value, _ = struct.unpack_from(
            "<IBBHQQ", content, symbols.offset + 24 * k
        )
        title = name_of(symbols.link, name)
        if at in places:
            known[k] = places[at] + value
            if info >> 4 == 1:  # global
                entries[title] = known[k]
        elif at == 0 and title:
            missing[k] = title
    imports, stubs = _imports(code, list(dict.fromkeys(missing.values())))
    for s in sections:
        if s.kind == 4 and s.info in places:
            for offset, info, addend in struct.iter_unpack(
                "<QQq", content[s.offset : s.offset + s.size]
            ):
                kind, k = info & 0xFFFFFFFF, info >> 32
                where = places[s.info] + offset
                if kind in _GOT and k in missing:
                    target = imports[missing[k]]
                elif kind in (_PC32, _PLT32, _PC64):
                    target = stubs[missing[k]] if k in missing else known[k]
                else:
                    raise ValueError(f"the object file has a relocation of kind {kind}")
                form = "<q" if kind == _PC64 else "<i"
                struct.pack_into(form, code, where, target + addend - where)
    return Image(bytes(code), entries, imports)


def _imports(code: bytearray, names: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Append a table of addresses, and for each a jump to there; return where both are."""
    code += b"\0" * (-len(code) % 16)
    imports = {name: len(code) + 8 * i for i, name in enumerate(names)}
    code += bytes(8 * len(names) + 8 * (len(names) % 2))
    stubs = {}
    for name in names:
        stubs[name] = len(code)
        code += b"\xff\x25" + struct.pack("<i", imports[name] - len(code) - 6)  # jmp [rip + ...]
        code += b"\xcc" * (-len(code) % 16)
    return imports, stubs


@functools.cache
def _libraries() -> tuple[Any, ...]:
    found = [ctypes.CDLL(None)]
    for name in ("libc.so.6", "libm.so.6"):
        try:
            found.append(ctypes.CDLL(name))
        except OSError:  # it is part of the other, or of the process
            continue
    return tuple(found)


def _address_of(symbol: str) -> int:
    if symbol not in SYMBOLS:
        raise ValueError(f"machine code must not call {symbol}()")
    for library in _libraries():
        try:
            return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0
        except AttributeError:
            continue
    raise ValueError(f"this system has no {symbol}()")


class Code:
    """An image in memory; its functions live as long as this object."""

    def __init__(self, image: Image) -> None:
        size = len(image.code)
        self._memory = mmap.mmap(-1, max(size, 1))
        self._memory[:size] = image.code
        for symbol, at in image.imports.items():
            struct.pack_into("<Q", self._memory, at, _address_of(symbol))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._entries = image.entries
        protect = _libraries()[0].mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if protect(self._address, max(size, 1), _PROT_READ | _PROT_EXEC):
            raise OSError("this system does not let memory be executable")

    def function(self, name: str, argtypes: Sequence[Any]) -> Any:
        """Return a function that gives an int; it runs without Python's lock."""
        return ctypes.CFUNCTYPE(ctypes.c_int, *argtypes)(self._address + self._entries[name])
