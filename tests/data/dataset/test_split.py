"""Held-out documents: by content, about the right share, neither side empty."""

from __future__ import annotations

import random

import numpy as np
import pytest

from discern.data.dataset.writing import HeldoutSplit
from discern.data.tokenizer.encoding import TokenBlock


def block_of(contents: list[int]) -> TokenBlock:
    """Documents of one token; equal numbers are equal documents."""
    numbers = np.array(contents, dtype=np.uint16)
    digests = np.zeros((len(contents), 16), dtype=np.uint8)
    digests[:, :2] = numbers.astype("<u2").view(np.uint8).reshape(-1, 2)
    ones = np.ones(len(contents), dtype=np.int64)
    return TokenBlock(numbers, ones.astype(bool), ones, ones, digests, ones)


def sides(contents: list[int], fraction: float, chunk: int = 7, seed: int = 0) -> dict[str, list[int]]:
    """Which documents go where, in order."""
    chooser = HeldoutSplit(fraction, seed)
    found: dict[str, list[int]] = {"train": [], "heldout": []}
    placed = [
        part for start in range(0, len(contents), chunk) for part in chooser.place(block_of(contents[start : start + chunk]))
    ]
    for split, block in [*placed, *chooser.finish()]:
        found[split] += block.tokens.tolist()
    return found


def test_duplicates_fall_on_the_same_side() -> None:
    draw = random.Random(0)
    for fraction in (0.01, 0.1, 0.5, 0.95):
        for seed in range(20):
            contents = draw.choices(range(8), k=40)
            found = sides(contents, fraction, seed=seed)
            assert not set(found["train"]) & set(found["heldout"])
            assert sorted(found["train"] + found["heldout"]) == sorted(contents)
            assert found["train"]
            assert found["heldout"]


def test_the_share_is_about_right() -> None:
    held = len(sides(list(range(20_000)), 0.1, chunk=1000)["heldout"])
    assert abs(held - 2000) < 5 * (20_000 * 0.1 * 0.9) ** 0.5


def test_the_seed_chooses() -> None:
    contents = list(range(1000))
    assert sides(contents, 0.1, seed=1) == sides(contents, 0.1, seed=1)
    assert sides(contents, 0.1, seed=1) != sides(contents, 0.1, seed=2)


def test_chunks_make_no_difference() -> None:
    contents = random.Random(1).choices(range(300), k=1000)
    for fraction in (0.001, 0.1):
        assert len({str(sides(contents, fraction, chunk)) for chunk in (1, 7, 50, 1000)}) == 1


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.99])
def test_two_different_documents_part(fraction: float) -> None:
    for first in range(20):
        found = sides([first, first, 100 + first, first], fraction)
        assert sorted(map(len, found.values())) == [1, 3]


def test_one_document_is_trained_on() -> None:
    assert sides([5, 5, 5], 0.9) == {"train": [5, 5, 5], "heldout": []}
    assert sides([], 0.5) == {"train": [], "heldout": []}


def test_none_held_out_if_told_so() -> None:
    assert sides(list(range(100)), 0.0)["heldout"] == []


def test_a_fuller_text_keeps_its_held_out_documents() -> None:
    """Adding text moves no document that was held out by its hash."""
    fewer, more = (set(sides(list(range(count)), 0.1)["heldout"]) for count in (2000, 4000))
    assert fewer <= more
