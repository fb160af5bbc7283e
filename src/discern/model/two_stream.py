"""What goes into and comes out of an encoder with a content and a query stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Factorization:
    """What is predicted, and who sees whom: a factorization order as masks.

    Attributes:
        visible: (B, L, L) True = the query at position i may see the token at position j, `visible[b, i, j]`. As the objective
            means it for the *query* stream; the content stream sees the same and each position itself besides. (XLNet's
            `perm_mask` is the opposite, 1 where i may not see j.) What memory holds is visible to all.
        positions: (B, P) which positions are predicted. Their order is that of the query states that come out, and nothing else.
            A row with fewer than P of them repeats any position; what comes out there is left out of the loss.
    """

    visible: Bool[Tensor, "B L L"]
    positions: Int[Tensor, "B P"]


class Remembering(NamedTuple):
    """How much of a row the next row of its slot will see.

    Attributes:
        reuse_length: R, positions of this row that are kept, from its beginning.
        memory_length: positions that a memory holds at most; the oldest are forgotten.
    """

    reuse_length: int
    memory_length: int


class Streams(NamedTuple):
    """What the two streams give.

    Attributes:
        query: (B, P, D) state of each predicted position, which knows its place and what it may see, but not its token.
        memory: (N, B, M, D) what each of the N blocks is to see of these rows in the next step, detached; None where nothing
            is to be remembered.
    """

    query: Float[Tensor, "B P D"]
    memory: Float[Tensor, "N B M D"] | None


class Content(NamedTuple):
    """What the content stream gives alone: as `Streams`, with the state of every position."""

    hidden: Float[Tensor, "B L D"]
    memory: Float[Tensor, "N B M D"] | None


def see_all(attention_mask: Bool[Tensor, "B L"] | None, document_ids: Int[Tensor, "B L"] | None) -> Bool[Tensor, "B L L"] | None:
    """Who sees whom where nothing is predicted: real tokens, of the same document; padding sees itself too. None: all see all."""
    if document_ids is None:
        if attention_mask is None:
            return None
        return attention_mask[:, None, :].expand(-1, attention_mask.shape[1], -1)
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same if attention_mask is None else same & attention_mask[:, None, :]


def forget(old: Float[Tensor, "N B M D"] | None, new: Float[Tensor, "N B R D"], memory_length: int) -> Float[Tensor, "N B K D"]:
    """The newest `memory_length` positions of what was and what comes, detached."""
    joined = new if old is None else torch.cat([old.to(new.dtype), new], 2)
    return joined[:, :, max(0, joined.shape[2] - memory_length) :].detach()
