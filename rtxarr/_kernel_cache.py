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

    That is its bytecode, the names and constants in it, its closure and the globals it names,
    followed through the functions and intrinsics it calls, and ``context`` (signature,
    architecture, versions).
    """
    digest = _Digest()
    digest.put(repr(context))
    digest.add(function, set())
    return digest.result()


def _python_function(value: Any) -> Any:
    # A numba dispatcher keeps its Python function in py_func, an intrinsic in _defn.
    return getattr(value, "py_func", getattr(value, "_defn", value))


# What is told apart by its text, which is the same in each process.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), np.generic, np.dtype, type)


class _Digest:
    """Puts values into a digest such that different ones give different digests."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self._seen: dict[int, int] = {}

    def result(self) -> str:
        return self._sha.hexdigest()

    def put(self, *texts: str | bytes) -> None:
        """Add texts, each with its length, so that they cannot run into each other."""
        for text in texts:
            data = text.encode() if isinstance(text, str) else text
            self._sha.update(len(data).to_bytes(8, "little") + data)

    def add(self, value: Any, names: set[str]) -> None:
        """Add a value that code mentioning ``names`` can reach."""
        function = _python_function(value)
        if isinstance(value, _PLAIN):
            self.put(type(value).__name__, repr(value))
        elif isinstance(value, types.CodeType):
            self._add_code(value)
        elif isinstance(function, types.FunctionType):
            if self._is_new(function):
                # Of a dispatcher: fastmath and the like.
                self.add(getattr(value, "targetoptions", None), set())
                self._add_function(function)
        elif isinstance(value, types.BuiltinFunctionType):
            self.put("builtin", f"{value.__module__}.{value.__qualname__}")
        elif isinstance(value, types.ModuleType):
            self.put("module", value.__name__)
            if value.__name__.startswith("rtxarr"):  # module.function: our own code may change
                self._add_named(vars(value), names)
        elif isinstance(value, np.ndarray):
            self.put("array", f"{value.dtype}{value.shape}", value.tobytes())
        elif isinstance(value, (tuple, list)):
            self.put("items", str(len(value)))
            for item in value:
                self.add(item, names)
        elif isinstance(value, (set, frozenset)):
            self.put("set", *sorted(map(repr, value)))
        elif isinstance(value, dict):
            self.put("dict", str(len(value)))
            for key, item in value.items():
                self.add(key, names)
                self.add(item, names)
        elif type(value).__module__.startswith(("numba.", "llvmlite.")):
            self.put(type(value).__qualname__, str(value))  # a type, or inline assembly
        elif self._is_new(value):
            self.put(type(value).__qualname__)
            self.add(getattr(value, "__dict__", None), names)

    def _is_new(self, value: Any) -> bool:
        """Number what is met; what was met before is its number."""
        n_seen = len(self._seen)
        number = self._seen.setdefault(id(value), n_seen)
        if number == n_seen:
            return True
        self.put("seen", str(number))
        return False

    def _add_function(self, function: types.FunctionType) -> None:
        # numba gives some functions, such as libdevice's, a meaning that is not in their code.
        self.put("function", function.__module__ or "", function.__qualname__)
        names = self._add_code(function.__code__)
        self.add(function.__defaults__, names)
        self.add(function.__kwdefaults__, names)
        for cell in function.__closure__ or ():
            self.add(cell.cell_contents, names)
        self._add_named(function.__globals__, names)

    def _add_named(self, found: dict[str, Any], names: set[str]) -> None:
        for name in sorted(names & found.keys()):
            self.put("name", name)
            self.add(found[name], names)

    def _add_code(self, code: types.CodeType) -> set[str]:
        """Add bytecode, names and constants, nested functions' too; return all the names.

        The bytecode has but numbers of names: that of ``exp(x)`` and that of ``log(x)`` are one.
        """
        self.put("code", code.co_code, *code.co_names)
        names = set(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                names |= self._add_code(constant)
            else:
                self.add(constant, names)
        return names


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
