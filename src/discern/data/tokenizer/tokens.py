"""Tokens of texts: encoded so that no text spells a special token, shown as readers see them, and counted where unknown."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from os.path import commonprefix
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Regex, Tokenizer, models, pre_tokenizers

from discern.data.tokenizer.loading import naming_panics, special_ids
from discern.data.tokenizer.words import word_forms

# Texts as ordinary text


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], *, ids_only: bool = False) -> list[Encoding]:
    """Encode texts as ordinary text, without special tokens around or in them.

    Most tokenizers never build a special token from text. Others find one in a text that spells it, so that the `</s>` of HTML
    would end the text: those with the special tokens among the pieces of a Unigram or the words of a vocabulary, or with special
    tokens that are declared as ordinary ones. Unigram is encoded without these pieces, as in SentencePiece. With the others, each
    such name is separated after its first character. A name of one character cannot be separated.

    Args:
        tokenizer: a tokenizer that `load_tokenizer` or `prepared` set up.
        ids_only: do not compute offsets and words, which is faster.
    """
    with naming_panics("the tokenizer"):
        ordinary = _without_special(tokenizer)
        # The fast variant does not compute offsets and words.
        encode = ordinary.encode_batch_fast if ids_only else ordinary.encode_batch
        encodings: list[Encoding] = encode(list(texts), add_special_tokens=False)
    return encodings


# The last tokenizers are remembered, because to copy a large vocabulary takes seconds.
@lru_cache(maxsize=2)
def _without_special(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, or if it builds a special token from a text that spells it, a copy that does not."""
    # The token for what is unknown is not among them, because text may well yield it.
    special = {number for role, number in special_ids(tokenizer).items() if role != "unk"}
    names = sorted(tokenizer.id_to_token(number) or "" for number in special)
    spelled = [text for name in names for text in (name, f"a {name} a", f"a{name}a")]
    if all(special.isdisjoint(each.ids) for each in tokenizer.encode_batch(spelled, add_special_tokens=False)):
        return tokenizer
    copy = Tokenizer.from_str(tokenizer.to_str())
    # Declared as special, they are ordinary text; declared otherwise, they would be found before anything separates them.
    copy.add_special_tokens(names)
    copy.encode_special_tokens = True
    if isinstance(copy.model, models.Unigram):
        model = json.loads(tokenizer.to_str())["model"]
        # U+FFFF is no character, so no text has it.
        pieces = [(f"\uffff{piece}" if piece in names else piece, score) for piece, score in model["vocab"]]
        copy.model = models.Unigram(pieces, model["unk_id"], model["byte_fallback"])
    else:
        copy.pre_tokenizer = separating(copy.pre_tokenizer, names)
    return copy


def separating(before: pre_tokenizers.PreTokenizer | None, names: Sequence[str]) -> pre_tokenizers.PreTokenizer:
    """A pre-tokenizer that also separates each of the names after its first character, so that no piece spells it."""
    pattern = "|".join(f"{re.escape(name[:1])}(?={re.escape(name[1:])})" for name in names)
    return pre_tokenizers.Sequence([*([before] if before else []), pre_tokenizers.Split(Regex(pattern), "merged_with_previous")])


# Tokens as readers see them, without the marks of a vocabulary


