"""Rare tokens more often: the strategic masking that the ELECTRA paper mentions."""

from __future__ import annotations

import torch

from discern.corruption.masking import Chosen, MaskingContext, maskable_positions, quota, smallest
from discern.errors import ConfigError
from discern.types import TokenBatch


def rarity(batch: TokenBatch, context: MaskingContext) -> Chosen:
    """Positions drawn without replacement, exactly `quota` a sequence, each draw with weight `count^-rarity_exponent`.

    `count` is how often the token occurs in the training split, 1 for one that doesn't. Exponent 0 is `uniform`.

    The paper tried to mask rarer tokens more often, for a minor gain, and gives no formula. The form is that of
    word2vec's subsampling, whose exponent is 1/2.

    Raises:
        ConfigError: the counts of the tokens are not known.

    Reference: Clark et al. 2020, appendix on negative results; Mikolov et al. 2013, section 2.3; for weighted draws by
    exponential numbers, Efraimidis and Spirakis 2006.
    """
    if context.token_counts is None:
        raise ConfigError(
            "masking 'rarity' needs to know how often each token occurs, and that is not given here",
            hint="use a data set of `discern prepare` or a run trained on one, which hold the counts, "
            "or set objective.masking=uniform",
        )
    maskable = maskable_positions(batch)
    counts = context.token_counts.to(batch.input_ids.device)[batch.input_ids].clamp(min=1).double()
    # The first of exponential clocks to ring, one with rate w each, is any of them with probability w / (sum of all w).
    keys = context.randomness.exponentials("masked positions", maskable.shape[1]) * counts**context.rarity_exponent
    keys = keys.masked_fill(~maskable, torch.inf)
    return Chosen(smallest(keys, quota(maskable, context.mask_probability)))
