"""Data sets, loaders, splits and checkpoints."""

from rtxarr.data._bundled import (
    CitationGraph,
    Digits,
    TopicsText,
    load_citeseer,
    load_cora,
    load_digits,
    load_topics_text,
)
from rtxarr.data._checkpoint import (
    LoadResult,
    load_arrays,
    load_checkpoint,
    load_into,
    save_arrays,
    save_checkpoint,
)
from rtxarr.data._loader import DataLoader
from rtxarr.data._safetensors import CheckpointError
from rtxarr.data._split import kfold, random_split

__all__ = [
    "CheckpointError",
    "CitationGraph",
    "DataLoader",
    "Digits",
    "LoadResult",
    "TopicsText",
    "kfold",
    "load_arrays",
    "load_checkpoint",
    "load_citeseer",
    "load_cora",
    "load_digits",
    "load_into",
    "load_topics_text",
    "random_split",
    "save_arrays",
    "save_checkpoint",
]
