"""Product of a sparse matrix in CSR form with a dense one."""

from __future__ import annotations

from typing import Any

from rtxarr import _device
from rtxarr._device import launch_planned, namespace, runs_kernels
from rtxarr._override import overridable
from rtxarr.kernels._dense import packed
from rtxarr.kernels.segment import can_be_wide, row_block

__all__ = ["spmm"]


@overridable
def spmm(
    values: Any, dense: Any, indptr: Any, indices: Any, *, order: Any = None, rows: Any = None
) -> Any:
    """Multiply a CSR matrix with a dense one.

    Parameters
    ----------
    values : array of float32, float64, complex64 or complex128, shape (n_entries,)
    dense : array of the same dtype, shape (n_columns, n_features)
    indptr : array of int64, shape (n_pieces + 1,)
    indices : array of int64, shape (n_entries,)
    order : array of int64, shape (n_entries,), optional
        Entry ``j`` is ``values[order[j]]`` instead of ``values[j]``.
    rows : array of int64, shape (n_rows + 1,), optional
        Row ``i`` of the result is the sum of the pieces ``rows[i]:rows[i + 1]``, in order; without
        it a row is a piece. On a GPU one thread for each feature adds up a piece, so long rows
        should be cut.

    Returns
    -------
    array, shape (n_rows, n_features), dtype of ``values``
        Entries are added in order.

    Notes
    -----
    On a GPU no index is checked: that would read them back to the host.
    """
    n_pieces, n_features = indptr.shape[0] - 1, dense.shape[1]
    n_rows = n_pieces if rows is None else rows.shape[0] - 1
    if 0 in (n_rows, n_features):
        return namespace(values).empty((n_rows, n_features), dtype=values.dtype)
    if not runs_kernels(values):
        return _spmm_host(values, dense, indptr, indices, order, rows)
    partial = _device.empty(values, (n_pieces, n_features), values.dtype)
    given = values, packed(dense), indptr, indices, indices if order is None else order
    launch_planned(_product, (order is not None,), (*given, partial, n_features))
    if rows is None:
        return partial
    out = _device.empty(values, (n_rows, n_features), values.dtype)
    launch_planned(_join, (), (partial, rows, out, n_features))
    return out


def _product(options, args):
    from rtxarr.kernels._spmm_cuda import multiply

    values, dense, indptr = args[:3]
    n_pieces, n_features = indptr.shape[0] - 1, dense.shape[1]
    wide = can_be_wide(dense, n_features)
    block = row_block(n_features, 4 if wide else 1)
    return multiply(values.dtype, wide, *options), -(-n_pieces // block[1]), block


def _join(options, args):
    from rtxarr.kernels._spmm_cuda import join

    out = args[2]
    return join(out.dtype), out.size, None


def _spmm_host(values, dense, indptr, indices, order, rows):
    from scipy import sparse

    values = values if order is None else values[order]
    indptr = indptr if rows is None else indptr[rows]
    shape = (indptr.shape[0] - 1, dense.shape[0])
    return sparse.csr_array((values, indices, indptr), shape=shape) @ dense
