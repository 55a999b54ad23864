"""Memory: who holds it, by module and operation, and the most that a block of code takes."""

import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from rtxarr import _device
from rtxarr._allocation import allocation_of
from rtxarr._device import Device, memory_stats
from rtxarr.autograd._tape import Node, Tensor

__all__ = ["Entry", "Report", "peak", "report", "stats"]

stats = memory_stats

_MIB = 2**20

# In this order: memory that is held under two names counts for the first.
KINDS = ("parameter", "buffer", "gradient", "optimizer", "saved", "other")
_PLURALS = {"saved": "saved for gradients", "other": "others"}


class Entry(NamedTuple):
    """One array of a :class:`Report`.

    Attributes
    ----------
    kind : str
        "parameter", "buffer", "gradient", "optimizer" (state), "saved" (for the gradient of an
        operation) or "other" (any other tensor).
    name : str
        Where it is: the dotted name in its module, the operation that saved it, or nothing.
    n_bytes : int
        Of the memory it keeps alive, which may be larger than itself.
    shape : tuple of int
    dtype : dtype
    module : str or None
        The dotted name of the module that it belongs to: of what is saved, the one whose call saved
        it. None where that is not known.
    """

    kind: str
    name: str
    n_bytes: int
    shape: tuple
    dtype: Any
    module: str | None = None


