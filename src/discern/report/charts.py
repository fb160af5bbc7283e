"""Charts as inline SVG. The same input gives the same bytes. Colors are CSS variables of the page, for light and dark mode."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Protocol, runtime_checkable

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
_STEPS = (1, 2, 2.5, 5, 10)  # between the ticks of an axis, up to a power of ten
_MARKED_UP_TO = 40  # points; more markers would hide the line


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
class StepCurves:
    """Curves over the steps of a run, on common axes.

    Attributes:
        unit: label of the vertical axis.
        lines: at most 8.
        logarithmic: whether the vertical axis is logarithmic; all values must then be positive.
        level: value of a horizontal reference line.
        level_label: label of that line.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    logarithmic: bool = False
    level: float | None = None
    level_label: str = ""

    def __post_init__(self) -> None:
        if len(self.lines) > len(_LINES):
            raise ValueError(f"chart '{self.title}' has {len(self.lines)} lines; there are {len(_LINES)} colors")

    def draw(self, axes: Axes) -> None:
        """Draw the curves on the axes."""
        _draw(axes, self)


@runtime_checkable
class Chart(Protocol):
    """A chart of any kind that a page can show.

    Attributes:
        lines: entries of the legend below the title: labels and colors.
        level, level_label: the dotted reference line in the legend, if any.
    """

    @property
    def title(self) -> str: ...
    @property
    def lines(self) -> Sequence[Line]: ...
    @property
    def level(self) -> float | None: ...
    @property
    def level_label(self) -> str: ...

    def draw(self, axes: Axes) -> None:
        """Draw it on the axes, in `INK` and the colors of `line_color`."""


def line_color(number: int) -> str:
    """The color with this index, from 1, as a placeholder for a color of the page; the index wraps around."""
    return _LINES[(number - 1) % len(_LINES)]


def line_style(number: int) -> dict[str, Any]:
    """Color, dashes and width of the line with this index, from 1, as arguments of `Axes.plot`."""
    place = (number - 1) % len(_LINES)
    return {"color": _LINES[place], "linestyle": _DASHES[place % len(_DASHES)], "linewidth": _WIDTHS[place // len(_DASHES)]}


@dataclass(frozen=True)
class Key:
    """An entry of a legend.

    Attributes:
        style: class of the stylesheet that draws the dashes of the line; "" if points stand for it.
        symbol: shape of the points; "" for a line.
    """

    label: str
    color: int
    style: str
    symbol: str = ""


def legend(chart: Chart) -> list[Key]:
    """The entries of a chart's legend."""
    keys = []
    for number, line in enumerate(chart.lines, 1):
        place = ((line.color or number) - 1) % len(_LINES)
        if isinstance(chart, Scatter):
            keys.append(Key(line.label, place + 1, "", _SYMBOLS[place]))
        else:
            wide = " bold" if place >= len(_DASHES) else ""
            keys.append(Key(line.label, place + 1, f"dash-{place % len(_DASHES) + 1}{wide}"))
    return keys


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


def _draw(axes: Axes, chart: StepCurves) -> None:
    if chart.level is not None:
        axes.axhline(chart.level, color=INK, linewidth=1, linestyle=(0, (2, 3)))
    for number, line in enumerate(chart.lines, 1):
        marker: dict[str, Any] = {"marker": "o", "markersize": 3} if len(line.steps) <= _MARKED_UP_TO else {}
        axes.plot(line.steps, line.values, **line_style(line.color or number), **marker)
    axes.set_xlim(left=0)
    axes.set_xlabel("step")
    axes.set_ylabel(chart.unit)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=_STEPS))
    if chart.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=_STEPS))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


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


COLORS = 8
"""Number of runs that can be told apart in a chart."""

_MARKERS = "os^DvPX*"
_SYMBOLS = "●■▲◆▼✚✖★"


