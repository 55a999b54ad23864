"""CUDA text to machine code by NVRTC, which needs no GPU and no driver."""

from __future__ import annotations

from typing import Any

from rtxarr import _device


class CompileError(RuntimeError):
    """The text does not compile: a mistake of the code generator."""


def version() -> str:
    """Return NVRTC's version, such as "13.0"."""
    major, minor = _check(_device.nvrtc.nvrtcVersion())
    return f"{major}.{minor}"


def options(cc: tuple[int, int], *, strict: bool) -> list[str]:
    """Return the compiler's options for an architecture.

    Strict code does not contract products and sums; other code's quotients and roots of float32
    are right to two units in the last place.
    """
    how = ["--fmad=false"] if strict else ["--prec-div=false", "--prec-sqrt=false"]
    return [f"--gpu-architecture=sm_{cc[0]}{cc[1]}", "--std=c++17", "--diag-suppress=177", *how]


def compile_text(
    text: str, cc: tuple[int, int], *, strict: bool = True, more: tuple[str, ...] = ()
) -> tuple[bytes, str]:
    """Compile CUDA text to a cubin.

    Parameters
    ----------
    text : str
    cc : tuple of int
        Compute capability, such as (9, 0).
    strict : bool, default True
    more : tuple of str
        Further options; with "--ptxas-options=-v" the log has registers and spilled bytes.

    Returns
    -------
    cubin : bytes
    log : str
    """
    nvrtc = _device.nvrtc
    program = _check(nvrtc.nvrtcCreateProgram(text.encode(), b"polygraph.cu", 0, [], []))
    try:
        words = [o.encode() for o in (*options(cc, strict=strict), *more)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(words), words)
        # NVRTC writes into the bytes; those of one character are Python's own.
        log = b" " * max(_check(nvrtc.nvrtcGetProgramLogSize(program)), 2)
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        said = log.rstrip(b"\0 ").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC: {status.name}\n{said}\n{text}")
        cubin = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
        _check(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin, said


def _check(result: tuple) -> Any:
    """Return what a call gave after its status, or raise."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"NVRTC: {status.name}")
    return values[0] if len(values) == 1 else values
