"""From a kernel's name and the kinds of its arguments to machine code; needs no GPU.

The machine code is kept on disk beside the other kernels. To find it there the compiler need not
be installed, so kernels can be compiled on another machine.
"""

from __future__ import annotations

import functools
import hashlib
import io
from importlib import resources
from importlib.metadata import version
from typing import Any, NamedTuple

from rtxarr import _device, _kernel_cache

__all__ = ["ACTIVATIONS", "Array", "Signature", "cubin"]

RELU, SIGMOID, SILU, GELU, GELU_TANH = range(1, 6)
ACTIVATIONS = {
    None: 0, "relu": RELU, "sigmoid": SIGMOID, "silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH
}  # fmt: skip


class Array(NamedTuple):
    """What a program takes for granted of an array.

    Attributes
    ----------
    dtype : str
        As cuTile calls it.
    n_dims : int
    major : int
        The axis along which neighbours are neighbours in memory: 1 of a matrix stored row by row.
    aligned : bool
        Whether all lines along that axis begin at multiples of 16 bytes.
    """

    dtype: str
    n_dims: int = 2
    major: int = 1
    aligned: bool = True


class Signature(NamedTuple):
    """A program: a kernel with all that is constant in it.

    Attributes
    ----------
    name : str
        Of a function in ``_kernels``.
    parameters : tuple
        An Array or the name of a scalar's dtype for each argument; a number for a constant, and
        for an array that is left out.
    warps : int, optional
        How many warps multiply.
    """

    name: str
    parameters: tuple
    warps: int | None = None


@functools.cache
def _sources() -> bytes:
    folder = resources.files(__package__)
    return b"".join(folder.joinpath(name).read_bytes() for name in ("_build.py", "_kernels.py"))


def cache_key(signature: Signature, arch: str) -> str:
    """Say what identifies the machine code: sources, signature, architecture and version."""
    context = repr((tuple(signature), arch, version("cuda-tile")))
    return hashlib.sha256(_sources() + context.encode()).hexdigest()


def cubin(signature: Signature, arch: str) -> tuple[str, bytes]:
    """Return the name of the entry point and the machine code, compiled or from disk.

    Parameters
    ----------
    signature : Signature
    arch : str
        Such as "sm_90".

    Raises
    ------
    FileNotFoundError
        When it is not on disk and the compiler, tileiras, is not installed.
    """
    key = cache_key(signature, arch)
    found = _kernel_cache.load(key)
    if found is None:
        found = signature.name, _export(signature, arch)
        _kernel_cache.store(key, *found)
    return found


def _export(signature: Signature, arch: str) -> bytes:
    from rtxarr.kernels.tile import _kernels

    ct = _device.tile
    compilation = ct.compilation
    kernel = ct.kernel(getattr(_kernels, signature.name), num_worker_warps=signature.warps)
    described = compilation.KernelSignature(
        [_constraint(ct, x) for x in signature.parameters],
        compilation.CallingConvention.cutile_python_v1(),
        symbol=signature.name,
    )
    code = io.BytesIO()
    compilation.export_kernel(kernel, [described], code, gpu_code=arch, output_format="cubin")
    return code.getvalue()


def _constraint(ct: Any, x: Any) -> Any:
    """Say in cuTile's terms what a kernel may take for granted of an argument."""
    if isinstance(x, str):
        return ct.compilation.ScalarConstraint(getattr(ct, x))
    if not isinstance(x, Array):
        return x
    dtype = getattr(ct, x.dtype)
    n_bytes = dtype.bitwidth // 8
    is_major = [axis == x.major for axis in range(x.n_dims)]
    return ct.compilation.ArrayConstraint(
        dtype,
        x.n_dims,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=[],
        may_alias_internally=False,
        stride_constant=[1 if here else None for here in is_major],
        stride_divisible_by=[16 // n_bytes if x.aligned and not here else 1 for here in is_major],
        base_addr_divisible_by=16 if x.aligned else n_bytes,
    )
