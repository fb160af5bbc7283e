"""The cache of rows: a hit is a miss, whatever decides the rows is in the key, and what cannot be used is passed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from safetensors.numpy import save_file

from discern.data.tokenizer import special_tokens
from discern.finetune import features_cache
from discern.finetune.features_cache import cached_features
from discern.storage.files import partial_name
from discern.tasks import families
from discern.tasks.base import Labels, Task, TextEncoder
from discern.tasks.examples import Answer, ClassificationExample, QuestionExample, TaggingExample
from discern.tasks.features import Column, Features, Ragged
from tests.interop.small_tokenizers import small_tokenizer

LONG = "the model reads the file and returns a tensor of shape " * 6


@dataclass(frozen=True)
class Case:
    """A task and examples of it."""

    task: Task[Any]
    examples: tuple[Any, ...]


def case(family: str, labels: Labels, metric: str, examples: Sequence[Any], **settings: Any) -> Case:
    chosen = families.load(family)
    return Case(chosen("own", chosen.Config(**{"sequence_length": 24, **settings}), (metric,), labels), tuple(examples))


def texts(*labels: Any) -> list[ClassificationExample]:
    return [ClassificationExample(str(place), LONG[place * 7 :], None, label) for place, label in enumerate(labels)]


SINGLE = case("classification", Labels(("bad", "good")), "accuracy", texts("good", "bad", "good"))
CASES = {
    "classes": SINGLE,
    "several classes": case("classification", Labels(("x", "y"), "multi"), "micro_f1", texts(("x",), (), ("x", "y"))),
    "numbers of pairs": case(
        "classification",
        Labels((), "number", scale=2.0, shift=1.0),
        "pearson",
        [ClassificationExample("0", "the file", LONG, 3.0), ClassificationExample("1", "a tensor", "of shape", 1.5)],
    ),
    "tags": case(
        "tagging",
        Labels(("B-X", "E-X", "I-X", "O", "S-X"), "tags", scheme="iob2"),
        "f1",
        [TaggingExample(str(n), tuple(LONG.split()[: 40 - n]), ("B-X", "O") * 20 if not n else ("O",) * 39) for n in range(2)],
    ),
    "questions": case(
        "squad2",
        Labels((), "spans"),
        "exact_match",
        [
            QuestionExample("0", "which file?", LONG, (Answer("the model", 0),), ("the model",), False),
            QuestionExample("1", "none?", "a tensor", (), (), True),
        ],
        sequence_length=40,
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the rows are kept; few examples are worth it here."""
    monkeypatch.setenv("DISCERN_CACHE", str(tmp_path))
    monkeypatch.setattr(features_cache, "_MIN_CACHED", 1)
    return tmp_path / "features"


@pytest.fixture
def text() -> TextEncoder:
    tokenizer = small_tokenizer("wordpiece, lower-cased")
    return TextEncoder(tokenizer, special_tokens(tokenizer))


