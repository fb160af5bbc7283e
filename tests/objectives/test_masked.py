"""What the objectives share: the rate of masking, duplicate draws in loss and samples, and settings that are refused."""

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from discern.corruption.randomness import Randomness
from discern.objectives import objectives
from discern.objectives.base import Vocabulary
from discern.objectives.config import MaskingConfig
from discern.objectives.losses import DenseLogits, masked_token_loss
from discern.objectives.masked import mask_batch, sample_replacements
from tests.support import SPECIAL, make_batch, settings

VOCABULARY = Vocabulary(50, SPECIAL)


def config(**changes: object) -> MaskingConfig:
    return MaskingConfig.model_validate({"name": "mlm", **changes})


@pytest.mark.parametrize(("step", "expected"), [(0, 0.1), (50, 0.2), (75, 0.25), (100, 0.3), (10_000, 0.3)])
def test_the_rate_goes_evenly_to_its_end(step: int, expected: float) -> None:
    changing = config(mask_probability=0.1, mask_probability_end=0.3, mask_probability_steps=100)
    assert changing.probability_at(step) == pytest.approx(expected)
    batch = make_batch([[SPECIAL.cls, *[9] * 40, SPECIAL.sep]] * 3)
    masked = mask_batch(batch, changing, VOCABULARY, Randomness(0, step, batch.slot))
    assert masked.num_masked == 3 * round(40 * expected)


def test_the_rate_stays_where_no_end_is_set() -> None:
    assert config().probability_at(10**6) == 0.15


@pytest.mark.parametrize("lone", [{"mask_probability_end": 0.3}, {"mask_probability_steps": 100}])
def test_an_end_without_its_step_is_refused(lone: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="set both or neither"):
        config(**lone)


def test_an_unknown_masking_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValidationError, match="unknown masking 'whole-words'; did you mean 'whole-word'"):
        config(masking="whole-words")


def test_draws_are_counted() -> None:
    batch = make_batch([[SPECIAL.cls, *[9] * 30, SPECIAL.sep]] * 20)
    masked = mask_batch(batch, config(masking="with-replacement", mask_probability=0.5), VOCABULARY, Randomness(0, 0, batch.slot))
    assert masked.draws is not None
    assert masked.target_draws is not None
    assert masked.num_targets == int(masked.draws.sum()) == 20 * 16
    assert masked.num_masked == int(masked.masked_positions.sum()) < masked.num_targets
    assert masked.target_draws.tolist() == masked.draws[masked.masked_positions].tolist()
    plain = mask_batch(batch, config(), VOCABULARY, Randomness(0, 0, batch.slot))
    assert plain.num_targets == plain.num_masked
    assert plain.target_draws is None


def test_a_position_drawn_twice_weighs_twice() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets, draws = torch.tensor([0, 4, 6]), torch.tensor([1, 2, 3])
    term = masked_token_loss(logits, targets, 2.0, draws)
    (gradient,) = torch.autograd.grad(term.total, logits)
    written_out = masked_token_loss(logits.repeat_interleave(draws, 0), targets.repeat_interleave(draws), 2.0)
    (expected,) = torch.autograd.grad(written_out.total, logits)
    torch.testing.assert_close(term.total, written_out.total)
    torch.testing.assert_close(gradient, expected)
    assert (term.count, term.weight) == (6, 2.0)


def test_samples_of_duplicates_are_averaged_and_don_t_depend_on_the_batch() -> None:
    batch = make_batch([[SPECIAL.cls, *[9] * 12, SPECIAL.sep]] * 6)
    numbers = Randomness(0, 0, batch.slot)
    settings = config(masking="with-replacement", mask_probability=0.6)

    def sampled(start: int, stop: int) -> torch.Tensor:
        part, rows = batch.rows(start, stop), numbers.rows(start, stop)
        masked = mask_batch(part, settings, VOCABULARY, rows)
        logits = torch.zeros(masked.num_masked, 1000)
        return sample_replacements(
            masked, DenseLogits(logits), rows, lambda logits, uniforms: (uniforms * logits.shape[1]).long()
        )

    masked = mask_batch(batch, settings, VOCABULARY, numbers)
    assert masked.target_draws is not None
    whole = sampled(0, 6)
    assert torch.equal(whole, torch.cat([sampled(0, 2), sampled(2, 6)]))
    positions, draws = masked.masked_positions, masked.target_draws
    drawn = [(numbers.uniforms(name, positions.shape[1])[positions] * 1000).long() for name in ("replacements", "replacements 1")]
    assert torch.equal(whole[draws == 1], drawn[0][draws == 1])
    assert torch.equal(whole[draws == 2], ((drawn[0] + drawn[1]) // 2)[draws == 2])
    assert (draws == 2).any()


@pytest.mark.parametrize("name", ["rtd", "mlm"])
@pytest.mark.parametrize("masking", ["with-replacement", "whole-word", "span", "rarity"])
def test_objectives_take_every_masking(name: str, masking: str) -> None:
    """Denominators are known beforehand, and the initial loss is that of even predictions."""
    factory = objectives.load(name)
    made = settings(50, hidden_dropout=0.0, attention_dropout=0.0)
    made = replace(made, vocabulary=replace(made.vocabulary, token_counts=torch.arange(50)))
    objective = factory(factory.Config(masking=masking), made)
    objective.initialize(0)
    rng = torch.Generator().manual_seed(0)
    batch = make_batch([[SPECIAL.cls, *torch.randint(5, 50, (20,), generator=rng).tolist(), SPECIAL.sep] for _ in range(32)])
    batch = replace(batch, word_starts=torch.rand(batch.input_ids.shape, generator=rng) < 0.7)
    numbers = Randomness(0, 0, batch.slot)
    corrupted = objective.corrupt(batch, numbers)
    output = objective(corrupted, numbers)
    assert objective.counts(corrupted) == {key: term.count for key, term in output.terms.items()}
    loss = sum(float(term.weight * term.total.detach() / term.count) for term in output.terms.values())
    assert loss == pytest.approx(objective.initial_loss(), rel=0.03)
