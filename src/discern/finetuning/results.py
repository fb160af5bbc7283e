"""The results of a fine-tuning: medians and spread over the seeds, failed seeds, and simple baselines to compare with."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from discern import __version__
from discern.config.schema import flatten, plain
from discern.errors import DataError
from discern.finetuning.task_files import TaskData
from discern.model_files.finetuned import read_scores, seed_folder
from discern.progress import Progress
from discern.storage.checksums import read_object, write_json
from discern.tasks.baselines.base import deciding_metrics, measure_baselines, unbeaten_metric


def summarize(
    out: Path,
    data: dict[str, TaskData],
    config: Any,
    model: str,
    seeds: Sequence[int],
    baselines: Mapping[str, Baselines] | None = None,
) -> dict[str, Any]:
    """The contents of results.json: the metrics of one task, or those of several tasks under `tasks` with their mean headline.

    `baselines` holds the baselines of the task (for several tasks, by task name); it is empty if none were measured.
    `beats_baselines` is true if the median beats the best baseline (`unbeaten_metric`), for several tasks that of each.

    `selected_on` names the split whose scores selected the weights (finetune.keep=best) or the learning rate
    (finetune.rate_search), or is None; if it is `split`, the scores are slightly optimistic.

    A seed that failed (it diverged, or predicts the same for every example) counts in the median like any other, unless it has no
    score at all; `failed_seeds` lists it. A seed that was trained again (finetune.retries) counts with its last attempt;
    `retried_seeds` lists the reasons why the others failed.
    """
    scores = {seed: read_scores(seed_folder(out, seed)) for seed in seeds}
    # Scores on a split that selected the weights are slightly optimistic.
    kept = config.finetune.keep == "best" and config.train.evaluate_every_steps > 0
    chosen = kept or config.finetune.rate_search
    measured = baselines or {}
    each = {
        name: _of_task(name, found, scores, measured.get(name, {})) | {"selected_on": found.monitored.name if chosen else None}
        for name, found in data.items()
    }
    headline = next(iter(each.values())) if len(each) == 1 else _of_several(each, scores)
    best = max(seeds, key=lambda seed: (_value(headline["scores"], list(seeds).index(seed)), -seed))
    padding = [found["padding_fraction"] for found in scores.values() if "padding_fraction" in found]
    return {
        **headline,
        **({"tasks": each} if len(each) > 1 else {}),
        "best_seed": best,
        "model": model,
        "seeds": list(seeds),
        "seconds": round(sum(found["seconds"] for found in scores.values()), 1),
        "padding_fraction": round(statistics.fmean(padding), 4) if padding else None,
        "discern": __version__,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "settings": {key: plain(value) for key, value in flatten(config).items() if value is not None},
    }


def _of_task(name: str, data: TaskData, scores: dict[int, dict[str, Any]], baselines: Baselines) -> dict[str, Any]:
    metric = data.task.metrics[0]
    found = {seed: record["tasks"].get(name) for seed, record in scores.items()}
    values = [entry[metric] if entry else None for entry in found.values()]
    evaluated = [entry for entry in found.values() if entry]
    metrics = {key: statistics.median(entry[key] for entry in evaluated) for key in (evaluated[0] if evaluated else ())}
    retried = {
        str(seed): [each["failure"] for each in record["retried"]] for seed, record in scores.items() if "retried" in record
    }
    failed = {str(seed): _reason(record, name) for seed, record in scores.items() if _reason(record, name)}
    summary = spread([value for value in values if value is not None])
    return {
        "task": name,
        "metric": metric,
        "split": data.dev_name,
        "train_examples": len(data.train.examples),
        "examples": len(data.evaluated[data.dev_name].examples),
        **summary,
        "scores": values,
        "metrics": metrics,
        **compared(baselines, metric, metrics),
        "failed_seeds": failed,
        "retried_seeds": retried,
        "files": data.files,
        "digests": data.digests,
    }


def _of_several(each: dict[str, dict[str, Any]], scores: dict[int, dict[str, Any]]) -> dict[str, Any]:
    columns = zip(*(entry["scores"] for entry in each.values()), strict=True)
    values = [statistics.fmean(column) if None not in column else None for column in columns]
    failed: dict[str, str] = {}
    for name, entry in each.items():
        for seed, reason in entry["failed_seeds"].items():
            failed[seed] = "; ".join(filter(None, (failed.get(seed), f"{name}: {reason}")))
    return {
        "task": "+".join(each),
        "metric": "mean",
        **spread([value for value in values if value is not None]),
        "scores": values,
        "metrics": {f"{name}_{key}": value for name, entry in each.items() for key, value in entry["metrics"].items()},
        "baselines": {name: entry["baselines"] for name, entry in each.items() if entry["baselines"]},
        "beats_baselines": _all_beaten([entry["beats_baselines"] for entry in each.values()]),
        "failed_seeds": failed,
        "retried_seeds": next(iter(each.values()))["retried_seeds"],
        "selected_on": ", ".join(dict.fromkeys(filter(None, (entry["selected_on"] for entry in each.values())))) or None,
    }


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Median, mean, sample standard deviation (None for one value), best and worst; all None without values."""
    if not values:
        return dict.fromkeys(("median", "mean", "standard_deviation", "best", "worst"))
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "standard_deviation": statistics.stdev(values) if len(values) > 1 else None,
        "best": max(values),
        "worst": min(values),
    }


