"""What the layers share: loading other libraries' parameters, and their text."""

from collections.abc import Mapping
from typing import Any

from rtxarr.data import CheckpointError
from rtxarr.geom._message_passing import MessagePassing
from rtxarr.nn import LSTM, BatchNorm, Linear, Module, Parameter, Sequential
from rtxarr.nn._text import call_text
from rtxarr.nn.initializers import xavier_uniform
from rtxarr.ops import moveaxis

__all__ = ["load_arrays"]

_CONVENTIONS = ("pyg", "dgl")


class Misfit(CheckpointError):
    """An array of another library's layer, by its name there, that has another shape."""

    def __init__(self, name: str, shape: tuple[int, ...], found: tuple[int, ...]):
        super().__init__(f"{name} must have shape {tuple(shape)}, got {tuple(found)}")
        self.name, self.shape, self.found = name, shape, found

    def inside(self, part: str) -> "Misfit":
        """Give the error of a model that has the layer under a name."""
        return Misfit(f"{part}.{self.name}", self.shape, self.found)


class Layer(Module):
    """A layer of a graph: text, and :meth:`load_arrays`."""

    # The names of settings for the text, and what DGL calls the parameters.
    _shown: tuple[str, ...] = ("in_channels", "out_channels")
    _dgl_names: Mapping[str, str] | None = None

    def load_arrays(self, arrays: Mapping[str, Any], *, convention: str = "pyg") -> None:
        """Load the parameters of another library's layer; see :func:`rtxarr.geom.load_arrays`."""
        load_arrays(self, arrays, convention=convention)

    def _from_pyg(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Give what PyTorch Geometric's layer holds under the names of this one's parameters."""
        return arrays

    def _from_dgl(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Give what DGL's layer holds under the names of this one's parameters."""
        if self._dgl_names is None:
            raise ValueError(f"DGL has no layer that gives what {type(self).__name__} does")
        return {_renamed(name, self._dgl_names): x for name, x in arrays.items()}

    def __repr__(self):
        return call_text(self, *self._shown)


class MessageLayer(Layer, MessagePassing):
    """A layer that is written as messages."""


def _renamed(name, names):
    """Replace the longest beginning of a dotted name that ``names`` has."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        start = ".".join(parts[:n])
        if start in names:
            return ".".join([names[start], *parts[n:]])
    return name


def load_arrays(module: Module, arrays: Mapping[str, Any], *, convention: str = "pyg") -> None:
    """Load the parameters of a model of PyTorch Geometric or DGL, by name.

    Parameters
    ----------
    module : Module
        A layer, or a model whose attributes have the names of the other one's.
    arrays : mapping of str to array
        The other model's parameters and buffers: ``{name: x.numpy() for name, x in
        model.state_dict().items()}``.
    convention : {"pyg", "dgl"}, default "pyg"
        Whose names and layouts they have. Transposed weights are turned, and biases that are only
        ever added up become one. PyTorch Geometric's ``MLP`` fits a :class:`rtxarr.nn.Sequential`
        with the same linear maps and norms.

    Raises
    ------
    CheckpointError
        Naming all arrays that are missing, left over or of another shape or dtype, those that fit
        a parameter by their names there; nothing has changed then.
    ValueError
        For a layer that the other library does not have.

    Notes
    -----
    Loaded layers give what the other library's do, but for:

    - DGL's layers add no loops, so ``add_self_loops=False`` unless the graph given there has them.
    - DGL's ``GraphConv`` divides by the roots of the number of edges that begin at the source and
      of those that end at the destination, :class:`GCNConv` always by the latter number of both.
    - DGL's ``RelGraphConv`` adds up where :class:`RGCNConv` averages: ``aggr="sum"``. Its
      ``ChebConv`` keeps loops, divides by the numbers of edges that end at the nodes and applies a
      ReLU unless told otherwise; its ``EdgeConv`` is one linear map, and before version 0.5 another
      one.
    - DGL's ``PNAConv`` is ``leaky_relu(layer(graph, x)) + x``, without the sum where the features
      change or ``residual=False``, with ``batch_norm=True`` and ``divide_input=True`` here. Its
      ``delta`` is ``mean_log_degree``.
    - PyTorch Geometric's ``RotatE`` takes the root of the sum of all squares, from a margin, and
      its ``TransE`` divides the nodes' embeddings by their norms. Embeddings of nodes,
      ``node_emb``, are what scores are called with here, imaginary parts last, and are left out.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> layer = geom.GCNConv(2, 3)
    >>> weight = np.arange(6, dtype="float32").reshape(2, 3)  # of DGL: inputs first
    >>> geom.load_arrays(layer, {"weight": weight, "bias": np.ones(3, "float32")}, convention="dgl")
    >>> layer.lin.weight.data
    array([[0., 3.],
           [1., 4.],
           [2., 5.]], dtype=float32)
    """
    if convention not in _CONVENTIONS:
        raise ValueError(f"convention must be 'pyg' or 'dgl', got {convention!r}")
    state = _translate(module, dict(arrays), convention)
    try:
        module.load_state_dict(state)
    except CheckpointError as error:
        raise CheckpointError(_by_their_names(str(error), state, arrays)) from None


def _by_their_names(text, state, arrays):
    """Say in an error which of the given arrays each key stands for that has another name."""
    theirs, lines = {id(x): name for name, x in arrays.items()}, text.split("\n")
    for i, line in enumerate(lines):
        key, colon, fault = line.strip().partition(": ")
        name = theirs.get(id(state.get(key)), key)
        if colon and name != key:
            lines[i] = f"  {name}, here {key}: {fault}"
    return "\n".join(lines)


def _translate(module, arrays, convention):
    """Give arrays under this library's names; what no name fits keeps its own."""
    if isinstance(module, Layer):
        arrays = module._from_dgl(arrays) if convention == "dgl" else module._from_pyg(arrays)
    elif isinstance(module, LSTM):
        return {_lstm_name(name): x for name, x in arrays.items()}
    elif isinstance(module, BatchNorm):
        known = {name.removeprefix("module."): x for name, x in arrays.items()}
        return {name: x for name, x in known.items() if name != "num_batches_tracked"}
    elif isinstance(module, Sequential):
        arrays = {f"layers.{_place(module, name)}": x for name, x in arrays.items()}
    found = {}
    for name, child in module.named_children():
        own = {key: arrays.pop(key) for key in list(arrays) if key.startswith(f"{name}.")}
        own = {key.removeprefix(f"{name}."): x for key, x in own.items()}
        try:
            own = _translate(child, own, convention)
        except Misfit as error:
            raise error.inside(name) from None
        found |= {f"{name}.{key}": x for key, x in own.items()}
    return arrays | found


