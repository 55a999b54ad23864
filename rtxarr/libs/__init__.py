"""Vendor libraries: cuBLASLt for matrix products, cuDNN for attention and convolutions.

Each is optional and has a plain fallback.
"""

from rtxarr.libs import blas, dnn

__all__ = ["blas", "dnn", "show"]


def show() -> None:
    """Print which library serves what, or why not, and what it left to the fallback.

    Examples
    --------
    >>> import rtxarr as rx
    >>> rx.libs.show()  # doctest: +SKIP
    matrix products: cuBLASLt 13.4.0, through nvmath-python 1.0.0
        2 by CuPy: dtypes complex64 and complex64
    attention and convolutions: cuDNN 9.19.0, through nvidia-cudnn-frontend 1.32.0
        1 by CuPy: attention in float32
    """
    print("\n".join([*blas.status().lines(), *dnn.status().lines()]))
