from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from discern.data.batching.rows import heldout_rows, training_rows
from discern.data.batching.segments import PackedRows
from discern.data.config import DataConfig
from discern.errors import DataError
from tests.support import SPECIAL, MemorySplit, random_documents


def numbered() -> MemorySplit:
    """Documents whose tokens are all different, so that order and completeness can be read off."""
    rng = np.random.default_rng(0)
    token = iter(range(5, 10**6))
    texts = [[[next(token) for _ in range(rng.integers(1, 30))] for _ in range(rng.integers(1, 5))] for _ in range(60)]
    return MemorySplit(texts, per_shard=17)


def packed(split: MemorySplit, length: int = 32, *, rotate: bool = True) -> PackedRows:
    return PackedRows(split, SPECIAL, length, 0, rotate=rotate)


@pytest.mark.parametrize("epoch", [0, 1, 7])
@pytest.mark.parametrize("length", [8, 32, 501])
def test_an_epoch_holds_every_token_once(epoch: int, length: int) -> None:
    split = numbered()
    packing = packed(split, length)
    rows = packing.rows(np.arange(packing.num_rows), epoch)
    assert sorted(rows.input_ids[~rows.is_special].tolist()) == sorted(split.read(0, split.num_tokens).tolist())


def test_by_hand() -> None:
    split = MemorySplit([[[10, 11], [12]], [[20, 21, 22, 23]], [[30]]])
    rows = packed(split, 6, rotate=False).rows(np.array([0, 1, 2]), 0)
    c, s, p = SPECIAL.cls, SPECIAL.sep, SPECIAL.pad
    # The cyclic text: c 10 11 12 s | c 20 21 22 23 s | c 30 s, in windows of five.
    assert rows.input_ids.tolist() == [[c, 10, 11, 12, s, s], [c, 20, 21, 22, 23, s], [c, s, c, 30, s, p]]
    assert rows.pieces is not None
    assert rows.pieces.tolist() == [[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 2]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 0]]
    assert rows.lengths.tolist() == [6, 6, 5]
    assert rows.is_special.tolist()[2] == [True, True, True, False, True, True]


def test_the_end_of_a_single_document_is_not_joined_to_its_beginning() -> None:
    packing = packed(MemorySplit([[list(range(100, 130))]]), 12)
    seen = []
    for epoch in range(5):
        rows = packing.rows(np.arange(packing.num_rows), epoch)
        assert rows.pieces is not None
        for row, piece, special in zip(rows.input_ids, rows.pieces, rows.is_special, strict=True):
            for number in set(piece.tolist()):
                tokens = row[(piece == number) & ~special]
                assert (np.diff(tokens) == 1).all()
            seen.append(len(set(piece[~special].tolist())))
    assert 2 in seen, "a row held both"


@pytest.mark.parametrize("packing", ["packed", "segments", "two-part"])
def test_an_empty_split_is_refused(packing: str) -> None:
    config = DataConfig(packing=packing)
    for read in (heldout_rows, partial(training_rows, seed=0)):
        with pytest.raises(DataError, match="no tokens"):
            read(MemorySplit([[[]]]), SPECIAL, config)


@pytest.mark.parametrize("kind", ["packed", "segments"])
def test_the_stream_reads_every_row_once_an_epoch_in_a_new_order(kind: str) -> None:
    split = MemorySplit(random_documents(60, 60, seed=2))
    stream = training_rows(split, SPECIAL, DataConfig(sequence_length=24, packing=kind), 0)
    count = stream.num_rows
    tokens = Counter(split.read(0, split.num_tokens).tolist())
    epochs = []
    for epoch in range(2):
        batch = stream.batch(np.arange(epoch * count, (epoch + 1) * count), np.arange(count))
        assert Counter(batch.input_ids[~batch.special_tokens_mask].tolist()) == tokens
        epochs.append(batch.input_ids)
    assert not np.array_equal(epochs[0], epochs[1])
    both = stream.batch(np.arange(count - 3, count + 3), np.arange(6))
    assert np.array_equal(both.input_ids, np.concatenate([epochs[0][-3:], epochs[1][:3]])), "a batch may span two epochs"
    assert both.example_index.tolist() == list(range(count - 3, count + 3))


@pytest.mark.parametrize("kind", ["packed", "segments"])
@pytest.mark.parametrize("overflow", ["carry", "drop"])
def test_every_token_keeps_whether_it_begins_a_word(kind: str, overflow: str) -> None:
    split = MemorySplit(random_documents(60, 90, seed=3), per_shard=17, begins=lambda token: token % 2 == 0)
    stream = training_rows(split, SPECIAL, DataConfig(sequence_length=24, packing=kind, overflow=overflow), 5)
    count = stream.num_rows
    batch = stream.batch(np.arange(count - 5, 2 * count), np.arange(count + 5))  # over the border of two epochs
    assert batch.word_starts is not None
    assert batch.word_starts.equal((batch.input_ids % 2 == 0) & ~batch.special_tokens_mask)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["packed", "segments", "two-part"])
def test_one_row_is_a_batch_without_a_warning_of_torch(kind: str, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(torch.set_warn_always, torch.is_warn_always_enabled()))
    torch.set_warn_always(True)
    split = MemorySplit(random_documents(20, 60))
    config = DataConfig(sequence_length=24, packing=kind)
    for rows in (training_rows(split, SPECIAL, config, 0), heldout_rows(split, SPECIAL, config)):
        rows.batch(np.arange(1), np.arange(1))
