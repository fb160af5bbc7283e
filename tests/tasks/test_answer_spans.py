"""Windows of long contexts, the characters of their tokens, and the best answers."""

from __future__ import annotations

import numpy as np
import pytest

from discern.tasks.base import Answer
from discern.tasks.features import cut_windows
from discern.tasks.questions import Window, best_answers, located_tokens
from tests.tasks.support import text_encoder

# Texts with some of their answers.
TEXTS = {
    "Élan  vital: the Rhône.": ("Élan  vital", "Rhône"),
    "Cafe\u0301 au lait, nai\u0308ve\u0323 x": ("Cafe\u0301", "nai\u0308ve\u0323"),
    "北京 is  a city北京市。": ("北京市", "is  a city"),
    "I 👍🏽 it 😀!": ("👍🏽 it", "😀"),
    "İstanbul \u00a0 ǅ ß\u3000end": ("İstanbul", "ß\u3000end"),
    "a\u200db c\x00d \ufffd\ne\tf": ("a\u200db",),
    "ﬁne ½ 한국어": ("½ 한국어",),
}
CONTEXT = "ab a cd  a b ab"
# Two tokens begin with the space before them, as those of some tokenizers do.
STARTS, ENDS = np.array([(0, 1), (1, 2), (2, 4), (5, 6), (6, 7), (8, 10), (11, 12), (12, 15)], np.int32).T
FIRST = 4
WINDOWS = [
    Window(FIRST + best_start - start, FIRST + best_stop - start, *(np.pad(a[start:stop], (FIRST, 0)) for a in (STARTS, ENDS)))
    for start, stop, best_start, best_stop in cut_windows(np.arange(9), 5, 3)
]


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_cover_every_character_and_answers_exactly(text: str, lowercase: bool) -> None:
    (tokens,) = located_tokens([text], text_encoder(*TEXTS, words=["the", "vital"], lowercase=lowercase))
    covered = {position for start, end in zip(tokens.starts, tokens.ends, strict=True) for position in range(start, end)}
    # A character that normalization drops between two spaces touches no token.
    assert {position for position, character in enumerate(text) if not (character.isspace() or character == "\ufffd")} <= covered
    for answer in TEXTS[text]:
        span = tokens.cover(Answer(answer, text.index(answer)))
        assert text[tokens.starts[span[0]] : tokens.ends[span[1]]] == answer


def test_an_answer_inside_a_token_takes_the_whole_token() -> None:
    text = "the vital one"
    tokens, nothing = located_tokens([text, "\u200d\ufffd"], text_encoder(text, words=["the", "vital", "one"]))
    assert tokens.cover(Answer("ita", 5)) == (1, 1)
    assert tokens.cover(Answer("e v", 2)) == (0, 1)
    assert tokens.cover(Answer(" ", 3)) == (1, 0)
    assert nothing.cover(Answer("\u200d", 0)) == (0, -1)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("max_length", [1, 3, 9])
@pytest.mark.parametrize("seed", range(3))
def test_best_answers_against_all_spans(joint: bool, max_length: int, seed: int) -> None:
    # Scores of all starts, and of all ends: for each start, or for all.
    rng, length = np.random.default_rng(seed), FIRST + 6
    scores = [(rng.normal(size=length), rng.normal(size=(length, length) if joint else length)) for _ in WINDOWS]
    positions = np.arange(length)
    outputs = [
        {"starts": positions, "start_scores": starts, "ends": np.broadcast_to(positions, ends.shape), "end_scores": ends}
        for starts, ends in scores
    ]
    best: dict[str, float] = {}
    for window, (starts, ends) in zip(WINDOWS, scores, strict=True):
        for first in range(window.best_start, window.best_stop):
            for last in range(first, min(first + max_length, len(window.starts))):
                text = CONTEXT[window.starts[first] : window.ends[last]].strip()
                best[text] = max(best.get(text, -np.inf), starts[first] + (ends[first, last] if joint else ends[last]))
    expected = sorted(best.items(), key=lambda item: -item[1])[:6]
    answers = best_answers(CONTEXT, WINDOWS, outputs, max_length=max_length, number=6)
    assert [answer["text"] for answer in answers] == [text for text, _ in expected]
    assert [answer["score"] for answer in answers] == pytest.approx([score for _, score in expected], abs=1e-6)
    assert all(CONTEXT.startswith(answer["text"], answer["start"]) for answer in answers)
