"""Products of matrices fused with what no vendor library fuses, on the tensor cores of a GPU.

Our own kernels, written in cuTile: ``pip install 'rtxarr[tile]'``. They take float16 and bfloat16
(8-bit numbers for :func:`matmul_fp8_rows`) and sum in float32. A matrix may be stored row by row
or column by column, with gaps between its lines, each of which must begin at a multiple of 16
bytes. Whatever they do not take is computed in separate steps with the same results up to
rounding; :func:`rtxarr.libs.show` counts it. A kernel is compiled when it is first met, which
takes about a second, and kept on disk.
"""

from __future__ import annotations

import functools
import math
import shutil
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np

from rtxarr import _device
from rtxarr._device import is_device_array, namespace
from rtxarr.dtypes import DTYPES, is_half
from rtxarr.kernels.tile._build import ACTIVATIONS, Array, Signature
from rtxarr.kernels.tile._launch import launch, load
from rtxarr.libs import _layout, blas
from rtxarr.libs._layout import Unsupported
from rtxarr.libs._status import Provider

__all__ = [
    "gated_linear",
    "linear",
    "matmul_fp8_rows",
    "norm_linear",
    "pays",
    "refusal",
    "status",
    "try_gated_linear",
    "try_linear",
]

_MAX_ELEMENTS = 2**31  # kernels count elements in 32 bits
_NO_COMPILER = "without its compiler"
_INSTALL = "pip install --upgrade 'cuda-tile[tileiras]'"
_FP8 = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_GELU_SCALE, _GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715


class Tile(NamedTuple):
    """What a block computes at a time, and how.

    Attributes
    ----------
    rows, columns, depth : int
        Of the result, and of the summed axis.
    warps : int, optional
        How many multiply.
    loops : bool
        Whether a block goes on to other tiles, where all matrices are stored row by row.
    """

    rows: int
    columns: int
    depth: int
    warps: int | None = None
    loops: bool = False


# The first that gives all processors work is taken, else the last. Those that an H200 computes
# fastest: one group of four warps can keep 128 x 128 sums in registers, two groups twice that.
_TILES = {
    "linear": (Tile(128, 128, 64, loops=True), Tile(64, 128, 64), Tile(64, 64, 64)),
    "gated_linear": (
        Tile(128, 128, 64, 8, loops=True),
        Tile(128, 64, 64, loops=True),
        Tile(64, 64, 64),
    ),
    "gated_linear_apart": (Tile(128, 128, 64, 8), Tile(128, 64, 64), Tile(64, 64, 64)),
    "norm_linear": (Tile(128, 256, 64, 8), Tile(64, 128, 64)),
    "fp8_rows": (Tile(128, 128, 128, 8, loops=True), Tile(64, 64, 128)),
    "fast fp8_rows": (
        Tile(128, 256, 128, 8, loops=True),
        Tile(128, 128, 128, 8),
        Tile(64, 64, 128),
    ),
}
_STATISTICS_TILE = (8, 512)

_provider = Provider("fused products", "separate steps")


# ---------------------------------------------------------------------------------- the library


def _look() -> tuple[str, str]:
    """Say which cuTile there is, or else why it cannot be used."""
    try:
        found = version("cuda-tile")
    except PackageNotFoundError:
        return "", "cuda-tile is not installed"
    if tuple(int(x) for x in found.split(".")[:2]) < (1, 7):
        return "", f"cuda-tile {found} is older than 1.7"
    driver = _device.cupy.cuda.runtime.driverGetVersion()
    if driver < 13000:
        return "", f"cuda-tile needs a driver for CUDA 13, got {driver // 1000}"
    try:
        compiler = f"tileiras {version('nvidia-cuda-tileiras')}"
    except PackageNotFoundError:
        compiler = "tileiras" if shutil.which("tileiras") else _NO_COMPILER
    return f"cuda-tile {found}, {compiler}", ""


@functools.cache
def _is_there() -> bool:
    """Look for the library; warn if it is not there. Once, as the answer is kept."""
    _provider.library, reason = _look()
    if reason:
        _provider.is_missing(reason, _INSTALL)
    return not reason


