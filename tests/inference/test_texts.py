"""Texts to check, sentences with marked wrong words, and the words of a text."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from discern.errors import DataError
from discern.inference.detection import Detection
from discern.inference.detection_evaluation import word_probabilities
from discern.inference.texts import WrongSpan, overlapping, read_checked, read_texts, words_of


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
        ('{"text": 7}', "a.jsonl:2: 'text' is not a text but 7"),
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
        ("The [[ ]] it.", "a.txt:1: the brackets at character 5 contain ' '"),
        ("The [[a [[b]] it.", "a.txt:1: the brackets at character 5 contain 'a [[b'"),
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
        ('"wrong": [[0, 30]]', "span 0 to 30 has no word of the text of 11 characters"),
        ('"wrong": [[3, 4]]', "span 3 to 4 has no word"),
        ('"wrong": [[4, 4]]', "span 4 to 4 has no word"),
        ('"wrong": [["3", 4]]', "'wrong.0.start': input should be a valid integer"),
        ('"wrong": [[true, 4]]', "'wrong.0.start': input should be a valid integer"),
        ('"wrong": [[4, 7, "typo", 1]]', "'wrong.0': input should be a valid dictionary"),
        ('"wrong": [4]', "'wrong.0': input should be a valid dictionary"),
        ('"wrong": [{"start": 4}]', "'wrong.0.end' is missing"),
        ('"wrong": "dog"', "'wrong': input should be a valid list"),
        ('"right": []', "'wrong' is missing"),
    ],
)
def test_wrong_spans_are_named(wrong: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'\n{{"text": "The dog it.", {wrong}}}\n')
    with pytest.raises(DataError) as caught:
        list(read_checked(tmp_path / "a.jsonl"))
    assert "a.jsonl:2" in caught.value.message
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" \t ", []),
        ("The cat sat.", ["The", "cat", "sat", "."]),
        ("They're the dogs' 'own'", ["They're", "the", "dogs", "'", "'", "own", "'"]),
        ("don’t stop", ["don’t", "stop"]),
        ("in 1995, 3.5 %", ["in", "1995", ",", "3", ".", "5", "%"]),
        ("snake_case a-b", ["snake_case", "a", "-", "b"]),
        ("我爱北京 ok", ["我", "爱", "北", "京", "ok"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("cafe\u0301 x", ["cafe\u0301", "x"]),
        ("في مدينة", ["في", "مدينة"]),
        ("a'", ["a", "'"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert [text[start:end] for start, end in words_of(text)] == words


def test_a_word_is_as_suspicious_as_its_worst_token() -> None:
    text = "The elephants ate."
    offsets = [(0, 3), (4, 7), (7, 9), (9, 13), (14, 17), (17, 18)]
    detection = Detection(text, ["the", "ele", "##ph", "##ants", "ate", "."], offsets, [0.1, 0.2, 0.9, 0.3, 0.4, 0.05])
    assert word_probabilities(detection, words_of(text)) == [0.1, 0.9, 0.4, 0.05]


def test_tokens_that_span_blanks_or_several_words_or_nothing() -> None:
    text = "ab cd e"
    # A token with the blank before it, one over two words, and one without characters.
    detection = Detection(text, ["ab", " c", "d e", ""], [(0, 2), (2, 4), (4, 7), (7, 7)], [0.1, 0.2, 0.6, 0.99])
    assert word_probabilities(detection, words_of(text)) == [0.1, 0.6, 0.6]


def test_a_word_that_the_tokenizer_drops_is_not_suspicious() -> None:
    detection = Detection("a \u200b b", ["a", "b"], [(0, 1), (4, 5)], [0.7, 0.8])
    assert word_probabilities(detection, words_of("a \u200b b")) == [0.7, 0.0, 0.8]


def test_overlapping_words() -> None:
    words = words_of("one two three")
    assert overlapping(words, (4, 7)) == [1]
    assert overlapping(words, (2, 5)) == [0, 1]
    assert overlapping(words, (3, 4)) == []
