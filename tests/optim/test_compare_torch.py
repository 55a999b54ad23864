"""Optimizers and schedules against PyTorch over 20 steps."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import optim
from rtxarr.nn import Parameter
from rtxarr.testing import assert_close

pytestmark = pytest.mark.compare

OPTIMIZERS = {
    "SGD": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    "Adam amsgrad": ("Adam", {"lr": 0.01, "betas": (0.7, 0.8), "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 0.01, "weight_decay": 0.2, "amsgrad": True}),
    "RMSprop": ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True, "weight_decay": 0.1}),
    "Adafactor": ("Adafactor", {"lr": 0.05, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_after_20_steps(name):
    import torch

    kind, settings = OPTIMIZERS[name]
    rng = np.random.default_rng(0)
    starts = [rng.standard_normal(s) for s in ((4, 3), (3,), (2, 4, 3))]
    x, y = rng.standard_normal((8, 4)), rng.standard_normal((8, 3))

    def train(namespace, params, optimizers, x, y):
        groups = [
            {"params": params[:2], "weight_decay": 0.3},
            {"params": params[2:], "lr": 0.02},
        ]
        optimizer = getattr(optimizers, kind)(groups, **settings)
        w, b, stack = params
        for _ in range(20):
            optimizer.zero_grad()
            error = x @ (w * stack[0] - stack[1]) + b - y
            namespace.mean(error * error).backward()
            optimizer.step()

    ours = [Parameter(s) for s in starts]
    theirs = [torch.tensor(s, requires_grad=True) for s in starts]
    train(rx, ours, optim, x, y)
    train(torch, theirs, torch.optim, torch.tensor(x), torch.tensor(y))
    for mine, want in zip(ours, theirs, strict=True):
        assert_close(mine, want.detach().numpy(), rtol=1e-8)


@pytest.mark.parametrize(
    ("make", "theirs"),
    [
        (
            lambda: optim.CosineSchedule(0.1, 10, final_lr=0.01),
            lambda s, o: s.CosineAnnealingLR(o, 10, eta_min=0.01),
        ),
        (
            lambda: optim.CosineSchedule(0.1, 3, n_periods=9, period_factor=2.0),
            lambda s, o: s.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
        ),
        (
            lambda: optim.OneCycleSchedule(0.1, 11),
            lambda s, o: s.OneCycleLR(o, 0.1, total_steps=11, cycle_momentum=False),
        ),
        (
            lambda: optim.StepSchedule(0.1, [2, 7], factor=0.3),
            lambda s, o: s.MultiStepLR(o, [2, 7], gamma=0.3),
        ),
        (lambda: optim.ExponentialSchedule(0.1, 0.9), lambda s, o: s.ExponentialLR(o, 0.9)),
        (
            lambda: optim.WarmupSchedule(0.1, 5, initial_lr=0.01),
            lambda s, o: s.LinearLR(o, start_factor=0.1, total_iters=5),
        ),
    ],
    ids=["cosine", "restarts", "one cycle", "steps", "exponential", "warmup"],
)
def test_schedules(make, theirs):
    import torch

    reference = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = theirs(torch.optim.lr_scheduler, reference)
    schedule = make()
    for step in range(11):
        assert schedule(step) == pytest.approx(reference.param_groups[0]["lr"]), step
        if step < 10:
            reference.step()
            scheduler.step()


def test_plateau():
    import torch

    measures = np.random.default_rng(1).uniform(0.9, 1.0, 60)
    reference = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        reference, factor=0.5, patience=3, cooldown=2, min_lr=0.01
    )
    schedule = optim.PlateauSchedule(1.0, factor=0.5, patience=3, cooldown=2, min_lr=0.01)
    for measure in measures:
        scheduler.step(measure)
        assert schedule(measure) == pytest.approx(reference.param_groups[0]["lr"])


def test_clip_grad_norm():
    import torch

    rng = np.random.default_rng(2)
    grads = [rng.standard_normal(s) for s in ((3, 4), (4,), ())]
    params = [Parameter(np.zeros(g.shape)) for g in grads]
    theirs = [torch.zeros(g.shape, dtype=torch.float64) for g in grads]
    for p, t, g in zip(params, theirs, grads, strict=True):
        p.grad, t.grad = np.asarray(g), torch.tensor(g)
    norm = optim.clip_grad_norm(params, 0.7)
    assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.7).numpy())
    for p, t in zip(params, theirs, strict=True):
        assert_close(p.grad, t.grad.numpy())
