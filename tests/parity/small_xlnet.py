"""Small XLNets, and rows for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from discern.models.base import Network
from discern.models.config import ModelConfig, build_config
from discern.models.xlnet.encoder import XLNetEncoder
from tests.parity.small_networks import VOCABULARY, network_of

SIZES = {"num_layers": 3, "hidden_size": 32, "embedding_size": 32, "num_heads": 4, "feedforward_size": 64}


def sizes(**changes: Any) -> ModelConfig:
    """A tiny XLNet without dropout."""
    given = {"encoder": "xlnet", "hidden_dropout": 0.0, "attention_dropout": 0.0, **SIZES, **changes}
    return build_config(given)


build_network = network_of


def encoder_of(network: Network) -> XLNetEncoder:
    """Its encoder, of its own type."""
    assert isinstance(network.encoder, XLNetEncoder)
    return network.encoder


def rows(count: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids, and segments 0 ... 0 1 ... 1 2."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY.size, (count, length), generator=random)
    segments = torch.zeros_like(ids)
    segments[:, length * 3 // 4 :] = 1
    segments[:, -1] = 2
    return ids, segments
