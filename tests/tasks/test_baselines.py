"""Baselines: what they say on cases that can be told by hand, and that they score as the network does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from discern.tasks import families
from discern.tasks import tasks as registry
from discern.tasks.base import Labels, Prediction, Task
from discern.tasks.baselines import base, tags
from discern.tasks.baselines.answers import NoAnswer, OverlapSentence
from discern.tasks.baselines.base import Baseline, measure_baselines
from discern.tasks.baselines.tags import AveragedPerceptron, MostFrequentTag, Perceptron
from discern.tasks.baselines.texts import MostFrequent, TfIdf
from discern.tasks.examples import Answer, ClassificationExample, QuestionExample, TaggingExample

COLORS = ("red", "blue", "green", "yellow", "brown", "gray", "pink", "white", "black", "orange")


def texts(labels: Sequence[Any], *wordings: str) -> list[ClassificationExample]:
    """An example a color, a wording and its label."""
    pairs = [(f"{wording} {color}", label) for color in COLORS for wording, label in zip(wordings, labels, strict=True)]
    return [ClassificationExample(str(number), text, None, label) for number, (text, label) in enumerate(pairs)]


def said(predictions: Sequence[Prediction] | None, key: str) -> list[Any]:
    assert predictions is not None
    return [each[key] for each in predictions]


def unseen(*wordings: str) -> list[ClassificationExample]:
    return [ClassificationExample(str(number), f"{wording} violet") for number, wording in enumerate(wordings)]


def test_the_most_frequent_class_the_median_and_the_most_frequent_set() -> None:
    classes = texts(("b", "a", "b"), "x", "y", "z")
    assert said(MostFrequent(Labels(("a", "b"))).predict(classes, classes[:2]), "label") == ["b", "b"]
    numbers = texts((1.0, 2.0, 90.0), "x", "y", "z")
    assert said(MostFrequent(Labels((), "number")).predict(numbers, numbers[:1]), "score") == [2.0]
    sets = texts((("b", "a"), ("a", "b"), ("a",)), "x", "y", "z")
    assert said(MostFrequent(Labels(("a", "b"), "multi")).predict(sets, sets[:1]), "labels") == [["a", "b"]]


def test_words_decide_classes_sets_and_numbers() -> None:
    single = TfIdf(Labels(("bad", "good")))
    assert single.title == "TF-IDF with logistic regression"
    train = texts(("good", "bad"), "a fine tale of", "a dull tale of")
    assert said(single.predict(train, unseen("dull", "fine")), "label") == ["bad", "good"]
    train = texts((("new", "red"), ("red",), ()), "fresh cherry", "cherry", "plain")
    several = TfIdf(Labels(("new", "red"), "multi")).predict(train, unseen("fresh cherry", "plain"))
    assert said(several, "labels") == [["new", "red"], []]
    alone = TfIdf(Labels(("red",), "multi"))
    train = texts((("red",), ("red",), ()), "fresh cherry", "cherry", "plain")
    assert said(alone.predict(train, unseen("cherry", "plain")), "labels") == [["red"], []]
    train = texts((5.0, 1.0), "fine", "dull")
    number = TfIdf(Labels((), "number"))
    assert number.title == "TF-IDF with ridge regression"
    high, low = said(number.predict(train, unseen("fine", "dull")), "score")
    assert high > 3.5
    assert low < 2.5


def test_of_a_pair_it_counts_what_the_two_have_in_common() -> None:
    same = [ClassificationExample(f"{n}", f"{color} {n}", color, "yes") for color in COLORS for n in range(3)]
    other = [
        ClassificationExample(f"{n}", f"{color} {n}", COLORS[place - n - 1], "no")
        for place, color in enumerate(COLORS)
        for n in range(3)
    ]
    asked = [ClassificationExample("1", "red 7", "red"), ClassificationExample("2", "red 7", "brown")]
    assert said(TfIdf(Labels(("no", "yes"))).predict([*same, *other], asked), "label") == ["yes", "no"]


def test_text_without_spaces_is_read_by_characters() -> None:
    rows = [(f"这家酒店的服务很好{n}", "好") for n in range(9)] + [(f"这本书的内容不行{n}", "坏") for n in range(9)]
    train = [ClassificationExample(str(place), text, None, label) for place, (text, label) in enumerate(rows)]
    asked = [ClassificationExample("1", "菜很好吃"), ClassificationExample("2", "一点也不行")]
    assert said(TfIdf(Labels(("坏", "好"))).predict(train, asked), "label") == ["好", "坏"]


def test_long_texts_are_left_out_but_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = families.load("classification")
    task = kind("mine", kind.Config(), ("accuracy",), Labels(("bad", "good")))
    examples = texts(("good", "bad"), "word " * 500 + "fine", "word " * 500 + "dull")
    monkeypatch.setattr(base, "TRAINING_CHARACTERS", len(repr(examples)) // 2)
    _, of_words = measure_baselines(task, examples, examples, print)
    assert (of_words.metrics, of_words.train_examples) == ({"accuracy": 1.0}, 10)


def test_what_cannot_be_learned_from_gives_nothing() -> None:
    signs = [ClassificationExample("1", " ", None, "a"), ClassificationExample("2", " ", None, "b")]
    assert TfIdf(Labels(("a", "b"))).predict(signs, signs) is None
    alike = texts(("a",), "x")
    assert TfIdf(Labels(("a", "b"))).predict(alike, alike) is None


def test_the_perceptron_keeps_the_mean_of_its_weights() -> None:
    items = np.array([[0], [1]])
    gold = np.array([1, 1])
    model = AveragedPerceptron(features=2, tags=2)
    model.fit([(items, gold)], passes=3)
    # The first sequence is tagged 0, 0 and corrected; the two passes after it make no mistake. The mean of nothing, and of the
    # corrected weights three times, is three quarters of them.
    np.testing.assert_allclose(model._weights[:2], [[-0.75, 0.75], [-0.75, 0.75]])
    np.testing.assert_allclose(model._moves, [[-0.75, 0.0], [0.0, 0.75], [-0.75, 0.75]])
    assert model.tag(items).tolist() == [1, 1]
    assert model.tag(np.zeros((0, 1), np.int64)).tolist() == []


def tagged(*sentences: str) -> list[TaggingExample]:
    """Of "to/O Ann/B-PER"."""
    pairs = [[word.split("/") for word in sentence.split()] for sentence in sentences]
    return [
        TaggingExample(str(number), tuple(word for word, _ in each), tuple(tag for _, tag in each))
        for number, each in enumerate(pairs)
    ]


def test_the_perceptron_goes_by_what_stands_around_a_word() -> None:
    names = ("May", "Paris", "Jordan", "Chad", "Georgia", "Sydney")
    train = tagged(*(f"in/O {name}/B-LOC now/O" for name in names), *(f"says/O {name}/B-PER Roe/I-PER" for name in names))
    asked = tagged("in/O Florence/B-LOC now/O", "says/O Florence/B-PER Roe/I-PER")
    usual = MostFrequentTag("iob2").predict(train, asked)
    assert said(usual, "tags") == [["O", "O", "O"], ["O", "O", "B-PER"]]
    learned = Perceptron("iob2").predict(train, asked)
    assert said(learned, "tags") == [list(each.tags or ()) for each in asked]
    assert learned == Perceptron("iob2").predict(train, asked)


def test_tags_that_mark_no_spans_are_learned_as_they_are() -> None:
    train = tagged("the/DET dog/NOUN", "a/DET cat/NOUN", "she/PRON runs/VERB")
    assert said(Perceptron("none").predict(train, tagged("the/DET cow/NOUN")), "tags") == [["DET", "NOUN"]]


def test_the_perceptron_takes_no_more_than_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    train = tagged(*(f"in/O {color}/B-X" for color in COLORS))
    monkeypatch.setattr(tags, "_WORD_PASSES", 20)
    kept, of_kept, passes = tags._affordable(train, [list(each.tags or ()) for each in train], 2)
    assert (len(kept), passes) == (5, 2)
    assert [each.tags for each in kept] == [tuple(each) for each in of_kept]


CONTEXT = 'Ann lives in Rome. "Bob lives in Oslo," said Carl. Dora moved to Lima in 1990.'


def test_the_sentence_that_shares_rare_words_is_the_answer() -> None:
    questions = [QuestionExample("1", "Where did Dora move to?", CONTEXT), QuestionExample("2", "Where lives Bob?", CONTEXT)]
    answers = said(OverlapSentence(0.0).predict([], questions), "answer")
    assert answers == ["Dora moved to Lima in 1990.", '"Bob lives in Oslo," said Carl.']
    chinese = QuestionExample("3", "谁住在上海？", "小王住在北京。小李住在上海！他很高兴。")
    assert said(OverlapSentence(0.0).predict([], [chinese]), "answer") == ["小李住在上海！"]


def test_no_answer_is_right_where_there_is_none() -> None:
    task = registry.load("squad2").family("squad2", families.load("squad2").Config(), ("exact_match", "f1"), Labels())
    asked = [
        QuestionExample("1", "Where does Ann live?", CONTEXT, (Answer("Rome", 13),), ("Rome",), impossible=False),
        QuestionExample("2", "Where does Eve live?", CONTEXT, impossible=True),
    ]
    found = {each.name: each.metrics["exact_match"] for each in measure_baselines(task, asked, asked, print)}
    assert found == {"no-answer": 0.5, "overlap-sentence": 0.0}
    assert said(NoAnswer(-2.75).predict([], asked), "no_answer") == [-1.75, -1.75]


@pytest.mark.parametrize(
    ("family", "labels", "metrics", "examples"),
    [
        ("classification", Labels(("a", "b")), ("matthews", "accuracy"), texts(("a", "b"), "one", "two")),
        ("classification", Labels(("a", "b"), "multi"), ("micro_f1",), texts((("a",), ("a", "b")), "one", "two")),
        ("classification", Labels((), "number"), ("spearman", "pearson"), texts((0.5, 1.5), "one", "two")),
        ("tagging", Labels(("B-X", "E-X", "I-X", "O", "S-X"), "tags", scheme="iob2"), ("f1",), tagged("a/O b/B-X", "c/O b/B-X")),
        ("squad1", Labels((), "spans"), ("f1",), [QuestionExample("1", "Who?", CONTEXT, (Answer("Ann", 0),), ("Ann",))]),
    ],
)
def test_they_are_scored_as_the_network_is(family: str, labels: Labels, metrics: tuple[str, ...], examples: list[Any]) -> None:
    kind: type[Task[Any]] = families.load(family)
    task = kind("mine", kind.Config(), metrics, labels)
    found = list(measure_baselines(task, examples, examples, print))
    assert found
    for each in found:
        assert set(metrics) <= each.metrics.keys()
        assert next(iter(each.metrics)) == metrics[0]
        assert each.record()["train_examples"] == len(examples)
    assert found == list(measure_baselines(task, examples, examples, print))


class Broken(Baseline[ClassificationExample]):
    name = "broken"
    title = "a broken one"

    def predict(self, train: object, examples: object) -> list[Prediction] | None:
        raise ValueError("no such thing")


def test_one_that_fails_is_told_and_large_files_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = families.load("classification")
    task = kind("mine", kind.Config(), ("accuracy",), Labels(("a", "b")))
    examples = texts(("a", "b"), "one", "two")
    monkeypatch.setattr(task, "baselines", lambda: [Broken(), MostFrequent(task.labels)])
    warnings: list[str] = []
    monkeypatch.setattr(base, "TRAINING_EXAMPLES", 7)
    found = list(measure_baselines(task, examples, examples, warnings.append))
    assert [(each.name, each.train_examples) for each in found] == [("majority", 7)]
    sample = "mine: baselines are trained on 7 of the 20 training examples"
    assert warnings == [sample, "baseline left out: a broken one: no such thing"]
    for limit in ("EVALUATED_EXAMPLES", "EVALUATED_CHARACTERS"):
        with monkeypatch.context() as limited:
            limited.setattr(base, limit, 5)
            assert not list(measure_baselines(task, examples, examples, warnings.append))
            assert warnings[-1].startswith("mine: no baselines: there are more than ")
