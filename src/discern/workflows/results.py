"""What several seeds of a fine-tuning come to: medians, spread, and the seeds that failed."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from discern import __version__
from discern.config.tree import flatten, plain
from discern.workflows.baselines import Baselines, compared
from discern.workflows.finetuned import read_scores, seed_folder
from discern.workflows.task_files import TaskData


def summarise(
    out: Path,
    data: dict[str, TaskData],
    config: Any,
    model: str,
    seeds: Sequence[int],
    baselines: Mapping[str, Baselines] | None = None,
) -> dict[str, Any]:
    """results.json: of one task its figures, of several those of each under `tasks` and the mean of their headlines.

    `baselines` are those of the task (of several tasks those of each, by its name), empty where none were measured;
    `beats_baselines` says whether the median is higher than the best of them, of several tasks than that of each.

    `selected_on` names the split whose scores chose which weights a seed ends with (finetune.keep=best) or the learning rate
    (finetune.rate_search), or is None; if it is `split`, the scores are slightly optimistic.

    A seed that failed (it diverged, or predicts the same for every example) counts in the median like any other, unless it has no
    score at all; it is named in `failed_seeds`. One that was trained again with another draw (finetune.retries) counts with its
    last draw; `retried_seeds` has why the others failed.
    """
    scores = {seed: read_scores(seed_folder(out, seed)) for seed in seeds}
    # Weights that were chosen by a split's scores flatter themselves on it.
    kept = config.finetune.keep == "best" and config.train.evaluate_every_steps > 0
    chosen = kept or config.finetune.rate_search
    measured = baselines or {}
    each = {
        name: _of_task(name, found, scores, measured.get(name, {})) | {"selected_on": found.watched.name if chosen else None}
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
    judged = [entry for entry in found.values() if entry]
    names = list(judged[0]) if judged else []
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
        "examples": len(data.judged[data.dev_name].examples),
        **summary,
        "scores": values,
        "metrics": {key: statistics.median(entry[key] for entry in judged) for key in names},
        **compared(baselines, metric, summary["median"]),
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
    """Median, mean, standard deviation (of a sample; 0 of one value), best and worst; None of nothing."""
    if not values:
        return dict.fromkeys(("median", "mean", "standard_deviation", "best", "worst"))
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "standard_deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
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
