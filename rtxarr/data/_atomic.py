"""Writing a file so that its name always leads to a whole one, old or new."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

# A temporary file that nobody has written to for this long belongs to a dead process.
_STALE_SECONDS = 600


@contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of ``path`` when the block ends without an error.

    The content goes to a temporary file in the same folder, is flushed to the disk, and is then
    renamed. A reader, or whoever comes after a crash or a power cut, finds the old content or the
    new one. After an error, a full disk included, the temporary file is removed and ``path`` is as
    it was; what a killed process left behind is removed by a later write to the same path.

    Parameters
    ----------
    path : path-like
        Its folder must exist. A symbolic link stays one: what it points to is replaced. Devices
        and pipes are refused; the permissions of a file stay as they were.

    Yields
    ------
    binary file, writable and seekable
    """
    target = os.path.realpath(path)
    if os.path.isdir(target):
        raise IsADirectoryError(
            errno.EISDIR, "path must name a file, got a folder", os.fspath(path)
        )
    if os.path.lexists(target) and not os.path.isfile(target):
        raise OSError(errno.EINVAL, "path must name a regular file", os.fspath(path))
    folder, name = os.path.split(target)
    if not os.path.lexists(folder):
        raise FileNotFoundError(errno.ENOENT, "the folder to write to does not exist", folder)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            _remove_stale(folder, name, os.fstat(file.fileno()).st_mtime)
            with suppress(OSError):  # no file yet, or a file system without permissions
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            error.add_note(f"while writing {target}, which is as it was before")
        raise
    _sync_folder(folder)


def _remove_stale(folder: str, name: str, now: float) -> None:
    # `now` is the file system's clock, not ours: they differ on network drives.
    pattern = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.tmp")
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # another process removes the same file
            if pattern.fullmatch(entry.name) and now - entry.stat().st_mtime > _STALE_SECONDS:
                os.unlink(entry.path)


def _sync_folder(folder: str) -> None:
    """Make a rename in ``folder`` survive a power cut."""
    if os.name != "posix":  # Windows cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
