"""The contracts of tasks: examples to rows, hidden states to a loss, outputs to predictions and scores."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from pydantic import Field
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from discern.config.schema import Section
from discern.data.tokenizer.plain_text import encode_texts
from discern.models.base import Encoder
from discern.models.config import ModelConfig
from discern.tasks.examples import Reading
from discern.tasks.features import Features, TaskRows
from discern.tasks.metrics import Scores
from discern.types import SpecialTokens, TokenBatch

if TYPE_CHECKING:
    from discern.tasks.baselines.base import Baseline

E = TypeVar("E")
Outputs = Sequence[Mapping[str, NDArray[np.float32]]]
"""Outputs of a network for each row, by name, without padding."""
Prediction = dict[str, Any]
"""Prediction for one example, as written to a file of predictions; `id` is the id of the example."""


class TaskConfig(Section):
    """Settings of all tasks. Each family extends them in its own module."""

    sequence_length: int = Field(
        128, ge=8, le=1 << 20, description="Maximum number of tokens per row, including [CLS] and [SEP]."
    )


@dataclass(frozen=True)
class Labels:
    """The labels of a task, collected from its training file.

    Attributes:
        names: classes or tags, in the order of the network's outputs; empty for scores and answers.
        kind: 'single': one class per example; 'multi': any number of classes; 'number': a score; 'tags': one tag per word;
            'spans': answers; 'vectors': none, the texts themselves are compared.
        scale, shift: a score is `scale * output + shift`.
        weights: weights of the classes in the loss, in the order of `names`; empty: all 1.
        scheme: tag scheme of the training file ('iob1', 'iob2', 'bioes' or 'none').
        pairs: whether the examples are pairs of texts.
    """

    names: tuple[str, ...] = ()
    kind: str = "single"
    scale: float = 1.0
    shift: float = 0.0
    weights: tuple[float, ...] = ()
    scheme: str = "none"
    pairs: bool = False


@dataclass(frozen=True)
class TextEncoder:
    """The tokenizer of the model, with the ids of its special tokens."""

    tokenizer: Tokenizer
    special: SpecialTokens

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        return [encoding.ids for encoding in encode_texts(self.tokenizer, texts, ids_only=True)]


class TaskHead(nn.Module, abc.ABC):
    """The head of one task on the encoder.

    Attributes:
        reads_words: whether the head also reads the word embeddings of the tokens.
    """

    reads_words: bool = False

    def inputs(self, hidden: Float[Tensor, "R L D"], encoder: Encoder, input_ids: Int[Tensor, "R L"]) -> Float[Tensor, "R L W"]:
        """What `forward` takes as `hidden`.

        Args:
            hidden: hidden states of the rows.
            encoder: encoder that computed them.
            input_ids: tokens of the rows.
        """
        if not self.reads_words:
            return hidden
        words = encoder.embeddings.words(input_ids)
        return torch.cat([hidden, F.layer_norm(words, words.shape[-1:]).to(hidden.dtype)], -1)

    @abc.abstractmethod
    def forward(
        self, hidden: Float[Tensor, "R L W"], tokens: TokenBatch, rows: TaskRows
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Compute the loss and the outputs for the rows of this task.

        Values that are not finite are taken as the sign of a network that diverged.

        Args:
            hidden: hidden states of the rows, W = D; if the head `reads_words`, W = D + E: each state is followed by the word
                embedding of its token, normalized to mean 0 and variance 1.
            tokens: the rows.
            rows: their targets, if any.

        Returns:
            The loss summed over all items, in nats, or None without targets; and the detached outputs by name.
        """


