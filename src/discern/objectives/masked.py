"""Masked language modeling, and what every objective with masks or a generator shares."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from discern.corruption import maskings
from discern.corruption.masking import Chosen, MaskingContext, Sample, hide
from discern.corruption.randomness import Randomness
from discern.errors import ConfigError
from discern.models import encoders
from discern.models.base import Encoder, Network, build_embeddings, build_encoder
from discern.models.config import ModelConfig
from discern.models.heads import BilinearTerm, CopyMLMHead
from discern.models.layers import TokenEmbeddings, WordEmbeddings
from discern.objectives.base import BuildSettings, Evaluator, ForwardPass, Phase, PretrainingObjective, WordTargets
from discern.objectives.config import MaskingConfig, ObjectiveConfig, PositionsConfig, TaughtConfig
from discern.objectives.losses import WordLogits, copy_loss, distillation_loss, word_logits
from discern.objectives.metrics import MetricsEvaluator, Ratios, masked_metrics
from discern.types import CorruptedBatch, LossTerm, StepOutput, TokenBatch

PositionsConfigT = TypeVar("PositionsConfigT", bound=PositionsConfig)
MaskingConfigT = TypeVar("MaskingConfigT", bound=MaskingConfig)


class MaskingObjective(PretrainingObjective[MaskingConfigT]):
    """An objective that masks chosen positions and predicts their tokens.

    Attributes:
        corrupts_causal_rows: whether positions are also chosen in causal rows, to be replaced there.
    """

    corrupts_causal_rows: ClassVar[bool] = True

    def corrupt(self, batch: TokenBatch, randomness: Randomness) -> CorruptedBatch:
        chosen = choose_positions(self, batch, randomness)
        shares = self.config.mask_token_probability, self.config.random_token_probability
        vocabulary = self.vocabulary.special.mask, self.vocabulary.size
        masked_ids = hide(batch.input_ids, chosen, shares, vocabulary, randomness)
        is_causal, following = None, None
        if fraction := self.config.causal_rows:
            # Evenly spaced, so that all batches have about equally many.
            row = batch.example_index.double()
            is_causal = ((row + 1) * fraction).floor() > (row * fraction).floor()
            causal = is_causal[:, None]
            joined, documents = batch.attention_mask[:, :-1], batch.document_ids
            if documents is not None:
                joined = joined & (documents[:, :-1] == documents[:, 1:])
            following = batch.maskable & F.pad(joined, (1, 0)) & causal
            masked_ids = torch.where(causal, batch.input_ids, masked_ids)
            chosen = chosen.among(~causal | following if self.corrupts_causal_rows else ~causal)
        return corrupted_batch(batch, chosen.positions, masked_ids, chosen.draws, is_causal, following)

    def head_share(self, network: Network, phase: Phase) -> float:
        """Heads over the vocabulary run at the masked positions only, all others at every position."""
        if not network.predicts_words:
            return 1.0
        # mask_probability changes linearly or not at all: a hundred points give its mean to a hundredth of the change.
        steps = (phase.begins + number * phase.steps // 100 for number in range(100))
        share, causal = sum(self.config.value_at("mask_probability", step) for step in steps) / 100, self.config.causal_rows
        return share + (1 - share) * causal

    def _masked_words(self, *, shown: float, correct: float | None) -> WordTargets | None:
        """`word_targets` of an encoder that predicts the tokens at the masked positions.

        Args:
            shown: fraction of these positions at which the encoder sees a word.
            correct: fraction of the shown words that are the original; None: that of the generator's samples.
        """
        if self.config.masking in ("rarity", "entropy"):  # chooses some tokens more often than they occur
            return None
        return WordTargets("mlm_loss", self.vocabulary, shown, correct, hides_all=self.config.mask_token_probability == 1)


class MLMConfig(TaughtConfig):
    """Settings of masked language modeling: 80% [MASK], 10% random, 10% unchanged, as in BERT."""

    name: str = Field("mlm", description="Objective, by its name in the registry.")
    mask_token_probability: float = Field(
        0.8, ge=0, le=1, description="Share of the chosen positions that become [MASK]. BERT: 0.8."
    )
    random_token_probability: float = Field(
        0.1, ge=0, le=1, description="Share of the chosen positions that become a random token. BERT: 0.1. The rest stays."
    )


class MaskedLanguageModel(MaskingObjective[TaughtConfig]):
    """Predict the original token at each chosen position: the objective of BERT, without next-sentence prediction.

    Reference: Devlin et al. 2019, section 3.1; new positions are drawn at every step, as in RoBERTa. With a teacher: Sanh et al.
    2019, "DistilBERT", section 2, without the loss of the states.

    Attributes:
        teachers: the teacher, if there is one; in a tuple, so that its weights are not those of this module.
    """

    Config: ClassVar[type[ObjectiveConfig]] = MLMConfig
    teachers: tuple[Network, ...] = ()

    def __init__(self, config: TaughtConfig, settings: BuildSettings) -> None:
        super().__init__(config, settings)
        model = settings.model
        embeddings = build_embeddings(settings.vocabulary.size, model.embedding_size, model)
        self.encoder = build_encoder(embeddings, model, gradient_checkpointing=settings.gradient_checkpointing)
        self.head = self.encoder.language_head()

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        return dict.fromkeys(("mlm", "teacher") if self.teachers and self.training else ("mlm",), batch.num_targets)

    def forward_passes(self, phase: Phase) -> list[ForwardPass]:
        share = self.head_share(self.networks()["encoder"], phase)
        taught = [ForwardPass(teacher, share, trains=False) for teacher in self.teachers]
        return super().forward_passes(phase) + taught

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        return StepOutput(*self.predict_masked(self.states(batch), batch))

    def states(self, batch: CorruptedBatch) -> Float[Tensor, "B L D"]:
        """The encoder's states of the masked text."""
        tokens, direction = batch.tokens, {}
        if self.encoder.reads_backwards:
            direction = {"is_reversed": tokens.is_reversed}
        elif batch.is_causal is not None:
            direction = {"is_causal": batch.is_causal}
        return self.encoder(batch.masked_ids, *tokens.context, **direction)  # type: ignore[no-any-return]

    def predict_masked(
        self, hidden: Float[Tensor, "B L D"], batch: CorruptedBatch, weight: float = 1.0
    ) -> tuple[dict[str, LossTerm], dict[str, Tensor]]:
        """The losses at the chosen positions, and observations."""
        chosen = batch.places("chosen")
        logits, targets = word_logits(self.head, chosen.gather(hidden)), chosen.gather(batch.tokens.input_ids)
        observations = logits.observed("mlm") | {"mlm_targets": targets} | self.observed_entropies(logits, targets, chosen)
        if not (self.teachers and self.training):
            return {"mlm": logits.loss(targets, chosen, weight)}, observations
        share = self.config.teacher_weight
        with torch.no_grad():
            (teacher,) = self.teachers
            states = chosen.gather(teacher.encoder(batch.masked_ids, *batch.tokens.context))
            # A word table may have rows beyond the vocabulary.
            wanted = teacher.head(states)[:, : self.vocabulary.size]
        losses = distillation_loss(logits.matrix(), wanted, self.config.teacher_temperature)
        taught = LossTerm(chosen.weigh(losses).sum(), chosen.count, weight * share)
        return {"mlm": logits.loss(targets, chosen, weight * (1 - share)), "teacher": taught}, observations

    def networks(self) -> dict[str, Network]:
        return {"encoder": Network(self.encoder, self.head)}

    def evaluator(self) -> Evaluator:
        return MetricsEvaluator(_metrics, {"mlm_loss": 1.0})

    def word_targets(self) -> WordTargets | None:
        shown = 1 - self.config.mask_token_probability
        correct = (shown - self.config.random_token_probability) / shown if shown > 0 else 0.0
        return self._masked_words(shown=shown, correct=correct)


