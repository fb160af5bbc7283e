"""How generator and discriminator are trained: what moves when, and what the generator learns from."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from discern.errors import ConfigError
from discern.model.network import Network
from discern.objectives.base import Phase
from discern.objectives.generator import Generator, Proposal
from discern.objectives.rtd_config import RTDConfig
from discern.types import CorruptedBatch, LossTerm

Copy = Callable[[], None]
"""Makes the discriminator begin where the generator stands."""


@dataclass(frozen=True)
class GeneratorLoss:
    """What the generator's part of a step adds to the loss, and what is logged of it.

    Attributes:
        terms: sums by name; their names and counts are those of `Algorithm.counts`.
        figures: means that are logged and not trained on.
    """

    terms: Mapping[str, LossTerm]
    figures: Mapping[str, LossTerm] = field(default_factory=dict)


class Algorithm(abc.ABC):
    """Decides which network moves at which step, and what the generator is rewarded for.

    Attributes:
        apart: the networks never move together, so they share nothing that both move; what `tying` names is copied when one
            takes over.
        needs_rewards: the generator learns from the discriminator's judgement.
    """

    apart: ClassVar[bool] = False
    needs_rewards: ClassVar[bool] = False

    def __init__(self, config: RTDConfig, generator: Generator) -> None:
        self.config = config
        self.generator = generator

    @classmethod
    @abc.abstractmethod
    def check(cls, config: RTDConfig) -> None:
        """Raise a ValueError where other settings don't go with this algorithm; it says why and what to set."""

    @abc.abstractmethod
    def phases(self, max_steps: int, copy: Copy) -> list[Phase]:
        """The stretches of training.

        Raises:
            ConfigError: they don't fit into `max_steps`.
        """

    def modules(self) -> dict[str, nn.Module]:
        """What it trains along with the generator, by name."""
        return {}

    def generator_networks(self) -> dict[str, Network]:
        """The generator's network, with what is trained along with it."""
        companions = tuple(self.modules().values())
        return {name: replace(network, companions=companions) for name, network in self.generator.networks().items()}

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        """How many items each of the generator's terms sums over."""
        return {"generator": self.generator.count(batch)}

    def generator_loss(self, proposal: Proposal, weight: float, rewards: Float[Tensor, "M"] | None) -> GeneratorLoss:
        """What the generator learns from.

        Args:
            weight: of the generator's loss at this step.
            rewards: the discriminator's loss at each chosen position, detached; None unless the algorithm `needs_rewards`.
        """
        return GeneratorLoss({"generator": replace(proposal.loss, weight=weight)})

    def initial_loss(self) -> float:
        """Weighted sum of the generator's terms before anything is learned, in nats."""
        return self.config.generator_weight * self.generator.initial_loss()

    def carry_state(self) -> dict[str, Tensor]:
        """What must be saved with the checkpoint besides weights."""
        return {}

    def load_carry_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Put back what `carry_state` gave."""


class Joint(Algorithm):
    """Both networks together from step 0, the generator by maximum likelihood; either may be frozen at some step.

    Reference: Clark et al. 2020, section 2.
    """

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        check_freezing(config)

    def phases(self, max_steps: int, copy: Copy) -> list[Phase]:
        return phases_with_freezing(self.config, max_steps)


def check_freezing(config: RTDConfig) -> None:
    """Raise a ValueError where a frozen network would move all the same, through what it shares."""
    freezes = config.freeze_generator_at is not None or config.freeze_discriminator_at is not None
    if config.generator_warmup_steps and (freezes or config.generator in ("uniform", "unigram") or config.tying == "all"):
        reason = "a network is frozen later on" if freezes else f"generator '{config.generator}' with tying '{config.tying}'"
        raise ValueError(
            f"generator_warmup_steps is {config.generator_warmup_steps}, which does not go with what else is set: {reason}; "
            "the warm-up is of a generator with weights that the discriminator does not use. Set generator_warmup_steps = 0"
        )
    if config.freeze_generator_at is not None and config.freeze_discriminator_at is not None:
        raise ValueError(
            f"freeze_generator_at is {config.freeze_generator_at} and freeze_discriminator_at {config.freeze_discriminator_at}: "
            "with both frozen nothing is trained; leave one of them out, and end the run by train.max_steps"
        )
    if config.freeze_generator_at is not None and config.tying not in ("none", "gradient-disentangled"):
        raise ValueError(
            f"freeze_generator_at is {config.freeze_generator_at}, but with tying '{config.tying}' the discriminator goes on "
            "moving what the generator reads; set tying = 'none' or 'gradient-disentangled'"
        )
    if config.freeze_discriminator_at is not None and config.tying != "none":
        raise ValueError(
            f"freeze_discriminator_at is {config.freeze_discriminator_at}, but with tying '{config.tying}' the generator goes on "
            "moving what the discriminator reads; set tying = 'none'"
        )


def phases_with_freezing(config: RTDConfig, max_steps: int) -> list[Phase]:
    """One phase, or two: where a network is frozen on the way, the other one's optimizer goes on; after a warm-up of the
    generator both networks begin with an optimizer and a schedule of their own.

    Raises:
        ConfigError: the warm-up leaves no step to train both.
    """
    warmup = config.generator_warmup_steps
    if warmup:
        if warmup >= max_steps:
            raise ConfigError(
                f"objective.generator_warmup_steps {warmup} leaves nothing of train.max_steps {max_steps} for the discriminator",
                hint="set it lower, or train.max_steps higher",
            )
        held = frozenset({"discriminator"})
        first = Phase("generator warm-up", warmup, frozenset({"generator"}), holds=held, own_schedule=True)
        return [first, Phase("train", max_steps - warmup, own_schedule=True, begins=warmup)]
    stops = {"discriminator": config.freeze_generator_at, "generator": config.freeze_discriminator_at}
    for left, step in stops.items():
        if step is not None and step < max_steps:
            alone = Phase(f"{left} alone", max_steps - step, frozenset({left}), fresh_optimizer=False, begins=step)
            return [Phase("train", step), alone] if step else [alone]
    return [Phase("train", max_steps)]


@torch.no_grad()
def copy_matching(source: nn.Module, target: nn.Module, leaving_out: str | None = None) -> None:
    """Give each parameter of `target` the value of the one of that name in `source`.

    Args:
        leaving_out: beginning of the names that stay as they are.
    """
    values = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        if leaving_out is None or not name.startswith(leaving_out):
            parameter.copy_(values[name])
