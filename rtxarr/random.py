"""Random numbers from counters: the same bits on the CPU and on every GPU.

A :class:`Generator` is a key and a counter. Value ``i`` of a draw depends on the key, on the
counter when the draw began, and on ``i``, and on nothing else: not on the device, the number of
threads or how a draw is cut into pieces. A draw of float32, float16, bfloat16 or bool values takes
one 32-bit word a value; one of float64 values or integers takes two, from an even counter. The
words come from Philox-4x32-10; see ``rtxarr.kernels.philox`` for their order.

In place of ``np.random.default_rng(0).normal(0.0, 1.0, size=5)`` write
``Generator(0).normal(5, 0.0, 1.0)``: the shape comes first. Dropout and the first values of layers
come from :func:`default_generator` unless they are given another.

Examples
--------
>>> from rtxarr.random import Generator
>>> rng = Generator(0)
>>> rng.integers(0, 10, (5,), device="cpu")
array([8, 6, 3, 0, 3])
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from rtxarr import _device, _override, _replay
from rtxarr._names import no_attribute
from rtxarr._random_place import Place, advanced
from rtxarr.dtypes import as_dtype, bfloat16
from rtxarr.kernels import philox

__all__ = ["Generator", "default_generator", "record_draws", "replay_draws", "seed"]

_U = np.uint64
_ALGORITHM = "philox4x32-10"
_FLOATS = tuple(np.dtype(t) for t in (np.float16, bfloat16, np.float32, np.float64))
_SPAWN = 2**64 - 1  # child number that leads to the spawned ones; explicit keys are smaller

# Guards the counters: a draw reserves its words before it makes them.
_lock = threading.Lock()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.logs: list[dict[Generator, Place]] = []  # of each record_draws() that it is inside of
        self.replayed: dict[Generator, Place] = {}  # where it has set generators back to


_thread = _Thread()


class _Pieces:
    """A mask that is drawn in pieces, and where its words are."""

    def __init__(self, draw: Callable[..., Any], place: Any) -> None:
        self._draw = draw
        self.place = place

    def __call__(self, start: int, shape: int | tuple[int, ...], device: Any = None) -> Any:
        return self._draw(start, shape, device)


class Generator:
    """A stream of random numbers.

    Parameters
    ----------
    seed : int in [0, 2**64)
    key : int or tuple of int in [0, 2**63), default ()
        Names one of the seed's independent streams: ``Generator(seed, key=(epoch, index))`` gives
        the same numbers wherever and whenever it is made.

    Notes
    -----
    All methods that draw take ``device``, a device or its name, for where the result is to be;
    by default the current device. ``shape`` is an int or a tuple of ints.
    """

    def __init__(self, seed: int, *, key: int | tuple[int, ...] = ()) -> None:
        pair = _U(_integer("seed", seed, 0, 2**64)), _U(0)
        for number in key if isinstance(key, tuple) else (key,):
            pair = philox.derive(*pair, _integer("key", number, 0, 2**63))
        self._own = Place(*pair)
        self._made_by = _override.tracing()  # it starts anew whenever that function runs
        if _replay.recorder() is not None:  # made anew in each replay
            _replay.on_replay(functools.partial(self._restart, self._own.copy()))

    def _restart(self, place: Place) -> None:
        self._own = place.copy()

    def __repr__(self) -> str:
        place = self._place()
        return f"<Generator {_ALGORITHM} key {int(place.key):016x} at {place.offset}>"

    def _place(self) -> Place:
        """Return where this thread stands in the stream."""
        return _thread.replayed.get(self, self._own)

    def _log(self) -> None:
        """Note where the stream stands before it is first used; the lock is held."""
        for log in _thread.logs:
            if self not in log:
                log[self] = self._place().copy()
                _replay.on_replay(functools.partial(_follow, log[self], self._follower()))

    def _follower(self) -> Callable[[], Place]:
        """Return what gives this thread's place in the stream whenever it is called."""
        replayed = _thread.replayed.get(self)
        return lambda: self._own if replayed is None else replayed

    # -------------------------------------------------------------------------------- streams

    def spawn(self, n: int) -> list[Generator]:
        """Return ``n`` new generators, independent of this one and of each other."""
        n = _integer("n", n, 0, 2**63)
        if self._trace() is not None:
            self._trace().refuse("it makes generators of another, new ones at each call")
        with _lock:
            self._log()
            place = self._place()
            first = place.spawned
            place.spawned += n
        children = [Generator(0) for _ in range(n)]
        _place_children(children, place, first)
        if _replay.recorder() is not None:
            follow = self._follower()

            def again() -> None:
                with _lock:
                    place = follow()
                    first = place.spawned
                    place.spawned += n
                _place_children(children, place, first)

            _replay.on_replay(again)
            _replay.on_failure(functools.partial(setattr, place, "spawned", first))
        return children

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dict of ints and a name, fit for JSON."""
        if self._trace() is not None:
            self._trace().refuse("it asks where a generator stands")
        place = self._place()
        return {
            "algorithm": _ALGORITHM,
            "key": int(place.key),
            "stream": int(place.stream),
            "offset": place.offset,
            "spawned": place.spawned,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from where the generator was when it gave ``state``."""
        expected = {"algorithm", "key", "stream", "offset", "spawned"}
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a dict, got {type(state).__name__}")
        if set(state) != expected:
            raise ValueError(f"state must have the keys {sorted(expected)}, got {sorted(state)}")
        if state["algorithm"] != _ALGORITHM:
            raise ValueError(f"algorithm must be {_ALGORITHM!r}, got {state['algorithm']!r}")
        numbers = {name: _integer(name, state[name], 0, 2**64) for name in expected - {"algorithm"}}
        if self._trace() is not None:
            self._trace().refuse("it sets a generator to another place")
        loaded = Place(
            _U(numbers["key"]), _U(numbers["stream"]), numbers["offset"], numbers["spawned"]
        )
        with _lock:
            self._log()
            if self in _thread.replayed:
                _thread.replayed[self] = loaded
                return
            if (step := _replay.recorder()) is not None:
                _replay.on_failure(functools.partial(setattr, self, "_own", self._own))
                _replay.on_replay(functools.partial(self._restart, loaded.copy()))
                step.cursors.pop(self, None)
            self._own = loaded

    def _reserve(self, kind: str, n: int) -> tuple[Place, int]:
        """Move the counter past ``n`` values; return whose it is and where they begin."""
        with _lock:
            if _thread.logs:
                self._log()
            place = self._place()
            start = place.advance(kind, n)
        return place, start

    def _reserve_in_memory(self, kind: str, n: int) -> Any:
        """Do the same in each replay of the step being captured; return the place on the GPU."""
        step: Any = _replay.recorder()
        if step.depth or self in step.cursors:
            return self._reserve_on_gpu(kind, n, step)
        with _lock:
            self._log()
        follow = self._follower()
        before = follow()
        _replay.on_failure(functools.partial(before.go_to, before.copy()))

        def make() -> np.ndarray:
            with _lock:
                place = follow()
                return np.array([place.advance(kind, n), place.stream, place.key], _U)

        return _replay.from_host(make)

    def _reserve_on_gpu(self, kind: str, n: int, step: _replay.Recorder) -> Any:
        """Do the same in a branch or loop that the GPU decides, and after one: it counts."""
        if _thread.logs or self in _thread.replayed:
            raise _replay.OncePerStep("draws random numbers that are to be drawn again")
        cursor = step.cursors.get(self)
        if cursor is None:
            cursor = _replay.Cursor()
            _replay.on_failure(functools.partial(self._own.go_to, self._own.copy()))

            def make() -> np.ndarray:
                with _lock:
                    return self._own.hand_over(cursor)

            cursor.words = _replay.from_host(make)
            step.cursors[self] = cursor
        return advanced(cursor.words, n, philox.words_per_value(kind))

    def _trace(self) -> Any:
        """Return the trace that is to do the drawing, or None."""
        trace = _override.tracing()
        return None if trace is self._made_by else trace

    def _draw(self, kind: str, shape: Any, dtype: Any, params: tuple, device: Any) -> Any:
        shape = _shape(shape)
        n = math.prod(shape)
        target = _device.device(device)
        trace = self._trace()
        if trace is not None:
            draw = trace.draws.reserve(self, kind, n)
            return draw(n, np.dtype(dtype), params, target).reshape(shape)
        if target.kind == "cuda" and _replay.recorder() is not None:
            _require_current(target)
            at = self._reserve_in_memory(kind, n)
            values = philox.fill_from_memory(kind, n, np.dtype(dtype), params, place=at)
            return values.reshape(shape)
        place, start = self._reserve(kind, n)
        values = philox.fill(
            kind,
            n,
            np.dtype(dtype),
            params,
            key=place.key,
            stream=place.stream,
            offset=start,
            device=target,
            words=place.words,
        )
        return values.reshape(shape)

    # -------------------------------------------------------------------- continuous numbers

    def uniform(
        self,
        shape: int | tuple[int, ...],
        low: float = 0.0,
        high: float = 1.0,
        *,
        dtype: Any = np.float64,
        device: Any = None,
    ) -> Any:
        """Draw uniform numbers in [low, high).

        Parameters
        ----------
        shape : int or tuple of int
        low, high : float
            Finite, ``low < high``.
        dtype : floating dtype, default float64
            float64 draws have 53 random bits, float32 draws 24; half types round those.
        device : Device or str, optional

        Returns
        -------
        array of ``dtype``, shape ``shape``
        """
        dtype = _float_dtype(dtype)
        low, high = _real("low", low), _real("high", high)
        if not (low < high and math.isfinite(high - low)):
            raise ValueError(f"low must be less than high, both finite, got {low} and {high}")
        first, last = _round_inward(low, dtype, up=True), _round_inward(high, dtype, up=False)
        if last == high:
            last = _next(last, -math.inf, dtype)
        if first > last:
            raise ValueError(f"no {dtype} number lies in [{low}, {high})")
        kind, scalar = ("uniform64", float) if dtype == np.float64 else ("uniform32", np.float32)
        params = tuple(scalar(x) for x in (high - low, low, first, last))
        return self._draw(kind, shape, dtype, params, device)

    def normal(
        self,
        shape: int | tuple[int, ...],
        mean: float = 0.0,
        std: float = 1.0,
        *,
        dtype: Any = np.float64,
        device: Any = None,
    ) -> Any:
        """Draw from the normal distribution, by the inverse of its distribution function.

        Parameters
        ----------
        shape : int or tuple of int
        mean : float
        std : float, at least 0
        dtype : floating dtype, default float64
            Computed in float64 and rounded; float64 draws reach 8.2 standard deviations, narrower
            ones 6.3.
        device : Device or str, optional

        Returns
        -------
        array of ``dtype``, shape ``shape``
        """
        dtype = _float_dtype(dtype)
        mean, std = _finite("mean", mean), _finite("std", std)
        if std < 0:
            raise ValueError(f"std must not be negative, got {std}")
        params = (0.0, 1.0, std, mean, -math.inf, math.inf)
        return self._draw(_sized("normal", dtype), shape, dtype, params, device)

    def truncated_normal(
        self,
        shape: int | tuple[int, ...],
        mean: float = 0.0,
        std: float = 1.0,
        low: float = -2.0,
        high: float = 2.0,
        *,
        dtype: Any = np.float64,
        device: Any = None,
    ) -> Any:
        """Draw from the normal distribution given that the number lies in [low, high].

        Parameters
        ----------
        shape : int or tuple of int
        mean : float
        std : float, more than 0
        low, high : float, ``low < high``
            Bounds of the numbers themselves; may be infinite.
        dtype : floating dtype, default float64
        device : Device or str, optional

        Returns
        -------
        array of ``dtype``, shape ``shape``
        """
        dtype = _float_dtype(dtype)
        mean, std = _finite("mean", mean), _finite("std", std)
        low, high = _real("low", low), _real("high", high)
        if std <= 0:
            raise ValueError(f"std must be positive, got {std}")
        if not low < high:
            raise ValueError(f"low must be less than high, got {low} and {high}")
        first, last = _round_inward(low, dtype, up=True), _round_inward(high, dtype, up=False)
        a, b, sign = (low - mean) / std, (high - mean) / std, 1.0
        if a + b > 0:  # the lower tail's probabilities keep more digits
            a, b, sign = -b, -a, -1.0
        start = math.erfc(-a / math.sqrt(2)) / 2
        width = math.erfc(-b / math.sqrt(2)) / 2 - start
        if width < 1e-290 or first > last:
            raise ValueError(
                f"[{low}, {high}] must hold some of the normal distribution with mean {mean} and "
                f"std {std}"
            )
        params = (start, width, sign * std, mean, first, last)
        return self._draw(_sized("normal", dtype), shape, dtype, params, device)

    def exponential(
        self,
        shape: int | tuple[int, ...],
        scale: float = 1.0,
        *,
        dtype: Any = np.float64,
        device: Any = None,
    ) -> Any:
        """Draw from the exponential distribution with mean ``scale`` (not negative)."""
        dtype = _float_dtype(dtype)
        scale = _finite("scale", scale)
        if scale < 0:
            raise ValueError(f"scale must not be negative, got {scale}")
        return self._draw(_sized("exponential", dtype), shape, dtype, (scale,), device)

    # ---------------------------------------------------------------------- discrete numbers

    def integers(
        self,
        low: int,
        high: int,
        shape: int | tuple[int, ...] = (),
        *,
        dtype: Any = np.int64,
        device: Any = None,
    ) -> Any:
        """Draw integers in [low, high), all equally likely.

        Parameters
        ----------
        low, high : int
            ``low < high``; both ends must fit in ``dtype``.
        shape : int or tuple of int
        dtype : integer dtype, default int64
        device : Device or str, optional

        Returns
        -------
        array of ``dtype``, shape ``shape``
        """
        dtype = as_dtype(dtype)
        if dtype.kind not in "iu":
            raise TypeError(f"dtype must be an integer type, got {dtype}")
        limits = np.iinfo(dtype)
        low = _integer("low", low, limits.min, limits.max + 1)
        high = _integer("high", high, limits.min, limits.max + 2)
        if low >= high:
            raise ValueError(f"low must be less than high, got {low} and {high}")
        kind, scalar = ("signed64", np.int64) if dtype.kind == "i" else ("unsigned64", _U)
        span = _U((high - low) % 2**64)  # all 2**64 are written as 0
        return self._draw(kind, shape, dtype, (span, scalar(low)), device)

    def bernoulli(
        self, p: Any, shape: int | tuple[int, ...] | None = None, *, device: Any = None
    ) -> Any:
        """Draw booleans that are True with probability ``p``.

        Parameters
        ----------
        p : float in [0, 1], or array of floats
            A float is taken to 32 bits. An array gives each element's probability; it fixes the
            shape and the device, and on a GPU its range is not checked.
        shape : int or tuple of int, optional
            Only with a float; () by default.
        device : Device or str, optional
            Only with a float.

        Returns
        -------
        array of bool
        """
        if not _device.is_array(p) or p.ndim == 0:
            p = _probability("p", p)
            return self._mask(() if shape is None else shape, p, device)
        if shape is not None or device is not None:
            raise ValueError("shape and device must be left out when p is an array")
        if isinstance(p, np.ndarray) and not ((p >= 0) & (p <= 1)).all():
            raise ValueError(f"p must lie in [0, 1], got values from {p.min()} to {p.max()}")
        return self.uniform(p.shape, device=_device.device_of(p)) < p

    def dropout_mask(self, shape: int | tuple[int, ...], rate: float, *, device: Any = None) -> Any:
        """Draw booleans that are False with probability ``rate``: what dropout keeps.

        Parameters
        ----------
        shape : int or tuple of int
        rate : float in [0, 1]
        device : Device or str, optional

        Returns
        -------
        array of bool, shape ``shape``
        """
        return self._mask(shape, 1.0 - _probability("rate", rate), device)

    def dropout_mask_pieces(self, n: int, rate: float) -> Callable[..., Any]:
        """Set ``n`` booleans of :meth:`dropout_mask` aside, to be drawn in pieces when needed.

        Parameters
        ----------
        n : int
        rate : float in [0, 1]

        Returns
        -------
        callable
            ``piece(start, shape, device=None)`` draws those from the ``start``-th on, the same
            each time, as an array of ``shape``. Its attribute ``place`` is what
            :meth:`dropout_place` gives, None in a function that is being traced.
        """
        n = _integer("n", n, 0, 2**63)
        params = (_U(round((1.0 - _probability("rate", rate)) * 2**32)),)
        trace = self._trace()
        if trace is not None:
            draw = trace.draws.reserve(self, "below32", n)

            def traced_piece(start: int, shape: Any, device: Any = None) -> Any:
                shape = _shape(shape)
                n, target = math.prod(shape), _device.device(device)
                return draw(n, np.dtype(np.bool), params, target, shift=start).reshape(shape)

            return _Pieces(traced_piece, None)
        if _replay.recorder() is not None:
            at = self._reserve_in_memory("below32", n)

            def piece_in_memory(start: int, shape: Any, device: Any = None) -> Any:
                _require_current(_device.device(device))
                shape = _shape(shape)
                options = {"place": at, "shift": start}
                n = math.prod(shape)
                return philox.fill_from_memory(
                    "below32", n, np.dtype(np.bool), params, **options
                ).reshape(shape)

            return _Pieces(piece_in_memory, at)
        place, first = self._reserve("below32", n)
        key, stream = place.key, place.stream

        def piece(start: int, shape: int | tuple[int, ...], device: Any = None) -> Any:
            shape = _shape(shape)
            values = philox.fill(
                "below32",
                math.prod(shape),
                np.dtype(np.bool),
                params,
                key=key,
                stream=stream,
                offset=first + start,
                device=_device.device(device),
            )
            return values.reshape(shape)

        return _Pieces(piece, (_U(first), stream, key))

    def dropout_place(self, n: int) -> Any:
        """Set ``n`` booleans of :meth:`dropout_mask` aside for kernels that make them themselves.

        Parameters
        ----------
        n : int

        Returns
        -------
        tuple of 3 np.uint64, or CuPy array of uint64, shape (3,)
            Offset, stream and key of their words; an array in a step that is being captured. In a
            function that is being traced a callable that draws them.
        """
        trace = self._trace()
        if trace is not None:
            return trace.draws.reserve(self, "below32", n)
        if _replay.recorder() is not None:
            return self._reserve_in_memory("below32", n)
        place, start = self._reserve("below32", n)
        return _U(start), place.stream, place.key

    def _mask(self, shape: Any, p: float, device: Any) -> Any:
        return self._draw("below32", shape, np.bool, (_U(round(p * 2**32)),), device)

    def permutation(self, x: Any, *, device: Any = None) -> Any:
        """Shuffle.

        Parameters
        ----------
        x : int or array
            An int stands for ``arange(x)``; an array is shuffled along its first axis.
        device : Device or str, optional
            Only with an int.

        Returns
        -------
        array of int64, shape (x,); or a shuffled copy of the array
        """
        if _device.is_array(x) and x.ndim > 0:
            if device is not None:
                raise ValueError("device must be left out when x is an array")
            return x[self._order(x.shape[0], _device.device_of(x))]
        return self._order(_integer("x", x, 0, 2**63), _device.device(device))

    def _order(self, n: int, place: Any) -> Any:
        # Sorting random 64-bit numbers; the stable sort makes even a tie the same everywhere.
        numbers = self._draw("unsigned64", n, np.uint64, (_U(0), _U(0)), place)
        return _device.namespace(numbers).argsort(numbers, stable=True)

    def choice(
        self,
        a: Any,
        size: int | tuple[int, ...] = (),
        *,
        replace: bool = True,
        p: Any = None,
        device: Any = None,
    ) -> Any:
        """Draw from ``range(a)``, or from the rows of an array.

        Parameters
        ----------
        a : int or array
            Not empty.
        size : int or tuple of int, default ()
        replace : bool, default True
            Whether the same element may be drawn again.
        p : array of floats, shape (n,), optional
            Probability of each element, summing to one; read on the host. Without
            replacement an element's chance at each draw is in proportion to it.
        device : Device or str, optional
            Only when ``a`` is an int.

        Returns
        -------
        array of int64, shape ``size``; or the drawn rows of ``a``
        """
        rows = a if _device.is_array(a) and a.ndim > 0 else None
        if rows is not None and device is not None:
            raise ValueError("device must be left out when a is an array")
        n = _integer("a", a, 1, 2**63) if rows is None else rows.shape[0]
        place = _device.device(device) if rows is None else _device.device_of(rows)
        shape = _shape(size)
        count = math.prod(shape)
        if n == 0:
            raise ValueError("a must not be empty")
        p = None if p is None else _probabilities(p, n)
        available = n if p is None else np.count_nonzero(p)
        if not replace and count > available:
            raise ValueError(
                f"size must be at most {available} when nothing is drawn twice, got {count}"
            )
        if replace and p is None:
            chosen = self.integers(0, n, shape, device=place)
        else:
            chosen = self._weighted(n, count, replace, p, place).reshape(shape)
        return chosen if rows is None else rows[chosen]

    def _weighted(self, n: int, count: int, replace: bool, p: Any, place: Any) -> Any:
        if p is None:
            return self._order(n, place)[:count]
        with place:
            xp = _device.namespace()
            if replace:
                # Summed on the host, since a GPU adds in another order.
                bounds = xp.asarray(np.cumsum(p) / np.cumsum(p)[-1])
                drawn = self.uniform(count, device=place)
                chosen = xp.searchsorted(bounds, drawn, side="right")
                return xp.astype(chosen, np.int64, copy=False)
            # Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006,
            # doi:10.1016/j.ipl.2005.11.003: the first arrivals of clocks running at rates p.
            possible = np.flatnonzero(p)
            arrival = self.exponential(possible.size, device=place) / xp.asarray(p[possible])
            return xp.asarray(possible)[xp.argsort(arrival, stable=True)[:count]]


