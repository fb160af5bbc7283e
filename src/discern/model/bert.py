"""The BERT-style encoder: embeddings, projection, a stack of blocks."""

from __future__ import annotations

import abc

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from discern.model.attention import SelfAttention, visible_keys
from discern.model.config import ModelConfig
from discern.model.dropout import Dropout
from discern.model.embeddings import TokenEmbeddings
from discern.model.encoder import Encoder


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
    def forward(self, hidden: Float[Tensor, "B L D"], visible: Bool[Tensor, "B 1 Q L"] | None) -> Float[Tensor, "B L D"]:
        """The hidden states after this block."""

    def feedforward(self, hidden: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Each position through the same two layers."""
        return self.contract(F.gelu(self.expand(hidden)))  # type: ignore[no-any-return]


class PostNormBlock(Block):
    """LayerNorm after each residual, as in BERT and ELECTRA."""

    def forward(self, hidden: Float[Tensor, "B L D"], visible: Bool[Tensor, "B 1 Q L"] | None) -> Float[Tensor, "B L D"]:
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, visible)))
        return self.feedforward_norm(hidden + self.dropout(self.feedforward(hidden)))  # type: ignore[no-any-return]


class PreNormBlock(Block):
    """LayerNorm before each part; the residual path is left alone.

    Reference: Xiong et al. 2020, "On layer normalization in the Transformer architecture".
    """

    def forward(self, hidden: Float[Tensor, "B L D"], visible: Bool[Tensor, "B 1 Q L"] | None) -> Float[Tensor, "B L D"]:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), visible))
        return hidden + self.dropout(self.feedforward(self.feedforward_norm(hidden)))  # type: ignore[no-any-return]


_BLOCKS: dict[str, type[Block]] = {"post": PostNormBlock, "pre": PreNormBlock}


class BertEncoder(Encoder):
    """Token ids to hidden states. No pooler: the state of [CLS] is the sequence's.

    Args:
        embeddings: read by this encoder, possibly shared with another.
        config: sizes; its embedding_size is not used here, the embeddings have theirs.
        gradient_checkpointing: recompute each block in the backward pass.

    Reference: Devlin et al. 2019; factorised embeddings as in Clark et al. 2020, appendix A.
    """

    def __init__(self, embeddings: TokenEmbeddings, config: ModelConfig, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
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
        """Hidden states of the last block."""
        visible = None
        if document_ids is not None and attention_mask is None:
            attention_mask = input_ids == input_ids
        if attention_mask is not None:
            visible = visible_keys(attention_mask, document_ids)
        hidden = self.embeddings(input_ids, token_type_ids, position_ids)
        if self.projection is not None:
            hidden = self.projection(hidden)
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                hidden = checkpoint(block, hidden, visible, use_reentrant=False)
            else:
                hidden = block(hidden, visible)
        return hidden if self.final_norm is None else self.final_norm(hidden)  # type: ignore[no-any-return]
