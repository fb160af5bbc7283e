"""The contract of baselines, and their evaluation on the examples that the network was trained and evaluated on."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from discern.data.batching.ordering import derive_key, permute

if TYPE_CHECKING:
    from discern.tasks.base import Prediction, Task

E = TypeVar("E")
# With more examples, baselines take too long for a side result.
TRAINING_EXAMPLES = 20_000
EVALUATED_EXAMPLES = 50_000


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

    Baselines are trained on at most `TRAINING_EXAMPLES` examples, sampled at random. There are none with more than
    `EVALUATED_EXAMPLES` examples to evaluate on.

    Args:
        train: training examples of the network.
        examples: examples that the network is evaluated on.
        warn: receives a message about each baseline that fails, which does not end the fine-tuning.
    """
    if len(examples) > EVALUATED_EXAMPLES:
        return
    train = sampled(train, TRAINING_EXAMPLES)
    for baseline in task.baselines():
        try:
            predictions = baseline.predict(train, examples)
        except (ValueError, MemoryError, np.linalg.LinAlgError) as problem:
            warn(f"baseline left out: {baseline.title}: {problem}")
            continue
        if predictions is not None:
            scores = task.score(examples, predictions).values
            yield BaselineScore(baseline.name, baseline.title, dict(scores), len(train))


def sampled(examples: Sequence[E], count: int) -> Sequence[E]:
    """A random but reproducible sample of the examples, in their order; all of them if there are no more."""
    size = len(examples)
    if size <= count:
        return examples
    chosen = np.sort(permute(np.arange(count), size, derive_key("baseline rows", size)))
    return [examples[int(row)] for row in chosen]
