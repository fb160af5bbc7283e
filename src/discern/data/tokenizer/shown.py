"""Tokens as readers see them, without the marks of a vocabulary."""

from __future__ import annotations

from tokenizers import Tokenizer

from discern.data.tokenizer.loading import special_tokens

_INSIDE = "##"  # of WordPiece


def added_text(tokenizer: Tokenizer, number: int) -> str:
    """The text that a token adds to the text before it: with a space in front if it begins a word after a space.

    A token whose bytes are not a whole character, of which there is no text, is spelled as in the vocabulary.
    """
    before = special_tokens(tokenizer).mask
    alone, both = (tokenizer.decode(ids, skip_special_tokens=False) for ids in ([before], [before, number]))
    text: str = both.removeprefix(alone)
    return text if text != both and text and "\ufffd" not in text else str(tokenizer.id_to_token(number))


def shown(tokenizer: Tokenizer, number: int) -> str:
    """A token as text on its own; `##` is kept for a token of WordPiece inside a word."""
    token, text = str(tokenizer.id_to_token(number)), added_text(tokenizer, number).strip()
    return token if token.startswith(_INSIDE) else text or token
