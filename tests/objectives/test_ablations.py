"""The objectives between BERT and ELECTRA: what each reads, where it is judged, and its figures by hand."""

from __future__ import annotations

import math

import pytest
import torch

from discern.corruption.randomness import Randomness
from discern.models.embeddings import DisentangledEmbeddings
from discern.objectives import objectives
from discern.objectives.ablations import AllTokensMLM
from discern.objectives.base import Objective
from discern.objectives.masked import MaskedLanguageModel, MLMConfig
from discern.objectives.metrics import MetricsEvaluator
from discern.types import CorruptedBatch, LossTerm, StepOutput, TokenBatch
from tests.support import SPECIAL, make_batch, settings


def build(name: str, **options: object) -> Objective:
    factory = objectives.load(name)
    model = settings(hidden_dropout=0.0, attention_dropout=0.0, initializer_range=0.3)
    objective: Objective = factory(factory.Config(**options), model)
    objective.initialize(0)
    return objective


def rows(count: int = 8) -> TokenBatch:
    rng = torch.Generator().manual_seed(0)
    return make_batch([[SPECIAL.cls, *torch.randint(5, 50, (20,), generator=rng).tolist(), SPECIAL.sep] for _ in range(count)])


def run(objective: Objective, tokens: TokenBatch) -> tuple[CorruptedBatch, StepOutput]:
    numbers = Randomness(0, 0, tokens.slot)
    corrupted = objective.corrupt(tokens, numbers)
    return corrupted, objective(corrupted, numbers)


@pytest.mark.parametrize("name", ["rtd-masked-only", "replace-mlm", "all-tokens-mlm"])
def test_the_encoder_reads_samples_and_never_a_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objective, tokens, read = build(name), rows(), []
    encoder = next(iter(objective.networks().values())).encoder
    encoder.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    corrupted, output = run(objective, tokens)
    (ids,) = read
    assert not (ids == SPECIAL.mask).any() or (output.observations["sampled_ids"] == SPECIAL.mask).any()
    assert torch.equal(ids[~corrupted.masked_positions], tokens.input_ids[~corrupted.masked_positions])
    assert torch.equal(ids[corrupted.masked_positions], output.observations["sampled_ids"])


def test_only_the_chosen_positions_are_judged() -> None:
    """The gradient that reaches the discriminator's logits is zero everywhere else."""
    objective, tokens, seen = build("rtd-masked-only"), rows(), []
    objective.networks()["discriminator"].head.register_forward_hook(
        lambda _, __, logits: seen.append(logits.retain_grad() or logits)
    )
    corrupted, output = run(objective, tokens)
    output.terms["discriminator"].total.backward()
    gradient = seen[0].grad
    assert torch.equal(gradient != 0, corrupted.masked_positions)
    logits, replaced = seen[0][corrupted.masked_positions], output.observations["is_replaced"][corrupted.masked_positions]
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, replaced.float())
    assert output.terms["discriminator"].total.item() / corrupted.num_masked == pytest.approx(each.item(), rel=1e-5)


def test_masked_only_and_all_tokens_are_the_same_network() -> None:
    """Of the same weights and positions, the two objectives give the same logits, and the same generator's loss."""
    tokens = rows()
    (_, masked_only), (_, everywhere) = run(build("rtd-masked-only"), tokens), run(build("rtd"), tokens)
    assert torch.equal(masked_only.observations["discriminator_logits"], everywhere.observations["discriminator_logits"])
    assert masked_only.terms["generator"].total.item() == pytest.approx(everywhere.terms["generator"].total.item(), rel=1e-6)


def test_where_the_generator_is_right_all_tokens_are_copied() -> None:
    """A gate that always copies costs nothing where nothing was replaced, and nearly everything where something was."""
    objective, tokens = build("all-tokens-mlm"), rows()
    with torch.no_grad():
        objective.head.copy_gate.weight.zero_()  # type: ignore[union-attr, operator]
        objective.head.copy_gate.bias.fill_(20.0)  # type: ignore[union-attr, operator]
    _, output = run(objective, tokens)
    replaced = int((output.observations["corrupted_ids"] != tokens.input_ids).sum())
    assert replaced > 0
    assert output.terms["mlm"].total.item() > 20 * replaced
    assert output.terms["mlm"].count == int(tokens.attention_mask.sum())


