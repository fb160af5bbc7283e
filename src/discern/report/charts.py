"""Curves as inline SVG: same input, same bytes; colours come from the page, so that they suit a light and a dark one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Protocol, runtime_checkable

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

# Stand-ins that matplotlib accepts as colours; in the SVG each becomes a variable of the page's style sheet.
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
_STEPS = (1, 2, 2.5, 5, 10)  # between the marks of an axis, up to a power of ten
_MARKED_UP_TO = 40  # points; more would hide the line


@dataclass(frozen=True)
class Line:
    """One curve: a value at each of some steps.

    Attributes:
        colour: number of its colour, from 1; None: by its place among the lines.
    """

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    colour: int | None = None


@dataclass(frozen=True)
class Chart:
    """Curves over the steps of a run, on common axes.

    Attributes:
        unit: of the vertical axis.
        lines: at most 8.
        logarithmic: the vertical axis; every value is then positive.
        level: a horizontal line to compare with.
        level_label: what that line is.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    logarithmic: bool = False
    level: float | None = None
    level_label: str = ""

    def __post_init__(self) -> None:
        if len(self.lines) > len(_LINES):
            raise ValueError(f"chart '{self.title}' has {len(self.lines)} lines; there are {len(_LINES)} colours")

    def draw(self, axes: Axes) -> None:
        """Put the curves on the axes."""
        _draw(axes, self)


@runtime_checkable
class Picture(Protocol):
    """What a page shows under a title: a `Chart`, or something that draws itself.

    Attributes:
        lines: for the key below the title, which shows their labels and colours.
        level, level_label: the dotted line of the key, if any.
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
        """Put it on the axes, in `INK` and the colours of `line_colour`."""


def line_colour(number: int) -> str:
    """The colour of that number, from 1; the page decides what it looks like. Past the last the first comes again."""
    return _LINES[(number - 1) % len(_LINES)]


def chart_svg(chart: Picture, name: str) -> str:
    """An `<svg>` element, as wide as its place, without reference to anything outside it.

    Args:
        name: goes before every id; two charts of a page need different ones.
    """
    stream = StringIO()
    with style.context(["default", _STYLE]):
        figure = Figure(figsize=_INCHES, layout="constrained")
        chart.draw(figure.add_subplot())
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _inline(stream.getvalue(), name)


def _draw(axes: Axes, chart: Chart) -> None:
    if chart.level is not None:
        axes.axhline(chart.level, color=INK, linewidth=1, linestyle=(0, (2, 3)))
    for number, line in enumerate(chart.lines, 1):
        colour = line_colour(line.colour or number)
        marker: dict[str, Any] = {"marker": "o", "markersize": 3} if len(line.steps) <= _MARKED_UP_TO else {}
        axes.plot(line.steps, line.values, color=colour, linewidth=1.6, **marker)
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
    """The element alone: HTML needs no prologue and no name spaces, and ids must be unique in the page."""
    svg = document[document.index("<svg") :].strip()
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href=", "href=")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None, "matplotlib writes a viewBox"
    # The figure's caption names it for everybody; without the fixed size it fills its place.
    return re.sub(r"<svg[^>]*>", f'<svg {box.group()} role="img" aria-labelledby="{name}-title">', svg, count=1)
