"""Texts to judge, and sentences whose wrong words are known."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from discern.errors import DataError
from discern.workflows.detect_input import WrongSpan, read_checked, read_texts


def test_lines_of_plain_text_keep_their_places(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes('\ufeffone\r\n\n {"text": 1} \nlast'.encode())
    found = list(read_texts(tmp_path / "a.txt"))
    assert [(text.number, text.text) for text in found] == [(1, "one"), (2, ""), (3, ' {"text": 1} '), (4, "last")]
    assert found[2].where == f"{tmp_path / 'a.txt'}:3"


@pytest.mark.parametrize(("name", "field"), [("a.jsonl", None), ("a.ndjson", "text"), ("a.txt", "text")])
def test_json_lines(name: str, field: str | None, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"text": "o\\u00efne\\ntwo"}\n\n{"id": 3, "text": "a\\ud800"}\n')
    assert [text.text for text in read_texts(tmp_path / name, field)] == ["oïne\ntwo", "", "a\ufffd"]


def test_compressed_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n'))
    assert [text.text for text in read_texts(tmp_path / "a.jsonl.gz")] == ["one"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"body": "x"}', "a.jsonl:2: no field 'text'; its fields: body"),
        ('{"text": 7}', "a.jsonl:2: 'text' is no text but 7"),
        ("[1]", "a.jsonl:2: a JSON list, expected an object"),
        ("{", "a.jsonl:2: not JSON"),
    ],
)
def test_a_line_that_is_wrong_is_named(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "fine"}}\n{line}\n')
    texts = read_texts(tmp_path / "a.jsonl")
    assert next(texts).text == "fine"
    with pytest.raises(DataError) as caught:
        next(texts)
    assert said in caught.value.message


def test_brackets_stand_around_wrong_words(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The [[eight]] it [a].\n\nAll right.\n[[a b]][[c]]\n")
    found = list(read_checked(tmp_path / "a.txt"))
    assert [text.text for text in found] == ["The eight it [a].", "All right.", "a bc"]
    assert [text.number for text in found] == [1, 3, 4]
    assert [text.wrong for text in found] == [(WrongSpan(4, 9),), (), (WrongSpan(0, 3), WrongSpan(3, 4))]


def test_spans_of_json_lines(tmp_path: Path) -> None:
    spans = '[{"start": 8, "end": 10, "kind": "random"}, [0, 3]]'
    (tmp_path / "a.jsonl").write_text(f'{{"text": "The dog it.", "wrong": {spans}}}\n{{"text": "Fine.", "wrong": []}}\n')
    first, second = read_checked(tmp_path / "a.jsonl")
    assert first.wrong == (WrongSpan(0, 3), WrongSpan(8, 10, "random"))
    assert second.wrong == ()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("The [[eight it.", "a.txt:1: the brackets at character 5 are not closed"),
        ("The [[ ]] it.", "a.txt:1: the brackets at character 5 hold ' '"),
        ("The [[a [[b]] it.", "a.txt:1: the brackets at character 5 hold 'a [[b'"),
    ],
)
def test_wrong_brackets_are_named(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(line)
    with pytest.raises(DataError) as caught:
        list(read_checked(tmp_path / "a.txt"))
    assert said in caught.value.message
    assert "JSON lines" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ('"wrong": [[0, 30]]', "span 0 to 30 holds no word of a text of 11 characters"),
        ('"wrong": [[3, 4]]', "span 3 to 4 holds no word"),
        ('"wrong": [[4, 4]]', "span 4 to 4 holds no word"),
        ('"wrong": [[true, 4]]', "[True, 4] is no span"),
        ('"wrong": [4]', "4 is no span"),
        ('"wrong": [{"start": 4}]', "[4, None] is no span"),
        ('"wrong": "dog"', "'wrong' is dog, no list"),
        ('"right": []', "no list 'wrong'"),
    ],
)
def test_wrong_spans_are_named(wrong: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'\n{{"text": "The dog it.", {wrong}}}\n')
    with pytest.raises(DataError) as caught:
        list(read_checked(tmp_path / "a.jsonl"))
    assert f"a.jsonl:2: {said}" in caught.value.message
