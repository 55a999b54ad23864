"""Loops to kernels: which thread runs what, what stays on chip.

* map (``_maps``): a thread takes one tile of packets; all its loads come before its arithmetic.
  An array that is read across, such as a transposed one, goes through shared memory (``_tiles``).
* rows (``_rows``): 1 to 1024 threads share a row, short rows share a block. What a later pass needs
  of an earlier one stays in registers or, of longer rows, in shared memory; each thread reads there
  only what it wrote, so the only barriers are those of the reductions and scans (``_scans``). Long
  rows are shared by blocks where these reach one another's memory (``_cluster``); elsewhere rows
  that leave no room for others on a multiprocessor (``_ring``) follow one another through shared
  memory.
* columns (``_columns``): a thread takes a packet of neighbouring columns, several share each.
* segments (``_segments``): part of a warp has a row. Of many features (``_features``) a thread
  takes a packet; what they share is computed once, by lanes dealt out over edges.

Threads combine by shuffles, then warps in order, so equal inputs give equal bits. Few long rows (or
columns) are cut into chunks: each pass is then a launch, and the next combines the chunks in order.
"""

from __future__ import annotations

from rtxarr.polygraph._loops import Loops
from rtxarr.polygraph.codegen._cluster import Cluster
from rtxarr.polygraph.codegen._columns import Columns
from rtxarr.polygraph.codegen._dialects import Dialect
from rtxarr.polygraph.codegen._features import Features
from rtxarr.polygraph.codegen._maps import Map, several
from rtxarr.polygraph.codegen._reciprocals import by_reciprocals, with_rough_sigmoids
from rtxarr.polygraph.codegen._ring import Ring
from rtxarr.polygraph.codegen._rows import Rows
from rtxarr.polygraph.codegen._segments import Segments
from rtxarr.polygraph.codegen._text import Kernel
from rtxarr.polygraph.codegen._tiles import Tiles, sides_of
from rtxarr.polygraph.codegen._writer import Writer

# Bytes of shared memory that a block may have; the least of the architectures with much of it.
SHARED_LIMIT = 227 * 1024


def has_clusters(cc: tuple[int, int]) -> bool:
    """Tell whether blocks of a compute capability can reach one another's shared memory."""
    return 9 <= cc[0] <= 11


def generate(
    loops: Loops,
    dialect: Dialect,
    *,
    strict: bool = True,
    shared_limit: int = SHARED_LIMIT,
    clusters: bool = False,
) -> Kernel:
    """Return the text of a kernel and how to launch it for these sizes.

    Parameters
    ----------
    loops : Loops
    dialect : Dialect
    strict : bool, default True
        Round halves after each operation.
    shared_limit : int, bytes
        What a block can have of shared memory.
    clusters : bool, default False
        Whether blocks can share rows: :func:`has_clusters`.
    """
    if loops.members:
        return several(loops, dialect, strict, shared_limit)
    if not strict:
        loops = with_rough_sigmoids(by_reciprocals(loops))
    writer = _WRITERS[loops.kind]
    if writer is Segments and loops.features >= 4:
        writer = Features
    if sides_of(loops) is not None:
        writer = Tiles
    if writer is Rows and clusters:
        cluster = Cluster(loops, dialect, strict, shared_limit)
        if cluster.fits():
            return cluster.run()
    if writer is Rows and not loops.scans:
        ring = Ring(loops, dialect, strict, shared_limit)
        if ring.fits():
            return ring.run()
    return writer(loops, dialect, strict, shared_limit).run()


_WRITERS: dict[str, type[Writer]] = {
    "map": Map,
    "rows": Rows,
    "columns": Columns,
    "segments": Segments,
}
