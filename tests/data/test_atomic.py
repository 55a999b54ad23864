import errno
import os
import subprocess
import sys

import pytest

from rtxarr.data import _atomic
from rtxarr.data._atomic import atomic_write


def write(path, content):
    with atomic_write(path) as file:
        file.write(content)


def test_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "file"
    for content in (b"old", b"new"):
        write(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["file"]


def test_old_content_is_there_until_the_block_ends(tmp_path):
    path = tmp_path / "file"
    write(path, b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


@pytest.mark.skipif(os.name != "posix", reason="permissions and pipes are POSIX's")
def test_permissions_stay_and_what_is_no_file_is_refused(tmp_path):
    path = tmp_path / "file"
    write(path, b"old")
    path.chmod(0o600)
    write(path, b"new")
    assert path.stat().st_mode & 0o777 == 0o600
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    for other in (pipe, loop):
        with pytest.raises(OSError, match="path must name a regular file"):
            write(other, b"new")
    assert pipe.is_fifo()
    assert loop.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["file", "loop", "pipe"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_block_changes_nothing(tmp_path, error):
    path = tmp_path / "file"
    write(path, b"old")
    with pytest.raises(error), atomic_write(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_system_call_changes_nothing_and_names_the_file(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    write(path, b"old")

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_atomic.os, call, fail)
    with pytest.raises(OSError, match="No space left") as caught:
        write(path, b"new")
    assert str(path) in caught.value.__notes__[0]
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_syncs_the_file_before_its_name_and_the_folder_after(tmp_path, monkeypatch):
    calls = []

    def record(name):
        original = getattr(os, name)

        def call(*args):
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(_atomic.os, name, call)

    record("fsync")
    record("replace")
    write(tmp_path / "file", b"content")
    assert calls == ["fsync", "replace", "fsync"]


def test_removes_what_a_dead_writer_left_behind_and_nothing_else(tmp_path):
    names = {
        "old leftover": ".file.0123456789abcdef.tmp",
        "fresh": ".file.0123456789abcde0.tmp",
        "of another file": ".file.b.0123456789abcdef.tmp",
        "the user's": ".file.notes.tmp",
    }
    for what, name in names.items():
        (tmp_path / name).write_bytes(b"")
        if what != "fresh":
            os.utime(tmp_path / name, (0, 0))
    write(tmp_path / "file", b"content")
    del names["old leftover"]
    assert sorted(os.listdir(tmp_path)) == sorted([*names.values(), "file"])


def test_follows_a_symbolic_link(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_permissions_follow_the_umask(tmp_path):
    code = (
        "import os, sys; os.umask(0o027); from rtxarr.data._atomic import atomic_write\n"
        "with atomic_write(sys.argv[1]) as file: file.write(b'x')"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "file"], check=True)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_refuses_a_folder(tmp_path):
    with pytest.raises(IsADirectoryError, match="must name a file"):
        write(tmp_path, b"")


def test_needs_the_folder(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        write(tmp_path / "missing" / "file", b"")
    said = f"the folder to write to does not exist: '{tmp_path / 'missing'}'"
    assert str(caught.value) == f"[Errno 2] {said}"
    assert not hasattr(caught.value, "__notes__")  # there is no file that could be as before
