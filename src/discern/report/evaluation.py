"""What `discern evaluate` found about a run, as pictures and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from discern.report.charts import INK, Line, Picture, line_colour
from discern.report.page import Table

_COLUMNS = {
    "tokens": "tokens judged",
    "replaced_fraction": "replaced fraction",
    "discriminator_loss": "discriminator loss",
    "discriminator_auc": "discriminator AUC",
    "discriminator_recall": "discriminator recall",
    "predicted_tokens": "tokens predicted",
    "prediction_loss": "prediction loss",
    "prediction_accuracy": "prediction accuracy",
}
_GROUPINGS = {
    "by_frequency": ("By frequency of the original token", "occurrences in a million tokens"),
    "by_position": ("By part of the row", "part of the row"),
}


@dataclass(frozen=True)
class Reliability:
    """How often a token was replaced, against the probability that the discriminator gave it.

    Attributes:
        lines: one, whose steps and values both lie between 0 and 1.
    """

    lines: Sequence[Line]
    title: str = "Calibration of the discriminator, held out"
    level: float | None = 1.0
    level_label: str = "as often as it says"

    def draw(self, axes: Axes) -> None:
        """The curve, and the diagonal."""
        axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (2, 3)))
        for number, line in enumerate(self.lines, 1):
            axes.plot(line.steps, line.values, color=line_colour(number), linewidth=1.6, marker="o", markersize=3)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_xlabel("probability of 'replaced'")
        axes.set_ylabel("share replaced")


@dataclass(frozen=True)
class ByGroup:
    """Shares of several groups side by side.

    Attributes:
        lines: their steps count the groups.
        names: of the groups.
    """

    title: str
    axis: str
    lines: Sequence[Line]
    names: Sequence[str]
    level: float | None = field(default=None)
    level_label: str = ""

    def draw(self, axes: Axes) -> None:
        """A point a group, joined to show the trend."""
        for number, line in enumerate(self.lines, 1):
            axes.plot(line.steps, line.values, color=line_colour(number), linewidth=1.6, marker="o", markersize=4)
        axes.set_xticks(range(len(self.names)), [name.replace(" ", "\n", 1) for name in self.names], fontsize=8)
        axes.set_xlabel(self.axis)
        axes.set_ylabel("share")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(6))


def evaluation_pictures(found: Mapping[str, Any]) -> list[Picture]:
    """The pictures that an evaluation has figures for."""
    pictures: list[Picture] = []
    for key, (title, axis) in _GROUPINGS.items():
        rows = found.get(key, [])
        lines = [
            Line(label, [place for place, row in enumerate(rows) if name in row], [row[name] for row in rows if name in row])
            for name, label in (
                ("discriminator_auc", "discriminator AUC"),
                ("discriminator_recall", "discriminator recall"),
                ("prediction_accuracy", "prediction accuracy"),
            )
        ]
        lines = [line for line in lines if line.values]
        if lines:
            pictures.append(ByGroup(f"{title}, held out", axis, lines, [row["group"] for row in rows]))
    if "calibration" in found:
        bins = found["calibration"]["bins"]
        curve = Line("discriminator", [each["probability"] for each in bins], [each["replaced"] for each in bins])
        pictures.append(Reliability([curve]))
    return pictures


def evaluation_tables(found: Mapping[str, Any]) -> list[Table]:
    """The figures behind the pictures."""
    origin = f"From `discern evaluate`, {found['rows']:,} held-out rows at step {found['step']:,}."
    tables = []
    for key, (title, _) in _GROUPINGS.items():
        rows = found.get(key, [])
        names = [name for name in _COLUMNS if any(name in row for row in rows)]
        cells = [[row["group"], *(_cell(row.get(name)) for name in names)] for row in rows]
        if cells:
            tables.append(Table(title, ["", *(_COLUMNS[name] for name in names)], cells, origin))
    if "calibration" in found:
        bins = found["calibration"]["bins"]
        cells = [[f"{each['tokens']:,}", each["probability"], each["replaced"]] for each in bins]
        error = found["calibration"]["expected_calibration_error"]
        note = f"{origin} Expected calibration error {error:.4f}: the mean distance of the two, over the tokens."
        tables.append(Table("Calibration of the discriminator", ["tokens", "probability of 'replaced'", "replaced"], cells, note))
    return tables


def _cell(value: float | None) -> str | float:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else value
