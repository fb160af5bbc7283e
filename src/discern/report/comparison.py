"""The page of a comparison: scores with their spread, significance tests, cost, and curves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from discern.report.charts import COLORS, Chart, Line
from discern.report.metrics import held_out_table, metric_charts
from discern.report.page import Page, Table

Comparison = Mapping[str, Any]
"""The contents of comparison.json."""
_BLANK = "–"
_COSTS = {
    "steps": "steps",
    "flops": "FLOPs",
    "flops_paper_convention": "FLOPs, paper",
    "seconds": "seconds",
    "positions": "positions read",
    "parameters": "parameters",
}


def comparison_page(comparison: Comparison) -> Page:
    """The page of a comparison by `discern compare`. The same input gives the same page."""
    runs, reference = comparison["runs"], comparison["reference"]
    trained = [run for run in runs if run["trained"]]
    logs = {run["name"]: [curve["points"] for curve in run["curves"]] for run in trained}
    held_out = {
        run["name"]: {key: with_spread(entry) for key, entry in run["held_out"].items()} for run in trained if run["held_out"]
    }
    note = "Measured on held-out text, each run by its own objective: losses of different objectives are not comparable."
    settings = [
        [run["name"], key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]
        for run in runs
        for key, value in run["settings"].items()
        if value is not None
    ]
    failures = [[run["name"], seed, "pre-training", reason] for run in runs for seed, reason in run["failures"].items()]
    failures += [
        [run["name"], str(comparison["seeds"][int(number)]), f"{task}, fine-tuning seed {seed}", reason]
        for run in runs
        for task in comparison["tasks"]
        for number, reasons in run["scores"][task]["failed_finetunings"].items()
        for seed, reason in reasons.items()
    ]
    return Page(
        title=f"discern: {', '.join(run['name'] for run in runs)} at equal {comparison['budget_unit']}"
        + ("" if comparison["complete"] else " (not finished)"),
        facts=_facts(comparison),
        charts=[*_pareto(comparison, trained), *metric_charts(logs, comparison["equal"])],
        sections=[
            _scores(comparison),
            Table(
                f"Against {reference}",
                ("run", "score", "difference of the medians", "p", "seeds"),
                [
                    [entry["run"], entry["task"], f"{entry['difference_of_medians']:+.4f}", p_text(entry), entry["verdict"]]
                    for entry in comparison["significance"]
                ],
                " ".join(significance_notes(comparison)),
            ),
            Table(
                "Cost",
                ("run", *_COSTS.values()),
                [[run["name"], *(_short(run[key]) for key in _COSTS)] for run in runs],
                f"Medians over the seeds that did not diverge, of pre-training alone. FLOPs: {comparison['convention']}. "
                "'Paper': by the paper's script.",
            ),
            held_out_table("Held-out metrics", held_out, note),
            Table(
                f"Settings that differ from those of {reference}",
                ("run", "setting", "value"),
                settings,
                f"Settings of {reference} that another objective does not have are left out.",
            ),
            Table(
                "Failures",
                ("run", "seed", "part", "reason"),
                failures,
                "To repeat a pre-training that failed, remove its folders results/RUN/seed-N and work/RUN/seed-N.",
            ),
        ],
        notes=_notes(comparison, len(trained)),
    )


def score_columns(comparison: Comparison) -> list[str]:
    """The mean (if there are several tasks), then each task."""
    return (["mean"] if len(comparison["tasks"]) > 1 else []) + list(comparison["tasks"])


def with_spread(entry: Mapping[str, Any]) -> str:
    """ "0.7120 (0.7010 to 0.7204)"; without a range if there is a single value."""
    if entry["median"] is None:
        return _BLANK
    single = sum(value is not None for value in entry["values"]) == 1
    return f"{entry['median']:.4f}" if single else f"{entry['median']:.4f} ({entry['lowest']:.4f} to {entry['highest']:.4f})"


def p_text(entry: Mapping[str, Any]) -> str:
    """The p-value of a difference, as the tables show it."""
    if entry["p"] is None:
        return _BLANK
    return f"{entry['p']:.3f}" if entry["p"] >= 0.001 else f"{entry['p']:.1g}"  # never 0


def significance_notes(comparison: Comparison) -> list[str]:
    """Description of the test, and its limits at these numbers of seeds."""
    entries = comparison["significance"]
    if not entries:
        return []
    exact = all(entry["exact"] for entry in entries)
    lines = [
        f"p: {'exact ' if exact else ''}permutation test of the difference of the means over pre-training seeds, two-sided, "
        f"unpaired, against '{comparison['reference']}'; not corrected for the {len(entries)} comparisons of the table."
    ]
    if not exact:
        lines.append("With so many seeds, p is estimated from 200,000 random ways to divide them, instead of all ways.")
    for (first, second), smallest in sorted({tuple(entry["seeds"]): entry["smallest_p"] for entry in entries}.items()):
        if min(first, second) < 2:
            lines.append(
                "With only one seed, the difference cannot be distinguished from chance: another seed could differ as much."
            )
        elif smallest > 0.05:
            lines.append(
                f"With {first} and {second} seeds the smallest possible p of such a test is {smallest:.3g}: no "
                "difference can reach 0.05, however large. With four seeds on each side it is 0.029, with five 0.008."
            )
        else:
            lines.append(f"With {first} and {second} seeds the smallest possible p of this test is {smallest:.2g}.")
    if any(run["failures"] for run in comparison["runs"]):
        lines.append("Seeds whose pre-training diverged have no score: they are left out of the medians and of the test.")
    lines.append(
        "A seed changes the initial weights, the order of the text, the masks and the samples. The files of the tasks stay the "
        "same, so the spread does not cover other test examples."
    )
    return lines


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    reference, data, seeds = comparison["runs"][0], comparison["data"], comparison["seeds"]
    shape, budget, unit = reference["shape"], comparison["budget"], comparison["budget_unit"]
    return [
        ("Equal for all runs", unit),
        ("Budget of a run with budget = 1", _BLANK if budget is None else f"{budget:.4g} {unit}"),
        ("Reference", comparison["reference"]),
        ("Pre-training seeds per run", f"{len(seeds)} seeds: {', '.join(map(str, seeds))}"),
        ("Fine-tuning seeds per encoder and task", str(comparison["finetune_seeds"])),
        (
            "Evaluated network of the reference",
            f"{reference['network']}: {shape['num_layers']} layers of width {shape['hidden_size']}, "
            f"{shape['num_heads']} attention heads, feed-forward width {shape['feedforward_size']}",
        ),
        (
            "Data set",
            f"{_short(data['documents'])} documents, {_short(data['tokens'])} tokens; vocabulary {data['vocab_size']:,}",
        ),
        ("Fingerprint of the data", str(data["fingerprint"])[:12]),
        *(("Machine", "; ".join(f"{key} {value}" for key, value in facts.items())) for facts in comparison["machines"]),
        *(("Versions", ", ".join(f"{key} {value}" for key, value in facts.items())) for facts in comparison["versions"]),
    ]


def _scores(comparison: Comparison) -> Table:
    columns, runs = score_columns(comparison), comparison["runs"]
    first = runs[0]["scores"]
    heads = [f"{column} ({first[column]['metric']})" if first[column]["metric"] else column for column in columns]
    rows = []
    for run in runs if columns else ():
        diverged = f" ({len(run['failures'])} diverged)" if run["failures"] else ""
        seeds = f"{run['finished_seeds']} of {len(comparison['seeds'])}{diverged}"
        rows.append([run["name"], *(with_spread(run["scores"][column]) for column in columns), seeds])
    note = "Median over the pre-training seeds, with the lowest and the highest; failed fine-tuning seeds are included."
    return Table("Scores after fine-tuning", ["run", *heads, "seeds"], rows, note)


def _pareto(comparison: Comparison, trained: list[Mapping[str, Any]]) -> list[Chart]:
    """The main score against the cost of pre-training, in FLOPs and in time."""
    columns = score_columns(comparison)
    if not columns:
        return []
    score, charts = columns[0], []
    scores = {run["name"]: run["scores"][score] for run in comparison["runs"]}
    label = "mean score" if score == "mean" else f"{score}: {scores[comparison['reference']]['metric']}"
    baseline = next((scores[run["name"]]["median"] for run in comparison["runs"] if not run["trained"]), None)
    for key, unit in (("flops", "FLOPs of pre-training"), ("seconds", "seconds of pre-training")):
        lines = []
        for number, run in enumerate(trained[:COLORS], 1):
            values = tuple(value for value in scores[run["name"]]["values"] if value is not None)
            if values and run[key] is not None:
                lines.append(Line(run["name"], (run[key],) * len(values), values, number))
        title = f"Score against {unit}"
        if lines:
            charts.append(Chart(title, label, tuple(lines), unit, level=baseline, level_label="untrained", scatter=True))
    return charts


def _notes(comparison: Comparison, trained: int) -> list[str]:
    notes = [*comparison["notes"]]
    if comparison["equal"] == "seconds":
        notes.append(
            f"'{comparison['reference']}' ran to its train.max_steps; each other run was given the time that the reference took "
            "with the same seed, on this machine and under its load at that time. Their learning rate decays with time from the "
            "first step on, that of the reference after the warm-up."
        )
    else:
        notes.append(
            "The number of steps of the other runs follows from the budget; their learning rate decays until their own last "
            "step, and settings in steps, such as the warm-up, were scaled in proportion."
        )
    if trained > COLORS:
        notes.append(f"The charts show the first {COLORS} runs; the tables show all.")
    return notes


def _short(value: float | None) -> str:
    """A number or cost, in scientific notation from ten billion on."""
    if value is None:
        return _BLANK
    return f"{value:,.6g}" if value < 1e5 else f"{value:,.0f}" if value < 1e10 else f"{value:.3e}"
