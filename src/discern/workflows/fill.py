"""The words that fit at the masks of a text, by the masked language model of a run or of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from discern.data.tokenizer import load_tokenizer
from discern.data.unknown import UnknownTokens
from discern.errors import ConfigError
from discern.model.heads import CopyMLMHead, LanguageHead, TiedLMHead
from discern.model.two_tower import TwoTowerEncoder
from discern.objectives.permutation_lm import PermutationLMConfig
from discern.scoring.filling import FilledToken, Filler, fill_masks, reading_masks
from discern.training.parallel import choose_device
from discern.workflows.models import load_model


def fill(
    model: Path,
    text: str,
    top: int,
    warn: Callable[[str], None],
    device: str = "auto",
    note: Callable[[str], None] = lambda _: None,
) -> list[list[FilledToken]]:
    """The likeliest tokens at each mask of a text, best first, computed in float32.

    Args:
        model: folder of a run, of an export, or of a Hugging Face ELECTRA generator or BERT.
        text: with "[MASK]" once or more often.
        top: how many a mask.
        warn: told of what makes the answer worth less, and of damaged checkpoints that were passed over.
        note: told the share of unknown tokens.

    Raises:
        ConfigError: the model has no head over the vocabulary, or the text no mask, or there is no such device.
        DataError: the folder holds neither a run nor a model, or no tokenizer.
        CheckpointError: its weights are missing or damaged.
    """
    filler = load_filler(model, warn, device)
    found = filled(filler, text, top, warn)
    unknown = UnknownTokens(filler.tokenizer)
    unknown.add_ids(filler.tokenizer.encode(text, add_special_tokens=False).ids)
    unknown.report(note, warn)
    return found


def filled(filler: Filler, text: str, top: int, warn: Callable[[str], None]) -> list[list[FilledToken]]:
    """As `fill`, with a model that is loaded already."""
    found = fill_masks(filler, text, top, warn)
    if len(found) > 1 and isinstance(filler.network.encoder, TwoTowerEncoder):
        warn("this generator was trained on clean text and never read a [MASK]; with several, each is told from the others too")
    return found


def load_filler(model: Path, warn: Callable[[str], None], device: str = "auto") -> Filler:
    """The masked language model in a folder, of an export with all its networks the generator; raises as `fill` does."""
    place = choose_device(device)
    loaded = load_model(model, beside=True, warn=warn)
    fillers = {name: network for name, network in loaded.networks.items() if isinstance(network.head, LanguageHead | CopyMLMHead)}
    permuted = loaded.objective is None or isinstance(loaded.objective, PermutationLMConfig)
    if permuted and any(isinstance(network.head, TiedLMHead) for network in fillers.values()):
        raise ConfigError(
            f"{model} is an XLNet: it was trained to predict by its query stream and never read a [MASK]",
            hint=f"discern score {model} TEXT says how likely sentences are; one trained by objective 'mlm' fills masks",
        )
    if not fillers:
        raise ConfigError(
            f"{model} has no head over the vocabulary, so it fills no mask: it holds the "
            f"{' and the '.join(loaded.networks)} alone",
            hint="give the run, or what `discern export RUN --out DIR --all-networks` or `--network generator` writes",
        )
    # Where encoder and generator both have one, the encoder was trained on samples in place of [MASK] and never read it.
    network = fillers.get("generator") or next(iter(fillers.values()))
    network.encoder.to(place)
    network.head.to(place)
    return Filler(network, reading_masks(load_tokenizer(loaded.tokenizer_path)), loaded.max_length)
