"""Machine code of the programs in ``_attention``.

Keys of the two families are apart, so that a change of one leaves the other's code on disk valid.
"""

from __future__ import annotations

import functools
import hashlib
import io
from importlib import resources
from importlib.metadata import version
from typing import NamedTuple

from rtxarr import _device, _kernel_cache
from rtxarr.kernels.tile._build import _constraint

__all__ = ["Program", "cubin"]


class Program(NamedTuple):
    """A kernel with all that is constant in it.

    Attributes
    ----------
    name : str
        Of a function in ``_attention``.
    parameters : tuple
        As of a :class:`rtxarr.kernels.tile._build.Signature`.
    warps : int
        How many multiply.
    blocks : int, optional
        How many blocks are to share a processor.
    """

    name: str
    parameters: tuple
    warps: int
    blocks: int | None = None


@functools.cache
def _sources() -> bytes:
    folder = resources.files(__package__)
    return b"".join(
        folder.joinpath(name).read_bytes() for name in ("_attention_build.py", "_attention.py")
    )


def cache_key(program: Program, arch: str) -> str:
    """Say what identifies the machine code: sources, program, architecture and version."""
    context = repr((tuple(program), arch, version("cuda-tile")))
    return hashlib.sha256(_sources() + context.encode()).hexdigest()


def cubin(program: Program, arch: str) -> tuple[str, bytes]:
    """Return what :func:`rtxarr.kernels.tile._build.cubin` does, of a program of attention."""
    key = cache_key(program, arch)
    found = _kernel_cache.load(key)
    if found is None:
        found = program.name, _export(program, arch)
        _kernel_cache.store(key, *found)
    return found


def _export(program: Program, arch: str) -> bytes:
    from rtxarr.kernels.tile import _attention

    ct = _device.tile
    compilation = ct.compilation
    hints = {"num_worker_warps": program.warps, "occupancy": program.blocks}
    kernel = ct.kernel(getattr(_attention, program.name), **hints)
    described = compilation.KernelSignature(
        [_constraint(ct, x) for x in program.parameters],
        compilation.CallingConvention.cutile_python_v1(),
        symbol=program.name,
    )
    code = io.BytesIO()
    compilation.export_kernel(kernel, [described], code, gpu_code=arch, output_format="cubin")
    return code.getvalue()
