"""What is said about unknown names."""

import pytest

from rtxarr._names import did_you_mean


@pytest.mark.parametrize(
    "name, hint",
    [("momentom", "; did you mean 'momentum'?"), ("xyz", ""), (3, ""), (None, "")],
)
def test_the_nearest_name_is_suggested_if_one_is_near(name, hint):
    assert did_you_mean(name, {"momentum": 0, "lr": 1}) == hint
