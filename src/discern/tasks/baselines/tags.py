"""Baselines of tagging: the most frequent tag of each word, and an averaged structured perceptron.

Reference: Collins 2002, "Discriminative Training Methods for Hidden Markov Models".
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar, cast, final

import numpy as np
from numpy.typing import NDArray

from discern.tasks.base import Labels, Prediction
from discern.tasks.baselines.base import Baseline, sampled
from discern.tasks.examples import TaggingExample, tag_counts
from discern.tasks.tags import Scheme, convert, spans_of, tags_of

# Words x passes, and words x passes x tags^2: some 20 seconds on one core.
_WORD_PASSES = 400_000
_TRANSITIONS = 2_000_000_000
_MAX_PASSES = 8
# Features x tags, of 4 bytes each, stored twice.
_WEIGHTS = 30_000_000


def tag_baselines(labels: Labels) -> list[Baseline[TaggingExample]]:
    """Baselines of a tagging task with these labels."""
    scheme = cast(Scheme, labels.scheme)
    return [MostFrequentTag(scheme), Perceptron(scheme)]


@final
class MostFrequentTag(Baseline[TaggingExample]):
    """The most frequent tag of each word in the training examples; for unknown words the most frequent tag overall."""

    name: ClassVar[str] = "majority"
    title = "the most frequent tag of each word"

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme

    def predict(self, train: Sequence[TaggingExample], examples: Sequence[TaggingExample]) -> list[Prediction] | None:
        of_word: dict[str, Counter[str]] = {}
        for example in train:
            for word, tag in zip(example.words, example.tags or (), strict=True):
                of_word.setdefault(word, Counter())[tag] += 1
        usual = {word: min(counts, key=lambda tag: (-counts[tag], tag)) for word, counts in of_word.items()}
        otherwise = next(iter(tag_counts(train)))
        return [
            _prediction(example, [usual.get(word, otherwise) for word in example.words], self._scheme) for example in examples
        ]


@final
class Perceptron(Baseline[TaggingExample]):
    """An averaged perceptron over words, affixes, shapes, neighbors and the previous tag, trained in BIOES."""

    name: ClassVar[str] = "perceptron"
    title = "an averaged perceptron"

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme

    def predict(self, train: Sequence[TaggingExample], examples: Sequence[TaggingExample]) -> list[Prediction] | None:
        marks = self._scheme != "none"
        tagged = [convert(example.tags or (), "bioes") if marks else list(example.tags or ()) for example in train]
        names = sorted({tag for tags in tagged for tag in tags})
        train, tagged, passes = _affordable(train, tagged, len(names))
        numbers = {name: number for number, name in enumerate(names)}
        table = _FeatureTable(train, len(names))
        model = AveragedPerceptron(len(table.numbers), len(names))
        gold = [np.array([numbers[tag] for tag in tags], np.int64) for tags in tagged]
        model.fit([(table.items(example.words), tags) for example, tags in zip(train, gold, strict=True) if len(tags)], passes)
        return [
            _prediction(example, [names[number] for number in model.tag(table.items(example.words))], self._scheme)
            for example in examples
        ]


def _affordable(
    train: Sequence[TaggingExample], tagged: list[list[str]], tags: int
) -> tuple[Sequence[TaggingExample], list[list[str]], int]:
    """The sentences, or a sample that fits the time, and the number of passes over them."""
    words = sum(len(each) for each in tagged)
    affordable = min(_WORD_PASSES, _TRANSITIONS // tags**2)
    passes = min(_MAX_PASSES, affordable // max(words, 1))
    if passes >= 2:
        return train, tagged, passes
    kept = sampled(range(len(train)), max(1, len(train) * affordable // (2 * words)))
    return [train[place] for place in kept], [tagged[place] for place in kept], 2


class _FeatureTable:
    """The features that occur in the training sentences, with their indices.

    Args:
        tags: number of tags; the more tags, the fewer features are kept, the most frequent ones.
    """

    def __init__(self, train: Sequence[TaggingExample], tags: int) -> None:
        counts: Counter[str] = Counter()
        for example in train:
            for features in _features(example.words):
                counts.update(features)
        kept = counts.most_common(max(1, _WEIGHTS // tags))
        self.numbers = {feature: number for number, (feature, _) in enumerate(kept)}

    def items(self, words: Sequence[str]) -> Items:
        """The feature indices of each word; unknown features are padding."""
        rows = [[self.numbers.get(feature, len(self.numbers)) for feature in features] for features in _features(words)]
        return np.array(rows, np.int64).reshape(len(words), -1 if rows else 1)


def _features(words: Sequence[str]) -> Iterator[list[str]]:
    """Features of each word, equally many: the word and its neighbors, prefixes and suffixes, shapes, and pairs of these."""
    around = ["<<", "<", *(word.lower() for word in words), ">", ">>"]
    shapes = ["<", *map(_shape, words), ">"]
    for place, word in enumerate(words):
        second, before, here, after, next_but_one = around[place : place + 5]
        earlier, shape, later = shapes[place : place + 3]
        affixes = [f"{kind}{length}={here[cut]}" for length in range(1, 5) for kind, cut in _cuts(length)]
        yield [
            "always",
            f"w={word}",
            f"l={here}",
            f"-1={before}",
            f"+1={after}",
            f"-2={second}",
            f"+2={next_but_one}",
            f"-1,0={before} {here}",
            f"0,+1={here} {after}",
            f"-1,+1={before} {after}",
            f"-1s={before[-3:]}",
            f"+1s={after[-3:]}",
            f"s={shape}",
            f"s-1={earlier},{shape}",
            f"s+1={shape},{later}",
            *affixes,
        ]


def _cuts(length: int) -> tuple[tuple[str, slice], tuple[str, slice]]:
    return ("p", slice(None, length)), ("e", slice(-length, None))


def _shape(word: str) -> str:
    """Character classes with repetitions collapsed: 'Xx' for "Berlin", 'd-x' for "12-fold"."""
    kinds = ("X" if each.isupper() else "x" if each.islower() else "d" if each.isdigit() else each for each in word)
    return "".join(kind for kind, _ in itertools.groupby(kinds))[:12]


def _prediction(example: TaggingExample, tags: list[str], scheme: Scheme) -> Prediction:
    predicted: NDArray[np.str_] | list[str] = tags
    if scheme != "none":
        predicted = tags_of(spans_of(tags), len(tags), scheme)
    return {"id": example.id, "words": list(example.words), "tags": list(predicted)}


Items = NDArray[np.int64]
"""(T, K) feature indices of each item of a sequence, filled with `padding` if an item has fewer than K."""


class AveragedPerceptron:
    """Linear scores of tags and of transitions, learned from mistakes and averaged over the training.

    Args:
        features: number of features; the index `features` itself is padding, whose weight stays 0.
        tags: number of tags.
    """

    def __init__(self, features: int, tags: int) -> None:
        self.padding = features
        self._tags = tags
        # The last row has the transitions from the start of a sequence.
        self._weights = np.zeros((features + 1, tags), np.float32)
        self._moves = np.zeros((tags + 1, tags), np.float32)

    def fit(self, sequences: Sequence[tuple[Items, NDArray[np.int64]]], passes: int, seed: int = 0) -> None:
        """Train on the sequences, in another order in each pass.

        Args:
            sequences: features and (T,) tags of each sequence.
        """
        late_weights, late_moves = np.zeros_like(self._weights), np.zeros_like(self._moves)
        generator, step = np.random.default_rng(seed), 1.0
        for _ in range(passes):
            for number in generator.permutation(len(sequences)):
                items, gold = sequences[number]
                predicted = self.tag(items)
                wrong = np.flatnonzero(predicted != gold)
                for place in wrong:
                    for tag, sign in ((gold[place], 1.0), (predicted[place], -1.0)):
                        # For a feature that occurs twice in an item one update is lost, which is harmless.
                        self._weights[items[place], tag] += sign
                        late_weights[items[place], tag] += sign * step
                if len(wrong):
                    before_gold, before_predicted = np.append(self._tags, gold[:-1]), np.append(self._tags, predicted[:-1])
                    for before, after, sign in ((before_gold, gold, 1.0), (before_predicted, predicted, -1.0)):
                        np.add.at(self._moves, (before, after), sign)
                        np.add.at(late_moves, (before, after), sign * step)
                self._weights[self.padding] = late_weights[self.padding] = 0.0
                step += 1
        # The mean of the weights after each sequence, computed without storing them.
        self._weights -= late_weights / np.float32(step)
        self._moves -= late_moves / np.float32(step)

    def tag(self, items: Items) -> NDArray[np.int64]:
        """(T,) tags with the highest total score (Viterbi)."""
        scores = self._weights[items].sum(1)
        count = len(scores)
        came_from = np.zeros((count, self._tags), np.int64)
        best = scores[0] + self._moves[-1] if count else np.zeros(self._tags)
        moves = self._moves[:-1]
        every = np.arange(self._tags)
        for place in range(1, count):
            reached = best[:, None] + moves
            came_from[place] = reached.argmax(0)
            best = reached[came_from[place], every] + scores[place]
        tags = np.zeros(count, np.int64)
        if count:
            tags[-1] = best.argmax()
            for place in range(count - 1, 0, -1):
                tags[place - 1] = came_from[place, tags[place]]
        return tags
