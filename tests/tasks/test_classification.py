"""Classification: rows by hand, labels, losses, predictions, metrics and what counts as failure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from discern.data.tokenizer import special_tokens
from discern.errors import DataError
from discern.models.config import build_config
from discern.tasks.base import Labels, TextEncoder
from discern.tasks.classification import Classification, ClassificationConfig, frame_texts
from discern.tasks.examples import ClassificationExample, Reading
from discern.tasks.features import TaskRows
from tests.small.tokenizers import small_tokenizer
from tests.support import make_batch

TOKENIZER = small_tokenizer("wordpiece, lower-cased")
TEXT = TextEncoder(TOKENIZER, special_tokens(TOKENIZER))
CLS, SEP = TEXT.special.cls, TEXT.special.sep


def reading(*labels: Any) -> Reading[ClassificationExample]:
    return Reading(tuple(ClassificationExample(str(n), f"text {n}", None, label) for n, label in enumerate(labels)), "made.csv")


def task(labels: Labels, metrics: tuple[str, ...] = ("accuracy",), **config: Any) -> Classification:
    return Classification("made", ClassificationConfig(**config), metrics, labels)


@pytest.mark.parametrize(
    ("first", "second", "length", "kept"),
    [
        ([10, 11], None, 8, ([10, 11], None)),
        ([10, 11, 12], None, 4, ([10, 11], None)),
        ([10, 11], [20, 21], 8, ([10, 11], [20, 21])),
        ([10, 11, 12, 13], [20], 6, ([10, 11], [20])),
        ([10], [20, 21, 22], 6, ([10], [20, 21])),
        ([10, 11, 12], [20, 21, 22], 8, ([10, 11, 12], [20, 21])),
        ([10, 11, 12], [20, 21, 22], 7, ([10, 11], [20, 21])),
    ],
)
def test_a_row_by_hand(first: list[int], second: list[int] | None, length: int, kept: tuple[list[int], list[int] | None]) -> None:
    row, segments, cut = frame_texts(first, second, TEXT, length)
    left, right = kept
    expected = [CLS, *left, SEP, *([*right, SEP] if right is not None else [])]
    assert row.tolist() == expected
    assert segments.tolist() == [0] * (len(left) + 2) + [1] * (len(expected) - len(left) - 2)
    assert cut == (kept != (first, second))


def test_cutting_is_bert_s_one_token_at_a_time() -> None:
    """The loop of the released code, as a specification: the longer half loses its last token; of equal ones the second."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        first, second = (list(range(start, start + int(rng.integers(1, 30)))) for start in (100, 200))
        length = int(rng.integers(8, 40))
        left, right = list(first), list(second)
        while len(left) + len(right) > length - 3:
            (left if len(left) > len(right) else right).pop()
        assert frame_texts(first, second, TEXT, length)[0].tolist() == [CLS, *left, SEP, *right, SEP]


def test_rows_of_examples() -> None:
    examples = (ClassificationExample("0", "the", None, "b"), ClassificationExample("1", "the", "the the", "a"))
    made = task(Labels(("a", "b"))).encode(examples, TEXT, labeled=True)
    the = TEXT.ids(["the"])[0]
    assert made.input_ids[1].tolist() == [CLS, *the, SEP, *the, *the, SEP]
    assert made.targets["class"].tolist() == [1, 0]
    assert not task(Labels(("a", "b"))).encode(examples, TEXT, labeled=False).targets


def test_cut_texts_are_counted() -> None:
    examples = (ClassificationExample("0", "the " * 50, None, "a"), ClassificationExample("1", "the", None, "b"))
    made = task(Labels(("a", "b")), sequence_length=8).encode(examples, TEXT, labeled=True)
    assert made.notes == ("1 of 2 texts were cut to 8 tokens",)
    assert made.input_ids.lengths.tolist()[0] == 8


def test_labels_are_those_of_the_file_numbers_in_their_order() -> None:
    learn = Classification.learn
    assert learn(reading("10", "9", "9", "x"), ClassificationConfig(), ()).names == ("9", "10", "x")
    assert learn(reading("1", "0"), ClassificationConfig(), ("0", "1")).names == ("0", "1")
    several = learn(reading(("a", "b"), (), ("b",)), ClassificationConfig(), ())
    assert (several.kind, several.names) == ("multi", ("a", "b"))


def test_scores_are_trained_on_in_units_of_their_spread() -> None:
    found = Classification.learn(reading(1.0, 3.0), ClassificationConfig(), ())
    assert (found.kind, found.shift, found.scale) == ("number", 2.0, 1.0)
    fixed = Classification.learn(reading(1.0, 3.0), ClassificationConfig(), ("0", "5"))
    made = task(fixed).encode(reading(1.0, 5.0).examples, TEXT, labeled=True)
    assert made.targets["score"].tolist() == pytest.approx([0.2, 1.0])


def test_rare_classes_may_count_more() -> None:
    found = Classification.learn(reading("a", "a", "a", "b"), ClassificationConfig(class_weights="balanced"), ())
    assert found.weights == pytest.approx((4 / 6, 4 / 2))
    several = Classification.learn(reading(("a", "b"), ("a",)), ClassificationConfig(class_weights="balanced"), ())
    assert several.weights == pytest.approx((2 / 4, 2 / 2))  # examples, not labels


