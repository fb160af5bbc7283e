"""Share of unknown tokens: counted wherever text is encoded, and reported in one form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from discern.data.tokenizer import special_ids, special_names

MANY_UNKNOWN = 0.05
"""Share of unknown tokens above which results are unreliable."""

_UNKNOWN = "unknown to the vocabulary ([UNK]), so the model cannot tell them apart"

OTHER_MODEL = (
    "use a model whose vocabulary fits this text, or train one: "
    "discern prepare TEXT --train-tokenizer wordpiece --out DATA, then discern pretrain --data DATA --out RUN"
)
"""What to do about it with a model whose vocabulary is fixed."""

OTHER_TOKENIZER = "train a tokenizer on this text instead: --train-tokenizer wordpiece (for Chinese: --language zh)"
"""What to do about it while a data set is prepared."""

MORE_TOKENS = "add the missing words to its vocabulary (--add-tokens 1000), or train a model with a tokenizer of its own"
"""What to do about it where a vocabulary can be extended."""


class UnknownTokens:
    """Counts tokens, and those of them that are [UNK].

    Args:
        tokenizer: whose ids or tokens are counted.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = special_ids(tokenizer)
        self._unknown_token = special_names(tokenizer)["unk"]
        self.tokens = self.unknown = 0

    def add_ids(self, ids: NDArray[Any] | Sequence[int]) -> None:
        """Count the ids of some text; those of [CLS], [SEP] and padding are no text."""
        found = np.asarray(ids)
        frame = [self._special[role] for role in ("pad", "cls", "sep")]
        self.tokens += found.size - int(np.isin(found, frame).sum())
        self.unknown += int((found == self._special["unk"]).sum())

    def add_tokens(self, tokens: Sequence[str]) -> None:
        """Count the tokens of some text, as the tokenizer writes them."""
        self.tokens += len(tokens)
        self.unknown += tokens.count(self._unknown_token)

    def report(self, note: Callable[[str], None], warn: Callable[[str], None], of: str = "") -> None:
        """As `report_unknown`, of what was counted so far."""
        report_unknown(self.unknown, self.tokens, note, warn, of=of)


def report_unknown(
    unknown: int,
    tokens: int,
    note: Callable[[str], None],
    warn: Callable[[str], None],
    *,
    of: str = "",
    advice: str = OTHER_MODEL,
) -> None:
    """Print the share of unknown tokens; where it is high, warn instead, and say what to do.

    Args:
        of: the text that was counted, where there are several.
        advice: one of the constants of this module.
    """
    before = f"{of}: " if of else ""
    warning = unknown_warning(unknown, tokens, advice)
    if warning is not None:
        warn(f"{before}{warning}")
    elif tokens:
        note(f"{before}unknown tokens: {_counted(unknown, tokens)}")


def unknown_warning(unknown: int, tokens: int, advice: str = OTHER_MODEL) -> str | None:
    """A warning about the share of unknown tokens, with what to do about it; None where the share is low."""
    return f"{_counted(unknown, tokens)} are {_UNKNOWN}; {advice}" if unknown > MANY_UNKNOWN * tokens else None


def _counted(unknown: int, tokens: int) -> str:
    return f"{unknown:,} of {tokens:,} tokens ({percent(unknown / tokens)})"


def percent(fraction: float) -> str:
    """A share as people read it, with two significant digits where it is small: "0.24 %", "41.2 %"."""
    value = 100 * fraction
    if not value:
        return "0 %"
    if value < 0.01:
        return "less than 0.01 %"
    return f"{value:.2f} %" if value < 1 else f"{value:.1f} %"
