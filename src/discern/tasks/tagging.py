"""Tagging: a tag for every word, predicted from the state of its first token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from discern.data.tokenizer.words import UNSPACED
from discern.errors import DataError, counted, did_you_mean
from discern.models.config import ModelConfig
from discern.models.heads import PredictionLayers
from discern.models.layers import Dropout
from discern.tasks.base import (
    Definition,
    Labels,
    LossAndOutputs,
    Outputs,
    Prediction,
    Predictions,
    Reading,
    Scores,
    TaggingExample,
    Task,
    TaskConfig,
    TaskHead,
    TextEncoder,
    tag_counts,
)
from discern.tasks.baselines import Baseline, tag_baselines
from discern.tasks.features import IGNORED, Features, Ragged, TaskRows, cut_windows
from discern.tasks.metrics import span_scores, tag_accuracy
from discern.tasks.rows import read_tags, tagging_rows
from discern.tasks.tags import Scheme, convert, detect_scheme, is_span_tag, join_tag, spans_of, split_tag, tags_of
from discern.types import TokenBatch

_TAG_COLUMN = "--tags COLUMN"
NO_WORD = -1
"""In `places["word"]`, marks tokens that no word is predicted from."""


class TaggingConfig(TaskConfig):
    """Settings of tagging."""

    head: Literal["linear", "prediction"] = Field(
        "linear",
        description="'linear': one linear layer on the state of every token. 'prediction': preceded by a layer of the same "
        "width, GELU and a LayerNorm, as in transformers' newer encoders, for which it is the default.",
    )
    overlap: int = Field(
        64, ge=0, description="Overlap, in tokens, between the windows of a long sentence; at most half a window."
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

    def forward(self, hidden: Float[Tensor, "R L D"], tokens: TokenBatch, rows: TaskRows) -> LossAndOutputs:
        states = hidden if self.inner is None else self.inner(hidden)
        logits = self.output(self.dropout(states)).float()
        loss = None
        if "tags" in rows.targets:
            targets = rows.targets["tags"]
            within = logits[:, : targets.shape[1]]
            loss = F.cross_entropy(within.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return loss, {"logits": logits}


class Tagging(Task[TaggingExample]):
    """A tag for every word, from its first token; spans are scored as by conlleval.

    The network learns BIOES, whatever the scheme of the files; predictions are converted to the scheme of the training file
    (BILOU and BMES to BIOES). Each type of the training file has all four prefixes, so that another file may contain new
    tags of known types, but no unknown types. Tags that mark no spans (parts of speech) are learned as they are, and scored by
    accuracy only.

    A sentence that is longer than a row is split into overlapping windows of whole words. Each word is learned and predicted in
    the window with the most context around it, so it counts once.

    Reference: google-research/electra, finetune/tagging.
    Differs: in the released code, segment ids are all 1; words are lowercased whatever the model's vocabulary; sentences are
    truncated, and the words cut off are not scored; a change of type begins no span.
    """

    Config = TaggingConfig
    config: TaggingConfig
    family = "tagging"
    make_rows = staticmethod(tagging_rows)

    def __init__(self, name: str, config: TaskConfig, metrics: tuple[str, ...], labels: Labels) -> None:
        self._scheme = cast(Scheme, labels.scheme)
        self._marks_spans = self._scheme != "none"
        super().__init__(name, config, metrics if self._marks_spans else ("accuracy",), labels)

    @classmethod
    def learn(cls, train: Reading[TaggingExample], config: TaskConfig, fixed: tuple[str, ...]) -> Labels:
        counts = _counts(train)
        scheme = detect_scheme(example.tags or () for example in train.examples)
        names = set(counts)
        if scheme != "none":
            types = {split_tag(tag)[1] for tag in counts if tag != "O"}
            names = {"O", *(join_tag(prefix, type) for type in types for prefix in "BIES")}
        elif "O" in counts and any(tag.startswith(("B-", "I-")) for tag in counts):
            # One misspelled tag must not turn spans into parts of speech.
            misspelled = next(tag for tag in counts if not is_span_tag(tag))
            raise _tag_error(
                train,
                misspelled,
                "is neither 'O' nor of the form 'B-TYPE', unlike other tags",
                hint=f"correct the tag, or choose another column: {_TAG_COLUMN}",
            )
        labels = fixed or tuple(sorted(names))
        if len(labels) < 2:
            raise DataError(
                f"every word of {train.source} is '{labels[0]}': there is nothing to learn",
                hint=f"check the column of the tags: {_TAG_COLUMN}",
            )
        return Labels(labels, "tags", scheme=scheme)

    @classmethod
    def read(
        cls, path: Path, definition: Definition[Any], split: str, config: TaskConfig, *, labeled: bool = True
    ) -> Reading[TaggingExample]:
        return read_tags(path, definition.layout, training=split == "train", labeled=labeled)

    def check(self, reading: Reading[TaggingExample]) -> None:
        names = self.labels.names
        for tag in _counts(reading):
            name = join_tag(*split_tag(tag)) if self._marks_spans and is_span_tag(tag) else tag
            if name not in names:
                raise _tag_error(
                    reading,
                    tag,
                    f"does not occur in the training file, whose tags are {', '.join(names[:20])}",
                    hint=f"{did_you_mean(tag, names)} Otherwise add sentences with it to the training file "
                    "(finetune.train_rows and --debug leave sentences out), or remove it from this file",
                )

    def encode(self, examples: Sequence[TaggingExample], text: TextEncoder, *, labeled: bool) -> Features:
        length = self.config.sequence_length
        room = length - 2

        # Tokenize each distinct word once. In running text, words follow a space, unless their script has none.
        sentences: list[Sequence[str]] = [example.words for example in examples]
        # The tokens of a word within a text may include the space before it, unlike those of the same word alone.
        alone, within = (text.tokenizer.encode(word, add_special_tokens=False).ids for word in ("a", " a"))
        if alone != within:
            sentences = [
                [*words[:1], *(word if UNSPACED.match(word) else f" {word}" for word in words[1:])] for words in sentences
            ]
        vocabulary = list(set(chain.from_iterable(sentences)))
        ids_of_word = dict(zip(vocabulary, text.ids(vocabulary), strict=True))

        # Split each sentence into windows, and note which word, if any, is predicted from each token.
        label_indices = {name: index for index, name in enumerate(self.labels.names)}
        rows: list[list[int]] = []
        word_indices: list[NDArray[np.int32]] = []
        targets: list[NDArray[np.int32]] = []
        windows_per_sentence: list[int] = []
        num_cut = 0
        for example, words in zip(examples, sentences, strict=True):
            pieces = [ids_of_word[word] for word in words]
            num_cut += sum(len(ids) > room for ids in pieces)
            # A word without any token, such as a control character, still needs one for its tag.
            pieces = [ids[:room] or [text.special.unk] for ids in pieces]
            bounds = np.cumsum([0, *map(len, pieces)])
            tokens = list(chain.from_iterable(pieces))
            windows = cut_windows(bounds, room, min(self.config.overlap, room // 2))
            windows_per_sentence.append(len(windows))
            for start, stop, *predicted in windows:
                rows.append([text.special.cls, *tokens[bounds[start] : bounds[stop]], text.special.sep])
                word_of_token = np.full(len(rows[-1]), NO_WORD, np.int32)
                words_here = np.arange(*predicted)
                word_of_token[1 + bounds[words_here] - bounds[start]] = words_here
                word_indices.append(word_of_token)
            if labeled:
                tags = convert(example.tags or (), "bioes" if self._marks_spans else "none")
                # `NO_WORD` selects the last element, `IGNORED`.
                labels = np.array([*(label_indices[tag] for tag in tags), IGNORED], np.int32)
                targets += [labels[word_of_token] for word_of_token in word_indices[-len(windows) :]]

        num_windowed = sum(count > 1 for count in windows_per_sentence)
        notes = {
            f"{num_windowed:,} of {len(examples):,} sentences are longer than {length} tokens and were split into windows": (
                num_windowed
            ),
            f"{counted(num_cut, 'word')} of more than {room} tokens, cut to the first {room}": num_cut,
        }
        input_ids = Ragged.of(rows)
        return Features(
            input_ids,
            Ragged(np.zeros(len(input_ids.values), np.uint8), input_ids.offsets),
            np.repeat(np.arange(len(examples)), windows_per_sentence),
            {"tags": Ragged.of(targets)} if labeled else {},
            {"word": Ragged.of(word_indices)},
            tuple(note for note, count in notes.items() if count),
        )

    def head(self, encoder: ModelConfig, dropout: float) -> TaggingHead:
        inner = PredictionLayers(encoder) if self.config.head == "prediction" else None
        return TaggingHead(encoder.hidden_size, dropout, len(self.labels.names), inner)

    def items(self, rows: TaskRows) -> int:
        return int((rows.targets["tags"] != IGNORED).sum())

    def predict(self, examples: Sequence[TaggingExample], features: Features, outputs: Outputs) -> list[Prediction]:
        sentence_logits = [np.zeros((len(example.words), len(self.labels.names))) for example in examples]
        for row, output in enumerate(outputs):
            words = features.places["word"][row]
            tokens = np.flatnonzero(words != NO_WORD)
            sentence_logits[features.example[row]][words[tokens]] = output["logits"][tokens]
        predictions = []
        for example, logits in zip(examples, sentence_logits, strict=True):
            tags = [self.labels.names[index] for index in logits.argmax(1)]
            probabilities = 1 / np.exp(logits - logits.max(1, keepdims=True)).sum(1)
            prediction: Prediction = {"id": example.id, "words": list(example.words), "tags": tags}
            if self._marks_spans:
                # A sequence that BIOES forbids is not repaired: conlleval defines its spans.
                spans = spans_of(tags)
                prediction |= {"tags": tags_of(spans, len(tags), self._scheme), "spans": [list(span) for span in spans]}
            prediction["probabilities"] = [round(value, 6) for value in probabilities.tolist()]
            # The logits of all tags for every word: fewer digits than elsewhere, because there are many of them.
            prediction["logits"] = logits.round(3).tolist()
            predictions.append(prediction)
        return predictions

    def score(self, examples: Sequence[TaggingExample], predictions: Predictions) -> Scores:
        # Compared in one scheme: another scheme than the training file's changes no span, but would change the accuracy.
        gold = [convert(example.tags or (), self._scheme) for example in examples]
        predicted = [prediction["tags"] for prediction in predictions]
        scores = span_scores(gold, predicted) if self._marks_spans else tag_accuracy(gold, predicted)
        return Scores({name: scores.values[name] for name in self.metrics}, scores.degenerate)

    def metric_terms(
        self, metric: str, examples: Sequence[TaggingExample], predictions: Predictions
    ) -> NDArray[np.float64] | None:
        pairs = [(example.tags or (), each["tags"]) for example, each in zip(examples, predictions, strict=True)]
        if metric == "f1":
            spans = [(set(spans_of(gold)), set(spans_of(tags))) for gold, tags in pairs]
            return np.array([(2 * len(gold & guess), len(gold) + len(guess)) for gold, guess in spans], np.float64)
        # Only tags that mark no spans, which are in no scheme, are scored by accuracy first.
        right = [sum(one == other for one, other in zip(gold, tags, strict=True)) for gold, tags in pairs]
        return np.column_stack([right, [len(tags) for _, tags in pairs]]).astype(np.float64)

    def mistakes(self, examples: Sequence[TaggingExample], predictions: Predictions) -> list[dict[str, Any]]:
        """Sentences with wrong spans (or wrong tags, if tags mark no spans), sorted by number of wrong spans, then wrong tags.

        A span is wrong if it is predicted but not gold, or gold but not predicted.
        """
        mistakes = []
        for example, prediction in zip(examples, predictions, strict=True):
            gold = convert(example.tags or (), self._scheme)
            wrong = wrong_tags = sum(truth != tag for truth, tag in zip(gold, prediction["tags"], strict=True))
            record = prediction | {"text": " ".join(example.words), "gold": gold}
            del record["logits"]
            if self._marks_spans:
                gold_spans, predicted_spans = set(spans_of(gold)), set(spans_of(prediction["tags"]))
                wrong = len(gold_spans ^ predicted_spans)
                record["missed"] = [list(span) for span in sorted(gold_spans - predicted_spans)]
                record["invented"] = [list(span) for span in sorted(predicted_spans - gold_spans)]
            if wrong:
                mistakes.append((wrong, wrong_tags, record | {"badness": float(wrong)}))
        return [record for *_, record in sorted(mistakes, key=lambda mistake: mistake[:2], reverse=True)]

    def failure(self, examples: Sequence[TaggingExample], predictions: Predictions) -> str | None:
        predicted = {tag for prediction in predictions for tag in prediction["tags"]}
        if len(predictions) < 2 or len(predicted) > 1 or not self.mistakes(examples, predictions):
            return None
        tag = predicted.pop()
        return "no span is predicted: every word is O" if self._marks_spans and tag == "O" else f"every word is {tag}"

    def baselines(self) -> Sequence[Baseline[TaggingExample]]:
        return tag_baselines(self.labels)


def _counts(reading: Reading[TaggingExample]) -> dict[str, int]:
    """Number of occurrences of each tag.

    Raises:
        DataError: a sentence has no tags.
    """
    for number, example in enumerate(reading.examples):
        if example.tags is None:
            raise DataError(
                f"{reading.place(number)}: the sentence has no tags",
                hint="give a file with a tag for every word; `discern predict` reads files without tags",
            )
    return tag_counts(reading.examples)


def _tag_error(reading: Reading[TaggingExample], tag: str, problem: str, hint: str) -> DataError:
    """An error that names the first sentence with a tag."""
    number = next(number for number, example in enumerate(reading.examples) if tag in (example.tags or ()))
    count = tag_counts(reading.examples)[tag]
    return DataError(f"{reading.place(number)}: tag '{tag}' ({count:,} in the file) {problem}", hint=hint)