def _metrics(output: StepOutput, batch: CorruptedBatch) -> tuple[Ratios, None]:
    return masked_metrics("mlm", output), None


def choose_positions(objective: PretrainingObjective[PositionsConfigT], batch: TokenBatch, randomness: Randomness) -> Chosen:
    """The positions that the objective's masking chooses.

    Raises:
        ConfigError: the masking needs something that the batch or the vocabulary does not have.
    """
    config = objective.config
    context = MaskingContext(
        mask_probability=config.value_at("mask_probability", randomness.step),
        randomness=randomness,
        token_counts=objective.vocabulary.token_counts,
        rarity_exponent=config.rarity_exponent,
        token_entropies=None if objective.entropies is None else objective.entropies.at(randomness.step),
        entropy_exponent=config.entropy_exponent,
        span_stop_probability=config.span_stop_probability,
        span_max_words=config.span_max_words,
    )
    return maskings.load(config.masking)(batch, context)


def corrupted_batch(
    batch: TokenBatch,
    positions: Bool[Tensor, "B L"],
    masked_ids: Int[Tensor, "B L"] | None = None,
    draws: Int[Tensor, "B L"] | None = None,
    is_causal: Bool[Tensor, "B"] | None = None,
    following: Bool[Tensor, "B L"] | None = None,
) -> CorruptedBatch:
    """The batch with these positions chosen and all denominators counted.

    Args:
        masked_ids: the ids after masking; None: nothing is masked.
        draws: number of times each position was drawn, if that may be more than once.
        is_causal: rows whose tokens are predicted from those before them.
        following: the words that are.
    """
    return CorruptedBatch(
        tokens=batch,
        masked_ids=batch.input_ids if masked_ids is None else masked_ids,
        masked_positions=positions,
        num_masked=int(positions.sum()),
        num_tokens=int(batch.attention_mask.sum()),
        draws=draws,
        num_draws=None if draws is None else int(draws.sum()),
        is_causal=is_causal,
        following=following,
    )


