"""The predictions of a generator for each token of a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from discern.inference.rows import TOKENS_PER_BATCH, best_places, device_of, windows_of
from discern.models.base import Network
from discern.models.heads import gather_positions
from discern.models.two_tower.encoder import TwoTowerEncoder
from discern.types import SpecialTokens

# Number of rows of logits at a time; each is as long as the vocabulary.
_PLACES_AT_ONCE = 256


@dataclass(frozen=True)
class Proposals:
    """The predictions of a generator for one token.

    Attributes:
        ids: ids of the likeliest tokens, without special tokens, the likeliest first.
        probabilities: their probabilities.
        own: probability of the token in the text.
    """

    ids: list[int]
    probabilities: list[float]
    own: float


@final
class Proposer:
    """A generator that predicts tokens of a text: a masked language model, or two language models, one in each direction.

    Attributes:
        network: network with a head over the vocabulary, in evaluation mode.
        special: ids of the special tokens.
    """

    def __init__(self, network: Network, special: SpecialTokens) -> None:
        self.network = network
        self.special = special
        self._is_two_tower = isinstance(network.encoder, TwoTowerEncoder)

    def rows_to_predict(self, places: Bool[Tensor, "L"]) -> Bool[Tensor, "R L"]:
        """The places to predict in each forward pass, if each is to be predicted from *all* other tokens of the text.

        None of two towers sees the token that it predicts, so they predict all places at once. A masked language model reads
        [MASK] there, so each place needs a forward pass of its own.
        """
        return places[None] if self._is_two_tower else torch.eye(len(places), dtype=torch.bool)[places]

    def logits(
        self, input_ids: Int[Tensor, "B L"], places: Bool[Tensor, "B L"], *context: Tensor | None
    ) -> Iterator[Float[Tensor, "n V"]]:
        """Logits over the vocabulary at the places, row by row, in blocks, on the CPU; `context` are
        the encoder's further arguments, on its device."""
        device = device_of(self.network)
        read = input_ids if self._is_two_tower else input_ids.masked_fill(places, self.special.mask)
        states = gather_positions(self.network.encoder(read.to(device), *context), places.to(device))
        for some in torch.split(states, _PLACES_AT_ONCE):
            yield self.network.head(some).float().cpu()


@torch.inference_mode()
def propose(
    proposer: Proposer,
    texts: Sequence[Sequence[int]],
    window_size: int,
    count: int,
    advance: Callable[[int], None],
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> list[list[Proposals]]:
    """The generator's predictions for each token of each text, given all other tokens.

    Args:
        texts: ids, without special tokens.
        window_size: number of tokens read at a time; longer texts are read in overlapping windows, and each token is predicted
            where it has most context.
        count: number of likeliest tokens to return.
        advance: called with the number of further tokens that are done.
    """
    found: list[list[Proposals]] = [[] for _ in texts]
    for number, ids in enumerate(texts):
        answers: list[Proposals | None] = [None] * len(ids)
        windows = windows_of([len(ids)], window_size)
        for window, counting in zip(windows, best_places(windows), strict=True):
            row = torch.tensor([proposer.special.cls, *ids[window.start : window.stop], proposer.special.sep])
            places = torch.zeros(len(row), dtype=torch.bool)
            places[[place + 1 for place in counting]] = True
            at = iter([window.start + place for place in counting])
            for some in torch.split(proposer.rows_to_predict(places), max(1, tokens_per_batch // len(row))):
                truth = row.expand_as(some)[some]
                for part in proposer.logits(row.expand_as(some), some):
                    here, truth = truth[: len(part)], truth[len(part) :]
                    for proposals in _named(part, here, count, proposer.special):
                        answers[next(at)] = proposals
                    advance(len(part))
        found[number] = [answer for answer in answers if answer is not None]
    return found


def _named(logits: Float[Tensor, "n V"], here: Int[Tensor, "n"], count: int, special: SpecialTokens) -> Iterator[Proposals]:
    """The likeliest tokens of each row; special tokens are left out, but keep their probability."""
    probabilities = logits.softmax(-1)
    own = probabilities.gather(1, here[:, None]).squeeze(1).tolist()
    hidden = torch.tensor([special.pad, special.unk, special.cls, special.sep, special.mask])
    best = probabilities.index_fill(1, hidden, -1.0).topk(min(count, logits.shape[1] - len(hidden)))
    for ids, values, mine in zip(best.indices.tolist(), best.values.tolist(), own, strict=True):
        yield Proposals(ids, values, mine)
