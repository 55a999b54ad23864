"""Nested tuples, lists and dicts of arrays, taken apart and put together."""

import collections

_DICTS = dict, collections.OrderedDict


def flatten(tree) -> tuple[list, object]:
    """Give the leaves of nested tuples, lists and dicts, and the structure (hashable)."""
    leaves: list = []
    return leaves, _structure(tree, leaves)


def _structure(tree, leaves):
    if isinstance(tree, dict):
        return type(tree), tuple(tree), tuple([_structure(v, leaves) for v in tree.values()])
    if isinstance(tree, (tuple, list)):
        return type(tree), None, tuple([_structure(v, leaves) for v in tree])
    leaves.append(tree)
    return None


def unflatten(structure, leaves):
    """Rebuild nested containers from their leaves."""
    return _build(structure, iter(leaves))


def _build(structure, leaves):
    if structure is None:
        return next(leaves)
    kind, keys, parts = structure
    values = [_build(part, leaves) for part in parts]
    if keys is not None:
        pairs = zip(keys, values, strict=True)
        return kind(pairs) if kind in _DICTS else dict(pairs)
    return kind(*values) if hasattr(kind, "_fields") else kind(values)
