"""The words that a masked language model expects where a text says [MASK]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from discern.data.tokenizer import SPECIAL_TOKENS, special_tokens
from discern.errors import ConfigError
from discern.model.network import Network
from discern.scoring.rows import read

MASK = SPECIAL_TOKENS["mask"]
_MASKS_AT_ONCE = 32


@dataclass(frozen=True)
class FilledToken:
    """A token that may stand at a mask.

    Attributes:
        token: as the tokenizer writes it: '##ing' continues a word.
        probability: in 0-1, of all tokens of the vocabulary.
    """

    token: str
    probability: float


@dataclass(frozen=True)
class Filler:
    """A masked language model, in evaluation mode, with its tokenizer.

    Attributes:
        tokenizer: reads "[MASK]" in a text as the mask, see `reading_masks`.
        max_length: positions it was trained on, [CLS] and [SEP] included; at least 3.
    """

    network: Network
    tokenizer: Tokenizer
    max_length: int

    @property
    def room(self) -> int:
        """Tokens of text that it takes at a time."""
        return self.max_length - 2


def reading_masks(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, but "[MASK]" in a text is the mask, to which the blanks before it belong.

    Where a token carries the blank before it (BPE, Unigram), a mask stood for both in training; a blank of its own would
    ask for the rest of a word.
    """
    reading = Tokenizer.from_str(tokenizer.to_str())
    reading.add_special_tokens([AddedToken(MASK, special=True, normalized=False, lstrip=True)])
    reading.encode_special_tokens = False
    return reading


def fill_masks(filler: Filler, text: str, top: int, warn: Callable[[str], None]) -> list[list[FilledToken]]:
    """The likeliest tokens at each mask, best first; equally likely ones in the order of their ids.

    Each mask is told from the text with all others in place. Special tokens are left out of what is given, and not of the
    probabilities. Of a text that is too long, each mask sees as many tokens around it as the model was trained on.

    Args:
        top: how many a mask; no more than the vocabulary has.
        warn: told of a text that is too long.

    Raises:
        ConfigError: the text has no mask, or `top` is not positive.
    """
    if top < 1:
        raise ConfigError(f"{top} predictions are asked for", hint="ask for one or more")
    special = special_tokens(filler.tokenizer)
    ids = filler.tokenizer.encode(text, add_special_tokens=False).ids
    masks = [position for position, token in enumerate(ids) if token == special.mask]
    if not masks:
        raise ConfigError(
            f"the text has no {MASK}: {_shortened(text)!r}",
            hint=f"write {MASK}, in capitals and brackets, where a token is to be filled in: 'The {MASK} sat on the mat.'",
        )
    if len(ids) > filler.room:
        warn(f"the text is longer than the {filler.room} tokens that the model was trained on: each mask sees those around it")
    allowed = _allowed(filler.tokenizer)
    words = {number: token for token, number in filler.tokenizer.get_vocab(with_added_tokens=True).items()}
    found: list[list[FilledToken]] = []
    for first in range(0, len(masks), _MASKS_AT_ONCE):
        probabilities = _mask_logits(filler, ids, masks[first : first + _MASKS_AT_ONCE]).softmax(-1).cpu()[:, allowed]
        # A stable sort rather than topk, which leaves the order of equals open.
        order = probabilities.sort(dim=-1, descending=True, stable=True)
        for values, places in zip(order.values[:, :top].tolist(), order.indices[:, :top], strict=True):
            chosen = allowed[places].tolist()
            found.append([FilledToken(words[number], value) for number, value in zip(chosen, values, strict=True)])
    return found


def window_start(position: int, length: int, room: int) -> int:
    """Where `room` tokens around a position begin, in a text of `length`: the position in the middle, or near an edge."""
    return max(0, min(position - room // 2, length - room))


@torch.inference_mode()
def _mask_logits(filler: Filler, ids: Sequence[int], positions: Sequence[int]) -> Float[Tensor, "M V"]:
    """Float32 logits at each position. All rows are equally long, so that none needs padding."""
    special, device = special_tokens(filler.tokenizer), filler.network.encoder.embeddings.weights.device
    starts = [window_start(position, len(ids), filler.room) for position in positions]
    distinct = sorted(set(starts))
    rows = [[special.cls, *ids[start : start + filler.room], special.sep] for start in distinct]
    hidden = read(filler.network.encoder, torch.tensor(rows, device=device))
    row = torch.tensor([distinct.index(start) for start in starts])
    place = torch.tensor([1 + position - start for position, start in zip(positions, starts, strict=True)])
    logits: Tensor = filler.network.head(hidden[row.to(device), place.to(device)])
    return logits.float()


def _allowed(tokenizer: Tokenizer) -> Tensor:
    """Ids of the words: neither special tokens nor rows of the table that no token has."""
    special = set(SPECIAL_TOKENS.values())
    words = [number for token, number in tokenizer.get_vocab(with_added_tokens=True).items() if token not in special]
    return torch.tensor(sorted(words))


def _shortened(text: str, length: int = 60) -> str:
    return text if len(text) <= length else text[:length] + "…"
