"""Forward and backward passes of layers."""

import numpy as np

import rtxarr as rx
from rtxarr import nn

SIZES = {
    # name: (layer, input shape) for the CPU and for a GPU
    "Linear": {
        "cpu": (lambda: nn.Linear(256, 256), (1024, 256)),
        "cuda:0": (lambda: nn.Linear(4096, 4096), (8192, 4096)),
    },
    "Conv2d": {
        "cpu": (lambda: nn.Conv2d(16, 32, 3, padding="same"), (8, 16, 32, 32)),
        "cuda:0": (lambda: nn.Conv2d(64, 128, 3, padding="same"), (32, 64, 64, 64)),
    },
    "BatchNorm": {
        "cpu": (lambda: nn.BatchNorm(32), (16, 32, 32, 32)),
        "cuda:0": (lambda: nn.BatchNorm(128), (64, 128, 64, 64)),
    },
    "LayerNorm": {
        "cpu": (lambda: nn.LayerNorm(256), (4096, 256)),
        "cuda:0": (lambda: nn.LayerNorm(1024), (65536, 1024)),
    },
    "LSTM": {
        "cpu": (lambda: nn.LSTM(64, 64), (16, 50, 64)),
        "cuda:0": (lambda: nn.LSTM(512, 512), (64, 50, 512)),
    },
    "GRU": {
        "cpu": (lambda: nn.GRU(64, 64), (16, 50, 64)),
        "cuda:0": (lambda: nn.GRU(512, 512), (64, 50, 512)),
    },
    "TransformerBlock": {
        "cpu": (lambda: nn.TransformerBlock(256, 8, causal=True), (4, 128, 256)),
        "cuda:0": (lambda: nn.TransformerBlock(1024, 16, causal=True), (8, 1024, 1024)),
    },
}


class Layer:
    """One call, and one call with the gradients of the input and of all parameters."""

    params = [list(SIZES), ["cpu", "cuda:0"]]
    param_names = ["layer", "device"]

    def setup(self, name, device):
        if device not in map(str, rx.devices()):
            raise NotImplementedError(f"needs {device}")
        make, shape = SIZES[name][device]
        with rx.device(device):
            self.layer = make()
        x = np.random.default_rng(0).standard_normal(shape).astype("float32")
        self.x = rx.Tensor(rx.asarray(x, device=device), requires_grad=True)
        self.ones = rx.ones_like(self._call().data)
        self.time_forward_backward(name, device)

    def _call(self):
        out = self.layer(self.x)
        return out[0] if isinstance(out, tuple) else out

    def time_forward(self, name, device):
        with rx.no_grad():
            self._call()
        rx.synchronize(device)

    def time_forward_backward(self, name, device):
        self.x.grad = None
        self.layer.zero_grad()
        self._call().backward(self.ones)
        rx.synchronize(device)
