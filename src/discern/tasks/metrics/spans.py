"""Precision, recall and F1 of spans, as conlleval counts them.

A span is correct if its start, end and type are; `discern.tasks.tags` defines spans. Micro-averaged over all types.
Reference: Tjong Kim Sang and Buchholz 2000, section 4, and the script conlleval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from discern.errors import DataError
from discern.tasks.metrics import Scores
from discern.tasks.tags import Span, spans_of
from discern.wording import counted


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """Numbers of correct, predicted and gold spans, which can be added over the parts of a file."""

    correct: int
    predicted: int
    gold: int

    @property
    def precision(self) -> float:
        """Fraction of the predicted spans that are correct; 0 if none was predicted."""
        return self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Fraction of the gold spans that were predicted; 0 if there are none."""
        return self.correct / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall; 0 if both are 0."""
        return 2 * self.correct / (self.predicted + self.gold) if self.correct else 0.0


def span_counts(gold: Sequence[Sequence[Span]], predicted: Sequence[Sequence[Span]]) -> dict[str, SpanCounts]:
    """Counts by type, the types sorted.

    Raises:
        DataError: the numbers of sentences differ.
    """
    if len(gold) != len(predicted):
        raise DataError(
            f"{counted(len(gold), 'sentence')} and predictions for {len(predicted)}", hint="give as many predictions as sentences"
        )
    correct: Counter[str] = Counter()
    guessed: Counter[str] = Counter()
    there: Counter[str] = Counter()
    for truth, guess in zip(gold, predicted, strict=True):
        correct.update(span.type for span in set(truth) & set(guess))
        guessed.update(span.type for span in set(guess))
        there.update(span.type for span in set(truth))
    return {kind: SpanCounts(correct[kind], guessed[kind], there[kind]) for kind in sorted(guessed | there)}


def total(counts: dict[str, SpanCounts]) -> SpanCounts:
    """The sum over all types."""
    return SpanCounts(
        sum(count.correct for count in counts.values()),
        sum(count.predicted for count in counts.values()),
        sum(count.gold for count in counts.values()),
    )


def span_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> Scores:
    """`precision`, `recall` and `f1` over all spans, `accuracy` over all words, from tags in any scheme.

    The gold and predicted tags may be in different schemes; the accuracy is then not meaningful.

    Raises:
        DataError: the numbers of sentences or tags differ, or a tag is neither "O" nor a prefix with a type.
    """
    counts = total(span_counts([spans_of(tags) for tags in gold], [spans_of(tags) for tags in predicted]))
    degenerate: dict[str, str] = {}
    if not counts.predicted:
        degenerate["precision"] = degenerate["f1"] = "no span is predicted"
    if not counts.gold:
        degenerate["recall"] = degenerate["f1"] = "the labels contain no span"
    values = {"precision": counts.precision, "recall": counts.recall, "f1": counts.f1}
    return Scores(values | tag_accuracy(gold, predicted).values, degenerate)


def tag_accuracy(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> Scores:
    """`accuracy` over all words: the metric of tags that mark no spans.

    Raises:
        DataError: the numbers of sentences or tags differ, or there are no words.
    """
    if len(gold) != len(predicted):
        raise DataError(
            f"{counted(len(gold), 'sentence')} and predictions for {len(predicted)}", hint="give as many predictions as sentences"
        )
    right = words = 0
    for number, (truth, guess) in enumerate(zip(gold, predicted, strict=True)):
        if len(truth) != len(guess):
            raise DataError(
                f"sentence {number} has {counted(len(truth), 'word')} and {counted(len(guess), 'predicted tag')}",
                hint="every word needs a tag",
            )
        right += sum(one == other for one, other in zip(truth, guess, strict=True))
        words += len(truth)
    if not words:
        raise DataError("no word to score", hint="give at least one sentence")
    return Scores({"accuracy": right / words})
