"""Sliding windows over spatial axes: their geometry, and what each of their taps reads."""

import functools
import itertools
import math
from typing import NamedTuple

from rtxarr._device import is_device_array
from rtxarr._override import tracing

# How many elements a buffer may get: what fits a core's cache, or fills a GPU.
_BUFFER_SIZE_CPU, _BUFFER_SIZE_GPU = 2**19, 2**26


class Windows(NamedTuple):
    """Geometry of the windows, one entry for each spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # before and after
    dilation: tuple[int, ...]

    @property
    def n_taps(self):
        return math.prod(self.kernel)

    @property
    def trivial(self):
        """Whether each window is one element, and each element a window."""
        return self.n_taps == 1 and set(self.stride) == {1} and set(self.padding) == {(0, 0)}

    def spans(self):
        """How many elements a window reaches over, holes included."""
        return [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]

    def counts(self, spatial):
        """How many windows fit along each axis of an input of shape ``spatial``."""
        return tuple(
            (n + sum(pair) - span) // s + 1
            for n, pair, span, s in zip(
                spatial, self.padding, self.spans(), self.stride, strict=True
            )
        )

    def check_fit(self, spatial, name):
        """Raise ValueError unless at least one window fits."""
        for n, pair, span in zip(spatial, self.padding, self.spans(), strict=True):
            if span > n + sum(pair):
                raise ValueError(
                    f"{name} must fit into the padded input, got windows reaching over "
                    f"{tuple(self.spans())} elements for spatial shape {tuple(spatial)} padded "
                    f"by {self.padding}"
                )

    def taps(self, spatial):
        """Give, for each tap that reads anything, its number, the windows and what they read.

        A tuple of ``(tap, windows, elements)``, the latter two tuples of slices: what lies in
        the padding is left out.
        """
        return _taps(self, tuple(spatial))


@functools.lru_cache(maxsize=256)
def _taps(windows, spatial):
    axes = [
        list(_axis_taps(*geometry))
        for geometry in zip(spatial, windows.counts(spatial), *windows, strict=True)
    ]
    numbers = itertools.product(*map(range, windows.kernel))
    tap_of = {place: tap for tap, place in enumerate(numbers)}
    return tuple(
        (tap_of[place], slices, elements)
        for place, slices, elements in (
            zip(*parts, strict=True) for parts in itertools.product(*axes)
        )
    )


def _axis_taps(n, count, kernel, stride, padding, dilation):
    """Yield ``(tap, windows, elements)`` along one axis."""
    for k in range(kernel):
        shift = k * dilation - padding[0]  # window i reads element i * stride + shift
        first = max(0, -(shift // stride))
        last = min(count, (n - 1 - shift) // stride + 1)
        if first < last:
            start = first * stride + shift
            yield (
                k,
                slice(first, last),
                slice(start, start + (last - first - 1) * stride + 1, stride),
            )


def per_axis(name, value, n_axes, least):
    """Give an int, or one for each spatial axis, as a tuple; refuse anything below ``least``."""
    values = (value,) * n_axes if isinstance(value, int) else value
    if (
        not isinstance(values, (tuple, list))
        or len(values) != n_axes
        or not all(isinstance(v, int) and v >= least for v in values)
    ):
        raise ValueError(f"{name} must be an int >= {least} or {n_axes} of them, got {value!r}")
    return tuple(values)


def make_windows(kernel, spatial, stride, padding, dilation):
    """Check and complete the geometry of windows over an input of shape ``spatial``."""
    n_axes = len(kernel)
    stride = per_axis("stride", stride, n_axes, 1)
    dilation = per_axis("dilation", dilation, n_axes, 1)
    if padding == "valid":
        padding = 0
    if padding == "same":
        pairs = []
        for n, k, s, d in zip(spatial, kernel, stride, dilation, strict=True):
            total = max(((n - 1) // s) * s + d * (k - 1) + 1 - n, 0)
            pairs.append((total // 2, total - total // 2))
    elif isinstance(padding, str):
        raise ValueError(f"padding must be an int, a tuple, 'same' or 'valid', got {padding!r}")
    else:
        pairs = [(p, p) for p in per_axis("padding", padding, n_axes, 0)]
    return Windows(tuple(kernel), stride, tuple(pairs), dilation)


def buffer_size(array):
    """How many elements an intermediate buffer beside ``array`` should have at most."""
    trace = tracing()
    on_gpu = is_device_array(array) if trace is None else not trace.on_numpy
    return _BUFFER_SIZE_GPU if on_gpu else _BUFFER_SIZE_CPU


def batches(n, item_size, array):
    """Cut a batch of ``n`` into even slices whose buffers, ``item_size`` an item, stay small."""
    pieces = max(1, min(n, math.ceil(n * item_size / buffer_size(array))))
    step = math.ceil(n / pieces)
    for start in range(0, n, step or 1):
        yield slice(start, min(start + step, n))


AXES = {1: "width", 2: "height, width", 3: "depth, height, width"}


def for_axes(function, name, doc, n_axes):
    """Name and document a function that a factory made for ``n_axes`` spatial axes."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc.format(axes=AXES[n_axes], n_axes=n_axes)
    return function


def check_spatial(x, n_axes):
    """Raise ValueError unless ``x`` is a batch of channels over ``n_axes`` spatial axes."""
    if x.ndim != n_axes + 2:
        raise ValueError(f"x must have shape (batch, channels, {AXES[n_axes]}), got {x.shape}")
