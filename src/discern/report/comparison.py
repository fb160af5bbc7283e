"""The page of a comparison: scores with their spread, significance tests, cost, and curves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from discern.report.charts import COLORS, Chart, Line, Scatter
from discern.report.curves import metric_title
from discern.report.page import Page, Table

Found = Mapping[str, Any]

# Horizontal axes: the metrics log counts tokens, while the budget counts positions.
_AXES = {"flops": "FLOPs", "seconds": "seconds of training", "tokens": "tokens (without padding)"}
_BLANK = "–"


def comparison_page(found: Found) -> Page:
    """The page of a comparison by `discern compare`. The same input gives the same page.

    Args:
        found: contents of comparison.json.
    """
    state = "" if found["complete"] else " (not finished)"
    rows = ", ".join(row["name"] for row in found["runs"])
    return Page(
        title=f"discern: {rows} at equal {found['budget_unit']}{state}",
        facts=_facts(found),
        curves=[*_pareto(found), *_curves(found)],
        tables=[
            table
            for table in (
                _scores(found),
                _significance(found),
                _cost(found),
                _held_out(found),
                _settings(found),
                _failures(found),
            )
            if table.rows
        ],
        notes=_notes(found),
    )


def score_columns(found: Found) -> list[str]:
    """The mean (if there are several tasks), then each task."""
    return (["mean"] if len(found["tasks"]) > 1 else []) + list(found["tasks"])


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


def significance_notes(found: Found) -> list[str]:
    """Description of the test, and its limits at these numbers of seeds."""
    entries = found["significance"]
    if not entries:
        return []
    sizes = sorted({tuple(entry["seeds"]) for entry in entries})
    exact = all(entry["exact"] for entry in entries)
    test = "exact permutation test" if exact else "permutation test"
    lines = [
        f"p: {test} of the difference of the means over pre-training seeds, two-sided, unpaired, against "
        f"'{found['reference']}'; not corrected for the {len(entries)} comparisons of the table."
    ]
    if not exact:
        lines.append("With so many seeds, p is estimated from 200,000 random ways to divide them, instead of all ways.")
    for first, second in sizes:
        smallest = next(entry["smallest_p"] for entry in entries if tuple(entry["seeds"]) == (first, second))
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
    if any(row["failures"] for row in found["runs"]):
        lines.append("Seeds whose pre-training diverged have no score: they are left out of the medians and of the test.")
    lines.append(
        "A seed changes the initial weights, the order of the text, the masks and the samples. The files of the tasks stay the "
        "same, so the spread does not cover other test examples."
    )
    return lines


def _facts(found: Found) -> list[tuple[str, str]]:
    reference = found["runs"][0]
    shape, data = reference["shape"], found["data"]
    budget = found["budget"]
    machines = ["; ".join(f"{key} {value}" for key, value in machine.items()) for machine in found["machines"]]
    versions = [", ".join(f"{key} {value}" for key, value in each.items()) for each in found["versions"]]
    return [
        ("Equal for all runs", found["budget_unit"]),
        ("Budget of a run with budget = 1", _BLANK if budget is None else f"{budget:.4g} {found['budget_unit']}"),
        ("Reference", found["reference"]),
        ("Pre-training seeds per run", f"{len(found['seeds'])} seeds: {', '.join(map(str, found['seeds']))}"),
        ("Fine-tuning seeds per encoder and task", str(found["finetune_seeds"])),
        (
            "Evaluated network of the reference",
            f"{reference['network']}: {shape['num_layers']} layers of width {shape['hidden_size']}, "
            f"{shape['num_heads']} attention heads, feed-forward width {shape['feedforward_size']}",
        ),
        ("Rows per step of the reference", f"{shape['sequences_per_step']:,} of {shape['sequence_length']:,} tokens"),
        (
            "Data set",
            f"{_whole(data['documents'])} documents, {_whole(data['tokens'])} tokens; vocabulary {data['vocab_size']:,}",
        ),
        ("Fingerprint of the data", str(data["fingerprint"])[:12]),
        *(("Machine", machine) for machine in machines),
        *(("Versions", version) for version in versions),
    ]


def _scores(found: Found) -> Table:
    columns = score_columns(found)
    first = found["runs"][0]["scores"]
    heads = [f"{column} ({first[column]['metric']})" if first[column]["metric"] else column for column in columns]
    rows = [
        [
            row["name"],
            *(with_spread(row["scores"][column]) for column in columns),
            _finished(row, len(found["seeds"])),
        ]
        for row in found["runs"]
        if columns
    ]
    note = "Median over the pre-training seeds, with the lowest and the highest; failed fine-tuning seeds are included."
    return Table("Scores after fine-tuning", ["run", *heads, "seeds"], rows, note)


def _finished(row: Mapping[str, Any], seeds: int) -> str:
    """ "3 of 3", "1 of 3 (2 diverged)"."""
    diverged = f" ({len(row['failures'])} diverged)" if row["failures"] else ""
    return f"{row['finished_seeds']} of {seeds}{diverged}"


def _failures(found: Found) -> Table:
    rows = [[row["name"], seed, "pre-training", reason] for row in found["runs"] for seed, reason in row["failures"].items()]
    rows += [
        [row["name"], str(found["seeds"][int(number)]), f"{task}, fine-tuning seed {seed}", reason]
        for row in found["runs"]
        for task in found["tasks"]
        for number, each in row["scores"][task]["failed_finetunings"].items()
        for seed, reason in each.items()
    ]
    again = "To repeat a pre-training that failed, remove its folders results/RUN/seed-N and work/RUN/seed-N."
    note = again if any(row["failures"] for row in found["runs"]) else ""
    return Table("Failures", ["run", "seed", "part", "reason"], rows, note)


def _significance(found: Found) -> Table:
    rows = [
        [entry["run"], entry["task"], f"{entry['difference_of_medians']:+.4f}", p_text(entry), entry["verdict"]]
        for entry in found["significance"]
    ]
    columns = ["run", "score", "difference of the medians", "p", "seeds"]
    return Table(f"Against {found['reference']}", columns, rows, " ".join(significance_notes(found)))


def _cost(found: Found) -> Table:
    rows = [
        [
            row["name"],
            _whole(row["steps"]),
            _short(row["flops"]),
            _short(row["flops_paper_convention"]),
            _short(row["seconds"], 1),
            _whole(row["positions"]),
            _whole(row["parameters"]),
        ]
        for row in found["runs"]
    ]
    columns = ["run", "steps", "FLOPs", "FLOPs, paper", "seconds", "positions read", "parameters"]
    note = (
        f"Medians over the seeds that did not diverge, of pre-training alone. FLOPs: {found['convention']}. 'Paper': by the "
        "paper's script."
    )
    return Table("Cost", columns, rows, note)


def _held_out(found: Found) -> Table:
    trained = [row for row in found["runs"] if row["held_out"]]
    keys = {key: None for row in trained for key in row["held_out"] if key != "heldout_loss"}
    rows = [
        [metric_title(key), *(with_spread(row["held_out"][key]) if key in row["held_out"] else "" for row in trained)]
        for key in keys
    ]
    note = "Measured on held-out text, each run by its own objective: losses of different objectives are not comparable."
    return Table("Held-out metrics", ["metric", *(row["name"] for row in trained)], rows, note)


def _settings(found: Found) -> Table:
    rows = [
        [row["name"], key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]
        for row in found["runs"]
        for key, value in row["settings"].items()
        if value is not None
    ]
    note = f"Settings of {found['reference']} that another objective does not have are left out."
    return Table(f"Settings that differ from those of {found['reference']}", ["run", "setting", "value"], rows, note)


def _pareto(found: Found) -> list[Chart]:
    """The main score against the cost of pre-training, in FLOPs and in time."""
    columns = score_columns(found)
    if not columns:
        return []
    score = columns[0]
    label = "mean score" if score == "mean" else f"{score}: {found['runs'][0]['scores'][score]['metric']}"
    trained = [row for row in found["runs"] if row["trained"]][:COLORS]
    baseline = next((row["scores"][score]["median"] for row in found["runs"] if not row["trained"]), None)
    charts: list[Chart] = []
    for key, unit in (("flops", "FLOPs of pre-training"), ("seconds", "seconds of pre-training")):
        points = [
            Line(row["name"], [row[key]], [value for value in row["scores"][score]["values"] if value is not None], number)
            for number, row in enumerate(trained, 1)
            if row[key] is not None and row["scores"][score]["median"] is not None
        ]
        if points:
            charts.append(Scatter(f"Score against {unit}", label, points, unit, level=baseline, level_label="untrained"))
    return charts


def _curves(found: Found) -> list[Chart]:
    """Losses, accuracies and AUC against the budget, with one line per seed."""
    axis = found["equal"]
    trained = [row for row in found["runs"] if row["trained"]][:COLORS]
    keys = {key: None for row in trained for each in row["curves"] for point in each["points"] for key in point}
    charts: list[Chart] = []
    for key in keys:
        if key == "loss" or not key.endswith(("_loss", "_accuracy", "_auc")) or key == "heldout_loss":
            continue
        groups = [(number, row["name"], _lines(row, key, axis, number)) for number, row in enumerate(trained, 1)]
        drawn = [(number, name, lines) for number, name, lines in groups if lines]
        if any(len(line.values) > 1 for _, _, lines in drawn for line in lines):
            seeds = [line for _, _, lines in drawn for line in lines]
            # The page shows no legend for a single line.
            title = metric_title(key) if len(drawn) > 1 else f"{metric_title(key)}: {drawn[0][1]}"
            charts.append(Chart(title, "", [Line(name, [], [], n) for n, name, _ in drawn], _AXES[axis], seeds))
    return charts


def _lines(row: Mapping[str, Any], key: str, axis: str, color: int) -> list[Line]:
    lines = []
    for each in row["curves"]:
        points = [(point[axis], point[key]) for point in each["points"] if point.get(key) is not None and axis in point]
        if points:
            lines.append(Line(row["name"], [x for x, _ in points], [y for _, y in points], color))
    return lines


def _notes(found: Found) -> list[str]:
    notes = [*found["notes"], *significance_notes(found)]
    if found["equal"] == "seconds":
        notes.append(
            f"'{found['reference']}' ran to its train.max_steps; each other run was given the time that the reference took with "
            f"the same seed, on this machine and under its load at that time. Their learning rate decays with time from the "
            f"first step on, that of the reference after the warm-up."
        )
    else:
        notes.append(
            "The number of steps of the other runs follows from the budget; their learning rate decays until their own last "
            "step, and settings in steps, such as the warm-up, were scaled in proportion."
        )
    if sum(row["trained"] for row in found["runs"]) > COLORS:
        notes.append(f"The charts show the first {COLORS} runs; the tables show all.")
    return notes


def _whole(value: float | None) -> str:
    return _BLANK if value is None else f"{round(value):,}"


def _short(value: float | None, digits: int = 4) -> str:
    """A cost, in scientific notation from a million on."""
    if value is None:
        return _BLANK
    return f"{value:,.{min(digits, 1)}f}" if value < 1e6 else f"{value:.{digits}e}"
