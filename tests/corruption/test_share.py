"""The share of chosen tokens that is claimed, against what the maskings choose and what clean texts put back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from discern.corruption import maskings
from discern.corruption.masking import MaskingContext, chosen_share
from discern.corruption.randomness import Randomness
from discern.models.config import build_config
from discern.objectives.rtd_variants import SentenceContrast
from discern.types import TokenBatch
from tests.support import SPECIAL, make_batch

ROWS = 2000


def full_rows(length: int) -> TokenBatch:
    """Rows of one text each; every second token begins a word."""
    made = make_batch([[SPECIAL.cls, *[9] * (length - 2), SPECIAL.sep]] * ROWS)
    return replace(made, word_starts=(torch.arange(length) % 2 == 1).expand(ROWS, length).contiguous())


@pytest.mark.parametrize("masking", ["uniform", "whole-word", "span", "with-replacement"])
@pytest.mark.parametrize(("length", "probability"), [(32, 0.15), (64, 0.25), (128, 0.15)])
def test_the_maskings_choose_that_share(masking: str, length: int, probability: float) -> None:
    batch = full_rows(length)
    chosen = maskings.load(masking)(batch, MaskingContext(probability, Randomness(0, 0, batch.slot))).positions
    counts = chosen.sum(1).double()
    share = chosen_share(masking, probability, length)
    assert share is not None
    # Words of two leave one token of an odd number unchosen.
    slack = 1.0 if masking in ("whole-word", "span") else 1e-9
    assert float(counts.mean()) == pytest.approx(share * (length - 2), abs=slack + 5 * float(counts.std()) / ROWS**0.5)


def test_the_released_settings_choose_less_than_they_say() -> None:
    assert chosen_share("with-replacement", 0.15, 128) == pytest.approx(17.7 / 126, abs=1e-4)
    assert chosen_share("with-replacement", 0.15, 512) == pytest.approx(71.5 / 510, abs=1e-4)
    assert chosen_share("with-replacement", 0.25, 512) == pytest.approx(113.3 / 510, abs=1e-4)
    assert chosen_share("uniform", 0.15, 64) == 9 / 62


@pytest.mark.parametrize("masking", ["rarity", "of another package"])
def test_where_the_token_decides_there_is_no_share(masking: str) -> None:
    assert chosen_share(masking, 0.15, 128) is None


def test_clean_texts_put_back_what_was_chosen_in_them() -> None:
    batch = full_rows(64)
    chosen = maskings.load("uniform")(batch, MaskingContext(0.15, Randomness(0, 0, batch.slot))).positions
    contrast = SentenceContrast(build_config(), 0.2, 1.0)
    restored = contrast.restore(batch.input_ids.masked_fill(chosen, 7), batch, Randomness(0, 1, batch.slot))
    left = float((restored == 7).sum()) / (ROWS * 62)
    share = chosen_share("uniform", 0.15, 64)
    assert share is not None
    assert left == pytest.approx(share * 0.8, abs=5 * share * (0.2 * 0.8 / ROWS) ** 0.5)
