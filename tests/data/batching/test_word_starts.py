"""Where words begin, from the data set into the batches of training."""

import numpy as np
import pytest

from discern.data.batching.rows import build_packing
from discern.data.batching.segments import PackedRows, SegmentRows
from discern.data.batching.stream import ExampleStream
from discern.data.config import DataConfig
from tests.support import SPECIAL, MemorySplit, random_documents


def begins(token: int) -> bool:
    """In these tests an even id begins a word and an odd one continues it."""
    return token % 2 == 0


@pytest.mark.parametrize("packing", ["packed", "segments"])
@pytest.mark.parametrize("overflow", ["carry", "drop"])
def test_every_token_keeps_its_bit(packing: str, overflow: str) -> None:
    split = MemorySplit(random_documents(60, 90, seed=3), per_shard=17, begins=begins)
    config = DataConfig(sequence_length=24, packing=packing, overflow=overflow)
    stream = ExampleStream(build_packing(split, SPECIAL, config, 5, training=True), 5)
    count = stream.num_rows
    batch = stream.batch(np.arange(count - 5, 2 * count), np.arange(count + 5))  # over the border of two epochs
    assert batch.word_starts is not None
    assert batch.word_starts.equal((batch.input_ids % 2 == 0) & ~batch.special_tokens_mask)


def test_segments_by_hand() -> None:
    split = MemorySplit([[[10, 11, 12], [13, 15]]], begins=begins)
    config = DataConfig(sequence_length=10, single_segment_probability=0, short_sequence_probability=0)
    rows = SegmentRows(split, SPECIAL, config, 0).rows(np.array([0]), 0)
    assert rows.word_starts is not None
    ids, starts = rows.input_ids[0].tolist(), rows.word_starts[0].tolist()
    assert [token for token, start in zip(ids, starts, strict=True) if start] == [10, 12]
    assert ids[:5] == [SPECIAL.cls, 10, 11, 12, SPECIAL.sep] or ids[:6] == [SPECIAL.cls, 10, 11, 12, 13, 15]


def test_packed_rows_by_hand() -> None:
    split = MemorySplit([[[10, 11], [12]], [[20, 21, 22, 23]], [[30]]], begins=begins)
    rows = PackedRows(split, SPECIAL, 6, 0, rotate=False).rows(np.array([0, 1, 2]), 0)
    assert rows.word_starts is not None
    # [CLS] 10 11 12 [SEP] [SEP] / [CLS] 20 21 22 23 [SEP] / [CLS] [SEP] [CLS] 30 [SEP] [PAD]
    assert rows.word_starts.astype(int).tolist() == [[0, 1, 0, 1, 0, 0], [0, 1, 0, 1, 0, 0], [0, 0, 0, 1, 0, 0]]
