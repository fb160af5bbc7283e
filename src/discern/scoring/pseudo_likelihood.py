"""Pseudo-log-likelihoods: the softmax probability of each token given the others, summed over the text."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from discern.model.heads import MaskedLMHead, TiedLMHead, gather_positions
from discern.model.network import Network
from discern.model.two_tower import TwoTowerEncoder
from discern.scoring.base import Method, Piece, ScoringModel
from discern.scoring.rows import batches, device_of, framed, log_probabilities, read
from discern.types import SpecialTokens


@dataclass(frozen=True)
class _Copy:
    """A piece with [MASK] in it, to be asked for one token.

    Attributes:
        piece: number of the piece.
        place: of the token that is asked for.
        hidden: places from the first that is masked to the last.
    """

    piece: int
    place: int
    hidden: range


class MaskedPseudoLikelihood(Method):
    """By a masked language model, in as many forward passes as the text has tokens. What is masked besides the token that
    is asked for, each subclass says.

    Args:
        temperature: divides the logits; 1: the network as it was trained.
    """

    def __init__(self, network: Network, special: SpecialTokens, temperature: float = 1.0) -> None:
        self._network, self._special, self._temperature = network, special, temperature

    @classmethod
    def lacks(cls, model: ScoringModel) -> str | None:
        return (
            None
            if _masked_lms(model)
            else "a masked language model, as objective 'mlm' trains, or 'rtd' beside the discriminator"
        )

    @classmethod
    def of(cls, model: ScoringModel) -> Method:
        return cls(_masked_lms(model)[0], model.special)

    @abc.abstractmethod
    def hidden(self, piece: Piece, place: int) -> range:
        """The places that are masked while the token at `place` is asked for; `place` is the first."""

    @torch.inference_mode()
    def token_scores(self, pieces: Sequence[Piece]) -> list[list[float]]:
        found: list[dict[int, float]] = [{} for _ in pieces]
        copies = [
            _Copy(number, place, self.hidden(piece, place)) for number, piece in enumerate(pieces) for place in piece.wanted
        ]
        for batch in batches([len(pieces[copy.piece].ids) + 2 for copy in copies]):
            asked = [copies[number] for number in batch]
            for copy, value in zip(asked, self._ask(pieces, asked), strict=True):
                found[copy.piece][copy.place] = value
        return [[by_place[place] for place in piece.wanted] for piece, by_place in zip(pieces, found, strict=True)]

    def _ask(self, pieces: Sequence[Piece], copies: Sequence[_Copy]) -> list[float]:
        """The log-probability of each copy's token."""
        device, mask_id = device_of(self._network), self._special.mask
        rows = [
            [mask_id if place in copy.hidden else token for place, token in enumerate(pieces[copy.piece].ids)] for copy in copies
        ]
        states = read(self._network.encoder, *framed(rows, self._special, device))
        places = torch.tensor([copy.place + 1 for copy in copies], device=device)
        at_places = states[torch.arange(len(copies), device=device), places]
        ids = [pieces[copy.piece].ids[copy.place] for copy in copies]
        return log_probabilities(self._network, at_places, ids, self._temperature).tolist()


@final
class PseudoLikelihood(MaskedPseudoLikelihood):
    """Each token masked in turn. Pieces of one rare word tell each other, so such words score too high.

    Reference: Salazar et al. 2020, "Masked language model scoring", section 2.
    """

    quantity: ClassVar[str] = "pseudo-log-likelihood"
    perplexity_name: ClassVar[str | None] = "pseudo_perplexity"

    def hidden(self, piece: Piece, place: int) -> range:
        return range(place, place + 1)


@final
class WordwisePseudoLikelihood(MaskedPseudoLikelihood):
    """Each token masked in turn together with what follows of its word: a word is told from left to right.

    Reference: Kauf and Ivanova 2023, "A better way to do masked language model scoring": PLL-word-l2r.
    """

    quantity: ClassVar[str] = "pseudo-log-likelihood, the rest of a word masked"

    def hidden(self, piece: Piece, place: int) -> range:
        end = place + 1
        while end < len(piece.ids) and not piece.word_starts[end]:
            end += 1
        return range(place, end)


@final
class TwoTowerLikelihood(Method):
    """By a left-to-right and a right-to-left model together, in one forward pass and without [MASK].

    Reference: Clark et al. 2020 (Electric), sections 2.3 and 4.2: "TwoTower".
    """

    quantity: ClassVar[str] = "pseudo-log-likelihood by the two-tower generator"

    def __init__(self, network: Network, special: SpecialTokens, temperature: float = 1.0) -> None:
        self._network, self._special, self._temperature = network, special, temperature

    @classmethod
    def lacks(cls, model: ScoringModel) -> str | None:
        return None if _two_towers(model) else "a two-tower generator, as objective 'electric' has"

    @classmethod
    def of(cls, model: ScoringModel) -> Method:
        return cls(_two_towers(model)[0], model.special)

    @torch.inference_mode()
    def token_scores(self, pieces: Sequence[Piece]) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in pieces]
        for batch in batches([len(piece.ids) + 2 for piece in pieces]):
            together = [pieces[number] for number in batch]
            input_ids, mask = framed([piece.ids for piece in together], self._special, device_of(self._network))
            asked = torch.zeros_like(mask)
            for row, piece in enumerate(together):
                asked[row, [place + 1 for place in piece.wanted]] = True
            states = gather_positions(self._network.encoder(input_ids, mask), asked)
            ids = [piece.ids[place] for piece in together for place in piece.wanted]
            values = iter(log_probabilities(self._network, states, ids, self._temperature).tolist())
            for number, piece in zip(batch, together, strict=True):
                found[number] = [next(values) for _ in piece.wanted]
        return found


def generator_likelihood(model: ScoringModel) -> Method | None:
    """log q(x_t | the others) by the generator of a model, at the temperature that it was sampled with; None without one."""
    temperature = model.sampling.temperature
    for network in _two_towers(model):
        return TwoTowerLikelihood(network, model.special, temperature)
    for network in _masked_lms(model):
        return PseudoLikelihood(network, model.special, temperature)
    return None


def _masked_lms(model: ScoringModel) -> list[Network]:
    return [network for network in _cloze_networks(model) if not isinstance(network.encoder, TwoTowerEncoder)]


def _two_towers(model: ScoringModel) -> list[Network]:
    return [network for network in _cloze_networks(model) if isinstance(network.encoder, TwoTowerEncoder)]


def _cloze_networks(model: ScoringModel) -> Iterator[Network]:
    kinds = (MaskedLMHead,) if model.is_permuted else (MaskedLMHead, TiedLMHead)
    return (network for network in model.networks.values() if isinstance(network.head, kinds))
