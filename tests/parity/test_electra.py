"""The same weights give the same numbers here and in transformers' ELECTRA: logits, losses and gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from discern.corruption.randomness import Randomness
from discern.models.base import Network, named_parameters
from discern.models.config import ModelConfig
from discern.types import TokenBatch
from tests.parity.small_networks import build, counterpart, inputs, network_logits, sizes, token_batch
from tests.paths import on_path

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
SHAPES = {
    "projected": sizes(),
    "one width": sizes(embedding_size=32, num_heads=2),
    "one head": sizes(num_heads=1, num_layers=1),
    "narrow heads": sizes(num_heads=8, num_layers=3, feedforward_size=128),
}
BATCHES = {
    "full": token_batch([17, 17, 17]),
    "padded": token_batch([17, 9, 3], 20),
    "segments": token_batch([17, 17], second=[6, 11]),
    "padded segments": token_batch([17, 12, 5], 19, second=[6, 4, 3]),
}


@pytest.fixture(params=["kernels", "plain"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds on both paths."""
    yield from on_path(request.param)


@pytest.fixture(params=SHAPES, scope="module")
def model(request: pytest.FixtureRequest) -> ModelConfig:
    return SHAPES[request.param]


@pytest.fixture(params=BATCHES, scope="module")
def batch(request: pytest.FixtureRequest) -> TokenBatch:
    return BATCHES[request.param]


def networks(model: ModelConfig) -> dict[str, Network]:
    """Every kind of network that can be exported."""
    return build(model, generator_size=0.5).networks() | build(model, "mlm").networks()


@pytest.mark.parametrize("name", ["discriminator", "generator", "encoder"])
@torch.no_grad()
def test_logits_at_every_token(model: ModelConfig, batch: TokenBatch, name: str) -> None:
    network = networks(model)[name]
    theirs = counterpart(network)(**inputs(batch)).logits
    ours = network_logits(network, batch)
    assert theirs.std() > 0.1, "the weights hide differences"
    # What stands at padding means nothing: where kernels run, padding isn't computed at all.
    torch.testing.assert_close(ours[batch.attention_mask], theirs[batch.attention_mask], **TOLERANCE)


@pytest.mark.parametrize("name", ["discriminator", "generator", "encoder"])
def test_gradient_of_every_parameter(model: ModelConfig, batch: TokenBatch, name: str) -> None:
    network = networks(model)[name]
    theirs = counterpart(network)
    ours_logits, their_logits = network_logits(network, batch), theirs(**inputs(batch)).logits
    # A weighted sum of squares: every logit counts, and none as much as another. Padding never counts.
    weights = torch.rand(ours_logits.shape, generator=torch.Generator().manual_seed(3))
    weights = weights * (batch.attention_mask if weights.dim() == 2 else batch.attention_mask[..., None])
    for logits in (ours_logits, their_logits):
        (weights * logits.square()).sum().div(weights.sum()).backward()
    gradients = dict(theirs.named_parameters())
    ours = {key: value.grad for key, value in named_parameters(network).items() if value.grad is not None}
    found = network.encoder.architecture.to_huggingface(ours, network.encoder.config)
    assert found.keys() == gradients.keys()
    for key, gradient in found.items():
        # The key's bias shifts all scores of a query alike, so its gradient is zero but for rounding.
        assert gradient.abs().max() > 0 or key.endswith("key.bias"), f"{key}: the gradient is zero"
        torch.testing.assert_close(gradient, gradients[key].grad, **TOLERANCE, msg=lambda text, key=key: f"{key}: {text}")


@torch.no_grad()
def test_a_step_of_the_objective_is_two_passes_of_transformers() -> None:
    objective = build(sizes(), generator_size=0.5)
    tokens = BATCHES["padded segments"]
    randomness = Randomness(1, 2, tokens.example_index)
    corrupted = objective.corrupt(tokens, randomness)
    output = objective(corrupted, randomness)
    discriminator, generator = (counterpart(objective.networks()[name]) for name in ("discriminator", "generator"))

    labels = tokens.input_ids.masked_fill(~corrupted.masked_positions, -100)
    guess = generator(**{**inputs(tokens), "input_ids": corrupted.masked_ids}, labels=labels)
    torch.testing.assert_close(output.observations["generator_logits"], guess.logits[corrupted.masked_positions], **TOLERANCE)
    term = output.terms["generator"]
    torch.testing.assert_close(term.total / term.count, guess.loss, **TOLERANCE)

    seen = output.observations
    kept = ~corrupted.masked_positions
    assert torch.equal(seen["corrupted_ids"][kept], tokens.input_ids[kept])
    judged = discriminator(**{**inputs(tokens), "input_ids": seen["corrupted_ids"]}, labels=seen["is_replaced"].long())
    real = tokens.attention_mask
    torch.testing.assert_close(seen["discriminator_logits"][real], judged.logits[real], **TOLERANCE)
    term = output.terms["discriminator"]
    torch.testing.assert_close(term.total / term.count, judged.loss, **TOLERANCE)
