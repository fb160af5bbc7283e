"""What the objectives share: the rate of masking, duplicate draws in loss and samples, and settings that are refused."""

from typing import Any

import pytest
import torch

from discern.corruption.randomness import Randomness
from discern.models.base import Network
from discern.objectives.losses import DenseLogits
from discern.objectives.masked import MaskedLanguageModel, MLMConfig, sample_replacements
from discern.types import CorruptedBatch, TokenBatch
from tests.support import SPECIAL, make_batch, settings


def masked(batch: TokenBatch, numbers: Randomness, **options: Any) -> CorruptedBatch:
    config = MLMConfig(mask_token_probability=1.0, random_token_probability=0.0, **options)
    return MaskedLanguageModel(config, settings(50)).corrupt(batch, numbers)


@pytest.mark.parametrize(("step", "expected"), [(0, 0.1), (50, 0.2), (75, 0.25), (100, 0.3), (10_000, 0.3)])
def test_the_rate_goes_evenly_to_its_end(step: int, expected: float) -> None:
    batch = make_batch([[SPECIAL.cls, *[9] * 40, SPECIAL.sep]] * 3)
    changing = {"mask_probability": 0.1, "mask_probability_end": 0.3, "mask_probability_steps": 100}
    assert masked(batch, Randomness(0, step, batch.slot), **changing).num_masked == 3 * round(40 * expected)
    assert masked(batch, Randomness(0, step, batch.slot)).num_masked == 3 * 6


def test_draws_are_counted() -> None:
    batch = make_batch([[SPECIAL.cls, *[9] * 30, SPECIAL.sep]] * 20)
    drawn = masked(batch, Randomness(0, 0, batch.slot), masking="with-replacement", mask_probability=0.5)
    assert drawn.draws is not None
    assert drawn.target_draws is not None
    assert drawn.num_targets == int(drawn.draws.sum()) == 20 * 16
    assert drawn.num_masked == int(drawn.masked_positions.sum()) < drawn.num_targets
    assert drawn.target_draws.tolist() == drawn.draws[drawn.masked_positions].tolist()
    plain = masked(batch, Randomness(0, 0, batch.slot))
    assert plain.num_targets == plain.num_masked
    assert plain.target_draws is None


def test_samples_of_duplicates_are_averaged_and_don_t_depend_on_the_batch() -> None:
    batch = make_batch([[SPECIAL.cls, *[9] * 12, SPECIAL.sep]] * 6)
    numbers = Randomness(0, 0, batch.slot)
    options = {"masking": "with-replacement", "mask_probability": 0.6}

    def sampled(start: int, stop: int) -> torch.Tensor:
        rows = numbers.rows(start, stop)
        part = masked(batch.rows(start, stop), rows, **options)
        logits = DenseLogits(torch.zeros(part.num_masked, 1000))
        return sample_replacements(part, logits, rows, lambda logits, uniforms: (uniforms * logits.shape[1]).long())

    corrupted, whole = masked(batch, numbers, **options), sampled(0, 6)
    assert corrupted.target_draws is not None
    assert torch.equal(whole, torch.cat([sampled(0, 2), sampled(2, 6)]))
    positions, draws = corrupted.masked_positions, corrupted.target_draws
    names = ("replacements", "replacements 1", "replacements 2")
    drawn = torch.stack([(numbers.uniforms(name, positions.shape[1])[positions] * 1000).long() for name in names])
    for times in (1, 2, 3):
        assert torch.equal(whole[draws == times], (drawn[:times].sum(0) // times)[draws == times])
        assert (draws == times).any()


@pytest.mark.parametrize("masking", ["uniform", "with-replacement"])
def test_a_teacher_adds_its_divergence_and_no_parameters(masking: str) -> None:
    config = MLMConfig(masking=masking, mask_probability=0.5, teacher="large", teacher_weight=0.25, teacher_temperature=3.0)
    student, teacher = (MaskedLanguageModel(config, settings(50, hidden_dropout=0.0, attention_dropout=0.0)) for _ in range(2))
    student.initialize(0)
    teacher.initialize(1)
    names = student.state_dict().keys()
    student.teachers = (Network(teacher.encoder.eval(), teacher.head.eval()),)
    tokens = make_batch([[SPECIAL.cls, *range(9, 29), SPECIAL.sep]] * 4)
    batch = student.corrupt(tokens, Randomness(0, 0, tokens.slot))
    output = student(batch, Randomness(0, 0, tokens.slot))
    assert student.state_dict().keys() == names
    assert student.counts(batch) == {"mlm": batch.num_targets, "teacher": batch.num_targets}
    assert [term.weight for term in output.terms.values()] == [0.75, 0.25]

    chosen = batch.masked_positions
    p, q = (
        (network.head(network.encoder(batch.masked_ids, tokens.attention_mask))[chosen] / 3).log_softmax(-1)
        for network in (student.teachers[0], student.networks()["encoder"])
    )
    draws = torch.ones(len(p)) if batch.draws is None else batch.draws[chosen]
    expected = 9 * (draws * (p.exp() * (p - q)).sum(-1)).sum()
    torch.testing.assert_close(output.terms["teacher"].total, expected)
    # An evaluation measures the text alone.
    assert student.eval().counts(batch).keys() == student(batch, Randomness(0, 0, tokens.slot)).terms.keys() == {"mlm"}
