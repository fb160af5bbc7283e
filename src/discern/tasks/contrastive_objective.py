"""Contrastive training as an objective: each text of a row is encoded on its own, and the loss compares the vectors of a batch.

A row of a batch holds the texts of an example one after another, each as `[CLS] text [SEP]`, with the number of the text as its
segment: so a step has whole examples, whatever the number of their texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from discern.corruption.randomness import Randomness
from discern.models.fused_ops import same_draws
from discern.tasks.contrastive import Contrastive, ContrastiveConfig, VectorHead
from discern.tasks.contrastive_loss import Vectors, cosent, gathered, info_nce, of_all_ranks
from discern.tasks.crops import cropped
from discern.tasks.features import TaskBatch
from discern.tasks.supervised import SupervisedEvaluator, SupervisedObjective
from discern.types import CorruptedBatch, LossTerm, StepOutput, TokenBatch

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
        """With `task.positives=crop`, crops the texts that are their own positives."""
        (group,) = cast(TaskBatch, batch).groups
        keys = group.targets.get("texts")
        if keys is not None and cast(Contrastive, self.tasks[group.task]).settings.positives == "crop":
            batch = cropped(batch, keys.shape[1], keys[:, 0] == keys[:, 1], randomness)
        return super().corrupt(batch, randomness)

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        tokens = cast(TaskBatch, batch.tokens)
        (group,) = tokens.groups
        task, keys = cast(Contrastive, self.tasks[group.task]), group.targets.get("texts")
        count = keys.shape[1] if keys is not None else int(tokens.token_type_ids.max()) + 1
        texts = texts_of(tokens, count)
        vectors = self._vectors(texts.tokens, cast(VectorHead, self.heads[group.task]), task.settings)
        table = vectors.new_zeros(tokens.size * count, vectors.shape[1]).index_copy(0, texts.places, vectors)
        table = table.view(tokens.size, count, -1)
        loss = table.new_zeros(())
        scores, settings = group.targets.get("score"), _loss_settings(task.settings, table.shape[-1])
        if self.training and keys is not None:
            own = Vectors(table, keys)
            everyone, first = of_all_ranks(own)
            loss = info_nce(own, everyone, first, symmetric=task.settings.symmetric, **settings)
        elif self.training and scores is not None:
            # One loss of all rows of the step, of which each rank has the share of its rows.
            # Negatives, of which batches may have different numbers, are not used.
            loss = cosent(gathered(table[:, :2].contiguous()), gathered(scores), **settings) * tokens.size
        terms = {group.task: LossTerm(loss, task.items(group), group.share)}
        return StepOutput(terms, {f"{group.task}/vectors": table.detach()})

    def evaluator(self) -> ContrastiveEvaluator:
        return ContrastiveEvaluator(self.tasks, self.heldout)

    def initial_loss(self) -> float:
        """ln N for N candidates, the positives of a step."""
        return math.log(self._sequences)

    def _vectors(self, texts: TokenBatch, head: VectorHead, settings: ContrastiveConfig) -> Float[Tensor, "T D"]:
        """The vector of each text, in their order."""

        def encode(part: TokenBatch) -> Tensor:
            return head.pooled(self._frame.states(self.encoder, part), part.attention_mask)

        if not settings.texts_per_pass or texts.size <= settings.texts_per_pass:
            return encode(texts)
        # In order of length, so that a pass has little padding.
        lengths = texts.attention_mask.sum(1)
        order = lengths.argsort(stable=True)
        parts = [_chosen(texts, rows, int(lengths[rows].max())) for rows in torch.split(order, settings.texts_per_pass)]
        if torch.is_grad_enabled():
            found = cached(encode, parts, [each for each in self.encoder.parameters() if each.requires_grad])
        else:
            found = torch.cat([encode(part) for part in parts])
        return found[order.argsort()]


class ContrastiveEvaluator(SupervisedEvaluator):
    """As its base; the loss is that of all pairs of a split at once, so it does not depend on the batches.

    That of judged pairs grows with their number, like `cosent`. It is 0 for queries and documents, which are not pairs.
    """

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        super().update(output, batch)
        for group in cast(TaskBatch, batch.tokens).groups:
            held = self.outputs[group.task]
            for name in ("texts", "score"):
                if name in group.targets:
                    for number, row in zip(group.features.tolist(), group.targets[name].cpu().numpy(), strict=True):
                        held[number] = {**held[number], name: row}

    def ordered(self, task: str) -> Any:
        return [{"vectors": row["vectors"]} for row in super().ordered(task)]

    def loss(self, task: str) -> float:
        rows = [row for _, row in sorted(self.outputs[task].items())]
        name = next((each for each in ("texts", "score") if rows and all(each in row for row in rows)), None)
        if name is None:
            return 0.0
        texts = 2 if name == "score" else None  # without negatives, as in training
        vectors = torch.from_numpy(np.stack([row["vectors"][:texts] for row in rows]))
        targets = torch.from_numpy(np.stack([row[name] for row in rows]))
        chosen = cast(Contrastive, self._tasks[task]).settings
        settings = _loss_settings(chosen, vectors.shape[-1])
        if name == "score":
            return float(cosent(vectors, targets, rows_at_a_time=_ROWS, **settings))
        every = Vectors(vectors, targets)
        total = 0.0
        for first in range(0, len(rows), _ROWS):
            block = Vectors(every.values[first : first + _ROWS], every.keys[first : first + _ROWS])
            total += float(info_nce(block, every, first, symmetric=chosen.symmetric, **settings))
        return total / len(rows)


def _loss_settings(settings: ContrastiveConfig, width: int) -> dict[str, Any]:
    sizes = (*settings.matryoshka, width) if settings.matryoshka else ()
    return {"temperature": settings.temperature, "sizes": tuple(dict.fromkeys(sizes))}


@dataclass(frozen=True)
class TextRows:
    """The T texts of a batch, one per row.

    Attributes:
        places: (T,) place of each text in the table of rows by texts: row * texts per row + number of the text.
    """

    tokens: TokenBatch
    places: Int[Tensor, "T"]


def texts_of(tokens: TokenBatch, count: int) -> TextRows:
    """The texts that the rows hold one after another.

    Args:
        tokens: rows whose segments are the numbers of their texts.
        count: maximum number of texts per row.
    """
    real, device = tokens.attention_mask, tokens.input_ids.device
    rows = torch.arange(tokens.size, device=device)
    keys = (rows[:, None] * count + tokens.token_type_ids)[real]
    lengths = torch.bincount(keys, minlength=tokens.size * count)
    places = lengths.nonzero().flatten()
    # Tokens of a text follow one another, and so do the texts of a row.
    within = torch.arange(len(keys), device=device) - (lengths.cumsum(0) - lengths)[keys]
    numbers = (lengths > 0).cumsum(0) - 1
    longest = int(lengths.max())
    input_ids = tokens.input_ids.new_zeros(len(places), longest)
    input_ids[numbers[keys], within] = tokens.input_ids[real]
    mask = torch.arange(longest, device=device) < lengths[places][:, None]
    return TextRows(_batch(input_ids, mask), places)


def _batch(input_ids: Int[Tensor, "T L"], mask: Bool[Tensor, "T L"]) -> TokenBatch:
    rows, length = input_ids.shape
    index = torch.arange(rows)
    return TokenBatch(
        input_ids=input_ids,
        attention_mask=mask,
        special_tokens_mask=~mask,
        token_type_ids=torch.zeros_like(input_ids),
        position_ids=torch.arange(length, device=input_ids.device).expand(rows, length),
        document_ids=None,
        word_starts=None,
        example_index=index,
        slot=index,
    )


def _chosen(texts: TokenBatch, rows: Int[Tensor, "P"], longest: int) -> TokenBatch:
    return _batch(texts.input_ids[rows, :longest], texts.attention_mask[rows, :longest])


def cached(encode: Callable[[TokenBatch], Tensor], parts: list[TokenBatch], parameters: list[Tensor]) -> Float[Tensor, "T D"]:
    """The vectors of all parts, whose activations are not kept: the backward pass encodes each part again.

    Args:
        parameters: what `encode` depends on and gradients are for.
    """
    found: Tensor = _Cached.apply(encode, parts, *parameters)  # type: ignore[no-untyped-call]
    return found


class _Cached(torch.autograd.Function):
    """One function of all parameters, so that each receives its gradient once, as DistributedDataParallel requires."""

    @staticmethod
    def forward(ctx: Any, encode: Callable[[TokenBatch], Tensor], parts: list[TokenBatch], *parameters: Tensor) -> Tensor:
        ctx.encode, ctx.parts, ctx.parameters, ctx.draws = encode, parts, parameters, []
        device = parts[0].input_ids.device
        ctx.precision = device.type, torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        vectors = []
        for part in parts:
            ctx.draws.append(same_draws(device))
            vectors.append(encode(part))
        ctx.sizes = [len(each) for each in vectors]
        return torch.cat(vectors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        totals: list[Tensor | None] = [None] * len(ctx.parameters)
        kind, enabled, dtype = ctx.precision
        for part, again, piece in zip(ctx.parts, ctx.draws, torch.split(gradient, ctx.sizes), strict=True):
            context: AbstractContextManager[Any] = torch.autocast(kind, dtype, enabled=enabled)
            with torch.enable_grad(), again(), context:
                vectors = ctx.encode(part)
            found = torch.autograd.grad(vectors, ctx.parameters, piece, allow_unused=True)
            totals = [new if old is None else old if new is None else old + new for old, new in zip(totals, found, strict=True)]
        return (None, None, *totals)
