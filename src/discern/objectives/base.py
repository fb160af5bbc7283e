"""The contract between an objective and the training loop."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn

from discern.corruption.randomness import Randomness, key_of
from discern.models.base import Network, initialize
from discern.models.config import ModelConfig
from discern.objectives.config import ObjectiveConfig
from discern.objectives.losses import TokenEntropies, WordLogits, entropies_of, entropy_sums
from discern.types import CorruptedBatch, Places, PlacesOf, SpecialTokens, StepOutput, TokenBatch

ConfigT = TypeVar("ConfigT", bound=ObjectiveConfig)


@dataclass(frozen=True)
class Phase:
    """A stretch of training with its own trainable networks and optimizer.

    Attributes:
        name: as written to the metrics log.
        steps: number of updates.
        trains: names of the networks whose parameters are updated; None: all of them.
        start: called once when the phase begins, but not when it is resumed; copies weights, for instance.
        fresh_optimizer: whether the optimizer's moments start at zero; False keeps those of the previous phase for the
            weights that are still trained.
        holds: names of the networks that stay unchanged, including the parameters they share with a trained network.
        own_schedule: whether the learning rate warms up and decays within the phase, as in a run of its own.
        begins: step at which the phase begins.
    """

    name: str
    steps: int
    trains: frozenset[str] | None = None
    start: Callable[[], None] | None = None
    fresh_optimizer: bool = True
    holds: frozenset[str] = frozenset()
    own_schedule: bool = False
    begins: int = 0


@dataclass(frozen=True)
class Vocabulary:
    """What an objective needs to know about the tokenizer and the training text.

    Attributes:
        size: V.
        special: ids of the special tokens.
        token_counts: (V,) occurrences of each id in the training split, int64; None if unknown.
    """

    size: int
    special: SpecialTokens
    token_counts: Int[Tensor, "V"] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class BuildSettings:
    """What an objective's networks are built from, besides the objective's own settings."""

    model: ModelConfig
    vocabulary: Vocabulary
    gradient_checkpointing: bool = False


@dataclass(frozen=True)
class ForwardPass:
    """One run of a network over all positions of the rows, once per step; the unit in which an objective reports its cost.

    Attributes:
        head_share: fraction of the positions that the head runs on.
        trains: whether a backward pass follows; False for a frozen generator that is only sampled from.
        query_share: fraction of the positions that the encoder's query stream runs on; 0 if it has none.
        remembered: positions of earlier rows that each row attends to.
    """

    network: Network
    head_share: float
    trains: bool = True
    query_share: float = 0.0
    remembered: int = 0


@dataclass(frozen=True)
class WordTargets:
    """What an encoder sees at the positions whose original words it predicts; this determines the loss of the best guess.

    Attributes:
        metric: name of its held-out loss.
        vocabulary: the words, with their counts if known.
        shown: fraction of the chosen positions at which a word is visible; the others do not reveal anything.
        correct: fraction of these at which the visible word is the original; None: that of the samples, `sampled_accuracy`.
        hides_all: whether the masking leaves none of the chosen words visible.
    """

    metric: str
    vocabulary: Vocabulary
    shown: float = 0.0
    correct: float | None = 0.0
    hides_all: bool = False


class Evaluator(abc.ABC):
    """Collects observations over held-out rows; the metrics do not depend on how the rows were batched."""

    @abc.abstractmethod
    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        """Add one batch."""

    @abc.abstractmethod
    def merge(self, other: Evaluator) -> None:
        """Add what another rank collected."""

    @abc.abstractmethod
    def compute(self) -> dict[str, float]:
        """Metrics by name: losses in nats, everything else in 0-1."""


class Objective(nn.Module, abc.ABC):
    """What to corrupt and what to predict. Owns its networks; knows nothing of optimizers, ranks or files.

    Callers ask an objective what it can do (`networks`, `forward_passes`, `word_targets`, ...) and never which class it is.
    A subclass is registered with one line and takes `(config, settings)`; its parameters stay uninitialized until
    `initialize` is called."""

    Config: ClassVar[type[ObjectiveConfig]]

    @abc.abstractmethod
    def initialize(self, seed: int) -> None:
        """Fill every parameter, as a function of the seed alone."""

    @abc.abstractmethod
    def corrupt(self, batch: TokenBatch, randomness: Randomness) -> CorruptedBatch:
        """Choose the positions to corrupt; runs no network."""

    @property
    def corrupts_anywhere(self) -> bool:
        """Whether `corrupt` gives the same result on every device, bit for bit: it computes with integers, or exactly."""
        return False

    @abc.abstractmethod
    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        """Number of items that each loss term sums over, known before any forward pass.

        In training, the terms may differ between phases, depending on which parameters have `requires_grad`.
        """

    @abc.abstractmethod
    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        """Compute the loss terms by name, and observations for evaluation and diagnosis."""

    @abc.abstractmethod
    def networks(self) -> dict[str, Network]:
        """Encoder and head by name; `export` takes the first by default."""

    @abc.abstractmethod
    def evaluator(self) -> Evaluator:
        """An empty collector of this objective's held-out metrics."""

    def phases(self, max_steps: int) -> list[Phase]:
        """The phases of training, whose steps sum to `max_steps`."""
        return [Phase("train", max_steps)]

    def forward_passes(self, phase: Phase) -> list[ForwardPass]:
        """The network runs of one step of a phase.

        By default each network runs once, and networks that the phase does not train run forward only.
        """
        return [
            ForwardPass(network, self.head_share(network, phase), phase.trains is None or name in phase.trains)
            for name, network in self.networks().items()
        ]

    def head_share(self, network: Network, phase: Phase) -> float:
        """Fraction of the positions that a network's head runs on, averaged over the steps of a phase."""
        return 1.0

    def loss_weights(self) -> tuple[float, float] | None:
        """Weights of the losses 'generator' and 'discriminator', if the loss is their sum and they never change."""
        return None

    def word_targets(self) -> WordTargets | None:
        """The words that the first network predicts at chosen positions.

        None if it predicts none, or if the chosen words are not as frequent as those of the text.
        """
        return None

    def carry_state(self) -> dict[str, Tensor]:
        """State to keep from step to step in addition to the parameters; saved with the checkpoint."""
        return {}

    def reads(self) -> frozenset[PlacesOf]:
        """The places of a batch that `forward` needs as an index; they are found before the batch moves to a device."""
        return frozenset({"chosen"})

    def step_statistics(self, output: StepOutput) -> dict[str, Tensor]:
        """Sums over the rows of a batch, by name, that `update_state` needs for the whole step."""
        return {}

    def update_state(self, step: int, sums: Mapping[str, Tensor]) -> None:
        """Take note of a step after its forward passes. The sums may still be computed by a device: do not read them here.

        Args:
            sums: results of `step_statistics`, summed over all micro-batches and ranks.
        """

    def reset_memory(self) -> None:
        """Drop what is kept of earlier rows: from now on, the slots of the batch read from other places in the text."""

    def load_carry_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `carry_state` returned."""


class PretrainingObjective(Objective, Generic[ConfigT]):
    """An objective whose networks are built from a configuration and filled from a seed."""

    def __init__(self, config: ConfigT, settings: BuildSettings) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = settings.vocabulary
        self._model = settings.model
        self._masking = getattr(config, "masking", None)
        self.entropies = TokenEntropies(settings.vocabulary.size) if self._masking == "entropy" else None

    @property
    def corrupts_anywhere(self) -> bool:
        return self._masking in ("uniform", "whole-word")  # which compute with integers

    def initialize(self, seed: int) -> None:
        initialize(self, torch.Generator().manual_seed(key_of(seed, "weights")), self._model)

    def observed_entropies(self, logits: WordLogits, targets: Int[Tensor, "N"], places: Places) -> dict[str, Tensor]:
        """The observation that masking 'entropy' learns from, of the predictions at N positions; none without it."""
        if not self.training or self.entropies is None:
            return {}
        return {"entropy_sums": entropy_sums(logits.map(entropies_of), targets, self.vocabulary.size, places.draws)}

    def step_statistics(self, output: StepOutput) -> dict[str, Tensor]:
        sums = output.observations.get("entropy_sums")
        return {} if sums is None else {"entropies": sums}

    def update_state(self, step: int, sums: Mapping[str, Tensor]) -> None:
        if self.entropies is not None:
            self.entropies.update(step, sums["entropies"])

    def carry_state(self) -> dict[str, Tensor]:
        return {} if self.entropies is None else self.entropies.state()

    def load_carry_state(self, state: Mapping[str, Tensor]) -> None:
        if self.entropies is not None:
            self.entropies.load(state)
