"""What proposes replacements: masked language model, two towers, or a distribution that no text changes."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from discern.corruption.masking import maskable_positions
from discern.corruption.randomness import Randomness
from discern.corruption.sampling import sample_fixed
from discern.errors import ConfigError
from discern.model.config import ModelConfig
from discern.model.embeddings import Embeddings
from discern.model.encoder import Encoder, build_encoder
from discern.model.heads import MaskedLMHead, gather_positions
from discern.model.network import Network
from discern.model.two_tower import two_tower_generator
from discern.objectives.base import BuildSettings
from discern.objectives.losses import masked_token_loss
from discern.objectives.masked import sample_replacements
from discern.objectives.replacement import context_of
from discern.objectives.rtd_config import RTDConfig
from discern.types import CorruptedBatch, LossTerm


@dataclass(frozen=True)
class Materials:
    """What a generator is built from.

    Attributes:
        settings: vocabulary, and whether activations are recomputed.
        sizes: of the generator.
        embeddings: that it reads.
        encoder: the discriminator's, where the two are one; otherwise None.
    """

    settings: BuildSettings
    sizes: ModelConfig
    embeddings: Embeddings
    encoder: Encoder | None


@dataclass(frozen=True)
class Proposal:
    """What a generator gives for a batch.

    Attributes:
        loss: of the original tokens, weight 1.
        logits: (N, V) where the loss is taken.
        targets: (N,) the original tokens there.
        masked_logits: (M, V) at the chosen positions, with gradient; the same tensor where the loss is taken there.
        originals: (M,) the original tokens there.
        sampled_ids: (M,) drawn from `masked_logits`, no gradient.
        states: (M, D) what `masked_logits` were computed from; None of a generator without weights.
    """

    loss: LossTerm
    logits: Float[Tensor, "N V"]
    targets: Int[Tensor, "N"]
    masked_logits: Float[Tensor, "M V"]
    originals: Int[Tensor, "M"]
    sampled_ids: Int[Tensor, "M"]
    states: Float[Tensor, "M D"] | None


class Generator(abc.ABC):
    """Proposes a token for each chosen position.

    Not a module itself: the objective registers its `modules`, under names that every checkpoint has.

    Attributes:
        everywhere: its head runs at every position, not at the chosen ones only.
    """

    everywhere: ClassVar[bool] = False

    def __init__(self, config: RTDConfig) -> None:
        self.config = config

    @classmethod
    @abc.abstractmethod
    def check(cls, config: RTDConfig) -> None:
        """Raise a ValueError where other settings don't go with this generator; it says why and what to set."""

    @abc.abstractmethod
    def modules(self) -> dict[str, nn.Module]:
        """What holds its weights and tables, by name."""

    @abc.abstractmethod
    def networks(self) -> dict[str, Network]:
        """Its encoder and head under the name 'generator'; empty where it has none."""

    @abc.abstractmethod
    def count(self, batch: CorruptedBatch) -> int:
        """How many items its loss sums over."""

    @abc.abstractmethod
    def propose(self, batch: CorruptedBatch, randomness: Randomness) -> Proposal:
        """Its loss, and a sample for each chosen position."""

    @abc.abstractmethod
    def initial_loss(self) -> float:
        """In nats, before it has learned anything."""

    def prepare(self) -> None:  # noqa: B027
        """Called before training: raise a ConfigError where something is missing."""


class NetworkGenerator(Generator):
    """A generator with weights: an encoder, and a head over the vocabulary.

    Attributes:
        network: both.
    """

    network: Network

    def modules(self) -> dict[str, nn.Module]:
        return {"generator": self.network.encoder, "generator_head": self.network.head}

    def networks(self) -> dict[str, Network]:
        return {"generator": self.network}

    @property
    def head(self) -> MaskedLMHead:
        """Over the vocabulary."""
        assert isinstance(self.network.head, MaskedLMHead)
        return self.network.head

    def initial_loss(self) -> float:
        """ln V."""
        return math.log(self.head.word_embeddings.num_embeddings)

    def _sample(
        self, batch: CorruptedBatch, randomness: Randomness, logits: Float[Tensor, "M V"], originals: Int[Tensor, "M"]
    ) -> Int[Tensor, "M"]:
        sampling = self.config.sampling
        return sample_replacements(batch, sampling.drawn_from(logits, originals), randomness, sampling.sampler())


