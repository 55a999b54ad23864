"""Module: trees of plain attributes, switches, state, text."""

import copy
import re

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.data import CheckpointError
from rtxarr.nn import Buffer, Module, Parameter
from rtxarr.testing import assert_close


class Scale(Module):
    def __init__(self, n, value=1.0):
        self.weight = Parameter(np.full(n, value, "float32"))
        self.n_calls = Buffer(np.zeros((), "int64"))

    def forward(self, x):
        return x * self.weight

    def __repr__(self):
        return f"Scale({self.weight.size})"


class Nested(Module):
    """Members in every kind of place."""

    def __init__(self):
        self.first = Scale(2)
        self.listed = [Scale(3), (Scale(4), "no module")]
        self.by_name = {"a": Scale(5), "b": [Parameter(np.zeros(6))]}
        self.bias = Parameter(np.zeros((), "float64"))
        self.size = 7
        self.table = np.zeros(3)

    def forward(self, x):
        return self.first(x) + self.bias


def test_members_are_found_in_every_kind_of_place():
    model = Nested()
    assert [name for name, _ in model.named_parameters()] == [
        "by_name.b.0",
        "bias",
        "first.weight",
        "listed.0.weight",
        "listed.1.0.weight",
        "by_name.a.weight",
    ]
    assert [p.size for p in model.parameters()] == [6, 1, 2, 3, 4, 5]
    assert [name for name, _ in model.named_buffers()] == [
        "first.n_calls",
        "listed.0.n_calls",
        "listed.1.0.n_calls",
        "by_name.a.n_calls",
    ]
    assert [name for name, _ in model.named_modules()] == [
        "",
        "first",
        "listed.0",
        "listed.1.0",
        "by_name.a",
    ]
    assert list(model.children()) == list(model.modules())[1:]


def test_members_added_later_are_found():
    model = Nested()
    model.listed.append(Scale(8))
    model.by_name["c"] = Scale(9)
    assert {"listed.2.weight", "by_name.c.weight"} <= set(model.state_dict())


def test_cycles_end():
    parent, child = Nested(), Nested()
    parent.child, child.parent = child, parent
    assert len(list(parent.modules())) == 2 * 5
    assert "(parent): ..." in repr(parent)
    parent.listed.append(parent.listed)
    assert len(list(parent.modules())) == 2 * 5
    assert [module for _, module in parent.named_modules()] == list(parent.modules())


def test_two_arrays_of_one_name_are_refused():
    model = Nested()
    model.by_name["c.d"], model.by_name["c"] = Parameter(np.ones(1)), {"d": Parameter(np.ones(1))}
    with pytest.raises(ValueError, match="names must differ, got two arrays named 'by_name.c.d'"):
        model.state_dict()
    with pytest.raises(ValueError, match="names must differ"):
        model.load_state_dict({})


def test_train_and_eval_reach_the_whole_tree():
    model = Nested()
    assert model.training
    assert model.eval() is model
    assert not any(m.training for m in model.modules())
    model.train()
    assert all(m.training for m in model.modules())


def test_apply_goes_from_the_leaves_up():
    model = Nested()
    seen = []
    assert model.apply(seen.append) is model
    assert set(map(id, seen)) == set(map(id, model.modules()))
    assert seen[-1] is model


def test_requires_grad_and_zero_grad():
    model = Nested()
    rx.sum(model(np.ones(2, "float32"))).backward()
    assert model.first.weight.grad is not None
    model.zero_grad()
    assert model.first.weight.grad is None
    assert model.requires_grad_(False) is model
    assert not model(np.ones(2, "float32")).requires_grad
    model.zero_grad()  # frozen parameters have none, and none can be set
    model.requires_grad_()
    assert all(p.requires_grad for p in model.parameters())


