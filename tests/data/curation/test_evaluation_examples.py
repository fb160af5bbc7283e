"""The examples of evaluation files: what counts as one, which texts it has, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from discern.data.curation.contamination import Example, read_examples
from discern.errors import ConfigError, DataError


def written(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


def test_lines_rows_and_objects(tmp_path: Path) -> None:
    lines = written(tmp_path, "a.txt", "\ufeffOne line.\n\nAnother\n")
    assert list(read_examples(lines)) == [Example(1, ("One line.",)), Example(3, ("Another",))]
    table = written(tmp_path, "a.csv", 'id,premise,hypothesis\n7,"A cat,\nasleep.",It sleeps.\n8,A dog.,It runs.\n')
    assert list(read_examples(table)) == [
        Example(2, ("7", "A cat,\nasleep.", "It sleeps.")),
        Example(4, ("8", "A dog.", "It runs.")),
    ]
    objects = written(tmp_path, "a.jsonl", '{"text": "a b", "qas": [{"q": "c"}, {"q": "d", "n": 3}]}\n\n{"text": "e"}\n')
    assert list(read_examples(objects)) == [Example(1, ("a b", "c", "d")), Example(3, ("e",))]


def test_chosen_fields_only(tmp_path: Path) -> None:
    table = written(tmp_path, "a.tsv", "sentence1\tsentence2\tlabel\nx y\tz\t1\n")
    assert [each.texts for each in read_examples(table, ["sentence2"])] == [("z",)]
    objects = written(tmp_path, "a.jsonl", '{"text": "a", "note": "b"}\n{"note": "c"}\n')
    assert [each.texts for each in read_examples(objects, ["text"])] == [("a",), ()]


def test_a_table_without_a_header_and_a_compressed_file(tmp_path: Path) -> None:
    bare = written(tmp_path, "a.tsv", "gj04\t1\t\tThey drank the pub dry.\ngj04\t0\t*\tThey drank the pub.\n")
    assert [each.texts[-1] for each in read_examples(bare)] == ["They drank the pub dry.", "They drank the pub."]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    assert list(read_examples(tmp_path / "a.jsonl.gz")) == [Example(1, ("a",))]
    assert list(read_examples(written(tmp_path, "a.json", '[{"text": "a"}]'))) == [Example(1, ("a",))]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", "", "is empty"),
        ("a.txt", " \n\n", "is empty"),
        ("a.csv", "text,label\n", "has no examples"),
        ("a.jsonl", '{"text": "a"}\n{"text"\n', "jsonl:2: not JSON"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', "jsonl:2: list instead of an object"),
        ("a.json", '{"data": [{"paragraphs": []}]}', "is one JSON object, expected one object per line, or an array"),
        ("a.tsv", "text\tlabel\nshort row\n", "tsv:2: 1 fields, but the header has 2"),
        ("a.bin", "\0" * 20, "is not text"),
    ],
)
def test_what_has_no_examples_is_refused(tmp_path: Path, name: str, content: str, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        list(read_examples(written(tmp_path, name, content)))
    assert name in caught.value.message
    assert caught.value.hint


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.txt cannot be read"):
        list(read_examples(tmp_path / "absent.txt"))
    with pytest.raises(DataError, match="is a folder"):
        list(read_examples(tmp_path))


@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", "text,label\nx y,1\n"), ("a.jsonl", '{"text": "x"}\n{"text": "y"}\n'), ("a.txt", "a line\n")]
)
def test_an_unknown_field_is_refused(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(ConfigError, match=r"has no (field|column) 'txet'") as caught:
        list(read_examples(written(tmp_path, name, content), ["txet"]))
    assert name == "a.txt" or "did you mean 'text'?" in str(caught.value.hint)
