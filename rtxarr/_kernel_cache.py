"""Compiled kernels on disk: what identifies a kernel, and reading and writing its machine code."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np

_log = logging.getLogger("rtxarr")
_MAGIC = b"rtxarr-kernel-1\n"


def cache_dir() -> Path | None:
    """Return where kernels are kept: ``RTXARR_CACHE_DIR``, else ``~/.cache/rtxarr``.

    An empty ``RTXARR_CACHE_DIR`` gives None: nothing is kept.
    """
    chosen = os.environ.get("RTXARR_CACHE_DIR")
    if chosen is None:
        return Path.home() / ".cache" / "rtxarr"
    return Path(chosen) if chosen else None


def fingerprint(function: Any, *context: Any) -> str:
    """Return a digest of all that the machine code of ``function`` depends on.

    That is its bytecode, constants, closure and the globals it names, followed through the
    functions and intrinsics it calls, and ``context`` (signature, architecture, versions).
    """
    digest = hashlib.sha256(repr(context).encode())
    _add_function(digest, function, set())
    return digest.hexdigest()


def _python_function(value: Any) -> Any:
    # A numba dispatcher keeps its Python function in py_func, an intrinsic in _defn.
    return getattr(value, "py_func", getattr(value, "_defn", value))


def _add_function(digest: Any, function: Any, seen: set[int]) -> None:
    function = _python_function(function)
    if id(function) in seen:
        return
    seen.add(id(function))
    names = _add_code(digest, function.__code__)
    digest.update(repr(function.__defaults__).encode())
    for cell in function.__closure__ or ():
        _add_value(digest, cell.cell_contents, names, seen)
    for name in sorted(names):
        if name in function.__globals__:
            digest.update(name.encode())
            _add_value(digest, function.__globals__[name], names, seen)


def _add_code(digest: Any, code: types.CodeType) -> set[str]:
    """Add the bytecode and constants, nested functions' too; return the names they mention."""
    digest.update(code.co_code)
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _add_code(digest, constant)
        else:
            digest.update(repr(constant).encode())
    return names


def _add_value(digest: Any, value: Any, names: set[str], seen: set[int]) -> None:
    if isinstance(value, types.ModuleType):
        digest.update(value.__name__.encode())
        if value.__name__.startswith("rtxarr"):  # module.function: our own code may change
            for name in sorted(names & vars(value).keys()):
                _add_value(digest, vars(value)[name], names, seen)
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(_python_function(value), types.FunctionType):
        _add_function(digest, value, seen)
    elif isinstance(value, (bool, int, float, complex, str, bytes, np.generic, np.dtype, type)):
        digest.update(repr(value).encode())
    elif isinstance(value, (tuple, list)):
        for item in value:
            _add_value(digest, item, names, seen)
    else:
        digest.update(type(value).__qualname__.encode())


def load(key: str) -> tuple[str, bytes] | None:
    """Return the entry name and machine code kept under ``key``; None if absent or damaged."""
    folder = cache_dir()
    if folder is None:
        return None
    try:
        content = (folder / key).read_bytes()
    except OSError:
        return None
    head, rest = content[: len(_MAGIC) + 32], content[len(_MAGIC) + 32 :]
    if head != _MAGIC + hashlib.sha256(rest).digest():
        return None
    name, _, code = rest.partition(b"\n")
    return name.decode(), code


def store(key: str, name: str, code: bytes) -> None:
    """Keep machine code under ``key``: whole or not at all, also when processes race."""
    folder = cache_dir()
    if folder is None:
        return
    rest = name.encode() + b"\n" + code
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(_MAGIC + hashlib.sha256(rest).digest() + rest)
            os.replace(temporary, folder / key)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        _log.warning("kernels cannot be kept in %s (%s): each process compiles anew", folder, error)
