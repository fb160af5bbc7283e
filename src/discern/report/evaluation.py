"""The metrics that `discern evaluate` measured on a run, as charts and tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from discern.model_files.run import BLIMP_FILE
from discern.report.charts import Chart, Line, reliability_chart
from discern.report.page import Table
from discern.storage.checksums import read_json

_COLUMNS = {
    "tokens": "tokens evaluated",
    "replaced_fraction": "replaced fraction",
    "discriminator_loss": "discriminator loss",
    "discriminator_auc": "discriminator AUC",
    "discriminator_recall": "discriminator recall",
    "predicted_tokens": "tokens predicted",
    "prediction_loss": "prediction loss",
    "prediction_accuracy": "prediction accuracy",
}
_GROUPINGS = {
    "by_frequency": ("By frequency of the original token", "occurrences per million tokens"),
    "by_position": ("By part of the row", "part of the row"),
}


def evaluation_charts(found: Mapping[str, Any]) -> list[Chart]:
    """The charts that an evaluation has data for."""
    charts: list[Chart] = []
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
            charts.append(Chart(f"{title}, held out", "share", lines, axis, names=[row["group"] for row in rows]))
    if "calibration" in found:
        bins = found["calibration"]["bins"]
        curve = Line("discriminator", [each["probability"] for each in bins], [each["replaced"] for each in bins])
        title = "Calibration of the discriminator, held out"
        charts.append(reliability_chart(title, curve, "probability of 'replaced'", "share replaced"))
    return charts


def evaluation_tables(found: Mapping[str, Any]) -> list[Table]:
    """The numbers behind the charts."""
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
        note = f"{origin} Expected calibration error {error:.4f}: the mean difference of the two columns, weighted by tokens."
        tables.append(Table("Calibration of the discriminator", ["tokens", "probability of 'replaced'", "replaced"], cells, note))
    return tables


def _cell(value: float | None) -> str | float:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else value


EVALUATE_AGAIN = "remove it; `discern evaluate RUN --suite blimp --data DIR` writes it again"

_GROUPS = {"by_phenomenon": "phenomenon", "by_paradigm": "paradigm"}
_NEEDED = {"accuracy", "pairs", "ties", "step", *_GROUPS}


def blimp_tables(found: Mapping[str, Any]) -> list[Table]:
    """Accuracy overall and by phenomenon, then by paradigm, with one column per scorer.

    Args:
        found: results by the name of the scorer; incomplete entries are skipped.
    """
    by_scorer = {name: each for name, each in found.items() if isinstance(each, Mapping) and each.keys() >= _NEEDED}
    if not by_scorer:
        return []
    note = " ".join(_origin(name, each) for name, each in by_scorer.items())
    tables = []
    for key, what in _GROUPS.items():
        groups = sorted({group for each in by_scorer.values() for group in each[key]})
        rows: list[list[str | float]] = [
            [group.replace("_", " "), *(each[key].get(group, "") for each in by_scorer.values())] for group in groups
        ]
        if key == "by_phenomenon":
            rows.insert(0, ["overall", *(each["accuracy"] for each in by_scorer.values())])
        tables.append(Table(f"BLiMP by {what}: accuracy", [what, *by_scorer], rows, note))
    return tables


def _origin(scorer: str, found: Mapping[str, Any]) -> str:
    limit = found.get("limit")
    which = f"the first {limit:,} of each paradigm" if isinstance(limit, int) else "all"
    step = "" if found["step"] is None else f" at step {found['step']:,}"
    return f"{scorer}{step}: {found['pairs']:,} pairs ({which}); ties, counted as one half: {found['ties']:,}."


def read_blimp_results(run: Path) -> dict[str, Any]:
    """Results of `discern evaluate --suite blimp` in a run's folder, by scorer; empty if there are none.

    Raises:
        DataError: the file is damaged.
    """
    path = run / BLIMP_FILE
    return read_json(path, hint=EVALUATE_AGAIN) if path.is_file() else {}
