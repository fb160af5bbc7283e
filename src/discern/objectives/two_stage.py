"""The generator first, then the discriminator, which begins as a copy of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from discern.errors import ConfigError
from discern.objectives.algorithm import Algorithm, Copy
from discern.objectives.base import Phase
from discern.objectives.generator import Generator
from discern.objectives.rtd_config import RTDConfig


class TwoStage(Algorithm):
    """The generator alone, by maximum likelihood; then it stays as it is, and the discriminator alone learns from its samples.

    The two never move together, so nothing is shared: the discriminator gets a copy of what `tying` names when it takes
    over, and of the whole encoder with `copy_weights`. Its optimizer begins anew. With tying 'gradient-disentangled' it goes
    on reading the generator's embeddings, which no longer move, and learns the difference.

    When a run is extended, the switch stays where it was.

    Reference: Clark et al. 2020, section 3.2, figure 3 right ("two-stage").
    """

    apart: ClassVar[bool] = True

    def __init__(self, config: RTDConfig, generator: Generator) -> None:
        super().__init__(config, generator)
        self._switch: int | None = None

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        if config.tying == "all":
            raise ValueError(
                "algorithm 'two-stage' freezes the generator while the discriminator learns, but with tying 'all' they are one "
                "encoder; set tying = 'embeddings' (the discriminator begins as a copy all the same)"
            )
        if config.copy_weights and (config.generator_size != 1 or config.generator_depth != 1):
            raise ValueError(
                "algorithm 'two-stage' copies the generator's weights into the discriminator, which needs the same sizes, but "
                f"generator_size is {config.generator_size:g} and generator_depth {config.generator_depth:g}; set generator_size "
                "= 1.0 and generator_depth = 1.0, or copy_weights = false for a discriminator that begins at random"
            )
        if config.generator_warmup_steps:
            raise ValueError(
                "algorithm 'two-stage' trains the generator first as it is; leave out generator_warmup_steps, or set algorithm = "
                "'joint'"
            )
        if config.freeze_generator_at is not None or config.freeze_discriminator_at is not None:
            raise ValueError(
                "algorithm 'two-stage' freezes the generator by itself, when its two_stage_steps are over; leave out "
                "freeze_generator_at and freeze_discriminator_at, or set algorithm = 'joint'"
            )

    def phases(self, max_steps: int, copy: Copy) -> list[Phase]:
        steps = self.config.two_stage_steps
        first = self._switch
        if first is None:
            first = round(steps * max_steps) if steps < 1 else round(steps)
            if not 0 < first < max_steps:
                raise ConfigError(
                    f"objective.two_stage_steps = {steps:g} gives the generator {first} of train.max_steps {max_steps}, "
                    "and the discriminator needs some too",
                    hint="set objective.two_stage_steps to a fraction like 0.5, or train.max_steps higher",
                )
        self._switch = first
        generator = Phase("generator", min(first, max_steps), frozenset({"generator"}))
        if first >= max_steps:
            return [generator]
        return [generator, Phase("discriminator", max_steps - first, frozenset({"discriminator"}), copy, begins=first)]

    def carry_state(self) -> dict[str, Tensor]:
        return {} if self._switch is None else {"two_stage_switch": torch.tensor([self._switch])}

    def load_carry_state(self, state: Mapping[str, Tensor]) -> None:
        if "two_stage_switch" in state:
            self._switch = int(state["two_stage_switch"])
