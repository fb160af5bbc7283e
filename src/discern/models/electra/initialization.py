"""Local initialization of encoder 'bert': weights with which each head attends to a near neighbor at step 0."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from discern.models.attention import SelfAttention, neighbor_of
from discern.models.electra.config import ElectraConfig
from discern.models.embeddings import DisentangledEmbeddings, Embeddings, TokenEmbeddings

# Highest and lowest frequency of the waves in radians per position; scale of the positions relative to the words; scale of
# queries and keys; and scale of what each part adds to the residual, relative to the usual initialization.
_FASTEST, _SLOWEST, _POSITION_STRENGTH, _ATTENTION_STRENGTH = 2.5, 0.01, 1.4, 1.3
_BRANCH_STRENGTH = 0.3


@torch.no_grad()
def start_locally(
    embeddings: TokenEmbeddings,
    projection: nn.Linear | None,
    attentions: Sequence[SelfAttention],
    contractions: Sequence[nn.Linear],
    config: ElectraConfig,
) -> None:
    """Initialize attention to near neighbors: head 0 attends to the previous token, head 1 to the next, then two away, ...

    Position embeddings become sine waves with geometrically spaced frequencies, about as large as the word embeddings, and the
    projection of the embeddings becomes an identity. The queries of each head read some of the waves, and its keys the same waves
    shifted by the offset of the head, so that their product is largest at that distance. What a block adds to the residual starts
    small; otherwise each LayerNorm would shrink the waves, and little of them would reach the fourth block. Only values change:
    the parameters are those of any encoder with learned absolute positions.

    Args:
        embeddings: embeddings of the encoder.
        projection: projection of the embeddings, if there is one.
        attentions: attentions of the blocks, in order.
        contractions: second feed-forward layers of the blocks.
        config: settings of the encoder.

    Reference: Trockman and Kolter 2023 (mimetic initialization), for the idea of starting where training would lead.
    """
    tables = embeddings.shared if isinstance(embeddings, DisentangledEmbeddings) else embeddings
    assert isinstance(tables, Embeddings)
    waves = torch.logspace(math.log10(_FASTEST), math.log10(_SLOWEST), tables.embedding_size // 2, dtype=torch.float64)
    angles = torch.arange(tables.position.num_embeddings, dtype=torch.float64)[:, None] * waves
    strength = _POSITION_STRENGTH * config.initializer_range
    tables.position.weight.zero_()
    tables.position.weight[:, : 2 * len(waves)] = strength * torch.stack([angles.sin(), angles.cos()], 2).flatten(1).float()
    if projection is not None:
        nn.init.eye_(projection.weight)
    reach = min(tables.embedding_size, config.hidden_size) // 2
    for attention, contract in zip(attentions, contractions, strict=True):
        attention.output.weight.mul_(_BRANCH_STRENGTH)
        contract.weight.mul_(_BRANCH_STRENGTH)
        for head in range(config.num_heads):
            _aim(attention.query.weight, waves[:reach], config, head, offset=0)
            _aim(attention.key.weight, waves[:reach], config, head, offset=neighbor_of(head))


def _aim(weight: Tensor, waves: Tensor, config: ElectraConfig, head: int, offset: int) -> None:
    """Make the rows of one head read the waves, shifted back by `offset` positions."""
    size = config.hidden_size // config.num_heads
    count = min(size // 2, len(waves))
    rows = weight[head * size : head * size + 2 * count]
    rows.zero_()
    # The highest frequencies, because low ones tell the position in the row, but do not distinguish neighbors.
    turn = waves[:count] * offset
    even = place = 2 * torch.arange(count)
    for row, column, value in (
        (even, place, turn.cos()),
        (even, place + 1, -turn.sin()),
        (even + 1, place, turn.sin()),
        (even + 1, place + 1, turn.cos()),
    ):
        rows[row, column] = _ATTENTION_STRENGTH * value.float()
