"""Working ahead of a loop: a thread for the host's part, a side stream for copies to a GPU."""

from __future__ import annotations

import contextvars
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import (
    Device,
    current_stream,
    device_of,
    empty_pinned,
    is_device_array,
    namespace,
    stream,
)
from rtxarr.data._tree import map_leaves


class Item(NamedTuple):
    """A result, the error that came instead of it, or neither: the end."""

    value: Any = None
    error: BaseException | None = None


END = Item()


class Prefetch:
    """The results of ``make(job)``, in the order of ``jobs``.

    Parameters
    ----------
    make : callable
    jobs : iterable
        Gone through in the thread.
    depth : int
        How many results the thread may be ahead; with 0 there is none. It starts with the first
        call of :meth:`get`, in a copy of the context of this call.
    """

    def __init__(self, make: Callable[[Any], Any], jobs: Iterable[Any], depth: int) -> None:
        self.closed = False
        self._items = _produce(make, jobs)
        self._results: queue.Queue[Item] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = None
        if depth:
            args = (_work, self._items, self._results, self._stop)
            run = contextvars.copy_context().run
            self._thread = threading.Thread(
                target=run, args=args, name="rtxarr-prefetch", daemon=True
            )

    def ready(self) -> bool:
        """Tell whether :meth:`get` would return at once."""
        return not self._results.empty()

    def get(self) -> Item:
        """Return the next item, waiting for it; not to be called again after END or an error."""
        if self.closed:
            return END
        if self._thread is None:
            return next(self._items)
        if self._thread.ident is None:
            self._thread.start()
        return self._results.get()

    def close(self) -> None:
        """Stop the thread and wait for it; what it has made is dropped."""
        self.closed = True
        self._stop.set()
        thread = self._thread
        # A daemon thread no longer runs when the interpreter goes down: joining it would hang.
        if thread is None or thread.ident is None or sys.is_finalizing():
            return
        with suppress(queue.Empty):  # a put that waits gets room; no other put follows it
            while True:
                self._results.get_nowait()
        thread.join()


def _produce(make: Callable[[Any], Any], jobs: Iterable[Any]) -> Iterator[Item]:
    item = Item(None)
    jobs = iter(jobs)
    while item is not END and item.error is None:
        try:
            job = next(jobs, END)
            item = END if job is END else Item(make(job))
        except BaseException as error:  # GeneratorExit too, of code that raises it
            item = Item(error=error)
        yield item


def _work(items: Iterator[Item], results: queue.Queue[Item], stop: threading.Event) -> None:
    for item in items:
        results.put(item)
        if stop.is_set():
            return


def in_turn(source: Prefetch) -> Generator[Item, None, None]:
    """Yield the items of ``source`` up to its end."""
    while (item := source.get()) is not END:
        yield item


# ------------------------------------------------------------------------ copies to a GPU


def is_movable(x: Any) -> bool:
    """Tell whether ``x`` is a NumPy array that a GPU can hold: no text, dates or objects."""
    return isinstance(x, np.ndarray) and x.dtype.kind not in "OSTUMm"


def pin(tree: Any) -> Any:
    """Copy NumPy arrays to page-locked memory, which a GPU reads beside the host's work."""

    def leaf(x: Any) -> Any:
        if is_device_array(x):  # made on this thread's stream: finish it before another uses it
            with device_of(x):
                current_stream().synchronize()
        if not is_movable(x):
            return x
        pinned = empty_pinned(x.shape, x.dtype)
        pinned[...] = x
        return pinned

    return map_leaves(tree, leaf)


def copied_ahead(source: Prefetch, device: Device, depth: int) -> Generator[Item, None, None]:
    """Yield the items of ``source`` up to its end, copied from pinned memory to ``device``.

    Up to ``depth`` copies are under way, on a side stream. Their memory belongs to the stream that
    is current here, as if the consumer had allocated it: a copy waits for the work queued before
    the allocation, and work queued after the item is handed out waits for the copy. The host
    waits only when it is more than ``depth`` copies ahead of the device.
    """
    with device:
        xp, side = namespace(), stream()

    def start(item: Item) -> tuple[Item, Any, list[np.ndarray]]:
        pairs: list[tuple[Any, np.ndarray]] = []

        def leaf(x: Any) -> Any:
            if not is_movable(x):
                return x
            pairs.append((xp.empty(x.shape, dtype=x.dtype), x))
            return pairs[-1][0]

        with device:
            value = map_leaves(item.value, leaf)
            side.wait_event(current_stream().record())
            for target, host in pairs:
                target.set(host, stream=side)
            return Item(value, item.error), side.record(), [host for _, host in pairs]

    waiting: deque[tuple[Item, Any, list[np.ndarray]]] = deque()
    # Pinned memory of items handed out while their copies were under way.
    reading: deque[tuple[Any, list[np.ndarray]]] = deque()
    ended = False
    try:
        while True:
            while not ended and len(waiting) < depth and (not waiting or source.ready()):
                item = source.get()
                ended = item is END or item.error is not None
                if item is not END:
                    waiting.append(start(item))
            if not waiting:
                return
            item, done, hosts = waiting.popleft()
            with device:
                current_stream().wait_event(done)
            reading.append((done, hosts))
            if len(reading) > depth:
                reading[0][0].synchronize()
                reading.popleft()
            yield item
    finally:
        side.synchronize()
