"""Unknown tokens: their fraction and their causes, counted and reported in the same way wherever text is encoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from discern.data.tokenizer import special_ids
from discern.data.tokenizer.extension import is_too_long, word_forms

MANY_UNKNOWN = 0.05
"""Fraction of unknown tokens above which results are unreliable."""

_MANY_OF_SEVERAL_CAUSES, _MANY_OF_ONE_CAUSE = 0.005, 0.001
"""Fractions worth a warning where the causes are known: a single one is often a mistake, and is easy to mend."""

_UNKNOWN = "unknown to the vocabulary ([UNK]), so the model cannot tell them apart"

OTHER_MODEL = (
    "use a model whose vocabulary fits this text, or train one: "
    "discern prepare TEXT --train-tokenizer bpe --out DATA, then discern pretrain --data DATA --out RUN"
)
"""Advice for a model whose vocabulary is fixed."""

OTHER_TOKENIZER = "train a byte-level tokenizer on this text instead, to which no character is unknown: --train-tokenizer bpe"
"""Advice while a data set is prepared."""

MORE_TOKENS = "add the missing words to its vocabulary (--add-tokens 1000), or train a model with a tokenizer of its own"
"""Advice where a vocabulary can be extended."""


def causes_of_unknown(tokenizer: Tokenizer, texts: Sequence[str], encodings: Sequence[Encoding]) -> Counter[str]:
    """Number of unknown tokens by cause: a character that the vocabulary lacks, or words that are too long for it."""
    unknown, found = special_ids(tokenizer)["unk"], Counter[str]()
    for text, encoding in zip(texts, encodings, strict=True):
        for number, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if number != unknown:
                continue
            word = "".join(word_forms(tokenizer, text[start:stop]))
            lacking = (letter for letter in word if all(tokenizer.token_to_id(mark + letter) is None for mark in ("", "##")))
            cause = next((f"{letter!r} (U+{ord(letter):04X})" for letter in lacking), "other words")
            if is_too_long(tokenizer, word):
                cause = f"words of more than {tokenizer.model.max_input_chars_per_word} characters"
            found[cause] += 1
    return found


class UnknownTokens:
    """Counts tokens, and how many of them are [UNK].

    Args:
        tokenizer: tokenizer of the ids or tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = special_ids(tokenizer)
        self._id_of = tokenizer.token_to_id
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
        # A Unigram model gives an unknown token its text as name, which is not in the vocabulary.
        self.unknown += sum(self._id_of(token) in (None, self._special["unk"]) for token in tokens)

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


def unknown_warning(unknown: int, tokens: int, advice: str = OTHER_MODEL, causes: Mapping[str, int] | None = None) -> str | None:
    """A warning about the fraction of unknown tokens, with advice; None if the fraction is low.

    Args:
        causes: number of unknown tokens by cause, of those that were examined.
    """
    least, because = MANY_UNKNOWN, ""
    if causes:
        total, frequent = sum(causes.values()), Counter(causes).most_common(3)
        least = _MANY_OF_ONE_CAUSE if 2 * frequent[0][1] > total else _MANY_OF_SEVERAL_CAUSES
        because = f"; unknown are {', '.join(f'{cause}: {percent(count / total)}' for cause, count in frequent)}"
    return f"{_counted(unknown, tokens)} are {_UNKNOWN}{because}; {advice}" if unknown > least * tokens else None


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
