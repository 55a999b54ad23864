"""The training loop, with a recipe that takes no time."""

import dataclasses
import errno
import json
import re
import signal
import sys

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import nn, optim, random
from rtxarr.data import (
    CheckpointError,
    DataLoader,
    load_arrays,
    load_checkpoint,
    save_checkpoint,
)
from rtxarr.recipes import RunError, Watch, _run, read_identity, run
from rtxarr.recipes._config import Config, option
from rtxarr.recipes._recipe import Recipe

KEYS = ["epoch", "train_loss", "val_loss", "train_accuracy", "val_accuracy", "epoch_ms"]


@dataclasses.dataclass(frozen=True)
class LineConfig(Config):
    epochs: int = option(6, "passes", at_least=1)
    lr: float = option(0.05, "rate", above=0)


class Line(nn.Module):
    def __init__(self):
        self.weight = nn.Parameter((3,), init="normal")

    def forward(self, x):
        return rx.sum(x * self.weight, axis=-1)


class Recipe(Recipe):
    """Fit a line; what it draws, its order and its optimizer all have a state."""

    name = "line"
    Config = LineConfig
    stateful = ("model", "optimizer", "loader")

    def __init__(self, config, *, seed):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((12, 3)).astype(np.float32)
        self.loader = DataLoader((x, x @ np.float32([1, -2, 3])), 4, seed=seed, device="cpu")
        self.data = self.loader.dataset
        self.model = Line()
        self.optimizer = optim.Adam(self.model.parameters(), lr=config.lr)

    def train_epoch(self, epoch, progress):
        total = 0.0
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = self.loss(rx.dropout(rx.Tensor(x), 0.1), y)
            loss.backward()
            self.optimizer.step()
            total += loss.item() * len(x) / 12
            progress(0.5)
        return total, 1 / (1 + total)

    def evaluate(self, part):
        loss = self.loss(*self.data).item()
        return loss, 1 / (1 + loss)

    def loss(self, x, y):
        return rx.mean((self.model(x) - y) ** 2)

    def finish(self, folder):
        (folder / "note.txt").write_text("done")
        return ["a note"]


class Fit(Recipe):
    """The same, with a metric of its own."""

    metric = "fit"


def test_a_recipe_names_its_metric(tmp_path):
    config = LineConfig(epochs=2)
    result = run(Fit, config, out=tmp_path, device="cpu")
    keys = [key.replace("accuracy", "fit") for key in KEYS]
    assert [list(entry) for entry in result.history] == [keys, [*keys, "test_fit"]]
    assert result.best["val_fit"] == max(entry["val_fit"] for entry in result.history)
    again = run(Fit, config, out=tmp_path, device="cpu", resume=True)
    assert again.was_finished
    assert again.test_metric == result.test_metric == result.history[-1]["test_fit"]
    with pytest.raises(CheckpointError, match="history must list the metrics"):
        run(Recipe, config, out=tmp_path, device="cpu", resume=True)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"fuse": True}, ["line makes no captured call, so nothing was fused"]),
        ({"fuse": False}, []),
        ({}, []),
    ],
)
def test_a_run_that_could_not_fuse_says_so(tmp_path, asked, said):
    config = LineConfig(epochs=1)
    result = run(Recipe, config, out=tmp_path, device="cpu", **asked)
    assert result.notes == ["a note", *said]
    assert run(Recipe, config, out=tmp_path, device="cpu", resume=True, **asked).notes == ["a note"]


class Captured(Recipe):
    """The same, with a step that may be a fused program."""

    def evaluate(self, part):
        self.captured(self.penalty)(self.data[0])
        return super().evaluate(part)

    def penalty(self, x):
        return rx.sum(x * x)


def test_a_run_that_could_fuse_says_nothing(tmp_path):
    result = run(Captured, LineConfig(epochs=1), out=tmp_path, device="cpu", fuse=True)
    assert result.notes == ["a note"]


class Interrupting(Watch):
    """Sends a signal at the end of an epoch."""

    def __init__(self, epoch, number):
        self.at, self.number = epoch, number

    def epoch(self, entry):
        if entry["epoch"] == self.at:
            signal.raise_signal(self.number)


