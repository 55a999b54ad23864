"""Checkpoints: a whole training state in one safetensors file, never a pickle.

The arrays of a nested state are the file's tensors; everything else is JSON in the file's metadata.
One file means one rename, so a save happens as a whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from rtxarr._allocation import owner_of
from rtxarr._device import Device, device_of, is_array, is_device_array, namespace, to_device
from rtxarr.autograd._tape import Tensor, raw
from rtxarr.data._safetensors import DIGEST_KEY, CheckpointError, parse_json, read_file, write_file
from rtxarr.data._tree import map_leaves

_STATE_KEY = "rtxarr.state"
_MAX_DEPTH = 64

# --------------------------------------------------------------------------------- flat files


def save_arrays(path: str | os.PathLike, arrays: Mapping[str, Any]) -> None:
    """Write named arrays to a safetensors file, atomically.

    Parameters
    ----------
    path : path-like
        Its folder must exist. After an error, a full disk included, it is as it was.
    arrays : mapping of str to array or Tensor
        NumPy, CuPy or other array-API arrays: bool, integers, floats, complex, bfloat16 and 8-bit
        floats; contiguous or not. Names are kept as they are.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from rtxarr.data import load_arrays, save_arrays
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_arrays(f"{folder}/w.safetensors", {"layers.0.weight": np.ones((2, 3))})
    ...     load_arrays(f"{folder}/w.safetensors")["layers.0.weight"].shape
    (2, 3)
    """
    write_file(path, {name: raw(x) for name, x in arrays.items()}, {})


def load_arrays(path: str | os.PathLike, *, device: str | Device = "cpu") -> dict[str, Any]:
    """Read all arrays of a safetensors file, whoever wrote it.

    Parameters
    ----------
    path : path-like
    device : str or Device, default "cpu"
        Where the arrays go.

    Returns
    -------
    dict of str to array
        Fresh, writable arrays.

    Raises
    ------
    CheckpointError
        When the file is truncated, malformed, or fails the checksum (which only files written
        by rtxarr carry); it names the file and the fault.
    """
    arrays, _ = read_file(path)
    return {name: to_device(x, device) for name, x in arrays.items()}


# -------------------------------------------------------------------------------- checkpoints


def save_checkpoint(path: str | os.PathLike, state: Mapping[str, Any]) -> None:
    """Write a nested state to one file, atomically.

    A process killed while saving, a full disk or a power cut leaves the previous checkpoint.

    Parameters
    ----------
    path : path-like
        One file, by convention ``*.safetensors``. Its folder must exist.
    state : dict
        Nested dicts with str keys, lists and tuples, whose leaves are arrays, Tensors (their data
        is stored), bool, int, float (NaN and infinities too), str and None. NumPy scalars are
        stored as 0-d arrays.

    Raises
    ------
    TypeError
        When the state holds anything else, saying where.
    OSError
        When the file cannot be written.

    Notes
    -----
    The file opens in any safetensors reader. An array is named by its keys joined with dots, as
    in ``model.layers.0.weight``; the rest of the state is JSON under ``rtxarr.state`` in the
    metadata. A SHA-256 of the whole file finds damage; it is no signature against forgery.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from rtxarr.data import load_checkpoint, save_checkpoint
    >>> state = {"model": {"weight": np.ones(3)}, "loader": {"epoch": 2, "position": 64}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(f"{folder}/last.safetensors", state)
    ...     load_checkpoint(f"{folder}/last.safetensors")
    {'model': {'weight': array([1., 1., 1.])}, 'loader': {'epoch': 2, 'position': 64}}
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict, got {type(state).__name__}")
    arrays: dict[str, Any] = {}
    tree = _encode(state, (), arrays)
    content = {"version": 1, "state": tree}
    write_file(path, arrays, {_STATE_KEY: json.dumps(content, separators=(",", ":"))})


def load_checkpoint(path: str | os.PathLike, *, device: str | Device = "cpu") -> dict[str, Any]:
    """Read the state that :func:`save_checkpoint` wrote, checking everything first.

    Parameters
    ----------
    path : path-like
    device : str or Device, default "cpu"
        Where the arrays go.

    Returns
    -------
    dict
        Equal to the saved state to the bit, with Tensors as arrays.

    Raises
    ------
    CheckpointError
        When the file is truncated, damaged, malformed, or no checkpoint; it names the file and
        the fault.
    """
    arrays, metadata = read_file(path)
    try:
        state = _parse_state(metadata, arrays)
    except CheckpointError as error:
        raise CheckpointError(f"{os.fspath(path)}: {error}") from None
    return map_leaves(state, lambda x: to_device(x, device) if is_array(x) else x)


def _parse_state(metadata: dict[str, str], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    if _STATE_KEY not in metadata:
        raise CheckpointError("holds arrays but no state: read it with load_arrays")
    if DIGEST_KEY not in metadata:
        raise CheckpointError("must carry a checksum")
    content = parse_json(metadata[_STATE_KEY], _STATE_KEY)
    if not isinstance(content, dict) or content.get("version") != 1:
        raise CheckpointError(
            f"{_STATE_KEY} must have version 1: a newer rtxarr may have written it"
        )
    unused = dict(arrays)
    state = _decode(content.get("state"), unused, 0)
    if not isinstance(state, dict):
        raise CheckpointError(f"the state must be a dict, got {type(state).__name__}")
    if unused:
        raise CheckpointError(f"the state does not mention {len(unused)} of the arrays")
    return state


# In the JSON tree a dict whose only key is "$array", "$float" or "$tuple" stands for what JSON has
# no word for. A key of the user's own that begins with "$" gets another "$" in front.


def _encode(node: Any, trail: tuple[str, ...], arrays: dict[str, Any]) -> Any:
    """Return ``node`` as JSON, its arrays collected in ``arrays``."""
    if len(trail) > _MAX_DEPTH:
        raise ValueError(f"state must be nested at most {_MAX_DEPTH} deep, got {'.'.join(trail)}")
    if isinstance(node, Tensor) or is_array(node):
        name = ".".join(trail)
        while name in arrays:  # {"a": {"b": x}, "a.b": y}
            name += "'"
        arrays[name] = raw(node)
        return {"$array": name}
    if isinstance(node, Mapping):
        return {_escape(key, trail): _encode(x, (*trail, key), arrays) for key, x in node.items()}
    if isinstance(node, (list, tuple)):
        items = [_encode(x, (*trail, str(i)), arrays) for i, x in enumerate(node)]
        return items if isinstance(node, list) else {"$tuple": items}
    if isinstance(node, float) and not math.isfinite(node):
        return {"$float": repr(float(node))}
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    raise TypeError(
        "state must hold arrays, dicts, lists, numbers, strings and None, "
        f"got {type(node).__name__} at {'.'.join(trail)!r}"
    )


def _escape(key: Any, trail: tuple[str, ...]) -> str:
    if not isinstance(key, str):
        where = repr(".".join(trail)) if trail else "state itself"
        raise TypeError(f"keys of state must be str, got {key!r} in {where}")
    return f"${key}" if key.startswith("$") else key


def _decode(node: Any, unused: dict[str, np.ndarray], depth: int) -> Any:
    """Undo :func:`_encode`, taking each array out of ``unused``."""
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"the state must be nested at most {_MAX_DEPTH} deep")
    if isinstance(node, list):
        return [_decode(x, unused, depth + 1) for x in node]
    if not isinstance(node, dict):
        return node
    match node:
        case {"$array": str(name)} if len(node) == 1 and name in unused:
            return unused.pop(name)
        case {"$float": "nan" | "inf" | "-inf" as text} if len(node) == 1:
            return float(text)
        case {"$tuple": list(items)} if len(node) == 1:
            return tuple(_decode(x, unused, depth + 1) for x in items)
    result = {}
    for key, x in node.items():
        if key.startswith("$") and not key.startswith("$$"):
            raise CheckpointError(f"the state has {key!r} with what does not belong there")
        result[key[1:] if key.startswith("$$") else key] = _decode(x, unused, depth + 1)
    return result


# ------------------------------------------------------------------------------- into a target


class LoadResult(NamedTuple):
    """What a load that is not strict passed over."""

    missing: list[str]
    unexpected: list[str]


def load_into(
    target: dict[str, Any], loaded: Mapping[str, Any], *, strict: bool = True
) -> LoadResult:
    """Copy a loaded state into one of the same structure, all of it or nothing.

    Parameters
    ----------
    target : dict
        Nested dicts of arrays, Tensors and plain values. Arrays and Tensors are overwritten in
        place, on the device where they are; plain values are replaced.
    loaded : dict
        As :func:`load_checkpoint` returns it.
    strict : bool, default True
        Whether a key that only one side has is an error; otherwise it is passed over. A wrong
        shape, dtype or kind always is one.

    Returns
    -------
    LoadResult
        ``missing``: keys that ``target`` alone has; ``unexpected``: keys that ``loaded`` alone
        has. Both empty when strict.

    Raises
    ------
    CheckpointError
        Naming every missing, unexpected, mis-shaped and mis-typed key at once. ``target`` is
        then unchanged.
    """
    places = dict(_leaves(target))
    values = {key: owner[last] for key, (owner, last) in _leaves(loaded)}
    missing = [".".join(key) for key in places if key not in values]
    unexpected = [".".join(key) for key in values if key not in places]
    common = [key for key in places if key in values]
    faults = [
        f"{'.'.join(key)}: {fault}"
        for key in common
        if (fault := _misfit(_get(places[key]), values[key]))
    ]
    if strict:
        faults = [
            *(f"{key}: missing" for key in missing),
            *(f"{key}: unexpected" for key in unexpected),
            *faults,
        ]
    if faults:
        raise CheckpointError("the loaded state does not fit:\n  " + "\n  ".join(faults))
    # Copies come first: they can fail for want of memory.
    owners = {owner_of(raw(_get(places[key]))) for key in common}
    staged = [(places[key], _staged(_get(places[key]), values[key], owners)) for key in common]
    for (owner, last), value in staged:
        old = owner[last]
        if isinstance(old, Tensor):
            old.assign(value)
        elif is_array(old) and not isinstance(old, np.generic):
            old[...] = value
        else:
            owner[last] = value
    return LoadResult(missing, unexpected)


_Place = tuple[Any, str]


def _leaves(
    node: Mapping[str, Any], trail: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], _Place]]:
    """Yield the keys of each leaf and the dict that holds it; lists are leaves."""
    for key, x in node.items():
        if isinstance(x, Mapping):
            yield from _leaves(x, (*trail, key))
        else:
            yield (*trail, key), (node, key)


def _get(place: _Place) -> Any:
    owner, last = place
    return owner[last]


def _misfit(old: Any, new: Any) -> str | None:
    """Say why ``new`` cannot take the place of ``old``, if it cannot."""
    old, new = raw(old), raw(new)
    if is_array(old) != is_array(new):
        kinds = ["an array" if is_array(x) else type(x).__name__ for x in (old, new)]
        return f"must be {kinds[0]}, got {kinds[1]}"
    if not is_array(old):
        return None
    faults = []
    if old.shape != new.shape:
        faults.append(f"shape {tuple(old.shape)}, got {tuple(new.shape)}")
    if old.dtype != new.dtype:
        faults.append(f"dtype {old.dtype}, got {new.dtype}")
    if isinstance(old, np.ndarray) and not old.flags.writeable:
        return "is read-only"
    return "must have " + " and ".join(faults) if faults else None


def _staged(old: Any, new: Any, owners: set[int]) -> Any:
    new = raw(new)
    if not is_array(new):
        return new
    if owner_of(new) in owners:  # one of the target's own, perhaps written before it is read
        new = namespace(new).asarray(new, copy=True)
    old = raw(old)
    return to_device(new, device_of(old)) if is_device_array(old) or is_device_array(new) else new
