"""Span F1 counted by hand."""

from __future__ import annotations

import pytest

from discern.errors import DataError
from discern.tasks.metrics.spans import SpanCounts, span_counts, span_scores, tag_accuracy
from discern.tasks.tags import spans_of


def scored(gold: str, predicted: str) -> tuple[float, float, float, float]:
    values = span_scores([line.split() for line in gold.split("/")], [line.split() for line in predicted.split("/")]).values
    return values["precision"], values["recall"], values["f1"], values["accuracy"]


@pytest.mark.parametrize(
    ("gold", "predicted", "expected"),
    [
        # A at 0-1 right, B at 3 predicted longer.
        ("B-A I-A O B-B O", "B-A I-A O B-B I-B", (1 / 2, 1 / 2, 1 / 2, 4 / 5)),
        # IOB1: two A in a row; the prediction makes one of them.
        ("I-A B-A O", "I-A I-A O", (0, 0, 0, 2 / 3)),
        # A change of type on I: A at 0, B at 1-2, both predicted, and a C too many.
        ("B-A I-B I-B O", "B-A B-B I-B I-C", (2 / 3, 1, 4 / 5, 2 / 4)),
        # The same spans in other prefixes.
        ("B-A I-A O S-B", "I-A I-A O I-B", (1, 1, 1, 2 / 4)),
        # The type of a span is part of it.
        ("B-A O", "B-B O", (0, 0, 0, 1 / 2)),
        # A span never goes over the end of a sentence.
        ("B-A I-A/I-A O", "B-A I-A/O O", (1, 1 / 2, 2 / 3, 3 / 4)),
    ],
)
def test_by_hand(gold: str, predicted: str, expected: tuple[float, float, float, float]) -> None:
    assert scored(gold, predicted) == pytest.approx(expected)


def test_counts_by_type() -> None:
    gold, predicted = "B-A O B-B I-B".split(), "B-A B-A B-B O".split()
    counts = span_counts([spans_of(gold)], [spans_of(predicted)])
    assert counts == {"A": SpanCounts(1, 2, 1), "B": SpanCounts(0, 1, 1)}
    assert counts["A"].f1 == pytest.approx(2 / 3)


def test_nothing_predicted_is_zero_and_named() -> None:
    scores = span_scores([["B-A"]], [["O"]])
    assert (scores.values["precision"], scores.values["f1"]) == (0, 0)
    assert scores.degenerate == {"precision": "no span is predicted", "f1": "no span is predicted"}


def test_unequal_numbers_are_errors() -> None:
    with pytest.raises(DataError, match="1 sentence and predictions for 0"):
        span_scores([["O"]], [])
    with pytest.raises(DataError, match="sentence 0 has 1 word and 2"):
        tag_accuracy([["NN"]], [["NN", "VB"]])
    with pytest.raises(DataError, match="no word"):
        tag_accuracy([], [])
