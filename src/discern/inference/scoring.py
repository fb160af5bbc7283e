"""How likely sentences are: the score of a text, and what computes it."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
from tokenizers import Encoding

from discern.corruption.masking import Sampling, chosen_share
from discern.data.tokenizer import special_tokens
from discern.data.tokenizer.tokens import encode_texts
from discern.data.tokenizer.words import WordFinder
from discern.errors import ConfigError, NumericsError
from discern.inference import PREFERRED, scorers
from discern.inference.rows import TextModel, best_places, moved, windows_of
from discern.model_files.folder import ModelFolder, open_model
from discern.models.base import Network
from discern.models.two_tower.encoder import TwoTowerEncoder
from discern.objectives.config import ObjectiveConfig
from discern.training.distributed import choose_device
from discern.types import SpecialTokens

UNIT = "nats"
"""Unit of every score."""


@dataclass(frozen=True)
class Score:
    """The score of one text, without special tokens.

    Attributes:
        text: the text, unchanged.
        total: sum of `token_scores`, in nats; higher is likelier; 0 for a text without tokens.
        tokens: tokens as in the vocabulary.
        offsets: (start, end) of each token in the text, in characters.
        token_scores: score of each token given the other tokens, in nats; the definition depends on the scorer.
        windows: number of overlapping windows that the text was read in; 1 if it fits in one, 0 if it has no tokens.
    """

    text: str
    total: float
    tokens: list[str]
    offsets: list[tuple[int, int]]
    token_scores: list[float]
    windows: int

    @property
    def num_characters(self) -> int:
        """Length of the text as given, in Unicode code points: spaces count, and lower-casing and stripping don't matter."""
        return len(self.text)

    @property
    def per_token(self) -> float:
        """Mean score of a token; 0 for a text without tokens."""
        return self.total / max(len(self.tokens), 1)

    @property
    def per_character(self) -> float:
        """Score divided by `num_characters`: comparable between vocabularies, unlike the mean over tokens."""
        return self.total / max(self.num_characters, 1)


def token_values(score: Score) -> dict[str, object]:
    """The scores of the tokens of a text, as in `discern score --tokens`."""
    return {"tokens": score.tokens, "offsets": score.offsets, "token_scores": score.token_scores}


def score_values(score: Score, *, tokens: bool) -> dict[str, object]:
    """The score of a text, as in the lines of `discern score --out`."""
    return {
        "score": score.total,
        "text": score.text,
        "num_tokens": len(score.tokens),
        "num_characters": score.num_characters,
        "score_per_token": score.per_token,
        "score_per_character": score.per_character,
        **(token_values(score) if tokens else {}),
    }


@dataclass(frozen=True)
class ScoredWindow:
    """A window of a text, and the tokens in it to score.

    Attributes:
        ids: token ids, without [CLS] and [SEP].
        word_starts: True for the first token of a word.
        wanted: indices in `ids` of the tokens to score, ascending.
    """

    ids: tuple[int, ...]
    word_starts: tuple[bool, ...]
    wanted: tuple[int, ...]


@dataclass(frozen=True)
class ScoringModel:
    """The networks of a model that scorers can use, and how they were trained.

    Attributes:
        networks: networks by name, in evaluation mode and on the device to compute on; only those that were trained to read
            text as it is scored.
        special: ids of the special tokens.
        chosen_share: expected fraction of the tokens for which the generator drew a sample when the discriminator was trained;
            None if there is no discriminator, it was not trained on all tokens, or the fraction is not defined.
        chosen_evenly: False if the probability of masking depended on the token, as with maskings 'rarity' and 'entropy'.
        sampling: how the replacements were sampled.
        is_permuted: whether a network with a query stream was trained to predict by it, in permuted orders, rather
            than as a masked language model.
    """

    networks: Mapping[str, Network]
    special: SpecialTokens
    chosen_share: float | None = None
    chosen_evenly: bool = True
    sampling: Sampling = field(default_factory=Sampling)
    is_permuted: bool = False


def kind_of(network: Network) -> str:
    """Kind of a network, in words."""
    if network.predicts == "energy":
        return "an energy model"
    if network.predicts == "replaced":
        return "a discriminator"
    if network.encoder.has_query_stream:
        return "a network with a query stream"
    if network.predicts != "words":
        return "a network that restores whole texts"
    return "a two-tower generator" if isinstance(network.encoder, TwoTowerEncoder) else "a masked language model"


