"""The contract of baselines, and their evaluation on the examples that the network was trained and evaluated on."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from discern.data.batching.stream import derive_key, permute

if TYPE_CHECKING:
    from discern.tasks.base import Prediction, Task

E = TypeVar("E")
# With more, baselines take too long for a side result: 20 seconds and 1 GB of memory for these characters on one core. The
# limits leave out whole examples: what decides the label may be at the end of a text.
TRAINING_EXAMPLES = 20_000
TRAINING_CHARACTERS = 20_000_000
EVALUATED_EXAMPLES = 50_000
EVALUATED_CHARACTERS = 100_000_000
# Metrics that are published together, by headline metric: a model beats a baseline if the first is higher and the second is not
# lower. One exactly right answer of a thousand is more than the exact match of whole sentences.
_PUBLISHED_TOGETHER = {
    "exact_match": ("f1", "exact_match"),
    "f1": ("f1", "exact_match"),
    "accuracy": ("accuracy", "f1"),
    "spearman": ("spearman", "pearson"),
}


class Baseline(abc.ABC, Generic[E]):
    """A simple predictor, trained and applied in seconds. The same examples give the same predictions.

    Attributes:
        name: key in results.
        title: description within a sentence: "TF-IDF with logistic regression".
    """

    name: ClassVar[str]
    title: str

    @abc.abstractmethod
    def predict(self, train: Sequence[E], examples: Sequence[E]) -> list[Prediction] | None:
        """Train on labeled examples and predict others; None if `train` is unusable (texts without a single word)."""


@dataclass(frozen=True)
class BaselineScore:
    """Scores of a baseline.

    Attributes:
        metrics: metrics by name, the headline metric first.
        train_examples: number of training examples.
    """

    name: str
    title: str
    metrics: dict[str, float]
    train_examples: int

    def record(self) -> dict[str, Any]:
        """The score as JSON values."""
        return {"title": self.title, "metrics": self.metrics, "train_examples": self.train_examples}


def measure_baselines(
    task: Task[Any], train: Sequence[Any], examples: Sequence[Any], warn: Callable[[str], None]
) -> Iterator[BaselineScore]:
    """Yield the score of each baseline of a task, the simplest first.

    Baselines are trained on a random sample of at most `TRAINING_EXAMPLES` examples and about `TRAINING_CHARACTERS` characters.
    There are none if the examples to evaluate on exceed `EVALUATED_EXAMPLES` or `EVALUATED_CHARACTERS`.

    Args:
        train: training examples of the network.
        examples: examples that the network is evaluated on.
        warn: receives a message about each of these limits, and about each baseline that fails, which does not end the
            fine-tuning.
    """
    if len(examples) > EVALUATED_EXAMPLES or _characters(examples) > EVALUATED_CHARACTERS:
        limits = f"{EVALUATED_EXAMPLES:,} examples or {EVALUATED_CHARACTERS:,} characters"
        warn(f"{task.name}: no baselines: there are more than {limits} to evaluate on")
        return
    total = len(train)
    train = sampled(train, TRAINING_EXAMPLES)
    train = sampled(train, max(1, len(train) * TRAINING_CHARACTERS // max(_characters(train), 1)))
    if len(train) < total:
        warn(f"{task.name}: baselines are trained on {len(train):,} of the {total:,} training examples")
    for baseline in task.baselines():
        try:
            predictions = baseline.predict(train, examples)
        except (ValueError, MemoryError, np.linalg.LinAlgError) as problem:
            warn(f"baseline left out: {baseline.title}: {problem}")
            continue
        if predictions is not None:
            scores = task.score(examples, predictions).values
            yield BaselineScore(baseline.name, baseline.title, dict(scores), len(train))


def deciding_metrics(metric: str, metrics: Mapping[str, float]) -> list[str]:
    """The metrics by which a model and a baseline are compared, the decisive one first.

    Args:
        metric: headline metric of the task.
        metrics: its metrics by name.
    """
    return [name for name in _PUBLISHED_TOGETHER.get(metric, (metric,)) if name in metrics]


def unbeaten_metric(metric: str, model: Mapping[str, float], baseline: Mapping[str, float]) -> str | None:
    """The metric in which a model does not beat a baseline; None if it beats the baseline.

    Args:
        metric: headline metric of the task.
        model, baseline: their metrics by name.
    """
    first, *others = deciding_metrics(metric, baseline)
    return first if model[first] <= baseline[first] else next((name for name in others if model[name] < baseline[name]), None)


def _characters(examples: Sequence[object]) -> int:
    """Number of characters of the examples, with their ids and labels."""
    return sum(len(repr(example)) for example in examples)


def sampled(examples: Sequence[E], count: int) -> Sequence[E]:
    """A random but reproducible sample of the examples, in their order; all of them if there are no more."""
    size = len(examples)
    if size <= count:
        return examples
    chosen = np.sort(permute(np.arange(count), size, derive_key("baseline rows", size)))
    return [examples[int(row)] for row in chosen]
