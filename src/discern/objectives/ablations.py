"""The objectives between BERT and ELECTRA: each differs from its neighbor in one respect.

Reference: Clark et al. 2020, section 3.3.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from discern.corruption.randomness import Randomness
from discern.models.base import Network, build_encoder
from discern.models.heads import CopyMLMHead, TiedLMHead
from discern.objectives.base import BuildSettings, Evaluator, Phase, WordTargets
from discern.objectives.config import GeneratorConfig
from discern.objectives.losses import word_logits
from discern.objectives.masked import MaskingObjective, restore_tokens, shared_embeddings
from discern.objectives.metrics import MetricsEvaluator, Ratios, generator_metrics, masked_metrics
from discern.objectives.rtd import Generator, GeneratorInputs, ReplacedTokenDetection, Replacement, RTDConfig
from discern.types import CorruptedBatch, LossTerm, PlacesOf, StepOutput


class MaskedOnlyRTDConfig(RTDConfig):
    """Settings of replaced token detection at the chosen positions; they mean the same as in objective 'rtd'."""

    detects_every_token: ClassVar[bool] = False
    name: str = Field("rtd-masked-only", description="Objective, by its name in the registry.")


class MaskedOnlyReplacedTokenDetection(ReplacedTokenDetection):
    """Replaced token detection whose discriminator learns from the chosen positions alone: "ELECTRA 15%".

    How much of ELECTRA's gain comes from a loss over all tokens instead of 15% of them?
    """

    Config = MaskedOnlyRTDConfig

    def classified(self, batch: CorruptedBatch) -> tuple[Bool[Tensor, "B L"], int]:
        return batch.masked_positions, batch.num_masked


class ReplaceMLMConfig(GeneratorConfig):
    """Settings of masked language modeling on replaced tokens."""

    encoder_reads_samples: ClassVar[bool] = True
    name: str = Field("replace-mlm", description="Objective, by its name in the registry.")
    tying: Literal["embeddings", "token", "none"] = Field(
        "embeddings",
        description="What generator and encoder share. 'embeddings': words, positions, segments and their LayerNorm, as far "
        "as the encoder has them; 'token': words only; 'none': nothing.",
    )


class ReplaceMLM(MaskingObjective[ReplaceMLMConfig]):
    """Predict the original token at each chosen position, where the encoder reads a generator's sample: "Replace MLM".

    How much of ELECTRA's gain comes from an encoder that never sees [MASK], which fine-tuning does not use either?
    """

    Config = ReplaceMLMConfig
    head: TiedLMHead | CopyMLMHead

    def __init__(self, config: ReplaceMLMConfig, settings: BuildSettings) -> None:
        super().__init__(config, settings)
        model = settings.model
        small = model.shrunk(config.generator_size, config.generator_depth)
        read, read_by_generator = shared_embeddings(settings, small, config.tying)
        self.encoder = build_encoder(read, model, gradient_checkpointing=settings.gradient_checkpointing)
        self.head = self.new_head()
        self._generator = Generator(config, GeneratorInputs(settings, small, read_by_generator))
        self.generator, self.generator_head = self._generator.encoder, self._generator.head

    def new_head(self) -> TiedLMHead | CopyMLMHead:
        """A head for the encoder."""
        return self.encoder.language_head()

    @staticmethod
    def metrics(output: StepOutput, batch: CorruptedBatch) -> tuple[Ratios, None]:
        """Metrics of the generator and of the encoder; `replaced_fraction` is the fraction of the chosen tokens."""
        ratios = generator_metrics(output, batch) | masked_metrics("mlm", output)
        equal, chosen = ratios["sampled_accuracy"]
        return ratios | {"replaced_fraction": (chosen - equal, chosen)}, None

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        return {"generator": batch.num_targets, "mlm": batch.num_targets}

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        replaced = self._generator.replace_chosen(batch, randomness, self.config.generator_weight)
        hidden = self.encoder(replaced.corrupted_ids, *batch.tokens.context)
        restored, observations = self.restore(hidden, replaced, batch)
        observations |= replaced.observations | self.observed_entropies(*replaced.learned)
        return StepOutput({"generator": replaced.term, "mlm": restored}, observations)

    def restore(
        self, hidden: Float[Tensor, "B L D"], replaced: Replacement, batch: CorruptedBatch
    ) -> tuple[LossTerm, dict[str, Tensor]]:
        """The encoder's loss and observations, given its states."""
        chosen, targets = batch.places("chosen"), replaced.observations["sampled_targets"]
        logits = word_logits(self.head, chosen.gather(hidden))
        return logits.loss(targets, chosen), {**logits.observed("mlm"), "mlm_targets": targets}

    def networks(self) -> dict[str, Network]:
        return {"encoder": Network(self.encoder, self.head), **self._generator.networks}

    def evaluator(self) -> Evaluator:
        return MetricsEvaluator(self.metrics, {"generator_loss": self.config.generator_weight, "mlm_loss": 1.0})

    def word_targets(self) -> WordTargets | None:
        return self._masked_words(shown=1.0, correct=None)


