"""Optimizers, learning-rate schedules, gradient clipping and averages of parameters.

One step of a training::

    optimizer.lr = schedule(step)  # a schedule is a function of the steps done
    optimizer.zero_grad()
    loss(model(x), y).backward()
    clip_grad_norm(model.parameters(), 1.0)
    optimizer.step()

``Adam(model.parameters(), lr=schedule)`` sets the rate of each step by itself, also in a captured
step.
"""

from rtxarr.optim._adafactor import Adafactor
from rtxarr.optim._adam import Adam, AdamW, Lion
from rtxarr.optim._clip import clip_grad_norm, clip_grad_value
from rtxarr.optim._ema import ExponentialMovingAverage
from rtxarr.optim._loss_scaler import LossScaler
from rtxarr.optim._optimizer import Optimizer
from rtxarr.optim._schedules import (
    ChainSchedule,
    CosineSchedule,
    ExponentialSchedule,
    OneCycleSchedule,
    PlateauSchedule,
    StepSchedule,
    WarmupSchedule,
)
from rtxarr.optim._sgd import SGD, RMSprop

__all__ = [
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "ChainSchedule",
    "CosineSchedule",
    "ExponentialMovingAverage",
    "ExponentialSchedule",
    "Lion",
    "LossScaler",
    "OneCycleSchedule",
    "Optimizer",
    "PlateauSchedule",
    "RMSprop",
    "StepSchedule",
    "WarmupSchedule",
    "clip_grad_norm",
    "clip_grad_value",
]
