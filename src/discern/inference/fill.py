"""Fill the [MASK] tokens of a text, by the masked language model of a model folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from discern.data.tokenizer import SPECIAL_TOKENS, TokenTexts, shown_as, special_names, special_tokens
from discern.data.tokenizer.tokens import UnknownTokens, separating
from discern.errors import ConfigError
from discern.inference.rows import TextModel, moved, read
from discern.model_files.folder import ModelFolder, open_model
from discern.models.base import Network
from discern.models.two_tower.encoder import TwoTowerEncoder
from discern.training.distributed import choose_device

MASK = SPECIAL_TOKENS["mask"]
_MASKS_AT_ONCE = 32


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

    def spelled(self, text: str) -> str:
        """A text whose masks are written as [MASK] or as the tokenizer itself spells them, all in the latter way."""
        return text.replace(MASK, special_names(self.tokenizer)["mask"])

    def begins_words(self, before: str) -> bool:
        """Whether the tokens that begin a word after a text have a space in front."""
        if before:
            return before[-1].isspace()  # which the mask, too, includes
        first = self.tokenizer.encode("a", add_special_tokens=False).ids[:1]
        return any(TokenTexts(self.tokenizer).added(number).startswith(" ") for number in first)

    def masks_in(self, text: str) -> int:
        """Number of masks in a text."""
        return self.spelled(text).count(special_names(self.tokenizer)["mask"])


def reading_masks(tokenizer: Tokenizer) -> Tokenizer:
    """A copy of the tokenizer that reads its mask token in a text as the mask, including the spaces before it.

    In BPE and Unigram vocabularies, a token includes the space before it, and so did a mask in training. A separate space before
    the mask would ask for the rest of a word. Other special tokens that a text spells, such as "[SEP]", are read as text.
    """
    names, content = special_names(tokenizer), json.loads(tokenizer.to_str())
    mask, words = names["mask"], tokenizer.get_vocab(with_added_tokens=False)
    kept = []
    for each in content["added_tokens"]:
        if not each["special"] or each["content"] == mask:
            kept.append(each)
        elif each["content"] not in words:
            # The library numbers such tokens in order: under a name that no text has, it still counts for those after it.
            kept.append(each | {"content": f"\0{each['content']}"})
    content["added_tokens"] = kept
    reading = Tokenizer.from_str(json.dumps(content))
    others = [name for role, name in names.items() if role not in ("mask", "unk")]
    found = reading.encode(" ".join(others), add_special_tokens=False).ids
    if any(tokenizer.token_to_id(name) in found for name in others):  # a Unigram has them among its pieces
        reading.pre_tokenizer = separating(reading.pre_tokenizer, others)
    reading.add_special_tokens([AddedToken(mask, special=True, normalized=False, lstrip=True)])
    reading.encode_special_tokens = False
    return reading


def fill_masks(filler: Filler, text: str, top: int, warn: Callable[[str], None]) -> list[list[FilledToken]]:
    """The likeliest tokens at each mask, best first; equally likely ones in the order of their ids.

    Each mask is predicted with all other masks in place. Special tokens are not returned, but keep their probability. In a text
    that is too long, each mask is predicted from as many tokens around it as the model was trained on.

    Args:
        top: number of tokens per mask.
        warn: called if the text is too long, or if the predictions are less reliable.

    Raises:
        ConfigError: the text has no mask, or `top` is not positive.
    """
    if top < 1:
        raise ConfigError(f"top is {top}, expected 1 or more", hint="--top 5")
    special = special_tokens(filler.tokenizer)
    ids = _ids(filler, text)
    masks = [position for position, token in enumerate(ids) if token == special.mask]
    if not masks:
        raise ConfigError(
            f"the text has no {MASK}: {text!r:.60}",
            hint=f"write {MASK}, in capitals and brackets, where a token is to be predicted: 'The {MASK} sat on the mat.'",
        )
    if len(ids) > filler.window_size:
        warn(
            f"the text is longer than the {filler.window_size} tokens that the model was trained on: "
            "each mask is predicted from those around it"
        )
    words = {number: token for token, number in filler.tokenizer.get_vocab(with_added_tokens=True).items()}
    # Neither special tokens nor rows of the embedding table without a token may be predicted.
    never = special_names(filler.tokenizer).values()
    allowed = torch.tensor(sorted(number for number, token in words.items() if token not in never))
    texts = TokenTexts(filler.tokenizer)
    found: list[list[FilledToken]] = []
    for first in range(0, len(masks), _MASKS_AT_ONCE):
        probabilities = _mask_logits(filler, ids, masks[first : first + _MASKS_AT_ONCE]).softmax(-1).cpu()[:, allowed]
        # A stable sort instead of topk, which does not define the order of ties.
        order = probabilities.sort(dim=-1, descending=True, stable=True)
        for values, places in zip(order.values[:, :top].tolist(), order.indices[:, :top], strict=True):
            chosen = zip(allowed[places].tolist(), values, strict=True)
            found.append([FilledToken(words[number], value, texts.added(number)) for number, value in chosen])
    if len(found) > 1 and isinstance(filler.network.encoder, TwoTowerEncoder):
        warn(
            "this generator was trained on text without [MASK]; with several masks, each prediction also depends on the other "
            "masks"
        )
    return found


def window_start(position: int, length: int, window_size: int) -> int:
    """Start of a window of `window_size` tokens around a position: centered, or at an edge of the text of `length`."""
    return max(0, min(position - window_size // 2, length - window_size))


@torch.inference_mode()
def _mask_logits(filler: Filler, ids: Sequence[int], positions: Sequence[int]) -> Float[Tensor, "M V"]:
    """Float32 logits at each position. All rows have the same length, so there is no padding."""
    special, device = special_tokens(filler.tokenizer), filler.network.encoder.embeddings.weights.device
    starts = [window_start(position, len(ids), filler.window_size) for position in positions]
    distinct = sorted(set(starts))
    rows = [[special.cls, *ids[start : start + filler.window_size], special.sep] for start in distinct]
    hidden = read(filler.network.encoder, torch.tensor(rows, device=device))
    row = torch.tensor([distinct.index(start) for start in starts])
    place = torch.tensor([1 + position - start for position, start in zip(positions, starts, strict=True)])
    logits: Tensor = filler.network.head(hidden[row.to(device), place.to(device)])
    return logits.float()


def _ids(filler: Filler, text: str) -> list[int]:
    ids: list[int] = filler.reading.encode(filler.spelled(text), add_special_tokens=False).ids
    return ids


def fill(
    model: Path,
    text: str,
    top: int,
    warn: Callable[[str], None],
    device: str = "auto",
    note: Callable[[str], None] = lambda _: None,
) -> list[list[FilledToken]]:
    """The likeliest tokens at each mask of a text, best first, in float32.

    Args:
        model: folder of a run, an export, or a Hugging Face ELECTRA generator or BERT.
        text: text with one or more "[MASK]".
        top: number of tokens per mask.
        warn: called with messages about texts that are too long, less reliable predictions, and damaged checkpoints that were
            skipped.
        note: called with the fraction of unknown tokens.

    Raises:
        ConfigError: the model has no head over the vocabulary, the text has no mask, or there is no such device.
        DataError: the folder is neither a run nor a model, or has no tokenizer.
        CheckpointError: the weights are missing or damaged.
    """
    filler = load_filler(model, warn, device)
    found = fill_masks(filler, text, top, warn)
    unknown = UnknownTokens(filler.tokenizer)
    unknown.add_ids(_ids(filler, text))
    unknown.report(note, warn)
    return found


def load_filler(model: Path | ModelFolder, warn: Callable[[str], None], device: str = "auto") -> Filler:
    """Load the masked language model of a folder, preferably its generator; raises the errors of `fill`."""
    place = choose_device(device)
    loaded = open_model(model, warn=warn)
    networks, objective = loaded.networks(), loaded.pretraining_objective
    fillers = {name: network for name, network in networks.items() if network.predicts_words}
    permuted = objective is None or objective.permutes
    if permuted and any(network.encoder.has_query_stream for network in fillers.values()):
        raise ConfigError(
            f"{loaded.folder} predicts by its query stream and was trained without [MASK]",
            hint=f"discern score {loaded.folder} FILE scores sentences; a model trained with objective 'mlm' fills masks",
        )
    if not fillers:
        raise ConfigError(
            f"{loaded.folder} has no head over the vocabulary to fill masks with; it only has the {' and the '.join(networks)}",
            hint="give the run, or export it again: discern export RUN --out DIR --all-networks (or --network generator)",
        )
    # If both have such a head, the encoder was trained on samples in place of [MASK], so only the generator knows [MASK].
    network = moved(fillers.get("generator") or next(iter(fillers.values())), place)
    return Filler(loaded.tokenizer, loaded.max_length, network, reading_masks(loaded.tokenizer))
