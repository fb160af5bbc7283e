"""Loss terms as sums and counts."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from discern import kernels
from discern.types import LossTerm


def masked_token_loss(
    logits: Float[Tensor, "M V"],
    targets: Int[Tensor, "M"],
    weight: float = 1.0,
    draws: Int[Tensor, "M"] | None = None,
    count: int | None = None,
) -> LossTerm:
    """Cross-entropy of the original tokens at the masked positions, summed, in float32.

    Args:
        draws: how often each position counts (`CorruptedBatch.target_draws`); None: once.
        count: the sum of `draws`; None: it is computed, which makes the host wait for a device.
    """
    if draws is not None:
        each = F.cross_entropy(logits.float(), targets, reduction="none")
        return LossTerm((each * draws).sum(), int(draws.sum()) if count is None else count, weight)
    if kernels.usable(logits):
        total = kernels.cross_entropy_sum(logits, targets)
    else:
        total = F.cross_entropy(logits.float(), targets, reduction="sum")
    return LossTerm(total, targets.shape[0], weight)


def replaced_token_loss(
    logits: Float[Tensor, "B L"],
    is_replaced: Bool[Tensor, "B L"],
    loss_mask: Bool[Tensor, "B L"],
    count: int,
    weight: float = 1.0,
) -> LossTerm:
    """Binary cross-entropy of *replaced* over the tokens of the mask, summed, in float32.

    Args:
        loss_mask: the tokens that count; in ELECTRA every real token, [CLS] and [SEP] included.
        count: number of tokens in the mask; passed in, because summing the mask would make a GPU wait.

    Reference: Clark et al. 2020, section 2; the released code's normalization over the tokens of the batch.
    """
    each = F.binary_cross_entropy_with_logits(logits.float(), is_replaced.float(), reduction="none")
    total = torch.where(loss_mask, each, torch.zeros_like(each)).sum()
    return LossTerm(total, count, weight)


def noise_contrastive_loss(
    energy: Float[Tensor, "B L"],
    log_noise_probability: Float[Tensor, "B L"],
    log_noise_odds: Float[Tensor, "B 1"],
    is_noise: Bool[Tensor, "B L"],
    loss_mask: Bool[Tensor, "B L"],
    count: int,
    weight: float = 1.0,
) -> LossTerm:
    """Binary cross-entropy of *noise* over the tokens of the mask, summed, in float32.

    With k of n tokens from q, P(noise) = k q / (k q + (n - k) exp(-energy)): its logit is energy + log q + log(k / (n - k)).

    Args:
        log_noise_probability: log q of the token at each position; no gradient flows into it.
        log_noise_odds: log(k / (n - k)) of each row, from its actual counts. Infinite for a row that is all noise: the loss is
            then 0, which is its limit.

    Reference: Clark et al. 2020 (Electric), algorithm 2; Gutmann and Hyvärinen 2010.
    """
    finite = torch.isfinite(log_noise_odds)
    odds = torch.where(finite, log_noise_odds, torch.zeros_like(log_noise_odds))
    logits = energy.float() + log_noise_probability.detach() + odds
    each = F.binary_cross_entropy_with_logits(logits, is_noise.float(), reduction="none")
    total = torch.where(loss_mask & finite, each, torch.zeros_like(each)).sum()
    return LossTerm(total, count, weight)


def copy_loss(
    word_losses: Float[Tensor, "T"],
    copy_logits: Float[Tensor, "T"],
    input_ids: Int[Tensor, "T"],
    targets: Int[Tensor, "T"],
    weight: float = 1.0,
) -> LossTerm:
    """Cross-entropy of the original tokens under D [input] + (1 - D) softmax(words), summed, in float32.

    Args:
        word_losses: cross-entropy of each original token under softmax(words).
        copy_logits: D is their sigmoid, the probability of copying the input token.

    Reference: Clark et al. 2020, section 3.3 (all-tokens MLM).
    """
    copied, written = F.logsigmoid(copy_logits.float()), F.logsigmoid(-copy_logits.float())
    written = written - word_losses
    log_probability = torch.where(input_ids == targets, torch.logaddexp(copied, written), written)
    return LossTerm(-log_probability.sum(), targets.shape[0], weight)
