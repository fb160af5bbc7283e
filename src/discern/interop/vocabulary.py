"""Loads the tokenizer of an imported model. A bare vocab.txt does not state how text is normalized; it is then inferred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from discern.data.tokenizer import bert_wordpiece, load_tokenizer, lowercases, prepared, special_ids
from discern.errors import DataError
from discern.interop.tokenizer import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from discern.tasks.readers.files import json_file

VOCABULARY_NAME = "vocab.txt"

# Possible normalizations (lower-cases, strips accents), the most common first. Tokenizers that keep case also keep accents.
_MANNERS = ((True, True), (True, False), (False, False))


@dataclass(frozen=True)
class FoundTokenizer:
    """A tokenizer, and how it normalizes text.

    Attributes:
        tokenizer: the tokenizer, ready for use.
        manner: the normalization and its source in words, such as 'lower-cased, by the entries of vocab.txt'.
        judged: whether the normalization was inferred from the entries of the vocabulary.
    """

    tokenizer: Tokenizer
    manner: str
    judged: bool = False


def find_tokenizer(source: Path, given: Path | None, lowercase: bool | None) -> FoundTokenizer:
    """The tokenizer of a model.

    Args:
        source: folder of the model, or a file in it.
        given: a tokenizer.json, a vocab.txt, or a folder with either, used instead of the files of the model; None: use those.
        lowercase: whether the tokenizer lower-cases; None: as the files state, otherwise inferred from the entries of the
            vocabulary. If it differs from the files or they don't state it, stripping of accents is inferred as well, unless the
            files state that.

    Raises:
        DataError: there is no tokenizer, or it lacks a special token.
        ConfigError: `lowercase` contradicts a tokenizer.json.
    """
    folder = source if source.is_dir() else source.parent
    path = given if given is not None else folder
    if given is None and not any((folder / name).is_file() for name in (TOKENIZER_NAME, VOCABULARY_NAME)):
        raise DataError(
            f"{folder} has no tokenizer: it has neither {TOKENIZER_NAME} nor {VOCABULARY_NAME}",
            hint=f"add --tokenizer PATH with the {VOCABULARY_NAME} that the model was trained with",
        )
    tokenizer = load_tokenizer(path, lowercase)
    file = path if path.is_file() else next(path / name for name in (TOKENIZER_NAME, VOCABULARY_NAME) if (path / name).is_file())
    if file.suffix == ".json":
        return FoundTokenizer(tokenizer, f"{_words(lowercases(tokenizer))}, as {file.name} says")
    settings = _settings(file.parent / TOKENIZER_CONFIG_NAME)
    stated, strips = settings.get("do_lower_case"), settings.get("strip_accents")
    if stated is None or lowercase not in (None, stated):
        vocabulary = tokenizer.get_vocab()
        lowers, strips = _judge(vocabulary, lowercase, strips)
        chinese = settings.get("tokenize_chinese_chars", True)
        tokenizer = prepared(bert_wordpiece(vocabulary, lowers, strips, chinese), str(file))
    else:
        lowers = stated  # if accents are not mentioned, they are treated as in BERT
    judged = lowercase is None and stated is None
    whence = f"by the entries of {file.name}" if judged else f"as {TOKENIZER_CONFIG_NAME} says"
    return FoundTokenizer(tokenizer, f"{_words(lowers, strips)}, {'as asked for' if lowercase is not None else whence}", judged)


def _settings(path: Path) -> dict[str, Any]:
    """The content of the settings file beside a vocabulary; empty if there is none."""
    settings = json_file(path) if path.is_file() else {}
    return settings if isinstance(settings, dict) else {}


def _words(lowers: bool, strips: bool | None = None) -> str:
    """Describe a normalization in words. Accents are mentioned only if they are not treated as in BERT.

    Args:
        strips: whether accents are stripped; None: as in BERT, only when lower-casing.
    """
    if strips in (None, lowers):
        return "lower-cased" if lowers else "cased"
    return "lower-cased with their accents kept" if lowers else "cased without accents"


def _judge(vocabulary: dict[str, int], lowercase: bool | None, strips: bool | None) -> tuple[bool, bool]:
    """Infer the normalization with which most entries can be produced: one that strips accents never produces 'é', for example.

    Args:
        lowercase, strips: what is known; None if unknown.
    """
    telling = [entry for entry in vocabulary if entry.isalpha() and not (entry.isascii() and entry == entry.lower())]
    manners = [manner for manner in _MANNERS if lowercase in (None, manner[0])]
    if strips is not None:
        manners = list(dict.fromkeys((lowers, strips) for lowers, _ in manners))
    if not telling:
        return manners[0]
    return max(manners, key=lambda manner: _reached(vocabulary, telling, manner))  # ties go to the first


def _reached(vocabulary: dict[str, int], entries: Sequence[str], manner: tuple[bool, bool]) -> int:
    """The number of entries that are tokenized to themselves."""
    tokenizer = bert_wordpiece(vocabulary, *manner)
    encoded = tokenizer.encode_batch(list(entries), add_special_tokens=False)
    return sum(encoding.tokens == [entry] for entry, encoding in zip(entries, encoded, strict=True))


def check_fits(tokenizer: Tokenizer, rows: int, name: str) -> None:
    """Check that every token id has a row in the word embeddings.

    Raises:
        DataError: an id has no row, so the tokenizer belongs to another model.
    """
    special_ids(tokenizer, name)
    entries = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if entries > rows:
        raise DataError(
            f"{name}: the tokenizer has {entries:,} entries, but the embeddings have only {rows:,} rows",
            hint="use the tokenizer that the model was trained with: --tokenizer PATH",
        )
