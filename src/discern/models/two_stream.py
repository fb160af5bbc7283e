"""Inputs and outputs of an encoder with a content and a query stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Factorization:
    """A factorization order as masks: the positions to predict, and the tokens that each position sees.

    Attributes:
        visible: (B, L, L) `visible[b, i, j]` is True if the query at position i may see the token at position j. This is for the
            *query* stream; in the content stream, each position also sees itself. (XLNet's `perm_mask` is the opposite, 1 if i
            may not see j.) Memory is visible to all positions.
        positions: (B, P) positions to predict, in the order of the returned query states. A row with fewer than P of them repeats
            any position, whose output is excluded from the loss.
    """

    visible: Bool[Tensor, "B L L"]
    positions: Int[Tensor, "B P"]


class Remembering(NamedTuple):
    """How much of a row the next row of its slot sees.

    Attributes:
        reuse_length: R, number of positions to keep, from the beginning of the row.
        memory_length: maximum number of positions in memory; the oldest are dropped.
    """

    reuse_length: int
    memory_length: int


class Streams(NamedTuple):
    """Output of the two streams.

    Attributes:
        query: (B, P, D) state of each predicted position, which depends on the position and the visible tokens, not on its token.
        memory: (N, B, M, D) states of these rows for each of the N blocks in the next step, detached; None if nothing is
            remembered.
    """

    query: Float[Tensor, "B P D"]
    memory: Float[Tensor, "N B M D"] | None


class Content(NamedTuple):
    """Output of the content stream alone: the state of every position, and the memory as in `Streams`."""

    hidden: Float[Tensor, "B L D"]
    memory: Float[Tensor, "N B M D"] | None


def update_memory(
    old: Float[Tensor, "N B M D"] | None, new: Float[Tensor, "N B R D"], memory_length: int
) -> Float[Tensor, "N B K D"]:
    """The newest `memory_length` positions of the old memory and the new states, detached."""
    joined = new if old is None else torch.cat([old.to(new.dtype), new], 2)
    return joined[:, :, max(0, joined.shape[2] - memory_length) :].detach()