def test_astype_converts_floats_and_gradients():
    model = Nested()
    rx.sum(model(np.ones(2, "float32"))).backward()
    optimizer_would_hold = list(model.parameters())
    assert model.astype("float16") is model
    assert {p.dtype for p in model.parameters()} == {np.dtype("float16")}
    assert {b.dtype for b in model.buffers()} == {np.dtype("int64")}
    assert model.first.weight.grad.dtype == np.float16
    assert all(a is b for a, b in zip(optimizer_would_hold, model.parameters(), strict=True))


def test_astype_spoils_a_graph_that_saved_the_old_values():
    model = Scale(2)
    loss = rx.sum(model(rx.Tensor(np.ones(2, "float32"), requires_grad=True)))
    model.astype("float64")
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


@pytest.mark.gpu
def test_to_device_moves_values_gradients_and_buffers():
    with rx.device("cpu"):
        model = Nested()
    rx.sum(model(np.ones(2, "float32"))).backward()
    model.to_device("cuda:0")
    tensors = [*model.parameters(), *model.buffers()]
    assert {rx.device_of(t.data) for t in tensors} == {rx.device("cuda:0")}
    assert rx.device_of(model.first.weight.grad) == rx.device("cuda:0")


def test_a_deep_copy_is_independent():
    model = Nested()
    twin = copy.deepcopy(model)
    twin.first.weight.assign(np.zeros(2, "float32"))
    assert_close(model.first.weight, np.ones(2, "float32"), exact=True)
    rx.sum(twin(np.ones(2, "float32"))).backward()
    assert twin.first.weight.grad is not None
    assert model.first.weight.grad is None


# ---------------------------------------------------------------------------------- attributes


@pytest.mark.parametrize("value", [np.zeros(2), 1.0, rx.Tensor(np.zeros(2)), Buffer(np.zeros(2))])
def test_a_parameter_is_not_replaced_by_something_else(value):
    model = Scale(2)
    with pytest.raises(TypeError, match=r"weight is a Parameter, got .*; write new values with"):
        model.weight = value
    with pytest.raises(TypeError, match="n_calls is a Buffer, got Parameter"):
        model.n_calls = Parameter(np.zeros(2))
    assert_close(model.weight, np.ones(2, "float32"), exact=True)


def test_a_parameter_is_replaced_by_a_parameter_or_none():
    model = Scale(2)
    model.weight = Parameter(np.zeros(3))
    assert [p.shape for p in model.parameters()] == [(3,)]
    model.weight = None
    assert list(model.parameters()) == []


def test_forward_must_be_there():
    class Empty(Module):
        pass

    with pytest.raises(TypeError, match=r"Empty must define forward\(\)"):
        Empty()(1)


def test_hooks_see_each_call_until_removed():
    model = Nested()
    seen = []
    remove = model.first.add_forward_hook(lambda module, args, out: seen.append((module, args)))
    x = np.ones(2, "float32")
    model(x)
    remove()
    model(x)
    assert seen == [(model.first, (x,))]


# --------------------------------------------------------------------------------------- state


def test_state_goes_from_one_model_to_another():
    model, other = Nested(), Nested()
    for i, p in enumerate(model.parameters()):
        p.assign(np.full(p.shape, i + 1, p.dtype))
    model.first.n_calls.assign(np.asarray(5))
    result = other.load_state_dict(model.state_dict())
    assert result.missing == result.unexpected == []
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_close(q, p, exact=True)
        assert q.data is not p.data, name
    assert other.first.n_calls.item() == 5


