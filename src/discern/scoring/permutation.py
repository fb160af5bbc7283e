"""The probability of a text from left to right, by the query stream of an XLNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast, final

import torch

from discern.model.heads import TiedLMHead, gather_positions
from discern.model.network import Network
from discern.model.two_stream import Factorization
from discern.model.xlnet import XLNetEncoder
from discern.scoring.base import Method, Piece, ScoringModel
from discern.scoring.rows import batches, device_of, log_probabilities, padded
from discern.types import SpecialTokens


@final
class PermutationLikelihood(Method):
    """log p(x_t | x_1 ... x_(t-1)): of all orders in which the network can predict a text, the one from left to right.

    The only one of the scores that is the log-probability of a text of so many tokens: over all of them it sums to one. Rows
    are the text alone, as the first part of a row of training: what is predicted never sees the [SEP] and [CLS] behind it.

    Differs: in training five tokens in six are context of the targets; here the first tokens have next to none.
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
    def of(cls, model: ScoringModel) -> Method:
        return cls(_permuted(model)[0], model.special)

    @torch.inference_mode()
    def token_scores(self, pieces: Sequence[Piece]) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in pieces]
        device = device_of(self._network)
        encoder = cast(XLNetEncoder, self._network.encoder)
        for batch in batches([len(piece.ids) for piece in pieces]):
            together = [pieces[number] for number in batch]
            input_ids, _ = padded([piece.ids for piece in together], self._special, device)
            rows, length = input_ids.shape
            # Padding is on the right, where nobody looks.
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
    """The networks whose query stream was trained."""
    if not model.is_permuted:
        return []
    return [
        network
        for network in model.networks.values()
        if isinstance(network.encoder, XLNetEncoder) and isinstance(network.head, TiedLMHead)
    ]
