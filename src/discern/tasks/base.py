"""What a task is: from examples to rows, from hidden states to a loss, from outputs to predictions and scores."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from pydantic import Field
from tokenizers import Tokenizer
from torch import Tensor, nn

from discern.config.base import Section
from discern.tasks.examples import Reading
from discern.tasks.features import Features, TaskRows
from discern.tasks.metrics.scores import Scores
from discern.types import SpecialTokens, TokenBatch

if TYPE_CHECKING:
    from discern.tasks.baselines.base import Baseline

E = TypeVar("E")
Outputs = Sequence[Mapping[str, NDArray[np.float32]]]
"""What a network says of each row, by name, padding taken off."""
Prediction = dict[str, Any]
"""What is said of one example, as it is written to a file of predictions; `id` is the example's."""


class TaskConfig(Section):
    """Settings that all tasks have. Those of a family stand in its file and extend these."""

    sequence_length: int = Field(128, ge=8, le=1 << 20, description="Positions of a row, [CLS] and [SEP] included.")


@dataclass(frozen=True)
class Labels:
    """What a task learned from its training file before any training.

    Attributes:
        names: of the classes or tags, in the order of the network's outputs; empty where there are none.
        kind: 'single': one class an example; 'multi': any number; 'number': a score; 'tags': one a word; 'spans': answers.
        scale, shift: a score is `scale * output + shift`.
        weights: of the classes in the loss, in the order of `names`; empty: all 1.
        scheme: that the tags of the training file are in ('iob1', 'iob2', 'bioes', 'none').
    """

    names: tuple[str, ...] = ()
    kind: str = "single"
    scale: float = 1.0
    shift: float = 0.0
    weights: tuple[float, ...] = ()
    scheme: str = "none"


@dataclass(frozen=True)
class TextEncoder:
    """Text to ids: the model's own tokenizer, with the ids of its special tokens."""

    tokenizer: Tokenizer
    special: SpecialTokens

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, not framed."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


class TaskHead(nn.Module, abc.ABC):
    """What stands on the encoder for one task."""

    @abc.abstractmethod
    def forward(
        self, hidden: Float[Tensor, "R L D"], tokens: TokenBatch, rows: TaskRows
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The loss summed over all items, in nats, or None without targets; and what is said of each row, detached.

        What is not finite counts as the sign of a network that diverged.

        Args:
            hidden: states of the rows of this task.
            tokens: those rows.
            rows: their targets, if any.
        """


class Task(abc.ABC, Generic[E]):
    """One supervised task. A family of tasks is a final subclass in a file of its own.

    Args:
        name: as results call it.
        config: of the class `Config`.
        metrics: which ones, by name; the first is the headline, of which more is better.
        labels: as `learn` gave them.
    """

    Config: ClassVar[type[TaskConfig]] = TaskConfig
    family: ClassVar[str]

    def __init__(self, name: str, config: TaskConfig, metrics: tuple[str, ...], labels: Labels) -> None:
        self.name = name
        self.config = config
        self.metrics = metrics
        self.labels = labels

    @classmethod
    @abc.abstractmethod
    def learn(cls, train: Reading[E], config: TaskConfig, fixed: tuple[str, ...]) -> Labels:
        """The labels that a training file uses; with `fixed` ones, those, in that order.

        Raises:
            DataError: there is nothing to learn: one class alone, no labels.
        """

    @abc.abstractmethod
    def check(self, reading: Reading[E]) -> None:
        """Raise a DataError where a labelled file has labels that the training file lacks."""

    def training_examples(self, examples: Sequence[E]) -> Sequence[E]:
        """What is trained on, given the examples of the training file: those, unless the settings add to them."""
        return examples

    @abc.abstractmethod
    def encode(self, examples: Sequence[E], text: TextEncoder, *, labelled: bool) -> Features:
        """Rows of the examples, with targets where `labelled`."""

    @abc.abstractmethod
    def head(self, hidden_size: int, dropout: float) -> TaskHead:
        """A new head, its weights not yet filled."""

    @abc.abstractmethod
    def items(self, rows: TaskRows) -> int:
        """How many items the loss of these rows sums over."""

    @abc.abstractmethod
    def predict(self, examples: Sequence[E], features: Features, outputs: Outputs) -> list[Prediction]:
        """What is said of each example."""

    @abc.abstractmethod
    def score(self, examples: Sequence[E], predictions: Sequence[Prediction]) -> Scores:
        """The metrics, by name, the headline first."""

    @abc.abstractmethod
    def mistakes(self, examples: Sequence[E], predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
        """What went wrong, worst first: the prediction with `text`, `gold` and `badness` (higher is worse)."""

    @abc.abstractmethod
    def failure(self, predictions: Sequence[Prediction]) -> str | None:
        """Why these predictions are those of a network that learned nothing ("every prediction is 1"), or None."""

    def baselines(self) -> Sequence[Baseline[E]]:
        """Simple predictors to compare the network with, the simplest first; none unless a family defines some."""
        return ()

    def rows_of(self, batch: TokenBatch, outputs: Mapping[str, Tensor]) -> list[dict[str, NDArray[np.float32]]]:
        """A head's outputs, row by row; what is per token is cut to the row's length.

        Args:
            batch: the rows of this task.
        """
        lengths = batch.attention_mask.sum(1).tolist()
        arrays = {name: tensor.detach().float().cpu().numpy() for name, tensor in outputs.items()}
        return [
            {name: array[row, : lengths[row]] if name in self.per_token else array[row] for name, array in arrays.items()}
            for row in range(len(lengths))
        ]

    per_token: ClassVar[frozenset[str]] = frozenset()
    """Names of the outputs that are (R, L, ...)."""


@dataclass(frozen=True)
class Source(abc.ABC, Generic[E]):
    """How the files of a task are found and read."""

    def configured(self, config: TaskConfig) -> Source[E]:
        """The same, reading as the task's settings say."""
        return self

    def record(self) -> dict[str, Any]:
        """What must be kept to read further files as the training file was read, as JSON has it; of a named task nothing."""
        return {}

    def text_names(self) -> tuple[tuple[str, ...], ...]:
        """What columns of the first text, and of the second, may be called in a table that is not in the task's own format."""
        return ()

    @abc.abstractmethod
    def splits(self, folder: Path) -> dict[str, Path]:
        """The files of each split that a folder holds: train, dev, test, and further ones by their names."""

    @abc.abstractmethod
    def read(self, path: Path, split: str, *, labelled: bool = True) -> Reading[E]:
        """The examples of a file. `split` says what it is for: training leaves out what cannot be learned from.

        Args:
            labelled: False for a file to predict: labels that it may have are not looked at, and no row is left out for them.
        """


@dataclass(frozen=True)
class Definition(Generic[E]):
    """A task by its name: what the registry holds.

    Attributes:
        family: the class that does the work.
        metrics: the first is the headline, of which more is better: seeds, sweeps and evaluations are ranked by it.
        labels: where they are fixed; empty: as the training file has them.
        defaults: settings that differ from the family's, by dotted key ("finetune.epochs").
        report_splits: further splits that are evaluated and reported if their files are there, as `split_metric`.
    """

    name: str
    family: type[Task[E]]
    source: Source[E]
    metrics: tuple[str, ...]
    labels: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    report_splits: tuple[str, ...] = ()
