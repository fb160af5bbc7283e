"""Words and the probability of each."""

from __future__ import annotations

import pytest

from discern.scoring.detection import Detection
from discern.scoring.words import overlapping, word_probabilities, words_of


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
