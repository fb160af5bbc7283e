"""InfoNCE over a batch: each anchor has to find its positive among the positives and negatives of all rows.

And CoSENT, for judged pairs: a pair with a higher score is to have a higher cosine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

ABSENT = 0
"""The key of a text that a row does not have."""


@dataclass(frozen=True)
class Vectors:
    """The vectors of rows of texts.

    Attributes:
        values: (N, K, D) vectors of the anchor, the positive and the negatives of each row; zeros for a text that is absent.
        keys: (N, K) what distinguishes texts, see `text_key`; `ABSENT` for a text that is absent.
    """

    values: Float[Tensor, "N K D"]
    keys: Int[Tensor, "N K"]


def text_key(text: str) -> int:
    """A number that is the same for equal texts, and for hardly any others: 62 bits of a hash."""
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 2) + 1


def info_nce(
    own: Vectors, everyone: Vectors, first: int, *, temperature: float, symmetric: bool = False, sizes: Sequence[int] = ()
) -> Tensor:
    """The loss summed over the rows, in nats: -log softmax(cosine / temperature) of the positive among all candidates.

    The candidates of an anchor are the positives and the negatives of every row. A candidate that equals the anchor or its
    positive, or is the positive of an equal anchor, would be a false negative, and is left out.

    Args:
        own: the rows to sum over.
        everyone: all rows; `own` are `first` and the following ones.
        temperature: divisor of the cosines.
        symmetric: also let each positive find its anchor among all anchors; the loss is the mean of both directions.
        sizes: the loss is the sum of those of the first `size` components of the vectors, for each of the sizes; empty: of the
            whole vectors alone.

    References: van den Oord et al. 2018, "Representation learning with contrastive predictive coding"; Henderson et al. 2017,
    "Efficient natural language response suggestion", section 4.4; Gao et al. 2021, "SimCSE"; Kusupati et al. 2022,
    "Matryoshka representation learning".
    """
    labels = torch.arange(first, first + len(own.keys), device=own.keys.device)
    hidden, hidden_back = _hidden(own.keys, everyone.keys, labels)
    total = own.values.new_zeros(())
    for size in sizes or (own.values.shape[-1],):
        mine, all_of_them = (F.normalize(each.values[..., :size], dim=-1) for each in (own, everyone))
        # The positives of all rows first: the positive of a row has the number of the row.
        candidates = all_of_them[:, 1:].transpose(0, 1).flatten(0, 1)
        loss = _cross_entropy(mine[:, 0] @ candidates.T / temperature, hidden, labels)
        if symmetric:
            loss = (loss + _cross_entropy(mine[:, 1] @ all_of_them[:, 0].T / temperature, hidden_back, labels)) / 2
        total = total + loss
    return total


def cosent(
    vectors: Float[Tensor, "N K D"],
    scores: Float[Tensor, "N"],
    *,
    temperature: float,
    sizes: Sequence[int] = (),
    rows_at_a_time: int | None = None,
) -> Tensor:
    """log(1 + sum of exp((cosine of i - cosine of j) / temperature)) over all i, j where pair j has a higher score than pair i.

    Args:
        vectors: of the two texts of each pair, and possibly of further texts, which are not read.
        scores: similarities of the pairs, as judged by people; only their order matters.
        temperature: divisor of the differences.
        sizes: as in `info_nce`.
        rows_at_a_time: number of pairs i that are compared with all others at a time, so that many pairs can be evaluated in
            little memory; None: all of them. Only None has gradients.

    Reference: Su 2022, "CoSENT: a more effective sentence vector scheme than Sentence BERT"; the loss of the same name in
    sentence-transformers.
    """
    block = rows_at_a_time or len(scores)
    total = vectors.new_zeros(())
    for size in sizes or (vectors.shape[-1],):
        cosines = F.cosine_similarity(vectors[:, 0, :size], vectors[:, 1, :size], dim=-1)
        every = [cosines.new_zeros(1)]  # its exponential is the 1 in the logarithm
        for first in range(0, len(scores), block):
            rows = slice(first, first + block)
            gaps = (cosines[rows, None] - cosines) / temperature
            found = gaps.masked_fill(scores[rows, None] >= scores, -torch.inf).flatten()
            every.append(found.logsumexp(0, keepdim=True) if rows_at_a_time else found)
        total = total + torch.cat(every).logsumexp(0)
    return total


def _cross_entropy(logits: Float[Tensor, "R C"], hidden: Bool[Tensor, "R C"], labels: Int[Tensor, "R"]) -> Tensor:
    return F.cross_entropy(logits.masked_fill(hidden, -torch.inf), labels, reduction="sum")


def _hidden(
    own: Int[Tensor, "R K"], everyone: Int[Tensor, "N K"], labels: Int[Tensor, "R"]
) -> tuple[Bool[Tensor, "R C"], Bool[Tensor, "R N"]]:
    """The candidates that an anchor, and the anchors that a positive, is not compared with."""
    anchors, positives = everyone[:, 0], everyone[:, 1]
    same_anchor, same_positive = own[:, :1] == anchors, own[:, 1:2] == positives
    candidates = everyone[:, 1:].T.flatten()
    hidden = (candidates == ABSENT) | (own[:, :1] == candidates) | (own[:, 1:2] == candidates)
    hidden[:, : len(everyone)] |= same_anchor
    hidden_back = same_anchor | same_positive | (own[:, 1:2] == anchors)
    rows = torch.arange(len(own), device=own.device)
    for mask in (hidden, hidden_back):
        mask[rows, labels] = False  # its own, even if anchor and positive are the same text (SimCSE)
    return hidden, hidden_back


def of_all_ranks(own: Vectors) -> tuple[Vectors, int]:
    """The rows of all ranks in order, and the index of this rank's first row. Gradients flow back to the rank of a row.

    Every rank must have equally many rows.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own, 0
    return Vectors(gathered(own.values), gathered(own.keys)), dist.get_rank() * len(own.keys)


def gathered(own: Tensor) -> Tensor:
    """The tensors of all ranks, one after another, which are equally long. Gradients flow back to the rank of a row."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    found: Tensor = _Gathered.apply(own)  # type: ignore[no-untyped-call]
    return found


class _Gathered(torch.autograd.Function):
    """The tensors of all ranks, one after another; each rank's tensor receives the gradients of the losses of all ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        ctx.rows = len(own)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        first: int = dist.get_rank() * ctx.rows
        return total[first : first + ctx.rows]
