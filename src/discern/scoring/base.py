"""The score of a sentence: what gives it, and how texts become pieces that a network can read."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import numpy as np
from tokenizers import Encoding, Tokenizer

from discern.corruption.sampling import Sampling
from discern.data.words import Sentences, word_finder
from discern.errors import NumericsError
from discern.model.heads import EnergyHead, MaskedLMHead, ReplacedTokenHead
from discern.model.network import Network
from discern.model.two_tower import TwoTowerEncoder
from discern.model.xlnet import XLNetEncoder
from discern.scoring.windows import best_places, windows_of
from discern.types import SpecialTokens

UNIT = "nats"
"""Of every score."""


@dataclass(frozen=True)
class Score:
    """How likely one text is. The special tokens around it are left out.

    Attributes:
        text: as it was given.
        total: sum of `token_scores`, in nats; higher is likelier. 0 for a text without a token.
        tokens: as the tokenizer writes them.
        offsets: (start, end) of each token in the text, in characters.
        token_scores: of each token given the others, in nats; what they are exactly, the scorer says.
        windows: in how many overlapping windows the text was read; 1 where it fits, 0 where it has no token.
    """

    text: str
    total: float
    tokens: list[str]
    offsets: list[tuple[int, int]]
    token_scores: list[float]
    windows: int


@dataclass(frozen=True)
class Piece:
    """Tokens that are read together.

    Attributes:
        ids: without [CLS] and [SEP].
        word_starts: True where a word begins.
        wanted: places in `ids`, ascending, whose tokens are to be scored.
    """

    ids: tuple[int, ...]
    word_starts: tuple[bool, ...]
    wanted: tuple[int, ...]


@dataclass(frozen=True)
class ScoringModel:
    """What a method is built from.

    Attributes:
        networks: by name, in evaluation mode and on the device to compute on; only those that can judge text as they were
            trained to read it.
        special: ids of the special tokens.
        chosen_share: expected fraction of the tokens for which the generator drew one in the discriminator's training; None
            where there is no discriminator, it was not trained on all tokens, or there is no such number.
        chosen_evenly: False: how often a token was chosen depended on the token, as masking 'rarity' does.
        sampling: how the replacements were drawn.
        is_permuted: an XLNet among the networks learned to predict in some order, by its query stream; not as a masked
            language model.
    """

    networks: Mapping[str, Network]
    special: SpecialTokens
    chosen_share: float | None = None
    chosen_evenly: bool = True
    sampling: Sampling = field(default_factory=Sampling)
    is_permuted: bool = False


def kind_of(network: Network) -> str:
    """What a network is to a scorer, in words."""
    if isinstance(network.head, EnergyHead):
        return "an energy model"
    if isinstance(network.head, ReplacedTokenHead):
        return "a discriminator"
    if isinstance(network.encoder, XLNetEncoder):
        return "an XLNet"
    if not isinstance(network.head, MaskedLMHead):
        return "a network that restores whole texts"
    return "a two-tower generator" if isinstance(network.encoder, TwoTowerEncoder) else "a masked language model"


class Perplexity:
    """exp of the negative mean score of the tokens of many texts.

    Attributes:
        tokens: of all texts until now.

    Reference: Salazar et al. 2020, section 2.3, for pseudo-log-likelihoods: PPPL = exp(-(1/N) sum of PLL), N all tokens.
    """

    def __init__(self) -> None:
        self._total = 0.0
        self.tokens = 0

    def add(self, scores: Sequence[Score]) -> None:
        """Take in the scores of some texts."""
        self._total += math.fsum(score.total for score in scores)
        self.tokens += sum(len(score.tokens) for score in scores)

    def value(self) -> float:
        """Of all texts until now; infinite beyond what a float holds, 1 without a token."""
        mean = -self._total / max(self.tokens, 1)
        return math.exp(mean) if mean < 700 else math.inf


class Method(abc.ABC):
    """Gives each token of a text its number. A subclass is final and has one line in the registry `scorers`.

    Attributes:
        needs_chosen_share: whether the numbers depend on `ScoringModel.chosen_share`.
        reads_ahead: whether the number of a token depends on those after it.
        quantity: what the sum over the tokens of a text is, in words; its unit is nats.
        perplexity_name: what exp of the negative mean number of all tokens is called; None where that has no name, as the
            numbers are no log-probabilities.
    """

    quantity: ClassVar[str] = "score"
    perplexity_name: ClassVar[str | None] = None
    needs_chosen_share: ClassVar[bool] = False
    reads_ahead: ClassVar[bool] = True

    @classmethod
    @abc.abstractmethod
    def lacks(cls, model: ScoringModel) -> str | None:
        """What the model would need for this method, to follow "needs"; None where it has it."""

    @classmethod
    @abc.abstractmethod
    def of(cls, model: ScoringModel) -> Method:
        """The method with the networks of a model that lacks nothing."""

    @abc.abstractmethod
    def token_scores(self, pieces: Sequence[Piece]) -> list[list[float]]:
        """In nats, of the wanted tokens of each piece; the same however the pieces come together, up to rounding."""


@final
@dataclass(frozen=True)
class Scorer:
    """A method with the tokenizer of its networks.

    Attributes:
        name: of the method in the registry.
        max_length: positions that the networks were trained on, [CLS] and [SEP] included; at least 3.
        step: of the weights; None where the model does not say.
    """

    name: str
    method: Method
    tokenizer: Tokenizer
    max_length: int
    step: int | None = None

    @property
    def described(self) -> str:
        """What the scores are, for people."""
        return f"scorer '{self.name}': {self.method.quantity} in {UNIT}, summed over the tokens; higher is likelier"

    @property
    def room(self) -> int:
        """Tokens of text that are read at a time."""
        return self.max_length - 2

    def score(self, texts: Sequence[str]) -> list[Score]:
        """One score a text, in order. Texts of the same tokens get the very same score.

        A text of more than `room` tokens is read in overlapping windows, and each token counts where it has most context.
        All texts and their scores are held at once: give some thousands at a time.

        Raises:
            NumericsError: a score is not finite.
        """
        encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        starts = self._word_starts(texts, encodings)
        windows = windows_of([len(encoding) for encoding in encodings], self.room)
        pieces = [
            Piece(tuple(encodings[at.text].ids[at.start : at.stop]), starts[at.text][at.start : at.stop], wanted)
            for at, wanted in zip(windows, best_places(windows, reads_ahead=self.method.reads_ahead), strict=True)
        ]
        distinct = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
        found = self.method.token_scores(list(distinct))
        token_scores = [[0.0] * len(encoding) for encoding in encodings]
        counts = [0] * len(encodings)
        for window, piece in zip(windows, pieces, strict=True):
            counts[window.text] += 1
            for place, value in zip(piece.wanted, found[distinct[piece]], strict=True):
                token_scores[window.text][window.start + place] = value
        wrong = next((row for row in token_scores if not all(map(math.isfinite, row))), None)
        if wrong is not None:
            raise NumericsError(
                f"text {token_scores.index(wrong) + 1} has a score that is not finite",
                hint="the weights are damaged, or the training diverged: discern doctor RUN",
            )
        return [
            Score(text, math.fsum(values), encoding.tokens, encoding.offsets, values, count)
            for text, encoding, values, count in zip(texts, encodings, token_scores, counts, strict=True)
        ]

    def _word_starts(self, texts: Sequence[str], encodings: Sequence[Encoding]) -> list[tuple[bool, ...]]:
        """Where words begin in each text, as the data set of a pre-training without a segmenter would say."""
        lengths = np.array([len(encoding) for encoding in encodings], dtype=np.int64)
        ids = np.array([number for encoding in encodings for number in encoding.ids], dtype=np.uint32)
        starts = word_finder(self.tokenizer).starts(Sentences(list(texts), ids, lengths, encodings))
        ends = np.cumsum(lengths)
        return [tuple(starts[end - length : end].tolist()) for end, length in zip(ends, lengths, strict=True)]
