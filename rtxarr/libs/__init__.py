"""Vendor libraries: cuBLASLt for matrix products. Each is optional and has a plain fallback."""

from rtxarr.libs import blas

__all__ = ["blas", "show"]


def show() -> None:
    """Print which library serves what, or why not, and what it left to the fallback.

    Examples
    --------
    >>> import rtxarr as rx
    >>> rx.libs.show()  # doctest: +SKIP
    matrix products: cuBLASLt 13.4.0, through nvmath-python 1.0.0
        2 by CuPy: dtypes complex64 and complex64
    """
    print("\n".join(blas.status().lines()))
