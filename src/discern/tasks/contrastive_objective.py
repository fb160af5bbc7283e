"""Contrastive training as an objective: each text of a row is encoded on its own, and the loss compares the vectors of a batch.

A row of a batch holds the texts of an example one after another, each as `[CLS] text [SEP]`, with the number of the text as its
segment: so a step has whole examples, whatever the number of their texts.

InfoNCE over a batch: each anchor has to find its positive among the positives and negatives of all rows. And CoSENT, for judged
pairs: a pair with a higher score is to have a higher cosine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from discern.corruption.randomness import Randomness
from discern.tasks.contrastive import Contrastive, ContrastiveConfig, VectorHead
from discern.tasks.features import TaskBatch
from discern.tasks.supervised import SupervisedEvaluator, SupervisedObjective
from discern.types import CorruptedBatch, LossTerm, StepOutput, TokenBatch

# Length of a crop as a fraction of its text. Izacard et al. 2021, "Unsupervised dense information retrieval with contrastive
# learning" (Contriever), section 3.1 and their code: from 5 or 10 to 50 percent.
_SHORTEST, _LONGEST = 0.1, 0.5
# A crop of one or two tokens says nothing about its text.
_MIN_TOKENS = 4
# Rows whose loss is computed at a time in an evaluation: their cosines with all candidates are held in memory.
_ROWS = 1024


class ContrastiveObjective(SupervisedObjective):
    """InfoNCE over the rows of a step, over all ranks, or CoSENT if they have scores; see `info_nce` and `cosent`.

    With `task.texts_per_pass`, texts are encoded that many at a time, without keeping activations; once the gradient of the
    loss by the vectors is known, each pass is repeated with the same dropout and differentiated. Memory then does not depend on
    the number of rows, and the gradient is the same. Reference: Gao et al. 2021, "Scaling deep contrastive learning batch size
    under memory limited setup" (GradCache).

    The arguments are those of `SupervisedObjective`, with a single task.
    """

    def corrupt(self, batch: TokenBatch, randomness: Randomness) -> CorruptedBatch:
        """With `task.positives=crop`, masks all but a crop of each text if the texts are their own positives."""
        (group,) = cast(TaskBatch, batch).groups
        crops = cast(Contrastive, self.tasks[group.task]).config.positives == "crop"
        keys = group.targets["texts"]
        if crops and "score" not in group.targets and torch.equal(keys[:, :1], keys[:, 1:]):
            batch = replace(batch, attention_mask=crop(batch, randomness), full=False)
        return super().corrupt(batch, randomness)

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        tokens = cast(TaskBatch, batch.tokens)
        (group,) = tokens.groups
        task, head = cast(Contrastive, self.tasks[group.task]), self.heads[group.task]

        # Lay out the texts, one per row. The tokens of a text follow one another, and so do the texts of a row.
        texts_per_row = group.targets["texts"].shape[1]
        real, rows = tokens.attention_mask, torch.arange(tokens.size, device=tokens.input_ids.device)
        numbers = (rows[:, None] * texts_per_row + tokens.token_type_ids)[real]
        numbers, lengths = torch.unique_consecutive(numbers, return_counts=True)
        mask = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
        input_ids = tokens.input_ids.new_zeros(mask.shape).masked_scatter(mask, tokens.input_ids[real])

        # Encode them.
        def encode(input_ids: Int[Tensor, "T L"], mask: Bool[Tensor, "T L"]) -> Float[Tensor, "T D"]:
            return cast(VectorHead, head).pooled(self.hidden_states(input_ids, mask, torch.zeros_like(input_ids)), mask)

        if 0 < task.config.texts_per_pass < len(mask):
            order = lengths.argsort(stable=True)  # so that a pass has little padding
            parts = []
            for part in order.split(task.config.texts_per_pass):
                longest = lengths[part[-1]]
                parts.append(checkpoint(encode, input_ids[part, :longest], mask[part, :longest], use_reentrant=False))
            vectors = torch.cat(parts)[order.argsort()]
        else:
            vectors = encode(input_ids, mask)
        vectors = vectors.new_zeros(tokens.size * texts_per_row, vectors.shape[1]).index_copy(0, numbers, vectors)
        vectors = vectors.view(tokens.size, texts_per_row, -1)

        # Compare them.
        loss = vectors.new_zeros(())
        if self.training:  # in an evaluation, the loss is that of a whole split
            everyone, first = {**group.targets, "vectors": vectors}, 0
            if dist.is_initialized():
                # The rows of all ranks, which have equally many. Each rank's vectors receive the gradients of all losses.
                everyone = {name: torch.cat(all_gather(rows)) for name, rows in everyone.items()}  # type: ignore[no-untyped-call]
                first = dist.get_rank() * tokens.size
            loss = _loss(task.config, everyone.pop("vectors"), everyone, slice(first, first + tokens.size))
            if "score" in everyone:
                loss = loss * tokens.size  # one loss of all rows of the step, of which each rank has the share of its rows
        terms = {group.task: LossTerm(loss, group.count, group.share)}
        return StepOutput(terms, {f"{group.task}/vectors": vectors.detach()})

    def evaluator(self) -> ContrastiveEvaluator:
        return ContrastiveEvaluator(self.tasks, self.heldout)


class ContrastiveEvaluator(SupervisedEvaluator):
    """As its base; the loss is that of all pairs of a split at once, so it does not depend on the batches.

    That of judged pairs grows with their number, like `cosent`. It is 0 for queries and documents, which are not pairs.
    """

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        super().update(output, batch)
        (group,) = cast(TaskBatch, batch.tokens).groups
        for name, targets in group.targets.items():
            for number, target in zip(group.features.tolist(), targets.cpu().numpy(), strict=True):
                self.outputs[group.task][number][name] = target

    def loss(self, task: str) -> float:
        rows, settings = self.ordered(task), cast(Contrastive, self._tasks[task]).config
        columns = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
        vectors = columns.pop("vectors")
        if "score" in columns:
            return float(_loss(settings, vectors, columns))
        if vectors.shape[1] == 1:
            return 0.0
        blocks = (slice(first, first + _ROWS) for first in range(0, len(rows), _ROWS))
        return sum(float(_loss(settings, vectors, columns, block)) for block in blocks) / len(rows)


def _loss(
    settings: ContrastiveConfig,
    vectors: Float[Tensor, "N K D"],
    targets: Mapping[str, Tensor],
    rows: slice = slice(None),
) -> Tensor:
    """CoSENT of all rows if they have scores, or InfoNCE summed over some of them."""
    sizes = tuple(dict.fromkeys((*settings.matryoshka, vectors.shape[-1])))
    if "score" in targets:
        return cosent(vectors, targets["score"], settings.temperature, sizes)
    return info_nce(vectors, targets["texts"], settings.temperature, sizes, rows=rows, symmetric=settings.symmetric)


def crop(batch: TokenBatch, randomness: Randomness) -> Bool[Tensor, "B L"]:
    """True at the tokens of a random span of each text, drawn independently, and at its [CLS] and [SEP].

    Args:
        batch: rows of twice the same text, each as `[CLS] text [SEP]`, whose segments are 0 and 1.
        randomness: the random numbers of these rows.
    """
    real, device = batch.attention_mask, batch.input_ids.device
    lengths = real.sum(1, keepdim=True) // 2
    words = lengths - 2  # without [CLS] and [SEP]

    # Draw length and start of both crops of each row.
    draws = randomness.to(device).uniforms("crops", 4)
    shares = _SHORTEST + (_LONGEST - _SHORTEST) * draws[:, :2]
    sizes = torch.minimum((shares * words).round().long().clamp(min=_MIN_TOKENS), words)
    starts = 1 + (draws[:, 2:] * (words - sizes + 1)).long()

    sizes, starts = (values.gather(1, batch.token_type_ids) for values in (sizes, starts))
    positions = torch.arange(real.shape[1], device=device) % lengths
    is_cropped = (positions == 0) | (positions == lengths - 1) | ((positions >= starts) & (positions < starts + sizes))
    return is_cropped & real


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
