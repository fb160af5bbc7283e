"""How likely sentences are, by the networks of a run, an export, or a Hugging Face folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from discern.corruption.share import chosen_share
from discern.data.tokenizer import load_tokenizer, special_tokens
from discern.data.unknown import UnknownTokens
from discern.errors import ConfigError, DataError
from discern.model.xlnet import XLNetEncoder
from discern.objectives.config import ObjectiveConfig
from discern.objectives.permutation_lm import PermutationLMConfig
from discern.objectives.replacement import ReplacementConfig
from discern.objectives.rtd_config import RTDConfig
from discern.progress import Progress
from discern.scoring import PREFERRED, scorers
from discern.scoring.base import Method, Score, Scorer, ScoringModel, kind_of
from discern.tasks.readers.files import numbered_lines, stream_lines
from discern.training.parallel import choose_device
from discern.types import SpecialTokens
from discern.workflows.models import LoadedModel, load_model

# Sentences are sorted by length among this many: enough that batches hardly need padding, few enough to be held at once.
_BLOCK = 512

# Of the released ELECTRAs by hidden size up to: what `inversion` assumes of a model that does not say. They drew positions
# with replacement in rows of 512.
_RELEASED_MASK_PROBABILITIES = ((768, 0.15), (1_000_000, 0.25))
_RELEASED_ROW_LENGTH = 512


def load_scorer(
    model: Path,
    name: str | None = None,
    device: str = "auto",
    *,
    warn: Callable[[str], None],
    preferred: Sequence[str] = PREFERRED,
) -> Scorer:
    """What scores texts by the networks in a folder, in float32.

    Args:
        model: a run, an export, or a Hugging Face ELECTRA.
        name: of the scorer; None: the first of `preferred` that the networks serve.
        warn: told of damaged checkpoints that were passed over, and of what had to be assumed.

    Raises:
        ConfigError: no such scorer or device, or the model lacks what the scorer needs.
        DataError: the folder holds neither a run nor a model, or no tokenizer.
        CheckpointError: its weights are missing or damaged.
    """
    if name is not None:
        scorers.load(name)
    place = choose_device(device)
    loaded = load_model(model, beside=True, warn=warn)
    for network in loaded.networks.values():
        for part in (network.encoder, network.head, network.bilinear):
            if part is not None:
                part.to(place).eval()
    tokenizer = load_tokenizer(loaded.tokenizer_path)
    served = _served(loaded, special_tokens(tokenizer))
    chosen = name or next((known for known in preferred if _method(known).lacks(served) is None), None)
    if chosen is None or (lack := _method(chosen).lacks(served)) is not None:
        needs = "no scorer can use it" if chosen is None else f"scorer '{chosen}' needs {lack}"
        raise ConfigError(f"{model}: {needs}; it holds {_described(served, loaded.objective)}", hint=_others(served))
    if loaded.objective is None and _method(chosen).needs_chosen_share:
        share = f"{served.chosen_share:.3g}, that of the released ELECTRAs of this width,"
        warn(f"{model} does not record the share of tokens that the generator drew in training: {share} is assumed")
    return Scorer(chosen, _method(chosen).of(served), tokenizer, loaded.max_length, loaded.step)


def score_lines(scorer: Scorer, source: Path, progress: Progress, warn: Callable[[str], None]) -> Iterator[list[Score]]:
    """The scores of a text with one sentence a line, in order, some hundreds at a time; memory is bounded.

    Args:
        source: a UTF-8 file, plain or compressed; `-` is standard input.
        warn: told of sentences that are read in several windows, and of empty lines at the end, which are passed over.

    Raises:
        DataError: the file cannot be read or holds no line, or a line has no token; those before it have been given.
    """
    name = "standard input" if str(source) == "-" else str(source)
    lines = stream_lines(sys.stdin.buffer, name) if str(source) == "-" else numbered_lines(source)
    lines = _without_blank_end(lines, name, warn)
    progress.start("scoring", None, "sentences")
    unknown = UnknownTokens(scorer.tokenizer)
    longer = done = 0
    try:
        while block := list(islice(lines, _BLOCK)):
            scores = scorer.score([text for _, text in block])
            empty = next((place for place, score in enumerate(scores) if not score.tokens), len(scores))
            for (number, _), score in zip(block[:empty], scores, strict=False):
                if score.windows > 1 and not longer:
                    warn(f"{name}:{number}: {_too_long(score, scorer)}")
                longer += score.windows > 1
                unknown.add_tokens(score.tokens)
            yield scores[:empty]
            if empty < len(scores):
                raise _nothing(name, *block[empty])
            done += len(scores)
            progress.advance(len(scores))
    finally:
        progress.finish()
    if not done:
        raise DataError(f"{name} holds no line", hint="give a text with one sentence a line")
    if longer > 1:
        warn(f"{longer:,} of {done:,} sentences were scored in several windows")
    unknown.report(progress.note, warn)


def _without_blank_end(lines: Iterator[tuple[int, str]], name: str, warn: Callable[[str], None]) -> Iterator[tuple[int, str]]:
    """The lines without the empty ones at the end; of those before another line the first of each group."""
    begins: tuple[int, str] | None = None
    number = 0
    for number, text in lines:
        if not text.strip():
            begins = begins or (number, text)
            continue
        if begins is not None:
            yield begins
            begins = None
        yield number, text
    if begins is not None:
        where = f"{begins[0]} to {number}" if number > begins[0] else f"{number}"
        warn(f"{name}:{where}: empty lines at the end, passed over")


def _too_long(score: Score, scorer: Scorer) -> str:
    return (
        f"{len(score.tokens):,} tokens, and the model was trained on {scorer.room:,} at a time: "
        f"scored in {score.windows:,} overlapping windows, each token where it has most context"
    )


def _nothing(name: str, number: int, text: str) -> DataError:
    why = "holds nothing that the tokenizer keeps" if text.strip() else "is empty"
    return DataError(
        f"{name}:{number}: the line {why}, so there is nothing to score",
        hint="take it out, so that sentences and scores stay in step: grep '[^[:space:]]' FILE leaves out empty lines",
    )


def _served(loaded: LoadedModel, special: SpecialTokens) -> ScoringModel:
    """What a model has for a scorer to use."""
    networks, objective = loaded.networks, loaded.objective
    if isinstance(objective, RTDConfig):
        share = _chosen_share(objective, loaded.step or 0, loaded.max_length)
        return ScoringModel(networks, special, share, share is not None, objective.sampling)
    if objective is None:
        width = max(network.encoder.config.hidden_size for network in networks.values())
        masked = next(probability for widest, probability in _RELEASED_MASK_PROBABILITIES if width <= widest)
        share = chosen_share("with-replacement", masked, _RELEASED_ROW_LENGTH)
        return ScoringModel(networks, special, share, is_permuted=True)
    if isinstance(objective, ReplacementConfig):
        # The encoder of these objectives reads a generator's samples where a masked language model reads [MASK].
        networks = {name: network for name, network in networks.items() if name != "encoder"}
    return ScoringModel(networks, special, is_permuted=isinstance(objective, PermutationLMConfig))


def _chosen_share(objective: RTDConfig, step: int, row_length: int) -> float | None:
    """Of the tokens that the discriminator read at a step; None where the masking has no such number."""
    share = chosen_share(objective.masking, objective.probability_at(step), row_length)
    if share is None or not objective.sentence_contrastive_weight:
        return share
    return share * (1 - objective.sentence_clean_probability)  # what was chosen in a text that stays clean is put back


def _method(name: str) -> type[Method]:
    found: type[Method] = scorers.load(name)
    return found


def _described(model: ScoringModel, objective: ObjectiveConfig | None) -> str:
    """What there is; of an XLNet also what it was trained by, as that decides what can use it."""
    by = "" if objective is None else f" trained by '{objective.name}'"
    kinds = (kind_of(network) + (by if isinstance(network.encoder, XLNetEncoder) else "") for network in model.networks.values())
    return " and ".join(dict.fromkeys(kinds)) or "no network of use here"


def _others(model: ScoringModel) -> str:
    """What would do instead."""
    usable = [name for name in scorers.names() if _method(name).lacks(model) is None]
    if usable:
        return f"for this model: --scorer {' or '.join(usable)}"
    return "give a run, or what `discern export RUN --out DIR --all-networks` writes"
