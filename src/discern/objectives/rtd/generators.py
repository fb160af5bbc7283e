"""What proposes replacements: a masked language model, two towers, or a fixed distribution."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from discern.corruption.randomness import Randomness
from discern.corruption.sampling import sample_fixed
from discern.errors import ConfigError
from discern.models.base import Encoder, Network
from discern.models.config import ModelConfig
from discern.models.embeddings import WordTable
from discern.models.heads import LanguageHead
from discern.models.two_tower import two_tower_generator
from discern.objectives.base import BuildSettings
from discern.objectives.losses import DenseLogits, WordLogits, word_logits
from discern.objectives.masked import sample_replacements
from discern.objectives.rtd.config import RTDConfig
from discern.objectives.two_networks import masked_lm
from discern.types import CorruptedBatch, LossTerm, Places, PlacesOf


@dataclass(frozen=True)
class GeneratorInputs:
    """What a generator is built from.

    Attributes:
        settings: vocabulary, and whether activations are recomputed.
        sizes: sizes of the generator.
        embeddings: the embeddings that it reads.
        encoder: the discriminator's encoder if the two networks are one; otherwise None.
    """

    settings: BuildSettings
    sizes: ModelConfig
    embeddings: WordTable
    encoder: Encoder | None


@dataclass(frozen=True)
class Prediction:
    """A generator's distributions over the vocabulary.

    Attributes:
        logits: at the N positions of the loss.
        targets: (N,) the original tokens there.
        places: the N positions, which may count more than once.
        masked_logits: at the M chosen positions, with gradient; the same as `logits` if the loss is taken there.
        chosen: the M positions.
        originals: (M,) the original tokens there.
        states: (M, D) the hidden states behind `masked_logits`; None for a generator without weights.
    """

    logits: WordLogits
    targets: Int[Tensor, "N"]
    places: Places
    masked_logits: WordLogits
    chosen: Places
    originals: Int[Tensor, "M"]
    states: Float[Tensor, "M D"] | None


class Generator(abc.ABC):
    """Proposes a token for each chosen position.

    Not a module itself: the objective registers its `modules`, under names that every checkpoint has.

    Attributes:
        everywhere: whether its head runs at every position, rather than at the chosen ones only.
    """

    everywhere: ClassVar[bool] = False

    def __init__(self, config: RTDConfig) -> None:
        self.config = config

    @classmethod
    @abc.abstractmethod
    def check(cls, config: RTDConfig) -> None:
        """Check that the other settings are compatible with this generator.

        Raises:
            ValueError: they are not; the message says why and what to set.
        """

    @abc.abstractmethod
    def modules(self) -> dict[str, nn.Module]:
        """The modules that hold its weights and tables, by name."""

    @abc.abstractmethod
    def networks(self) -> dict[str, Network]:
        """Its encoder and head under the name 'generator'; empty if it has none."""

    @abc.abstractmethod
    def count(self, batch: CorruptedBatch) -> int:
        """Number of items that its loss sums over."""

    @abc.abstractmethod
    def predict(self, batch: CorruptedBatch) -> Prediction:
        """Run the generator once; its loss and its samples come from the same logits."""

    def loss(self, prediction: Prediction, weight: float) -> LossTerm:
        """Cross-entropy of the original tokens, summed."""
        return prediction.logits.loss(prediction.targets, prediction.places, weight)

    def reads(self) -> frozenset[PlacesOf]:
        """The places of a batch that `predict` needs as an index."""
        return frozenset({"chosen"})

    def sample(self, prediction: Prediction, batch: CorruptedBatch, randomness: Randomness) -> Int[Tensor, "M"]:
        """A token for each chosen position, drawn from `masked_logits`; no gradient."""
        sample = self.config.sampling_at(randomness.step).sample
        return sample_replacements(batch, prediction.masked_logits, randomness, sample, prediction.originals)

    @abc.abstractmethod
    def initial_loss(self) -> float:
        """Expected loss before any training, in nats."""

    def prepare(self) -> None:  # noqa: B027
        """Check before training that nothing is missing.

        Raises:
            ConfigError: something is missing.
        """


class NetworkGenerator(Generator):
    """A generator with weights: an encoder, and a head over the vocabulary.

    Attributes:
        network: the encoder with its head.
    """

    network: Network

    def modules(self) -> dict[str, nn.Module]:
        return {"generator": self.network.encoder, "generator_head": self.network.head}

    def networks(self) -> dict[str, Network]:
        return {"generator": self.network}

    @property
    def head(self) -> LanguageHead:
        """The head over the vocabulary."""
        assert isinstance(self.network.head, LanguageHead)
        return self.network.head

    def initial_loss(self) -> float:
        """ln V."""
        return math.log(self.head.word_embeddings.num_embeddings)


class MaskedLMGenerator(NetworkGenerator):
    """A masked language model: reads [MASK] at the chosen positions and predicts the original tokens there.

    Reference: Clark et al. 2020, section 2.
    """

    def __init__(self, config: RTDConfig, inputs: GeneratorInputs) -> None:
        super().__init__(config)
        if inputs.encoder is None:
            self.network = Network(*masked_lm(inputs.embeddings, inputs.sizes, inputs.settings))
        else:
            self.network = Network(inputs.encoder, inputs.encoder.language_head())

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        pass

    def count(self, batch: CorruptedBatch) -> int:
        return batch.num_targets

    def predict(self, batch: CorruptedBatch) -> Prediction:
        tokens, chosen = batch.tokens, batch.places("chosen")
        # The head is the most expensive product, so it runs on the chosen positions alone.
        states = chosen.gather(self.network.encoder(batch.masked_ids, *tokens.context))
        logits, originals = word_logits(self.head, states), chosen.gather(tokens.input_ids)
        return Prediction(logits, originals, chosen, logits, chosen, originals, states)


class TwoTowerGenerator(NetworkGenerator):
    """Two language models over the clean text, one in each direction: each token is predicted from all the others.

    No [MASK] is needed, so the loss is taken at every maskable position, wherever samples are drawn.

    Reference: Clark et al. 2020 (Electric), section 2.3, and its table of results for "ELECTRA-TT".
    """

    everywhere: ClassVar[bool] = True

    def __init__(self, config: RTDConfig, inputs: GeneratorInputs) -> None:
        super().__init__(config)
        checkpointing = inputs.settings.gradient_checkpointing
        self.network = two_tower_generator(inputs.embeddings, inputs.sizes, gradient_checkpointing=checkpointing)

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
        return int(batch.mask("words").sum())

    def reads(self) -> frozenset[PlacesOf]:
        return frozenset({"chosen", "words"})

    def predict(self, batch: CorruptedBatch) -> Prediction:
        tokens, words = batch.tokens, batch.places("words")
        states = words.gather(self.network.encoder(tokens.input_ids, *tokens.context))
        logits, targets, chosen = word_logits(self.head, states), words.gather(tokens.input_ids), batch.places("chosen")
        at = chosen.among(words)
        masked_logits, originals = logits.select(at), targets.index_select(0, at)
        return Prediction(logits, targets, words, masked_logits, chosen, originals, states.index_select(0, at))


class FixedGenerator(Generator):
    """Proposes tokens from one distribution, regardless of the text. It has no weights; its loss is only reported."""

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        what = f"generator '{config.generator}' has no weights"
        if config.tying in ("all", "gradient-disentangled"):
            raise ValueError(f"{what} for tying '{config.tying}' to share; set tying = 'embeddings', or generator = 'mlm'")
        if config.masking == "entropy":
            raise ValueError(
                f"{what}, so its predictions are equally uncertain everywhere, and masking 'entropy' would choose evenly; set "
                "masking = 'uniform', or generator = 'mlm'"
            )
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
        """The log-probability of each word."""

    def networks(self) -> dict[str, Network]:
        return {}

    def count(self, batch: CorruptedBatch) -> int:
        return batch.num_targets

    def predict(self, batch: CorruptedBatch) -> Prediction:
        chosen = batch.places("chosen")
        originals = chosen.gather(batch.tokens.input_ids)
        logits = DenseLogits(self.log_probabilities(originals.device).expand(len(originals), -1))
        return Prediction(logits, originals, chosen, logits, chosen, originals, None)

    def loss(self, prediction: Prediction, weight: float) -> LossTerm:
        """As for every generator; the logits are log-probabilities already, so no softmax is needed."""
        targets, places = prediction.targets, prediction.places
        losses = -self.log_probabilities(targets.device)[targets]
        return LossTerm(places.weigh(losses).sum(), places.count, weight)

    def sample(self, prediction: Prediction, batch: CorruptedBatch, randomness: Randomness) -> Int[Tensor, "M"]:
        sampling = self.config.sampling_at(randomness.step)
        if sampling.cuts:
            return super().sample(prediction, batch, randomness)
        # One distribution for all positions: no matrix of M x V is needed.
        drawn_from = torch.log_softmax(self.log_probabilities(prediction.targets.device) / sampling.temperature, 0)
        logits = prediction.masked_logits
        return sample_replacements(batch, logits, randomness, lambda _, uniforms: sample_fixed(drawn_from, uniforms))


class UniformGenerator(FixedGenerator):
    """Every word of the vocabulary with equal probability, special tokens included, as in the released code."""

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        super().check(config)
        if config.top_p < 1:
            raise ValueError(
                "generator 'uniform' proposes all words with equal probability, and top_p below 1 would exclude those with the "
                "highest ids; leave out top_p, or set generator = 'unigram'"
            )

    def __init__(self, config: RTDConfig, inputs: GeneratorInputs) -> None:
        super().__init__(config)
        self._size = inputs.settings.vocabulary.size

    def modules(self) -> dict[str, nn.Module]:
        return {}

    def log_probabilities(self, device: torch.device) -> Float[Tensor, "V"]:
        return torch.full((self._size,), -math.log(self._size), device=device)

    def initial_loss(self) -> float:
        """ln V, throughout the training."""
        return math.log(self._size)


class UnigramGenerator(FixedGenerator):
    """Words with their frequencies in the training split; one is added to each count, so that no word is impossible.

    Reference: Clark et al. 2020, section 3.2: the generator "unigram" of figure 3, the weakest there.
    """

    def __init__(self, config: RTDConfig, inputs: GeneratorInputs) -> None:
        super().__init__(config)
        vocabulary = inputs.settings.vocabulary
        self._known = vocabulary.token_counts is not None
        self._table = FrequencyTable(vocabulary.size, vocabulary.token_counts)

    def prepare(self) -> None:
        if not self._known:
            raise ConfigError(
                "generator 'unigram' needs to know how often each word occurs in the training split, but there is no data set",
                hint="give a run or a data set, or set objective.generator = 'mlm'",
            )

    def modules(self) -> dict[str, nn.Module]:
        return {"generator_frequencies": self._table}

    def log_probabilities(self, device: torch.device) -> Float[Tensor, "V"]:
        return self._table.log_probabilities

    def initial_loss(self) -> float:
        """The entropy of the distribution: its mean loss over text with these word frequencies."""
        return float(torch.special.entr(self._table.log_probabilities.double().exp()).sum())


class FrequencyTable(nn.Module):
    """Log-probabilities of words by their counts, each plus one. They are saved with the checkpoint and restored from it.

    Attributes:
        log_probabilities: (V,), float32.
    """

    log_probabilities: Tensor

    def __init__(self, size: int, counts: Int[Tensor, "V"] | None) -> None:
        super().__init__()
        smoothed = torch.ones(size, dtype=torch.float64) if counts is None else counts.double() + 1
        self.register_buffer("log_probabilities", (smoothed / smoothed.sum()).log().float())