class CorpusScore:
    """The score of many texts together: the sum of their scores over the sum of their lengths, not a mean over texts.

    Attributes:
        tokens: number of tokens of all texts so far.
        characters: number of characters of all texts so far, as in `Score.num_characters`.
    """

    def __init__(self) -> None:
        self._total = 0.0
        self.tokens = self.characters = 0

    def add(self, scores: Sequence[Score]) -> None:
        """Add the scores of some texts."""
        self._total += math.fsum(score.total for score in scores)
        self.tokens += sum(len(score.tokens) for score in scores)
        self.characters += sum(score.num_characters for score in scores)

    @property
    def per_token(self) -> float:
        """Mean score of a token; 0 without tokens."""
        return self._total / max(self.tokens, 1)

    @property
    def per_character(self) -> float:
        """Mean score of a character; 0 without characters."""
        return self._total / max(self.characters, 1)

    @property
    def perplexity(self) -> float:
        """exp of the negative mean score of a token; infinite if it overflows, 1 without tokens.

        Reference: Salazar et al. 2020, section 2.3, for pseudo-log-likelihoods: PPPL = exp(-(1/N) sum of PLL), N all tokens.
        """
        return math.exp(-self.per_token) if self.per_token > -700 else math.inf

    def values(self, scorer: TextScorer) -> dict[str, Any]:
        """The scorer, the lengths and the means, as in `discern score --json`."""
        name = scorer.method.perplexity_name
        return {
            "scorer": scorer.name,
            "quantity": scorer.method.quantity,
            "unit": UNIT,
            "num_tokens": self.tokens,
            "num_characters": self.characters,
            "score_per_token": self.per_token,
            "score_per_character": self.per_character,
            **({} if name is None else {name: self.perplexity}),
        }


class TokenScorer(abc.ABC):
    """Computes the score of each token of a text. A subclass is final and has one line in the registry `scorers`.

    Attributes:
        needs_chosen_share: whether the scores depend on `ScoringModel.chosen_share`.
        reads_ahead: whether the score of a token depends on the tokens after it.
        quantity: name of the sum over the tokens of a text; its unit is nats.
        perplexity_name: name of exp of the negative mean score of all tokens; None if it has no name, as the scores are not
            log-probabilities.
    """

    quantity: ClassVar[str] = "score"
    perplexity_name: ClassVar[str | None] = None
    needs_chosen_share: ClassVar[bool] = False
    reads_ahead: ClassVar[bool] = True

    @classmethod
    @abc.abstractmethod
    def lacks(cls, model: ScoringModel) -> str | None:
        """What the model lacks for this scorer, worded to follow "needs"; None if it lacks nothing."""

    @classmethod
    @abc.abstractmethod
    def of(cls, model: ScoringModel) -> TokenScorer:
        """The scorer with the networks of a model that lacks nothing."""

    @abc.abstractmethod
    def token_scores(self, pieces: Sequence[ScoredWindow]) -> list[list[float]]:
        """Scores of the wanted tokens of each window, in nats; the same in any batch, up to rounding."""


class NetworkScorer(TokenScorer):
    """A scorer by a single network, the first of a model that it can use.

    Args:
        temperature: divides the logits of a softmax; 1: as in training.

    Attributes:
        needs: what it needs, as in `lacks`.
    """

    needs: ClassVar[str]

    def __init__(self, network: Network, special: SpecialTokens, temperature: float = 1.0) -> None:
        self.network, self.special, self.temperature = network, special, temperature

    @classmethod
    @abc.abstractmethod
    def can_use(cls, network: Network, model: ScoringModel) -> bool:
        """Whether the scorer can use a network of a model."""

    @classmethod
    def lacks(cls, model: ScoringModel) -> str | None:
        return None if any(cls.can_use(network, model) for network in model.networks.values()) else cls.needs

    @classmethod
    def of(cls, model: ScoringModel, temperature: float = 1.0) -> TokenScorer:
        network = next(network for network in model.networks.values() if cls.can_use(network, model))
        return cls(network, model.special, temperature)


