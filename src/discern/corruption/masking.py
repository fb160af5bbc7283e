"""Chooses the positions of a sequence to corrupt, masks them, and samples replacements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from discern import kernels
from discern.corruption.randomness import Randomness
from discern.errors import ConfigError
from discern.types import TokenBatch

Sample = Callable[..., Int[Tensor, "N"]]
"""Samples one id per row of logits, (N, V), given a uniform number in [0, 1) for each."""


@dataclass(frozen=True)
class MaskingContext:
    """Input of a masking, besides the batch.

    Attributes:
        mask_probability: share of the maskable tokens to choose at this step.
        randomness: the numbers of this step and these rows.
        token_counts: (V,) number of occurrences of each id in the training split; None if unknown.
        rarity_exponent: for masking 'rarity'.
        token_entropies: (V,) for masking 'entropy': mean entropy of the predictions of each token; None: unknown, as at first.
        entropy_exponent: for masking 'entropy'.
        span_stop_probability: for masking 'span': probability that a span ends after each of its words.
        span_max_words: for masking 'span': maximum number of words of a span.
    """

    mask_probability: float
    randomness: Randomness
    token_counts: Int[Tensor, "V"] | None = None
    rarity_exponent: float = 0.5
    token_entropies: Float[Tensor, "V"] | None = None
    entropy_exponent: float = 1.0
    span_stop_probability: float = 0.2
    span_max_words: int = 10


@dataclass(frozen=True)
class Chosen:
    """The positions that a masking chose.

    Attributes:
        positions: (B, L) True where a position was chosen.
        draws: (B, L) number of times each position was drawn; None if no position can be drawn twice.
    """

    positions: Bool[Tensor, "B L"]
    draws: Int[Tensor, "B L"] | None = None

    def among(self, positions: Bool[Tensor, "B L"]) -> Chosen:
        """Those of the choice that are among other positions."""
        return Chosen(self.positions & positions, None if self.draws is None else self.draws * positions)


def quota(maskable: Bool[Tensor, "B L"], mask_probability: float) -> Int[Tensor, "B"]:
    """Number of positions to choose per sequence: `round(mask_probability * maskable)`, at least one if any is maskable.

    Halves round to even. Differs: the released code also counts [CLS] and [SEP], and limits the number by the row's length.
    """
    available = maskable.sum(1)
    # float64: 0.15 x 190 must be the 28.5 that a person computes, not the 28.500002 of float32.
    wanted = torch.round(available.double() * mask_probability).long().clamp(min=1)
    return torch.minimum(wanted, available)


def uniform(batch: TokenBatch, context: MaskingContext) -> Chosen:
    """Draw positions evenly and without replacement, exactly `quota` per sequence.

    Differs: the released code draws with replacement, so that 13.8% of the tokens are chosen instead of 15%.
    Reference: Clark et al. 2020, section 2.
    """
    keys = context.randomness.integers("masked positions", batch.maskable.shape[1])
    return Chosen(smallest(keys, batch.maskable, quota(batch.maskable, context.mask_probability)))


def rarity(batch: TokenBatch, context: MaskingContext) -> Chosen:
    """Draw positions without replacement, exactly `quota` per sequence, each with weight `count^-rarity_exponent`.

    `count` is the number of occurrences of the token in the training split, at least 1. Exponent 0 equals `uniform`.

    The paper tried to mask rarer tokens more often, for a minor gain, and gives no formula. The form is that of
    word2vec's subsampling, whose exponent is 1/2.

    Raises:
        ConfigError: the token counts are unknown.

    Reference: Clark et al. 2020, appendix on negative results; Mikolov et al. 2013, section 2.3; for weighted draws by
    exponential numbers, Efraimidis and Spirakis 2006.
    """
    if context.token_counts is None:
        raise ConfigError(
            "masking 'rarity' needs to know how often each token occurs, which is unknown here",
            hint="use a data set of `discern prepare` or a run trained on one, which contain the counts, "
            "or set objective.masking=uniform",
        )
    counts = context.token_counts.to(batch.input_ids.device)[batch.input_ids].clamp(min=1).double()
    return _first_to_ring(counts**context.rarity_exponent, batch, context)


def entropy(batch: TokenBatch, context: MaskingContext) -> Chosen:
    """Draw positions without replacement, exactly `quota` per sequence, each with weight `entropy^entropy_exponent`.

    `entropy` is the recent mean entropy of the model's predictions of that token, at least 0.001 nats (`TokenEntropies`).
    Positions are drawn evenly with exponent 0, and while the entropies are unknown.

    Reference: for weighted draws by exponential numbers, Efraimidis and Spirakis 2006.
    """
    times = torch.ones_like(batch.input_ids, dtype=torch.float64)
    if context.token_entropies is not None:
        entropies = context.token_entropies.to(batch.input_ids.device)[batch.input_ids]
        times = entropies.double().clamp(min=1e-3) ** -context.entropy_exponent
    return _first_to_ring(times, batch, context)


def _first_to_ring(times: Float[Tensor, "B L"], batch: TokenBatch, context: MaskingContext) -> Chosen:
    """Draw positions without replacement, exactly `quota` per sequence, with weights that are the reciprocals of `times`."""
    # Of several exponential clocks, one with rate w is the first to ring with probability w / (sum of all rates).
    keys = context.randomness.exponentials("masked positions", times.shape[1]) * times
    return Chosen(smallest(keys, batch.maskable, quota(batch.maskable, context.mask_probability)))


def smallest(keys: Shaped[Tensor, "B L"], among: Bool[Tensor, "B L"], count: Int[Tensor, "B"]) -> Bool[Tensor, "B L"]:
    """True at the `count` smallest keys of each row among the positions in `among`, of which there must be enough."""
    last = torch.inf if keys.is_floating_point() else torch.iinfo(keys.dtype).max
    rank = keys.masked_fill(~among, last).argsort(dim=1, stable=True).argsort(1)
    return (rank < count[:, None]) & among


def with_replacement(batch: TokenBatch, context: MaskingContext) -> Chosen:
    """Draw `draw_quota` times per sequence from all maskable positions, so that some are drawn more than once.

    In a row of 128 tokens there are 19 draws of 17.7 different tokens on average: 13.8% instead of 15%. `draws` counts them.

    Reference: google-research/electra, pretraining/pretrain_helpers.py, `mask`.
    """
    maskable = batch.maskable
    available = maskable.sum(1)
    count = draw_quota(batch.attention_mask, available, context.mask_probability)
    numbers = context.randomness.integers("masked positions", maskable.shape[1]) % available.clamp(min=1)[:, None]
    places = (~maskable).to(torch.uint8).argsort(dim=1, stable=True)  # the maskable positions first, in order
    positions = places.gather(1, numbers)
    counted = torch.arange(maskable.shape[1], device=count.device) < count[:, None]
    draws = torch.zeros_like(maskable, dtype=torch.int64).scatter_add_(1, positions, counted.long())
    return Chosen(draws > 0, draws)


def draw_quota(attention_mask: Bool[Tensor, "B L"], available: Int[Tensor, "B"], mask_probability: float) -> Int[Tensor, "B"]:
    """Number of draws per sequence: `round(mask_probability * real tokens)`, [CLS] and [SEP] included.

    At most `int((mask_probability + 0.005) * L)`, at least 1, and none if nothing is maskable (where the released
    code divides by zero). Halves round to even, in float32, as there.
    """
    wanted = torch.round(attention_mask.sum(1).float() * mask_probability).long()
    most = int((mask_probability + 0.005) * attention_mask.shape[1])
    return wanted.clamp(max=most).clamp(min=1) * (available > 0)


def words_of(batch: TokenBatch) -> tuple[Int[Tensor, "B L"], Int[Tensor, "B L"]]:
    """The words of each row, numbered from 0: the number of each maskable token's word, and the lengths of the words.

    A word is a run of maskable tokens. It ends at the latest at a special token or at the end of the row. If packing has cut
    a word, the remaining part counts as a word. If the batch does not record where words begin, every token is a word.

    Returns:
        (B, L) number of the word of each maskable token, 0 elsewhere; (B, L) number of tokens of each word, by the word's
        number, 0 beyond the last word.
    """
    maskable = batch.maskable
    starts = torch.ones_like(maskable) if batch.word_starts is None else batch.word_starts
    if batch.is_reversed is not None:
        # In reversed text, a word begins with the last of its tokens in the row, and the next token begins another word.
        starts = torch.where(batch.is_reversed[:, None], F.pad(starts, (1, -1)), starts)
    begins = maskable & (starts | ~F.pad(maskable, (1, -1)))
    number = (begins.cumsum(1) - 1).clamp(min=0) * maskable
    return number, torch.zeros_like(number).scatter_add_(1, number, maskable.long())


def whole_word(batch: TokenBatch, context: MaskingContext) -> Chosen:
    """Choose whole words in uniformly random order, until the `quota` of tokens of the row is filled; see `_take_in_order`.

    Raises:
        ConfigError: the batch does not record where words begin.

    Reference: google-research/bert, create_pretraining_data.py, `do_whole_word_mask`; Cui et al. 2019 for Chinese.
    """
    if batch.word_starts is None:
        raise ConfigError(
            "masking 'whole-word' needs to know where words begin, which these rows do not record",
            hint="train on a data set of `discern prepare`, which stores it, or set objective.masking=uniform",
        )
    return _take_in_order(context.randomness.integers("masked words", batch.maskable.shape[1]), batch, context)


def span(batch: TokenBatch, context: MaskingContext) -> Chosen:
    """Choose spans of whole words, until the `quota` of tokens of the row is filled; see `_take_in_order`.

    If words are unknown, the spans consist of tokens. The words of a row form a ring, which is cut into spans of random length,
    starting at a random place. The spans are taken in random order. All places are therefore equally likely, which they would
    not be if spans ended at the ends of the row. Long words are slightly less likely, because they are skipped if they do not
    fit. A span continues after a special token.

    Differs: SpanBERT draws the beginning of each span independently, which favors words away from the beginning of the row.
    Reference: Joshi et al. 2020, section 3.1.
    """
    (_, words), randomness = words_of(batch), context.randomness
    length = words.shape[1]
    # A truncated geometric distribution: for 0.2 and 10 words, the mean is 3.8 words.
    weights = [(1 - context.span_stop_probability) ** number for number in range(context.span_max_words)]
    lengths = span_lengths(randomness.uniforms("span lengths", length), weights)
    number = torch.arange(length, device=lengths.device)
    turn = randomness.integers("span turn", 1)
    # Entries beyond the last word of a row are meaningless and not used.
    place = (number - turn) % (words > 0).sum(1, keepdim=True).clamp(min=1)
    span_of_word = torch.searchsorted(lengths.cumsum(1), place, right=True)
    rank = randomness.integers("masked spans", length).argsort(1).argsort(1)
    return _take_in_order(rank.gather(1, span_of_word) * length + place, batch, context)


def span_lengths(uniforms: Float[Tensor, "..."], weights: list[float]) -> Int[Tensor, "..."]:
    """Lengths from 1 on with these weights, by inverting their cumulative distribution function."""
    cumulative = torch.tensor(weights, dtype=torch.float64, device=uniforms.device).cumsum(0)
    return torch.searchsorted((cumulative / cumulative[-1])[:-1], uniforms.double().contiguous(), right=True) + 1


def _take_in_order(keys: Int[Tensor, "B L"], batch: TokenBatch, context: MaskingContext) -> Chosen:
    """The tokens of words that are taken in the order of their keys, until each row has its `quota` of tokens.

    A word that would exceed the quota is skipped. A row therefore has fewer tokens only if each remaining word is longer than
    the number of missing tokens. There is one exception: if even the shortest word of a row is longer than the quota, the
    first word of that length is taken, so that every row with words has at least one.

    Args:
        keys: key of each word, by the word's number.
    """
    number, lengths = words_of(batch)
    order = keys.argsort(dim=1, stable=True)
    lengths = lengths.gather(1, order)
    shortest = lengths.masked_fill(lengths == 0, lengths.shape[1]).amin(1)
    left = torch.maximum(quota(batch.maskable, context.mask_probability), shortest)

    # One pass takes all words up to the first one that does not fit. Neither that word nor any other of its length fits later,
    # so there are at most as many passes as different lengths, instead of one per word.
    taken = torch.zeros_like(batch.maskable)
    while True:
        fits = ~taken & (lengths > 0) & (lengths <= left[:, None])
        now = fits & ((lengths * fits).cumsum(1) <= left[:, None])
        if not now.any():
            break
        taken = taken | now
        left = left - (lengths * now).sum(1)
    return Chosen(torch.zeros_like(taken).scatter_(1, order, taken).gather(1, number) & batch.maskable)


def chosen_share(masking: str, mask_probability: float, row_length: int) -> float | None:
    """Expected fraction of the maskable tokens that are chosen, in a full row that holds one text.

    Whole numbers of positions are chosen, so this is `mask_probability` up to rounding: 9 of 62 tokens, 0.145 for 0.15, in a
    row of 64. Draws with replacement may coincide: k draws from n positions choose n (1 - (1 - 1/n)^k) different ones on
    average, 17.7 of 126 in a row of 128.

    Args:
        masking: name of the masking in the registry.
        row_length: positions of a row, [CLS] and [SEP] included; at least 3.

    Returns:
        None if there is no single number: `rarity` and `entropy` choose some tokens more often than others, and the maskings of
        other packages are unknown.
    """
    row, available = torch.ones(1, row_length, dtype=torch.bool), row_length - 2
    if masking in ("uniform", "whole-word", "span"):
        return int(quota(row[:, 2:], mask_probability)) / available
    if masking == "with-replacement":
        draws = int(draw_quota(row, torch.tensor([available]), mask_probability))
        return 1 - (1 - 1 / available) ** draws
    return None


def hide(
    input_ids: Int[Tensor, "B L"],
    chosen: Chosen,
    shares: tuple[float, float],
    vocabulary: tuple[int, int],
    randomness: Randomness,
) -> Int[Tensor, "B L"]:
    """Replace the ids at the chosen positions by [MASK] or random tokens.

    If positions may be drawn more than once, each draw decides independently: a position becomes [MASK] if any of its draws
    does, otherwise a random token if any of them does.

    Args:
        shares: share of the chosen positions that becomes [MASK], and share that becomes a random token; the rest stays.
        vocabulary: id of [MASK], and V. A random token is any of the V, as in BERT.

    Reference for the draws: google-research/electra, pretraining/pretrain_helpers.py, `mask`.
    """
    mask_share, random_share = shares
    mask_id, vocab_size = vocabulary
    draw = randomness.uniforms("masked input", input_ids.shape[1])
    random_ids = randomness.integers("random tokens", input_ids.shape[1]) % vocab_size
    # Probability that any draw is [MASK], and that any is [MASK] or random.
    limits: list[Any] = [mask_share, min(1.0, mask_share + random_share)]
    if chosen.draws is not None:
        limits = [1 - (1 - share) ** chosen.draws.double() for share in limits]
    masked, changed = limits
    kept = torch.where(draw < changed, random_ids, input_ids)
    return torch.where(chosen.positions, torch.where(draw < masked, mask_id, kept), input_ids)


@dataclass(frozen=True)
class Sampling:
    """How replacements are drawn from a generator's logits. The defaults are the paper's.

    Attributes:
        temperature: divides the logits.
        top_p: probability mass of the likeliest tokens to sample from; 1: all tokens.
        disallow_original: never draw the original token.

    Reference: Clark et al. 2020, section 2 and appendix G (higher temperature and no original tokens: no gain); Holtzman et
    al. 2020 (top-p).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    disallow_original: bool = False

    @property
    def cuts(self) -> bool:
        """Whether some tokens are excluded, so that the distribution is not the plain softmax."""
        return self.top_p < 1 or self.disallow_original

    def logits(
        self, logits: Float[Tensor, "M V"], originals: Int[Tensor, "M"], drawn: Int[Tensor, "M"] | None = None
    ) -> Float[Tensor, "M V"]:
        """The logits to sample from, float32, minus infinity for excluded tokens; differentiable.

        Args:
            drawn: tokens that have been sampled from these logits and must not be excluded. On a GPU, the same sum of
                probabilities may come out slightly different when it is computed again, and so may what `top_p` excludes.
        """
        logits = logits.float() / self.temperature
        if self.disallow_original:
            logits = logits.scatter(1, originals[:, None], float("-inf"))
        if self.top_p == 1:
            return logits
        with torch.no_grad():
            probabilities, order = torch.softmax(logits, -1).sort(stable=True, dim=-1, descending=True)
            # A token is excluded if those before it suffice; the first never is.
            surplus = (probabilities.cumsum(-1) - probabilities) >= self.top_p
            surplus[:, 0] = False
            left_out = torch.zeros_like(surplus).scatter(1, order, surplus)
            if drawn is not None:
                left_out.scatter_(1, drawn[:, None], False)
        return logits.masked_fill(left_out, float("-inf"))

    def sample(self, logits: Float[Tensor, "M V"], uniforms: Float[Tensor, "M"], originals: Int[Tensor, "M"]) -> Int[Tensor, "M"]:
        """Sample one id per row; no gradient."""
        if not self.cuts:
            return sample_tokens(logits, uniforms, self.temperature)
        return sample_tokens(self.logits(logits.detach(), originals), uniforms)


