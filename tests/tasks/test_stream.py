"""The order of rows in fine-tuning: every row once before any twice, lengths together, tasks by their share."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from discern.tasks.features import Features, Ragged, TaskRowsInOrder, TaskStream


def rows(count: int, seed: int = 0) -> Features:
    """Rows whose second id is their number, of random lengths."""
    rng = np.random.default_rng(seed)
    ids = [[2, number, *[7] * int(rng.integers(1, 60)), 3] for number in range(count)]
    return Features(Ragged.of(ids), Ragged.of([[0] * len(row) for row in ids], np.uint8), np.arange(count), {})


def read(stream: TaskStream, first: int, count: int, per_step: int) -> list[tuple[str, int]]:
    """Task and number of each row of some steps."""
    found = []
    for step in range(first, first + count):
        slots = np.arange(per_step)
        batch = stream.batch(step * per_step + slots, slots)
        task = {
            row: (group.task, number)
            for group in batch.groups
            for row, number in zip(group.rows.tolist(), group.features.tolist(), strict=True)
        }
        found += [task[row] for row in range(per_step)]
        for row, (_, number) in enumerate(found[-per_step:]):
            assert int(batch.input_ids[row, 1]) == number
    return found


@pytest.mark.parametrize(("count", "per_step"), [(64, 8), (61, 8), (5, 8), (1, 4)])
def test_every_row_comes_once_before_any_comes_twice(count: int, per_step: int) -> None:
    # Rows are sorted within rounds of whole steps, as many as the rows fill.
    steps = 6 * max(1, count // per_step)
    seen = Counter(number for _, number in read(TaskStream({"a": rows(count)}, 0, per_step), 0, steps, per_step))
    assert sum(seen.values()) == steps * per_step
    assert max(seen.values()) - min(seen[number] for number in range(count)) <= 1


def test_a_step_does_not_depend_on_what_was_read_before() -> None:
    features = {"a": rows(100), "b": rows(30, 1)}
    whole = read(TaskStream(features, 3, 8), 0, 40, 8)
    assert read(TaskStream(features, 3, 8), 33, 7, 8) == whole[33 * 8 :]
    assert read(TaskStream(features, 4, 8), 0, 40, 8) != whole


def test_epochs_differ() -> None:
    stream = TaskStream({"a": rows(64)}, 0, 8)
    assert read(stream, 0, 8, 8) != read(stream, 8, 8, 8)


def test_rows_of_similar_length_stand_together() -> None:
    features = rows(2000)
    stream = TaskStream({"a": features}, 0, 16)
    random = (
        sum(
            1 - lengths.mean() / lengths.max()
            for lengths in np.array_split(np.random.default_rng(0).permutation(features.input_ids.lengths), 125)
        )
        / 125
    )
    assert stream.padding_fraction(125) < 0.05 < 0.3 < random


@pytest.mark.parametrize(("alpha", "share"), [(1.0, 0.8), (0.5, 2 / 3), (0.0, 0.5)])
def test_tasks_are_drawn_by_their_size_to_a_power(alpha: float, share: float) -> None:
    features = {"large": rows(800), "small": rows(200, 1)}
    drawn = read(TaskStream(features, 0, 50, alpha), 0, 60, 50)
    large = sum(task == "large" for task, _ in drawn) / len(drawn)
    # 3,000 draws: three standard deviations.
    assert abs(large - share) < 3 * (share * (1 - share) / 3000) ** 0.5
    of_small = Counter(number for task, number in drawn if task == "small")
    assert len(of_small) == 200
    assert max(of_small.values()) - min(of_small.values()) <= 2


def test_a_rank_knows_the_shares_of_the_whole_step() -> None:
    stream = TaskStream({"large": rows(90), "small": rows(30, 1)}, 0, 8)
    for step in range(15):
        places = np.arange(step * 8, step * 8 + 8)
        whole = stream.batch(places, np.arange(8))
        shares = {group.task: len(group.rows) / 8 for group in whole.groups}
        for part in (stream.batch(places[:4], np.arange(4)), stream.batch(places[4:], np.arange(4, 8)), whole.rows(2, 3)):
            assert {group.task: group.share for group in part.groups} == shares


def test_evaluation_reads_every_row_once_the_shortest_first() -> None:
    features = {"a": rows(20), "b": rows(7, 1)}
    order = TaskRowsInOrder(features)
    places = np.arange(order.num_rows)
    batch = order.batch(places, places)
    assert sorted(batch.groups[0].features.tolist()) == list(range(20))
    assert sorted(batch.groups[1].features.tolist()) == list(range(7))
    lengths = batch.attention_mask.sum(1)
    assert (lengths[:20].diff() >= 0).all()