@functools.cache
def _can_compile() -> bool:
    found, reason = _look()
    return not reason and not found.endswith(_NO_COMPILER)


def status() -> Provider:
    """Return what serves fused products on a GPU, and what was computed in steps instead."""
    return looked_up(_provider)


def looked_up(provider: Provider) -> Provider:
    """Let a provider say which cuTile there is, or why none; without the warning of a first use."""
    if len(_device.devices()) > 1:
        provider.library, reason = _look()
        provider.missing = f"{reason}; {_INSTALL}" if reason else ""
    return provider


def refusal(*matrices: tuple) -> str:
    """Return why no kernel would multiply matrices that lie so; "" if one would.

    Parameters
    ----------
    *matrices : (dtype, shape, strides)
        Inputs and weights, strides in bytes; they are taken to be well aligned.
    """
    if len(_device.devices()) < 2:
        return "there is no GPU"
    _, reason = _look()
    if reason:
        return reason
    dtype = matrices[0][0]
    try:
        if not is_half(dtype):
            raise Unsupported(f"operands of {dtype}")
        for other, shape, strides in matrices:
            if other != dtype:
                raise Unsupported(f"operands of {dtype} and {other}")
            if 0 in shape:
                raise Unsupported("operands without elements")
            placed = _placed("an operand", shape, strides, dtype.itemsize)
            if placed.ld * dtype.itemsize % 16:
                raise Unsupported(f"an operand{_UNALIGNED}")
    except Unsupported as reason:
        return str(reason)
    return ""


def pays(kind: str, m: int, k: int, n: int) -> bool:
    """Tell whether a kernel for a product of (m, k) and (k, n) is faster than separate steps.

    Parameters
    ----------
    kind : {"gate", "activation"}
        What follows the product: that of :func:`gated_linear` or of :func:`linear`.
    m, k, n : int
        Rows, features of a row, and features of the result; of a gated pair not those of both.

    Returns
    -------
    bool

    Notes
    -----
    The bounds are those of 40 sizes in bfloat16 on an H200, from 16 to 8192 rows and weights of 1
    to 59 million.
    """
    if kind == "activation":  # what is spared is hardly more than the start of a kernel
        return k <= 1024 and m * n <= 2**20
    return k * n <= 2**22 or 32 < m <= 128 or (k <= 4096 and m >= 512)


def _fused(run: Any, x: Any, *args: Any) -> Any:
    """Return ``run(x, *args)``, or None where no kernel can compute it."""
    if not is_device_array(x) or not _is_there():
        return None
    try:
        return run(x, *args)
    except Unsupported as reason:
        if text := str(reason):
            _provider.refused[text] += 1
        return None


def _start(signature: Signature, n_blocks: int, values: list[int]) -> None:
    loaded = _load(signature, _device.cupy.cuda.runtime.getDevice())
    if isinstance(loaded, str):
        raise Unsupported(loaded)
    launch(loaded, n_blocks, values)


@functools.cache
def _load(signature: Signature, device_id: int) -> Any:
    """Give a kernel, or why there is none; it is compiled, or refused, once."""
    try:
        return load(signature, device_id)
    except Exception as error:  # of many kinds: the compiler's, the driver's
        reason = f"{signature.name} does not compile ({str(error).partition(chr(10))[0]})"
        warnings.warn(f"fused products run in separate steps: {reason}", RuntimeWarning, 5)
        return reason


# ------------------------------------------------------------------------------------- arguments


_UNALIGNED = " with lines that do not begin at multiples of 16 bytes"


