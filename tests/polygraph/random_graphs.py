"""Random graphs whose values stay finite, so that kernels can be held to the interpreter."""

import math
import random

import numpy as np

from rtxarr.polygraph import _ir as ir

_UNARY = ("negative", "abs", "square", "tanh", "sin", "sigmoid", "floor", "sign")
_BINARY = ("add", "subtract", "multiply", "maximum", "minimum")


class Maker:
    """Grows a graph node by node; ``graph()`` and ``arrays()`` give what was made."""

    def __init__(self, seed, dtype="float32", n_steps=12):
        self.rng = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        self.dtype = np.dtype(dtype)
        self.inputs, self.values = [], []
        shape = tuple(self.rng.choice((1, 2, 3, 5, 8)) for _ in range(self.rng.randint(1, 4)))
        self.pool = [self.input(shape)]
        if self.rng.random() < 0.5:
            self.pool.append(self.input(shape))
        for _ in range(n_steps):
            self.pool.append(self.step())

    def input(self, shape, dtype=None, high=None):
        dtype = np.dtype(dtype or self.dtype)
        node = ir.input_node(len(self.inputs), dtype, shape)
        if high is not None:
            value = self.numpy.integers(0, high, shape).astype(dtype)
        else:
            value = self.numpy.uniform(-2, 2, shape).astype(dtype)
        self.inputs.append(node)
        self.values.append(value)
        return node

    def pick(self):
        recent = self.pool[-4:]
        return self.rng.choice(recent if self.rng.random() < 0.7 else self.pool)

    def step(self):
        kind = self.rng.choice(
            ["unary", "binary", "binary", "where", "reduce", "reduce", "view", "view", "normalize"]
            + ["concat", "update", "gather", "matmul", "constant", "iota", "scan", "scatter"]
        )
        return getattr(self, kind)(self.pick())

    def unary(self, x):
        return ir.map_node(self.rng.choice(_UNARY), x)

    def like(self, shape):
        """Give a node of this shape: one there is, broadcast, or a new input."""
        fitting = [n for n in self.pool if n.shape == shape]
        small = [n for n in self.pool if _broadcasts(n.shape, shape)]
        if small and self.rng.random() < 0.4:
            return ir.broadcast(self.rng.choice(small), shape)
        return self.rng.choice(fitting) if fitting else self.input(shape)

    def binary(self, x):
        return ir.map_node(self.rng.choice(_BINARY), x, self.like(x.shape))

    def where(self, x):
        test = ir.map_node(self.rng.choice(("less", "greater_equal")), x, self.like(x.shape))
        return ir.map_node("where", test, x, self.like(x.shape))

    def constant(self, x):
        value = ir.constant(self.rng.uniform(-2, 2), self.dtype)
        return ir.map_node("multiply", x, ir.broadcast(value, x.shape))

    def iota(self, x):
        if not x.ndim:
            return self.unary(x)
        counter = ir.iota(x.shape, self.rng.randrange(x.ndim), np.int64)
        return ir.map_node("add", x, ir.cast(counter, self.dtype))

    def axes(self, x):
        return self.rng.sample(range(x.ndim), self.rng.randint(min(1, x.ndim), x.ndim))

    def reduce(self, x):
        op = self.rng.choice(("sum", "max", "min", "argmax"))
        axes = self.axes(x)
        if op == "argmax":
            if not x.ndim:
                return self.unary(x)
            return ir.cast(ir.reduce_node(op, x, axes[:1]), self.dtype)
        out = ir.reduce_node(op, x, axes)
        if op == "sum":  # keep it small
            n = math.prod(x.shape[a] for a in axes)
            scale = ir.broadcast(ir.constant(1 / n, self.dtype), out.shape)
            out = ir.map_node("multiply", out, scale)
        return out

    def scan(self, x):
        """Give running means of numbers that stay small; from the other end every other time."""
        if not x.ndim:
            return self.unary(x)
        axis = x.ndim - 1 if self.rng.random() < 0.8 else self.rng.randrange(x.ndim)
        small = ir.map_node("tanh", x)
        ends = [n - 1 if i == axis else 0 for i, n in enumerate(x.shape)]
        steps = [-1 if i == axis else 1 for i in range(x.ndim)]
        before, after = self.rng.choice(((0, 0), (0, 0), (1, 1), (1, 0), (0, 1)))
        if before:
            small = ir.slice_node(small, ends, steps, x.shape)
        op = f"cumulative_{self.rng.choice(('sum', 'sum', 'prod', 'max', 'min'))}"
        out = ir.scan_node(op, small, axis)
        return ir.slice_node(out, ends, steps, x.shape) if after else out

    def normalize(self, x):
        """Take from ``x`` what a reduction of it gives, broadcast back."""
        axes = self.axes(x)
        kept = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
        top = ir.reshape(ir.reduce_node("max", x, axes), kept)
        return ir.map_node("tanh", ir.map_node("subtract", x, ir.broadcast(top, x.shape)))

    def view(self, x):
        choice = self.rng.randrange(3)
        if choice == 0 or not x.ndim:
            return ir.reshape(x, _factors(self.rng, x.size))
        if choice == 1:
            return ir.permute(x, self.rng.sample(range(x.ndim), x.ndim))
        return ir.slice_node(x, *self.part(x))

    def part(self, x):
        starts, steps, lengths = [], [], []
        for n in x.shape:
            step = self.rng.choice((1, 1, 2, -1))
            length = self.rng.randint(1, (n + abs(step) - 1) // abs(step))
            span = (length - 1) * abs(step)
            low = self.rng.randint(0, n - 1 - span)
            starts.append(low if step > 0 else low + span)
            steps.append(step)
            lengths.append(length)
        return starts, steps, lengths

    def concat(self, x):
        if not x.ndim:
            return self.unary(x)
        parts = [x, self.like(x.shape), ir.map_node("negative", x)][: self.rng.randint(2, 3)]
        return ir.concat(parts, self.rng.randrange(x.ndim))

    def update(self, x):
        starts, steps, lengths = self.part(x)
        return ir.update(x, self.like(tuple(lengths)), starts, steps)

    def gather(self, x):
        if not x.ndim:
            return self.unary(x)
        axis = self.rng.randrange(x.ndim)
        index = self.input((self.rng.randint(1, 6),), "int64", high=x.shape[axis])
        return ir.gather(x, index, axis)

    def scatter(self, x):
        """Give what is greatest or least of the rows that go to each row, and of a number."""
        if x.ndim < 1 or not x.size:
            return self.unary(x)
        rows = ir.reshape(x, (x.shape[0], x.size // x.shape[0]))
        n_rows = self.rng.randint(1, 5)
        index = self.input((x.shape[0],), "int64", high=n_rows)
        op = self.rng.choice(("max", "min"))
        out = ir.scatter_reduce(op, index, rows, n_rows)
        limit = ir.broadcast(ir.constant(-2 if op == "max" else 2, self.dtype), out.shape)
        return ir.map_node("maximum" if op == "max" else "minimum", out, limit)

    def matmul(self, x):
        if x.ndim != 2:
            return self.unary(x)
        product = ir.matmul(x, ir.permute(x, (1, 0)))
        return ir.map_node("tanh", product)

    def graph(self):
        outputs = self.rng.sample(self.pool, self.rng.randint(1, min(3, len(self.pool))))
        outputs.append(self.pool[-1])
        return ir.Graph(self.inputs, outputs)

    def arrays(self):
        return self.values


def _broadcasts(small, shape):
    if len(small) > len(shape):
        return False
    ends = zip(reversed(small), reversed(shape), strict=False)
    return all(a in (1, b) for a, b in ends)


def _factors(rng, size):
    shape = []
    while size > 1 and len(shape) < 3:
        divisors = [d for d in range(2, size + 1) if size % d == 0]
        d = rng.choice(divisors)
        shape.append(d)
        size //= d
    if size > 1 or rng.random() < 0.3:
        shape.insert(rng.randint(0, len(shape)), size)
    return tuple(shape)
