"""The cloze network: no state knows the token at its own place, and every state knows all the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from discern.models.base import Network, initialize
from discern.models.config import build_config
from discern.models.layers import Embeddings
from discern.models.two_tower.encoder import two_tower_generator
from tests.paths import on_path

SIZES = build_config(num_layers=2, hidden_size=16, embedding_size=8, num_heads=2, feedforward_size=32, max_positions=16)


@pytest.fixture(params=["kernels", "plain"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    for _ in on_path(request.param):
        yield request.param


def cloze(**sizes: object) -> Network:
    config = SIZES.model_copy(update=sizes)
    network = two_tower_generator(Embeddings(20, config.embedding_size, config), config)
    parts = torch.nn.ModuleList([network.encoder, network.head])
    initialize(parts, torch.Generator().manual_seed(0), config.model_copy(update={"initializer_range": 0.3}))
    parts.eval()
    return network


def changed(network: Network, ids: torch.Tensor, at: int, *context: torch.Tensor | None) -> list[list[bool]]:
    """Which positions of each row get other logits when the tokens in column `at` become others."""
    other = ids.clone()
    other[:, at] = (other[:, at] + 7) % 20
    with torch.no_grad():
        before, after = network.token_logits(ids, *context), network.token_logits(other, *context)
    return [[not torch.equal(a, b) for a, b in zip(*rows, strict=True)] for rows in zip(before, after, strict=True)]


@pytest.mark.parametrize("normalization", ["post", "pre"])
def test_each_position_sees_every_other_and_not_itself(normalization: str) -> None:
    network, ids = cloze(normalization=normalization), torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(1))
    for at in range(6):
        assert changed(network, ids, at) == [[place != at for place in range(6)]] * 3


def test_documents_and_padding_stay_apart() -> None:
    """Two pieces of three and two tokens, then padding."""
    ids = torch.randint(0, 20, (2, 7), generator=torch.Generator().manual_seed(2))
    real = torch.tensor([[True] * 5 + [False] * 2]).expand(2, 7)
    pieces = torch.tensor([[0, 0, 0, 1, 1, 2, 2]]).expand(2, 7)
    network = cloze()
    for at, others in {0: [1, 2], 1: [0, 2], 2: [0, 1], 3: [4], 4: [3], 5: [], 6: []}.items():
        for row in changed(network, ids, at, real, None, None, pieces):
            assert [place for place in range(5) if row[place]] == others


def test_a_row_in_a_longer_batch_gives_the_same() -> None:
    network, ids = cloze(), torch.randint(0, 20, (1, 9), generator=torch.Generator().manual_seed(3))
    real = torch.tensor([[True] * 5 + [False] * 4])
    with torch.no_grad():
        torch.testing.assert_close(network.token_logits(ids, real)[:, :5], network.token_logits(ids[:, :5]))


@pytest.mark.parametrize("length", [1, 2])
def test_edges_are_zeros(length: int) -> None:
    encoder = cloze().encoder
    with torch.no_grad():
        states = encoder(torch.arange(length)[None])
    assert states.shape == (1, length, 32)
    assert not states[0, 0, :16].any()
    assert not states[0, -1, 16:].any()


def test_rows_of_padding_stay_finite() -> None:
    network = cloze()
    ids, nothing = torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.bool)
    network.token_logits(ids, nothing).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in network.encoder.parameters() if p.grad is not None)


def test_the_head_is_over_both_towers_and_tied_to_the_words() -> None:
    network = cloze()
    assert network.token_logits(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 20)
    assert network.head.dense.weight.shape == (8, 32)
    assert network.head.word_embeddings is network.encoder.embeddings.word  # type: ignore[attr-defined]
