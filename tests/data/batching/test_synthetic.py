import numpy as np
import pytest
import torch

from discern.data.batching.synthetic import SPECIAL, SyntheticRows


def test_full_rows_are_framed_and_hold_words_only() -> None:
    numbers = np.arange(6)
    batch = SyntheticRows(100, 12, 1.0, 6, 0).batch(numbers, numbers)
    assert batch.full
    assert batch.visible_mask is None
    assert (batch.input_ids[:, 0] == SPECIAL.cls).all()
    assert (batch.input_ids[:, -1] == SPECIAL.sep).all()
    assert batch.input_ids[:, 1:-1].min() > SPECIAL.mask
    assert batch.input_ids.max() < 100
    assert torch.equal(batch.special_tokens_mask, torch.tensor([True, *[False] * 10, True]).expand(6, -1))


@pytest.mark.parametrize("fill", [0.1, 0.6, 0.9])
def test_uneven_rows_are_as_full_as_asked(fill: float) -> None:
    numbers = np.arange(2000)
    batch = SyntheticRows(100, 64, fill, 2000, 0).batch(numbers, numbers)
    lengths = batch.attention_mask.sum(1)
    assert float(lengths.float().mean()) / 64 == pytest.approx(fill, abs=0.02)
    assert len(lengths.unique()) > 5
    assert (batch.input_ids[~batch.attention_mask] == SPECIAL.pad).all()
    assert (batch.input_ids.gather(1, lengths[:, None] - 1) == SPECIAL.sep).all()


def test_rows_of_two_parts_are_laid_out_as_those_of_text() -> None:
    batch = SyntheticRows(40, 32, 1.0, 6, 0, two_parts=True).batch(np.arange(4), np.arange(4))
    assert batch.reuse_length == 16
    assert batch.is_reversed is not None
    assert batch.is_reversed.tolist() == [False, True, False, True]
    for row in range(4):
        special = batch.special_tokens_mask[row].nonzero().flatten().tolist()
        assert special == [23, 30, 31]
        assert batch.input_ids[row, special].tolist() == [SPECIAL.sep, SPECIAL.sep, SPECIAL.cls]
        assert batch.token_type_ids[row].tolist() == [0] * 24 + [1] * 7 + [2]
        words = [place for place in range(32) if place not in special]
        assert (batch.input_ids[row, words] >= 5).all()
