"""The two-segment examples, against a plain sequential builder written from the published description."""

import random
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from discern.data.batching.segments import SegmentRows, assign_segments
from discern.data.config import DataConfig
from tests.support import SPECIAL, MemorySplit, random_documents


def build(split: MemorySplit, seed: int = 0, **settings: object) -> SegmentRows:
    return SegmentRows(split, SPECIAL, DataConfig(**{"sequence_length": 64, **settings}), seed)


def sequential(documents: list[list[list[int]]], longest: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """The released builder: one state, sentence after sentence, overflow dropped."""
    rng = random.Random(seed)
    examples = []
    target = longest

    def emit(buffer: list[list[int]]) -> None:
        nonlocal target
        aim = 100_000 if rng.random() < 0.1 else (target - 3) // 2
        first: list[int] = []
        second: list[int] = []
        for sentence in buffer:
            fits = len(first) + len(sentence) < aim
            if not first or fits or (not second and len(first) < aim and rng.random() < 0.5):
                first += sentence
            else:
                second += sentence
        first = first[: longest - 2]
        examples.append((first, second[: max(0, longest - len(first) - 3)]))
        target = rng.randint(5, longest) if rng.random() < 0.05 else longest

    for document in documents:
        buffer: list[list[int]] = []
        for sentence in document:
            buffer.append(sentence)
            if sum(map(len, buffer)) >= target:
                emit(buffer)
                buffer = []
        if buffer:
            emit(buffer)
    return examples


def unpack(ids: np.ndarray, types: np.ndarray, special: np.ndarray) -> tuple[list[int], list[int]]:
    return ids[~special & (types == 0)].tolist(), ids[~special & (types == 1)].tolist()


def test_the_distribution_is_that_of_the_released_builder() -> None:
    documents = random_documents(3000, 100, seed=5, sentences=(1, 30), words=(1, 45))
    theirs = sequential(documents, 64, seed=1)
    packing = build(MemorySplit(documents, per_shard=700), overflow="drop")
    rows = packing.rows(np.arange(packing.num_rows), 0)
    ours = [unpack(*row) for row in zip(rows.input_ids, rows.token_types, rows.is_special, strict=True)]
    assert len(ours) == pytest.approx(len(theirs), rel=0.02)
    measures = {
        "length of A": lambda pair: len(pair[0]),
        "length of B": lambda pair: len(pair[1]),
        "total": lambda pair: len(pair[0]) + len(pair[1]),
        "share of A": lambda pair: len(pair[0]) / (len(pair[0]) + len(pair[1])),
    }
    for name, measure in measures.items():
        assert stats.ks_2samp([measure(p) for p in ours], [measure(p) for p in theirs]).pvalue > 1e-3, name
    single = [np.mean([not second for _, second in pairs]) for pairs in (ours, theirs)]
    assert single[0] == pytest.approx(single[1], abs=0.015)


def test_layout() -> None:
    packing = build(MemorySplit(random_documents(50, 60)))
    rows = packing.rows(np.arange(packing.num_rows), 0)
    for ids, types, count in zip(rows.input_ids, rows.token_types, rows.lengths, strict=True):
        separators = np.flatnonzero(ids[:count] == SPECIAL.sep)
        assert ids[0] == SPECIAL.cls
        assert separators[-1] == count - 1
        assert (ids[count:] == SPECIAL.pad).all()
        assert len(separators) == 1 + types.max()
        if types.max():
            assert types.tolist() == [0] * (separators[0] + 1) + [1] * (count - separators[0] - 1) + [0] * (64 - count)
        else:
            assert not types.any()


@pytest.mark.parametrize("length", [8, 13, 64])
def test_carried_overflow_keeps_every_token(length: int) -> None:
    split = MemorySplit(random_documents(200, 100, words=(1, 90)), per_shard=60)
    packing = build(split, sequence_length=length)
    rows = packing.rows(np.arange(packing.num_rows), 3)
    assert Counter(rows.input_ids[~rows.is_special].tolist()) == Counter(split.read(0, split.num_tokens).tolist())


def test_a_very_long_document_is_planned_wholly() -> None:
    split = MemorySplit([[[9] * 11] * 30_000])
    packing = build(split)
    rows = packing.rows(np.arange(packing.num_rows), 0)
    assert (~rows.is_special).sum() == split.num_tokens


def one_by_one(lengths: list[int], aim: int, coins: list[bool]) -> list[bool]:
    """The rule of the released code, sentence by sentence."""
    first = second = 0
    found = []
    for length, coin in zip(lengths, coins, strict=True):
        found.append(first == 0 or first + length < aim or (second == 0 and first < aim and coin))
        if found[-1]:
            first += length
        else:
            second += length
    return found


def test_examples_are_assigned_at_once_as_one_by_one() -> None:
    rng = np.random.default_rng(0)
    sentences, aims = rng.integers(1, 20, 200), rng.integers(1, 120, 200)
    lengths, coins = rng.integers(0, 40, sentences.sum()), rng.random(sentences.sum()) < 0.5
    cuts = np.cumsum(sentences)[:-1]
    parts = zip(np.split(lengths, cuts), aims.tolist(), np.split(coins, cuts), strict=True)
    expected = [each for part, aim, tosses in parts for each in one_by_one(part.tolist(), aim, tosses.tolist())]
    assert assign_segments(lengths, sentences, aims, coins).tolist() == expected


@pytest.mark.parametrize("per_shard", [3, 1000])
def test_a_row_does_not_depend_on_the_rows_beside_it(per_shard: int) -> None:
    """Of several shards too, in any order and number."""
    rows = build(MemorySplit(random_documents(30, 50, seed=4), per_shard=per_shard))
    order = np.random.default_rng(0).permutation(rows.num_rows)
    together = rows.rows(order, 2)
    for place, number in enumerate(order[:40]):
        alone = rows.rows(np.array([number]), 2)
        for name in ("input_ids", "lengths", "is_special", "token_types", "word_starts"):
            assert np.array_equal(getattr(alone, name)[0], getattr(together, name)[place])