def _all_beaten(beaten: Sequence[bool | None]) -> bool | None:
    known = [each for each in beaten if each is not None]
    return all(known) if known else None


def _reason(record: dict[str, Any], name: str) -> str | None:
    reason: str | None = record.get("failure") or record.get("failures", {}).get(name)
    return reason


def _value(values: Sequence[float | None], place: int) -> float:
    value = values[place]
    return float("-inf") if value is None else value


BASELINES_FILE = "baselines.json"

Baselines = dict[str, dict[str, Any]]
"""Baselines by name, the simplest first: `title`, `metrics` with the headline first, `train_examples`."""


def measured_baselines(data: Mapping[str, TaskData], folder: Path, progress: Progress) -> dict[str, Baselines]:
    """The baselines of each task on its evaluated split.

    Args:
        folder: folder in which measured baselines are kept; they are reused as long as the examples are the same.
    """
    kept = _kept_baselines(folder)
    found: dict[str, dict[str, Any]] = {}
    for name, each in data.items():
        found[name] = _task_baselines(each, kept.get(name, {}), progress)
        if found[name] != kept.get(name):  # saved per task, in case the next one is interrupted
            write_json(folder / BASELINES_FILE, kept | found)
    return {name: entry["baselines"] for name, entry in found.items()}


def compared(baselines: Baselines, metric: str, metrics: Mapping[str, float]) -> dict[str, Any]:
    """`baselines`, the name of the best one as `best_baseline`, and whether the model beats it as `beats_baselines`.

    Args:
        metric: headline metric of the task.
        metrics: metrics of the model; empty if it has no score.
    """

    def standing(name: str) -> list[float]:
        found: Mapping[str, float] = baselines[name]["metrics"]
        return [found[each] for each in deciding_metrics(metric, found)]

    best = max(baselines, key=standing, default=None)
    beats = None if best is None or not metrics else unbeaten_metric(metric, metrics, baselines[best]["metrics"]) is None
    return {"baselines": baselines, "best_baseline": best, "beats_baselines": beats}


ADVICE = (
    "More labeled examples, a model pre-trained for longer, or one adapted to such text (discern adapt) may help; "
    "`discern finetune --sweep-rates` looks for a better learning rate."
)
"""Advice for a model that does not beat its baselines."""


def _task_baselines(data: TaskData, kept: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    made_from = {"train": data.digests["train"], "evaluated": data.digests[data.dev_name], "discern": __version__}
    if kept.get("made_from") == made_from:
        return dict(kept)
    task, train, evaluated = data.task, data.train.examples, data.evaluated[data.dev_name].examples
    found: Baselines = {}
    for score in measure_baselines(task, train, evaluated, progress.note):
        metric = task.metrics[0]
        progress.note(f"{task.name}: baseline, {score.title}: {metric} {score.metrics[metric]:.4f}")
        found[score.name] = score.record()
    return {"made_from": made_from, "baselines": found}


def _kept_baselines(folder: Path) -> dict[str, Any]:
    """The baselines that were measured before; empty if there is no file, or a damaged one."""
    try:
        return read_object(folder / BASELINES_FILE, hint="")
    except DataError:
        return {}
