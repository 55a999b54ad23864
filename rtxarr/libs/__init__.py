"""Libraries: cuBLASLt for matrix products, cuDNN for attention and convolutions, cuTile for fused
products and for attention that cuDNN has no plan for, cuFFT for Fourier transforms.

Each is optional and has a plain fallback.
"""

from rtxarr.libs import _tile_attention, blas, dnn, fft, tile

__all__ = ["blas", "dnn", "fft", "show", "tile"]


def show() -> None:
    """Print which library serves what, or why not, and what it left to the fallback.

    Examples
    --------
    >>> import rtxarr as rx
    >>> rx.libs.show()  # doctest: +SKIP
    matrix products: cuBLASLt 13.4.0, through nvmath-python 1.0.0
        2 by CuPy: dtypes complex64 and complex64
    fused products: cuda-tile 1.7.0, tileiras 13.4.92
    attention and convolutions: cuDNN 9.19.0, through nvidia-cudnn-frontend 1.32.0
        1 by CuPy: attention in float32
        2 by cuda-tile: attention with dropout
    attention that cuDNN leaves: cuda-tile 1.7.0, tileiras 13.4.92
    Fourier transforms: cuFFT 12.0.0, through CuPy
    """
    providers = blas, tile, dnn, _tile_attention, fft
    print("\n".join(line for provider in providers for line in provider.status().lines()))