def assert_equal(one: Features, two: Features) -> None:
    def same(first: Column, second: Column) -> None:
        assert type(first) is type(second)
        pairs = [(first, second)]
        if isinstance(first, Ragged) and isinstance(second, Ragged):
            pairs = [(first.values, second.values), (first.offsets, second.offsets)]
        for left, right in pairs:
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)

    same(one.input_ids, two.input_ids)
    same(one.token_types, two.token_types)
    same(one.example, two.example)
    for left, right in ((one.targets, two.targets), (one.places, two.places)):
        assert left.keys() == right.keys()
        for name in left:
            same(left[name], right[name])
    assert one.notes == two.notes


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.mark.parametrize("labeled", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_hit_is_a_miss(name: str, labeled: bool, text: TextEncoder, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    given = CASES[name]
    missed = cached_features(given.task, given.examples, text, labeled=labeled)
    assert bool(missed.targets) == labeled
    assert len(files(folder)) == 1

    def encode(*_: Any, **__: Any) -> Features:
        raise AssertionError("the rows are in the cache")

    monkeypatch.setattr(given.task, "encode", encode)
    assert_equal(cached_features(given.task, given.examples, text, labeled=labeled), missed)


def test_long_texts_leave_a_note_that_is_kept(text: TextEncoder) -> None:
    for _ in range(2):
        assert "were cut to 24 tokens" in cached_features(SINGLE.task, SINGLE.examples, text, labeled=True).notes[0]


def changed_length(task: Task[Any]) -> Task[Any]:
    return type(task)(task.name, task.config.model_copy(update={"sequence_length": 16}), task.metrics, task.labels)


def changed_labels(task: Task[Any]) -> Task[Any]:
    return type(task)(task.name, task.config, task.metrics, Labels(("good", "bad")))


def test_everything_that_decides_the_rows_is_in_the_key(text: TextEncoder, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    task, examples = SINGLE.task, SINGLE.examples
    cased = small_tokenizer("wordpiece, cased")
    other_word = (replace(examples[0], text=examples[0].text + "!"), *examples[1:])
    other_label = (replace(examples[0], label="bad"), *examples[1:])
    variants: list[tuple[Task[Any], Sequence[Any], TextEncoder, bool]] = [
        (task, examples, text, True),
        (task, examples, text, False),
        (task, other_word, text, True),
        (task, other_label, text, True),
        (task, examples[::-1], text, True),
        (task, examples, TextEncoder(cased, special_tokens(cased)), True),
        (changed_length(task), examples, text, True),
        (changed_labels(task), examples, text, True),
        (task, examples[:2], text, True),  # a debug run keeps the first ones of a file
    ]
    for count, (chosen, rows, encoder, labeled) in enumerate(variants, start=1):
        found = cached_features(chosen, rows, encoder, labeled=labeled)
        assert_equal(found, chosen.encode(rows, encoder, labeled=labeled))
        assert len(files(folder)) == count
    monkeypatch.setattr(features_cache, "_code_digest", lambda _: "another version of the code")
    cached_features(task, examples, text, labeled=True)
    assert len(files(folder)) == len(variants) + 1


def test_few_examples_are_not_kept(text: TextEncoder, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(features_cache, "_MIN_CACHED", 4)
    cached_features(SINGLE.task, SINGLE.examples, text, labeled=True)
    assert files(folder) == []


@pytest.mark.parametrize("damage", ["empty", "cut short", "no tensors", "something else"])
def test_a_damaged_file_is_passed_over_and_written_again(damage: str, text: TextEncoder, folder: Path) -> None:
    right = cached_features(SINGLE.task, SINGLE.examples, text, labeled=True)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    if damage == "no tensors":
        save_file({"x": np.zeros(1)}, path)
    else:
        path.write_bytes({"empty": b"", "cut short": whole[:-9], "something else": b"\xff" * 99}[damage])
    assert_equal(cached_features(SINGLE.task, SINGLE.examples, text, labeled=True), right)
    assert path.read_bytes() == whole


def test_what_a_killed_process_left_is_not_read(text: TextEncoder, folder: Path) -> None:
    right = cached_features(SINGLE.task, SINGLE.examples, text, labeled=True)
    (path,) = folder.iterdir()
    half = folder / partial_name(path.name)
    half.write_bytes(path.read_bytes()[:40])
    path.unlink()
    assert_equal(cached_features(SINGLE.task, SINGLE.examples, text, labeled=True), right)
    assert files(folder) == [path.name]


def test_a_full_disk_leaves_nothing_behind(text: TextEncoder, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: BinaryIO) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("discern.storage.files.sync_file", full)
    found = cached_features(SINGLE.task, SINGLE.examples, text, labeled=True)
    assert_equal(found, SINGLE.task.encode(SINGLE.examples, text, labeled=True))
    assert files(folder) == []


def test_a_folder_that_cannot_be_is_passed_over(text: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("DISCERN_CACHE", str(tmp_path / "file"))
    found = cached_features(SINGLE.task, SINGLE.examples, text, labeled=True)
    assert_equal(found, SINGLE.task.encode(SINGLE.examples, text, labeled=True))
