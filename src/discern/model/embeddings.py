"""Word, position and segment embeddings."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from discern.model.config import ModelConfig
from discern.model.dropout import Dropout


class Embeddings(nn.Module):
    """The sum of three embeddings, normalised and dropped out; generator and discriminator share one by default.

    Reference: Clark et al. 2020, section 3.2 (weight sharing). The released code shares the LayerNorm too.

    Args:
        vocab_size: V.
        embedding_size: E, which may differ from the hidden size of the encoders that read it.
        config: the tables' other sizes.
    """

    def __init__(self, vocab_size: int, embedding_size: int, config: ModelConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab_size, embedding_size)
        self.position = nn.Embedding(config.max_positions, embedding_size)
        self.token_type = nn.Embedding(config.num_token_types, embedding_size)
        self.norm = nn.LayerNorm(embedding_size, eps=config.layer_norm_epsilon)
        self.dropout = Dropout(config.hidden_dropout)

    @property
    def embedding_size(self) -> int:
        """E."""
        return self.word.embedding_dim

    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        token_type_ids: Int[Tensor, "B L"] | None,
        position_ids: Int[Tensor, "B L"] | None,
    ) -> Float[Tensor, "B L E"]:
        """Embeddings of the ids; segments default to 0, positions to 0, 1, 2, ..."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None, :]
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        total = self.word(input_ids) + self.position(position_ids) + self.token_type(token_type_ids)
        return self.dropout(self.norm(total))  # type: ignore[no-any-return]
