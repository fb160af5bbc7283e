"""Values of the weights at step 0."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from discern.model.bert import BertEncoder, Block
from discern.model.config import ModelConfig
from discern.model.embeddings import DisentangledEmbeddings, Embeddings
from discern.model.heads import MaskedLMHead, TiedLMHead, TokenHead
from discern.model.relative_attention import RelativeAttention
from discern.model.xlnet import XLNetEncoder

# Of the local start: radians a position of the fastest and the slowest wave, and the strength of positions (against the
# words') and of queries and keys; and the strength of what each part adds to the residual, against its fan-in.
_FASTEST, _SLOWEST, _POSITION_STRENGTH, _ATTENTION_STRENGTH = 2.5, 0.01, 1.4, 1.3
_BRANCH_STRENGTH = 0.3


@torch.no_grad()
def initialise(module: nn.Module, generator: torch.Generator, config: ModelConfig) -> None:
    """Fill every weight of a network, drawing from `generator`; a shared part is filled once.

    'released': matrices and embeddings from a normal cut at two standard deviations, biases 0, LayerNorm 1 and 0, Glorot
    uniform for the projection of the embeddings and the last layer of the discriminator. 'local': matrices by the number of
    their inputs instead, and attention that begins by looking at near neighbours, see `start_locally`. The weights of an
    XLNet encoder come from a normal that is not cut, its biases of attention and the query's embedding too.

    Reference: google-research/electra, modeling.py; TensorFlow's truncated normal has 0.88 of the nominal deviation.
    zihangdai/xlnet, where TensorFlow's default fills the query's embedding; here it is as the rest, as in transformers.
    """
    glorot = {id(part) for part in _glorot_layers(module)}
    local = config.initialisation == "local"
    for part in module.modules():
        if isinstance(part, nn.Linear):
            if id(part) in glorot:
                nn.init.xavier_uniform_(part.weight, generator=generator)
            else:
                _truncated_normal(part.weight, generator, part.in_features**-0.5 if local else config.initializer_range)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            _truncated_normal(part.weight, generator, config.initializer_range)
        elif isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)
        elif isinstance(part, MaskedLMHead | TiedLMHead):
            nn.init.zeros_(part.bias)
    for part in module.modules():
        if isinstance(part, DisentangledEmbeddings):
            nn.init.zeros_(part.difference.weight)
        if isinstance(part, XLNetEncoder):
            _start_xlnet(part, generator)
        if isinstance(part, BertEncoder) and local:
            start_locally(part)


def _start_xlnet(encoder: XLNetEncoder, generator: torch.Generator) -> None:
    """Fill the weights of an XLNet encoder as its released code does, `query_embedding` apart, which that leaves to a default."""
    weights: list[Tensor] = [encoder.query_embedding]
    for part in encoder.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            weights.append(part.weight)
        if isinstance(part, RelativeAttention):
            weights += [part.content_bias, part.position_bias, part.segment_bias, part.segments]
    for weight in weights:
        nn.init.normal_(weight, std=encoder.config.initializer_range, generator=generator)


@torch.no_grad()
def start_locally(encoder: BertEncoder) -> None:
    """Begin with attention to near neighbours: head 0 looks at the token before, head 1 at the one after, then two away, ...

    Positions become waves of geometric frequencies as strong as the words, the projection of the embeddings an identity.
    Each head's queries read some of the waves, its keys the same waves turned by the head's offset, so that their product is
    largest that far away. What a block adds to the residual starts small: at full strength each LayerNorm would shrink the
    waves, and the fourth block would hardly find them. Only values change: the parameters are those of any encoder with
    learned absolute positions.

    Reference: Trockman and Kolter 2023 (mimetic initialisation), for the idea of starting where training would lead.
    """
    embeddings = encoder.embeddings
    tables = embeddings.shared if isinstance(embeddings, DisentangledEmbeddings) else embeddings
    assert isinstance(tables, Embeddings)
    waves = torch.logspace(math.log10(_FASTEST), math.log10(_SLOWEST), tables.embedding_size // 2, dtype=torch.float64)
    angles = torch.arange(tables.position.num_embeddings, dtype=torch.float64)[:, None] * waves
    strength = _POSITION_STRENGTH * encoder.config.initializer_range
    tables.position.weight.zero_()
    tables.position.weight[:, : 2 * len(waves)] = strength * torch.stack([angles.sin(), angles.cos()], 2).flatten(1).float()
    if encoder.projection is not None:
        nn.init.eye_(encoder.projection.weight)
    reach = min(tables.embedding_size, encoder.config.hidden_size) // 2
    for block in encoder.blocks:
        assert isinstance(block, Block)
        attention = block.attention
        attention.output.weight.mul_(_BRANCH_STRENGTH)
        block.contract.weight.mul_(_BRANCH_STRENGTH)
        for head in range(encoder.config.num_heads):
            _aim(attention.query.weight, waves[:reach], encoder.config, head, offset=0)
            _aim(attention.key.weight, waves[:reach], encoder.config, head, offset=_offset(head))


def _offset(head: int) -> int:
    """-1, +1, -2, +2, ..."""
    return (head // 2 + 1) * (1 if head % 2 else -1)


def _aim(weight: Tensor, waves: Tensor, config: ModelConfig, head: int, offset: int) -> None:
    """Make the rows of one head read waves, turned back by `offset` positions."""
    size = config.hidden_size // config.num_heads
    count = min(size // 2, len(waves))
    rows = weight[head * size : head * size + 2 * count]
    rows.zero_()
    # The fastest waves: a slow one says where in the row a token is, not which of its neighbours.
    turn = waves[:count] * offset
    even = place = 2 * torch.arange(count)
    for row, column, value in (
        (even, place, turn.cos()),
        (even, place + 1, -turn.sin()),
        (even + 1, place, turn.sin()),
        (even + 1, place + 1, turn.cos()),
    ):
        rows[row, column] = _ATTENTION_STRENGTH * value.float()


def _glorot_layers(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for part in module.modules():
        if isinstance(part, BertEncoder) and part.projection is not None:
            found.append(part.projection)
        if isinstance(part, TokenHead):
            found.append(part.output)
    return found


def _truncated_normal(weight: Tensor, generator: torch.Generator, std: float) -> None:
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)
