"""Published scores of ELECTRA, BERT, XLNet and their contemporaries, for comparison.

Each score has its source, split, number of seeds and cost of pre-training. Scores that differ in these are not comparable, so
tables show them too. The data is in `published.toml`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

# Metric of each column of GLUE, unless the row names another.
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
        task: name of a task; "glue" is the average, over the tasks that `note` names or all but WNLI.
        metric: name of the metric in results.
        value: fraction in 0-1.
        split: dev, test, or test_leaderboard (ensembles and other tricks allowed).
        seeds: number of runs and their summary: "median of 10", "best of 3", "single", "not stated".
        flops: FLOPs of pre-training, counted as in the ELECTRA paper; None if not published.
        parameters: number of parameters of the network; None if not published.
        source: publication and table.
        note: further conditions, or "".
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
    """The published scores in the order of the file, filtered by task, split and model."""
    return tuple(
        score for score in _all() if task in (None, score.task) and split in (None, score.split) and model in (None, score.model)
    )


@cache
def _all() -> tuple[PublishedScore, ...]:
    text = files("discern.tasks").joinpath("published.toml").read_text(encoding="utf-8")
    content: dict[str, Any] = tomllib.loads(text)
    return tuple(score for row in content["row"] for score in _row(row, content["source"]))


def _row(row: dict[str, Any], sources: dict[str, str]) -> list[PublishedScore]:
    """The scores of a row: a number is in the usual metric of its task, an object names its metrics."""
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
