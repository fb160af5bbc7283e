"""Baselines of a fine-tuning: measured once, stored in its folder, and compared with its score."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from discern import __version__
from discern.parsing import json_value
from discern.progress import Progress
from discern.tasks.baselines.base import EVALUATED_EXAMPLES, TRAINING_EXAMPLES, measure_baselines
from discern.workflows.finetuned import write_json
from discern.workflows.task_files import TaskData

BASELINES_FILE = "baselines.json"

Baselines = dict[str, dict[str, Any]]
"""By name, the simplest first: `title`, `metrics` with the headline first, `train_examples`."""


def baselines_of(data: Mapping[str, TaskData], folder: Path, progress: Progress) -> dict[str, Baselines]:
    """The baselines of each task on the split that is evaluated.

    Args:
        folder: where those measured before are kept; they count for the examples that they were measured on.
    """
    kept = _kept(folder)
    found: dict[str, dict[str, Any]] = {}
    for name, each in data.items():
        found[name] = _of_task(each, kept.get(name, {}), progress)
        if found[name] != kept.get(name):  # an interruption in the next task loses nothing of this one
            write_json(folder / BASELINES_FILE, kept | found)
    return {name: entry["baselines"] for name, entry in found.items()}


def compared(baselines: Baselines, metric: str, score: float | None) -> dict[str, Any]:
    """`baselines`, the name of the best as `best_baseline`, and as `beats_baselines` whether a score is higher than its.

    Args:
        score: None: there is none.
    """
    best = max(baselines, key=lambda name: baselines[name]["metrics"][metric], default=None)
    beats = None if best is None or score is None else score > baselines[best]["metrics"][metric]
    return {"baselines": baselines, "best_baseline": best, "beats_baselines": beats}


def verdict(entry: Mapping[str, Any]) -> str | None:
    """A sentence if a score does not beat the baselines; None if it does, or if there are none.

    Args:
        entry: of a task in results: `metric` and what `compared` gave. Results from before there were baselines have none.
    """
    if entry.get("beats_baselines") is not False:
        return None
    best = entry["baselines"][entry["best_baseline"]]
    return f"The model does not beat {best['title']} ({best['metrics'][entry['metric']]:.4f})."


ADVICE = (
    "More labeled examples, a model pre-trained for longer, or one adapted to such text (discern adapt) may help; "
    "--sweep-rates looks for a better learning rate."
)
"""What to do about a model that its baselines beat."""


def _of_task(data: TaskData, kept: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    made_from = {"train": data.digests["train"], "evaluated": data.digests[data.dev_name], "discern": __version__}
    if kept.get("made_from") == made_from:
        return dict(kept)
    task, train, evaluated = data.task, data.train.examples, data.judged[data.dev_name].examples
    found: Baselines = {}
    if len(evaluated) > EVALUATED_EXAMPLES:
        progress.note(f"{task.name}: no baselines: there are more than {EVALUATED_EXAMPLES:,} examples to evaluate on")
    elif len(train) > TRAINING_EXAMPLES:
        progress.note(f"{task.name}: baselines are trained on {TRAINING_EXAMPLES:,} of the {len(train):,} training examples")
    for score in measure_baselines(task, train, evaluated, progress.note):
        metric = task.metrics[0]
        progress.note(f"{task.name}: baseline, {score.title}: {metric} {score.metrics[metric]:.4f}")
        found[score.name] = score.record()
    return {"made_from": made_from, "baselines": found}


def _kept(folder: Path) -> dict[str, Any]:
    """What was measured before; nothing where there is none, or a damaged one."""
    try:
        found = json_value((folder / BASELINES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
