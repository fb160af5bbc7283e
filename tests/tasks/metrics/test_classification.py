"""Values computed by hand, and the undefined ones."""

from __future__ import annotations

import math

import pytest

from discern.errors import ConfigError, DataError
from discern.tasks.metrics.classification import class_scores, label_set_scores, number_scores

ALL = ("accuracy", "f1", "macro_f1", "matthews")


def test_classes_by_hand() -> None:
    # tp 2, fn 1, fp 1, tn 2
    scores = class_scores(list("111000"), list("110100"), ALL)
    assert scores.values["accuracy"] == pytest.approx(4 / 6)
    assert scores.values["f1"] == pytest.approx(2 * 2 / (3 + 3))
    assert scores.values["macro_f1"] == pytest.approx(2 / 3)
    assert scores.values["matthews"] == pytest.approx((2 * 2 - 1) / math.sqrt(3 * 3 * 3 * 3))
    assert not scores.degenerate
    assert class_scores(["a", "b"], ["a", "a"], ("f1",), positive="a").values["f1"] == pytest.approx(2 / 3)


def test_a_constant_prediction_is_zero_and_named() -> None:
    scores = class_scores(list("1100"), list("1111"), ALL)
    assert scores.values["matthews"] == 0
    assert scores.degenerate == {"matthews": "every prediction is 1"}
    assert class_scores(list("11"), list("10"), ("matthews",)).degenerate == {"matthews": "every label is 1"}
    assert class_scores(list("00"), list("00"), ("f1",)).degenerate == {"f1": "no label and no prediction is '1'"}


def test_correlations_by_hand() -> None:
    # Ranks 1 2 3 against 1 3 2: rho = 1 - 6 * 2 / (3 * 8).
    scores = number_scores([0, 1, 5], [1, 4, 2], ("pearson", "spearman", "mean_squared_error", "mean_absolute_error"))
    assert scores.values["spearman"] == pytest.approx(0.5)
    x, y = [-2, -1, 3], [-4 / 3, 5 / 3, -1 / 3]
    r = sum(a * b for a, b in zip(x, y, strict=True)) / math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))
    assert scores.values["pearson"] == pytest.approx(r)
    assert scores.values["mean_squared_error"] == pytest.approx((1 + 9 + 9) / 3)
    assert scores.values["mean_absolute_error"] == pytest.approx(7 / 3)


def test_correlation_of_a_constant_is_zero_and_named() -> None:
    scores = number_scores([1, 2, 3], [2, 2, 2])
    assert scores.values == {"spearman": 0, "pearson": 0}
    assert set(scores.degenerate) == {"spearman", "pearson"}
    assert number_scores([1], [2]).degenerate["pearson"] == "a single example has no correlation"
    assert all(math.isfinite(value) for value in number_scores([1, 2], [1e-300, 2e-300]).values.values())


def test_a_prediction_that_is_no_number_is_an_error() -> None:
    with pytest.raises(DataError, match="prediction 1 is nan"):
        number_scores([1, 2], [1, math.nan])


def test_label_sets_by_hand() -> None:
    # a: tp 1; b: tp 1, fn 1; c: fp 1
    scores = label_set_scores(
        [("a", "b"), ("b",), ()], [("a", "b"), ("c",), ()], ("micro_f1", "macro_f1", "precision", "recall", "exact_match")
    )
    assert scores.values["precision"] == pytest.approx(2 / 3)
    assert scores.values["recall"] == pytest.approx(2 / 3)
    assert scores.values["micro_f1"] == pytest.approx(2 / 3)
    assert scores.values["macro_f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert scores.values["exact_match"] == pytest.approx(2 / 3)
    names = ("micro_f1", "macro_f1", "precision", "recall")
    alone = label_set_scores([("a",), (), ("a",), ()], [(), (), ("a",), ()], names)
    assert alone.values == pytest.approx({"micro_f1": 2 / 3, "macro_f1": 2 / 3, "precision": 1, "recall": 1 / 2})
    assert set(label_set_scores([("a",), ()], [(), ()], names).values.values()) == {0}
    empty = label_set_scores([()], [()])
    assert empty.values["micro_f1"] == 0
    assert "micro_f1" in empty.degenerate


def test_wrong_calls() -> None:
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        class_scores(["1"], ["1"], ("acuracy",))
    with pytest.raises(DataError, match="2 labels and 1 predictions"):
        class_scores(["1", "0"], ["1"])
    with pytest.raises(DataError, match="0 labels"):
        class_scores([], [])
