"""Small real data sets that come with the package; see `bundled/README.md` for their sources."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._device import Device, device_of, namespace, to_device


@dataclass(frozen=True, repr=False)
class CitationGraph:
    """Papers that cite each other, with their words and topics.

    Attributes
    ----------
    x_data : array of float32, shape (n_values,)
    x_indices : array of int64, shape (n_values,)
    x_indptr : array of int64, shape (n_nodes + 1,)
        Word indicators of the papers in CSR form; row ``i`` is ``x_indptr[i]:x_indptr[i + 1]``.
    x_shape : (int, int)
        ``(n_nodes, n_features)``.
    edge_index : array of int64, shape (2, n_edges)
        Source and target of each edge, sorted by source. Both directions are listed, without
        self loops and duplicates.
    labels : array of int64, shape (n_nodes,)
        Topic in [0, n_classes), or -1 for none.
    train, val, test : arrays of int64, shape (n,)
        Node indices of the public split.
    n_classes : int
    """

    x_data: Any
    x_indices: Any
    x_indptr: Any
    x_shape: tuple[int, int]
    edge_index: Any
    labels: Any
    train: Any
    val: Any
    test: Any
    n_classes: int

    @property
    def n_nodes(self) -> int:
        """Number of papers."""
        return self.x_shape[0]

    @property
    def n_features(self) -> int:
        """Number of words."""
        return self.x_shape[1]

    @property
    def n_edges(self) -> int:
        """Number of directed edges."""
        return self.edge_index.shape[1]

    def features(self) -> Any:
        """Return the features as a dense array of float32, shape (n_nodes, n_features)."""
        xp = namespace(self.x_data)
        with device_of(self.x_data):
            dense = xp.zeros(self.x_shape, dtype=self.x_data.dtype)
            rows = xp.repeat(xp.arange(self.n_nodes), xp.diff(self.x_indptr))
        dense[rows, self.x_indices] = self.x_data
        return dense

    def __repr__(self) -> str:
        return (
            f"CitationGraph({self.n_nodes} nodes, {self.n_edges} edges, "
            f"{self.n_features} features, {self.n_classes} classes)"
        )


@dataclass(frozen=True, repr=False)
class Digits:
    """Images of handwritten digits.

    Attributes
    ----------
    images : array of uint8, shape (n_images, 8, 8)
        Ink from 0 to 16.
    labels : array of int64, shape (n_images,)
        In [0, 10).
    train, val, test : arrays of int64, shape (n,)
        Image indices of a fixed split: 1197, 300 and 300, the latter two with 30 of each class.
    n_classes : int
    """

    images: Any
    labels: Any
    train: Any
    val: Any
    test: Any
    n_classes: int

    def __repr__(self) -> str:
        return f"Digits({self.images.shape[0]} images, {self.n_classes} classes)"


@dataclass(frozen=True, repr=False)
class TopicsText:
    """Text for a character model.

    Attributes
    ----------
    text : str
    vocabulary : str
        The distinct characters of ``text``, in code point order.
    tokens : array of int64, shape (n_characters,)
        Position of each character of ``text`` in ``vocabulary``.
    train, val : arrays of int64, shape (n,)
        The first nine tenths of ``tokens`` and the rest.
    """

    text: str
    vocabulary: str
    tokens: Any
    train: Any
    val: Any

    def encode(self, text: str) -> Any:
        """Return the tokens of ``text``, int64, shape (len(text),), beside ``tokens``."""
        index = {character: i for i, character in enumerate(self.vocabulary)}
        if unknown := set(text) - index.keys():
            raise ValueError(f"text must use the vocabulary, got {''.join(sorted(unknown))!r}")
        tokens = np.asarray([index[character] for character in text], dtype=np.int64)
        return to_device(tokens, device_of(self.tokens))

    def decode(self, tokens: Any) -> str:
        """Return the text of ``tokens``, an array or sequence of ints, shape (n,)."""
        tokens = to_device(tokens, "cpu") if hasattr(tokens, "dtype") else tokens
        return "".join(self.vocabulary[int(token)] for token in tokens)

    def __repr__(self) -> str:
        return f"TopicsText({len(self.text)} characters, vocabulary of {len(self.vocabulary)})"


def load_cora(*, device: str | Device | None = None) -> CitationGraph:
    """Load Cora: 2708 papers on machine learning, 10556 edges, 1433 words, 7 topics.

    Parameters
    ----------
    device : str or Device, optional
        Where the arrays go; the current device by default.

    References
    ----------
    Yang, Cohen and Salakhutdinov, "Revisiting Semi-Supervised Learning with Graph Embeddings",
    2016, arXiv:1603.08861 (the split: 140, 500 and 1000 nodes).

    Examples
    --------
    >>> from rtxarr.data import load_cora
    >>> cora = load_cora(device="cpu")
    >>> cora
    CitationGraph(2708 nodes, 10556 edges, 1433 features, 7 classes)
    >>> cora.features().shape
    (2708, 1433)
    """
    return _load_graph("cora", 7, device)


def load_citeseer(*, device: str | Device | None = None) -> CitationGraph:
    """Load Citeseer: 3327 papers on computer science, 9104 edges, 3703 words, 6 topics.

    48 papers have no edge, and 15 no label (-1); none of the latter is in the split.

    Parameters
    ----------
    device : str or Device, optional
        Where the arrays go; the current device by default.

    References
    ----------
    Yang, Cohen and Salakhutdinov, "Revisiting Semi-Supervised Learning with Graph Embeddings",
    2016, arXiv:1603.08861 (the split: 120, 500 and 1000 nodes).
    """
    return _load_graph("citeseer", 6, device)


def load_digits(*, device: str | Device | None = None) -> Digits:
    """Load 1797 handwritten digits of 8x8 pixels.

    Parameters
    ----------
    device : str or Device, optional
        Where the arrays go; the current device by default.

    References
    ----------
    Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", 1998, UCI Machine Learning
    Repository, doi:10.24432/C50P49 (its test part).

    Examples
    --------
    >>> from rtxarr.data import load_digits
    >>> digits = load_digits(device="cpu")
    >>> digits.images.shape, digits.images.dtype
    ((1797, 8, 8), dtype('uint8'))
    """
    arrays = {name: to_device(x, _device.device(device)) for name, x in _read("digits").items()}
    return Digits(**arrays, n_classes=10)


def load_topics_text(*, device: str | Device | None = None) -> TopicsText:
    """Load the text of Python's own help topics, for a character model.

    It comes with the running Python (``pydoc_data.topics``) and so differs between versions: about
    380,000 characters. Topics are in the order of their names; a paragraph that several share is
    kept once, so that validation does not repeat what was trained on.

    Parameters
    ----------
    device : str or Device, optional
        Where the arrays go; the current device by default.
    """
    from pydoc_data.topics import topics

    paragraphs = [p for name in sorted(topics) for p in topics[name].strip().split("\n\n")]
    text = "\n\n".join(dict.fromkeys(paragraphs)) + "\n"
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    vocabulary, tokens = np.unique(points, return_inverse=True)
    tokens = to_device(tokens.astype(np.int64), _device.device(device))
    n_train = len(text) * 9 // 10
    characters = "".join(map(chr, vocabulary))
    return TopicsText(text, characters, tokens, tokens[:n_train], tokens[n_train:])


def _load_graph(name: str, n_classes: int, device: str | Device | None) -> CitationGraph:
    raw = _read(name)
    place = _device.device(device)
    arrays = {
        key: to_device(x if x.dtype == np.float32 else x.astype(np.int64), place)
        for key, x in raw.items()
        if key not in ("x_shape", "y")
    }
    labels = to_device(raw["y"].astype(np.int64), place)
    n_nodes, n_features = raw["x_shape"].tolist()
    return CitationGraph(
        **arrays, labels=labels, x_shape=(n_nodes, n_features), n_classes=n_classes
    )


def _read(name: str) -> dict[str, np.ndarray]:
    with (
        (files("rtxarr.data") / "bundled" / f"{name}.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        return dict(archive)
