"""Attention as kernels of our own in cuTile, where cuDNN has no plan: dropout above all."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from typing import Any, NamedTuple

import numpy as np

from rtxarr import _device
from rtxarr.dtypes import is_half
from rtxarr.kernels.tile._attention_build import Program
from rtxarr.kernels.tile._build import Array
from rtxarr.kernels.tile._launch import launch, load
from rtxarr.libs import tile
from rtxarr.libs._layout import Unsupported
from rtxarr.libs._status import Provider

__all__ = ["Dropout", "Problem", "attempt", "backward", "forward", "status"]

_F32 = np.dtype("float32")
# Bytes of a table with a bit for each weight, kept or not, which the gradient by the queries leaves
# to that by the keys: to make random words again takes longer.
_MOST_BITS = 1 << 30
_MAX_ELEMENTS = 2**31  # kernels count elements in 32 bits
_MOST_DIM = 256
# As in rtxarr/kernels/tile/_attention.py, which cannot be imported without cuTile.
NO_MASK, BOOLEAN, ADDED = range(3)
ANYWHERE, ALIKE, AT_BLOCKS = range(3)

_provider = Provider("attention that cuDNN leaves", "blocks of scores")


class Dropout(NamedTuple):
    """Which weights are dropped.

    Attributes
    ----------
    place : tuple of 3 np.uint64, or CuPy array of uint64, shape (3,)
        Offset, stream and key of the random words: one for each weight, in the order (batch,
        n_queries, n_heads, n_keys).
    threshold : int
        The number below which a word keeps its weight.
    rate : float in (0, 1)
    """

    place: Any
    threshold: int
    rate: float


class Tiles(NamedTuple):
    """What a block takes at a time, and how; see Program."""

    queries: int
    keys: int
    warps: int
    blocks: int | None = None


# By kernel and the larger of the two head dimensions. Of two blocks that share a processor one
# makes random words and exponentials while the other multiplies.
_TILES = {
    "attention": {
        64: Tiles(64, 128, 4, 2), 128: Tiles(64, 128, 4, 2), 256: Tiles(128, 64, 8)
    },
    "attention_queries": {
        64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 64, 8)
    },
    "attention_keys": {
        64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 64, 8)
    },
}  # fmt: skip


class Problem(NamedTuple):
    """What is asked for, beside the arrays; see :func:`rtxarr.libs.dnn.try_attention`."""

    causal: bool
    offset: int
    window: int | None
    scale: float
    dropout: Dropout | None


def status() -> Provider:
    """Return what serves attention that cuDNN does not, and what was computed in blocks instead."""
    return tile.looked_up(_provider)


def attempt(run: Any, *args: Any) -> Any:
    """Return ``run(*args)``, or None where no kernel can compute it."""
    try:
        return run(*args)
    except Unsupported as reason:
        if text := str(reason):
            _provider.refused[text] += 1
        return None


def forward(q: Any, k: Any, v: Any, mask: Any, lengths: Any, problem: Problem) -> tuple[Any, Any]:
    """Return attention and the logarithms of the sums of exponentials.

    Raises
    ------
    Unsupported
        If no kernel can compute it, or not faster than separate steps.
    """
    device_id = _check(q, k, v, mask, lengths, problem)
    q, k, v = (_aligned(x) for x in (q, k, v))
    out = _behind((*q.shape[:3], v.shape[3]), q.dtype)
    logs = _empty(q.shape[:3], _F32)
    args = _Arguments(q, k, v, mask, lengths, problem, device_id)
    args.heads(out)
    args.rows(logs)
    args.start("attention", 0)
    return out, logs


def backward(
    grad: Any, out: Any, logs: Any, q: Any, k: Any, v: Any, mask: Any, lengths: Any,
    problem: Problem, of_mask: bool,
) -> list[Any]:  # fmt: skip
    """Return the gradients by q, k and v, and None; of equal arrays they have equal bits.

    Raises
    ------
    Unsupported
    """
    device_id = _check(q, k, v, mask, lengths, problem)
    if of_mask:
        raise Unsupported("the gradient of a mask")
    if grad.dtype != q.dtype or out.dtype != q.dtype or logs.dtype != _F32:
        raise Unsupported(f"a gradient of {grad.dtype} for {q.dtype}")
    _check_arrays(device_id, grad=grad, out=out, logs=logs)
    q, k, v, out, grad = (_aligned(x) for x in (q, k, v, out, grad))
    logs = _device.cupy.ascontiguousarray(logs)
    delta = _empty(q.shape[:3], _F32)
    of_q, of_k, of_v = (_behind(x.shape, x.dtype) for x in (q, k, v))
    args = _Arguments(q, k, v, mask, lengths, problem, device_id)
    bits = None if problem.dropout is None else _table_of_bits(q, k)
    stored = bits is not None
    shared = args.copy()
    args.heads(out)
    args.rows(logs)
    args.heads(grad)
    args.rows(delta)
    args.heads(of_q)
    args.bits(bits)
    args.start("attention_queries", 0, stored)
    shared.rows(logs)
    shared.heads(grad)
    shared.rows(delta)
    shared.bits(bits)
    shared.heads(of_k)
    shared.heads(of_v)
    shared.start("attention_keys", 1, stored)
    return [of_q, of_k, of_v, None]


# ----------------------------------------------------------------------------------------- checks


def _check(q, k, v, mask, lengths, problem):
    """Refuse what no kernel takes; return which device the arrays are on."""
    dtype = q.dtype
    if not is_half(dtype) or k.dtype != dtype or v.dtype != dtype:
        raise Unsupported("")  # which is counted as refused by cuDNN
    if max(q.shape[3], v.shape[3]) > _MOST_DIM:
        raise Unsupported(f"heads of more than {_MOST_DIM}")
    if not math.isfinite(problem.scale):
        raise Unsupported("a scale that is not finite")
    if mask is not None and mask.dtype not in (np.bool_, _F32, dtype):
        raise Unsupported(f"a mask of {mask.dtype}")
    if problem.dropout is not None and problem.dropout.place is None:
        raise Unsupported("random numbers of a function that is traced")
    if problem.dropout is not None and not 1 <= problem.dropout.threshold <= 2**32:
        raise Unsupported("a dropout rate of almost one")
    if max(abs(problem.offset), problem.window or 0) >= 2**30:
        raise Unsupported("a causal offset or window of 2**30 or more")
    if _missing():
        raise Unsupported("")  # which the status says
    device_id = _device.cupy.cuda.runtime.getDevice()
    _check_arrays(device_id, q=q, k=k, v=v, mask=mask, lengths=lengths)
    if _is_slower(q, k, device_id):
        raise Unsupported("few blocks with many keys each")
    return device_id


def _check_arrays(device_id, **arrays):
    for name, x in arrays.items():
        if x is None:
            continue
        if type(x) is not _device.cupy.ndarray:
            raise Unsupported(f"{name} that is not a CuPy array")
        if x.data.device_id != device_id:
            raise Unsupported(f"{name} that is not on the current device")
        if x.size == 0:
            raise Unsupported("")
        if sum((n - 1) * abs(step) for n, step in zip(x.shape, x.strides, strict=True)) >= (
            _MAX_ELEMENTS * x.itemsize
        ):
            raise Unsupported(f"{name} that spans {_MAX_ELEMENTS} elements or more")


@functools.cache
def _missing() -> str:
    """Say why cuTile cannot be used; "" if it can. It is looked for once."""
    _, reason = tile._look()
    return reason


def _is_slower(q, k, device_id):
    """Tell whether blocks of scores, which all processors share, would be done sooner."""
    n_heads, n_queries, n_keys = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
    rounds = -(-n_heads * -(-n_queries // 128) // tile._processors(device_id))
    # Measured on an H200, in seconds: a tile takes 2 to 5 us, a score in blocks 40 ps.
    return rounds * -(-n_keys // 128) * 5e-6 > 6e-4 + n_heads * n_queries * n_keys * 4e-11


# -------------------------------------------------------------------------------------- arguments


def _empty(shape: Any, dtype: Any) -> Any:
    return _device.cupy.ndarray(shape, dtype)


def _behind(shape: tuple[int, ...], dtype: Any) -> Any:
    """Make an array with heads behind the sequence in memory."""
    n_batch, n_heads, n_rows, dim = shape
    return _empty((n_batch, n_rows, n_heads, dim), dtype).transpose(0, 2, 1, 3)


def _is_aligned(x: Any) -> bool:
    """Tell whether all rows are contiguous and begin at multiples of 16 bytes."""
    steps = [step for n, step in zip(x.shape[:3], x.strides[:3], strict=True) if n > 1]
    is_dense = x.shape[3] == 1 or x.strides[3] == x.itemsize
    return is_dense and x.data.ptr % 16 == 0 and all(n > 0 and n % 16 == 0 for n in steps)


def _aligned(x: Any) -> Any:
    """Return ``x``, or a copy with heads behind the sequence and gaps between short rows."""
    if _is_aligned(x):
        return x
    unit = 16 // x.itemsize
    dim = x.shape[3]
    wide = _behind((*x.shape[:3], -(-dim // unit) * unit), x.dtype)[..., :dim]
    wide[...] = x
    return wide


def _table_of_bits(q: Any, k: Any) -> Any:
    """Make room for a bit for each weight; None if that is much."""
    shape = (*q.shape[:3], -(-k.shape[2] // 32))
    return _empty(shape, np.dtype("uint32")) if 4 * math.prod(shape) <= _MOST_BITS else None


def _power_of_two(n: int) -> int:
    return 1 << max(4, (n - 1).bit_length())


def _begin(dropout: Dropout | None, n_keys: int) -> int:
    """Tell where rows of weights begin within a block of four random words."""
    if dropout is None or n_keys % 4:
        return ANYWHERE
    is_known = isinstance(dropout.place, tuple)
    return AT_BLOCKS if is_known and dropout.place[0] % 4 == 0 else ALIKE


class _Arguments:
    """What a program is told: the kinds of its arguments, and what it finds at its start."""

    def __init__(self, q, k, v, mask, lengths, problem, device_id):
        self.parameters: list[Any] = []
        self.values: list[int] = []
        self.device_id = device_id
        self.q, self.k, self.v = q, k, v
        for x in (q, k, v):
            self.heads(x)
        kind, axes = self._mask(mask)
        self._lengths(lengths)
        from_memory = self._dropout(problem.dropout)
        self._scalar("float32", problem.scale)
        has_window = problem.window is not None
        # The window's end moves with the queries, like the bound of causal attention.
        self._scalar("int32", problem.offset if problem.causal or has_window else None)
        self._scalar("int32", problem.window)
        self.of_mask = (kind, *axes)
        self.has_lengths = lengths is not None
        self.others = (
            problem.causal, has_window, problem.dropout is not None, from_memory,
            _begin(problem.dropout, k.shape[2]), q.shape[1] // k.shape[1],
            _power_of_two(q.shape[3]), _power_of_two(v.shape[3]),
        )  # fmt: skip

    def copy(self) -> _Arguments:
        """Give the same for another program, whose arguments end otherwise."""
        found = copy.copy(self)
        found.parameters, found.values = list(self.parameters), list(self.values)
        return found

    def _array(self, x: Any, kind: str, *, aligned: bool) -> None:
        self.parameters.append(Array(kind, x.ndim, x.ndim - 1, aligned))
        whole = 16 // x.itemsize  # what is said of an axis of length one is not used
        steps = [
            step // x.itemsize if n > 1 else whole
            for n, step in zip(x.shape, x.strides, strict=True)
        ]
        self.values += [x.data.ptr, *x.shape, *steps[:-1], 1]

    def _scalar(self, kind: str, value: Any) -> None:
        if value is None:
            self.parameters.append(0)
            return
        self.parameters.append(kind)
        bits = np.array(value, kind).view(f"uint{8 * np.dtype(kind).itemsize}")
        self.values.append(int(bits))

    def heads(self, x: Any) -> None:
        self._array(x, x.dtype.name, aligned=_is_aligned(x))

    def rows(self, x: Any) -> None:
        self._array(x, "float32", aligned=False)

    def bits(self, x: Any) -> None:
        """Add the table of which weights are kept, if there is one."""
        if x is None:
            self.parameters.append(0)
        else:
            self._array(x, "uint32", aligned=False)

    def _mask(self, mask: Any) -> tuple[int, tuple[bool, ...]]:
        """Add a mask; return its kind, and along which axes it is not broadcast."""
        if mask is None:
            self.parameters.append(0)
            return NO_MASK, (False,) * 4
        if mask.shape[3] > 1 and mask.strides[3] != mask.itemsize or min(mask.strides) < 0:
            mask = _device.cupy.ascontiguousarray(mask)
        self.mask = mask  # a copy must live until the program is started
        is_bool = mask.dtype == np.bool_
        self._array(mask, "bool_" if is_bool else mask.dtype.name, aligned=False)
        return BOOLEAN if is_bool else ADDED, tuple(n > 1 for n in mask.shape)

    def _lengths(self, lengths: Any) -> None:
        if lengths is None:
            self.parameters.append(0)
            return
        if lengths.dtype not in (np.int32, np.int64):
            lengths = lengths.astype(np.int64)
        self.lengths = lengths = _device.cupy.ascontiguousarray(lengths)
        self._array(lengths, lengths.dtype.name, aligned=False)

    def _dropout(self, dropout: Dropout | None) -> bool:
        """Add what dropout takes; return whether its place is in memory."""
        if dropout is None:
            self.parameters += [0, 0, 0, 0, 0]
            self._scalar("float32", 1.0)
            return False
        from_memory = not isinstance(dropout.place, tuple)
        if from_memory:
            self._array(dropout.place, "uint64", aligned=False)
            self.parameters += [0, 0, 0]
        else:
            self.parameters.append(0)
            for word in dropout.place:
                self._scalar("uint64", word)
        self._scalar("uint32", dropout.threshold - 1)
        self._scalar("float32", 1 / (1 - dropout.rate))
        return from_memory

    def start(self, name: str, of_keys: int, *more: bool) -> None:
        """Start a program with a block for each tile of queries, or ``of_keys``."""
        tiles = _TILES[name][max(64, *self.others[-2:])]
        x, n = (self.k, tiles.keys) if of_keys else (self.q, tiles.queries)
        n_blocks = x.shape[0] * x.shape[1] * -(-x.shape[2] // n)
        ragged = self.has_lengths or self.k.shape[2] % tiles.keys > 0
        constants = *self.of_mask, self.has_lengths, ragged, *self.others, tiles.queries, tiles.keys
        constants += more
        parameters = *self.parameters, *constants
        program = Program(name, parameters, tiles.warps, tiles.blocks)
        loaded = _load(program, self.device_id)
        if isinstance(loaded, str):
            raise Unsupported(loaded)
        launch(loaded, n_blocks, self.values)


@functools.cache
def _load(program: Program, device_id: int) -> Any:
    """Give a program, or why there is none; it is compiled, or refused, once."""
    try:
        return load(program, device_id)
    except FileNotFoundError:
        return "cuda-tile without its compiler"
    except Exception as error:  # of many kinds: the compiler's, the driver's
        reason = f"{program.name} does not compile ({str(error).partition(chr(10))[0]})"
        warnings.warn(f"attention runs without cuTile: {reason}", RuntimeWarning, 5)
        return reason
