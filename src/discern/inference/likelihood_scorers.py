"""Scorers by a softmax over the vocabulary: pseudo-log-likelihoods, and the likelihood from left to right."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast, final

import torch

from discern.inference.rows import batches, device_of, framed, log_probabilities, padded, read
from discern.inference.scoring import ScoredWindow, ScoringModel, TokenScorer
from discern.models.base import Network
from discern.models.heads import MaskedLMHead, TiedLMHead, gather_positions
from discern.models.two_tower import TwoTowerEncoder
from discern.models.xlnet.encoder import XLNetEncoder
from discern.models.xlnet.two_stream import Factorization
from discern.types import SpecialTokens


@dataclass(frozen=True)
class _Copy:
    """A copy of a window with masks, to score one token.

    Attributes:
        piece: index of the window.
        place: index of the token to score.
        hidden: indices of the masked tokens.
    """

    piece: int
    place: int
    hidden: range


class MaskedPseudoLikelihood(TokenScorer):
    """Pseudo-likelihood by a masked language model, with one masked row per token. Subclasses define what else is masked.

    Args:
        temperature: divides the logits; 1: as in training.
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
    def of(cls, model: ScoringModel) -> TokenScorer:
        return cls(_masked_lms(model)[0], model.special)

    @abc.abstractmethod
    def hidden(self, piece: ScoredWindow, place: int) -> range:
        """Indices of the masked tokens when the token at `place` is scored; `place` is the first."""

    @torch.inference_mode()
    def token_scores(self, pieces: Sequence[ScoredWindow]) -> list[list[float]]:
        found: list[dict[int, float]] = [{} for _ in pieces]
        copies = [
            _Copy(number, place, self.hidden(piece, place)) for number, piece in enumerate(pieces) for place in piece.wanted
        ]
        for batch in batches([len(pieces[copy.piece].ids) + 2 for copy in copies]):
            asked = [copies[number] for number in batch]
            for copy, value in zip(asked, self._ask(pieces, asked), strict=True):
                found[copy.piece][copy.place] = value
        return [[by_place[place] for place in piece.wanted] for piece, by_place in zip(pieces, found, strict=True)]

    def _ask(self, pieces: Sequence[ScoredWindow], copies: Sequence[_Copy]) -> list[float]:
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
    """Each token is masked in turn. The other tokens of a rare word reveal it, so such words score too high.

    Reference: Salazar et al. 2020, "Masked language model scoring", section 2.
    """

    quantity: ClassVar[str] = "pseudo-log-likelihood"
    perplexity_name: ClassVar[str | None] = "pseudo_perplexity"

    def hidden(self, piece: ScoredWindow, place: int) -> range:
        return range(place, place + 1)


@final
class WordwisePseudoLikelihood(MaskedPseudoLikelihood):
    """Each token is masked in turn with the rest of its word: the tokens of a word are predicted from left to right.

    Reference: Kauf and Ivanova 2023, "A better way to do masked language model scoring": PLL-word-l2r.
    """

    quantity: ClassVar[str] = "pseudo-log-likelihood, the rest of a word masked"

    def hidden(self, piece: ScoredWindow, place: int) -> range:
        end = place + 1
        while end < len(piece.ids) and not piece.word_starts[end]:
            end += 1
        return range(place, end)


@final
class TwoTowerLikelihood(TokenScorer):
    """Pseudo-likelihood by a left-to-right and a right-to-left model together, in one forward pass and without [MASK].

    Reference: Clark et al. 2020 (Electric), sections 2.3 and 4.2: "TwoTower".
    """

    quantity: ClassVar[str] = "pseudo-log-likelihood by the two-tower generator"

    def __init__(self, network: Network, special: SpecialTokens, temperature: float = 1.0) -> None:
        self._network, self._special, self._temperature = network, special, temperature

    @classmethod
    def lacks(cls, model: ScoringModel) -> str | None:
        return None if _two_towers(model) else "a two-tower generator, as objective 'electric' has"

    @classmethod
    def of(cls, model: ScoringModel) -> TokenScorer:
        return cls(_two_towers(model)[0], model.special)

    @torch.inference_mode()
    def token_scores(self, pieces: Sequence[ScoredWindow]) -> list[list[float]]:
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


def generator_likelihood(model: ScoringModel) -> TokenScorer | None:
    """Scorer of log q(x_t | the others) by the generator of a model, at its sampling temperature; None without a generator."""
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


@final
class PermutationLikelihood(TokenScorer):
    """log p(x_t | x_1 ... x_(t-1)): of all orders in which the network can predict a text, the one from left to right.

    This is the only score that is a log-probability: the probabilities of all texts of a given length sum to one. A row is the
    text alone, like the beginning of a row in training: no predicted token sees the [SEP] and [CLS] behind it.

    Differs: in training, five tokens in six are context of the targets; here the first tokens have hardly any.
    Reference: Yang et al. 2019, section 2.2, equation 3.
    """

    quantity: ClassVar[str] = "log-likelihood from left to right"
    reads_ahead = False
    perplexity_name = "perplexity"

    def __init__(self, network: Network, special: SpecialTokens) -> None:
        self._network, self._special = network, special

    @classmethod
    def lacks(cls, model: ScoringModel) -> str | None:
        return None if _permuted(model) else "an XLNet, as objective 'permutation-lm' trains"

    @classmethod
    def of(cls, model: ScoringModel) -> TokenScorer:
        return cls(_permuted(model)[0], model.special)

    @torch.inference_mode()
    def token_scores(self, pieces: Sequence[ScoredWindow]) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in pieces]
        device = device_of(self._network)
        encoder = cast(XLNetEncoder, self._network.encoder)
        for batch in batches([len(piece.ids) for piece in pieces]):
            together = [pieces[number] for number in batch]
            input_ids, _ = padded([piece.ids for piece in together], self._special, device)
            rows, length = input_ids.shape
            # Padding is on the right, which no token attends to.
            before = torch.ones(length, length, dtype=torch.bool, device=device).tril(-1).expand(rows, -1, -1)
            asked = torch.zeros(rows, length, dtype=torch.bool, device=device)
            for row, piece in enumerate(together):
                asked[row, list(piece.wanted)] = True
            positions = torch.arange(length, device=device).expand(rows, -1)
            states = gather_positions(encoder.two_streams(input_ids, Factorization(before, positions)).query, asked)
            ids = [piece.ids[place] for piece in together for place in piece.wanted]
            values = iter(log_probabilities(self._network, states, ids).tolist())
            for number, piece in zip(batch, together, strict=True):
                found[number] = [next(values) for _ in piece.wanted]
        return found


def _permuted(model: ScoringModel) -> list[Network]:
    """The networks with a trained query stream."""
    if not model.is_permuted:
        return []
    return [
        network
        for network in model.networks.values()
        if isinstance(network.encoder, XLNetEncoder) and isinstance(network.head, TiedLMHead)
    ]
