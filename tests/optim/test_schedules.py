"""Schedules against closed forms and values by hand."""

import math

import numpy as np
import pytest

from rtxarr import optim
from rtxarr.nn import Parameter


def rates(schedule, *steps):
    return [schedule(step) for step in steps]


def test_warmup():
    schedule = optim.WarmupSchedule(0.1, 4, initial_lr=0.02)
    assert rates(schedule, 0, 1, 2, 4, 100) == pytest.approx([0.02, 0.04, 0.06, 0.1, 0.1])
    assert optim.WarmupSchedule(0.1, 0)(0) == 0.1


def test_cosine():
    schedule = optim.CosineSchedule(1.0, 10, final_lr=0.2)
    want = [0.2 + 0.4 * (1 + math.cos(math.pi * t / 10)) for t in (0, 3, 5)]
    assert rates(schedule, 0, 3, 5, 10, 11) == pytest.approx([*want, 0.2, 0.2])


def test_cosine_with_warmup():
    schedule = optim.CosineSchedule(1.0, 14, warmup=4)
    assert rates(schedule, 0, 2, 4, 9, 14) == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])


def test_cosine_with_restarts():
    schedule = optim.CosineSchedule(1.0, 4, n_periods=3, period_factor=2.0)
    assert rates(schedule, 0, 2, 4, 8, 12, 20, 28, 99) == pytest.approx(
        [1.0, 0.5, 1.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    )


def test_one_cycle():
    schedule = optim.OneCycleSchedule(1.0, 11, rise=5 / 11, initial_factor=10, final_factor=100)
    assert rates(schedule, 0, 2, 4, 7, 10, 50) == pytest.approx(
        [0.1, 0.55, 1.0, (1 + 0.001) / 2, 0.001, 0.001]
    )


def test_steps():
    schedule = optim.StepSchedule(1.0, [3, 5], factor=0.5)
    assert rates(schedule, 0, 2, 3, 4, 5, 9) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_exponential():
    assert rates(optim.ExponentialSchedule(2.0, 0.5, every=2), 0, 1, 4) == pytest.approx(
        [2.0, math.sqrt(2), 0.5]
    )
    assert rates(optim.ExponentialSchedule(2.0, 0.5, every=2, stairs=True), 0, 1, 2, 3) == [
        *[2.0, 2.0],
        *[1.0, 1.0],
    ]


def test_chain():
    schedule = optim.ChainSchedule(
        (optim.WarmupSchedule(1.0, 2), 2),
        (lambda step: 10.0 + step, 3),
        (optim.StepSchedule(0.5, [2]), 1),
    )
    assert rates(schedule, 0, 1, 2, 4, 5, 6, 7) == pytest.approx([0, 0.5, 10, 12, 0.5, 0.5, 0.05])


def test_a_schedule_drives_an_optimizer():
    param = Parameter(np.zeros(1))
    optimizer = optim.SGD([param], lr=1.0)
    schedule = optim.StepSchedule(1.0, [2])
    for step in range(4):
        optimizer.lr = schedule(step)
        param.grad = np.ones(1)
        optimizer.step()
    assert param.item() == pytest.approx(-(1 + 1 + 0.1 + 0.1))


def test_plateau_waits_then_lowers():
    schedule = optim.PlateauSchedule(1.0, factor=0.5, patience=1, threshold=0.1, min_lr=0.2)
    # 0.95 is an improvement of less than a tenth.
    measures = [1.0, 0.95, 0.95, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert [schedule(m) for m in measures] == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.2]


def test_plateau_of_a_score():
    schedule = optim.PlateauSchedule(1.0, patience=0, mode="max")
    assert [schedule(m) for m in (0.5, 0.7, 0.7)] == pytest.approx([1.0, 1.0, 0.1])


def test_plateau_rests_after_a_change():
    schedule = optim.PlateauSchedule(1.0, factor=0.5, patience=0, cooldown=2)
    assert [schedule(1.0) for _ in range(6)] == [1.0, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_plateau_counts_a_nan_as_bad():
    schedule = optim.PlateauSchedule(1.0, factor=0.5, patience=0)
    assert [schedule(m) for m in (1.0, math.nan, 0.5)] == [1.0, 0.5, 0.5]


def test_plateau_goes_on_from_its_state():
    def make():
        return optim.PlateauSchedule(1.0, factor=0.5, patience=2, cooldown=1)

    measures = [3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    whole = make()
    want = [whole(m) for m in measures]
    first, second = make(), make()
    got = [first(m) for m in measures[:4]]
    second.load_state_dict(first.state_dict())
    assert got + [second(m) for m in measures[4:]] == want
    with pytest.raises(ValueError, match="state must have best, lr, n_bad, n_resting, got lr"):
        second.load_state_dict({"lr": 1.0})
    with pytest.raises(TypeError, match="state must be a dict, got NoneType"):
        second.load_state_dict(None)
    with pytest.raises(ValueError, match="n_bad must be >= 0 and finite, got -1"):
        second.load_state_dict({**first.state_dict(), "n_bad": -1})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.WarmupSchedule(-1.0, 4), "lr must be >= 0 and finite, got -1.0"),
        (lambda: optim.WarmupSchedule(math.nan, 4), "lr must be >= 0 and finite, got nan"),
        (lambda: optim.CosineSchedule(1.0, 0), "n_steps must be > 0 and finite, got 0"),
        (lambda: optim.CosineSchedule(1.0, 4, warmup=4), "warmup must be < n_steps, got 4 and 4"),
        (lambda: optim.CosineSchedule(1.0, 4, period_factor=0.5), "period_factor must be >= 1"),
        (lambda: optim.OneCycleSchedule(1.0, 10, rise=1.0), r"rise must lie in \(0, 1\)"),
        (lambda: optim.OneCycleSchedule(1.0, 3, rise=0.3), "take more than a step, got 0.3 of 3"),
        (lambda: optim.StepSchedule(1.0, [5, 3]), r"boundaries must be increasing, got \[5, 3\]"),
        (lambda: optim.ExponentialSchedule(1.0, 0.0), "factor must be > 0 and finite, got 0.0"),
        (lambda: optim.ChainSchedule(), "parts must be"),
        (lambda: optim.ChainSchedule((abs, 0)), "n_steps > 0"),
        (lambda: optim.PlateauSchedule(1.0, factor=1.0), r"factor must lie in \(0, 1\), got 1.0"),
        (lambda: optim.PlateauSchedule(1.0, mode="low"), "mode must be 'min' or 'max', got 'low'"),
        (lambda: optim.PlateauSchedule(1.0, patience=-1), "patience must be >= 0 and finite"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_settings_must_be_numbers():
    with pytest.raises(TypeError, match="lr must be a number, got str"):
        optim.CosineSchedule("fast", 4)
