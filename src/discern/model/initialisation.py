"""Values of the weights at step 0."""

from __future__ import annotations

import torch
from torch import nn

from discern.model.bert import BertEncoder
from discern.model.heads import MaskedLMHead, ReplacedTokenHead


@torch.no_grad()
def initialise(module: nn.Module, generator: torch.Generator, std: float) -> None:
    """Fill a network as the released code does, drawing from `generator`.

    Matrices and embeddings: normal cut at two standard deviations. Biases 0, LayerNorm 1 and 0. Glorot uniform for the
    projection of the embeddings and the last layer of the discriminator. A shared part is filled once.

    Reference: google-research/electra, modeling.py; TensorFlow's truncated normal has 0.88 of the nominal deviation.
    """
    glorot = {id(part) for part in _glorot_layers(module)}
    for part in module.modules():
        if isinstance(part, nn.Linear):
            if id(part) in glorot:
                nn.init.xavier_uniform_(part.weight, generator=generator)
            else:
                _truncated_normal(part.weight, generator, std)
            nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            _truncated_normal(part.weight, generator, std)
        elif isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)
        elif isinstance(part, MaskedLMHead):
            nn.init.zeros_(part.bias)


def _glorot_layers(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for part in module.modules():
        if isinstance(part, BertEncoder) and part.projection is not None:
            found.append(part.projection)
        if isinstance(part, ReplacedTokenHead):
            found.append(part.output)
    return found


def _truncated_normal(weight: torch.Tensor, generator: torch.Generator, std: float) -> None:
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)
