"""The encoder of ModernBERT."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from discern.models.attention import SelfAttention, Unpadding, neighbor_of, visible_in_window
from discern.models.base import StackedEncoder
from discern.models.config import ModelConfig
from discern.models.heads import MaskedLMHead, TiedLMHead
from discern.models.layers import (
    Disentangled,
    Dropout,
    States,
    SumOfParts,
    TokenEmbeddings,
    WordEmbeddings,
    as_states,
    linear_geglu,
    linear_residual_norm,
    normalized,
)
from discern.models.modernbert.config import ModernBertConfig
from discern.models.modernbert.huggingface import ModernBertArchitecture
from discern.models.rotary import Rotation, frequencies, rotation

# Pairs of each head that aim it, the fastest ones; and the strength of their biases.
_PAIRS, _STRENGTH = 4, 4.0


class ModernBertBlock(SumOfParts):
    """Attention and a gated feed-forward layer, each with a LayerNorm before it and a residual around both.

    Each LayerNorm is computed together with the residual before it. The one before the attention is therefore computed by the
    previous block, and the first block has none, as the embeddings are normalized.

    Args:
        config: settings of the encoder.
        layer: number of the block, from 0.
    """

    def __init__(self, config: ModernBertConfig, layer: int) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.feedforward_size
        self.attention_norm = _norm(size, config) if layer else None
        window = None if config.is_full(layer) else config.local_window // 2
        self.attention = SelfAttention(config, bias=config.attention_bias, window=window)
        self.feedforward_norm = _norm(size, config)
        # The first half of its output goes through the GELU and is multiplied by the second.
        self.expand = nn.Linear(size, 2 * inner, bias=config.feedforward_bias)
        self.contract = nn.Linear(inner, size, bias=config.feedforward_bias)
        self.dropout = Dropout(config.hidden_dropout)

    def forward(self, states: States, unpadding: Unpadding, rotate: Rotation, following: nn.LayerNorm) -> States:
        """The hidden states after this block.

        Args:
            states: the sum of the residuals, and the normalized states that attention reads.
            unpadding: layout of the batch, for the window of this block.
            rotate: rotation of its queries and keys.
            following: LayerNorm of the next block's attention, or the last of the encoder.
        """
        attended = self.attention(states.operand, unpadding, rotate)
        states = linear_residual_norm(
            self.attention.output, attended, states.values, self.feedforward_norm, self.dropout, keeps_sum=True
        )
        inner = linear_geglu(self.expand, states.operand)
        return linear_residual_norm(self.contract, inner, states.values, following, self.dropout, keeps_sum=True)


class ModernBertEncoder(StackedEncoder):
    """Token ids to hidden states. Rows may have any length; segments are not distinguished.

    Differs: embeddings narrower than the hidden states are projected before their LayerNorm, for a generator that reads a wider
    network's words; an export stores the product of the two. `hidden_dropout` is applied to the outputs of both sub-layers;
    ModernBERT has its dropout of the feed-forward layer before the last product, and uses the attention's after the attention.

    Reference: Warner et al. 2024 (ModernBERT), section 2; the modeling code of transformers.
    """

    Config = ModernBertConfig
    architecture = ModernBertArchitecture()
    config: ModernBertConfig
    embeddings_class = WordEmbeddings
    fine_tuning: ClassVar[Mapping[str, object]] = {
        "classification.head": "prediction",
        "tagging.head": "prediction",
        "questions.head": "prediction",
    }
    disentangled_class = Disentangled
    position_tables = ()
    contiguous = True

    def __init__(self, embeddings: TokenEmbeddings, config: ModernBertConfig, **options: Any) -> None:
        super().__init__(embeddings, config, projection_bias=False, **options)
        self.embedding_norm = _norm(config.hidden_size, config)
        self.dropout = Dropout(config.hidden_dropout)
        self.blocks = nn.ModuleList(ModernBertBlock(config, layer) for layer in range(config.num_layers))
        self.final_norm = _norm(config.hidden_size, config)

    def language_head(self, config: ModelConfig | None = None) -> TiedLMHead:
        return MaskedLMHead(config or self.config, self.embeddings.table, self.projection)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Draw the layers that add to the residual from a narrower normal; with `initialization = "local"`, set them to zero, and
        let head 0 attend to the previous token, head 1 to the next, head 2 to the one two before, and so on.

        Let w_j be the frequencies of a head of width d. With a query bias of (c, 0) and a key bias of (c cos(o w_j),
        -c sin(o w_j)) in pair j, the two rotated biases of a query at m and a key at n contribute c^2 / sqrt(d) times the sum of
        cos((m - n + o) w_j) to their score: most at n = m + o, whatever m is. The highest frequencies distinguish neighbors best.
        Only values change: the parameters are those of any ModernBERT with biases of attention.
        """
        config, blocks = self.config, cast(Iterable[Any], self.blocks)
        is_local, width = config.initialization == "local", config.hidden_size // config.num_heads
        count, half = min(_PAIRS, width // 2), width // 2
        for number, block in enumerate(blocks):
            for layer in (block.attention.output, block.contract):
                narrower = config.output_std(layer.in_features) / config.linear_std(layer.in_features)
                layer.weight.mul_(0.0 if is_local else narrower)
            if not is_local:
                continue
            theta = config.full_rope_theta if config.is_full(number) else config.local_rope_theta
            turns = frequencies(theta, width)[:count]
            query, key = block.attention.query.bias.view(-1, width), block.attention.key.bias.view(-1, width)
            for head in range(config.num_heads):
                angles = neighbor_of(head) * turns
                query[head, :count] = _STRENGTH
                key[head, :count] = _STRENGTH * angles.cos()
                key[head, half : half + count] = -_STRENGTH * angles.sin()

    def stacked_layers(self) -> Mapping[nn.Linear, int]:
        return {block.expand: 2 for block in self.blocks if isinstance(block, ModernBertBlock)}

    def last_states(
        self,
        input_ids: Int[Tensor, "B L"],
        token_type_ids: Int[Tensor, "B L"] | None,
        position_ids: Int[Tensor, "#B L"] | None,
        unpadding: Unpadding,
    ) -> Float[Tensor, "B L D"]:
        config, length = self.config, input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device)[None]
        if unpadding.offsets is not None:
            position_ids = position_ids.expand(input_ids.shape)
        hidden = self.embeddings.words(input_ids)
        states = normalized(self.embedding_norm, hidden if self.projection is None else self.projection(hidden))
        states = as_states(self.dropout(states.values)) if self.dropout.active else states
        windowed = unpadding  # kernels apply the window themselves
        if unpadding.offsets is None:
            windowed = Unpadding(visible_in_window(unpadding.visible, length, config.local_window // 2, input_ids.device))
        width = config.hidden_size // config.num_heads
        full = unpadding, rotation(config.full_rope_theta, width, position_ids)
        local = windowed, rotation(config.local_rope_theta, width, position_ids)
        following = [*(block.attention_norm for block in self.blocks[1:]), self.final_norm]
        for layer, (block, norm) in enumerate(zip(self.blocks, following, strict=True)):
            states = self.run_block(block, states, *(full if config.is_full(layer) else local), norm)
        return states.operand


def _norm(size: int, config: ModernBertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(size, eps=config.layer_norm_epsilon, bias=config.norm_bias)
