"""Fraction of unknown tokens, counted and reported in the same way wherever text is encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from discern.data.tokenizer import special_ids, special_names

MANY_UNKNOWN = 0.05
"""Fraction of unknown tokens above which results are unreliable."""

_UNKNOWN = "unknown to the vocabulary ([UNK]), so the model cannot tell them apart"

OTHER_MODEL = (
    "use a model whose vocabulary fits this text, or train one: "
    "discern prepare TEXT --train-tokenizer wordpiece --out DATA, then discern pretrain --data DATA --out RUN"
)
"""Advice for a model whose vocabulary is fixed."""

OTHER_TOKENIZER = "train a tokenizer on this text instead: --train-tokenizer wordpiece (for Chinese: --language zh)"
"""Advice while a data set is prepared."""

MORE_TOKENS = "add the missing words to its vocabulary (--add-tokens 1000), or train a model with a tokenizer of its own"
"""Advice where a vocabulary can be extended."""


class UnknownTokens:
    """Counts tokens, and how many of them are [UNK].

    Args:
        tokenizer: tokenizer of the ids or tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = special_ids(tokenizer)
        self._unknown_token = special_names(tokenizer)["unk"]
        self.tokens = self.unknown = 0

    def add_ids(self, ids: NDArray[Any] | Sequence[int]) -> None:
        """Count the ids of some text, except for [CLS], [SEP] and padding."""
        found = np.asarray(ids)
        frame = [self._special[role] for role in ("pad", "cls", "sep")]
        self.tokens += found.size - int(np.isin(found, frame).sum())
        self.unknown += int((found == self._special["unk"]).sum())

    def add_tokens(self, tokens: Sequence[str]) -> None:
        """Count the tokens of some text, in the spelling of the tokenizer."""
        self.tokens += len(tokens)
        self.unknown += tokens.count(self._unknown_token)

    def report(self, note: Callable[[str], None], warn: Callable[[str], None], of: str = "") -> None:
        """Report what has been counted so far; see `report_unknown`."""
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
    """Report the fraction of unknown tokens, as a warning with advice if it is high.

    Args:
        note: prints a message.
        warn: prints a warning.
        of: name of the text that was counted, if there are several.
        advice: one of the constants of this module.
    """
    before = f"{of}: " if of else ""
    warning = unknown_warning(unknown, tokens, advice)
    if warning is not None:
        warn(f"{before}{warning}")
    elif tokens:
        note(f"{before}unknown tokens: {_counted(unknown, tokens)}")


def unknown_warning(unknown: int, tokens: int, advice: str = OTHER_MODEL) -> str | None:
    """A warning about the fraction of unknown tokens, with advice; None if the fraction is low."""
    return f"{_counted(unknown, tokens)} are {_UNKNOWN}; {advice}" if unknown > MANY_UNKNOWN * tokens else None


def _counted(unknown: int, tokens: int) -> str:
    return f"{unknown:,} of {tokens:,} tokens ({percent(unknown / tokens)})"


def percent(fraction: float) -> str:
    """A fraction in percent, with two digits after the point if it is small: "0.24%", "41.2%"."""
    value = 100 * fraction
    if not value:
        return "0%"
    if value < 0.01:
        return "less than 0.01%"
    return f"{value:.2f}%" if value < 1 else f"{value:.1f}%"
