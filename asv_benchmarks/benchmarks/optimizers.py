"""Steps of the optimizers."""

import numpy as np

import rtxarr as rx
from rtxarr import nn, optim

OPTIMIZERS = {
    "SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": optim.Adam,
    "AdamW": optim.AdamW,
    "Lion": optim.Lion,
    "RMSprop": optim.RMSprop,
    "Adafactor": optim.Adafactor,
}


class Step:
    """Small parameters are bound by host time, large ones by memory bandwidth.

    A step of Adam reads four arrays and writes three: 28 bytes for each float32 parameter.
    """

    params = [list(OPTIMIZERS), ["cpu", "cuda:0"], ["100 of 64", "4 of 4096 x 1024"]]
    param_names = ["optimizer", "device", "parameters"]

    def setup(self, name, device, parameters):
        if device not in map(str, rx.devices()):
            raise NotImplementedError(f"needs {device}")
        n, shape = (100, (8, 8)) if parameters == "100 of 64" else (4, (4096, 1024))
        params = [nn.Parameter(shape, init="normal", device=device) for _ in range(n)]
        for param in params:
            param.grad = rx.asarray(np.full(shape, 0.01, "float32"), device=device)
        self.optimizer = OPTIMIZERS[name](params)
        self.device = device
        self.time_step(name, device, parameters)

    def time_step(self, name, device, parameters):
        self.optimizer.step()
        rx.synchronize(self.device)


class ClipGradNorm:
    """Bound by host time, most of it for the new arrays."""

    params = ["cpu", "cuda:0"]
    param_names = ["device"]

    def setup(self, device):
        if device not in map(str, rx.devices()):
            raise NotImplementedError(f"needs {device}")
        self.params_ = [nn.Parameter((8, 8), init="normal", device=device) for _ in range(100)]
        for param in self.params_:
            param.grad = rx.ones((8, 8), dtype="float32", device=device)
        self.device = device
        self.time_clip(device)

    def time_clip(self, device):
        optim.clip_grad_norm(self.params_, 1.0)
        rx.synchronize(self.device)
