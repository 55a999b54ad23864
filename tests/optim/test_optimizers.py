"""Each optimizer against its equations in plain float64, and what all of them share."""

import copy
import math
import warnings

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _replay, nn, optim
from rtxarr.data import load_checkpoint, save_checkpoint
from rtxarr.nn import Parameter
from rtxarr.testing import assert_close

SHAPES = {"matrix": (3, 4), "vector": (4,), "scalar": (), "stack": (2, 3, 4)}
N_STEPS = 20


def gradients(shape, n_steps=N_STEPS, seed=0):
    """Gradients that do not depend on the parameters, so that every step is comparable."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for _ in range(n_steps)]


def run(make, start, grads, dtype="float64"):
    """Give the parameter after each step of an optimizer."""
    param = Parameter(np.asarray(start), dtype=dtype)
    optimizer = make([param])
    seen = []
    for grad in grads:
        param.grad = np.asarray(grad, dtype=dtype)
        optimizer.step()
        seen.append(np.array(param.data, dtype="float64"))
    return seen


# The expected steps: one function an optimizer, over one float64 array at a time.


def sgd(p, grads, lr, momentum=0.0, nesterov=False, weight_decay=0.0):
    v = 0.0
    for g in grads:
        g = g + weight_decay * p
        v = momentum * v + g
        p = p - lr * (g + momentum * v if nesterov else v)
        yield p


def adam(p, grads, lr, betas, eps, weight_decay=0.0, decoupled=False, amsgrad=False):
    m = v = largest = 0.0
    for t, g in enumerate(grads, start=1):
        if decoupled:
            p = p - lr * weight_decay * p
        else:
            g = g + weight_decay * p
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        largest = np.maximum(largest, v)
        m_hat = m / (1 - betas[0] ** t)
        v_hat = (largest if amsgrad else v) / (1 - betas[1] ** t)
        p = p - lr * m_hat / (np.sqrt(v_hat) + eps)
        yield p


def lion(p, grads, lr, betas, weight_decay=0.0):
    m = 0.0
    for g in grads:
        c = betas[0] * m + (1 - betas[0]) * g
        p = p - lr * (np.sign(c) + weight_decay * p)
        m = betas[1] * m + (1 - betas[1]) * g
        yield p


def rmsprop(p, grads, lr, alpha, eps, momentum=0.0, centered=False, weight_decay=0.0):
    v = mean = velocity = 0.0
    for g in grads:
        g = g + weight_decay * p
        v = alpha * v + (1 - alpha) * g**2
        mean = alpha * mean + (1 - alpha) * g
        step = g / (np.sqrt(v - mean**2 if centered else v) + eps)
        velocity = momentum * velocity + step
        p = p - lr * velocity
        yield p


def adafactor(p, grads, lr, relative_step, weight_decay=0.0):
    row = column = v = 0.0
    for t, g in enumerate(grads, start=1):
        beta = 1 - t**-0.8
        square = g**2 + 1e-30
        if p.ndim >= 2:
            row = beta * row + (1 - beta) * square.sum(axis=-1)
            column = beta * column + (1 - beta) * square.sum(axis=-2)
            total = row.sum(axis=-1)[..., None, None]
            v = row[..., :, None] * column[..., None, :] / total
        else:
            v = beta * v + (1 - beta) * square
        u = g / np.sqrt(v)
        u = u / max(1.0, math.sqrt(np.mean(u**2)))
        rate = lr
        if relative_step:
            rate = max(1e-3, math.sqrt(np.mean(p**2))) * min(lr, 1 / math.sqrt(t))
        p = p * (1 - lr * weight_decay) - rate * u
        yield p


CASES = {
    "SGD": (sgd, optim.SGD, {"lr": 0.1}),
    "SGD momentum": (sgd, optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD nesterov": (sgd, optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    "Adam": (adam, optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6}),
    "Adam decay": (
        adam,
        optim.Adam,
        {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-8, "weight_decay": 0.1},
    ),
    "Adam amsgrad": (
        adam,
        optim.Adam,
        {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-8, "amsgrad": True},
    ),
    "AdamW": (
        lambda *args, **settings: adam(*args, **settings, decoupled=True),
        optim.AdamW,
        {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.3},
    ),
    "Lion": (lion, optim.Lion, {"lr": 0.01, "betas": (0.9, 0.98), "weight_decay": 0.2}),
    "RMSprop": (rmsprop, optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "eps": 1e-8}),
    "RMSprop centered": (
        rmsprop,
        optim.RMSprop,
        {
            "lr": 0.01,
            "alpha": 0.9,
            "eps": 1e-2,
            "momentum": 0.7,
            "centered": True,
            "weight_decay": 0.1,
        },
    ),
    "Adafactor": (adafactor, optim.Adafactor, {"lr": 0.05, "relative_step": True}),
    "Adafactor fixed": (
        adafactor,
        optim.Adafactor,
        {"lr": 0.05, "relative_step": False, "weight_decay": 0.1},
    ),
}
cases = pytest.mark.parametrize("name", CASES)


@cases
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_steps_follow_the_equations(name, shape):
    expected, kind, settings = CASES[name]
    start = np.random.default_rng(1).standard_normal(shape)
    grads = gradients(shape)
    got = run(lambda params: kind(params, **settings), start, grads)
    for g, want in zip(got, expected(start, grads, **settings), strict=True):
        assert_close(g, want, rtol=1e-10)


@cases
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_narrow_parameters_keep_float32_state(name, dtype):
    _, kind, settings = CASES[name]
    start = np.random.default_rng(1).standard_normal((3, 4)).astype("float32")
    param = Parameter(start, dtype=dtype)
    optimizer = kind([param], **settings)
    wide = Parameter(param.data.astype("float32"))
    reference = kind([wide], **settings)
    for grad in gradients((3, 4), 3):
        wide.assign(param.data.astype("float32"))
        param.grad = grad.astype(param.dtype)
        wide.grad = param.grad.astype("float32")
        optimizer.step()
        reference.step()
        assert param.dtype == np.dtype(dtype)
        # The step is computed in float32 and rounded once.
        assert_close(param, wide.data.astype(param.dtype), exact=True)
    arrays = [x for x in optimizer.state[param].values() if isinstance(x, np.ndarray)]
    assert {x.dtype for x in arrays} <= {np.dtype("float32")}


@cases
@pytest.mark.skip_xp("dask.array", reason="dask has no update in place")
def test_works_over_every_namespace(xp, name):
    _, kind, settings = CASES[name]
    start = np.random.default_rng(1).standard_normal((3, 4))
    grads = gradients((3, 4), 4)
    want = run(lambda params: kind(params, **settings), start, grads)[-1]
    param = Parameter(xp.asarray(start))
    optimizer = kind([param], **settings)
    for grad in grads:
        param.grad = xp.asarray(grad)  # read-only under numpy:readonly
        optimizer.step()
    assert_close(param, want)


@cases
def test_a_resumed_run_has_the_same_bits(name):
    _, kind, settings = CASES[name]

    def make():
        rng = np.random.default_rng(3)
        params = [Parameter(rng.standard_normal(s), dtype="float32") for s in ((3, 4), (5,))]
        groups = [{"params": params[:1], "lr": 0.003}, {"params": params[1:]}]
        return params, kind(groups, **settings)

    def train(params, optimizer, steps):
        for step in steps:
            optimizer.lr = 0.02 / (1 + step)
            for place, param in enumerate(params):
                param.grad = gradients(param.shape, 9, seed=place)[step].astype("float32")
            optimizer.step()

    params, optimizer = make()
    train(params, optimizer, range(4))
    saved = optimizer.state_dict()
    resumed, fresh = make()
    for old, new in zip(params, resumed, strict=True):
        new.assign(old.data)
    fresh.load_state_dict(saved)
    train(params, optimizer, range(4, 9))  # also shows that the load made copies
    train(resumed, fresh, range(4, 9))
    for old, new in zip(params, resumed, strict=True):
        assert_close(new, old, exact=True)
    assert fresh.lr == optimizer.lr
    assert str(fresh.state_dict()) == str(optimizer.state_dict())


def test_state_goes_through_a_checkpoint_file(tmp_path):
    param = Parameter(np.ones((2, 3), "float32"))
    optimizer = optim.AdamW([param], lr=0.1)
    param.grad = np.full((2, 3), 0.5, "float32")
    optimizer.step()
    save_checkpoint(tmp_path / "last.safetensors", {"optimizer": optimizer.state_dict()})
    other = Parameter(np.ones((2, 3), "float32"))
    fresh = optim.AdamW([other], lr=0.1)
    fresh.load_state_dict(load_checkpoint(tmp_path / "last.safetensors")["optimizer"])
    assert str(fresh.state_dict()) == str(optimizer.state_dict())


@cases
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_large_parameters_are_updated_in_pieces(name, dtype, monkeypatch):
    _, kind, settings = CASES[name]
    start = np.random.default_rng(1).standard_normal((7, 30))
    grads = [g.T for g in gradients((30, 7), 4)]
    want = run(lambda params: kind(params, **settings), start, grads, dtype)
    monkeypatch.setattr("rtxarr.optim._optimizer._PIECE", 32)
    got = run(lambda params: kind(params, **settings), start, grads, dtype)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, exact=True)


@cases
def test_gradients_are_left_alone(name):
    _, kind, settings = CASES[name]
    param = Parameter(np.ones((3, 4)))
    optimizer = kind([param], **settings)
    grad = gradients((3, 4), 1)[0]
    grad.flags.writeable = False
    for _ in range(3):
        param.grad = grad
        optimizer.step()
        assert param.grad is grad


def test_parameters_without_a_gradient_are_passed_over():
    used, unused, frozen = (Parameter(np.ones(3)) for _ in range(3))
    frozen.requires_grad = False
    optimizer = optim.SGD([used, unused, frozen], lr=1.0, weight_decay=0.5)
    used.grad = np.ones(3)
    optimizer.step()
    optimizer.zero_grad()
    assert_close(used, [-0.5] * 3)
    assert_close(unused, [1.0] * 3, exact=True)
    assert_close(frozen, [1.0] * 3, exact=True)
    assert used.grad is None


def test_a_step_is_seen_by_a_graph_that_saved_the_parameter():
    param = Parameter(np.ones(3))
    optimizer = optim.SGD([param], lr=0.1)
    loss = rx.sum(param * param)
    param.grad = np.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_groups_have_their_own_settings():
    slow, fast = Parameter(np.zeros(2)), Parameter(np.zeros(2))
    optimizer = optim.SGD([{"params": [slow]}, {"params": [fast], "lr": 1.0}], lr=0.1)

    def move():
        before = [np.array(p.data) for p in (slow, fast)]
        slow.grad = fast.grad = np.ones(2)
        optimizer.step()
        return [float((b - p.data)[0]) for b, p in zip(before, (slow, fast), strict=True)]

    assert move() == pytest.approx([0.1, 1.0])
    optimizer.lr = 0.05  # the ratio stays
    assert optimizer.lr == 0.05
    assert move() == pytest.approx([0.05, 0.5])
    optimizer.groups[0]["lr"] = 0.25
    assert move() == pytest.approx([0.25, 0.5])


def test_repr_shows_the_settings():
    optimizer = optim.SGD([Parameter(np.zeros(2))], lr=0.1)
    assert repr(optimizer) == (
        "SGD(1 parameters, lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0)"
    )


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (optim.SGD, {"lr": -0.1}, r"lr must be >= 0 and finite, got -0.1"),
        (optim.SGD, {"lr": math.nan}, r"lr must be >= 0 and finite, got nan"),
        (optim.SGD, {"lr": math.inf}, r"lr must be >= 0 and finite, got inf"),
        (optim.SGD, {"lr": 0.1, "momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        (optim.SGD, {"lr": 0.1, "nesterov": True}, "momentum must be > 0 with nesterov, got 0"),
        (optim.Adam, {"betas": (0.9, 1.0)}, r"betas must lie in \[0, 1\), got \(0.9, 1.0\)"),
        (optim.Adam, {"betas": 0.9}, "betas must be two numbers, got 0.9"),
        (optim.Adam, {"eps": -1e-8}, "eps must be >= 0 and finite"),
        (optim.AdamW, {"weight_decay": -1}, "weight_decay must be >= 0 and finite, got -1"),
        (optim.Lion, {"betas": (-0.1, 0.9)}, r"betas must lie in \[0, 1\)"),
        (optim.RMSprop, {"alpha": 1.5}, r"alpha must be in \[0, 1\), got 1.5"),
        (optim.Adafactor, {"clip_threshold": 0}, "clip_threshold must be > 0, got 0"),
        (optim.Adafactor, {"decay_exponent": 1}, r"decay_exponent must be in \[0, 1\), got 1"),
        (optim.Adafactor, {"eps": (-1, 0)}, "eps must be two numbers >= 0"),
    ],
)
def test_settings_are_checked(kind, settings, message):
    param = Parameter(np.zeros(2))
    with pytest.raises(ValueError, match=message):
        kind([param], **settings)
    with pytest.raises(ValueError, match=message):
        kind([{"params": [param], **settings}], lr=0.1)


def test_setting_a_bad_rate_changes_nothing():
    optimizer = optim.SGD([Parameter(np.zeros(2))], lr=0.1)
    with pytest.raises(ValueError, match="lr must be >= 0 and finite, got -1"):
        optimizer.lr = -1
    assert optimizer.lr == 0.1
    assert optimizer.groups[0]["lr"] == 0.1


def test_params_are_checked():
    param = Parameter(np.zeros(2))
    with pytest.raises(ValueError, match="at least one Parameter, got none"):
        optim.SGD([], lr=0.1)
    with pytest.raises(ValueError, match="each Parameter once, got one twice"):
        optim.SGD([{"params": [param]}, {"params": [param]}], lr=0.1)
    with pytest.raises(TypeError, match="params must be an iterable of Parameters.*got Parameter"):
        optim.SGD(param, lr=0.1)
    with pytest.raises(TypeError, match=r"as model.parameters\(\) gives it, got Linear"):
        optim.SGD(nn.Linear(2, 1), lr=0.1)
    with pytest.raises(TypeError, match=r"params\[1\] must be a Parameter, got ndarray"):
        optim.SGD([param, np.zeros(2)], lr=0.1)
    with pytest.raises(TypeError, match=r"params\[0\] must be real floating-point, got complex128"):
        optim.SGD([Parameter(np.zeros(2, dtype="complex128"))], lr=0.1)
    with pytest.raises(ValueError, match="group 0 must have 'params', got lr"):
        optim.SGD([{"lr": 0.1}], lr=0.1)
    with pytest.raises(ValueError, match="got 'momentom'; did you mean 'momentum'"):
        optim.SGD([{"params": [param], "momentom": 0.9}], lr=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("state"), "state must have lr, groups, state, got lr, groups"),
        (lambda s: s["groups"].append({}), "state must have 1 groups, got 2"),
        (lambda s: s["groups"][0].pop("eps"), "group 0 must have lr, .*eps"),
        (lambda s: s["groups"][0].update(lr=-1.0), "lr must be >= 0"),
        (lambda s: s["state"].update({"7": {}}), "state must be of 2 parameters, got place '7'"),
        (lambda s: s["state"]["0"].pop("mean"), "state 0 must have step, mean, mean_square"),
        (lambda s: s["state"]["0"].update(step=-1), "step must be >= 0"),
        (lambda s: s.update(lr=np.nan), "lr must be >= 0 and finite, got nan"),
        (lambda s: s["groups"][0].update(lr_ratio=np.inf), "lr_ratio must be >= 0 and finite"),
        (
            lambda s: s["state"]["0"].update(mean=np.zeros((2, 2), "float32")),
            r"mean of state 0 must have shape \(2, 3\) and dtype float32, got \(2, 2\)",
        ),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, message):
    params = [Parameter(np.ones((2, 3), "float32")), Parameter(np.ones(3, "float32"))]
    optimizer = optim.Adam(params, lr=0.1)
    for param in params:
        param.grad = np.ones(param.shape, "float32")
    optimizer.step()
    state = optimizer.state_dict()
    before = str(optimizer.state_dict())
    change(state)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert str(optimizer.state_dict()) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: None, "state must be a dict, got NoneType"),
        (lambda s: {**s, "groups": None}, "groups must be a list, got NoneType"),
        (lambda s: {**s, "lr": "fast"}, "lr must be a number, got str"),
        (lambda s: {**s, "state": {"0": {"step": "x", "velocity": np.ones(2)}}}, "step must be a"),
        (
            lambda s: {**s, "state": {"0": {"step": 1, "velocity": None}}},
            "velocity of state 0 must be an array",
        ),
    ],
)
def test_a_state_of_a_wrong_kind_changes_nothing(change, message):
    optimizer = optim.SGD([Parameter(np.ones(2))], lr=0.1, momentum=0.5)
    before = str(optimizer.state_dict())
    with pytest.raises(TypeError, match=message):
        optimizer.load_state_dict(change(optimizer.state_dict()))
    assert str(optimizer.state_dict()) == before


def test_settings_must_be_numbers():
    with pytest.raises(TypeError, match="lr must be a number, got str"):
        optim.SGD([Parameter(np.ones(2))], lr="fast")


@cases
def test_parameters_without_elements_are_passed_over(name):
    _, kind, settings = CASES[name]
    param = Parameter(np.ones((0, 3), "float32"))
    optimizer = kind([param], **settings)
    param.grad = np.ones((0, 3), "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert optimizer.state_dict()["state"]["0"]["step"] == 1


# ------------------------------------------------------------------------------ rates by schedule


def descend(optimizer, param, steps, rates=None):
    """Step, setting the rates by hand if they are given; give the rates used."""
    seen = []
    for step in steps:
        if rates is not None:
            optimizer.lr = rates(step)
        param.grad = gradients(param.shape, 9)[step].astype("float32")
        optimizer.step()
        seen.append(optimizer.lr)
    return seen


def test_a_schedule_gives_the_rate_of_each_step():
    schedule = optim.CosineSchedule(0.1, n_steps=8, warmup=2)
    by_hand, by_itself = (Parameter(np.ones((2, 3), "float32")) for _ in range(2))
    first = descend(optim.Adam([by_hand], lr=1.0), by_hand, range(6), schedule)
    optimizer = optim.Adam([by_itself], lr=schedule)
    assert optimizer.lr == schedule(0)
    assert descend(optimizer, by_itself, range(6)) == first == [schedule(i) for i in range(6)]
    assert_close(by_itself, by_hand, exact=True)


def test_groups_keep_their_ratio_to_a_schedule():
    slow, fast = Parameter(np.zeros(2)), Parameter(np.zeros(2))
    schedule = optim.StepSchedule(0.5, [1])
    optimizer = optim.SGD([{"params": [slow]}, {"params": [fast], "lr": 1.0}], lr=schedule)
    for _ in range(2):
        slow.grad = fast.grad = np.ones(2)
        optimizer.step()
    assert [group["lr"] for group in optimizer.groups] == pytest.approx([0.05, 0.1])
    assert_close(fast, 2 * slow.data)


def test_a_schedule_goes_on_from_a_saved_state():
    schedule = optim.ExponentialSchedule(0.1, 0.5)
    param = Parameter(np.ones(3, "float32"))
    optimizer = optim.SGD([param], lr=schedule)
    descend(optimizer, param, range(3))
    saved = optimizer.state_dict()
    assert saved["n_steps"] == 3
    fresh = optim.SGD([param], lr=schedule)
    fresh.load_state_dict(saved)
    assert descend(fresh, param, [3]) == [schedule(3)]
    saved.pop("n_steps")  # as saved before rates could be schedules
    fresh.load_state_dict(saved)
    assert descend(fresh, param, [3]) == [schedule(3)]
    with pytest.raises(ValueError, match="n_steps must be >= 0 and finite, got -1"):
        fresh.load_state_dict({**saved, "n_steps": -1})


def test_a_rate_takes_the_place_of_a_schedule_and_back():
    param = Parameter(np.ones(3, "float32"))
    optimizer = optim.SGD([param], lr=optim.ExponentialSchedule(0.1, 0.5))
    assert descend(optimizer, param, range(2)) == [0.1, 0.05]
    optimizer.lr = 0.3
    assert descend(optimizer, param, [2]) == [0.3]
    assert "n_steps" not in optimizer.state_dict()
    optimizer.lr = optim.ExponentialSchedule(0.2, 0.5)
    assert descend(optimizer, param, [3]) == [0.025]  # all steps count


def test_schedules_are_checked():
    param = Parameter(np.ones(3, "float32"))
    with pytest.raises(ValueError, match="lr must be >= 0 and finite, got -1"):
        optim.SGD([param], lr=lambda step: -1.0)
    with pytest.raises(TypeError, match="lr must be a number, got str"):
        optim.SGD([param], lr=lambda step: "fast")
    optimizer = optim.SGD([param], lr=0.1)
    with pytest.raises(TypeError, match="PlateauSchedule needs a measure"):
        optimizer.lr = optim.PlateauSchedule(0.1)
    assert optimizer.lr == 0.1


def test_the_rate_cannot_be_set_in_a_captured_step(monkeypatch):
    optimizer = optim.SGD([Parameter(np.ones(3))], lr=0.1)
    monkeypatch.setattr(_replay._thread, "recorder", object())
    with pytest.raises(RuntimeError, match="lr cannot be set in a step that is being captured"):
        optimizer.lr = 0.2
    assert optimizer.lr == 0.1


def test_a_loaded_state_lies_where_the_old_one_did():
    param = Parameter(np.ones(3, "float32"))
    optimizer = optim.Adam([param], lr=0.1)
    descend(optimizer, param, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    mean = optimizer.state[param]["mean"]
    before = mean.copy()
    descend(optimizer, param, [2])
    optimizer.load_state_dict(saved)
    assert optimizer.state[param]["mean"] is mean
    assert_close(mean, before, exact=True)


def test_loading_a_fresh_state_keeps_the_arrays_that_graphs_may_hold():
    param = nn.Parameter(np.ones(3, np.float32))
    optimizer = optim.Adam([param])
    fresh = optimizer.state_dict()
    param.grad = np.ones(3, np.float32)
    optimizer.step()
    mean = optimizer.state[param]["mean"]
    optimizer.load_state_dict(fresh)
    assert optimizer.state[param]["mean"] is mean
    assert optimizer.state[param]["step"] == 0
    assert_close(mean, np.zeros(3, np.float32), exact=True)
