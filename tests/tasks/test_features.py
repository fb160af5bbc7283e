"""Rows of any length as batches: padding, targets, the rows of each task, micro-batches."""

from __future__ import annotations

import numpy as np
import torch

from discern.tasks.features import IGNORED, Features, Ragged, collate

FIRST = Features(
    Ragged.of([[2, 5, 3], [2, 6, 7, 8, 3]]),
    Ragged.of([[0, 0, 0], [0, 0, 1, 1, 1]], np.uint8),
    np.arange(2),
    {"class": np.array([1, 0])},
)
SECOND = Features(
    Ragged.of([[2, 9, 9, 3]]),
    Ragged.of([[0, 0, 0, 0]], np.uint8),
    np.arange(1),
    {"tags": Ragged.of([[IGNORED, 4, 5, IGNORED]], np.int64)},
)


def batch() -> object:
    places = np.arange(3)
    return collate({"a": FIRST, "b": SECOND}, [("a", 1), ("b", 0), ("a", 0)], places + 10, places)


def test_ragged_sequences_come_back() -> None:
    ragged = Ragged.of([[1, 2], [], [3]])
    assert [ragged[row].tolist() for row in range(3)] == [[1, 2], [], [3]]
    assert ragged.lengths.tolist() == [2, 0, 1]
    assert ragged.padded(np.array([2, 0]), 2, -1).tolist() == [[3, -1], [1, 2]]
    assert len(Ragged.of([])) == 0


def test_a_batch_is_as_long_as_its_longest_row() -> None:
    made = batch()
    assert made.input_ids.tolist() == [[2, 6, 7, 8, 3], [2, 9, 9, 3, 0], [2, 5, 3, 0, 0]]
    assert made.attention_mask.sum(1).tolist() == [5, 4, 3]
    assert made.token_type_ids[0].tolist() == [0, 0, 1, 1, 1]
    assert made.example_index.tolist() == [10, 11, 12]
    assert not made.full


def test_each_task_has_its_rows_and_targets() -> None:
    first, second = batch().groups
    assert (first.task, first.rows.tolist(), first.features.tolist()) == ("a", [0, 2], [1, 0])
    assert first.targets["class"].tolist() == [0, 1]
    assert second.rows.tolist() == [1]
    assert second.targets["tags"].tolist() == [[IGNORED, 4, 5, IGNORED]]


def test_a_micro_batch_keeps_every_task_even_without_rows() -> None:
    part = batch().rows(1, 3)
    first, second = part.groups
    assert part.input_ids.shape == (2, 5)
    assert (first.rows.tolist(), first.targets["class"].tolist()) == ([1], [1])
    assert second.rows.tolist() == [0]
    alone = batch().rows(0, 1).groups
    assert [group.task for group in alone] == ["a", "b"]
    assert alone[1].rows.tolist() == []


def test_a_batch_moves_with_its_targets() -> None:
    moved = batch().to(torch.device("meta"))
    assert moved.groups[0].targets["class"].device.type == "meta"
    assert moved.groups[1].rows.device.type == "meta"
