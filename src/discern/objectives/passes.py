"""Which networks a training step runs, over how much: what an objective tells of its cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from discern.model.heads import LanguageHead
from discern.model.network import Network
from discern.objectives.base import Objective, Phase
from discern.objectives.config import MaskingConfig


@dataclass(frozen=True)
class Pass:
    """One network run over all positions of the rows, once a step.

    Attributes:
        head_share: of the positions that the head runs on.
        trains: backward too; False: forward only, as a frozen generator that is sampled from.
        query_share: of the positions that the encoder's query stream runs on; 0: there is none.
        remembered: positions of earlier rows that each row sees.
    """

    network: Network
    head_share: float
    trains: bool = True
    query_share: float = 0.0
    remembered: int = 0


@runtime_checkable
class TellsPasses(Protocol):
    """An objective whose steps are something else than each of its networks once, vocabulary heads at masked positions."""

    def passes(self, phase: Phase) -> list[Pass]:
        """What a step of the phase runs."""


def step_passes(objective: Objective, phase: Phase) -> list[Pass]:
    """What a step of a phase runs.

    An objective that doesn't tell is taken to run each network once: heads over the vocabulary at the masked positions, others
    everywhere, and networks that the phase does not train forward only.
    """
    if isinstance(objective, TellsPasses):
        return objective.passes(phase)
    found = []
    for name, network in objective.networks().items():
        trains = phase.trains is None or name in phase.trains
        found.append(Pass(network, head_share(objective, network, phase), trains))
    return found


def has_vocabulary(network: Network) -> bool:
    """Whether the network's head predicts words."""
    return any(isinstance(module, LanguageHead) for module in network.head.modules())


def head_share(objective: Objective, network: Network, phase: Phase) -> float:
    """Of the positions; where the mask probability changes over training, its mean over the steps of the phase."""
    config = getattr(objective, "config", None)
    if not isinstance(config, MaskingConfig) or not has_vocabulary(network):
        return 1.0
    # The change is linear, or none: a hundred points are exact to a hundredth of it.
    return sum(config.probability_at(phase.begins + step * phase.steps // 100) for step in range(100)) / 100
