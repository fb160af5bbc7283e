"""What a baseline is, and how it is measured: on the examples that the network was trained and evaluated on."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from discern.data.ordering import derive_key, permute

if TYPE_CHECKING:
    from discern.tasks.base import Prediction, Task

E = TypeVar("E")
# Beyond these, a baseline takes longer than people wait for a footnote.
TRAINING_EXAMPLES = 20_000
EVALUATED_EXAMPLES = 50_000


class Baseline(abc.ABC, Generic[E]):
    """A simple predictor, trained and applied in seconds. The same examples give the same predictions.

    Attributes:
        name: the key in results.
        title: what it is, as it stands in a sentence: "TF-IDF with logistic regression".
    """

    name: ClassVar[str]
    title: str

    @abc.abstractmethod
    def predict(self, train: Sequence[E], examples: Sequence[E]) -> list[Prediction] | None:
        """Predictions for `examples`, or None if it cannot be trained on `train` (texts without a single word).

        Args:
            train: labelled.
        """


@dataclass(frozen=True)
class BaselineScore:
    """Scores of a baseline.

    Attributes:
        metrics: by name, the headline first, as of the network.
        train_examples: how many it was trained on.
    """

    name: str
    title: str
    metrics: dict[str, float]
    train_examples: int

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"title": self.title, "metrics": self.metrics, "train_examples": self.train_examples}


def measure_baselines(
    task: Task[Any], train: Sequence[Any], examples: Sequence[Any], warn: Callable[[str], None]
) -> Iterator[BaselineScore]:
    """The score of each baseline of a task, the simplest first, as each is done.

    Those that learn take `TRAINING_EXAMPLES` drawn at random where there are more, and none is measured on more than
    `EVALUATED_EXAMPLES`.

    Args:
        train: what the network is trained on.
        examples: what it is evaluated on.
        warn: told which baseline could not be measured: no reason to lose a fine-tuning.
    """
    if len(examples) > EVALUATED_EXAMPLES:
        return
    train = drawn(train, TRAINING_EXAMPLES)
    for baseline in task.baselines():
        try:
            predictions = baseline.predict(train, examples)
        except (ValueError, MemoryError, np.linalg.LinAlgError) as problem:
            warn(f"no baseline from {baseline.title}: {problem}")
            continue
        if predictions is not None:
            scores = task.score(examples, predictions).values
            yield BaselineScore(baseline.name, baseline.title, dict(scores), len(train))


def drawn(examples: Sequence[E], count: int) -> Sequence[E]:
    """So many of the examples, at random but always the same ones, in their order; all where there are no more."""
    size = len(examples)
    if size <= count:
        return examples
    chosen = np.sort(permute(np.arange(count), size, derive_key("baseline rows", size)))
    return [examples[int(row)] for row in chosen]