class TokenTexts:
    """The texts of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)

    def added(self, number: int) -> str:
        """The text that a token adds to a text of whole words: with a space in front if it begins a word after a space.

        A part of a character is the replacement character, U+FFFD.
        """
        return self.row([self._special["mask"], number])[-1]

    def row(self, ids: Sequence[int]) -> list[str]:
        """The text that each token of a row adds to those before it."""
        texts = []
        for place, number in enumerate(ids):
            if number in self._special.values():
                texts.append(f" {self._tokenizer.id_to_token(number)}")
                continue
            before = list(ids[max(0, place - 4) : place])  # more than the tokens of a character
            alone, both = (self._tokenizer.decode(part, skip_special_tokens=False) for part in (before, [*before, number]))
            # `alone` may end in a part of a character that is complete now.
            texts.append(both[len(commonprefix([alone, both])) :])  # noqa: RUF071, these are texts
        return texts

    def shown(self, number: int) -> str:
        """A token as text on its own: `##` is kept for a token of WordPiece inside a word, and a part of a character is named."""
        return shown_as(str(self._tokenizer.id_to_token(number)), self.added(number))


def shown_as(token: str, text: str) -> str:
    """What is shown for a token on its own, see `TokenTexts.shown`, of its name and the text that it adds."""
    return token if token.startswith("##") or "\ufffd" in text else text.strip() or token


# Unknown tokens: their fraction and their causes, counted and reported in the same way wherever text is encoded

_UNKNOWN = "unknown to the vocabulary ([UNK]), so the model cannot tell them apart"

_ADVICE = (
    "train a byte-level tokenizer on this text, to which no character is unknown (discern prepare TEXT --train-tokenizer bpe), "
    "use a model whose vocabulary fits the text, or add words to that of a model: discern adapt --add-tokens 1000"
)


class UnknownTokens:
    """Counts tokens, and how many of them are [UNK].

    Args:
        tokenizer: tokenizer of the ids or tokens.
        tokens: number of tokens that have been counted before.
        unknown: number of unknown ones among them.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: int = 0, unknown: int = 0) -> None:
        self._special = special_ids(tokenizer)
        self._id_of = tokenizer.token_to_id
        self.tokens, self.unknown = tokens, unknown

    def add_ids(self, ids: NDArray[Any] | Sequence[int]) -> None:
        """Count the ids of some text, except for [CLS], [SEP] and padding."""
        frame = [self._special[role] for role in ("pad", "cls", "sep")]
        self.tokens += int(np.isin(ids, frame, invert=True).sum())
        self.unknown += int(np.isin(ids, self._special["unk"]).sum())

    def add_tokens(self, tokens: Sequence[str]) -> None:
        """Count the tokens of some text, in the spelling of the tokenizer."""
        # A Unigram model gives an unknown token its text as name, which is not in the vocabulary.
        ids = map(self._id_of, tokens)
        self.add_ids([self._special["unk"] if number is None else number for number in ids])

    def report(self, note: Callable[[str], None], warn: Callable[[str], None], of: str = "") -> None:
        """Report the fraction of unknown tokens so far, if there are some, as a warning with advice if it is high.

        Args:
            note: prints a message.
            warn: prints a warning.
            of: name of the text that was counted, if there are several.
        """
        before = f"{of}: " if of else ""
        if warning := unknown_warning(self.unknown, self.tokens):
            warn(f"{before}{warning}")
        elif self.unknown:
            note(f"{before}unknown tokens: {_counted(self.unknown, self.tokens)}")


def unknown_warning(unknown: int, tokens: int, causes: Mapping[str, int] | None = None) -> str | None:
    """A warning about the fraction of unknown tokens, with advice; None if the fraction is low.

    Args:
        causes: number of unknown tokens by cause, of those that were examined.
    """
    least, because = 0.05, ""  # results are unreliable above this fraction
    if causes:
        total, frequent = sum(causes.values()), Counter(causes).most_common(3)
        # A single cause is often a mistake, and is easy to mend.
        least = 0.001 if 2 * frequent[0][1] > total else 0.005
        because = f"; unknown are {', '.join(f'{cause}: {percent(count / total)}' for cause, count in frequent)}"
    return f"{_counted(unknown, tokens)} are {_UNKNOWN}{because}; {_ADVICE}" if unknown > least * tokens else None


def _counted(unknown: int, tokens: int) -> str:
    return f"{unknown:,} of {tokens:,} tokens ({percent(unknown / tokens)})"


def percent(fraction: float) -> str:
    """A fraction in percent, with three digits: "0.24%", "41.2%"."""
    return "less than 0.01%" if 0 < fraction < 1e-4 else f"{100 * fraction:.3g}%"


def causes_of_unknown(tokenizer: Tokenizer, texts: Sequence[str]) -> Counter[str]:
    """Number of unknown tokens by cause: a character that the vocabulary lacks, or words that are too long for it."""
    unknown, causes = special_ids(tokenizer)["unk"], Counter[str]()
    longest = getattr(tokenizer.model, "max_input_chars_per_word", None)
    for text, encoding in zip(texts, encode_texts(tokenizer, texts), strict=True):
        for number, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if number == unknown:
                word = "".join(word_forms(tokenizer, text[start:stop]))
                lacking = (letter for letter in word if all(tokenizer.token_to_id(mark + letter) is None for mark in ("", "##")))
                cause = next((f"{letter!r} (U+{ord(letter):04X})" for letter in lacking), "other words")
                causes[cause if longest is None or len(word) <= longest else f"words of more than {longest} characters"] += 1
    return causes