class AllTokensMLMConfig(ReplaceMLMConfig):
    """Settings of restoring every token."""

    name: str = Field("all-tokens-mlm", description="Objective, by its name in the registry.")


class AllTokensMLM(ReplaceMLM):
    """Predict the original token everywhere, from text in which a generator's samples replace the chosen tokens.

    The prediction at t is D [x_corrupt_t] + (1 - D) softmax(words), with D from a sigmoid layer: without this gate the encoder
    would spend its capacity on learning to copy. The head over the vocabulary runs on every token, which at V = 30,522 is most
    of the arithmetic and memory; `train.micro_batch_size` limits the memory.

    Reference: Clark et al. 2020, section 3.3, "All-Tokens MLM".
    """

    Config = AllTokensMLMConfig
    head: CopyMLMHead

    def new_head(self) -> CopyMLMHead:
        return CopyMLMHead(self.encoder.config, self.encoder.language_head())

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        return {"generator": batch.num_targets, "mlm": batch.num_tokens}

    def restore(
        self, hidden: Float[Tensor, "B L D"], replaced: Replacement, batch: CorruptedBatch
    ) -> tuple[LossTerm, dict[str, Tensor]]:
        return restore_tokens(self.head, hidden, batch, replaced.corrupted_ids)

    def reads(self) -> frozenset[PlacesOf]:
        return frozenset({"chosen", "real"})

    def head_share(self, network: Network, phase: Phase) -> float:
        """1 for the encoder, whose head runs on every token; the masked fraction for the generator."""
        return 1.0 if network.head is self.head else super().head_share(network, phase)

    @staticmethod
    def metrics(output: StepOutput, batch: CorruptedBatch) -> tuple[Ratios, None]:
        """Metrics of the generator, and of the encoder, which restores every token by copying or writing.

        `mlm_loss` and `mlm_accuracy` are over all real tokens, `masked_accuracy` over the chosen positions alone;
        `copy_probability` is the mean of the gate. `replaced_fraction` is the fraction of all real tokens.
        """
        seen, real = output.observations, batch.tokens.attention_mask
        logits, copy_logits, targets = seen["mlm_logits"].float(), seen["copy_logits"].float(), seen["mlm_targets"]
        read = seen["corrupted_ids"][real]
        # In units of (1 - D) / (sum of the softmax), copying adds exp(copy logit) times that sum to the token that is read.
        copied = copy_logits + logits.logsumexp(1)
        read_score = logits.gather(1, read[:, None]).squeeze(1).logaddexp(copied)
        best, written = logits.max(1)
        correct, count = read.where(read_score >= best, written) == targets, len(targets)
        return generator_metrics(output, batch) | {
            "mlm_loss": (output.terms["mlm"].total, count),
            "mlm_accuracy": (correct.sum(), count),
            "masked_accuracy": ((correct & batch.masked_positions[real]).sum(), batch.num_masked),
            "copy_probability": (F.sigmoid(copy_logits).sum(), count),
            "replaced_fraction": ((read != targets).sum(), count),
        }, None

    def word_targets(self) -> None:
        return None