# ------------------------------------------------------------------------- the default generator


def default_generator() -> Generator:
    """Return the generator that is used where none is given; it starts from seed 0."""
    return _default


def seed(n: int) -> None:
    """Restart the default generator from seed ``n``."""
    _default.load_state_dict(Generator(n).state_dict())


def __getattr__(name: str) -> Any:
    raise no_attribute(__name__, name)


# ------------------------------------------------------------------------ recording and replay


@contextmanager
def record_draws() -> Iterator[dict[Generator, Any]]:
    """Log which generators this thread uses, and where each stood before its first use.

    Yields
    ------
    dict
        Fills as draws happen; give it to :func:`replay_draws`.
    """
    log: dict[Generator, Place] = {}
    _thread.logs.append(log)
    try:
        yield log
    finally:
        # By identity: nested logs can be equal.
        del _thread.logs[next(i for i, other in enumerate(_thread.logs) if other is log)]


@contextmanager
def replay_draws(log: dict[Generator, Any]) -> Iterator[None]:
    """Let this thread draw again what it drew when ``log`` was made.

    The generators themselves stay where they are, for what follows and for other threads.
    """
    before = _thread.replayed
    places = {generator: place.copy() for generator, place in log.items()}
    for generator, place in places.items():
        _replay.on_replay(functools.partial(place.go_to, log[generator]))
    _thread.replayed = {**before, **places}
    try:
        yield
    finally:
        _thread.replayed = before


