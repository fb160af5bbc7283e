"""A tokenizer and a network, both small."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

import torch

from discern.data.tokenizer import bert_wordpiece, prepared, special_tokens
from discern.models.base import Encoder, build_encoder
from discern.models.config import build_config
from discern.models.embeddings import Embeddings
from discern.models.initialization import initialize
from discern.tasks.base import TextEncoder

MODEL = build_config(
    num_layers=1, hidden_size=32, embedding_size=16, num_heads=2, feedforward_size=64, hidden_dropout=0.0, attention_dropout=0.0
)


def text_encoder(*texts: str, words: Iterable[str] = (), lowercase: bool = True) -> TextEncoder:
    """A tokenizer that knows `words`, and otherwise cuts these texts into characters."""
    normal = unicodedata.normalize("NFD", "".join(texts))
    characters = sorted({character for character in normal + normal.lower() if not character.isspace()})
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *characters, *(f"##{entry}" for entry in characters)]
    vocabulary = {entry: number for number, entry in enumerate(dict.fromkeys(entries))}
    tokenizer = prepared(bert_wordpiece(vocabulary, lowercase), "small")
    return TextEncoder(tokenizer, special_tokens(tokenizer))


def small_encoder(rows: int, seed: int = 0) -> Encoder:
    """A network of one block over a vocabulary, in training mode."""
    encoder = build_encoder(Embeddings(rows, MODEL.embedding_size, MODEL), MODEL)
    initialize(encoder, torch.Generator().manual_seed(seed), MODEL)
    return encoder
