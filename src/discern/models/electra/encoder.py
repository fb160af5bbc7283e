"""The BERT-style encoder: embeddings, projection, a stack of blocks."""

from __future__ import annotations

import abc

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from discern.models.attention import SelfAttention
from discern.models.base import Encoder
from discern.models.electra.config import ElectraConfig
from discern.models.electra.initialization import start_locally
from discern.models.embeddings import TokenEmbeddings
from discern.models.flops import module_flops, parts_flops
from discern.models.fused_ops import Dropout, States, as_states, linear_gelu, linear_residual_norm, normalized
from discern.models.unpadding import Direction, Unpadding, padded_rows, plan_unpadding, real_tokens
from discern.types import Spans


class Block(nn.Module, abc.ABC):
    """Attention and feed-forward, each with dropout, a residual and a LayerNorm.

    Reference: Vaswani et al. 2017; GELU by the error function, as BERT and ELECTRA have it.
    """

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.expand = nn.Linear(config.hidden_size, config.feedforward_size)
        self.contract = nn.Linear(config.feedforward_size, config.hidden_size)
        self.feedforward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.dropout = Dropout(config.hidden_dropout)

    def forward_flops(self, length: int) -> float:
        """FLOPs per token that attends to `length` tokens."""
        return parts_flops(length, self.attention, self.expand, self.contract)

    @abc.abstractmethod
    def forward(self, states: States, unpadding: Unpadding) -> States:
        """The hidden states after this block."""


class PostNormBlock(Block):
    """LayerNorm after each residual, as in BERT and ELECTRA."""

    def forward(self, states: States, unpadding: Unpadding) -> States:
        attended = self.attention(states.operand, unpadding)
        states = linear_residual_norm(self.attention.output, attended, states.values, self.attention_norm, self.dropout)
        inner = linear_gelu(self.expand, states.operand)
        return linear_residual_norm(self.contract, inner, states.values, self.feedforward_norm, self.dropout)


class PreNormBlock(Block):
    """LayerNorm before each sub-layer, none on the residual path.

    Reference: Xiong et al. 2020, "On layer normalization in the Transformer architecture".
    """

    def forward(self, states: States, unpadding: Unpadding) -> States:
        hidden = states.values
        attended = self.attention(normalized(self.attention_norm, hidden).operand, unpadding)
        hidden = hidden + self.dropout(self.attention.output(attended))
        inner = linear_gelu(self.expand, normalized(self.feedforward_norm, hidden).operand)
        hidden = hidden + self.dropout(self.contract(inner))
        return States(hidden, hidden)


_BLOCKS: dict[str, type[Block]] = {"post": PostNormBlock, "pre": PreNormBlock}


class BertEncoder(Encoder):
    """Token ids to hidden states. There is no pooler: the state of [CLS] represents the sequence.

    Args:
        embeddings: possibly shared with another encoder.
        config: settings; its embedding_size is not used, the embeddings have their own.
        gradient_checkpointing: recompute each block in the backward pass.
        direction: what a token attends to; in one direction, this is a tower of a language model.

    Reference: Devlin et al. 2019; factorized embeddings as in Clark et al. 2020, appendix A.
    """

    Config = ElectraConfig
    config: ElectraConfig
    one_way = True
    takes_spans = True

    def __init__(
        self,
        embeddings: TokenEmbeddings,
        config: ElectraConfig,
        *,
        gradient_checkpointing: bool = False,
        direction: Direction = "both",
    ) -> None:
        super().__init__()
        self.config = config
        self.direction = direction
        self.gradient_checkpointing = gradient_checkpointing
        self.embeddings = embeddings
        width = embeddings.embedding_size
        self.projection = nn.Linear(width, config.hidden_size) if width != config.hidden_size else None
        self.blocks = nn.ModuleList(_BLOCKS[config.normalization](config) for _ in range(config.num_layers))
        # Pre-norm blocks return the sum of their residuals, not normalized.
        final = config.normalization == "pre"
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon) if final else None

    def initialize(self, generator: torch.Generator) -> None:
        """With `initialization = "local"`, aim each attention head at a near neighbor; draws nothing."""
        if self.config.initialization == "local":
            blocks = [block for block in self.blocks if isinstance(block, Block)]
            attentions, contractions = [block.attention for block in blocks], [block.contract for block in blocks]
            start_locally(self.embeddings, self.projection, attentions, contractions, self.config)

    def glorot_layers(self) -> list[nn.Linear]:
        return [] if self.projection is None else [self.projection]

    def repeated_blocks(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward_flops(self, length: int, *, query_share: float = 0.0, remembered: int = 0) -> float:
        projection = 0.0 if self.projection is None else module_flops(self.projection, length)
        return projection + module_flops(self.blocks, length)

    def recomputed_flops(self, length: int, *, query_share: float = 0.0, remembered: int = 0) -> float:
        return module_flops(self.blocks, length) if self.gradient_checkpointing else 0.0

    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Bool[Tensor, "B L"] | None = None,
        token_type_ids: Int[Tensor, "B L"] | None = None,
        position_ids: Int[Tensor, "B L"] | None = None,
        document_ids: Int[Tensor, "B L"] | None = None,
        spans: Spans | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Hidden states of the last block; those of padding are undefined."""
        shape = input_ids.shape
        weights = self.embeddings.weights
        unpadding = plan_unpadding(input_ids, attention_mask, document_ids, weights, self.direction, spans=spans)
        if unpadding.places is not None:
            input_ids, token_type_ids, position_ids = real_tokens(unpadding.places, input_ids, token_type_ids, position_ids)
        hidden = self.embeddings(input_ids, token_type_ids, position_ids)
        if self.projection is not None:
            hidden = self.projection(hidden)
        states = as_states(hidden)
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                states = checkpoint(block, states, unpadding, use_reentrant=False)
            else:
                states = block(states, unpadding)
        hidden = states.values if self.final_norm is None else self.final_norm(states.values)
        return hidden if unpadding.places is None else padded_rows(hidden, unpadding.places, shape)
