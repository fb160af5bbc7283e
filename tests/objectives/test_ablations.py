"""The objectives between BERT and ELECTRA: what each reads, where it is judged, and its figures by hand."""

from __future__ import annotations

import math

import pytest
import torch

from discern.corruption.randomness import Randomness
from discern.objectives import objectives
from discern.objectives.ablations import AllTokensMLM
from discern.objectives.base import Objective
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
            **dict.fromkeys(("generator_targets", "sampled_targets"), torch.tensor([6, 9, 9])),
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