@dataclass(frozen=True)
class Scatter:
    """Scores against cost: one point per seed, a larger one at the median, and the Pareto front.

    Attributes:
        x_label, y_label: labels of the axes.
        lines: for each run, its cost (one number) and the scores of its seeds.
        level: a reference score, shown as a dotted line.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    level: float | None = None
    level_label: str = ""

    def draw(self, axes: Axes) -> None:
        """Draw it on the axes."""
        if self.level is not None:
            axes.axhline(self.level, color=INK, linewidth=1, linestyle=(0, (2, 3)))
        medians = [(line.steps[0], statistics.median(line.values)) for line in self.lines]
        front = pareto_front(medians)
        axes.plot([x for x, _ in front], [y for _, y in front], color=INK, linewidth=1, linestyle="--")
        for number, (line, (cost, median)) in enumerate(zip(self.lines, medians, strict=True), 1):
            color = line_color(line.color or number)
            axes.plot([cost, cost], [min(line.values), max(line.values)], color=color, linewidth=1)
            axes.plot([cost] * len(line.values), line.values, color=color, linestyle="", marker="_", markersize=6)
            axes.plot([cost], [median], color=color, linestyle="", marker=_MARKERS[(line.color or number) - 1], markersize=6)
        axes.set_xlim(0, 1.08 * max(cost for cost, _ in medians) or 1)
        _label(axes, self.x_label, self.y_label)


@dataclass(frozen=True)
class SeedCurves:
    """A metric against cost, with one thin line per seed in the color of its run.

    Attributes:
        lines: the legend: a label and a color for each run.
        seeds: the curves.
    """

    title: str
    x_label: str
    lines: Sequence[Line]
    seeds: Sequence[Line]
    level: float | None = None
    level_label: str = ""

    def draw(self, axes: Axes) -> None:
        """Draw it on the axes."""
        for line in self.seeds:
            marker = "o" if len(line.values) == 1 else ""
            look = line_style(line.color or 1) | {"linewidth": 1.1}
            axes.plot(line.steps, line.values, marker=marker, markersize=3, **look)
        axes.set_xlim(left=0)
        _label(axes, self.x_label, "")


@dataclass(frozen=True)
class Reliability:
    """Reliability diagram: how often something is the case against its predicted probability.

    Attributes:
        lines: a single one; its steps and values both lie between 0 and 1.
    """

    lines: Sequence[Line]
    title: str = "Calibration of the discriminator, held out"
    level: float | None = 1.0
    level_label: str = "perfect calibration"
    x_label: str = "probability of 'replaced'"
    y_label: str = "share replaced"

    def draw(self, axes: Axes) -> None:
        """Draw the curve and the diagonal."""
        axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (2, 3)))
        for number, line in enumerate(self.lines, 1):
            axes.plot(line.steps, line.values, marker="o", markersize=3, **line_style(number))
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)


@dataclass(frozen=True)
class ByGroup:
    """Metrics of several groups of tokens side by side.

    Attributes:
        lines: curves whose steps are indices of groups.
        names: names of the groups.
    """

    title: str
    axis: str
    lines: Sequence[Line]
    names: Sequence[str]
    level: float | None = None
    level_label: str = ""

    def draw(self, axes: Axes) -> None:
        """Draw one point per group, joined to show the trend."""
        for number, line in enumerate(self.lines, 1):
            axes.plot(line.steps, line.values, marker="o", markersize=4, **line_style(number))
        axes.set_xticks(range(len(self.names)), [name.replace(" ", "\n", 1) for name in self.names], fontsize=8)
        axes.set_xlabel(self.axis)
        axes.set_ylabel("share")
        highest = max(value for line in self.lines for value in line.values)
        axes.set_ylim(0, 1.08 * highest or 1)  # so that the highest point is not cut
        axes.yaxis.set_major_locator(MaxNLocator(6))


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (cost, score) that no other point dominates, by increasing cost.

    A point is dominated by one that is better at the same cost or lower, or as good at a lower cost.
    """
    front: list[tuple[float, float]] = []
    for cost, score in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or score > front[-1][1]:
            front.append((cost, score))
    return front


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}" if value < 1e4 else f"{value:.3g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
