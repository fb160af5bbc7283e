"""Small XLNets with weights that hide nothing, and their transformers counterparts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from discern.model_files.huggingface import network_to_huggingface
from discern.models.base import Network, build_embeddings, build_encoder
from discern.models.config import ModelConfig, build_config
from discern.models.xlnet.encoder import XLNetEncoder
from tests.parity.small_networks import VOCABULARY, make_noisy

SIZES = {"num_layers": 3, "hidden_size": 32, "embedding_size": 32, "num_heads": 4, "feedforward_size": 64}


def sizes(**changes: Any) -> ModelConfig:
    """A tiny XLNet without dropout."""
    given = {"encoder": "xlnet", "hidden_dropout": 0.0, "attention_dropout": 0.0, **SIZES, **changes}
    return build_config(given)


def build_network(model: ModelConfig, seed: int = 0) -> Network:
    """An encoder with its head, in evaluation mode, every parameter far from zero and from one."""
    embeddings = build_embeddings(VOCABULARY.size, model.embedding_size, model)
    encoder = build_encoder(embeddings, model)
    network = Network(encoder, encoder.language_head())
    whole = nn.ModuleList([network.encoder, network.head])
    make_noisy(whole, seed)
    whole.eval()
    return network


def encoder_of(network: Network) -> XLNetEncoder:
    """Its encoder, of its own type."""
    assert isinstance(network.encoder, XLNetEncoder)
    return network.encoder


def counterpart(network: Network, **changes: Any) -> Any:
    """The `XLNetLMHeadModel` with the same weights, in evaluation mode."""
    from transformers import XLNetConfig, XLNetLMHeadModel

    exported = network_to_huggingface(network, VOCABULARY.special)
    model = XLNetLMHeadModel(XLNetConfig(**{**exported.config, **changes}))
    missing, unexpected = model.load_state_dict(exported.tensors, strict=False)
    assert set(missing) == {"lm_loss.weight"}
    assert not unexpected
    model.tie_weights()
    return model.eval()


def rows(count: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids, and segments 0 ... 0 1 ... 1 2."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY.size, (count, length), generator=random)
    segments = torch.zeros_like(ids)
    segments[:, length * 3 // 4 :] = 1
    segments[:, -1] = 2
    return ids, segments
