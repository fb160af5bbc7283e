"""An encoder with its head, as export, evaluation and the model card see it."""

from __future__ import annotations

from dataclasses import dataclass

from discern.model.encoder import Encoder
from discern.model.heads import MaskedLMHead, ReplacedTokenHead


@dataclass(frozen=True)
class Network:
    """One of an objective's networks.

    Attributes:
        encoder: ids to hidden states.
        head: what stands on it.
    """

    encoder: Encoder
    head: MaskedLMHead | ReplacedTokenHead
