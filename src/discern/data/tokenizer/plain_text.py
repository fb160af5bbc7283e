"""Encodes texts so that no text yields a special token, whatever it spells."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

from tokenizers import Encoding, Regex, Tokenizer, models, pre_tokenizers

from discern.data.tokenizer.loading import naming_panics, special_ids


class PlainText:
    """Encodes texts as ordinary text, without special tokens around them.

    Unigram and WordLevel models have the special tokens among their pieces, and find them in a text that spells one: the `</s>`
    of HTML would end the text. Such texts are encoded again, with each of these names separated after its first character.
    Other models never build a special token from text.

    Args:
        tokenizer: a tokenizer that `load_tokenizer` or `prepared` set up.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = special_ids(tokenizer) if isinstance(tokenizer.model, models.Unigram | models.WordLevel) else {}
        self._special = {number for role, number in ids.items() if role != "unk"}

    def encode(self, texts: Sequence[str], *, ids_only: bool = False) -> list[Encoding]:
        """One encoding per text, in order.

        Args:
            ids_only: do not compute offsets and words, which is faster.
        """
        encodings = _encode(self._tokenizer, texts, ids_only)
        if self._special:
            spelled = [row for row, each in enumerate(encodings) if not self._special.isdisjoint(each.ids)]
            again = _encode(self._separating, [texts[row] for row in spelled], ids_only) if spelled else []
            for row, encoding in zip(spelled, again, strict=True):
                encodings[row] = encoding
        return encodings

    @cached_property
    def _separating(self) -> Tokenizer:
        """The tokenizer, with the names of special tokens separated after their first character."""
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        copy.encode_special_tokens = True
        names = sorted({self._tokenizer.id_to_token(number) or "" for number in self._special})
        steps = [copy.pre_tokenizer] if copy.pre_tokenizer is not None else []
        for name in names:
            pattern = Regex(f"{re.escape(name[:1])}(?={re.escape(name[1:])})")
            steps.append(pre_tokenizers.Split(pattern, "isolated"))
        copy.pre_tokenizer = pre_tokenizers.Sequence(steps)
        return copy


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], *, ids_only: bool = False) -> list[Encoding]:
    """Encode texts as ordinary text, see `PlainText`."""
    return PlainText(tokenizer).encode(texts, ids_only=ids_only)


def _encode(tokenizer: Tokenizer, texts: Sequence[str], ids_only: bool) -> list[Encoding]:
    # The fast variant does not compute offsets and words.
    encode = tokenizer.encode_batch_fast if ids_only else tokenizer.encode_batch
    with naming_panics("the tokenizer"):
        encodings: list[Encoding] = encode(list(texts), add_special_tokens=False)
    return encodings
