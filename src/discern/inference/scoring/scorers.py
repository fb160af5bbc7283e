"""How likely texts are: the score of a text, and the scorer of a model folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from tokenizers import Encoding
from torch import Tensor
from torch.nn import functional as F

from discern.corruption.masking import Sampling, chosen_share
from discern.data.sources.streams import shown_name
from discern.data.tables import numbered_lines, without_blank_end
from discern.data.tokenizer import special_tokens
from discern.data.tokenizer.tokens import encode_texts
from discern.data.tokenizer.words import WordFinder
from discern.errors import ConfigError, DataError
from discern.inference import PREFERRED, scorers
from discern.inference.texts import InputText, numbered
from discern.inference.windows import (
    ROWS_PER_BATCH,
    TextModel,
    TextT,
    Window,
    device_of,
    framed_outputs,
    log_probabilities,
    moved,
    predicted_from_others,
    read_blocks,
    read_in_windows,
)
from discern.model_files.folder import ModelFolder, open_model
from discern.models.base import Network
from discern.models.two_stream import Factorization
from discern.models.two_tower.encoder import TwoTowerEncoder
from discern.progress import Progress
from discern.training.distributed import choose_device
from discern.types import SpecialTokens

PERPLEXITIES = {"pll": "pseudo_perplexity", "permutation-lm": "perplexity"}
"""Names of exp of the negative mean score of a token, for the scorers whose scores are log-probabilities."""


@dataclass(frozen=True)
class Score:
    """The score of one text, without special tokens.

    Attributes:
        text: the text, unchanged.
        total: sum of `token_scores`, in nats; higher is likelier; 0 for a text without tokens.
        tokens: tokens as in the vocabulary.
        offsets: (start, end) of each token in the text, in characters.
        token_scores: score of each token given the other tokens, in nats; the definition depends on the scorer.
    """

    text: str
    total: float
    tokens: list[str]
    offsets: list[tuple[int, int]]
    token_scores: list[float]

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


def values_of_scores(scores: Sequence[Score], *, tokens: bool) -> dict[str, object]:
    """The scores of several texts as lists, as in `discern score --json`."""
    return {
        "scores": [score.total for score in scores],
        "scores_per_token": [score.per_token for score in scores],
        "scores_per_character": [score.per_character for score in scores],
        **({"tokens": [token_values(score) for score in scores]} if tokens else {}),
    }


class CorpusScore:
    """The score of many texts together: the sum of their scores over the sum of their lengths, not a mean over texts."""

    def __init__(self) -> None:
        self._total, self._tokens, self._characters = 0.0, 0, 0

    def add(self, scores: Sequence[Score]) -> None:
        """Add the scores of some texts."""
        self._total += math.fsum(score.total for score in scores)
        for score in scores:
            self._tokens += len(score.tokens)
            self._characters += score.num_characters

    def values(self, scorer: TextScorer) -> dict[str, Any]:
        """The scorer, the lengths and the means, as in `discern score --json`; 0 is the mean over no tokens or characters.

        The perplexity, for scorers that have one, is exp of the negative mean score of a token; infinite if it overflows.
        Reference: Salazar et al. 2020, section 2.3, for pseudo-log-likelihoods: PPPL = exp(-(1/N) sum of PLL), N all tokens.
        """
        per_token, perplexity = self._total / max(self._tokens, 1), PERPLEXITIES.get(scorer.name)
        return {
            "scorer": scorer.name,
            "quantity": scorer.method.quantity,
            "unit": "nats",
            "num_tokens": self._tokens,
            "num_characters": self._characters,
            "score_per_token": per_token,
            "score_per_character": self._total / max(self._characters, 1),
            **({perplexity: math.exp(-per_token) if per_token > -700 else math.inf} if perplexity else {}),
        }


@dataclass(frozen=True)
class ScoringModel:
    """The networks of a model that scorers can use, and how they were trained.

    Attributes:
        networks: networks by name, in evaluation mode and on the device to compute on; only those that were trained to read
            text as it is scored.
        special: ids of the special tokens.
        chosen_share: expected fraction of the tokens for which the generator drew a sample when the discriminator was trained;
            0 if there is no discriminator, it was not trained on all tokens, or the probability of masking depended on the
            token, as with maskings 'rarity' and 'entropy'.
        sampling: how the replacements were sampled.
        is_permuted: whether a network with a query stream was trained to predict by it, in permuted orders, rather
            than as a masked language model.
    """

    networks: Mapping[str, Network]
    special: SpecialTokens
    chosen_share: float = 0.0
    sampling: Sampling = field(default_factory=Sampling)
    is_permuted: bool = False

    def kind(self, network: Network) -> str:
        """What a network predicts, "energy" or "replaced", or how it predicts words: "permuted", "two-tower" or "masked"."""
        if network.predicts != "words":
            return network.predicts
        if self.is_permuted and network.encoder.has_query_stream:
            return "permuted"
        return "two-tower" if isinstance(network.encoder, TwoTowerEncoder) else "masked"


class TokenScorer:
    """Computes the score of each token of a text, with one network of a model. A subclass has one line in `scorers`.

    Args:
        model: a model that the scorer supports; the first network that it can use is used.

    Attributes:
        temperature: divides the logits of a softmax.
        quantity: name of the sum over the tokens of a text; its unit is nats.
        needs: what a model must have, worded to follow "needs".
        kinds: kinds of networks that can be used, as in `ScoringModel.kind`.
        reads_ahead: whether the score of a token depends on the tokens after it.
    """

    quantity: ClassVar[str] = "score"
    needs: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ()
    reads_ahead: ClassVar[bool] = True

    def __init__(self, model: ScoringModel) -> None:
        self.network, self.special, self.temperature = self.usable(model)[0], model.special, 1.0

    @classmethod
    def usable(cls, model: ScoringModel) -> list[Network]:
        """The networks of a model that the scorer can use."""
        return [network for network in model.networks.values() if model.kind(network) in cls.kinds]

    def outputs(self, input_ids: Int[Tensor, "B L"], mask: Bool[Tensor, "B L"]) -> Float[Tensor, "B L"]:
        """The score of each token of rows `[CLS] text [SEP]`, in nats; those of other positions are not used.

        By default the negated logits: of an energy model and of a discriminator, a higher logit means a less likely token.
        """
        return -self.network.token_logits(input_ids, mask)

    def token_scores(self, windows: Sequence[Window]) -> Iterable[tuple[int, Sequence[float]]]:
        """Index and scores of the wanted tokens of each window, in any order; the same in any batch, up to rounding."""
        return framed_outputs(windows, self.outputs, self.special, device_of(self.network.encoder))


# The scorers


class PseudoLikelihood(TokenScorer):
    """Each token is masked in turn. The other tokens of a rare word reveal it, so such words score too high.

    Reference: Salazar et al. 2020, "Masked language model scoring", section 2.
    """

    quantity = "pseudo-log-likelihood"
    needs = "a masked language model, as objective 'mlm' trains, or 'rtd' beside the discriminator"
    kinds: ClassVar[tuple[str, ...]] = ("masked",)

    def masked(self, window: Window, place: int) -> range:
        """Indices of the masked tokens when the token at `place` is scored."""
        return range(place, place + 1)

    def token_scores(self, windows: Sequence[Window]) -> Iterable[tuple[int, Sequence[float]]]:
        return predicted_from_others(
            self.network,
            windows,
            self.special,
            lambda logits, ids: log_probabilities(logits, ids, self.temperature).tolist(),
            self.masked,
        )


class WordwisePseudoLikelihood(PseudoLikelihood):
    """Each token is masked in turn with the rest of its word: the tokens of a word are predicted from left to right.

    Reference: Kauf and Ivanova 2023, "A better way to do masked language model scoring": PLL-word-l2r.
    """

    quantity = "pseudo-log-likelihood, the rest of a word masked"

    def masked(self, window: Window, place: int) -> range:
        end = place + 1
        while end < len(window.ids) and not window.word_starts[end]:
            end += 1
        return range(place, end)


class TwoTowerLikelihood(PseudoLikelihood):
    """Pseudo-likelihood by a left-to-right and a right-to-left model together.

    Reference: Clark et al. 2020 (Electric), sections 2.3 and 4.2: "TwoTower".
    """

    quantity = "pseudo-log-likelihood by the two-tower generator"
    needs = "a two-tower generator, as objective 'electric' has"
    kinds = ("two-tower",)


class PermutationLikelihood(TokenScorer):
    """log p(x_t | x_1 ... x_(t-1)): of all orders in which the network can predict a text, the one from left to right.

    This is the only score that is a log-probability: the probabilities of all texts of a given length sum to one. A row begins
    with the text, like the beginning of a row in training: no predicted token sees the [SEP] behind it.

    Differs: in training, five tokens in six are context of the targets; here the first tokens have hardly any.
    Reference: Yang et al. 2019, section 2.2, equation 3.
    """

    quantity = "log-likelihood from left to right"
    needs = "a network with a query stream, as objective 'permutation-lm' trains"
    kinds = ("permuted",)
    reads_ahead = False

    def outputs(self, input_ids: Int[Tensor, "B L"], mask: Bool[Tensor, "B L"]) -> Float[Tensor, "B L"]:
        text = input_ids[:, 1:]  # without [CLS]
        num_rows, length = text.shape
        # Padding is on the right, which no token attends to.
        before = torch.ones(length, length, dtype=torch.bool, device=text.device).tril(-1).expand(num_rows, -1, -1)
        positions = torch.arange(length, device=text.device).expand(num_rows, -1)
        encoder: Any = self.network.encoder
        states: Tensor = encoder.two_streams(text, Factorization(before, positions)).query
        parts = zip(*(torch.split(each.flatten(0, 1), ROWS_PER_BATCH) for each in (states, text)), strict=True)
        scores = torch.cat([log_probabilities(self.network.head(some).float(), ids) for some, ids in parts])
        return F.pad(scores.view_as(text), (1, 0))


class Energies(TokenScorer):
    """The negated energy of each token: log p(x_t | the others), not normalized.

    The noise distribution and the odds of noise, which the loss adds to the energy in training, are not part of the score.

    Reference: Clark et al. 2020 (Electric), section 2.1 and 4.2: the pseudo-log-likelihood of a text is -sum E(x)_t.
    """

    quantity = "unnormalized pseudo-log-likelihood (minus the energies)"
    needs = "an energy model, as objective 'electric' trains"
    kinds = ("energy",)


class ReplacedTokenOdds(TokenScorer):
    """Log-odds of each token being original: log P(original) - log P(replaced).

    At the optimum this is log p - log q - log(1 - p) + log((1 - a + a q) / a), where p and q are the probabilities of x_t in text
    and by the generator, and a is the fraction of tokens with a sample of the generator. Of two equally likely tokens, the one
    that the generator finds likelier scores lower, and every further token adds about log((1 - a) / a). The score is therefore
    for sentences that differ in few tokens; `inversion` removes q and a. With objective 'rtd-masked-only' the optimum is
    log p - log(1 - p), without q.

    Reference: Clark et al. 2020, section 2.
    """

    quantity = "log-odds of the tokens being original"
    needs = "a discriminator, as objective 'rtd' trains"
    kinds = ("replaced",)


class Inversion(PseudoLikelihood):
    """log p(x_t | the others), from the discriminator's odds and the generator's probability of the token.

    The discriminator reads the text once. A generator that is a masked language model reads it once per token, a two-tower
    generator once. The probabilities of different tokens at a position need not sum to 1, as the discriminator only evaluates
    the token in the text.

    Reference: Clark et al. 2020, appendix on ELECTRA as a masked language model.
    """

    quantity = "pseudo-log-likelihood by discriminator and generator"
    needs = (
        "a discriminator and a generator with weights of its own, as a run of objective 'rtd' has, trained on every token, with "
        "uniformly chosen positions and samples of the whole softmax, without top_p and disallow_original"
    )
    kinds = ("masked", "two-tower")

    def __init__(self, model: ScoringModel) -> None:
        super().__init__(model)
        self.odds, self.share, self.temperature = ReplacedTokenOdds(model), model.chosen_share, model.sampling.temperature

    @classmethod
    def usable(cls, model: ScoringModel) -> list[Network]:
        """The generators, if the formula holds for the model."""
        is_known = model.chosen_share > 0 and not model.sampling.cuts
        return super().usable(model) if is_known and ReplacedTokenOdds.usable(model) else []

    def token_scores(self, windows: Sequence[Window]) -> Iterable[tuple[int, Sequence[float]]]:
        likelihoods = dict(super().token_scores(windows))
        for number, odds in self.odds.token_scores(windows):
            log_q = torch.tensor(likelihoods[number]).double()
            yield number, inverted(torch.tensor(odds).double(), log_q, self.share).tolist()


def inverted(log_odds: Float[Tensor, "..."], log_generator: Float[Tensor, "..."], chosen_share: float) -> Float[Tensor, "..."]:
    """log p(x) of a token from its log-odds of being original, as of an optimal discriminator.

    A token is original if it was not masked, or if the generator happened to sample it: with D = P(original),
    a = chosen_share and q the generator, D = ((1 - a) p + a q p) / ((1 - a) p + a q), so that
    p = a D q / (a q + (1 - a)(1 - D)), which never exceeds D.

    Args:
        log_odds: log D - log(1 - D).
        log_generator: log q.
    """
    log_share, log_rest = math.log(chosen_share), math.log1p(-chosen_share)
    chosen = log_share + log_generator
    return chosen + F.logsigmoid(log_odds) - torch.logaddexp(chosen, log_rest + F.logsigmoid(-log_odds))


# Texts, files and model folders


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
        return f"scorer '{self.name}': {self.method.quantity} in nats, summed over the tokens; higher is likelier"

    def score(self, texts: Sequence[str]) -> list[Score]:
        """One score per text, in order. Texts with the same tokens get exactly the same score.

        All texts and their scores are held in memory: pass some thousands at a time.

        Raises:
            NumericsError: a score is not finite.
        """
        return list(self._scores(texts, encode_texts(self.tokenizer, texts)))

    def score_blocks(
        self, texts: Iterable[TextT], progress: Progress, warn: Callable[[str], None]
    ) -> Iterator[list[tuple[TextT, Score]]]:
        """Each text with its score, in order and in blocks. `warn` is called as by `read_blocks`."""
        return read_blocks(self, texts, self._scores, progress, warn, description="scoring")

    def _scores(self, texts: Sequence[str], encodings: Sequence[Encoding]) -> Iterator[Score]:
        finder = WordFinder(self.tokenizer)  # as in a data set prepared without a segmenter
        word_starts = [
            finder.starts(np.array(encoding.ids, np.uint32), np.array([len(encoding)]), [text], [encoding]).tolist()
            for text, encoding in zip(texts, encodings, strict=True)
        ]
        found = read_in_windows(
            [encoding.ids for encoding in encodings],
            self.window_size,
            self.method.token_scores,
            reads_ahead=self.method.reads_ahead,
            word_starts=word_starts,
        )
        for text, encoding, values in zip(texts, encodings, found, strict=True):
            yield Score(text, math.fsum(values), encoding.tokens, encoding.offsets, values)


def score_lines(
    scorer: TextScorer, source: Path | Sequence[str], progress: Progress, warn: Callable[[str], None]
) -> Iterator[list[Score]]:
    """Scores of sentences, in order and in blocks; the memory for a file is bounded.

    Args:
        source: the sentences, or a UTF-8 file with one per line, plain or compressed; `-` is standard input.
        warn: called with messages about sentences that are read in several windows.

    Raises:
        DataError: the file cannot be read or has no lines, or a line has no tokens; the scores before it were returned.
    """
    if isinstance(source, Path):
        name = shown_name(source)
        lines = without_blank_end(numbered_lines(source))
        texts: Iterable[InputText] = (InputText(f"{name}:{number}", number, text) for number, text in lines)
    else:
        name, texts = "the text", numbered(source)
    block = None
    for block in scorer.score_blocks(texts, progress, warn):
        filled = list(takewhile(lambda pair: pair[1].tokens, block))
        yield [score for _, score in filled]
        if len(filled) < len(block):
            raise DataError(
                f"{block[len(filled)][0].where} is empty, or contains nothing that the tokenizer keeps, so there is no score",
                hint="leave it out; grep '[^[:space:]]' FILE removes empty lines, so that sentences and scores stay aligned",
            )
    if block is None:
        raise DataError(f"{name} has no lines", hint="give one sentence per line")


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
    place = choose_device(device)
    opened = open_model(model, warn=warn)
    networks, objective, special = opened.networks(), opened.pretraining_objective, special_tokens(opened.tokenizer)
    for network in networks.values():
        moved(network, place)
    if objective is None:
        width = max(network.encoder.config.hidden_size for network in networks.values())
        # The released ELECTRAs drew positions with replacement in rows of 512.
        share = chosen_share("with-replacement", 0.15 if width <= 768 else 0.25, 512)
        served = ScoringModel(networks, special, share or 0.0, is_permuted=True)
    else:
        if objective.encoder_reads_samples:
            # This encoder reads a generator's samples where a masked language model reads [MASK].
            networks = {name: network for name, network in networks.items() if name != "encoder"}
        step = opened.step or 0
        share = objective.replaced_share(step, opened.max_length) if objective.detects_every_token else None
        served = ScoringModel(networks, special, share or 0.0, objective.sampling_at(step), objective.permutes)
    names = supported(served)
    chosen = name or next((known for known in preferred if known in names), None)
    if chosen is None or chosen not in names:
        needs = "no scorer can use it" if chosen is None else f"scorer '{chosen}' needs {scorers.load(chosen).needs}"
        export = "give a run, or export it again: discern export RUN --out DIR --all-networks"
        raise ConfigError(f"{opened.folder}: {needs}", hint=f"for this model: --scorer {' or '.join(names)}" if names else export)
    method = scorers.load(chosen)(served)
    if objective is None and isinstance(method, Inversion):
        assumed = f"{method.share:.3g}, that of the released ELECTRAs of this width,"
        warn(f"{opened.folder} does not record the fraction of tokens that were masked in training: {assumed} is assumed")
    return TextScorer(opened.tokenizer, opened.max_length, chosen, method, opened.step)


def supported(model: ScoringModel) -> list[str]:
    """The names of the scorers that a model supports."""
    return [name for name in scorers.names() if scorers.load(name).usable(model)]