def _place(module, name):
    """Give the place of ``lins.1.weight`` or ``norms.0.bias`` of PyTorch Geometric's MLP."""
    kind, _, rest = name.partition(".")
    number, _, own = rest.partition(".")
    if kind not in ("lins", "norms") or not number.isdigit():
        return name
    layers = [i for i, one in enumerate(module.layers) if isinstance(one, Module)]
    places = [i for i in layers if isinstance(module.layers[i], Linear) == (kind == "lins")]
    return f"{places[int(number)]}.{own}" if int(number) < len(places) else name


def _lstm_name(name):
    """Turn ``weight_ih_l0_reverse`` into ``layers.0.1.weight_ih``."""
    stem, _, place = name.rpartition("_l")
    number, _, reverse = place.partition("_")
    return f"layers.{number}.{int(bool(reverse))}.{stem}" if number.isdigit() else name


# ------------------------------------------------------------------------------------- parts


def made(dtype: Any, device: Any, generator: Any) -> dict[str, Any]:
    """Give the options of parameters."""
    return {"dtype": dtype, "device": device, "generator": generator}


def linear(n_inputs: int, n_outputs: int, *, bias: bool = True, **options: Any) -> Linear:
    """Give a linear map that starts as those of PyTorch Geometric do."""
    return Linear(n_inputs, n_outputs, bias=bias, weight_init="xavier_uniform", **options)


def vectors(n_heads: int, n_features: int, **options: Any) -> Parameter:
    """Give a vector for each head; shape (1, n_heads, n_features)."""
    init = xavier_uniform(in_axis=1, out_axis=2)
    return Parameter((1, n_heads, n_features), init=init, **options)


def bias_of(n: int, wanted: bool, **options: Any) -> Parameter | None:
    """Give a bias of zeros, or None."""
    return Parameter((n,), init="zeros", **options) if wanted else None


def sizes(in_channels: Any) -> tuple[int, int]:
    """Give the features of sources and of destinations."""
    return in_channels if isinstance(in_channels, tuple) else (in_channels, in_channels)


def turned(x: Any) -> Any:
    """Transpose a weight whose inputs come first."""
    return moveaxis(x, 0, -1)


def with_bias(out: Any, bias: Any) -> Any:
    """Add a bias that may be None."""
    return out if bias is None else out + bias


def widest(nn: Any) -> int:
    """Give the most outputs that a map inside a network has."""
    if not isinstance(nn, Module):
        return 1
    return max((p.shape[0] for p in nn.parameters() if p.ndim), default=1)
