"""Fill the [MASK] tokens of a text, by the masked language model of a model folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from discern.data.tokenizer import SPECIAL_TOKENS, TokenTexts, shown_as, special_names
from discern.data.tokenizer.tokens import UnknownTokens, separating
from discern.errors import ConfigError
from discern.inference.windows import TextModel, device_of, moved, read, warn_if_long
from discern.model_files.folder import ModelFolder, open_model
from discern.models.base import Network
from discern.models.two_tower.encoder import TwoTowerEncoder
from discern.training.distributed import choose_device

MASK = SPECIAL_TOKENS["mask"]


@dataclass(frozen=True)
class FilledToken:
    """A prediction for a mask.

    Attributes:
        token: token as in the vocabulary; '##ing' continues a word.
        probability: its probability among all tokens of the vocabulary, in 0-1.
        text: what the token adds to the text before it: ' meal', 'ing'.
    """

    token: str
    probability: float
    text: str

    @property
    def shown(self) -> str:
        """The text without the space in front; '##' is kept, and a part of a character is spelled as in the vocabulary."""
        return shown_as(self.token, self.text)


@dataclass(frozen=True)
class Filler(TextModel):
    """A masked language model.

    Attributes:
        reading: a copy of the tokenizer that reads the mask token in a text as a mask, see `reading_masks`.
    """

    network: Network
    reading: Tokenizer

    def ids(self, text: str) -> list[int]:
        """The ids of a text whose masks are written as [MASK] or as the tokenizer itself spells them."""
        spelled = text.replace(MASK, special_names(self.tokenizer)["mask"])
        return self.reading.encode(spelled, add_special_tokens=False).ids

    def masks_in(self, text: str) -> int:
        """Number of masks in a text."""
        return self.ids(text).count(self.special.mask)


def load_filler(model: Path | ModelFolder, warn: Callable[[str], None], device: str = "auto") -> Filler:
    """Load the masked language model of a folder, preferably its generator.

    Args:
        model: a run, an export, or a Hugging Face ELECTRA generator or BERT.
        warn: called with messages about damaged checkpoints that were skipped.

    Raises:
        ConfigError: the model has no head over the vocabulary, or there is no such device.
        DataError: the folder is neither a run nor a model, or has no tokenizer.
        CheckpointError: the weights are missing or damaged.
    """
    place, opened = choose_device(device), open_model(model, warn=warn)
    networks, objective = opened.networks(), opened.pretraining_objective
    permuted = objective is None or objective.permutes  # trained without [MASK], to predict by the query stream
    fillers = {
        name: network
        for name, network in networks.items()
        if network.predicts_words and not (permuted and network.encoder.has_query_stream)
    }
    if not fillers:
        raise ConfigError(
            f"{opened.folder} has no head over the vocabulary that was trained to fill masks; it only has the "
            f"{' and the '.join(networks)}",
            hint="give the run, or export it again: discern export RUN --out DIR --all-networks (or --network generator)",
        )
    # If both have such a head, the encoder was trained on samples in place of [MASK], so only the generator knows [MASK].
    network = moved(fillers.get("generator") or next(iter(fillers.values())), place)
    return Filler(opened.tokenizer, opened.max_length, network, reading_masks(opened.tokenizer))


def reading_masks(tokenizer: Tokenizer) -> Tokenizer:
    """A copy of the tokenizer that reads its mask token in a text as the mask, including the spaces before it.

    In BPE and Unigram vocabularies, a token includes the space before it, and so did a mask in training. A separate space before
    the mask would ask for the rest of a word. Other special tokens that a text spells, such as "[SEP]", are read as text.
    """
    names, content = special_names(tokenizer), json.loads(tokenizer.to_str())
    mask = names["mask"]
    for each in content["added_tokens"]:
        if each["content"] == mask:
            each |= {"special": False, "normalized": False, "lstrip": True}
    reading = Tokenizer.from_str(json.dumps(content))
    reading.encode_special_tokens = True  # reads special tokens as text; the mask no longer is one
    others = [name for role, name in names.items() if role not in ("mask", "unk")]
    found = reading.encode(" ".join(others), add_special_tokens=False).ids
    if any(tokenizer.token_to_id(name) in found for name in others):  # a Unigram has them among its pieces
        reading.pre_tokenizer = separating(reading.pre_tokenizer, others)
    return reading


def fill(
    model: Path,
    text: str,
    top: int,
    warn: Callable[[str], None],
    device: str = "auto",
    note: Callable[[str], None] = lambda _: None,
) -> list[list[FilledToken]]:
    """The likeliest tokens at each mask of a text, best first, in float32; raises the errors of both functions that it calls."""
    return fill_masks(load_filler(model, warn, device), text, top, warn, note)


@torch.inference_mode()
def fill_masks(
    filler: Filler, text: str, top: int, warn: Callable[[str], None], note: Callable[[str], None] = lambda _: None
) -> list[list[FilledToken]]:
    """The likeliest tokens at each mask, best first; equally likely ones in the order of their ids.

    Each mask is predicted with all other masks in place. Special tokens are not returned, but keep their probability. In a text
    that is too long, each mask is predicted from as many tokens around it as the model was trained on.

    Args:
        text: text with one or more "[MASK]".
        top: number of tokens per mask.
        warn: called if the text is too long, or if the predictions are less reliable.
        note: called with the fraction of unknown tokens.

    Raises:
        ConfigError: the text has no mask.
    """
    ids = filler.ids(text)
    masks = [position for position, token in enumerate(ids) if token == filler.special.mask]
    if not masks:
        raise ConfigError(
            f"the text has no {MASK}: {text!r:.60}",
            hint=f"write {MASK}, in capitals and brackets, where a token is to be predicted: 'The {MASK} sat on the mat.'",
        )
    warn_if_long(filler, "the text", ids, warn, "each mask is predicted from the tokens around it")
    words = {number: token for token, number in filler.tokenizer.get_vocab(with_added_tokens=True).items()}
    # Neither special tokens nor rows of the embedding table without a token may be predicted.
    never = special_names(filler.tokenizer).values()
    allowed = torch.tensor(sorted(number for number, token in words.items() if token not in never))
    # The logits of each mask, in a window around it, centered or at an edge of the text; there is no padding.
    size, special, device = filler.window_size, filler.special, device_of(filler.network.encoder)
    starts = [max(0, min(position - size // 2, len(ids) - size)) for position in masks]
    distinct = sorted(set(starts))
    rows = torch.tensor([[special.cls, *ids[start : start + size], special.sep] for start in distinct], device=device)
    states = read(filler.network.encoder, rows)
    places = [1 + position - start for position, start in zip(masks, starts, strict=True)]
    logits = filler.network.head(states[[distinct.index(start) for start in starts], places]).float()
    # A stable sort instead of topk, which does not define the order of ties.
    ranked = logits.softmax(-1).cpu()[:, allowed].sort(dim=-1, descending=True, stable=True)
    texts, found = TokenTexts(filler.tokenizer), list[list[FilledToken]]()
    for values, best in zip(ranked.values[:, :top].tolist(), ranked.indices[:, :top], strict=True):
        chosen = zip(allowed[best].tolist(), values, strict=True)
        found.append([FilledToken(words[number], value, texts.added(number)) for number, value in chosen])
    if len(found) > 1 and isinstance(filler.network.encoder, TwoTowerEncoder):
        warn(
            "this generator was trained on text without [MASK]; with several masks, each prediction also depends on the other "
            "masks"
        )
    unknown = UnknownTokens(filler.tokenizer)
    unknown.add_ids(ids)
    unknown.report(note, warn)
    return found


def fill_values(text: str, masks: Sequence[Sequence[FilledToken]]) -> dict[str, Any]:
    """A text with the predictions for its mask, or for each of its masks, as in `discern fill --json`."""
    lists = [
        [{"token": each.token, "text": each.text, "shown": each.shown, "probability": each.probability} for each in mask]
        for mask in masks
    ]
    return {"text": text, "predictions": lists[0] if len(lists) == 1 else lists}
