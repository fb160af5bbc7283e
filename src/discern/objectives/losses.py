"""Loss terms as sums and counts."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from discern import kernels
from discern.types import LossTerm


def masked_token_loss(logits: Float[Tensor, "M V"], targets: Int[Tensor, "M"], weight: float = 1.0) -> LossTerm:
    """Cross-entropy of the original tokens at the masked positions, summed, in float32."""
    if kernels.usable(logits):
        total = kernels.cross_entropy_sum(logits, targets)
    else:
        total = F.cross_entropy(logits.float(), targets, reduction="sum")
    return LossTerm(total, targets.shape[0], weight)


def replaced_token_loss(
    logits: Float[Tensor, "B L"],
    is_replaced: Bool[Tensor, "B L"],
    attention_mask: Bool[Tensor, "B L"],
    count: int,
    weight: float = 1.0,
) -> LossTerm:
    """Binary cross-entropy of *replaced* over every real token, [CLS] and [SEP] included, summed, in float32.

    Args:
        count: how many tokens are real; passed in, because asking the mask would make a GPU wait.

    Reference: Clark et al. 2020, section 2; the released code's normalisation over the tokens of the batch.
    """
    each = F.binary_cross_entropy_with_logits(logits.float(), is_replaced.float(), reduction="none")
    total = torch.where(attention_mask, each, torch.zeros_like(each)).sum()
    return LossTerm(total, count, weight)
