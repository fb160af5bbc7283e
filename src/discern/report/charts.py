"""Charts as inline SVG. The same input gives the same bytes. Colors are CSS variables of the page, for light and dark mode."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import StringIO
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

# Placeholders that matplotlib accepts as colors; in the SVG each becomes a variable of the stylesheet.
_INK, _GRID = "#a0b0c0", "#a0b0c9"
_LINES = tuple(f"#a0b0c{number}" for number in range(1, 9))
_VARIABLES = {_INK: "currentColor", _GRID: "var(--grid)"} | {line: f"var(--line-{i})" for i, line in enumerate(_LINES, 1)}

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "discern",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _GRID,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
}
_INCHES = (4.4, 2.6)
# A line is told apart by its color and by its dashes, so that a chart can be read without colors; `.dash-N` in page.css repeats
# them in the legend. The second four lines have the dashes of the first four, and are wider.
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2.5)), (0, (1.6, 1.6)), (0, (5.5, 2, 1.6, 2)))
_WIDTHS = (1.6, 2.8)
_MARKERS = "os^DvPX*"  # page.html repeats them in the legend
_MARKED_UP_TO = 40  # points; more markers would hide the line

COLORS = len(_LINES)
"""Number of lines that can be told apart in a chart."""


@dataclass(frozen=True)
class Line:
    """One curve: a value for each step.

    Attributes:
        label: entry of the legend, which lines can share; "": none.
        color: index of the color, from 1.
    """

    label: str
    steps: tuple[float, ...]
    values: tuple[float, ...]
    color: int = 1


@dataclass(frozen=True)
class Chart:
    """Lines on common axes.

    Attributes:
        logarithmic: whether the vertical axis is logarithmic if all values are positive.
        level: value at which a dotted reference line begins.
        level_label: label of that line.
        slope: slope of that line; 1 is the diagonal of two shares.
        scatter: whether a line is a run: its cost, repeated for each of its seeds, and their scores. Drawn are a point per seed,
            a larger one at the median, and the Pareto front.
    """

    title: str
    y_label: str
    lines: tuple[Line, ...] = ()
    x_label: str = "step"
    logarithmic: bool = False
    level: float | None = None
    level_label: str = ""
    slope: float = 0.0
    scatter: bool = False

    @property
    def legend(self) -> dict[str, int]:
        """The color of each label."""
        return {line.label: line.color for line in self.lines if line.label}


def reliability_chart(title: str, bins: Sequence[Mapping[str, float]], x_label: str, y_label: str) -> Chart:
    """A reliability diagram, with the expected calibration error in its legend.

    Args:
        bins: as of `objectives.metrics.calibration`.
    """
    error = sum(row["tokens"] * abs(row["probability"] - row["replaced"]) for row in bins)
    label = f"expected calibration error {error / sum(row['tokens'] for row in bins):.3f}"
    line = Line(label, tuple(row["probability"] for row in bins), tuple(row["replaced"] for row in bins))
    return Chart(title, y_label, (line,), x_label, level=0.0, level_label="perfect calibration", slope=1.0)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (cost, score) that no other point dominates, by increasing cost.

    A point is dominated by one that is better at the same cost or lower, or as good at a lower cost.
    """
    front: list[tuple[float, float]] = []
    for cost, score in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or score > front[-1][1]:
            front.append((cost, score))
    return front


@lru_cache(maxsize=128)
def chart_svg(chart: Chart, name: str) -> str:
    """An `<svg>` element that fills the width of its container and refers to nothing outside it.

    Args:
        name: prefix of every id; the charts of a page need different ones.
    """
    stream = StringIO()
    with style.context(["default", _STYLE]):
        figure = Figure(figsize=_INCHES, layout="constrained")
        _draw(chart, figure.add_subplot())
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    # The element alone: HTML needs no prologue and no namespaces, and ids must be unique in the page.
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href=", "href=")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    # The caption of the figure labels it for screen readers too; without a fixed size it fills its container.
    opening = rf'<svg \g<1> role="img" aria-labelledby="{name}-title">'
    return re.sub(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', opening, svg, count=1)


def _draw(chart: Chart, axes: Axes) -> None:
    if chart.level is not None:
        axes.axline((0, chart.level), slope=chart.slope, color=_INK, linewidth=1, linestyle=(0, (2, 3)))
    if chart.scatter:
        medians = [(line.steps[0], statistics.median(line.values)) for line in chart.lines]
        front = pareto_front(medians)
        axes.plot([x for x, _ in front], [y for _, y in front], color=_INK, linestyle="--")
        for line, (cost, median) in zip(chart.lines, medians, strict=True):
            color, marker = _LINES[line.color - 1], _MARKERS[line.color - 1]
            axes.plot(line.steps, line.values, color=color, marker="_")
            axes.plot([cost], [median], color=color, marker=marker)
    else:
        for line in chart.lines:
            wide, dashes = divmod(line.color - 1, len(_DASHES))
            axes.plot(
                line.steps,
                line.values,
                color=_LINES[line.color - 1],
                linestyle=_DASHES[dashes],
                linewidth=_WIDTHS[wide],
                marker="o" if len(line.steps) <= _MARKED_UP_TO else "",
                markersize=3,
            )
    axes.locator_params(axis="x", nbins=5)
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    if chart.logarithmic and all(value > 0 for line in chart.lines for value in line.values):
        axes.set_yscale("log", subs=(2, 5))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
        axis.set_minor_formatter(axis.get_major_formatter())
    if chart.slope:
        axes.set(xlim=(0, 1), ylim=(0, 1))
    else:
        axes.set_xlim(left=0)
