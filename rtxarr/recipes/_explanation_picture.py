"""A picture of the edges that an answer of a graph network rests on."""

from pathlib import Path

import numpy as np

from rtxarr.recipes._layout import distance_layout
from rtxarr.recipes._pictures import _COLOURS, _GREY, _INK, _PALE, _figure, _write


def mixed_node(
    nodes: np.ndarray, edges: np.ndarray, labels: np.ndarray, chances: np.ndarray
) -> int:
    """Give the one of ``nodes`` whose class is told for sure although its neighbours differ.

    Of those with 4 to 10 edges and the right answer, if there are any, it is the one with the
    largest product of the chance of its class and the entropy of its neighbours' classes.
    """
    counts = np.zeros(chances.shape)
    np.add.at(counts, (edges[1], labels[edges[0]]), 1)
    degree = counts.sum(axis=1)
    shares = counts / np.maximum(degree, 1)[:, None]
    entropy = -np.sum(shares * np.log(np.where(shares > 0, shares, 1)), axis=1)
    score = chances[np.arange(len(labels)), labels] * entropy
    fits = (degree >= 4) & (degree <= 10) & (chances.argmax(axis=1) == labels)
    chosen = nodes[fits[nodes]]
    chosen = chosen if chosen.size else nodes
    return int(chosen[np.argmax(score[chosen])])


def draw_explanation(
    path: Path,
    title: str,
    node: int,
    edges: np.ndarray,
    weight: np.ndarray,
    labels: np.ndarray,
    names: tuple[str, ...],
) -> None:
    """Draw the edges that have any weight, as wide and dark as it is, and the nodes at them.

    Parameters
    ----------
    path : Path
    title : str
    node : int
        Whose answer is explained; drawn as a star.
    edges : array of int64, shape (2, n_edges)
        Each way.
    weight : array of float, shape (n_edges,)
        In [0, 1]; of the two ways of an edge the larger is drawn.
    labels : array of int64, shape (n_nodes,)
        The classes, which are the colours.
    names : tuple of str
        Of the classes.
    """
    figure = _figure(9.2, 6.4)
    axes = figure.subplots()
    used = np.flatnonzero(weight > 0)
    nodes, ends = np.unique(np.append(edges[:, used], node), return_inverse=True)
    pairs = np.sort(ends[:-1].reshape(2, -1), axis=0)  # as they come, without their way
    points = np.zeros((1, 2))
    if pairs.size:
        points = distance_layout(np.concatenate([pairs, pairs[::-1]], axis=1))
    for edge in np.argsort(weight[used], kind="stable"):
        share, (x, y) = float(weight[used[edge]]), points[pairs[:, edge]].T
        colour = _INK if share > 0.5 else _GREY if share > 0.25 else _PALE
        axes.plot(x, y, color=colour, linewidth=0.6 + 3.4 * share, zorder=1 + share)
    for label, name in enumerate(names):
        x, y = points[(labels[nodes] == label) & (nodes != node)].T
        style = {"color": _COLOURS[label], "edgecolors": "white", "linewidths": 0.6}
        axes.scatter(x, y, s=60, zorder=3, label=name, **style)
    x, y = points[nodes == node].T
    style = {"color": _COLOURS[labels[node]], "edgecolors": _INK, "linewidths": 1.0}
    axes.scatter(x, y, s=420, marker="*", zorder=4, **style)
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.margins(0.05)
    figure.legend(frameon=False, loc="outside right center", markerscale=1.2, labelcolor=_INK)
    _write(figure, path, title)
