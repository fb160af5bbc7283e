"""Multi-head self-attention, and the block around it."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from discern import kernels
from discern.models.config import ModelConfig
from discern.models.flops import SumOfParts, parts_flops
from discern.models.fused_ops import Dropout, States, linear_activation, linear_residual_norm
from discern.models.rotary import Rotation
from discern.models.unpadding import Unpadding, attend_in_spans


class SelfAttention(nn.Module):
    """Multi-head scaled dot-product attention with dropout on the probabilities, to the whole document or to a window.

    Args:
        config: settings of the encoder.
        bias: whether the projections have biases, as in BERT.
        window: greatest distance of a token that is attended to; None: any.

    Reference: Vaswani et al. 2017, section 3.2.
    """

    def __init__(self, config: ModelConfig, *, bias: bool = True, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.query = nn.Linear(size, size, bias=bias)
        self.key = nn.Linear(size, size, bias=bias)
        self.value = nn.Linear(size, size, bias=bias)
        self.output = nn.Linear(size, size, bias=bias)
        self.dropout = Dropout(config.attention_dropout)

    def forward(
        self, hidden: Float[Tensor, "*tokens D"], unpadding: Unpadding, rotate: Rotation | None = None
    ) -> Float[Tensor, "*tokens D"]:
        """The attended values of each token, heads concatenated. The caller applies `output`, fused with what follows.

        Args:
            unpadding: layout of the batch; in padded rows, its mask has the window.
            rotate: rotation of queries and keys by their positions; None: none.
        """
        # Queries, keys and values side by side, from one product
        projections = (self.query, self.key, self.value)
        weight = torch.cat([projection.weight for projection in projections])
        bias = None if self.query.bias is None else torch.cat([projection.bias for projection in projections])
        packed = F.linear(hidden, weight, bias)
        width = packed.shape[-1] // 3 // self.num_heads
        if unpadding.offsets is not None and unpadding.longest is not None:
            query, key, value = packed.view(-1, 3, self.num_heads, width).unbind(1)
            if rotate is not None:
                query, key = rotate.of_tokens(query), rotate.of_tokens(key)
            bounds = unpadding.offsets, unpadding.longest
            return attend_in_spans(query, key, value, *bounds, self.window, unpadding.direction).reshape(hidden.shape)
        if unpadding.offsets is not None:
            flat = packed.flatten(0, -2)
            if rotate is not None:
                cosine, sine = rotate.cosine.flatten(0, -2), rotate.sine.flatten(0, -2)
                flat = kernels.rotary(flat, self.num_heads, cosine, sine, torch.arange(len(flat)))
            attended = kernels.attention(flat, self.num_heads, unpadding.offsets, self.dropout.active, self.window)
            return attended.view(hidden.shape)
        query, key, value = packed.view(*packed.shape[:2], 3, self.num_heads, width).transpose(1, 3).unbind(2)
        if rotate is not None:
            query, key = rotate(query), rotate(key)
        visible = unpadding.visible
        if query.device.type == "cpu" and not torch.compiler.is_compiling():
            # Computed step by step: torch's fused kernel has no dropout here, and was slower up to 512 positions.
            scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-1, -2)
            if visible is not None:
                # The smallest finite number instead of -inf, so that the result is finite for any mask.
                scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
            # Softmax returns float32 under autocast; the product with the values casts it back.
            attended = self.dropout(scores.softmax(-1).to(value.dtype)) @ value
        else:
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=self.dropout.active)
        return attended.transpose(1, 2).flatten(2)

    def forward_flops(self, length: int) -> float:
        """FLOPs per token of documents of `length` tokens: four projections, scores and weighted values."""
        window, seen = self.window, float(length)
        if window is not None and window < length:
            seen = (length * (2 * window + 1) - window * (window + 1)) / length
        return parts_flops(length, self.query, self.key, self.value, self.output) + 4 * self.value.out_features * seen


class TransformerBlock(SumOfParts):
    """The layers of a block: attention and feed-forward, each with dropout, a residual and a LayerNorm.

    Args:
        config: settings of the encoder.

    Attributes:
        attention_class: its attention, which has its last layer as `output`.
        activation: activation of the feed-forward layers, by its name in the configuration.

    Reference: Vaswani et al. 2017; GELU by the error function, as BERT and ELECTRA have it.
    """

    attention_class: ClassVar[type[nn.Module]] = SelfAttention
    activation: str = "gelu"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention: Any = self.attention_class(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.expand = nn.Linear(config.hidden_size, config.feedforward_size)
        self.contract = nn.Linear(config.feedforward_size, config.hidden_size)
        self.feedforward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.dropout = Dropout(config.hidden_dropout)

    def after_attention(self, attended: Float[Tensor, "*tokens D"], residual: Float[Tensor, "*tokens D"]) -> States:
        """The states after a post-norm block, whose LayerNorms follow the residuals.

        Args:
            attended: what attention gives, before its last layer.
            residual: the states that it is added to.
        """
        states = linear_residual_norm(self.attention.output, attended, residual, self.attention_norm, self.dropout)
        inner = linear_activation(self.expand, states.operand, self.activation)
        return linear_residual_norm(self.contract, inner, states.values, self.feedforward_norm, self.dropout)


def neighbor_of(head: int) -> int:
    """The relative position that a head attends to when heads begin locally: -1, +1, -2, +2, ..."""
    return (head // 2 + 1) * (1 if head % 2 else -1)
