"""Explanations of programs as one HTML page, with pictures of their graphs.

A picture has a box for each step of a program, in layers: a step stands below those that it reads
from. In a box its operations stand in layers likewise.
"""

from __future__ import annotations

import html
import itertools
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rtxarr.polygraph import _explain
from rtxarr.polygraph._explain import ProgramReport, StepReport
from rtxarr.polygraph._ir import VIEWS, Node, behind_views
from rtxarr.polygraph._layout import Layout, Point, arrange

# Fill and line of boxes.
_COLOURS = {
    "map": ("#e3effb", "#2f6fb3"),
    "maps": ("#e6e6fa", "#5a55b5"),
    "rows": ("#e4f4e6", "#2f8a45"),
    "columns": ("#dff3f2", "#1f8a85"),
    "segments": ("#fdeedb", "#c0701a"),
    "eager": ("#f0f0f2", "#7b7b85"),
    "array": ("#ffffff", "#9a9aa5"),
}
_WORDS = {
    "map": "all elements alike",
    "maps": "the same of many arrays",
    "rows": "rows",
    "columns": "columns",
    "segments": "edges of a graph",
    "eager": "run by a library",
}

# In pixels: letters and lines of the font, space inside of boxes and between them.
_LETTER, _BOLD_LETTER, _LINE, _TITLE = 6.7, 7.0, 22, 16
_PAD, _GAP, _ACROSS, _BETWEEN, _MARGIN = 12, 10, 40, 46, 24
# Steps with more operations than this are drawn without them.
_MOST_DRAWN = 60

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #1c1c22; max-width: 1200px; margin: 2em auto;
  padding: 0 1.5em; background: #fff }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2.2em }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .3em .8em; text-align: left;
  border-bottom: 1px solid #e2e2e8; vertical-align: top } td.n, th.n { text-align: right;
  white-space: nowrap; font-variant-numeric: tabular-nums }
pre { background: #f6f6f8; padding: 1em; overflow-x: auto;
  font: 12px/1.45 ui-monospace, monospace } summary { cursor: pointer; margin: .3em 0 }
