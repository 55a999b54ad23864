"""Machine code of kernels, kept in memory and on disk: each text is compiled once.

Once also where several processes start on an empty cache: the first locks a file of the key, the
others wait for what it makes. Files carry a checksum and appear whole or not at all; what was cut
off or changed is compiled anew.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rtxarr import _kernel_cache

try:
    import fcntl
except ImportError:  # not on Windows: each process compiles for itself
    fcntl = None  # type: ignore[assignment]

_PREFIX = "polygraph-"


class CacheInfo(NamedTuple):
    """What a cache did and holds; see :func:`cache_info`."""

    memory_hits: int
    disk_hits: int
    compiled: int
    hit_ratio: float
    memory_kernels: int
    memory_bytes: int
    disk_kernels: int
    disk_bytes: int
    disk_limit: int
    folder: Path | None


class KernelCache:
    """Machine code under keys: what was not used for longest goes first.

    Parameters
    ----------
    memory_limit, disk_limit : int, bytes
    patience : float, seconds
        How long to wait for another process that compiles the same.
    """

    def __init__(
        self, memory_limit: int = 64 << 20, disk_limit: int = 512 << 20, patience: float = 60.0
    ) -> None:
        self.memory_limit = memory_limit
        self.disk_limit = disk_limit
        self.patience = patience
        self._lock = threading.Lock()
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._making: dict[str, threading.Lock] = {}
        self._memory_hits = self._disk_hits = self._compiled = 0

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        """Return the code kept under ``key``, or what ``make()`` gives, which is then kept."""
        with self._lock:
            code = self._memory.get(key)
            if code is not None:
                self._memory_hits += 1
                self._memory.move_to_end(key)
                return code
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                code = self._memory.get(key)
                self._memory_hits += code is not None
            if code is None:
                code = self._from_disk(key) or self._make(key, make)
                self._remember(key, code)
        return code

    def _make(self, key: str, make: Callable[[], bytes]) -> bytes:
        with _one_process(key, self.patience):
            code = self._from_disk(key)  # another process may have made it meanwhile
            if code is None:
                code = make()
                with self._lock:
                    self._compiled += 1
                _kernel_cache.store(_PREFIX + key, "", code)
                self._trim()
        return code

    def _from_disk(self, key: str) -> bytes | None:
        found = _kernel_cache.load(_PREFIX + key)
        if found is None:
            return None
        with self._lock:
            self._disk_hits += 1
        with suppress(OSError):
            os.utime(_path(key))
        return found[1]

    def _remember(self, key: str, code: bytes) -> None:
        with self._lock:
            self._memory[key] = code
            self._making.pop(key, None)
            size = sum(map(len, self._memory.values()))
            while size > self.memory_limit and len(self._memory) > 1:
                _, old = self._memory.popitem(last=False)
                size -= len(old)

    def _trim(self) -> None:
        """Delete files until nine tenths of the limit are used, if it is passed."""
        files = sorted(_files())
        size = sum(n for _, n, _ in files)
        if size <= self.disk_limit:
            return
        for _, n, path in files:
            with suppress(OSError):
                path.unlink()
            size -= n
            if size <= self.disk_limit * 9 // 10:
                break

    def info(self) -> CacheInfo:
        files = _files()
        with self._lock:
            hits = self._memory_hits + self._disk_hits
            return CacheInfo(
                memory_hits=self._memory_hits,
                disk_hits=self._disk_hits,
                compiled=self._compiled,
                hit_ratio=hits / max(hits + self._compiled, 1),
                memory_kernels=len(self._memory),
                memory_bytes=sum(map(len, self._memory.values())),
                disk_kernels=len(files),
                disk_bytes=sum(n for _, n, _ in files),
                disk_limit=self.disk_limit,
                folder=_kernel_cache.cache_dir(),
            )


def digest(*parts: object) -> str:
    """Return a key: what the machine code depends on, put together."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _path(key: str) -> Path:
    folder = _kernel_cache.cache_dir()
    return (folder or Path()) / (_PREFIX + key)


def _files() -> list[tuple[float, int, Path]]:
    """Return (time of last use, bytes, path) of each kernel on disk."""
    folder = _kernel_cache.cache_dir()
    found = []
    for path in folder.glob(f"{_PREFIX}*") if folder is not None else ():
        with suppress(OSError):  # another process may delete it
            status = path.stat()
            if path.suffix != ".lock":
                found.append((status.st_mtime, status.st_size, path))
    return found


@contextmanager
def _one_process(key: str, patience: float) -> Iterator[None]:
    """Let one process at a time be here with ``key``; after ``patience`` seconds, all."""
    folder = _kernel_cache.cache_dir()
    if folder is None or fcntl is None:
        yield
        return
    path = _path(key).with_suffix(".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError:  # a cache that cannot be written: nothing to wait for
        yield
        return
    with lock:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.01)
        try:
            yield
        finally:
            # Who waits for this file finds the kernel; who comes later need not wait.
            path.unlink(missing_ok=True)


kernels = KernelCache()


def cache_info() -> CacheInfo:
    """Return what the cache of compiled kernels did in this process, and what it holds.

    Returns
    -------
    CacheInfo
        ``memory_hits``, ``disk_hits``, ``compiled`` and ``hit_ratio`` of this process;
        ``memory_kernels`` and ``memory_bytes``; ``disk_kernels``, ``disk_bytes`` and
        ``disk_limit`` of ``folder``, which is None where ``RTXARR_CACHE_DIR`` is empty.
    """
    return kernels.info()
