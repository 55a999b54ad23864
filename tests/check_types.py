"""Code as users write it, for the type checker alone: mypy reads it, nothing runs it."""

from typing import assert_type

import numpy as np

import rtxarr as rx
from rtxarr import nn, optim

w = rx.Tensor(np.ones(3), requires_grad=True)
assert_type((w - 1.0) ** 2 + 2 / w, rx.Tensor)
assert_type(-w @ w[1:].T, rx.Tensor)
assert_type(w.reshape(3, 1).sum(axis=0), rx.Tensor)
assert_type(len(w) * float(w[0]), float)
w[0] = 2.0
rx.mean(rx.where(w > 0, w, 0.0)).backward()

model = nn.Linear(3, 1)
optimizer = optim.Adam(model.parameters(), lr=0.1)
gradient = rx.grad(lambda x: rx.sum(model(x)))(np.ones((2, 3)))
norm = rx.linalg.vector_norm(gradient) + rx.random.Generator(0).normal((1,))
with rx.device("cpu"), rx.no_grad():
    optimizer.step()
