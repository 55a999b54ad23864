"""What is said about unknown names."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr._names import _INSTEAD_OF_NUMPY, did_you_mean


@pytest.mark.parametrize(
    "name, hint",
    [("momentom", "; did you mean 'momentum'?"), ("xyz", ""), (3, ""), (None, "")],
)
def test_the_nearest_name_is_suggested_if_one_is_near(name, hint):
    assert did_you_mean(name, {"momentum": 0, "lr": 1}) == hint


@pytest.mark.parametrize("name, instead", _INSTEAD_OF_NUMPY.items())
def test_functions_that_numpy_names_otherwise_are_translated(name, instead):
    assert hasattr(np, name) or hasattr(np.linalg, name)
    with pytest.raises(AttributeError) as caught:
        getattr(rx, name)
    assert str(caught.value).endswith(f": write rtxarr.{instead}")
    found = rx
    for part in instead.partition("(")[0].split("."):
        found = getattr(found, part)
    assert callable(found)


def test_a_norm_is_translated_where_numpy_has_it():
    with pytest.raises(AttributeError, match=r"has no attribute 'norm': write .*vector_norm\(x\)$"):
        _ = rx.linalg.norm


def test_other_names_have_no_translation():
    with pytest.raises(AttributeError, match="has no attribute 'nope'$"):
        _ = rx.nope
