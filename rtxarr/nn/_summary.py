"""The table of a model's layers."""

from rtxarr.autograd import Tensor, no_grad


def summarize(model, example_inputs):
    """Give the table of :meth:`Module.summary`."""
    shapes = _output_shapes(model, example_inputs) if example_inputs else {}
    rows = [("layer", "output shape", "parameters")] if shapes else [("layer", "parameters")]
    for label, module in _labelled(model, type(model).__name__, "", set()):
        count = f"{sum(p.size for p in module.parameters()):,}"
        rows.append((label, shapes.get(module, "-"), count) if shapes else (label, count))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(_align(row, widths)).rstrip() for row in rows]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([lines[0], rule, *lines[1:], rule, _totals(model)])


def _labelled(module, label, indent, seen):
    """Yield each module once, with its name below its parent's."""
    if id(module) in seen:
        return
    seen.add(id(module))
    yield indent + label, module
    for name, child in module.named_children():
        yield from _labelled(child, f"{name} ({type(child).__name__})", indent + "  ", seen)


def _align(row, widths):
    *cells, count = row
    return [*(c.ljust(w) for c, w in zip(cells, widths, strict=False)), count.rjust(widths[-1])]


def _output_shapes(model, example_inputs):
    """Run the model once, changing nothing, and give the text of each module's output shape."""
    modules = list(model.modules())
    shapes = {}

    def note(module, args, out):
        shapes[module] = _shape_text(out)

    modes = [module.training for module in modules]
    removers = [module.add_forward_hook(note) for module in modules]
    try:
        model.eval()
        with no_grad():
            model(*example_inputs)
    finally:
        for remove in removers:
            remove()
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
    return shapes


def _shape_text(out):
    if isinstance(out, dict):
        out = tuple(out.values())
    if isinstance(out, (list, tuple)):
        return ", ".join(_shape_text(part) for part in out)
    return str(tuple(out.shape)) if isinstance(out, Tensor) or hasattr(out, "shape") else "-"


def _totals(model):
    parameters = list(model.parameters())
    total = sum(p.size for p in parameters)
    trained = sum(p.size for p in parameters if p.requires_grad)
    tensors = [*parameters, *model.buffers()]
    n_bytes = sum(t.size * t.dtype.itemsize for t in tensors)
    return f"{total:,} parameters, {trained:,} of them trained; {_bytes_text(n_bytes)}"


def _bytes_text(n):
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:,.0f} {unit}" if unit == "B" else f"{n:,.1f} {unit}"
        n /= 1024
    return f"{n:,.1f} GiB"