.picture { overflow-x: auto; border: 1px solid #e2e2e8; border-radius: 6px; margin: 1em 0 }
.key span { display: inline-block; margin-right: 1.4em } .key i { display: inline-block; width: 1em;
  height: 1em; border-radius: 3px; vertical-align: -2px; margin-right: .4em; border: 1px solid }
.why { color: #555560 }
"""


def page(
    name: str,
    reports: Sequence[ProgramReport],
    notes: Sequence[str],
    rate: float | None,
    *,
    seconds: Mapping[str, list[float]] | None = None,
) -> str:
    """Return the page; ``seconds`` are times of the steps of the only program."""
    title = html.escape(name)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>",
    ]
    if rate:
        parts.append(f"<p>A copy moves {rate / 1e9:.1f} GB/s.</p>")
    for report in _with_parts(reports):
        parts += _program(report, rate, seconds)
    if notes:
        parts.append("<h2>Notes</h2><ul>")
        parts += [f"<li>{html.escape(note)}</li>" for note in notes]
        parts.append("</ul>")
    if not reports and not notes:
        parts.append("<p>It has not been called.</p>")
    return "\n".join([*parts, "</body></html>", ""])


def _with_parts(reports: Sequence[ProgramReport]) -> list[ProgramReport]:
    return [r for report in reports for r in (report, *_with_parts(report.parts))]


def _program(report: ProgramReport, rate: float | None, seconds: Any) -> list[str]:
    kinds = dict.fromkeys(step.kind for step in report.steps if step.kind != "view")
    key = "".join(
        f"<span><i style='background:{_COLOURS[k][0]};border-color:{_COLOURS[k][1]}'></i>"
        f"{_WORDS[k]}</span>"
        for k in kinds
    )
    total = _explain.moved(report.n_bytes, report.n_bytes_apart, rate)
    lines = [
        f"<h2>{html.escape(report.title.capitalize())}</h2><p>Moves {html.escape(total)}.</p>",
        *(f"<p>{html.escape(note)}</p>" for note in report.program.notes),
        f"<p class='key'>{key}</p><div class='picture'>{picture(report, seconds)}</div>",
        "<table><tr><th>step</th><th>computes</th><th>writes</th><th class='n'>moves</th>"
        "<th class='n'>one at a time</th><th class='n'>at best</th>"
        + ("<th class='n'>took</th><th class='n'>quartiles</th>" if seconds else "")
        + "</tr>",
    ]
    for step in report.steps:
        lines.append(_row(step, rate, seconds))
    lines.append("</table><details><summary>The program</summary>")
    lines.append(f"<pre>{html.escape(report.program.text)}</pre></details>")
    for step in report.steps:
        if step.source is not None:
            lines.append(f"<details><summary>Generated text of {step.name}</summary>")
            lines.append(f"<pre>{html.escape(step.source())}</pre></details>")
    return lines


def _row(step: StepReport, rate: float | None, seconds: Any) -> str:
    def listed(arrays):
        return "<br>".join(
            f"{name} {_explain.shape_of(n)}"
            + (f" <span class='why'>{html.escape(step.why[n])}</span>" if step.why[n] else "")
            for name, n in arrays
        )

    cells = [
        f"<td><b>{step.name}</b><br>{html.escape(step.title)}</td>",
        f"<td>{html.escape(_explain.operation_counts(step.operations))}</td>",
        f"<td>{listed(step.writes)}</td>",
        f"<td class='n'>{_explain.in_bytes(step.n_bytes) if step.n_bytes else ''}</td>",
        f"<td class='n'>{_explain.in_bytes(step.n_bytes_apart) if step.n_bytes else ''}</td>",
        f"<td class='n'>{_explain.in_time(step.n_bytes / rate) if rate and step.n_bytes else ''}"
        "</td>",
    ]
    if seconds:
        low, middle, high = (
            map(_explain.in_time, _explain.quartiles(seconds[step.name]))
            if step.name in seconds
            else ("", "", "")
        )
        cells.append(f"<td class='n'>{middle}</td><td class='n'>{low} - {high}</td>")
    return f"<tr>{''.join(cells)}</tr>"


# ---------------------------------------------------------------------------------- pictures


@dataclass(eq=False)
class _Card:
    """A step or array as it is drawn: lines of text, and the operations in it."""

    kind: str
    title: list[str]
    above: tuple[Node, ...]  # reads
    below: tuple[Node, ...]  # gives
    labels: dict[Node, str] = field(default_factory=dict)  # of its operations
    inner: Layout = Layout({}, {}, 0.0, 0.0)

    @property
    def head(self) -> float:
        """The height of its title."""
        return len(self.title) * _TITLE + 10

    @property
    def size(self) -> tuple[float, float]:
        width = max([self.inner.width, *(len(t) * _BOLD_LETTER for t in self.title)]) + 2 * _PAD
        return width, self.head + (self.inner.height + _PAD if self.inner.height else 0)


def picture(report: ProgramReport, seconds: Any = None) -> str:
    """Return a program's graph as SVG."""
    cards, sources = _cards(report, seconds)
    sizes = {card: card.size for card in cards}
    found = arrange(cards, sources, sizes, across=_ACROSS, between=_BETWEEN)
    width, height = found.width + 2 * _MARGIN, found.height + 2 * _MARGIN
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}'"
        f" viewBox='{-_MARGIN} {-_MARGIN} {width:.0f} {height:.0f}' font-size='12'"
        " font-family='system-ui, sans-serif'><defs><marker id='tip' viewBox='0 0 8 8' refX='7'"
        " refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
        "<path d='M0 0 L8 4 L0 8 z' fill='#55555f'/></marker></defs>"
    ]
    parts += [_line(points, "#55555f", tip=True) for points in found.routes.values()]
    parts += [_drawn(card, *found.corners[card], *sizes[card]) for card in cards]
    return "\n".join([*parts, "</svg>"])


