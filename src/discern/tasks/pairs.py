"""What a head reads of a pair of texts: a summary of each, and how far each token is from its counterpart in the other text."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from discern.models.fused_ops import Dropout
from discern.types import TokenBatch

# The logits of the alignment are cosines times e to the power of this, about 10 at first. The factor is trained.
_SHARPNESS = 2.3
_NOWHERE = -1e4


class PairStates(nn.Module):
    """One state per row from the states of two texts: their means, compared, and their tokens, aligned and compared.

    A token is described by its state, to which its word embedding may be appended; the two together are called its state here.
    Each token is aligned to the mean of the other text's states, weighted by the softmax of their cosines times a trained factor.
    Three things are known of it then: its absolute difference from what it is aligned to, its largest cosine, and whether the
    other text has the same token. Each text has the means of these over its tokens, weighted by a trained importance. The state
    of the row is computed from them, the state of [CLS], the mean states of both texts, and the absolute difference and the
    product of these, by a linear layer, GELU and LayerNorm.

    Small encoders need it: from a few thousand pairs they do not learn to compare two texts inside their few layers.

    Args:
        input_size: width W of what is known of each token: its state, followed by its word embedding if the head reads both.
        hidden_size: width D of the state of the row.
        dropout: dropout of the input of the linear layer.

    References: Parikh et al. 2016, "A decomposable attention model for natural language inference" (alignment); Conneau et al.
    2017, "Supervised learning of universal sentence representations" (difference and product); Chen et al. 2017, "Reading
    Wikipedia to answer open-domain questions" (same token); Zhang et al. 2020, "BERTScore" (largest cosines).
    """

    def __init__(self, input_size: int, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(_SHARPNESS))
        self.importance = nn.Parameter(torch.zeros(input_size))  # at first, all tokens are equally important
        self.dropout = Dropout(dropout)
        self.dense = nn.Linear(7 * input_size + 4, hidden_size)
        self.norm = nn.LayerNorm(hidden_size)

    def forward(self, hidden: Float[Tensor, "R L W"], tokens: TokenBatch) -> Float[Tensor, "R D"]:
        """The state of each row. A text alone is compared to zeros, which leaves [CLS] and its means, one of them weighted."""
        real = tokens.attention_mask
        # The states of padding are undefined, and 0 * nan is not 0.
        hidden = hidden.masked_fill(~real[..., None], 0.0)
        is_second = tokens.token_type_ids == 1
        first, second = parts = real & ~is_second, real & is_second
        across = real[:, :, None] & real[:, None, :] & (is_second[:, :, None] != is_second[:, None, :])

        # In float32: a softmax of cosines in bfloat16 loses the differences it is about.
        directions = F.normalize(hidden.float(), dim=-1)
        cosines = (directions @ directions.transpose(1, 2)).masked_fill(~across, _NOWHERE)
        weights = (cosines * self.sharpness.exp()).softmax(-1).masked_fill(~across, 0.0)
        gaps = (hidden - weights.to(hidden.dtype) @ hidden).abs()
        nearest = cosines.amax(-1, keepdim=True).clamp(min=-1.0)
        shared = ((tokens.input_ids[:, :, None] == tokens.input_ids[:, None, :]) & across).any(-1)
        known = torch.cat([gaps, nearest.to(hidden.dtype), shared[..., None].to(hidden.dtype)], -1)

        importance = (hidden @ self.importance).float()
        one, two = mean_state(hidden, first), mean_state(hidden, second)
        aligned = (_weighted(known, importance, part) for part in parts)
        everything = torch.cat([hidden[:, 0], one, two, (one - two).abs(), one * two, *aligned], -1)
        state: Tensor = self.norm(F.gelu(self.dense(self.dropout(everything))))
        return state


def _weighted(
    known: Float[Tensor, "R L K"], importance: Float[Tensor, "R L"], chosen: Bool[Tensor, "R L"]
) -> Float[Tensor, "R K"]:
    """The mean over the chosen tokens of each row, weighted by the softmax of their importance; zeros without any."""
    weights = importance.masked_fill(~chosen, _NOWHERE).softmax(-1).masked_fill(~chosen, 0.0)
    return (weights.to(known.dtype)[:, None] @ known).squeeze(1)


def mean_state(hidden: Float[Tensor, "R L D"], chosen: Bool[Tensor, "R L"]) -> Float[Tensor, "R D"]:
    """The mean state of the chosen tokens of each row; zeros for a row without any."""
    # Masked by value: the states of padding are undefined, and 0 * inf is not 0. The sum in float32: bf16 has 8 bits.
    total = hidden.masked_fill(~chosen[..., None], 0.0).sum(1, dtype=torch.float32)
    return (total / chosen.sum(1, keepdim=True).clamp(min=1)).to(hidden.dtype)