class Report:
    """What is held on a device; ``str`` gives a table.

    Attributes
    ----------
    device : Device
    entries : list of Entry
        The largest first. Memory that several arrays look at is there once.
    graphs : dict of str to int
        Bytes that the graphs of each captured step keep to themselves. Gradients and results made
        in them are among the entries too.
    stats : dict
        The figures of :func:`stats`, without what graphs keep.
    """

    def __init__(self, device: Device, entries: list[Entry], graphs: dict[str, int]):
        self.device = device
        self.graphs = graphs
        self.entries = sorted(entries, key=lambda entry: -entry.n_bytes)
        self.stats = memory_stats(device)

    @property
    def n_bytes(self) -> int:
        """Bytes of all entries together."""
        return sum(entry.n_bytes for entry in self.entries)

    def by_kind(self) -> dict[str, int]:
        """Give the bytes of each kind of entry that there is."""
        return self._totals((entry.kind, entry.n_bytes) for entry in self.entries)

    def by_module(self) -> dict[str, int]:
        """Give the bytes of each module: what it has itself and what is saved for its gradients.

        Returns
        -------
        dict of str to int
            Parameters, buffers, gradients and optimizer state count for the module that has the
            parameter itself. What an operation saved counts for the module whose parameter it took,
            or that called it inside :class:`rtxarr.profile`; where neither is known it is left out.
            The largest first.
        """
        return self._totals((e.module, e.n_bytes) for e in self.entries if e.module is not None)

    def by_operation(self) -> dict[str, int]:
        """Give the bytes that are saved for the gradient of each operation, the largest first."""
        saved = [entry for entry in self.entries if entry.kind == "saved"]
        return self._totals((entry.name, entry.n_bytes) for entry in saved)

    @staticmethod
    def _totals(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
        totals: dict[str, int] = {}
        for name, n_bytes in pairs:
            totals[name] = totals.get(name, 0) + n_bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def table(self, n_rows: int = 20) -> str:
        """Give the text of the totals and of the ``n_rows`` largest entries."""
        pool = {name: value / _MIB for name, value in self.stats.items()}
        lines = [
            f"{self.device}: {self.n_bytes / _MIB:,.1f} MiB in arrays, {pool['used']:,.1f} in use, "
            f"{pool['pool']:,.1f} kept by the pool, {pool['free']:,.1f} of {pool['total']:,.1f} "
            "free",
            "",
        ]
        lines += [f"{n / _MIB:12,.1f} MiB  {_plural(kind)}" for kind, n in self.by_kind().items()]
        lines += [f"{n / _MIB:12,.1f} MiB  graphs of {name}" for name, n in self.graphs.items()]
        lines += ["", f"{'MiB':>12}  {'kind':9}  name"]
        for entry in self.entries[:n_rows]:
            of = f" in {entry.module}" if entry.kind == "saved" and entry.module else ""
            where = f"{entry.name}{of}  {entry.shape} {entry.dtype}".lstrip()
            lines.append(f"{entry.n_bytes / _MIB:12,.2f}  {entry.kind:9}  {where}")
        rest = self.entries[n_rows:]
        if rest:
            held = sum(entry.n_bytes for entry in rest)
            lines.append(f"{held / _MIB:12,.2f}  {'':9}  in {len(rest)} more")
        return "\n".join(lines)

    __str__ = table

    def __repr__(self) -> str:
        return f"Report({self.device}, {len(self.entries)} arrays, {self.n_bytes:,} bytes)"


def _plural(kind: str) -> str:
    return _PLURALS.get(kind, kind if kind == "optimizer" else f"{kind}s")


def report(module: Any = None, *, optimizer: Any = None, device: Any = None) -> Report:
    """List the live arrays by the module or the operation that holds them.

    Parameters
    ----------
    module : Module, optional
        Whose parameters to name. All modules when left out; their class comes first in the names
        then.
    optimizer : Optimizer, optional
        Whose state to name. All optimizers when left out.
    device : Device or str, optional
        That of the first parameter of ``module``, or the current one, when left out.

    Returns
    -------
    Report

    Notes
    -----
    Looks at all objects of the program, so it takes a moment. Raw arrays that no module, optimizer,
    tensor or graph holds are not seen; they are the difference to what is in use.

    Examples
    --------
    >>> import rtxarr as rx
    >>> from rtxarr import nn
    >>> layer = nn.Linear(1024, 256, weight_init="zeros", device="cpu")
    >>> found = rx.memory.report(layer)
    >>> found.by_kind()["parameter"]
    1049600
    >>> found.entries[0].name, found.entries[0].n_bytes
    ('weight', 1048576)
    """
    if device is None:
        first = next(module.parameters(), None) if module is not None else None
        place = _device.device() if first is None else _device.device_of(first.data)
    else:
        place = _device.device(device)
    return _survey(place, module, optimizer)


def _survey(place: Device, module: Any = None, optimizer: Any = None) -> Report:
    survey = _Survey(place)
    return Report(place, survey.run(module, optimizer), survey.graphs)


class _Survey:
    """Goes through everything that holds arrays on one device, and takes each memory once."""

    def __init__(self, place: Device):
        self.place = place
        self.entries: list[Entry] = []
        self.seen: set = set()
        self.graphs: dict[str, int] = {}

    def run(self, module: Any, optimizer: Any) -> list[Entry]:
        gc.collect()  # what nobody reaches any more is not held
        live = gc.get_objects()
        roots = [("", module)] if module is not None else _root_modules(live)
        optimizers = [optimizer] if optimizer is not None else _of_class(live, "optim", "Optimizer")
        tensors = [
            ("parameter", _joined(root, name), p)
            for root, owner in roots
            for name, p in owner.named_parameters()
        ]
        names = {id(p): name for _, name, p in tensors}
        tensors += [
            ("buffer", _joined(root, name), b)
            for root, owner in roots
            for name, b in owner.named_buffers()
        ]
        for kind, name, tensor in tensors:
            self.take(kind, name, tensor.data)
        for kind, name, tensor in tensors:
            if kind == "parameter":
                self.take("gradient", name, tensor.grad)
        for one in optimizers:
            for param, values in one.state.items():
                for key, value in values.items():
                    known = names.get(id(param), f"{type(one).__name__}.state")
                    self.take("optimizer", f"{known} ({key})", value)
        module_of = _modules_of_nodes(live, roots)
        for node in live:
            if type(node) is Node and type(node.saved) is tuple:
                for value in _flat(node.saved):
                    self.take("saved", node.plan.op.name, value, module_of(node))
        for step in _of_class(live, "autograd", "Captured"):
            n_bytes = step.pool_bytes(self.place)
            if n_bytes:
                name = getattr(step, "__name__", "a step")
                self.graphs[name] = self.graphs.get(name, 0) + n_bytes
        for tensor in live:
            # One whose memory could not be had is not complete.
            if issubclass(type(tensor), Tensor) and hasattr(tensor, "node"):
                self.take("other", "", tensor.data)
                self.take("other", "gradient", tensor.grad)
        return self.entries

    def take(self, kind: str, name: str, array: Any, module: str | None = None) -> None:
        if not hasattr(array, "nbytes") or not _device.is_array(array):
            return
        if _device.device_of(array) != self.place:
            return
        key, n_bytes = allocation_of(array)
        if key in self.seen or n_bytes == 0:
            return
        self.seen.add(key)
        if kind not in ("saved", "other"):
            module = name.rpartition(".")[0]
        self.entries.append(Entry(kind, name, n_bytes, tuple(array.shape), array.dtype, module))


def _modules_of_nodes(live: list, roots: list) -> Callable[[Node], str | None]:
    """Give what tells the module of a node: from its parameters, or what a profile noted."""
    known: dict[int, str] = {}  # by the id of a module, or of a parameter's end of the tape
    for root, owner in roots:
        known |= {id(m): _joined(root, name) for name, m in owner.named_modules()}
        pairs = owner.named_parameters()
        known |= {id(p.node): _joined(root, name).rpartition(".")[0] for name, p in pairs if p.node}
    makers: dict = {}
    for profile in _of_class(live, "_profile", "profile"):
        if hasattr(profile, "_modules"):  # one that could not be made is not complete
            makers |= profile.makers()

    def module_of(node: Node) -> str | None:
        if node in makers:
            return known.get(id(makers[node]))
        return next((known[id(edge[0])] for edge in node.edges if id(edge[0]) in known), None)

    return module_of


def _joined(root: str, name: str) -> str:
    return ".".join(filter(None, (root, name)))


def _flat(values: tuple) -> Iterable:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


def _of_class(live: list, room: str, name: str) -> list:
    """Give the live instances of a class of a room that may not be loaded, or have none."""
    kind = getattr(sys.modules.get(f"rtxarr.{room}"), name, None)
    # isinstance() would ask proxies, of which some warn.
    return [] if kind is None else [x for x in live if issubclass(type(x), kind)]


def _root_modules(live: list) -> list[tuple[str, Any]]:
    """Give ``(class name, module)`` for the modules that are in no other."""
    modules = _of_class(live, "nn", "Module")
    inner = {id(child) for module in modules for child in module.children()}
    return [(type(m).__name__, m) for m in modules if id(m) not in inner]


def largest_holders(place: Device, n_holders: int = 5) -> str:
    """Say in one sentence who holds most of a device, for an error message; may be empty."""
    found = _survey(place)
    holders = found.by_module()
    for e in found.entries:
        if e.kind == "saved" and e.module is None:
            name = f"saved for {e.name}()"
            holders[name] = holders.get(name, 0) + e.n_bytes
    holders |= {f"graphs of {name}()": n for name, n in found.graphs.items()}
    others = found.by_kind().get("other")
    if others:
        holders["other tensors"] = others
    largest = sorted(holders.items(), key=lambda item: -item[1])[:n_holders]
    if not largest:
        return ""
    listed = ", ".join(f"{name} {n / _MIB:,.1f} MiB" for name, n in largest)
    return f"The largest holders: {listed}. "


# ----------------------------------------------------------------------------------- peak


class peak:  # noqa: N801  (used like no_grad)
    """Measure the most memory that is held at a time in a ``with`` block.

    Parameters
    ----------
    device : Device or str, default the current device

    Attributes
    ----------
    bytes : int
        On a GPU, of live arrays, among what this thread takes from CuPy's memory pools; on the
        CPU, of the process's resident memory, with what is free and kept for reuse. Up to now while
        the block runs.
    before : int
        The same when the block began: ``bytes - before`` is what it needed on top.

    Examples
    --------
    >>> import rtxarr as rx
    >>> with rx.memory.peak("cpu") as p:
    ...     x = rx.ones(10**7, device="cpu")
    >>> p.bytes - p.before > 60e6
    True
    >>> print(p)  # doctest: +SKIP
    76.3 MiB more than the 71.2 MiB before, on cpu
    """

    before: int = 0

    def __init__(self, device: Any = None):
        place = _device.device(device)
        self._meter: Any = _HostPeak() if place.kind == "cpu" else _device_peak(place)
        self.device = place

    def __enter__(self) -> "peak":
        self.before = self._meter.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._meter.stop()

    def __str__(self) -> str:
        more, before = (self.bytes - self.before) / 2**20, self.before / 2**20
        return f"{more:,.1f} MiB more than the {before:,.1f} MiB before, on {self.device}"

    @property
    def bytes(self) -> int:
        return self._meter.peak()


class _HostPeak:
    """The kernel's own high-water mark of resident memory, set back when a block begins."""

    running: list["_HostPeak"] = []  # blocks around one another: the mark is the process's

    def start(self) -> int:
        for outer in self.running:
            outer.highest = outer.peak()
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError as error:
            raise RuntimeError(
                f"the peak of the CPU's memory is only known to Linux: {error}"
            ) from None
        self.highest = 0
        self.running.append(self)
        return memory_stats("cpu")["used"]

    def stop(self) -> None:
        self.highest = self.peak()
        self.running.remove(self)

    def peak(self) -> int:
        return max(self.highest, _high_water_mark()) if self in self.running else self.highest


def _high_water_mark() -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def _device_peak(place: Device) -> Any:
    """Make what counts the bytes that come from CuPy's pools and go back to them."""

    class Meter(_device.cupy.cuda.MemoryHook):  # type: ignore[name-defined, misc]
        def start(self):
            self.name = f"rtxarr.memory.peak {id(self)}"  # two of one name cannot be nested
            self.used = self.highest = memory_stats(place)["used"]
            self.own: set[int] = set()  # addresses of what came in the block
            self.held: list[int] = []
            self.__enter__()
            return self.used

        def stop(self):
            self.__exit__(None, None, None)

        def peak(self):
            return self.highest

        def malloc_postprocess(self, **kwargs):
            if kwargs["device_id"] == place.index and kwargs["mem_ptr"]:
                self.own.add(kwargs["mem_ptr"])
                self.used += kwargs["mem_size"]
                self.highest = max(self.highest, self.used)

        def free_preprocess(self, **kwargs):
            if kwargs["device_id"] == place.index and kwargs["mem_ptr"] not in self.own:
                self.held.append(memory_stats(place)["used"])

        def free_postprocess(self, **kwargs):
            if kwargs["device_id"] != place.index:
                return
            if kwargs["mem_ptr"] in self.own:
                self.own.remove(kwargs["mem_ptr"])
                self.used -= kwargs["mem_size"]
            else:  # what was there before is in ``used`` only if the default pool gave it
                self.used -= self.held.pop() - memory_stats(place)["used"]

    return Meter()
