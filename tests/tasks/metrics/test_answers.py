"""The rules of the official scripts on cases that are computed by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from discern.errors import DataError
from discern.tasks.examples import QuestionExample
from discern.tasks.metrics.answers import (
    SquadPrediction,
    cmrc_scores,
    common_piece_f1,
    exact_match,
    mrqa_scores,
    normalized,
    squad1_scores,
    squad2_scores,
    word_f1,
    word_f1_or_nothing,
)
from discern.tasks.squad import read_squad
from tests.tasks.data_folder import data_folder


def question(identity: str, *golds: str) -> QuestionExample:
    return QuestionExample(identity, "?", "c", (), golds, not golds)


def test_normalization() -> None:
    assert normalized(" The  U.S.A.,\tan Area\n") == "usa area"
    assert normalized("A.") == ""
    assert normalized("theatre another") == "theatre another"
    assert normalized("«Été» 中文。") == "«été» 中文。"  # punctuation of ASCII only
    assert exact_match("the Rhine!", "rhine") == 1


def test_f1_counts_words_with_their_number() -> None:
    assert word_f1("big big cat", "big cat cat") == pytest.approx(2 / 3)
    assert word_f1("cat", "cat on the mat") == pytest.approx(2 * 1 * (1 / 3) / (1 + 1 / 3))
    assert word_f1("", "") == word_f1("the", "a") == word_f1("", "cat") == 0
    assert word_f1_or_nothing("", "") == word_f1_or_nothing("the", "a") == 1
    assert word_f1_or_nothing("", "cat") == 0


def test_squad1_takes_the_best_gold_and_counts_the_unanswered() -> None:
    examples = [question("1", "red cat", "cat"), question("2", "dog")]
    scores = squad1_scores(examples, {"1": "a cat"}).values
    assert scores == {"exact_match": 0.5, "f1": 0.5}
    assert mrqa_scores(examples, {"1": "a cat"}).values == {"exact_match": 0.5, "f1": 0.5}
    assert mrqa_scores(examples, {}).values == {"exact_match": 0, "f1": 0}
    with pytest.raises(DataError, match="no question"):
        mrqa_scores([], {})
    with pytest.raises(DataError, match="squad2"):
        squad1_scores([question("1")], {"1": "x"})


def test_squad2_by_hand() -> None:
    examples = [question("a", "red cat"), question("b", "dog"), question("c"), question("d")]
    predictions = {
        "a": SquadPrediction("red", -4.0),
        "b": SquadPrediction("dog", 1.0),
        "c": SquadPrediction("fish", 0.0),
        "d": SquadPrediction("", 3.0),
    }
    scores = squad2_scores(examples, predictions, threshold=-1.0).values
    # a is answered: F1 2/3; b, c, d are taken for unanswerable: b wrong, c and d right.
    assert scores["exact_match"] == pytest.approx(2 / 4)
    assert scores["f1"] == pytest.approx((2 / 3 + 2) / 4)
    assert (scores["HasAns_exact_match"], scores["HasAns_f1"]) == (0, pytest.approx(1 / 3))
    assert (scores["NoAns_exact_match"], scores["NoAns_f1"]) == (1, 1)
    # From "nothing is answered" (2 right) on: a +0 (F1 2/3), c -1, b +1, d 0.
    assert (scores["best_exact_match"], scores["best_exact_match_threshold"]) == (2 / 4, pytest.approx(-4))
    assert (scores["best_f1"], scores["best_f1_threshold"]) == (pytest.approx((2 + 2 / 3) / 4), -4.0)
    assert scores["best_exact_match_threshold"] < -4  # so that a is not answered either


def test_the_best_threshold_is_the_best_of_all() -> None:
    random_ = random.Random(0)
    for _ in range(20):
        examples = [question(str(number), *(["x y"] if random_.random() < 0.5 else [])) for number in range(8)]
        # Distinct numbers: among equals the script may count an answer in the middle of them.
        levels = random_.sample(range(-20, 20), 8)
        predictions = {
            example.id: SquadPrediction(random_.choice(["x y", "x", "", "z"]), level / 4)
            for example, level in zip(examples, levels, strict=True)
        }
        scores = squad2_scores(examples, predictions, 0).values
        for name in ("exact_match", "f1"):
            tried = [squad2_scores(examples, predictions, level / 4).values[name] for level in (-99, *levels)]
            assert scores[f"best_{name}"] == pytest.approx(max(tried))
            reached = squad2_scores(examples, predictions, scores[f"best_{name}_threshold"]).values[name]
            assert reached == pytest.approx(max(tried))


def test_squad2_without_questions_of_a_kind() -> None:
    scores = squad2_scores([question("a", "cat")], {"a": SquadPrediction("cat", 0.2)}, 0.5).values
    assert scores["HasAns_f1"] == scores["f1"] == 1
    assert "NoAns_f1" not in scores
    with pytest.raises(DataError, match="no question has a prediction"):
        squad2_scores([question("a", "cat")], {}, 0.5)


def test_cmrc_by_hand() -> None:
    assert common_piece_f1("光荣和ω-force", "光荣和") == pytest.approx(2 * 1 * (3 / 4) / (1 + 3 / 4))
    assert common_piece_f1("北京市海淀区", "北京海淀区") == pytest.approx(2 * (3 / 6) * (3 / 5) / (3 / 6 + 3 / 5))
    assert common_piece_f1("甲乙", "丙") == 0
    examples = [question("1", "《红楼梦》"), question("2", "iPhone 手机")]
    assert cmrc_scores(examples, {"1": "红楼梦。", "2": "iphone"}).values == {
        "exact_match": 0.5,
        "f1": pytest.approx((1 + 2 * (1 / 3) / (1 + 1 / 3)) / 2),
    }


@pytest.mark.parametrize("folder", ["squad1", "squad2"])
def test_the_gold_answers_of_real_files_score_full_marks(folder: str) -> None:
    examples = list(itertools.islice(read_squad(data_folder(folder) / "dev.json").examples, 2000))
    if folder == "squad1":
        scores = squad1_scores(examples, {example.id: example.golds[0] for example in examples}).values
        assert scores["exact_match"] == 1
        assert scores["f1"] == 1
        return
    predictions = {
        example.id: SquadPrediction(example.golds[0] if example.golds else "nothing", float(not example.golds))
        for example in examples
    }
    scores = squad2_scores(examples, predictions, 0.5).values
    assert scores["exact_match"] == scores["f1"] == scores["best_f1"] == 1
    assert squad2_scores(examples, predictions, 2.0).values["NoAns_f1"] == 0
