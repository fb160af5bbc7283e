"""Self-attention over the whole sequence, and which key each query may see."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from discern.model.config import ModelConfig
from discern.model.dropout import Dropout


def visible_keys(attention_mask: Bool[Tensor, "B L"], document_ids: Int[Tensor, "B L"] | None) -> Bool[Tensor, "B 1 Q L"]:
    """True where a query may see a key: real tokens, of the same document piece where rows hold several.

    Padding sees padding where it would see nothing else: a softmax over no key is 0/0, which some fused kernels leave NaN.
    Q is 1 where every query of a row sees the same keys, L otherwise.
    """
    keys = attention_mask[:, None, None, :]
    if document_ids is None:
        return keys | ~attention_mask.any(1)[:, None, None, None]
    same_piece = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same_piece & (keys | ~attention_mask[:, None, :, None])


class SelfAttention(nn.Module):
    """Multi-head scaled dot-product attention with dropout on the probabilities.

    Reference: Vaswani et al. 2017, section 3.2; BERT's biases on all projections.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)
        self.output = nn.Linear(size, size)
        self.dropout = Dropout(config.attention_dropout)

    def forward(self, hidden: Float[Tensor, "B L D"], visible: Bool[Tensor, "B 1 Q L"] | None) -> Float[Tensor, "B L D"]:
        """The attended values, projected back; `visible` None means that every key is seen."""
        query, key, value = (self._split(projection(hidden)) for projection in (self.query, self.key, self.value))
        if hidden.device.type == "cpu" and not torch.compiler.is_compiling():
            attended = self._attend(query, key, value, visible)
        else:
            probability = self.dropout.probability if self.training else 0.0
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=probability)
        return self.output(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
        # Written out on the CPU: the fused kernel there has no dropout and was measured slower up to 512 positions.
        scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-1, -2)
        if visible is not None:
            # The smallest finite number instead of -inf: finite whatever the mask.
            scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        # Softmax returns float32 under autocast; the product with the values takes it back down.
        probabilities: Tensor = self.dropout(scores.softmax(-1).to(value.dtype))
        return probabilities @ value

    def _split(self, projected: Float[Tensor, "B L D"]) -> Float[Tensor, "B H L d"]:
        batch, length, size = projected.shape
        return projected.view(batch, length, self.num_heads, size // self.num_heads).transpose(1, 2)
