"""Scorers by a softmax over the vocabulary: pseudo-log-likelihoods, and the likelihood from left to right."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from discern.inference.rows import batches, device_of, framed, log_probabilities, padded, read
from discern.inference.scoring import NetworkScorer, ScoredWindow, ScoringModel, TokenScorer
from discern.models.base import Network
from discern.models.heads import gather_positions
from discern.models.two_stream import Factorization
from discern.models.two_tower.encoder import TwoTowerEncoder


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


class MaskedPseudoLikelihood(NetworkScorer):
    """Pseudo-likelihood by a masked language model, with one masked row per token. Subclasses define what else is masked."""

    needs: ClassVar[str] = "a masked language model, as objective 'mlm' trains, or 'rtd' beside the discriminator"

    @classmethod
    def can_use(cls, network: Network, model: ScoringModel) -> bool:
        return _is_cloze(network, model) and not isinstance(network.encoder, TwoTowerEncoder)

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
            together = [copies[number] for number in batch]
            rows = [
                [self.special.mask if place in copy.hidden else token for place, token in enumerate(pieces[copy.piece].ids)]
                for copy in together
            ]
            states = read(self.network.encoder, *framed(rows, self.special, device_of(self.network)))
            at_places = states[range(len(together)), [copy.place + 1 for copy in together]]
            ids = [pieces[copy.piece].ids[copy.place] for copy in together]
            values = log_probabilities(self.network, at_places, ids, self.temperature).tolist()
            for copy, value in zip(together, values, strict=True):
                found[copy.piece][copy.place] = value
        return [[by_place[place] for place in piece.wanted] for piece, by_place in zip(pieces, found, strict=True)]


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


class OnePassLikelihood(NetworkScorer):
    """Likelihood by a network that predicts every token in one forward pass and without [MASK].

    Attributes:
        num_before: number of special tokens on either side of the text.
    """

    num_before: ClassVar[int]

    @abc.abstractmethod
    def states(self, rows: Sequence[Sequence[int]], device: torch.device) -> Float[Tensor, "B L D"]:
        """The states that predict the tokens of some rows, framed and padded."""

    @torch.inference_mode()
    def token_scores(self, pieces: Sequence[ScoredWindow]) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in pieces]
        for batch in batches([len(piece.ids) + 2 * self.num_before for piece in pieces]):
            together = [pieces[number] for number in batch]
            states = self.states([piece.ids for piece in together], device_of(self.network))
            wanted = torch.zeros(states.shape[:2], dtype=torch.bool, device=states.device)
            for row, piece in enumerate(together):
                wanted[row, [place + self.num_before for place in piece.wanted]] = True
            ids = [piece.ids[place] for piece in together for place in piece.wanted]
            values = iter(log_probabilities(self.network, gather_positions(states, wanted), ids, self.temperature).tolist())
            for number, piece in zip(batch, together, strict=True):
                found[number] = [next(values) for _ in piece.wanted]
        return found


@final
class TwoTowerLikelihood(OnePassLikelihood):
    """Pseudo-likelihood by a left-to-right and a right-to-left model together.

    Reference: Clark et al. 2020 (Electric), sections 2.3 and 4.2: "TwoTower".
    """

    quantity: ClassVar[str] = "pseudo-log-likelihood by the two-tower generator"
    needs: ClassVar[str] = "a two-tower generator, as objective 'electric' has"
    num_before: ClassVar[int] = 1

    @classmethod
    def can_use(cls, network: Network, model: ScoringModel) -> bool:
        return _is_cloze(network, model) and isinstance(network.encoder, TwoTowerEncoder)

    def states(self, rows: Sequence[Sequence[int]], device: torch.device) -> Float[Tensor, "B L D"]:
        states: Tensor = self.network.encoder(*framed(rows, self.special, device))
        return states


def _is_cloze(network: Network, model: ScoringModel) -> bool:
    """Whether a network predicts a token from all others."""
    return network.predicts == "words" and not (model.is_permuted and network.encoder.has_query_stream)


def generator_likelihood(model: ScoringModel) -> TokenScorer | None:
    """Scorer of log q(x_t | the others) by the generator of a model, at its sampling temperature; None without a generator."""
    methods: tuple[type[NetworkScorer], ...] = (TwoTowerLikelihood, PseudoLikelihood)
    usable = (method for method in methods if method.lacks(model) is None)
    return next((method.of(model, model.sampling.temperature) for method in usable), None)


@final
class PermutationLikelihood(OnePassLikelihood):
    """log p(x_t | x_1 ... x_(t-1)): of all orders in which the network can predict a text, the one from left to right.

    This is the only score that is a log-probability: the probabilities of all texts of a given length sum to one. A row is the
    text alone, like the beginning of a row in training: no predicted token sees the [SEP] and [CLS] behind it.

    Differs: in training, five tokens in six are context of the targets; here the first tokens have hardly any.
    Reference: Yang et al. 2019, section 2.2, equation 3.
    """

    quantity: ClassVar[str] = "log-likelihood from left to right"
    needs: ClassVar[str] = "a network with a query stream, as objective 'permutation-lm' trains"
    num_before: ClassVar[int] = 0
    reads_ahead = False
    perplexity_name = "perplexity"

    @classmethod
    def can_use(cls, network: Network, model: ScoringModel) -> bool:
        return model.is_permuted and network.encoder.has_query_stream and network.predicts == "words"

    def states(self, rows: Sequence[Sequence[int]], device: torch.device) -> Float[Tensor, "B L D"]:
        input_ids, _ = padded(rows, self.special, device)
        num_rows, length = input_ids.shape
        # Padding is on the right, which no token attends to.
        before = torch.ones(length, length, dtype=torch.bool, device=device).tril(-1).expand(num_rows, -1, -1)
        positions = torch.arange(length, device=device).expand(num_rows, -1)
        encoder: Any = self.network.encoder
        states: Tensor = encoder.two_streams(input_ids, Factorization(before, positions)).query
        return states
