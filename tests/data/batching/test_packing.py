from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from discern.data.batching.rows import build_packing, heldout_rows, training_rows
from discern.data.batching.segments import PackedRows
from discern.data.batching.stream import ExampleStream
from discern.data.config import DataConfig
from discern.errors import DataError
from tests.support import SPECIAL, MemorySplit, random_documents


def numbered(documents: int = 60, seed: int = 0) -> MemorySplit:
    """Documents whose tokens are all different, so that order and completeness can be read off."""
    rng = np.random.default_rng(seed)
    token = iter(range(5, 10**6))
    texts = [[[next(token) for _ in range(rng.integers(1, 30))] for _ in range(rng.integers(1, 5))] for _ in range(documents)]
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


def test_only_the_last_row_is_padded_and_rows_begin_with_cls() -> None:
    packing = packed(numbered())
    rows = packing.rows(np.arange(packing.num_rows), 0)
    assert (rows.lengths[:-1] == 32).all()
    assert (rows.input_ids[:, 0] == SPECIAL.cls).all()
    assert (rows.input_ids[-1, rows.lengths[-1] :] == SPECIAL.pad).all()


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


def test_a_piece_holds_one_document_in_order() -> None:
    split = numbered()
    owner = {}
    for shard in split.shards:
        for document, (start, stop) in enumerate(zip(shard.document_starts[:-1], shard.document_starts[1:], strict=True)):
            owner |= {int(token): (shard.first_token, document) for token in shard.tokens[start:stop]}
    packing = packed(split)
    rows = packing.rows(np.arange(packing.num_rows), 3)
    assert rows.pieces is not None
    for ids, special, pieces in zip(rows.input_ids, rows.is_special, rows.pieces, strict=True):
        for piece in np.unique(pieces):
            tokens = ids[(pieces == piece) & ~special]
            assert len({owner[token] for token in tokens.tolist()}) <= 1
            assert (np.diff(tokens) == 1).all()


def test_epochs_cut_documents_at_other_places() -> None:
    packing = packed(numbered())
    assert not np.array_equal(packing.rows(np.arange(4), 0).input_ids, packing.rows(np.arange(4), 1).input_ids)


def test_documents_without_tokens_do_no_harm() -> None:
    split = MemorySplit([[[10]], [[]], [[11, 12]], [[]]])
    packing = packed(split, 8)
    rows = packing.rows(np.arange(packing.num_rows), 0)
    assert sorted(rows.input_ids[~rows.is_special].tolist()) == [10, 11, 12]


def test_an_empty_split_is_refused() -> None:
    empty = MemorySplit([[[]]])
    with pytest.raises(DataError, match="no tokens"):
        build_packing(empty, SPECIAL, DataConfig(), 0, training=True)


@pytest.mark.parametrize("kind", ["packed", "segments"])
def test_any_batch_is_found_without_those_before_it(kind: str) -> None:
    split = MemorySplit(random_documents(80, 60, seed=2))
    config = DataConfig(sequence_length=24, packing=kind)

    def stream() -> ExampleStream:
        return ExampleStream(build_packing(split, SPECIAL, config, 9, training=True), 9)

    running = stream()
    everything = [running.batch(np.arange(start, start + 8), np.arange(8)).input_ids for start in range(0, 8 * 60, 8)]
    alone = stream().batch(np.arange(8 * 57, 8 * 58), np.arange(8)).input_ids
    assert np.array_equal(everything[57], alone)


@pytest.mark.parametrize("kind", ["packed", "segments"])
def test_the_stream_reads_every_row_once_an_epoch_in_a_new_order(kind: str) -> None:
    split = MemorySplit(random_documents(60, 60, seed=2))
    config = DataConfig(sequence_length=24, packing=kind)
    stream = ExampleStream(build_packing(split, SPECIAL, config, 0, training=True), 0)
    count = stream.num_rows
    tokens = Counter(split.read(0, split.num_tokens).tolist())
    epochs = []
    for epoch in range(2):
        batch = stream.batch(np.arange(epoch * count, (epoch + 1) * count), np.arange(count))
        assert Counter(batch.input_ids[~batch.special_tokens_mask].tolist()) == tokens
        epochs.append(batch.input_ids)
    assert not np.array_equal(epochs[0], epochs[1])


def test_a_batch_may_span_two_epochs() -> None:
    split = MemorySplit(random_documents(20, 60))
    stream = ExampleStream(build_packing(split, SPECIAL, DataConfig(sequence_length=24), 0, training=True), 0)
    border = stream.num_rows
    both = stream.batch(np.arange(border - 3, border + 3), np.arange(6))
    first = stream.batch(np.arange(border - 3, border), np.arange(3))
    second = stream.batch(np.arange(border, border + 3), np.arange(3, 6))
    assert np.array_equal(both.input_ids, np.concatenate([first.input_ids, second.input_ids]))
    assert both.example_index.tolist() == list(range(border - 3, border + 3))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["packed", "segments", "two-part"])
def test_one_row_is_a_batch_without_a_warning_of_torch(kind: str, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(torch.set_warn_always, torch.is_warn_always_enabled()))
    torch.set_warn_always(True)
    split = MemorySplit(random_documents(20, 60))
    config = DataConfig(sequence_length=24, packing=kind)
    for rows in (training_rows(split, SPECIAL, config, 0), heldout_rows(split, SPECIAL, config)):
        rows.batch(np.arange(1), np.arange(1))
