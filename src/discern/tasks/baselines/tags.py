"""Baselines of tagging: each word's most frequent tag, and an averaged perceptron."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar, cast, final

import numpy as np
from numpy.typing import NDArray

from discern.tasks.base import Labels, Prediction
from discern.tasks.baselines.base import Baseline, drawn
from discern.tasks.baselines.perceptron import AveragedPerceptron, Items
from discern.tasks.examples import TaggingExample, tag_counts
from discern.tasks.tags import Scheme, convert, spans_of, tags_of

# Words times passes over them, and the same times the square of the tags: some 20 seconds of one core.
_WORD_PASSES = 400_000
_TRANSITIONS = 2_000_000_000
_MOST_PASSES = 8
# Features times tags, 4 bytes each, twice.
_WEIGHTS = 30_000_000


def tag_baselines(labels: Labels) -> list[Baseline[TaggingExample]]:
    """Baselines of a tagging task with these labels."""
    scheme = cast(Scheme, labels.scheme)
    return [MostFrequentTag(scheme), Perceptron(scheme)]


@final
class MostFrequentTag(Baseline[TaggingExample]):
    """Each word's most frequent tag in the training examples; of an unknown word the most frequent tag of all."""

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
    """An averaged perceptron over words, affixes, shapes, neighbors and the previous tag, learned in BIOES."""

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
    """The sentences, or as many of them as there is time for, and how often to go through them."""
    words = sum(len(each) for each in tagged)
    affordable = min(_WORD_PASSES, _TRANSITIONS // tags**2)
    passes = min(_MOST_PASSES, affordable // max(words, 1))
    if passes >= 2:
        return train, tagged, passes
    kept = drawn(range(len(train)), max(1, len(train) * affordable // (2 * words)))
    return [train[place] for place in kept], [tagged[place] for place in kept], 2


class _FeatureTable:
    """The features that occur in the training sentences, by number.

    Args:
        tags: how many; with more of them fewer features are kept, the frequent ones.
    """

    def __init__(self, train: Sequence[TaggingExample], tags: int) -> None:
        counts: Counter[str] = Counter()
        for example in train:
            for features in _features(example.words):
                counts.update(features)
        kept = counts.most_common(max(1, _WEIGHTS // tags))
        self.numbers = {feature: number for number, (feature, _) in enumerate(kept)}

    def items(self, words: Sequence[str]) -> Items:
        """The features of each word; those that are unknown are padding."""
        rows = [[self.numbers.get(feature, len(self.numbers)) for feature in features] for features in _features(words)]
        return np.array(rows, np.int64).reshape(len(words), -1 if rows else 1)


def _features(words: Sequence[str]) -> Iterator[list[str]]:
    """Of each word as many: itself and its neighbors, beginnings and endings, shapes, and pairs of them."""
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
    """'Xx' of "Berlin", 'd-x' of "12-fold": kinds of characters, of equal ones in a row one."""
    kinds = ("X" if each.isupper() else "x" if each.islower() else "d" if each.isdigit() else each for each in word)
    return "".join(kind for kind, _ in itertools.groupby(kinds))[:12]


def _prediction(example: TaggingExample, tags: list[str], scheme: Scheme) -> Prediction:
    said: NDArray[np.str_] | list[str] = tags
    if scheme != "none":
        said = tags_of(spans_of(tags), len(tags), scheme)
    return {"id": example.id, "words": list(example.words), "tags": list(said)}
