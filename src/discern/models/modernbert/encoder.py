"""The encoder of ModernBERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from discern import kernels
from discern.models.attention import SelfAttention
from discern.models.base import Encoder
from discern.models.config import ModelConfig
from discern.models.embeddings import DisentangledWords, TokenEmbeddings, WordEmbeddings, WordTable
from discern.models.flops import module_flops, parts_flops
from discern.models.fused_ops import Dropout, States, as_states, linear_add_norm, linear_geglu, normalized
from discern.models.heads import LanguageHead, MaskedLMHead
from discern.models.modernbert.config import ModernBertConfig
from discern.models.modernbert.initialization import aim_heads
from discern.models.modernbert.rotary import Rotation, rotation
from discern.models.unpadding import (
    Direction,
    Unpadding,
    attend_in_spans,
    padded_rows,
    plan_unpadding,
    real_tokens,
    visible_in_window,
)
from discern.types import Spans


class RotaryAttention(SelfAttention):
    """Self-attention with rotary positions, to the whole document or to a window.

    Args:
        config: settings of the encoder.
        window: greatest distance of a token that is attended to; None: any.
    """

    def __init__(self, config: ModernBertConfig, window: int | None) -> None:
        super().__init__(config, bias=config.attention_bias)
        self.window = window

    def forward(  # type: ignore[override]
        self, hidden: Float[Tensor, "*tokens D"], unpadding: Unpadding, rotate: Rotation
    ) -> Float[Tensor, "*tokens D"]:
        """The attended values of each token, heads concatenated. The caller applies `output`, fused with what follows."""
        packed = self._projected(hidden)
        if unpadding.offsets is not None and unpadding.longest is not None:
            query, key, value = self._tokens(packed)
            query, key = rotate.of_tokens(query), rotate.of_tokens(key)
            bounds = unpadding.offsets, unpadding.longest
            attended = attend_in_spans(query, key, value, *bounds, self.window, unpadding.direction)
            return attended.reshape(hidden.shape)
        if unpadding.offsets is not None:
            flat = packed.flatten(0, -2)
            cosine, sine = rotate.cosine.flatten(0, -2), rotate.sine.flatten(0, -2)
            flat = kernels.rotary(flat, self.num_heads, cosine, sine, torch.arange(len(flat)))
            attended = kernels.attention(flat, self.num_heads, unpadding.offsets, self.dropout.active, self.window)
            return attended.view(hidden.shape)
        query, key, value = (self._split(part) for part in packed.chunk(3, -1))
        return self._attended(rotate(query), rotate(key), value, unpadding.visible)

    def forward_flops(self, length: int) -> float:
        """FLOPs per token of documents of `length` tokens: four projections, scores and weighted values."""
        window, seen = self.window, float(length)
        if window is not None and window < length:
            seen = (length * (2 * window + 1) - window * (window + 1)) / length
        return parts_flops(length, self.query, self.key, self.value, self.output) + 4 * self.value.out_features * seen


class ModernBertBlock(nn.Module):
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
        self.attention = RotaryAttention(config, None if config.is_full(layer) else config.local_window // 2)
        self.feedforward_norm = _norm(size, config)
        # The first half of its output goes through the GELU and is multiplied by the second.
        self.expand = nn.Linear(size, 2 * inner, bias=config.feedforward_bias)
        self.contract = nn.Linear(inner, size, bias=config.feedforward_bias)
        self.dropout = Dropout(config.hidden_dropout)

    def forward_flops(self, length: int) -> float:
        """FLOPs per token of documents of `length` tokens."""
        return parts_flops(length, self.attention, self.expand, self.contract)

    def forward(self, states: States, unpadding: Unpadding, rotate: Rotation, following: nn.LayerNorm | None) -> States:
        """The hidden states after this block.

        Args:
            states: the sum of the residuals, and the normalized states that attention reads.
            unpadding: layout of the batch, for the window of this block.
            rotate: rotation of its queries and keys.
            following: LayerNorm of the next block's attention; None: this is the last block.
        """
        attended = self.attention(states.operand, unpadding, rotate)
        states = linear_add_norm(self.attention.output, attended, states.values, self.feedforward_norm, self.dropout)
        inner = linear_geglu(self.expand, states.operand)
        if following is None:
            return as_states(states.values + self.dropout(self.contract(inner)))
        return linear_add_norm(self.contract, inner, states.values, following, self.dropout)


class ModernBertEncoder(Encoder):
    """Token ids to hidden states. Rows may have any length; segments are not distinguished.

    Differs: embeddings narrower than the hidden states are projected before their LayerNorm, for a generator that reads a wider
    network's words; an export stores the product of the two. `hidden_dropout` is applied to the outputs of both sub-layers;
    ModernBERT has its dropout of the feed-forward layer before the last product, and uses the attention's after the attention.

    Args:
        embeddings: of words alone, possibly shared with another encoder.
        config: settings; its embedding_size is not used, the embeddings have their own.
        gradient_checkpointing: recompute each block in the backward pass.
        direction: what a token attends to; in one direction, this is a tower of a language model.

    Reference: Warner et al. 2024 (ModernBERT), section 2; the modeling code of transformers.
    """

    Config = ModernBertConfig
    config: ModernBertConfig
    embeddings_class = WordEmbeddings
    fine_tuning: ClassVar[Mapping[str, object]] = {
        "classification.head": "prediction",
        "tagging.head": "prediction",
        "questions.head": "prediction",
    }
    disentangled_class = DisentangledWords
    one_way = True
    takes_spans = True
    limits_positions = False

    def __init__(
        self,
        embeddings: TokenEmbeddings,
        config: ModernBertConfig,
        *,
        gradient_checkpointing: bool = False,
        direction: Direction = "both",
    ) -> None:
        super().__init__()
        self.config = config
        self.direction = direction
        self.gradient_checkpointing = gradient_checkpointing
        self.embeddings = embeddings
        width, size = embeddings.embedding_size, config.hidden_size
        self.projection = nn.Linear(width, size, bias=False) if width != size else None
        self.embedding_norm = _norm(size, config)
        self.dropout = Dropout(config.hidden_dropout)
        self.blocks = nn.ModuleList(ModernBertBlock(config, layer) for layer in range(config.num_layers))
        self.final_norm = _norm(size, config)

    def language_head(self, config: ModelConfig | None = None) -> LanguageHead:
        assert isinstance(self.embeddings, WordTable)
        return MaskedLMHead(config or self.config, self.embeddings.word, self.projection)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Draw the layers that add to the residual from a narrower normal; with `initialization = "local"`, aim the heads."""
        blocks = [block for block in self.blocks if isinstance(block, ModernBertBlock)]
        for block in blocks:
            for layer in (block.attention.output, block.contract):
                layer.weight.mul_(self.config.output_std(layer.in_features) / self.config.linear_std(layer.in_features))
        if self.config.initialization == "local":
            aim_heads([block.attention for block in blocks], self.config)

    def stacked_layers(self) -> Mapping[nn.Linear, int]:
        return {block.expand: 2 for block in self.blocks if isinstance(block, ModernBertBlock)}

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
        """Hidden states of the last block; those of padding are undefined. Segments are ignored."""
        shape = input_ids.shape
        weights = self.embeddings.weights
        rows = input_ids, attention_mask, document_ids
        unpadding = plan_unpadding(*rows, weights, self.direction, contiguous=True, spans=spans)
        if position_ids is None:
            position_ids = torch.arange(shape[1], device=input_ids.device)[None]
        if unpadding.places is not None:
            input_ids, _, position_ids = real_tokens(unpadding.places, input_ids, None, position_ids)
        elif unpadding.offsets is not None:
            position_ids = position_ids.expand(shape)
        states = self._embedded(input_ids)
        layouts = {True: unpadding, False: self._windowed(unpadding, shape[1], input_ids.device)}
        width = self.config.hidden_size // self.config.num_heads
        thetas = {True: self.config.full_rope_theta, False: self.config.local_rope_theta}
        rotations = {full: rotation(theta, width, position_ids) for full, theta in thetas.items()}
        following = [*(block.attention_norm for block in self.blocks[1:]), None]
        for layer, (block, norm) in enumerate(zip(self.blocks, following, strict=True)):
            full = self.config.is_full(layer)
            if self.gradient_checkpointing and self.training:
                states = checkpoint(block, states, layouts[full], rotations[full], norm, use_reentrant=False)
            else:
                states = block(states, layouts[full], rotations[full], norm)
        hidden: Tensor = self.final_norm(states.values)
        return hidden if unpadding.places is None else padded_rows(hidden, unpadding.places, shape)

    def _embedded(self, input_ids: Int[Tensor, "B L"]) -> States:
        hidden = self.embeddings.words(input_ids)
        if self.projection is not None:
            hidden = self.projection(hidden)
        states = normalized(self.embedding_norm, hidden)
        return as_states(self.dropout(states.values)) if self.dropout.active else states

    def _windowed(self, unpadding: Unpadding, length: int, device: torch.device) -> Unpadding:
        """The layout for the layers with a window. Kernels apply the window themselves."""
        if unpadding.offsets is not None:
            return unpadding
        return Unpadding(visible_in_window(unpadding.visible, length, self.config.local_window // 2, device))


def _norm(size: int, config: ModernBertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(size, eps=config.layer_norm_epsilon, bias=config.norm_bias)
