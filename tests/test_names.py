"""What is said about unknown names."""

import importlib

import numpy as np
import pytest

import rtxarr as rx
from rtxarr._names import _INSTEAD, did_you_mean


@pytest.mark.parametrize(
    "name, hint",
    [("momentom", "; did you mean 'momentum'?"), ("xyz", ""), (3, ""), (None, "")],
)
def test_the_nearest_name_is_suggested_if_one_is_near(name, hint):
    assert did_you_mean(name, {"momentum": 0, "lr": 1}) == hint


KNOWN = [
    (module, *entry)
    for module, table in _INSTEAD.items()
    for entry in table.items()
    if module != "rtxarr.linalg" or entry[0] not in rx.linalg.__all__
]


@pytest.mark.parametrize("module, name, instead", KNOWN)
def test_names_of_other_libraries_are_translated(module, name, instead):
    with pytest.raises(AttributeError) as caught:
        getattr(importlib.import_module(module), name)
    assert str(caught.value) == f"module {module!r} has no attribute {name!r}: write {instead}"


@pytest.mark.parametrize("instead", sorted({i for *_, i in KNOWN if i.startswith("rtxarr.")}))
def test_translations_lead_to_something(instead):
    path, _, method = instead.partition("().")
    found = rx
    for part in path.partition("(")[0].split(".")[1:]:
        found = getattr(found, part)
    if method:
        found = getattr(found(), method.partition("(")[0])
    assert callable(found) or found is rx.nn.initializers


def test_the_translated_names_are_those_of_numpy():
    for name in _INSTEAD["rtxarr"]:
        assert hasattr(np, name) or hasattr(np.linalg, name)
    for name in _INSTEAD["rtxarr.random"]:
        assert hasattr(np.random, name) or hasattr(np.random.Generator, name)


@pytest.mark.parametrize("module", [rx, rx.linalg, rx.nn, rx.random])
def test_other_names_have_no_translation(module):
    with pytest.raises(AttributeError, match="has no attribute 'nope'$"):
        _ = module.nope
