"""``rtx train``: from the options to a run, and from its end to words."""

import dataclasses
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rtxarr import recipes
from rtxarr._device import device as get_device
from rtxarr.autograd import CaptureError
from rtxarr.cli._info import gpu_name
from rtxarr.cli._progress import make_watch
from rtxarr.data import CheckpointError
from rtxarr.recipes import RunError

_RUNS = Path("runs")


def show_recipes(name: str | None = None) -> int:
    """Print the recipes, or one of them, with their settings; give the exit status."""
    try:
        kinds = [recipes.load(n) for n in ([name] if name else recipes.NAMES)]
    except ValueError as error:
        return _fail(error, 2)
    for kind in kinds:
        default = " (default)" if kind.name == recipes.NAMES[0] else ""
        print(f"{kind.name}{default}\n  {kind.__doc__.splitlines()[0]}")
        for field in dataclasses.fields(kind.Config):
            print(f"    {f'{field.name}={field.default}':<22} {field.metadata['doc']}")
    return 0


def is_setting(key: str) -> bool:
    """Tell whether one of the recipes has a setting of that name."""
    return any(
        field.name == key
        for name in recipes.NAMES
        for field in dataclasses.fields(recipes.load(name).Config)
    )


def train(
    name: str | None,
    *,
    device: str | None,
    seed: int | None,
    settings: list[str],
    resume: bool,
    out: Path | None,
    capture: bool | None = None,
    fuse: bool | None = None,
) -> int:
    """Run a recipe and print how it went; give the exit status.

    Parameters
    ----------
    name, device, seed, out : optional
        None for what was not said: the defaults, or what the resumed run has.
    settings : list of str
        ``key=value``.
    capture : bool, optional
        Whether to replay steps as CUDA graphs; None for where there is a GPU.
    fuse : bool, optional
        Whether to fuse the kernels of steps; None for what the recipe has on a GPU.
    """
    try:
        plan = _plan(name, device, seed, settings, resume, out)
    except (RuntimeError, TypeError, ValueError) as error:
        return _fail(error, 2)
    except OSError as error:
        return _fail(error, 1)
    start = time.perf_counter()
    where = f"{plan.device} {gpu_name(plan.device)}".rstrip()
    title = f"{plan.kind.name} on {where}, seed {plan.seed}, into {plan.folder}"
    command = f"rtx train --resume --out {shlex.quote(str(plan.folder))}"
    for option, said in (("capture", capture), ("fuse", fuse)):  # what the run's folder has not
        if said is not None:
            command += f" --{'' if said else 'no-'}{option}"
    try:
        with make_watch(title, plan.device, plan.kind.metric) as watch:
            result = recipes.run(
                plan.kind,
                plan.config,
                out=plan.folder,
                seed=plan.seed,
                device=plan.device,
                capture=capture,
                fuse=fuse,
                resume=resume,
                watch=watch,
            )
    except RunError as error:
        return _fail(error, 2)
    except (CheckpointError, FloatingPointError) as error:
        return _fail(error, 1)
    except CaptureError as error:
        error.add_note("train without CUDA graphs: --no-capture")
        return _fail(error, 1)
    except OSError as error:
        status = _fail(error, 1)
        if (plan.folder / recipes.CHECKPOINT).exists():
            print(f"go on from the last checkpoint with\n  {command}", file=sys.stderr)
        return status
    except KeyboardInterrupt as error:
        saved = (plan.folder / recipes.CHECKPOINT).exists()
        way_on = (
            f"go on from the last checkpoint with\n  {command}" if saved else "nothing is saved"
        )
        print(f"\nstopped at once; {way_on}")
        return 128 + (error.args[0] if error.args else signal.SIGINT)
    n_done = len(result.history)
    if result.signal is not None:
        number = signal.Signals(result.signal)
        word = "interrupted" if number == signal.SIGINT else number.name
        print(
            f"{word}: saved after epoch {n_done} of {plan.config.epochs}. Go on with\n  {command}"
        )
        return 128 + result.signal
    if result.was_finished:
        print(f"finished already: {n_done} of {plan.config.epochs} epochs")
    for note in result.notes:
        print(note)
    what = f"test {plan.kind.metric} {result.test_metric:.4f}"
    print(f"{what}, parameters of epoch {result.best['epoch']}")
    names = sorted(path.name for path in plan.folder.iterdir())
    files = ", ".join(name for name in names if not name.startswith("."))
    print(f"{time.perf_counter() - start:.1f} s; {plan.folder} has {files}")
    return 0


@dataclasses.dataclass
class _Plan:
    kind: Any
    config: Any
    seed: int
    device: Any
    folder: Path


def _plan(name, device, seed, settings, resume, out):
    """Fill what was not said with the defaults, or with what the resumed run has."""
    if resume:
        folder = out or _latest_run(name)
        there = recipes.read_identity(folder)
        kind = recipes.load(there["recipe"])
        try:
            config = kind.Config(**there["config"])
        except (TypeError, ValueError) as error:
            raise RunError(f"{folder / recipes.CONFIG}: {error}") from None
        if name is not None and recipes.load(name) is not kind:
            raise RunError(f"{folder} has a run of {kind.name}, not of {name}")
    else:
        there = {"seed": 0, "device": "auto"}
        kind = recipes.load(name or recipes.NAMES[0])
        config = kind.Config()
        folder = out
    config = dataclasses.replace(config, **recipes.parse_settings(kind.Config, settings))
    place = get_device(device or there["device"])
    return _Plan(
        kind,
        config,
        seed=there["seed"] if seed is None else seed,
        device=place,
        folder=folder or _new_folder(kind.name),
    )


def _new_folder(name: str) -> Path:
    """Make runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that is not there yet."""
    folder, number = _RUNS / name, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = _RUNS / f"{name}-{number}"


def _latest_run(name: str | None) -> Path:
    """Give the run below runs/ that was saved last, of one recipe or of any."""
    found = list(_RUNS.glob(f"*/{recipes.CHECKPOINT}"))
    if name is not None:
        recipes.load(name)
        found = [p for p in found if recipes.read_identity(p.parent)["recipe"] == name]
    if not found:
        what = f"run of {name}" if name else "run"
        raise RunError(f"there is no {what} below {_RUNS.absolute()} to resume; name it with --out")
    return max(found, key=lambda path: path.stat().st_mtime).parent


def _fail(error: Exception, status: int) -> int:
    """Print an error with its notes, which say which file it was; give the exit status."""
    print("; ".join([f"rtx: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
    return status
