"""The best answers, against a search through all spans of all windows."""

from __future__ import annotations

import numpy as np
import pytest

from discern.tasks.answer_spans import (
    FoundAnswer,
    WindowOffsets,
    admissible_spans,
    best_answers,
    cut_windows,
    no_answer_score,
    probabilities,
)

CONTEXT = "ab a cd  a b ab"
# Two tokens begin with the space before them, as those of some tokenizers do.
TOKENS = [(0, 1), (1, 2), (2, 4), (5, 6), (6, 7), (8, 10), (11, 12), (12, 15)]
FIRST = 4


def small_windows() -> list[WindowOffsets]:
    starts, ends = np.array(TOKENS, np.int32).T
    return [
        WindowOffsets(FIRST, best - start, best_stop - start, starts[start:stop], ends[start:stop])
        for start, stop, best, best_stop in cut_windows(len(TOKENS), 5, 2)
    ]


def said_of(starts: np.ndarray, ends: np.ndarray) -> dict[str, np.ndarray]:
    """As a head says it: sorted, as float32; scores a position, and an end's of each start (L, L) or of all (L,)."""
    order = np.argsort(-starts, kind="stable")
    of_ends = ends[order] if ends.ndim == 2 else ends
    end_order = np.argsort(-of_ends, -1, kind="stable")
    said = {
        "starts": order,
        "start_scores": starts[order],
        "ends": end_order,
        "end_scores": np.take_along_axis(of_ends, end_order, -1),
    }
    return {name: array.astype(np.float32) for name, array in said.items()}


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("max_length", [1, 3, 9])
@pytest.mark.parametrize("seed", range(5))
def test_best_answers_against_all_spans(joint: bool, max_length: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    windows, length = small_windows(), FIRST + 6
    scores = [(rng.normal(size=length), rng.normal(size=(length, length) if joint else length)) for _ in windows]
    best: dict[str, float] = {}
    for window, (starts, ends) in zip(windows, scores, strict=True):
        for first in range(window.best_start, window.best_stop):
            for last in range(first, min(first + max_length, len(window.starts))):
                text = CONTEXT[window.starts[first] : window.ends[last]].strip()
                end = ends[first + FIRST, last + FIRST] if joint else ends[last + FIRST]
                best[text] = max(best.get(text, -np.inf), starts[first + FIRST] + end)
    expected = sorted(best.items(), key=lambda item: -item[1])[:6]
    found = best_answers(CONTEXT, windows, [said_of(*each) for each in scores], max_length=max_length, number=6)
    assert [answer.text for answer in found] == [text for text, _ in expected]
    np.testing.assert_allclose([answer.score for answer in found], [score for _, score in expected], atol=1e-5)
    for answer in found:
        assert CONTEXT[answer.start :].startswith(answer.text)


def test_what_a_span_must_be() -> None:
    window = WindowOffsets(FIRST, 1, 4, *np.array([(0, 1), (1, 2), (2, 4), (5, 6), (6, 7)], np.int32).T)
    length = FIRST + 6
    spans = admissible_spans(said_of(np.zeros(length), np.zeros(length)), window, 2)
    found = sorted(zip(spans.firsts.tolist(), spans.lasts.tolist(), strict=True))
    assert found == [(1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4)]


def test_only_cls_is_proposed() -> None:
    said = {name: np.zeros(1, np.float32) for name in ("starts", "start_scores", "ends", "end_scores")}
    assert best_answers(CONTEXT, small_windows()[:1], [said], max_length=30, number=20) == []
    assert best_answers("", [], [], max_length=30, number=20) == []


def test_probabilities_sum_to_one() -> None:
    answers = [FoundAnswer("a", 0, np.log(3.0), -900.0), FoundAnswer("b", 1, 0.0, -900.0)]
    assert probabilities(answers) == pytest.approx([0.75, 0.25])
    assert probabilities([]) == []


def test_the_window_that_speaks_least_for_no_answer_counts() -> None:
    answers = [FoundAnswer("a", 0, 1.5, 0.5), FoundAnswer("b", 1, 1.0, 0.0)]
    assert no_answer_score([3.0, -1.0, 5.0], answers, relative=False) == -1.0
    assert no_answer_score([3.0, -1.0, 5.0], answers, relative=True) == -3.0
    assert no_answer_score([3.0], [], relative=True) == 3.0
