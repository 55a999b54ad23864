"""Nested dicts, tuples and lists of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to the leaves of nested dicts, tuples and lists."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(x, function) for key, x in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_leaves(x, function) for x in tree)
    if isinstance(tree, list):
        return [map_leaves(x, function) for x in tree]
    return function(tree)
