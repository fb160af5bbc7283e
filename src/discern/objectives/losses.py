"""Loss terms as sums and counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from discern import kernels
from discern.models.heads import CopyMLMHead, TiedLMHead
from discern.types import LossTerm, Places


def replaced_token_loss(
    logits: Float[Tensor, "B L"],
    positive: Bool[Tensor, "B L"],
    loss_mask: Bool[Tensor, "B L"],
    count: int,
    weight: float = 1.0,
) -> LossTerm:
    """Binary cross-entropy of a class, such as *replaced*, over the tokens of the mask, summed, in float32.

    Args:
        loss_mask: the tokens that count; in ELECTRA every real token, [CLS] and [SEP] included.
        count: number of tokens in the mask; passed in, because summing the mask would make a GPU wait.

    Reference: Clark et al. 2020, section 2; the released code's normalization over the tokens of the batch.
    """
    each = F.binary_cross_entropy_with_logits(logits.float(), positive.float(), reduction="none")
    return LossTerm(torch.where(loss_mask, each, 0.0).sum(), count, weight)


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
    logits = energy.float() + log_noise_probability.detach() + torch.where(finite, log_noise_odds, 0.0)
    return replaced_token_loss(logits, is_noise, loss_mask & finite, count, weight)


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


def distillation_loss(student: Float[Tensor, "N C"], teacher: Float[Tensor, "N C"], temperature: float) -> Float[Tensor, "N"]:
    """KL divergence of the student's classes from the teacher's, in nats, float32, with both logits divided by T, times T^2.

    The factor keeps the size of the gradient.

    Reference: Hinton et al. 2015, "Distilling the knowledge in a neural network", section 2.
    """
    predicted, wanted = ((each.float() / temperature).log_softmax(-1) for each in (student, teacher))
    return temperature**2 * F.kl_div(predicted, wanted, reduction="none", log_target=True).sum(-1)


PART = 1 << 25
"""Number of logits that are computed at once: 128 MiB in float32."""


class DenseLogits:
    """Logits over the vocabulary at N positions as one matrix."""

    def __init__(self, logits: Float[Tensor, "N V"]) -> None:
        self._logits = logits

    def matrix(self) -> Float[Tensor, "N V"]:
        """All of them at once, with gradient."""
        return self._logits

    def observed(self, name: str) -> dict[str, Tensor]:
        """The observation `<name>_logits`, without gradient; none if the logits are computed in parts."""
        return {f"{name}_logits": self._logits.detach()}

    def losses(self, targets: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
        """Cross-entropy of each target, in float32, with gradient."""
        return F.cross_entropy(self._logits.float(), targets, reduction="none")

    def loss(self, targets: Int[Tensor, "N"], places: Places, weight: float = 1.0) -> LossTerm:
        """Cross-entropy of the targets, summed, in float32.

        Args:
            places: the N positions, which may count more than once.
        """
        if places.draws is not None:
            total = places.weigh(self.losses(targets)).sum()
        elif kernels.usable(self._logits):
            total = kernels.cross_entropy_sum(self._logits, targets)
        else:
            total = F.cross_entropy(self._logits.float(), targets, reduction="sum")
        return LossTerm(total, places.count, weight)

    def select(self, index: Int[Tensor, "M"]) -> WordLogits:
        """The logits at some of the positions."""
        return DenseLogits(self._logits.index_select(0, index))

    @torch.no_grad()
    def map(self, function: Callable[..., Tensor], *columns: Tensor) -> Tensor:
        """The result of a function of some rows of logits, without gradient, and of the same rows of the columns; (N, ...)."""
        logits = self._logits.detach()
        if logits.device.type == "cpu":
            return function(logits, *columns)
        rows = max(PART // logits.shape[1], 1)  # results may be as large as the logits, in float32
        parts = zip(*(torch.split(column, rows) for column in (logits, *columns)), strict=True)
        return torch.cat([function(*part) for part in parts])


class ChunkedLogits:
    """The same, computed a few rows at a time wherever they are needed.

    Args:
        states: what the word table is multiplied with, (N, E).
        table: (V, E).
        bias: (V,).
        rows: number of rows of a part; None: as many as have `PART` logits.
    """

    def __init__(
        self, states: Float[Tensor, "N E"], table: Float[Tensor, "V E"], bias: Float[Tensor, "V"], rows: int | None = None
    ) -> None:
        self._states, self._table, self._bias = states, table, bias
        self._rows = rows or max(PART // table.shape[0], 1)

    def matrix(self) -> Float[Tensor, "N V"]:
        return F.linear(self._states, self._table, self._bias)

    def observed(self, name: str) -> dict[str, Tensor]:
        return {}

    def losses(self, targets: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
        arguments = (self._states, self._table, self._bias, targets, self._rows)
        return LinearCrossEntropy.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]

    def loss(self, targets: Int[Tensor, "N"], places: Places, weight: float = 1.0) -> LossTerm:
        return LossTerm(places.weigh(self.losses(targets)).sum(), places.count, weight)

    def select(self, index: Int[Tensor, "M"]) -> WordLogits:
        return ChunkedLogits(self._states.index_select(0, index), self._table, self._bias, self._rows)

    @torch.no_grad()
    def map(self, function: Callable[..., Tensor], *columns: Tensor) -> Tensor:
        parts = zip(*(torch.split(column, self._rows) for column in (self._states.detach(), *columns)), strict=True)
        return torch.cat([function(F.linear(states, self._table, self._bias), *others) for states, *others in parts])


WordLogits = DenseLogits | ChunkedLogits


def word_logits(head: TiedLMHead | CopyMLMHead, states: Float[Tensor, "N D"]) -> WordLogits:
    """The logits of a head at some states: in parts while training on a device other than the CPU, otherwise as one matrix."""
    if states.device.type == "cpu" or not head.training:
        return DenseLogits(head(states))
    words: Any = getattr(head, "words", head)
    return ChunkedLogits(words.inner(states), words.word_embeddings.weight, words.bias)


class LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy of each target under softmax(states table^T + bias), in float32.

    Only the logits of `rows` rows are in memory at a time. The backward pass computes them again, one product more than the three
    of the plain computation.

    Reference: Wijmans et al. 2024, "Cut your losses in large-vocabulary language models", of which this is the part in rows.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, table: Tensor, bias: Tensor, targets: Tensor, rows: int) -> Tensor:
        losses, normalizers, dtype = [], [], states.dtype
        for some, wanted in zip(torch.split(states, rows), torch.split(targets, rows), strict=True):
            logits = F.linear(some, table, bias)  # in the precision of autocast, if it is on
            dtype = logits.dtype
            normalizer = logits.float().logsumexp(1)
            losses.append(normalizer - logits.gather(1, wanted[:, None]).squeeze(1).float())
            normalizers.append(normalizer)
        ctx.save_for_backward(states, table, bias, targets, torch.cat(normalizers))
        ctx.rows, ctx.dtype = rows, dtype
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        states, table, bias, targets, normalizers = ctx.saved_tensors
        operand, shift = table.to(ctx.dtype), bias.to(ctx.dtype)
        # In float32, also if the table is not: each part adds to the sum.
        dtable, dbias = torch.zeros_like(table, dtype=torch.float32), torch.zeros_like(bias)
        dstates = torch.empty_like(states)
        columns = (states, targets, normalizers, gradient, dstates)
        for some, wanted, normalizer, slope, result in zip(*(torch.split(each, ctx.rows) for each in columns), strict=True):
            low = some.to(ctx.dtype)
            slopes = (F.linear(low, operand, shift).float() - normalizer[:, None]).exp_()
            slopes.scatter_add_(1, wanted[:, None], torch.full_like(slopes[:, :1], -1.0))
            slopes.mul_(slope[:, None])
            dbias += slopes.sum(0)
            slopes = slopes.to(ctx.dtype)
            result.copy_(slopes @ operand)
            dtable += slopes.T @ low
        return dstates, dtable, dbias, None, None


_DECAY, _PREFIX = 0.99, "token_entropies."
_PART = 1 << 20
"""Number of logits that are computed at once on a processor."""


class TokenEntropies:
    """The mean entropy e_v of the predictions of each token id v, in nats: an exponential moving average over its predictions.

    A step that predicts v at c positions, with mean entropy m, changes e_v to d^c e_v + (1 - d^c) m, with d = 0.99. All e_v
    begin at ln V, the entropy of a uniform distribution, so a token that has not been predicted yet counts as uncertain.

    The masks of a step are drawn while the step before it is computed. They use the values of two steps before, and those of
    the first two steps no values, so that they do not depend on timing. Both versions are part of the checkpoint.

    Args:
        size: V.
    """

    def __init__(self, size: int) -> None:
        self._newest = torch.full((size,), math.log(size), dtype=torch.float64)
        self._by_step: dict[int, Tensor] = {}

    def at(self, step: int) -> Float[Tensor, "V"] | None:
        """The values for the masks of a step: of this step or the next one while training; None: no values."""
        values = self._by_step.get(step)
        # On the meta device, values are unknown. On a GPU, the thread that reads rows waits for them, on its stream of copies,
        # which begins after the step that computed them; the thread that trains goes on.
        return None if values is None or values.is_meta else values.cpu()

    def update(self, step: int, sums: Float[Tensor, "2 V"]) -> None:
        """Add the predictions of a step.

        Args:
            sums: result of `entropy_sums` over all positions of the step.
        """
        entropies, counts = sums.double()
        kept = _DECAY**counts
        newest = self._newest.to(sums.device, non_blocking=True)
        self._newest = kept * newest + (1 - kept) * entropies / counts.clamp(min=1)
        before = {number: values for number, values in self._by_step.items() if number == step + 1}
        # A new dictionary: another thread may be reading the old one.
        self._by_step = before | {step + 2: self._newest}

    def state(self) -> dict[str, Tensor]:
        """Values to save with the checkpoint, by name."""
        return {f"{_PREFIX}{step}": values.cpu() for step, values in self._by_step.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`."""
        self._by_step = {int(name.removeprefix(_PREFIX)): values for name, values in state.items()}
        if self._by_step:
            self._newest = self._by_step[max(self._by_step)]


