"""The BERT-style encoder: embeddings, projection, a stack of blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from discern.models.attention import TransformerBlock, Unpadding, neighbor_of
from discern.models.base import StackedEncoder
from discern.models.electra.config import ElectraConfig
from discern.models.electra.huggingface import ElectraArchitecture
from discern.models.layers import DisentangledEmbeddings, Embeddings, States, TokenEmbeddings, as_states, linear_gelu, normalized

# Highest and lowest frequency of the waves in radians per position; scale of the positions relative to the words; scale of
# queries and keys; and scale of what each part adds to the residual, relative to the usual initialization.
_FASTEST, _SLOWEST, _POSITION_STRENGTH, _ATTENTION_STRENGTH = 2.5, 0.01, 1.4, 1.3
_BRANCH_STRENGTH = 0.3


class PostNormBlock(TransformerBlock):
    """LayerNorm after each residual, as in BERT and ELECTRA."""

    def forward(self, states: States, unpadding: Unpadding) -> States:
        """The hidden states after this block."""
        return self.after_attention(self.attention(states.operand, unpadding), states.values)


class PreNormBlock(TransformerBlock):
    """LayerNorm before each sub-layer, none on the residual path.

    Reference: Xiong et al. 2020, "On layer normalization in the Transformer architecture".
    """

    def forward(self, states: States, unpadding: Unpadding) -> States:
        """The hidden states after this block."""
        hidden = states.values
        attended = self.attention(normalized(self.attention_norm, hidden).operand, unpadding)
        hidden = hidden + self.dropout(self.attention.output(attended))
        inner = linear_gelu(self.expand, normalized(self.feedforward_norm, hidden).operand)
        hidden = hidden + self.dropout(self.contract(inner))
        return States(hidden, hidden)


_BLOCKS: dict[str, type[TransformerBlock]] = {"post": PostNormBlock, "pre": PreNormBlock}


class BertEncoder(StackedEncoder):
    """Token ids to hidden states. There is no pooler: the state of [CLS] represents the sequence.

    Reference: Devlin et al. 2019; factorized embeddings as in Clark et al. 2020, appendix A.
    """

    Config = ElectraConfig
    architecture = ElectraArchitecture()
    config: ElectraConfig

    def __init__(self, embeddings: TokenEmbeddings, config: ElectraConfig, **options: Any) -> None:
        super().__init__(embeddings, config, **options)
        self.blocks = nn.ModuleList(_BLOCKS[config.normalization](config) for _ in range(config.num_layers))
        # Pre-norm blocks return the sum of their residuals, not normalized.
        final = config.normalization == "pre"
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon) if final else None

    def initialize(self, generator: torch.Generator) -> None:
        """With `initialization = "local"`, aim each attention head at a near neighbor; draws nothing."""
        if self.config.initialization == "local":
            start_locally(self.embeddings, self.projection, self.blocks, self.config)

    def glorot_layers(self) -> list[nn.Linear]:
        return [] if self.projection is None else [self.projection]

    def last_states(
        self,
        input_ids: Int[Tensor, "B L"],
        token_type_ids: Int[Tensor, "B L"] | None,
        position_ids: Int[Tensor, "#B L"] | None,
        unpadding: Unpadding,
    ) -> Float[Tensor, "B L D"]:
        hidden = self.embeddings(input_ids, token_type_ids, position_ids)
        states = as_states(hidden if self.projection is None else self.projection(hidden))
        for block in self.blocks:
            states = self.run_block(block, states, unpadding)
        return states.values if self.final_norm is None else self.final_norm(states.values)


@torch.no_grad()
def start_locally(
    embeddings: TokenEmbeddings,
    projection: nn.Linear | None,
    blocks: Iterable[Any],
    config: ElectraConfig,
) -> None:
    """Initialize attention to near neighbors: head 0 attends to the previous token, head 1 to the next, then two away, ...

    Position embeddings become sine waves with geometrically spaced frequencies, about as large as the word embeddings, and the
    projection of the embeddings becomes an identity. The queries of each head read some of the waves, and its keys the same waves
    shifted by the offset of the head, so that their product is largest at that distance. What a block adds to the residual starts
    small; otherwise each LayerNorm would shrink the waves, and little of them would reach the fourth block. Only values change:
    the parameters are those of any encoder with learned absolute positions.

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
    for block in blocks:
        attention = block.attention
        for last in (attention.output, block.contract):
            last.weight.mul_(_BRANCH_STRENGTH)
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
    rotations = torch.stack([turn.cos(), -turn.sin(), turn.sin(), turn.cos()], 1).view(count, 2, 2)
    rows[:, : 2 * count] = _ATTENTION_STRENGTH * torch.block_diag(*rotations).float()  # type: ignore[no-untyped-call]
