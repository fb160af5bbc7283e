"""Metrics computed by hand, undefined ones, and the rules of the official scripts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import f1_score, matthews_corrcoef

from discern.errors import ConfigError, DataError
from discern.tasks.base import Scores
from discern.tasks.metrics import (
    CMRC,
    SQUAD1,
    SQUAD2,
    best_similarities,
    class_scores,
    cmrc_f1,
    exact_match,
    label_set_scores,
    normalized_words,
    number_scores,
    span_scores,
    squad2_scores,
    word_f1,
    word_f1_or_nothing,
)

ALL = ("accuracy", "f1", "macro_f1", "matthews")


def test_classes_by_hand() -> None:
    # tp 2, fn 1, fp 1, tn 2
    scores = class_scores(list("111000"), list("110100"), ALL)
    expected = {"accuracy": 4 / 6, "f1": 2 * 2 / (3 + 3), "macro_f1": 2 / 3, "matthews": (2 * 2 - 1) / math.sqrt(3 * 3 * 3 * 3)}
    assert scores.values == pytest.approx(expected)
    assert not scores.degenerate
    assert class_scores(["a", "b"], ["a", "a"], ("f1",), positive="a").values["f1"] == pytest.approx(2 / 3)


def test_many_classes_as_scikit_learn() -> None:
    gold, predicted = np.random.default_rng(0).integers(0, 5, (2, 100)).astype(str)
    scores = class_scores(gold, predicted, ("macro_f1", "matthews"))
    expected = (f1_score(gold, predicted, average="macro"), matthews_corrcoef(gold, predicted))
    assert tuple(scores.values.values()) == pytest.approx(expected)


def test_numbers_by_hand() -> None:
    # Ranks 1 2 3 against 1 3 2: rho = 1 - 6 * 2 / (3 * 8).
    scores = number_scores([0, 1, 5], [1, 4, 2], ("pearson", "spearman", "mean_absolute_error"))
    x, y = [-2, -1, 3], [-4 / 3, 5 / 3, -1 / 3]
    r = sum(a * b for a, b in zip(x, y, strict=True)) / math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))
    assert scores.values == pytest.approx({"pearson": r, "spearman": 0.5, "mean_absolute_error": 7 / 3})
    assert all(math.isfinite(value) for value in number_scores([1, 2], [1e-300, 2e-300]).values.values())
    with pytest.raises(DataError, match="prediction 1 is not finite"):
        number_scores([1, 2], [1, math.nan])


def test_label_sets_by_hand() -> None:
    # a: tp 1; b: tp 1, fn 1; c: fp 1
    scores = label_set_scores([("a", "b"), ("b",), ()], [("a", "b"), ("c",), ()])
    assert scores.values == pytest.approx({"micro_f1": 2 / 3, "macro_f1": (1 + 2 / 3 + 0) / 3, "exact_match": 2 / 3})


@pytest.mark.parametrize(
    ("scores", "gold", "predicted", "degenerate"),
    [
        (class_scores, "1100", "1111", {"matthews": "every prediction is 1"}),
        (class_scores, "11", "10", {"matthews": "every label is 1"}),
        (class_scores, "0011", "0011", {}),
        (class_scores, "0022", "0202", {"f1": "no label and no prediction is '1'"}),
        (number_scores, (1, 2, 3), (2, 2, 2), dict.fromkeys(("spearman", "pearson"), "every prediction is 2.0")),
        (number_scores, (1,), (2,), dict.fromkeys(("spearman", "pearson"), "a single example has no correlation")),
        (label_set_scores, [()], [()], dict.fromkeys(("micro_f1", "macro_f1"), "no label is given or predicted")),
        (span_scores, [["B-A"]], [["O"]], dict.fromkeys(("precision", "f1"), "no span is predicted")),
        (span_scores, [["O"]], [["B-A"]], dict.fromkeys(("recall", "f1"), "the labels contain no span")),
    ],
)
def test_undefined_metrics_are_zero_and_named(
    scores: Callable[..., Scores], gold: Any, predicted: Any, degenerate: dict[str, str]
) -> None:
    result = scores(list(gold), list(predicted), ALL) if scores is class_scores else scores(gold, predicted)
    assert result.degenerate == degenerate
    assert all(result.values[name] == 0 for name in degenerate)


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        class_scores(["1"], ["1"], ("acuracy",))


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
def test_spans_by_hand(gold: str, predicted: str, expected: tuple[float, ...]) -> None:
    scores = span_scores(*([line.split() for line in lines.split("/")] for lines in (gold, predicted)))
    assert tuple(scores.values[name] for name in ("precision", "recall", "f1", "accuracy")) == pytest.approx(expected)
    assert scores.degenerate == {}


def test_normalization() -> None:
    assert normalized_words(" The  U.S.A.,\tan Area\n") == ["usa", "area"]
    assert normalized_words("A.") == []
    assert normalized_words("theatre another") == ["theatre", "another"]
    assert normalized_words("«Été» 中文。") == ["«été»", "中文。"]  # punctuation of ASCII only
    assert exact_match("the Rhine!", "rhine") == 1


def test_f1_counts_words_with_their_number() -> None:
    assert word_f1("big big cat", "big cat cat") == pytest.approx(2 / 3)
    assert word_f1("cat", "cat on the mat") == pytest.approx(2 * 1 * (1 / 3) / (1 + 1 / 3))
    assert word_f1("", "") == word_f1("the", "a") == word_f1("", "cat") == 0
    assert word_f1_or_nothing("", "") == word_f1_or_nothing("the", "a") == 1
    assert word_f1_or_nothing("", "cat") == 0


def test_the_best_gold_counts() -> None:
    golds, answers = [("red cat", "cat"), ("dog",)], ["a cat", ""]
    assert [best_similarities(golds, answers, metric).tolist() for metric in SQUAD1.values()] == [[1, 0], [1, 0]]


def test_squad2_by_hand() -> None:
    golds, answers = [("red cat",), ("dog",), (), ()], ["red", "dog", "fish", ""]
    scores = squad2_scores(golds, answers, [-4.0, 1.0, 0.0, 3.0], threshold=-1.0)
    # The first is answered: F1 2/3. The others count as unanswerable: the second is wrong, the third and fourth are right.
    assert scores["exact_match"] == pytest.approx(2 / 4)
    assert scores["f1"] == pytest.approx((2 / 3 + 2) / 4)
    assert (scores["HasAns_exact_match"], scores["HasAns_f1"]) == (0, pytest.approx(1 / 3))
    assert (scores["NoAns_exact_match"], scores["NoAns_f1"]) == (1, 1)
    # With no question answered, 2 are right. Answered one by one: first +0 (F1 2/3), third -1, second +1, fourth 0.
    assert (scores["best_exact_match"], scores["best_exact_match_threshold"]) == (2 / 4, pytest.approx(-4))
    assert (scores["best_f1"], scores["best_f1_threshold"]) == (pytest.approx((2 + 2 / 3) / 4), -4.0)
    assert scores["best_exact_match_threshold"] < -4  # so that the first is not answered either
    assert "NoAns_f1" not in squad2_scores([("cat",)], ["cat"], [0.2], 0.5)


def test_the_best_threshold_is_the_best_of_all() -> None:
    rng = random.Random(0)
    for _ in range(20):
        golds = [rng.choice([("x y",), ()]) for _ in range(8)]
        answers = rng.choices(["x y", "x", "", "z"], k=8)
        # Distinct numbers: among equals the script may count an answer in the middle of them.
        levels = rng.sample(range(-20, 20), 8)
        scores = squad2_scores(golds, answers, levels, 0)
        for name in SQUAD2:
            best = max(squad2_scores(golds, answers, levels, level)[name] for level in (-99, *levels))
            assert scores[f"best_{name}"] == pytest.approx(best)
            assert squad2_scores(golds, answers, levels, scores[f"best_{name}_threshold"])[name] == pytest.approx(best)


def test_cmrc_by_hand() -> None:
    assert cmrc_f1("光荣和ω-force", "光荣和") == pytest.approx(2 * 1 * (3 / 4) / (1 + 3 / 4))
    assert cmrc_f1("北京市海淀区", "北京海淀区") == pytest.approx(2 * (3 / 6) * (3 / 5) / (3 / 6 + 3 / 5))
    assert cmrc_f1("甲乙", "丙") == 0
    golds, answers = [("《红楼梦》",), ("iPhone 手机",)], ["红楼梦。", "iphone"]
    assert best_similarities(golds, answers, CMRC["exact_match"]).tolist() == [1, 0]
    assert best_similarities(golds, answers, CMRC["f1"]) == pytest.approx([1, 2 * (1 / 3) / (1 + 1 / 3)])
