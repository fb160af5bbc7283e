"""The BERT-style encoder: embeddings, projection, a stack of blocks."""

from __future__ import annotations

import abc

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from discern.errors import ConfigError
from discern.model.attention import SelfAttention
from discern.model.config import ModelConfig
from discern.model.dropout import Dropout
from discern.model.embeddings import TokenEmbeddings
from discern.model.encoder import Encoder
from discern.model.joints import States, as_states, linear_gelu, linear_residual_norm, normalised
from discern.model.layout import Direction, Layout, lay_out


class Block(nn.Module, abc.ABC):
    """Attention and feed-forward, each with dropout, a residual and a LayerNorm.

    Reference: Vaswani et al. 2017; GELU by the error function, as BERT and ELECTRA have it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.expand = nn.Linear(config.hidden_size, config.feedforward_size)
        self.contract = nn.Linear(config.feedforward_size, config.hidden_size)
        self.feedforward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.dropout = Dropout(config.hidden_dropout)

    @abc.abstractmethod
    def forward(self, states: States, layout: Layout) -> States:
        """The hidden states after this block."""


class PostNormBlock(Block):
    """LayerNorm after each residual, as in BERT and ELECTRA."""

    def forward(self, states: States, layout: Layout) -> States:
        attended = self.attention(states.operand, layout)
        states = linear_residual_norm(self.attention.output, attended, states.values, self.attention_norm, self.dropout)
        inner = linear_gelu(self.expand, states.operand)
        return linear_residual_norm(self.contract, inner, states.values, self.feedforward_norm, self.dropout)


class PreNormBlock(Block):
    """LayerNorm before each part; the residual path is left alone.

    Reference: Xiong et al. 2020, "On layer normalization in the Transformer architecture".
    """

    def forward(self, states: States, layout: Layout) -> States:
        hidden = states.values
        attended = self.attention(normalised(self.attention_norm, hidden).operand, layout)
        hidden = hidden + self.dropout(self.attention.output(attended))
        inner = linear_gelu(self.expand, normalised(self.feedforward_norm, hidden).operand)
        hidden = hidden + self.dropout(self.contract(inner))
        return States(hidden, hidden)


_BLOCKS: dict[str, type[Block]] = {"post": PostNormBlock, "pre": PreNormBlock}


class BertEncoder(Encoder):
    """Token ids to hidden states. No pooler: the state of [CLS] is the sequence's.

    Args:
        embeddings: read by this encoder, possibly shared with another.
        config: sizes; its embedding_size is not used here, the embeddings have theirs.
        gradient_checkpointing: recompute each block in the backward pass.
        direction: what a token sees; one way, this is the tower of a language model.

    Raises:
        ConfigError: the configuration asks for what this encoder has not.

    Reference: Devlin et al. 2019; factorised embeddings as in Clark et al. 2020, appendix A.
    """

    def __init__(
        self,
        embeddings: TokenEmbeddings,
        config: ModelConfig,
        *,
        gradient_checkpointing: bool = False,
        direction: Direction = "both",
    ) -> None:
        super().__init__()
        _check(config)
        self.config = config
        self.direction = direction
        self.gradient_checkpointing = gradient_checkpointing
        self.embeddings = embeddings
        width = embeddings.embedding_size
        self.projection = nn.Linear(width, config.hidden_size) if width != config.hidden_size else None
        self.blocks = nn.ModuleList(_BLOCKS[config.normalisation](config) for _ in range(config.num_layers))
        # What pre-norm blocks hand on is the bare sum of their residuals.
        final = config.normalisation == "pre"
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon) if final else None

    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Bool[Tensor, "B L"] | None = None,
        token_type_ids: Int[Tensor, "B L"] | None = None,
        position_ids: Int[Tensor, "B L"] | None = None,
        document_ids: Int[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Hidden states of the last block; what stands at padding means nothing."""
        shape = input_ids.shape
        layout = lay_out(input_ids, attention_mask, document_ids, self.embeddings.weights, self.direction)
        if layout.places is not None:
            input_ids, token_type_ids, position_ids = _real(layout.places, input_ids, token_type_ids, position_ids)
        hidden = self.embeddings(input_ids, token_type_ids, position_ids)
        if self.projection is not None:
            hidden = self.projection(hidden)
        states = as_states(hidden)
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                states = checkpoint(block, states, layout, use_reentrant=False)
            else:
                states = block(states, layout)
        hidden = states.values if self.final_norm is None else self.final_norm(states.values)
        return hidden if layout.places is None else _spread(hidden, layout.places, shape)


def _check(config: ModelConfig) -> None:
    """Refuse what this encoder has not."""
    for key, value, only in (("activation", config.activation, "gelu"), ("clamp_length", config.clamp_length, 0)):
        if value != only:
            raise ConfigError(
                f"encoder 'bert' has no model.{key} '{value}'", hint=f"set model.{key}={only}, or model.encoder=xlnet"
            )


def _real(
    places: Int[Tensor, "T"],
    input_ids: Int[Tensor, "B L"],
    token_type_ids: Int[Tensor, "B L"] | None,
    position_ids: Int[Tensor, "B L"] | None,
) -> tuple[Int[Tensor, "1 T"], Int[Tensor, "1 T"] | None, Int[Tensor, "1 T"]]:
    """The ids of the real tokens as one row; their positions can no longer be told from where they stand."""
    length = input_ids.shape[1]
    types = None if token_type_ids is None else token_type_ids.expand_as(input_ids).flatten()[places][None]
    positions = places % length if position_ids is None else position_ids.expand_as(input_ids).flatten()[places]
    return input_ids.flatten()[places][None], types, positions[None]


def _spread(hidden: Float[Tensor, "1 T D"], places: Int[Tensor, "T"], shape: torch.Size) -> Float[Tensor, "B L D"]:
    """Back to rows of equal length, with zeros for padding."""
    slots = hidden.new_zeros(shape.numel(), hidden.shape[-1])
    return slots.index_copy(0, places, hidden[0]).view(*shape, -1)
