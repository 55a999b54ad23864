"""Training steps of the recipes, and the sparse product that the graph network lives on."""

import numpy as np

import rtxarr as rx
from rtxarr.data import load_cora
from rtxarr.recipes import NAMES, load

DEVICES = ["cpu", "cuda:0"]


class Epoch:
    """An epoch of training. On a GPU the small recipes are bound by the host's launches."""

    params = [list(NAMES), DEVICES]
    param_names = ["recipe", "device"]
    timeout = 120

    def setup(self, name, device):
        if device not in map(str, rx.devices()):
            raise NotImplementedError(f"needs {device}")
        self.device = rx.device(device)
        kind = load(name)
        with self.device:
            self.recipe = kind(kind.Config(), seed=0)
        self.time_train_epoch(name, device)

    def time_train_epoch(self, name, device):
        with self.device:
            self.recipe.train_epoch(0, lambda fraction: None)
        rx.synchronize(self.device)


class SparseProduct:
    """Cora's words times a matrix: 49,216 entries, each reading a row of ``n_features``."""

    params = [["forward", "backward"], [16, 256], DEVICES]
    param_names = ["direction", "n_features", "device"]

    def setup(self, direction, n_features, device):
        if device not in map(str, rx.devices()):
            raise NotImplementedError(f"needs {device}")
        cora = load_cora(device=device)
        self.device = rx.device(device)
        self.values = cora.x_data
        pattern = rx.SparsityPattern(cora.x_indptr, cora.x_indices, cora.x_shape)
        self.pattern = pattern if direction == "forward" else pattern.T
        dense = np.ones((self.pattern.shape[1], n_features), dtype=np.float32)
        self.dense = rx.asarray(dense, device=device)
        self.time_spmm(direction, n_features, device)

    def time_spmm(self, direction, n_features, device):
        rx.spmm(self.values, self.dense, self.pattern)
        rx.synchronize(self.device)