class Task(abc.ABC, Generic[E]):
    """One supervised task. A family of tasks is a final subclass in its own module.

    Args:
        name: name of the task in results.
        config: settings, an instance of the class `Config`.
        metrics: names of the metrics; the first is the headline metric, for which higher is better.
        labels: labels that `learn` returned.
    """

    Config: ClassVar[type[TaskConfig]] = TaskConfig
    family: ClassVar[str]
    objective: ClassVar[str | None] = None
    """The objective that trains the family, as `module:Class`; None: `SupervisedObjective`, which can train several tasks."""
    own_frame: ClassVar[bool] = False
    """Whether rows must be framed as in pre-training, because the encoder is later used without the record of its fine-tuning."""

    def __init__(self, name: str, config: TaskConfig, metrics: tuple[str, ...], labels: Labels) -> None:
        self.name = name
        self.config = config
        self.metrics = metrics
        self.labels = labels

    @classmethod
    @abc.abstractmethod
    def learn(cls, train: Reading[E], config: TaskConfig, fixed: tuple[str, ...]) -> Labels:
        """The labels of a training file, or the `fixed` ones in their order if there are any.

        Raises:
            DataError: there is nothing to learn: no labels, or a single class.
        """

    @classmethod
    def check_encoder(cls, config: TaskConfig, encoder: ModelConfig) -> None:
        """Raise a ConfigError if the settings do not fit the encoder."""

    @abc.abstractmethod
    def check(self, reading: Reading[E]) -> None:
        """Raise a DataError if a labeled file has labels that the training file lacks."""

    def training_examples(self, examples: Sequence[E]) -> Sequence[E]:
        """The examples to train on: those of the training file, and any that the settings add."""
        return examples

    @abc.abstractmethod
    def encode(self, examples: Sequence[E], text: TextEncoder, *, labeled: bool) -> Features:
        """The rows of the examples, with targets if `labeled`."""

    @abc.abstractmethod
    def head(self, encoder: ModelConfig, dropout: float) -> TaskHead:
        """A new head, without initialized weights.

        Args:
            encoder: settings of the encoder that the head is for.
        """

    @abc.abstractmethod
    def items(self, rows: TaskRows) -> int:
        """Number of items that the loss of these rows is summed over."""

    @abc.abstractmethod
    def predict(self, examples: Sequence[E], features: Features, outputs: Outputs) -> list[Prediction]:
        """The prediction for each example."""

    @abc.abstractmethod
    def score(self, examples: Sequence[E], predictions: Sequence[Prediction]) -> Scores:
        """The metrics by name, the headline metric first."""

    @abc.abstractmethod
    def mistakes(self, examples: Sequence[E], predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
        """Wrong predictions, the worst first, each with `text`, `gold` and `badness` (higher is worse)."""

    @abc.abstractmethod
    def failure(self, examples: Sequence[E], predictions: Sequence[Prediction]) -> str | None:
        """Why these predictions show that the network learned nothing ("every prediction is 1"), or None.

        Equal predictions are no failure where they are right.
        """

    def baselines(self) -> Sequence[Baseline[E]]:
        """Simple predictors to compare the network with, the simplest first; none by default."""
        return ()

    def rows_of(self, batch: TokenBatch, outputs: Mapping[str, Tensor]) -> list[dict[str, NDArray[np.float32]]]:
        """The outputs of a head, row by row; outputs per token are cut to the length of the row.

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
    """Names of the outputs per token, of shape (R, L, ...)."""


@dataclass(frozen=True)
class Source(abc.ABC, Generic[E]):
    """Finds and reads the files of a task.

    Attributes:
        reads_folders: whether `read` also takes folders.
    """

    reads_folders: ClassVar[bool] = False

    @property
    def needs_dropout(self) -> bool:
        """Whether there is something to learn only if dropout makes two passes differ."""
        return False

    def configured(self, config: TaskConfig) -> Source[E]:
        """The source, configured by the settings of the task."""
        return self

    def record(self) -> dict[str, Any]:
        """JSON values that are needed to read further files like the training file; empty for named tasks."""
        return {}

    def text_names(self) -> tuple[tuple[str, ...], ...]:
        """Column names of the first and the second text in tables that are not in the task's own format."""
        return ()

    @abc.abstractmethod
    def splits(self, folder: Path) -> dict[str, Path]:
        """The file of each split in a folder: train, dev, test, and further splits by name."""

    @abc.abstractmethod
    def read(self, path: Path, split: str, *, labeled: bool = True) -> Reading[E]:
        """The examples of a file. For the split "train", examples that cannot be learned from are left out.

        Args:
            labeled: False for a file to predict: its labels are not read, and no row is left out because of them.
        """


@dataclass(frozen=True)
class Definition(Generic[E]):
    """A named task, as the registry holds it.

    Attributes:
        family: class that does the work.
        metrics: the first is the headline metric, which ranks seeds, sweeps and evaluations; higher is better.
        labels: fixed labels; empty: taken from the training file.
        defaults: settings that differ from the defaults of the family, by dotted key ("finetune.epochs").
        report_splits: further splits whose metrics are reported as `split_metric`, if their files exist.
    """

    name: str
    family: type[Task[E]]
    source: Source[E]
    metrics: tuple[str, ...]
    labels: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    report_splits: tuple[str, ...] = ()