def test_loading_is_seen_by_a_graph_that_saved_the_old_values():
    model = Scale(2)
    loss = rx.sum(model(rx.Tensor(np.ones(2, "float32"), requires_grad=True)))
    model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_all_faults_are_named_and_nothing_changes():
    model = Nested()
    state = {name: np.ones(a.shape, a.dtype) for name, a in model.state_dict().items()}
    state["first.weight"] = np.ones(3, "float32")
    state["bias"] = np.ones((), "float32")
    del state["listed.0.weight"]
    state["stray"] = np.zeros(1)
    before = {name: np.array(a) for name, a in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        model.load_state_dict(state)
    for fault in (
        "listed.0.weight: missing",
        "stray: unexpected",
        "first.weight: must have shape (2,), got (3,)",
        "bias: must have dtype float64, got float32",
    ):
        assert fault in str(caught.value)
    with pytest.raises(CheckpointError, match="first.weight: must have shape"):
        model.load_state_dict(state, strict=False)
    for name, array in model.state_dict().items():
        assert_close(array, before[name], exact=True)


def test_not_strict_passes_over_missing_and_unexpected_names():
    model = Scale(2)
    result = model.load_state_dict({"weight": np.zeros(2, "float32"), "stray": 1}, strict=False)
    assert (result.missing, result.unexpected) == (["n_calls"], ["stray"])
    assert_close(model.weight, np.zeros(2, "float32"), exact=True)


class Tied(Module):
    def __init__(self):
        self.encoder = Scale(3)
        self.decoder = Scale(3)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(self.encoder(x))


def test_a_shared_parameter_counts_once_and_stays_shared():
    model = Tied()
    assert [name for name, _ in model.named_parameters()] == ["encoder.weight"]
    assert "decoder.weight" not in model.state_dict()
    other = Tied()
    state = {**model.state_dict(), "encoder.weight": np.full(3, 2.0, "float32")}
    other.load_state_dict(state)
    assert other.decoder.weight is other.encoder.weight
    assert_close(other(np.ones(3, "float32")), np.full(3, 4.0, "float32"))
    rx.sum(other(np.ones(3, "float32"))).backward()
    assert_close(other.encoder.weight.grad, np.full(3, 4.0, "float32"))
    assert "3 parameters" in other.summary()


# ---------------------------------------------------------------------------------------- text


def test_repr_is_a_tree():
    assert repr(Tied()) == "Tied(\n  (encoder): Scale(3)\n  (decoder): Scale(3)\n)"

    class Outer(Module):
        def __init__(self):
            self.inner = [Tied()]

    assert repr(Outer()) == (
        "Outer(\n  (inner.0): Tied(\n    (encoder): Scale(3)\n    (decoder): Scale(3)\n  )\n)"
    )

    class Empty(Module):
        pass

    assert repr(Empty()) == "Empty()"


def test_summary_has_shapes_and_counts_and_changes_nothing():
    model = Tied()
    model.encoder.weight.requires_grad = False
    model.decoder.training = False
    text = model.summary(np.ones((2, 3), "float32"))
    assert text.splitlines() == [
        "layer              output shape  parameters",
        "-" * 43,
        "Tied               (2, 3)                 3",
        "  encoder (Scale)  (2, 3)                 3",
        "  decoder (Scale)  (2, 3)                 3",
        "-" * 43,
        "3 parameters, 0 of them trained; 28 B",
    ]
    assert [m.training for m in model.modules()] == [True, True, False]
    assert all(m._forward_hooks == () for m in model.modules())


def test_summary_is_indented_by_depth():
    class Outer(Module):
        def __init__(self):
            self.blocks = [Tied()]

    lines = Outer().summary().splitlines()[2:6]
    assert [re.sub(r" +\d+$", "", line) for line in lines] == [
        "Outer",
        "  blocks.0 (Tied)",
        "    encoder (Scale)",
        "    decoder (Scale)",
    ]


def test_summary_without_inputs_has_counts_alone():
    assert Scale(2000).summary().splitlines() == [
        "layer  parameters",
        "-" * 17,
        "Scale       2,000",
        "-" * 17,
        "2,000 parameters, 2,000 of them trained; 7.8 KiB",
    ]


def test_summary_of_several_outputs():
    class Two(Module):
        def forward(self, x):
            return x, {"y": x[0], "n": 3}

    assert "(2, 3), (3,), -" in Two().summary(np.ones((2, 3)))
