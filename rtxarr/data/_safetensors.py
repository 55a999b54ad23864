"""The safetensors file format: written in one atomic step, and read without trusting the file.

A file is the header's length (8 bytes, little endian), the header (JSON: each array's dtype, shape
and place, and string metadata) and the arrays' bytes without a gap. Files written here open in the
``safetensors`` package and the other way round. Two metadata entries are ours:

``rtxarr.sha256``
    SHA-256 of the whole file, taken with zeros in the digest's own place.
``rtxarr.complex128``
    JSON list of the arrays that are complex128, which the format lacks: they are stored as
    float64 with a last axis of two.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
import stat
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from rtxarr._device import is_array, is_device_array, to_device
from rtxarr.data._atomic import atomic_write

# The safetensors package refuses longer headers too.
MAX_HEADER_BYTES = 100_000_000
_MAX_NDIM = 64  # NumPy's own limit

_DTYPES = {
    "BOOL": np.dtype("bool"),
    "I8": np.dtype("int8"),
    "I16": np.dtype("int16"),
    "I32": np.dtype("int32"),
    "I64": np.dtype("int64"),
    "U8": np.dtype("uint8"),
    "U16": np.dtype("uint16"),
    "U32": np.dtype("uint32"),
    "U64": np.dtype("uint64"),
    "F16": np.dtype("float16"),
    "F32": np.dtype("float32"),
    "F64": np.dtype("float64"),
    "C64": np.dtype("complex64"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

_METADATA = "__metadata__"
DIGEST_KEY = "rtxarr.sha256"
_COMPLEX_KEY = "rtxarr.complex128"
# Our headers begin with the digest, so it can be filled in after the data is written.
_DIGEST_PREFIX = b'{"__metadata__":{"rtxarr.sha256":"'
_NO_DIGEST = b"0" * 64


# Error messages quote what a hostile file says, so the quotes are bounded.
_quote = reprlib.Repr()
_quote.maxstring = _quote.maxother = 200
_short = _quote.repr


class CheckpointError(ValueError):
    """A file is not what it must be, or a loaded state does not fit; nothing was changed."""


class _Entry(NamedTuple):
    """Where one array lies among the file's data."""

    begin: int
    end: int
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]


# ------------------------------------------------------------------------------------ write


def write_file(
    path: str | os.PathLike, arrays: Mapping[str, Any], metadata: Mapping[str, str]
) -> None:
    """Write arrays and string metadata to ``path``, atomically.

    Parameters
    ----------
    path : path-like
    arrays : mapping of str to array
        Of any library and device, contiguous or not. Device arrays are fetched one at a time.
    metadata : mapping of str to str
    """
    arrays = {name: _checked(name, x) for name, x in arrays.items()}
    metadata = dict(metadata)
    if pairs := [name for name, x in arrays.items() if x.dtype == np.complex128]:
        metadata[_COMPLEX_KEY] = json.dumps(pairs)
    # Wide elements first: each array then begins at a multiple of its element size.
    order = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    header = _format_header([(name, arrays[name]) for name in order], metadata)
    head = len(header).to_bytes(8, "little") + header
    digest = hashlib.sha256()
    with atomic_write(path) as file:
        parts: Iterable[Any] = chain([head], (_host_bytes(arrays[name]) for name in order))
        for part in parts:
            digest.update(part)
            file.write(part)
        file.seek(8 + len(_DIGEST_PREFIX))
        file.write(digest.hexdigest().encode())


def _checked(name: str, x: Any) -> Any:
    """Return ``x`` as a NumPy or CuPy array of a dtype that can be stored."""
    if not isinstance(name, str):
        raise TypeError(f"names of arrays must be str, got {name!r}")
    if name == _METADATA:
        raise ValueError(f"no array can be named {_METADATA!r}: the file format uses that name")
    name.encode()  # refuses lone surrogates, which other readers cannot take
    if not is_array(x):
        raise TypeError(f"{name!r} must be an array, got {type(x).__name__}")
    if not is_device_array(x):
        x = np.asarray(x)
        x = x.astype(x.dtype.newbyteorder("="), copy=False)
    if x.dtype not in _CODES and x.dtype != np.complex128:
        known = ", ".join(map(str, _CODES))
        raise TypeError(f"{name!r} must have one of the dtypes {known}, complex128, got {x.dtype}")
    return x


def _format_header(arrays: list[tuple[str, Any]], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {_METADATA: {DIGEST_KEY: _NO_DIGEST.decode(), **metadata}}
    begin = 0
    for name, x in arrays:
        if x.dtype == np.complex128:
            code, shape = "F64", [*x.shape, 2]
        else:
            code, shape = _CODES[x.dtype], list(x.shape)
        end = begin + x.size * x.dtype.itemsize
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"names and JSON state must take at most {MAX_HEADER_BYTES:,} bytes, "
            f"got {len(text):,}; "
            "keep large lists as arrays"
        )
    return text


def _host_bytes(x: Any) -> np.ndarray:
    """Return the elements of ``x`` in C order, little endian, as one row of uint8 on the host."""
    host = to_device(x, "cpu")
    return np.ascontiguousarray(host).reshape(-1).view(np.uint8)


# ------------------------------------------------------------------------------------- read


