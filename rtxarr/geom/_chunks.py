"""Graphs of more edges than memory holds at once: made of chunks, kept in files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._checks import check_range
from rtxarr.data._atomic import atomic_write
from rtxarr.geom._graph import Graph, _index_dtype, _require_integers, _sizes, plain

__all__ = ["EdgeChunks", "from_chunks", "open_graph"]

_META = "graph.json"
_FORMAT = "rtxarr graph 1"


class EdgeChunks:
    """Two long arrays, such as files mapped into memory, as chunks for :func:`from_chunks`.

    Parameters
    ----------
    src, dst : array of any integer dtype, shape (n_edges,)
    size : int, default 2**24
        Edges of a chunk.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> chunks = geom.EdgeChunks(np.array([3, 0, 1]), np.array([1, 1, 0]), size=2)
    >>> [src.tolist() for src, dst in chunks]
    [[3, 0], [1]]
    """

    def __init__(self, src: Any, dst: Any, *, size: int = 2**24):
        if not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"size must be an int >= 1, got {size!r}")
        _require_integers(src=src, dst=dst)
        if src.shape != dst.shape:
            raise ValueError(
                f"src and dst must have one length, got {src.shape[0]} and {dst.shape[0]}"
            )
        self.src, self.dst, self.size = src, dst, int(size)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for start in range(0, self.src.shape[0], self.size):
            part = slice(start, start + self.size)
            yield self.src[part], self.dst[part]


def from_chunks(
    chunks: Iterable[tuple[Any, Any]],
    *,
    n_nodes: int | None = None,
    n_src: int | None = None,
    n_dst: int | None = None,
    keep_numbers: bool = True,
    device: Any = None,
    folder: str | os.PathLike | None = None,
    nodes: Mapping[str, Any] | None = None,
) -> Graph:
    """Make a graph of edges that come in chunks; the same as :meth:`Graph.from_edges` of all.

    Beside the graph itself there is memory for one chunk and one number a destination: of a
    billion edges to nodes that 32 bits count it takes 4 or 12 GB, where sorting the whole list
    takes more than 30.

    Parameters
    ----------
    chunks : iterable of (array, array)
        Sources and destinations of a run of edges, of any integer dtype. It is gone through
        twice, and must give the same both times: a list, an :class:`EdgeChunks`, or an object
        whose ``__iter__`` reads or draws them anew.
    n_nodes, n_src, n_dst : int
        As for :meth:`Graph.from_edges`.
    keep_numbers : bool, default True
        Whether edges are numbered as they come, which takes 8 bytes an edge. Without, they are
        numbered as they are stored: by their destinations, and by when they came.
    device : str or Device, default the current device
        Where the graph is made; chunks are copied there.
    folder : path-like, optional
        Make the graph in files in this new or empty folder instead, which :func:`open_graph` maps
        into memory again. Its device is the CPU.
    nodes : mapping of str to array or Tensor, optional
        As for :class:`Graph`.

    Returns
    -------
    Graph

    Raises
    ------
    IndexError
        When an entry is not the number of a node; names the chunk.
    ValueError
        When the chunks are others the second time.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> chunks = geom.EdgeChunks(np.array([3, 0, 1]), np.array([1, 1, 0]), size=2)
    >>> graph = geom.from_chunks(chunks, n_nodes=4)
    >>> graph.src, graph.dst
    (array([3, 0, 1]), array([1, 1, 0]))
    """
    n_src, n_dst = _sizes(n_nodes, n_src, n_dst)
    if isinstance(chunks, Iterator):
        raise TypeError(
            "chunks must be something to go through twice, as a list is, got an iterator: "
            f"{type(chunks).__name__}"
        )
    place = _device.device(device if folder is None else "cpu")
    with place:
        xp = _device.namespace()
        indptr = xp.zeros(n_dst + 1, dtype=xp.int64)
        for _, dst in _checked(chunks, n_src, n_dst, place):
            indptr[1:] += xp.bincount(dst, minlength=n_dst)
        indptr = xp.cumulative_sum(indptr)
        n_edges = int(indptr[-1])
        made = _Files(folder) if folder is not None else xp
        indices = made.empty(n_edges, dtype=_index_dtype(xp, n_src))
        edge_ids = made.empty(n_edges, dtype=xp.int64) if keep_numbers else None
        _place(chunks, n_src, n_dst, place, indptr, indices, edge_ids)
        if folder is not None:
            indptr = made.save(indptr, indices, edge_ids, n_src)
        return Graph._made(indptr, indices, n_src, edge_ids, nodes)


def _checked(chunks, n_src, n_dst, place):
    """Give the chunks on a device, as int64, once they are known to be of nodes."""
    for i, (src, dst) in enumerate(chunks):
        _require_integers(**{f"src of chunk {i}": src, f"dst of chunk {i}": dst})
        src, dst = (_device.to_device(plain(x), place) for x in (src, dst))
        if src.shape != dst.shape:
            raise ValueError(
                f"src and dst of chunk {i} must have one length, got {src.shape[0]} and "
                f"{dst.shape[0]}"
            )
        check_range(f"src of chunk {i}", src, 0, n_src)
        check_range(f"dst of chunk {i}", dst, 0, n_dst)
        yield src, _device.namespace(dst).astype(dst, np.int64, copy=False)


def _place(chunks, n_src, n_dst, place, indptr, indices, edge_ids):
    """Put each edge behind those of its destination that came before."""
    xp = _device.namespace(indptr)
    free = xp.asarray(indptr[:-1], copy=True)
    n_placed = 0
    for src, dst in _checked(chunks, n_src, n_dst, place):
        n = dst.shape[0]
        if n == 0:
            continue
        order = xp.argsort(dst, stable=True)
        dst = xp.take(dst, order)
        stored = xp.arange(n, dtype=xp.int64)
        starts = xp.concat([xp.zeros(1, dtype=xp.int64), xp.nonzero(dst[1:] != dst[:-1])[0] + 1])
        nodes = xp.take(dst, starts)
        counts = xp.concat([starts[1:], xp.full(1, n, dtype=xp.int64)]) - starts
        first = xp.take(free, nodes)
        if bool(xp.any(first + counts > xp.take(indptr, nodes + 1))):
            raise ValueError("chunks must give the same edges both times, got others")
        run = xp.searchsorted(starts, stored, side="right") - 1
        to = xp.take(first - starts, run) + stored
        indices[to] = xp.astype(xp.take(src, order), indices.dtype)
        if edge_ids is not None:
            edge_ids[to] = order + n_placed
        free[nodes] = first + counts
        n_placed += n
    if n_placed != indices.shape[0]:
        raise ValueError(
            f"chunks must give the same edges both times, got {indices.shape[0]} and then "
            f"{n_placed}"
        )


class _Files:
    """Makes the arrays of a graph as files in a folder."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(self.folder.iterdir()):
            raise FileExistsError(f"{folder} must be empty, it is not")
        self.names = iter(("indices", "edge_ids"))

    def empty(self, n, *, dtype):
        path = self.folder / f"{next(self.names)}.npy"
        if n == 0:  # which cannot be mapped
            np.save(path, np.empty(0, dtype=dtype))
            return np.empty(0, dtype=dtype)
        return np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=(n,)).view(
            np.ndarray
        )

    def save(self, indptr, indices, edge_ids, n_src):
        """Write the rest; a folder without the last file is not whole."""
        np.save(self.folder / "indptr.npy", indptr)
        for x in (indices, edge_ids):
            if x is not None and isinstance(x.base, np.memmap):
                x.base.flush()
        meta = {"format": _FORMAT, "n_src": n_src, "is_ordered": edge_ids is None}
        with atomic_write(self.folder / _META) as file:
            file.write(json.dumps(meta).encode())
        return _mapped(self.folder, "indptr")


