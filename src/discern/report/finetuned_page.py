"""The page of a fine-tuned model: scores with their spread, baselines, learning curves, and the worst mistakes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from discern.errors import counted
from discern.model_files.finetuned import CONFIG_FILE, RESULTS_FILE, predictions_file, read_results, seed_folder
from discern.objectives.metrics import calibration
from discern.progress import duration_in_words
from discern.report.charts import reliability_chart
from discern.report.metrics import metric_charts
from discern.report.page import Confusion, Page, Table, Texts, entity_pieces
from discern.report.verdict import task_title, task_verdict
from discern.storage.checksums import read_lines, read_text, understood
from discern.training.metrics import METRICS_FILE, read_records

_WORST = 10
_LONGEST = 300  # characters of a cell
_MOST_LABELS = 20  # of a confusion matrix; a larger one cannot be read


def finetuned_page(folder: Path) -> Page:
    """The page of a fine-tuned model.

    Raises:
        DataError: the fine-tuning is not finished, or one of its files is damaged.
    """
    results = read_results(folder)
    seed, best = results["best_seed"], seed_folder(folder, results["best_seed"])
    logs = {f"seed {number}": [read_records(seed_folder(folder, number) / METRICS_FILE)] for number in results["seeds"]}
    charts, verdict = metric_charts(logs, speed=False), []
    confusions, worst = [], []
    with understood(folder / RESULTS_FILE, hint="remove it, then run the same `discern finetune` command: it writes it again"):
        tasks = {task_title(entry): entry for entry in results.get("tasks", {"": results}).values()}
        facts, scores = _facts(results), _scores(tasks)
        names = " and ".join(f"{title} ({counted(entry['train_examples'], 'example')})" for title, entry in tasks.items())
        for title, entry in tasks.items():
            path = best / f"mistakes-{entry['task']}.jsonl"
            hint = f"remove it for a page without mistakes; to create it again, remove {best} and fine-tune again"
            mistakes = read_lines(path, hint=hint) if path.is_file() else []
            verdict += task_verdict(title, entry)
            with understood(path, hint=hint):
                worst += _worst_mistakes(f"Worst mistakes of seed {seed}: {title}", mistakes)
            # Without a file of mistakes, no prediction is known to be correct.
            judged = read_judged(best, entry["task"], mistakes) if path.is_file() else []
            if judged:
                correct = np.array([gold == predicted for gold, predicted, _ in judged])
                bins = calibration(np.array([confidence for _, _, confidence in judged]), correct)
                charts.append(reliability_chart(f"Calibration on {title}, seed {seed}", bins, "confidence", "share correct"))
                confusions += confusion(f"Confusion on {title}, seed {seed}", judged)
    trained = f"Fine-tuned from {Path(results['model']).name} on {names}, with {counted(len(results['seeds']), 'seed')}."
    return Page(
        title=f"discern: {folder.resolve().name}",
        verdict=[trained, *verdict],
        facts=facts,
        charts=charts,
        sections=[scores, *confusions, *worst],
        configuration=read_text(folder / CONFIG_FILE, hint="restore it from a copy, or fine-tune again with another --out"),
        notes=["Scores are fractions in 0-1; correlations are in -1 to 1. The median of the seeds is the number to report."],
    )


def _facts(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    settings = results["settings"]
    steps = f"{settings['train.max_steps']:,}, each of {settings['train.sequences_per_step']} rows"
    if results["kept_step"]:
        steps += f": {results['passes']:.1f} passes; the weights are those of step {results['kept_step']:,}"
    decay = settings["optimizer.layer_decay"]
    by_layer = "" if decay == 1 else f", times {decay:g} for each layer from the top down"
    return [
        ("Model", results["model"]),
        ("Recipe", settings["finetune.recipe"]),
        ("Seeds", ", ".join(map(str, results["seeds"]))),
        ("Steps per seed", "none: the encoder is not trained" if settings["finetune.few_shot"] else steps),
        ("Peak learning rate", f"{settings['optimizer.learning_rate']:g}{by_layer}"),
        ("Time in training", duration_in_words(results["seconds"])),
        ("Made with", f"discern {results['discern']}"),
    ]


def _scores(tasks: Mapping[str, Any]) -> Table:
    """The scores of the model, and those of simple predictors on the same examples."""
    rows: list[list[str | float | None]] = []
    notes = []
    for title, entry in tasks.items():
        metric = entry["metric"]
        chosen = ", on which the weights were selected" if entry.get("selected_on") == entry["split"] else ""
        split = f"{entry['split']}, {counted(entry['examples'], 'example')}{chosen}"
        if entry["median"] is not None:
            deviation = entry["standard_deviation"]
            spread = None if deviation is None else f"{entry['worst']:.4f} to {entry['best']:.4f}"
            rows.append([title, "this model", metric, entry["median"], deviation, spread, split])
        if teacher := entry.get("teacher"):
            rows.append([title, f"teacher: {teacher['model']}", metric, teacher["score"], None, None, split])
        for baseline in (entry.get("baselines") or {}).values():
            rows.append([title, f"baseline: {baseline['title']}", metric, baseline["metrics"][metric], None, None, split])
        others = {name: value for name, value in entry["metrics"].items() if name != metric}
        rows += [[title, "this model", name, value, None, None, split] for name, value in others.items()]
        notes += [f"{title}, seed {seed} failed: {reason}." for seed, reason in entry["failed_seeds"].items()]
    columns = ("Task", "Predictor", "Metric", "Median of the seeds", "Standard deviation", "Range", "Measured on")
    return Table("Scores", columns, rows, " ".join(notes))


def _worst_mistakes(title: str, records: Sequence[Mapping[str, Any]]) -> list[Table | Texts]:
    """The worst mistakes of a seed as a table or, for tagging, as texts with their entities."""
    rows: list[list[str | float]] = []
    texts = []
    for record in records[:_WORST]:
        if "words" in record and "tags" in record:
            texts.append(("", entity_pieces(record)))
            continue
        text = " / ".join(str(record[key]) for key in ("text", "pair", "context") if key in record)
        answers = ("label", "labels", "score", "answer", "tags", "similarity", "found")
        predicted = next((record[key] for key in answers if key in record), "")
        rows.append([*map(_shortened, (text, record["gold"], predicted)), float(record["badness"])])
    shown: list[Table | Texts] = [Table(title, ("Text", "Gold", "Predicted", "Badness"), rows)]
    return shown + ([Texts(title, texts, shaded=False)] if texts else [])


def _shortened(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


Judged = tuple[str, str, float]
"""The correct label, the predicted label, and its probability."""


def read_judged(seed: Path, task: str, mistakes: Sequence[Mapping[str, Any]]) -> list[Judged]:
    """The predictions of a seed for a task with one label per example; empty if the task is another one.

    Every prediction that is not among the mistakes is correct.

    Args:
        seed: folder of the seed.
        mistakes: all mistakes of the seed.

    Raises:
        DataError: the predictions are damaged.
    """
    path = predictions_file(seed, task)
    if not path.is_file():
        return []
    hint = f"remove it for a page without these pictures; to create it again, remove {seed} and fine-tune again"
    with understood(path, hint=hint):
        gold = {mistake["id"]: mistake["gold"] for mistake in mistakes}
        return [
            (gold.get(record["id"], record["label"]), record["label"], record["probabilities"][record["label"]])
            for record in read_lines(path, hint=hint)
            if "label" in record and "probabilities" in record
        ]


def confusion(title: str, judged: Sequence[Judged]) -> list[Confusion]:
    """The confusion matrix; none without predictions, or with more labels than can be read."""
    labels = sorted({label for gold, predicted, _ in judged for label in (gold, predicted)})
    if not 2 <= len(labels) <= _MOST_LABELS:
        return []
    counts = Counter((gold, predicted) for gold, predicted, _ in judged)
    rows = [[counts[gold, predicted] for predicted in labels] for gold in labels]
    correct = sum(counts[label, label] for label in labels)
    return [Confusion(title, labels, rows, f"{correct:,} of {len(judged):,} predictions are correct: those on the diagonal.")]
