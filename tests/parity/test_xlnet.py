"""The same weights give the same numbers here and in transformers' XLNet: logits, memories, losses and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from discern.models.base import Network
from discern.models.two_stream import Factorization, Remembering
from tests.parity.small_networks import counterpart
from tests.parity.small_xlnet import build_network, encoder_of, rows, sizes
from tests.paths import on_path

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
LENGTH, REUSED, REMEMBERED, PREDICTED, BATCH = 16, 8, 12, 5, 4
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "reversed": {"bi_data": True},
    "clamped": {"clamp_length": 5},
    "reversed and clamped": {"bi_data": True, "clamp_length": 5},
    "gelu by tanh": {"activation": "gelu-tanh"},
    "relu": {"activation": "relu"},
    "silu": {"activation": "silu"},
    "one head": {"num_heads": 1},
    "one layer": {"num_layers": 1},
}


@pytest.fixture(params=["kernels", "plain"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds on both paths."""
    yield from on_path(request.param)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Network, Any, Tensor | None]:
    """A network, its counterpart, and which rows are reversed."""
    settings = dict(CASES[request.param])
    reads_backwards = settings.pop("bi_data", False)
    network = build_network(sizes(**settings))
    theirs = counterpart(network, bi_data=reads_backwards, mem_len=REMEMBERED, reuse_len=REUSED)
    # transformers takes the second half of the batch for reversed.
    return network, theirs, torch.arange(BATCH) >= BATCH // 2 if reads_backwards else None


def factorization(seed: int = 0) -> Factorization:
    """A random order of the tokens of each row, and the last ones in it to predict; who stands earlier is seen."""
    random = torch.Generator().manual_seed(seed)
    rank = torch.rand(BATCH, LENGTH, generator=random).argsort(1)
    return Factorization(rank[:, None, :] < rank[:, :, None], rank.argsort(1)[:, -PREDICTED:].sort(1).values)


def as_theirs(order: Factorization) -> dict[str, Tensor]:
    return {
        "perm_mask": (~order.visible).float(),
        "target_mapping": F.one_hot(order.positions, order.visible.shape[1]).float(),
    }


def test_four_steps_with_memory(case: tuple[Network, Any, Tensor | None]) -> None:
    """Logits, memories and loss; from the second step on, with what the first remembered."""
    network, theirs, is_reversed = case
    encoder = encoder_of(network)
    ours_memory, their_memory = None, None
    for step in range(4):
        ids, segments = rows(BATCH, LENGTH, seed=step)
        order = factorization(step)
        labels = ids.gather(1, order.positions)
        with torch.no_grad():
            expected = theirs(ids, token_type_ids=segments, mems=their_memory, use_mems=True, labels=labels, **as_theirs(order))
            streams = encoder.two_streams(
                ids,
                order,
                segments,
                memory=ours_memory,
                is_reversed=is_reversed,
                remembering=Remembering(REUSED, REMEMBERED),
            )
            logits = network.head(streams.query)
        assert expected.logits.std() > 0.5, "the weights hide differences"
        torch.testing.assert_close(logits, expected.logits, **TOLERANCE)
        torch.testing.assert_close(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), expected.loss, **TOLERANCE)
        ours_memory, their_memory = streams.memory, expected.mems
        assert ours_memory is not None
        assert ours_memory.shape[2] == (8, 12, 12, 12)[step]
        torch.testing.assert_close(ours_memory.transpose(1, 2), torch.stack(their_memory), **TOLERANCE)


def test_gradient_of_every_parameter(case: tuple[Network, Any, Tensor | None]) -> None:
    network, theirs, is_reversed = case
    encoder = encoder_of(network)
    memory = torch.randn(len(encoder.blocks), BATCH, REMEMBERED, 32, generator=torch.Generator().manual_seed(5))
    ids, segments = rows(BATCH, LENGTH)
    order = factorization()
    logits = network.head(encoder.two_streams(ids, order, segments, memory=memory, is_reversed=is_reversed).query)
    expected = theirs(ids, token_type_ids=segments, mems=list(memory.transpose(1, 2)), use_mems=True, **as_theirs(order)).logits
    weights = torch.rand(logits.shape, generator=torch.Generator().manual_seed(3))
    for each in (logits, expected):
        (weights * each.square()).sum().div(weights.sum()).backward()
    _compare_gradients(network, theirs, unused=set())


def test_gradients_of_the_content_stream_alone() -> None:
    network = build_network(sizes())
    theirs = counterpart(network)
    ids, segments = rows(BATCH, LENGTH)
    real = torch.arange(LENGTH) < torch.tensor([16, 9, 3, 1])[:, None]
    weights = torch.rand(BATCH, LENGTH, 97, generator=torch.Generator().manual_seed(3)) * real[..., None]
    ours = network.head(network.encoder(ids, real, segments))
    expected = theirs(ids, token_type_ids=segments, attention_mask=real.long()).logits
    for each in (ours, expected):
        (weights * each.square()).sum().div(weights.sum()).backward()
    _compare_gradients(network, theirs, unused={"query_embedding"})


def _compare_gradients(network: Network, theirs: Any, unused: set[str]) -> None:
    encoder = encoder_of(network)
    gradients = {name: value.grad for name, value in theirs.named_parameters()}
    parameters = dict(encoder.named_parameters())
    for ours_name, parameter in parameters.items():
        ours = parameter.grad
        assert ours is not None, f"{ours_name} gets no gradient"
        if ours_name in unused:
            assert not ours.any()
            continue
        assert ours.abs().max() > 0, f"{ours_name}: the gradient is zero"
        ((their_name, shaped),) = encoder.architecture.to_huggingface({f"encoder.{ours_name}": ours}, encoder.config).items()
        reference = gradients[their_name]
        torch.testing.assert_close(shaped, reference, **TOLERANCE, msg=lambda text, name=ours_name: f"{name}: {text}")
    torch.testing.assert_close(network.head.bias.grad, gradients["lm_loss.bias"], **TOLERANCE)


@pytest.mark.parametrize("side", ["none", "right", "left"])
@torch.no_grad()
def test_content_stream_with_padding(side: str) -> None:
    network = build_network(sizes())
    ids, segments = rows(BATCH, LENGTH)
    lengths = torch.tensor([16, 9, 3, 1])[:, None]
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    if side == "right":
        real = torch.arange(LENGTH) < lengths
    elif side == "left":
        real = torch.arange(LENGTH) >= LENGTH - lengths
    ours = network.head(network.encoder(ids, None if side == "none" else real, segments))
    expected = counterpart(network)(ids, token_type_ids=segments, attention_mask=real.long()).logits
    assert expected.std() > 0.5, "the weights hide differences"
    torch.testing.assert_close(ours, expected, **TOLERANCE)


@torch.no_grad()
def test_content_stream_without_segments_and_with_memory() -> None:
    network = build_network(sizes())
    theirs = counterpart(network, mem_len=REMEMBERED, reuse_len=REUSED)
    ids, _ = rows(BATCH, LENGTH)
    memory = torch.randn(3, BATCH, 7, 32, generator=torch.Generator().manual_seed(5))
    expected = theirs(ids, mems=list(memory.transpose(1, 2)), use_mems=True)
    ours = encoder_of(network).content_stream(ids, memory=memory, remembering=Remembering(REUSED, REMEMBERED))
    torch.testing.assert_close(network.head(ours.hidden), expected.logits, **TOLERANCE)
    assert ours.memory is not None
    torch.testing.assert_close(ours.memory.transpose(1, 2), torch.stack(expected.mems), **TOLERANCE)
