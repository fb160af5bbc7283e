"""Masked and causal language modeling with one encoder, as an objective and as a generator."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from discern.config.schema import RunPoint
from discern.corruption.randomness import Randomness
from discern.data.config import DataConfig
from discern.models.config import ModelConfig
from discern.objectives.base import Evaluator
from discern.objectives.config import CAUSAL_FRACTION, ObjectiveConfig, TaughtConfig, check_one_way
from discern.objectives.losses import word_logits
from discern.objectives.masked import MaskedLanguageModel
from discern.objectives.metrics import MetricsEvaluator, Ratios, masked_metrics
from discern.objectives.rtd import Generator, Prediction
from discern.types import CorruptedBatch, Places, PlacesOf, StepOutput


class HybridConfig(TaughtConfig):
    """Settings of masked and causal language modeling."""

    name: str = Field("hybrid", description="Objective, by its name in the registry.")
    causal_fraction: float = CAUSAL_FRACTION
    mask_probability: float = Field(
        0.3, gt=0, lt=1, description="Fraction of maskable tokens chosen in a masked row. GPT-BERT: 0.3."
    )
    mask_probability_end: float | None = Field(
        0.15, gt=0, lt=1, description="mask_probability changes to this value over mask_probability_steps steps. GPT-BERT: 0.15."
    )
    mask_probability_steps: RunPoint | None = Field(
        0.999,  # type: ignore[assignment]
        gt=0,
        description="Number of steps until mask_probability_end is reached, or the fraction of the run below 1.",
    )

    @property
    def causal_rows(self) -> float:
        return self.causal_fraction

    def check(self, data: DataConfig, model: ModelConfig) -> None:
        check_one_way(model, f"objective '{self.name}'")


class HybridLanguageModel(MaskedLanguageModel):
    """Masked language modeling in most rows, and causal language modeling in the others, by the same encoder and head.

    In a masked row, the state at a chosen position predicts the token there from the whole text. In a causal row nothing is
    masked, attention is left to right, and the state at t predicts the token at t + 1. The loss is the mean over the chosen
    positions of the masked rows, times the fraction of such rows, plus the mean over the words of the causal rows, times theirs.

    Differs: GPT-BERT predicts masked tokens from the position before them, too, where fill-mask pipelines do not look for them.
    Here [MASK] tells the network which token to predict.

    Reference: Charpentier and Samuel 2024, "GPT or BERT: why not both?", section 2.
    """

    Config: ClassVar[type[ObjectiveConfig]] = HybridConfig
    corrupts_causal_rows = False
    config: HybridConfig

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        return super().counts(batch) | {"causal_lm": int(batch.mask("next").sum())}

    def reads(self) -> frozenset[PlacesOf]:
        return frozenset({"chosen", "next"})

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        hidden, (masked_weight, causal_weight) = self.states(batch), self._weights()
        terms, observations = self.predict_masked(hidden, batch, masked_weight)
        following = batch.places("next")
        logits = word_logits(self.head, predicting_states(hidden, following, batch))
        targets = following.gather(batch.tokens.input_ids)
        observations |= logits.observed("causal_lm") | {"causal_lm_targets": targets}
        return StepOutput(terms | {"causal_lm": logits.loss(targets, following, causal_weight)}, observations)

    def _weights(self) -> tuple[float, float]:
        return 1 - self.config.causal_fraction, self.config.causal_fraction

    def evaluator(self) -> Evaluator:
        return MetricsEvaluator(_metrics, dict(zip(("mlm_loss", "causal_lm_loss"), self._weights(), strict=True)))


def _metrics(output: StepOutput, batch: CorruptedBatch) -> tuple[Ratios, None]:
    return masked_metrics("mlm", output) | masked_metrics("causal_lm", output), None


def predicting_states(hidden: Float[Tensor, "B L D"], places: Places, batch: CorruptedBatch) -> Float[Tensor, "N D"]:
    """The state that predicts each token of `places`: its own; in a causal row, that of the token before it."""
    assert batch.is_causal is not None
    earlier = batch.is_causal[places.index // hidden.shape[1]].long()
    return hidden.flatten(0, 1).index_select(0, (places.index - earlier).clamp(min=0))


class HybridGenerator(Generator):
    """A masked language model that is also trained as a causal one: in causal rows, it proposes tokens from those before them.

    The discriminator reads such rows like all others: it sees what the generator did not.
    """

    learns_at: ClassVar[PlacesOf] = "predicted"

    def predict(self, batch: CorruptedBatch) -> Prediction:
        predicted = batch.places("predicted")
        hidden = self.encoder(batch.masked_ids, *batch.tokens.context, is_causal=batch.is_causal)
        states = predicting_states(hidden, predicted, batch)
        logits, at = word_logits(self.head, states), batch.places("chosen").among(predicted)
        return Prediction(logits, predicted, logits.select(at), states.index_select(0, at))
