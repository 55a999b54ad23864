"""Data sets of graphs: two that come with the package, and a reader of a text format."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr.data._bundled import _read
from rtxarr.geom._batch import Batch
from rtxarr.geom._graph import Graph

__all__ = ["GraphSet", "load_karate", "load_mutag", "read_dgcnn"]


@dataclasses.dataclass(frozen=True, repr=False)
class GraphSet:
    """Graphs with a class each.

    Attributes
    ----------
    graphs : tuple of Graph
        ``nodes["tag"]`` is the kind of each node in ``[0, n_tags)``; sets with further numbers
        about nodes have them, as float64, as ``nodes["attributes"]``.
    labels : array of int64, shape (n_graphs,)
        In ``[0, n_classes)``.
    n_tags, n_classes : int
    folds : tuple of (array, array)
        Graphs to train on and to test with, of each fold of the published cross-validation.

    Examples
    --------
    >>> from rtxarr import geom
    >>> mutag = geom.load_mutag(device="cpu")
    >>> train, test = mutag.folds[0]
    >>> mutag.batch(test)
    Batch(18 graphs, 350 nodes, 768 edges, nodes: tag, graph: label)
    """

    graphs: tuple[Graph, ...]
    labels: Any
    n_tags: int
    n_classes: int
    folds: tuple[tuple[Any, Any], ...]

    @property
    def n_graphs(self) -> int:
        return len(self.graphs)

    def batch(self, indices: Any) -> Batch:
        """Give some graphs as one, their labels as ``graph["label"]``.

        Parameters
        ----------
        indices : array of int, shape (n,)
        """
        wanted = _device.to_device(indices, "cpu").tolist()
        xp = _device.namespace(self.labels)
        labels = xp.take(self.labels, _device.to_device(indices, _device.device_of(self.labels)))
        return Batch.from_graphs([self.graphs[i] for i in wanted], graph={"label": labels})

    def __repr__(self) -> str:
        return (
            f"GraphSet({self.n_graphs} graphs, {self.n_classes} classes, {self.n_tags} tags, "
            f"{len(self.folds)} folds)"
        )


def load_mutag(*, device: Any = None) -> GraphSet:
    """Load MUTAG: 188 aromatic compounds, to be told by whether they are mutagenic.

    Nodes are atoms of seven elements, and edges, both ways, are bonds. The ten folds are those of
    DGCNN, which test with 18 graphs each and so with 180 in all.

    Parameters
    ----------
    device : str or Device, optional
        Where the arrays go; the current device by default.

    References
    ----------
    Debnath et al., "Structure-activity relationship of mutagenic aromatic and heteroaromatic nitro
    compounds", 1991, doi:10.1021/jm00106a046.
    Zhang, Cui, Neumann and Chen, "An End-to-End Deep Learning Architecture for Graph
    Classification", 2018, doi:10.1609/aaai.v32i1.11782 (the folds).

    Examples
    --------
    >>> from rtxarr import geom
    >>> mutag = geom.load_mutag(device="cpu")
    >>> mutag
    GraphSet(188 graphs, 2 classes, 7 tags, 10 folds)
    >>> mutag.graphs[0]
    Graph(23 nodes, 54 edges, nodes: tag)
    """
    held = {key: x.astype(np.int64) for key, x in _read("mutag").items()}
    tests = np.split(held["test"], held["test_ptr"][1:-1])
    trains = np.split(held["train"], held["train_ptr"][1:-1])
    blocks = Graph.from_edges(
        *held["edge_index"], n_nodes=len(held["tag"]), nodes={"tag": held["tag"]}
    )
    return _on(
        device, Batch(blocks, held["ptr"]), held["label"], 7, 2, zip(trains, tests, strict=True)
    )


def load_karate(*, device: Any = None) -> Graph:
    """Load Zachary's karate club: 34 members, 156 edges (both ways), and the two parts it split in.

    Parameters
    ----------
    device : str or Device, optional
        Where the arrays go; the current device by default.

    Returns
    -------
    Graph
        ``nodes["label"]`` is 0 for those who stayed with the instructor, node 0, and 1 for those
        who went with the administrator, node 33.

    References
    ----------
    Zachary, "An Information Flow Model for Conflict and Fission in Small Groups", 1977,
    doi:10.1086/jar.33.4.3629752.

    Examples
    --------
    >>> from rtxarr import geom
    >>> geom.load_karate(device="cpu")
    Graph(34 nodes, 156 edges, nodes: label)
    """
    held = {key: x.astype(np.int64) for key, x in _read("karate").items()}
    graph = Graph.from_edges(*held["edge_index"], n_nodes=34, nodes={"label": held["label"]})
    return graph.to_device(_device.device(device))


def read_dgcnn(folder: str | os.PathLike, *, device: Any = None) -> GraphSet:
    """Read a set of graphs in the text format of DGCNN and GIN.

    The folder ``NAME`` has ``NAME.txt``: the number of graphs, then for each a line with its number
    of nodes and its class, and a line for each node, ``tag m n_1 ... n_m``, with the numbers of its
    ``m`` neighbours, and perhaps further numbers about it. Folds are in
    ``10fold_idx/train_idx-1.txt`` and ``test_idx-1.txt`` to ``-10.txt``, if they are there.

    Parameters
    ----------
    folder : path-like
    device : str or Device, optional
        Where the arrays go; the current device by default.

    Returns
    -------
    GraphSet
        Edges lead from each node to the neighbours in its line; as the format lists every edge with
        both of its nodes, there is one each way. Classes and tags are numbered in rising order.

    Raises
    ------
    ValueError
        When the text is not in this format; says in which line.

    Examples
    --------
    >>> from rtxarr import geom
    >>> geom.read_dgcnn("dataset/PROTEINS")  # doctest: +SKIP
    GraphSet(1113 graphs, 2 classes, 3 tags, 10 folds)
    """
    folder = Path(folder)
    path = folder / f"{folder.resolve().name}.txt"
    lines = path.read_text(encoding="utf-8").splitlines()
    at = 0

    def numbers(least, what):
        nonlocal at
        at += 1
        words = lines[at - 1].split() if at <= len(lines) else []
        try:
            if len(words) < least:
                raise ValueError
            return [int(word) for word in words[:least]], words[least:]
        except ValueError:
            raise ValueError(f"{path}:{at} must have {what}, got {' '.join(words)!r}") from None

    ((n_graphs,), _) = numbers(1, "the number of graphs")
    ptr, src, dst, tags, labels, attributes = [0], [], [], [], [], []
    for _ in range(n_graphs):
        ((n_nodes, label), _) = numbers(2, "the number of nodes and the class of a graph")
        labels.append(label)
        for node in range(n_nodes):
            ((tag, m), rest) = numbers(2, "the tag and the number of neighbours of a node")
            try:
                found = [int(word) for word in rest[:m]]
                if len(found) != m or not all(0 <= other < n_nodes for other in found):
                    raise ValueError
                attributes.append([float(word) for word in rest[m:]])
            except ValueError:
                wanted = f"{m} neighbours in [0, {n_nodes})"
                raise ValueError(
                    f"{path}:{at} must have {wanted}, got {' '.join(rest)!r}"
                ) from None
            tags.append(tag)
            src += [ptr[-1] + node] * m
            dst += [ptr[-1] + other for other in found]
        ptr.append(ptr[-1] + n_nodes)
    known_tags, tag_of = np.unique(np.array(tags, dtype=np.int64), return_inverse=True)
    classes, class_of = np.unique(np.array(labels, dtype=np.int64), return_inverse=True)
    nodes: dict[str, Any] = {"tag": tag_of}
    if any(attributes):
        nodes["attributes"] = np.array(attributes)
    blocks = Graph.from_edges(
        np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64), n_nodes=ptr[-1], nodes=nodes
    )
    folds: list[Any] = []
    while (name := folder / "10fold_idx" / f"test_idx-{len(folds) + 1}.txt").exists():
        train = name.with_name(name.name.replace("test", "train"))
        folds.append([np.loadtxt(file, dtype=np.int64, ndmin=1) for file in (train, name)])
    return _on(device, Batch(blocks, np.array(ptr)), class_of, len(known_tags), len(classes), folds)


def _on(device, batch, labels, n_tags, n_classes, folds):
    place = _device.device(device)

    def moved(x):
        return _device.to_device(x, place)

    return GraphSet(
        tuple(graph.to_device(place) for graph in batch.unbatch()),
        moved(labels),
        n_tags,
        n_classes,
        tuple((moved(train), moved(test)) for train, test in folds),
    )
