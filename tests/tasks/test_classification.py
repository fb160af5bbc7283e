"""Classification: rows by hand, labels, losses, heads, predictions, metrics and what counts as failure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from discern.data.tokenizer import special_tokens
from discern.errors import DataError
from discern.models.config import build_config
from discern.tasks.base import ClassificationExample, Labels, Reading, TextEncoder
from discern.tasks.classification import Classification, ClassificationConfig, frame_texts
from discern.tasks.features import TaskRows
from tests.parity.small_networks import token_batch
from tests.small.tokenizers import small_tokenizer
from tests.support import make_batch

TOKENIZER = small_tokenizer("wordpiece, lower-cased")
TEXT = TextEncoder(TOKENIZER, special_tokens(TOKENIZER))
CLS, SEP = TEXT.special.cls, TEXT.special.sep
CLASSES, SETS, SCORES = Labels(("a", "b")), Labels(("a", "b"), "multi"), Labels((), "number")


def reading(*labels: Any) -> Reading[ClassificationExample]:
    return Reading(tuple(ClassificationExample(str(n), f"text {n}", None, label) for n, label in enumerate(labels)), "made.csv")


def task(labels: Labels, metrics: tuple[str, ...] = ("accuracy",), **config: Any) -> Classification:
    return Classification("made", ClassificationConfig(**config), metrics, labels)


def test_cutting_is_bert_s_one_token_at_a_time() -> None:
    """The loop of the released code, as a specification: the longer half loses its last token; of equal ones the second."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        first, second = (list(range(start, start + int(rng.integers(1, 30)))) for start in (100, 200))
        length = int(rng.integers(8, 40))
        left, right = list(first), list(second)
        while len(left) + len(right) > length - 3:
            (left if len(left) > len(right) else right).pop()
        row, segments, was_cut = frame_texts(first, second, TEXT, length)
        assert row.tolist() == [CLS, *left, SEP, *right, SEP]
        assert segments.tolist() == [0] * (len(left) + 2) + [1] * (len(right) + 1)
        assert was_cut == ((left, right) != (first, second))


def test_rows_of_examples() -> None:
    examples = (ClassificationExample("0", "the " * 50, None, "b"), ClassificationExample("1", "the", "the the", "a"))
    made = task(CLASSES, sequence_length=8).encode(examples, TEXT, labeled=True)
    ((the,),) = TEXT.ids(["the"])
    assert [made.input_ids[row].tolist() for row in range(2)] == [[CLS, *[the] * 6, SEP], [CLS, the, SEP, the, the, SEP]]
    assert [made.token_types[row].tolist() for row in range(2)] == [[0] * 8, [0, 0, 0, 1, 1, 1]]
    assert made.targets["class"].tolist() == [1, 0]
    assert made.notes == ("1 of 2 texts were cut to 8 tokens",)
    assert not task(CLASSES).encode(examples, TEXT, labeled=False).targets


BALANCED = ClassificationConfig(class_weights="balanced")


@pytest.mark.parametrize(
    ("labels", "config", "fixed", "expected"),
    [
        (("10", "9", "9", "x"), ClassificationConfig(), (), Labels(("9", "10", "x"))),
        (("1", "0"), ClassificationConfig(), ("0", "1"), Labels(("0", "1"))),
        ((("a", "b"), (), ("b",)), ClassificationConfig(), (), SETS),
        ((1.0, 3.0), ClassificationConfig(), (), Labels((), "number", scale=1.0, shift=2.0)),
        ((2.0, 3.0), ClassificationConfig(), ("1", "5"), Labels((), "number", scale=4.0, shift=1.0)),
        (("a", "a", "a", "b"), BALANCED, (), Labels(("a", "b"), weights=(4 / 6, 4 / 2))),
        # Counted by examples, not by labels.
        ((("a", "b"), ("a",)), BALANCED, (), Labels(("a", "b"), "multi", weights=(2 / 4, 2 / 2))),
    ],
)
def test_labels_are_those_of_the_file(
    labels: Any, config: ClassificationConfig, fixed: tuple[str, ...], expected: Labels
) -> None:
    train = reading(*labels)
    assert Classification.learn(train, config, fixed) == expected
    paired = replace(train, examples=tuple(replace(example, pair="b") for example in train.examples))
    assert Classification.learn(paired, config, fixed) == replace(expected, pairs=True)


