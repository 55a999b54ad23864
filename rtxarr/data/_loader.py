"""Batches of a dataset: in a seeded order, prefetched, and resumable to the sample."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._device import (
    Device,
    device_of,
    empty_pinned,
    is_array,
    is_device_array,
    namespace,
    to_device,
)
from rtxarr.autograd._tape import raw
from rtxarr.data._prefetch import Prefetch, copied_ahead, in_turn, is_movable, pin
from rtxarr.data._tree import map_leaves
from rtxarr.random import Generator

# What the loader draws for: part of the generators' keys.
_ORDER, _TRANSFORM = 0, 1


class DataLoader:
    """Batches of a dataset, epoch after epoch.

    The order of epoch ``e`` depends on ``seed`` and ``e`` alone. A loop runs to the end of the
    current epoch; where it was left early (``break``, an error), the next loop goes on. So what a
    loader gives next follows from :meth:`state_dict`, however far it has read ahead.

    Parameters
    ----------
    dataset : array, tuple or dict of arrays, or any object with ``__len__`` and ``__getitem__``
        Arrays (or Tensors, for their data) are indexed along their first axis, which must have one
        length. An object, and so a list, is indexed with ints in ``range(len(dataset))`` and
        returns a sample: an array or number, or a tuple or dict of them.
    batch_size : int, at least 1
    shuffle : bool, default True
        Whether each epoch has an order of its own; otherwise all have the dataset's.
    seed : int, default 0
    drop_last : bool, default False
        Leave out a last batch that is smaller than ``batch_size``.
    device : str or Device, optional
        Where batches go. By default the GPU that the dataset's arrays are on, else the current
        device. Copies to a GPU run beside the work on earlier batches.
    prefetch : int, default 2
        How many batches a background thread prepares ahead; with 0 there is none. Arrays on a
        GPU are indexed there, without a thread.
    collate : callable, optional
        Makes a batch of a list of samples. By default arrays and numbers are stacked, field by
        field in tuples and dicts; anything else becomes a list.
    transform : callable, optional
        Called as ``transform(sample)``, before ``collate`` and in the background thread. One that
        requires two arguments gets as the second a :class:`~rtxarr.random.Generator` that
        depends on ``seed``, the epoch and the sample's index alone, so that random augmentation
        is resumed too.

    Notes
    -----
    ``len(loader)`` is the number of batches of a whole epoch.

    In the background thread the current device is the CPU. An error there is raised in the loop
    that asks for the batch, with a note that names the sample. The thread ends with its loop.
    Two loops at once need two loaders: a new loop ends the one in progress.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr.data import DataLoader
    >>> x, y = np.arange(10.0), np.arange(10)
    >>> loader = DataLoader((x, y), 4, seed=1, device="cpu")
    >>> [len(labels) for _, labels in loader]
    [4, 4, 2]
    >>> loader.state_dict()
    {'epoch': 1, 'position': 0, 'seed': 1, 'n_samples': 10}
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        device: str | Device | None = None,
        prefetch: int = 2,
        collate: Callable[[list], Any] | None = None,
        transform: Callable[..., Any] | None = None,
    ) -> None:
        self._arrays = _find_arrays(dataset)
        self.dataset = map_leaves(dataset, raw) if self._arrays else dataset
        self.batch_size = _integer("batch_size", batch_size, 1)
        self.shuffle = shuffle
        self.seed = _integer("seed", seed, 0, 2**64)
        self.drop_last = drop_last
        self.prefetch = _integer("prefetch", prefetch, 0)
        self.collate = collate
        self.transform = transform
        if transform is None and collate is None and batch_size > 1:
            _refuse_fields(dataset)
        self._transform_draws = transform is not None and _n_required(transform) > 1
        self.n_samples = _count_samples(dataset, self._arrays)
        if drop_last and self.n_samples < self.batch_size:
            raise ValueError(
                f"batch_size must be at most {self.n_samples}, the number of samples, with "
                f"drop_last, got {self.batch_size}: there would be no batch"
            )
        on_gpu = bool(self._arrays) and is_device_array(self._arrays[0])
        self._home = device_of(self._arrays[0]) if on_gpu else _device.device("cpu")
        self.device = self._home if on_gpu and device is None else _device.device(device)
        self._copies_ahead = self.prefetch > 0 and not on_gpu and self.device != "cpu"
        self._epoch = 0
        self._position = 0
        self._source: Prefetch | None = None  # of the loop in progress

    def __repr__(self) -> str:
        return (
            f"DataLoader({self.n_samples} samples, batch_size={self.batch_size}, "
            f"device={str(self.device)!r}, epoch={self._epoch}, position={self._position})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: all but the loop in progress."""
        return {**self.__dict__, "_source": None}

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return len(self._begins(0))

    @property
    def epoch(self) -> int:
        """The epoch that the next loop works on, from 0."""
        return self._epoch

    def state_dict(self) -> dict[str, int]:
        """Return where the loader stands, in JSON's terms.

        Returns
        -------
        dict
            ``epoch``; ``position``, the number of its samples that have been handed out (those
            only prefetched do not count); ``seed`` and ``n_samples``, which must agree on loading.
        """
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self.seed,
            "n_samples": self.n_samples,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to where another loader of the same data stood, ending a loop in progress.

        ``batch_size`` may differ, since positions count samples. A state taken inside a
        loop's last round leaves nothing of that epoch: the next loop is empty, the one after it
        whole.
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError(
                f"state must have the keys {list(self.state_dict())}, got {list(state)}"
            )
        for name, own in (("seed", self.seed), ("n_samples", self.n_samples)):
            if state[name] != own:
                raise ValueError(f"{name} in state must be this loader's {own}, got {state[name]}")
        epoch = _integer("epoch", state["epoch"], 0, 2**63)
        position = _integer("position", state["position"], 0)
        if position > self.n_samples:
            raise ValueError(f"position must be at most {self.n_samples}, got {position}")
        self.close()
        self._epoch, self._position = epoch, position

    def close(self) -> None:
        """End the loop in progress, if there is one, and its thread."""
        if self._source is None:
            return
        self._source.close()
        self._source = None
        if not self._begins(self._position):  # it gave all it had, even if it was left by break
            self._epoch += 1
            self._position = 0

    def __iter__(self) -> Iterator[Any]:
        self.close()
        depth = self.prefetch if self._home == "cpu" else 0
        source = Prefetch(self._make, self._jobs(self._epoch, self._position), depth)
        self._source = source
        ahead = self._copies_ahead
        items = copied_ahead(source, self.device, depth) if ahead else in_turn(source)
        try:
            for item in items:
                if source.closed:
                    break
                if item.error is not None:
                    raise item.error
                n_samples, batch = item.value
                self._position += n_samples
                yield batch
            if source.closed:
                raise RuntimeError(
                    "this loop has ended: another began on the same DataLoader, or it was closed"
                )
        finally:
            items.close()
            if self._source is source:
                self.close()

    def _begins(self, position: int) -> range:
        n_left = self.n_samples - position
        if self.drop_last:
            n_left -= n_left % self.batch_size
        return range(position, position + n_left, self.batch_size)

    def _jobs(self, epoch: int, position: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the epoch and the sample indices of each batch."""
        order = np.arange(self.n_samples)
        if self.shuffle:
            rng = Generator(self.seed, key=(_ORDER, epoch))
            order = rng.permutation(self.n_samples, device="cpu")
        for begin in self._begins(position):
            yield epoch, order[begin : begin + self.batch_size]

    def _make(self, job: tuple[int, np.ndarray]) -> tuple[int, Any]:
        """Return the size of a batch and the batch, on its device unless it is copied later."""
        epoch, indices = job
        with self._home:
            if self._arrays and self.transform is None and self.collate is None:
                take = _take_pinned if self._copies_ahead else _take
                batch = map_leaves(self.dataset, lambda x: take(x, indices))
            else:
                samples = [self._sample(epoch, i) for i in indices.tolist()]
                try:
                    batch = (self.collate or _stack)(samples)
                except BaseException as error:
                    error.add_note(f"while making a batch of the samples {indices.tolist()}")
                    raise
                if self._copies_ahead:
                    batch = pin(batch)
        return len(indices), batch if self._copies_ahead else map_leaves(batch, self._place)

    def _sample(self, epoch: int, index: int) -> Any:
        try:
            if self._arrays:
                sample = map_leaves(self.dataset, lambda x: x[index])
            else:
                sample = self.dataset[index]
            if self.transform is None:
                return sample
            if not self._transform_draws:
                return self.transform(sample)
            rng = Generator(self.seed, key=(_TRANSFORM, epoch, index))
            return self.transform(sample, rng)
        except BaseException as error:
            error.add_note(f"while loading sample {index} in epoch {epoch}")
            raise

    def _place(self, x: Any) -> Any:
        return to_device(x, self.device) if is_movable(x) or is_device_array(x) else x


def _integer(name: str, value: Any, least: int, end: int | None = None) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if end is not None and value >= end:
        raise ValueError(f"{name} must be less than {end}, got {value}")
    return operator.index(value)


def _n_required(function: Callable[..., Any]) -> int:
    """Return how many positional arguments a call needs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some builtins do not tell
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def _find_arrays(dataset: Any) -> list[Any]:
    """Return the arrays of a dataset that consists of arrays; else nothing."""
    if isinstance(dataset, Mapping):
        arrays = list(dataset.values())
        if not arrays or not all(map(is_array, arrays)):
            kinds = ", ".join(type(x).__name__ for x in arrays) or "nothing"
            raise TypeError(f"a dict as dataset must hold arrays, got {kinds}")
    elif isinstance(dataset, tuple) and dataset and all(map(is_array, dataset)):
        arrays = list(dataset)
    else:
        arrays = [dataset] if is_array(dataset) else []
    arrays = [raw(x) for x in arrays]
    namespace(*arrays)  # refuses arrays of two libraries
    return arrays


def _refuse_fields(dataset: Any) -> None:
    """Refuse a list of arrays of one length that are no samples to stack: ``[x, y]``."""
    if not (isinstance(dataset, list) and len(dataset) > 1 and all(map(is_array, dataset))):
        return
    arrays = [raw(x) for x in dataset]
    lengths = {x.shape[:1] for x in arrays}
    if len(lengths) == 1 and len({(x.shape, x.dtype) for x in arrays}) > 1:
        raise TypeError(
            "dataset must be a tuple or dict of arrays of one length, got a list of them, which "
            f"means {len(arrays)} samples: write (x, y) for [x, y]"
        )


def _count_samples(dataset: Any, arrays: list[Any]) -> int:
    if not arrays:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(
                "dataset must be an array, a tuple or dict of arrays, or have __len__ and "
                f"__getitem__, got {type(dataset).__name__}"
            )
        return len(dataset)
    if any(x.ndim == 0 for x in arrays):
        raise ValueError("arrays of dataset must have a first axis to index, got one of shape ()")
    lengths = {x.shape[0] for x in arrays}
    if len(lengths) > 1:
        raise ValueError(f"arrays of dataset must have one length, got {sorted(lengths)}")
    return lengths.pop()


def _take(x: Any, indices: np.ndarray) -> Any:
    xp = namespace(x)
    return xp.take(x, xp.asarray(indices), axis=0)


def _take_pinned(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    if not is_movable(x):
        return _take(x, indices)
    out = empty_pinned((len(indices), *x.shape[1:]), x.dtype)
    return np.take(x, indices, axis=0, out=out, mode="clip")  # "raise" would buffer the result


def _stack(samples: list[Any]) -> Any:
    """Join samples along a new first axis, field by field."""
    samples = [raw(sample) for sample in samples]
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: _stack([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple):
        return tuple(_stack(list(field)) for field in zip(*samples, strict=True))
    if isinstance(first, (bool, int, float, complex, np.generic)):
        return np.asarray(samples)
    if is_array(first):
        return namespace(*samples).stack(samples)
    return samples
