"""XLNet's factorization order, and the attention masks that follow from it.

A row has three classes of tokens. *Targets* are predicted, in a random order; *functional* tokens ([SEP], [CLS]) have a place
in that order but are not predicted; all other tokens are *context*, visible to all.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from discern.corruption.randomness import Randomness

_CONTEXT = -1


def factorization_order(
    length: int, reuse_length: int, permutation_size: int | None, randomness: Randomness
) -> Int[Tensor, "B L"]:
    """Rank of each position in the factorization order of its part of the row.

    A part is cut into windows. One permutation is drawn for each part and row, and applied to all its windows, which keep
    their order from left to right.

    Args:
        length: L.
        reuse_length: start of the second part; 0: the row is one part.
        permutation_size: positions per window; None: a part is one window.

    Reference: zihangdai/xlnet, data_utils.py, `_local_perm`.
    """
    sizes = [reuse_length, length - reuse_length] if reuse_length else [length]
    parts = []
    for number, size in enumerate(sizes):
        window = min(permutation_size or size, size)
        drawn = randomness.integers(f"factorization order {number}", window).argsort(1).argsort(1)
        place = torch.arange(size, device=drawn.device)
        parts.append(place // window * window + drawn[:, place % window])
    return torch.cat(parts, 1)


def blocked_pairs(
    order: Int[Tensor, "B L"], targets: Bool[Tensor, "B L"], functional: Bool[Tensor, "B L"], reuse_length: int
) -> Bool[Tensor, "B L L"]:
    """True where the token of the row may not see the token of the column, when each predicts itself.

    | row \\ column | context | target | functional |
    |---|---|---|---|
    | context | sees | never | never |
    | target | sees | only those earlier in the order | only those earlier in the order |
    | functional | sees | those not later in the order | those not later in the order, itself too |

    The first part does not see the second, which sees all of the first. So the states of the first part, which a memory keeps
    for the next row, contain nothing of the text with which that row continues.

    Args:
        order: the result of `factorization_order`.
        functional: special tokens; they are not targets.

    Reference: zihangdai/xlnet, data_utils.py, `_local_perm` and `_create_data`.
    """
    rank = torch.where(targets | functional, order, _CONTEXT)
    # A token that is not a target sees itself: its own rank counts as one later.
    own = torch.where(targets, rank, rank + 1)
    blocked = (own[:, :, None] <= rank[:, None, :]) & (rank[:, None, :] != _CONTEXT)
    if reuse_length:
        second = torch.arange(order.shape[1], device=order.device) >= reuse_length
        blocked = torch.where(second[:, None] == second[None, :], blocked, second[None, :])
    return blocked
