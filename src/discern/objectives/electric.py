"""Electric: an energy for every token in its context, learned by telling text from noise."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from discern.corruption.randomness import Randomness
from discern.models.base import Network, build_encoder
from discern.models.heads import EnergyHead
from discern.models.layers import same_draws
from discern.objectives.base import BuildSettings, Evaluator, ForwardPass, Phase, PretrainingObjective
from discern.objectives.config import PositionsConfig
from discern.objectives.losses import noise_contrastive_loss, word_logits
from discern.objectives.masked import bilinear_term, choose_positions, corrupted_batch, shared_embeddings
from discern.objectives.metrics import Binary, MetricsEvaluator, Ratios, generator_metrics, noise_logits
from discern.objectives.rtd import GeneratorInputs
from discern.objectives.rtd_variants import TwoTowerGenerator
from discern.types import CorruptedBatch, PlacesOf, StepOutput, TokenBatch


class ElectricConfig(PositionsConfig):
    """Settings of Electric. No [MASK] is used: both networks read words."""

    name: str = Field("electric", description="Objective, by its name in the registry.")
    generator_size: float = Field(
        0.25, gt=0, le=1, description="Width of each of the generator's two towers, a fraction of the discriminator's."
    )
    generator_depth: float = Field(
        1.0, gt=0, le=1, description="Depth of each of the generator's two towers, a fraction of the discriminator's."
    )
    tying: Literal["embeddings", "token", "none", "gradient-disentangled"] = Field(
        "embeddings", description="What generator and discriminator share, as in objective 'rtd'."
    )
    discriminator_head: Literal["dense", "bilinear"] = Field(
        "dense", description="What turns the discriminator's states into energies, as in objective 'rtd'."
    )
    generator_weight: float = Field(1.0, ge=0, description="Factor of the generator's loss.")
    discriminator_weight: float = Field(50.0, ge=0, description="Factor of the noise-contrastive loss. Electric: 50.")


class Electric(PretrainingObjective[ElectricConfig]):
    """A cloze generator q proposes noise for some tokens; the energy of each token estimates its probability given the others.

    exp(-energy) estimates p(x_t | all the others) without a sum over the vocabulary: the noise-contrastive loss is minimal
    when it is normalized. That holds exactly if q is the true conditional distribution and a row has one noise token, and
    approximately otherwise (docs/concepts/electric.md measures the gaps). Unlike ELECTRA, Electric asks whether a token *came
    from* q, even if q happened to draw the original.

    q learns from clean text, and the noise is drawn from it. Each token, noise or not, is then compared with q given the noised
    text around it, in a second pass without gradient, so that energy and q have the same context. Dropout drops the same units
    in both passes; otherwise a word would be drawn from one q and compared with another. [CLS], [SEP] and padding, on which q
    is not trained, are not part of the loss.

    Differs: the released code takes q given the clean text at every position, which biases the energies even with an exact q
    and a single noise token; it draws positions with replacement, assumes the fraction of noise to be mask_probability in every
    row, and includes [CLS] and [SEP] in the loss. The paper rounds the number of noise tokens up; here the masking decides it.
    Reference: Clark et al. 2020, "Pre-training transformers as energy-based cloze models", algorithm 2.
    """

    Config = ElectricConfig

    def __init__(self, config: ElectricConfig, settings: BuildSettings) -> None:
        super().__init__(config, settings)
        model = settings.model
        small = model.shrunk(config.generator_size, config.generator_depth)
        read, read_by_generator = shared_embeddings(settings, small, config.tying)
        self.discriminator = build_encoder(read, model, gradient_checkpointing=settings.gradient_checkpointing)
        self.discriminator_head = EnergyHead(model)
        self.discriminator_bilinear = bilinear_term(config.discriminator_head, self.discriminator)
        self._generator = TwoTowerGenerator(config, GeneratorInputs(settings, small, read_by_generator))
        self.generator, self.generator_head = self._generator.encoder, self._generator.head

    def corrupt(self, batch: TokenBatch, randomness: Randomness) -> CorruptedBatch:
        return corrupted_batch(batch, choose_positions(self, batch, randomness).positions)

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        return dict.fromkeys(("generator", "discriminator"), self._generator.count(batch))

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        tokens, is_noise, is_word, words = batch.tokens, batch.masked_positions, batch.mask("words"), batch.places("words")
        generator_again = same_draws(tokens.input_ids.device)
        replaced = self._generator.replace_chosen(batch, randomness, self.config.generator_weight)
        ids = replaced.corrupted_ids

        # Words are drawn from q and scored by q with the same units dropped, so that both are one distribution.
        with torch.no_grad(), generator_again():
            around = word_logits(self.generator_head, words.gather(self.generator(ids, *tokens.context)))
            log_noise = around.map(log_probability, words.gather(ids))
        energy = self.networks()["discriminator"].token_logits(ids, *tokens.context)
        log_noise_probability = words.scatter(torch.zeros_like(energy, dtype=torch.float32), log_noise)
        log_noise_odds = noise_odds(is_noise, is_word)
        contrast = noise_contrastive_loss(
            energy, log_noise_probability, log_noise_odds, is_noise, is_word, words.count, self.config.discriminator_weight
        )
        observations = {
            **replaced.observations,
            **self.observed_entropies(*replaced.learned),
            "is_noise": is_noise,
            "energy": energy.detach(),
            "log_noise_probability": log_noise_probability,
            "log_noise_odds": log_noise_odds,
        }
        return StepOutput({"generator": replaced.term, "discriminator": contrast}, observations)

    def reads(self) -> frozenset[PlacesOf]:
        return frozenset({"chosen", "words"})

    def networks(self) -> dict[str, Network]:
        return {
            "discriminator": Network(self.discriminator, self.discriminator_head, self.discriminator_bilinear),
            **self._generator.networks,
        }

    def forward_passes(self, phase: Phase) -> list[ForwardPass]:
        """Both networks with their heads at every position, and the generator a second time without gradient."""
        return [*super().forward_passes(phase), ForwardPass(self.networks()["generator"], 1.0, trains=False)]

    def evaluator(self) -> Evaluator:
        weights = {"generator_loss": self.config.generator_weight, "discriminator_loss": self.config.discriminator_weight}
        return MetricsEvaluator(noise_contrastive_metrics, weights)


def noise_contrastive_metrics(output: StepOutput, batch: CorruptedBatch) -> tuple[Ratios, Binary]:
    """Metrics of Electric, over the tokens that may be noise.

    The discriminator's are of the class *noise*, from its odds with log q and the fraction of noise. `energy` is the mean
    energy of the tokens that are not noise: if exp(-energy) were normalized it would be their cross-entropy, comparable with
    the generator's.
    """
    seen, mask, term = output.observations, batch.tokens.maskable, output.terms["discriminator"]
    ratios: Ratios = {
        "discriminator_loss": (term.total, term.count),
        "energy": (seen["energy"].float()[mask & ~seen["is_noise"]].sum(), term.count - batch.num_masked),
        "noise_fraction": (batch.num_masked, term.count),
        "replaced_fraction": ((seen["corrupted_ids"] != batch.tokens.input_ids).sum(), term.count),
    }
    binary = noise_logits(seen)[mask], seen["is_noise"][mask], mask[mask]
    return generator_metrics(output, batch) | ratios, binary


@torch.no_grad()
def log_probability(logits: Float[Tensor, "N V"], ids: Tensor) -> Float[Tensor, "N"]:
    """Log of the softmax at one id per row, in float32; no gradient."""
    logits = logits.float()
    return logits.gather(1, ids[:, None]).squeeze(1) - logits.logsumexp(1)


def noise_odds(is_noise: Tensor, words: Tensor) -> Float[Tensor, "B 1"]:
    """log(k / (n - k)) of each row with k of its n words noise; infinite if all or none are."""
    noise, number = is_noise.sum(1, keepdim=True), words.sum(1, keepdim=True)
    return torch.log(noise.float()) - torch.log((number - noise).float())
