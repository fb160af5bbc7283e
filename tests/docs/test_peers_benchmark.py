"""The peers that the GPU benchmark compares with: that they are what they say, and train."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks import peers

SIZES = {"num_layers": 1, "hidden_size": 32, "embedding_size": 32, "num_heads": 4, "feedforward_size": 32}
VOCABULARY = 60


@pytest.mark.parametrize(("name", "untrained"), [("electra", math.log(60) + 50 * math.log(2)), ("modernbert", math.log(60))])
def test_a_peer_begins_at_chance_and_learns(name: str, untrained: float) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        step = peers.PEERS[name](SIZES, VOCABULARY, 16, torch.device("cpu"), compiled=False)
        ids = peers.random_ids(4, 16, VOCABULARY, torch.device("cpu")).clamp(max=6)  # two words, soon known
        losses = [float(step(ids)) for _ in range(40)]
    assert losses[0] == pytest.approx(untrained, rel=0.1)
    assert sum(losses[-5:]) / 5 < 0.9 * losses[0]


def test_a_peer_is_timed() -> None:
    ids = peers.random_ids(2, 8, VOCABULARY, torch.device("cpu"))
    assert ids.min() >= peers.FIRST
    found = peers.time_step(lambda given: given.sum(), ids, 0.0)
    assert found["steps"] == 3
    assert found["tokens_per_second"] == pytest.approx(16_000 / found["step_milliseconds"])