def _placed(name: str, shape: Any, strides: Any, n_bytes: int) -> _layout.Matrix:
    """Tell how a matrix of elements of ``n_bytes`` lies."""
    rows, cols = shape
    steps = [step // n_bytes for step in strides]
    found = _layout.matrix(rows, cols, *steps)
    if cols == 1 and steps[0] == 1:  # one line rather than many short ones
        found = _layout.Matrix(True, rows)
    if found is None:
        raise Unsupported(f"{name} whose rows and columns are both apart in memory")
    n_lines, length = (cols, rows) if found.transposed else (rows, cols)
    if n_lines == 1:
        unit = 16 // n_bytes
        found = _layout.Matrix(found.transposed, -(-length // unit) * unit)
    if (n_lines - 1) * found.ld + length >= _MAX_ELEMENTS:
        raise Unsupported(f"{name} that spans {_MAX_ELEMENTS} elements or more")
    return found


class _Arguments:
    """What a kernel is told: the kinds of its arguments, and what it finds at its start.

    Parameters
    ----------
    dtype : dtype
        Of all arrays that are not said to be of another.
    """

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self.parameters: list[Any] = []
        self.values: list[int] = []
        self.is_plain = True  # all matrices are stored row by row, and aligned
        self._device_id = _device.cupy.cuda.runtime.getDevice()

    def _check(self, name: str, x: Any, dtype: Any) -> None:
        if type(x) is not _device.cupy.ndarray:
            raise Unsupported(f"{name} that is not a CuPy array")
        if x.dtype != dtype:
            raise Unsupported(f"{name} of {x.dtype} beside operands of {dtype}")
        if x.data.device_id != self._device_id:
            raise Unsupported(f"{name} that is not on the current device")

    def matrix(self, name: str, x: Any, kind: str | None = None, *, is_out: bool = False) -> None:
        """Add a matrix.

        Parameters
        ----------
        name : str
        x : array, shape (rows, columns)
        kind : str, optional
            cuTile's name of the dtype, if it is not NumPy's.
        is_out : bool, default False
            Whether it may lie in any way, at a loss of time.
        """
        self._check(name, x, np.uint8 if kind else self.dtype)
        found = _placed(name, x.shape, x.strides, x.itemsize)
        ld = found.ld
        strides = (1, ld) if found.transposed else (ld, 1)
        aligned = x.data.ptr % 16 == 0 and ld * x.itemsize % 16 == 0
        if not aligned and not is_out:
            raise Unsupported(name + _UNALIGNED)
        self.is_plain &= aligned and not found.transposed
        self.parameters.append(Array(kind or self.dtype.name, 2, 1 - found.transposed, aligned))
        self.values += [x.data.ptr, *x.shape, *strides]

    def vector(self, name: str, x: Any, *, dtype: Any = None, aligned: bool = False) -> None:
        """Add a vector; None is left out."""
        if x is None:
            self.parameters.append(0)
            return
        dtype = np.dtype(dtype or self.dtype)
        self._check(name, x, dtype)
        if x.size > 1 and x.strides[0] != x.itemsize:
            raise Unsupported(f"{name} with gaps")
        if aligned and x.data.ptr % 16:
            raise Unsupported(f"{name} that does not begin at a multiple of 16 bytes")
        self.parameters.append(Array(dtype.name, 1, 0, aligned))
        self.values += [x.data.ptr, x.size, 1]

    def pair(self, name: str, x: Any, y: Any) -> int | None:
        """Add two matrices that lie alike as one array of shape (2, rows, columns).

        Returns
        -------
        int or None
            Which of the two ``y`` is in it; None, and nothing is added, if there is no such array.
        """
        self._check(name, x, self.dtype)
        self._check(name, y, self.dtype)
        found = _placed(name, x.shape, x.strides, x.itemsize)
        apart = abs(y.data.ptr - x.data.ptr) // x.itemsize
        if found != _placed(name, y.shape, y.strides, y.itemsize) or not 0 < apart < _MAX_ELEMENTS:
            return None
        strides = (1, found.ld) if found.transposed else (found.ld, 1)
        if (x.data.ptr | y.data.ptr | found.ld * x.itemsize) % 16:
            raise Unsupported(name + _UNALIGNED)
        self.is_plain &= not found.transposed
        self.parameters.append(Array(self.dtype.name, 3, 2 - found.transposed))
        self.values += [min(x.data.ptr, y.data.ptr), 2, *x.shape, apart, *strides]
        return int(y.data.ptr > x.data.ptr)

    def start(self, name: str, shape: tuple[int, int], constants: tuple, tiles: str = "") -> None:
        """Start a kernel that computes a matrix of ``shape`` in tiles."""
        m, n = shape
        n_processors = _processors(self._device_id)  # each has room for one block
        for tile in _TILES[tiles or name]:
            n_tiles = -(-m // tile.rows) * -(-n // tile.columns)
            if n_tiles >= n_processors and m > tile.rows // 2:
                break
        loops = tile.loops and self.is_plain
        parameters = (*self.parameters, *constants, loops, *tile[:3])
        signature = Signature(name, parameters, tile.warps)
        _start(signature, min(n_tiles, n_processors) if loops else n_tiles, self.values)


@functools.cache
def _processors(device_id: int) -> int:
    runtime = _device.cupy.cuda.runtime
    return runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device_id)


def _check_halves(x: Any, weight: Any) -> None:
    if not is_half(x.dtype):
        raise Unsupported(f"operands of {x.dtype}")
    if 0 in (*x.shape, *weight.shape):
        raise Unsupported("")


def _check_linear(x: Any, weight: Any, bias: Any, activation: str | None) -> None:
    if weight.ndim != 2:
        raise ValueError(f"weight must have shape (out_features, in_features), got {weight.shape}")
    if x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x must have shape (..., {weight.shape[1]}) for weight of shape {weight.shape}, got "
            f"{x.shape}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {weight.shape[:1]}, got {bias.shape}")
    if activation not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation must be one of {names}, got {activation!r}")


def _flat(x: Any) -> Any:
    return x if x.ndim == 2 else namespace(x).reshape(x, (-1, x.shape[-1]))


def _like(out: Any, x: Any) -> Any:
    """Give a result of rows the leading axes of ``x``."""
    return out if x.ndim == 2 else namespace(out).reshape(out, (*x.shape[:-1], out.shape[1]))


def _empty(shape: Any, dtype: Any) -> Any:
    return _device.cupy.ndarray(shape, dtype)


# ------------------------------------------------------------------------- products with a layer


def linear(x: Any, weight: Any, bias: Any = None, *, activation: str | None = None) -> Any:
    """Return ``activation(x @ weight.T + bias)``, rounded once.

    Parameters
    ----------
    x : array of a real floating dtype, shape (..., in_features)
    weight : array, shape (out_features, in_features)
    bias : array, shape (out_features,), optional
    activation : {"relu", "sigmoid", "silu", "gelu", "gelu_tanh"}, optional

    Returns
    -------
    array, shape (..., out_features), dtype of ``x``
    """
    _check_linear(x, weight, bias, activation)
    rows = _flat(x)
    out = _fused(_linear, rows, weight, bias, activation)
    if out is None:
        total = _wide_product(rows, weight, bias)
        out = _rounded(_activate(total, activation), x.dtype)
    return _like(out, x)


def _linear(x, weight, bias, activation):
    _check_halves(x, weight)
    shape = x.shape[0], weight.shape[0]
    out = _empty(shape, x.dtype)
    args = _Arguments(x.dtype)
    args.matrix("an input", x)
    args.matrix("a weight", weight)
    args.vector("a bias", bias)
    args.matrix("a result", out, is_out=True)
    args.start("linear", shape, (ACTIVATIONS[activation], bias is not None))
    return out


def gated_linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    gate: Any = None,
    gate_bias: Any = None,
    activation: str = "silu",
) -> Any:
    """Return ``(x @ w.T + b) * activation(x @ v.T + c)``, rounded once: SwiGLU, GEGLU and the like.

    Parameters
    ----------
    x : array of a real floating dtype, shape (..., in_features)
    weight : array, shape (2 * out_features, in_features)
        ``w`` above ``v``, the gate's; ``w`` alone beside ``gate``.
    bias : array, shape (2 * out_features,), optional
        ``b`` before ``c``; ``b`` alone beside ``gate``.
    gate : array, shape (out_features, in_features), optional
        ``v``.
    gate_bias : array, shape (out_features,), optional
        ``c``, which must be given if ``b`` is.
    activation : {"relu", "sigmoid", "silu", "gelu", "gelu_tanh"}, default "silu"
        Of the gate.

    Returns
    -------
    array, shape (..., out_features), dtype of ``x``

    References
    ----------
    Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202, eq. 5.
    """
    _check_linear(x, weight, bias, activation)
    if activation is None:
        raise ValueError("activation must be given")
    if gate is None:
        if gate_bias is not None:
            raise ValueError("gate_bias must be part of bias where gate is part of weight")
        if weight.shape[0] % 2:
            raise ValueError(f"weight must have an even number of rows, got {weight.shape}")
        n = weight.shape[0] // 2
        weight, gate = weight[:n, :], weight[n:, :]
        bias, gate_bias = (None, None) if bias is None else (bias[:n], bias[n:])
    elif gate.shape != weight.shape:
        raise ValueError(f"gate must have shape {weight.shape}, got {gate.shape}")
    _check_linear(x, gate, gate_bias, activation)
    if (bias is None) != (gate_bias is None):
        raise ValueError("bias and gate_bias must be given together")
    rows = _flat(x)
    out = _fused(_gated_linear, rows, weight, gate, bias, gate_bias, activation)
    if out is None:
        factor = _activate(_wide_product(rows, gate, gate_bias), activation)
        out = _rounded(_wide_product(rows, weight, bias) * factor, x.dtype)
    return _like(out, x)


def try_gated_linear(
    x: Any, weight: Any, gate: Any, bias: Any, gate_bias: Any, *, activation: str
) -> Any:
    """Return what :func:`gated_linear` does; None where separate steps take less time.

    Also where no kernel takes the arrays, or cuTile is not installed with its compiler.

    Parameters
    ----------
    x : array of a real floating dtype, shape (..., in_features)
    weight, gate : array, shape (out_features, in_features)
    bias, gate_bias : array, shape (out_features,), or None
    activation : {"relu", "sigmoid", "silu", "gelu", "gelu_tanh"}
        Of the gate.

    Returns
    -------
    array, shape (..., out_features), dtype of ``x``, or None
    """
    size = math.prod(x.shape[:-1]), *weight.shape[::-1]
    if (bias is None) != (gate_bias is None) or not _suits("gate", x.dtype, size):
        return None
    out = _fused(_gated_linear, _flat(x), weight, gate, bias, gate_bias, activation)
    return None if out is None else _like(out, x)


def try_linear(x: Any, weight: Any, bias: Any, *, activation: str) -> Any:
    """Return what :func:`linear` does; None where :func:`try_gated_linear` would give it.

    Parameters
    ----------
    x : array of a real floating dtype, shape (..., in_features)
    weight : array, shape (out_features, in_features)
    bias : array, shape (out_features,), or None
    activation : {"relu", "sigmoid", "silu", "gelu", "gelu_tanh"}

    Returns
    -------
    array, shape (..., out_features), dtype of ``x``, or None
    """
    size = math.prod(x.shape[:-1]), *weight.shape[::-1]
    if not _suits("activation", x.dtype, size):
        return None
    out = _fused(_linear, _flat(x), weight, bias, activation)
    return None if out is None else _like(out, x)


def _suits(kind, dtype, size):
    return is_half(dtype) and pays(kind, *size) and _can_compile()


def _gated_linear(x, weight, gate, bias, gate_bias, activation):
    _check_halves(x, weight)
    shape = x.shape[0], weight.shape[0]
    out = _empty(shape, x.dtype)
    args = _Arguments(x.dtype)
    args.matrix("an input", x)
    place = args.pair("a weight", weight, gate)
    if place is None:
        args.matrix("a weight", weight)
        args.matrix("a gate's weight", gate)
    args.vector("a bias", bias)
    args.vector("a gate's bias", gate_bias)
    args.matrix("a result", out, is_out=True)
    name, places = ("gated_linear_apart", ()) if place is None else ("gated_linear", (place,))
    args.start(name, shape, (ACTIVATIONS[activation], *places, bias is not None))
    return out


def norm_linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    norm: str = "rms",
    scale: Any = None,
    shift: Any = None,
    eps: float = 1e-6,
) -> Any:
    """Return ``normalized(x) @ weight.T + bias``; what is normalized is not written to memory.

    Parameters
    ----------
    x : array of a real floating dtype, shape (..., in_features)
    weight : array, shape (out_features, in_features)
    bias : array, shape (out_features,), optional
    norm : {"rms", "layer"}, default "rms"
        "rms" divides each row by its root mean square, "layer" also takes away its mean first.
    scale, shift : array, shape (in_features,), optional
        What the rows are multiplied by after that, and what is added to them then.
    eps : float, above 0, default 1e-6
        Added to the mean square.

    Returns
    -------
    array, shape (..., out_features), dtype of ``x``
        Normalized rows are rounded to that before they are multiplied.
    """
    _check_linear(x, weight, bias, None)
    if norm not in ("rms", "layer"):
        raise ValueError(f"norm must be 'rms' or 'layer', got {norm!r}")
    for name, vector in (("scale", scale), ("shift", shift)):
        if vector is not None and vector.shape != weight.shape[1:]:
            raise ValueError(f"{name} must have shape {weight.shape[1:]}, got {vector.shape}")
    if not eps > 0:
        raise ValueError(f"eps must be above 0, got {eps}")
    rows = _flat(x)
    args = weight, bias, norm == "layer", scale, shift, eps
    out = _fused(_norm_linear, rows, *args)
    if out is None:
        out = _norm_linear_in_steps(rows, *args)
    return _like(out, x)


