"""Windows over long texts: that they cover, overlap, and share the tokens out by context."""

from __future__ import annotations

import itertools
import math

import pytest

from discern.inference.rows import TextWindow, best_places, windows_of


@pytest.mark.parametrize("window_size", [1, 2, 7, 30])
@pytest.mark.parametrize("length", [0, 1, 6, 7, 8, 29, 30, 31, 45, 61, 100])
def test_windows_cover_every_token_and_overlap_by_half(length: int, window_size: int) -> None:
    windows = windows_of([length], window_size)
    assert sorted({position for window in windows for position in range(window.start, window.stop)}) == list(range(length))
    assert all(0 < window.stop - window.start <= window_size for window in windows)
    assert len(windows) == (length > 0) if length <= window_size else len(windows) > 1
    for before, after in itertools.pairwise(windows):
        assert 0 < after.start - before.start <= max(window_size // 2, 1)


def test_context_counts_no_end_of_the_text() -> None:
    window = TextWindow(0, start=10, stop=20, whole=30)
    assert [window.context(position) for position in (10, 12, 19)] == [0, 2, 0]
    assert TextWindow(0, 0, 20, 30).context(0) == 19
    assert TextWindow(0, 10, 20, 20).context(19) == 9
    assert TextWindow(0, 0, 20, 20).context(5) == math.inf


@pytest.mark.parametrize("reads_ahead", [True, False])
def test_each_token_counts_once_where_it_has_most_context(*, reads_ahead: bool) -> None:
    windows = windows_of([45, 7, 0, 30, 61], 30)
    shares = best_places(windows, reads_ahead=reads_ahead)
    counted = [(w.text, w.start + place) for w, places in zip(windows, shares, strict=True) for place in places]
    assert sorted(counted) == [(text, position) for text, length in enumerate([45, 7, 0, 30, 61]) for position in range(length)]
    for window, places in zip(windows, shares, strict=True):
        for place in places:
            position = window.start + place
            rivals = [each for each in windows if each.text == window.text and each.start <= position < each.stop]
            if reads_ahead:
                assert window.context(position) == max(each.context(position) for each in rivals)
            else:
                assert window == rivals[0]
