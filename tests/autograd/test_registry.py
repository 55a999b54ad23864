"""Every differentiable operation of the library has a gradient check of first and second order."""

import importlib
import pkgutil
from pathlib import Path

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.autograd._op import OPS
from rtxarr.autograd._tape import Node
from rtxarr.autograd._tree import flatten
from rtxarr.dtypes import is_inexact
from rtxarr.testing import gradcheck, gradgradcheck

# Operations register themselves when their module is imported.
for _module in pkgutil.walk_packages(rx.__path__, "rtxarr."):
    if not _module.name.startswith(
        ("rtxarr.kernels", "rtxarr.cli", "rtxarr.data", "rtxarr.recipes")
    ):
        importlib.import_module(_module.name)


def _collect():
    cases = {}
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        module = importlib.import_module(f"{__package__}.{path.stem}" if __package__ else path.stem)
        for name, found in module.CASES.items():
            assert name not in cases, f"{path.name} repeats the cases of {name}"
            cases[name] = found
    return cases


CASES = _collect()
IDS = [(name, i) for name, found in CASES.items() for i in range(len(found))]


# Rounding to 8 bits has no derivative: the gradient is that of the product of rounded numbers.
ROUNDED = {"fp8_linear"}


def test_every_operation_has_a_case():
    assert set(OPS) - set(CASES) == ROUNDED


def test_every_case_names_an_operation():
    assert set(CASES) - set(OPS) == set()


def test_every_argument_with_a_rule_has_a_case():
    for op in OPS.values():
        op.plans.clear()
    for function, args in (case for found in CASES.values() for case in found):
        with np.errstate(all="ignore"):
            function(*map(_tracked, args))
    for op in OPS.values():
        checked = {name for pattern in op.plans for name in _names(op, pattern)}
        assert set(op.rules) <= checked, f"the cases of {op.name} miss an argument"


def _names(op, pattern):
    return [op.variadic or op.arg_names[i] for i in pattern]


def _tracked(a):
    return rx.Tensor(a, requires_grad=True) if a is not None and is_inexact(a.dtype) else a


def _operations(outputs):
    names, seen = set(), set()
    stack = [t.node for t in outputs if isinstance(t, rx.Tensor)]
    while stack:
        node = stack.pop()
        if node in seen or type(node) is not Node:
            continue
        seen.add(node)
        names.add(node.plan.op.name)
        stack.extend(edge[0] for edge in node.edges)
    return names


@pytest.mark.parametrize(("name", "which"), IDS, ids=[f"{n}-{i}" for n, i in IDS])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_gradients_of_first_and_second_order(name, which, device):
    function, args = CASES[name][which]
    args = [rx.asarray(a, device=device) if isinstance(a, np.ndarray) else a for a in args]
    with rx.device(device):
        tracked = list(map(_tracked, args))
        with np.errstate(all="ignore"):
            assert name in _operations(flatten(function(*tracked))[0]), (
                "the case misses its operation"
            )
        gradcheck(function, args)
        gradgradcheck(function, args)
