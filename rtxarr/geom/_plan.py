"""What an operation or a layer will cost on a graph, before it runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rtxarr import _device
from rtxarr.dtypes import finfo
from rtxarr.geom import _messages
from rtxarr.geom._aggregate import aggregate
from rtxarr.geom._graph import Graph
from rtxarr.geom._layer import Layer
from rtxarr.geom._speed import Speed, speed_of
from rtxarr.geom._stream import aggregate_streamed
from rtxarr.geom._trace import ATTENTION, WITH_MESSAGES, Step, Trace, trace
from rtxarr.nn import Module
from rtxarr.nn._summary import _bytes_text

__all__ = ["Plan", "PlannedStep", "plan"]


class PlannedStep(NamedTuple):
    """One operation of a plan.

    Attributes
    ----------
    name : str
        "products" are those of dense matrices, "others" all operations that are neither on edges
        nor products.
    is_backward : bool
    kernel : str
        What does it.
    width : int
        Elements of a row.
    most_bytes : int
        Read and written if no row of a source is read from a cache.
    least_bytes : int
        Read and written if each array is read once.
    likely_bytes : int
        Between the two: the rows that most edges read stay in the cache.
    seconds : float
        For ``likely_bytes``, or for the multiplications if these take longer.
    """

    name: str
    is_backward: bool
    kernel: str
    width: int
    most_bytes: int
    least_bytes: int
    likely_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """What :func:`plan` found out.

    Attributes
    ----------
    steps : tuple of PlannedStep
    seconds : float
        How long it takes at the rates of the device, without launches and other host work.
    most_seconds, least_seconds : float
        The two floors: what ``most_bytes`` and ``least_bytes`` take at the bandwidth alone.
    peak_bytes : int
        Memory beyond the graph, the features and the parameters, at the worst moment.
    kept_bytes : int
        Of it, what stays with the graph: its edges in another order, weights.
    n_slices : int
        In how many parts of the features an operation is to be done.
    memory_limit : int or None
    from_host : bool
    device : Device
    bandwidth : float
        Bytes a second.
    """

    steps: tuple[PlannedStep, ...]
    seconds: float
    peak_bytes: int
    kept_bytes: int
    n_slices: int
    memory_limit: int | None
    from_host: bool
    device: Any
    bandwidth: float
    title: str
    _run: Any = None

    @property
    def most_seconds(self) -> float:
        return sum(step.most_bytes for step in self.steps) / self.bandwidth

    @property
    def least_seconds(self) -> float:
        return sum(step.least_bytes for step in self.steps) / self.bandwidth

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit; true without one."""
        return self.memory_limit is None or self.peak_bytes <= self.memory_limit

    def __call__(self, x: Any, **options: Any) -> Any:
        """Do the operation as planned, in ``n_slices`` parts of the features.

        Parameters
        ----------
        x : array or Tensor, shape (n_src, n_features)
            NumPy's, also mapped from a file, for a plan with ``from_host``.
        **options
            ``weight`` and ``empty`` of :func:`aggregate`; ``out`` of :func:`aggregate_streamed`
            with ``from_host``.

        Returns
        -------
        array or Tensor, shape (n_dst, n_features)
            The same, to the bit, as in one part.
        """
        if self._run is None:
            raise ValueError("only plans of operations can be called, this is one of a layer")
        return self._run(x, **options)

    def __repr__(self) -> str:
        rows = [("", "kernel", "width", "no reuse", "read once", "likely", "ms")]
        rows += [
            (
                step.name + (" backward" if step.is_backward else ""),
                step.kernel,
                str(step.width) if step.width else "",
                *map(_bytes_text, (step.most_bytes, step.least_bytes, step.likely_bytes)),
                f"{1e3 * step.seconds:.4g}",
            )
            for step in self.steps
        ]
        totals = [sum(getattr(s, f"{kind}_bytes") for s in self.steps) for kind in _KINDS]
        rows.append(("in all", "", "", *map(_bytes_text, totals), f"{1e3 * self.seconds:.4g}"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(n) if i < 2 else cell.rjust(n)
                for i, (cell, n) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        rule = "-" * max(map(len, lines))
        lines = [self.title, rule, lines[0], rule, *lines[1:-1], rule, lines[-1]]
        lines.append(
            f"moving the bytes takes {1e3 * self.least_seconds:.4g} to "
            f"{1e3 * self.most_seconds:.4g} ms at {self.bandwidth / 1e9:,.0f} GB/s of {self.device}"
        )
        lines.append(f"peak memory {_bytes_text(self.peak_bytes)}{self._limits()}")
        return "\n".join(lines)

    def _limits(self):
        parts = [f", {_bytes_text(self.kept_bytes)} of it kept with the graph"]
        if self.n_slices > 1:
            parts.append(f", in {self.n_slices} slices of the features")
        if self.from_host:
            parts.append(", features in the host's memory")
        if not self.fits:
            parts.append(f": over the limit of {_bytes_text(self.memory_limit)}")
        return "".join(parts)


_KINDS = ("most", "least", "likely")


def plan(
    graph: Graph,
    work: str | Callable[..., Any],
    n_features: int,
    *,
    dtype: Any = "float32",
    weighted: bool = False,
    edge_channels: int | None = None,
    backward: bool = False,
    memory_limit: int | None = None,
    from_host: bool = False,
) -> Plan:
    """Predict bytes, time and memory of an operation or a layer on a graph.

    Parameters
    ----------
    graph : Graph
        Its sources are its destinations.
    work : str or callable
        An operation of :func:`aggregate`, a layer, or any function or model that is called as
        ``work(graph, x)``. It is called on a small graph, layers as in evaluation.
    n_features : int
        Of ``x``.
    dtype : dtype, default float32
        Of ``x``.
    weighted : bool, default False
        Call it with a weight for each edge.
    edge_channels : int, optional
        Call it with so many features of each edge.
    backward : bool, default False
        Plan the gradients of ``x`` and the parameters too.
    memory_limit : int, bytes, optional
        An operation over it is planned in slices of the features.
    from_host : bool, default False
        Plan an operation whose features and result stay in the host's memory, so that only slices
        of them are on the device.

    Returns
    -------
    Plan
        A table as text. That of an operation can be called with the features.

    Raises
    ------
    ValueError
        When an operation is over ``memory_limit`` with one feature at a time.

    Notes
    -----
    The bandwidth of a device, and its rate of multiplications, are measured once unless they are
    known. The likely bytes take the sources with the most edges to stay in the cache, as many as
    there is room for.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> src, dst = np.arange(100_000) % 1000, np.arange(100_000) // 100
    >>> graph = geom.Graph.from_edges(src, dst, n_nodes=1000)
    >>> plan = geom.plan(graph, "sum", 64, memory_limit=10_000_000)
    >>> plan.steps[0].name, plan.steps[0].most_bytes, plan.n_slices
    ('gather_sum', 26264008, 1)
    >>> plan(np.ones((1000, 64), "float32")).shape
    (1000, 64)
    """
    edge = () if weighted else None if edge_channels is None else (edge_channels,)
    is_operation = isinstance(work, str)
    if weighted and edge_channels is not None:
        raise ValueError("weighted and edge_channels cannot be given both")
    if from_host and (backward or not is_operation):
        raise ValueError("from_host is for operations, without backward")
    function = _operation(work) if is_operation else work
    place = graph.device
    speed = speed_of(place)

    def traced(width):
        return trace(graph, function, width, dtype, edge, backward)

    found, n_slices = traced(n_features), 1
    peak = _peak(found, graph, n_features, n_features, dtype, from_host)
    while is_operation and memory_limit is not None and peak > memory_limit:
        if n_slices >= n_features:
            raise ValueError(
                f"memory_limit must be at least the {peak} bytes of one feature at a time, got "
                f"{memory_limit}"
            )
        n_slices = min(2 * n_slices, n_features)
        width = -(-n_features // n_slices)
        found = traced(width)
        peak = _peak(found, graph, width, n_features, dtype, from_host)
    if n_slices > 1:
        width = -(-n_features // n_slices)
        n_slices = -(-n_features // width)
    repeats = n_slices if n_slices > 1 else 1
    steps = _planned(graph, found.steps, speed, repeats)
    run = None
    if is_operation:
        one = aggregate_streamed if from_host else aggregate

        def run(x, **options):
            return one(graph, x, work, n_slices=n_slices, **options)

    name = f"'{work}'" if is_operation else _name(work)
    kind = np.dtype(dtype).name
    title = f"{name} over {n_features} features of {kind} on {graph!r}"
    return Plan(
        tuple(steps),
        sum(step.seconds for step in steps),
        peak,
        found.graphs,
        n_slices,
        memory_limit,
        from_host,
        place,
        speed.bandwidth,
        title,
        run,
    )


def _operation(op):
    _messages.check_op(op)
    return lambda graph, x, weight=None: aggregate(graph, x, op, weight=weight)


def _name(work):
    if isinstance(work, Layer) and "\n" not in repr(work):
        return repr(work)
    return type(work).__name__ if isinstance(work, Module) else getattr(work, "__name__", "work")


def _peak(found: Trace, graph, width, n_features, dtype, from_host):
    """Give the most bytes that are held, for an operation in slices with its whole result."""
    itemsize = finfo(dtype).bits // 8
    peak = found.peak + found.graphs
    if from_host:  # two slices of the features, the next one being on its way
        return peak + 2 * graph.n_src * width * itemsize
    if width < n_features:
        return peak + graph.n_dst * n_features * itemsize
    return peak


# ------------------------------------------------------------------------------------- the costs


def _planned(graph, steps, speed, repeats):
    """Give the operations on edges one by one, and the others added up."""
    reuse = _Reuse(graph, speed.cache)
    rest: dict[tuple[str, bool], list] = {}
    planned = []
    for step in steps:
        if step.of_graph:
            planned.append(_edge_step(graph, step, speed, reuse, repeats))
            continue
        nbytes = sum(held.nbytes for held in (*step.arrays, *step.outputs)) if step.outputs else 0
        flops = _flops(step)
        kind = "products" if flops else "messages" if step.in_messages else "others"
        total = rest.setdefault((kind, step.is_backward), [0, 0.0])
        total[0] += repeats * nbytes
        total[1] += repeats * max(nbytes / speed.bandwidth, flops / speed.flops)
    for (kind, is_backward), (nbytes, seconds) in rest.items():
        if nbytes:
            kernel = "runs of destinations" if kind == "messages" else ""
            planned.append(
                PlannedStep(kind, is_backward, kernel, 0, nbytes, nbytes, nbytes, seconds)
            )
    return planned


def _edge_step(graph, step: Step, speed: Speed, reuse, repeats):
    fixed = sum(held.nbytes for held in step.outputs)
    fixed += graph.n_edges * graph.indices.dtype.itemsize + 8 * (graph.n_dst + 1)
    most = least = likely = fixed
    for held in step.arrays:
        if held.rows == "nodes" and not _is_resident(step.name, held.name):
            row = held.width * held.itemsize
            most += graph.n_edges * row
            least += graph.n_src * row
            likely += reuse.likely(row)
        else:
            for_all = held.nbytes
            most, least, likely = most + for_all, least + for_all, likely + for_all
    width = max((held.width for held in step.arrays), default=1)
    most, least, likely = (repeats * x for x in (max(most, least), least, likely))
    return PlannedStep(
        step.name,
        step.is_backward,
        _kernel(step.name, graph),
        width,
        most,
        least,
        likely,
        likely / speed.bandwidth,
    )


def _is_resident(op, name):
    """Tell whether a destination's row is read once for all its edges."""
    return op == "spread" or name in ("v", "own", "query") or name.endswith("dst")


def _flops(step):
    if step.name not in ("matmul", "linear") or not step.outputs:
        return 0
    return 2 * math.prod(step.outputs[0].shape) * step.arrays[0].shape[-1]


class _Reuse:
    """How many bytes of sources' rows are read if those with most edges stay in the cache."""

    def __init__(self, graph, cache):
        self._graph, self._cache = graph, cache

    def likely(self, row):
        n = self._graph.n_src
        if not row or not n:
            return 0
        n_kept = min(self._cache // row, n)
        kept = int(self._graph.once("edges_of_hubs", self._sums)[n_kept])
        return (self._graph.n_edges - kept + n_kept) * row

    def _sums(self):
        """Give how many edges begin at the ``i`` sources with the most; shape (n_src + 1,)."""
        graph = self._graph
        xp = _device.namespace(graph.indices)
        degrees = xp.sort(xp.bincount(graph.indices, minlength=graph.n_src))[::-1]
        sums = np.zeros(graph.n_src + 1, dtype=np.int64)
        sums[1:] = _device.to_device(xp.cumulative_sum(degrees), "cpu")
        return sums


_CPU = {
    "gather_sum": "sparse product (SciPy)",
    "gather_mean": "sparse product (SciPy)",
    "collect": "sparse product (SciPy)",
    "weighted_sum": "sparse product (SciPy)",
    "gather_extremum": "rows side by side (NumPy)",
    "gather_product": "runs of destinations",
    "gather_ranked": "runs of destinations",
}
_GPU = {
    "gather_sum": "rows by their degrees",
    "gather_mean": "rows by their degrees",
    "gather_extremum": "rows by their degrees",
    "gather_var": "rows by their degrees, twice",
    "gather_product": "products of segments",
    "gather_ranked": "ranks in segments",
    "share_sum": "rows by their degrees",
    "matched_sum": "rows by their degrees",
    "difference_sum": "rows by their degrees",
    "tie_share": "rows by their degrees",
    "collect": "segment",
    "spread": "array functions",
    "numbered": "array functions",
    "weighted_sum": "rows by their degrees",
    "biased_sum": "rows by their degrees",
}


def _kernel(name, graph):
    if not _device.is_device_array(graph.indptr):
        return _CPU.get(name, "chunks of edges" if name in WITH_MESSAGES else "array functions")
    of_attention = name.partition(" ")[0] in ATTENTION
    one = of_attention or name in (*WITH_MESSAGES, "softmax_over_edges")
    return _GPU.get(name, "one pass" if one else "array functions")
