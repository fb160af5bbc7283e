"""Figures by group, on a batch small enough to compute by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from discern.objectives.metrics import Breakdown
from discern.types import CorruptedBatch, StepOutput
from tests.support import SPECIAL, make_batch

# Ids 5, 6, 7 make up 90 %, a little under 10 % and 5 in a million of the text.
COUNTS = np.array([0, 0, 0, 0, 0, 900_000, 99_995, 5], np.int64)


def batch_of(ids: list[list[int]], masked: list[list[bool]]) -> CorruptedBatch:
    tokens, positions = make_batch(ids), torch.tensor(masked)
    return CorruptedBatch(tokens, tokens.input_ids, positions, int(positions.sum()), int(tokens.attention_mask.sum()))


def test_tokens_count_by_the_frequency_and_the_place_of_the_original() -> None:
    batch = batch_of([[SPECIAL.cls, 5, 7, SPECIAL.sep]], [[False, True, True, False]])
    observed = {
        "generator_logits": torch.tensor([[0.0] * 5 + [9.0, 0.0, 0.0], [0.0] * 8]),
        "generator_targets": torch.tensor([5, 7]),
        "discriminator_logits": torch.tensor([[-5.0, -5.0, 5.0, -5.0]]),
        "is_replaced": torch.tensor([[False, False, True, False]]),
        "loss_mask": batch.tokens.attention_mask,
    }
    breakdown = Breakdown(COUNTS)
    breakdown.update(StepOutput({}, observed), batch)
    found = breakdown.metrics()
    frequent, rare = found["by_frequency"]
    assert (frequent["group"], rare["group"]) == ("1,000 and more", "1 to 10")
    assert (frequent["tokens"], rare["tokens"]) == (1, 1)  # [CLS] and [SEP] belong to no class
    assert (frequent["prediction_accuracy"], rare["prediction_accuracy"]) == (1.0, 0.0)
    assert rare["prediction_loss"] == pytest.approx(math.log(8))
    assert (frequent["replaced_fraction"], rare["replaced_fraction"]) == (0.0, 1.0)
    assert rare["discriminator_loss"] == pytest.approx(math.log1p(math.exp(-5)))
    assert rare["discriminator_recall"] == 1.0
    assert "discriminator_recall" not in frequent, "no token of the group was replaced"
    assert [row["group"] for row in found["by_position"]] == ["first quarter", "second quarter", "third quarter", "last quarter"]
    assert [row["tokens"] for row in found["by_position"]] == [1, 1, 1, 1]
    assert ["predicted_tokens" in row for row in found["by_position"]] == [False, True, True, False]
    share = 1 / (1 + math.exp(5))
    assert found["calibration"]["expected_calibration_error"] == pytest.approx(share)
    assert [row["tokens"] for row in found["calibration"]["bins"]] == [3, 1]


def test_padding_is_in_no_group_and_a_row_is_cut_by_its_real_tokens() -> None:
    batch = batch_of([[SPECIAL.cls, 5, 5, 5, 5, 5, 5, SPECIAL.sep], [SPECIAL.cls, SPECIAL.sep]], [[False] * 8, [False] * 8])
    logits = torch.zeros(2, 8)
    breakdown = Breakdown(COUNTS)
    seen = {"discriminator_logits": logits, "is_replaced": logits > 1, "loss_mask": batch.tokens.attention_mask}
    breakdown.update(StepOutput({}, seen), batch)
    assert [row["tokens"] for row in breakdown.metrics()["by_position"]] == [3, 2, 3, 2]


def test_an_objective_may_say_which_tokens_it_judges() -> None:
    batch = batch_of([[SPECIAL.cls, 5, 5, 5, 5, 5, 5, SPECIAL.sep]], [[False, True, False, True] + [False] * 4])
    logits = torch.tensor([[9.0, 1.0, 9.0, -1.0, 9.0, 9.0, 9.0, 9.0]])
    seen = {"discriminator_logits": logits, "is_replaced": batch.masked_positions, "loss_mask": batch.masked_positions}
    breakdown = Breakdown(COUNTS)
    breakdown.update(StepOutput({}, seen), batch)
    found = breakdown.metrics()
    assert [row.get("tokens") for row in found["by_position"]] == [1, 1]
    assert [row["discriminator_recall"] for row in found["by_position"]] == [1.0, 0.0]
    assert sum(row["tokens"] for row in found["calibration"]["bins"]) == 2
