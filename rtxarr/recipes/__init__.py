"""Runnable trainings on real data, one readable file each; ``rtx train NAME`` runs them."""

import importlib
from typing import Any

from rtxarr.recipes._config import parse_settings, unknown
from rtxarr.recipes._run import CHECKPOINT, CONFIG, RunError, Watch, read_identity, run

__all__ = [
    "CHECKPOINT",
    "CONFIG",
    "NAMES",
    "RunError",
    "Watch",
    "load",
    "parse_settings",
    "read_identity",
    "run",
]

NAMES = (
    "gcn-cora",
    "gat-cora",
    "conv-digits",
    "char-transformer",
    "gin-mutag",
    "link-citeseer",
    "pointnet-shapes",
)
"""The recipes; the first is the default one."""


def load(name: str) -> Any:
    """Give the recipe's class.

    Parameters
    ----------
    name : str
        One of :data:`NAMES`.

    Raises
    ------
    ValueError
        For an unknown name, with one that is near.
    """
    if name not in NAMES:
        raise ValueError(unknown("recipe", name, NAMES))
    return importlib.import_module(f"rtxarr.recipes.{name.replace('-', '_')}").Recipe
