"""Texts of files, their words, and windows over long texts: that they cover, overlap, and share the tokens out by context."""

from __future__ import annotations

import gzip
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from discern.errors import DataError
from discern.inference.texts import overlapping, read_texts, words_of
from discern.inference.windows import Window, batches, read_in_windows, window_spans


def test_lines_of_plain_text_keep_their_places(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes('\ufeffone\r\n\n {"text": 1} \nlast'.encode())
    found = list(read_texts(tmp_path / "a.txt"))
    assert [(text.number, text.text) for text in found] == [(1, "one"), (2, ""), (3, ' {"text": 1} '), (4, "last")]
    assert found[2].where == f"{tmp_path / 'a.txt'}:3"


@pytest.mark.parametrize(("name", "field"), [("a.jsonl", None), ("a.jsonl.gz", None), ("a.txt", "text")])
def test_json_lines(name: str, field: str | None, tmp_path: Path) -> None:
    content = b'{"text": "o\\u00efne\\ntwo"}\n\n{"id": 3, "text": "a\\ud800"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert [text.text for text in read_texts(tmp_path / name, field)] == ["oïne\ntwo", "", "a\ufffd"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"body": "x"}', "no field 'text' with a text in '{\"body\": \"x\"}'"),
        ('{"text": 7}', "no field 'text' with a text"),
        ("[1]", "no field 'text' with a text"),
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" \t ", []),
        ("They're the dogs' 'own'", ["They're", "the", "dogs", "'", "'", "own", "'"]),
        ("don’t stop", ["don’t", "stop"]),
        ("in 1995, 3.5 %", ["in", "1995", ",", "3", ".", "5", "%"]),
        ("snake_case a-b", ["snake_case", "a", "-", "b"]),
        ("我爱北京 ok", ["我", "爱", "北", "京", "ok"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("cafe\u0301 x", ["cafe\u0301", "x"]),
        ("a'", ["a", "'"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert [text[start:end] for start, end in words_of(text)] == words


def test_overlapping_words() -> None:
    words = words_of("one two three")
    assert [overlapping(words, span) for span in ((4, 7), (2, 5), (3, 4))] == [[1], [0, 1], []]


@pytest.mark.parametrize("reads_ahead", [True, False])
@pytest.mark.parametrize("window_size", [1, 2, 7, 30])
@pytest.mark.parametrize("length", [0, 1, 6, 7, 30, 31, 45, 61, 100])
def test_each_token_counts_once_where_it_has_most_context(length: int, window_size: int, *, reads_ahead: bool) -> None:
    spans = window_spans(length, window_size, reads_ahead=reads_ahead)

    def context(window: range, position: int) -> float:
        left = position - window.start if window.start or not reads_ahead else math.inf
        return min(left, window.stop - 1 - position if window.stop < length and reads_ahead else math.inf)

    assert sorted(window.start + place for window, wanted in spans for place in wanted) == list(range(length))
    assert all(0 < len(window) <= window_size for window, _ in spans)
    for (before, _), (after, _) in itertools.pairwise(spans):
        assert 0 < after.start - before.start <= max(window_size // 2, 1), "neighbors overlap by half"
    for window, wanted in spans:
        for position in (window.start + place for place in wanted):
            assert context(window, position) == max(context(other, position) for other, _ in spans if position in other)


def test_equal_windows_are_computed_once() -> None:
    seen: list[Window] = []

    def compute(windows: list[Window]) -> Iterator[tuple[int, list[int]]]:
        seen.extend(windows)
        yield from ((number, [10 * window.ids[place] for place in window.wanted]) for number, window in enumerate(windows))

    assert read_in_windows([[1, 2], [], [3, 4, 5, 6], [1, 2]], 3, compute) == [[10, 20], [], [30, 40, 50, 60], [10, 20]]
    assert [window.ids for window in seen] == [(1, 2), (3, 4, 5), (4, 5, 6)]


@pytest.mark.parametrize("lengths", [[], [3], [500] * 20, list(range(3, 600, 7)), [3] * 1000, [9000, 3]])
def test_batches_hold_each_row_once_and_stay_small(lengths: list[int]) -> None:
    found = list(batches(lengths))
    assert sorted(number for batch in found for number in batch) == list(range(len(lengths)))
    for batch in found:
        widest = max(lengths[number] for number in batch)
        assert len(batch) == 1 or (len(batch) * widest <= 4096 and len(batch) <= 256)
