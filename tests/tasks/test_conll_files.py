"""Columns of words and tags: made-up files, and the published ones up to their scores."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from discern.data.tokenizer import load_tokenizer, special_tokens
from discern.errors import ConfigError, DataError
from discern.finetuning.plan import find_splits
from discern.tasks import tasks
from discern.tasks.base import Definition, TaggingExample, TextEncoder, tag_counts
from discern.tasks.features import IGNORED
from discern.tasks.readers.conll import read_conll
from discern.tasks.tagging import Tagging, TaggingConfig
from discern.tasks.tags import spans_of
from tests.tasks.data_folder import data_folder, write


def test_columns_by_spaces_with_document_marks_and_no_blank_line_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("-DOCSTART- -X- O\n\nAda NNP  B-PER\nsings VBZ O\n\n\n \nIt PRP O\nrains VBZ O")
    reading = read_conll(path)
    assert [(example.id, example.words, example.tags) for example in reading.examples] == [
        ("0", ("Ada", "sings"), ("B-PER", "O")),
        ("1", ("It", "rains"), ("O", "O")),
    ]
    assert reading.places == (f"{path}:3", f"{path}:8")
    assert reading.notes == ("2 tags in scheme IOB2",)
    assert read_conll(write(path, "a DT", "b NN")).notes == ("2 tags that mark no spans",)


def test_a_file_of_words_alone_has_no_tags(tmp_path: Path) -> None:
    path, ner = write(tmp_path / "test.txt", "Ada", "sings"), tasks.load("ner")
    assert ner.read(path, "test", TaggingConfig()).examples[0].tags is None
    with pytest.raises(ConfigError, match=r"the column of the tags \(-1\) is also that of the words \(0\)"):
        ner.read(path, "train", TaggingConfig())


def test_any_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "1 Ada NNP B-PER", "2 sings VBZ O")
    (example,) = read_conll(path, word_column=1, tag_column=2).examples
    assert (example.words, example.tags) == (("Ada", "sings"), ("NNP", "VBZ"))
    assert read_conll(path, word_column=-3, tag_column=None).examples[0].tags is None
    with pytest.raises(ConfigError, match="no tag column 4") as error:
        read_conll(path, tag_column=4)
    assert "choose 0 to 3" in str(error.value)


def test_tabs_part_columns_where_there_are_any_and_words_keep_their_spaces(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "New York\tB-LOC", "\u00a0x\tO", "\u3000\tO", "# id = 7", "", "y\tO", end="\r\n")
    assert [example.words for example in read_conll(path).examples] == [("New York", "\u00a0x", "\u3000"), ("y",)]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("multiconer.conll", ["# id 1f\tdomain=train", "x _ _ B-A", "# _ _ O", "", "# id 2\tdomain=train", "y _ _ O"]),
        ("two.txt", ["# newdoc", "x B-A", "# O", "", "# newdoc", "y O"]),
        ("three.txt", ["# sent_id 2", "x NN B-A", "# # O", "", "# sent_id 3", "y NN O"]),
        ("ud.conllu", ["#text=x #", "1\tx\tB-A", "2-3\t#s\t_", "2\t#\tO", "", "# a\tb\tO", "1\ty\tO"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_comments_are_told_from_the_word(tmp_path: Path, name: str, lines: list[str]) -> None:
    reading = read_conll(write(tmp_path / name, *lines), word_column=1 if name == "ud.conllu" else 0)
    assert [(example.words, example.tags) for example in reading.examples] == [(("x", "#"), ("B-A", "O")), (("y",), ("O",))]
    assert (reading.problems[0].kind, reading.problems[0].count) == ("comment line, left out", 2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["Ada B-PER", "sings"], r"a\.txt:2 has 1 columns, but line 1 has 2"),
        (["Ada\t"], r"a\.txt:1: an empty column"),
        (["", "-DOCSTART- O"], "has no sentences"),
    ],
)
def test_faults_name_the_line(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_conll(write(tmp_path / "a.txt", *lines))


def test_a_character_a_line_with_its_place_in_the_word(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "男0\tB-PER.NOM", "友1\tI-PER.NOM", "00\tO", "x12\tO", "\ufffd\ufffd0\tO")
    reading = read_conll(path, characters=True)
    assert reading.examples[0].words == ("男", "友", "0", "x", "\ufffd\ufffd")
    assert any("are removed" in note for note in reading.notes)
    path = write(tmp_path / "b.txt", "男\tB-PER", "友\tI-PER")
    assert read_conll(path, characters=True).examples[0].words == ("男", "友")


def test_conll_2000_has_the_published_numbers() -> None:
    # Tjong Kim Sang and Buchholz 2000, table 1 and section 4.
    reading = read_conll(data_folder("conll2000") / "train.txt")
    assert len(reading.examples) == 8936
    assert sum(len(example.words) for example in reading.examples) == 211_727
    assert sum(len(spans_of(example.tags or ())) for example in reading.examples) == 106_978
    assert reading.notes == ("22 tags in scheme IOB2",)
    assert not reading.problems


def test_weibo_has_the_numbers_of_its_readme() -> None:
    reading = read_conll(data_folder("zh", "weibo-ner", "weiboNER_2nd_conll.train"), characters=True)
    assert len(reading.examples) == 1350
    assert sum(len(example.words) for example in reading.examples) == 73_778
    tags = tag_counts(reading.examples)
    assert [tags[f"B-{kind}"] for kind in ("PER.NAM", "PER.NOM", "GPE.NAM")] == [574, 766, 205]
    # Some spans of the file begin with I-, which conlleval counts and the readme doesn't.
    types = Counter(span.type for example in reading.examples for span in spans_of(example.tags or ()))
    assert [types[kind] for kind in ("PER.NAM", "PER.NOM", "GPE.NAM")] == [578, 772, 205]


@pytest.mark.parametrize(
    ("name", "folder", "vocabulary", "sentences", "labels"),
    [
        # Eleven types of chunk, each with four prefixes, and O.
        ("chunk", ["conll2000"], "bert-uncased-en.txt", 2012, 45),
        ("weibo-ner", ["zh", "weibo-ner"], "bert-zh.txt", 270, 33),
    ],
)
def test_every_word_of_a_real_file_gets_its_tag_back(
    name: str, folder: list[str], vocabulary: str, sentences: int, labels: int
) -> None:
    definition: Definition[TaggingExample] = tasks.load(name)
    config = TaggingConfig(sequence_length=64)
    paths = find_splits(definition, data_folder(*folder))
    train, test = (definition.read(paths[split], split, config) for split in ("train", "test"))
    task = Tagging(name, config, definition.metrics, Tagging.learn(train, config, ()))
    task.check(test)
    tokenizer = load_tokenizer(data_folder("vocab", vocabulary))
    features = task.encode(test.examples, TextEncoder(tokenizer, special_tokens(tokenizer)), labeled=True)
    assert len(task.labels.names) == labels
    assert len(test.examples) == sentences < len(features)
    assert features.input_ids.lengths.max() <= 64
    targets = features.targets["tags"]
    assert (targets.values != IGNORED).sum() == sum(len(example.words) for example in test.examples)
    certain = np.eye(labels, dtype=np.float32)
    outputs = [{"logits": certain[np.maximum(targets[row], 0)]} for row in range(len(features))]
    predictions = task.predict(test.examples, features, outputs)
    assert task.score(test.examples, predictions).values == dict.fromkeys(definition.metrics, 1.0)
    assert task.mistakes(test.examples, predictions) == []
