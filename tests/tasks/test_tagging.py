"""Tagging from sentences to scores."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from discern.data.tokenizer import load_tokenizer, special_tokens
from discern.errors import DataError
from discern.models.config import build_config
from discern.tasks.base import Labels, Reading, TaggingExample, TextEncoder
from discern.tasks.features import IGNORED, Features, TaskRowsInOrder
from discern.tasks.tagging import Tagging, TaggingConfig
from tests.small.tokenizers import GEMMA_NAMES, ROBERTA_NAMES, bpe, gemma, roberta, stated, unigram, written
from tests.tasks.support import text_encoder

METRICS = ("f1", "precision", "recall", "accuracy")
TEXT = text_encoder("abcdefghijklmnop", words=("the", "sees"))


def sentence(words: str, tags: str | None = None, identity: str = "0") -> TaggingExample:
    return TaggingExample(identity, tuple(words.split(" ")), tuple(tags.split()) if tags is not None else None)


def read(*examples: TaggingExample) -> Reading[TaggingExample]:
    return Reading(examples, "a file")


def make(*train: TaggingExample, **options: Any) -> Tagging:
    config = TaggingConfig(**options)
    return Tagging("ner", config, METRICS, Tagging.learn(read(*train), config, ()))


def outputs_saying(task: Tagging, features: Features, tags: Sequence[str]) -> list[dict[str, Any]]:
    """As if a head were sure of these tags (in the trained scheme) of each example, and said anything where it is not asked."""
    random = np.random.default_rng(0)
    outputs = []
    for row, example in enumerate(features.example):
        words = features.places["word"][row]
        logits = random.normal(size=(len(words), len(task.labels.names))).astype(np.float32)
        for token in np.flatnonzero(words >= 0):
            logits[token] = 0
            logits[token, task.labels.names.index(tags[example].split()[words[token]])] = 9
        outputs.append({"logits": logits})
    return outputs


def predict(task: Tagging, examples: Sequence[TaggingExample], *tags: str) -> list[dict[str, Any]]:
    features = task.encode(examples, TEXT, labeled=False)
    return task.predict(examples, features, outputs_saying(task, features, tags))


def test_every_type_has_all_four_prefixes_and_the_scheme_is_kept() -> None:
    labels = Tagging.learn(read(sentence("a b c", "I-A I-A O"), sentence("a b", "I-B-C B-B-C")), TaggingConfig(), ())
    names = ("B-A", "B-B-C", "E-A", "E-B-C", "I-A", "I-B-C", "O", "S-A", "S-B-C")
    assert labels == Labels(names, "tags", scheme="iob1")
    assert Tagging.learn(read(sentence("a b", "B I")), TaggingConfig(), ()).names == ("B", "E", "I", "O", "S")


def test_tags_that_mark_no_spans_are_kept_and_scored_by_accuracy() -> None:
    examples = [sentence("a b c", "NN VB NN"), sentence("a", "VB", "1")]
    task = make(*examples)
    assert task.labels == Labels(("NN", "VB"), "tags", scheme="none")
    assert task.metrics == ("accuracy",)
    predictions = predict(task, examples, "NN VB VB", "VB")
    assert predictions[0]["tags"] == ["NN", "VB", "VB"]
    assert "spans" not in predictions[0]
    assert task.score(examples, predictions).values == {"accuracy": 3 / 4}
    (mistake,) = task.mistakes(examples, predictions)
    assert (mistake["id"], mistake["badness"], mistake["gold"]) == ("0", 1, ["NN", "VB", "NN"])


def test_nothing_to_learn() -> None:
    with pytest.raises(DataError, match=r"a file, example 0: the sentence has no tags"):
        Tagging.learn(read(sentence("a")), TaggingConfig(), ())
    for tags in ("O O", "NN NN"):
        with pytest.raises(DataError, match=r"(?s)there is nothing to learn.*--tags COLUMN"):
            Tagging.learn(read(sentence("a b", tags)), TaggingConfig(), ())
    # One slip must not make parts of speech of a file of spans.
    with pytest.raises(DataError, match=r"example 0: tag 'BX' \(1 in the file\) is neither 'O' nor of the form 'B-TYPE'"):
        Tagging.learn(read(sentence("a b c", "B-X O BX")), TaggingConfig(), ())


@pytest.mark.parametrize(
    ("train", "known", "unknown", "message"),
    [
        ("B-PER I-PER O", "S-PER O E-PER", "O B-PERS", r"(?s)tag 'B-PERS' \(1 in the file\).*did you mean 'B-PER'"),
        ("B-PER I-PER O", "U-PER O L-PER", "O NN", "tag 'NN' .*, whose tags are B-PER, E-PER, I-PER, O, S-PER"),
        ("NN VB NN", "VB VB VB", "NN NNS", "tag 'NNS' .* does not occur in the training file, whose tags are NN, VB"),
    ],
)
def test_further_files_may_hold_new_tags_of_known_types_only(train: str, known: str, unknown: str, message: str) -> None:
    task = make(sentence("a b c", train))
    task.check(read(sentence("a b c", known)))
    with pytest.raises(DataError, match=message):
        task.check(read(sentence("a b", unknown)))


def test_rows_by_hand() -> None:
    example = sentence("abc the de \x07 fgh", "B-X I-X O B-Y B-Y")
    task = make(example, sequence_length=8)
    assert task.labels.names == ("B-X", "B-Y", "E-X", "E-Y", "I-X", "I-Y", "O", "S-X", "S-Y")
    features = task.encode([example], TEXT, labeled=True)
    assert [[TEXT.tokenizer.id_to_token(id) for id in features.input_ids[row]] for row in range(3)] == [
        ["[CLS]", "a", "##b", "##c", "the", "d", "##e", "[SEP]"],
        ["[CLS]", "the", "d", "##e", "[UNK]", "[SEP]"],
        ["[CLS]", "d", "##e", "[UNK]", "f", "##g", "##h", "[SEP]"],
    ]
    # 'de' stands best in the second window, the word of which nothing is left in the third.
    places = [[-1, 0, -1, -1, 1, -1, -1, -1], [-1, -1, 2, -1, -1, -1], [-1, -1, -1, 3, 4, -1, -1, -1]]
    classes = {-1: IGNORED, 0: 0, 1: 2, 2: 6, 3: 8, 4: 8}  # B-X E-X O S-Y S-Y
    for row, expected in enumerate(places):
        assert features.places["word"][row].tolist() == expected
        assert features.targets["tags"][row].tolist() == [classes[word] for word in expected]
        assert not features.token_types[row].any()
    assert features.example.tolist() == [0, 0, 0]
    assert features.notes == ("1 of 1 sentences are longer than 8 tokens and were split into windows",)
    assert predict(task, [example], "B-X E-X O S-Y S-Y")[0]["tags"] == list(example.tags or ())
    assert task.encode([example], TEXT, labeled=False).targets == {}


@pytest.mark.parametrize(("made", "names"), [(roberta, ROBERTA_NAMES), (gemma, GEMMA_NAMES), (bpe, {}), (unigram, {})])
def test_words_are_read_as_in_running_text(made: Callable[[], Tokenizer], names: dict[str, str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(written(tmp_path, made(), **stated(names)))
    text = TextEncoder(tokenizer, special_tokens(tokenizer))
    words = ("the", "quick", "cat's", ",", "the", "東", "京", "fox")
    features = make(sentence("a b", "B-A O")).encode([TaggingExample("0", words)], text, labeled=False)
    places = features.places["word"][0]
    starts = [*np.flatnonzero(places >= 0), len(places) - 1]
    pieces = [features.input_ids[0][start:stop].tolist() for start, stop in itertools.pairwise(starts)]
    before = ["" if number == 0 or word in "東京" else " " for number, word in enumerate(words)]
    assert pieces == list(text.ids([space + word for space, word in zip(before, words, strict=True)]))


def test_a_word_longer_than_a_row_keeps_its_first_pieces() -> None:
    examples = [sentence("a abcdefgh a", "O B-X O")]
    task = make(*examples, sequence_length=8)
    features = task.encode(examples, TEXT, labeled=False)
    assert features.input_ids.lengths.max() == 8
    assert "1 word of more than 6 tokens, cut to the first 6" in features.notes
    assert predict(task, examples, "O S-X O")[0]["tags"] == ["O", "B-X", "O"]


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ("B-X I-X O B-X", "B-X I-X O B-X"),
        ("I-X B-X O I-X", "I-X I-X O I-X"),
        ("B-X E-X O S-X", "B-X E-X O S-X"),
        ("B-X L-X O U-X", "B-X E-X O S-X"),
    ],
)
def test_predictions_come_in_the_scheme_of_the_training_file(train: str, expected: str) -> None:
    # The prediction begins with I: read as conlleval reads it.
    (prediction,) = predict(make(sentence("a b c d", train)), [sentence("a b c d")], "I-X E-X O S-X")
    assert prediction["tags"] == expected.split()
    assert prediction["spans"] == [[0, 2, "X"], [3, 4, "X"]]
    assert list(prediction) == ["id", "words", "tags", "spans", "probabilities", "logits"]
    # e^9 against five classes at e^0: O and the four prefixes of one type.
    assert prediction["probabilities"] == [pytest.approx(np.exp(9) / (np.exp(9) + 4), abs=1e-6)] * 4


def test_scores_by_hand_with_iob1_and_a_change_of_type() -> None:
    gold = sentence("a b c d e", "I-A I-B O I-A B-A")
    task = make(gold)
    predictions = predict(task, [gold], "B-A E-A O S-A S-A")
    other_scheme = sentence("a b c d e", "S-A S-B O S-A S-A")
    assert task.score([other_scheme], predictions) == task.score([gold], predictions)
    # Gold (0,1,A) (1,2,B) (3,4,A) (4,5,A); predicted (0,2,A) (3,4,A) (4,5,A).
    assert task.score([gold], predictions).values == pytest.approx(
        {"f1": 4 / 7, "precision": 2 / 3, "recall": 1 / 2, "accuracy": 4 / 5}
    )
    (mistake,) = task.mistakes([gold], predictions)
    assert mistake["badness"] == 3
    assert (mistake["missed"], mistake["invented"]) == ([[0, 1, "A"], [1, 2, "B"]], [[0, 2, "A"]])
    assert (mistake["text"], mistake["gold"]) == ("a b c d e", ["I-A", "I-B", "O", "I-A", "B-A"])


def test_the_worst_mistakes_come_first() -> None:
    examples = [
        sentence("a b c d", "B-A O O O", "one"),
        sentence("a b c d", "B-A O B-A O", "two"),
        sentence("a b c d", "B-A I-A I-A O", "right"),
        sentence("a b c d", "B-A I-A I-A I-A", "wide"),
    ]
    task = make(*examples)
    predictions = predict(task, examples, "O O O O", "O O O O", "B-A I-A E-A O", "O O O O")
    badness = {mistake["id"]: mistake["badness"] for mistake in task.mistakes(examples, predictions)}
    assert list(badness.items()) == [("two", 2), ("wide", 1), ("one", 1)]


def test_failures_are_named() -> None:
    examples = [sentence("a b", "B-A O"), sentence("a", "O", "1")]
    task = make(*examples)
    assert task.failure(examples, predict(task, examples, "O O", "O")) == "no span is predicted: every word is O"
    assert task.failure(examples, predict(task, examples, "S-A S-A", "S-A")) == "every word is B-A"
    assert task.failure(examples, predict(task, examples, "S-A O", "O")) is None
    without = [sentence("a b", "O O"), sentence("a", "O", "1")]
    assert task.failure(without, predict(task, without, "O O", "O")) is None, "there is no span"


def test_loss_is_the_sum_over_tagged_words() -> None:
    examples = [sentence("abc the", "B-X O"), sentence("the sees the abc d e", "O O O B-X I-X O", "1")]
    task = make(*examples)
    features = task.encode(examples, TEXT, labeled=True)
    batch = TaskRowsInOrder({"ner": features}).batch(np.arange(2), np.arange(2))
    head = task.head(build_config(hidden_size=4), 0.0)
    torch.nn.init.zeros_(head.output.weight)
    torch.nn.init.zeros_(head.output.bias)
    # Targets may be shorter than the batch.
    for length in (batch.input_ids.shape[1], 40):
        loss, outputs = head(torch.randn(2, length, 4), batch, batch.groups[0])
        torch.testing.assert_close(loss, 8 * torch.tensor(5.0).log())
        assert outputs["logits"].shape == (2, length, 5)
    assert task.items(batch.groups[0]) == 8