class MaskedLMGenerator(NetworkGenerator):
    """A masked language model: sees [MASK] at the chosen positions, and its loss and samples come from the same logits.

    Reference: Clark et al. 2020, section 2.
    """

    def __init__(self, config: RTDConfig, materials: Materials) -> None:
        super().__init__(config)
        sizes, checkpointing = materials.sizes, materials.settings.gradient_checkpointing
        encoder = materials.encoder
        if encoder is None:
            encoder = build_encoder(materials.embeddings, sizes, gradient_checkpointing=checkpointing)
        self.network = Network(encoder, MaskedLMHead(sizes, materials.embeddings.word))

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        pass

    def count(self, batch: CorruptedBatch) -> int:
        return batch.num_targets

    def propose(self, batch: CorruptedBatch, randomness: Randomness) -> Proposal:
        tokens, positions = batch.tokens, batch.masked_positions
        states = gather_positions(self.network.encoder(batch.masked_ids, *context_of(tokens)), positions)
        logits = self.head(states)
        originals = tokens.input_ids[positions]
        sampled_ids = self._sample(batch, randomness, logits, originals)
        loss = masked_token_loss(logits, originals, draws=batch.target_draws)
        return Proposal(loss, logits, originals, logits, originals, sampled_ids, states)


class TwoTowerGenerator(NetworkGenerator):
    """Two language models over the clean text, one each way: the token at a place from all the others.

    No [MASK] is needed, so the loss is taken at every maskable position, wherever samples are drawn.

    Reference: Clark et al. 2020 (Electric), section 2.3, and its table of results for "ELECTRA-TT".
    """

    everywhere: ClassVar[bool] = True

    def __init__(self, config: RTDConfig, materials: Materials) -> None:
        super().__init__(config)
        checkpointing = materials.settings.gradient_checkpointing
        self.network = two_tower_generator(materials.embeddings, materials.sizes, gradient_checkpointing=checkpointing)

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        if config.tying == "all":
            raise ValueError(
                "generator 'two-tower' reads the text once in each direction, and a discriminator reads it in both at once, so "
                "they cannot share all weights as tying 'all' asks; set tying = 'embeddings', or generator = 'mlm'"
            )
        if config.algorithm == "two-stage" and config.copy_weights:
            raise ValueError(
                "algorithm 'two-stage' copies the generator into the discriminator, and a 'two-tower' generator is two encoders "
                "that each see one direction; set copy_weights = false, or generator = 'mlm'"
            )

    def count(self, batch: CorruptedBatch) -> int:
        return int(maskable_positions(batch.tokens).sum())

    def propose(self, batch: CorruptedBatch, randomness: Randomness) -> Proposal:
        tokens, positions, maskable = batch.tokens, batch.masked_positions, maskable_positions(batch.tokens)
        states = gather_positions(self.network.encoder(tokens.input_ids, *context_of(tokens)), maskable)
        logits, targets, chosen = self.head(states), tokens.input_ids[maskable], positions[maskable]
        masked_logits, originals = logits[chosen], targets[chosen]
        sampled_ids = self._sample(batch, randomness, masked_logits, originals)
        loss = masked_token_loss(logits, targets)
        return Proposal(loss, logits, targets, masked_logits, originals, sampled_ids, states[chosen])


