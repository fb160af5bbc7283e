"""Columns of words and tags."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.errors import ConfigError, DataError
from discern.tasks.conll import TAGGING_FILES, read_conll
from discern.tasks.examples import tag_counts
from discern.tasks.metrics.spans import span_counts, total
from discern.tasks.readers.files import split_file
from discern.tasks.tags import detect_scheme, spans_of
from tests.tasks.data_folder import data_folder, write


def test_columns_by_spaces_with_document_marks_and_no_blank_line_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("-DOCSTART- -X- O\n\nAda NNP  B-PER\nsings VBZ O\n\n\n \nIt PRP O\nrains VBZ O")
    reading = read_conll(path)
    assert [(example.id, example.words, example.tags) for example in reading.examples] == [
        ("0", ("Ada", "sings"), ("B-PER", "O")),
        ("1", ("It", "rains"), ("O", "O")),
    ]
    assert reading.notes == ("2 tags in scheme IOB2",)


def test_any_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "1 Ada NNP B-PER", "2 sings VBZ O")
    (example,) = read_conll(path, word_column=1, tag_column=2).examples
    assert (example.words, example.tags) == (("Ada", "sings"), ("NNP", "VBZ"))
    assert read_conll(path, word_column=-3, tag_column=None).examples[0].tags is None
    with pytest.raises(ConfigError, match="no tag column 4") as error:
        read_conll(path, tag_column=4)
    assert "choose 0 to 3" in str(error.value)


def test_tabs_part_columns_where_there_are_any_and_words_keep_their_spaces(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "New York\tB-LOC", "\u00a0x\tO", "# id = 7", "", "y\tO", end="\r\n")
    reading = read_conll(path)
    assert [example.words for example in reading.examples] == [("New York", "\u00a0x"), ("y",)]
    assert "comment line" in reading.problems[0].kind


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("multiconer.conll", ["# id 1f\tdomain=train", "x _ _ B-A", "# _ _ O", "", "# id 2\tdomain=train", "y _ _ O"]),
        ("two.txt", ["# newdoc", "x B-A", "# O", "", "# newdoc", "y O"]),
        ("three.txt", ["# sent_id 2", "x NN B-A", "# # O", "", "# sent_id 3", "y NN O"]),
        ("ud.conllu", ["#text=x #", "1\tx\tB-A", "2\t#\tO", "", "# a\tb\tO", "1\ty\tO"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_comments_are_told_from_the_word(tmp_path: Path, name: str, lines: list[str]) -> None:
    reading = read_conll(write(tmp_path / name, *lines), word_column=1 if name == "ud.conllu" else 0)
    assert [(example.words, example.tags) for example in reading.examples] == [(("x", "#"), ("B-A", "O")), (("y",), ("O",))]
    assert (reading.problems[0].kind, reading.problems[0].count) == ("comment line, left out", 2)


def test_wide_spaces_are_words(tmp_path: Path) -> None:
    (example,) = read_conll(write(tmp_path / "a.txt", "我\tO", "\u3000\tO", "你\tO")).examples
    assert example.words == ("我", "\u3000", "你")


def test_faults_name_the_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.txt:2 has 1 columns, but line 1 has 2"):
        read_conll(write(tmp_path / "a.txt", "Ada B-PER", "sings"))
    with pytest.raises(DataError, match=r"a\.txt:1: an empty column"):
        read_conll(write(tmp_path / "a.txt", "Ada\t"))
    with pytest.raises(DataError, match="has no sentences"):
        read_conll(write(tmp_path / "a.txt", "", "-DOCSTART- O"))


def test_a_character_a_line_with_its_place_in_the_word(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "男0\tB-PER.NOM", "友1\tI-PER.NOM", "00\tO", "x12\tO", "\ufffd\ufffd0\tO")
    reading = read_conll(path, characters=True)
    assert reading.examples[0].words == ("男", "友", "0", "x", "\ufffd\ufffd")
    assert any("are removed" in note for note in reading.notes)
    path = write(tmp_path / "b.txt", "男\tB-PER", "友\tI-PER")
    assert read_conll(path, characters=True).examples[0].words == ("男", "友")


def test_slips_in_the_tags_are_told(tmp_path: Path) -> None:
    reading = read_conll(write(tmp_path / "a.txt", "a B-X", "b O", "c I-X", "d O", "e B-X"))
    assert reading.notes[1] == "spans that begin with I, which IOB2 does not allow: 1, read as by conlleval"
    assert read_conll(write(tmp_path / "a.txt", "a DT", "b NN")).notes == ("2 tags that mark no spans",)


@pytest.mark.parametrize(
    ("split", "sentences", "words", "spans"), [("train", 8936, 211_727, 106_978), ("test", 2012, 47_377, 23_852)]
)
def test_conll_2000_has_the_published_numbers(split: str, sentences: int, words: int, spans: int) -> None:
    # Tjong Kim Sang and Buchholz 2000, table 1 and section 4.
    reading = read_conll(split_file(data_folder("conll2000"), TAGGING_FILES[split], "chunking"))
    assert len(reading.examples) == sentences
    assert sum(len(example.words) for example in reading.examples) == words
    assert detect_scheme(example.tags or () for example in reading.examples) == "iob2"
    assert not reading.problems
    assert sum(len(spans_of(example.tags or ())) for example in reading.examples) == spans


@pytest.mark.parametrize(("split", "sentences", "words"), [("train", 1350, 73_778), ("dev", 270, 14_509), ("test", 270, 14_842)])
def test_weibo_has_the_numbers_of_its_readme(split: str, sentences: int, words: int) -> None:
    reading = read_conll(split_file(data_folder("zh", "weibo-ner"), TAGGING_FILES[split], "Weibo NER"), characters=True)
    assert len(reading.examples) == sentences
    assert sum(len(example.words) for example in reading.examples) == words
    assert {len(word) for example in reading.examples for word in example.words} <= {1, 2}
    if split == "train":
        tags = tag_counts(reading.examples)
        assert [tags[f"B-{kind}"] for kind in ("PER.NAM", "PER.NOM", "GPE.NAM")] == [574, 766, 205]
        # Some spans of the file begin with I-, which conlleval counts and the readme doesn't.
        found = [spans_of(example.tags or ()) for example in reading.examples]
        counts = span_counts(found, found)
        assert [counts[kind].gold for kind in ("PER.NAM", "PER.NOM", "GPE.NAM")] == [578, 772, 205]
        assert total(counts).f1 == 1