def _norm_linear(x, weight, bias, is_centred, scale, shift, eps):
    _check_halves(x, weight)
    m, _ = shape = x.shape[0], weight.shape[0]
    inverse = _empty(m, np.float32)
    mean = _empty(m, np.float32) if is_centred else None
    out = _empty(shape, x.dtype)
    args = _Arguments(x.dtype)
    args.matrix("an input", x)
    args.vector("a mean", mean, dtype=np.float32)
    args.vector("an inverse", inverse, dtype=np.float32)
    statistics = Signature(
        "row_statistics", (*args.parameters, "float32", is_centred, *_STATISTICS_TILE)
    )
    of_statistics = [*args.values, int(np.float32(eps).view(np.uint32))]
    args.vector("a scale", scale, aligned=True)
    args.vector("a shift", shift, aligned=True)
    args.matrix("a weight", weight)
    args.vector("a bias", bias)
    args.matrix("a result", out, is_out=True)
    _start(statistics, -(-m // _STATISTICS_TILE[0]), of_statistics)
    there = tuple(vector is not None for vector in (scale, shift, bias))
    args.start("norm_linear", shape, (is_centred, *there))
    return out


def _norm_linear_in_steps(x, weight, bias, is_centred, scale, shift, eps):
    wide = _wide(x)
    xp = namespace(wide)
    if is_centred:
        wide = wide - xp.mean(wide, axis=1, keepdims=True)
    wide = wide / xp.sqrt(xp.mean(wide * wide, axis=1, keepdims=True) + eps)
    if scale is not None:
        wide = wide * _wide(scale)
    if shift is not None:
        wide = wide + _wide(shift)
    return _rounded(_wide_product(_rounded(wide, x.dtype), weight, bias), x.dtype)


# ---------------------------------------------------------------------------------- in steps


def _wide(x):
    xp = namespace(x)
    return xp.astype(x, xp.float32) if is_half(x.dtype) else x


def _erf(x):
    if hasattr(x, "__array_ufunc__"):
        return _device.special(x).erf(x)
    return namespace(x).from_dlpack(_device.special(x).erf(np.from_dlpack(x)))


def _rounded(x, dtype):
    return namespace(x).astype(x, dtype, copy=False)


def _wide_product(x, weight, bias):
    """Multiply halves to float32, and others in their own dtype."""
    if is_half(x.dtype) and weight.dtype == x.dtype:
        total = blas.matmul(x, weight.T, dtype="float32")
    else:
        total = blas.matmul(_wide(x), _wide(weight).T)
    return total if bias is None else total + _wide(bias)


def _activate(x, activation):
    xp = namespace(x)
    if activation == "relu":
        return xp.maximum(x, 0)
    if activation == "gelu":
        return 0.5 * x * (1 + _erf(x * math.sqrt(0.5)))
    if activation is None:
        return x
    if activation == "gelu_tanh":
        return 0.5 * x * (1 + xp.tanh(_GELU_SCALE * (x + _GELU_CUBIC * x * x * x)))
    small = xp.exp(-xp.abs(x))
    sigmoid = xp.where(x < 0, small, 1) / (1 + small)
    return sigmoid if activation == "sigmoid" else x * sigmoid


# ------------------------------------------------------------------------------------------ fp8


def matmul_fp8_rows(
    a: Any,
    b: Any,
    *,
    formats: tuple[str, str] = ("e4m3", "e4m3"),
    scale_a: Any = None,
    scale_b: Any = None,
    dtype: Any = "bfloat16",
    bias: Any = None,
    fast: bool = False,
) -> Any:
    """Return ``(scale_a * a) @ (scale_b * b) + bias`` of 8-bit numbers, with a scale for each row.

    Parameters
    ----------
    a : array of uint8, shape (m, k)
        Bits of e4m3 or e5m2 numbers, stored row by row.
    b : array of uint8, shape (k, n)
        Stored column by column, as the transpose of a weight is.
    formats : ({"e4m3", "e5m2"}, {"e4m3", "e5m2"})
        Of ``a`` and ``b``.
    scale_a : array of float32, shape (m, 1), optional
    scale_b : array of float32, shape (1, n), optional
    dtype : dtype, default bfloat16
        Of the result: bfloat16 or float16; float32 too is computed, but not by our kernel.
    bias : array of ``dtype``, shape (n,), optional
    fast : bool, default False
        Whether to accumulate with fewer bits, on GPUs of compute capability 9.0.

    Returns
    -------
    array, shape (m, n)

    Notes
    -----
    Unlike :func:`rtxarr.libs.blas.matmul_fp8`, which computes what is refused here, this takes two
    operands in e5m2 and a scale of one operand alone, but not two formats.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"operands must have shapes (m, k) and (k, n), got {a.shape}, {b.shape}")
    if a.dtype != np.uint8 or b.dtype != np.uint8:
        raise TypeError(f"a and b must be uint8, got {a.dtype} and {b.dtype}")
    if any(name not in _FP8 for name in formats):
        raise ValueError(f"formats must be 'e4m3' or 'e5m2', got {formats}")
    m, n = shape = a.shape[0], b.shape[1]
    for name, scale, wanted in (("scale_a", scale_a, (m, 1)), ("scale_b", scale_b, (1, n))):
        if scale is not None and (scale.dtype != np.float32 or scale.shape != wanted):
            raise ValueError(
                f"{name} must be float32 of shape {wanted}, got {scale.dtype} of {scale.shape}"
            )
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias must have shape {(n,)}, got {bias.shape}")
    dtype = np.dtype(DTYPES.get(dtype, dtype))
    out = _fused(_fp8_rows, a, b, formats, (scale_a, scale_b), dtype, bias, fast, shape)
    if out is not None:
        return out
    options = {"formats": formats, "dtype": dtype, "bias": bias, "fast": fast}
    return blas.matmul_fp8(a, b, scale_a=scale_a, scale_b=scale_b, **options)


def _fp8_rows(a, b, formats, scales, dtype, bias, fast, shape):
    if formats[0] != formats[1]:
        raise Unsupported(f"8-bit numbers of {formats[0]} beside {formats[1]}")
    if not is_half(dtype):
        raise Unsupported(f"a result of {dtype} from 8-bit numbers")
    if 0 in (*a.shape, *b.shape):
        raise Unsupported("")
    out = _empty(shape, dtype)
    args = _Arguments(dtype)
    args.matrix("an input", a, _FP8[formats[0]])
    args.matrix("a weight", b.T, _FP8[formats[1]])
    if any(kind.major == 0 for kind in args.parameters):
        raise Unsupported("8-bit numbers that are not stored along the summed axis")
    for scale in scales:
        args.vector("a scale", None if scale is None else scale.reshape(-1), dtype=np.float32)
    args.vector("a bias", bias)
    args.matrix("a result", out, is_out=True)
    there = tuple(vector is not None for vector in (*scales, bias))
    tiles = "fast fp8_rows" if fast else ""
    args.start("fp8_rows", shape, (*there, bool(fast)), tiles)
    return out
