"""Many arrays in one launch: a table of their addresses on the GPU, their elements cut over blocks.

A launch for each array costs microseconds of host time, more than most arrays of a model take on a
GPU. All arrays here are CuPy's (NumPy's in the simulator), C-contiguous, of float16, bfloat16,
float32 or float64, and those of one call on one GPU unless it says otherwise. Nothing waits for the
GPU, and all of it can be captured.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from rtxarr import _device
from rtxarr._device import Device, launch
from rtxarr._replay import from_host, recorder
from rtxarr.dtypes import accumulator

__all__ = [
    "average",
    "averaging",
    "batches",
    "find_not_finite",
    "move_scale",
    "norm_and_factor",
    "scaled_copies",
    "upload",
]

CHUNK = 4096  # elements of one array that a block takes
THREADS = 256  # in a block
MOST = 400  # arrays in one launch: with their numbers they fill at most the 64 KiB of a quick copy

# The state of a loss scale, float32: the scale, the good steps since it changed, and from here on a
# flag for each optimizer, not zero once a gradient was not finite.
FOUND = 2


def batches(rows: Iterable[tuple], key: Callable[[tuple], Any]) -> Iterator[tuple[Any, list]]:
    """Give rows of arrays in groups of one ``key`` and one GPU, of at most ``MOST`` rows.

    Each row begins with the array that says which GPU. Yields the key and the rows.
    """
    found: dict[Any, list] = {}
    for row in rows:
        found.setdefault((key(row), gpu_of(row[0])), []).append(row)
    for (name, place), group in found.items():
        with on_gpu(place):
            for start in range(0, len(group), MOST):
                yield name, group[start : start + MOST]


_gpu_of = attrgetter("data.device_id")


def gpu_of(x: Any) -> int | None:
    """Return which GPU an array is on; None in the simulator."""
    return None if isinstance(x, (np.ndarray, np.generic)) else _gpu_of(x)


def on_gpu(index: int | None) -> contextlib.AbstractContextManager:
    """Make a GPU the current one for a ``with`` block, if it is not; None is the simulator's."""
    if index is None or _device.cupy.cuda.runtime.getDevice() == index:
        return contextlib.nullcontext()
    return Device("cuda", index)


class Table(NamedTuple):
    """What a launch needs to find its arrays: the arguments that all kernels begin with.

    Attributes
    ----------
    words : array of int64
        Addresses and sizes, as ``_multi_tensor_cuda`` says, then the words of ``tail``.
    n_rows : int
    blocks : array of int64, shape (n_blocks,)
    tail : int
        Where in ``words`` those of ``tail`` begin.
    """

    words: Any
    n_rows: int
    blocks: Any
    tail: int

    def launch(self, kernel: Any, *args: Any) -> None:
        """Start a kernel on all blocks."""
        shape = self.blocks.shape[0]
        launch(kernel, shape, (self.words, self.n_rows, self.blocks, *args), block=THREADS)

    def rest(self, start: int, dtype: Any) -> Any:
        """Give the words from ``start`` of the tail on as an array of another type."""
        words, first = self.words, self.tail + start
        if isinstance(words, np.ndarray):
            return words[first:].view(dtype)
        n = (words.size - first) * 8 // dtype.itemsize
        return type(words)(n, dtype, words.data + 8 * first)  # at half the cost of two views


_of_gpu, _of_host = attrgetter("data.ptr"), attrgetter("ctypes.data")


def addresses(arrays: Sequence) -> np.ndarray:
    """Return where arrays lie, as int64."""
    address = _of_host if isinstance(arrays[0], np.ndarray) else _of_gpu
    return np.fromiter(map(address, arrays), np.int64, len(arrays))


def sizes_of(arrays: Sequence) -> tuple[int, ...]:
    """Return how many elements arrays have."""
    return tuple([x.size for x in arrays])


