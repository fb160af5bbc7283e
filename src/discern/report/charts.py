"""Charts as inline SVG. The same input gives the same bytes. Colors are CSS variables of the page, for light and dark mode."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

# Placeholders that matplotlib accepts as colors; in the SVG each becomes a variable of the stylesheet.
INK, _GRID = "#a0b0c0", "#a0b0c9"
_LINES = tuple(f"#a0b0c{number}" for number in range(1, 9))
_VARIABLES = {INK: "currentColor", _GRID: "var(--grid)"} | {line: f"var(--line-{i})" for i, line in enumerate(_LINES, 1)}

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "discern",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": _GRID,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
}
_INCHES = (4.4, 2.6)
# A line is told apart by its color and by its dashes, so that a chart can be read without colors; `.dash-N` in page.css repeats
# them in the legend. The second four lines have the dashes of the first four, and are wider.
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2.5)), (0, (1.6, 1.6)), (0, (5.5, 2, 1.6, 2)))
_WIDTHS = (1.6, 2.8)
_MARKERS = "os^DvPX*"
_SYMBOLS = "●■▲◆▼✚✖★"
_MARKED_UP_TO = 40  # points; more markers would hide the line

COLORS = len(_LINES)
"""Number of lines that can be told apart in a chart."""


@dataclass(frozen=True)
class Line:
    """One curve: a value for each step.

    Attributes:
        color: index of the color, from 1; None: the index of the line in its chart.
    """

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    color: int | None = None


@dataclass(frozen=True)
class Key:
    """An entry of a legend.

    Attributes:
        style: class of the stylesheet that draws the dashes of the line; "" if points stand for it.
        symbol: shape of the points; "" for a line.
    """

    label: str
    color: int
    style: str = ""
    symbol: str = ""


@dataclass(frozen=True)
class Chart:
    """Lines on common axes.

    Attributes:
        lines: at most `COLORS`; their labels are the legend.
        curves: what is drawn, if several curves belong to one line of the legend.
        names: names of the positions 0, 1, ... on the horizontal axis; empty for numbers.
        logarithmic: whether the vertical axis is logarithmic; all values must then be positive.
        level: value at which a dotted reference line begins.
        level_label: label of that line.
        slope: slope of that line; 1 is the diagonal of two shares.
    """

    title: str
    y_label: str
    lines: Sequence[Line]
    x_label: str = "step"
    curves: Sequence[Line] = ()
    names: Sequence[str] = ()
    logarithmic: bool = False
    level: float | None = None
    level_label: str = ""
    slope: float = 0.0

    def draw(self, axes: Axes) -> None:
        """Draw it on the axes."""
        if self.level is not None:
            axes.axline((0, self.level), slope=self.slope, color=INK, linewidth=1, linestyle=(0, (2, 3)))
        self._plot(axes)
        axes.set(xlabel=self.x_label, ylabel=self.y_label)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=self.x_label == "step", steps=(1, 2, 2.5, 5, 10)))
        if self.logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 2.5, 5, 10)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        if self.slope:
            axes.set(xlim=(0, 1), ylim=(0, 1))
        elif self.names:
            axes.set_ylim(bottom=0)
            axes.set_xticks(range(len(self.names)), [name.replace(" ", "\n", 1) for name in self.names], fontsize=8)
        else:
            axes.set_xlim(left=0)

    def _plot(self, axes: Axes) -> None:
        for number, line in enumerate(self.curves or self.lines, 1):
            place = (line.color or number) - 1
            axes.plot(
                line.steps,
                line.values,
                color=_LINES[place],
                linestyle=_DASHES[place % len(_DASHES)],
                linewidth=1.1 if self.curves else _WIDTHS[place // len(_DASHES)],
                marker="o" if len(line.steps) <= _MARKED_UP_TO else "",
                markersize=3,
            )

    def legend(self) -> list[Key]:
        """The entries of the legend."""
        return [self._key(line.label, line.color or number) for number, line in enumerate(self.lines, 1)]

    def _key(self, label: str, color: int) -> Key:
        wide = " bold" if color > len(_DASHES) else ""
        return Key(label, color, style=f"dash-{(color - 1) % len(_DASHES) + 1}{wide}")


class Scatter(Chart):
    """Scores against cost: one point per seed, a larger one at the median, and the Pareto front.

    A line is a run: its cost (one number) and the scores of its seeds.
    """

    def _plot(self, axes: Axes) -> None:
        medians = [(line.steps[0], statistics.median(line.values)) for line in self.lines]
        front = pareto_front(medians)
        axes.plot([x for x, _ in front], [y for _, y in front], color=INK, linewidth=1, linestyle="--")
        for number, (line, (cost, median)) in enumerate(zip(self.lines, medians, strict=True), 1):
            place = (line.color or number) - 1
            axes.plot([cost, cost], [min(line.values), max(line.values)], color=_LINES[place], linewidth=1)
            axes.plot([cost] * len(line.values), line.values, color=_LINES[place], linestyle="", marker="_", markersize=6)
            axes.plot([cost], [median], color=_LINES[place], linestyle="", marker=_MARKERS[place], markersize=6)

    def _key(self, label: str, color: int) -> Key:
        return Key(label, color, symbol=_SYMBOLS[color - 1])


def reliability_chart(title: str, line: Line, x_label: str, y_label: str) -> Chart:
    """A reliability diagram: how often something is the case against its predicted probability, both between 0 and 1."""
    return Chart(title, y_label, [line], x_label, level=0.0, level_label="perfect calibration", slope=1.0)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (cost, score) that no other point dominates, by increasing cost.

    A point is dominated by one that is better at the same cost or lower, or as good at a lower cost.
    """
    front: list[tuple[float, float]] = []
    for cost, score in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or score > front[-1][1]:
            front.append((cost, score))
    return front


def chart_svg(chart: Chart, name: str) -> str:
    """An `<svg>` element that fills the width of its container and refers to nothing outside it.

    Args:
        name: prefix of every id; the charts of a page need different ones.
    """
    stream = StringIO()
    with style.context(["default", _STYLE]):
        figure = Figure(figsize=_INCHES, layout="constrained")
        chart.draw(figure.add_subplot())
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _inline(stream.getvalue(), name)


def _inline(document: str, name: str) -> str:
    """The element alone: HTML needs no prologue and no namespaces, and ids must be unique in the page."""
    svg = document[document.index("<svg") :].strip()
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href=", "href=")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None, "matplotlib writes a viewBox"
    # The caption of the figure labels it for screen readers too; without a fixed size it fills its container.
    return re.sub(r"<svg[^>]*>", f'<svg {box.group()} role="img" aria-labelledby="{name}-title">', svg, count=1)
