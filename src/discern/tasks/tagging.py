"""Tagging: a tag for every word, read from the state of its first token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from discern.errors import DataError, did_you_mean
from discern.model.dropout import Dropout
from discern.tasks.base import Labels, Outputs, Prediction, Task, TaskConfig, TaskHead, TextEncoder
from discern.tasks.examples import Reading, TaggingExample, tag_counts
from discern.tasks.features import IGNORED, Features, Ragged, TaskRows
from discern.tasks.metrics.scores import Scores
from discern.tasks.metrics.spans import span_scores, tag_accuracy
from discern.tasks.tags import Scheme, Span, convert, detect_scheme, spans_of, split_tag, tags_of
from discern.types import TokenBatch

if TYPE_CHECKING:
    from discern.tasks.baselines.base import Baseline

# Words are tokenised this many at a time, each distinct one once.
_BLOCK = 10_000
_TAG_COLUMN = "--tags COLUMN for a file of your own, --set task.tag_column=N for those of a named task"
_NOT_HERE = -1
"""Stands in `places["word"]` where a token says nothing of a word."""


class TaggingConfig(TaskConfig):
    """Settings of tagging."""

    word_column: int = Field(0, description="Column of the words in CoNLL files, from 0; negative counts from the right.")
    tag_column: int = Field(-1, description="Column of the tags in CoNLL files; -1: the last.")
    overlap: int = Field(
        64, ge=0, description="Tokens that windows share where a sentence is longer than a row; at most half a window."
    )


class TaggingHead(TaskHead):
    """Dropout and one linear layer on the state of every token.

    Differs: google-research/electra has no dropout here.

    Args:
        num_tags: outputs a token.
    """

    def __init__(self, hidden_size: int, dropout: float, num_tags: int) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(hidden_size, num_tags)

    def forward(
        self, hidden: Float[Tensor, "R L D"], tokens: TokenBatch, rows: TaskRows
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        logits = self.output(self.dropout(hidden)).float()
        loss = None
        if "tags" in rows.targets:
            targets = rows.targets["tags"]
            within = logits[:, : targets.shape[1]]
            loss = F.cross_entropy(within.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return loss, {"logits": logits.detach()}


class Tagging(Task[TaggingExample]):
    """A tag for every word, from its first token; spans are scored as conlleval does.

    The network learns BIOES, whatever scheme the files are in; predictions come back in the scheme of the training file
    (BILOU and BMES as BIOES). Each type of the training file has all four prefixes, so that a further file cannot hold a tag
    that is unknown, only a type. Tags that mark no spans (parts of speech) are learned as they are and scored by accuracy alone.

    A sentence that is longer than a row is cut into windows of whole words that overlap. Each word is learned from and read in
    the one window that shows most around it, so it counts once.

    Reference: google-research/electra, finetune/tagging.
    Differs: there, segment ids are all 1; words are lower-cased whatever the model's vocabulary; sentences are cut short, and
    the words cut off are not scored; a change of type begins no span.
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
                f"every word of {train.source} is '{names[0]}': there is nothing to tell apart",
                hint=f"check the column of the tags: {_TAG_COLUMN}",
            )
        return Labels(names, "tags", scheme=scheme)

    def check(self, reading: Reading[TaggingExample]) -> None:
        known = {self._unit(name) for name in self.labels.names}
        for tag, count in _counts(reading).items():
            if self._marks_spans and not _is_mark(tag):
                raise DataError(
                    f"{_place_of(reading, tag)}: tag '{tag}' ({count:,} in the file) is neither 'O' nor of the form 'B-TYPE', as "
                    "the tags of the training file are",
                    hint=f"is it the same column ({_TAG_COLUMN})? Otherwise put the tag right",
                )
            if self._unit(tag) not in known:
                of_type = "is of a type that does not" if self._marks_spans else "does not"
                raise DataError(
                    f"{_place_of(reading, tag)}: tag '{tag}' ({count:,} in the file) {of_type} occur in the training file, "
                    f"whose tags are {', '.join(sorted(known)[:20])}",
                    hint=f"{did_you_mean(tag, known)} Otherwise put sentences with it into the training file (with all of it: "
                    "finetune.train_rows and --debug leave sentences out), or take it out here",
                )

    def _unit(self, tag: str) -> str:
        """What must be known of a tag: of one that marks a span its type, as the tag 'B-TYPE'."""
        if tag == "O" or not self._marks_spans:
            return tag
        return tags_of([Span(0, 1, split_tag(tag)[1])], 1, "iob2")[0]

    def encode(self, examples: Sequence[TaggingExample], text: TextEncoder, *, labelled: bool) -> Features:
        room = self.config.sequence_length - 2
        overlap = cast(TaggingConfig, self.config).overlap
        pieces = _Pieces(examples, text, room)
        ids: list[NDArray[np.int32]] = []
        places: list[NDArray[np.int32]] = []
        targets: list[NDArray[np.int32]] = []
        numbers: list[int] = []
        windowed = 0
        for number, example in enumerate(examples):
            words = [pieces.of[word] for word in example.words]
            classes = self._classes(example) if labelled else None
            windows = cut_sentence([len(word) for word in words], room, overlap)
            windowed += len(windows) > 1
            for window in windows:
                row, place = _framed(words, window, text)
                ids.append(row)
                places.append(place)
                numbers.append(number)
                if classes is not None:
                    # `_NOT_HERE` picks the last element, which is the one that is ignored.
                    targets.append(classes[place])
        token_types = Ragged.of((np.zeros(len(row), np.uint8) for row in ids), np.uint8)
        notes = pieces.notes(examples, windowed, self.config.sequence_length)
        return Features(
            Ragged.of(ids),
            token_types,
            np.array(numbers, np.int64),
            {"tags": Ragged.of(targets)} if labelled else {},
            {"word": Ragged.of(places)},
            notes,
        )

    def _classes(self, example: TaggingExample) -> NDArray[np.int32]:
        """(W + 1,) number of each word's tag in the trained scheme; `IGNORED` at the end."""
        numbers = {name: number for number, name in enumerate(self.labels.names)}
        tags = self._as(example.tags or (), "bioes")
        return np.array([*(numbers[tag] for tag in tags), IGNORED], np.int32)

    def _as(self, tags: Sequence[str], scheme: Scheme) -> list[str]:
        return convert(tags, scheme) if self._marks_spans else list(tags)

    def head(self, hidden_size: int, dropout: float) -> TaggingHead:
        return TaggingHead(hidden_size, dropout, len(self.labels.names))

    def items(self, rows: TaskRows) -> int:
        return int((rows.targets["tags"] != IGNORED).sum()) if "tags" in rows.targets else 0

    def predict(self, examples: Sequence[TaggingExample], features: Features, outputs: Outputs) -> list[Prediction]:
        classes = [np.zeros(len(example.words), np.int64) for example in examples]
        probabilities = [np.zeros(len(example.words)) for example in examples]
        scores = [np.zeros((len(example.words), len(self.labels.names))) for example in examples]
        for row, said in enumerate(outputs):
            example, words = int(features.example[row]), features.places["word"][row]
            here = words != _NOT_HERE
            logits = said["logits"][here].astype(np.float64)
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
        said: Prediction = {"id": example.id, "words": list(example.words), "tags": tags}
        if self._marks_spans:
            # A sequence that BIOES forbids is read, not repaired: conlleval knows what it means.
            spans = spans_of(tags)
            said["tags"] = tags_of(spans, len(tags), cast(Scheme, self.labels.scheme))
            said["spans"] = [list(span) for span in spans]
        # Of each word those of all trained tags: fewer digits than elsewhere, as there are so many.
        return said | {"probabilities": shown, "logits": logits.round(3).tolist()}

    def score(self, examples: Sequence[TaggingExample], predictions: Sequence[Prediction]) -> Scores:
        # In one scheme: a slip in the file's tags, or another scheme than the training file's, changes no span but the accuracy.
        gold = [self._as(example.tags or (), cast(Scheme, self.labels.scheme)) for example in examples]
        said = [prediction["tags"] for prediction in predictions]
        scores = span_scores(gold, said) if self._marks_spans else tag_accuracy(gold, said)
        degenerate = {name: why for name, why in scores.degenerate.items() if name in self.metrics}
        return Scores({name: scores.values[name] for name in self.metrics}, degenerate)

    def mistakes(self, examples: Sequence[TaggingExample], predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
        """Sentences with a wrong span (a wrong tag, where tags mark no spans), by their number, then by that of wrong tags.

        A span counts as wrong if it is predicted and not there, or there and not predicted.
        """
        found = []
        for example, prediction in zip(examples, predictions, strict=True):
            gold = self._as(example.tags or (), cast(Scheme, self.labels.scheme))
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

    def failure(self, predictions: Sequence[Prediction]) -> str | None:
        if len(predictions) < 2:
            return None
        said = {tag for prediction in predictions for tag in prediction["tags"]}
        if len(said) != 1:
            return None
        tag = said.pop()
        return "no span is predicted: every word is O" if self._marks_spans and tag == "O" else f"every word is {tag}"

    def baselines(self) -> Sequence[Baseline[TaggingExample]]:
        from discern.tasks.baselines.tags import tag_baselines

        return tag_baselines(self.labels)


class WordWindow(NamedTuple):
    """Words `start` to `stop - 1` of a sentence, and those of them (`words`) of which no other window shows more around them."""

    start: int
    stop: int
    words: NDArray[np.int64]


def cut_sentence(sizes: Sequence[int], room: int, overlap: int) -> list[WordWindow]:
    """The windows of a sentence, each of as many whole words as fit, up to the one that reaches its end.

    How much a window shows around a word is the lesser of its tokens on both sides; longer windows win, then earlier ones.
    Every word is among the `words` of exactly one window; a window that shows no word best is left out.
    Reference: BERT, run_squad.py, `_check_is_max_context`.

    Args:
        sizes: (W,) tokens of each word, 1 to `room`.
        room: tokens that a window holds.
        overlap: tokens that two windows in a row should share; they share half a window at most, whole words only, and less
            where the next word leaves less.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    begins = ends - np.asarray(sizes, np.int64)
    count, shared = len(ends), min(overlap, room // 2)
    bounds: list[tuple[int, int]] = []
    start = stop = 0
    while not bounds or stop < count:
        if bounds:
            # The next window shows the last words of this one again, but not so many that its first new word has no room.
            start = int(np.searchsorted(begins, max(ends[stop - 1] - shared, ends[stop] - room)))
        stop = int(np.searchsorted(ends, (begins[start] if count else 0) + room, side="right"))
        bounds.append((start, stop))
    most = np.full(count, -1.0)
    owner = np.zeros(count, np.int64)
    for number, (start, stop) in enumerate(bounds):
        around = np.minimum(begins[start:stop] - begins[start], ends[stop - 1] - ends[start:stop]) if count else np.zeros(0)
        shown = around + 0.01 * (ends[stop - 1] - begins[start] if count else 0)
        better = np.flatnonzero(shown > most[start:stop]) + start
        most[better], owner[better] = shown[better - start], number
    windows = [WordWindow(start, stop, np.flatnonzero(owner == number)) for number, (start, stop) in enumerate(bounds)]
    return [window for window in windows if len(window.words) or not count]


class _Pieces:
    """The tokens of every distinct word, between 1 and `room` of them.

    Attributes:
        of: ids by word.
    """

    def __init__(self, examples: Sequence[TaggingExample], text: TextEncoder, room: int) -> None:
        self.of: dict[str, list[int]] = {}
        self._room = room
        self._cut: set[str] = set()
        self._empty: set[str] = set()
        for block in _blocks(list(dict.fromkeys(word for example in examples for word in example.words))):
            for word, ids in zip(block, text.ids(block), strict=True):
                if not ids:
                    # Control characters and the like: the word still needs a place for its tag.
                    self._empty.add(word)
                elif len(ids) > room:
                    self._cut.add(word)
                self.of[word] = ids[:room] or [text.special.unk]

    def notes(self, examples: Sequence[TaggingExample], windowed: int, length: int) -> tuple[str, ...]:
        """What happened to the words and sentences, a line each."""
        odd = self._cut | self._empty
        counts = Counter(word for example in examples for word in example.words if word in odd) if odd else Counter[str]()
        cut, empty = (sum(counts[word] for word in words) for words in (self._cut, self._empty))
        lines = {
            f"{windowed:,} of {len(examples):,} sentences are longer than {length} tokens and were cut into windows": windowed,
            f"{cut:,} words of more than {self._room} tokens were cut to their first {self._room}": cut,
            f"{empty:,} words of which the tokenizer leaves nothing are read as [UNK]": empty,
        }
        return tuple(line for line, count in lines.items() if count)


def _blocks(words: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(words), _BLOCK):
        yield words[start : start + _BLOCK]


def _framed(words: Sequence[list[int]], window: WordWindow, text: TextEncoder) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`[CLS] words [SEP]`, and for each token the number of the word that it begins and is read for."""
    shown = words[window.start : window.stop]
    row = [text.special.cls, *(id for word in shown for id in word), text.special.sep]
    begins = np.cumsum([1, *map(len, shown)])
    place = np.full(len(row), _NOT_HERE, np.int32)
    place[begins[window.words - window.start]] = window.words
    return np.array(row, np.int32), place


def _counts(reading: Reading[TaggingExample]) -> Mapping[str, int]:
    """How often each tag occurs.

    Raises:
        DataError: a sentence has none.
    """
    bare = next((place for place, example in enumerate(reading.examples) if example.tags is None), None)
    if bare is not None:
        raise DataError(
            f"{reading.place(bare)}: the sentence has no tags",
            hint="give a file with a tag for every word; one without is for `discern predict`",
        )
    return tag_counts(reading.examples)


def _place_of(reading: Reading[TaggingExample], tag: str) -> str:
    """Where the first sentence with a tag stands."""
    return reading.place(next(place for place, each in enumerate(reading.examples) if tag in (each.tags or ())))


def _is_mark(tag: str) -> bool:
    """Whether a tag could begin a span or go on with it."""
    return detect_scheme([[tag]]) != "none"


def _refuse_mixture(train: Reading[TaggingExample], counts: Mapping[str, int]) -> None:
    """One misspelt tag must not turn a file of spans into one of parts of speech."""
    marks = [tag for tag in counts if tag[:2] in ("B-", "I-")]
    odd = [tag for tag in counts if not _is_mark(tag)]
    if "O" in counts and marks:
        raise DataError(
            f"{_place_of(train, odd[0])}: tag '{odd[0]}' ({counts[odd[0]]:,} in the file) is neither 'O' nor of the form "
            f"'B-TYPE', as '{marks[0]}' is",
            hint=f"put the tag right, or choose another column: {_TAG_COLUMN}",
        )
