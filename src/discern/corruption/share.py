"""The actual share of tokens that a masking chooses."""

from __future__ import annotations

import torch

from discern.corruption.masking import quota
from discern.corruption.with_replacement import draw_quota

_EXACT = frozenset({"uniform", "whole-word", "span"})
"""Maskings that choose exactly `quota` positions and favor no token."""


def chosen_share(masking: str, mask_probability: float, row_length: int) -> float | None:
    """Expected fraction of the maskable tokens that are chosen, in a full row that holds one text.

    Whole numbers of positions are chosen, so this is `mask_probability` up to rounding: 9 of 62 tokens, 0.145 for 0.15, in a
    row of 64. Of the draws with replacement some coincide: n positions drawn k times give n (1 - (1 - 1/n)^k) different ones,
    17.7 of 126 in a row of 128.

    Args:
        masking: its name in the registry.
        row_length: positions of a row, [CLS] and [SEP] included; at least 3.

    Returns:
        None where there is no such number: `rarity` chooses a rare token more often than a frequent one, and what a masking
        of another package does is not known.
    """
    available = row_length - 2
    if masking in _EXACT:
        return int(quota(torch.ones(1, available, dtype=torch.bool), mask_probability)) / available
    if masking == "with-replacement":
        row = torch.ones(1, row_length, dtype=torch.bool)
        draws = int(draw_quota(row, torch.tensor([available]), mask_probability))
        return 1 - (1 - 1 / available) ** draws
    return None
