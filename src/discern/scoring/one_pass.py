"""Scores that one forward pass over the text as it stands gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

import torch

from discern.model.heads import EnergyHead, ReplacedTokenHead, TokenHead
from discern.model.network import Network
from discern.scoring.base import Method, Piece, ScoringModel
from discern.scoring.rows import batches, device_of, framed
from discern.types import SpecialTokens


@final
class Energies(Method):
    """Minus the energy of each token: log p(x_t | all the others), not normalised.

    The noise distribution and the odds of noise, which the loss adds to the energy in training, have no part in it.

    Reference: Clark et al. 2020 (Electric), section 2.1 and 4.2: the pseudo-log-likelihood of a text is -sum E(x)_t.
    """

    quantity: ClassVar[str] = "unnormalized pseudo-log-likelihood (minus the energies)"

    def __init__(self, network: Network, special: SpecialTokens) -> None:
        self._network, self._special = network, special

    @classmethod
    def lacks(cls, model: ScoringModel) -> str | None:
        return None if _with_head(model, EnergyHead) else "an energy model, as objective 'electric' trains"

    @classmethod
    def of(cls, model: ScoringModel) -> Method:
        return cls(_with_head(model, EnergyHead)[0], model.special)

    def token_scores(self, pieces: Sequence[Piece]) -> list[list[float]]:
        return minus_numbers(self._network, self._special, pieces)


@final
class ReplacedTokenOdds(Method):
    """Log-odds of each token being original: log P(original) - log P(replaced).

    At the optimum that is log p - log q - log(1 - p) + log((1 - a + a q) / a), with p and q the probabilities of x_t in the
    text and by the generator, and a the share of the tokens that the generator drew one for. A token that the generator likes
    scores lower than one that is as likely and surprises it, and every further token adds about log((1 - a) / a). So it
    compares sentences that differ in few tokens; `inversion` takes q and a out again. Under objective 'rtd-masked-only' the
    optimum is log p - log(1 - p), without q.

    Reference: Clark et al. 2020, section 2.
    """

    quantity: ClassVar[str] = "log-odds of the tokens being original"

    def __init__(self, network: Network, special: SpecialTokens) -> None:
        self._network, self._special = network, special

    @classmethod
    def lacks(cls, model: ScoringModel) -> str | None:
        return None if _with_head(model, ReplacedTokenHead) else "a discriminator, as objective 'rtd' trains"

    @classmethod
    def of(cls, model: ScoringModel) -> Method:
        return cls(_with_head(model, ReplacedTokenHead)[0], model.special)

    def token_scores(self, pieces: Sequence[Piece]) -> list[list[float]]:
        return minus_numbers(self._network, self._special, pieces)


@torch.inference_mode()
def minus_numbers(network: Network, special: SpecialTokens, pieces: Sequence[Piece]) -> list[list[float]]:
    """The negated number that the head gives each wanted token: both heads count what is unlikely upwards."""
    found: list[list[float]] = [[] for _ in pieces]
    for batch in batches([len(piece.ids) + 2 for piece in pieces]):
        numbers = network.token_logits(*framed([pieces[number].ids for number in batch], special, device_of(network)))
        for number, row in zip(batch, (-numbers.float()).tolist(), strict=True):
            found[number] = [row[place + 1] for place in pieces[number].wanted]
    return found


def _with_head(model: ScoringModel, head: type[TokenHead]) -> list[Network]:
    return [network for network in model.networks.values() if isinstance(network.head, head)]
