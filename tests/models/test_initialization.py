"""Weights at step 0: their distribution, what they depend on, and the loss they give."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from discern.corruption.randomness import Randomness
from discern.models.config import build_config
from discern.objectives import objectives
from discern.objectives.base import BuildSettings, Objective, Vocabulary
from discern.types import SpecialTokens
from tests.parity.small_networks import make_noisy, token_batch

BERT = Vocabulary(30522, SpecialTokens(pad=0, unk=1, cls=2, sep=3, mask=4))
# Wide enough for statistics, shallow enough for a moment.
SIZES = build_config(num_layers=2, hidden_size=256, embedding_size=128, num_heads=4, feedforward_size=1024, max_positions=512)


def initialized(name: str = "rtd", seed: int = 0) -> Objective:
    kind = objectives.load(name)
    objective: Objective = kind(kind.Config(), BuildSettings(SIZES, BERT))
    objective.initialize(seed)
    return objective


@pytest.fixture(scope="module")
def objective() -> Objective:
    return initialized()


def is_glorot(name: str) -> bool:
    return name in {"discriminator.projection.weight", "generator.projection.weight", "discriminator_head.output.weight"}


def parameters(objective: Objective) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in objective.named_parameters()}


def test_matrices_are_normal_cut_at_two_deviations(objective: Objective) -> None:
    """0.02 nominal; cut at two of them, the deviation is 0.02 x sqrt(1 - 4 phi(2) / (2 Phi(2) - 1)) = 0.0176."""
    density = math.exp(-2) / math.sqrt(2 * math.pi)
    expected = 0.02 * math.sqrt(1 - 4 * density / math.erf(math.sqrt(2)))
    assert expected == pytest.approx(0.0176, abs=5e-5)
    seen = 0
    for name, value in parameters(objective).items():
        if value.dim() == 2 and value.numel() > 30_000 and not is_glorot(name):
            assert float(value.std()) == pytest.approx(expected, rel=0.02), name
            assert float(value.mean()) == pytest.approx(0, abs=3e-4), name
            assert float(value.abs().max()) <= 0.04, name
            seen += value.numel()
    assert seen > 5_000_000


def test_glorot_where_the_released_code_leaves_the_default(objective: Objective) -> None:
    """Uniform between plus and minus sqrt(6 / (inputs + outputs))."""
    glorot = {name: value for name, value in parameters(objective).items() if is_glorot(name)}
    assert len(glorot) == 3
    for name, value in glorot.items():
        limit = math.sqrt(6 / sum(value.shape))
        assert 0.95 * limit < float(value.abs().max()) <= limit, name
        assert float(value.std()) == pytest.approx(limit / math.sqrt(3), rel=0.1), name


def test_biases_are_zero_and_norms_are_one(objective: Objective) -> None:
    norms = {name for name, part in objective.named_modules() if isinstance(part, nn.LayerNorm)}
    for name, value in parameters(objective).items():
        if value.dim() == 1:
            expected = 1.0 if name.removesuffix(".weight") in norms else 0.0
            assert torch.equal(value, torch.full_like(value, expected)), name


@pytest.mark.parametrize("name", ["rtd", "mlm"])
def test_the_seed_decides_every_parameter(name: str) -> None:
    """Whatever stood there before, and whatever torch's own generator did."""
    first, again, other = initialized(name), initialized(name), initialized(name, seed=1)
    torch.manual_seed(99)
    make_noisy(again)
    again.initialize(0)
    for parameter, value in parameters(first).items():
        assert torch.equal(value, parameters(again)[parameter]), parameter
    differing = [key for key, value in parameters(first).items() if not torch.equal(value, parameters(other)[key])]
    assert len(differing) == sum(value.dim() == 2 for value in parameters(first).values())


@torch.no_grad()
def test_the_first_loss_is_about_45(objective: Objective) -> None:
    """ln 30,522 = 10.3 for the generator and 50 ln 2 = 34.7 for the discriminator."""
    batch = token_batch([128] * 8)
    randomness = Randomness(0, 0, batch.slot)
    output = objective.eval()(objective.corrupt(batch, randomness), randomness)
    means = {name: float(term.total) / term.count for name, term in output.terms.items()}
    assert means["generator"] == pytest.approx(math.log(30522), abs=0.1)
    assert means["discriminator"] == pytest.approx(math.log(2), abs=0.15)
    total = sum(term.weight * means[name] for name, term in output.terms.items())
    assert 42 < total < 50


@torch.no_grad()
def test_the_first_loss_of_masked_language_modeling() -> None:
    objective = initialized("mlm").eval()
    batch = token_batch([128] * 8)
    randomness = Randomness(0, 0, batch.slot)
    term = objective(objective.corrupt(batch, randomness), randomness).terms["mlm"]
    assert float(term.total) / term.count == pytest.approx(math.log(30522), abs=0.1)