def upload(
    columns: Sequence[np.ndarray],
    sizes: tuple[int, ...],
    tail: Callable[[], np.ndarray] | None = None,
) -> Table:
    """Bring addresses and sizes to the GPU.

    Parameters
    ----------
    columns : sequence of array of int64, shape (n_rows,)
        For each role, the addresses of the arrays.
    sizes : tuple of int, length n_rows
    tail : callable, optional
        Gives int64 words that follow, always as many; once for each step, eager or replayed.
    """
    blocks, lengths = _blocks(sizes)
    fixed = np.concatenate((*columns, lengths))

    def make():
        # Keeps the blocks as long as a captured step that reads them.
        return np.concatenate((fixed, tail())) if tail and blocks is not None else fixed

    return Table(from_host(make), len(sizes), blocks, fixed.size)


_uploaded: dict[tuple, tuple[Any, np.ndarray]] = {}
_uploading = threading.Lock()


def _blocks(sizes: tuple[int, ...]) -> tuple[Any, np.ndarray]:
    """Return, on the GPU, the row and chunk of each block, and the sizes as an array."""
    key = sizes, _device._SIMULATING or _device.cupy.cuda.runtime.getDevice()
    found = _uploaded.get(key)
    if found is not None:
        return found
    lengths = np.array(sizes, np.int64)
    counts = -(-lengths // CHUNK)
    first = np.cumsum(counts) - counts
    chunks = np.arange(counts.sum()) - np.repeat(first, counts)
    host = np.repeat(np.arange(len(sizes)) << 32, counts) | chunks
    if recorder() is not None:  # no copy of the host's memory may be recorded
        return from_host(lambda: host), lengths
    out = host
    if not _device._SIMULATING:
        out = _device.cupy.asarray(host)
        _device.cupy.cuda.get_current_stream().synchronize()  # once; other streams will read it too
    with _uploading:
        if len(_uploaded) >= 256:
            del _uploaded[next(iter(_uploaded))]
        _uploaded[key] = out, lengths
    return out, lengths


def contiguous(x: Any) -> bool:
    """Tell whether ``x`` is a C-contiguous array (no NumPy scalar)."""
    known = getattr(x, "_c_contiguous", None)  # CuPy's, without an object of all flags
    return isinstance(x, np.ndarray) and x.flags.c_contiguous if known is None else known


_all_of_gpu = attrgetter("_c_contiguous")


def made_contiguous(arrays: list) -> list:
    """Return the arrays, with copies of those that are not C-contiguous."""
    if not _device._SIMULATING and all(map(_all_of_gpu, arrays)):
        return arrays
    from rtxarr.kernels._dense import packed

    return [packed(x) for x in arrays]


def on_one_gpu(arrays: Sequence) -> bool:
    """Tell whether all arrays are on one GPU (or in the simulator)."""
    if len(set(map(type, arrays))) > 1 or not _device.runs_kernels(arrays[0]):
        return False
    return isinstance(arrays[0], np.ndarray) or len(set(map(_gpu_of, arrays))) == 1


def _kinds(arrays: Sequence) -> Iterator[tuple[Any, Sequence[int]]]:
    """Give each dtype with the places of its arrays, at most ``MOST`` at once."""
    dtypes = dict.fromkeys([x.dtype for x in arrays])
    for dtype in dtypes:
        places: Sequence[int] = range(len(arrays))
        if len(dtypes) > 1:
            places = [i for i in places if arrays[i].dtype == dtype]
        for start in range(0, len(places), MOST):
            yield dtype, places[start : start + MOST]


def norm_and_factor(arrays: Sequence, max_norm: float) -> Any:
    """Return the joint 2-norm of arrays, and the factor that brings it down to ``max_norm``.

    Parameters
    ----------
    arrays : sequence of array
        Of types with one accumulator: float64, or any of the others.
    max_norm : float > 0

    Returns
    -------
    array, shape (2,), of the accumulator's type
        The norm, and ``min(1, max_norm / (norm + 1e-6))``. Each thread adds its squares in order,
        then the threads' sums and the blocks' are added pairwise: equal inputs give equal bits.
    """
    from rtxarr.kernels._multi_tensor_cuda import finish_norm, squares

    dtype = np.dtype(accumulator(arrays[0].dtype))
    with on_gpu(gpu_of(arrays[0])):
        partial = _empty((sum([-(-x.size // CHUNK) for x in arrays]),), dtype)
        first = 0
        for source, places in _kinds(arrays):
            found = made_contiguous([arrays[i] for i in places])  # alive until the launch
            table = upload([addresses(found)], sizes_of(found))
            table.launch(squares(source), partial, first)
            first += table.blocks.shape[0]
        out = _empty((2,), dtype)
        launch(finish_norm(dtype), 1, (partial, dtype.type(max_norm), out), block=THREADS)
    return out


def scaled_copies(arrays: Sequence, factor: Any, at: int = 0, *, inverse: bool = False) -> list:
    """Return new arrays: each times ``factor[at]``, or with ``inverse`` over it, rounded once.

    ``factor`` is an array of float32 or float64. The new arrays share one piece of memory, which
    goes back when the last of them does.
    """
    from rtxarr.kernels._multi_tensor_cuda import scale

    with on_gpu(gpu_of(arrays[0])):
        copies = _all_empty(arrays)
        for dtype, places in _kinds(arrays):
            found = made_contiguous([arrays[i] for i in places])
            columns = [addresses([copies[i] for i in places]), addresses(found)]
            table = upload(columns, sizes_of(found))
            table.launch(scale(dtype, inverse=inverse), factor, at)
    return copies


def _empty(shape: tuple, dtype: Any) -> Any:
    """Make an array without the cost of ``xp.empty``, half of it."""
    return np.empty(shape, dtype) if _device._SIMULATING else _device.cupy.ndarray(shape, dtype)


def _all_empty(arrays: Sequence) -> list:
    """Make an array like each of these; asking the memory pool for every one takes longest."""
    if _device._SIMULATING:
        return [np.empty(x.shape, x.dtype) for x in arrays]
    starts = [0, *accumulate([-(-x.nbytes // 256) * 256 for x in arrays])]
    memory, array = _device.cupy.cuda.alloc(starts.pop()), _device.cupy.ndarray
    pairs = zip(arrays, starts, strict=True)
    return [array(x.shape, x.dtype, memory + start) for x, start in pairs]


def find_not_finite(arrays: Sequence, state: Any, slot: int) -> None:
    """Set ``state[FOUND + slot]`` to 1 if any element is infinite or NaN."""
    from rtxarr.kernels._multi_tensor_cuda import check

    with on_gpu(gpu_of(state)):
        for dtype, places in _kinds(arrays):
            found = made_contiguous([arrays[i] for i in places])
            upload([addresses(found)], sizes_of(found)).launch(check(dtype), state, slot)


def move_scale(state: Any, growth: float, backoff: float, interval: int) -> None:
    """Move a loss scale on, in one thread; see :class:`rtxarr.optim.LossScaler`."""
    from rtxarr.kernels._multi_tensor_cuda import update_scale

    numbers = np.float32(growth), np.float32(backoff), np.float32(interval)
    launch(update_scale(), 1, (state, *numbers))


class Averaging(NamedTuple):
    """Arrays to be averaged into others, prepared by :func:`averaging`: one launch of them."""

    gpu: int | None
    dtypes: tuple[Any, Any]
    columns: list[np.ndarray]
    sizes: tuple[int, ...]


def averaging(targets: Sequence, sources: Sequence) -> list[Averaging]:
    """Prepare :func:`average`, which goes for as long as the arrays lie where they are."""
    rows = zip(targets, sources, strict=True)
    found = []
    for dtypes, group in batches(rows, lambda row: (row[0].dtype, row[1].dtype)):
        to, of = zip(*group, strict=True)
        columns = [addresses(to), addresses(of)]
        found.append(Averaging(gpu_of(to[0]), dtypes, columns, sizes_of(to)))
    return found


def average(prepared: Sequence[Averaging], numbers: Callable[[], tuple[float, float]]) -> None:
    """Move each target ``a`` to ``keep * a + new * source`` in place.

    ``numbers()`` gives ``keep`` and ``new``, for each step, eager or replayed.
    """
    from rtxarr.kernels._multi_tensor_cuda import average as kernel

    for gpu, (target, source), columns, sizes in prepared:
        scalar = accumulator(target)

        def tail(scalar=scalar):
            return np.array([*numbers(), 0, 0], scalar).view(np.int64)

        with on_gpu(gpu):
            table = upload(columns, sizes, tail)
            table.launch(kernel(target, source), table.rest(0, scalar))
