"""A picture's worth of a high-dimensional embedding: neighbours stay neighbours in the plane."""

import numpy as np


def neighbor_layout(
    x: np.ndarray, *, n_neighbors: int = 15, n_steps: int = 300, n_negatives: int = 8, seed: int = 0
) -> np.ndarray:
    """Place points in the plane so that those near each other in ``x`` are near each other.

    Parameters
    ----------
    x : array of float32, shape (n, n_features)
        Compared by the angle between rows.
    n_neighbors, n_steps, n_negatives : int
        Neighbours that attract a point, steps, and points drawn at random that repel it in each.
    seed : int

    Returns
    -------
    array of float32, shape (n, 2)

    Notes
    -----
    The loss is that of UMAP with its curve's ``a = b = 1`` and equal weights, minimised over all
    attractions at once: ``-log q`` over neighbours and ``-log(1 - q)`` over random pairs, where
    ``q = 1 / (1 + d**2)`` for points ``d`` apart.

    References
    ----------
    McInnes, Healy and Melville, "UMAP: Uniform Manifold Approximation and Projection for Dimension
    Reduction", 2018, arXiv:1802.03426, section 3.2.
    """
    x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    n = x.shape[0]
    rows, columns = _neighbor_pairs(x, min(n_neighbors, n - 1))
    starts = np.searchsorted(rows, np.arange(n))  # every row has neighbours
    rng = np.random.default_rng(seed)
    y = principal_axes(x)
    y = (y / max(float(y.std()), 1e-12) * 3).astype(np.float32)
    y += rng.normal(scale=1e-2, size=y.shape).astype(np.float32)  # equal rows must part
    for step in range(n_steps):
        apart = y[rows] - y[columns]
        pull = np.add.reduceat(apart * (2 / (1 + _squared(apart))), starts, axis=0)
        away = y[:, None] - y[rng.integers(0, n, (n, n_negatives))]
        squared = _squared(away)
        push = np.sum(np.clip(away * (2 / ((1e-3 + squared) * (1 + squared))), -4, 4), axis=1)
        force = push * (n_neighbors / n_negatives) - pull
        y += 0.1 * (1 - step / n_steps) * np.clip(force, -8, 8)
    return y


def principal_axes(x: np.ndarray) -> np.ndarray:
    """Project rows onto the two directions in which they differ most; shape (n, 2)."""
    centred = x - x.mean(axis=0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    return centred @ axes[:2].T


def _neighbor_pairs(x, k):
    """Give the pairs of which one is among the other's ``k`` nearest, sorted, both ways."""
    n = x.shape[0]
    similarity = x @ x.T
    np.fill_diagonal(similarity, -np.inf)
    nearest = np.argpartition(similarity, -k, axis=1)[:, -k:].ravel()
    owner = np.repeat(np.arange(n), k)
    pairs = np.unique(np.concatenate([owner * n + nearest, nearest * n + owner]))
    return pairs // n, pairs % n


def _squared(x):
    return np.sum(x * x, axis=-1, keepdims=True)


def distance_layout(edges: np.ndarray, *, n_steps: int = 200, n_starts: int = 8) -> np.ndarray:
    """Place the nodes of a connected graph so that they are as far apart as edges lie between them.

    Parameters
    ----------
    edges : array of int64, shape (2, n_edges)
        Each way; every node has one.
    n_steps, n_starts : int
        Steps, and layouts of which the best after an eighth of them is kept.

    Returns
    -------
    array of float64, shape (n_nodes, 2)

    Notes
    -----
    Each step takes all nodes to the weighted means of where the others want them, with the weights
    ``d**-2`` of nodes ``d`` edges apart.

    References
    ----------
    Gansner, Koren and North, "Graph Drawing by Stress Majorization", 2004,
    doi:10.1007/978-3-540-31843-9_25, eq. 5.
    """
    from scipy import sparse
    from scipy.sparse import csgraph

    n = int(edges.max()) + 1
    matrix = sparse.csr_array((np.ones(edges.shape[1]), edges), shape=(n, n))
    wanted = csgraph.shortest_path(matrix, unweighted=True)
    centred = -0.5 * (wanted**2 - np.mean(wanted**2, axis=0))
    y = principal_axes(centred - centred.mean(axis=1, keepdims=True))  # roughly
    y = y / max(float(np.abs(y).max()), 1e-12) * wanted.max() / 2
    weight = np.zeros_like(wanted)
    np.divide(1.0, wanted**2, out=weight, where=wanted > 0)
    # Twins, and rings seen edge on, part as chance has it; a ring that is twisted has more stress.
    rng = np.random.default_rng(0)
    starts = [y + rng.normal(scale=1e-6, size=y.shape) for _ in range(n_starts)]
    starts = [_majorized(y, wanted, weight, n_steps // 8) for y in starts]
    best = min(starts, key=lambda y: _stress(y, wanted, weight))
    return _majorized(best, wanted, weight, n_steps)


def _majorized(y, wanted, weight, n_steps):
    for _ in range(n_steps):
        apart = y[:, None] - y[None]
        length = np.maximum(np.sqrt(_squared(apart)), 1e-9)
        aims = y[None] + apart / length * wanted[:, :, None]
        y = np.einsum("ij,ijk->ik", weight, aims) / weight.sum(axis=1, keepdims=True)
    return y


def _stress(y, wanted, weight):
    length = np.sqrt(_squared(y[:, None] - y[None]))[:, :, 0]
    return float(np.sum(weight * (length - wanted) ** 2))
