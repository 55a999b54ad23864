"""Files of programs: a header in JSON and parts of bytes, each byte covered by a checksum.

====================  ==========================================================================
bytes                 content
====================  ==========================================================================
16                    ``rtxarr-bundle-1\\n``
8                     length of the header, little-endian
32                    SHA-256 of the length and the header; HMAC-SHA-256 where a key was given
as the length says    the header: JSON, whose "parts" list name, size and SHA-256 of each part
the rest              the parts, one after the other
====================  ==========================================================================
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
import tempfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

MAGIC = b"rtxarr-bundle-1\n"
_FIXED = len(MAGIC) + 8 + 32
_LONGEST_HEADER = 1 << 30


class BundleError(RuntimeError):
    """Raised for a file of programs that is damaged, was changed, or is for another machine."""


def write(
    path: str | PathLike, header: Mapping[str, Any], parts: Mapping[str, bytes], key: bytes | None
) -> None:
    """Write a file: whole or not at all.

    Parameters
    ----------
    header : mapping
        Of what JSON can hold; "parts" is added.
    parts : mapping of str to bytes
    key : bytes or None
        A secret that :func:`read` must be given, too.
    """
    listed = [
        {"name": name, "size": len(part), "sha256": hashlib.sha256(part).hexdigest()}
        for name, part in parts.items()
    ]
    text = json.dumps({**header, "parts": listed}, separators=(",", ":"), allow_nan=False).encode()
    size = struct.pack("<Q", len(text))
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as f:
            f.writelines([MAGIC, size, _digest(size + text, key), text, *parts.values()])
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read(path: str | PathLike, key: bytes | None) -> tuple[dict, dict[str, memoryview]]:
    """Return the header and the parts of a file, all of which were checked.

    Raises
    ------
    BundleError
        Naming the file and what is wrong with it.
    """
    content = memoryview(Path(path).read_bytes())
    if content[: len(MAGIC)] != MAGIC:
        known = bytes(content[: len(MAGIC) - 3]) == MAGIC[:-3]
        what = "is of another version of the format" if known else "is no file of programs"
        raise BundleError(f"{path} {what}")
    if len(content) < _FIXED:
        raise BundleError(f"{path} is cut off: it ends in its header")
    size = content[len(MAGIC) : len(MAGIC) + 8]
    (length,) = struct.unpack("<Q", size)
    text = content[_FIXED : _FIXED + length]
    if len(text) < length or length > _LONGEST_HEADER:
        raise BundleError(f"{path} is cut off: it ends in its header, or its length was changed")
    given = bytes(content[len(MAGIC) + 8 : _FIXED])
    if not hmac.compare_digest(given, _digest(bytes(size) + bytes(text), key)):
        if key is None or hmac.compare_digest(given, _digest(bytes(size) + bytes(text), None)):
            more = "" if key is None else ", or it was written without a key"
            more = more or ", or it was written with a key, which load() must be given"
            raise BundleError(f"{path}: its header was changed{more}")
        raise BundleError(f"{path}: its header was changed, or the key is another")
    header = json.loads(bytes(text))
    parts, at = {}, _FIXED + length
    for part in header["parts"]:
        found = content[at : at + part["size"]]
        at += part["size"]
        if len(found) < part["size"]:
            raise BundleError(f"{path} is cut off: it ends in its part {part['name']!r}")
        if hashlib.sha256(found).hexdigest() != part["sha256"]:
            raise BundleError(f"{path}: its part {part['name']!r} was changed")
        parts[part["name"]] = found
    if at != len(content):
        raise BundleError(f"{path} has {len(content) - at} bytes after its last part")
    return header, parts


def _digest(content: bytes, key: bytes | None) -> bytes:
    if key is None:
        return hashlib.sha256(content).digest()
    return hmac.digest(key, content, "sha256")