def test_figures_of_copying_by_hand() -> None:
    """Four words read as 5 6 7 8, meant as 5 6 9 9. The first is copied, the second written over; the third is restored, the
    fourth copied wrongly."""
    tokens = make_batch([[5, 6, 9, 9]])
    chosen = torch.tensor([[False, True, True, True]])
    batch = CorruptedBatch(tokens, tokens.input_ids, chosen, 3, 4)
    words = torch.zeros(4, 10)
    words[1, 0] = words[2, 9] = 10.0
    gate = torch.tensor([3.0, -3.0, -3.0, 3.0])
    output = StepOutput(
        {"mlm": LossTerm(torch.tensor(6.0), 4), "generator": LossTerm(torch.tensor(1.5), 3)},
        {
            "generator_logits": torch.zeros(3, 10),
            "generator_targets": torch.tensor([6, 9, 9]),
            "sampled_ids": torch.tensor([6, 7, 8]),
            "corrupted_ids": torch.tensor([[5, 6, 7, 8]]),
            "mlm_logits": words,
            "mlm_targets": torch.tensor([5, 6, 9, 9]),
            "copy_logits": gate,
        },
    )
    evaluator = MetricsEvaluator(AllTokensMLM.metrics, {"generator_loss": 1.0, "mlm_loss": 1.0})
    evaluator.update(output, batch)
    sigmoid = 1 / (1 + math.exp(-3))
    assert evaluator.compute() == pytest.approx(
        {
            "loss": 2.0,
            "generator_loss": 0.5,
            "generator_accuracy": 0.0,
            "sampled_accuracy": 1 / 3,
            "mlm_loss": 1.5,
            "mlm_accuracy": 2 / 4,
            "masked_accuracy": 1 / 3,
            "copy_probability": (2 * sigmoid + 2 * (1 - sigmoid)) / 4,
            "replaced_fraction": 2 / 4,
        },
        rel=1e-6,
    )


def test_figures_of_restoring() -> None:
    objective, tokens = build("replace-mlm").eval(), rows()
    corrupted, output = run(objective, tokens)
    evaluator = objective.evaluator()
    evaluator.update(output, corrupted)
    figures, seen = evaluator.compute(), output.observations
    replaced = (seen["sampled_ids"] != seen["generator_targets"]).float().mean().item()
    assert figures["replaced_fraction"] == pytest.approx(replaced)
    means = {name: term.total.item() / corrupted.num_masked for name, term in output.terms.items()}
    assert figures["loss"] == pytest.approx(means["generator"] + means["mlm"])
    assert figures["mlm_accuracy"] == pytest.approx((seen["mlm_logits"].argmax(1) == seen["mlm_targets"]).float().mean().item())


@pytest.mark.parametrize("name", ["rtd-masked-only", "electric"])
def test_disentangled_words_get_no_gradient_from_the_discriminator(name: str) -> None:
    objective = build(name, tying="gradient-disentangled", discriminator_head="bilinear")
    _, output = run(objective, rows())
    read = objective.networks()["discriminator"].encoder.embeddings
    assert isinstance(read, DisentangledEmbeddings)
    output.terms["discriminator"].total.backward()
    assert read.shared.word.weight.grad is None
    assert read.difference.weight.grad is not None


@pytest.mark.parametrize("name", ["rtd-masked-only", "electric", "replace-mlm", "all-tokens-mlm"])
@pytest.mark.parametrize("tying", ["token", "none"])
def test_the_ways_of_tying(name: str, tying: str) -> None:
    first, generator = (network.encoder.embeddings for network in build(name, tying=tying).networks().values())
    assert first is not generator
    assert (first.weights is generator.weights) is (tying == "token")
    assert torch.isfinite(run(build(name, tying=tying), rows())[1].terms["generator"].total)


@pytest.mark.parametrize(("mask", "random"), [(0.8, 0.1), (0.85, 0.0), (1.0, 0.0)])
def test_masked_language_modeling_hides_as_it_is_told(mask: float, random: float) -> None:
    """80/10/10, 85/15, and [MASK] alone: shares of the chosen positions, within four standard deviations."""
    config = MLMConfig(mask_token_probability=mask, random_token_probability=random)
    objective, tokens = MaskedLanguageModel(config, settings(vocab_size=5000)), rows(1000)
    corrupted = objective.corrupt(tokens, Randomness(0, 0, tokens.slot))
    chosen = corrupted.masked_positions
    assert corrupted.num_masked == 3000
    hidden, original = corrupted.masked_ids[chosen], tokens.input_ids[chosen]
    slack = 4 * 0.5 / math.sqrt(3000)
    assert (hidden == SPECIAL.mask).float().mean().item() == pytest.approx(mask, abs=slack if mask < 1 else 0)
    assert (hidden == original).float().mean().item() == pytest.approx(1 - mask - random, abs=slack if mask < 1 else 0)
    assert torch.equal(corrupted.masked_ids[~chosen], tokens.input_ids[~chosen])