@final
@dataclass(frozen=True)
class TextScorer(TextModel):
    """Scores texts: a token scorer with the tokenizer of its networks.

    Attributes:
        name: name of the scorer in the registry.
        step: training step of the weights; None if unknown.
    """

    name: str
    method: TokenScorer
    step: int | None = None

    @property
    def described(self) -> str:
        """Description of the scores in words."""
        return f"scorer '{self.name}': {self.method.quantity} in {UNIT}, summed over the tokens; higher is likelier"

    def score(self, texts: Sequence[str]) -> list[Score]:
        """One score per text, in order. Texts with the same tokens get exactly the same score.

        A text of more than `window_size` tokens is read in overlapping windows; each token is scored where it has most context.
        All texts and their scores are held in memory: pass some thousands at a time.

        Raises:
            NumericsError: a score is not finite.
        """
        encodings = encode_texts(self.tokenizer, texts)
        starts = self._word_starts(texts, encodings)
        windows = windows_of([len(encoding) for encoding in encodings], self.window_size)
        pieces = [
            ScoredWindow(tuple(encodings[at.text].ids[at.start : at.stop]), starts[at.text][at.start : at.stop], wanted)
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
        """Whether each token starts a word, as in a data set prepared without a segmenter."""
        lengths = np.array([len(encoding) for encoding in encodings], dtype=np.int64)
        ids = np.array([number for encoding in encodings for number in encoding.ids], dtype=np.uint32)
        starts = WordFinder(self.tokenizer).starts(ids, lengths, texts, encodings)
        ends = np.cumsum(lengths)
        return [tuple(starts[end - length : end].tolist()) for end, length in zip(ends, lengths, strict=True)]


# Mask probability of the released ELECTRAs, by maximum hidden size: assumed by `inversion` if a model does not record it.
# They drew positions with replacement in rows of 512.
_RELEASED_MASK_PROBABILITIES = ((768, 0.15), (1_000_000, 0.25))
_RELEASED_ROW_LENGTH = 512


def load_scorer(
    model: Path | ModelFolder,
    name: str | None = None,
    device: str = "auto",
    *,
    warn: Callable[[str], None],
    preferred: Sequence[str] = PREFERRED,
) -> TextScorer:
    """Load a scorer with the networks of a folder, in float32.

    Args:
        model: a run, an export, or a Hugging Face ELECTRA.
        name: name of the scorer; None: the first of `preferred` that the model supports.
        warn: called with messages about damaged checkpoints that were skipped and about assumptions.

    Raises:
        ConfigError: there is no such scorer or device, or the model lacks a network that the scorer needs.
        DataError: the folder is neither a run nor a model, or has no tokenizer.
        CheckpointError: the weights are missing or damaged.
    """
    if name is not None:
        scorers.load(name)
    place = choose_device(device)
    loaded = open_model(model, warn=warn)
    for network in loaded.networks().values():
        moved(network, place)
    tokenizer = loaded.tokenizer
    served = _served(loaded, special_tokens(tokenizer))
    chosen = name or next((known for known in preferred if _method(known).lacks(served) is None), None)
    if chosen is None or (lack := _method(chosen).lacks(served)) is not None:
        needs = "no scorer can use it" if chosen is None else f"scorer '{chosen}' needs {lack}"
        raise ConfigError(
            f"{loaded.folder}: {needs}; it has {_described(served, loaded.pretraining_objective)}", hint=_others(served)
        )
    if loaded.pretraining_objective is None and _method(chosen).needs_chosen_share:
        share = f"{served.chosen_share:.3g}, that of the released ELECTRAs of this width,"
        warn(f"{loaded.folder} does not record the fraction of tokens that were masked in training: {share} is assumed")
    return TextScorer(tokenizer, loaded.max_length, chosen, _method(chosen).of(served), loaded.step)


def _served(loaded: ModelFolder, special: SpecialTokens) -> ScoringModel:
    """The networks of a model that scorers can use."""
    networks, objective = loaded.networks(), loaded.pretraining_objective
    if objective is not None and objective.detects_every_token:
        share = objective.replaced_share(loaded.step or 0, loaded.max_length)
        return ScoringModel(networks, special, share, share is not None, objective.sampling_at(loaded.step or 0))
    if objective is None:
        width = max(network.encoder.config.hidden_size for network in networks.values())
        masked = next(probability for widest, probability in _RELEASED_MASK_PROBABILITIES if width <= widest)
        share = chosen_share("with-replacement", masked, _RELEASED_ROW_LENGTH)
        return ScoringModel(networks, special, share, is_permuted=True)
    if objective.encoder_reads_samples:
        # This encoder reads a generator's samples where a masked language model reads [MASK].
        networks = {name: network for name, network in networks.items() if name != "encoder"}
    return ScoringModel(networks, special, is_permuted=objective.permutes)


def _method(name: str) -> type[TokenScorer]:
    found: type[TokenScorer] = scorers.load(name)
    return found


def _described(model: ScoringModel, objective: ObjectiveConfig | None) -> str:
    """The networks in words; for one with a query stream with its objective, which decides which scorers can use it."""
    by = "" if objective is None else f" trained by '{objective.name}'"
    kinds = (kind_of(network) + (by if network.encoder.has_query_stream else "") for network in model.networks.values())
    return " and ".join(dict.fromkeys(kinds)) or "no network for scoring"


def _others(model: ScoringModel) -> str:
    """A hint at what works instead."""
    usable = [name for name in scorers.names() if _method(name).lacks(model) is None]
    if usable:
        return f"for this model: --scorer {' or '.join(usable)}"
    return "give a run, or export it again: discern export RUN --out DIR --all-networks"