def open_graph(folder: str | os.PathLike) -> Graph:
    """Map a graph into memory that :func:`from_chunks` made in a folder.

    Parameters
    ----------
    folder : path-like

    Returns
    -------
    Graph
        Nothing of it is read before it is needed, nor checked: the files must be as they were
        written.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from rtxarr import geom
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     chunks = geom.EdgeChunks(np.array([3, 0, 1]), np.array([1, 1, 0]))
    ...     _ = geom.from_chunks(chunks, n_nodes=4, folder=folder)
    ...     geom.open_graph(folder)
    Graph(4 nodes, 3 edges)
    """
    folder = Path(folder)
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder} must be the folder of a graph that was written to its end: it has no {_META}"
        ) from None
    if meta.get("format") != _FORMAT:
        raise ValueError(f"{folder / _META} must be of {_FORMAT!r}, got {meta.get('format')!r}")
    ids = None if meta["is_ordered"] else _mapped(folder, "edge_ids")
    return Graph._made(_mapped(folder, "indptr"), _mapped(folder, "indices"), meta["n_src"], ids)


def _mapped(folder, name):
    path = folder / f"{name}.npy"
    x = np.load(path, mmap_mode="r") if _has_entries(path) else np.load(path)
    return x.view(np.ndarray)


def _has_entries(path):
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        return np.lib.format.read_array_header_1_0(file)[0] != (0,)
