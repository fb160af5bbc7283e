"""The contract between an objective and the loop."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor, nn

from discern.corruption.randomness import Randomness
from discern.model.config import ModelConfig
from discern.model.network import Network
from discern.objectives.config import ObjectiveConfig
from discern.types import CorruptedBatch, SpecialTokens, StepOutput, TokenBatch


@dataclass(frozen=True)
class Phase:
    """A stretch of training with its own trainable networks and optimizer.

    Attributes:
        name: as the journal calls it.
        steps: how many updates it lasts.
        trains: names of the networks whose parameters move; None: all.
        start: called once when the phase begins (not when it is resumed), to copy weights for instance.
        fresh_optimizer: its moments begin at zero; False: those of the phase before go on, where weights still move.
        holds: names of the networks that stay as they are, even what they share with one that moves.
        own_schedule: the learning rate rises and falls within the phase, as though it were a run by itself.
        begins: the step that it begins at.
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
    """What an objective needs to know of the tokenizer, and of the text that it is trained on.

    Attributes:
        size: V.
        special: ids of the special tokens.
        token_counts: (V,) how often each id occurs in the training split, int64; None where that isn't known.
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


class Evaluator(abc.ABC):
    """Gathers observations over held-out rows; the figures don't depend on how the rows were batched."""

    @abc.abstractmethod
    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        """Take in one batch."""

    @abc.abstractmethod
    def merge(self, other: Evaluator) -> None:
        """Take in what another rank gathered."""

    @abc.abstractmethod
    def compute(self) -> dict[str, float]:
        """Figures by name: losses in nats, everything else in 0-1."""


class Objective(nn.Module, abc.ABC):
    """What to corrupt and what to predict. Owns its networks; knows nothing of optimizers, ranks or files.

    A subclass is final, stands in one file and has one line in the registry. It takes `(config, settings)` and leaves
    its parameters uninitialised until `initialise` is called.
    """

    Config: ClassVar[type[ObjectiveConfig]]

    @abc.abstractmethod
    def initialise(self, seed: int) -> None:
        """Fill every parameter, as a function of the seed alone."""

    @abc.abstractmethod
    def corrupt(self, batch: TokenBatch, randomness: Randomness) -> CorruptedBatch:
        """Choose positions; runs no network."""

    @abc.abstractmethod
    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        """How many items each loss term sums over, known before any forward pass.

        In training, terms may come and go with the phase, by what `requires_grad` says.
        """

    @abc.abstractmethod
    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        """Sums by name, and observations for evaluation and diagnosis."""

    @abc.abstractmethod
    def networks(self) -> dict[str, Network]:
        """Encoder and head by name; the first is what export takes by default."""

    @abc.abstractmethod
    def evaluator(self) -> Evaluator:
        """An empty collector of this objective's held-out figures."""

    @abc.abstractmethod
    def initial_loss(self) -> float:
        """The loss in nats that an untrained network should have: evenly spread predictions."""

    def phases(self, max_steps: int) -> list[Phase]:
        """The stretches of training, whose steps sum to `max_steps`."""
        return [Phase("train", max_steps)]

    def carry_state(self) -> dict[str, Tensor]:
        """What lives from step to step besides parameters; saved with the checkpoint."""
        return {}

    def load_carry_state(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `carry_state` gave."""
        if state:
            raise ValueError(f"{type(self).__name__} carries no state, but was given {sorted(state)}")