def read_metrics(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def without_time(entries):
    return [{k: v for k, v in entry.items() if k != "epoch_ms"} for entry in entries]


def test_a_run_leaves_everything(tmp_path):
    result = run(Recipe, out=tmp_path / "a" / "b", seed=3, device="cpu")
    folder = tmp_path / "a" / "b"
    assert {path.name for path in folder.iterdir()} == {
        "checkpoint.safetensors",
        "config.json",
        "curves.png",
        "metrics.jsonl",
        "model.safetensors",
        "note.txt",
    }
    entries = read_metrics(folder)
    assert [list(entry) for entry in entries] == [KEYS] * 5 + [[*KEYS, "test_accuracy"]]
    assert [entry["epoch"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    assert entries == result.history
    assert result.notes == ["a note"]
    config = json.loads((folder / "config.json").read_text())
    assert list(config) == ["recipe", "seed", "config", "device", "versions"]
    assert config["config"] == {"epochs": 6, "lr": 0.05}
    assert (config["recipe"], config["seed"], config["device"]) == ("line", 3, "cpu")
    assert {"python", "rtxarr", "numpy"} <= set(config["versions"])
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_model_is_that_of_the_best_epoch(tmp_path):
    class Worsening(Recipe):
        def evaluate(self, part):
            if part == "test":
                return 0.0, float(self.model.weight.data[0] == self.kept)
            epoch = self.loader.epoch
            if epoch == 2:
                self.kept = float(self.model.weight.data[0])
            return 1.0, 0.9 if epoch in (2, 3) else 0.1

    result = run(Worsening, out=tmp_path, device="cpu")
    assert result.best["epoch"] == 2  # the earlier of two equal ones
    assert result.test_metric == 1.0
    assert load_arrays(tmp_path / "model.safetensors")["weight"][0] == np.float32(
        load_arrays(tmp_path / "checkpoint.safetensors")["best_model.weight"][0]
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("epoch", [1, 4, 6])
def test_resumed_run_equals_one_that_was_not_interrupted(tmp_path, epoch, number):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(Recipe, out=whole, seed=1, device="cpu")
    random.seed(99)  # whatever else draws between the two
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    first = run(Recipe, out=parts, seed=1, device="cpu", watch=Interrupting(epoch, number))
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert (first.signal, first.test_metric) == (number, None)
    assert [entry["epoch"] for entry in read_metrics(parts)] == list(range(1, epoch + 1))
    random.seed(98)
    run(Recipe, out=parts, seed=1, device="cpu", resume=True)
    assert without_time(read_metrics(parts)) == without_time(read_metrics(whole))
    model = "model.safetensors"
    assert (parts / model).read_bytes() == (whole / model).read_bytes()


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path):
    class Killed(Watch):
        def epoch(self, entry):
            if entry["epoch"] == 3:
                raise MemoryError  # nothing is saved on the way out

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(Recipe, out=whole, device="cpu")
    with pytest.raises(MemoryError):
        run(Recipe, out=parts, device="cpu", watch=Killed())
    assert len(read_metrics(parts)) == 3  # more than the checkpoint of the start knows
    run(Recipe, out=parts, device="cpu", resume=True)
    assert without_time(read_metrics(parts)) == without_time(read_metrics(whole))


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    run(Recipe, out=tmp_path, device="cpu")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    result = run(Recipe, out=tmp_path, device="cpu", resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert result.test_metric is not None
    assert result.was_finished


@pytest.mark.parametrize("name", ["metrics.jsonl", "model.safetensors", "curves.png", "note.txt"])
def test_resuming_a_finished_run_writes_what_is_missing(tmp_path, name):
    class Named(Recipe):
        files = ("note.txt",)

    assert not run(Named, out=tmp_path, device="cpu").was_finished
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    run(Named, out=tmp_path, device="cpu", resume=True)
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert {n for n in after if after[n] != before.get(n)} == {name}
    assert name == "curves.png" or (tmp_path / name).read_bytes() == whole


def test_second_signal_stops_at_once(tmp_path):
    class Twice(Recipe):
        def train_epoch(self, epoch, progress):
            if epoch == 2:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            return super().train_epoch(epoch, progress)

    with pytest.raises(KeyboardInterrupt):
        run(Twice, out=tmp_path, device="cpu")
    assert len(read_metrics(tmp_path)) == 2


def test_a_signal_while_the_results_are_written_stops_at_once(tmp_path):
    class Stopped(Recipe):
        def finish(self, folder):
            signal.raise_signal(signal.SIGTERM)
            return super().finish(folder)

    with pytest.raises(KeyboardInterrupt, match=f"^{signal.SIGTERM.value}$"):
        run(Stopped, out=tmp_path, device="cpu")
    assert not (tmp_path / "note.txt").exists()
    assert run(Recipe, out=tmp_path, device="cpu", resume=True).notes == ["a note"]


def test_progress_is_told(tmp_path):
    class Watching(Watch):
        heard = []

        def begin(self, n_epochs, n_done):
            self.heard.append((n_epochs, n_done))

        def progress(self, fraction):
            self.heard.append(fraction)

        def epoch(self, entry):
            self.heard.append(entry["epoch"])

    run(Recipe, LineConfig(epochs=1), out=tmp_path, device="cpu", watch=Watching())
    assert Watching.heard == [(1, 0), 0.5, 0.5, 0.5, 1]


def test_folder_in_use_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("words")
    with pytest.raises(RunError, match="is not empty: resume the run in it or choose another"):
        run(Recipe, out=tmp_path, device="cpu")
    with pytest.raises(RunError, match="must be a folder, it is a file"):
        run(Recipe, out=tmp_path / "thesis.txt", device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_another_run_writes_to_is_refused(tmp_path, resume):
    class Twice(Watch):
        def epoch(self, entry):
            if entry["epoch"] == 2:
                with pytest.raises(RunError, match="another run is writing to .*: wait for its"):
                    run(Recipe, out=tmp_path, device="cpu", resume=resume)

    result = run(Recipe, out=tmp_path, device="cpu", watch=Twice())
    assert len(result.history) == 6
    run(Recipe, out=tmp_path, device="cpu", resume=True)  # the lock ends with the run


@pytest.mark.parametrize("missing", ["locks of the file system", "fcntl"])
def test_a_folder_that_cannot_be_locked_is_said(tmp_path, monkeypatch, missing):
    if missing == "fcntl":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    else:
        fcntl = pytest.importorskip("fcntl")

        def refuse(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(RuntimeWarning, match="could not be locked .*: start no other run in it"):
        assert len(run(Recipe, out=tmp_path, device="cpu").history) == 6


def test_resuming_names_what_differs(tmp_path):
    run(Recipe, LineConfig(epochs=1), out=tmp_path, device="cpu")

    class Other(Recipe):
        name = "other"

    def resume(kind=Recipe, seed=0, **values):
        values = {"epochs": 1, **values}
        run(kind, LineConfig(**values), out=tmp_path, seed=seed, device="cpu", resume=True)

    with pytest.raises(RunError, match="seed is 0 there, 5 here; lr is 0.05 there, 0.1 here$"):
        resume(seed=5, lr=0.1)
    with pytest.raises(RunError, match="epochs is 1 there, 2 here$"):
        resume(epochs=2)
    with pytest.raises(RunError, match="recipe is line there, other here$"):
        resume(Other)


def test_resuming_needs_a_whole_run(tmp_path):
    with pytest.raises(RunError, match=r"holds no run to resume: .*checkpoint.safetensors is not"):
        run(Recipe, out=tmp_path, device="cpu", resume=True)
    with pytest.raises(RunError, match=r"holds no run to resume: .*config.json is not there"):
        read_identity(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config.json must be JSON"):
        read_identity(tmp_path)
    (tmp_path / "config.json").write_text('{"recipe": "line"}')
    with pytest.raises(RunError, match=r"config.json must have recipe \(str\), seed \(int\), con"):
        read_identity(tmp_path)
    wrong = {"recipe": "line", "seed": "0", "config": {}, "device": "cpu"}
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(RunError, match=r"config.json must have .*seed \(int\)"):
        read_identity(tmp_path)
    run(Recipe, LineConfig(epochs=1), out=tmp_path / "new", device="cpu")
    checkpoint = tmp_path / "new" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        run(Recipe, LineConfig(epochs=1), out=tmp_path / "new", device="cpu", resume=True)


@pytest.mark.parametrize(
    "part, value, message",
    [
        ("identity", {}, "identity must be recipe, seed and config of a run"),
        ("identity", "line", "identity must be recipe"),
        ("identity", {"recipe": "line", "seed": np.arange(2), "config": {}}, "identity must be"),
        ("history", "abc", "history must list the metrics of each epoch, of 2 at most"),
        ("history", [], "best must be an entry of history, empty before the first"),
        ("history", [1, 2], "history must list"),
        ("history", [{"epoch": 1}], "history must list"),
        ("best", 3, "best must be an entry of history"),
        ("best", {}, "best must be an entry of history"),
        ("best", {"epoch": np.arange(3)}, "best must be an entry of history"),
        ("best_model", {}, "best_model does not fit: .*weight"),
        ("best_model", "abc", "best_model does not fit: "),
        ("best_model", {"weight": np.zeros(4, np.float32)}, "best_model does not fit: .*shape"),
        ("training", {}, "training does not fit: state must be a dict of model, optimizer, loader"),
        ("training", 1, "training does not fit: state must be a dict of .*, got int"),
        ("training", {"model": 1, "optimizer": 2, "loader": 3}, "training does not fit: "),
        ("random", {}, "random does not fit: state must have the keys"),
        ("random", None, "random does not fit: state must be a dict, got NoneType"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path, part, value, message):
    config = LineConfig(epochs=2)
    run(Recipe, config, out=tmp_path, device="cpu")
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, {**load_checkpoint(path), part: value})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(path))}: {message}") as caught:
        run(Recipe, config, out=tmp_path, device="cpu", resume=True)
    assert "\n" not in str(caught.value)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_checkpoint_must_have_all_parts(tmp_path):
    run(Recipe, out=tmp_path, device="cpu")
    save_checkpoint(tmp_path / "checkpoint.safetensors", {"history": [], "best": {}})
    with pytest.raises(CheckpointError, match="must have identity, .*, got history, best$"):
        run(Recipe, out=tmp_path, device="cpu", resume=True)


def test_a_full_disk_is_told_with_the_file(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    loop = _run._Loop(None, tmp_path, {})
    with pytest.raises(OSError, match="No space left") as caught:
        loop._add_metrics({"epoch": 1})
    assert caught.value.__notes__ == [f"while writing {tmp_path / 'metrics.jsonl'}"]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    class Exploding(Recipe):
        def train_epoch(self, epoch, progress):
            loss, accuracy = super().train_epoch(epoch, progress)
            return (loss if epoch < 2 else float("nan")), accuracy

    with pytest.raises(FloatingPointError, match="train_loss is nan in epoch 3: lower lr"):
        run(Exploding, out=tmp_path, device="cpu")
    assert len(read_metrics(tmp_path)) == 2