@pytest.mark.parametrize(
    ("labels", "gold", "targets"),
    [
        (SETS, (("b",), ()), {"classes": [[0, 1], [0, 0]]}),
        (Labels((), "number", scale=2.0, shift=1.0), (1.0, 4.0), {"score": [0, 1.5]}),
    ],
)
def test_targets_by_hand(labels: Labels, gold: Any, targets: dict[str, Any]) -> None:
    made = task(labels).encode(reading(*gold).examples, TEXT, labeled=True).targets
    assert {name: values.tolist() for name, values in made.items()} == targets


@pytest.mark.parametrize(
    ("labels", "fixed", "message", "hint"),
    [
        ((None, "a"), (), "no labels", "train on a file with labels"),
        (("a", "a"), (), "every example of made.csv is 'a'", "--label COLUMN"),
        ((2.0, 2.0), (), "every example of made.csv is '2.0'", "--label COLUMN"),
        (("1", "1"), ("0", "1"), "nothing to learn", "give the whole file, with 0, 1"),
    ],
)
def test_nothing_to_learn_is_an_error(labels: tuple[Any, ...], fixed: tuple[str, ...], message: str, hint: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        Classification.learn(reading(*labels), ClassificationConfig(), fixed)
    assert hint in str(caught.value.hint)


def test_an_unknown_label_names_the_nearest() -> None:
    with pytest.raises(DataError, match=r"example 1: label 'positve' \(2 in the file\)") as caught:
        task(Labels(("negative", "positive"))).check(reading("positive", "positve", "positve"))
    assert "did you mean 'positive'?" in str(caught.value.hint)


def test_both_orders_of_a_pair_are_trained_on_if_asked() -> None:
    pair = (ClassificationExample("0", "x", "y", "a"),)
    assert task(CLASSES).training_examples(pair) == pair
    swapped = task(CLASSES, swap_pairs=True).training_examples(pair)
    assert swapped == (*pair, ClassificationExample("0", "y", "x", "a"))


def rows(**targets: Any) -> TaskRows:
    everything = torch.arange(2)
    return TaskRows("made", everything, everything, {name: torch.tensor(value) for name, value in targets.items()})


@pytest.mark.parametrize(
    ("labels", "targets", "expected"),
    [
        (CLASSES, {"class": [0, 1]}, 2 * math.log(2)),
        (Labels(("a", "b"), weights=(0.5, 3.0)), {"class": [0, 1]}, 3.5 * math.log(2)),
        (Labels(("a", "b", "c"), "multi"), {"classes": [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]}, 6 * math.log(2)),
        (SCORES, {"score": [1.0, -2.0]}, 5.0),
    ],
)
def test_the_loss_of_even_outputs_by_hand(labels: Labels, targets: dict[str, Any], expected: float) -> None:
    head = task(labels).head(build_config(hidden_size=4), 0.0)
    torch.nn.init.zeros_(head.output.weight)
    torch.nn.init.zeros_(head.output.bias)
    loss, outputs = head(torch.randn(2, 3, 4), make_batch([[2, 5, 3], [2, 6, 3]]), rows(**targets))
    assert float(loss.detach()) == pytest.approx(expected)
    assert outputs["logits"].shape == (2, max(1, len(labels.names)))


@pytest.mark.parametrize(
    ("config", "state_of"),
    [
        ({"head": "summary"}, lambda head, hidden: torch.tanh(head.summary(hidden[:, 0]))),
        ({"head": "dense"}, lambda head, hidden: F.gelu(head.summary(hidden[:, 0]))),
        ({"pooling": "mean"}, lambda head, hidden: torch.stack([hidden[0].mean(0), hidden[1, :2].mean(0)])),
    ],
)
def test_the_state_by_hand(config: dict[str, Any], state_of: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    head = task(CLASSES, **config).head(build_config(hidden_size=4), 0.0)
    batch = token_batch([5, 2])
    # What padding holds must not matter.
    hidden = torch.randn(2, 5, 4).masked_fill(~batch.attention_mask[..., None], float("nan"))
    _, outputs = head(hidden, batch, rows())
    torch.testing.assert_close(outputs["logits"], head.output(state_of(head, hidden)).detach())


def predicted(made: Classification, *logits: list[float]) -> list[dict[str, Any]]:
    examples = [ClassificationExample(str(n), "x") for n in range(len(logits))]
    features = made.encode(examples, TEXT, labeled=False)
    return made.predict(examples, features, [{"logits": np.array(row, np.float32)} for row in logits])


def test_predictions_by_hand() -> None:
    (one,) = predicted(task(CLASSES), [0.0, math.log(3)])
    assert (one["label"], one["probabilities"]) == ("b", {"a": 0.25, "b": 0.75})
    (several,) = predicted(task(SETS), [math.log(3), -math.log(3)])
    assert (several["labels"], several["probabilities"]) == (["a"], {"a": 0.75, "b": 0.25})
    (number,) = predicted(task(Labels((), "number", scale=5.0, shift=1.0)), [0.5])
    assert number["score"] == pytest.approx(3.5)


def test_mistakes_come_worst_first() -> None:
    made = task(CLASSES)
    wrong = made.mistakes(reading("a", "a", "b").examples, predicted(made, [0.0, 1.0], [0.0, 4.0], [0.0, 9.0]))
    assert [(record["id"], record["gold"]) for record in wrong] == [("1", "a"), ("0", "a")]
    assert wrong[0]["badness"] == pytest.approx(math.log(1 + math.exp(4)), rel=1e-3)
    several = task(SETS)
    (record,) = several.mistakes(reading(("a",), ("a", "b")).examples, predicted(several, [math.log(3)] * 2, [1.0, 1.0]))
    assert (record["id"], record["badness"]) == ("0", pytest.approx(-math.log(0.75) - math.log(0.25)))
    scores = task(SCORES)
    (record,) = scores.mistakes(reading(1.0, 2.0).examples, predicted(scores, [1.5], [2.0]))
    assert (record["id"], record["badness"]) == ("0", 0.5)


def test_scores_are_glue_s() -> None:
    made = task(Labels(("0", "1")), ("matthews", "accuracy", "f1"))
    scores = made.score(reading("1", "1", "0", "0").examples, predicted(made, [0, 1], [1, 0], [1, 0], [1, 0]))
    # One of two positives found, nothing called wrongly: (1 x 2 - 0) / sqrt(1 x 2 x 2 x 3).
    assert scores.values == pytest.approx({"matthews": 2 / math.sqrt(12), "accuracy": 0.75, "f1": 2 / 3})


@pytest.mark.parametrize(
    ("labels", "gold", "logits", "failure"),
    [
        (CLASSES, "ab", ([0, 1], [0, 2]), "every prediction is b"),
        (CLASSES, "ab", ([0, 1], [2, 0]), None),
        (CLASSES, "bb", ([0, 1], [0, 2]), None),  # each example is b
        (SCORES, (0.0, 1.0), ([0.5], [0.5]), "every prediction is about 0.5"),
        (SCORES, (0.0, 1.0), ([0.5], [0.9]), None),
        (SCORES, (0.5, 0.5), ([0.5], [0.5]), None),
    ],
)
def test_the_same_answer_everywhere_is_a_failure(labels: Labels, gold: Any, logits: Any, failure: str | None) -> None:
    made = task(labels)
    assert made.failure(reading(*gold).examples, predicted(made, *logits)) == failure