def _place_children(children: list[Generator], parent: Place, first: int) -> None:
    base = philox.derive(parent.key, parent.stream, _SPAWN)
    for i, child in enumerate(children):
        child._own = Place(*philox.derive(*base, first + i))


def _require_current(target: _device.Device) -> None:
    if target != _device.device():
        raise ValueError(
            f"device must be {_device.device()}, which captures the step, got {target}"
        )


def _follow(place: Place, follower: Callable[[], Place]) -> None:
    place.go_to(follower())


# --------------------------------------------------------------------------------------- checks


def _integer(name: str, value: Any, low: int, high: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None
    if not low <= number < high:
        raise ValueError(f"{name} must lie in [{low}, {high}), got {number}")
    return number


def _shape(shape: Any) -> tuple[int, ...]:
    sizes = shape if isinstance(shape, (tuple, list)) else (shape,)
    return tuple(_integer("shape", size, 0, 2**63) for size in sizes)


def _real(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None


def _finite(name: str, value: Any) -> float:
    number = _real(name, value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def _probability(name: str, value: Any) -> float:
    number = _real(name, value)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {number}")
    return number


def _probabilities(p: Any, n: int) -> np.ndarray:
    if _device.is_array(p):
        p = _device.to_device(p, "cpu")
    given = np.asarray(p)
    eps = np.finfo(given.dtype).eps if given.dtype.kind == "f" else 0.0
    p = given.astype(np.float64)
    if p.shape != (n,):
        raise ValueError(f"p must have shape ({n},), got {p.shape}")
    if not (p >= 0).all():
        raise ValueError(f"p must not be negative or NaN, got a minimum of {p.min()}")
    if abs(p.sum() - 1.0) > math.sqrt(max(eps, np.finfo(np.float64).eps)):
        raise ValueError(f"p must sum to one, got {p.sum()}")
    return p


def _float_dtype(dtype: Any) -> np.dtype:
    dtype = as_dtype(dtype)
    if dtype not in _FLOATS:
        raise TypeError(f"dtype must be float16, bfloat16, float32 or float64, got {dtype}")
    return dtype


def _sized(kind: str, dtype: np.dtype) -> str:
    return f"{kind}64" if dtype == np.float64 else f"{kind}32"


def _round_inward(x: float, dtype: np.dtype, *, up: bool) -> float:
    """Return the ``dtype`` number nearest to ``x`` that is not below (up) or above (down) it."""
    with np.errstate(over="ignore"):
        rounded = float(np.asarray(x).astype(dtype))
    if up and rounded < x:
        return _next(rounded, math.inf, dtype)
    if not up and rounded > x:
        return _next(rounded, -math.inf, dtype)
    return rounded


def _next(x: float, toward: float, dtype: np.dtype) -> float:
    start, end = np.asarray(x).astype(dtype), np.asarray(toward).astype(dtype)
    return float(np.nextafter(start, end))


_default = Generator(0)