def read_file(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read and check a whole file.

    Returns
    -------
    arrays : dict of str to NumPy array
        In the order of the file's data; fresh and writable.
    metadata : dict of str to str

    Raises
    ------
    CheckpointError
        When the file breaks the format or its checksum, naming both the file and the fault.
    """
    path = os.fspath(path)
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
        raise CheckpointError(f"{path}: must be a regular file")
    with open(path, "rb") as file:
        try:
            return _read(file, os.fstat(file.fileno()).st_size)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None


def _read(file: BinaryIO, n_bytes: int) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    length, header = _read_header(file, n_bytes)
    entries, metadata = _parse_header(header, n_bytes - 8 - len(header))
    digest = None
    if DIGEST_KEY in metadata:
        digest = hashlib.sha256(length + _without_digest(header, metadata[DIGEST_KEY]))
    arrays = {entry.name: _read_array(file, entry, digest) for entry in entries}
    if digest is not None and digest.hexdigest() != metadata[DIGEST_KEY]:
        raise CheckpointError("the checksum does not match: the file was damaged or changed")
    for name in _complex_names(metadata):
        arrays[name] = _join_complex(name, arrays.get(name))
    return arrays, metadata


def _read_header(file: BinaryIO, n_bytes: int) -> tuple[bytes, bytes]:
    length = file.read(8)
    if len(length) < 8:
        raise CheckpointError(f"must hold at least 8 bytes, got {len(length)}")
    n_header = int.from_bytes(length, "little")
    if n_header > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the header must take at most {MAX_HEADER_BYTES:,} bytes, got {n_header:,}: not a "
            "safetensors file"
        )
    if n_header > n_bytes - 8:
        raise CheckpointError(
            f"the header must take {n_header:,} bytes but only {n_bytes - 8:,} follow: truncated, "
            "or not a safetensors file"
        )
    header = file.read(n_header)
    if len(header) < n_header:
        raise CheckpointError("the file was cut while it was read")
    return length, header


def _parse_header(header: bytes, n_data: int) -> tuple[list[_Entry], dict[str, str]]:
    if not header.startswith(b"{"):
        raise CheckpointError("the header must begin with '{': not a safetensors file")
    try:
        text = header.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"the header must be UTF-8: {error}") from None
    content = parse_json(text, "the header")
    metadata = content.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{_METADATA} must map strings to strings")
    entries = sorted(_parse_entry(name, described) for name, described in content.items())
    end = 0
    for entry in entries:
        if entry.begin != end:
            fault = "overlaps the array before it" if entry.begin < end else "leaves a gap"
            raise CheckpointError(
                f"the data of {_short(entry.name)} must begin at byte {end}, got {entry.begin}: "
                f"{fault}"
            )
        end = entry.end
    if end != n_data:
        fault = "truncated" if n_data < end else "something follows the last array"
        raise CheckpointError(f"the data must take {end:,} bytes, got {n_data:,}: {fault}")
    return entries, metadata


def parse_json(text: str, what: str) -> Any:
    """Parse strict JSON: no duplicate keys, no NaN or infinity, no overflow, bounded nesting."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise CheckpointError(f"{what} has the key {_short(key)} twice")
            key.encode()  # a lone surrogate is not text: a UnicodeEncodeError
            result[key] = value
        return result

    def finite(literal: str) -> float:
        value = float(literal)
        if not math.isfinite(value):
            raise CheckpointError(f"{what} must hold finite numbers, got {literal}")
        return value

    try:
        return json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{what} must be JSON: {error}") from None


def _parse_entry(name: str, described: Any) -> _Entry:
    key, name = name, _short(name)
    if not isinstance(described, dict) or described.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{name} must have a dtype, a shape and data_offsets, nothing else")
    code, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise CheckpointError(f"the dtype of {name} must be one of {known}, got {_short(code)}")
    if not _are_counts(shape) or len(shape) > _MAX_NDIM:
        raise CheckpointError(
            f"the shape of {name} must be up to {_MAX_NDIM} sizes, got {_short(shape)}"
        )
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"data_offsets of {name} must be [begin, end], got {_short(offsets)}")
    dtype = _DTYPES[code]
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{name} of dtype {code} and shape {tuple(shape)} must take {n_bytes:,} bytes, "
            f"got data_offsets {offsets}"
        )
    if math.prod(filter(None, shape)) * dtype.itemsize >= 2**63:  # (0, 2**62): no such array
        raise CheckpointError(f"the shape of {name} is too large, got {tuple(shape)}")
    return _Entry(offsets[0], offsets[1], key, dtype, tuple(shape))


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _without_digest(header: bytes, digest: str) -> bytes:
    begin = len(_DIGEST_PREFIX)
    end = begin + len(_NO_DIGEST)
    if header[:end] != _DIGEST_PREFIX + digest.encode("utf-8", "replace"):
        raise CheckpointError(
            "the checksum is not in its place: another program rewrote the header"
        )
    return header[:begin] + _NO_DIGEST + header[end:]


def _read_array(file: BinaryIO, entry: _Entry, digest: Any) -> np.ndarray:
    data = np.empty(entry.end - entry.begin, np.uint8)
    if file.readinto(data) != data.size:  # type: ignore[attr-defined]
        raise CheckpointError("the file was cut while it was read")
    if digest is not None:
        digest.update(data)
    if entry.dtype == np.bool and np.any(data > 1):
        raise CheckpointError(f"{_short(entry.name)} of dtype BOOL must hold bytes 0 and 1 alone")
    return data.view(entry.dtype).reshape(entry.shape)


def _complex_names(metadata: dict[str, str]) -> list[str]:
    names = parse_json(metadata.get(_COMPLEX_KEY, "[]"), _COMPLEX_KEY)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{_COMPLEX_KEY} must be a list of names")
    if len(set(names)) < len(names):
        raise CheckpointError(f"{_COMPLEX_KEY} names an array twice")
    return names


def _join_complex(name: str, pairs: np.ndarray | None) -> np.ndarray:
    if pairs is None or pairs.dtype != np.float64 or pairs.shape[-1:] != (2,):
        raise CheckpointError(
            f"{_COMPLEX_KEY} must name float64 arrays of shape (..., 2), got {_short(name)}"
        )
    return pairs.view(np.complex128).reshape(pairs.shape[:-1])
