"""Windows of long texts; batches of rows: padding, targets, the rows of each task, micro-batches; and the order of rows."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from discern.tasks.features import IGNORED, Features, Ragged, TaskBatch, TaskRowsInOrder, TaskStream, collate, cut_windows

PAIRS = Features(
    Ragged.of([[2, 5, 3], [2, 6, 7, 8, 3]]),
    Ragged.of([[0, 0, 0], [0, 0, 1, 1, 1]], np.uint8),
    np.arange(2),
    {"class": np.array([1, 0])},
)
TAGGED = Features(
    Ragged.of([[2, 9, 9, 3]]),
    Ragged.of([[0, 0, 0, 0]], np.uint8),
    np.arange(1),
    {"tags": Ragged.of([[IGNORED, 4, 5, IGNORED]], np.int64)},
)


def batch() -> TaskBatch:
    places = np.arange(3)
    return collate({"pairs": PAIRS, "tagged": TAGGED}, np.array([[0, 1], [1, 0], [0, 0]]), places + 10, places)


def test_a_batch_by_hand() -> None:
    made = batch()
    assert made.input_ids.tolist() == [[2, 6, 7, 8, 3], [2, 9, 9, 3, 0], [2, 5, 3, 0, 0]]
    assert made.attention_mask.sum(1).tolist() == [5, 4, 3]
    assert made.token_type_ids.tolist() == [[0, 0, 1, 1, 1], [0] * 5, [0] * 5]
    assert (made.example_index.tolist(), made.full) == ([10, 11, 12], False)
    pairs, tagged = made.groups
    assert (pairs.task, pairs.rows.tolist(), pairs.features.tolist()) == ("pairs", [0, 2], [1, 0])
    assert (pairs.targets["class"].tolist(), tagged.rows.tolist()) == ([0, 1], [1])
    assert tagged.targets["tags"].tolist() == [[IGNORED, 4, 5, IGNORED]]


def test_a_micro_batch_has_a_group_of_every_task_even_without_rows() -> None:
    part = batch().rows(1, 3)
    pairs, tagged = part.groups
    assert part.input_ids.shape == (2, 5)
    assert (pairs.rows.tolist(), pairs.targets["class"].tolist(), tagged.rows.tolist()) == ([1], [1], [0])
    assert [(group.task, group.rows.tolist()) for group in batch().rows(0, 1).groups] == [("pairs", [0]), ("tagged", [])]


@pytest.mark.parametrize(
    ("sizes", "room", "overlap", "windows"),
    [
        ([1] * 10, 4, 2, [(0, 4, 0, 3), (2, 6, 3, 5), (4, 8, 5, 7), (6, 10, 7, 10)]),
        # A word as long as a row shares it with none; one that is longer than the overlap is not shown twice.
        ([1] * 6 + [6], 6, 3, [(0, 6, 0, 6), (6, 7, 6, 7)]),
        ([], 4, 2, [(0, 0, 0, 0)]),
    ],
)
def test_windows_by_hand(sizes: list[int], room: int, overlap: int, windows: list[tuple[int, ...]]) -> None:
    assert cut_windows(np.cumsum([0, *sizes]), room, overlap) == windows


@given(st.lists(st.integers(1, 6), min_size=1, max_size=60), st.integers(6, 20), st.integers(0, 30))
@settings(deadline=None)
def test_every_word_is_read_once_where_most_is_around_it(sizes: list[int], room: int, overlap: int) -> None:
    bounds = np.cumsum([0, *sizes])
    windows = cut_windows(bounds, room, overlap)
    assert [word for *_, first, end in windows for word in range(first, end)] == list(range(len(sizes)))
    for (first, end, *_), (start, stop, *_) in pairwise(windows):
        assert first < start <= end < stop
        assert bounds[end] - bounds[start] <= overlap
    for start, stop, *predicted in windows:
        assert bounds[stop] - bounds[start] <= room
        for word in range(*predicted):
            contexts = {
                (first, end): min(bounds[word] - bounds[first], bounds[end] - bounds[word + 1])
                + 0.01 * (bounds[end] - bounds[first])
                for first, end, *_ in windows
                if first <= word < end
            }
            assert max(contexts, key=contexts.__getitem__) == (start, stop)


def rows(count: int, seed: int = 0) -> Features:
    """Rows whose second id is their number, of random lengths."""
    rng = np.random.default_rng(seed)
    ids = [[2, number, *[7] * int(rng.integers(1, 60)), 3] for number in range(count)]
    return Features(Ragged.of(ids), Ragged.of([[0] * len(row) for row in ids], np.uint8), np.arange(count), {})


def read(stream: TaskStream, steps: range, per_step: int) -> list[tuple[str, int]]:
    """Task and number of each row of some steps."""
    numbered = []
    for step in steps:
        batch = stream.batch(step * per_step + np.arange(per_step), np.arange(per_step))
        task = {row: group.task for group in batch.groups for row in group.rows.tolist()}
        numbered += [(task[row], number) for row, number in enumerate(batch.input_ids[:, 1].tolist())]
    return numbered


@pytest.mark.parametrize(("count", "per_step"), [(64, 8), (61, 8), (5, 8), (1, 4)])
def test_every_row_comes_once_before_any_comes_twice(count: int, per_step: int) -> None:
    # Rows are sorted within rounds of whole steps, as many as the rows fill.
    steps = 6 * max(1, count // per_step)
    seen = Counter(number for _, number in read(TaskStream({"a": rows(count)}, 0, per_step), range(steps), per_step))
    assert max(seen.values()) - min(seen[number] for number in range(count)) <= 1


def test_a_step_does_not_depend_on_what_was_read_before() -> None:
    features = {"a": rows(100), "b": rows(30, 1)}
    steps = read(TaskStream(features, 3, 8), range(40), 8)
    assert read(TaskStream(features, 3, 8), range(33, 40), 8) == steps[33 * 8 :]
    assert read(TaskStream(features, 4, 8), range(40), 8) != steps, "the order depends on the seed"
    stream = TaskStream({"a": rows(64)}, 0, 8)
    assert read(stream, range(8), 8) != read(stream, range(8, 16), 8), "epochs differ"


def test_batches_of_rows_of_similar_length_have_little_padding() -> None:
    features = rows(2000)
    shuffled = np.random.default_rng(0).permutation(features.input_ids.lengths).reshape(125, 16)
    assert TaskStream({"a": features}, 0, 16).padding_fraction(125) < 0.05
    assert 1 - shuffled.mean() / shuffled.max(1).mean() > 0.3


@pytest.mark.parametrize(("alpha", "share"), [(1.0, 0.8), (0.5, 2 / 3), (0.0, 0.5)])
def test_tasks_are_drawn_by_their_size_to_a_power(alpha: float, share: float) -> None:
    features = {"large": rows(800), "small": rows(200, 1)}
    counts = Counter(read(TaskStream(features, 0, 50, alpha), range(60), 50))
    large = sum(count for (task, _), count in counts.items() if task == "large") / 3000
    # 3,000 draws: three standard deviations.
    assert abs(large - share) < 3 * (share * (1 - share) / 3000) ** 0.5
    of_small = [count for (task, _), count in counts.items() if task == "small"]
    assert len(of_small) == 200
    assert max(of_small) - min(of_small) <= 2


def test_a_rank_knows_the_shares_of_the_whole_step() -> None:
    stream = TaskStream({"large": rows(90), "small": rows(30, 1)}, 0, 8)
    for step in range(15):
        places = np.arange(step * 8, step * 8 + 8)
        batch = stream.batch(places, np.arange(8))
        shares = {group.task: len(group.rows) / 8 for group in batch.groups}
        for part in (stream.batch(places[:4], np.arange(4)), stream.batch(places[4:], np.arange(4, 8)), batch.rows(2, 3)):
            assert {group.task: group.share for group in part.groups} == shares


def test_evaluation_reads_every_row_once_the_shortest_first() -> None:
    order = TaskRowsInOrder({"a": rows(20), "b": rows(7, 1)})
    places = np.arange(order.num_rows)
    batch = order.batch(places, places)
    assert [sorted(group.features.tolist()) for group in batch.groups] == [list(range(20)), list(range(7))]
    lengths = batch.attention_mask.sum(1)
    assert (lengths[:20].diff() >= 0).all()
