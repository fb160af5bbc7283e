"""Encodes texts so that no text yields a special token, whatever it spells."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from tokenizers import AddedToken, Encoding, Regex, Tokenizer, pre_tokenizers

from discern.data.tokenizer.loading import naming_panics, special_ids


class PlainText:
    """Encodes texts as ordinary text, without special tokens around them.

    Most tokenizers never build a special token from text. Others find one in a text that spells it, so that the `</s>` of HTML
    would end the text: those with the special tokens among the pieces of a Unigram or the words of a vocabulary, or with special
    tokens that are declared as ordinary ones. Such texts are encoded again, with each of these names separated after its first
    character. A name of one character cannot be separated.

    Args:
        tokenizer: a tokenizer that `load_tokenizer` or `prepared` set up.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special = _special(tokenizer)
        self._special = frozenset(special.values())
        spelled = [text for name in special for text in _spelled(name)]
        self._finds_special = any(not self._special.isdisjoint(each.ids) for each in _encode(tokenizer, spelled, True))

    def encode(self, texts: Sequence[str], *, ids_only: bool = False) -> list[Encoding]:
        """One encoding per text, in order.

        Args:
            ids_only: do not compute offsets and words, which is faster.
        """
        encodings = _encode(self._tokenizer, texts, ids_only)
        if self._finds_special:
            spelled = [row for row, each in enumerate(encodings) if not self._special.isdisjoint(each.ids)]
            again = _encode(_separating(self._tokenizer), [texts[row] for row in spelled], ids_only) if spelled else []
            for row, encoding in zip(spelled, again, strict=True):
                encodings[row] = encoding
        return encodings


def _special(tokenizer: Tokenizer) -> dict[str, int]:
    """The special tokens by name, without the one for what is unknown, which text may well yield."""
    ids = special_ids(tokenizer)
    return {tokenizer.id_to_token(number) or "": number for number in ids.values() if number != ids["unk"]}


def _spelled(name: str) -> tuple[str, ...]:
    """Texts that spell a special token: alone, between words, and within one."""
    return name, f"a {name} a", f"a{name}a"


@lru_cache(maxsize=2)
def _separating(tokenizer: Tokenizer) -> Tokenizer:
    """A copy of the tokenizer with the names of special tokens separated after their first character.

    To copy a large vocabulary takes seconds, so the copies of the last tokenizers are kept.
    """
    copy = Tokenizer.from_str(tokenizer.to_str())
    names = sorted(_special(tokenizer))
    # Declared as special, they are ordinary text; declared otherwise, they would be found before anything separates them.
    copy.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    copy.encode_special_tokens = True
    copy.pre_tokenizer = separating(copy.pre_tokenizer, names)
    return copy


def separating(before: pre_tokenizers.PreTokenizer | None, names: Sequence[str]) -> pre_tokenizers.PreTokenizer:
    """A pre-tokenizer that also separates each of the names after its first character, so that no piece spells it."""
    steps = [before] if before is not None else []
    for name in names:
        pattern = Regex(f"{re.escape(name[:1])}(?={re.escape(name[1:])})")
        steps.append(pre_tokenizers.Split(pattern, "isolated"))
    return pre_tokenizers.Sequence(steps)


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], *, ids_only: bool = False) -> list[Encoding]:
    """Encode texts as ordinary text, see `PlainText`."""
    return PlainText(tokenizer).encode(texts, ids_only=ids_only)


def _encode(tokenizer: Tokenizer, texts: Sequence[str], ids_only: bool) -> list[Encoding]:
    # The fast variant does not compute offsets and words.
    encode = tokenizer.encode_batch_fast if ids_only else tokenizer.encode_batch
    with naming_panics("the tokenizer"):
        encodings: list[Encoding] = encode(list(texts), add_special_tokens=False)
    return encodings
