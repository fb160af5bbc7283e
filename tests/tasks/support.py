"""A small tokenizer, and a task that a registered family makes."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Any

from discern.data.tokenizer import bert_wordpiece, prepared, special_tokens
from discern.tasks import families
from discern.tasks.base import Labels, Task, TextEncoder


def text_encoder(*texts: str, words: Iterable[str] = (), lowercase: bool = True) -> TextEncoder:
    """A tokenizer that knows `words`, and otherwise cuts these texts into characters."""
    normal = unicodedata.normalize("NFD", "".join(texts))
    characters = sorted({character for character in normal + normal.lower() if not character.isspace()})
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *characters, *(f"##{entry}" for entry in characters)]
    vocabulary = {entry: number for number, entry in enumerate(dict.fromkeys(entries))}
    tokenizer = prepared(bert_wordpiece(vocabulary, lowercase), "small")
    return TextEncoder(tokenizer, special_tokens(tokenizer))


def task(family: str, labels: Labels, *metrics: str) -> Task[Any]:
    kind: type[Task[Any]] = families.load(family)
    return kind("mine", kind.Config(), metrics, labels)
