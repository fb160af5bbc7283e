"""Crops of texts: contiguous spans between [CLS] and [SEP], drawn for each text on its own, and as long as promised."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from discern.corruption.randomness import Randomness
from discern.tasks.crops import cropped
from discern.types import TokenBatch

CLS, SEP = 1, 2
LENGTHS = (60, 5, 1, 30)


def batch_of(lengths: tuple[int, ...]) -> TokenBatch:
    """Rows of twice the same text, whose tokens are 10, 11, 12, ..."""
    rows = [[CLS, *range(10, 10 + length), SEP] * 2 for length in lengths]
    longest = max(map(len, rows))
    ids, types = np.zeros((2, len(rows), longest), np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
        types[place, len(row) // 2 : len(row)] = 1
    input_ids, index = torch.from_numpy(ids), torch.arange(len(rows))
    mask = input_ids > 0
    places = torch.arange(longest).expand(len(rows), longest)
    return TokenBatch(input_ids, mask, ~mask, torch.from_numpy(types), places, None, None, index, index)


def texts_of(batch: TokenBatch, row: int) -> list[list[int]]:
    real = batch.attention_mask[row]
    ids, types = batch.input_ids[row][real], batch.token_type_ids[row][real]
    return [ids[types == number].tolist() for number in (0, 1)]


def crops(step: int, chosen: list[bool] | None = None) -> TokenBatch:
    batch = batch_of(LENGTHS)
    rows = torch.tensor(chosen or [True] * len(LENGTHS))
    return cropped(batch, 2, rows, Randomness(0, step, batch.example_index))


@pytest.fixture(scope="module")
def many() -> list[TokenBatch]:
    return [crops(step) for step in range(200)]


def test_a_crop_is_a_span_of_its_text_in_its_frame(many: list[TokenBatch]) -> None:
    for batch in many:
        assert batch.attention_mask.shape == batch.input_ids.shape == batch.position_ids.shape
        assert batch.attention_mask.sum(1).max() == batch.input_ids.shape[1]
        assert torch.equal(batch.attention_mask, batch.input_ids > 0)
        for row, length in enumerate(LENGTHS):
            for text in texts_of(batch, row):
                assert (text[0], text[-1]) == (CLS, SEP)
                words = text[1:-1]
                assert words == list(range(words[0], words[0] + len(words)))
                assert min(words) >= 10
                assert max(words) < 10 + length
                shortest, longest = min(max(round(0.1 * length), 4), length), min(max(length // 2, 4), length)
                assert shortest <= len(words) <= longest


def test_crops_differ_from_text_to_text_and_cover_it(many: list[TokenBatch]) -> None:
    pairs = [texts_of(batch, 0) for batch in many]
    assert np.mean([first != second for first, second in pairs]) > 0.95
    assert {word for pair in pairs for text in pair for word in text[1:-1]} == set(range(10, 70))
    assert {len(text) - 2 for pair in pairs for text in pair} == set(range(6, 31))


def test_rows_that_are_not_chosen_are_unchanged() -> None:
    found, before = crops(3, [False, True, True, False]), batch_of(LENGTHS)
    for row in (0, 3):
        assert texts_of(found, row) == texts_of(before, row)
    assert texts_of(found, 1) != texts_of(before, 1)


def test_the_same_numbers_draw_the_same_crops() -> None:
    assert torch.equal(crops(4).input_ids, crops(4).input_ids)
