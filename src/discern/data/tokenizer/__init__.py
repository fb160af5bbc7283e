"""Tokenizers: loaded, trained, extended, and run over documents."""

from discern.data.tokenizer.loading import (
    END_OF_DOCUMENT,
    SPECIAL_TOKENS,
    bert_wordpiece,
    fingerprint,
    framing,
    load_tokenizer,
    lowercases,
    prepared,
    special_ids,
    special_names,
    special_tokens,
    strips_accents,
    vocab_size,
)
from discern.data.tokenizer.tokens import TokenTexts, shown_as

__all__ = [
    "END_OF_DOCUMENT",
    "SPECIAL_TOKENS",
    "TokenTexts",
    "bert_wordpiece",
    "fingerprint",
    "framing",
    "load_tokenizer",
    "lowercases",
    "prepared",
    "shown_as",
    "special_ids",
    "special_names",
    "special_tokens",
    "strips_accents",
    "vocab_size",
]
