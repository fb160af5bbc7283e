"""Tokens as readers see them, without the marks of a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from tokenizers import Tokenizer

from discern.data.tokenizer.loading import special_names, special_tokens

_INSIDE = "##"  # of WordPiece
_PART = "\ufffd"  # what a part of a character is decoded to
_CONTEXT = 4  # tokens; more than a character has


def shown_as(token: str, text: str) -> str:
    """What is shown for a token on its own, see `TokenTexts.shown`, of its name and the text that it adds."""
    named = token.startswith(_INSIDE) or _PART in text
    return token if named else text.strip() or token


class TokenTexts:
    """The texts of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = [special_tokens(tokenizer).mask]
        self._special = frozenset(special_names(tokenizer).values())
        # In such vocabularies the end of a word is marked, so a token alone does not show what is before it.
        self._marks_ends = bool(getattr(tokenizer.model, "end_of_word_suffix", None))
        self._added: dict[int, str] = {}

    def added(self, number: int) -> str:
        """The text that a token adds to a text of whole words: with a space in front if it begins a word after a space.

        A part of a character is the replacement character, U+FFFD.
        """
        if number not in self._added:
            if self._is_special(number) or self._marks_ends:
                self._added[number] = f" {self._decoded([number]).strip() or self._name(number)}"
            else:
                self._added[number] = self._after(self._before, number)
        return self._added[number]

    def row(self, ids: Sequence[int]) -> list[str]:
        """The text that each token of a row adds to those before it."""
        texts: list[str] = []
        for place, number in enumerate(ids):
            before = ids[max(0, place - _CONTEXT) : place]
            apart = self._is_special(number) or (place > 0 and self._is_special(ids[place - 1]))
            texts.append(self.added(number) if apart else self._after(before, number))
        return texts

    def shown(self, number: int) -> str:
        """A token as text on its own: `##` is kept for a token of WordPiece inside a word, and a part of a character is named."""
        return shown_as(self._name(number), self.added(number))

    def _after(self, before: Sequence[int], number: int) -> str:
        alone, both = self._decoded(before), self._decoded([*before, number])
        # `alone` may end in a part of a character that is complete now.
        same = takewhile(lambda characters: characters[0] == characters[1], zip(alone, both, strict=False))
        return both[sum(1 for _ in same) :]

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _name(self, number: int) -> str:
        return str(self._tokenizer.id_to_token(number))

    def _is_special(self, number: int) -> bool:
        return self._name(number) in self._special
