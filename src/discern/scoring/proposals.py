"""What a generator would put at each place of a text."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from discern.model.heads import gather_positions
from discern.model.network import Network
from discern.model.two_tower import TwoTowerEncoder
from discern.scoring.rows import TOKENS_PER_BATCH
from discern.scoring.windows import best_places, windows_of
from discern.types import SpecialTokens

# Rows of logits at a time, each as long as the vocabulary.
_PLACES_AT_ONCE = 256


@dataclass(frozen=True)
class Proposals:
    """What a generator says of one place.

    Attributes:
        ids: of the likeliest tokens that are not special, the likeliest first.
        probabilities: of these.
        own: probability of the token that stands there.
    """

    ids: list[int]
    probabilities: list[float]
    own: float


class Proposer(abc.ABC):
    """A generator, asked what would stand at some places of a text.

    Attributes:
        network: with a head over the vocabulary, in evaluation mode.
        special: ids of the special tokens.
    """

    def __init__(self, network: Network, special: SpecialTokens) -> None:
        self.network = network
        self.special = special

    @abc.abstractmethod
    def reads(self, input_ids: Int[Tensor, "B L"], places: Bool[Tensor, "B L"]) -> Int[Tensor, "B L"]:
        """What the network is given where it is asked about these places."""

    @abc.abstractmethod
    def questions(self, places: Bool[Tensor, "L"]) -> Bool[Tensor, "R L"]:
        """The places one asks about together, a row a pass: where each must be told from *all* other tokens of the text."""

    def logits(
        self, input_ids: Int[Tensor, "B L"], places: Bool[Tensor, "B L"], *context: Tensor | None
    ) -> Iterator[Float[Tensor, "n V"]]:
        """Over the vocabulary at the places, row by row, some places at a time; `context` as the encoder takes it, mask first."""
        states = gather_positions(self.network.encoder(self.reads(input_ids, places), *context), places)
        for some in torch.split(states, _PLACES_AT_ONCE):
            yield self.network.head(some).float()


@final
class MaskedProposer(Proposer):
    """A masked language model: it sees [MASK] at the places it is asked about, so alone each must have a pass of its own."""

    def reads(self, input_ids: Int[Tensor, "B L"], places: Bool[Tensor, "B L"]) -> Int[Tensor, "B L"]:
        return input_ids.masked_fill(places, self.special.mask)

    def questions(self, places: Bool[Tensor, "L"]) -> Bool[Tensor, "R L"]:
        return torch.eye(len(places), dtype=torch.bool)[places]


@final
class TwoTowerProposer(Proposer):
    """Two language models, one each way: at every place the text itself is what they must not see, and don't."""

    def reads(self, input_ids: Int[Tensor, "B L"], places: Bool[Tensor, "B L"]) -> Int[Tensor, "B L"]:
        return input_ids

    def questions(self, places: Bool[Tensor, "L"]) -> Bool[Tensor, "R L"]:
        return places[None]


def proposer_of(network: Network, special: SpecialTokens) -> Proposer:
    """What asks this generator in its own way."""
    kind = TwoTowerProposer if isinstance(network.encoder, TwoTowerEncoder) else MaskedProposer
    return kind(network, special)


@torch.inference_mode()
def propose(
    proposer: Proposer,
    texts: Sequence[Sequence[int]],
    room: int,
    count: int,
    advance: Callable[[int], None],
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> list[list[Proposals]]:
    """For each token of each text, what the generator would put in its place, told from all others.

    Args:
        texts: ids, without special tokens.
        room: tokens it takes at a time; longer texts are read in overlapping windows, each place in the one where it has
            most context.
        count: how many tokens to name.
        advance: told how many places more are done.
    """
    found: list[list[Proposals]] = [[] for _ in texts]
    for number, ids in enumerate(texts):
        answers: list[Proposals | None] = [None] * len(ids)
        windows = windows_of([len(ids)], room)
        for window, counting in zip(windows, best_places(windows), strict=True):
            row = torch.tensor([proposer.special.cls, *ids[window.start : window.stop], proposer.special.sep])
            places = torch.zeros(len(row), dtype=torch.bool)
            places[[place + 1 for place in counting]] = True
            asked = proposer.questions(places)
            at = iter([window.start + place for place in counting])
            for some in torch.split(asked, max(1, tokens_per_batch // len(row))):
                truth = row.expand_as(some)[some]
                logits = proposer.logits(row.expand_as(some), some)
                for part in logits:
                    here, truth = truth[: len(part)], truth[len(part) :]
                    for proposals in _named(part, here, count, proposer.special):
                        answers[next(at)] = proposals
                    advance(len(part))
        found[number] = [answer for answer in answers if answer is not None]
    return found


def _named(logits: Float[Tensor, "n V"], here: Int[Tensor, "n"], count: int, special: SpecialTokens) -> Iterator[Proposals]:
    """The likeliest tokens of each row; special ones are not named, but have their share of the probability."""
    probabilities = logits.softmax(-1)
    own = probabilities.gather(1, here[:, None]).squeeze(1).tolist()
    hidden = torch.tensor([special.pad, special.unk, special.cls, special.sep, special.mask])
    best = probabilities.index_fill(1, hidden, -1.0).topk(min(count, logits.shape[1] - len(hidden)))
    for ids, values, mine in zip(best.indices.tolist(), best.values.tolist(), own, strict=True):
        yield Proposals(ids, values, mine)
