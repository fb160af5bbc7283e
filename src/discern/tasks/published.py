"""Published scores of ELECTRA, BERT, XLNet and their contemporaries, to stand beside ours.

Each is labelled with where it comes from, on which split, over how many seeds, and what its pre-training cost: numbers of
different labels are not comparable, and a table that shows them shows the labels too. The data is in `published.toml`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

# Under which metric a column of GLUE is published, where the row does not say otherwise.
GLUE_METRICS = {
    "cola": "matthews",
    "sst2": "accuracy",
    "mrpc": "accuracy",
    "stsb": "spearman",
    "qqp": "accuracy",
    "mnli": "accuracy",
    "qnli": "accuracy",
    "rte": "accuracy",
    "wnli": "accuracy",
    "glue": "average",
    "chunk": "f1",
}


@dataclass(frozen=True, slots=True)
class PublishedScore:
    """One published number.

    Attributes:
        task: a task's name; "glue" is the average, over the tasks that `note` names or all but WNLI.
        metric: as our results name it.
        value: a fraction in 0-1.
        split: dev, test, or test_leaderboard (ensembles and other tricks allowed).
        seeds: how many runs and which of them: "median of 10", "best of 3", "single", "not stated".
        flops: of pre-training, as the ELECTRA paper counts; None where not published.
        parameters: of the network; None where not published.
        source: publication and table.
        note: what else one must know, or "".
    """

    model: str
    task: str
    metric: str
    value: float
    split: str
    seeds: str
    flops: float | None
    parameters: float | None
    source: str
    note: str


def published_scores(task: str | None = None, split: str | None = None, model: str | None = None) -> tuple[PublishedScore, ...]:
    """The published scores in the order of the file, of a task, a split, a model, or all."""
    return tuple(
        score for score in _all() if task in (None, score.task) and split in (None, score.split) and model in (None, score.model)
    )


@cache
def _all() -> tuple[PublishedScore, ...]:
    text = files("discern.tasks").joinpath("published.toml").read_text(encoding="utf-8")
    content: dict[str, Any] = tomllib.loads(text)
    return tuple(score for row in content["row"] for score in _row(row, content["source"]))


def _row(row: dict[str, Any], sources: dict[str, str]) -> list[PublishedScore]:
    """The scores of a row: a number is in the metric of its task, an object names its metrics."""
    scores = []
    for task, published in row["scores"].items():
        named = published if isinstance(published, dict) else {row.get("metrics", {}).get(task, GLUE_METRICS[task]): published}
        for metric, percent in named.items():
            scores.append(
                PublishedScore(
                    model=row["model"],
                    task=task,
                    metric=metric,
                    value=round(percent / 100, 6),
                    split=row["split"],
                    seeds=row["seeds"],
                    flops=row.get("flops"),
                    parameters=row.get("parameters"),
                    source=f"{sources[row['source']]}, {row['place']}",
                    note=row.get("note", ""),
                )
            )
    return scores