@torch.no_grad()
def entropy_sums(
    entropies: Float[Tensor, "N"], targets: Int[Tensor, "N"], vocab_size: int, draws: Int[Tensor, "N"] | None = None
) -> Float[Tensor, "2 V"]:
    """Sum of the entropies of the predictions of each token id, in nats, and their number, float64.

    Args:
        draws: 0 for a prediction that does not count; None: all of them do.
    """
    counted = torch.ones_like(entropies, dtype=torch.float64) if draws is None else (draws > 0).double()
    sums = torch.zeros(2, vocab_size, dtype=torch.float64, device=entropies.device)
    return sums.index_add(1, targets, torch.stack([entropies.double() * counted, counted]))


def entropies_of(logits: Float[Tensor, "N V"]) -> Float[Tensor, "N"]:
    """The entropy of each softmax, in nats, float32: ln Z - E[logit], with a third of the work of p ln p."""
    # In parts that fit into the cache of a processor, as the exponentials are as large as the logits.
    rows, entropies = max(1, (_PART if logits.device.type == "cpu" else 64 * _PART) // logits.shape[1]), []
    for part in map(Tensor.float, torch.split(logits, rows)):
        shifted = part - part.amax(-1, keepdim=True)
        exponentials = shifted.exp()
        total = exponentials.sum(-1)
        entropies.append((total.log() - (exponentials * shifted).sum(-1) / total).clamp(min=0))
    return torch.cat(entropies)
