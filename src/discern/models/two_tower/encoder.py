"""The cloze network of Electric: predicts the word at every position from all other positions, in one pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from discern.errors import ConfigError
from discern.models import encoders
from discern.models.base import Encoder, Network
from discern.models.config import ModelConfig
from discern.models.heads import TiedLMHead
from discern.models.layers import TokenEmbeddings
from discern.models.two_tower.huggingface import TwoTowerArchitecture
from discern.types import Spans


class TwoTowerEncoder(Encoder):
    """The state at t concatenates the left-to-right tower's at t - 1 and the right-to-left tower's at t + 1: 2D numbers.

    So it does not depend on the token at t, and the text needs no [MASK]. Where t has no neighbor, at the edge of a row or of a
    document piece, the state of that side is zero.

    Differs: the released code rolls the states, so that the neighbor beyond an edge is at the row's other end.

    Args:
        embeddings: embeddings that both towers read, possibly shared with another network.
        config: sizes of one tower.
        gradient_checkpointing: recompute each block in the backward pass.

    Reference: Clark et al. 2020 (Electric), section 2.3; Baevski et al. 2019 (cloze-driven pre-training).
    """

    Config = ModelConfig
    architecture = TwoTowerArchitecture()
    takes_spans = True

    def __init__(self, embeddings: TokenEmbeddings, config: ModelConfig, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embeddings = embeddings
        build = partial(encoders.load(config.encoder), embeddings, config, gradient_checkpointing=gradient_checkpointing)
        self.left: Encoder = build(direction="left-to-right")
        self.right: Encoder = build(direction="right-to-left")

    def language_head(self, config: ModelConfig | None = None) -> TiedLMHead:
        """A new head over both towers' states; of encoders with a projection of the words, the left tower's is tied to it."""
        pair = (config or self.config).model_copy(update={"hidden_size": 2 * self.config.hidden_size})
        return self.left.language_head(pair)

    def repeated_blocks(self) -> list[nn.Module]:
        return [*self.left.repeated_blocks(), *self.right.repeated_blocks()]

    def forward_flops(self, length: int, **_: Any) -> float:
        return self.left.forward_flops(length) + self.right.forward_flops(length)

    def recomputed_flops(self, length: int, **_: Any) -> float:
        return self.left.recomputed_flops(length) + self.right.recomputed_flops(length)

    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Bool[Tensor, "B L"] | None = None,
        token_type_ids: Int[Tensor, "B L"] | None = None,
        position_ids: Int[Tensor, "B L"] | None = None,
        document_ids: Int[Tensor, "B L"] | None = None,
        spans: Spans | None = None,
    ) -> Float[Tensor, "B L two_D"]:
        """States of the context of each token, without the token."""
        context: tuple[Any, ...] = attention_mask, token_type_ids, position_ids, document_ids
        if spans is not None:
            context = *context, spans
        before, behind = self.left(input_ids, *context)[:, :-1], self.right(input_ids, *context)[:, 1:]
        # Only neighbors that are real tokens of one document piece see each other
        apart = torch.zeros_like(input_ids[:, 1:], dtype=torch.bool)
        if attention_mask is not None:
            apart = ~(attention_mask[:, :-1] & attention_mask[:, 1:])
        if document_ids is not None:
            apart = apart | (document_ids[:, :-1] != document_ids[:, 1:])
        before, behind = (states.masked_fill(apart[..., None], 0) for states in (before, behind))
        return torch.cat([F.pad(before, (0, 0, 1, 0)), F.pad(behind, (0, 0, 0, 1))], -1)


def two_tower_generator(embeddings: TokenEmbeddings, config: ModelConfig, *, gradient_checkpointing: bool = False) -> Network:
    """The two towers with a head over the vocabulary: q(x_t | all the others) at every position.

    `network.token_logits(input_ids, *context)` takes the clean text. To compute logits at some positions only, call the
    encoder and pass the states of these positions (`gather_positions`) to the head.

    Args:
        embeddings: embeddings that the towers read; their word table is the output matrix of the head.
        config: sizes of one tower.
        gradient_checkpointing: recompute each block in the backward pass.

    Raises:
        ConfigError: the encoder cannot be built to read in one direction.
    """
    able = [name for name in encoders.names() if encoders.load(name).one_way]
    if config.encoder not in able:
        raise ConfigError(
            f"the two towers each read in one direction, which encoder '{config.encoder}' cannot",
            hint=f"set model.encoder to {' or '.join(able)}",
        )
    encoder = TwoTowerEncoder(embeddings, config, gradient_checkpointing=gradient_checkpointing)
    return Network(encoder, encoder.language_head())
