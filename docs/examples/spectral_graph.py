"""A layer of a network of signals: a filter over time at each node, attention among neighbours.

Each node of a graph has a signal of ``n_times`` samples. Its spectrum is weighted, neighbours are
attended to (P. Velickovic et al., "Graph attention networks", 2018, eq. 1-4), and a gate decides
how much of the old signal stays (K. Cho et al., "Learning phrase representations", 2014, eq. 7).
"""

import numpy as np

import rtxarr as rx
from rtxarr import geom


def parameters(n_times=64, n_heads=4, seed=0):
    """Return a filter of the spectrum, vectors of attention, and matrices of the gate."""
    rng = np.random.default_rng(seed)
    real, imag = rng.standard_normal((2, n_times // 2 + 1), dtype=np.float32)
    parts = {"filter": real + np.complex64(1j) * imag}
    for name in ("source", "target"):
        shape = (n_heads, n_times // n_heads)
        parts[name] = rng.standard_normal(shape, dtype=np.float32) / shape[1] ** 0.5
    for name in ("gate", "candidate"):
        shape = (2 * n_times, n_times)
        parts[name] = rng.standard_normal(shape, dtype=np.float32) / shape[0] ** 0.5
    return parts


def layer(parts, graph, x):
    """Return the signals after one layer.

    Parameters
    ----------
    parts : dict
        As :func:`parameters` gives it, on the device of ``x``.
    graph : geom.Graph
    x : array of float32, shape (n_nodes, n_times)
    """
    n_nodes, n_times = x.shape
    waves = rx.fft.rfft(rx.tanh(x), axis=1)
    filtered = rx.fft.irfft(waves * parts["filter"], n=n_times, axis=1)
    heads = rx.reshape(filtered, (n_nodes, *parts["source"].shape))
    source = rx.sum(heads * parts["source"], axis=2)
    target = rx.sum(heads * parts["target"], axis=2)
    logits = rx.take(source, graph.src, axis=0) + rx.take(target, graph.dst, axis=0)
    share = geom.edge_softmax(graph, rx.leaky_relu(logits, negative_slope=0.2))
    heard = geom.aggregate(graph, heads, "sum", weight=share)
    both = rx.concat([rx.reshape(heard, x.shape), x], axis=1)
    gate = rx.sigmoid(rx.matmul(both, parts["gate"]))
    return (1 - gate) * x + gate * rx.tanh(rx.matmul(both, parts["candidate"]))