def _cards(report: ProgramReport, seconds: Any) -> tuple[list[_Card], dict]:
    """Return what is drawn, in order, and for each what it reads from."""
    graph, names = report.program.graph, report.program._names
    used = {n for step in report.steps for _, n in step.reads} | set(graph.roots)
    cards = [
        _Card("array", [names.get(n, ""), _explain.shape_of(n)], (), (n,))
        for n in graph.inputs
        if n in used
    ]
    cards += [_step_card(step, seconds) for step in report.steps if step.kind != "view"]
    for i, node in enumerate(graph.outputs):
        cards.append(_Card("array", [f"result {i}", _explain.shape_of(node)], (node,), ()))
    for number, node in graph.updates:
        title = [f"x{number} becomes", _explain.shape_of(node)]
        cards.append(_Card("array", title, (node,), ()))
    giver: dict[Node, _Card] = {}
    sources: dict[_Card, list[_Card]] = {}
    for card in cards:
        bases = [n if n in giver else behind_views(n) for n in card.above]
        sources[card] = list(dict.fromkeys(giver[n] for n in bases if n in giver))
        giver |= dict.fromkeys(card.below, card)
    return cards, sources


def _step_card(step: StepReport, seconds: Any) -> _Card:
    title = [f"{step.name}: {step.title}", _explain.in_bytes(step.n_bytes)]
    if seconds and step.name in seconds:
        title[1] += f", {_explain.in_time(statistics.median(seconds[step.name]))}"
    members = [n for n in step.members if n.op not in VIEWS] or step.members
    above, below = (tuple(n for _, n in arrays) for arrays in (step.reads, step.writes))
    card = _Card(step.kind, title, above, below)
    if len(members) > _MOST_DRAWN:
        text = _explain.operation_counts(step.operations)
        card.title += textwrap.wrap(text, 60)
    else:
        card.labels = {n: _label(n) for n in members}
        sources = {
            n: list(dict.fromkeys(s for s in map(behind_views, n.src) if s in card.labels))
            for n in members
        }
        sizes = {n: (len(t) * _LETTER + 16, _LINE) for n, t in card.labels.items()}
        card.inner = arrange(members, sources, sizes, across=_GAP, between=14)
    return card


def _label(node: Node) -> str:
    numbers = [s.attrs[0] for s in map(behind_views, node.src) if s.op == "constant"]
    words = [str(n) if len(str(n)) < 9 else f"{n:.3g}" for n in numbers]
    return " ".join([_explain.describe(node), *words])


def _drawn(card: _Card, x: float, y: float, width: float, height: float) -> str:
    fill, line = _COLOURS[card.kind]
    parts = [
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}'"
        f" rx='{20 if card.kind == 'array' else 8}' fill='{fill}' stroke='{line}'/>"
    ]
    for i, text in enumerate(card.title):
        weight = " font-weight='600'" if i == 0 else ""
        parts.append(
            f"<text x='{x + width / 2:.1f}' y='{y + 18 + _TITLE * i:.1f}' text-anchor='middle'"
            f"{weight}>{html.escape(text)}</text>"
        )
    left, top = x + (width - card.inner.width) / 2, y + card.head
    for points in card.inner.routes.values():
        parts.append(_line([(left + a, top + b) for a, b in points], "#9a9aa5", tip=False))
    for node, (a, b) in card.inner.corners.items():
        if node in card.labels:
            text = card.labels[node]
            wide = len(text) * _LETTER + 16
            parts.append(
                f"<rect x='{left + a:.1f}' y='{top + b:.1f}' width='{wide:.1f}' height='{_LINE}'"
                f" rx='4' fill='#fff' stroke='{line}' stroke-opacity='.5'/>"
                f"<text x='{left + a + wide / 2:.1f}' y='{top + b + 15:.1f}'"
                f" text-anchor='middle'>{html.escape(text)}</text>"
            )
    return "".join(parts)


def _line(points: list[Point], colour: str, *, tip: bool) -> str:
    """Return a line through the points of a route; see :class:`Layout`."""
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for k, ((x, y), (u, v)) in enumerate(itertools.pairwise(points)):
        if k % 2 == 0:
            path += f" L{u:.1f} {v:.1f}"
            continue
        bend = (v - y) / 2
        path += f" C{x:.1f} {y + bend:.1f} {u:.1f} {v - bend:.1f} {u:.1f} {v:.1f}"
    end = " marker-end='url(#tip)'" if tip else ""
    return f"<path d='{path}' fill='none' stroke='{colour}'{end}/>"
