"""Tagging: a tag for every word, predicted from the state of its first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from discern.errors import DataError, did_you_mean
from discern.models.config import ModelConfig
from discern.models.fused_ops import Dropout
from discern.models.heads import PredictionLayers
from discern.tasks.base import Labels, Outputs, Prediction, Task, TaskConfig, TaskHead, TextEncoder
from discern.tasks.examples import Reading, TaggingExample, tag_counts
from discern.tasks.features import IGNORED, Features, Ragged, TaskRows
from discern.tasks.metrics import Scores
from discern.tasks.metrics.spans import span_scores, tag_accuracy
from discern.tasks.tagged_rows import NO_WORD, WordPieces, cut_sentence, framed
from discern.tasks.tags import Scheme, Span, convert, detect_scheme, spans_of, split_tag, tags_of
from discern.types import TokenBatch

if TYPE_CHECKING:
    from discern.tasks.baselines.base import Baseline

_TAG_COLUMN = "--tags COLUMN for a file of your own, --set task.tag_column=N for those of a named task"


class TaggingConfig(TaskConfig):
    """Settings of tagging."""

    word_column: int = Field(0, description="Column of the words in CoNLL files, from 0; negative numbers count from the right.")
    tag_column: int = Field(-1, description="Column of the tags in CoNLL files; -1 is the last column.")
    head: Literal["linear", "prediction"] = Field(
        "linear",
        description="'linear': one linear layer on the state of every token. 'prediction': preceded by a layer of the same "
        "width, GELU and a LayerNorm, as in transformers' newer encoders, for which it is the default.",
    )
    overlap: int = Field(
        64, ge=0, description="Overlap, in tokens, between the windows of a long sentence; at most half a window."
    )
    spaced_words: bool = Field(
        True,
        description="Read every word but the first with a space before it, as in running text. This concerns tokenizers that "
        "keep the space with the word (byte-level BPE). Words of scripts without spaces are read without.",
    )


class TaggingHead(TaskHead):
    """Dropout and one linear layer on the state of every token, possibly preceded by other layers.

    Differs: google-research/electra has no dropout here.

    Args:
        num_tags: number of outputs per token.
        inner: ModernBERT's layers before the last one; None: there are none.
    """

    def __init__(self, hidden_size: int, dropout: float, num_tags: int, inner: PredictionLayers | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(hidden_size, num_tags)

    def forward(
        self, hidden: Float[Tensor, "R L D"], tokens: TokenBatch, rows: TaskRows
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        states = hidden if self.inner is None else self.inner(hidden)
        logits = self.output(self.dropout(states)).float()
        loss = None
        if "tags" in rows.targets:
            targets = rows.targets["tags"]
            within = logits[:, : targets.shape[1]]
            loss = F.cross_entropy(within.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return loss, {"logits": logits.detach()}


class Tagging(Task[TaggingExample]):
    """A tag for every word, from its first token; spans are scored as by conlleval.

    The network learns BIOES, whatever the scheme of the files; predictions are converted to the scheme of the training file
    (BILOU and BMES to BIOES). Each type of the training file has all four prefixes, so that another file may contain unknown
    types, but no unknown tags of known types. Tags that mark no spans (parts of speech) are learned as they are, and scored by
    accuracy only.

    A sentence that is longer than a row is split into overlapping windows of whole words. Each word is learned and predicted in
    the window with the most context around it, so it counts once.

    Reference: google-research/electra, finetune/tagging.
    Differs: in the released code, segment ids are all 1; words are lowercased whatever the model's vocabulary; sentences are
    truncated, and the words cut off are not scored; a change of type begins no span.
    """

    Config: ClassVar[type[TaskConfig]] = TaggingConfig
    family: ClassVar[str] = "tagging"
    per_token: ClassVar[frozenset[str]] = frozenset({"logits"})

    def __init__(self, name: str, config: TaskConfig, metrics: tuple[str, ...], labels: Labels) -> None:
        super().__init__(name, config, metrics if labels.scheme != "none" else ("accuracy",), labels)
        self._marks_spans = labels.scheme != "none"

    @classmethod
    def learn(cls, train: Reading[TaggingExample], config: TaskConfig, fixed: tuple[str, ...]) -> Labels:
        counts = _counts(train)
        scheme = detect_scheme(example.tags or () for example in train.examples)
        if scheme == "none":
            _refuse_mixture(train, counts)
            names = fixed or tuple(sorted(counts))
        else:
            kinds = {split_tag(tag)[1] for tag in counts if tag != "O"}
            marks = {f"{prefix}-{kind}" if kind else prefix for kind in kinds for prefix in "BIES"}
            names = fixed or (tuple(sorted({"O", *marks})) if kinds else ("O",))
        if len(names) < 2:
            raise DataError(
                f"every word of {train.source} is '{names[0]}': there is nothing to learn",
                hint=f"check the column of the tags: {_TAG_COLUMN}",
            )
        return Labels(names, "tags", scheme=scheme)

    def check(self, reading: Reading[TaggingExample]) -> None:
        known = {self._unit(name) for name in self.labels.names}
        for tag, count in _counts(reading).items():
            if self._marks_spans and not _is_mark(tag):
                raise DataError(
                    f"{_place_of(reading, tag)}: tag '{tag}' ({count:,} in the file) is neither 'O' nor of the form 'B-TYPE', "
                    f"unlike the tags of the training file",
                    hint=f"check the column of the tags ({_TAG_COLUMN}), or correct the tag",
                )
            if self._unit(tag) not in known:
                of_type = "is of a type that does not" if self._marks_spans else "does not"
                raise DataError(
                    f"{_place_of(reading, tag)}: tag '{tag}' ({count:,} in the file) {of_type} occur in the training file, "
                    f"whose tags are {', '.join(sorted(known)[:20])}",
                    hint=f"{did_you_mean(tag, known)} Otherwise add sentences with it to the training file "
                    "(finetune.train_rows and --debug leave sentences out), or remove it from this file",
                )

    def _unit(self, tag: str) -> str:
        """The part of a tag that the training file must contain: for a tag that marks a span its type, as 'B-TYPE'."""
        if tag == "O" or not self._marks_spans:
            return tag
        return tags_of([Span(0, 1, split_tag(tag)[1])], 1, "iob2")[0]

    def encode(self, examples: Sequence[TaggingExample], text: TextEncoder, *, labeled: bool) -> Features:
        room = self.config.sequence_length - 2
        config = cast(TaggingConfig, self.config)
        pieces = WordPieces(examples, text, room, spaced=config.spaced_words)
        ids: list[NDArray[np.int32]] = []
        places: list[NDArray[np.int32]] = []
        targets: list[NDArray[np.int32]] = []
        numbers: list[int] = []
        windowed = 0
        for number, example in enumerate(examples):
            words = [pieces.of[form] for form in pieces.forms(example)]
            classes = self._classes(example) if labeled else None
            windows = cut_sentence([len(word) for word in words], room, config.overlap)
            windowed += len(windows) > 1
            for window in windows:
                row, place = framed(words, window, text)
                ids.append(row)
                places.append(place)
                numbers.append(number)
                if classes is not None:
                    # `NO_WORD` selects the last element, which is `IGNORED`.
                    targets.append(classes[place])
        token_types = Ragged.of((np.zeros(len(row), np.uint8) for row in ids), np.uint8)
        notes = pieces.notes(examples, windowed, self.config.sequence_length)
        return Features(
            Ragged.of(ids),
            token_types,
            np.array(numbers, np.int64),
            {"tags": Ragged.of(targets)} if labeled else {},
            {"word": Ragged.of(places)},
            notes,
        )

    def _classes(self, example: TaggingExample) -> NDArray[np.int32]:
        """(W + 1,) index of each word's tag in the trained scheme, and `IGNORED` at the end."""
        numbers = {name: number for number, name in enumerate(self.labels.names)}
        tags = self._in_scheme(example.tags or (), "bioes")
        return np.array([*(numbers[tag] for tag in tags), IGNORED], np.int32)

    def _in_scheme(self, tags: Sequence[str], scheme: Scheme) -> list[str]:
        return convert(tags, scheme) if self._marks_spans else list(tags)

    def head(self, encoder: ModelConfig, dropout: float) -> TaggingHead:
        inner = PredictionLayers(encoder) if cast(TaggingConfig, self.config).head == "prediction" else None
        return TaggingHead(encoder.hidden_size, dropout, len(self.labels.names), inner)

    def items(self, rows: TaskRows) -> int:
        return int((rows.targets["tags"] != IGNORED).sum()) if "tags" in rows.targets else 0

    def predict(self, examples: Sequence[TaggingExample], features: Features, outputs: Outputs) -> list[Prediction]:
        classes = [np.zeros(len(example.words), np.int64) for example in examples]
        probabilities = [np.zeros(len(example.words)) for example in examples]
        scores = [np.zeros((len(example.words), len(self.labels.names))) for example in examples]
        for row, output in enumerate(outputs):
            example, words = int(features.example[row]), features.places["word"][row]
            here = words != NO_WORD
            logits = output["logits"][here].astype(np.float64)
            best = logits.max(1, keepdims=True, initial=-np.inf)
            classes[example][words[here]] = logits.argmax(1)
            probabilities[example][words[here]] = 1 / np.exp(logits - best).sum(1)
            scores[example][words[here]] = logits
        return [self._prediction(*each) for each in zip(examples, classes, probabilities, scores, strict=True)]

    def _prediction(
        self,
        example: TaggingExample,
        classes: NDArray[np.int64],
        probabilities: NDArray[np.float64],
        logits: NDArray[np.float64],
    ) -> Prediction:
        tags = [self.labels.names[number] for number in classes]
        shown = [round(float(value), 6) for value in probabilities]
        prediction: Prediction = {"id": example.id, "words": list(example.words), "tags": tags}
        if self._marks_spans:
            # A sequence that BIOES forbids is not repaired: conlleval defines its spans.
            spans = spans_of(tags)
            prediction["tags"] = tags_of(spans, len(tags), cast(Scheme, self.labels.scheme))
            prediction["spans"] = [list(span) for span in spans]
        # The logits of all tags for every word: fewer digits than elsewhere, because there are many of them.
        return prediction | {"probabilities": shown, "logits": logits.round(3).tolist()}

    def score(self, examples: Sequence[TaggingExample], predictions: Sequence[Prediction]) -> Scores:
        # Compared in one scheme: another scheme than the training file's changes no span, but would change the accuracy.
        gold = [self._in_scheme(example.tags or (), cast(Scheme, self.labels.scheme)) for example in examples]
        predicted = [prediction["tags"] for prediction in predictions]
        scores = span_scores(gold, predicted) if self._marks_spans else tag_accuracy(gold, predicted)
        degenerate = {name: why for name, why in scores.degenerate.items() if name in self.metrics}
        return Scores({name: scores.values[name] for name in self.metrics}, degenerate)

    def mistakes(self, examples: Sequence[TaggingExample], predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
        """Sentences with wrong spans (or wrong tags, if tags mark no spans), sorted by number of wrong spans, then wrong tags.

        A span is wrong if it is predicted but not gold, or gold but not predicted.
        """
        found = []
        for example, prediction in zip(examples, predictions, strict=True):
            gold = self._in_scheme(example.tags or (), cast(Scheme, self.labels.scheme))
            words = sum(one != other for one, other in zip(gold, prediction["tags"], strict=True))
            shown = {name: value for name, value in prediction.items() if name != "logits"}
            record = {**shown, "text": " ".join(example.words), "gold": gold}
            wrong = words
            if self._marks_spans:
                truth, guess = set(spans_of(gold)), {tuple(span) for span in prediction["spans"]}
                wrong = len(truth ^ guess)
                record |= {
                    "missed": [list(span) for span in sorted(truth - guess)],
                    "invented": [list(span) for span in sorted(guess - truth)],
                }
            if wrong:
                found.append((wrong, words, record | {"badness": float(wrong)}))
        return [record for *_, record in sorted(found, key=lambda each: (-each[0], -each[1]))]

    def failure(self, examples: Sequence[TaggingExample], predictions: Sequence[Prediction]) -> str | None:
        if len(predictions) < 2:
            return None
        predicted = {tag for prediction in predictions for tag in prediction["tags"]}
        if len(predicted) != 1 or not self.mistakes(examples, predictions):
            return None
        tag = predicted.pop()
        return "no span is predicted: every word is O" if self._marks_spans and tag == "O" else f"every word is {tag}"

    def baselines(self) -> Sequence[Baseline[TaggingExample]]:
        from discern.tasks.baselines.tags import tag_baselines

        return tag_baselines(self.labels)


def _counts(reading: Reading[TaggingExample]) -> Mapping[str, int]:
    """Number of occurrences of each tag.

    Raises:
        DataError: a sentence has no tags.
    """
    bare = next((place for place, example in enumerate(reading.examples) if example.tags is None), None)
    if bare is not None:
        raise DataError(
            f"{reading.place(bare)}: the sentence has no tags",
            hint="give a file with a tag for every word; `discern predict` reads files without tags",
        )
    return tag_counts(reading.examples)


def _place_of(reading: Reading[TaggingExample], tag: str) -> str:
    """Place of the first sentence that contains a tag."""
    return reading.place(next(place for place, each in enumerate(reading.examples) if tag in (each.tags or ())))


def _is_mark(tag: str) -> bool:
    """Whether a tag could begin or continue a span."""
    return detect_scheme([[tag]]) != "none"


def _refuse_mixture(train: Reading[TaggingExample], counts: Mapping[str, int]) -> None:
    """Raise a DataError for span tags mixed with others: one misspelled tag must not turn spans into parts of speech."""
    marks = [tag for tag in counts if tag[:2] in ("B-", "I-")]
    odd = [tag for tag in counts if not _is_mark(tag)]
    if "O" in counts and marks:
        raise DataError(
            f"{_place_of(train, odd[0])}: tag '{odd[0]}' ({counts[odd[0]]:,} in the file) is neither 'O' nor of the form "
            f"'B-TYPE', as '{marks[0]}' is",
            hint=f"correct the tag, or choose another column: {_TAG_COLUMN}",
        )