@pytest.mark.parametrize(
    ("labels", "message"),
    [((None,), "no labels"), (("a", "a"), "nothing to learn"), ((2.0, 2.0), "nothing to learn"), (((), ()), "has a label")],
)
def test_nothing_to_learn_is_an_error(labels: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Classification.learn(reading(*labels), ClassificationConfig(), ())


def test_a_named_task_with_one_class_needs_its_whole_file() -> None:
    with pytest.raises(DataError, match="nothing to learn") as caught:
        Classification.learn(reading("1", "1"), ClassificationConfig(), ("0", "1"))
    assert caught.value.hint == "give the whole file, with 0, 1"


def test_an_unknown_label_names_the_nearest() -> None:
    with pytest.raises(DataError, match="'positve'") as caught:
        task(Labels(("negative", "positive"))).check(reading("positve"))
    assert "did you mean 'positive'?" in str(caught.value.hint)


def test_both_orders_of_a_pair_are_trained_on_if_asked() -> None:
    pair = (ClassificationExample("0", "x", "y", "a"),)
    assert task(Labels(("a", "b"))).training_examples(pair) == pair
    first, second = task(Labels(("a", "b")), swap_pairs=True).training_examples(pair)
    assert (first.text, first.pair, second.text, second.pair) == ("x", "y", "y", "x")


def rows(**targets: Any) -> TaskRows:
    count = len(next(iter(targets.values())))
    return TaskRows(
        "made", torch.arange(count), torch.arange(count), {name: torch.tensor(value) for name, value in targets.items()}
    )


@pytest.mark.parametrize(
    ("labels", "targets", "expected"),
    [
        (Labels(("a", "b")), {"class": [0, 1]}, 2 * math.log(2)),
        (Labels(("a", "b"), weights=(0.5, 3.0)), {"class": [0, 1]}, 3.5 * math.log(2)),
        (Labels(("a", "b", "c"), "multi"), {"classes": [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]}, 6 * math.log(2)),
        (Labels((), "number"), {"score": [1.0, -2.0]}, 5.0),
    ],
)
def test_the_loss_of_even_outputs_by_hand(labels: Labels, targets: dict[str, Any], expected: float) -> None:
    head = task(labels).head(build_config(hidden_size=4), 0.0)
    torch.nn.init.zeros_(head.output.weight)
    torch.nn.init.zeros_(head.output.bias)
    loss, said = head(torch.randn(2, 3, 4), make_batch([[2, 5, 3], [2, 6, 3]]), rows(**targets))
    assert float(loss.detach()) == pytest.approx(expected)
    assert said["logits"].shape == (2, max(1, len(labels.names)))


def predicted(made: Classification, *logits: list[float]) -> list[dict[str, Any]]:
    examples = [ClassificationExample(str(n), "x") for n in range(len(logits))]
    features = made.encode(examples, TEXT, labeled=False)
    return made.predict(examples, features, [{"logits": np.array(row, np.float32)} for row in logits])


def test_predictions_by_hand() -> None:
    (one,) = predicted(task(Labels(("a", "b"))), [0.0, math.log(3)])
    assert (one["label"], one["probabilities"]) == ("b", {"a": 0.25, "b": 0.75})
    (several,) = predicted(task(Labels(("a", "b"), "multi")), [math.log(3), -math.log(3)])
    assert (several["labels"], several["probabilities"]) == (["a"], {"a": 0.75, "b": 0.25})
    (number,) = predicted(task(Labels((), "number", scale=5.0, shift=1.0)), [0.5])
    assert number["score"] == pytest.approx(3.5)


def test_mistakes_come_worst_first() -> None:
    made = task(Labels(("a", "b")))
    wrong = made.mistakes(reading("a", "a", "b").examples, predicted(made, [0.0, 1.0], [0.0, 4.0], [0.0, 9.0]))
    assert [record["id"] for record in wrong] == ["1", "0"]
    assert wrong[0]["gold"] == "a"
    assert wrong[0]["badness"] == pytest.approx(math.log(1 + math.exp(4)), rel=1e-3)


def test_scores_are_glue_s() -> None:
    made = task(Labels(("0", "1")), ("matthews", "accuracy", "f1"))
    scores = made.score(reading("1", "1", "0", "0").examples, predicted(made, [0, 1], [1, 0], [1, 0], [1, 0]))
    # One of two positives found, nothing called wrongly: (1 x 2 - 0) / sqrt(1 x 2 x 2 x 3).
    assert scores.values == pytest.approx({"matthews": 2 / math.sqrt(12), "accuracy": 0.75, "f1": 2 / 3})


def test_the_same_answer_everywhere_is_a_failure() -> None:
    made, both, equal = task(Labels(("a", "b"))), reading("a", "b").examples, reading("b", "b").examples
    assert made.failure(both, predicted(made, [0, 1], [0, 2])) == "every prediction is b"
    assert made.failure(both, predicted(made, [0, 1], [2, 0])) is None
    assert made.failure(equal, predicted(made, [2, 0], [1, 0])) == "every prediction is a"
    assert made.failure(equal, predicted(made, [0, 1], [0, 2])) is None, "each example is b"
    numbers = task(Labels((), "number"))
    assert numbers.failure(reading(0.0, 1.0).examples, predicted(numbers, [0.5], [0.5])) == "every prediction is about 0.5"
    assert numbers.failure(reading(0.0, 1.0).examples, predicted(numbers, [0.5], [0.9])) is None
    assert numbers.failure(reading(0.5, 0.5).examples, predicted(numbers, [0.5], [0.5])) is None
