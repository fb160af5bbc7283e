"""Wrong words in held-out sentences: how often the discriminator of the demonstration finds them."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from discern.data.dataset.shards import TokenData
from discern.data.tokenizer import load_tokenizer
from discern.inference.detection import detect
from discern.inference.detection_evaluation import word_probabilities
from discern.inference.texts import Span, overlapping, words_of
from discern.objectives.metrics import area_under_curve
from discern.progress import Progress

SENTENCES = 200
_SHORTEST, _LONGEST = 8, 30  # words
_FEWEST_OCCURRENCES = 5
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class WrongWords:
    """Result of the discriminator on sentences in which one word was replaced at random.

    Attributes:
        sentences: number of sentences.
        auc: chance that a wrong word looks more suspicious than another word of any of the sentences.
        most_suspicious: number of sentences in which the wrong word looks the most suspicious.
    """

    sentences: int
    auc: float
    most_suspicious: int


def wrong_words(
    run: Path, data: Path, progress: Progress, warn: Callable[[str], None], count: int = SENTENCES
) -> WrongWords | None:
    """Put a random word into each of `count` held-out sentences, and look for it; None if there is no such sentence.

    All words that occur at least five times in the held-out text are equally likely. The choice is the same each time.

    Args:
        run: run or model with a discriminator.
        data: data set with a held-out split, of which the decoded tokens are the text.
    """
    found = list(_sentences(data))
    frequent = Counter(text[start:end] for text, words in found for start, end in words)
    candidates = sorted(word for word, times in frequent.items() if times >= _FEWEST_OCCURRENCES)
    generator = random.Random(0)
    generator.shuffle(found)
    if not found or len(candidates) < 2:
        return None
    changed = [_with_wrong_word(text, words, candidates, generator) for text, words in found[:count]]
    probabilities: list[float] = []
    wrong: list[bool] = []
    first = 0
    for (_, span), detection in zip(changed, detect(run, [text for text, _ in changed], progress, warn), strict=True):
        words = words_of(detection.text)
        each = word_probabilities(detection, words)
        places = overlapping(words, span)
        first += max(each) == max(each[place] for place in places)
        probabilities += each
        wrong += [number in places for number in range(len(each))]
    return WrongWords(len(changed), area_under_curve(np.array(probabilities, np.float32), np.array(wrong)), first)


def _sentences(data: Path) -> Iterator[tuple[str, list[Span]]]:
    """Sentences of the held-out text that have a usual length, with the places of their words."""
    tokenizer = load_tokenizer(data)
    for shard in TokenData.open(data).split("heldout").shards:
        for start, stop in pairwise(shard.sentence_starts):
            for text in _SENTENCE_END.split(tokenizer.decode(shard.tokens[start:stop].tolist())):
                words = [(start, end) for start, end in words_of(text) if text[start:end].isalpha()]
                if _SHORTEST <= len(words) <= _LONGEST and "[UNK]" not in text:
                    yield text, words


def _with_wrong_word(text: str, words: list[Span], candidates: list[str], generator: random.Random) -> tuple[str, Span]:
    """The sentence with one of its words replaced, and the place of that word."""
    start, end = generator.choice(words)
    replacement = generator.choice([word for word in candidates if word != text[start:end]])
    return text[:start] + replacement + text[end:], (start, start + len(replacement))
