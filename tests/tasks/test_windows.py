"""Windows of long contexts, and the characters of their tokens."""

from __future__ import annotations

import pytest

from discern.tasks.answer_spans import ContextWindow, RowBudget, cut_windows, located_tokens, row_budget
from discern.tasks.examples import Answer
from tests.tasks.question_support import text_encoder

TEXTS = [
    "Élan  vital: the Rhône.",
    "Cafe\u0301 au lait, nai\u0308ve\u0323 x",
    "北京 is  a city北京市。",
    "I 👍🏽 it 😀!",
    "İstanbul \u00a0 ǅ ß\u3000end",
    "a\u200db c\x00d \ufffd\ne\tf",
    "ﬁne ½ 한국어",
    "x",
]


def test_windows_by_hand() -> None:
    assert cut_windows(10, 4, 2) == [
        ContextWindow(0, 4, 0, 3),
        ContextWindow(2, 6, 3, 5),
        ContextWindow(4, 8, 5, 7),
        ContextWindow(6, 10, 7, 10),
    ]
    # The last is shorter: token 4 has two tokens on its lesser side in neither, and more on the whole in the first.
    assert cut_windows(7, 5, 3) == [ContextWindow(0, 5, 0, 4), ContextWindow(3, 7, 4, 7)]
    assert cut_windows(5, 5, 3) == [ContextWindow(0, 5, 0, 5)]
    assert cut_windows(6, 5, 5) == [ContextWindow(0, 5, 0, 5), ContextWindow(5, 6, 5, 6)]
    assert cut_windows(0, 5, 3) == [ContextWindow(0, 0, 0, 0)]


@pytest.mark.parametrize(("tokens", "length", "stride"), [(1, 1, 1), (50, 7, 3), (51, 7, 7), (400, 100, 37), (9, 3, 1)])
def test_every_token_is_best_in_the_window_that_shows_most_around_it(tokens: int, length: int, stride: int) -> None:
    windows = cut_windows(tokens, length, stride)
    for token in range(tokens):
        shown = {
            number: min(token - window.start, window.stop - 1 - token) + 0.01 * (window.stop - window.start)
            for number, window in enumerate(windows)
            if window.start <= token < window.stop
        }
        best = [number for number, window in enumerate(windows) if window.best_start <= token < window.best_stop]
        assert best == [max(shown, key=lambda number: (shown[number], -number))]
    assert windows[0].start == 0
    assert windows[-1].stop == tokens
    assert [window.start for window in windows] == [number * stride for number in range(len(windows))]


def test_shares_of_a_row() -> None:
    shares = {"max_question": 64, "stride": 128, "max_answer": 30}
    assert row_budget(10, 512, **shares) == RowBudget(10, 499, 128)
    assert row_budget(100, 384, **shares) == RowBudget(64, 317, 128)
    assert row_budget(10, 128, **shares) == RowBudget(10, 115, 85)
    assert row_budget(100, 64, **shares) == RowBudget(21, 40, 20)
    for length in range(8, 80):
        for question in range(40):
            kept, window, stride = row_budget(question, length, **shares)
            assert kept + window + 3 == length
            assert window >= 1
            assert 1 <= stride <= window


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_every_character_belongs_to_a_token(text: str, lowercase: bool) -> None:
    (tokens,) = located_tokens([text], text_encoder(*TEXTS, words=["the", "vital"], lowercase=lowercase))
    covered = {place for start, end in zip(tokens.starts, tokens.ends, strict=True) for place in range(start, end)}
    # What is dropped by itself between two spaces touches no token.
    alone = {place for place, character in enumerate(text) if character == "\ufffd"}
    assert {place for place, character in enumerate(text) if not character.isspace()} - alone <= covered
    assert len(tokens.ids) == len(tokens.starts) == len(tokens.ends)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (TEXTS[0], "Élan  vital"),
        (TEXTS[0], "Rhône"),
        (TEXTS[1], "Cafe\u0301"),
        (TEXTS[1], "nai\u0308ve\u0323"),
        (TEXTS[2], "北京市"),
        (TEXTS[2], "is  a city"),
        (TEXTS[3], "👍🏽 it"),
        (TEXTS[3], "😀"),
        (TEXTS[4], "İstanbul"),
        (TEXTS[4], "ß\u3000end"),
        (TEXTS[5], "a\u200db"),
        (TEXTS[6], "½ 한국어"),
    ],
)
def test_answers_are_exact_to_the_character(text: str, answer: str) -> None:
    (tokens,) = located_tokens([text], text_encoder(*TEXTS))
    span = tokens.cover(Answer(answer, text.index(answer)))
    assert span is not None
    assert text[tokens.starts[span[0]] : tokens.ends[span[1]]] == answer


def test_an_answer_inside_a_token_takes_the_whole_token() -> None:
    text = "the vital one"
    (tokens,) = located_tokens([text], text_encoder(text, words=["the", "vital", "one"]))
    assert tokens.cover(Answer("ita", 5)) == (1, 1)
    assert tokens.cover(Answer("e v", 2)) == (0, 1)
    assert tokens.cover(Answer(" ", 3)) is None


def test_a_context_without_tokens() -> None:
    (tokens,) = located_tokens(["\u200d\ufffd"], text_encoder("a"))
    assert len(tokens.ids) == 0
    assert tokens.cover(Answer("\u200d", 0)) is None
