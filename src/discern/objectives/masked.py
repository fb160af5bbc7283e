"""Masking of a batch, shared by the objectives that predict masked tokens."""

from __future__ import annotations

from typing import TypeVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from discern.corruption import MASKINGS_BY_TOKEN, MASKINGS_OF_INTEGERS, maskings
from discern.corruption.masking import Chosen, MaskingContext, Sample, average_samples, hide
from discern.corruption.randomness import Randomness
from discern.models.base import Network
from discern.objectives.base import Phase, PretrainingObjective, Vocabulary, WordTargets, predicts_words
from discern.objectives.config import MaskingConfig, PositionsConfig
from discern.objectives.losses import WordLogits
from discern.types import CorruptedBatch, TokenBatch

MaskingConfigT = TypeVar("MaskingConfigT", bound=MaskingConfig)


class MaskingObjective(PretrainingObjective[MaskingConfigT]):
    """An objective that masks chosen positions and predicts their tokens."""

    def corrupt(self, batch: TokenBatch, randomness: Randomness) -> CorruptedBatch:
        return mask_batch(batch, self.config, self.vocabulary, randomness, self.token_entropies(randomness.step))

    @property
    def corrupts_anywhere(self) -> bool:
        return self.config.masking in MASKINGS_OF_INTEGERS

    def head_share(self, network: Network, phase: Phase) -> float:
        """Heads over the vocabulary run at the masked positions only, all others at every position."""
        if not predicts_words(network):
            return 1.0
        # mask_probability changes linearly or not at all: a hundred points give its mean to a hundredth of the change.
        steps = (phase.begins + number * phase.steps // 100 for number in range(100))
        return sum(self.config.probability_at(step) for step in steps) / 100

    def _masked_words(self, *, shown: float, correct: float | None) -> WordTargets | None:
        """`word_targets` of an encoder that predicts the tokens at the masked positions.

        Args:
            shown: fraction of these positions at which the encoder sees a word.
            correct: fraction of the shown words that are the original; None: that of the generator's samples.
        """
        if self.config.masking in MASKINGS_BY_TOKEN:  # chooses some tokens more often than they occur
            return None
        return WordTargets("mlm_loss", self.vocabulary, shown, correct, hides_all=self.config.mask_token_probability == 1)


def choose_positions(
    batch: TokenBatch,
    config: PositionsConfig,
    vocabulary: Vocabulary,
    randomness: Randomness,
    token_entropies: Float[Tensor, "V"] | None = None,
) -> Chosen:
    """The positions that the configured masking chooses.

    Args:
        token_entropies: mean entropy of the predictions of each token, for masking 'entropy'; None: unknown.

    Raises:
        ConfigError: the masking needs something that the batch or the vocabulary does not have.
    """
    context = MaskingContext(
        mask_probability=config.probability_at(randomness.step),
        randomness=randomness,
        token_counts=vocabulary.token_counts,
        rarity_exponent=config.rarity_exponent,
        token_entropies=token_entropies,
        entropy_exponent=config.entropy_exponent,
        span_stop_probability=config.span_stop_probability,
        span_max_words=config.span_max_words,
    )
    return maskings.load(config.masking)(batch, context)


def mask_batch(
    batch: TokenBatch,
    config: MaskingConfig,
    vocabulary: Vocabulary,
    randomness: Randomness,
    token_entropies: Float[Tensor, "V"] | None = None,
) -> CorruptedBatch:
    """The batch with positions chosen and masked, and all denominators counted.

    Args:
        token_entropies: as for `choose_positions`.

    Raises:
        ConfigError: the masking needs something that the batch or the vocabulary does not have.
    """
    chosen = choose_positions(batch, config, vocabulary, randomness, token_entropies)
    positions, draws = chosen.positions, chosen.draws
    shares = (config.mask_token_probability, config.random_token_probability)
    masked_ids = hide(batch.input_ids, positions, shares, (vocabulary.special.mask, vocabulary.size), randomness, draws)
    return CorruptedBatch(
        tokens=batch,
        masked_ids=masked_ids,
        masked_positions=positions,
        num_masked=int(positions.sum()),
        num_tokens=int(batch.attention_mask.sum()),
        draws=draws,
        num_draws=None if draws is None else int(draws.sum()),
    )


def unmasked_batch(batch: TokenBatch, positions: Bool[Tensor, "B L"]) -> CorruptedBatch:
    """The batch with these positions chosen, its ids as they were, and all denominators counted."""
    return CorruptedBatch(
        tokens=batch,
        masked_ids=batch.input_ids,
        masked_positions=positions,
        num_masked=int(positions.sum()),
        num_tokens=int(batch.attention_mask.sum()),
    )


def sample_replacements(
    batch: CorruptedBatch, logits: WordLogits, randomness: Randomness, sample: Sample, *columns: Tensor
) -> Int[Tensor, "M"]:
    """One id for each chosen position, drawn by `sample` from its row of logits.

    A position that was drawn several times gets the floored mean of as many samples, as in the released code.

    Args:
        columns: further arguments of `sample`, with a row for each chosen position.
    """
    chosen, length = batch.places("chosen"), batch.masked_positions.shape[1]

    def uniforms(purpose: str) -> Float[Tensor, "M"]:
        return chosen.gather(randomness.uniforms(purpose, length))

    def again(at: Int[Tensor, "n"], ordinal: int) -> Int[Tensor, "n"]:
        given = uniforms(f"replacements {ordinal}"), *columns
        return logits.select(at).map(sample, *(each.index_select(0, at) for each in given))

    return average_samples(logits.map(sample, uniforms("replacements"), *columns), chosen, again)
