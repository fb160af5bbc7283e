"""Rows in two parts: the cyclic text, the layout, and how rows follow one another."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from discern.data.batching.rows import heldout_rows, training_rows
from discern.data.batching.two_part import BackwardText, ForwardText, choose_segments
from discern.data.config import DataConfig
from discern.types import SpecialTokens, TokenBatch
from tests.support import SPECIAL, MemorySplit, random_documents

EOD = 99
WITH_EOD = SpecialTokens(pad=0, unk=1, cls=2, sep=3, mask=4, eod=EOD)


def begins(token: int) -> bool:
    return token % 3 != 0


def split_of(count: int = 40, per_shard: int = 7) -> MemorySplit:
    """Documents whose tokens are all different, so that a token says where it stands."""
    documents = random_documents(count, 50, seed=1, sentences=(1, 6), words=(1, 12))
    number = iter(range(100, 10**6))
    return MemorySplit([[[next(number) for _ in s] for s in d] for d in documents], per_shard, begins)


def written_out(split: MemorySplit) -> tuple[list[int], list[bool], list[int]]:
    """The cyclic text token by token: ids, word starts, cuts."""
    ids, starts, cuts = [], [], []
    for shard in split.shards:
        ends = set(shard.document_starts[1:].tolist())
        for local, token in enumerate(shard.tokens.tolist()):
            if local in shard.sentence_starts:
                cuts.append(len(ids))
            ids.append(token)
            starts.append(begins(token))
            if local + 1 in ends:
                ids.append(EOD)
                starts.append(True)
    return ids, starts, cuts


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_cyclic_text_is_what_it_is_written_out(direction: str) -> None:
    split = split_of(12, per_shard=3)
    ids, starts, cuts = written_out(split)
    size = len(ids)
    cyclic: ForwardText | BackwardText = ForwardText(split, EOD)
    if direction == "backward":
        cyclic, ids, starts = BackwardText(cyclic), ids[::-1], starts[::-1]
        cuts = sorted((size - cut) % size for cut in cuts)
    assert cyclic.size == size
    everywhere = [lap * size + cut for lap in (-2, -1, 0, 1, 2, 3) for cut in cuts]
    for start in range(-size - 3, size + 3, 5):
        assert cyclic.next_cut(start) == next(cut for cut in everywhere if cut >= start)
        assert cyclic.previous_cut(start) == next(cut for cut in reversed(everywhere) if cut <= start)
        for length in (0, 1, 9, 40, size + 7):
            text, word_starts = cyclic.read(start, start + length)
            assert text.tolist() == [ids[place % size] for place in range(start, start + length)]
            assert word_starts.tolist() == [starts[place % size] for place in range(start, start + length)]
            assert cyclic.cuts(start, start + length).tolist() == [c for c in everywhere if start <= c < start + length]


def config(length: int = 32, *, reversed_rows: bool = True) -> DataConfig:
    return DataConfig(sequence_length=length, packing="two-part", reversed_rows=reversed_rows)


def step(split: MemorySplit, number: int, *, ordered: bool = True, reversed_rows: bool = True) -> TokenBatch:
    rows = training_rows(split, WITH_EOD, config(reversed_rows=reversed_rows), 0, slots=4 if ordered else None)
    places = np.arange(4)
    return rows.batch(number * 4 + places, places)


def test_the_layout() -> None:
    split = split_of()
    labels = []
    for number in range(30):
        batch = step(split, number)
        assert batch.full
        assert batch.attention_mask.all()
        assert batch.reuse_length == 16
        assert batch.is_reversed is not None
        assert batch.is_reversed.tolist() == [False, True, False, True]
        assert batch.continues is not None
        labels += batch.continues.tolist()
        for row in range(4):
            special = batch.special_tokens_mask[row].nonzero().flatten().tolist()
            middle = special[0]
            assert special == [middle, 30, 31]
            assert 16 < middle < 29
            assert batch.input_ids[row, special].tolist() == [SPECIAL.sep, SPECIAL.sep, SPECIAL.cls]
            assert batch.token_type_ids[row].tolist() == [0] * (middle + 1) + [1] * (30 - middle) + [2]
            assert batch.position_ids[row].tolist() == list(range(32))
    assert 0.35 < np.mean(labels) < 0.6
    assert not step(split, 0, reversed_rows=False).is_reversed.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("backwards", [0, 1])
def test_a_slot_reads_on_where_it_ended(backwards: int) -> None:
    split = split_of()
    cyclic: ForwardText | BackwardText = ForwardText(split, EOD)
    cyclic = BackwardText(cyclic) if backwards else cyclic
    rows = [step(split, number) for number in range(60)]
    for slot in (backwards, 2 + backwards):
        read = np.concatenate([batch.input_ids[slot, :16] for batch in rows])
        first = int(np.flatnonzero(cyclic.read(0, cyclic.size)[0] == read[read != EOD][0])[0]) - int(np.argmax(read != EOD))
        assert read.tolist() == cyclic.read(first, first + len(read))[0].tolist()
        for batch, following in itertools.pairwise(rows):
            middle = int(batch.special_tokens_mask[slot].nonzero()[0])
            shown = batch.input_ids[slot, 16:middle]  # A, which the next row begins with
            assert torch.equal(shown, following.input_ids[slot, : len(shown)])


@pytest.mark.parametrize("backwards", [False, True])
def test_a_ends_at_a_sentence_and_b_follows_or_does_not_overlap(backwards: bool) -> None:
    cyclic: ForwardText | BackwardText = ForwardText(split_of(), EOD)
    cyclic = BackwardText(cyclic) if backwards else cyclic
    rng = np.random.default_rng(0)
    for _ in range(500):
        row = int(rng.integers(cyclic.size))
        begin, room = row + 16, 13
        chosen = choose_segments(cyclic, (row, begin, room), rng.random(3))
        assert chosen.first + chosen.second == room
        assert min(chosen.first, chosen.second) >= 1
        if chosen.continues:
            # Trimming takes from the longer, so A may end before the sentence where B begins.
            assert begin + chosen.first <= chosen.start == cyclic.next_cut(chosen.start)
            assert chosen.start + chosen.second <= cyclic.next_cut(begin + room)
        else:
            assert cyclic.next_cut(chosen.start) == chosen.start, "B begins with a sentence"
            assert begin + room <= chosen.start
            assert chosen.start + chosen.second <= row + cyclic.size


def test_segments_by_hand() -> None:
    # Sentences of 4, 4, 4, ... tokens; each document is one sentence of 3 and its end.
    cyclic = ForwardText(MemorySplit([[[100 + 3 * n, 101 + 3 * n, 102 + 3 * n]] for n in range(30)]), EOD)
    half = np.array([0.5, 0.0, 0.0])
    # Cuts within 10 tokens behind place 8: 12, 16. The first is drawn, B is 12 to 20; 2 too many come off the longer one, B.
    assert choose_segments(cyclic, (0, 8, 10), half) == (4, 12, 6, True)
    # The second is drawn: A has 8, B 4, and 2 come off A.
    assert choose_segments(cyclic, (0, 8, 10), np.array([0.5, 0.5, 0.0])).first == 6
    # Another B: from place 20 on, the end of what the row may show.
    assert choose_segments(cyclic, (0, 8, 10), np.array([0.0, 0.0, 0.0])) == (4, 20, 6, False)
    # No cut within 3 tokens of place 8: A is the whole sentence and gives a token for B.
    assert not choose_segments(cyclic, (0, 8, 3), half).continues


@pytest.mark.parametrize("ordered", [True, False])
def test_any_rows_at_once_and_the_same_again(ordered: bool) -> None:
    split = split_of()
    rows = training_rows(split, WITH_EOD, config(), 0, slots=6 if ordered else None)
    slots = np.arange(6)
    whole = rows.batch(60 + slots, slots)
    part = training_rows(split, WITH_EOD, config(), 0, slots=6 if ordered else None).batch(62 + slots[:3], slots[2:5])
    assert torch.equal(whole.input_ids[2:5], part.input_ids)


def test_shuffled_rows_of_the_next_epoch_are_others_and_half_run_backwards() -> None:
    split = split_of(200)
    rows = training_rows(split, WITH_EOD, config(), 0)
    count = rows.num_rows
    first, second = (rows.batch(epoch * count + np.arange(count), np.arange(count)) for epoch in (0, 1))
    assert not torch.equal(first.input_ids, second.input_ids)
    assert first.is_reversed is not None
    assert first.is_reversed.tolist() == [bool(slot % 2) for slot in range(count)], "the same number in every batch"


def test_heldout_rows_stand_in_the_order_of_the_text() -> None:
    split = split_of()
    rows = heldout_rows(split, WITH_EOD, config())
    places = np.arange(rows.num_rows)
    batch = rows.batch(places, places)
    ids, _, _ = written_out(split)
    assert batch.input_ids[:, :16].flatten().tolist() == ids[: 16 * rows.num_rows]
    assert torch.equal(batch.input_ids[3:5], rows.batch(places[3:5], places[3:5]).input_ids)


def test_sep_ends_a_document_where_the_tokenizer_has_no_end_of_document() -> None:
    rows = heldout_rows(MemorySplit([[[7, 8, 9]]] * 20), SPECIAL, config(10))
    batch = rows.batch(np.array([0]), np.array([0]))
    assert batch.input_ids[0, :5].tolist() == [7, 8, 9, SPECIAL.sep, 7]
    assert not batch.special_tokens_mask[0, 3], "within the text it is a token like any other"


@pytest.mark.parametrize("documents", [[[[7]]], [[[7, 8]], [[9]]], [[[7] * 300]]])
def test_a_text_shorter_than_a_row_repeats(documents: list[list[list[int]]]) -> None:
    split = MemorySplit(documents)
    for slots in (None, 4):
        batch = training_rows(split, WITH_EOD, config(), 0, slots=slots).batch(np.arange(8), np.arange(8) % 4)
        assert batch.input_ids.shape == (8, 32)
        assert set(batch.input_ids.flatten().tolist()) <= {2, 3, 7, 8, 9, EOD}


@pytest.mark.parametrize("settings", [{"sequence_length": 63}, {"length_schedule": ((0, 17), (5, 63))}, {"sequence_length": 8}])
def test_rows_without_halves_are_refused(settings: dict[str, Any]) -> None:
    DataConfig(**settings, packing="packed")
    with pytest.raises(ValueError, match=r"even sequence_length of at least 10, not .*; set data.sequence_length="):
        DataConfig(**settings, packing="two-part")
