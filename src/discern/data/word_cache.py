"""Encodes BERT's WordPiece word by word, and each word once: faster than the library on most languages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from discern.data.tokenizer import SPECIAL_TOKENS, naming_panics

_CAPACITY = 1 << 17
_MISSES_WORTH_IT = 0.5
# Punctuation to BERT in every version of Unicode: ASCII's, and what is frequent in European and Chinese text.
_PUNCTUATION = r"!-/:-@\[-`{-~«»·–—‘’“”…、。〈〉《》「」『』【】！（），：；？"
_IDEOGRAPHS = "\u3400-\u4dbf\u4e00-\u9fff"
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class WordCache:
    """Gives the ids that the tokenizer gives, sentence by sentence.

    BERT's normaliser looks at no character but the one at hand and the marks on it, and its words end at ASCII spaces,
    punctuation and ideographs at the latest. So the pieces between those can be encoded by themselves, and remembered.
    (ASCII control characters vanish, and join what they stood between: a sentence with any is encoded whole.)

    Args:
        tokenizer: one that `applies` is true of.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}
        apart = _PUNCTUATION + (_IDEOGRAPHS if tokenizer.normalizer.handle_chinese_chars else "")
        self._pieces = re.compile(rf"[^ \t\r\n{apart}]+|[{apart}]")

    @staticmethod
    def applies(tokenizer: Tokenizer) -> bool:
        """Whether this is BERT's tokenizer, with no added tokens but the special ones."""
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        return (
            isinstance(tokenizer.model, models.WordPiece)
            and isinstance(tokenizer.normalizer, normalizers.BertNormalizer)
            and isinstance(tokenizer.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
            and added <= set(SPECIAL_TOKENS.values())
            and tokenizer.encode_special_tokens
        )

    def encode(self, sentences: Sequence[str]) -> tuple[list[int], Int[np.ndarray, " S"]] | None:
        """The ids of all sentences in a row and the length of each; None where most pieces are new, as in Thai: the
        library does that better."""
        whole = {sentence for sentence in sentences if _CONTROLS.search(sentence)}
        pieces = [[sentence] if sentence in whole else self._pieces.findall(sentence) for sentence in sentences]
        new = list(set(chain.from_iterable(pieces)) - self._ids.keys())
        if sum(map(len, new)) > _MISSES_WORTH_IT * sum(map(len, sentences)):
            return None
        if len(self._ids) + len(new) > _CAPACITY:
            self._ids = {}
            new = list(set(chain.from_iterable(pieces)))
        with naming_panics("the tokenizer"):
            encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        self._ids.update(zip(new, (encoding.ids for encoding in encodings), strict=True))
        find = self._ids.__getitem__
        flat: list[int] = []
        ends = []
        for sentence in pieces:
            flat += chain.from_iterable(map(find, sentence))
            ends.append(len(flat))
        for text in whole:  # not worth remembering
            del self._ids[text]
        return flat, np.diff(np.array(ends, dtype=np.int64), prepend=0)
