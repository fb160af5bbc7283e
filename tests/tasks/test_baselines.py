"""Baselines: what they say on cases that can be told by hand, and that they score as the network does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from discern.tasks import baselines as module
from discern.tasks.base import Answer, ClassificationExample, Labels, Prediction, QuestionExample, TaggingExample
from discern.tasks.baselines import Baseline, BaselineScore, best_baseline, comparison_sentence, measure_baselines
from tests.tasks.support import task

COLORS = ("red", "blue", "green", "yellow", "brown", "gray", "pink", "white", "black", "orange")


def predictions(
    labels: Labels, number: int, train: Sequence[Any], examples: Sequence[Any], *, family: str = "classification"
) -> list[Any]:
    """What the baseline of this number predicts."""
    baseline = task(family, labels).baselines()[number]
    records = baseline.predict(train, examples)
    assert baseline.predict(train, examples) == records
    return [next(value for key, value in record.items() if key != "id") for record in records]


def texts(labels: Sequence[Any], *wordings: str) -> list[ClassificationExample]:
    """An example a color, a wording and its label."""
    pairs = [(f"{wording} {color}", label) for color in COLORS for wording, label in zip(wordings, labels, strict=True)]
    return [ClassificationExample(str(number), text, None, label) for number, (text, label) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("labels", "gold", "expected"),
    [
        (Labels(("a", "b")), ("b", "a", "b"), "b"),
        (Labels((), "number"), (1.0, 2.0, 90.0), 2.0),
        (Labels(("a", "b"), "multi"), (("b", "a"), ("a", "b"), ("a",)), ["a", "b"]),
    ],
)
def test_the_most_frequent_class_the_median_and_the_most_frequent_set(labels: Labels, gold: Any, expected: Any) -> None:
    train = texts(gold, "x", "y", "z")
    assert predictions(labels, 0, train, train[:2]) == [expected] * 2


@pytest.mark.parametrize(
    ("labels", "gold", "wordings", "expected"),
    [
        (Labels(("bad", "good")), ("good", "bad"), ("fine tale of", "dull tale of"), ["good", "bad"]),
        (
            Labels(("new", "red"), "multi"),
            (("new", "red"), ("red",), ()),
            ("fresh cherry", "cherry", "plain"),
            [["new", "red"], ["red"], []],
        ),
        (Labels(("red",), "multi"), (("red",), ("red",), ()), ("fresh cherry", "cherry", "plain"), [["red"], ["red"], []]),
        (Labels((), "number"), (5.0, 1.0), ("fine", "dull"), pytest.approx([5, 1], abs=1.5)),
    ],
)
def test_words_decide_classes_sets_and_numbers(labels: Labels, gold: Any, wordings: tuple[str, ...], expected: Any) -> None:
    unseen = [ClassificationExample(wording, f"{wording} violet") for wording in wordings]
    assert predictions(labels, 1, texts(gold, *wordings), unseen) == expected


def test_of_a_pair_it_counts_what_the_two_have_in_common() -> None:
    rows = [(place, color, n) for place, color in enumerate(COLORS) for n in range(3)]
    same = [ClassificationExample("", f"{color} {n}", color, "yes") for _, color, n in rows]
    other = [ClassificationExample("", f"{color} {n}", COLORS[place - n - 1], "no") for place, color, n in rows]
    asked = [ClassificationExample("", "red 7", pair) for pair in ("red", "brown")]
    assert predictions(Labels(("no", "yes")), 1, [*same, *other], asked) == ["yes", "no"]


def test_text_without_spaces_is_read_by_characters() -> None:
    pairs = (("这家酒店的服务很好", "好"), ("这本书的内容不行", "坏"))
    train = [ClassificationExample("", f"{text}{n}", None, label) for n in range(9) for text, label in pairs]
    asked = [ClassificationExample("", text) for text in ("菜很好吃", "一点也不行")]
    assert predictions(Labels(("坏", "好")), 1, train, asked) == ["好", "坏"]


def tagged(*sentences: str) -> list[TaggingExample]:
    """Of "to/O Ann/B-PER"."""
    pairs = [zip(*(word.split("/") for word in sentence.split()), strict=True) for sentence in sentences]
    return [TaggingExample("", words, tags) for words, tags in pairs]


def test_the_perceptron_goes_by_what_stands_around_a_word() -> None:
    names = ("May", "Paris", "Jordan", "Chad", "Georgia", "Sydney")
    train = tagged(*(f"in/O {name}/B-LOC now/O" for name in names), *(f"says/O {name}/B-PER Roe/I-PER" for name in names))
    asked = tagged("in/O Florence/B-LOC now/O", "says/O Florence/B-PER Roe/I-PER")
    labels = Labels(("O", "B-LOC", "B-PER", "I-PER"), "tags", scheme="iob2")
    assert predictions(labels, 0, train, asked, family="tagging") == [["O", "O", "O"], ["O", "O", "B-PER"]]
    assert predictions(labels, 1, train, asked, family="tagging") == [list(example.tags or ()) for example in asked]


def test_the_perceptron_reads_the_tag_before() -> None:
    """Tags that mark no spans, of words with the same words around them."""
    train = tagged(*(" ".join([f"{tag.lower()}/{tag}", *[f"x/{tag}"] * 8]) for tag in "ABC"))
    expected = [list(example.tags or ()) for example in train]
    assert predictions(Labels(("A", "B", "C"), "tags"), 1, train, train, family="tagging") == expected


CONTEXT = 'Ann lives in Rome. "Bob lives in Oslo," said Carl. Dora moved to Lima in 1990.'


def test_the_sentence_that_shares_rare_words_is_the_answer() -> None:
    questions = [
        QuestionExample("1", "Where did Dora move to?", CONTEXT),
        QuestionExample("2", "Where lives Bob?", CONTEXT),
        QuestionExample("3", "谁住在上海？", "小王住在北京。小李住在上海！他很高兴。"),
    ]
    (overlap,) = task("squad1", Labels()).baselines()
    answers = [record["answer"] for record in overlap.predict([], questions)]
    assert answers == ["Dora moved to Lima in 1990.", '"Bob lives in Oslo," said Carl.', "小李住在上海！"]


def test_no_answer_is_right_where_there_is_none() -> None:
    asked = [
        QuestionExample("1", "Where does Ann live?", CONTEXT, (Answer("Rome", 13),), ("Rome",), impossible=False),
        QuestionExample("2", "Where does Eve live?", CONTEXT, impossible=True),
    ]
    nothing, overlap = measure_baselines(task("squad2", Labels(), "exact_match", "f1"), asked, asked, print)
    assert (nothing.name, nothing.metrics["exact_match"]) == ("no-answer", 0.5)
    assert (overlap.name, overlap.metrics["exact_match"]) == ("overlap-sentence", 0.0)


def broken(train: object, examples: object) -> list[Prediction]:
    raise ValueError("no such thing")


def test_one_that_fails_is_told_and_large_files_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    made = task("classification", Labels(("a", "b")), "accuracy")
    # Long texts are left out, but never cut.
    examples = texts(("a", "b"), "word " * 500 + "fine", "word " * 500 + "dull")
    baselines = [*made.baselines(), Baseline("broken", "a broken one", broken)]
    monkeypatch.setattr(made, "baselines", lambda: baselines)
    for limit, value in (("TRAINING_EXAMPLES", 10), ("TRAINING_CHARACTERS", len(repr(examples)) // 2)):
        warnings: list[str] = []
        with monkeypatch.context() as limited:
            limited.setattr(module, limit, value)
            _, tfidf = measure_baselines(made, examples, examples, warnings.append)
        assert (tfidf.metrics, tfidf.train_examples) == ({"accuracy": 1.0}, 10)
        sample = "mine: baselines are trained on 10 of the 20 training examples"
        assert warnings == [sample, "baseline left out: a broken one: no such thing"]
    for limit in ("EVALUATED_EXAMPLES", "EVALUATED_CHARACTERS"):
        with monkeypatch.context() as limited:
            limited.setattr(module, limit, 5)
            assert not list(measure_baselines(made, examples, examples, warnings.append))
            assert warnings[-1].startswith("mine: no baselines: there are more than ")


@pytest.mark.parametrize("train", [texts(("a",), "x"), [ClassificationExample(label, " ", None, label) for label in "ab"]])
def test_what_cannot_be_learned_from_gives_nothing(train: list[ClassificationExample]) -> None:
    """A single class, and texts without words."""
    warnings: list[str] = []
    scores = measure_baselines(task("classification", Labels(("a", "b")), "accuracy"), train, train, warnings.append)
    assert [score.name for score in scores] == ["majority"]
    assert [line.split(":")[1] for line in warnings] == [" TF-IDF with logistic regression"]


def test_of_answers_the_best_is_the_one_with_the_highest_f1() -> None:
    """One exactly right answer of a thousand is more than the exact match of whole sentences."""
    sentence = BaselineScore("sentence", "", {"exact_match": 0.0, "f1": 0.164}, 9, [])
    nothing = BaselineScore("nothing", "", {"exact_match": 0.034, "f1": 0.034}, 9, [])
    assert best_baseline("exact_match", [nothing, sentence]) is sentence
    assert best_baseline("exact_match", []) is None


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        ("better", "The model beats a list (accuracy 0.5000): the difference is +0.1000, 95 % interval -0.0100 to +0.2000."),
        ("worse", "The model does not reach a list (accuracy 0.5000): the difference is +0.1000, 95 % interval"),
        ("undecided", "Compared to a list (accuracy 0.5000): no difference that 150 examples can show."),
    ],
)
def test_a_sentence_says_whether_the_model_beats_the_best(verdict: str, sentence: str) -> None:
    comparison = {"metric": "accuracy", "difference": 0.1, "interval": [-0.01, 0.2], "verdict": verdict}
    baselines = {"list": {"title": "a list", "metrics": {"accuracy": 0.5}}}
    entry = {"comparison": comparison, "baselines": baselines, "best_baseline": "list", "examples": 150}
    assert str(comparison_sentence(entry)).startswith(sentence)
    assert comparison_sentence({**entry, "comparison": None}) is None