class FixedGenerator(Generator):
    """Proposes from one distribution whatever the text says. It has no weights; its loss is reported and moves nothing."""

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        what = f"generator '{config.generator}' has no weights"
        if config.tying in ("all", "gradient-disentangled"):
            raise ValueError(f"{what} for tying '{config.tying}' to share; set tying = 'embeddings', or generator = 'mlm'")
        if config.algorithm != "joint":
            raise ValueError(f"{what} for algorithm '{config.algorithm}' to train; set algorithm = 'joint', or generator = 'mlm'")
        if config.generator_checkpoint is not None:
            raise ValueError(f"{what} to fill from generator_checkpoint; leave that out, or set generator = 'mlm'")
        if config.freeze_generator_at is not None:
            raise ValueError(f"{what} to freeze; leave out freeze_generator_at, or set generator = 'mlm'")
        if config.freeze_discriminator_at is not None:
            raise ValueError(
                f"{what}, so with the discriminator frozen nothing is trained; leave out freeze_discriminator_at, and end the "
                "run by train.max_steps"
            )

    @abc.abstractmethod
    def log_probabilities(self, device: torch.device) -> Float[Tensor, "V"]:
        """Of each word."""

    def networks(self) -> dict[str, Network]:
        return {}

    def count(self, batch: CorruptedBatch) -> int:
        return batch.num_targets

    def propose(self, batch: CorruptedBatch, randomness: Randomness) -> Proposal:
        originals = batch.tokens.input_ids[batch.masked_positions]
        each = self.log_probabilities(originals.device)
        logits = each.expand(len(originals), -1)
        sampling = self.config.sampling
        if sampling.cuts:
            sampled_ids = sample_replacements(batch, sampling.drawn_from(logits, originals), randomness, sampling.sampler())
        else:
            drawn_from = torch.log_softmax(each / sampling.temperature, 0)
            sampled_ids = sample_replacements(batch, logits, randomness, lambda _, uniforms: sample_fixed(drawn_from, uniforms))
        draws = batch.target_draws
        losses = -each[originals] if draws is None else -each[originals] * draws
        return Proposal(LossTerm(losses.sum(), self.count(batch)), logits, originals, logits, originals, sampled_ids, None)


class UniformGenerator(FixedGenerator):
    """Every word of the vocabulary with equal probability, special tokens included, as in the released code."""

    def __init__(self, config: RTDConfig, materials: Materials) -> None:
        super().__init__(config)
        self._size = materials.settings.vocabulary.size

    def modules(self) -> dict[str, nn.Module]:
        return {}

    def log_probabilities(self, device: torch.device) -> Float[Tensor, "V"]:
        return torch.full((self._size,), -math.log(self._size), device=device)

    def initial_loss(self) -> float:
        """ln V, and it stays that."""
        return math.log(self._size)


class UnigramGenerator(FixedGenerator):
    """Words as frequent as in the training split, each counted once more than it occurs, so that none is impossible.

    Reference: Clark et al. 2020, section 3.2: the generator "unigram" of figure 3, the weakest there.
    """

    def __init__(self, config: RTDConfig, materials: Materials) -> None:
        super().__init__(config)
        vocabulary = materials.settings.vocabulary
        self._known = vocabulary.token_counts is not None
        self._table = FrequencyTable(vocabulary.size, vocabulary.token_counts)

    def prepare(self) -> None:
        if not self._known:
            raise ConfigError(
                "generator 'unigram' needs how often each word occurs in the training split, and no data set is at hand",
                hint="give a run or a data set, or set objective.generator = 'mlm'",
            )

    def modules(self) -> dict[str, nn.Module]:
        return {"generator_frequencies": self._table}

    def log_probabilities(self, device: torch.device) -> Float[Tensor, "V"]:
        return self._table.log_probabilities

    def initial_loss(self) -> float:
        """The entropy of the distribution: the mean loss over text in which words are as frequent."""
        return float(torch.special.entr(self._table.log_probabilities.double().exp()).sum())


class FrequencyTable(nn.Module):
    """Log-probabilities of words by their counts, each plus one; saved with the checkpoint, which fills it where none are given.

    Attributes:
        log_probabilities: (V,), float32.
    """

    log_probabilities: Tensor

    def __init__(self, size: int, counts: Int[Tensor, "V"] | None) -> None:
        super().__init__()
        smoothed = torch.ones(size, dtype=torch.float64) if counts is None else counts.double() + 1
        self.register_buffer("log_probabilities", (smoothed / smoothed.sum()).log().float())
