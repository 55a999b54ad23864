"""Loading batches and writing checkpoints."""

import os
import tempfile

import numpy as np

import rtxarr as rx
from rtxarr.data import DataLoader, load_checkpoint, load_cora, save_checkpoint


class LoadArrays:
    """One epoch over two host arrays; bound by gathering rows and, on a GPU, by the copies."""

    params = (["cpu", "cuda:0"], [0, 2], [16, 4096])
    param_names = ["device", "prefetch", "n_features"]

    def setup(self, device, prefetch, n_features):
        if device not in map(str, rx.devices()):
            raise NotImplementedError(f"needs {device}")
        x = np.zeros((10_000, n_features), np.float32)
        y = np.zeros(10_000, np.int64)
        self.loader = DataLoader((x, y), 100, device=device, prefetch=prefetch)
        self.device = device
        self.time_epoch(device, prefetch, n_features)

    def time_epoch(self, device, prefetch, n_features):
        for _ in self.loader:
            pass
        rx.synchronize(self.device)


class LoadSamples:
    """One epoch over an object that returns samples; bound by Python."""

    params = [0, 2]
    param_names = ["prefetch"]

    def setup(self, prefetch):
        x = np.zeros((5000, 28, 28), np.float32)
        samples = [(image, 0) for image in x]
        self.loader = DataLoader(samples, 50, device="cpu", prefetch=prefetch)

    def time_epoch(self, prefetch):
        for _ in self.loader:
            pass


class Checkpoint:
    """Saving is bound by the disk and SHA-256, loading by SHA-256."""

    params = [1, 100]
    param_names = ["n_mib"]

    def setup(self, n_mib):
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "c.safetensors")
        n_arrays = 100
        rows = np.ones((n_arrays, n_mib * 2**18 // n_arrays), np.float32)
        self.state = {"model": dict(zip(map(str, range(n_arrays)), rows, strict=True)), "step": 1}
        save_checkpoint(self.path, self.state)

    def teardown(self, n_mib):
        self.folder.cleanup()

    def time_save(self, n_mib):
        save_checkpoint(self.path, self.state)

    def time_load(self, n_mib):
        load_checkpoint(self.path)


class Bundled:
    """Reading Cora from the package."""

    def time_load_cora(self):
        load_cora(device="cpu")

    def time_dense_features(self):
        load_cora(device="cpu").features()
