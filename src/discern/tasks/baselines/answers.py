"""Baselines of question answering: the sentence of the context most similar to the question, and no answer."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar, final

from discern.tasks.base import Prediction
from discern.tasks.baselines.base import Baseline
from discern.tasks.examples import QuestionExample

# A sentence ends at its punctuation mark, including quotation marks and brackets after it, or at the end of a line.
_SENTENCE = re.compile("[^\n]+?(?:[.!?](?=[\"')\\]]*(?:\\s|$))[\"')\\]]*|[。！？；][”’」』）]*|(?=\n)|$)")
# Each Chinese or Japanese character is a word.
_WORD = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\\W\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+")


def answer_baselines(*, threshold: float, has_impossible: bool) -> list[Baseline[QuestionExample]]:
    """Baselines of question answering.

    Args:
        threshold: the answer is empty if `no_answer` exceeds it.
        has_impossible: whether questions may have no answer.
    """
    nothing: list[Baseline[QuestionExample]] = [NoAnswer(threshold)] if has_impossible else []
    return [*nothing, OverlapSentence(threshold)]


@final
class NoAnswer(Baseline[QuestionExample]):
    """Predicts no answer for every question."""

    name: ClassVar[str] = "no-answer"
    title = "leaving every question unanswered"

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def predict(self, train: Sequence[QuestionExample], examples: Sequence[QuestionExample]) -> list[Prediction] | None:
        return [{"id": each.id, "answer": "", "best_answer": "", "no_answer": self._threshold + 1} for each in examples]


@final
class OverlapSentence(Baseline[QuestionExample]):
    """The sentence that shares most words with the question, weighted by rarity; ties go to shorter, then earlier sentences."""

    name: ClassVar[str] = "overlap-sentence"
    title = "the sentence that shares the most words with the question"

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def predict(self, train: Sequence[QuestionExample], examples: Sequence[QuestionExample]) -> list[Prediction] | None:
        weights = _rarity([*train, *examples])
        predictions: list[Prediction] = []
        for example in examples:
            asked = set(_words(example.question))
            candidates = list(_sentences(example.context)) or [example.context.strip()]
            shared = [sum(weights[word] for word in asked.intersection(_words(sentence))) for sentence in candidates]
            best = max(range(len(candidates)), key=lambda place: (shared[place], -len(candidates[place])))
            share = shared[best] / (sum(weights[word] for word in asked) or 1.0)
            # Below the threshold, so that a question is always answered, and the lower the overlap, the closer to it.
            prediction = {"answer": candidates[best], "best_answer": candidates[best], "no_answer": self._threshold - share}
            predictions.append({"id": example.id, **prediction})
        return predictions


def _rarity(examples: Sequence[QuestionExample]) -> dict[str, float]:
    """Inverse document frequency of each word in contexts and questions; repeated contexts count once."""
    texts = dict.fromkeys([each.context for each in examples] + [each.question for each in examples])
    counts = Counter(word for text in texts for word in set(_words(text)))
    return {word: math.log(1 + len(texts) / count) for word, count in counts.items()}


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _sentences(context: str) -> Iterator[str]:
    for found in _SENTENCE.finditer(context):
        sentence = found.group().strip()
        if sentence:
            yield sentence
