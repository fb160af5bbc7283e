"""The metrics of runs as charts and tables: the curves of the metrics log, and the results of `discern evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from discern.model_files.run import BLIMP_FILE
from discern.parsing import is_number
from discern.report.charts import COLORS, Chart, Line
from discern.report.page import Table
from discern.storage.checksums import read_json
from discern.training.metrics import HELD_OUT, held_out_metrics

Records = Sequence[Mapping[str, Any]]
"""Lines of a metrics log, oldest first, each with its "step"."""

AXES = {"step": "step", "tokens": "tokens (without padding)", "flops": "FLOPs", "seconds": "seconds of training"}
"""Horizontal axes of the curves, by their key in the metrics log."""
_POINTS = 400  # of a curve; more could not be told apart

_MEANINGS = {
    "heldout_loss": ("Loss", "What training minimizes: the weighted sum of the losses below, in nats. Lower is better."),
    "heldout_generator_loss": (
        "Generator loss",
        "Mean negative log-probability of the original token at the masked positions, in nats. Guessing every word with equal "
        "probability gives the logarithm of the vocabulary size.",
    ),
    "generator_accuracy": (
        "Generator accuracy",
        "Share of the masked positions where the likeliest token is the original one.",
    ),
    "sampled_accuracy": (
        "Sampled accuracy",
        "Share of the masked positions where the sampled token is the original one; such tokens count as original.",
    ),
    "heldout_discriminator_loss": (
        "Discriminator loss",
        "Mean negative log-probability of the correct label, original or replaced, over all tokens, in nats.",
    ),
    "discriminator_auc": (
        "Discriminator AUC",
        "Probability that a replaced token scores above an original one, without [CLS] and [SEP]. 0.5 is guessing, 1 is perfect.",
    ),
    "discriminator_precision": (
        "Discriminator precision",
        "Share of the tokens flagged at probability 1/2 that were replaced. Flagging at random gives the replaced fraction; "
        "0 if nothing was flagged.",
    ),
    "discriminator_recall": (
        "Discriminator recall",
        "Share of the replaced tokens that are flagged at probability 1/2. "
        "Low while the probabilities are close to the replaced fraction, whatever the AUC.",
    ),
    "discriminator_accuracy": ("Discriminator accuracy", "Share of all tokens that are classified correctly at probability 1/2."),
    "replaced_fraction": (
        "Replaced fraction",
        "Share of all tokens that the generator replaced with a different token; with replace-mlm, share of the chosen tokens.",
    ),
    "heldout_mlm_loss": (
        "Loss",
        "Mean negative log-probability of the original token at the positions of the loss, in nats. Guessing every word with "
        "equal probability gives the logarithm of the vocabulary size.",
    ),
    "mlm_accuracy": (
        "Accuracy",
        "Share of the positions of the loss where the likeliest token is the original one: the chosen positions, or all tokens "
        "with all-tokens-mlm.",
    ),
    "heldout_causal_lm_loss": (
        "Causal loss",
        "Mean negative log-probability of each token given those before it, in nats.",
    ),
    "causal_lm_accuracy": ("Causal accuracy", "Share of the tokens that are the likeliest ones given those before them."),
    "heldout_correction_loss": (
        "Correction loss",
        "Mean negative log-probability of the original token, copied or written by the discriminator, over all tokens, in nats.",
    ),
    "masked_accuracy": (
        "Accuracy at chosen positions",
        "Share of the chosen positions where the likeliest token is the original one.",
    ),
    "copy_probability": ("Copy probability", "Mean probability of copying the input token."),
    "heldout_permutation_lm_loss": (
        "Loss",
        "Mean negative log-probability of the token at the predicted positions, each given the context and the positions "
        "before it in a random order, in nats. Guessing every word with equal probability gives the logarithm of the vocabulary "
        "size.",
    ),
    "permutation_lm_accuracy": ("Accuracy", "Share of the predicted positions where the likeliest token is the correct one."),
    "heldout_next_sentence_loss": (
        "Next-sentence loss",
        "Mean negative log-probability of the correct answer to whether the second segment follows the first, in nats. "
        "0.6931 is guessing.",
    ),
    "next_sentence_accuracy": (
        "Next-sentence accuracy",
        "Share of the rows where this is predicted correctly; guessing gives one half if B follows A in half of the rows.",
    ),
    "next_sentence_share": (
        "B follows A",
        "Share of the rows where segment B follows segment A in the text; "
        "below one half if sentences are long compared with the rows.",
    ),
}
"""Name and meaning of each held-out metric, by its key in the metrics log, in the order of the page."""

# Charts of the metrics log below the losses, with the label of each key.
_HELD_OUT_CHARTS = (
    (Chart("Discriminator AUC, held out", "AUC", level=0.5, level_label="guessing"), {"discriminator_auc": ""}),
    (
        Chart("Generator accuracy, held out", "share"),
        {"generator_accuracy": "likeliest token", "sampled_accuracy": "sampled token"},
    ),
    (
        Chart("Accuracy of word prediction, held out", "share"),
        {"mlm_accuracy": "positions of the loss", "masked_accuracy": "chosen positions"},
    ),
    (Chart("Accuracy at predicted positions, held out", "share"), {"permutation_lm_accuracy": ""}),
    (Chart("Accuracy of next-sentence prediction, held out", "share"), {"next_sentence_accuracy": ""}),
    (
        Chart("Discriminator at probability 1/2, held out", "share"),
        {"discriminator_precision": "precision", "discriminator_recall": "recall", "replaced_fraction": "replaced fraction"},
    ),
)
_TRAINING_CHARTS = (
    (Chart("Learning rate", "learning rate"), {"learning_rate": ""}),
    (Chart("Gradient norm before clipping", "norm", logarithmic=True), {"grad_norm": ""}),
    (Chart("Speed of training", "tokens per second"), {"tokens_per_second": ""}),
)


def metric_charts(runs: Mapping[str, Sequence[Records]], axis: str = "step", *, speed: bool = True) -> list[Chart]:
    """The curves of metrics logs.

    With one run, its training and held-out losses share a chart. With several runs, each metric has one, with lines of all.

    Args:
        runs: metrics logs of each run, one for each of its seeds; the first `COLORS` runs are drawn.
        axis: key of `AXES`.
        speed: whether to draw the learning rate, the gradient norm and the speed, too.
    """
    records = [record for logs in runs.values() for log in logs for record in log]
    keys = {key: None for record in records for key in record if not key.startswith(HELD_OUT)}
    losses = [key for key in keys if key == "loss" or key.endswith("_loss")]
    if len(losses) == 2 and "loss" in losses:  # with one term, the sum is the same number
        losses = ["loss"]
    titles = {"loss": "Loss, weighted sum" if len(losses) > 1 else "Loss", "mlm_loss": "Loss", "permutation_lm_loss": "Loss"}
    groups = [(Chart(titles.get(key, _words(key)), "nats"), {key: "training", f"{HELD_OUT}{key}": "held out"}) for key in losses]
    # Metrics of tasks, which have names of their own.
    others = {key: None for record in records for key in held_out_metrics(record) if key not in _MEANINGS}
    task_charts = [(Chart(f"{_words(key)}, held out", ""), {key: ""}) for key in others if not key.startswith(HELD_OUT)]
    charts: list[Chart] = []
    drawn, single = [*runs.items()][:COLORS], len(runs) == 1
    for chart, labels in (*groups, *_HELD_OUT_CHARTS, *task_charts, *(_TRAINING_CHARTS if speed else ())):
        by_title: dict[str, list[Line]] = {}
        for number, (key, label) in enumerate(labels.items(), 1):
            lines = by_title.setdefault(chart.title if single or not label else f"{chart.title}: {label}", [])
            for color, (name, logs) in enumerate(drawn, 1):
                lines += _lines(logs, key, axis, *((label, number) if single else (name, color)))
        charts += [
            replace(chart, title=title, lines=tuple(lines), x_label=AXES[axis]) for title, lines in by_title.items() if lines
        ]
    return charts


def _lines(logs: Sequence[Records], key: str, axis: str, label: str, color: int) -> list[Line]:
    lines = []
    for log in logs:
        points = [(record[axis], record[key]) for record in log if is_number(record.get(key)) and is_number(record.get(axis))]
        if points:
            steps, values = zip(*points[: -1 : 1 + len(points) // _POINTS], points[-1], strict=True)
            lines.append(Line(label, steps, values, color))
    return lines


def _words(key: str) -> str:
    return key.replace("_", " ").capitalize()


def last_held_out(records: Records) -> tuple[int | None, dict[str, float]]:
    """The step and the metrics of the last evaluation, in the order of the page; (None, {}) without an evaluation."""
    for record in reversed(records):
        if metrics := held_out_metrics(record):
            if sum(key.endswith("_loss") for key in metrics) == 2:  # with one term, the sum is the same number
                metrics.pop("heldout_loss", None)
            return record["step"], {key: metrics[key] for key in _MEANINGS if key in metrics} | metrics
    return None, {}


def held_out_table(title: str, metrics: Mapping[str, Mapping[str, float | str]], note: str = "") -> Table:
    """Held-out metrics: with their meaning if there is one column, side by side if there are several.

    Args:
        metrics: metrics of each column, by their keys in the metrics log.
    """
    single = len(metrics) == 1
    rows = [
        [
            _MEANINGS.get(key, (key, ""))[0],
            *(column.get(key) for column in metrics.values()),
            *([_MEANINGS.get(key, ("", ""))[1]] if single else []),
        ]
        for key in dict.fromkeys(key for column in metrics.values() for key in column)
    ]
    return Table(title, ("Metric", *metrics, *(["Meaning"] if single else [])), rows, note)


# ---- evaluation.json ----

_GROUPINGS = {
    "by_frequency": ("By frequency of the original token, held out", "occurrences per million tokens"),
    "by_position": ("By part of the row, held out", "part of the row"),
}
_IN_GROUPS = {
    "discriminator_auc": "discriminator AUC",
    "discriminator_recall": "discriminator recall",
    "prediction_accuracy": "prediction accuracy",
}


def group_tables(results: Mapping[str, Any]) -> list[Table]:
    """The results of `discern evaluate` by frequency and by position."""
    return [
        Table(
            title,
            (column, *_IN_GROUPS.values()),
            [[group["group"], *(group.get(name) for name in _IN_GROUPS)] for group in results[key]],
        )
        for key, (title, column) in _GROUPINGS.items()
    ]


# ---- blimp.json ----

EVALUATE_AGAIN = "remove it; `discern evaluate RUN --suite blimp --data DIR` writes it again"


def blimp_tables(results: Mapping[str, Any]) -> list[Table]:
    """Accuracy overall and by phenomenon, with one column per scorer.

    Args:
        results: results by the name of the scorer.
    """
    if not results:
        return []
    notes = []
    for name, result in results.items():
        step = "" if result["step"] is None else f" at step {result['step']:,}"
        which = f"the first {result['limit']:,} of each paradigm" if result["limit"] else "all"
        notes.append(f"{name}{step}: {result['pairs']:,} pairs ({which}); ties, counted as one half: {result['ties']:,}.")
    rows: list[list[Any]] = [["overall", *(result["accuracy"] for result in results.values())]]
    for phenomenon in sorted({phenomenon for result in results.values() for phenomenon in result["by_phenomenon"]}):
        rows.append([phenomenon.replace("_", " "), *(result["by_phenomenon"].get(phenomenon) for result in results.values())])
    return [Table("BLiMP by phenomenon: accuracy", ("phenomenon", *results), rows, " ".join(notes))]


def read_blimp_results(run: Path) -> dict[str, Any]:
    """Results of `discern evaluate --suite blimp` in a run's folder, by scorer; empty if there are none.

    Raises:
        DataError: the file is damaged.
    """
    path = run / BLIMP_FILE
    return read_json(path, hint=EVALUATE_AGAIN) if path.is_file() else {}
