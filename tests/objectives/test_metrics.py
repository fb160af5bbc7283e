"""Held-out figures: by hand, against scikit-learn, and whatever the batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, precision_score, recall_score, roc_auc_score
from torch import Tensor

from discern.corruption.masking import maskable_positions
from discern.corruption.randomness import Randomness
from discern.models.heads import ReplacedTokenHead
from discern.objectives.base import Evaluator
from discern.objectives.losses import masked_token_loss, replaced_token_loss
from discern.objectives.metrics import MetricsEvaluator, area_under_curve, ratio, replaced_token_metrics
from discern.types import CorruptedBatch, StepOutput, TokenBatch
from tests.parity.small_networks import build, sizes, token_batch


def test_ratio_of_nothing_is_zero() -> None:
    assert ratio(0, 0) == 0.0
    assert ratio(1, 4) == 0.25


@pytest.mark.parametrize(
    ("scores", "positive", "expected"),
    [
        ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
        ([4, 3, 2, 1], [0, 0, 1, 1], 0.0),
        ([1, 1, 1, 1], [0, 1, 0, 1], 0.5),
        ([1, 2, 2, 3], [0, 0, 1, 1], 0.875),  # of four pairs three are right and one is tied
        ([1, 2], [1, 1], 0.0),
        ([1, 2], [0, 0], 0.0),
        ([], [], 0.0),
    ],
)
def test_area_by_hand(scores: Sequence[float], positive: Sequence[int], expected: float) -> None:
    assert area_under_curve(np.array(scores, np.float32), np.array(positive, bool)) == pytest.approx(expected)


@pytest.mark.parametrize("levels", [2, 5, 40, 10**6])
def test_area_is_that_of_scikit_learn(levels: int) -> None:
    """Few levels make many ties."""
    random = np.random.default_rng(levels)
    for share in (0.01, 0.15, 0.5):
        positive = random.random(3000) < share
        scores = (random.integers(0, levels, 3000) + levels * 0.3 * positive).round().astype(np.float32)
        assert area_under_curve(scores, positive) == pytest.approx(roc_auc_score(positive, scores), abs=1e-12)


def batch_of(lengths: Sequence[int], width: int, masked: Tensor) -> CorruptedBatch:
    tokens = token_batch(lengths, width)
    return CorruptedBatch(tokens, tokens.input_ids, masked, int(masked.sum()), int(tokens.attention_mask.sum()))


def test_replaced_tokens_by_hand() -> None:
    """Two rows of 4 and 3 real tokens. Four were chosen: two samples differ, two are lucky. One replaced token is found,
    one is missed, one real token is flagged; what stands at the padding counts nowhere."""
    masked = torch.tensor([[False, True, True, False], [False, True, True, False]])
    batch = batch_of([4, 3], 4, masked)
    is_replaced = torch.tensor([[False, True, False, False], [False, True, False, True]])
    logits = torch.tensor([[-1.0, 2.0, 1.0, -2.0], [-3.0, -1.0, -2.0, 9.0]])
    targets = torch.tensor([5, 6, 7, 8])
    generator_logits = torch.zeros(4, 97)
    generator_logits[0, 5] = generator_logits[1, 6] = generator_logits[2, 9] = generator_logits[3, 8] = math.log(2)
    output = StepOutput(
        {
            "generator": masked_token_loss(generator_logits, targets),
            "discriminator": replaced_token_loss(logits, is_replaced, batch.tokens.attention_mask, batch.num_tokens),
        },
        {
            "generator_logits": generator_logits,
            "generator_targets": targets,
            "sampled_ids": torch.tensor([50, 6, 51, 8]),
            "is_replaced": is_replaced,
            "discriminator_logits": logits,
        },
    )
    evaluator = MetricsEvaluator(replaced_token_metrics, {"generator_loss": 1.0, "discriminator_loss": 50.0})
    evaluator.update(output, batch)
    figures = evaluator.compute()

    # The true token has 2 / 98 of the probability three times, and 1 / 98 once.
    generator_loss = (3 * math.log(98 / 2) + math.log(98)) / 4
    right = [math.log1p(math.exp(-value)) for value in (1, 2, 2, 3, 2)]
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


def test_a_logit_of_zero_is_not_flagged() -> None:
    evaluator = MetricsEvaluator(replaced_token_metrics, {"generator_loss": 1.0, "discriminator_loss": 50.0})
    evaluator.update(*observed(logits=torch.zeros(1, 4), is_replaced=torch.tensor([[False, True, False, False]])))
    assert evaluator.compute()["discriminator_accuracy"] == 3 / 4


def observed(logits: Tensor, is_replaced: Tensor) -> tuple[StepOutput, CorruptedBatch]:
    """A batch of one full row where nothing was masked."""
    batch = batch_of([4], 4, torch.zeros(1, 4, dtype=torch.bool))
    nothing = torch.zeros(0, dtype=torch.long)
    terms = {
        "generator": masked_token_loss(torch.zeros(0, 97), nothing),
        "discriminator": replaced_token_loss(logits, is_replaced, batch.tokens.attention_mask, 4),
    }
    seen = {"generator_logits": torch.zeros(0, 97), "generator_targets": nothing, "sampled_ids": nothing}
    return StepOutput(terms, {**seen, "is_replaced": is_replaced, "discriminator_logits": logits}), batch


@pytest.mark.parametrize("name", ["rtd", "electric"])
def test_the_area_does_not_depend_on_what_is_said_of_special_tokens(name: str) -> None:
    objective = build(sizes(), name)
    randomness = Randomness(7, 0, EVERYTHING.example_index)
    corrupted = objective.corrupt(EVERYTHING, randomness)
    with torch.no_grad():
        output = objective(corrupted, randomness)
    areas = []
    for said in (-50.0, 50.0):
        seen = dict(output.observations)
        logits = "discriminator_logits" if name == "rtd" else "energy"
        seen[logits] = torch.where(EVERYTHING.special_tokens_mask, said, seen[logits])
        evaluator = objective.evaluator()
        evaluator.update(replace(output, observations=seen), corrupted)
        areas.append(evaluator.compute()["discriminator_auc"])
    assert 0 < areas[0] == areas[1] < 1


LENGTHS = [17, 3, 12, 20, 9, 5, 20, 2, 14, 8]
EVERYTHING = token_batch(LENGTHS, 20, seed=3)


def rows(start: int, stop: int) -> TokenBatch:
    return replace(EVERYTHING.rows(start, stop), full=False)


def evaluated(name: str, cuts: Sequence[int]) -> Evaluator:
    """Every row once, in batches that end at `cuts`."""
    objective = build(sizes(), name)
    evaluator = objective.evaluator()
    for start, stop in zip([0, *cuts], [*cuts, len(LENGTHS)], strict=True):
        batch = rows(start, stop)
        randomness = Randomness(7, 0, batch.example_index)
        corrupted = objective.corrupt(batch, randomness)
        with torch.no_grad():
            evaluator.update(objective(corrupted, randomness), corrupted)
    return evaluator


@pytest.mark.parametrize("name", ["rtd", "mlm"])
def test_the_batch_size_changes_nothing(name: str) -> None:
    whole = evaluated(name, []).compute()
    assert whole["loss"] > 0
    for cuts in ([5], [1, 2, 3], list(range(1, len(LENGTHS)))):
        assert evaluated(name, cuts).compute() == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", ["rtd", "mlm"])
def test_what_other_ranks_saw_is_merged(name: str) -> None:
    objective = build(sizes(), name)
    parts = []
    for rank in range(3):
        evaluator = objective.evaluator()
        for start in range(rank, len(LENGTHS), 3):
            batch = rows(start, start + 1)
            randomness = Randomness(7, 0, batch.example_index)
            corrupted = objective.corrupt(batch, randomness)
            with torch.no_grad():
                evaluator.update(objective(corrupted, randomness), corrupted)
        parts.append(evaluator)
    first, *others = parts
    for other in others:
        first.merge(other)
    assert first.compute() == pytest.approx(evaluated(name, []).compute(), rel=1e-5)


@torch.no_grad()
def test_the_figures_are_those_of_scikit_learn() -> None:
    objective = build(sizes())
    randomness = Randomness(7, 0, EVERYTHING.example_index)
    corrupted = objective.corrupt(EVERYTHING, randomness)
    real = EVERYTHING.attention_mask
    head = objective.networks()["discriminator"].head
    assert isinstance(head, ReplacedTokenHead)
    # A threshold in the middle, so that half of the tokens are flagged.
    head.output.bias -= objective(corrupted, randomness).observations["discriminator_logits"][real].median()
    output = objective(corrupted, randomness)
    evaluator = objective.evaluator()
    evaluator.update(output, corrupted)
    figures = evaluator.compute()
    truth, logits = output.observations["is_replaced"][real].numpy(), output.observations["discriminator_logits"][real].numpy()
    flagged = logits > 0
    assert 0.4 < flagged.mean() < 0.6
    words = maskable_positions(EVERYTHING)[real].numpy()
    assert 0 < words.sum() < len(words)
    assert figures["discriminator_auc"] == pytest.approx(roc_auc_score(truth[words], logits[words]))
    assert figures["discriminator_accuracy"] == pytest.approx(accuracy_score(truth, flagged))
    assert figures["discriminator_precision"] == pytest.approx(precision_score(truth, flagged))
    assert figures["discriminator_recall"] == pytest.approx(recall_score(truth, flagged))
