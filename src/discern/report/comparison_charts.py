"""Pictures of a comparison: scores against cost, and curves of several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from discern.report.charts import INK, Line, line_colour

COLOURS = 8
"""Runs that can be told apart in a picture."""

_MARKERS = "os^DvPX*"


@dataclass(frozen=True)
class Scatter:
    """Scores against cost: a point a seed, a larger one at the median, and the front that no other run beats.

    Attributes:
        x_label, y_label: of the axes.
        lines: of each run the cost (one number) and the scores of its seeds.
        level: a score to compare with, as a dotted line.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    level: float | None = None
    level_label: str = ""

    def draw(self, axes: Axes) -> None:
        """Put it on the axes."""
        if self.level is not None:
            axes.axhline(self.level, color=INK, linewidth=1, linestyle=(0, (2, 3)))
        medians = [(line.steps[0], statistics.median(line.values)) for line in self.lines]
        front = pareto_front(medians)
        axes.plot([x for x, _ in front], [y for _, y in front], color=INK, linewidth=1, linestyle="--")
        for number, (line, (cost, median)) in enumerate(zip(self.lines, medians, strict=True), 1):
            colour = line_colour(line.colour or number)
            axes.plot([cost, cost], [min(line.values), max(line.values)], color=colour, linewidth=1)
            axes.plot([cost] * len(line.values), line.values, color=colour, linestyle="", marker="_", markersize=6)
            axes.plot([cost], [median], color=colour, linestyle="", marker=_MARKERS[(line.colour or number) - 1], markersize=6)
        axes.set_xlim(0, 1.08 * max(cost for cost, _ in medians) or 1)
        _label(axes, self.x_label, self.y_label)


@dataclass(frozen=True)
class SeedCurves:
    """A figure over what was spent, a thin line a seed in the colour of its run.

    Attributes:
        lines: the key: a label and a colour for each run.
        seeds: the curves.
    """

    title: str
    x_label: str
    lines: Sequence[Line]
    seeds: Sequence[Line]
    level: float | None = None
    level_label: str = ""

    def draw(self, axes: Axes) -> None:
        """Put it on the axes."""
        for line in self.seeds:
            marker = "o" if len(line.values) == 1 else ""
            axes.plot(line.steps, line.values, color=line_colour(line.colour or 1), linewidth=1.1, marker=marker, markersize=3)
        axes.set_xlim(left=0)
        _label(axes, self.x_label, "")


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (cost, score) that no other beats: none is as cheap and better, or cheaper and as good. By rising cost."""
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
