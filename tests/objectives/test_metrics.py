"""Held-out figures: by hand, against scikit-learn, and whatever the batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from discern.objectives.losses import DenseLogits, replaced_token_loss
from discern.objectives.metrics import MetricsEvaluator, area_under_curve, replaced_token_metrics
from discern.types import CorruptedBatch, Places, StepOutput
from tests.parity.small_networks import token_batch


@pytest.mark.parametrize("levels", [5, 10**6])
def test_area_is_that_of_scikit_learn(levels: int) -> None:
    """Few levels make many ties."""
    random = np.random.default_rng(levels)
    positive = random.random(3000) < 0.15
    scores = (random.integers(0, levels, 3000) + levels * 0.3 * positive).round().astype(np.float32)
    assert area_under_curve(scores, positive) == pytest.approx(roc_auc_score(positive, scores), abs=1e-12)
    assert area_under_curve(scores, positive & False) == 0.0


def batch_of(lengths: Sequence[int], width: int, masked: Tensor) -> CorruptedBatch:
    tokens = token_batch(lengths, width)
    return CorruptedBatch(tokens, tokens.input_ids, masked, int(masked.sum()), int(tokens.attention_mask.sum()))


def test_replaced_tokens_by_hand() -> None:
    """Two rows of 4 and 3 real tokens. Four were chosen: two samples differ, two are lucky. One replaced token is found,
    one is missed, one real token is flagged; a logit of zero flags nothing, and what stands at the padding counts nowhere."""
    masked = torch.tensor([[False, True, True, False], [False, True, True, False]])
    batch = batch_of([4, 3], 4, masked)
    is_replaced = torch.tensor([[False, True, False, False], [False, True, False, True]])
    logits = torch.tensor([[-1.0, 2.0, 1.0, -2.0], [0.0, -1.0, -2.0, 9.0]])
    targets = torch.tensor([5, 6, 7, 8])
    generator_logits = torch.zeros(4, 97)
    generator_logits[0, 5] = generator_logits[1, 6] = generator_logits[2, 9] = generator_logits[3, 8] = math.log(2)
    output = StepOutput(
        {
            "generator": DenseLogits(generator_logits).loss(targets, Places(targets, 4)),
            "discriminator": replaced_token_loss(logits, is_replaced, batch.tokens.attention_mask, batch.num_tokens),
        },
        {
            "generator_logits": generator_logits,
            "generator_targets": targets,
            "sampled_ids": torch.tensor([50, 6, 51, 8]),
            "sampled_targets": targets,
            "loss_mask": batch.tokens.attention_mask,
            "is_replaced": is_replaced,
            "discriminator_logits": logits,
        },
    )
    evaluator = MetricsEvaluator(replaced_token_metrics, {"generator_loss": 1.0, "discriminator_loss": 50.0})
    evaluator.update(output, batch)
    figures = evaluator.compute()

    # The true token has 2 / 98 of the probability three times, and 1 / 98 once.
    generator_loss = (3 * math.log(98 / 2) + math.log(98)) / 4
    right = [math.log1p(math.exp(-value)) for value in (1, 2, 2, 0, 2)]
    wrong = [math.log1p(math.exp(value)) for value in (1, 1)]
    discriminator_loss = (sum(right) + sum(wrong)) / 7
    assert figures == pytest.approx(
        {
            "loss": generator_loss + 50 * discriminator_loss,
            "generator_loss": generator_loss,
            "generator_accuracy": 3 / 4,
            "sampled_accuracy": 2 / 4,
            "discriminator_loss": discriminator_loss,
            "discriminator_accuracy": 5 / 7,
            # Of words, without [CLS] and [SEP]. Replaced: 2 and -1. Real: 1. Of two pairs the 2 wins one.
            "discriminator_auc": 1 / 2,
            "discriminator_precision": 1 / 2,
            "discriminator_recall": 1 / 2,
            "replaced_fraction": 2 / 7,
        },
        rel=1e-6,
    )
