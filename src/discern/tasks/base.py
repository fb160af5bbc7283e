"""The contracts of tasks: examples to rows, hidden states to a loss, outputs to predictions and scores."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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
from discern.data.sources.documents import Problem, ProblemLog
from discern.data.tables import Table
from discern.data.tokenizer.tokens import encode_texts
from discern.models.base import Encoder
from discern.models.config import ModelConfig
from discern.tasks.features import Features, TaskRows
from discern.types import SpecialTokens, TokenBatch

if TYPE_CHECKING:
    from discern.tasks.baselines import Baseline

E = TypeVar("E")
Outputs = Sequence[Mapping[str, NDArray[np.float32]]]
"""Outputs of a network for each row, by name. Those per token may be longer than the row."""
LossAndOutputs = tuple[Tensor | None, dict[str, Tensor]]
"""The loss of a head, or None without targets, and its outputs by name."""
Prediction = dict[str, Any]
"""Prediction for one example, as written to a file of predictions; `id` is the id of the example."""
Predictions = Sequence[Prediction]


# Number of texts tokenized at a time: the id lists of a large file take more memory than its rows.
_BLOCK = 10_000

# A class, a number (regression), several classes at once, or unknown.
Label = str | float | tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ClassificationExample:
    """A text or a pair of texts with its label.

    Attributes:
        id: unique within its file; the official id if the format has one.
        label: a str is a class, a float a score, a tuple a set of classes; None if the file has no labels.
    """

    id: str
    text: str
    pair: str | None = None
    label: Label = None


@dataclass(frozen=True, slots=True)
class TaggingExample:
    """The words of a sentence with their tags, None if the file has no tags."""

    id: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in a context: `context[start : start + len(text)] == text` exactly."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class QuestionExample:
    """A question about a context.

    Attributes:
        answers: answers that occur in the context; training uses the first.
        golds: texts that the official metric compares with, whether they occur in the context or not.
        impossible: whether the context contains no answer; None if unknown (a test file).
    """

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] = ()
    golds: tuple[str, ...] = ()
    impossible: bool | None = None


@dataclass(frozen=True, slots=True)
class TextGroup:
    """Texts whose vectors are compared: an anchor, its positive and its negatives; or a query, or a document, alone.

    Attributes:
        texts: anchor, positive, negatives in this order; or a single text.
        score: similarity of two texts, as judged by people; None if they were not judged.
        relevant: ids of the documents that are relevant for a query, with their grades; None if this is not a query.
    """

    id: str
    texts: tuple[str, ...]
    score: float | None = None
    relevant: tuple[tuple[str, float], ...] | None = None

    @property
    def text(self) -> str:
        """The anchor, the query or the document."""
        return self.texts[0]


@dataclass(frozen=True, slots=True)
class Reading(Generic[E]):
    """The content of a file.

    Attributes:
        examples: examples in the order of the file.
        source: name of the file in messages.
        problems: rows that were left out or corrected, counted by kind, with the first few places (`file:line` and reason).
        notes: decisions of the reader, one per line, such as the columns or the tag scheme.
        places: `file:line` of each example; empty if unknown.
        indivisible: whether the examples only make sense together, as queries and the documents that are searched.
    """

    examples: tuple[E, ...]
    source: str
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    indivisible: bool = False

    def place(self, number: int) -> str:
        """Place of an example in its file, for messages."""
        return self.places[number] if self.places else f"{self.source}, example {getattr(self.examples[number], 'id', number)}"


@dataclass(frozen=True, slots=True)
class Scores:
    """Metrics of a set of predictions.

    Attributes:
        values: metrics by name: fractions in 0-1 (correlations in -1 to 1), apart from thresholds, and errors in the unit of
            the labels.
        degenerate: by name, why a metric is undefined on these predictions and was set to 0 ("every prediction is 1").
    """

    values: dict[str, float]
    degenerate: dict[str, str] = field(default_factory=dict)

    def undefined(self, where: str) -> list[str]:
        """Lines that say which metrics are undefined, and why, on the split `where`."""
        return [f"{name} on {where} is undefined and counts as 0: {why}" for name, why in self.degenerate.items()]


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

    def ids(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Token ids of each text, without special tokens."""
        for start in range(0, len(texts), _BLOCK):
            yield from (encoding.ids for encoding in encode_texts(self.tokenizer, texts[start : start + _BLOCK], ids_only=True))


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
    def forward(self, hidden: Float[Tensor, "R L W"], tokens: TokenBatch, rows: TaskRows) -> LossAndOutputs:
        """Compute the loss and the outputs for the rows of this task.

        Values that are not finite are taken as the sign of a network that diverged.

        Args:
            hidden: hidden states of the rows, W = D; if the head `reads_words`, W = D + E: each state is followed by the word
                embedding of its token, normalized to mean 0 and variance 1.
            tokens: the rows.
            rows: their targets, if any.

        Returns:
            The loss summed over all items, in nats, or None without targets; and the outputs by name.
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
    make_rows: ClassVar[Callable[..., Iterator[tuple[Any, str]]]]
    """Makes an example of each row of a table, with its place; see `rows`."""

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
    def check_model(cls, definition: Definition[E], config: TaskConfig, encoder: Encoder, *, dropout: float, frame: str) -> None:
        """Raise a ConfigError if the settings do not fit the encoder or the files."""

    @classmethod
    @abc.abstractmethod
    def read(cls, path: Path, definition: Definition[E], split: str, config: TaskConfig, *, labeled: bool = True) -> Reading[E]:
        """The examples of a file with the layout of a definition; see `Definition.read`."""

    @classmethod
    def rows(cls, table: Table, layout: Layout) -> Iterator[E]:
        """The examples of a table to predict, one by one; only for families that are predicted."""
        return (example for example, _ in cls.make_rows(table, layout, ProblemLog(), labeled=False))

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

    def items(self, rows: TaskRows) -> int:
        """Number of items that the loss of these rows, which have targets, is summed over: the rows by default."""
        return len(rows.rows)

    @abc.abstractmethod
    def predict(self, examples: Sequence[E], features: Features, outputs: Outputs) -> list[Prediction]:
        """The prediction for each example."""

    @abc.abstractmethod
    def score(self, examples: Sequence[E], predictions: Predictions) -> Scores:
        """The metrics by name, the headline metric first."""

    def metric_terms(self, metric: str, examples: Sequence[E], predictions: Predictions) -> NDArray[np.float64] | None:
        """(N, 2) what each prediction adds to the numerator and the denominator of a metric, which is the ratio of their sums.

        The terms of a mean are the values and ones. None, the default: the metric is no such ratio; resampled examples are scored
        to compute its interval, which is slower.
        """
        return None

    @abc.abstractmethod
    def mistakes(self, examples: Sequence[E], predictions: Predictions) -> list[dict[str, Any]]:
        """Wrong predictions, the worst first, each with `text`, `gold` and `badness` (higher is worse)."""

    @abc.abstractmethod
    def failure(self, examples: Sequence[E], predictions: Predictions) -> str | None:
        """Why these predictions show that the network learned nothing ("every prediction is 1"), or None.

        Equal predictions are no failure where they are right.
        """

    def baselines(self) -> Sequence[Baseline[E]]:
        """Simple predictors to compare the network with, the simplest first; none by default."""
        return ()


@dataclass(frozen=True)
class Layout:
    """How the files of a task are read.

    Attributes:
        columns: possible names of the column of each role, the first that exists is used. In a file with one word per line,
            the index of the column, from 0; negative numbers count from the right.
        format: a format of tables, or another one that the family reads ('conll', 'squad', 'mrqa'); None: recognized by
            content and name.
        kind: for classification 'label' (one class), 'labels' (any number of classes) or 'number'; for text embeddings 'pairs',
            'texts' (single texts) or 'judged' (pairs that are evaluated by their judged similarity).
        separator: separator of several labels in one cell; None: JSON lists.
        header: the columns of files without a header.
        verbatim: quotation marks in TSV files are text, even around a whole field.
        characters: every character is a word.
        published: the files are those of a published data set: malformed rows of it are left out and counted.
    """

    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    format: str | None = None
    kind: str = "label"
    separator: str | None = None
    header: tuple[str, ...] = ()
    verbatim: bool = False
    characters: bool = False
    published: bool = False

    @classmethod
    def of_record(cls, record: Mapping[str, Any] | None) -> Layout:
        """The layout from its record in JSON; an empty one for a model of another library, which has none."""
        if not record:
            return cls()
        values = {each.name: record[each.name] for each in fields(cls)}
        columns = {role: tuple(names) for role, names in record["columns"].items()}
        return cls(**values | {"columns": columns, "header": tuple(record["header"])})

    def with_columns(self, columns: Mapping[str, str]) -> Layout:
        """The layout with other columns for some roles."""
        return replace(self, columns={**self.columns, **{role: (name,) for role, name in columns.items()}})

    def column(self, table: Table, role: str) -> str:
        """The column of a role.

        Raises:
            ConfigError: it does not exist; the hint names the most similar one.
        """
        names = self.columns[role]
        return next((name for name in names if name in table.columns), None) or table.require(names[0], option_of(role))

    def optional_column(self, table: Table, role: str) -> str | None:
        """The column of a role that files may lack, such as the label of a published test file."""
        if role in self.columns and (not self.published or any(name in table.columns for name in self.columns[role])):
            return self.column(table, role)
        return None

    def describe(self) -> str:
        """The columns in words, such as "columns: text = 'review', label = 'stars'"."""
        several = "several labels" + (f", separated by '{self.separator}'" if self.separator is not None else "")
        kind = {"number": " (a number)", "labels": f" ({several})"}.get(self.kind, "")
        quote = "" if self.format == "conll" else "'"  # a number needs none
        return "columns: " + ", ".join(f"{role} = {quote}{names[0]}{quote}" for role, names in self.columns.items()) + kind


@dataclass(frozen=True)
class Definition(Generic[E]):
    """A named task, as the registry holds it; or the task of a user's own files, which has no `files`.

    Attributes:
        family: class that does the work.
        metrics: the first is the headline metric, which ranks seeds, sweeps and evaluations; higher is better.
        files: possible file names of each split, relative to the folder of the task; the first that exists is used. Splits:
            train, dev, test, and further ones.
        layout: how the files are read.
        labels: fixed labels, or the lowest and the highest score; empty: taken from the training file.
        defaults: settings that differ from the defaults of the family, by dotted key ("finetune.epochs").
        report_splits: further splits whose metrics are reported as `split_metric`, if their files exist.
        reader: reads files in a format that no layout describes: `reader(path, labeled)`.
        source: where the files are published.
        license: their license, as stated there.
    """

    name: str
    family: type[Task[E]]
    metrics: tuple[str, ...]
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layout: Layout = field(default_factory=Layout)
    labels: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    report_splits: tuple[str, ...] = ()
    reader: Callable[[Path, bool], Reading[E]] | None = None
    source: str = ""
    license: str = ""

    def read(self, path: Path, split: str, config: TaskConfig, *, labeled: bool = True) -> Reading[E]:
        """The examples of a file. For the split "train", examples that cannot be learned from are left out.

        Args:
            labeled: False for a file to predict: its labels are not read, and no row is left out because of them.
        """
        if self.reader is not None:
            return self.reader(path, labeled)
        return self.family.read(path, self, split, config, labeled=labeled)


def label_counts(examples: Sequence[ClassificationExample]) -> dict[str, int]:
    """Number of examples of each class, the most frequent first, ties sorted by name. Scores are not counted."""
    labels = (label if isinstance(label, tuple) else (label,) for label in (example.label for example in examples))
    names = sorted(name for group in labels for name in group if isinstance(name, str))
    return dict(Counter(names).most_common())  # equal counts stay in the order of the names


def tag_counts(examples: Sequence[TaggingExample]) -> dict[str, int]:
    """Number of occurrences of each tag, the most frequent first, ties sorted by name."""
    return dict(Counter(sorted(tag for example in examples for tag in example.tags or ())).most_common())


def option_of(role: str) -> str:
    """The option that names the column of a role."""
    return "--set files.start" if role == "start" else f"--{role}"