def sample_replacements(
    batch: CorruptedBatch, logits: WordLogits, randomness: Randomness, sample: Sample, *columns: Tensor
) -> Int[Tensor, "M"]:
    """One id for each chosen position, drawn by `sample` from its row of logits.

    A position that was drawn several times gets the floored mean of as many samples. If they differ, that is the id of an
    unrelated token. The authors know and kept it (google-research/electra, issue 41).

    Args:
        columns: further arguments of `sample`, with a row for each chosen position.
    """
    chosen = batch.places("chosen")

    def uniforms(purpose: str) -> Float[Tensor, "M"]:
        return chosen.gather(randomness.uniforms(purpose, batch.masked_positions.shape[1]))

    ids = logits.map(sample, uniforms("replacements"), *columns)
    for ordinal, at in enumerate(chosen.drawn_again, 1):
        arguments = uniforms(f"replacements {ordinal}"), *columns
        ids = ids.index_add(0, at, logits.select(at).map(sample, *(column.index_select(0, at) for column in arguments)))
    return ids if chosen.draws is None else ids // chosen.draws.clamp(min=1)


def restore_tokens(
    head: CopyMLMHead,
    hidden: Float[Tensor, "B L D"],
    batch: CorruptedBatch,
    corrupted_ids: Int[Tensor, "B L"],
    weight: float = 1.0,
) -> tuple[LossTerm, dict[str, Tensor]]:
    """Predict the original token at every real position, by copying the one that was read or by writing another.

    Args:
        hidden: states of the corrupted text.
        weight: factor of the loss.
    """
    real = batch.places("real")
    states, targets = real.gather(hidden), real.gather(batch.tokens.input_ids)
    logits, copy_logits = word_logits(head, states), head.copy_logits(states)
    term = copy_loss(logits.losses(targets), copy_logits, real.gather(corrupted_ids), targets, weight)
    return term, {**logits.observed("mlm"), "mlm_targets": targets, "copy_logits": copy_logits.detach()}


def bilinear_term(kind: str, encoder: Encoder) -> BilinearTerm | None:
    """The term that this kind of head adds to the discriminator's logits; None if there is none."""
    return BilinearTerm(encoder.config, encoder.embeddings.embedding_size) if kind == "bilinear" else None


def shared_embeddings(settings: BuildSettings, small: ModelConfig, tying: str) -> tuple[TokenEmbeddings, WordEmbeddings]:
    """The embeddings of the main network and those of the generator.

    Args:
        small: sizes of the generator.
        tying: 'embeddings', 'all', 'token', 'none', 'gradient-disentangled', or 'equal': nothing is shared, and both are as wide
            as the main network's.

    Raises:
        ConfigError: encoders of this kind cannot share embeddings.
    """
    model, size = settings.model, settings.vocabulary.size
    kind: Any = encoders.load(model.encoder)
    if kind.disentangled_class is None:
        raise ConfigError(
            f"encoder '{model.encoder}' cannot share its embeddings with a generator, as this objective asks",
            hint="set model.encoder=bert, or another objective",
        )
    read_by_generator = build_embeddings(size, small.hidden_size if tying == "none" else model.embedding_size, small)
    if tying in ("embeddings", "all"):
        return read_by_generator, read_by_generator
    if tying == "gradient-disentangled":
        return kind.disentangled_class(read_by_generator, model), read_by_generator
    read = build_embeddings(size, model.embedding_size, model)
    if tying == "token":
        read_by_generator.word = read.word
    return read, read_by_generator
