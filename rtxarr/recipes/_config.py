"""Settings of a recipe: typed, documented and checked fields that ``--set key=value`` changes."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from rtxarr._names import did_you_mean
from rtxarr.autograd import autocast


def option(
    default: Any,
    doc: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    one_of: tuple[str, ...] | None = None,
) -> Any:
    """Make a field of a :class:`Config` with its documentation and its range."""
    limits: dict[str, Any] = {
        "at least": at_least,
        "above": above,
        "at most": at_most,
        "below": below,
        "one of": one_of,
    }
    limits = {word: limit for word, limit in limits.items() if limit is not None}
    return dataclasses.field(default=default, metadata={"doc": doc, "limits": limits})


def precision_option() -> Any:
    """Make the field for the precision of the products, to be passed to :func:`low_precision`."""
    names = ("float32", "bfloat16", "float16")
    return option("float32", "of the products: float32, bfloat16 or float16", one_of=names)


def low_precision(precision: str) -> autocast:
    """Give the ``with`` block in which a model runs in a precision."""
    return autocast(None if precision == "float32" else precision)


@dataclasses.dataclass(frozen=True)
class Config:
    """Base of the recipes' settings; checks types and ranges when it is made."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is float and type(value) is int:
                object.__setattr__(self, field.name, value := float(value))
            if type(value) is not field.type:
                raise TypeError(f"{field.name} must be {_kind(field.type)}, got {value!r}")
            limits = field.metadata["limits"]
            fits = all(_FITS[word](value, limit) for word, limit in limits.items())
            if not fits or (field.type is float and not math.isfinite(value)):
                wanted = " and ".join(f"{word} {_listed(limit)}" for word, limit in limits.items())
                raise ValueError(f"{field.name} must be {wanted or 'finite'}, got {value!r}")


_FITS = {
    "at least": lambda value, limit: value >= limit,
    "above": lambda value, limit: value > limit,
    "at most": lambda value, limit: value <= limit,
    "below": lambda value, limit: value < limit,
    "one of": lambda value, limit: value in limit,
}


def _listed(limit: Any) -> str:
    return ", ".join(limit) if isinstance(limit, tuple) else str(limit)


def parse_settings(kind: type[Config], settings: Iterable[str]) -> dict[str, Any]:
    """Turn ``key=value`` texts into typed values of the fields of ``kind``.

    Raises
    ------
    ValueError
        For a text without ``=``, an unknown key (naming the nearest one) or a value that is not
        of the field's type. Ranges are checked when the config is made.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals:
            raise ValueError(f"a setting must be key=value, got {setting!r}")
        if key not in fields:
            raise ValueError(unknown("a setting", key, fields))
        values[key] = _parse(key, fields[key].type, text.strip())
    return values


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Say which names are known, that ``name`` is none, and which is near it."""
    known = list(known)
    return f"{what} must be one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}"


def _parse(key: str, kind: Any, text: str) -> Any:
    try:
        return _PARSERS[kind](text)
    except (KeyError, ValueError):
        raise ValueError(f"{key} must be {_kind(kind)}, got {text!r}") from None


_PARSERS: dict[type, Callable[[str], Any]] = {
    int: int,
    float: float,
    str: str,
    bool: lambda text: {"true": True, "false": False}[text.lower()],
}


def _kind(kind: type) -> str:
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    return names[kind]
