"""A picture of what a graph attention network looks at."""

from pathlib import Path

import numpy as np

from rtxarr.recipes._pictures import _COLOURS, _GREY, _INK, _figure, _write

_MOST = 8  # of the second ring, at each node of the first


def uneven_nodes(nodes: np.ndarray, dst: np.ndarray, weight: np.ndarray, n: int) -> np.ndarray:
    """Give ``n`` of ``nodes`` with 6 to 14 edges whose attention is the furthest from even."""
    count = np.bincount(dst, minlength=nodes.max() + 1)
    square = np.bincount(dst, weight**2, minlength=nodes.max() + 1)
    fits = nodes[(count[nodes] >= 7) & (count[nodes] <= 15)]  # with the loop
    return fits[np.argsort(-(count * square)[fits], kind="stable")][:n]


def draw_attention(
    path: Path,
    title: str,
    nodes: np.ndarray,
    edges: np.ndarray,
    weights: tuple[np.ndarray, np.ndarray],
    labels: np.ndarray,
    guesses: np.ndarray,
    names: tuple[str, ...],
) -> None:
    """Draw nodes amid their neighbours and the neighbours of those, with lines as wide as weights.

    Parameters
    ----------
    path : Path
    title : str
    nodes : array of int64, shape (n_panels,)
        One for each panel.
    edges : array of int64, shape (2, n_edges)
        Sources and destinations.
    weights : tuple of two arrays, shape (n_edges,)
        Attention of the first layer, for the outer lines, and of the second, for the inner ones.
    labels, guesses : array of int64, shape (n_nodes,)
        The classes, which are the colours, and what the network says.
    names : tuple of str
        Of the classes.
    """
    src, dst = edges
    figure = _figure(12.6, 5.2)
    for axes, node in zip(figure.subplots(1, len(nodes), squeeze=False)[0], nodes, strict=True):
        near = np.flatnonzero((dst == node) & (src != node))
        near = near[np.argsort(labels[src[near]], kind="stable")]
        sectors = 2 * np.pi * np.arange(len(near)) / len(near)
        seen = {node, *src[near].tolist()}
        for edge, angle in zip(near, sectors, strict=True):
            place = np.array([np.cos(angle), np.sin(angle)])
            _line(axes, np.zeros(2), place, weights[1][edge] * len(near))
            far = np.flatnonzero((dst == src[edge]) & ~np.isin(src, list(seen)))
            far = far[np.argsort(-weights[0][far], kind="stable")][:_MOST]
            width = 2 * np.pi / len(near) * 0.8
            for i, outer in enumerate(far):
                turn = angle + width * ((i + 0.5) / len(far) - 0.5)
                end = 1.75 * np.array([np.cos(turn), np.sin(turn)])
                _line(axes, place, end, weights[0][outer] * np.sum(dst == src[edge]))
                _dot(axes, end, labels[src[outer]], 16)
            _dot(axes, place, labels[src[edge]], 60)
        _dot(axes, np.zeros(2), labels[node], 170)
        right = guesses[node] == labels[node]
        text = f"{names[labels[node]]}\nthe network: {names[guesses[node]]}"
        axes.set_title(text, color=_COLOURS[0] if right else _COLOURS[3], fontsize=9)
        axes.set_aspect("equal")
        axes.set_axis_off()
        axes.margins(0.06)
    for label, name in enumerate(names):
        axes.scatter([], [], s=36, color=_COLOURS[label], label=name)
    figure.legend(frameon=False, loc="outside lower center", ncols=4, labelcolor=_INK)
    _write(figure, path, f"{title}\n")  # the line keeps the titles of the panels away


def _line(axes, start, stop, share):
    """Draw an edge; a share of 1 is the even one."""
    x, y = np.stack([start, stop], axis=1)
    axes.plot(x, y, color=_GREY, linewidth=min(1.6 * share, 8), alpha=0.6, zorder=1)


def _dot(axes, place, label, size):
    style = {"color": _COLOURS[label], "edgecolors": "white", "linewidths": 0.6}
    axes.scatter(*place, s=size, zorder=2, **style)
