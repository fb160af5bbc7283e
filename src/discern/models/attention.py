"""Multi-head self-attention."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from discern import kernels
from discern.models.config import ModelConfig
from discern.models.flops import parts_flops
from discern.models.fused_ops import Dropout
from discern.models.unpadding import Unpadding, attend_in_spans


class SelfAttention(nn.Module):
    """Multi-head scaled dot-product attention with dropout on the probabilities.

    Args:
        config: settings of the encoder.
        bias: whether the projections have biases, as in BERT.

    Reference: Vaswani et al. 2017, section 3.2.
    """

    def __init__(self, config: ModelConfig, *, bias: bool = True) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.query = nn.Linear(size, size, bias=bias)
        self.key = nn.Linear(size, size, bias=bias)
        self.value = nn.Linear(size, size, bias=bias)
        self.output = nn.Linear(size, size, bias=bias)
        self.dropout = Dropout(config.attention_dropout)

    def forward(self, hidden: Float[Tensor, "*tokens D"], unpadding: Unpadding) -> Float[Tensor, "*tokens D"]:
        """The attended values of each token, heads concatenated. The caller applies `output`, fused with what follows."""
        packed = self._projected(hidden)
        if unpadding.offsets is not None and unpadding.longest is not None:
            query, key, value = self._tokens(packed)
            bounds = unpadding.offsets, unpadding.longest
            return attend_in_spans(query, key, value, *bounds, direction=unpadding.direction).reshape(hidden.shape)
        if unpadding.offsets is not None:
            attended = kernels.attention(packed.flatten(0, -2), self.num_heads, unpadding.offsets, self.dropout.active)
            return attended.view(hidden.shape)
        query, key, value = (self._split(part) for part in packed.chunk(3, -1))
        return self._attended(query, key, value, unpadding.visible)

    def forward_flops(self, length: int) -> float:
        """FLOPs per token that attends to `length` tokens: four projections, scores and weighted values."""
        return parts_flops(length, self.query, self.key, self.value, self.output) + 4 * self.value.out_features * length

    def _projected(self, hidden: Float[Tensor, "*tokens D"]) -> Float[Tensor, "*tokens three_D"]:
        """Queries, keys and values side by side, from one product."""
        projections = (self.query, self.key, self.value)
        weight = torch.cat([projection.weight for projection in projections])
        bias = None if self.query.bias is None else torch.cat([projection.bias for projection in projections])
        return F.linear(hidden, weight, bias)

    def _attended(
        self,
        query: Float[Tensor, "B H L d"],
        key: Float[Tensor, "B H L d"],
        value: Float[Tensor, "B H L d"],
        visible: Bool[Tensor, "#B 1 #Q L"] | None,
    ) -> Float[Tensor, "B L D"]:
        """The attended values of padded rows, heads concatenated."""
        if query.device.type == "cpu" and not torch.compiler.is_compiling():
            attended = self._attend(query, key, value, visible)
        else:
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=self.dropout.active)
        return attended.transpose(1, 2).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
        # Computed step by step on the CPU: torch's fused kernel there has no dropout, and was slower up to 512 positions.
        scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-1, -2)
        if visible is not None:
            # The smallest finite number instead of -inf, so that the result is finite for any mask.
            scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        # Softmax returns float32 under autocast; the product with the values casts it back.
        probabilities: Tensor = self.dropout(scores.softmax(-1).to(value.dtype))
        return probabilities @ value

    def _tokens(self, packed: Float[Tensor, "*tokens three_D"]) -> tuple[Tensor, ...]:
        """Queries, keys and values of all tokens, each (T, H, d)."""
        width = packed.shape[-1] // 3 // self.num_heads
        return packed.view(-1, 3, self.num_heads, width).unbind(1)

    def _split(self, projected: Float[Tensor, "B L D"]) -> Float[Tensor, "B H L d"]:
        batch, length, size = projected.shape
        return projected.reshape(batch, length, self.num_heads, size // self.num_heads).transpose(1, 2)


def neighbor_of(head: int) -> int:
    """The relative position that a head attends to when heads begin locally: -1, +1, -2, +2, ..."""
    return (head // 2 + 1) * (1 if head % 2 else -1)
