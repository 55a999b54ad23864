"""The training loop that the recipes share: metrics, checkpoints, resuming, pictures."""

import dataclasses
import json
import math
import os
import platform
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rtxarr import random
from rtxarr._device import device as get_device
from rtxarr._device import namespace
from rtxarr.data import CheckpointError, load_checkpoint, save_arrays, save_checkpoint
from rtxarr.data._atomic import atomic_write
from rtxarr.recipes._recipe import Recipe

CHECKPOINT = "checkpoint.safetensors"
CONFIG = "config.json"
METRICS = "metrics.jsonl"
MODEL = "model.safetensors"
CURVES = "curves.png"

# What a checkpoint has, and then what is measured in an epoch.
_STATE = ("identity", "history", "best", "best_model", "training", "random")


def _measured(metric: str) -> tuple[str, ...]:
    return "train_loss", "val_loss", f"train_{metric}", f"val_{metric}", "epoch_ms"


# Training is never further ahead of the checkpoint than this, or than one epoch.
_SECONDS_BETWEEN_SAVES = 5.0


class RunError(RuntimeError):
    """A run that cannot start or be resumed, and why."""


@dataclasses.dataclass
class Result:
    """How a run ended.

    Attributes
    ----------
    history : list of dict
        What ``metrics.jsonl`` holds.
    best : dict
        The entry of the epoch whose parameters are in ``model.safetensors``; empty before the
        first.
    test_metric : float or None
        The recipe's ``metric``; None when the run was interrupted.
    signal : int or None
        The signal that interrupted it.
    notes : list of str
        What the recipe has to show, and what it could not do as asked.
    was_finished : bool
        Whether the resumed run had all its epochs.
    """

    history: list[dict[str, Any]]
    best: dict[str, Any]
    test_metric: float | None = None
    signal: int | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    was_finished: bool = False


class Watch:
    """Is told how a run goes; this one does nothing."""

    def begin(self, n_epochs: int, n_done: int) -> None:
        """Learn that epochs ``n_done`` to ``n_epochs`` follow."""

    def progress(self, fraction: float) -> None:
        """Learn how much of the current epoch is done."""

    def epoch(self, entry: dict[str, Any]) -> None:
        """Learn the metrics of the epoch that has ended."""


def run(
    kind: type[Recipe],
    config: Any = None,
    *,
    out: str | os.PathLike,
    seed: int = 0,
    device: Any = None,
    capture: bool | None = None,
    fuse: bool | None = None,
    resume: bool = False,
    watch: Watch | None = None,
) -> Result:
    """Train a recipe and write everything about it to a folder.

    Parameters
    ----------
    kind : type
        A recipe, as :func:`rtxarr.recipes.load` gives it.
    config : Config, optional
        The recipe's settings; its defaults when left out.
    out : path-like
        Made if need be. Must be empty unless ``resume``.
    seed : int, default 0
        Of the parameters, the order of the data and dropout. Seeds the default generator.
    device : str or Device, default the current device
    capture : bool, default whether ``device`` is a GPU
        Replay the steps as CUDA graphs, with the same results to the bit.
    fuse : bool, default whether the recipe says so, where steps are captured on a GPU
        Fuse the kernels of the steps (:func:`rtxarr.jit`); sums are added up in another order.
    resume : bool, default False
        Go on with the run in ``out``: the metrics, except for ``epoch_ms``, are those of a run
        that was not interrupted. On another device they differ in the last digits. Of a finished
        run, files that are missing are written again, and nothing else.
    watch : Watch, optional
        Is told about every epoch.

    Returns
    -------
    Result
        SIGINT and SIGTERM end the run after the current epoch, with a checkpoint; a second one,
        or one after the last epoch, raises KeyboardInterrupt at once.

    Raises
    ------
    RunError
        When ``out`` holds something, another run is writing to it, or the run to resume has
        another recipe, seed or settings.
    CheckpointError
        When the checkpoint to resume from is damaged or holds something else; nothing has changed.
    FloatingPointError
        When the loss is not finite.
    """
    config = kind.Config() if config is None else config
    place = get_device(device)
    folder = Path(out)
    identity = {"recipe": kind.name, "seed": seed, "config": dataclasses.asdict(config)}
    random.seed(seed)
    with (
        _open_folder(folder, identity, resume, kind.metric) as saved,
        place,
        _one_blas_thread(),
        _stopping() as stop,
    ):
        training = kind(config, seed=seed)
        training.capture = place.kind == "cuda" if capture is None else capture
        captured = training.capture and place.kind == "cuda"
        training.fuse = captured and kind.fuses if fuse is None else fuse
        loop = _Loop(training, folder, identity)
        if saved is None:
            _write_json(
                folder / CONFIG, {**identity, "device": str(place), "versions": _versions()}
            )
            loop.save()
        else:
            loop.load(saved)
        watch = watch or Watch()
        watch.begin(config.epochs, len(loop.history))
        was_finished = len(loop.history) == config.epochs
        if not was_finished:
            loop.train(config.epochs, stop, watch)
        stop.at_once = True  # there is nothing more to save
        if stop.signal is not None:
            return Result(loop.history, loop.best, signal=stop.signal)
        result = loop.finish(was_finished)
        asked = [word for word, wanted in (("captured", capture), ("fused", fuse)) if wanted]
        if asked and not was_finished and not training.captures:
            result.notes.append(
                f"{kind.name} makes no captured call, so nothing was {' or '.join(asked)}"
            )
        return result


