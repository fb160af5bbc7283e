"""InfoNCE over a batch: each anchor has to find its positive among the positives and negatives of all rows.

And CoSENT, for judged pairs: a pair with a higher score is to have a higher cosine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F


def info_nce(
    vectors: Float[Tensor, "N K D"],
    keys: Int[Tensor, "N K"],
    temperature: float,
    sizes: Sequence[int],
    *,
    rows: slice = slice(None),
    symmetric: bool = False,
) -> Tensor:
    """The loss summed over some rows, in nats: -log softmax(cosine / temperature) of the positive among all candidates.

    The candidates of an anchor are the positives and the negatives of all N rows. A candidate that equals the anchor or its
    positive, or is the positive of an equal anchor, would be a false negative, and is left out.

    Args:
        vectors: of the anchor, the positive and the negatives of each row; zeros for a text that is absent.
        keys: the number of each text, the same for equal texts; 0 for a text that is absent.
        temperature: divisor of the cosines.
        sizes: the loss is the sum of those of the first `size` components of the vectors, for each of the sizes.
        rows: the rows to sum over.
        symmetric: also let each positive find its anchor among all anchors; the loss is the mean of both directions.

    References: van den Oord et al. 2018, "Representation learning with contrastive predictive coding"; Henderson et al. 2017,
    "Efficient natural language response suggestion", section 4.4; Gao et al. 2021, "SimCSE"; Kusupati et al. 2022,
    "Matryoshka representation learning".
    """
    # The positives of all rows come first, so the positive of a row has the number of the row.
    labels = torch.arange(len(keys), device=keys.device)[rows]
    anchors, positives, candidates = keys[:, 0], keys[:, 1], keys[:, 1:].T.flatten()
    anchor, positive = anchors[rows, None], positives[rows, None]

    # Leave out false negatives, but never the positive itself, even if anchor and positive are the same text (SimCSE).
    is_hidden = (candidates == 0) | (candidates == anchor) | (candidates == positive)
    is_hidden[:, : len(keys)] |= anchors == anchor
    is_hidden_anchor = (anchors == anchor) | (positives == positive) | (anchors == positive)
    for mask in (is_hidden, is_hidden_anchor):
        mask.scatter_(1, labels[:, None], False)

    total = vectors.new_zeros(())
    for size in sizes:
        directions = F.normalize(vectors[..., :size], dim=-1)
        logits = directions[rows, 0] @ directions[:, 1:].transpose(0, 1).flatten(0, 1).T / temperature
        loss = F.cross_entropy(logits.masked_fill(is_hidden, -torch.inf), labels, reduction="sum")
        if symmetric:
            logits = directions[rows, 1] @ directions[:, 0].T / temperature
            backward = F.cross_entropy(logits.masked_fill(is_hidden_anchor, -torch.inf), labels, reduction="sum")
            loss = (loss + backward) / 2
        total = total + loss
    return total


def cosent(vectors: Float[Tensor, "N 2 D"], scores: Float[Tensor, "N"], temperature: float, sizes: Sequence[int]) -> Tensor:
    """log(1 + sum of exp((cosine of i - cosine of j) / temperature)) over all i, j where pair j has a higher score than pair i.

    Args:
        vectors: of the two texts of each pair.
        scores: similarities of the pairs, as judged by people; only their order matters.
        temperature: divisor of the differences.
        sizes: as in `info_nce`.

    Reference: Su 2022, "CoSENT: a more effective sentence vector scheme than Sentence BERT"; the loss of the same name in
    sentence-transformers.
    """
    scores, order = scores.sort()
    num_lower = torch.searchsorted(scores, scores)  # number of pairs with a lower score
    total = vectors.new_zeros(())
    for size in sizes:
        cosines = F.cosine_similarity(vectors[order, 0, :size], vectors[order, 1, :size], dim=-1) / temperature
        # For each j, the logarithm of the sum over all i is a cumulative one, so memory is linear in the number of pairs.
        lower = F.pad(cosines.logcumsumexp(0), (1, 0), value=-torch.inf)[num_lower]
        total = total + F.pad(lower - cosines, (1, 0)).logsumexp(0)  # exp(0) is the 1 in the logarithm
    return total


def gather_ranks(rows: Tensor) -> Tensor:
    """The tensors of all ranks, one after another, which are equally long. Gradients flow back to the rank of a row."""
    if not dist.is_initialized():
        return rows
    gathered: Tensor = _GatherRanks.apply(rows)  # type: ignore[no-untyped-call]
    return gathered


class _GatherRanks(torch.autograd.Function):
    """The tensors of all ranks; each rank's tensor receives the gradients of the losses of all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]
