"""Intervals and paired differences: by hand, against exact tests, and by simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from discern.tasks.base import Answer, ClassificationExample, Labels, Prediction, QuestionExample, TaggingExample, Task, TextGroup
from discern.tasks.metrics import interval, paired
from tests.tasks.support import task

ACCURACY = task("classification", Labels(("a", "b")), "accuracy")


def classified(*right: int) -> tuple[list[ClassificationExample], list[Prediction]]:
    """Examples of class "a", predicted as "a" where `right`."""
    examples = [ClassificationExample(str(number), "text", None, "a") for number in range(len(right))]
    return examples, [{"id": str(number), "label": "a" if correct else "b"} for number, correct in enumerate(right)]


def test_wilson_by_hand() -> None:
    # 8 of 10: (0.8 + z²/20 ± z sqrt(0.016 + z²/400)) / (1 + z²/10) with z = 1.959964
    assert interval(ACCURACY, *classified(*[1] * 8, *[0] * 2)) == pytest.approx((0.490162, 0.943318), abs=1e-6)


@pytest.mark.parametrize(
    ("wins", "losses", "verdict"),
    [(10, 2, "better"), (5, 0, "undecided"), (7, 1, "undecided"), (2, 10, "worse"), (0, 0, "undecided")],
)
def test_the_verdict_of_an_accuracy_is_that_of_mcnemar(wins: int, losses: int, verdict: str) -> None:
    """Of 150 examples; 10 against 2 has an exact p of 2 (1 + 12 + 66) / 4096 = 0.039."""
    examples, model = classified(*[1] * wins, *[0] * losses, *[1] * (150 - wins - losses))
    _, baseline = classified(*[0] * wins, *[1] * losses, *[1] * (150 - wins - losses))
    found = paired(ACCURACY, examples, model, baseline)
    assert found.verdict == verdict
    assert found.difference == pytest.approx((wins - losses) / 150)
    assert (verdict != "undecided") == (wins + losses > 0 and binomtest(wins, wins + losses).pvalue < 0.05)
    # Bonett and Price: one more of each
    more, less = (wins + 1) / 152, (losses + 1) / 152
    radius = 1.959964 * math.sqrt((more + less - (more - less) ** 2) / 152)
    assert found.interval == pytest.approx([more - less - radius, more - less + radius])


def test_the_bootstrap_contains_the_true_value_in_95_of_100_cases() -> None:
    """The fraction of the words with the right tag, which depends on the sentence."""
    generator = np.random.default_rng(0)
    words = task("tagging", Labels(("A", "B"), "tags"), "accuracy")
    contained = []
    for _ in range(200):
        lengths, easy = generator.integers(1, 10, 80), generator.random(80) < 0.5
        examples = [TaggingExample("", ("word",) * length, ("A",) * length) for length in lengths]
        right = [generator.random(length) < (0.9 if is_easy else 0.6) for length, is_easy in zip(lengths, easy, strict=True)]
        low, high = interval(words, examples, [{"tags": np.where(each, "A", "B").tolist()} for each in right])
        contained.append(low <= 0.75 <= high)
    assert 0.91 <= np.mean(contained) <= 0.98


def numbers(generator: np.random.Generator, count: int, noise: float) -> tuple[list[ClassificationExample], list[Prediction]]:
    gold = generator.normal(size=count)
    examples = [ClassificationExample(str(number), "text", None, float(value)) for number, value in enumerate(gold)]
    return examples, [{"id": str(n), "score": float(value + noise * generator.normal())} for n, value in enumerate(gold)]


def test_the_bootstrap_agrees_with_the_known_interval_of_a_correlation() -> None:
    examples, predictions = numbers(np.random.default_rng(1), 400, 1.0)
    regression = task("classification", Labels((), "number"), "pearson")
    value = regression.score(examples, predictions).values["pearson"]
    fisher = [math.tanh(math.atanh(value) + sign * 1.959964 / math.sqrt(397)) for sign in (-1, 1)]
    assert interval(regression, examples, predictions) == pytest.approx(fisher, abs=0.01)
    shuffled = [{**each, "score": other["score"]} for each, other in zip(predictions, predictions[::-1], strict=True)]
    assert paired(regression, examples, predictions, shuffled).verdict == "better"
    assert paired(regression, examples, shuffled, predictions).verdict == "worse"
    assert paired(regression, examples, predictions, predictions).verdict == "undecided"


def sets(*labels: tuple[str, ...]) -> list[ClassificationExample]:
    return [ClassificationExample(str(number), "text", None, each) for number, each in enumerate(labels)]


SENTENCES = [TaggingExample("0", ("a", "b"), ("B-X", "I-X")), TaggingExample("1", ("c", "d", "e"), ("O", "O", "B-X"))]
QUESTIONS = [
    QuestionExample("0", "Who?", "Ann Lee ran.", (Answer("Ann Lee", 0),), ("Ann Lee",)),
    QuestionExample("1", "Who?", "Bob ran.", (Answer("Bob", 0),), ("Bob",)),
]
QUERIES = [TextGroup("0", ("a", "x")), TextGroup("1", ("b", "y")), TextGroup("2", ("b", "z"))]


@pytest.mark.parametrize(
    ("made", "examples", "predictions"),
    [
        (ACCURACY, *classified(1, 1, 0)),
        (
            task("classification", Labels(("a", "b"), "multi"), "micro_f1"),
            sets(("a",), ("a", "b"), ()),
            [{"labels": ["a"]}, {"labels": ["b"]}, {"labels": ["a"]}],
        ),
        (
            task("tagging", Labels(("O",), "tags", scheme="iob2"), "f1"),
            SENTENCES,
            [{"tags": ["B-X", "I-X"]}, {"tags": ["B-X"] * 3}],
        ),
        (task("tagging", Labels(("O",), "tags"), "f1"), SENTENCES, [{"tags": ["B-X", "I-X"]}, {"tags": ["B-X"] * 3}]),
        (task("squad1", Labels(), "f1"), QUESTIONS, [{"id": "0", "answer": "Ann"}, {"id": "1", "answer": "Bob"}]),
        (
            task("pairs", Labels((), "vectors"), "ndcg_at_10"),
            QUERIES,
            [{"ranks": [1], "grades": [1.0]}, {"ranks": [3, 4], "grades": [1.0, 1.0]}],
        ),
    ],
)
def test_the_terms_of_a_metric_give_its_value(made: Task[Any], examples: list[Any], predictions: list[Prediction]) -> None:
    metric = made.metrics[0]
    terms = made.metric_terms(metric, examples, predictions)
    assert terms is not None
    value = made.score(examples, predictions).values[metric]
    assert terms[:, 0].sum() / terms[:, 1].sum() == pytest.approx(value)
    low, high = interval(made, examples, predictions)
    assert low <= value <= high
    assert interval(made, examples, predictions) == (low, high)
    assert paired(made, examples, predictions, predictions).verdict == "undecided"


def test_answers_are_better_by_f1_if_no_fewer_match_exactly() -> None:
    made = task("squad1", Labels(), "exact_match", "f1")
    examples = [
        QuestionExample(str(number), "Who?", "Ann Lee ran.", (Answer("Ann Lee", 0),), ("Ann Lee",)) for number in range(30)
    ]

    def answers(exact: int, otherwise: str) -> list[Prediction]:
        return [{"id": str(number), "answer": "Ann Lee" if number < exact else otherwise} for number in range(30)]

    found = paired(made, examples, answers(3, "Ann"), answers(3, "ran"))
    assert (found.metric, found.verdict) == ("f1", "better")
    assert found.difference == pytest.approx(0.9 * 2 / 3)
    assert paired(made, examples, answers(2, "Ann"), answers(3, "ran")).verdict == "undecided"
    assert paired(made, examples, answers(3, "ran"), answers(2, "Ann")).verdict == "worse"