def read_identity(folder: str | os.PathLike) -> dict[str, Any]:
    """Give ``recipe``, ``seed``, ``config``, ``device`` and ``versions`` of the run in a folder."""
    path = Path(folder) / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{folder} holds no run to resume: {path} is not there") from None
    except ValueError as error:
        raise RunError(f"{path} must be JSON: {error}") from None
    kinds = {"recipe": str, "seed": int, "config": dict, "device": str}
    if not isinstance(found, dict) or any(type(found.get(n)) is not k for n, k in kinds.items()):
        wanted = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
        raise RunError(f"{path} must have {wanted}")
    return found


@contextmanager
def _open_folder(
    folder: Path, identity: dict, resume: bool, metric: str
) -> Iterator[dict[str, Any] | None]:
    """Make the folder, or give the checkpoint in it; keep other runs out in the ``with`` block."""
    if resume:
        if not (folder / CHECKPOINT).exists():
            raise RunError(f"{folder} holds no run to resume: {folder / CHECKPOINT} is not there")
        with _locked(folder):
            yield _load(folder, identity, metric)
        return
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} must be a folder, it is a file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder} must be a folder that can be made: {error.strerror}") from None
    with _locked(folder):
        if any(folder.iterdir()):
            raise RunError(f"{folder} is not empty: resume the run in it or choose another folder")
        yield None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, without a file in it that a killed process would leave behind."""
    try:
        import fcntl
    except ImportError:  # Windows, which has no locks of folders
        _warn_unlocked(folder, "this system cannot lock a folder")
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another run is writing to {folder}: wait for its end or choose another folder"
            ) from None
        except OSError as error:  # a file system without locks
            _warn_unlocked(folder, error.strerror)
        yield
    finally:
        os.close(descriptor)


def _warn_unlocked(folder: Path, reason: str | None) -> None:
    warnings.warn(
        f"{folder} could not be locked ({reason}): start no other run in it",
        RuntimeWarning,
        stacklevel=4,
    )


def _load(folder: Path, identity: dict, metric: str) -> dict[str, Any]:
    """Give the checkpoint if it is one of the run that ``identity`` describes."""
    path = folder / CHECKPOINT
    saved = load_checkpoint(path, device="cpu")
    if set(saved) != set(_STATE):
        raise CheckpointError(f"{path}: must have {', '.join(_STATE)}, got {', '.join(saved)}")
    there = saved["identity"]
    if not _is_identity(there):
        raise CheckpointError(f"{path}: identity must be recipe, seed and config of a run")
    differences = _differences(there, identity)
    if differences:
        raise RunError(
            f"the run in {folder} has other settings, so it cannot be resumed with these: "
            + "; ".join(differences)
        )
    history, best, n_epochs = saved["history"], saved["best"], identity["config"]["epochs"]
    if not (
        isinstance(history, list)
        and len(history) <= n_epochs
        and all(_is_entry(entry, metric) for entry in history)
        and [entry["epoch"] for entry in history] == list(range(1, len(history) + 1))
    ):
        raise CheckpointError(
            f"{path}: history must list the metrics of each epoch, of {n_epochs} at most"
        )
    fits = _is_entry(best, metric) and best in history if history else best == {}
    if not fits:
        raise CheckpointError(f"{path}: best must be an entry of history, empty before the first")
    return saved


def _is_identity(x: Any) -> bool:
    return (
        isinstance(x, dict)
        and set(x) == {"recipe", "seed", "config"}
        and isinstance(x["config"], dict)
        and all(
            isinstance(value, (str, int, float))
            for value in (x["recipe"], x["seed"], *x["config"].values())
        )
    )


def _is_entry(x: Any, metric: str) -> bool:
    """Tell whether ``x`` is what was measured in an epoch."""
    return (
        isinstance(x, dict)
        and set(x) == {"epoch", *_measured(metric)}
        and type(x["epoch"]) is int
        and all(type(x[key]) is float and math.isfinite(x[key]) for key in _measured(metric))
    )


def _differences(there: dict, here: dict) -> list[str]:
    """Name what differs between the recipe, seed and settings of two runs."""
    if there["recipe"] != here["recipe"]:
        return [f"recipe is {there['recipe']} there, {here['recipe']} here"]
    flat = [{"seed": run["seed"], **run["config"]} for run in (there, here)]
    return [
        f"{key} is {flat[0].get(key, 'missing')} there, {flat[1].get(key, 'missing')} here"
        for key in flat[1] | flat[0]
        if flat[0].get(key) != flat[1].get(key)
    ]


class _Loop:
    """The epochs of one run and what is kept of them."""

    def __init__(self, training: Any, folder: Path, identity: dict):
        self.training = training
        self.folder = folder
        self.identity = identity
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] = {}
        self.best_model: dict[str, Any] = {}
        self.saved_at = time.monotonic()

    def train(self, n_epochs: int, stop: "_Stop", watch: Watch) -> None:
        # Entries that the checkpoint does not know are of epochs that are trained again.
        self._write_metrics()
        while len(self.history) < n_epochs and stop.signal is None:
            entry = self._epoch(watch)
            self._add_metrics(entry)
            if time.monotonic() - self.saved_at > _SECONDS_BETWEEN_SAVES:
                self.save()
            watch.epoch(entry)
        self.save()

    def _epoch(self, watch: Watch) -> dict[str, Any]:
        start = time.perf_counter()
        done = len(self.history)
        train_loss, train_metric = map(float, self.training.train_epoch(done, watch.progress))
        val_loss, val_metric = map(float, self.training.evaluate("val"))
        entry = {
            "epoch": done + 1,
            "train_loss": train_loss,
            "val_loss": val_loss,
            f"train_{self.training.metric}": train_metric,
            f"val_{self.training.metric}": val_metric,
            "epoch_ms": round(1000 * (time.perf_counter() - start), 3),
        }
        for key in ("train_loss", "val_loss"):
            if not math.isfinite(entry[key]):
                raise FloatingPointError(
                    f"{key} is {entry[key]} in epoch {entry['epoch']}: lower lr"
                )
        self.history.append(entry)
        rank = self.training.rank
        if not self.best or rank(entry) > rank(self.best):
            self.best = entry
            state = self.training.model.state_dict()
            self.best_model = {k: namespace(x).asarray(x, copy=True) for k, x in state.items()}
        return entry

    def save(self) -> None:
        state = {
            "identity": self.identity,
            "history": self.history,
            "best": self.best,
            "best_model": self.best_model,
            "training": self.training.state(),
            "random": random.default_generator().state_dict(),
        }
        save_checkpoint(self.folder / CHECKPOINT, state)
        self.saved_at = time.monotonic()

    def load(self, saved: dict[str, Any]) -> None:
        self.history = saved["history"]
        self.best = saved["best"]
        if self.history:
            self._take("best_model", saved, self.training.model.load_state_dict)
            self.best_model = saved["best_model"]
        self._take("training", saved, self.training.load_state)
        self._take("random", saved, random.default_generator().load_state_dict)

    def _take(self, name: str, saved: dict[str, Any], load: Callable[[Any], Any]) -> None:
        """Load a part of the checkpoint, whatever is in it."""
        try:
            load(saved[name])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            why = " ".join(str(error).split())
            raise CheckpointError(
                f"{self.folder / CHECKPOINT}: {name} does not fit: {why}"
            ) from error

    def finish(self, was_finished: bool) -> Result:
        """Test the best parameters and write them and the pictures, or what is missing of them."""
        from rtxarr.recipes._pictures import draw_curves

        training = self.training
        training.model.load_state_dict(self.best_model)
        test_metric = float(training.evaluate("test")[1])
        self.history[-1][f"test_{self.training.metric}"] = test_metric

        def lacks(*names: str) -> bool:
            return not (was_finished and all((self.folder / name).exists() for name in names))

        if (
            lacks(METRICS)
            or f"test_{self.training.metric}" not in (self.folder / METRICS).read_text()
        ):
            self._write_metrics()
        if lacks(MODEL):
            save_arrays(self.folder / MODEL, self.best_model)
        if lacks(CURVES):
            draw_curves(
                self.folder / CURVES,
                training.name,
                self.history,
                self.best,
                test_metric,
                training.baselines,
                self.training.metric,
            )
        notes = []
        if not training.files or lacks(*training.files):
            notes = training.finish(self.folder)
        return Result(self.history, self.best, test_metric, notes=notes, was_finished=was_finished)

    def _write_metrics(self) -> None:
        with atomic_write(self.folder / METRICS) as file:
            file.writelines(_line(entry).encode() for entry in self.history)

    def _add_metrics(self, entry: dict[str, Any]) -> None:
        path = self.folder / METRICS
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(_line(entry))
        except OSError as error:
            error.add_note(f"while writing {path}")
            raise


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, allow_nan=False) + "\n"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("rtxarr", "numpy", "scipy", "cupy-cuda12x", "cupy-cuda13x", "cupy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _one_blas_thread() -> Any:
    """Keep BLAS to one thread in a ``with`` block.

    The recipes' matrices are small: a second thread gains a tenth, costs twenty times the time when
    another process has its core, and makes the last bits depend on the number of cores.
    """
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        raise ImportError("recipes need threadpoolctl: pip install 'rtxarr[cli]'") from None
    return threadpool_limits(1, user_api="blas")


class _Stop:
    """Whether a signal has asked for the end, and whether the next one brings it at once."""

    signal: int | None = None
    at_once = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.at_once or self.signal is not None:
            raise KeyboardInterrupt(number)
        self.signal = number


@contextmanager
def _stopping() -> Iterator[_Stop]:
    """Turn SIGINT and SIGTERM into a wish; only the main thread may."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
