"""Compile numba kernels: signatures, PTX, machine code. Needs no GPU and no driver."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from rtxarr import _device

_log = logging.getLogger("rtxarr")
_HALF = ("float16", "bfloat16")

# A description of one argument: (dtype name, dimensions, "C" or "A"), or a scalar's dtype name.
Signature = tuple[str | tuple[str, int, str], ...]


def signature_of(args: tuple) -> Signature:
    """Describe arguments of ``launch`` the way ``compile_ptx`` wants them."""
    return tuple(_describe(x) for x in args)


def _describe(x: Any) -> str | tuple[str, int, str]:
    if isinstance(x, np.generic):
        return x.dtype.name
    if isinstance(x, (bool, int, float)):
        return {bool: "bool", int: "int64", float: "float64"}[type(x)]
    if _device.is_array(x):
        return x.dtype.name, x.ndim, "C" if x.flags.c_contiguous else "A"
    raise TypeError(f"a kernel takes arrays and numbers, got {type(x).__name__}")


def _numba_type(described: str | tuple[str, int, str]) -> Any:
    types = _device.types
    if isinstance(described, str):
        return types.boolean if described == "bool" else getattr(types, described)
    name, n_dims, layout = described
    element = "uint16" if name in _HALF else {"bool": "boolean"}.get(name, name)
    array: Any = types.Array
    return array(getattr(types, element), n_dims, layout)


def compile_ptx(kernel: Any, args_signature: Signature, cc: tuple[int, int]) -> tuple[str, str]:
    """Compile ``kernel`` to PTX; needs no GPU and no driver.

    Parameters
    ----------
    kernel : function or ``cuda.jit`` dispatcher
        Its blocks are launched in clusters of as many along x as its ``cluster`` says, if there.
    args_signature : tuple
        For each argument ``(dtype name, n_dims, "C" or "A")``, or a scalar's dtype name: what
        ``signature_of(args)`` gives.
    cc : tuple of int
        Compute capability, such as (9, 0).

    Returns
    -------
    name, ptx : str
        The entry point's name and the text.
    """
    cuda, types = _device.cuda, _device.types
    options = getattr(kernel, "targetoptions", {})
    options = {name: options[name] for name in ("fastmath", "launch_bounds") if options.get(name)}
    with _compiling_for(cc):
        ptx, _ = cuda.compile(
            getattr(kernel, "py_func", kernel),
            types.void(*map(_numba_type, args_signature)),
            device=False,
            abi="numba",
            cc=cc,
            **options,
        )
    (name,) = re.findall(r"\.visible \.entry (\w+)", ptx)
    if blocks := getattr(kernel, "cluster", 0):
        start = ptx.index(")", ptx.index(f".entry {name}(")) + 1
        lines = f"\n.explicitcluster\n.reqnctapercluster {blocks}, 1, 1"
        ptx = ptx[:start] + lines + ptx[start:]
    return name, ptx


_compile_lock = threading.Lock()


@contextmanager
def _compiling_for(cc: tuple[int, int]) -> Iterator[None]:
    """Let device functions compile for ``cc`` too.

    numba asks the current GPU for their architecture even when one is given for the kernel.
    """
    dispatcher = _device.cuda.dispatcher
    with _compile_lock:
        asked = dispatcher.get_current_device
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
        try:
            yield
        finally:
            dispatcher.get_current_device = asked


def assemble(ptx: str, cc: tuple[int, int]) -> tuple[bytes, str]:
    """Assemble PTX to a cubin with nvJitLink; needs no GPU and no driver.

    Doing so here rather than in the driver lets a toolkit newer than the driver work.

    Returns
    -------
    cubin : bytes
    log : str
        The assembler's report: registers and spilled bytes.
    """
    nvjitlink = _device.nvjitlink
    handle = nvjitlink.create(2, [f"-arch=sm_{cc[0]}{cc[1]}", "-verbose"])
    try:
        text = ptx.encode() + b"\0"
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, text, len(text), "kernel")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        if log:
            nvjitlink.get_info_log(handle, log)
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin), log.decode(errors="replace").rstrip("\0")


# struct's letters for scalars, each padded to a slot of 8 bytes.
_SLOTS = {
    "bool": "?7x", "int8": "b7x", "uint8": "B7x", "int16": "h6x", "uint16": "H6x",
    "int32": "i4x", "uint32": "I4x", "int64": "q", "uint64": "Q",
    "float16": "e6x", "float32": "f4x", "float64": "d",
}  # fmt: skip


def slot_formats(signature: Signature) -> list[str]:
    """Return, for each argument, struct's format of what varies: an address, or a number."""
    return [_SLOTS[x] if isinstance(x, str) else "Q" for x in signature]


def machine_code(ptx: str, cc: tuple[int, int]) -> bytes:
    """Return a cubin, or without nvJitLink the PTX for the driver to assemble."""
    try:
        return assemble(ptx, cc)[0]
    except (ImportError, _device.DynamicLibNotFoundError) as error:
        _log.warning("no nvJitLink (%s): the driver assembles kernels when they are loaded", error)
        return ptx.encode()
