"""LLVM assembly to machine code, in memory."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Sequence
from typing import Any

from rtxarr.polygraph import _cache

_lock = threading.Lock()  # LLVM's contexts are not for several threads


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread of the parent may have held it


@functools.cache
def _llvm() -> Any:
    """Return llvmlite's binding, ready for this processor; None if it is too old."""
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return None
    if not hasattr(llvm, "create_pass_builder"):
        return None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def is_available() -> bool:
    """Tell whether code can be compiled: whether llvmlite 0.45 or newer is there."""
    return _llvm() is not None


@functools.cache
def _machine() -> Any:
    llvm = _llvm()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        jit=True,
    )


def _object_code(text: str) -> bytes:
    """Return an object file with the functions of ``text``, for this processor."""
    llvm = _llvm()
    with _lock:
        module = llvm.parse_assembly(text)
        _optimize(module, _machine())
        return _machine().emit_object(module)


def _optimize(module: Any, machine: Any) -> None:
    llvm = _llvm()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


@functools.cache
def _circumstances() -> tuple[str, ...]:
    """Return what an object file depends on besides its text."""
    llvm = _llvm()
    triple = llvm.get_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    version = ".".join(map(str, llvm.llvm_version_info))
    return triple, llvm.get_host_cpu_name(), features, version


class Module:
    """The function ``kernel`` of a text, as machine code; it lives as long as this object."""

    def __init__(self, text: str) -> None:
        key = _cache.digest(text, *_circumstances())
        code = _cache.kernels.get(key, lambda: _object_code(text))
        llvm = _llvm()
        with _lock:
            link = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
            link.export_symbol("kernel")
            # A name must be new to the compiler, and an address must not outlive it.
            self._compiler = llvm.create_lljit_compiler(_machine())
            self._library = link.link(self._compiler, "kernel")
            self._address = self._library["kernel"]

    def function(self, name: str, argtypes: Sequence[Any]) -> Any:
        """Return a function that gives an int; it runs without Python's lock."""
        if name != "kernel":
            raise ValueError(f"a module has the function 'kernel', got {name!r}")
        return ctypes.CFUNCTYPE(ctypes.c_int, *argtypes)(self._address)


@functools.lru_cache(maxsize=1024)
def compiled(text: str) -> Module:
    """Return the functions of ``text``, compiled once."""
    return Module(text)


def object_code(texts: Sequence[str], cpu: str) -> bytes:
    """Return an ELF object with the function ``kernel`` of each text, as ``k0``, ``k1``, ...

    ``cpu`` is a level of the x86-64 psABI, such as "x86-64-v3".
    """
    llvm = _llvm()
    with _lock:
        machine = llvm.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(
            cpu=cpu, opt=3, reloc="pic", codemodel="small"
        )
        whole = llvm.parse_assembly('target triple = "x86_64-unknown-linux-gnu"')
        for i, text in enumerate(texts):
            module = llvm.parse_assembly(text.replace("@kernel(", f"@k{i}("))
            module.triple = whole.triple
            _optimize(module, machine)
            whole.link_in(module)
        return machine.emit_object(whole)
