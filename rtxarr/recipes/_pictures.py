"""Pictures of a run. matplotlib is imported when the first one is drawn."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rtxarr.data._atomic import atomic_write

# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#5B4A8A", "#8C8C8C")
_INK, _GREY, _PALE = "#222222", "#6b6b6b", "#e4e4e4"


def draw_curves(
    path: Path,
    title: str,
    history: list[dict[str, Any]],
    best: dict[str, Any],
    test_metric: float,
    baselines: Mapping[str, tuple[float, str]],
    metric: str,
) -> None:
    """Draw the loss and a metric over the epochs, the best epoch marked."""
    figure = _figure(9.0, 3.9)
    left, right = figure.subplots(1, 2)
    epochs = [entry["epoch"] for entry in history]
    for axes, what in ((left, "loss"), (right, metric)):
        _clean(axes)
        axes.grid(axis="y", color=_PALE, linewidth=0.8)
        for colour, part, name in (
            (_COLOURS[0], "train", "training"),
            (_COLOURS[3], "val", "validation"),
        ):
            values = [entry[f"{part}_{what}"] for entry in history]
            axes.plot(
                epochs,
                values,
                color=colour,
                linewidth=1.6,
                label=name,
                marker="o" if len(epochs) == 1 else None,
            )
        if what in baselines:
            value, name = baselines[what]
            axes.axhline(value, color=_GREY, linewidth=1.2, linestyle=(0, (1, 2)), label=name)
        axes.axvline(best["epoch"], color=_GREY, linewidth=0.9, linestyle=(0, (3, 3)))
        axes.plot(
            best["epoch"],
            best[f"val_{what}"],
            "o",
            color=_COLOURS[3],
            markersize=6,
            markeredgecolor="white",
        )
        axes.set_xlabel("epoch", color=_GREY)
        axes.set_title(what, loc="left", color=_INK, fontsize=11)
        axes.margins(x=0.02)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if len(epochs) == 1:
            axes.set_xticks(epochs)
    left.legend(facecolor="white", edgecolor="none", framealpha=0.8, labelcolor=_INK)
    result = f"test {metric} {100 * test_metric:.1f} %"
    _write(figure, path, f"{title}: {result} with the parameters of epoch {best['epoch']}")


def draw_embedding(
    path: Path,
    title: str,
    points: np.ndarray,
    labels: np.ndarray,
    names: list[str],
    edges: np.ndarray,
) -> None:
    """Draw points in the plane, coloured by class, over the edges between them.

    Parameters
    ----------
    path : Path
    title : str
    points : array of float, shape (n_nodes, 2)
    labels : array of int64, shape (n_nodes,)
    names : list of str
        Of the classes.
    edges : array of int64, shape (2, n_edges)
    """
    from matplotlib.collections import LineCollection

    figure = _figure(9.2, 6.8)
    axes = figure.subplots()
    lines = LineCollection(points[edges.T], colors="#555555", linewidths=0.3, alpha=0.1)
    axes.add_collection(lines)
    for label, name in enumerate(names):
        x, y = points[labels == label].T
        axes.scatter(
            x,
            y,
            s=12,
            color=_COLOURS[label],
            linewidths=0.3,
            edgecolors="white",
            label=name,
            zorder=2,
        )
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.margins(0.02)
    figure.legend(frameon=False, loc="outside right center", markerscale=2.2, labelcolor=_INK)
    _write(figure, path, title)


def draw_guesses(
    path: Path, images: np.ndarray, labels: np.ndarray, chances: np.ndarray, n_shown: int = 24
) -> None:
    """Draw the images that a classifier is least sure of or wrong about, and what it says.

    Parameters
    ----------
    path : Path
    images : array, shape (n, height, width)
    labels : array of int64, shape (n,)
    chances : array of float, shape (n, n_classes)
    n_shown : int
    """
    guesses = chances.argmax(axis=1)
    hardest = np.argsort(chances[np.arange(len(labels)), labels], kind="stable")[:n_shown]
    n_columns = min(8, len(hardest))
    n_rows = -(-len(hardest) // n_columns)
    figure = _figure(1.1 * n_columns, 1.35 * n_rows + 0.5)
    for place, axes in enumerate(figure.subplots(n_rows, n_columns, squeeze=False).ravel()):
        axes.set_axis_off()
        if place >= len(hardest):
            continue
        i = hardest[place]
        axes.imshow(images[i], cmap="gray_r", interpolation="nearest")
        right = guesses[i] == labels[i]
        text = f"{guesses[i]}" if right else f"{guesses[i]}, not {labels[i]}"
        axes.set_title(
            f"{text}\n{100 * chances[i, guesses[i]]:.0f} %",
            color=_COLOURS[0] if right else _COLOURS[3],
            fontsize=9,
            fontweight="normal" if right else "bold",
        )
    n_wrong = np.count_nonzero(guesses != labels)
    _write(
        figure,
        path,
        f"The hardest of {len(labels)} test images: what the network says, and how sure it is "
        f"({n_wrong} wrong)",
    )


_ELEMENTS = {"C": _INK, "N": _COLOURS[0], "O": _COLOURS[3]}
_HALOGENS = _COLOURS[2]


def draw_compounds(path: Path, compounds: list[tuple], elements: tuple[str, ...]) -> None:
    """Draw compounds that were hard to tell, with what the network says of each.

    Parameters
    ----------
    path : Path
    compounds : list of tuple
        Of each: the places of its atoms, shape (n, 2), the bonds, shape (2, n_bonds), the elements'
        numbers, shape (n,), the class, 1 for mutagenic, and the chance that the network gives it.
    elements : tuple of str
    """
    from matplotlib.collections import LineCollection

    figure = _figure(11.0, 6.8)
    panels = figure.subplots(3, 6).ravel()
    for axes in panels:
        axes.set_axis_off()
    for axes, (points, bonds, atoms, label, chance) in zip(panels, compounds, strict=False):
        axes.add_collection(LineCollection(points[bonds.T], colors=_GREY, linewidths=1.0))
        for number in np.unique(atoms):
            x, y = points[atoms == number].T
            colour = _ELEMENTS.get(elements[number], _HALOGENS)
            axes.scatter(x, y, s=22, color=colour, edgecolors="white", linewidths=0.5, zorder=2)
        right = (chance > 0.5) == bool(label)
        axes.set_title(
            f"{'mutagenic' if label else 'not mutagenic'}\npredicted chance {100 * chance:.0f} %",
            color=_COLOURS[0] if right else _COLOURS[3],
            fontsize=9,
        )
        axes.set_aspect("equal")
        axes.margins(0.08)
    names = {"carbon": _INK, "nitrogen": _COLOURS[0], "oxygen": _COLOURS[3], "halogen": _HALOGENS}
    for name, colour in names.items():
        panels[-1].scatter([], [], s=30, color=colour, label=name)
    figure.legend(frameon=False, loc="outside lower center", ncols=4, labelcolor=_INK)
    _write(
        figure,
        path,
        "The test compounds that the networks found hardest, and the chance they give them to be "
        "mutagenic",
    )


def draw_scores(path: Path, title: str, positive: np.ndarray, negative: np.ndarray) -> None:
    """Draw how the scores of pairs with an edge and without are spread, and what a bar gives.

    Parameters
    ----------
    path : Path
    title : str
    positive, negative : array of float, shape (n_positive,) and (n_negative,)
        Chances of an edge.
    """
    figure = _figure(9.0, 3.9)
    left, right = figure.subplots(1, 2)
    bins = np.linspace(0, 1, 41)
    both = ((positive, _COLOURS[0], "with an edge"), (negative, _COLOURS[3], "without an edge"))
    for scores, colour, name in both:
        left.hist(scores, bins, color=colour, alpha=0.6, label=name)
    left.set_xlabel("chance of an edge, says the network", color=_GREY)
    left.set_title("pairs of papers", loc="left", color=_INK, fontsize=11)
    left.legend(frameon=False, labelcolor=_INK)
    bars = np.sort(np.concatenate([positive, negative, [np.inf, -np.inf]]))[::-1]
    found, wrong = (
        1 - np.searchsorted(np.sort(scores), bars) / len(scores) for scores, _, _ in both
    )
    right.plot(wrong, found, color=_COLOURS[0], linewidth=1.6)
    right.plot([0, 1], [0, 1], color=_GREY, linewidth=0.9, linestyle=(0, (3, 3)))
    right.set_xlabel("share of pairs without an edge above the bar", color=_GREY)
    right.set_title("share of edges above it", loc="left", color=_INK, fontsize=11)
    for axes in (left, right):
        _clean(axes)
        axes.margins(x=0.02)
    _write(figure, path, title)


def draw_clouds(
    path: Path, clouds: np.ndarray, labels: np.ndarray, chances: np.ndarray, names: tuple[str, ...]
) -> None:
    """Draw for each class a cloud that a classifier is sure of, and the one it finds hardest.

    Parameters
    ----------
    path : Path
    clouds : array of float, shape (n, n_points, 3)
    labels : array of int64, shape (n,)
    chances : array of float, shape (n, n_classes)
    names : tuple of str
        Of the classes.
    """
    guesses = chances.argmax(axis=1)
    of_truth = chances[np.arange(len(labels)), labels]
    figure = _figure(1.45 * len(names), 4.3)
    panels = figure.subplots(
        2, len(names), subplot_kw={"projection": "3d"}, gridspec_kw={"wspace": 0, "hspace": 0}
    )
    for label in range(len(names)):
        mine = np.flatnonzero(labels == label)
        order = mine[np.argsort(of_truth[mine], kind="stable")]
        for axes, i in zip(panels[:, label], order[[-1, 0]] if order.size else (), strict=False):
            right = guesses[i] == label
            depth = clouds[i, :, 1]
            axes.scatter(*clouds[i].T, c=depth, cmap="viridis", s=5, depthshade=True)
            text = names[guesses[i]] if right else f"{names[guesses[i]]},\nnot {names[label]}"
            axes.set_title(
                f"{text}\n{100 * chances[i, guesses[i]]:.0f} %",
                color=_COLOURS[0] if right else _COLOURS[3],
                fontsize=8,
                fontweight="normal" if right else "bold",
            )
            axes.set_box_aspect((1, 1, 1), zoom=1.3)
    for axes in panels.ravel():
        axes.set_axis_off()
        axes.set(xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1))
    n_wrong = np.count_nonzero(guesses != labels)
    _write(
        figure,
        path,
        f"Of each kind the clearest and the hardest of {len(labels)} test clouds: what the network "
        f"says, and how sure it is ({n_wrong} wrong)",
    )


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _clean(axes: Any) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_PALE)
    axes.tick_params(colors=_GREY, length=0)


def _write(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", color=_INK, fontsize=11, fontweight="bold")
    with atomic_write(path) as file:
        figure.savefig(file, format="png")
