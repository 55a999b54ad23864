"""The cache of machine code: damage, several threads and processes, limits."""

import os
import subprocess
import sys
import threading
import time

import pytest

from rtxarr.polygraph import _cache, _cuda_backend
from rtxarr.polygraph._cache import KernelCache
from rtxarr.polygraph.codegen import _llvm


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path))
    return tmp_path


def never():
    raise AssertionError("compiled what the cache has")


def test_a_kernel_is_made_once_and_found_by_the_next_process():
    assert KernelCache().get("k", lambda: b"code") == b"code"
    other = KernelCache()
    assert other.get("k", never) == b"code"
    assert other.get("k", never) == b"code"
    info = other.info()
    assert (info.memory_hits, info.disk_hits, info.compiled) == (1, 1, 0)
    assert info.hit_ratio == 1 and info.disk_kernels == 1 and info.memory_bytes == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[:20],
        lambda content: content[:-1] + b"x",
        lambda content: content + b"more",
        lambda content: b"\x7fELF of somebody else",
        lambda content: content.replace(b"kernel-1", b"kernel-0"),
    ],
    ids=["empty", "cut", "cut-head", "changed", "longer", "foreign", "version"],
)
def test_a_damaged_file_is_compiled_anew(folder, damage):
    KernelCache().get("k", lambda: b"code")
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    cache = KernelCache()
    assert cache.get("k", lambda: b"code") == b"code"
    assert cache.info().compiled == 1
    assert KernelCache().get("k", never) == b"code"


def test_other_tools_compile_anew(monkeypatch):
    monkeypatch.setattr(_cache, "kernels", KernelCache())
    found = {"version": "13.0", "options": ["--std=c++17"]}
    compiled = []

    def compile_text(text, cc, *, strict):
        compiled.append(cc)
        return b"cubin", ""

    tools = _cuda_backend._nvrtc
    monkeypatch.setattr(tools, "version", lambda: found["version"])
    monkeypatch.setattr(tools, "options", lambda cc, *, strict: found["options"])
    monkeypatch.setattr(tools, "compile_text", compile_text)

    def count(cc=(9, 0), text="void f() {}"):
        for _ in range(2):
            _cuda_backend.machine_code(text, cc, strict=True)
        return len(compiled)

    assert count() == 1
    assert count(cc=(8, 0)) == 2
    assert count(text="void g() {}") == 3
    found["version"] = "13.1"
    assert count() == 4
    found["options"] = ["--std=c++17", "--fmad=false"]
    assert count() == 5


def test_another_processor_or_llvm_compiles_anew(monkeypatch):
    pytest.importorskip("llvmlite")
    monkeypatch.setattr(_cache, "kernels", KernelCache())
    text = "define i32 @kernel() {\n  ret i32 7\n}\n"
    here = _llvm._circumstances()
    for i in range(len(here)):
        other = (*here[:i], here[i] + "-other", *here[i + 1 :])
        for circumstances in (here, other):
            monkeypatch.setattr(_llvm, "_circumstances", lambda found=circumstances: found)
            assert _llvm.Module(text).function("kernel", [])() == 7
        assert _cache.kernels.info().compiled == i + 2


def test_threads_compile_a_key_once():
    cache, made, got = KernelCache(), [], []

    def make():
        made.append(1)
        time.sleep(0.05)
        return b"code"

    threads = [threading.Thread(target=lambda: got.append(cache.get("k", make))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == [b"code"] * 8 and len(made) == 1


_PROCESSES = """
import os, time
from rtxarr.polygraph._cache import KernelCache

start = time.monotonic() + 0.3
for _ in range(16):
    if not os.fork():
        cache = KernelCache()

        def make():
            time.sleep(0.1)
            return b"code"

        time.sleep(max(start - time.monotonic(), 0))
        ok = all(cache.get(key, make) == b"code" for key in "abc")
        os._exit(cache.info().compiled if ok else 99)
print(*(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(16)))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_that_start_together_compile_a_key_once(folder):
    done = subprocess.run(
        [sys.executable, "-c", _PROCESSES], capture_output=True, text=True, check=True
    )
    counts = list(map(int, done.stdout.split()))
    assert len(counts) == 16 and sum(counts) == 3, counts
    assert len(list(folder.iterdir())) == 3  # no locks are left


def test_a_process_that_hangs_is_not_waited_for():
    with _cache._one_process("k", 1.0):
        assert KernelCache(patience=0.05).get("k", lambda: b"code") == b"code"


def test_the_least_recently_used_files_go_first(folder):
    cache = KernelCache(disk_limit=1000)
    for age, key in ((300, "old"), (200, "used"), (100, "new")):
        cache.get(key, lambda: bytes(250))
        os.utime(folder / f"polygraph-{key}", (time.time() - age,) * 2)
    KernelCache().get("used", never)
    cache.get("more", lambda: bytes(250))
    names = sorted(p.name.removeprefix("polygraph-") for p in folder.iterdir())
    assert names == ["more", "new", "used"]


def test_memory_is_limited():
    cache = KernelCache(memory_limit=1000)
    for i in range(10):
        cache.get(str(i), lambda: bytes(300))
    assert cache.info().memory_kernels == 3
    cache.get("large", lambda: bytes(5000))  # more than the limit is kept while it is the newest
    assert cache.info().memory_kernels == 1


def test_without_a_folder_only_memory_is_used(monkeypatch):
    monkeypatch.setenv("RTXARR_CACHE_DIR", "")
    cache = KernelCache()
    assert cache.get("k", lambda: b"code") == cache.get("k", never) == b"code"
    assert cache.info().folder is None and cache.info().disk_kernels == 0


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path / "file" / "inside"))
    cache = KernelCache()
    assert cache.get("k", lambda: b"code") == cache.get("k", never) == b"code"
