"""The weights at step 0: the rules that all encoders share. An encoder's exceptions are in its `initialize`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from discern.models.base import Encoder
from discern.models.config import ModelConfig
from discern.models.embeddings import Disentangled
from discern.models.heads import MaskedLMHead, TiedLMHead, TokenHead


@torch.no_grad()
def initialize(module: nn.Module, generator: torch.Generator, config: ModelConfig) -> None:
    """Fill every weight of a network, drawing from `generator`; a shared part is filled once.

    Matrices and embeddings come from a normal that is truncated at two standard deviations, biases are 0, LayerNorms 1 and 0.
    The projection of the embeddings and the last layer of the discriminator are Glorot uniform. Then each encoder fills the
    weights that its architecture initializes differently, see `Encoder.initialize`.

    Reference: google-research/electra, modeling.py; TensorFlow's truncated normal has 0.88 of the nominal deviation.
    """
    stds = _stds(module, config)
    for part in module.modules():
        if isinstance(part, nn.Linear):
            std = stds.get(id(part), config.linear_std(part.in_features))
            if std is None:
                nn.init.xavier_uniform_(part.weight, generator=generator)
            else:
                truncated_normal(part.weight, generator, std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            truncated_normal(part.weight, generator, config.initializer_range)
        elif isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, TiedLMHead):
            nn.init.zeros_(part.bias)
    for part in module.modules():
        if isinstance(part, Disentangled):
            nn.init.zeros_(part.difference.weight)
        if isinstance(part, Encoder):
            part.initialize(generator)


def _stds(module: nn.Module, config: ModelConfig) -> dict[int, float | None]:
    """Standard deviations of layers that have others than most, by identity; None: Glorot uniform."""
    layers, found = config.head_layers(), dict[int, float | None]()
    for part in module.modules():
        if isinstance(part, Encoder):
            found |= {id(layer): None for layer in part.glorot_layers()}
        if isinstance(part, MaskedLMHead | TokenHead) and layers.dense_std is not None:
            found[id(part.dense)] = layers.dense_std
        if isinstance(part, TokenHead):
            found[id(part.output)] = layers.output_std
    return found


@torch.no_grad()
def truncated_normal(weight: Tensor, generator: torch.Generator, std: float) -> None:
    """Fill a matrix from a normal that is truncated at two standard deviations."""
    # Not nn.init.trunc_normal_: it draws other numbers before torch 2.13, and a seed means the same weights in every version.
    weight.normal_(0.0, std, generator=generator)
    while (outside := weight.abs() > 2 * std).any():
        weight.copy_(torch.where(outside, torch.empty_like(weight).normal_(0.0, std, generator=generator), weight))