@torch.no_grad()
def sample_tokens(logits: Float[Tensor, "M V"], uniforms: Float[Tensor, "M"], temperature: float = 1.0) -> Int[Tensor, "M"]:
    """Sample one id per row from softmax(logits / temperature), by inverting its distribution function.

    One uniform number per row: Gumbel noise would need V of them. The arithmetic is float32 whatever the logits are:
    bfloat16 has 8 bits, in which many candidates tie.

    Args:
        logits: minus infinity at tokens never to draw.
        uniforms: in [0, 1).

    Reference: Clark et al. 2020, section 2; no gradient flows through the choice.
    """
    if kernels.usable(logits):
        return kernels.sample(logits, uniforms, temperature)
    probabilities = torch.softmax(logits.float() / temperature, -1)
    distribution = probabilities.cumsum_(-1)
    # The sum may differ slightly from 1; scaling the draw by it keeps the last candidate reachable and favors no other.
    # Rounding may raise the product to the sum itself, which is beyond every candidate.
    total = distribution[:, -1]
    targets = torch.minimum(uniforms.float() * total, total.nextafter(total.new_zeros(())))[:, None]
    chosen = torch.searchsorted(distribution, targets, right=True).squeeze(1)
    return chosen.clamp_(max=logits.shape[1] - 1)
