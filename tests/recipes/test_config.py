"""Settings: types, ranges, and what is said about mistakes."""

import dataclasses
import math

import pytest

from rtxarr import recipes
from rtxarr.recipes._config import Config, option, parse_settings


@dataclasses.dataclass(frozen=True)
class Example(Config):
    epochs: int = option(3, "passes", at_least=1)
    lr: float = option(0.1, "rate", above=0)
    share: float = option(0.5, "part", at_least=0, below=1)
    scale: float = option(1.0, "any number")
    norm: bool = option(True, "whether to normalise")
    mode: str = option("sum", "which")
    kind: str = option("a", "which", one_of=("a", "b"))


def test_settings_are_parsed_by_type():
    texts = ["epochs=7", "lr=1e-3", " share = 0 ", "norm=False", "mode=a=b"]
    got = parse_settings(Example, texts)
    assert got == {"epochs": 7, "lr": 1e-3, "share": 0.0, "norm": False, "mode": "a=b"}
    assert type(got["share"]) is float
    assert Example(**got).lr == 1e-3


def test_integers_are_taken_for_numbers():
    assert type(Example(scale=2).scale) is float


@pytest.mark.parametrize(
    "text, message",
    [
        ("epochs", "a setting must be key=value, got 'epochs'"),
        ("epoch=3", "a setting must be one of epochs, lr, .*, got 'epoch'; did you mean 'epochs'"),
        ("epochs=3.5", "epochs must be an integer, got '3.5'"),
        ("lr=fast", "lr must be a number, got 'fast'"),
        ("norm=1", "norm must be true or false, got '1'"),
    ],
)
def test_wrong_settings_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_settings(Example, [text])


@pytest.mark.parametrize(
    "values, error, message",
    [
        ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0"),
        ({"lr": 0.0}, ValueError, "lr must be above 0, got 0.0"),
        ({"lr": math.inf}, ValueError, "lr must be above 0, got inf"),
        ({"share": 1.0}, ValueError, "share must be at least 0 and below 1, got 1.0"),
        ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
        ({"epochs": 2.0}, TypeError, "epochs must be an integer, got 2.0"),
        ({"epochs": True}, TypeError, "epochs must be an integer, got True"),
        ({"mode": 1}, TypeError, "mode must be text, got 1"),
        ({"kind": "c"}, ValueError, "kind must be one of a, b, got 'c'"),
    ],
)
def test_values_out_of_range_are_refused(values, error, message):
    with pytest.raises(error, match=message):
        Example(**values)


@pytest.mark.parametrize("name", recipes.NAMES)
def test_recipes_are_short_and_documented(name):
    kind = recipes.load(name)
    assert kind.name == name
    assert kind.Config().epochs >= 1
    for field in dataclasses.fields(kind.Config):
        assert field.metadata["doc"]
    path = recipes.__path__[0] + f"/{name.replace('-', '_')}.py"
    with open(path, encoding="utf-8") as file:
        assert len(file.readlines()) < 150


@pytest.mark.parametrize("name, near", [("cora", "gcn-cora"), ("digits", "conv-digits")])
def test_unknown_recipe_suggests_the_nearest(name, near):
    with pytest.raises(ValueError, match=f"recipe must be .*, got '{name}'; did you mean '{near}'"):
        recipes.load(name)
