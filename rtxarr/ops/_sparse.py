"""Products of a sparse matrix with a dense one, and their rules."""

from functools import cached_property
from typing import Any

import numpy as np

from rtxarr._checks import check_range
from rtxarr._device import device_of, to_device
from rtxarr._override import tracing
from rtxarr.autograd._op import differentiable
from rtxarr.dtypes import is_inexact
from rtxarr.kernels import spmm as kernels
from rtxarr.ops._half import rounded_once
from rtxarr.ops._index import take
from rtxarr.ops._reduce import sum

__all__ = ["SparsityPattern", "spmm"]

# Longer rows are summed in pieces of so many entries, counted from the row's start.
_PIECE = 256


class SparsityPattern:
    """Where the entries of a sparse matrix are: its CSR form without the values.

    Parameters
    ----------
    indptr : array of int64, shape (n_rows + 1,)
        Row ``i`` has the entries ``indptr[i]:indptr[i + 1]``.
    indices : array of int64, shape (n_entries,)
        Their columns. One may come twice in a row: the entries then add up.
    shape : tuple of int
        ``(n_rows, n_columns)``.

    Raises
    ------
    ValueError, IndexError
        When the three do not fit each other; IndexError for a column out of range. Their values
        are read to the host for that, once.

    Notes
    -----
    Must not be changed: what products need is worked out once and kept, the transposed pattern
    included.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> pattern = rx.SparsityPattern(np.array([0, 1, 3]), np.array([2, 0, 1]), (2, 3))
    >>> rx.spmm(np.array([1.0, 2.0, 3.0]), np.eye(3), pattern)
    array([[0., 0., 1.],
           [2., 3., 0.]])
    """

    def __init__(self, indptr: Any, indices: Any, shape: tuple[int, int]):
        self.indptr = indptr
        self.indices = indices
        self.shape = tuple(shape)
        self._check()

    def _check(self):
        for name, array in (("indptr", self.indptr), ("indices", self.indices)):
            if array.ndim != 1 or array.dtype != np.int64:
                raise ValueError(f"{name} must be 1-D int64, got {array.ndim}-D {array.dtype}")
        indptr, indices = self._host
        n_rows, n_columns = self.shape
        if indptr.shape[0] != n_rows + 1:
            raise ValueError(f"indptr must have {n_rows + 1} entries, got {indptr.shape[0]}")
        if indptr[0] != 0 or indptr[-1] != indices.shape[0] or (np.diff(indptr) < 0).any():
            raise ValueError(
                f"indptr must rise from 0 to the number of entries, {indices.shape[0]}, got "
                f"{indptr[0]} to {indptr[-1]}"
            )
        check_range("indices", indices, 0, n_columns)

    def __repr__(self):
        return f"SparsityPattern({self.shape[0]} x {self.shape[1]}, {self.n_entries} entries)"

    @property
    def n_entries(self) -> int:
        """Number of entries."""
        return self.indices.shape[0]

    @cached_property
    def _host(self):
        return to_device(self.indptr, "cpu"), to_device(self.indices, "cpu")

    @cached_property
    def rows(self) -> Any:
        """Row of each entry; int64, shape (n_entries,)."""
        indptr = self._host[0]
        return self._place(np.repeat(np.arange(self.shape[0]), np.diff(indptr)))

    @cached_property
    def order(self) -> Any:
        """Entries in the order of the transposed pattern; int64, shape (n_entries,)."""
        return self._place(np.argsort(self._host[1], kind="stable"))

    @cached_property
    def T(self) -> "SparsityPattern":
        """The transposed pattern: its entries are those at ``order``."""
        counts = np.bincount(self._host[1], minlength=self.shape[1])
        indptr = np.concatenate([[0], np.cumsum(counts)])
        rows = take(self.rows, self.order)
        return SparsityPattern(self._place(indptr), rows, (self.shape[1], self.shape[0]))

    @cached_property
    def pieces(self) -> tuple[Any, Any]:
        """Cut of long rows: ``(piece pointers, row pointers into the pieces or None)``."""
        indptr = self._host[0]
        n_pieces = np.maximum(-(-np.diff(indptr) // _PIECE), 1)
        if n_pieces.max(initial=1) == 1:
            return self.indptr, None
        rows = np.concatenate([[0], np.cumsum(n_pieces)])
        place = np.arange(rows[-1]) - np.repeat(rows[:-1], n_pieces)  # of a piece in its row
        starts = np.repeat(indptr[:-1], n_pieces) + place * _PIECE
        return self._place(np.append(starts, indptr[-1])), self._place(rows)

    def _place(self, array):
        return to_device(array, device_of(self.indices))


@differentiable
def spmm(values, dense, /, pattern, *, transpose=False):
    """Multiply a sparse matrix with a dense one.

    Parameters
    ----------
    values : array or Tensor, shape (n_entries,)
        The entries, in the order of the pattern.
    dense : array or Tensor, shape (n_columns, n_features), dtype of ``values``
        With ``transpose``, shape (n_rows, n_features).
    pattern : SparsityPattern
    transpose : bool, default False
        Multiply with the transposed matrix.

    Returns
    -------
    array or Tensor, shape (n_rows, n_features); with ``transpose``, (n_columns, n_features)
        Rows are summed in a fixed order, those of half types in float32. Differentiable in
        ``values`` and ``dense``.
    """
    if values.shape != (pattern.n_entries,):
        raise ValueError(f"values must have shape {(pattern.n_entries,)}, got {values.shape}")
    n_rows = pattern.shape[0 if transpose else 1]
    if dense.ndim != 2 or dense.shape[0] != n_rows:
        raise ValueError(f"dense must have shape ({n_rows}, n_features), got {dense.shape}")
    if not is_inexact(values.dtype) or values.dtype != dense.dtype:
        raise TypeError(
            "values and dense must have one floating-point or complex dtype, got "
            f"{values.dtype} and {dense.dtype}"
        )
    return _multiply(values, dense, pattern, transpose)


@rounded_once
def _multiply(values, dense, pattern, transpose):
    order = pattern.order if transpose else None
    side = pattern.T if transpose else pattern
    # Kernels of fused programs cut long rows themselves.
    pieces, rows = side.pieces if tracing() is None else (side.indptr, None)
    return kernels.spmm(values, dense, pieces, side.indices, order=order, rows=rows)


def _values_rule(g, dense, pattern, transpose):
    rows, columns = pattern.rows, pattern.indices
    if transpose:
        rows, columns = columns, rows
    return sum(take(g, rows, axis=0) * take(dense, columns, axis=0), axis=1)


spmm.defvjps(
    values=_values_rule,
    dense=lambda g, values, pattern, transpose: spmm(values, g, pattern, transpose=not transpose),
)
