"""How a run goes: a progress bar on a terminal, now and then a line elsewhere."""

import sys
import time
from contextlib import AbstractContextManager
from typing import Any

from rtxarr._device import Device, memory_stats
from rtxarr.recipes import Watch

# Lines of a whole run, when it is fast; at least one in so many seconds when it is slow.
_LINES = 10
_SECONDS = 15.0
# Columns that the bar with all its words takes, with short ones, and with its figures of training
# alone; where there are fewer, there is no bar either.
_WIDE, _SHORT, _SCARCE = 120, 76, 52


def make_watch(title: str, device: Device, metric: str) -> Any:
    """Give what tells the user, under a title, for a ``with`` block."""
    return (_Bar if _can_draw() else _Lines)(title, device, metric)


def _can_draw() -> bool:
    """Tell whether the output is a terminal, with the characters that rich draws with."""
    out = sys.stdout  # None when closed
    return out is not None and out.isatty() and out.encoding.lower().startswith("utf")


class _Lines(Watch, AbstractContextManager):
    """A line for the first epoch, the last, and some between."""

    def __init__(self, title: str, device: Device, metric: str):
        self.title, self.device, self.metric = title, device, metric

    def __exit__(self, *error: object) -> None:
        pass

    def begin(self, n_epochs: int, n_done: int) -> None:
        print(self.title, flush=True)
        self.n_epochs, self.first = n_epochs, n_done + 1
        self.started = self.printed = time.monotonic()

    def epoch(self, entry: dict[str, Any]) -> None:
        epoch, now = entry["epoch"], time.monotonic()
        due = epoch % max(1, self.n_epochs // _LINES) == 0 or now - self.printed > _SECONDS
        if due or epoch in (self.first, self.n_epochs):
            self.printed = now
            left = (now - self.started) / (epoch - self.first + 1) * (self.n_epochs - epoch)
            place = f"epoch {epoch:{len(str(self.n_epochs))}}/{self.n_epochs}"
            print(
                f"{place}  {_figures(entry, self.metric)}  "
                f"{left:.0f} s left  {_memory(self.device)}",
                flush=True,
            )


class _Bar(Watch, AbstractContextManager):
    """One line that is drawn again and again."""

    def __init__(self, title: str, device: Device, metric: str):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.title, self.device, self.metric = title, device, metric
        console = Console()
        self.narrow = console.width < _WIDE
        self.short = console.width < _SHORT
        columns = [
            TextColumn(("" if self.narrow else "epoch ") + "{task.fields[epoch]}/{task.total}"),
            BarColumn(bar_width=6 if self.narrow else 24),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[memory]}"),
        ]
        if self.short:
            del columns[4]
        if console.width < _SCARCE:
            del columns[1]
        self.bar = Progress(*columns, console=console)

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def begin(self, n_epochs: int, n_done: int) -> None:
        print(self.title)
        self.n_done = n_done
        self.task = self.bar.add_task(
            "", total=n_epochs, completed=n_done, epoch=n_done, figures="", memory=""
        )
        self.bar.start()

    def progress(self, fraction: float) -> None:
        self.bar.update(self.task, completed=self.n_done + fraction)

    def epoch(self, entry: dict[str, Any]) -> None:
        self.n_done = entry["epoch"]
        self.bar.update(
            self.task,
            completed=self.n_done,
            epoch=self.n_done,
            figures=_figures(entry, self.metric, short=self.short),
            memory=_memory(self.device, short=self.narrow),
        )


def _figures(entry: dict[str, Any], metric: str, *, short: bool = False) -> str:
    if short:
        return f"loss {entry['train_loss']:.3f} {metric} {entry[f'train_{metric}']:.3f}"
    return (
        f"loss {entry['train_loss']:.3f} val {entry['val_loss']:.3f}  "
        f"{metric} {entry[f'train_{metric}']:.3f} val {entry[f'val_{metric}']:.3f}"
    )


def _memory(device: Device, *, short: bool = False) -> str:
    used = f"{memory_stats(device)['used'] / 2**20:,.0f} MiB"
    return used if short else f"{used} on {device}"
