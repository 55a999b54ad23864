"""A block of a Fourier neural operator: low frequencies mixed by matrices, points by a layer.

Z. Li et al., "Fourier neural operator for parametric partial differential equations", 2021, eq. 4.
"""

import numpy as np

import rtxarr as rx


def parameters(n_channels=64, n_modes=12, seed=0):
    """Return matrices of ``2 n_modes x n_modes`` frequencies, and a layer's weight and bias."""
    rng = np.random.default_rng(seed)
    shape = (2, 2 * n_modes, n_modes, n_channels, n_channels)
    real, imag = rng.standard_normal(shape, dtype=np.float32) / n_channels
    weight = rng.standard_normal((n_channels, n_channels), dtype=np.float32) / n_channels**0.5
    bias = rng.standard_normal(n_channels, dtype=np.float32)
    return {"modes": real + np.complex64(1j) * imag, "weight": weight, "bias": bias}


def block(parts, x):
    """Return ``gelu(x W + b + irfft2(R rfft2(x)))``.

    Parameters
    ----------
    parts : dict
        As :func:`parameters` gives it, on the device of ``x``.
    x : array of float32, shape (n_fields, n_y, n_x, n_channels)
        Fields, at the points of a grid.
    """
    size, n_modes = x.shape[1:3], parts["modes"].shape[1]
    waves = rx.fft.rfftn(x, axes=(1, 2), norm="ortho")
    low = rx.concat([waves[:, :n_modes, :n_modes], waves[:, -n_modes:, :n_modes]], axis=1)
    mixed = rx.einsum("byxi,yxio->byxo", low, parts["modes"])
    waves = rx.zeros_like(waves)
    waves[:, :n_modes, :n_modes] = mixed[:, :n_modes]
    waves[:, -n_modes:, :n_modes] = mixed[:, n_modes:]
    smooth = rx.fft.irfftn(waves, s=size, axes=(1, 2), norm="ortho")
    return rx.gelu(smooth + rx.matmul(x, parts["weight"]) + parts["bias"])
